"""The arithmetic of a pass: what the executor asks for, on one call's tensors by its engine.

Does not know: plans, ranks, messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.engine.base import KV, Engine, Output, Seed, Sizes
from ringattn.partial import accumulator_dtype
from ringattn.records import Home, Records, Rows
from ringattn.schedule.ops import Kind


class ForwardArithmetic:
    """Own queries into `carry`. Tensors are row-first, (rows, batch, heads, dim)."""

    def __init__(self, engine: Engine, works: Sequence[Any], q: Tensor, home: Home, sinks: Tensor | None) -> None:
        """`home`: the own K and V."""
        self.engine, self.q = engine, q
        self.value_dim = home.values[1].x.shape[3]
        self.carry = engine.begin(works, q, self.value_dim, sinks)
        self.homes = {Kind.Q: Home(q), Kind.KV: home}
        if self.carry.out.carried is not None:
            self.homes[Kind.OUT] = Home(self.carry.out.carried, scalars=(_row_first(self.carry.lse),))

    def fold(self, kv: KV, _: KV | None, work: Any) -> None:
        """Into the carry."""
        self.engine.attend(self.q, kv, self.carry, work)

    def serve(self, guests: Mapping[Kind, Records], work: Any) -> None:
        """As `fold`, into a carry of its own, which is handed out."""
        q, out = _only(guests[Kind.Q]).x, _only(guests[Kind.OUT])
        carry = self.engine.begin([work], q, self.value_dim, None)
        self.engine.attend(q, _keys(guests[Kind.KV]), carry, work)
        assert carry.out.carried is not None
        out.x.copy_(carry.out.carried)
        out.scalars[0].copy_(_row_first(carry.lse))


class BackwardArithmetic:
    """Gradients of own queries into `dq`, of own keys and values into the home of DKV."""

    def __init__(
        self, engine: Engine, works: Sequence[Any], q: Tensor, home: Home, seed: Seed, grads: Home
    ) -> None:
        """`home`: the own K and V; `grads`: the accumulators of their gradients."""
        self.engine, self.q, self.seed = engine, q, seed
        self.value_dim = seed.dout.shape[3]
        self.dq: Output = engine.begin_grad(works, q, self.value_dim)
        scalars = _row_first(seed.lse), _row_first(seed.delta)
        self.homes = {Kind.Q: Home(q), Kind.KV: home, Kind.SEED: Home(seed.dout, scalars=scalars), Kind.DKV: grads}
        if self.dq.carried is not None:
            self.homes[Kind.DQ] = Home(self.dq.carried)

    def fold(self, kv: KV, dkv: KV | None, work: Any) -> None:
        """Into dq and dkv."""
        assert dkv is not None
        self.engine.attend_grad(self.q, kv, self.seed, self.dq, dkv, work)

    def serve(self, guests: Mapping[Kind, Records], work: Any) -> None:
        """As `fold`, with the seed that came: delta stands for the output, see `Seed`."""
        q, came, dq = (_only(guests[kind]) for kind in (Kind.Q, Kind.SEED, Kind.DQ))
        dout, (lse, delta) = came.x.contiguous(), (one.permute(1, 2, 0).contiguous() for one in came.scalars)
        seed = Seed(dout, torch.zeros_like(dout), lse, -delta, delta)
        into = self.engine.begin_grad([work], q.x, self.value_dim)
        self.engine.attend_grad(q.x, _keys(guests[Kind.KV]), seed, into, _keys(guests[Kind.DKV]), work)
        assert into.carried is not None
        dq.x.copy_(into.carried)


def serving_bytes(sizes: Sizes, backward: bool) -> int:
    """What `serve` holds beside the engine's call: a carry; backward copies of the seed, zeros for out, and dQ."""
    rows, item = sizes.rows * sizes.batch * sizes.heads, accumulator_dtype(sizes.dtype).itemsize
    if not backward:
        return rows * (sizes.value_dim + 1) * item
    return rows * (2 * sizes.value_dim * sizes.dtype.itemsize + (sizes.head_dim + 3) * item)


def _row_first(x: Tensor) -> Tensor:
    """(batch, heads, rows) as (rows, batch, heads)."""
    return x.permute(2, 0, 1)


def _only(records: Records) -> Rows:
    """The only value of records with one head."""
    ((value,),) = records.parts.values()
    return value


def _keys(records: Records) -> KV:
    """K and V of records with one head."""
    ((k, v),) = records.parts.values()
    return KV(k.x, v.x)

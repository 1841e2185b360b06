"""The arithmetic of a pass: what the executor asks for, on one call's tensors by its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.engine.base import KV, BackwardInputs, Engine, Output, Sizes, SoftmaxState
from ringattn.engine.softmax_state import accumulator_dtype
from ringattn.runtime.records import LocalTensors, PackedBuffer, Rows
from ringattn.schedule.ops import Kind


class ForwardArithmetic:
    """Own queries into `state`. Tensors are row-first, (rows, batch, heads, dim)."""

    def __init__(
        self,
        engine: Engine,
        works: Sequence[Any],
        q: Tensor,
        local: LocalTensors,
        sinks: Tensor | None,
        dropout_seed: int = 0,
    ) -> None:
        """`local`: the own K and V."""
        self.engine, self.q, self._dropout_seed = engine, q, dropout_seed
        self.value_dim = local.values[1].x.shape[3]
        # All works at once: the engine may find which launches are the first and the last on their rows.
        self.state = engine.begin(works, q, self.value_dim, sinks)._replace(dropout_seed=dropout_seed)
        self._received: dict[int, SoftmaxState] = {}
        self.local = {Kind.Q: LocalTensors(q), Kind.KV: local}
        # Outputs of other ranks are merged into what is carried; without it, none arrive.
        if self.state.out.carried is not None:
            self.local[Kind.OUT] = LocalTensors(self.state.out.carried, scalars=(_row_first(self.state.lse),))

    def attend(self, kv: KV, _: KV | None, work: Any, final: bool = False) -> None:
        """Into the state."""
        self.engine.attend(self.q, kv, self.state, work)

    def attend_received(self, received: Mapping[Kind, PackedBuffer], works: Sequence[Any], at: int) -> None:
        """As `attend`, into a state of its own, which is handed out after the last of the works."""
        # Received rows are all one head: each (row, head) of a shard is a row here.
        q = _only(received[Kind.Q]).x
        if not at:
            # No sinks: the owner of the queries counts them, once.
            begun = self.engine.begin(works, q, self.value_dim, None)
            self._received[id(works)] = begun._replace(dropout_seed=self._dropout_seed)
        state = self._received[id(works)]
        self.engine.attend(q, _keys(received[Kind.KV]), state, works[at])
        if Kind.OUT not in received:
            return
        del self._received[id(works)]
        out = _only(received[Kind.OUT])
        assert state.out.carried is not None
        out.x.copy_(state.out.carried)
        # The lse goes back in the record of its output: the owner merges by it.
        out.scalars[0].copy_(_row_first(state.lse))


class BackwardArithmetic:
    """Gradients of own queries into `dq`, of own keys and values into the local DKV."""

    def __init__(
        self,
        engine: Engine,
        works: Sequence[Any],
        q: Tensor,
        local: LocalTensors,
        seed: BackwardInputs,
        grads: LocalTensors,
    ) -> None:
        """`local`: the own K and V; `grads`: the accumulators of their gradients, or the gradients, see `OwnSums`."""
        self.engine, self.q, self.seed = engine, q, seed
        self.value_dim = seed.dout.shape[3]
        self.dq: Output = engine.begin_grad(works, q, self.value_dim)
        self._received: dict[int, tuple[BackwardInputs, Output]] = {}
        # lse and delta travel beside dout, so a receiver needs no output.
        scalars = _row_first(seed.lse), _row_first(seed.delta)
        grad_out = LocalTensors(seed.dout, scalars=scalars)
        self.local = {Kind.Q: LocalTensors(q), Kind.KV: local, Kind.GRAD_OUT: grad_out, Kind.DKV: grads}
        # As forward: dQ of other ranks is added to what is carried.
        if self.dq.carried is not None:
            self.local[Kind.DQ] = LocalTensors(self.dq.carried)

    def attend(self, kv: KV, dkv: KV | None, work: Any, final: bool = False) -> None:
        """Into dq and dkv."""
        sums, result = (None, dkv) if final else (dkv, None)
        self.engine.attend_grad(self.q, kv, self.seed, self.dq, sums, work, result)

    def attend_received(self, received: Mapping[Kind, PackedBuffer], works: Sequence[Any], at: int) -> None:
        """As `attend`, with the seed that came: delta stands for the output, see `BackwardInputs`."""
        q = _only(received[Kind.Q]).x
        if not at:
            # Not the own dQ: these queries belong to other ranks, to whom it is sent.
            into = self.engine.begin_grad(works, q, self.value_dim)
            seed = _seed(_only(received[Kind.GRAD_OUT]))._replace(dropout_seed=self.seed.dropout_seed)
            self._received[id(works)] = seed, into
        seed, into = self._received[id(works)]
        self.engine.attend_grad(q, _keys(received[Kind.KV]), seed, into, _keys(received[Kind.DKV]), works[at])
        if Kind.DQ not in received:
            return
        del self._received[id(works)]
        assert into.carried is not None
        _only(received[Kind.DQ]).x.copy_(into.carried)


def _seed(came: Rows) -> BackwardInputs:
    # They lie beside each other in a record, row by row; the engines want each by itself, for longer than the record
    # lives. A single row is contiguous in the record already, so it takes a clone to copy it.
    dout, lse, delta = (
        x.clone(memory_format=torch.contiguous_format)
        for x in (came.x, *(one.permute(1, 2, 0) for one in came.scalars))
    )
    # delta = sum(dout * out) - dlse: out = 0 and dlse = -delta stand for the output that stayed away.
    return BackwardInputs(dout, torch.zeros_like(dout), lse, -delta, delta)


def serving_bytes(sizes: Sizes, backward: bool) -> int:
    """What `attend_received` holds from the first to the last of its works, beside the engine's calls.

    A state; backward its inputs' copies, zeros and dQ.
    """
    rows, item = sizes.rows * sizes.batch * sizes.heads, accumulator_dtype(sizes.dtype).itemsize
    if not backward:
        # out and lse of each row.
        return rows * (sizes.value_dim + 1) * item
    # dout and zeros in the inputs' dtype; dQ, lse, delta and -delta in the accumulator's.
    return rows * (2 * sizes.value_dim * sizes.dtype.itemsize + (sizes.head_dim + 3) * item)


def _row_first(x: Tensor) -> Tensor:
    """(batch, heads, rows) as (rows, batch, heads)."""
    return x.permute(2, 0, 1)


def _only(records: PackedBuffer) -> Rows:
    """The only value of records with one head."""
    ((value,),) = records.parts.values()
    return value


def _keys(records: PackedBuffer) -> KV:
    """K and V of records with one head."""
    ((k, v),) = records.parts.values()
    return KV(k.x, v.x)

"""The contract between the runtime and an engine, and the state of the online softmax with its merge.

An engine does the arithmetic of one rank: it accumulates tiles into a softmax state, or into gradients. All tensors are
*row-first*: (rows, batch, heads, dim), any strides with a contiguous last dimension, so that a user's tensor (a
transposed view) and a received message (rows outermost) look alike.

The state is `(out, lse)`: `out` (rows, batch, heads, dim) is normalised over the keys accumulated so far, and `lse`
(batch, heads, rows) is the natural log of their summed exponentials, both in the accumulator dtype (float32; float64
for float64 inputs). The identity is (0, -inf); the merge is associative and commutative up to rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ringattn.core.geometry import Tile
from ringattn.errors import UnsupportedError

# --- the softmax state ------------------------------------------------------------------------------------------------


NEG_INF = float("-inf")


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax states and gradients of `dtype` inputs are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def identity(rows: int, batch: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """A state that has seen no key, in the accumulator dtype of `like`.

    Returns `out` as a (rows, batch, heads, dim) view of a contiguous (batch, rows, heads, dim) tensor, and `lse`
    (batch, heads, rows).
    """
    dtype = accumulator_dtype(like.dtype)
    out = torch.zeros(batch, rows, heads, dim, dtype=dtype, device=like.device)
    lse = torch.full((batch, heads, rows), NEG_INF, dtype=dtype, device=like.device)
    return out.transpose(0, 1), lse


def uninitialized(rows: int, batch: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for a state, laid out as that of `identity`."""
    dtype = accumulator_dtype(like.dtype)
    out = torch.empty(batch, rows, heads, dim, dtype=dtype, device=like.device)
    return out.transpose(0, 1), torch.empty((batch, heads, rows), dtype=dtype, device=like.device)


def begin_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, sinks: Tensor | None) -> None:
    """Make `(out, lse)`, which hold nothing yet, the state over the first keys, and over `sinks` (heads,) if any."""
    if sinks is None:
        out.copy_(part_out)
        lse.copy_(part_lse)
        return
    torch.logaddexp(sinks.to(lse.dtype)[None, :, None], part_lse, out=lse)
    torch.mul(part_out, by_row(weights(part_lse, lse)), out=out)


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the state over further keys into `(out, lse)`, in place.

    `out`, `part_out`: (rows, batch, heads, dim); `lse`, `part_lse`: (batch, heads, rows). A row that neither has seen
    stays (0, -inf).
    """
    merged = torch.logaddexp(lse, part_lse)
    # Finite where neither has seen a key, so that both shares are exp(-inf) = 0 there.
    whole = merged.clamp_min(torch.finfo(merged.dtype).min)
    keep, add = (lse - whole).exp_(), (part_lse - whole).exp_()
    out.mul_(by_row(keep)).addcmul_(part_out, by_row(add))
    lse.copy_(merged)


def weights(lse: Tensor, merged: Tensor) -> Tensor:
    """exp(lse - merged), 0 where nothing was seen: the share of one state in the merged one."""
    return torch.where(lse == NEG_INF, 0.0, torch.exp(lse - merged))


def by_row(per_row: Tensor) -> Tensor:
    """(batch, heads, rows) as (rows, batch, heads, 1), to scale a row-first tensor."""
    return per_row.permute(2, 0, 1).unsqueeze(-1)


# --- the contract of engines ------------------------------------------------------------------------------------------


OPTIONAL = ("softcap", "alibi_slopes", "dropout_p")
"""Fields of `Softmax` that not every engine computes; None where a call does without."""


class Softmax(NamedTuple):
    """How scores become weights. `group`: query heads per K/V head (query head h reads K/V head h // group).

    A score is scaled, then capped, then loses slope * |distance|, see `ringattn.options`. `alibi_slopes`: of all query
    heads of the call, which `Tile.first_head` counts. `starts`: where documents start among the queries and among the
    keys, if slopes need it because the two differ. `dropout_p`: which weights are dropped depends on a seed too, which
    comes with each pass.
    """

    scale: float
    group: int = 1
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    starts: tuple[tuple[int, int], ...] = ()
    dropout_p: float | None = None

    def options(self) -> dict[str, object]:
        """Those of `OPTIONAL` that the call uses, by name."""
        return {name: value for name in OPTIONAL if (value := getattr(self, name)) is not None}

    def refuse_options(self, engine: str) -> None:
        """Raise UnsupportedError for an option: the engine has none of `OPTIONAL`."""
        for name, value in self.options().items():
            raise UnsupportedError(f"engine={engine!r} has no {name}={value}; use engine='plain'")

    def shift(self, q_position: int) -> int:
        """By how much positions of queries exceed those of keys at the same distance from their documents' starts."""
        if not self.starts:
            return 0
        # Documents may be empty: the last one that starts here or before has the position.
        start, kv_start = self.starts[bisect_right(self.starts, q_position, key=lambda one: one[0]) - 1]
        return start - kv_start


class KV(NamedTuple):
    """Keys (rows, batch, heads, d_k) and values (rows, batch, heads, d_v) of K/V heads `first_head` onwards.

    Also carries dK and dV, which have the same shapes in the accumulator dtype.
    """

    k: Tensor
    v: Tensor
    first_head: int = 0


class Visit(NamedTuple):
    """How a step of a backward pass adds to the dK/dV rows of its tiles.

    `overwrite`: no step added to these rows before, so it overwrites them and does not accumulate. `last`: no step adds
    to them afterwards, so its sums are final.
    """

    overwrite: bool = False
    last: bool = False


class BackwardInputs(NamedTuple):
    """What backward starts from, for the rank's own queries.

    `dout`: (rows, batch, heads, d_v). `out`: the final output, same shape. `lse`: (batch, heads, rows), merged over
    all keys and sinks, accumulator dtype. `dlse`: gradient of `lse`, same shape, or None where nobody used it.
    `delta`: (batch, heads, rows) = sum(dout * out) - dlse, accumulator dtype. `dropout_seed`: of the forward pass.
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    delta: Tensor
    dropout_seed: int = 0


class Output(NamedTuple):
    """What a pass makes for the rank's own query rows, attention or dQ: (rows, batch, heads, dim).

    `carried`: in the accumulator dtype, between the steps; None where no step hands anything to a later one. `result`:
    in the inputs' dtype, where the last step that meets a row puts what is then final; None where `finalized` converts.
    """

    carried: Tensor | None
    result: Tensor | None = None

    def finalized(self, dtype: torch.dtype) -> Tensor:
        """What it is after the last step, in the inputs' dtype."""
        if self.result is not None:
            return self.result
        assert self.carried is not None
        return self.carried.to(dtype)


class SoftmaxState(NamedTuple):
    """The online softmax of the rank's own queries between the steps of a pass.

    `out`: normalized over the keys seen so far. `lse`: (batch, heads, rows), natural log, accumulator dtype; what it
    holds before the first step is the engine's affair. `sinks`: (heads,) logits, where the engine still needs them.
    `dropout_seed`: of the pass, where the call has dropout.
    """

    out: Output
    lse: Tensor
    sinks: Tensor | None = None
    dropout_seed: int = 0


class Sizes(NamedTuple):
    """The sizes of a call on one rank: its query rows, batches, query heads, dimensions of keys and of values."""

    rows: int
    batch: int
    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype


class Engine(Protocol):
    """The block kernels of one rank."""

    name: str
    sm_margin: int
    """Multiprocessors of a GPU that its kernels leave free, so that exchanges run beside them; 0 where it cannot."""

    def prepare(
        self,
        steps: Sequence[Sequence[Tile]],
        softmax: Softmax,
        rows: int,
        heads: int,
        *,
        more: bool = False,
        visits: Sequence[Visit] = (),
    ) -> Sequence[Any]:
        """Turn the tiles of a pass's steps into what each step's `attend` or `attend_grad` consumes. Once per plan.

        Query rows of the tiles index `q`, which has `rows`; key rows index the K/V that the step reads; heads are
        query heads, of which there are `heads`. `more`: others add to the output after the last step, so it stays in
        the accumulator dtype. `visits`: of each step, where any is the first or the last to add to its dK/dV.
        """
        ...

    def begin(self, works: Sequence[Any], q: Tensor, value_dim: int, sinks: Tensor | None) -> SoftmaxState:
        """The state before the first of the steps. `sinks`: (heads,) logits that take weight and give no value."""
        ...

    def attend(self, q: Tensor, kv: KV, state: SoftmaxState, work: Any) -> None:
        """Accumulate a step's tiles into the state, in place."""
        ...

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        """Return `BackwardInputs.delta`."""
        ...

    def begin_grad(self, works: Sequence[Any], q: Tensor, value_dim: int) -> Output:
        """dQ before the first of the steps."""
        ...

    def attend_grad(
        self,
        q: Tensor,
        kv: KV,
        inputs: BackwardInputs,
        dq: Output,
        dkv: KV | None,
        work: Any,
        result: KV | None = None,
    ) -> None:
        """Add the gradients of a step's tiles to `dq` and to `dkv` (like kv, accumulator dtype), in place.

        A step that overwrites does not read `dkv` and sets all key rows of its tiles: to zero where no query attends.
        The last step writes the sums to `result`, like kv in the inputs' dtype; `dkv` is then undefined, and may be
        None where a step is both.
        """
        ...

    def workspace_bytes(self, work: Any, sizes: Sizes, backward: bool, dlse: bool = False) -> int:
        """The most that one `attend`, or `attend_grad`, of a step has allocated at once and given back on its return.

        Of operands that lie as (batch, rows, heads, dim) without gaps; `dlse`: backward with a gradient of lse.
        """
        ...


class Accumulating:
    """The part of an engine that carries in accumulators from the first step to the last."""

    sm_margin = 0

    def begin(self, works: Sequence[Any], q: Tensor, value_dim: int, sinks: Tensor | None) -> SoftmaxState:
        """Nothing seen yet but the sinks."""
        rows, batch, heads, _ = q.shape
        out, lse = identity(rows, batch, heads, value_dim, like=q)
        if sinks is not None:
            lse.copy_(sinks[None, :, None])
        return SoftmaxState(Output(out), lse)

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        """In plain torch."""
        dtype = accumulator_dtype(dout.dtype)
        delta = (dout.to(dtype) * out.to(dtype)).sum(-1).permute(1, 2, 0)
        return (delta if dlse is None else delta - dlse).contiguous()

    def begin_grad(self, works: Sequence[Any], q: Tensor, value_dim: int) -> Output:
        """Zeros."""
        zeros = torch.zeros_like(
            q.transpose(0, 1), dtype=accumulator_dtype(q.dtype), memory_format=torch.contiguous_format
        )
        return Output(zeros.transpose(0, 1))

"""The contract between the runtime and an engine, and the state of the online softmax with its merge.

An engine does the arithmetic of one rank: it accumulates tiles into a softmax state, or into gradients. All tensors are
*row-first*: (rows, batch, heads, dim), with any strides and a contiguous last dimension. So a user's tensor (a
transposed view) and a received message (rows outermost) have the same form.

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
    """Return the dtype in which softmax states and gradients of `dtype` inputs are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def identity(rows: int, batch: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state before any key, in the accumulator dtype of `like`.

    `out` is a (rows, batch, heads, dim) view of a contiguous (batch, rows, heads, dim) tensor, and `lse` has the shape
    (batch, heads, rows).
    """
    dtype = accumulator_dtype(like.dtype)
    out = torch.zeros(batch, rows, heads, dim, dtype=dtype, device=like.device)
    lse = torch.full((batch, heads, rows), NEG_INF, dtype=dtype, device=like.device)
    return out.transpose(0, 1), lse


def uninitialized(rows: int, batch: int, heads: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate a state with the layout of `identity`, without filling it."""
    dtype = accumulator_dtype(like.dtype)
    out = torch.empty(batch, rows, heads, dim, dtype=dtype, device=like.device)
    return out.transpose(0, 1), torch.empty((batch, heads, rows), dtype=dtype, device=like.device)


def begin_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, sinks: Tensor | None) -> None:
    """Set `(out, lse)`, which are uninitialized, to the state over the first keys and over `sinks` (heads,), if any."""
    if sinks is None:
        out.copy_(part_out)
        lse.copy_(part_lse)
        return
    torch.logaddexp(sinks.to(lse.dtype)[None, :, None], part_lse, out=lse)
    torch.mul(part_out, by_row(weights(part_lse, lse)), out=out)


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the state over further keys into `(out, lse)`, in place.

    `out`, `part_out`: (rows, batch, heads, dim); `lse`, `part_lse`: (batch, heads, rows). A row without a key in
    either state stays (0, -inf).
    """
    merged = torch.logaddexp(lse, part_lse)
    # `whole` is finite even if a row has no key in either state, so that both shares of the row are exp(-inf) = 0.
    whole = merged.clamp_min(torch.finfo(merged.dtype).min)
    keep, add = (lse - whole).exp_(), (part_lse - whole).exp_()
    out.mul_(by_row(keep)).addcmul_(part_out, by_row(add))
    lse.copy_(merged)


def weights(lse: Tensor, merged: Tensor) -> Tensor:
    """Return exp(lse - merged), the share of a state in the merged state: 0 for rows that have seen no key."""
    return torch.where(lse == NEG_INF, 0.0, torch.exp(lse - merged))


def by_row(per_row: Tensor) -> Tensor:
    """View (batch, heads, rows) as (rows, batch, heads, 1), to scale a row-first tensor."""
    return per_row.permute(2, 0, 1).unsqueeze(-1)


# --- the contract of engines ------------------------------------------------------------------------------------------


OPTIONAL = ("softcap", "alibi_slopes", "dropout_p")
"""Fields of `Softmax` that not every engine supports. None means that the call does not use the option."""


class Softmax(NamedTuple):
    """The parameters of the softmax. `group`: query heads per K/V head (query head h reads K/V head h // group).

    A score is scaled, then capped, and then slope * |distance| is subtracted (see `ringattn.options`). `alibi_slopes`
    has a slope for each query head of the call, in the numbering of `Tile.first_head`. `starts` gives the start of each
    document among the queries and among the keys, if the two differ and slopes need it. `dropout_p` is the probability
    alone: the seed is an argument of each pass.
    """

    scale: float
    group: int = 1
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    starts: tuple[tuple[int, int], ...] = ()
    dropout_p: float | None = None

    def options(self) -> dict[str, object]:
        """Return the options among `OPTIONAL` that the call uses, by name."""
        return {name: value for name in OPTIONAL if (value := getattr(self, name)) is not None}

    def refuse_options(self, engine: str) -> None:
        """Raise UnsupportedError if the call uses an option of `OPTIONAL`, for an engine that supports none of them."""
        for name, value in self.options().items():
            raise UnsupportedError(f"engine={engine!r} has no {name}={value}; use engine='plain'")

    def shift(self, q_position: int) -> int:
        """Return the start of the query's document minus the start of the same document among the keys."""
        if not self.starts:
            return 0
        # Documents may be empty. The last document that starts at or before the position contains it.
        start, kv_start = self.starts[bisect_right(self.starts, q_position, key=lambda pair: pair[0]) - 1]
        return start - kv_start


class KV(NamedTuple):
    """Keys (rows, batch, heads, d_k) and values (rows, batch, heads, d_v) of K/V heads `first_head` onwards.

    Instead of keys and values, it may hold dK and dV, which have the same shapes in the accumulator dtype.
    """

    k: Tensor
    v: Tensor
    first_head: int = 0


class Visit(NamedTuple):
    """The position of a step among the steps of a backward pass that add to the dK/dV rows of its tiles.

    `overwrite`: no earlier step added to these rows, so this step overwrites them instead of accumulating. `last`: no
    later step adds to them, so the sums of this step are final.
    """

    overwrite: bool = False
    last: bool = False


class BackwardInputs(NamedTuple):
    """The inputs of backward for the rank's own queries.

    `dout`: (rows, batch, heads, d_v). `out`: the final output, same shape. `lse`: (batch, heads, rows), merged over
    all keys and sinks, in the accumulator dtype. `dlse`: the gradient of `lse`, same shape, or None if `lse` was not
    used. `delta`: (batch, heads, rows) = sum(dout * out) - dlse, in the accumulator dtype. `dropout_seed`: the seed of
    the forward pass.
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    delta: Tensor
    dropout_seed: int = 0


class Output(NamedTuple):
    """The output of a pass for the rank's own query rows, attention or dQ: (rows, batch, heads, dim).

    `carried` holds the sums between steps, in the accumulator dtype; None if no step passes a sum on to a later one.
    `result` is in the inputs' dtype: the last step of a row writes its final value there; None if `finalized` converts.
    """

    carried: Tensor | None
    result: Tensor | None = None

    def finalized(self, dtype: torch.dtype) -> Tensor:
        """Return the output after the last step, in the inputs' dtype."""
        if self.result is not None:
            return self.result
        assert self.carried is not None
        return self.carried.to(dtype)


class SoftmaxState(NamedTuple):
    """The online softmax of the rank's own queries between the steps of a pass.

    `out`: normalized over the keys seen so far. `lse`: (batch, heads, rows), natural log, accumulator dtype; the
    engine defines its content before the first step. `sinks`: (heads,) logits, if the engine still has to add them.
    `dropout_seed`: the seed of the pass, if the call has dropout.
    """

    out: Output
    lse: Tensor
    sinks: Tensor | None = None
    dropout_seed: int = 0


class Sizes(NamedTuple):
    """The sizes of a call on one rank: query rows, batch size, query heads, and the dimensions of keys and values."""

    rows: int
    batch: int
    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype


class Engine(Protocol):
    """The contract of an engine, which does the attention arithmetic of one rank."""

    name: str
    sm_margin: int
    """The multiprocessors of a GPU that the kernels leave free for concurrent exchanges; 0 if the engine cannot."""

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
        """Turn the tiles of each step into the `work` that its `attend` or `attend_grad` takes. Called once per plan.

        Query rows of the tiles index `q`, which has `rows` rows and `heads` heads; key rows index the K/V that the step
        reads; heads are query heads. `more`: other ranks' outputs are merged after the last step, so the output stays
        in the accumulator dtype. `visits`: one per step, given if a step is the first or the last to add to its dK/dV.
        """
        ...

    def begin(self, works: Sequence[Any], q: Tensor, value_dim: int, sinks: Tensor | None) -> SoftmaxState:
        """Return the state before the first step. `sinks`: (heads,) logits that take weight but have no value."""
        ...

    def attend(self, q: Tensor, kv: KV, state: SoftmaxState, work: Any) -> None:
        """Accumulate a step's tiles into the state, in place."""
        ...

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        """Return `BackwardInputs.delta`."""
        ...

    def begin_grad(self, works: Sequence[Any], q: Tensor, value_dim: int) -> Output:
        """Return dQ before the first step."""
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
        """Add the gradients of a step's tiles to `dq` and to `dkv` (shaped like kv, accumulator dtype), in place.

        A step that overwrites does not read `dkv`; it sets all key rows of its tiles, to zero if no query attends to
        them. The last step writes the sums to `result`, which has the shapes of kv and the inputs' dtype, and leaves
        `dkv` undefined. If a step is both the first and the last, `dkv` may be None.
        """
        ...

    def workspace_bytes(self, work: Any, sizes: Sizes, backward: bool, dlse: bool = False) -> int:
        """Return the peak of the temporary memory in one `attend` or `attend_grad` of a step, in bytes.

        Operands are assumed to be contiguous as (batch, rows, heads, dim). `dlse`: whether backward has a gradient of
        lse.
        """
        ...


class Accumulating:
    """The common methods of engines that keep their sums in accumulators from the first step to the last."""

    sm_margin = 0

    def begin(self, works: Sequence[Any], q: Tensor, value_dim: int, sinks: Tensor | None) -> SoftmaxState:
        """Return the state over the sinks alone."""
        rows, batch, heads, _ = q.shape
        out, lse = identity(rows, batch, heads, value_dim, like=q)
        if sinks is not None:
            lse.copy_(sinks[None, :, None])
        return SoftmaxState(Output(out), lse)

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        """Return `BackwardInputs.delta`, computed in plain torch."""
        dtype = accumulator_dtype(dout.dtype)
        delta = (dout.to(dtype) * out.to(dtype)).sum(-1).permute(1, 2, 0)
        return (delta if dlse is None else delta - dlse).contiguous()

    def begin_grad(self, works: Sequence[Any], q: Tensor, value_dim: int) -> Output:
        """Return zeros for dQ, in the accumulator dtype."""
        zeros = torch.zeros_like(
            q.transpose(0, 1), dtype=accumulator_dtype(q.dtype), memory_format=torch.contiguous_format
        )
        return Output(zeros.transpose(0, 1))

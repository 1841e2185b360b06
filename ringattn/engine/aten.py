"""The engine on torch's own fused attention kernels.

Guarantees: no mask tensor, and no copy of a strided operand on the CPU. Tiles become rectangles, and a rectangle
becomes one call of a block op on permuted views. Operands are copied in these cases only: half inputs on the CPU
(computed in float32), unequal or unaligned head dimensions (padded with zeros), a gradient of lse (one more column), a
reversed rectangle, queries if the scale is not positive, and dout and out of cuDNN's backward if their layout is not
that of the queries. The ops recompute the weights from the merged lse, and delta from dout and out.
Results repeat bit for bit on the CPU. The fused CUDA kernels round their partial results and gradients to the input
dtype, and for half inputs the gradient of lse too. Their backward repeats bit for bit only under
`torch.use_deterministic_algorithms`, which excludes cuDNN, as torch itself does
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, "cuDNN SDPA is not deterministic"). The plain engine computes
float32 and float64 on CUDA, half dtypes on a GPU without units for them, and heads too wide for a fused kernel.
Not covered: ranks, schedules, softcap (refused).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.core.geometry import StridedRange, Tile
from ringattn.engine.base import (
    KV,
    NEG_INF,
    Accumulating,
    BackwardInputs,
    Output,
    Sizes,
    Softmax,
    SoftmaxState,
    Visit,
    accumulator_dtype,
    begin_,
    by_row,
    merge_,
    uninitialized,
)
from ringattn.engine.plain import PlainEngine, PlainWork
from ringattn.engine.rectangles import (
    HeadGroup,
    Piece,
    Rectangle,
    accumulators,
    as_slice,
    finish,
    first_pieces,
    head_groups,
    join_rectangles,
    piece_views,
    rectangles,
    temporary_sums_bytes,
)

ops = torch.ops.aten

HIDDEN_ROWS = 64
"""The number of rows whose scores are computed again at once, to find a NaN that the CPU op has hidden."""


class BlockOp(NamedTuple):
    """A fused kernel for operands (batch, heads, rows, dim) and lse (batch, heads, rows).

    K and V may have fewer heads than q. `forward(q, k, v, causal, scale)` returns (out, lse);
    `backward(dout, q, k, v, out, lse, causal, scale)` returns (dq, dk, dv) in the operands' dtype. Unless
    `square_causal_only`, causal is aligned to the top left corner. Head dimensions are multiples of `dim_step` up to
    `max_dim`, the same for k and v. `keeps_half`: half operands stay half; otherwise they are converted to the
    accumulator dtype first.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]
    square_causal_only: bool
    keeps_half: bool
    dim_step: int
    max_dim: int
    min_keys: int = 1


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    # An lse of exactly 0 is rare, so the search for hidden rows almost never runs.
    if not lse.is_meta and int(lse.count_nonzero()) < lse.numel():
        _repair_hidden_rows(out, lse, q, k, causal)
    return out, lse


def _repair_hidden_rows(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, causal: bool) -> None:
    """Correct, in place, the rows without any score above -inf. `_cpu_forward` calls it if some lse is 0.

    For such a row the op returns (out, lse) = (0, 0), as for a row without keys. In a merge, an lse of 0 would count
    like a key with score 0. The right result is NaN if a score is NaN, and (0, -inf) if all scores are -inf. The NaN
    may come from a key, so the scores are computed again, a few rows at a time.
    """
    # Query head h reads K/V head h // group.
    group = q.shape[1] // k.shape[1]
    hidden = (lse == 0) & ~(out.abs() > 0).any(-1)  # an output of 0, or of NaN if a value is NaN
    for batch, head in hidden.any(-1).nonzero().tolist():
        for rows in hidden[batch, head].nonzero()[:, 0].split(HIDDEN_ROWS):
            scores = q[batch, head, rows] @ k[batch, head // group].mT
            if causal:
                # Causal from the top left corner, as in the op: row i sees keys 0 .. i.
                scores.masked_fill_(torch.arange(k.shape[2], device=k.device) > rows[:, None], NEG_INF)
            greatest = scores.amax(-1)  # NaN if any score is NaN
            # With a finite score the lse is really 0, and the row is correct.
            rows, greatest = rows[~greatest.isfinite()], greatest[~greatest.isfinite()]
            lse[batch, head, rows] = greatest
            out[batch, head, rows] = torch.where(greatest.isnan(), greatest, 0.0)[:, None].expand(-1, out.shape[3])


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return ops._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, causal, scale=scale)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return ops._scaled_dot_product_flash_attention_backward(
        # No cumulative lengths (all sequences are equally long) and no dropout: 0.0 and an unread random state.
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
        *_no_dropout(q, torch.uint64, 2), scale=scale,
    )  # fmt: skip


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    # cuDNN's lse has a last axis of length 1.
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Torch caches cuDNN's graphs by the strides of q, k and v, but a graph is compiled for the strides of out and dout
    # too. So the strides of out and dout must follow from q's (aten/src/ATen/native/cudnn/MHA.cpp, `MHAParams`).
    dout, out = (_laid_out_as(q, x) for x in (dout, out))
    return ops._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.contiguous().unsqueeze(-1), *_no_dropout(q, torch.int64), None, None, None,
        q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def _laid_out_as(q: Tensor, x: Tensor) -> Tensor:
    """Return `x` (batch, heads, rows, dim) without gaps in memory and with its dimensions in the order of q's."""
    order = sorted(range(3), key=q.stride, reverse=True)
    return x.permute(*order, 3).contiguous().permute(*map(order.index, range(3)), 3)


def _no_dropout(like: Tensor, dtype: torch.dtype, *seed_shape: int) -> tuple[Tensor, Tensor]:
    """Return the random state that the CUDA backward ops require and, without dropout, do not read."""
    return like.new_zeros(seed_shape, dtype=dtype), like.new_zeros((), dtype=dtype)


# name, forward, backward, square_causal_only, keeps_half, dim_step, max_dim
CPU = BlockOp("cpu-flash", _cpu_forward, _cpu_backward, False, False, 1, 1 << 30)
FLASH = BlockOp("cuda-flash", _flash_forward, _flash_backward, True, True, 8, 256)
CUDNN = BlockOp("cudnn", _cudnn_forward, _cudnn_backward, True, True, 8, 128, min_keys=2)
OPS = {"cpu": (CPU,), "cuda": (CUDNN, FLASH)}
HALF_DTYPES = (torch.float16, torch.bfloat16)


def choose(device: torch.device, dtype: torch.dtype, dim: int) -> BlockOp | None:
    """Return the fastest block op for inputs of this dtype padded to `dim`; None if torch has none.

    Under `torch.use_deterministic_algorithms` the backward of the op repeats bit for bit.
    """
    if device.type == "cpu":
        return CPU
    if device.type != "cuda" or dtype not in HALF_DTYPES or _capability(device) < (8, 0) or dim > FLASH.max_dim:
        return None
    # Older cuDNN is wrong for lengths that are not multiples of 128; on other architectures its kernels are slower.
    trusted = (torch.backends.cudnn.version() or 0) > 91500 and _capability(device)[0] in (9, 10)
    repeats = torch.are_deterministic_algorithms_enabled()
    return CUDNN if trusted and not repeats and dim <= CUDNN.max_dim else FLASH


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class AtenWork(NamedTuple):
    """The rectangles of a step with their heads, and the same tiles for the plain engine.

    `begins`: for each rectangle, whether it is the first of the pass on its queries; None if the state is initialised
    before the pass. `sets`: for each rectangle, whether it overwrites its rows of dK/dV; None if the step accumulates
    into its rows, or zeroes them first.
    """

    rectangles: tuple[tuple[Rectangle, HeadGroup], ...]
    scaling: Scaling
    plain: PlainWork
    begins: tuple[bool, ...] | None
    sets: tuple[bool, ...] | None


class AtenEngine(Accumulating):
    """The engine that computes attention with the fused kernels that torch has for `device`."""

    name = "aten"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ops: tuple[BlockOp, ...] = OPS.get(device.type, ())
        self._plain = PlainEngine()

    def prepare(
        self,
        steps: Sequence[Sequence[Tile]],
        softmax: Softmax,
        rows: int,
        heads: int,
        *,
        more: bool = False,
        visits: Sequence[Visit] = (),
    ) -> list[AtenWork]:
        """Cut the tiles into rectangles. Raises UnsupportedError for softmax options: no torch kernel supports them."""
        softmax.refuse_options(self.name)
        cut, square_causal_only = [], any(op.square_causal_only for op in self._ops)
        for tiles in steps:
            # The op is chosen later. If one op of the device needs square causal rectangles, cut all tiles into those.
            parts = [rectangle for tile in tiles for rectangle in rectangles(tile, square_causal_only)]
            # Join the parts into few rectangles, then cut each rectangle whose heads do not group evenly.
            joined = join_rectangles(parts)
            cut.append(tuple((whole, part) for whole in joined for part in head_groups(whole.heads, softmax.group)))
        # With `more`, outputs of other ranks may be merged before the first rectangle.
        queries = [[Piece(rectangle.q_rows, part.q_heads) for rectangle, part in pieces] for pieces in cut]
        every = Piece(StridedRange(0, rows), StridedRange(0, heads))
        begins = None if more else first_pieces(queries, [every])
        works = []
        for step, plain in enumerate(self._plain.prepare(steps, softmax, rows, heads, visits=visits)):
            sets = None
            if plain.visit.overwrite:
                keys = [Piece(rectangle.k_rows, part.kv_heads) for rectangle, part in cut[step]]
                first = first_pieces([keys], plain.keys)
                sets = None if first is None else first[0]
            factors = scaling(softmax.scale)
            works.append(AtenWork(cut[step], factors, plain, None if begins is None else begins[step], sets))
        return works

    def begin(self, works: Sequence[AtenWork], q: Tensor, value_dim: int, sinks: Tensor | None) -> SoftmaxState:
        """Return the state before the first step: uninitialized if the first rectangle of every row is known."""
        if not works or works[0].begins is None:
            return super().begin(works, q, value_dim, sinks)
        rows, batch, heads, _ = q.shape
        out, lse = uninitialized(rows, batch, heads, value_dim, like=q)
        return SoftmaxState(Output(out), lse, sinks)

    def attend(self, q: Tensor, kv: KV, state: SoftmaxState, work: AtenWork) -> None:
        """Accumulate the tiles into the state, in place."""
        # Choose the op for each call: it depends on the dtype and the padded head dimension.
        op, width = self._op_and_width(*_dims(q, kv), extra_columns=0)
        if op is None:
            self._begin_rows(state, work)
            self._plain.attend(q, kv, state, work.plain)
            return
        dtype = q.dtype if op.keeps_half else accumulator_dtype(q.dtype)
        for (rectangle, heads), begins in zip(work.rectangles, _flags(work.begins, work), strict=True):
            views = RectangleViews(rectangle, heads, dtype)
            self._attend_rectangle(views, op, width, q, kv, state, work.scaling, begins)

    def _begin_rows(self, state: SoftmaxState, work: AtenWork) -> None:
        """Initialise the rows whose first rectangle is in this step, because the plain engine only merges."""
        assert state.out.carried is not None
        for (rectangle, heads), begins in zip(work.rectangles, _flags(work.begins, work), strict=True):
            if begins:
                views = RectangleViews(rectangle, heads, state.lse.dtype)
                views.view(state.out.carried).zero_()
                nothing = NEG_INF if state.sinks is None else state.sinks[as_slice(heads.q_heads), None]
                views.view_rows(state.lse)[...] = nothing

    def _attend_rectangle(
        self,
        views: RectangleViews,
        op: BlockOp,
        width: int,
        q: Tensor,
        kv: KV,
        state: SoftmaxState,
        factors: Scaling,
        begins: bool,
    ) -> None:
        """Accumulate a rectangle. A separate method, so that its tensors are freed before the next rectangle.

        `width`: the head dimension of the op, to which operands are padded. `begins`: whether to overwrite the state of
        the rectangle's rows, instead of merging with it.
        """
        out, lse, rectangle = state.out.carried, state.lse, views.rectangle
        assert out is not None
        # Flash attention computes a rectangle with fewer keys than the op needs.
        call = op if rectangle.k_rows.count >= op.min_keys else FLASH
        q_part, k, v = (operand(x, width) for x in (times(views.queries(q), factors.of_q), *views.keys(kv)))
        part_out, part_lse = call.forward(q_part, k, v, rectangle.causal, factors.scale)
        # The merge works by row: first remove the padding and restore the buffer's row order.
        part_out = views.restored(part_out, kv.v.shape[-1]).to(out.dtype)
        # The op's lse is (batch, heads, rows): a reversed rectangle is flipped back along its rows.
        part_lse = part_lse.flip(-1) if rectangle.reversed else part_lse
        if begins:
            sinks = None if state.sinks is None else state.sinks[as_slice(views.heads.q_heads)]
            begin_(views.view(out), views.view_rows(lse), part_out, part_lse, sinks)
        else:
            # The CPU op's lse has heads innermost, and torch's arithmetic on unequal strides is five times slower.
            part_lse = part_lse.contiguous()
            merge_(views.view(out), views.view_rows(lse), part_out, part_lse)

    def begin_grad(self, works: Sequence[AtenWork], q: Tensor, value_dim: int) -> Output:
        """Return dQ before the first step: uninitialized if the first rectangle of every row is known."""
        if not works or works[0].begins is None:
            return super().begin_grad(works, q, value_dim)
        rows, batch, heads, dim = q.shape
        return Output(uninitialized(rows, batch, heads, dim, like=q)[0])

    def attend_grad(
        self,
        q: Tensor,
        kv: KV,
        inputs: BackwardInputs,
        dq: Output,
        dkv: KV | None,
        work: AtenWork,
        result: KV | None = None,
    ) -> None:
        """Add the tiles' gradients to `dq` and `dkv`, in place, or write the last sums to `result`."""
        # A gradient of lse is one more column of v, which may widen the padded head dimension.
        op, width = self._op_and_width(*_dims(q, kv), extra_columns=0 if inputs.dlse is None else 1)
        begins = _flags(work.begins, work)
        if op is None:
            for (rectangle, heads), overwrite in zip(work.rectangles, begins, strict=True):
                if overwrite:
                    assert dq.carried is not None
                    RectangleViews(rectangle, heads, q.dtype).view(dq.carried).zero_()
            self._plain.attend_grad(q, kv, inputs, dq, dkv, work.plain, result)
            return
        if _at_once(work):
            # Each rectangle's dK and dV are final, so no accumulator is needed.
            sums = result
        else:
            visit = work.plain.visit if work.sets is None else Visit()
            sums = accumulators(dkv, result, work.plain.keys, visit)
        assert sums is not None
        dtype, sets = q.dtype if op.keeps_half else accumulator_dtype(q.dtype), _flags(work.sets, work)
        for (rectangle, heads), *overwrites in zip(work.rectangles, begins, sets, strict=True):
            views = RectangleViews(rectangle, heads, dtype)
            self._grad_of_rectangle(views, op, width, q, kv, inputs, dq, sums, work.scaling, overwrites)
        if sums is not result:
            finish(sums, result, work.plain.keys)

    def _grad_of_rectangle(
        self,
        views: RectangleViews,
        op: BlockOp,
        width: int,
        q: Tensor,
        kv: KV,
        inputs: BackwardInputs,
        dq: Output,
        sums: KV,
        factors: Scaling,
        overwrites: Sequence[bool],
    ) -> None:
        """Add the gradients of a rectangle.

        `width`: the head dimension of the op, to which operands are padded. `overwrites`: whether the rectangle
        overwrites its query rows, and whether it overwrites its key rows.
        """
        into, rectangle = dq.carried, views.rectangle
        assert into is not None
        # As in forward: flash attention if the op needs more keys.
        call = op if rectangle.k_rows.count >= op.min_keys else FLASH
        dout, (k, v) = views.queries(inputs.dout), views.keys(kv)
        if inputs.dlse is not None:
            # With v' = [v, 1], dout' = [dout, dlse] and out' = [out, 0] the op's ds = p (dout'.v' - dout'.out')
            # equals p (dout.v + dlse - dout.out), which is the gradient of the scores.
            dout, v = (widened(x, x.shape[-1] + 1, value=1.0) for x in (dout, v))
            dout[..., -1:] = by_row(views.rows(inputs.dlse))
        dout, q_part, k, v, out = (
            operand(x, width) for x in (dout, times(views.queries(q), factors.of_q), k, v, views.queries(inputs.out))
        )
        # The merged lse makes exp(score - lse) the weight among all keys of the row, not only this rectangle's.
        grads = call.backward(dout, q_part, k, v, out, views.rows(inputs.lse), rectangle.causal, factors.scale)
        # The op received q * of_q, so the gradient is multiplied by of_q (chain rule).
        put(views.view(into), views.restored(grads[0], q.shape[-1]), overwrites[0], factors.of_q)
        # The first head of the sums may be later than that of K and V.
        for x, part in zip(views.view_keys(sums), grads[1:], strict=True):
            put(x, views.restored(part, x.shape[-1]), overwrites[1])

    def workspace_bytes(self, work: AtenWork, sizes: Sizes, backward: bool, dlse: bool = False) -> int:
        """See `Engine`. On CUDA the result excludes the memory that fused kernels allocate inside a call."""
        facts = sizes.head_dim, sizes.value_dim, sizes.dtype, self._device
        op, width = self._op_and_width(*facts, extra_columns=1 if dlse else 0)
        if op is None:
            return self._plain.workspace_bytes(work.plain, sizes, backward)
        # Operands are converted to the dtype in which the op computes.
        dtype = sizes.dtype if op.keeps_half else accumulator_dtype(sizes.dtype)
        scaled = work.scaling.of_q != 1
        # Rectangles run one after another, so the largest determines the peak.
        counts = [RectangleBytes(*part, sizes, width, dtype, dlse, scaled) for part in work.rectangles]
        if backward:
            sums = 0 if _at_once(work) else temporary_sums_bytes(work.plain.keys, work.plain.visit, sizes)
            return sums + max((count.backward_bytes() for count in counts), default=0)
        begins = zip(counts, _flags(work.begins, work), strict=True)
        return max((count.forward_bytes(first) for count, first in begins), default=0)

    def _op_and_width(
        self, head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device, extra_columns: int
    ) -> tuple[BlockOp | None, int]:
        """Return the block op and the head dimension that it is called with, unpadded if possible."""
        # The ops need the same width for k and v: the larger, rounded up if either must be padded anyway.
        dims = (head_dim, value_dim + extra_columns)
        width, step = max(dims), max((op.dim_step for op in self._ops), default=1)
        if width != min(dims) or width % step:
            width = -(-width // 8) * 8  # The CPU op needs no multiple of 8 but is faster with one.
        return self._choose_op(device, dtype, width), width

    def _choose_op(self, device: torch.device, dtype: torch.dtype, dim: int) -> BlockOp | None:
        return choose(device, dtype, dim)


def _flags(flags: tuple[bool, ...] | None, work: AtenWork) -> tuple[bool, ...]:
    """Return a flag for each rectangle; all False if `flags` is None."""
    return (False,) * len(work.rectangles) if flags is None else flags


def _at_once(work: AtenWork) -> bool:
    """Return whether each row of dK and dV is computed by a single rectangle of the pass."""
    return work.plain.visit.last and work.sets is not None and all(work.sets)


def _dims(q: Tensor, kv: KV) -> tuple[int, int, torch.dtype, torch.device]:
    """Return the head dimensions of keys and values, and the dtype and device of the call."""
    return kv.k.shape[-1], kv.v.shape[-1], q.dtype, q.device


# --- rectangles in row-first tensors: views of operands in the order of the operator, and results written back -------


LEAST_SCALE = torch.finfo(torch.float32).tiny
"""The smallest scale for an op. The ops multiply the -inf of masked scores and the row maximum by the scale."""


class Scaling(NamedTuple):
    """A call's scale as two factors: `of_q` multiplies q, and `scale`, at least `LEAST_SCALE`, is passed to the op."""

    of_q: float
    scale: float


def scaling(scale: float) -> Scaling:
    """Split `scale` into two factors. q is multiplied by 1 for most scales, and by -1 if the scale is negative."""
    if abs(scale) >= LEAST_SCALE:
        return Scaling(math.copysign(1.0, scale), abs(scale))
    return Scaling(scale, 1.0)


class RectangleViews(NamedTuple):
    """The views of row-first tensors that belong to a rectangle: operands, and results in the buffers' row order."""

    rectangle: Rectangle
    heads: HeadGroup
    dtype: torch.dtype

    def view(self, x: Tensor) -> Tensor:
        """Return the rectangle's view of a (rows, batch, query heads, dim) tensor."""
        # Ranges become slices, so a strided operand is a view.
        return x[as_slice(self.rectangle.q_rows), :, as_slice(self.heads.q_heads)]

    def view_keys(self, kv: KV) -> tuple[Tensor, Tensor]:
        """Return the rectangle's views of K and V, or of their gradients."""
        return piece_views(kv, Piece(self.rectangle.k_rows, self.heads.kv_heads))

    def view_rows(self, x: Tensor) -> Tensor:
        """Return the rectangle's view of a (batch, query heads, rows) tensor."""
        # lse and delta have their rows last, unlike q and dout.
        return x[:, as_slice(self.heads.q_heads), as_slice(self.rectangle.q_rows)]

    def queries(self, x: Tensor) -> Tensor:
        """Return `view` in the op's dtype and row order."""
        return self._ordered(self.view(x).to(self.dtype), 0)

    def keys(self, kv: KV) -> tuple[Tensor, Tensor]:
        """Return `view_keys` in the op's dtype and row order."""
        k, v = self.view_keys(kv)
        return self._ordered(k.to(self.dtype), 0), self._ordered(v.to(self.dtype), 0)

    def rows(self, x: Tensor) -> Tensor:
        """Return `view_rows` in the op's row order."""
        return self._ordered(self.view_rows(x), -1)

    def restored(self, x: Tensor, dim: int) -> Tensor:
        """Return a result (batch, heads, rows, padded dim) as row-first, in the buffer's row order, without padding."""
        # Remove the padding before the flip, so that it is not copied.
        return self._ordered(x.permute(2, 0, 1, 3)[..., :dim], 0)

    def _ordered(self, x: Tensor, axis: int) -> Tensor:
        # A reversed rectangle is anti-causal: with both sides flipped it is causal from the top left corner.
        return x.flip(axis) if self.rectangle.reversed else x


def put(x: Tensor, part: Tensor, overwrite: bool, factor: float = 1.0) -> None:
    """Add `part` times `factor` to `x`, or overwrite `x` with it."""
    if not overwrite:
        x.add_(part, alpha=factor)
    elif factor == 1:
        x.copy_(part)
    else:
        torch.mul(part, factor, out=x)


def times(x: Tensor, factor: float) -> Tensor:
    """Return `x * factor`; `x` itself if the factor is 1."""
    return x if factor == 1 else x * factor


def operand(x: Tensor, width: int) -> Tensor:
    """Return (rows, batch, heads, dim) as (batch, heads, rows, width): a view, or a zero-padded copy."""
    # Zero columns add nothing to q . k and give output columns of 0, which `restored` removes.
    return (widened(x, width) if x.shape[-1] < width else x).permute(1, 2, 0, 3)


def widened(x: Tensor, width: int, value: float = 0.0) -> Tensor:
    """Return a copy of x with columns of `value` up to `width` and a contiguous last dimension."""
    # torch's `pad` and `cat` preserve strides that look like channels_last, for example those of a column with batches
    # innermost.
    wide = x.new_full((*x.shape[:-1], width), value)
    wide[..., : x.shape[-1]] = x
    return wide


# --- bytes that a call of a fused kernel allocates, computed before it runs ------------------------------------------
# On the CPU this counts every byte from torch's allocator inside the call, including the kernels' buffers.
# The buffers are those of torch's aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (`cpu_flash_attention`,
# `cpu_flash_attention_backward`, `flash_attention_kernel_impl`), float32 and float64.


# The keys per block of scores in torch's kernel (kvSplitSize).
KEY_BLOCK = 512


def query_block(q_rows: int) -> int:
    """Return the number of query rows that a thread of the CPU kernel processes at once."""
    # qSplitSize of torch's flash_attention kernels.
    return min(q_rows, 256 if q_rows >= 768 else 64 if q_rows >= 192 else 32)


def kernel_bytes(q_rows: int, k_rows: int, dim: int, item_bytes: int, backward: bool) -> int:
    """Return the bytes of the buffers inside a call of the CPU kernel.

    Forward: a block of scores, two numbers per row and a block of output for each thread. Backward: a block of scores
    and of their gradient for each thread, and one number per row shared by all threads.
    """
    block = query_block(q_rows)
    scores = block * min(k_rows, KEY_BLOCK)
    threads = torch.get_num_threads()
    # Scores (block, keys), row maximum and sum (block, 2), output (block, dim); backward scores and their gradient.
    elements = threads * 2 * scores + block if backward else threads * (scores + 2 * block + block * dim)
    return elements * item_bytes


class RectangleBytes(NamedTuple):
    """The memory of a kernel call for a rectangle and some heads; the kernel works on `width` columns in `dtype`.

    `dlse`: whether backward has a gradient of lse, which is one more column of dout and v. `scaled`: whether q is
    multiplied by a factor first.
    """

    rectangle: Rectangle
    heads: HeadGroup
    sizes: Sizes
    width: int
    dtype: torch.dtype
    dlse: bool = False
    scaled: bool = False

    def forward_bytes(self, begins: bool = False) -> int:
        """Return the peak memory of forward: in the call, while the row order is restored, or in the merge.

        `begins`: whether the result becomes the state without a merge.
        """
        sizes, item = self.sizes, self.dtype.itemsize
        # A number for each query row and head: the size of an lse.
        rows = self._q(1)
        # The op's output with padded columns, and its lse.
        result = self._q(self.width) + rows
        inside = kernel_bytes(self.rectangle.q_rows.count, self.rectangle.k_rows.count, self.width, item, False)
        # A flip along the rows is a copy without the padding.
        restored = self._q(sizes.value_dim) if self.rectangle.reversed else 0
        # `merge_` allocates the merged lse twice, and two weights. A first rectangle only restores the row order of its
        # lse.
        merging = 4 * rows if not begins else rows if self.rectangle.reversed else 0
        # During the merge the reordered copy has replaced a reversed result, but the op's lse still exists.
        live = restored + rows if restored else result
        operands = (self._q(sizes.head_dim), self._k(sizes.head_dim), self._k(sizes.value_dim))
        padded = (self._q(self.width), self._k(self.width), self._k(self.width))
        widths = (sizes.head_dim, sizes.head_dim, sizes.value_dim)
        # The peak is in one of three phases: the call, the reordering, the merge.
        after = max(result + inside, result + restored, live + merging)
        return self._copied(operands, padded, widths, after, new=(self.scaled, False, False))

    def backward_bytes(self) -> int:
        """Return the peak memory of backward, which adds gradients to their rows without a merge."""
        sizes, rectangle = self.sizes, self.rectangle
        # The op's dq, dk and dv with padded columns.
        grads = self._q(self.width) + 2 * self._k(self.width)
        inside = kernel_bytes(rectangle.q_rows.count, rectangle.k_rows.count, self.width, self.dtype.itemsize, True)
        if not self._dout_is_contiguous():
            inside += self._q(self.width)  # the kernel's `grad_out.contiguous()`
        # The flipped lse exists during the call; afterwards the gradients are flipped one at a time.
        if rectangle.reversed:
            inside = max(inside + self._q(1), self._q(sizes.head_dim), self._k(max(sizes.head_dim, sizes.value_dim)))
        # A gradient of lse is one more column of dout and of v.
        value_dim = sizes.value_dim + self.dlse
        dims = (value_dim, sizes.head_dim, sizes.head_dim, value_dim, sizes.value_dim)
        counts = (self._q, self._q, self._k, self._k, self._q)  # dout, q, k, v, out
        operands = tuple(count(dim) for count, dim in zip(counts, dims, strict=True))
        padded = tuple(count(self.width) for count in counts)
        # In the order of `dims`. With a gradient of lse, dout and v are new tensors.
        new = (self.dlse, self.scaled, False, self.dlse, False)
        return self._copied(operands, padded, dims, grads + inside, new)

    def _copied(
        self,
        operands: tuple[int, ...],
        padded: tuple[int, ...],
        widths: tuple[int, ...],
        after: int,
        new: tuple[bool, ...],
    ) -> int:
        """Return the peak memory while operands are converted, then padded, and then held with `after` more bytes.

        For each operand: `operands` has its bytes without padding, `padded` its bytes with padding, `widths` its head
        dimension, and `new` whether it is a new tensor in any case.
        """
        # Conversion and reversal copy every operand; otherwise only operands that are new tensors take memory.
        every = self._converted or self.rectangle.reversed
        first = [nbytes if every or is_new else 0 for nbytes, is_new in zip(operands, new, strict=True)]
        narrow = [width < self.width for width in widths]
        padding = sum(nbytes for nbytes, pads in zip(padded, narrow, strict=True) if pads)
        # A padded copy replaces the copy before it; unpadded copies stay until the call has returned.
        left = sum(nbytes for nbytes, pads in zip(first, narrow, strict=True) if not pads)
        return max(sum(first) + padding, left + padding + after)

    @property
    def _converted(self) -> bool:
        return self.sizes.dtype != self.dtype

    def _dout_is_contiguous(self) -> bool:
        """Return whether dout is contiguous as (batch, rows, heads, dim). Padded copies have rows outermost instead."""
        if self.dlse or self.sizes.value_dim < self.width:
            return self.sizes.batch == 1 or self.rectangle.q_rows.count == 1
        if self._converted or self.rectangle.reversed:
            return True
        rows, heads = self.rectangle.q_rows, self.heads.q_heads
        # A view is contiguous if it skips no row and no head between those that it contains.
        whole_rows = rows.stride == 1 and (self.sizes.batch == 1 or rows.count == self.sizes.rows)
        return whole_rows and (heads.count == self.sizes.heads or self.sizes.batch * rows.count == 1)

    def _q(self, dim: int) -> int:
        """Return the bytes of `dim` numbers for each query row and head."""
        return math.prod((self.rectangle.q_rows.count, self.sizes.batch, self.heads.q_heads.count, dim)) * (
            self.dtype.itemsize
        )

    def _k(self, dim: int) -> int:
        """Return the bytes of `dim` numbers for each key row and head."""
        return math.prod((self.rectangle.k_rows.count, self.sizes.batch, self.heads.kv_heads.count, dim)) * (
            self.dtype.itemsize
        )

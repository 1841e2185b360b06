"""The engine on torch's own fused attention kernels.

Guarantees no mask tensor and no copy of a strided operand on the CPU: tiles become rectangles, and a rectangle becomes
one call of a block op on permuted views. Only operands that need one are copied: half inputs on the CPU (computed in
float32), unequal or unaligned head dimensions (padded with zeros), a gradient of lse (one more column), a reversed
rectangle, and queries where the scale is not positive. The ops recompute the weights from the merged lse, and delta
from dout and out.
Bits repeat on the CPU. The fused CUDA kernels round their partials and gradients, and of a half input the gradient of
lse too, to the input dtype. Their backward repeats bit for bit only under `torch.use_deterministic_algorithms`, which
leaves cuDNN out, as torch itself does (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, "cuDNN SDPA is not
deterministic"). float32 and float64 on CUDA, half dtypes on a GPU without the units for them and heads too wide for a
fused kernel are computed by the plain engine.
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
    held_by,
    joined,
    own_sums_bytes,
    rectangles,
)

ops = torch.ops.aten

HIDDEN_ROWS = 64
"""Rows whose scores are looked at together where the CPU op has hidden a NaN."""


class BlockOp(NamedTuple):
    """One fused kernel. Operands are (batch, heads, rows, dim) with fewer K/V heads allowed, lse (batch, heads, rows).

    `forward(q, k, v, causal, scale)` gives (out, lse); `backward(dout, q, k, v, out, lse, causal, scale)` gives
    (dq, dk, dv) in the operands' dtype. Where not `square_causal_only`, causal is aligned to the top left corner. Head
    dimensions are multiples of `dim_step` up to `max_dim`, the same for k and v. `keeps_half`: computes half operands
    as such; otherwise they come in the accumulator dtype.
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
    # An lse of exactly 0 is rare, so the search for hidden rows is almost never made.
    if not lse.is_meta and int(lse.count_nonzero()) < lse.numel():
        _show_hidden(out, lse, q, k, causal)
    return out, lse


def _show_hidden(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, causal: bool) -> None:
    """Set right, in place, the rows of which no score is a number above -inf; `_cpu_forward` calls it where lse is 0.

    The op takes them for rows without a key and says (0, 0), which weighs like a key. A row with a NaN is NaN; one of
    -inf alone has seen nothing. That is found by its scores, a few rows at a time, as its keys may hold the NaN.
    """
    # Query head h reads K/V head h // group.
    group = q.shape[1] // k.shape[1]
    hidden = (lse == 0) & ~(out.abs() > 0).any(-1)  # 0, or NaN where a value is
    for batch, head in hidden.any(-1).nonzero().tolist():
        for rows in hidden[batch, head].nonzero()[:, 0].split(HIDDEN_ROWS):
            scores = q[batch, head, rows] @ k[batch, head // group].mT
            if causal:
                # Causal from the top left corner, as the op: row i sees keys 0 .. i.
                scores.masked_fill_(torch.arange(k.shape[2]) > rows[:, None], NEG_INF)
            greatest = scores.amax(-1)  # of numbers and a NaN it is NaN
            # Finite scores: the lse is truly 0 and the row is right as it is.
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
        # No cumulative lengths (every row is as long) and no dropout: 0.0 and an unread random state.
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
        *_no_dropout(q, torch.uint64, 2), scale=scale,
    )  # fmt: skip


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    # cuDNN gives lse a last axis of 1.
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return ops._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.contiguous().unsqueeze(-1), *_no_dropout(q, torch.int64), None, None, None,
        q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def _no_dropout(like: Tensor, dtype: torch.dtype, *seed_shape: int) -> tuple[Tensor, Tensor]:
    """The random state that the CUDA backwards ask for and, without dropout, do not read."""
    return like.new_zeros(seed_shape, dtype=dtype), like.new_zeros((), dtype=dtype)


# name, forward, backward, square_causal_only, keeps_half, dim_step, max_dim
CPU = BlockOp("cpu-flash", _cpu_forward, _cpu_backward, False, False, 1, 1 << 30)
FLASH = BlockOp("cuda-flash", _flash_forward, _flash_backward, True, True, 8, 256)
CUDNN = BlockOp("cudnn", _cudnn_forward, _cudnn_backward, True, True, 8, 128, min_keys=2)
OPS = {"cpu": (CPU,), "cuda": (CUDNN, FLASH)}
HALF_DTYPES = (torch.float16, torch.bfloat16)


def choose(device: torch.device, dtype: torch.dtype, dim: int) -> BlockOp | None:
    """The fastest block op for inputs of this dtype padded to `dim`; None where torch ships none.

    Under `torch.use_deterministic_algorithms` it is one whose backward repeats bit for bit.
    """
    if device.type == "cpu":
        return CPU
    if device.type != "cuda" or dtype not in HALF_DTYPES or _capability(device) < (8, 0) or dim > FLASH.max_dim:
        return None
    # Older cuDNN is wrong for lengths that are not multiples of 128; other architectures run its slower kernels.
    trusted = (torch.backends.cudnn.version() or 0) > 91500 and _capability(device)[0] in (9, 10)
    repeats = torch.are_deterministic_algorithms_enabled()
    return CUDNN if trusted and not repeats and dim <= CUDNN.max_dim else FLASH


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class AtenWork(NamedTuple):
    """The rectangles of one step with their heads, and the same tiles for the plain engine.

    `begins`: which rectangles are the first of the pass on their queries; None where the state is set before all.
    `sets`: which are the first on their keys, in a step that is the first itself; None where its rows are zeroed.
    """

    rectangles: tuple[tuple[Rectangle, HeadGroup], ...]
    scaling: Scaling
    plain: PlainWork
    begins: tuple[bool, ...] | None
    sets: tuple[bool, ...] | None


class AtenEngine(Accumulating):
    """Attention by the fused kernels that torch ships for `device`."""

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
        """Cut the tiles. Raises UnsupportedError for options, which no fused kernel of torch knows."""
        softmax.refuse_options(self.name)
        cut, square_causal_only = [], any(op.square_causal_only for op in self._ops)
        for tiles in steps:
            # If one op of the device asks for square causal rectangles, all are cut so: the op is chosen later.
            found = [rectangle for tile in tiles for rectangle in rectangles(tile, square_causal_only)]
            # Few rectangles, then each cut where its heads do not group evenly.
            cut.append(tuple((one, part) for one in joined(found) for part in head_groups(one.heads, softmax.group)))
        # With `more`, outputs of other ranks may be merged before the first rectangle.
        queries = [[Piece(one.q_rows, part.q_heads) for one, part in pieces] for pieces in cut]
        every = Piece(StridedRange(0, rows), StridedRange(0, heads))
        begins = None if more else first_pieces(queries, [every])
        works = []
        for step, plain in enumerate(self._plain.prepare(steps, softmax, rows, heads, visits=visits)):
            sets = None
            if plain.visit.overwrite:
                keys = [Piece(one.k_rows, part.kv_heads) for one, part in cut[step]]
                known = first_pieces([keys], plain.keys)
                sets = None if known is None else known[0]
            by = scaling(softmax.scale)
            works.append(AtenWork(cut[step], by, plain, None if begins is None else begins[step], sets))
        return works

    def begin(self, works: Sequence[AtenWork], q: Tensor, value_dim: int, sinks: Tensor | None) -> SoftmaxState:
        """Uninitialized where the first rectangles of all rows are known."""
        if not works or works[0].begins is None:
            return super().begin(works, q, value_dim, sinks)
        rows, batch, heads, _ = q.shape
        out, lse = uninitialized(rows, batch, heads, value_dim, like=q)
        return SoftmaxState(Output(out), lse, sinks)

    def attend(self, q: Tensor, kv: KV, state: SoftmaxState, work: AtenWork) -> None:
        """Accumulate the tiles into the state, in place."""
        # The op is chosen for each call, since it depends on the dtype and the padded head dimension.
        op, width = self._op_and_width(*_dims(q, kv), extra_columns=0)
        if op is None:
            self._begin_rows(state, work)
            self._plain.attend(q, kv, state, work.plain)
            return
        dtype = q.dtype if op.keeps_half else accumulator_dtype(q.dtype)
        for (rectangle, heads), begins in zip(work.rectangles, _flags(work.begins, work), strict=True):
            at = Place(rectangle, heads, dtype)
            self._attend_rectangle(at, op, width, q, kv, state, work.scaling, begins)

    def _begin_rows(self, state: SoftmaxState, work: AtenWork) -> None:
        """Set the rows that `begin` left to the step's rectangles, for the plain engine, which merges into all."""
        assert state.out.carried is not None
        for (rectangle, heads), begins in zip(work.rectangles, _flags(work.begins, work), strict=True):
            if begins:
                at = Place(rectangle, heads, state.lse.dtype)
                at.view(state.out.carried).zero_()
                nothing = NEG_INF if state.sinks is None else state.sinks[as_slice(heads.q_heads), None]
                at.view_rows(state.lse)[...] = nothing

    def _attend_rectangle(
        self, at: Place, op: BlockOp, width: int, q: Tensor, kv: KV, state: SoftmaxState, by: Scaling, begins: bool
    ) -> None:
        """One rectangle, in a call of its own so that what it allocates is gone before the next one."""
        out, lse, rectangle = state.out.carried, state.lse, at.rectangle
        assert out is not None
        # A rectangle of fewer keys than the op takes goes to flash.
        call = op if rectangle.k_rows.count >= op.min_keys else FLASH
        q_part, k, v = (operand(x, width) for x in (times(at.queries(q), by.of_q), *at.keys(kv)))
        part_out, part_lse = call.forward(q_part, k, v, rectangle.causal, by.scale)
        # Padding off and rows in the buffer's order before the merge, which is by row.
        part_out = at.restored(part_out, kv.v.shape[-1]).to(out.dtype)
        # The op's lse is (batch, heads, rows): a reversed rectangle is flipped back along its rows.
        part_lse = part_lse.flip(-1) if rectangle.reversed else part_lse
        if begins:
            sinks = None if state.sinks is None else state.sinks[as_slice(at.heads.q_heads)]
            begin_(at.view(out), at.view_rows(lse), part_out, part_lse, sinks)
        else:
            # The CPU op's lse has heads innermost; torch's arithmetic on unlike strides is five times slower.
            part_lse = part_lse.contiguous()
            merge_(at.view(out), at.view_rows(lse), part_out, part_lse)

    def begin_grad(self, works: Sequence[AtenWork], q: Tensor, value_dim: int) -> Output:
        """Uninitialized where the first rectangles of all rows are known."""
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
                    Place(rectangle, heads, q.dtype).view(dq.carried).zero_()
            self._plain.attend_grad(q, kv, inputs, dq, dkv, work.plain, result)
            return
        if _at_once(work):
            # What a rectangle makes is final, so it needs no accumulator.
            sums = result
        else:
            visit = work.plain.visit if work.sets is None else Visit()
            sums = accumulators(dkv, result, work.plain.keys, visit)
        assert sums is not None
        dtype, sets = q.dtype if op.keeps_half else accumulator_dtype(q.dtype), _flags(work.sets, work)
        for (rectangle, heads), *overwrites in zip(work.rectangles, begins, sets, strict=True):
            at = Place(rectangle, heads, dtype)
            self._grad_of_rectangle(at, op, width, q, kv, inputs, dq, sums, work.scaling, overwrites)
        if sums is not result:
            finish(sums, result, work.plain.keys)

    def _grad_of_rectangle(
        self,
        at: Place,
        op: BlockOp,
        width: int,
        q: Tensor,
        kv: KV,
        inputs: BackwardInputs,
        dq: Output,
        sums: KV,
        by: Scaling,
        overwrites: Sequence[bool],
    ) -> None:
        """As `_attend_rectangle`. `overwrites`: the rows of the queries, and of the keys."""
        into, rectangle = dq.carried, at.rectangle
        assert into is not None
        # As forward, by the number of keys.
        call = op if rectangle.k_rows.count >= op.min_keys else FLASH
        dout, (k, v) = at.queries(inputs.dout), at.keys(kv)
        if inputs.dlse is not None:
            # With v' = [v, 1], dout' = [dout, dlse] and out' = [out, 0] the op's ds = p (dout'.v' - dout'.out')
            # is the wanted p (dout.v + dlse - dout.out).
            dout, v = (widened(x, x.shape[-1] + 1, value=1.0) for x in (dout, v))
            dout[..., -1:] = by_row(at.rows(inputs.dlse))
        dout, q_part, k, v, out = (
            operand(x, width) for x in (dout, times(at.queries(q), by.of_q), k, v, at.queries(inputs.out))
        )
        # The merged lse makes exp(score - lse) the weight among all keys of the row, not only this rectangle's.
        grads = call.backward(dout, q_part, k, v, out, at.rows(inputs.lse), rectangle.causal, by.scale)
        # q went in times of_q, so its gradient comes out to be multiplied by it once more (chain rule).
        put(at.view(into), at.restored(grads[0], q.shape[-1]), overwrites[0], by.of_q)
        # The sums may begin at a later head than K and V.
        for x, part in zip(at.view_keys(sums), grads[1:], strict=True):
            put(x, at.restored(part, x.shape[-1]), overwrites[1])

    def workspace_bytes(self, work: AtenWork, sizes: Sizes, backward: bool, dlse: bool = False) -> int:
        """See `Engine`; on CUDA without what the fused kernels take for themselves inside a call."""
        facts = sizes.head_dim, sizes.value_dim, sizes.dtype, self._device
        op, width = self._op_and_width(*facts, extra_columns=1 if dlse else 0)
        if op is None:
            return self._plain.workspace_bytes(work.plain, sizes, backward)
        # What the op computes in is what its operands are converted to.
        dtype = sizes.dtype if op.keeps_half else accumulator_dtype(sizes.dtype)
        scaled = work.scaling.of_q != 1
        # Rectangles run one after another: the largest counts.
        pieces = [Strips(one, heads, sizes, width, dtype, dlse, scaled) for one, heads in work.rectangles]
        if backward:
            sums = 0 if _at_once(work) else own_sums_bytes(work.plain.keys, work.plain.visit, sizes)
            return sums + max((one.backward_bytes() for one in pieces), default=0)
        begins = zip(pieces, _flags(work.begins, work), strict=True)
        return max((one.forward_bytes(first) for one, first in begins), default=0)

    def _op_and_width(
        self, head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device, extra_columns: int
    ) -> tuple[BlockOp | None, int]:
        """The block op and the head dimension that it is called with: unpadded where it can be."""
        # One width for k and v, as the ops ask: the larger, rounded up where either must be padded anyway.
        dims = (head_dim, value_dim + extra_columns)
        width, step = max(dims), max((op.dim_step for op in self._ops), default=1)
        if width != min(dims) or width % step:
            width = -(-width // 8) * 8  # The CPU op needs no multiple of 8 but is faster with one.
        return self._chosen(device, dtype, width), width

    def _chosen(self, device: torch.device, dtype: torch.dtype, dim: int) -> BlockOp | None:
        return choose(device, dtype, dim)


def _flags(flags: tuple[bool, ...] | None, work: AtenWork) -> tuple[bool, ...]:
    """Of each rectangle."""
    return (False,) * len(work.rectangles) if flags is None else flags


def _at_once(work: AtenWork) -> bool:
    """Whether each row of dK and dV is made by one rectangle of the pass."""
    return work.plain.visit.last and work.sets is not None and all(work.sets)


def _dims(q: Tensor, kv: KV) -> tuple[int, int, torch.dtype, torch.device]:
    """Of keys and of values, with the dtype and the device of the call."""
    return kv.k.shape[-1], kv.v.shape[-1], q.dtype, q.device


# --- rectangles in row-first tensors: views of operands in the order of the operator, and results written back -------


LEAST_SCALE = torch.finfo(torch.float32).tiny
"""The ops multiply the -inf of a masked score by the scale, and their row maximum too: it must not be less."""


class Scaling(NamedTuple):
    """A call's scale as what q is multiplied by, and the `scale`, of at least `LEAST_SCALE`, that an op is given."""

    of_q: float
    scale: float


def scaling(scale: float) -> Scaling:
    """The two factors of `scale`; q stays as it is wherever it can, and keeps its bits where the scale is negative."""
    if abs(scale) >= LEAST_SCALE:
        return Scaling(math.copysign(1.0, scale), abs(scale))
    return Scaling(scale, 1.0)


class Place(NamedTuple):
    """Where a rectangle lies in row-first tensors: reads its operands and maps results back."""

    rectangle: Rectangle
    heads: HeadGroup
    dtype: torch.dtype

    def view(self, x: Tensor) -> Tensor:
        """The rectangle's part of a (rows, batch, query heads, dim) tensor."""
        # Ranges become slices, so a strided operand is a view.
        return x[as_slice(self.rectangle.q_rows), :, as_slice(self.heads.q_heads)]

    def view_keys(self, kv: KV) -> tuple[Tensor, Tensor]:
        """The rectangle's part of K and V, or of their gradients."""
        return held_by(kv, Piece(self.rectangle.k_rows, self.heads.kv_heads))

    def view_rows(self, x: Tensor) -> Tensor:
        """The rectangle's part of a (batch, query heads, rows) tensor."""
        # lse and delta have their rows last, unlike q and dout.
        return x[:, as_slice(self.heads.q_heads), as_slice(self.rectangle.q_rows)]

    def queries(self, x: Tensor) -> Tensor:
        """`view` as the op wants it: its dtype and its order of rows."""
        return self._ordered(self.view(x).to(self.dtype), 0)

    def keys(self, kv: KV) -> tuple[Tensor, Tensor]:
        """`view_keys` as the op wants them."""
        k, v = self.view_keys(kv)
        return self._ordered(k.to(self.dtype), 0), self._ordered(v.to(self.dtype), 0)

    def rows(self, x: Tensor) -> Tensor:
        """`view_rows` in the op's order of rows."""
        return self._ordered(self.view_rows(x), -1)

    def restored(self, x: Tensor, dim: int) -> Tensor:
        """A result (batch, heads, rows, padded dim) as row-first, in the buffer's order, without the padding."""
        # Cut before the flip, so that padding is not copied.
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
    """`x` itself where the factor is 1."""
    return x if factor == 1 else x * factor


def operand(x: Tensor, width: int) -> Tensor:
    """(rows, batch, heads, dim) as (batch, heads, rows, width): a view, or a zero-padded copy of it."""
    # Zero columns add nothing to q . k and give output columns of 0, which `restored` cuts off.
    return (widened(x, width) if x.shape[-1] < width else x).permute(1, 2, 0, 3)


def widened(x: Tensor, width: int, value: float = 0.0) -> Tensor:
    """x with columns of `value` up to `width`, in memory of its own with a contiguous last dimension."""
    # torch's `pad` and `cat` keep what looks like channels_last, as a single column does where batches lie innermost.
    wide = x.new_full((*x.shape[:-1], width), value)
    wide[..., : x.shape[-1]] = x
    return wide


# --- bytes that one call of a fused kernel allocates, counted before it runs -----------------------------------------
# On the CPU, every byte that torch's allocator hands out inside the call, buffers of the kernels included.
# The buffers are those of torch's aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (`cpu_flash_attention`,
# `cpu_flash_attention_backward`, `flash_attention_kernel_impl`), float32 and float64.


# Keys of one block of scores in torch's kernel (kvSplitSize).
KEY_BLOCK = 512


def query_block(q_rows: int) -> int:
    """Query rows that a thread of the CPU kernel works on at once."""
    # torch's own steps: qSplitSize of its flash_attention kernels.
    return min(q_rows, 256 if q_rows >= 768 else 64 if q_rows >= 192 else 32)


def kernel_bytes(q_rows: int, k_rows: int, dim: int, item_bytes: int, backward: bool) -> int:
    """Buffers inside one call of the CPU kernel.

    Forward of each thread a block of scores, two numbers a row, a block of output. Backward of each thread a block of
    scores and of their gradient, and of all together one number a row.
    """
    block = query_block(q_rows)
    scores = block * min(k_rows, KEY_BLOCK)
    threads = torch.get_num_threads()
    # Scores (block, keys), row maximum and sum (block, 2), output (block, dim); backward scores and their gradient.
    elements = threads * 2 * scores + block if backward else threads * (scores + 2 * block + block * dim)
    return elements * item_bytes


class Strips(NamedTuple):
    """A rectangle for some heads of a call with `sizes`; the kernel works on `width` columns in `dtype`.

    `dlse`: backward with a gradient of lse, which is one more column of dout and v. `scaled`: q is multiplied first.
    """

    rectangle: Rectangle
    heads: HeadGroup
    sizes: Sizes
    width: int
    dtype: torch.dtype
    dlse: bool = False
    scaled: bool = False

    def forward_bytes(self, begins: bool = False) -> int:
        """The most at once: copies of operands with the kernel's call, with its order restored, or with the merge.

        `begins`: what is made becomes the state, without a merge.
        """
        sizes, item = self.sizes, self.dtype.itemsize
        # One number for each query row and head: the size of an lse.
        rows = self._q(1)
        # The op's output, of padded columns, with its lse.
        result = self._q(self.width) + rows
        inside = kernel_bytes(self.rectangle.q_rows.count, self.rectangle.k_rows.count, self.width, item, False)
        # A flip along the rows is a copy without the padding.
        restored = self._q(sizes.value_dim) if self.rectangle.reversed else 0
        # Of `softmax_state.merge_`: the merged lse twice and two weights; a first one is only put in order.
        merging = 4 * rows if not begins else rows if self.rectangle.reversed else 0
        # While merging, a reversed result has been replaced by its copy in order, but its lse is still held.
        kept = restored + rows if restored else result
        operands = (self._q(sizes.head_dim), self._k(sizes.head_dim), self._k(sizes.value_dim))
        padded = (self._q(self.width), self._k(self.width), self._k(self.width))
        widths = (sizes.head_dim, sizes.head_dim, sizes.value_dim)
        # Three moments, one after the other: the call, the reordering, the merge.
        after = max(result + inside, result + restored, kept + merging)
        return self._copied(operands, padded, widths, after, made=(self.scaled, False, False))

    def backward_bytes(self) -> int:
        """The same of the gradient, which is added where it belongs without a merge."""
        sizes, rectangle = self.sizes, self.rectangle
        # dq, dk and dv of the op, of padded columns.
        grads = self._q(self.width) + 2 * self._k(self.width)
        inside = kernel_bytes(rectangle.q_rows.count, rectangle.k_rows.count, self.width, self.dtype.itemsize, True)
        if not self._dout_is_contiguous():
            inside += self._q(self.width)  # the kernel's `grad_out.contiguous()`
        # Inside the call the flipped lse is held; after it the gradients are flipped one at a time.
        if rectangle.reversed:
            inside = max(inside + self._q(1), self._q(sizes.head_dim), self._k(max(sizes.head_dim, sizes.value_dim)))
        # A gradient of lse is one more column of dout and of v.
        value_dim = sizes.value_dim + self.dlse
        dims = (value_dim, sizes.head_dim, sizes.head_dim, value_dim, sizes.value_dim)
        counts = (self._q, self._q, self._k, self._k, self._q)  # dout, q, k, v, out
        operands = tuple(count(dim) for count, dim in zip(counts, dims, strict=True))
        padded = tuple(count(self.width) for count in counts)
        # In the order of `dims`; dout and v are new tensors with the column of lse.
        made = (self.dlse, self.scaled, False, self.dlse, False)
        return self._copied(operands, padded, dims, grads + inside, made)

    def _copied(
        self,
        operands: tuple[int, ...],
        padded: tuple[int, ...],
        widths: tuple[int, ...],
        after: int,
        made: tuple[bool, ...],
    ) -> int:
        """The most at once while operands are converted, then padded, and then with what comes `after`.

        `made`: which operands are new in any case.
        """
        # Converting or reversing copies every operand; else only those that are made anew.
        every = self._converted or self.rectangle.reversed
        first = [nbytes if every or new else 0 for nbytes, new in zip(operands, made, strict=True)]
        narrow = [width < self.width for width in widths]
        padding = sum(nbytes for nbytes, pads in zip(padded, narrow, strict=True) if pads)
        # Padding replaces the copy before it; unpadded copies stay until the call has returned.
        left = sum(nbytes for nbytes, pads in zip(first, narrow, strict=True) if not pads)
        return max(sum(first) + padding, left + padding + after)

    @property
    def _converted(self) -> bool:
        return self.sizes.dtype != self.dtype

    def _dout_is_contiguous(self) -> bool:
        """As (batch, rows, heads, dim); copies of operands are, and padded ones have rows outermost."""
        if self.dlse or self.sizes.value_dim < self.width:
            return self.sizes.batch == 1 or self.rectangle.q_rows.count == 1
        if self._converted or self.rectangle.reversed:
            return True
        rows, heads = self.rectangle.q_rows, self.heads.q_heads
        # A view of rows and heads is contiguous where it leaves out none between two that it has.
        whole_rows = rows.stride == 1 and (self.sizes.batch == 1 or rows.count == self.sizes.rows)
        return whole_rows and (heads.count == self.sizes.heads or self.sizes.batch * rows.count == 1)

    def _q(self, dim: int) -> int:
        """Bytes of `dim` numbers for each query row and head."""
        return math.prod((self.rectangle.q_rows.count, self.sizes.batch, self.heads.q_heads.count, dim)) * (
            self.dtype.itemsize
        )

    def _k(self, dim: int) -> int:
        """Bytes of `dim` numbers for each key row and head."""
        return math.prod((self.rectangle.k_rows.count, self.sizes.batch, self.heads.kv_heads.count, dim)) * (
            self.dtype.itemsize
        )

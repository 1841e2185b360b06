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

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.core.geometry import StridedRange, Tile
from ringattn.engine.base import KV, Accumulating, BackwardInputs, Output, Sizes, Softmax, SoftmaxState, Visit
from ringattn.engine.firsts import Piece, accumulators, as_slice, finish, first_pieces, own_sums_bytes
from ringattn.engine.place import Place, Scaling, operand, put, scaling, times, widened
from ringattn.engine.plain import PlainEngine, PlainWork
from ringattn.engine.rectangles import HeadGroup, Rectangle, head_groups, joined, rectangles
from ringattn.engine.softmax_state import NEG_INF, accumulator_dtype, begin_, by_row, merge_, uninitialized
from ringattn.engine.strips import Strips

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
        softmax.refuse_others(self.name)
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
            if plain.visit.first:
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
        seed: BackwardInputs,
        dq: Output,
        dkv: KV | None,
        work: AtenWork,
        result: KV | None = None,
    ) -> None:
        """Add the tiles' gradients to `dq` and `dkv`, in place, or write the last sums to `result`."""
        # A gradient of lse is one more column of v, which may widen the padded head dimension.
        op, width = self._op_and_width(*_dims(q, kv), extra_columns=0 if seed.dlse is None else 1)
        begins = _flags(work.begins, work)
        if op is None:
            for (rectangle, heads), first in zip(work.rectangles, begins, strict=True):
                if first:
                    assert dq.carried is not None
                    Place(rectangle, heads, q.dtype).view(dq.carried).zero_()
            self._plain.attend_grad(q, kv, seed, dq, dkv, work.plain, result)
            return
        if _at_once(work):
            # What a rectangle makes is final, so it needs no accumulator.
            sums = result
        else:
            visit = work.plain.visit if work.sets is None else Visit()
            sums = accumulators(dkv, result, work.plain.keys, visit)
        assert sums is not None
        dtype, sets = q.dtype if op.keeps_half else accumulator_dtype(q.dtype), _flags(work.sets, work)
        for (rectangle, heads), *firsts in zip(work.rectangles, begins, sets, strict=True):
            at = Place(rectangle, heads, dtype)
            self._grad_of_rectangle(at, op, width, q, kv, seed, dq, sums, work.scaling, firsts)
        if sums is not result:
            finish(sums, result, work.plain.keys)

    def _grad_of_rectangle(
        self,
        at: Place,
        op: BlockOp,
        width: int,
        q: Tensor,
        kv: KV,
        seed: BackwardInputs,
        dq: Output,
        sums: KV,
        by: Scaling,
        firsts: Sequence[bool],
    ) -> None:
        """As `_attend_rectangle`. `firsts`: on the queries, on the keys."""
        into, rectangle = dq.carried, at.rectangle
        assert into is not None
        # As forward, by the number of keys.
        call = op if rectangle.k_rows.count >= op.min_keys else FLASH
        dout, (k, v) = at.queries(seed.dout), at.keys(kv)
        if seed.dlse is not None:
            # With v' = [v, 1], dout' = [dout, dlse] and out' = [out, 0] the op's ds = p (dout'.v' - dout'.out')
            # is the wanted p (dout.v + dlse - dout.out).
            dout, v = (widened(x, x.shape[-1] + 1, value=1.0) for x in (dout, v))
            dout[..., -1:] = by_row(at.rows(seed.dlse))
        dout, q_part, k, v, out = (
            operand(x, width) for x in (dout, times(at.queries(q), by.of_q), k, v, at.queries(seed.out))
        )
        # The merged lse makes exp(score - lse) the weight among all keys of the row, not only this rectangle's.
        grads = call.backward(dout, q_part, k, v, out, at.rows(seed.lse), rectangle.causal, by.scale)
        # q went in times of_q, so its gradient comes out to be multiplied by it once more (chain rule).
        put(at.view(into), at.restored(grads[0], q.shape[-1]), firsts[0], by.of_q)
        # The sums may begin at a later head than K and V.
        for x, part in zip(at.view_keys(sums), grads[1:], strict=True):
            put(x, at.restored(part, x.shape[-1]), firsts[1])

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

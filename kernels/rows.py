"""Kernels over rows of (rows, batch, heads, dim): copies, delta, the merge of softmax states, eight bits for the wire.

A program processes BLOCK_ROWS rows of a head. Tensors may have any strides with a contiguous last dimension.
Guarantees: deterministic, no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.launch import LaunchCall

BLOCK_ROWS = 32
OF_ROWS = ("dlse_batch", "dlse_head", "delta_batch", "delta_head")  # strides that vary with the number of rows
OF_STATES = ("lse_batch", "lse_head", "part_lse_batch", "part_lse_head")  # the same
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each eight-bit dtype."""
OF_SCALES = ("scales_row", "scales_batch")  # strides that vary with the number of heads


def _launch(kernel: Any, tensors: tuple[Any, ...], rows: int, like: Tensor, strides: tuple[int, ...], warps: int = 4,
            **constants: Any) -> LaunchCall:  # fmt: skip
    """Return the launch of `kernel` over `rows` rows of the batches and heads of `like`."""
    _, batch, heads, dim = like.shape
    meta = {"DIM": dim, "WIDTH": triton.next_power_of_2(dim), **constants, "BLOCK_ROWS": BLOCK_ROWS}
    grid = (triton.cdiv(rows, BLOCK_ROWS) * batch * heads,)
    return LaunchCall(kernel, grid, (*tensors, rows, heads, *strides), {**meta, "num_warps": warps, "num_stages": 1})


def _rows_of(*tensors: Tensor) -> tuple[int, ...]:
    """Return the (row, batch, head) strides of each tensor."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


@triton.jit
def corners(rows, heads, BLOCK_ROWS: tl.constexpr):
    """Return rows, batch and head of this program. Heads vary fastest, because a row's heads are usually adjacent."""
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    # program = head + heads * (block of rows + blocks * batch)
    row = (tl.program_id(0) // heads % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    return row, (tl.program_id(0) // heads // blocks).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)


# --- copies of rows --------------------------------------------------------------------------------------------------


def move_rows_call(
    source: Tensor, into: Tensor, *, gather: Tensor | None = None, scatter: Tensor | None = None, add: bool = False
) -> LaunchCall:
    """Return the launch of into[scatter] = source[gather], or += with `add`. It packs, unpacks, gathers and scatters.

    `source`, `into`: (rows, batch, heads, dim). The dtype is converted; an addition is done in the wider dtype and
    rounded once. `gather`, `scatter`: (count,) int64, contiguous, rows of `source` and of `into`; None for all rows in
    order. `scatter` must not contain a row twice. Rows at a constant stride need no list: slice the tensor
    (`x[start:stop:step]`) and move all rows of the slice.
    """
    count = len(gather) if gather is not None else source.shape[0]
    tensors = source, into, gather, scatter
    return _launch(move_rows, tensors, count, source, _rows_of(source, into), warps=8, ADD=add)


@triton.jit(do_not_specialize=["count", "heads"])
def move_rows(
    source, into, gather, scatter, count, heads,
    source_row, source_batch, source_head, into_row, into_batch, into_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Copy or add BLOCK_ROWS rows of a head; see `move_rows_call`."""
    source_index, batch, head = corners(count, heads, BLOCK_ROWS)
    # Without a list, move the rows in order.
    into_index = source_index
    live = source_index < count
    if scatter is not None:
        into_index = tl.load(scatter + source_index, mask=live, other=0)
    # Read `scatter` with the program's index before `gather` replaces that index.
    if gather is not None:
        source_index = tl.load(gather + source_index, mask=live, other=0)
    column = tl.arange(0, WIDTH)[None, :]
    inside = live[:, None] & (column < DIM)
    value = tl.load(
        source + batch * source_batch + head * source_head + (source_index * source_row)[:, None] + column, mask=inside
    )
    to = into + batch * into_batch + head * into_head + (into_index * into_row)[:, None] + column
    if ADD:
        # The sum has the wider of the two dtypes; the store rounds it.
        value += tl.load(to, mask=inside)
    tl.store(to, value.to(into.dtype.element_ty), mask=inside)


# --- the row sums of a backward pass ---------------------------------------------------------------------------------


def delta_call(dout: Tensor, out: Tensor, dlse: Tensor | None, delta: Tensor) -> LaunchCall:
    """Return the launch that writes delta = sum(dout * out) - dlse, with products and sums in float32.

    `dout`, `out`: (rows, batch, heads, dim). `dlse`, `delta`: (batch, heads, rows) float32, any strides; `dlse` is None
    if lse has no gradient.
    """
    strides = *_rows_of(dout, out), *(delta if dlse is None else dlse).stride(), *delta.stride()
    return _launch(row_sums, (dout, out, dlse, delta), dout.shape[0], dout, strides)


@triton.jit(do_not_specialize=["rows", "heads", *OF_ROWS])
def row_sums(
    dout, out, dlse, delta, rows, heads,
    dout_row, dout_batch, dout_head, out_row, out_batch, out_head, dlse_batch, dlse_head,
    dlse_row, delta_batch, delta_head, delta_row,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Write delta of BLOCK_ROWS rows of a head; see `delta_call`."""
    row, batch, head = corners(rows, heads, BLOCK_ROWS)
    live = row < rows
    column = tl.arange(0, WIDTH)[None, :]
    inside = live[:, None] & (column < DIM)
    of_dout = dout + batch * dout_batch + head * dout_head + (row * dout_row)[:, None] + column
    of_out = out + batch * out_batch + head * out_head + (row * out_row)[:, None] + column
    wide = tl.load(of_dout, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(wide * tl.load(of_out, mask=inside, other=0.0).to(tl.float32), 1)
    if dlse is not None:
        total -= tl.load(dlse + batch * dlse_batch + head * dlse_head + row * dlse_row, mask=live, other=0.0)
    tl.store(delta + batch * delta_batch + head * delta_head + row * delta_row, total, mask=live)


# --- the merge of two softmax states ---------------------------------------------------------------------------------


def merge_call(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> LaunchCall:
    """Return the launch that merges the state `(part_out, part_lse)` over other keys into `(out, lse)`, in place.

    The formula is that of `ringattn/engine/base.py`: with m = logaddexp(lse, part_lse), out becomes
    out * exp(lse - m) + part_out * exp(part_lse - m), and lse becomes m, in natural logarithms. A row without a key in
    either state stays (0, -inf). `out`, `part_out`: (rows, batch, heads, dim) float32. `lse`, `part_lse`:
    (batch, heads, rows) float32, any strides.
    """
    strides = *_rows_of(out), *lse.stride(), *_rows_of(part_out), *part_lse.stride()
    return _launch(merge, (out, lse, part_out, part_lse), out.shape[0], out, strides)


@triton.jit
def share(lse, merged):
    """Return exp(lse - merged), 0 for rows that have seen no key."""
    return tl.where(lse == float("-inf"), 0.0, tl.exp(lse - merged))


@triton.jit(do_not_specialize=["rows", "heads", *OF_STATES])
def merge(
    out, lse, part_out, part_lse, rows, heads,
    out_row, out_batch, out_head, lse_batch, lse_head, lse_row,
    part_row, part_batch, part_head, part_lse_batch, part_lse_head, part_lse_row,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the states of BLOCK_ROWS rows of a head; see `merge_call`."""
    row, batch, head = corners(rows, heads, BLOCK_ROWS)
    live = row < rows
    at_lse = lse + batch * lse_batch + head * lse_head + row * lse_row
    old = tl.load(at_lse, mask=live, other=float("-inf"))
    new = tl.load(
        part_lse + batch * part_lse_batch + head * part_lse_head + row * part_lse_row, mask=live, other=float("-inf")
    )
    top = tl.maximum(old, new)
    # -inf - (-inf) is NaN. A row without a key uses 0 as its maximum, and log(0) then gives -inf again.
    top = tl.where(top == float("-inf"), 0.0, top)
    merged = top + tl.log(tl.exp(old - top) + tl.exp(new - top))
    column = tl.arange(0, WIDTH)[None, :]
    inside = live[:, None] & (column < DIM)
    at_out = out + batch * out_batch + head * out_head + (row * out_row)[:, None] + column
    old_out = tl.load(at_out, mask=inside, other=0.0)
    new_out = tl.load(
        part_out + batch * part_batch + head * part_head + (row * part_row)[:, None] + column, mask=inside, other=0.0
    )
    tl.store(at_out, old_out * share(old, merged)[:, None] + new_out * share(new, merged)[:, None], mask=inside)
    # One warp stores lse of all rows. The others must have loaded it.
    tl.debug_barrier()
    tl.store(at_lse, merged, mask=live)


# --- K and V in eight bits for the wire ------------------------------------------------------------------------------
# Each token and head has a float32 scale: amax / the largest number of the code, where amax is the largest magnitude of
# the token's head. No scale is below 2^-126. int8: values are rounded to the nearest step. fp8: e4m3 (OCP OFP8: 3
# mantissa bits, largest 448, smallest normal 2^-6).
# Guarantees: |x - restored| <= scale / 2 = amax / 254 for int8, and <= |x| * 2^-4 + scale * 2^-10 for fp8 (half a unit
# in the last place of a normal, and of a subnormal value), plus float32 rounding below 2^-13 of the bound. This holds
# for magnitudes up to 3.4e38; the largest float32 may be restored as infinity. A head with a value that is not finite
# is restored as NaN, never as numbers. `ringattn.runtime.records` computes the same bits in plain torch.


def quantize_call(x: Tensor, values: Tensor, scales: Tensor) -> LaunchCall:
    """Return the launch that quantizes x (rows, batch, heads, dim) to `values`, int8 or float8_e4m3fn, and `scales`.

    `scales`: (rows, batch, heads) float32, any strides. Triton has float8_e4m3fn from sm_89 on.
    """
    constants: dict[str, Any] = {"LARGEST": LARGEST[values.dtype], "ROUND": values.dtype == torch.int8}
    return _launch(quantize, (x, values, scales), x.shape[0], x, _rows_of(x, values, scales), **constants)


def restore_call(values: Tensor, scales: Tensor, x: Tensor) -> LaunchCall:
    """Return the launch of the inverse of `quantize_call`: x = values * scales, in the dtype of x."""
    return _launch(restore, (x, values, scales), x.shape[0], x, _rows_of(x, values, scales))


@triton.jit(do_not_specialize=["rows", "heads", *OF_SCALES])
def quantize(
    x, values, scales, rows, heads,
    x_row, x_batch, x_head, values_row, values_batch, values_head, scales_row, scales_batch, scales_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, LARGEST: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Quantize BLOCK_ROWS rows of a head; see `quantize_call`."""
    row, batch, head = corners(rows, heads, BLOCK_ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < DIM)
    source = x + batch * x_batch + head * x_head + (row * x_row)[:, None] + column
    full = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    # At least the smallest normal number, so that the division is defined for zeros and accurate for tiny values.
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(full), 1), LARGEST), 1.1754943508222875e-38)
    # A maximum may drop NaN; the sum of x * 0 is 0 for finite x and NaN for any other.
    scale += tl.sum(full * 0.0, 1)
    steps = tl.div_rn(full, scale[:, None])  # `/` may err in the last place on a GPU
    if ROUND:
        # The cast to int8 truncates.
        steps = tl.floor(steps + 0.5)
    to = values + batch * values_batch + head * values_head + (row * values_row)[:, None] + column
    tl.store(to, steps.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + batch * scales_batch + head * scales_head + row * scales_row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "heads", *OF_SCALES])
def restore(
    x, values, scales, rows, heads,
    x_row, x_batch, x_head, values_row, values_batch, values_head, scales_row, scales_batch, scales_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Restore BLOCK_ROWS quantized rows of a head; see `restore_call`."""
    row, batch, head = corners(rows, heads, BLOCK_ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < DIM)
    source = values + batch * values_batch + head * values_head + (row * values_row)[:, None] + column
    scale = tl.load(scales + batch * scales_batch + head * scales_head + row * scales_row, mask=row < rows, other=0.0)
    # A single product in float32, which the store rounds once.
    full = tl.load(source, mask=inside).to(tl.float32) * scale[:, None]
    to = x + batch * x_batch + head * x_head + (row * x_row)[:, None] + column
    tl.store(to, full.to(x.dtype.element_ty), mask=inside)

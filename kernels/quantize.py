"""K and V in eight bits for the wire, with one float32 scale for each token and head, and back.

int8: scale = amax / 127, values rounded to the nearest step. fp8: e4m3 (OCP OFP8: 3 mantissa bits, largest 448,
smallest normal 2^-6), scale = amax / 448. amax is the largest magnitude of the token's head; no scale is below 2^-126.
Guarantees: |x - restored| <= scale / 2 = amax / 254 for int8; <= |x| * 2^-4 + scale * 2^-10 for fp8 (half a unit in the
last place of a normal, and of a subnormal value); beyond that only float32 rounding, below 2^-13 of the bound. For
magnitudes up to 3.4e38: the largest float32 may come back as infinity. A head that is not finite comes back as NaN,
never as numbers. The same bits as `ringattn.runtime.records` computes in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.launch_call import LaunchCall

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
BLOCK_ROWS = 32
VARIES = ("rows", "heads", "scales_row", "scales_batch")  # counts of rows, and strides that are so many heads


def quantize_call(x: Tensor, values: Tensor, scales: Tensor) -> LaunchCall:
    """Quantize x (rows, batch, heads, dim) into `values`, alike in int8 or float8_e4m3fn, and `scales`.

    `scales`: (rows, batch, heads) float32. Strides are free but the last of `x` and `values`, which is 1. Triton has
    float8_e4m3fn from sm_89 on.
    """
    meta = {"LARGEST": LARGEST[values.dtype], "ROUND": values.dtype == torch.int8}
    return _call(quantize, x, values, scales, meta)


def restore_call(values: Tensor, scales: Tensor, x: Tensor) -> LaunchCall:
    """The inverse of `quantize_call`: x gets values * scales, in its own dtype."""
    return _call(restore, x, values, scales, {})


def _call(kernel: object, x: Tensor, values: Tensor, scales: Tensor, meta: dict[str, float]) -> LaunchCall:
    rows, batch, heads, dim = x.shape
    args = (x, values, scales, rows, heads, *x.stride()[:3], *values.stride()[:3], *scales.stride())
    sizes = {"DIM": dim, "WIDTH": triton.next_power_of_2(dim), "BLOCK_ROWS": BLOCK_ROWS}
    grid = (triton.cdiv(rows, BLOCK_ROWS) * batch * heads,)
    return LaunchCall(kernel, grid, args, {**sizes, **meta, "num_warps": 4, "num_stages": 1})


@triton.jit
def corners(rows, heads, BLOCK_ROWS: tl.constexpr):
    """Row, batch and head of this program; heads vary fastest."""
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    # program = head + heads * (block of rows + blocks * batch): neighbouring programs read neighbouring heads of a row.
    row = (tl.program_id(0) // heads % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    return row, (tl.program_id(0) // heads // blocks).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)


@triton.jit(do_not_specialize=VARIES)
def quantize(
    x, values, scales, rows, heads,
    x_row, x_batch, x_head, values_row, values_batch, values_head, scales_row, scales_batch, scales_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, LARGEST: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head."""
    row, batch, head = corners(rows, heads, BLOCK_ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < DIM)
    source = x + batch * x_batch + head * x_head + (row * x_row)[:, None] + column
    full = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    # Not below the smallest normal number, so that the division is defined for zeros and accurate for tiny values.
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


@triton.jit(do_not_specialize=VARIES)
def restore(
    x, values, scales, rows, heads,
    x_row, x_batch, x_head, values_row, values_batch, values_head, scales_row, scales_batch, scales_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head."""
    row, batch, head = corners(rows, heads, BLOCK_ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < DIM)
    source = values + batch * values_batch + head * values_head + (row * values_row)[:, None] + column
    scale = tl.load(scales + batch * scales_batch + head * scales_head + row * scales_row, mask=row < rows, other=0.0)
    # One product in float32, rounded once by the store.
    full = tl.load(source, mask=inside).to(tl.float32) * scale[:, None]
    to = x + batch * x_batch + head * x_head + (row * x_row)[:, None] + column
    tl.store(to, full.to(x.dtype.element_ty), mask=inside)

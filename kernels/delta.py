"""The row sums that a backward pass starts from: delta = sum of dout * out over a head, less the gradient of lse.

Guarantees: products and sums in float32, one pass over what is read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.launch_call import LaunchCall
from ringattn.kernels.rows import corners

BLOCK_ROWS = 32
OF_ROWS = ("dlse_batch", "dlse_head", "delta_batch", "delta_head")  # strides that are so many rows


def delta_call(dout: Tensor, out: Tensor, dlse: Tensor | None, delta: Tensor) -> LaunchCall:
    """Write `delta`.

    `dout`, `out`: (rows, batch, heads, dim), any strides but the last, which is 1. `dlse`, `delta`: (batch, heads,
    rows) float32, any strides; `dlse` None where lse has no gradient.
    """
    rows, batch, heads, dim = dout.shape
    strides = delta.stride() if dlse is None else dlse.stride()
    args = dout, out, dlse, delta, rows, heads, *dout.stride()[:3], *out.stride()[:3], *strides, *delta.stride()
    meta = {"DIM": dim, "WIDTH": triton.next_power_of_2(dim), "BLOCK_ROWS": BLOCK_ROWS, "num_warps": 4, "num_stages": 1}
    return LaunchCall(row_sums, (triton.cdiv(rows, BLOCK_ROWS) * batch * heads,), args, meta)


@triton.jit(do_not_specialize=["rows", "heads", *OF_ROWS])
def row_sums(
    dout, out, dlse, delta, rows, heads,
    dout_row, dout_batch, dout_head, out_row, out_batch, out_head, dlse_batch, dlse_head,
    dlse_row, delta_batch, delta_head, delta_row,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head."""
    row, batch, head = corners(rows, heads, BLOCK_ROWS)
    held = row < rows
    column = tl.arange(0, WIDTH)[None, :]
    inside = held[:, None] & (column < DIM)
    of_dout = dout + batch * dout_batch + head * dout_head + (row * dout_row)[:, None] + column
    of_out = out + batch * out_batch + head * out_head + (row * out_row)[:, None] + column
    wide = tl.load(of_dout, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(wide * tl.load(of_out, mask=inside, other=0.0).to(tl.float32), 1)
    if dlse is not None:
        total -= tl.load(dlse + batch * dlse_batch + head * dlse_head + row * dlse_row, mask=held, other=0.0)
    tl.store(delta + batch * delta_batch + head * delta_head + row * delta_row, total, mask=held)

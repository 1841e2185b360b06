"""Merges two softmax states over different keys, in place.

The algebra of `ringattn/engine/softmax_state.py`: with m = logaddexp(lse, part_lse), out becomes
out * exp(lse - m) + part_out * exp(part_lse - m), and lse becomes m.
Guarantees: float32 in and out, natural logarithms; a row that neither has seen stays (0, -inf).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.launch_call import LaunchCall
from ringattn.kernels.rows import corners

BLOCK_ROWS = 32
OF_ROWS = ("lse_batch", "lse_head", "part_lse_batch", "part_lse_head")  # strides that are so many rows


def merge_call(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> LaunchCall:
    """The launch that merges the softmax state `(part_out, part_lse)` into `(out, lse)`, in place.

    `out`, `part_out`: (rows, batch, heads, dim) float32, any strides but the last, which is 1. `lse`, `part_lse`:
    (batch, heads, rows) float32, any strides.
    """
    rows, batch, heads, dim = out.shape
    args = (
        out, lse, part_out, part_lse, rows, heads,
        *out.stride()[:3], *lse.stride(), *part_out.stride()[:3], *part_lse.stride(),
    )  # fmt: skip
    meta = {"DIM": dim, "WIDTH": triton.next_power_of_2(dim), "BLOCK_ROWS": BLOCK_ROWS, "num_warps": 4, "num_stages": 1}
    return LaunchCall(merge, (triton.cdiv(rows, BLOCK_ROWS) * batch * heads,), args, meta)


@triton.jit
def share(lse, merged):
    """exp(lse - merged), 0 where nothing was seen."""
    return tl.where(lse == float("-inf"), 0.0, tl.exp(lse - merged))


@triton.jit(do_not_specialize=["rows", "heads", *OF_ROWS])
def merge(
    out, lse, part_out, part_lse, rows, heads,
    out_row, out_batch, out_head, lse_batch, lse_head, lse_row,
    part_row, part_batch, part_head, part_lse_batch, part_lse_head, part_lse_row,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head."""
    row, batch, head = corners(rows, heads, BLOCK_ROWS)
    held = row < rows
    at_lse = lse + batch * lse_batch + head * lse_head + row * lse_row
    old = tl.load(at_lse, mask=held, other=float("-inf"))
    new = tl.load(
        part_lse + batch * part_lse_batch + head * part_lse_head + row * part_lse_row, mask=held, other=float("-inf")
    )
    top = tl.maximum(old, new)
    # -inf minus -inf is not a number; a row without a key takes 0 as its maximum and log(0) gives its -inf back.
    top = tl.where(top == float("-inf"), 0.0, top)
    merged = top + tl.log(tl.exp(old - top) + tl.exp(new - top))
    column = tl.arange(0, WIDTH)[None, :]
    inside = held[:, None] & (column < DIM)
    at_out = out + batch * out_batch + head * out_head + (row * out_row)[:, None] + column
    mine = tl.load(at_out, mask=inside, other=0.0)
    theirs = tl.load(
        part_out + batch * part_batch + head * part_head + (row * part_row)[:, None] + column, mask=inside, other=0.0
    )
    tl.store(at_out, mine * share(old, merged)[:, None] + theirs * share(new, merged)[:, None], mask=inside)
    tl.store(at_lse, merged, mask=held)

"""Moves rows of K, V or gradients between strided tensors: pack, unpack, gather, scatter, scatter with add.

Rows at a constant stride need no list: slice the tensor (`x[start:stop:step]`) and move all rows of the slice.
Guarantees: the dtype is converted on the way; an addition is done in the wider dtype and rounded once; deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.launch_call import LaunchCall

BLOCK_ROWS = 32


def move_rows_call(
    source: Tensor, into: Tensor, *, gather: Tensor | None = None, scatter: Tensor | None = None, add: bool = False
) -> LaunchCall:
    """into[scatter] = source[gather], or += with `add`.

    `source`, `into`: (rows, batch, heads, dim), any strides but the last, which is 1. `gather`, `scatter`: (count,)
    int64, contiguous, rows of `source` and of `into`; None for all rows in order. No row may come twice in `scatter`.
    """
    count = len(gather) if gather is not None else source.shape[0]
    _, batch, heads, dim = source.shape
    args = (source, into, gather, scatter, count, heads, *source.stride()[:3], *into.stride()[:3])
    meta = {"DIM": dim, "WIDTH": triton.next_power_of_2(dim), "ADD": add, "BLOCK_ROWS": BLOCK_ROWS}
    grid = (triton.cdiv(count, BLOCK_ROWS) * batch * heads,)
    return LaunchCall(move_rows, grid, args, {**meta, "num_warps": 8, "num_stages": 1})


@triton.jit
def corners(rows, heads, BLOCK_ROWS: tl.constexpr):
    """Rows, batch and head of this program. Heads vary fastest, because a row's heads usually lie side by side."""
    blocks = tl.cdiv(rows, BLOCK_ROWS)
    # program = head + heads * (block of rows + blocks * batch)
    row = (tl.program_id(0) // heads % blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    return row, (tl.program_id(0) // heads // blocks).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)


@triton.jit(do_not_specialize=["count", "heads"])
def move_rows(
    source, into, gather, scatter, count, heads,
    source_row, source_batch, source_head, into_row, into_batch, into_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head."""
    here, batch, head = corners(count, heads, BLOCK_ROWS)
    # Without a list, rows are moved in order.
    there = here
    held = here < count
    if scatter is not None:
        there = tl.load(scatter + here, mask=held, other=0)
    # `scatter` is read with the program's own index, so before `gather` replaces it.
    if gather is not None:
        here = tl.load(gather + here, mask=held, other=0)
    column = tl.arange(0, WIDTH)[None, :]
    inside = held[:, None] & (column < DIM)
    value = tl.load(
        source + batch * source_batch + head * source_head + (here * source_row)[:, None] + column, mask=inside
    )
    to = into + batch * into_batch + head * into_head + (there * into_row)[:, None] + column
    if ADD:
        # Added in the wider of the two dtypes, rounded by the store.
        value += tl.load(to, mask=inside)
    tl.store(to, value.to(into.dtype.element_ty), mask=inside)

"""What the attention kernels share: finding a block's work in the tables, bringing rows in, masks and logits.

Rows of an entry come by loads of each thread or by a tensor descriptor (TMA) made in the kernel, with the same values.
Guarantees: a read row is 0 beyond its head dimension and beyond the entry's rows; offsets in 64 bits.
"""

from __future__ import annotations

from functools import cache
from math import e, log2
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.launch import FIRST, LAST, BlockColumn, Config, EntryColumn, Table

# Columns of blocks and entries. The first three are the same: first row, row stride, rows.
_FIRST_ROW, _ROW_STRIDE, _ROWS = map(tl.constexpr, range(3))
_FIRST_HEAD, _HEADS = tl.constexpr(BlockColumn.FIRST_HEAD), tl.constexpr(BlockColumn.HEADS)
_FIRST_ENTRY, _END_ENTRY = tl.constexpr(BlockColumn.FIRST_ENTRY), tl.constexpr(BlockColumn.END_ENTRY)
_FLAGS, BLOCK_COLUMNS = tl.constexpr(BlockColumn.FLAGS), tl.constexpr(BlockColumn.COUNT)
_OWN_STEP, _OTHER_STEP, _LO, _HI = map(tl.constexpr, range(EntryColumn.OWN_STEP, EntryColumn.HI + 1))
_FIRST_VISIBLE, _END_VISIBLE = tl.constexpr(EntryColumn.FIRST_VISIBLE), tl.constexpr(EntryColumn.END_VISIBLE)
_FIRST_FULL, _END_FULL = tl.constexpr(EntryColumn.FIRST_FULL), tl.constexpr(EntryColumn.END_FULL)
_FIRST_Q_HEAD, _Q_HEADS = tl.constexpr(EntryColumn.FIRST_Q_HEAD), tl.constexpr(EntryColumn.Q_HEADS)
ENTRY_COLUMNS = tl.constexpr(EntryColumn.COUNT)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The least finite float32: as a shift of exponents it leaves -inf where it is, and every finite peak."""
_FIRST, _LAST = tl.constexpr(FIRST), tl.constexpr(LAST)
_BEYOND = tl.constexpr((1 << 31) - 1)


@triton.jit
def load_rows(base, offsets, live, DIM: tl.constexpr, PADDED: tl.constexpr):
    """(rows, PADDED) values of rows at int64 `offsets` from `base`: 0 beyond DIM, and where not `live`."""
    dims = tl.arange(0, PADDED)
    return tl.load(base + offsets[:, None] + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def rows_of(base, stride, run, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, DESCRIBED: tl.constexpr):
    """What `read_block` reads a run of rows from: a descriptor, or the first row and the distance of two rows."""
    # A range (first row, row stride, rows) of a tensor whose rows are `stride` elements apart.
    # 64-bit from here: row times stride exceeds int32 for long sequences.
    first = base + run[0].to(tl.int64) * stride
    step = run[1].to(tl.int64) * stride
    # The descriptor begins at the range's first row, so a block is found by its number alone.
    if DESCRIBED:
        source = tl.make_tensor_descriptor(first, [run[2], DIM], [step, 1], [ROWS, PADDED])
    else:
        source = first, step
    return source


@triton.jit
def read_block(
    source, at, count, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, DESCRIBED: tl.constexpr
):  # fmt: skip
    """Block `at` of a run of `count` rows: (ROWS, PADDED)."""
    if DESCRIBED:
        # The descriptor knows count and DIM: what lies outside reads as 0.
        rows = source.load([at * ROWS, 0])
    else:
        # A ragged last block: rows from `count` on are other tokens, and must read as 0.
        index = at * ROWS + tl.arange(0, ROWS)
        rows = load_rows(source[0], index.to(tl.int64) * source[1], index < count, DIM, PADDED)
    return rows


@triton.jit
def store_rows(base, offsets, live, values, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Store `values` (rows, PADDED), cast, to the `live` rows at `offsets` from `base`."""
    dims = tl.arange(0, PADDED)
    # PADDED is a power of two; the columns from DIM on exist only in registers.
    inside = live[:, None] & (dims < DIM)[None, :]
    tl.store(base + offsets[:, None] + dims[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def logits(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Base-2 logits of q . k, and where SOFTCAP the capped tanh in [-1, 1]; scaled as `logit_scales` says."""
    # With SOFTCAP `scale` is 2 scale / softcap * log2 e, so that s is the exponent of e^2x in base 2.
    s, capped = products * scale, products
    if SOFTCAP:
        # tanh x = 1 - 2 / (1 + e^2x), right at both infinities.
        capped = 1.0 - 2.0 / (1.0 + tl.exp2(s))
        s = softcap * capped
    return s, capped


@triton.jit
def item_of(blocks, item, block_count, slots, batches, section):
    """(block, batch, head, idle) of an item; a block with fewer heads than `slots` has idle items at its last head.

    The heads, those of all batches counted through, are worked on in sections of `section`, of which the first has what
    is left over. A section's blocks follow each other as in the table, the longest first, and each block comes for all
    heads of the section:

        3 blocks, 5 heads, section 2    item    0 1 2 | 3 4 5 6 7 8 | 9 . . . . .
                                        block   0 1 2 | 0 0 1 1 2 2 | 0 0 1 1 2 2
                                        head    0 0 0 | 1 2 1 2 1 2 | 3 4 3 4 3 4

    So what the heads of a section read stays in the L2 cache, and a launch ends with short blocks of many heads.
    """
    left_over = slots * batches % section
    # Counted from the end of the first section, and negative in it, if it is the narrower one.
    later = item - block_count * left_over
    before = tl.where(later < 0, 0, left_over + later // (block_count * section) * section)
    width = tl.where(later < 0, left_over, section)
    within = item - block_count * before
    block = blocks + within // width * BLOCK_COLUMNS
    place = before + within % width
    slot, heads = place % slots, tl.load(block + _HEADS)
    # The grid has `slots` items for every block; those past the block's heads do nothing.
    head = tl.load(block + _FIRST_HEAD) + tl.minimum(slot, heads - 1)
    return block, (place // slots).to(tl.int64), head.to(tl.int64), slot >= heads


@triton.jit
def run_of(block):
    """The block's own run of rows: (first row, row stride, rows).

    Volatile, so that asking again after a long loop computes anew: the addresses of a whole block are tens of
    registers of each thread, which the compiler else keeps through the loop.
    """
    first = tl.load(block + _FIRST_ROW, volatile=True)
    return first, tl.load(block + _ROW_STRIDE, volatile=True), tl.load(block + _ROWS, volatile=True)


@triton.jit
def rows_in(block, idle, ROWS: tl.constexpr):
    """(int64 rows of the block, which of them live); none does where `idle`."""
    run = run_of(block)
    # An idle item has no live row, so nothing is loaded or stored for it.
    at = tl.arange(0, ROWS)
    return (run[0] + at * run[1]).to(tl.int64), at < tl.where(idle, 0, run[2])


@triton.jit
def entries_of(block):
    """(first entry, one past the last one)."""
    return tl.load(block + _FIRST_ENTRY), tl.load(block + _END_ENTRY)


@triton.jit
def ends_of(block):
    """Whether the block is the first of its rows in the pass, and whether it is the last."""
    flags = tl.load(block + _FLAGS)
    return (flags & _FIRST) != 0, (flags & _LAST) != 0


@triton.jit
def rows_and_band(entry):
    """Of an entry: (first row, row stride, rows), and (own step, other step, lo, hi)."""
    rows = tl.load(entry + _FIRST_ROW), tl.load(entry + _ROW_STRIDE), tl.load(entry + _ROWS)
    steps = tl.load(entry + _OWN_STEP), tl.load(entry + _OTHER_STEP)
    return rows, (steps[0], steps[1], tl.load(entry + _LO), tl.load(entry + _HI))


@triton.jit
def visits(entry):
    """Of an entry's blocks of rows: the first visible and full ones, one past the last full and visible ones."""
    # start <= full <= full_end <= end, in blocks of the entry:  start | edge | full .. full_end | edge | end
    start, full = tl.load(entry + _FIRST_VISIBLE), tl.load(entry + _FIRST_FULL)
    return start, full, tl.load(entry + _END_FULL), tl.load(entry + _END_VISIBLE)


@triton.jit
def query_heads(entry):
    """The first query head of an entry of queries, beyond own head * group, and how many there are."""
    return tl.load(entry + _FIRST_Q_HEAD), tl.load(entry + _Q_HEADS)


@triton.jit
def banded(own, other, count, band):
    """The pairs, (own rows, other rows), that the band allows among the `count` rows of an entry."""
    # By one comparison a pair, of unsigned numbers, among which those below 0 are the greatest: lo <= distance <= hi is
    # 0 <= distance - lo <= hi - lo. The table keeps rows and banded distances below 2^30, so nothing leaves 32 bits.
    lowest = tl.where(other < count, other * band[1] + band[2], _BEYOND)
    above = own[:, None] * band[0] - lowest[None, :]
    return above.to(tl.uint32, bitcast=True) <= (band[3] - band[2]).to(tl.uint32, bitcast=True)


SMALLEST = torch.finfo(torch.float32).tiny


def keeps_order(factor: float) -> bool:
    """Whether what is multiplied by `factor` keeps its order, and -inf: a positive one, in float32 with tiny ones 0."""
    return factor >= SMALLEST


def logit_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """What `logits` multiplies by: (of the products, of the capped tanh), both with the change to base 2."""
    if softcap is None:
        return scale * log2(e), 0.0
    # tanh(x) is found from e^2x, which is where the 2 is from; both factors change to base 2.
    return 2 * scale / softcap * log2(e), softcap * log2(e)


def grid_of(table: Table, batches: int, programs: int | None) -> tuple[int]:
    """One program for each block, head and batch, or `programs` if these are fewer; none for an empty table."""
    # A program takes items in steps of the grid, so any number of programs covers them.
    items = table.blocks.shape[0] * table.slots * batches
    return (items if programs is None else min(items, programs),)


def section_for(table: Table, *read: Tensor, reads: int = 1, sharing: int = 1) -> int:
    """The `section` of a launch (see `item_of`).

    `read`: what it reads block by block, (rows, batch, heads, dim): a head of the table `reads` heads of these, and
    `sharing` heads of the table that follow each other the same.
    """
    of_a_head = reads * sum(x.shape[0] * x.shape[3] * x.itemsize for x in read)
    heads, gpu = table.slots * read[0].shape[1], gpu_of(read[0].device)
    return section_of(heads, table.blocks.shape[0], of_a_head, gpu, sharing)


class Gpu(NamedTuple):
    """Bytes of the L2 cache, and multiprocessors."""

    l2: int
    multiprocessors: int


def section_of(heads: int, blocks: int, head_bytes: int, gpu: Gpu, sharing: int = 1) -> int:
    """How many of `heads` heads, with so many blocks each, are worked on at once: those that fit two thirds of L2.

    The rest of L2 is for what is read once and written. Two items a multiprocessor in any case: a section of fewer
    would leave some idle at the end, and several sections would be worked on at once.
    """
    fitting = gpu.l2 * 2 // 3 // max(head_bytes, 1)
    filling = -(-2 * gpu.multiprocessors // (max(blocks, 1) * sharing))
    return max(1, min(heads, max(1, fitting, filling) * sharing))


H100 = Gpu(50 << 20, 132)


@cache
def gpu_of(device: torch.device) -> Gpu:
    """An H100 where there is no GPU."""
    if device.type != "cuda":
        return H100
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.L2_cache_size, properties.multi_processor_count)


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    """(row, batch, head) strides of each."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def state_beside(state: Tensor | None, result: Tensor | None, stand_in: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The state, or `stand_in` of its dtype where no block reads or writes it, and the strides of state and result.

    Raises ValueError where both are None: then there is nowhere to write.
    """
    if state is None and result is None:
        raise ValueError("a launch needs the state or, where it begins and ends the pass, the result; pass one")
    # Where one of the two is missing the other's strides stand in; they are not read.
    of = [x for x in (state, result) if x is not None]
    return stand_in if state is None else state, strides_of(of[0], of[-1])


def describable(*tensors: Tensor) -> bool:
    """Whether descriptors can read these tensors (rows, batch, heads, dim): half precision, 16-byte borders.

    The rule is TMA's: bases and all strides but the last, which is 1, are multiples of 16 bytes (CUDA driver API,
    `cuTensorMapEncodeTiled`); rows at a stride of 0, all in one place, have no such border, and what is seen by several
    heads at a stride of 0 is left to plain loads.
    """
    return all(
        x.dtype in (torch.float16, torch.bfloat16)
        and x.data_ptr() % 16 == 0
        and not any(stride * x.itemsize % 16 for stride in x.stride()[:3])
        and x.stride(0) > 0
        and (x.stride(2) > 0 or x.shape[2] == 1)
        for x in tensors
    )


def compiled_with(config: Config) -> dict[str, int]:
    """The keywords of a launch that are the compiler's own."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}

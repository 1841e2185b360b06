"""Shared parts of the attention kernels: reading the tables, loading rows, masks and logits.

Rows of an entry are loaded by each thread or through a tensor descriptor (TMA) that the kernel makes; the values are
the same. Guarantees: a loaded row is 0 beyond its head dimension and beyond the entry's rows; offsets have 64 bits.
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
"""The smallest finite float32. Used in place of a peak of -inf, it keeps exponents free of -inf - (-inf)."""
_FIRST, _LAST = tl.constexpr(FIRST), tl.constexpr(LAST)
_BEYOND = tl.constexpr((1 << 31) - 1)


@triton.jit
def load_rows(base, offsets, live, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load (rows, PADDED) values of rows at int64 `offsets` from `base`: 0 beyond DIM and for rows not `live`."""
    dims = tl.arange(0, PADDED)
    return tl.load(base + offsets[:, None] + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def rows_of(base, stride, run, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, DESCRIBED: tl.constexpr):
    """Return the source of a run of rows for `read_block`: a descriptor, or the first row and the distance of rows.

    `run`: (first row, row stride, rows), in a tensor whose rows are `stride` elements apart.
    """
    # Use 64 bits from here on: row times stride exceeds int32 for long sequences.
    first = base + run[0].to(tl.int64) * stride
    step = run[1].to(tl.int64) * stride
    # The descriptor starts at the first row of the run, so the block's index is enough to load it.
    if DESCRIBED:
        source = tl.make_tensor_descriptor(first, [run[2], DIM], [step, 1], [ROWS, PADDED])
    else:
        source = first, step
    return source


@triton.jit
def read_block(
    source, index, count, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, DESCRIBED: tl.constexpr
):  # fmt: skip
    """Load block `index` of a run of `count` rows: (ROWS, PADDED)."""
    if DESCRIBED:
        # The descriptor includes count and DIM: elements outside are read as 0.
        rows = source.load([index * ROWS, 0])
    else:
        # In an incomplete last block, rows from `count` on are other tokens and must be read as 0.
        row = index * ROWS + tl.arange(0, ROWS)
        rows = load_rows(source[0], row.to(tl.int64) * source[1], row < count, DIM, PADDED)
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
    """Return base-2 logits of q . k and, with SOFTCAP, the tanh in [-1, 1]. The scales are those of `logit_scales`."""
    # With SOFTCAP `scale` is 2 scale / softcap * log2 e, so that s is the exponent of e^2x in base 2.
    s, capped = products * scale, products
    if SOFTCAP:
        # tanh x = 1 - 2 / (1 + e^2x), which is correct at both infinities.
        capped = 1.0 - 2.0 / (1.0 + tl.exp2(s))
        s = softcap * capped
    return s, capped


@triton.jit
def through_cap(p, capped, SOFTCAP: tl.constexpr):
    """Return `p`, with SOFTCAP multiplied by the derivative of the tanh; both as `logits` has them."""
    return p * (1.0 - capped * capped) if SOFTCAP else p


@triton.jit
def item_of(blocks, item, block_count, slots, batches, section):
    """Return (block, batch, head, idle) of an item. A block with fewer heads than `slots` has idle items.

    An idle item has the block's last head. The heads, numbered over all batches, are processed in sections of `section`
    heads; the first section has the remainder. A section goes through the blocks in the order of the table, the longest
    first, and through all its heads for each block:

        3 blocks, 5 heads, section 2    item    0 1 2 | 3 4 5 6 7 8 | 9 . . . . .
                                        block   0 1 2 | 0 0 1 1 2 2 | 0 0 1 1 2 2
                                        head    0 0 0 | 1 2 1 2 1 2 | 3 4 3 4 3 4

    So the data that the heads of a section read stays in the L2 cache, and a launch ends with short blocks of many
    heads.
    """
    left_over = slots * batches % section
    # Items counted from the end of the narrower first section, so items in that section are negative.
    later = item - block_count * left_over
    before = tl.where(later < 0, 0, left_over + later // (block_count * section) * section)
    width = tl.where(later < 0, left_over, section)
    within = item - block_count * before
    block = blocks + within // width * BLOCK_COLUMNS
    batch_slot = before + within % width
    slot, heads = batch_slot % slots, tl.load(block + _HEADS)
    # The grid has `slots` items for every block; items past the block's heads do nothing.
    head = tl.load(block + _FIRST_HEAD) + tl.minimum(slot, heads - 1)
    return block, (batch_slot // slots).to(tl.int64), head.to(tl.int64), slot >= heads


@triton.jit
def run_of(block):
    """Load the block's own run of rows: (first row, row stride, rows).

    The loads are volatile, so that a second call after a long loop loads again. Otherwise the compiler keeps the
    addresses of a whole block, tens of registers of each thread, through the loop.
    """
    first = tl.load(block + _FIRST_ROW, volatile=True)
    return first, tl.load(block + _ROW_STRIDE, volatile=True), tl.load(block + _ROWS, volatile=True)


@triton.jit
def rows_in(block, idle, ROWS: tl.constexpr):
    """Return the block's rows as int64 and a mask of the live rows, which is all false for an `idle` item."""
    run = run_of(block)
    # An idle item has no live row, so nothing is loaded or stored for it.
    row_index = tl.arange(0, ROWS)
    return (run[0] + row_index * run[1]).to(tl.int64), row_index < tl.where(idle, 0, run[2])


@triton.jit
def entries_of(block):
    """Load the range of a block's entries: (first, one past the last)."""
    return tl.load(block + _FIRST_ENTRY), tl.load(block + _END_ENTRY)


@triton.jit
def ends_of(block):
    """Return whether the block is the first of the pass on its rows, and whether it is the last."""
    flags = tl.load(block + _FLAGS)
    return (flags & _FIRST) != 0, (flags & _LAST) != 0


@triton.jit
def rows_and_band(entry):
    """Load an entry's run (first row, row stride, rows) and its band (own step, other step, lo, hi)."""
    rows = tl.load(entry + _FIRST_ROW), tl.load(entry + _ROW_STRIDE), tl.load(entry + _ROWS)
    steps = tl.load(entry + _OWN_STEP), tl.load(entry + _OTHER_STEP)
    return rows, (steps[0], steps[1], tl.load(entry + _LO), tl.load(entry + _HI))


@triton.jit
def visits(entry):
    """Load (start, full, full_end, end): the ranges of visible and of full blocks of an entry's rows."""
    # start <= full <= full_end <= end, in blocks of the entry:  start | edge | full .. full_end | edge | end
    start, full = tl.load(entry + _FIRST_VISIBLE), tl.load(entry + _FIRST_FULL)
    return start, full, tl.load(entry + _END_FULL), tl.load(entry + _END_VISIBLE)


@triton.jit
def query_heads(entry):
    """Load an entry's first query head, counted from own head * group, and the number of its query heads."""
    return tl.load(entry + _FIRST_Q_HEAD), tl.load(entry + _Q_HEADS)


@triton.jit
def banded(own_rows, other_rows, count, band):
    """Return a mask (own rows, other rows) of the pairs that the band allows among the `count` rows of an entry."""
    # One unsigned comparison per pair: lo <= distance <= hi is 0 <= distance - lo <= hi - lo, and a negative number is
    # a large unsigned one. The table keeps rows and banded distances below 2^30, so nothing exceeds 32 bits.
    lowest = tl.where(other_rows < count, other_rows * band[1] + band[2], _BEYOND)
    above = own_rows[:, None] * band[0] - lowest[None, :]
    return above.to(tl.uint32, bitcast=True) <= (band[3] - band[2]).to(tl.uint32, bitcast=True)


SMALLEST = torch.finfo(torch.float32).tiny


def keeps_order(factor: float) -> bool:
    """Return whether multiplication by `factor` preserves order and -inf in float32 with subnormal numbers as 0."""
    return factor >= SMALLEST


def logit_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factors of `logits`, for the products and for the tanh; both include the change to base 2."""
    if softcap is None:
        return scale * log2(e), 0.0
    # The factor 2 is there because tanh(x) is computed from e^2x.
    return 2 * scale / softcap * log2(e), softcap * log2(e)


def grid_of(table: Table, batches: int, programs: int | None) -> tuple[int]:
    """Return a grid of a program per block, head and batch, limited to `programs`; 0 for an empty table."""
    # A program takes items in steps of the grid size, so any number of programs covers all items.
    items = table.blocks.shape[0] * table.slots * batches
    return (items if programs is None else min(items, programs),)


def section_for(table: Table, *read: Tensor, reads: int = 1, sharing: int = 1) -> int:
    """Return the `section` of a launch (see `item_of`).

    `read`: the tensors (rows, batch, heads, dim) that the launch reads block by block. A head of the table reads
    `reads` of their heads, and `sharing` consecutive heads of the table read the same.
    """
    of_a_head = reads * sum(x.shape[0] * x.shape[3] * x.itemsize for x in read)
    heads, gpu = table.slots * read[0].shape[1], gpu_of(read[0].device)
    return section_of(heads, table.blocks.shape[0], of_a_head, gpu, sharing)


class Gpu(NamedTuple):
    """The bytes of a GPU's L2 cache, and the number of its multiprocessors."""

    l2: int
    multiprocessors: int


def section_of(heads: int, blocks: int, head_bytes: int, gpu: Gpu, sharing: int = 1) -> int:
    """Return the number of heads in a section, at most `heads`: their data fits into two thirds of the L2 cache.

    The rest of L2 is for data that is read once or written. `blocks`: the number of blocks of each head. A section has
    at least two items per multiprocessor, even if its data does not fit. With fewer, some multiprocessors would be idle
    at the end of a section, and several sections would run at once.
    """
    fitting = gpu.l2 * 2 // 3 // max(head_bytes, 1)
    filling = -(-2 * gpu.multiprocessors // (max(blocks, 1) * sharing))
    return max(1, min(heads, max(1, fitting, filling) * sharing))


H100 = Gpu(50 << 20, 132)


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the properties of the device, or those of an H100 if it is not a GPU."""
    if device.type != "cuda":
        return H100
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.L2_cache_size, properties.multi_processor_count)


def strides_of(*tensors: Tensor) -> tuple[int, ...]:
    """Return the (row, batch, head) strides of each tensor."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def state_beside(state: Tensor | None, result: Tensor | None, stand_in: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the state and the strides of state and result.

    If there is no state, no block reads or writes it, and `stand_in`, a tensor of its dtype, is returned.
    Raises ValueError if both are None, because there is nowhere to write.
    """
    if state is None and result is None:
        raise ValueError("a launch needs the state or, if it is the whole pass, the result; pass one of them")
    # If one of the two is missing, use the other's strides; the kernel does not read them.
    of = [x for x in (state, result) if x is not None]
    return stand_in if state is None else state, strides_of(of[0], of[-1])


def describable(*tensors: Tensor) -> bool:
    """Return whether descriptors can read these tensors (rows, batch, heads, dim): half precision, 16-byte alignment.

    TMA requires base addresses and all strides except the last, which is 1, to be multiples of 16 bytes (CUDA driver
    API, `cuTensorMapEncodeTiled`). A row stride of 0 is not supported, and tensors that several heads share at a stride
    of 0 are left to plain loads.
    """
    return all(x.dtype in (torch.float16, torch.bfloat16) and aligned(x) for x in tensors)


def aligned(x: Tensor) -> bool:
    """Return whether TMA supports the base address and the strides of a tensor (rows, batch, heads, dim)."""
    return (
        x.data_ptr() % 16 == 0
        and not any(stride * x.itemsize % 16 for stride in x.stride()[:3])
        and x.stride(0) > 0
        and (x.stride(2) > 0 or x.shape[2] == 1)
    )


def compiled_with(config: Config) -> dict[str, int]:
    """Return the compiler's keywords of a launch."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}

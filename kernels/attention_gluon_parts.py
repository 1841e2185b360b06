"""Shared parts of the Gluon kernels: rotating buffers, a program's work, descriptors and copies, masks, rows in memory.

Guarantees: a copy starts only after the readers of its buffer are done. Tables are read as in the other kernels
(`attention_tiles`). The programs of a launch together take every item once. The counter of items is 0 before and after
a launch. No item is overwritten before both consumers have read it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ringattn.kernels.attention_options import bias_of
from ringattn.kernels.attention_tiles import ends_of, entries_of, item_of, rows_and_band, run_of

copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""Start a copy by TMA into shared memory. Triton 3.9 renamed the function."""


@gluon.jit
def slot_of(turn, SLOTS: gl.constexpr):
    """Return (buffer, parity of the phase that fills it) for the `turn`-th use, from 0, of SLOTS rotating buffers."""
    # SLOTS 2:   turn   0 1 2 3 4 5
    #            slot   0 1 0 1 0 1
    #            parity 0 0 1 1 0 0
    return turn % SLOTS, turn // SLOTS & 1


@gluon.jit
def visited(nth, start, full, full_end):
    """Return the index of the `nth` block of an entry's rows: first full blocks, then the blocks before and after."""
    # Full blocks need no mask, so they get a separate loop; the others follow, left edge first:
    #    blocks   start . . full . . . full_end . end
    #    nth            4 5      0 1 2 3           6
    edge = start + nth - (full_end - full)
    return gl.where(edge < start, full + nth, gl.where(edge < full, edge, start + nth))


@gluon.jit
def work_of(blocks, item, block_count, slots, batches, section):
    """Return (block, batch, head, live rows, first entry, one past the last). An idle item has no row and no entry."""
    block, batch, head, idle = item_of(blocks, item, block_count, slots, batches, section)
    first, last = entries_of(block)
    return block, batch, head, gl.where(idle, 0, run_of(block)[2]), gl.where(idle, last, first), last


@gluon.jit
def buffers_for(dtype: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Allocate SLOTS buffers for rows of DIM columns. Return a tuple with the buffers of each piece of the columns.

    A shape has powers of two only, so 192 columns are three pieces of 64. Other dimensions are one piece.
    """
    COLS: gl.constexpr = DIM & -DIM
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], dtype)
    pieces = ()
    for _ in gl.static_range(DIM // COLS):
        pieces += (gl.allocate_shared_memory(dtype, [SLOTS, ROWS, COLS], layout),)  # type: ignore[assignment]
    return pieces


@gluon.jit
def rows_at(buffers, slot):
    """Return the rows in a slot: a tuple with the buffer of each piece of the columns."""
    rows = ()
    for piece in gl.static_range(len(buffers)):
        rows += (buffers[piece].index(slot),)  # type: ignore[assignment]
    return rows


@gluon.jit
def rows_from(rows, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Return COUNT rows from FIRST on, of each piece of the columns."""
    part = ()
    for piece in gl.static_range(len(rows)):
        part += (rows[piece].slice(FIRST, COUNT),)  # type: ignore[assignment]
    return part


@gluon.jit
def described(base, first, stride, distance, count, rows):
    """Make a descriptor of `count` rows, every `stride`-th from row `first` on.

    It loads boxes shaped like each of `rows`, a tuple with the buffer of each piece of the columns.
    """
    box: gl.constexpr = rows[0].shape
    layout: gl.constexpr = rows[0].layout
    first_row = base + first.to(gl.int64) * distance
    step = stride.to(gl.int64) * distance
    return tma.make_tensor_descriptor(first_row, [count, len(rows) * box[1]], [step, 1], box, layout)


@gluon.jit
def barriers_for(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate a barrier for each of SLOTS buffers; a phase ends with the given number of ARRIVALS."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=ARRIVALS)
    return barriers


@gluon.jit
def landed(turn, full, SLOTS: gl.constexpr):
    """Wait until all loads before `turn` have ended, so that none of them reads a descriptor any more."""
    # Wait for the last use of each slot. A new barrier counts as having finished the phase before its first.
    for ahead in gl.static_range(SLOTS):
        slot, parity = slot_of(turn + ahead, SLOTS)
        mbarrier.wait(full.index(slot), parity ^ 1)


@gluon.jit
def copy_rows(descriptor, first_row, full, rows):
    """Start to load the block of rows from `first_row` on into `rows`, the buffers of all pieces of the columns."""
    for piece in gl.static_range(len(rows)):
        copy_block(descriptor, [first_row, piece * rows[0].shape[1]], full, rows[piece])


@gluon.jit
def bring(descriptor, first_row, slot, parity, full, empty, buffers):
    """Load the block of rows from `first_row` on into a slot, as soon as the slot's readers are done."""
    # The other parity belongs to the previous use, whose readers must be done. On a new barrier this wait passes.
    mbarrier.wait(empty.index(slot), parity ^ 1)
    # Announce the bytes before the copy: the barrier flips when they have arrived.
    mbarrier.expect(full.index(slot), descriptor.block_type.nbytes * len(buffers))
    copy_rows(descriptor, first_row, full.index(slot), rows_at(buffers, slot))


@gluon.jit
def seen(own_rows, entry):
    """Return the first and the last row of the entry that each own row sees.

    Steps are positive, so an own row sees all rows between these two.
    """
    rows, band = rows_and_band(entry)
    # lo <= own * s_own - other * s_other <= hi, solved for `other`.
    near, far = own_rows * band[0] - band[2], own_rows * band[0] - band[3]
    first = gl.where(far > 0, (far + band[1] - 1) // band[1], 0)
    last = gl.where(near < 0, -1, near // band[1])
    return first, gl.minimum(last, rows[2] - 1)


@gluon.jit
def scaled(acc, factors):
    """Return `acc` with each row multiplied by its factor."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.expand_dims(gl.convert_layout(factors, rows), 1)


@gluon.jit
def places(base, strides, block, batch, head, own_rows):
    """Return pointers to rows of a block; `own_rows` counts within the block."""
    run = run_of(block)
    # The rows of the tensor.
    rows = (run[0] + own_rows * run[1]).to(gl.int64)
    return base + batch * strides[1] + head * strides[2] + rows * strides[0]


@gluon.jit
def over_dims(pointers, DIM: gl.constexpr, layout: gl.constexpr):
    """Return pointers to the values of each row."""
    return gl.expand_dims(pointers, 1) + gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, layout)), 0)


# --- items of a program ----------------------------------------------------------------------------------------------
# The first item of a program is its own number; after that it takes the next item that no program has. The producer
# reads it from a counter in global memory and passes it to the consumers through shared memory. So all programs end at
# about the same time, however long their items are and whenever their multiprocessors start.


PLACES = gl.constexpr(2)
"""The number of items in shared memory: the producer may be an item ahead of the slower consumer."""


@gluon.jit
def taken(counter, total):
    """Take the next item that no program has. Return it, or a number of at least `total` if no item is left."""
    nth = gl.atomic_add(counter, 1, sem="relaxed")
    # The first item of each program is not counted, and each program counts again at its end. So the last count of
    # the launch returns total - 1, and its program resets the counter for the next launch.
    gl.store(counter, 0, mask=nth == total - 1)
    return gl.num_programs(0) + nth


@gluon.jit
def hand_over(item, turn, handed, WARPS: gl.constexpr):
    """Pass the `turn`-th item to the consumers. `handed`: the buffers and barriers that `hand` returned."""
    items, full, empty = handed
    slot, parity = slot_of(turn, PLACES)
    mbarrier.wait(empty.index(slot), parity ^ 1)
    items.index(slot).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    mbarrier.arrive(full.index(slot))


@gluon.jit
def received(turn, handed, WARPS: gl.constexpr):
    """Return the `turn`-th item that the producer passes. `handed`: the buffers and barriers that `hand` returned."""
    items, full, empty = handed
    slot, parity = slot_of(turn, PLACES)
    mbarrier.wait(full.index(slot), parity)
    item = gl.max(items.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(empty.index(slot))
    return item


@gluon.jit
def hand(READERS: gl.constexpr):
    """Allocate the buffers for items and their barriers (full, empty) for a program with READERS consumers."""
    items = gl.allocate_shared_memory(gl.int32, [PLACES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return items, barriers_for(PLACES, 1), barriers_for(PLACES, READERS)


# --- products, masks and sums ----------------------------------------------------------------------------------------


CONSUMERS = gl.constexpr(2)


@gluon.jit
def products(left, right, COLS: gl.constexpr, layout: gl.constexpr):
    """Start the product of the rows of `left` with the rows of `right`: (left rows, COLS).

    Each of the two is a tuple of the pieces of its columns. The products of all pieces have the same sums.
    """
    ROWS: gl.constexpr = left[0].shape[0]
    # With use_acc=False the zeros are not read; they only define the layout of the product.
    sums = gl.zeros([ROWS, COLS], gl.float32, layout)
    for piece in gl.static_range(len(left)):
        right_columns = right[piece].permute((1, 0))
        sums = hopper.warpgroup_mma(left[piece], right_columns, sums, use_acc=piece > 0, is_async=True)
    return sums


@gluon.jit
def zeros_for(PIECES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """Return sums of zero for ROWS rows: a tuple with COLS columns for each of the PIECES."""
    sums = ()
    for _ in gl.static_range(PIECES):
        sums += (gl.zeros([ROWS, COLS], gl.float32, layout),)  # type: ignore[assignment]
    return sums


@gluon.jit
def added(sums, weights, rows):
    """Start to add the products of `weights` with `rows` to the sums, for each piece of the columns."""
    started = ()
    for piece in gl.static_range(len(rows)):
        started += (hopper.warpgroup_mma(weights, rows[piece], sums[piece], is_async=True),)  # type: ignore[assignment]
    return started


@gluon.jit
def completed(sums, RUNNING: gl.constexpr):
    """Wait until at most RUNNING products are in progress. Return the sums of all pieces of the columns."""
    ended = hopper.warpgroup_mma_wait(RUNNING, deps=sums)
    if len(sums) == 1:
        ended = (ended,)
    return ended


@gluon.jit
def masked(s, limits, index, COLS: gl.constexpr):
    """Return the scores `s` of block `index` of the entry, with -inf for rows that an own row does not see.

    `limits`: the first and the last row of the entry that each own row sees.
    """
    cols = gl.expand_dims(gl.arange(0, COLS, layout=gl.SliceLayout(0, s.type.layout)), 0)
    # A thread's columns are 8 apart. Split in this way, it needs no register for the number of each column.
    of_eight = cols & 7
    eight = cols - of_eight
    # Count from the block's first row, like `cols`. A single unsigned comparison checks both ends: a negative distance
    # is larger than any count.
    left, count = limits[0] - index * COLS, gl.maximum(limits[1] - limits[0] + 1, 0)
    beyond = eight - (gl.expand_dims(left, 1) - of_eight)
    return gl.where(beyond.to(gl.uint32) < gl.expand_dims(count.to(gl.uint32), 1), s, float("-inf"))


@gluon.jit
def numbered(COLS: gl.constexpr, layout: gl.constexpr):
    """Return the numbers of the columns of scores in `layout`, as floats."""
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    # A thread's columns are a base, which is 0, 2, 4 or 6, plus constants. Only the base takes a conversion.
    return (cols & ~6).to(gl.float32) + (cols & 6).to(gl.float32)


@gluon.jit
def alibi_of(alibi, index, head, scales, RAW: gl.constexpr):
    """Return what `bias_of` does for entry `index` and query head `head`, or None without ALiBi.

    `alibi`: the places of the entries and the slopes. `scales`: those of `logits`.
    """
    places, slopes = alibi
    scale, softcap = scales
    bias = None
    if slopes is not None:
        bias = bias_of(places, index, slopes, head, scale if softcap is None else softcap, RAW)
    return bias


@gluon.jit
def deliver(
    sums, factor, carried, result, carried_strides, result_strides, block, batch, head, own_rows, live,
    layout: gl.constexpr,
):  # fmt: skip
    """Add the sums that are carried between launches and store them, or write the result if this launch is the last.

    `sums`: those of each piece of the columns. `factor`: None, or what this launch's sums are multiplied by.
    """
    begins, ends = ends_of(block)
    inside = gl.expand_dims(own_rows < live, 1)
    COLS: gl.constexpr = sums[0].shape[1]
    for piece in gl.static_range(len(sums)):
        total = sums[piece] if factor is None else sums[piece] * factor
        if carried is not None:
            rows = places(carried, carried_strides, block, batch, head, own_rows)
            pointers = over_dims(rows + piece * COLS, COLS, layout)
            # For a FIRST block there is no sum yet.
            total += gl.load(pointers, mask=inside & (begins == 0), other=0.0)
            gl.store(pointers, total, mask=inside & (ends == 0))
        if result is not None:
            rows = places(result, result_strides, block, batch, head, own_rows)
            pointers = over_dims(rows + piece * COLS, COLS, layout)
            gl.store(pointers, total.to(result.dtype.element_ty), mask=inside & ends)

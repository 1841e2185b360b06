"""What the Gluon kernels share: rotating buffers, a program's work, descriptors and copies, masks, rows in memory.

Guarantees: a copy is not started before the readers of its buffer have left it; the rows of a run in a table are those
of the other kernels (`attention_tiles`); over all programs of a launch every item is taken once; the counter of items,
0 before a launch, is 0 after it; no item is overwritten before both consumers have read it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ringattn.kernels.attention_tiles import ends_of, entries_of, item_of, rows_and_band, run_of


@gluon.jit
def slot_of(turn, SLOTS: gl.constexpr):
    """Of the `turn`-th use, from 0, of a ring of SLOTS buffers: (the buffer, the parity of the phase that fills it)."""
    # SLOTS 2:   turn   0 1 2 3 4 5
    #            slot   0 1 0 1 0 1
    #            parity 0 0 1 1 0 0
    return turn % SLOTS, turn // SLOTS & 1


@gluon.jit
def visited(nth, start, full, full_end):
    """The `nth` block of an entry's rows: the full ones first, then those before and after them."""
    # Full blocks need no mask and one loop body; the others follow, left edge first:
    #    blocks   start . . full . . . full_end . end
    #    nth            4 5      0 1 2 3           6
    edge = start + nth - (full_end - full)
    return gl.where(edge < start, full + nth, gl.where(edge < full, edge, start + nth))


@gluon.jit
def work_of(blocks, item, block_count, slots, batches, section):
    """(block, batch, head, live rows, first entry, one past the last); an idle item has no row and no entry."""
    block, batch, head, idle = item_of(blocks, item, block_count, slots, batches, section)
    first, last = entries_of(block)
    return block, batch, head, gl.where(idle, 0, run_of(block)[2]), gl.where(idle, last, first), last


@gluon.jit
def described(base, first, stride, distance, count, buffer):
    """A descriptor, in boxes like `buffer`, of `count` rows from row `first` on, every `stride`-th; 0 beyond them."""
    layout: gl.constexpr = buffer.layout
    first_row = base + first.to(gl.int64) * distance
    step = stride.to(gl.int64) * distance
    return tma.make_tensor_descriptor(first_row, [count, buffer.shape[1]], [step, 1], buffer.shape, layout)


@gluon.jit
def barriers_for(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """A barrier for each of SLOTS buffers, of which a phase ends with so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(slot), count=ARRIVALS)
    return barriers


@gluon.jit
def landed(turn, full, SLOTS: gl.constexpr):
    """Wait until all loads of the turns before `turn` have ended: no descriptor is being read any more."""
    # The last use of each slot; a new barrier counts as having finished the phase before its first.
    for ahead in gl.static_range(SLOTS):
        slot, parity = slot_of(turn + ahead, SLOTS)
        mbarrier.wait(full.index(slot), parity ^ 1)


@gluon.jit
def bring(rows, at, slot, parity, full, empty, buffers):
    """Load a block of rows into a slot, once its readers have left."""
    # The other parity is that of the use before: its readers have left. A new barrier lets the first wait pass.
    mbarrier.wait(empty.index(slot), parity ^ 1)
    # Before the copy: the barrier flips when so many bytes have arrived.
    mbarrier.expect(full.index(slot), rows.block_type.nbytes)
    tma.async_copy_global_to_shared(rows, [at, 0], full.index(slot), buffers.index(slot))


@gluon.jit
def seen(own, entry):
    """The first and the last row of the entry that each row of the block sees: a run, since steps are positive."""
    rows, band = rows_and_band(entry)
    # lo <= own * s_own - other * s_other <= hi, solved for `other`.
    near, far = own * band[0] - band[2], own * band[0] - band[3]
    first = gl.where(far > 0, (far + band[1] - 1) // band[1], 0)
    last = gl.where(near < 0, -1, near // band[1])
    return first, gl.minimum(last, rows[2] - 1)


@gluon.jit
def scaled(acc, by):
    """`acc` with its rows multiplied."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.expand_dims(gl.convert_layout(by, rows), 1)


@gluon.jit
def places(base, strides, block, batch, head, own):
    """Pointers to the `own` rows of a block."""
    run = run_of(block)
    # `own` counts rows within the block; these are rows of the tensor.
    rows = (run[0] + own * run[1]).to(gl.int64)
    return base + batch * strides[1] + head * strides[2] + rows * strides[0]


@gluon.jit
def over_dims(pointers, DIM: gl.constexpr, layout: gl.constexpr):
    """Pointers to the values of each row."""
    return gl.expand_dims(pointers, 1) + gl.expand_dims(gl.arange(0, DIM, layout=gl.SliceLayout(0, layout)), 0)


# --- items of a program ----------------------------------------------------------------------------------------------
# A program takes its own number first, then always the next item that no program has. The producer takes it from a
# counter in global memory and hands it to the consumers through shared memory, so that programs end together, however
# long their items are and whenever a multiprocessor begins.


PLACES = gl.constexpr(2)
"""Items that are handed over at once: the producer may be one ahead of the slower consumer."""


@gluon.jit
def taken(counter, total):
    """The next item that no program has; `total` or more when there is none."""
    nth = gl.atomic_add(counter, 1, sem="relaxed")
    # The first items, one of each program, are not counted, and each program counts once in vain. So the last of all
    # to count finds total - 1, and leaves the counter to the next launch.
    gl.store(counter, 0, mask=nth == total - 1)
    return gl.num_programs(0) + nth


@gluon.jit
def hand_over(item, turn, handed, WARPS: gl.constexpr):
    """Give the consumers the `turn`-th item."""
    items, full, empty = handed
    slot, parity = slot_of(turn, PLACES)
    mbarrier.wait(empty.index(slot), parity ^ 1)
    items.index(slot).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    mbarrier.arrive(full.index(slot))


@gluon.jit
def received(turn, handed, WARPS: gl.constexpr):
    """The `turn`-th item that the producer gives."""
    items, full, empty = handed
    slot, parity = slot_of(turn, PLACES)
    mbarrier.wait(full.index(slot), parity)
    item = gl.max(items.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(empty.index(slot))
    return item


@gluon.jit
def hand(READERS: gl.constexpr):
    """(places for items, and their barriers: full, empty) of a program with so many consumers."""
    items = gl.allocate_shared_memory(gl.int32, [PLACES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return items, barriers_for(PLACES, 1), barriers_for(PLACES, READERS)


# --- the backward kernels --------------------------------------------------------------------------------------------


CONSUMERS = gl.constexpr(2)


@gluon.jit
def products(own, other, COLS: gl.constexpr, layout: gl.constexpr):
    """Start own . other, rows by rows: (own rows, COLS)."""
    ROWS: gl.constexpr = own.shape[0]
    # Not read, since use_acc is False: it gives the product its layout.
    zeros = gl.zeros([ROWS, COLS], gl.float32, layout)
    return hopper.warpgroup_mma(own, other.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def masked(s, limits, at, COLS: gl.constexpr):
    """`s` of block `at` of the entry where `limits`, the first and the last row that each own row sees, admit it."""
    cols = gl.expand_dims(gl.arange(0, COLS, layout=gl.SliceLayout(0, s.type.layout)), 0)
    # A thread has columns 8 apart: split so, it keeps no register for the number of each.
    of_eight = cols & 7
    eight = cols - of_eight
    # Counted from the block's first row, like `cols`. One comparison serves both ends: what is before the first is,
    # without a sign, more than any count.
    left, count = limits[0] - at * COLS, gl.maximum(limits[1] - limits[0] + 1, 0)
    beyond = eight - (gl.expand_dims(left, 1) - of_eight)
    return gl.where(beyond.to(gl.uint32) < gl.expand_dims(count.to(gl.uint32), 1), s, float("-inf"))


@gluon.jit
def deliver(
    total, carried, result, carried_strides, result_strides, block, batch, head, own, live,
    DIM: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Add to the sum that is carried between launches, or with the last of them write the result."""
    begins, ends = ends_of(block)
    inside = gl.expand_dims(own < live, 1)
    if carried is not None:
        at = over_dims(places(carried, carried_strides, block, batch, head, own), DIM, layout)
        # A FIRST block finds no sum there.
        total += gl.load(at, mask=inside & (begins == 0), other=0.0)
        gl.store(at, total, mask=inside & (ends == 0))
    if result is not None:
        at = over_dims(places(result, result_strides, block, batch, head, own), DIM, layout)
        gl.store(at, total.to(result.dtype.element_ty), mask=inside & ends)

"""Which items a program of a Gluon launch takes: its own number first, then always the next that no program has.

The producer takes an item from a counter in global memory and hands it to the consumers through shared memory, so that
programs end together, however long their items are and whenever a multiprocessor begins.
Guarantees: over all programs every item once; the counter, 0 before a launch, is 0 after it; no item is written over
before both consumers have it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringattn.kernels.attention_gluon_parts import slot_of

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
    places, full, empty = handed
    slot, parity = slot_of(turn, PLACES)
    mbarrier.wait(empty.index(slot), parity ^ 1)
    places.index(slot).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    mbarrier.arrive(full.index(slot))


@gluon.jit
def received(turn, handed, WARPS: gl.constexpr):
    """The `turn`-th item that the producer gives."""
    places, full, empty = handed
    slot, parity = slot_of(turn, PLACES)
    mbarrier.wait(full.index(slot), parity)
    item = gl.max(places.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(empty.index(slot))
    return item


@gluon.jit
def hand(READERS: gl.constexpr):
    """(places for items, and their barriers: full, empty) of a program with so many consumers."""
    places = gl.allocate_shared_memory(gl.int32, [PLACES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(PLACES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return places, full, empty

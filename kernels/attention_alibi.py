"""ALiBi in the attention kernels: a score loses slope * |distance|, and no position is loaded.

A block's positions are two arithmetic sequences, so its bias, where all keys are on one side of their queries, is a
number of the query and one of the key: the former is left to the peak of the row, the latter is one multiplication and
addition a score, before the one that scales it. Only blocks with keys on both sides take the distance of each pair.
Guarantees the bias that docs/masks.md defines, in float32, for slopes of any sign to `STEEPEST` and any strides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ringattn.kernels.attention_tiles import LOG2_E
from ringattn.kernels.launch_call import PLACES

STEEPEST = 2.0**32
"""The greatest slope, of either sign: times any distance it is far from what float32 holds."""
# Of an entry: distance of the first rows, own and other stride, first query head.
PLACE_COLUMNS = tl.constexpr(PLACES)


def adds_raw(factor: float) -> bool:
    """Whether a bias may be added before the logits are multiplied by `factor`, divided by it."""
    return abs(factor) >= 2.0**-20


@triton.jit
def bias_of(places, index, slopes, head, factor, RAW: tl.constexpr):
    """What `biased` needs of entry `index`: the slope, with RAW of what `factor` multiplies, and the entry's place.

    `head`: a query head of the buffer.
    """
    place = places + index * PLACE_COLUMNS
    slope = tl.load(slopes + head + tl.load(place + 3)) * LOG2_E
    return slope / factor if RAW else slope, place


@triton.jit
def steps_of(place, AGAIN: tl.constexpr):
    """Of an entry: the distance of the first rows, own and other stride. With AGAIN loaded each time."""
    # Volatile, so that what follows from them takes no registers through a loop that has none left.
    return tl.load(place, volatile=AGAIN), tl.load(place + 1, volatile=AGAIN), tl.load(place + 2, volatile=AGAIN)


@triton.jit
def biased(s, slope, place, steps, at, OWN: tl.constexpr, OTHER: tl.constexpr, KEYS_OWN: tl.constexpr):
    """(t, rest): s with ALiBi is t + rest, `rest` one number for each query.

    Of block `at` of the entry's rows, (OWN, OTHER) pairs. With KEYS_OWN its own rows are keys, and `rest` is what a
    query has for each position that it comes after the block's first.
    """
    ahead, own_step, other_step = steps
    # Row i of the block is  ahead + i * own_step - j * other_step  after row j of the entry's block.
    ahead -= at * OTHER * other_step
    farthest = ahead + (OWN - 1) * own_step
    crossing = (ahead < (OTHER - 1) * other_step) & (farthest > 0)
    # The slope of the distance with its sign, where that is the same for all pairs; else 0, and the branch adds all.
    signed = tl.where(crossing, 0.0, tl.where(farthest > 0, slope, -slope))
    own = (ahead + tl.arange(0, OWN) * own_step).to(tl.float32)
    other = (tl.arange(0, OTHER) * other_step).to(tl.float32)
    s += -signed * own[:, None] if KEYS_OWN else signed * other[None, :]
    if crossing:
        # Loaded again, so that it stays a branch: a compiler may else compute it for every block, and choose.
        ahead, own_step, other_step = steps_of(place, True)
        own = (ahead - at * OTHER * other_step + tl.arange(0, OWN) * own_step).to(tl.float32)
        other = (tl.arange(0, OTHER) * other_step).to(tl.float32)
        s -= slope * tl.abs(own[:, None] - other[None, :])
    return s, signed if KEYS_OWN else -signed * own

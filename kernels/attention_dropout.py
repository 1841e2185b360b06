"""Dropout in the attention kernels: Philox 4x32-10 on the places of pairs says which are dropped (docs/masks.md).

Guarantees the pairs of that definition whatever the table, the blocks, the heads and batches of the buffers: positions
are words of 32 bits that count on from the first rows of a block and of an entry. A word that is the same for a row or
for a column is computed once for it: of the ten rounds the first costs a pair nothing, the second one operation.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ringattn.kernels.launch_call import POSITIONS

# Of an entry: first position and position stride of the block, the same of the entry, first query head.
POSITION_COLUMNS = tl.constexpr(POSITIONS)
_ROUNDS = tl.constexpr(10)
_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_W0, _W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


class Dropout(NamedTuple):
    """Of a launch: the seed, 64 bits; words below `threshold` are dropped; `kept` divides the others."""

    seed: int
    threshold: int
    kept: float


def arguments(dropout: Dropout | None) -> tuple[int | float | None, ...]:
    """What a kernel is told: the seed's lower and upper half and the threshold, as signed words; then `kept`."""
    if dropout is None:
        return None, None, None, None
    return *seed_words(dropout.seed), _signed(dropout.threshold), dropout.kept


def seed_words(seed: int) -> tuple[int, int]:
    """The halves of a seed, the lower one first, as signed numbers of 32 bits: always one type of argument."""
    return _signed(seed & 0xFFFFFFFF), _signed(seed >> 32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@triton.jit
def _word(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _product(x, M: tl.constexpr):
    """(upper, lower word) of x * M."""
    both = x.to(tl.uint64) * M
    return (both >> 32).to(tl.uint32), both.to(tl.uint32)


@triton.jit
def draw_of(positions, index, head, batch, low, high, threshold):
    """What `dropped` needs of entry `index`, for query head `head` and row `batch` of the buffers."""
    place = positions + index * POSITION_COLUMNS
    of_call = (head + tl.load(place + 4)).to(tl.uint32)
    return place, of_call, batch.to(tl.uint32), _word(low), _word(high), _word(threshold)


@triton.jit
def _drawn(a, b, c, d, low, high):
    """The four words of counters (a, b, c, d) and the key (low, high)."""
    # Rows and columns that have not met yet are arrays of one axis: what they share is computed once.
    for turn in tl.static_range(_ROUNDS):
        key0 = low + (turn * _W0) % 4294967296
        key1 = high + (turn * _W1) % 4294967296
        a_high, a_low = _product(a, _M0)
        c_high, c_low = _product(c, _M1)
        a, b, c, d = c_high ^ b ^ key0, c_low, a_high ^ d ^ key1, a_low
    return a, b, c, d


@triton.jit
def dropped(
    draw, at, OWN: tl.constexpr, OTHER: tl.constexpr, KEYS_OWN: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """Booleans (OWN, OTHER): which pairs of the block's rows and of block `at` of the entry's rows are dropped.

    TOGETHER: that of the table: four keys beside each other take a word each of one counter.
    """
    place, head, batch, low, high, threshold = draw
    own_first, own_step = tl.load(place), tl.load(place + 1)
    other_step = tl.load(place + 3)
    other_first = tl.load(place + 2) + at * OTHER * other_step
    if TOGETHER == 1:
        own = _word(own_first + tl.arange(0, OWN) * own_step)[:, None]
        other = _word(other_first + tl.arange(0, OTHER) * other_step)[None, :]
        keys, queries = (own, other) if KEYS_OWN else (other, own)
        a, b, c, d = _drawn(keys >> 2, queries, head, batch, low, high)
        odd, upper = (keys & 1) != 0, (keys & 2) != 0
        gone = tl.where(upper, tl.where(odd, d, c), tl.where(odd, b, a)) < threshold
    elif KEYS_OWN:
        keys = ((_word(own_first) >> 2) + tl.arange(0, OWN // 4).to(tl.uint32))[:, None]
        queries = _word(other_first + tl.arange(0, OTHER) * other_step)[None, :]
        a, b, c, d = _drawn(keys, queries, head, batch, low, high)
        four = tl.join(tl.join(a < threshold, c < threshold), tl.join(b < threshold, d < threshold))
        gone = tl.reshape(tl.permute(four, (0, 2, 3, 1)), (OWN, OTHER))
    else:
        queries = _word(own_first + tl.arange(0, OWN) * own_step)[:, None]
        keys = ((_word(other_first) >> 2) + tl.arange(0, OTHER // 4).to(tl.uint32))[None, :]
        a, b, c, d = _drawn(keys, queries, head, batch, low, high)
        four = tl.join(tl.join(a < threshold, c < threshold), tl.join(b < threshold, d < threshold))
        gone = tl.reshape(four, (OWN, OTHER))
    return gone

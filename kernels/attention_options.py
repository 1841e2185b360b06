"""ALiBi and dropout in the attention kernels.

ALiBi: a score loses slope * |distance|, and no position is loaded. A block's positions are two arithmetic sequences, so
its bias, where all keys are on one side of their queries, is a number of the query and one of the key: the former is
left to the peak of the row, the latter is one multiplication and addition a score, before the one that scales it. Only
blocks with keys on both sides take the distance of each pair.
Dropout: Philox 4x32-10 on the places of pairs decides which are dropped. A word that is the same for a row or for a
column is computed once for it: of the ten rounds the first costs a pair nothing, the second one operation.
Guarantees: the bias and the pairs that docs/masks.md defines; the bias in float32, for slopes of any sign to `STEEPEST`
and any strides; dropout whatever the table, the blocks, the heads and batches of the buffers: positions are words of 32
bits that count on from the first rows of a block and of an entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Required, TypedDict

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention_tiles import LOG2_E, compiled_with
from ringattn.kernels.launch import PLACES, POSITIONS, Config, Table, padded

# --- ALiBi -----------------------------------------------------------------------------------------------------------


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


# --- dropout ---------------------------------------------------------------------------------------------------------


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


# --- what the launches of the attention kernels share ----------------------------------------------------------------


class CallOptions(TypedDict, total=False):
    """Facts of a call beside its tensors. The keywords of every launch.

    `group`: query heads per K/V head. `first_kv_head`: the first K/V head that is held. `slopes`: of ALiBi, float32,
    one for each query head of the call; distances are those of `table.places`. `dropout`: by the places of pairs that
    `table.positions` has. `programs`: the size of the grid, by default a program a block.
    """

    scale: Required[float]
    softcap: float | None
    group: int
    first_kv_head: int
    slopes: Tensor | None
    dropout: Dropout | None
    programs: int | None


def shared_arguments(table: Table, batches: int, section: int, options: CallOptions) -> tuple[Any, ...]:
    """The arguments from `blocks` to `first_kv_head`, which all kernels have; words of the seed are signed."""
    dropout = options.get("dropout")
    draws = (None,) * 4 if dropout is None else (*seed_words(dropout.seed), _signed(dropout.threshold), dropout.kept)
    return (
        table.blocks, table.entries, table.places, options.get("slopes"), table.positions, *draws,
        table.blocks.shape[0], table.slots, batches, section, options.get("group", 1), options.get("first_kv_head", 0),
    )  # fmt: skip


def shared_constants(q: Tensor, v: Tensor, config: Config, table: Table, options: CallOptions) -> dict[str, Any]:
    """The compile-time constants that all kernels have."""
    d_k, d_v = q.shape[3], v.shape[3]
    return {
        "D_K": d_k, "D_V": d_v, "PAD_K": padded(d_k), "PAD_V": padded(d_v), "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "SOFTCAP": options.get("softcap") is not None,
        "DESCRIBED": config.form != "pointers", "TOGETHER": table.together, **compiled_with(config),
    }  # fmt: skip

"""ALiBi and dropout in the attention kernels.

ALiBi subtracts slope * |distance| from a score without loading positions. The positions of a block are two arithmetic
sequences. If all keys are on the same side of their queries, the bias is the sum of a number per query and a number per
key: the first goes into the peak of the row, and the second costs a multiplication and an addition per score, before
scaling. Only blocks with keys on both sides compute the distance of each pair.
Dropout: Philox 4x32-10 on the positions of pairs decides which are dropped. A word that is equal for a whole row or
column is computed once for it: of the ten rounds, the first costs nothing per pair and the second a single operation.
Guarantees: the bias and the dropped pairs that docs/masks.md defines. The bias is float32, for slopes of any sign up to
`STEEPEST` and any strides. Dropout does not depend on the table, the blocks, or the heads and batches of the buffers:
positions are 32-bit words counted from the first rows of a block and of an entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Required, TypedDict

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.attention_tiles import LOG2_E, compiled_with, keeps_order, logit_scales
from ringattn.kernels.launch import PLACES, POSITIONS, Config, Table, padded

# --- ALiBi -----------------------------------------------------------------------------------------------------------


STEEPEST = 2.0**32
"""The largest slope, of either sign: its product with any distance is far below the limit of float32."""
# The columns of an entry: distance of the first rows, own and other stride, first query head.
PLACE_COLUMNS = tl.constexpr(PLACES)


def adds_raw(factor: float) -> bool:
    """Return whether a bias divided by `factor` may be added before the logits are multiplied by `factor`."""
    return abs(factor) >= 2.0**-20


def factor_of(options: CallOptions) -> float:
    """Return the last factor of a logit: that of the tanh with softcap, else that of the product."""
    softcap = options.get("softcap")
    return logit_scales(options["scale"], softcap)[softcap is not None]


def peaks_raw(options: CallOptions) -> bool:
    """Return whether the forward may find the largest logit of a row before it multiplies by the last factor."""
    factor = factor_of(options)
    return keeps_order(factor) and (options.get("slopes") is None or adds_raw(factor))


@triton.jit
def bias_of(places, index, slopes, head, factor, RAW: tl.constexpr):
    """Return the slope, with RAW divided by `factor`, and the address of the row of `places` that entry `index` has.

    Both are arguments of `biased`. `head`: a query head of the buffer.
    """
    place = places + index * PLACE_COLUMNS
    slope = tl.load(slopes + head + tl.load(place + 3)) * LOG2_E
    return slope / factor if RAW else slope, place


@triton.jit
def steps_of(place, AGAIN: tl.constexpr):
    """Load an entry's distance of the first rows, own stride and other stride, from its row of `places`.

    `place`: the address of the row. AGAIN: load again at every call.
    """
    # A volatile load keeps the derived values out of registers in a loop that has none to spare.
    return tl.load(place, volatile=AGAIN), tl.load(place + 1, volatile=AGAIN), tl.load(place + 2, volatile=AGAIN)


@triton.jit
def biased(s, slope, place, steps, index, own, other, OWN: tl.constexpr, KEYS_OWN: tl.constexpr):
    """Return (t, rest), where the score with ALiBi is t + rest and `rest` is a number per query.

    `s` has the pairs of rows `own` of a block of OWN rows with the rows of block `index` of the entry. `own` and
    `other`: the number of each row in its block. With KEYS_OWN the own rows are keys, and `rest` is a single factor:
    the number of a query is `rest` times its distance in positions from the first query of the block.
    """
    OTHER: tl.constexpr = other.shape[0]
    ahead, own_step, other_step = steps
    # The position of row i of the block minus that of row j of the entry's block is
    #     ahead + i * own_step - j * other_step.
    ahead -= index * OTHER * other_step
    farthest = ahead + (OWN - 1) * own_step
    crossing = (ahead < other_step * (OTHER - 1)) & (farthest > 0)
    # The slope with the sign of the distance if it is the same for all pairs; else 0, and the branch adds the bias.
    signed = tl.where(crossing, 0.0, tl.where(farthest > 0, slope, -slope))
    own_offset = (ahead + own * own_step).to(tl.float32)
    other_offset = (other * other_step).to(tl.float32)
    s = s + (-signed * own_offset[:, None] if KEYS_OWN else signed * other_offset[None, :])
    if crossing:
        # Load again, so that this stays a branch. Otherwise the compiler may compute it for every block and select.
        ahead, own_step, other_step = steps_of(place, True)
        own_offset = (ahead - index * OTHER * other_step + own * own_step).to(tl.float32)
        other_offset = (other * other_step).to(tl.float32)
        s = s - slope * tl.abs(own_offset[:, None] - other_offset[None, :])
    return s, signed if KEYS_OWN else -signed * own_offset


@triton.jit
def with_bias(
    s, raw, factor, alibi, steps, index, own, other, OWN: tl.constexpr, KEYS_OWN: tl.constexpr, RAW: tl.constexpr
):  # fmt: skip
    """Add ALiBi to the scores `s` = `raw` * `factor`: return (t, rest), whose sum is the biased score; see `biased`.

    `alibi`: the slope and the place, `steps`: the distances, as `biased` takes them. With RAW the bias is added before
    the multiplication by `factor`.
    """
    if RAW:
        s, rest = biased(raw, alibi[0], alibi[1], steps, index, own, other, OWN, KEYS_OWN)
        s, rest = s * factor, rest * factor
    else:
        s, rest = biased(s, alibi[0], alibi[1], steps, index, own, other, OWN, KEYS_OWN)
    return s, rest


# --- dropout ---------------------------------------------------------------------------------------------------------


# The columns of an entry: first position and stride of the block, the same of the entry, first query head.
POSITION_COLUMNS = tl.constexpr(POSITIONS)
_ROUNDS = tl.constexpr(10)
_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_W0, _W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


class Dropout(NamedTuple):
    """The dropout of a launch. `seed`: 64 bits. A random word below `threshold` drops its pair.

    `kept`: the share of pairs that are kept; it divides their weights.
    """

    seed: int
    threshold: int
    kept: float


def seed_words(seed: int) -> tuple[int, int]:
    """Return the halves of a seed, the lower first, as signed 32-bit numbers, so that the argument type is constant."""
    return _signed(seed & 0xFFFFFFFF), _signed(seed >> 32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@triton.jit
def _word(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _product(x, M: tl.constexpr):
    """Return the (upper, lower) word of x * M."""
    both = x.to(tl.uint64) * M
    return (both >> 32).to(tl.uint32), both.to(tl.uint32)


@triton.jit
def draw_of(positions, index, head, batch, low, high, threshold):
    """Return the argument `draw` of `dropped` for entry `index`, query head `head` and batch `batch` of the buffers."""
    place = positions + index * POSITION_COLUMNS
    of_call = (head + tl.load(place + 4)).to(tl.uint32)
    return place, of_call, batch.to(tl.uint32), _word(low), _word(high), _word(threshold)


@triton.jit
def _drawn(a, b, c, d, low, high):
    """Return the four random words of counters (a, b, c, d) with the key (low, high)."""
    # Until rows and columns are combined, their values are arrays of one axis, so each is computed once.
    for turn in tl.static_range(_ROUNDS):
        key0 = low + (turn * _W0) % 4294967296
        key1 = high + (turn * _W1) % 4294967296
        a_high, a_low = _product(a, _M0)
        c_high, c_low = _product(c, _M1)
        a, b, c, d = c_high ^ b ^ key0, c_low, a_high ^ d ^ key1, a_low
    return a, b, c, d


@triton.jit
def dropped(
    draw, index, OWN: tl.constexpr, OTHER: tl.constexpr, KEYS_OWN: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """Return booleans (OWN, OTHER): the dropped pairs of the block's rows and block `index` of the entry's rows.

    TOGETHER: as in the table. If it is 4, each counter gives the words of four adjacent keys.
    """
    place, head, batch, low, high, threshold = draw
    own_first, own_step = tl.load(place), tl.load(place + 1)
    other_step = tl.load(place + 3)
    other_first = tl.load(place + 2) + index * OTHER * other_step
    if TOGETHER == 1:
        own_position = _word(own_first + tl.arange(0, OWN) * own_step)[:, None]
        other_position = _word(other_first + tl.arange(0, OTHER) * other_step)[None, :]
        keys, queries = (own_position, other_position) if KEYS_OWN else (other_position, own_position)
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


# --- shared arguments and constants of the attention kernels ---------------------------------------------------------


class CallOptions(TypedDict, total=False):
    """The keywords of every launch: the properties of a call other than its tensors.

    `group`: query heads per K/V head. `first_kv_head`: the first K/V head in the buffer. `slopes`: ALiBi's, float32, a
    slope per query head of the call; distances come from `table.places`. `dropout`: positions come from
    `table.positions`. `programs`: the size of the grid, by default a program per block.
    """

    scale: Required[float]
    softcap: float | None
    group: int
    first_kv_head: int
    slopes: Tensor | None
    dropout: Dropout | None
    programs: int | None


def shared_arguments(table: Table, batches: int, section: int, options: CallOptions) -> tuple[Any, ...]:
    """Return the arguments from `blocks` to `first_kv_head`, which all kernels have; words of the seed are signed."""
    dropout = options.get("dropout")
    draws = (None,) * 4 if dropout is None else (*seed_words(dropout.seed), _signed(dropout.threshold), dropout.kept)
    return (
        table.blocks, table.entries, table.places, options.get("slopes"), table.positions, *draws,
        table.blocks.shape[0], table.slots, batches, section, options.get("group", 1), options.get("first_kv_head", 0),
    )  # fmt: skip


def shared_constants(q: Tensor, v: Tensor, config: Config, table: Table, options: CallOptions) -> dict[str, Any]:
    """Return the compile-time constants that all kernels have."""
    d_k, d_v = q.shape[3], v.shape[3]
    return {
        "D_K": d_k, "D_V": d_v, "PAD_K": padded(d_k), "PAD_V": padded(d_v), "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "SOFTCAP": options.get("softcap") is not None,
        "DESCRIBED": config.form != "pointers", "TOGETHER": table.together, **compiled_with(config),
    }  # fmt: skip

"""The dropout mask, computed from positions alone: equal for every schedule, layout, world size and chunk of rows.

Guarantees the definition in docs/masks.md for every engine: Philox 4x32-10 (Salmon et al., SC 2011) with the seed as
key and the positions of the pair, its head and its batch as counter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.core.geometry import StridedRange

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF
KEYS_OF_A_COUNTER = 4
"""A counter gives four random words, for four adjacent keys."""
MOST_TOKENS = 2**32
"""The longest sequence of queries or keys: a position is one word of the counter."""
PAIR_BYTES = 5 * 8
"""Peak memory of `is_dropped` per pair: four words and a temporary, int64."""


def is_dropped(
    into: Tensor, heads: StridedRange, queries: StridedRange, keys: StridedRange, seed: int, p: float
) -> None:
    """Write to the booleans `into` which pairs of these heads and positions are dropped, with probability `p`.

    Shape:
        into: (batch, heads, queries, keys)
    """
    h, q, k = (torch.arange(run.start, run.stop, run.stride, device=into.device) for run in (heads, queries, keys))
    b = torch.arange(into.shape[0], device=into.device)
    state = [torch.empty(into.shape, dtype=torch.int64, device=into.device) for _ in range(5)]
    # The counter: key position / 4, query position, query head, batch. Key position % 4 selects the random word.
    state[0].copy_(k // KEYS_OF_A_COUNTER)
    for word, value in zip(state[1:], (q[:, None], h[:, None, None], b[:, None, None, None]), strict=False):
        word.copy_(value)
    philox_(state, seed)
    word_index = k % KEYS_OF_A_COUNTER
    for index in range(1, KEYS_OF_A_COUNTER):
        torch.where(word_index == index, state[index], state[0], out=state[0])
    torch.lt(state[0], threshold(p), out=into)


def threshold(p: float) -> int:
    """Return the word below which a pair is dropped: p in units of 2**-32, rounded down."""
    return int(p * 2**32)


def philox_(state: list[Tensor], seed: int) -> None:
    """Run Philox 4x32-10 in place on five int64 tensors.

    The first four hold the counter before and the random words after; the fifth is scratch. `seed`: the key, its lower
    32 bits first.
    """
    keys = [seed & WORD, seed >> 32 & WORD]
    for _ in range(ROUNDS):
        a, b, c, d, spare = state
        # (a, b, c, d) becomes (hi(m1 c) ^ b ^ key0, lo(m1 c), hi(m0 a) ^ d ^ key1, lo(m0 a)). A product of two words
        # may be negative as an int64. Its bits are right, and the masks remove the sign bits that a shift brings in.
        torch.mul(a, MULTIPLIERS[0], out=spare)
        torch.mul(c, MULTIPLIERS[1], out=a)
        torch.bitwise_right_shift(spare, 32, out=c)
        c.bitwise_and_(WORD).bitwise_xor_(d).bitwise_xor_(keys[1])
        torch.bitwise_and(spare, WORD, out=d)
        torch.bitwise_and(a, WORD, out=spare)
        a.bitwise_right_shift_(32).bitwise_and_(WORD).bitwise_xor_(b).bitwise_xor_(keys[0])
        state[:] = [a, spare, c, d, b]
        keys = [(key + step) & WORD for key, step in zip(keys, KEY_STEPS, strict=True)]

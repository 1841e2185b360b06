"""Which pairs dropout drops, from their places alone: the same in every schedule, layout, world size and chunk of rows.

Guarantees the definition that docs/masks.md gives, whatever engine computes it: Philox 4x32-10 (Salmon et al., SC 2011)
with the seed as key and the place of a pair as counter.
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
"""Four words come of a counter, for four keys beside each other."""
MOST_TOKENS = 2**32
"""Of either sequence: a position is one word of the counter."""
PAIR_BYTES = 5 * 8
"""What `is_dropped` has allocated at once for each pair: four words and one more, int64."""


def is_dropped(
    into: Tensor, heads: StridedRange, queries: StridedRange, keys: StridedRange, seed: int, p: float
) -> None:
    """Write to `into`, booleans, which pairs are dropped with probability `p`: of all batches, `heads` and positions.

    Shape:
        into: (batch, heads, queries, keys)
    """
    h, q, k = (torch.arange(run.start, run.stop, run.stride, device=into.device) for run in (heads, queries, keys))
    b = torch.arange(into.shape[0], device=into.device)
    words = [torch.empty(into.shape, dtype=torch.int64, device=into.device) for _ in range(5)]
    # The counter: key position / 4, query position, query head, batch; the key's place among its four names the word.
    words[0].copy_(k // KEYS_OF_A_COUNTER)
    for word, value in zip(words[1:], (q[:, None], h[:, None, None], b[:, None, None, None]), strict=False):
        word.copy_(value)
    philox_(words, seed)
    place = k % KEYS_OF_A_COUNTER
    for at in range(1, KEYS_OF_A_COUNTER):
        torch.where(place == at, words[at], words[0], out=words[0])
    torch.lt(words[0], threshold(p), out=into)


def threshold(p: float) -> int:
    """Words below it are dropped: p in units of 2**-32, rounded down."""
    return int(p * 2**32)


def philox_(words: list[Tensor], seed: int) -> None:
    """Philox 4x32-10 in place: the first four int64 tensors hold a counter, then its random words; the fifth anything.

    `seed`: the key, its lower 32 bits first.
    """
    keys = [seed & WORD, seed >> 32 & WORD]
    for _ in range(ROUNDS):
        a, b, c, d, spare = words
        # (a, b, c, d) becomes (hi(m1 c) ^ b ^ key0, lo(m1 c), hi(m0 a) ^ d ^ key1, lo(m0 a)). A product of two words
        # may pass for a negative int64; its bits are right, and masks remove what a shift of its sign brings in.
        torch.mul(a, MULTIPLIERS[0], out=spare)
        torch.mul(c, MULTIPLIERS[1], out=a)
        torch.bitwise_right_shift(spare, 32, out=c)
        c.bitwise_and_(WORD).bitwise_xor_(d).bitwise_xor_(keys[1])
        torch.bitwise_and(spare, WORD, out=d)
        torch.bitwise_and(a, WORD, out=spare)
        a.bitwise_right_shift_(32).bitwise_and_(WORD).bitwise_xor_(b).bitwise_xor_(keys[0])
        words[:] = [a, spare, c, d, b]
        keys = [(key + step) & WORD for key, step in zip(keys, KEY_STEPS, strict=True)]

"""Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011) with numpy's 64-bit integers, and dropout based on it.

Guarantees: nothing of ringattn is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Words = list[np.ndarray]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Return the four random words for a counter of four words. All are uint64 arrays of numbers below 2**32."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = counter
    for turn in range(10):
        k0, k1 = (np.uint64((k + turn * w) % 2**32) for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        product0, product2 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product2 >> np.uint64(32)) ^ c1 ^ k0,
            product2 & low,
            (product0 >> np.uint64(32)) ^ c3 ^ k1,
            product0 & low,
        )
    return [c0, c1, c2, c3]


def kept(batch: int, heads: int, q_tokens: int, k_tokens: int, seed: int, p: float) -> Tensor:
    """Return `kept_at` for all pairs: (batch, heads, q tokens, k tokens) float64."""
    return kept_at(*(range(n) for n in (batch, heads, q_tokens, k_tokens)), seed, p)


def kept_at(
    batch: Sequence[int], heads: Sequence[int], queries: Sequence[int], keys: Sequence[int], seed: int, p: float
) -> Tensor:
    """Return the factors of dropout for these indices, (batch, heads, queries, keys) float64.

    The factor is 1 / (1 - p) for a weight that dropout keeps, otherwise 0.

    The keys 4 j to 4 j + 3 use the words of counter (j, query, head, batch); the seed is Philox's key.
    """
    groups = sorted({key // 4 for key in keys})
    axes = np.meshgrid(
        *(np.array(indices, dtype=np.uint64) for indices in (batch, heads, queries, groups)), indexing="ij"
    )
    words = philox(axes[::-1], (seed % 2**32, seed >> 32))
    random_words = np.stack(words, -1).reshape(len(batch), len(heads), len(queries), len(groups) * 4)
    random_words = random_words[..., [4 * groups.index(key // 4) + key % 4 for key in keys]]
    return torch.from_numpy((random_words >= np.uint64(int(p * 2**32))) / (1 - p))

"""The formulas behind `claims`, each with its source."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Model(NamedTuple):
    """A transformer of `layers` blocks of width `dim`, with a feed-forward of four times that."""

    layers: int
    dim: int

    def params(self, vocab: int, tied: bool = True) -> int:
        """12 L d^2 and one embedding, or two (Kaplan et al. 2020, section 2.1)."""
        return 12 * self.layers * self.dim**2 + (1 if tied else 2) * vocab * self.dim


def stored_without_checkpointing(model: Model) -> int:
    """Bytes a token in 16 bits: 34 d a layer without the scores (Korthikanti et al. 2022, equation 2).

    And 4 d for the embedding's output and the last norm's.
    """
    return 34 * model.layers * model.dim + 4 * model.dim


def seen_by_checkpointing(model: Model) -> int:
    """Bytes a token where each layer keeps its input and one layer lives (same source, section 5)."""
    return 2 * model.layers * model.dim + 34 * model.dim + 4 * model.dim


def dilated_score_bytes(tokens: float, lengths: Sequence[int], rates: Sequence[int]) -> float:
    """Bytes in fp16 of the scores of one head, all branches: each row of a branch sees w/r keys, one in r is a row."""
    return sum(tokens * w / r**2 * 2 for w, r in zip(lengths, rates, strict=True))


def zero_gb(billions: float, optimizer_bytes: float, stage: int, ranks: int) -> float:
    """GB a rank of weights and gradients in 16 bits and the optimizer's bytes (Rajbhandari et al. 2020, figure 1)."""
    shares = [1.0 if stage < needed else 1 / ranks for needed in (3, 2, 1)]
    return billions * (2 * shares[0] + 2 * shares[1] + optimizer_bytes * shares[2])


def gathered_mib(tokens: int, heads: int = 8, dim: int = 512, ranks: int = 2) -> float:
    """Three float32 blocks of H n (n / p) scores, and 8.07 tensors of n d: what S1's all-gather allocated."""
    return (3 * heads * tokens * (tokens / ranks) * 4 + 8.07 * tokens * dim * 4) / MIB


def partitioned_mib(tokens: int, heads: int = 8, dim: int = 512, ranks: int = 2) -> float:
    """The same with own queries against one chunk of keys: H (n / p)^2 scores, and tensors of n / p rows."""
    own = tokens / ranks
    return (3 * heads * own * own * 4 + 8.07 * own * dim * 4) / MIB


def tiled_mib(tokens: int, dim: int = 512, ranks: int = 2) -> float:
    """The same tensors without scores in memory."""
    return 8.07 * tokens / ranks * dim * 4 / MIB


def fitted_tokens(gib: float) -> float:
    """Tokens at which S3's own measurements, 9.1 + 0.0262 n + 6.30e-5 n^2 MiB, reach so much memory."""
    a, b, c = 6.30e-5, 0.0262, 9.1 - gib * 1024
    return (-b + sqrt(b * b - 4 * a * c)) / (2 * a)

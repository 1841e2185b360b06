"""Whether one of two takes longer, decided from rounds in which both were timed.

What disturbs a machine for longer than a round disturbs both, so the ratio of a round says more than that of two
medians. Guarantees: the interval holds the median of such ratios in 95 of 100 runs whatever their distribution, as far
as rounds are independent; "slower" and "faster" are said only where it excludes 1, "level" only where it also ends
near 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, inf
from statistics import median
from typing import NamedTuple

LEVEL = 0.95
NEAR = 0.05
"""How much slower the first may still be where the two are called level."""


class Ratio(NamedTuple):
    """The median of the rounds' ratios, and the interval that holds the true one; above 1: the first is faster."""

    median: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """Slower, faster, level, or undecided where the rounds differ too much or are too few."""
        if self.high < 1 or self.low > 1:
            return "slower" if self.high < 1 else "faster"
        return "level" if self.low >= 1 - NEAR else "undecided"

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def paired(first_s: Sequence[float], second_s: Sequence[float]) -> Ratio:
    """How many times as long the second takes, from seconds of the same rounds. Raises `ValueError` for unlike many."""
    ratios = sorted(second / first for first, second in zip(first_s, second_s, strict=True))
    # The number of ratios below the true median is binomial(n, 1/2): outside of the k-th from either end it lies with
    # the chance of fewer than k, twice.
    count, below, outside = len(ratios), 0.0, 0
    while (below := below + comb(count, outside) / 2**count) <= (1 - LEVEL) / 2:
        outside += 1
    if not outside:  # too few rounds to say anything
        return Ratio(median(ratios), 0.0, inf)
    return Ratio(median(ratios), ratios[outside - 1], ratios[-outside])

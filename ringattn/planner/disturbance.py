"""What slows some ranks and links of a simulated machine: stragglers, slow links, jitter.

Guarantees: the same disturbance, the same factors, whoever asks for them and in whatever order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringattn.errors import InputError


@dataclass(frozen=True)
class Disturbance:
    """Factors on the times of a pass. `slow_ranks`: (rank, factor on its work and packing).

    `slow_links`: (rank, peer, factor on the messages between the two, either way). `jitter`: work of a rank in a step
    takes up to this share longer, drawn evenly from `seed`. Raises `InputError` for factors below 1, which would speed
    up, for ranks and links named twice, for a negative share and for a negative seed.
    """

    slow_ranks: tuple[tuple[int, float], ...] = ()
    slow_links: tuple[tuple[int, int, float], ...] = ()
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Nothing is faster than undisturbed."""
        factors = [("slow_rank", factor) for _, factor in self.slow_ranks]
        for name, factor in (*factors, *(("slow_link", factor) for _, _, factor in self.slow_links)):
            if not factor >= 1:
                raise InputError(f"{name}: the factor {factor:g} must be at least 1, for times as long")
        if not self.jitter >= 0 or self.seed < 0:
            raise InputError(f"jitter={self.jitter:g} seed={self.seed}: neither may be negative")
        pairs = [frozenset(one[:2]) for one in self.slow_links]
        if len(set(pairs)) < len(pairs) or any(len(pair) < 2 for pair in pairs):
            raise InputError("slow_link: name each pair of different ranks once")
        ranks = [rank for rank, _ in self.slow_ranks]
        if len(set(ranks)) < len(ranks):
            raise InputError("slow_rank: name each rank once")

    def check_ranks(self, ranks: int) -> None:
        """Raise `InputError` where a rank is named that is not there."""
        named = [rank for rank, _ in self.slow_ranks] + [rank for one in self.slow_links for rank in one[:2]]
        if wrong := [rank for rank in named if not 0 <= rank < ranks]:
            raise InputError(f"slow_rank, slow_link: there is no rank {wrong[0]}, with ranks 0 to {ranks - 1}")

    def of_work(self, ranks: int, step: int) -> np.ndarray:
        """The factor on each rank's work in a step of the schedule, of shape (ranks,)."""
        factors = np.ones(ranks)
        if self.jitter:
            factors += self.jitter * np.random.default_rng((self.seed, step)).random(ranks)
        for rank, factor in self.slow_ranks:
            factors[rank] *= factor
        return factors

    def of_link(self, src: int, dst: int) -> float:
        """The factor on a message."""
        return next((factor for a, b, factor in self.slow_links if {a, b} == {src, dst}), 1.0)

"""The newest heartbeat of each rank in one feed, and since when it has not changed.

Guarantee: only what this rank itself has read counts. A time in which the feed did not answer, or in which this rank
stood still, makes nobody silent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Heard(Generic[T]):
    """One heartbeat as it was read. Times are on the monotonic clock of this process."""

    beat: T
    first_s: float
    last_s: float
    changed: bool = False
    """Whether an older heartbeat of this rank was read before, so that `first_s` is when a new one was sent."""


class Feed(Generic[T]):
    """Written by the health thread, read by any thread."""

    def __init__(self, gap_s: float) -> None:
        """After a longer time than `gap_s` without a reading, what was read before does not count."""
        self._gap_s = gap_s
        self.heard: dict[int, Heard[T]] = {}

    def note(self, rank: int, beat: T, now_s: float) -> None:
        """Record that the newest heartbeat of `rank` is `beat`."""
        before = self.heard.get(rank)
        if before is None or before.beat != beat or now_s - before.last_s > self._gap_s:
            self.heard[rank] = Heard(beat, now_s, now_s, before is not None and before.beat != beat)
        else:
            before.last_s = now_s

    def keep(self, ranks: Collection[int]) -> None:
        """Forget ranks that are not read any more: what was read of them says nothing later."""
        for rank in self.heard.keys() - set(ranks):
            del self.heard[rank]

    def unchanged(self, at_least_s: float, since_s: float) -> set[int]:
        """The ranks whose heartbeat was the same for `at_least_s`, the last time that it was read after `since_s`."""
        return {
            rank
            for rank, heard in list(self.heard.items())
            if heard.last_s - heard.first_s >= at_least_s and heard.last_s >= since_s
        }

    def new(self, since_s: float) -> set[int]:
        """The ranks that have sent a heartbeat since then."""
        return {rank for rank, heard in list(self.heard.items()) if heard.changed and heard.first_s >= since_s}

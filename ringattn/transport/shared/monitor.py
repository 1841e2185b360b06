"""Heartbeats in shared pages: who is alive, who is silent, and what a missed deadline can say of the others.

Guarantees: a rank counts as silent only by rounds that the observer itself has run, so one that was stopped itself, or
starved, blames nobody; a rank that closes or fails says so before it hangs up, and is neither silent nor gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ringattn.transport.shared.page import BEAT, CLOSED, POISON, Page

BEAT_S = 0.1
SILENCE_S = 0.8
SILENT_ROUNDS = 6
"""A rank is silent when its beat has stood still this long, over this many rounds of the observer's own thread."""
DOUBT_S = SILENCE_S + 0.6
"""How long a rank that reports a missed deadline looks who is silent: more than silence takes to show."""


class BeatMonitor:
    """One rank's view of the others. `update` runs in the thread that beats, the rest in any."""

    def __init__(self, rank: int, own: Page, pages: dict[int, Page]) -> None:
        """`pages` may still be filled in."""
        self.gone: set[int] = set()
        """Ranks whose process has ended without closing the ring."""
        self._rank, self._own, self._pages = rank, own, pages
        self._rounds = 0
        self._heard = dict.fromkeys(pages, (0, time.monotonic(), 0))  # beat, when it was new, the round in which it was

    def update(self) -> None:
        """One round: read every beat."""
        now = time.monotonic()
        self._rounds += 1
        for rank, page in self._pages.items():
            beat = page.load(BEAT)
            if beat != self._heard[rank][0]:
                self._heard[rank] = (beat, now, self._rounds)

    def lose(self, hung_up: set[int]) -> bool:
        """Note ranks that have hung up; whether one of them is gone."""
        gone = {rank for rank in hung_up if not self._ended(rank)}
        self.gone |= gone
        return bool(gone)

    def silent(self) -> list[int]:
        """The ranks whose heartbeat stands still, though they have neither closed nor failed."""
        now = time.monotonic()
        return [
            rank
            for rank, (_, when, round_) in self._heard.items()
            if rank != self._rank
            and now - when >= SILENCE_S
            and self._rounds - round_ >= SILENT_ROUNDS
            and not self._ended(rank)
        ]

    def diagnosis(self, awaited: Iterable[int]) -> str:
        """After a missed deadline: who is silent or gone, and where the others of `awaited` are.

        Takes until each rank has either shown a new beat or been silent for long enough.
        """
        began = time.monotonic()
        while time.monotonic() < began + DOUBT_S and self._doubtful(began):
            time.sleep(BEAT_S / 4)
        silent = [rank for rank in self.silent() if rank not in self.gone]
        words = [f"rank {rank} is gone (its process has ended)" for rank in sorted(self.gone)]
        words += [
            f"rank {rank} is silent (stopped, stuck or gone), last heard in '{self._pages[rank].status}'"
            for rank in silent
        ]
        for rank in awaited:
            if self._own.load(CLOSED, rank):
                words.append(f"rank {rank} has left its ring")
            elif rank not in silent and rank not in self.gone:
                words.append(f"rank {rank} is alive in '{self._pages[rank].status}'")
        return "; ".join(words)

    def _doubtful(self, since: float) -> bool:
        """Whether some rank has neither shown a beat since then nor been silent for long enough."""
        known = {self._rank, *self.silent(), *self.gone}
        return any(
            when < since and rank not in known and not self._ended(rank) for rank, (_, when, _) in self._heard.items()
        )

    def _ended(self, rank: int) -> bool:
        return bool(self._own.load(CLOSED, rank) or self._own.load(POISON, rank))

"""Deadlines, and waits that keep them."""

from __future__ import annotations

import time
from collections.abc import Callable

SPIN_S = 200e-6
"""How long to ask again and again before the first nap: a launch is over within that."""
FIRST_NAP_S = 50e-6
LONGEST_NAP_S = 0.02


class Deadline:
    """A moment on the monotonic clock, `timeout_s` from its making."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def passed(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self._at

    @property
    def left_s(self) -> float:
        """Seconds until the moment, negative after it."""
        return self._at - time.monotonic()

    def plus(self, seconds: float) -> Deadline:
        """The deadline so much later, still known as one of `timeout_s`."""
        later = Deadline(self.timeout_s)
        later._at = self._at + seconds
        return later


def wait_until(
    ready: Callable[[], bool],
    deadline: Deadline,
    watch: Callable[[], None] | None = None,
    naps_s: tuple[float, float] = (FIRST_NAP_S, LONGEST_NAP_S),
) -> bool:
    """Nap until `ready()`; False when the deadline passed first. `watch` runs before each nap and may raise.

    What is ready counts before what `watch` finds: another rank may have gone on, and failed, since it was asked for.
    `naps_s`: the first nap and the longest.
    """
    (nap_s, longest_nap_s), spun = naps_s, time.monotonic() + SPIN_S
    while not ready():
        if deadline.passed:
            return False
        if watch is not None:
            try:
                watch()
            except Exception:
                if ready():
                    return True
                raise
        if time.monotonic() >= spun:
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, longest_nap_s)
    return True

"""Waiting on the host: short naps until something is true, a deadline passes, or a watched failure is raised.

Guarantees: no wait without a deadline; no nap longer than `LONGEST_NAP_S`, so that a signal is served in time.
"""

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
        """Whether the moment has come."""
        return time.monotonic() >= self._at


def wait_until(ready: Callable[[], bool], deadline: Deadline, watch: Callable[[], None] | None = None) -> bool:
    """Nap until `ready()`; False when the deadline came first. `watch` runs before each nap and may raise."""
    nap_s, spun = FIRST_NAP_S, time.monotonic() + SPIN_S
    while not ready():
        if deadline.passed:
            return False
        if watch is not None:
            watch()
        if time.monotonic() >= spun:
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
    return True

"""The last calls of a rank as its peers can read them in its pulse: number, digest, and the words of the newest.

With it the ranks need not agree anew on a call that they have agreed on once: whoever waits compares, and a rank that
makes another call is found. Promises: calls are compared by number, so ranks that are some calls apart are not wronged.
Does not know: what a call is.
"""

from __future__ import annotations

import json
from collections import deque

WINDOW = 64
"""Calls that are kept; ranks that are further apart than this are compared later."""
WORDS = 400


class CallWindow:
    """Written by the thread that makes the calls, read by the supervisor's."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, str]] = deque(maxlen=WINDOW)
        self._words = ""

    def announce(self, number: int, digest: bytes, words: str) -> None:
        """This rank now makes its call `number`."""
        self._words = words
        self._calls.append((number, digest.hex()))

    def status(self, where: str, exchanges: int) -> str:
        """For the pulse. `exchanges`: how many this rank has started."""
        calls = list(self._calls)
        return json.dumps({"at": where, "exchanges": exchanges, "words": self._words[:WORDS], "calls": calls})

    def differs(self, status: str) -> str | None:
        """The first call that a peer with this `status` made otherwise than this rank, in words; None if none."""
        told = json.loads(status)
        theirs = dict(map(tuple, told["calls"]))
        mine = list(self._calls)
        for number, digest in mine:
            if theirs.get(number, digest) != digest:
                here = f", here '{self._words[:WORDS]}'" if number == mine[-1][0] else ""
                return f"call {number} is another there (now at '{told['words']}'{here})"
        return None

    @staticmethod
    def place(status: str) -> tuple[int, str]:
        """How many exchanges the rank that said `status` has started, and where it was."""
        told = json.loads(status)
        return told["exchanges"], told["at"]

"""The calls of a rank as its peers can read them in its pulse: number, digest of all calls up to it, newest words.

With it the ranks need not agree anew on a call that they have agreed on once: whoever listens compares, and a rank that
makes another call is found. Guarantees: calls are compared by number, so ranks that are some calls apart are not
wronged; every `MILESTONE`-th call stays comparable, so ranks that are far apart are compared too, and a difference,
once made, shows in every later call.
"""

from __future__ import annotations

import json
from collections import deque
from hashlib import sha256

WINDOW = 64
"""Newest calls that are kept one by one."""
MILESTONE = 64
MILESTONES = 64
WORDS = 400


class CallWindow:
    """Written by the thread that makes the calls, read by those that watch and beat."""

    def __init__(self) -> None:
        self._newest: deque[tuple[int, str]] = deque(maxlen=WINDOW)
        self._milestones: deque[tuple[int, str]] = deque(maxlen=MILESTONES)
        self._chain = b""
        self._words = ""
        self.number = 0

    def announce(self, number: int, digest: bytes, words: str) -> None:
        """This rank now makes its call `number`."""
        self._chain = sha256(self._chain + digest).digest()[:8]
        self._words, self.number = words, number
        entry = number, self._chain.hex()
        self._newest.append(entry)
        if number % MILESTONE == 0:
            self._milestones.append(entry)

    def status(self, **place: object) -> str:
        """For the pulse; `place` is what `places` gives back."""
        calls = [*self._milestones, *self._newest]
        return json.dumps({**place, "call": self.number, "words": self._words[:WORDS], "calls": calls})

    def differs(self, status: str) -> str | None:
        """The first call that a peer with this `status` is known to have made otherwise, in words; None if none."""
        told = json.loads(status)
        theirs = dict(map(tuple, told["calls"]))
        for number, chain in [*self._milestones, *self._newest]:
            if theirs.get(number, chain) != chain:
                return f"call {number} is another there (now at '{told['words']}', here '{self._words[:WORDS]}')"
        return None

    @staticmethod
    def places(status: str) -> dict[str, object]:
        """What `status` was given, and `call`, the number of the rank's newest call."""
        return json.loads(status)

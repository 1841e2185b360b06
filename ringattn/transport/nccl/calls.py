"""The calls of a rank, as its heartbeats tell them, so that ranks need not compare a call that they compared before."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from ringattn.transport.base import COMPARED

KEPT = 8192
"""Calls that a rank remembers."""
BACK = (0, 1, 2, 3, 5, 8, 16, 64, 256, 1024, 4096)
"""How far the calls lie back that a heartbeat tells of, besides the first: ranks are compared however far one is
ahead."""
WORDS = 120


GRADIENTS_DIFFER = (
    "needs gradients on one of the two ranks only, which the other cannot know of a call that was compared before; let "
    "an input require a gradient on every rank, as q.requires_grad_() does"
)
CHAIN, CALL = 16, 20
"""Hexadecimal digits of a call in a heartbeat: the chain ends at the first place, a digest of the call alone at the
second, and a chain of needed gradients follows."""


class CallHistory:
    """Written by the thread that makes the calls, read by the supervisor and the heartbeat thread.

    The chain of a call is a digest of it and of all before it, so that one that is equal vouches for all before it.
    A call that the ranks compare themselves is the same in all chains, whatever each rank made of it: if they refuse it
    together, the ring goes on. What follows the chain says only how a difference came about.
    """

    def __init__(self) -> None:
        self._chains: dict[int, str] = {}
        self._chain = self._gradients = b""
        self.words = ""
        self.number = 0

    def announce(self, number: int, digest: bytes, words: str, gradients: str = "") -> None:
        """This rank now makes its call `number`."""
        link = b"" if gradients == COMPARED else digest
        self._chain = sha256(self._chain + link + gradients.encode()).digest()[:8]
        self._gradients = sha256(self._gradients + gradients.encode()).digest()[:2]
        self._chains[number] = self._chain.hex() + sha256(digest).hexdigest()[:4] + self._gradients.hex()
        self._chains.pop(number - KEPT, None)
        self.words, self.number = words.partition("\n")[0][:WORDS], number

    def told(self) -> dict[str, object]:
        """For the heartbeat: a few hundred bytes, however many calls there were."""
        number = self.number
        return {"call": number, "words": self.words, "calls": [self._chains.get(n, "") for n in _told_of(number)]}

    def differs(self, theirs: dict[str, Any]) -> str | None:
        """The first call that the rank which told `theirs` is known to have made otherwise, in words; None if none."""
        equal = 0
        for number, chain in zip(_told_of(theirs["call"]), theirs["calls"], strict=True):
            mine = self._chains.get(number, "")
            if mine and chain and mine[:CHAIN] != chain[:CHAIN]:
                if number == equal + 1 and mine[CHAIN:CALL] == chain[CHAIN:CALL]:
                    return f"call {number} {GRADIENTS_DIFFER}"
                which = f"call {number}" if number == equal + 1 else f"one of calls {equal + 1} to {number}"
                other = f"{which} is another there (now at '{theirs['words']}', here '{self.words}')"
                # Of several calls the first that differs is not known, only that needed gradients differ, too.
                several = number != equal + 1 and mine[CALL:] != chain[CALL:]
                return f"{other}, or {GRADIENTS_DIFFER}" if several else other
            equal = number if mine and chain else equal
        return None


def _told_of(number: int) -> list[int]:
    """The calls of which a rank tells that makes its call `number`, ascending."""
    return sorted({max(number - back, 1) for back in BACK}) if number else []

"""All ranks make the same call, or all of them raise.

Promises one question and one answer a call: the ranks' words are compared before anything else is sent, and one rank's
refusal is every rank's.
Does not know: what the calls do.
"""

from __future__ import annotations

from hashlib import sha256

from ringattn.errors import DisagreementError, InputError
from ringattn.transport.base import Transport


class Agreement:
    """One rank's side of the agreements of a ring, numbered by its calls."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._calls = 0
        self._agreed: set[bytes] = set()

    def announced(self, words: str, refusal: InputError | None, always: bool) -> str | None:
        """What to say to the other ranks, or None where they have agreed on these words before and would be noticed.

        A transport that itself notices a rank with another call needs one agreement on a call, unless `always`.
        """
        self._calls += 1
        mine = f"refused {refusal}" if refusal is not None else words
        noticed = self._transport.announce(self._calls, _digest(mine), mine)
        known = noticed and _digest(mine) in self._agreed and refusal is None and not always
        return None if known else mine

    def ask(self, mine: str) -> list[str]:
        """Say it, and hear every rank."""
        return [answer.decode() for answer in self._transport.agree(f"{self._calls}: {mine}".encode())]

    def settle(self, mine: str, answers: list[str]) -> None:
        """Raise `InputError` for what another rank refused, and `DisagreementError` where the ranks do not agree."""
        told = [answer.partition(": ")[2] for answer in answers]
        for rank, answer in enumerate(told):
            if answer.startswith("refused "):
                raise InputError(f"rank {rank} refused the call, so all ranks do: {answer.removeprefix('refused ')}")
        if len(set(answers)) > 1:
            listed = "\n".join(f"  rank {rank}: call {answer}" for rank, answer in enumerate(answers))
            raise DisagreementError(f"the ranks do not ask for the same:\n{listed}")
        self._agreed.add(_digest(mine))


def _digest(words: str) -> bytes:
    return sha256(words.encode()).digest()[:8]

"""All ranks make the same call, or all of them raise.

Guarantees one question and one answer a call: the ranks' words are compared before anything else is sent, and one
rank's refusal is every rank's.
"""

from __future__ import annotations

from hashlib import sha256

from ringattn.errors import DisagreementError, InputError, RingError
from ringattn.transport.base import Transport

KEPT_AGREEMENTS = 4096
"""Calls that a ring remembers to have agreed on, those made last; with other documents in each step there is no end to
them. All ranks forget the same one at the same call."""


class ConsistencyCheck:
    """One rank's side of the agreements of a ring, numbered by its calls."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._agreed: dict[bytes, None] = {}
        self.calls = 0
        """Calls so far: the number of the newest one, which all ranks that make the same calls give it."""

    def announced(self, words: str, refusal: RingError | None, always: bool, backward_of: int | None) -> str | None:
        """What to say to the other ranks, or None where they have agreed on these words before and would be noticed.

        A transport that itself notices a rank with another call needs one agreement on a call, unless `always`. It is
        told `backward_of` too, so one agreement is enough for the backward passes of all calls with these words.
        """
        self.calls += 1
        mine = words if backward_of is None else f"backward of call {backward_of}: {words}"
        if refusal is not None:
            mine = f"refused {refusal}"
        noticed = self._transport.announce(self.calls, _digest(mine), mine)
        known = noticed and refusal is None and not always and self._used(words, backward_of)
        return None if known else mine

    def ask(self, mine: str) -> list[str]:
        """Say it, and hear every rank."""
        return [answer.decode() for answer in self._transport.all_gather_bytes(f"{self.calls}: {mine}".encode())]

    def settle(self, words: str, backward_of: int | None, answers: list[str]) -> None:
        """Raise `InputError` for what another rank refused, and `DisagreementError` where the ranks do not agree."""
        told = [answer.partition(": ")[2] for answer in answers]
        for rank, answer in enumerate(told):
            if answer.startswith("refused "):
                raise InputError(f"rank {rank} refused the call, so all ranks do: {answer.removeprefix('refused ')}")
        if len(set(answers)) > 1:
            listed = "\n".join(f"  rank {rank}: call {answer}" for rank, answer in enumerate(answers))
            raise DisagreementError(f"the ranks do not ask for the same:\n{listed}")
        self._agreed[_key(words, backward_of)] = None
        if len(self._agreed) > KEPT_AGREEMENTS:
            del self._agreed[next(iter(self._agreed))]

    def _used(self, words: str, backward_of: int | None) -> bool:
        """Whether the ranks have agreed on these words; if so they are now the ones used last, on every rank."""
        key = _key(words, backward_of)
        if key not in self._agreed:
            return False
        self._agreed[key] = self._agreed.pop(key)
        return True


def _key(words: str, backward_of: int | None) -> bytes:
    return _digest(words if backward_of is None else f"backward of {words}")


def _digest(words: str) -> bytes:
    return sha256(words.encode()).digest()[:8]

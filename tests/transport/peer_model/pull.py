"""The order of operations of an exchange over shm, as `ShmTransport` has it: the receiver copies (pull).

All steps are the host's. A start waits for no other rank. A wait takes all its receives before it waits until its sends
have been taken, so it waits only for starts and for receives of the same exchange: no deadlock. Buffers belong to the
transport from start to wait, so a copy needs no credit; the credit says that the sender's buffer has been read.
A rank that fails poisons every page before its caller gets the error and may overwrite what it was sending. So a
receiver that checks behind its copy knows that it has read the right bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringattn.transport.peer.program import (
    Copy,
    FindBuffer,
    LogStart,
    Program,
    Wait,
    Word,
    WordKind,
    Write,
    counted,
    last,
    received,
    sent,
)
from tests.transport.peer_model.endings import EndStep


def pull_exchange(rank: int, sends: Sequence[int], recvs: Sequence[int]) -> Program:
    """What `rank` does to send a message to each peer of `sends` and receive one from each of `recvs`."""
    out, into = sent(rank, sends), received(rank, recvs)
    start: list[Any] = [LogStart(*each, sends=False) for each in into]
    for each in out:
        # Whoever sees the arrival finds the entry.
        start += [LogStart(*each, sends=True), Write(Word(WordKind.ARRIVAL, each.src, each.dst), each.nth)]
    wait: list[Any] = []
    for each in into:
        wait += [Wait(Word(WordKind.ARRIVAL, each.src, each.dst), each.nth, data=True), FindBuffer(*each), Copy(*each)]
        # Behind the copy: what was right until now was right while it was read.
        wait += [EndStep.CHECK, Write(Word(WordKind.CREDIT, each.src, each.dst), each.nth)]
    wait += [Wait(Word(WordKind.CREDIT, each.src, each.dst), each.nth) for each in last(out)]
    return Program(rank, tuple(start), tuple(wait), counted(out, into))

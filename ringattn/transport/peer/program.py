"""The order of operations of an exchange by copy engines.

The sender's copy engine writes the receiver's buffer (push). Why this order, of the k-th message of a pair:
no read before the write: copy, fence of the store, arrival >= k, DONE, consumer;
no overwrite before the last read: last reader, READY, credit >= k, copy;
source kept until it is read: copy, DONE, caller;
no deadlock: credits depend only on READY, copies on credits, arrivals on copies, and READY on earlier exchanges, so
every wait is for a smaller (exchange, phase), also where all streams of a device share one hardware queue.
Therefore stores stand before waits in each batch, data and flags never share one, and between the first operation that
is enqueued and the last the host waits for nothing. `tests/transport/peer_model` proves it and breaks each rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringattn.transport.shared.steps import (
    Copy,
    Event,
    FindBuffer,
    LogStart,
    Memops,
    PairMessage,
    Program,
    RecordEvent,
    Step,
    Stream,
    Wait,
    WaitEvent,
    Word,
    WordKind,
    Write,
    counted,
    last,
    received,
    sent,
)

MAX_MEMOPS = 255
"""Operations in one batch of the driver."""


def push_exchange(rank: int, sends: Sequence[int], recvs: Sequence[int]) -> Program:
    """What `rank` does to send a message to each peer of `sends` and receive one from each of `recvs`.

    A peer may stand there several times. Nothing at all where both are empty.
    """
    out, into = sent(rank, sends), received(rank, recvs)
    if not out and not into:
        return Program(rank, (), (), ())
    logged = [LogStart(*each, sends=False) for each in into] + [LogStart(*each, sends=True) for each in out]
    allowed: list[Write | Wait] = [
        *(Write(_word(WordKind.CREDIT, each), each.nth) for each in last(into)),
        *(Wait(_word(WordKind.CREDIT, each), each.nth) for each in last(out)),
    ]
    arrived: list[Write | Wait] = [
        *(Write(_word(WordKind.ARRIVAL, each), each.nth) for each in last(out)),
        *(Wait(_word(WordKind.ARRIVAL, each), each.nth, data=True) for each in last(into)),
    ]
    start: list[Step] = [
        *logged,
        *(FindBuffer(*each) for each in out),
        RecordEvent(Event.READY, Stream.CALLER),
        WaitEvent(Event.READY, Stream.LANE),
        *_batches(allowed),
        *(Copy(*each) for each in out),
        *_batches(arrived),
        RecordEvent(Event.DONE, Stream.LANE),
    ]
    return Program(rank, tuple(start), (WaitEvent(Event.DONE, Stream.CALLER),), counted(out, into))


def _word(kind: WordKind, message: PairMessage) -> Word:
    return Word(kind, message.src, message.dst)


def _batches(ops: list[Write | Wait]) -> list[Memops]:
    return [Memops(tuple(ops[at : at + MAX_MEMOPS])) for at in range(0, len(ops), MAX_MEMOPS)]

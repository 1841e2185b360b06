"""What `ringattn.bench.shm` times: ways in which every rank gets bytes from the one before, all at once.

`exchanging` is a transport. `copying` is what no transport can be below that copies once: the same bytes out of the
same kind of memory of the same neighbor by the copy that shm makes, and nothing is sent, agreed on or waited for.
Guarantees: bytes that arrive wrong raise `GateError`, and nothing is timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.bench.gate import GateError
from ringattn.transport.base import Message, Transport
from ringattn.transport.shared.page import Segment
from ringattn.transport.shared.transport import ShmTransport, copy

BYTES_PER_SERIES = 1 << 28
MOST, LEAST = 100, 4
BATCHES = 2


class Way(NamedTuple):
    """`move` brings the bytes of `sent` of the rank before `into`, called on all ranks at about the same time."""

    name: str
    transport: Transport
    sent: Tensor
    into: Tensor
    move: Callable[[], None]


def exchanging(transport: Transport, nbytes: int) -> Way:
    """An exchange with both neighbors, bound."""
    sent, into = transport.allocate(nbytes), transport.allocate(nbytes)
    after, before = _neighbors(transport)
    hop = transport.bind([Message(after, sent, "sent")], [Message(before, into, "sent")])
    return Way(transport.name, transport, sent, into, lambda: hop.start().wait())


def copying(transport: ShmTransport, nbytes: int) -> Way:
    """A copy out of the memory of the rank before, which is mapped here."""
    own, into = Segment.create("copied", nbytes), transport.allocate(nbytes)
    own.populate()
    numbers = transport.all_gather_bytes(str(transport.group.share(own)).encode())
    _, before = _neighbors(transport)
    until = time.monotonic() + transport.group.timeout_s
    theirs = Segment.attach(transport.group.pull(before, int(numbers[before]), until))
    sent = torch.frombuffer(own.buffer(0, nbytes), dtype=torch.uint8)
    return Way("copy", transport, sent, into, lambda: copy(into.data_ptr(), theirs.address, nbytes))


def exchanges(way: Way) -> list[float]:
    """Seconds of each exchange of a series on this rank. Ranks meet in each of them."""
    _check(way)
    times = []
    for _ in range(max(LEAST, min(MOST, BYTES_PER_SERIES // len(way.sent)))):
        start = time.perf_counter()
        way.move()
        times.append(time.perf_counter() - start)
    return times


def copies(way: Way) -> list[float]:
    """Seconds of a copy on the slowest rank, the mean of a batch: copies alone do not make ranks meet.

    With more ranks than processors a copy of its own may run between two turns of the others, and so take no longer
    than where there are none. A batch is longer than such turns, and starts on all ranks at once.
    """
    _check(way)
    count, own = max(LEAST, BYTES_PER_SERIES // len(way.sent)), []
    for _ in range(BATCHES):
        way.transport.all_gather_bytes(b"")
        start = time.perf_counter()
        for _ in range(count):
            way.move()
        own.append((time.perf_counter() - start) / count)
    by_rank = [json.loads(told) for told in way.transport.all_gather_bytes(json.dumps(own).encode())]
    return [max(batch) for batch in zip(*by_rank, strict=True)]


def _check(way: Way) -> None:
    """One move that the gate looks at; all ranks are done with it."""
    rank, before = way.transport.rank, _neighbors(way.transport)[1]
    pattern = torch.arange(251, dtype=torch.uint8)  # a prime, so that no shift of whole words looks alike
    way.sent.copy_(pattern.repeat(len(way.sent) // 251 + 1)[: len(way.sent)])
    way.sent[-1], way.into[:] = rank, 255
    way.transport.all_gather_bytes(b"")
    way.move()
    if not torch.equal(way.into[:-1], way.sent[:-1]) or way.into[-1] != before:
        raise GateError(f"rank {rank}: {len(way.sent)} bytes over {way.name} arrived wrong")
    way.transport.all_gather_bytes(b"")


def _neighbors(transport: Transport) -> tuple[int, int]:
    """The next rank and the one before."""
    return (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size

"""The transfers that `ringattn.bench.shm` times: all ranks get bytes from their previous rank at the same time.

`exchanging` uses a transport. `copying` is a lower bound for transports that copy once: it copies the same bytes from
the same kind of memory of the same neighbor, with the copy function of shm, and without any message or wait.
Guarantees: if wrong bytes arrive, `GateError` is raised and nothing is timed.
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
    """A way to transfer bytes. `move` transfers `sent` of the previous rank to `into` of this rank.

    All ranks call `move` at about the same time.
    """

    name: str
    transport: Transport
    sent: Tensor
    into: Tensor
    move: Callable[[], None]


def exchanging(transport: Transport, nbytes: int) -> Way:
    """Return an exchange with both neighbors over a transport."""
    sent, into = transport.allocate(nbytes), transport.allocate(nbytes)
    next_rank, previous_rank = _neighbors(transport)
    hop = transport.bind([Message(next_rank, sent, "sent")], [Message(previous_rank, into, "sent")])
    return Way(transport.name, transport, sent, into, lambda: hop.start().wait())


def copying(transport: ShmTransport, nbytes: int) -> Way:
    """Return a copy from the mapped memory of the previous rank."""
    segment, into = Segment.create("copied", nbytes), transport.allocate(nbytes)
    segment.populate()
    numbers = transport.all_gather_bytes(str(transport.group.share(segment)).encode())
    _, previous_rank = _neighbors(transport)
    deadline_s = time.monotonic() + transport.group.timeout_s
    peer_segment = Segment.attach(transport.group.pull(previous_rank, int(numbers[previous_rank]), deadline_s))
    sent = torch.frombuffer(segment.buffer(0, nbytes), dtype=torch.uint8)
    return Way("copy", transport, sent, into, lambda: copy(into.data_ptr(), peer_segment.address, nbytes))


def exchanges(way: Way) -> list[float]:
    """Return the seconds of each exchange of a series on this rank. Each exchange synchronises the ranks."""
    _check(way)
    times = []
    for _ in range(max(LEAST, min(MOST, BYTES_PER_SERIES // len(way.sent)))):
        start = time.perf_counter()
        way.move()
        times.append(time.perf_counter() - start)
    return times


def copies(way: Way) -> list[float]:
    """Return the mean seconds per copy of each batch, on the slowest rank of that batch.

    Copies do not synchronize the ranks. With more ranks than processors, a single copy may therefore run while the
    other ranks are not scheduled, and take no longer than without them. A batch is longer than a time slice, and starts
    on all ranks at the same time.
    """
    _check(way)
    count, batch_means = max(LEAST, BYTES_PER_SERIES // len(way.sent)), []
    for _ in range(BATCHES):
        way.transport.all_gather_bytes(b"")
        start = time.perf_counter()
        for _ in range(count):
            way.move()
        batch_means.append((time.perf_counter() - start) / count)
    by_rank = [json.loads(encoded) for encoded in way.transport.all_gather_bytes(json.dumps(batch_means).encode())]
    return [max(batch) for batch in zip(*by_rank, strict=True)]


def _check(way: Way) -> None:
    """Transfer a pattern once and check the received bytes. It returns after all ranks have finished the check.

    Raises `GateError` if a byte is wrong.
    """
    rank, previous_rank = way.transport.rank, _neighbors(way.transport)[1]
    pattern = torch.arange(251, dtype=torch.uint8)  # a prime, so that a shift by whole words is noticed
    way.sent.copy_(pattern.repeat(len(way.sent) // 251 + 1)[: len(way.sent)])
    way.sent[-1], way.into[:] = rank, 255
    way.transport.all_gather_bytes(b"")
    way.move()
    if not torch.equal(way.into[:-1], way.sent[:-1]) or way.into[-1] != previous_rank:
        raise GateError(f"rank {rank}: {len(way.sent)} bytes over {way.name} arrived wrong")
    way.transport.all_gather_bytes(b"")


def _neighbors(transport: Transport) -> tuple[int, int]:
    """Return the next rank and the previous one."""
    return (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size

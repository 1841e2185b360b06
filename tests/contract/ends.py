"""The part of the transport contract on rings that are forked away or dropped: checks that run on each rank."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from ringattn.errors import ClosedError, PeerLostError
from ringattn.ring import Ring
from ringattn.transport.base import Message, Transport

CHILD_S = 8
"""A forked child that lives longer is killed."""


def forked_child_is_refused(ring: Transport) -> None:
    # Every rank forks while a message is under way. The parents finish it and exchange another.
    after, before = (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size
    sent, received = torch.full((16,), float(ring.rank)), torch.zeros(16)
    hop = ring.bind([Message(after, sent)], [Message(before, received)])
    handle = hop.start()
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)
        os._exit(_count_refusals(ring, [handle.wait, hop.start]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    handle.wait()
    assert received.tolist() == [float(before)] * 16
    hop.start().wait()
    assert ring.all_gather_bytes(bytes([ring.rank])) == [bytes([rank]) for rank in range(ring.world_size)]


def _count_refusals(ring: Transport, calls: list[Callable[[], object]]) -> int:
    """How many of `calls` and of the calls of `ring` raise the error of a forked child; 99 if one does not."""
    calls += [
        lambda: ring.allocate(8),
        lambda: ring.all_gather_bytes(b""),
        lambda: ring.exchange([], []),
        lambda: ring.bind([], []).start(),
    ]
    refused = 0
    for call in calls:
        try:
            call()
            return 99
        except ClosedError as error:
            refused += "a forked process cannot use the ring of its parent; open a ring after the fork" in str(error)
    ring.abort(ValueError("a failure of the child"))
    ring.close()
    return refused


def dropped_ring_is_closed(ring: Transport) -> None:
    ring.all_gather_bytes(b"")
    if ring.rank == 1:
        group = Ring(transport=ring)
        group.barrier()
        del group
        gc.collect()
        until = time.monotonic() + CHILD_S
        while ring._end is None:  # type: ignore[attr-defined]
            assert time.monotonic() < until
            time.sleep(0.01)
        with pytest.raises(ClosedError, match="rank 1 closed its ring"):
            ring.allocate(8)
    else:
        group = Ring(transport=ring)
        group.barrier()
        buffer = torch.zeros(16)
        with pytest.raises(PeerLostError, match="rank 1 closed its ring"):
            ring.exchange([], [Message(1, buffer)]).wait()

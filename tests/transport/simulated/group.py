"""The group that a thread has open, and what NCCL refuses to launch as one.

Source: NCCL user guide, "Group calls"; enqueue.cc and group.cc of NCCL 2.28.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tests.transport.simulated.communicators import Communicator
from tests.transport.simulated.entries import Op


class QueuedCall(NamedTuple):
    """A send or receive that waits for the end of its group."""

    comm: Communicator
    op: Op
    stream: str


class OpenGroup(threading.local):
    """Each thread has one of its own."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[QueuedCall] = []

    def take(self) -> list[QueuedCall]:
        """All that is queued, which is then queued no more."""
        calls, self.calls = self.calls, []
        return calls


def check_group(calls: Sequence[QueuedCall]) -> str | None:
    """Why these calls cannot be one group, None if they can."""
    if len({call.comm.config.blocking for call in calls}) > 1:
        return "blocking and non-blocking communicators share a group"
    streams: dict[Communicator, str] = {}
    selves: Counter[tuple[Communicator, str]] = Counter()
    for comm, op, stream in calls:
        if streams.setdefault(comm, stream) != stream:
            return f"{comm} is given two streams in one group, which this simulator does not model"
        if op.peer == comm.rank:
            selves[comm, op.kind] += 1
    for comm in streams:
        if selves[comm, "send"] != selves[comm, "recv"]:
            return f"a send to itself and its receive must be in one group of {comm}"
    return None

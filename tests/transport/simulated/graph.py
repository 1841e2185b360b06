"""CUDA graphs: what one rank issued during a capture, kept to be issued again.

Guarantees: a capture runs nothing of what the streams are given; a replay issues it in the captured order. The caller's
own compute is host code here: it runs once, at the capture, and a replay only repeats what it told the trace.
Source: CUDA programming guide, "Stream capture"; NCCL user guide, "Using NCCL with CUDA graphs".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.transport.simulated.communicators import Communicator
from tests.transport.simulated.entries import Entry, Launch, Record, Touch, Wait

if TYPE_CHECKING:
    from tests.transport.simulated.world import SimWorld


class Graph:
    """Alive until `reset`; its communicators cannot end before."""

    def __init__(self, world: SimWorld, rank: int) -> None:
        self.rank = rank
        self._world = world
        self._entries: list[Entry] = []
        self._alive = True

    def add(self, entry: Entry) -> None:
        """Capture one entry."""
        known = [record for record in self._entries if isinstance(record, Record)]
        if isinstance(entry, Wait) and entry.record not in known:
            self._world.violate(self.rank, f"{entry} that was recorded outside of the capture")
        self._entries.append(entry)

    def uses(self, comm: Communicator) -> bool:
        """Whether the graph lives and launches on `comm`."""
        return self._alive and any(isinstance(entry, Launch) and entry.comm is comm for entry in self._entries)

    def replay(self) -> None:
        """Issue everything again, from the thread that computes; its waits of the compute stream block."""
        world, fresh = self._world, {}
        for entry in self._entries:
            if isinstance(entry, Record):
                fresh[entry] = Record(self.rank, entry.stream, captured=False)
                world.issue(fresh[entry])
            elif isinstance(entry, Wait):
                world.issue(Wait(self.rank, entry.stream, fresh.get(entry.record, entry.record)))
            elif isinstance(entry, Touch):
                world.issue(Touch(self.rank, entry.stream, entry.reads, entry.writes, entry.label, entry.held))
            elif isinstance(entry, Launch):
                launch = entry.again(world.next_group(self.rank))
                world.number(launch)
                world.submit(launch)

    def reset(self) -> None:
        """Destroy the graph."""
        self._alive = False

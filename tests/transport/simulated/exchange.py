"""One rank that obeys every rule: what tests begin with before they break one.

Guarantees: without arguments that ask for a mistake, a run of it has no violation and no race.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ringattn.transport.nccl.binding import Capability, CommConfig, Status
from tests.transport.simulated.device import SimDevice, SimEvent, span
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import SimWorld

Result = TypeVar("Result")
Part = tuple[str, torch.Tensor, int]
"""send or recv, buffer, peer."""


class Rank:
    """`rank` of a world with its library, its device, one communicator and one communication stream."""

    def __init__(
        self,
        world: SimWorld,
        rank: int,
        unique_id: bytes,
        blocking: bool = False,
        uuid: str | None = None,
        capabilities: frozenset[Capability] = frozenset(Capability),
    ) -> None:
        self.world, self.rank = world, rank
        self.after, self.before = (rank + 1) % world.world_size, (rank - 1) % world.world_size
        self.device = SimDevice(world, rank, uuid)
        self.library = SimLibrary(world, rank, capabilities)
        self.lane = self.device.new_stream()
        self.compute = self.device.current_stream()
        self._kept: list[torch.Tensor] = []
        self.comm = self.library.init(world.world_size, unique_id, rank, CommConfig(blocking))

    def open(self) -> Rank:
        """Wait until the communicator is ready."""
        with self.world.changed:
            self.world.changed.wait_for(lambda: self.world.registry.by_handle[self.comm].clique.full, 10.0)
        assert self.settle() == Status.SUCCESS
        return self

    def settle(self, comm: int = 0) -> int:
        """Poll a communicator as long as it is in progress, at most a few times; its last status."""
        for _ in range(self.world.polls):
            if (status := self.library.state(comm or self.comm)) != Status.IN_PROGRESS:
                return status
        return self.library.state(comm or self.comm)

    def post(self, parts: Sequence[Part], comm: int = 0) -> list[int]:
        """The statuses of these calls, as they are."""
        calls = {"send": self.library.send, "recv": self.library.recv}
        return [
            calls[kind](buffer.data_ptr(), buffer.nbytes, peer, comm or self.comm, self.lane.cuda_stream)
            for kind, buffer, peer in parts
        ]

    def group(self, parts: Sequence[Part], comm: int = 0) -> int:
        """One group, launched; its status once it is finalized."""
        self.library.group_start()
        self.post(parts, comm)
        status = self.library.group_end()
        return self.settle(comm) if status == Status.IN_PROGRESS else status

    def recorded(self) -> SimEvent:
        """An event behind everything that the communication stream holds."""
        event = self.device.new_event()
        event.record(self.lane)
        return event

    def wait(self) -> None:
        """Block until the communication stream is empty."""
        self.compute.wait_event(self.recorded())

    def filled(self, value: int, nbytes: int = 16) -> torch.Tensor:
        """Device memory full of `value`, which lives as long as this rank."""
        self._kept.append(self.device.empty(nbytes).fill_(value))
        return self._kept[-1]


def until(what: Callable[[], bool]) -> None:
    """Return when another thread has brought `what` about."""
    end_s = time.monotonic() + 10.0
    while not what():
        assert time.monotonic() < end_s, "it did not arrive about"
        time.sleep(0.001)


def open_ranks(world: SimWorld, **options: Any) -> list[Rank]:
    """All ranks of a world, driven by the calling thread: nothing that they do may block."""
    unique_id = SimLibrary(world, 0).unique_id()
    ranks = [Rank(world, rank, unique_id, **options) for rank in range(world.world_size)]
    return [rank.open() for rank in ranks]


def on_ranks(world: SimWorld, body: Callable[[Rank], Result], **options: Any) -> list[Result | None]:
    """`body` on a thread per rank; the results by rank."""
    unique_id = SimLibrary(world, 0).unique_id()
    return world.run(lambda rank: body(Rank(world, rank, unique_id, **options).open()))


def ring_hops(
    me: Rank, hops: int, nbytes: int = 16, *, order_lane: bool = True, order_compute: bool = True, swap_at: int = -1
) -> int:
    """Send this rank's number around the ring through two slots, computing on each; what the last slot holds.

    Mistakes on request: `order_lane=False` lets the lane not wait for compute, `order_compute=False` lets compute not
    wait for the lane, `swap_at` receives one hop into the slot that it sends from.
    """
    slots = [me.filled(me.rank, nbytes), me.filled(255, nbytes)]
    me.device.touch(writes=[span(slots[0])], label="pack")
    ready, done = me.device.new_event(), me.device.new_event()
    for hop in range(hops):
        source, target = slots[hop % 2], slots[(hop + 1) % 2]
        ready.record(me.compute)
        if order_lane:
            me.lane.wait_event(ready)
        into = source if hop == swap_at else target
        assert me.group([("send", source, me.after), ("recv", into, me.before)]) == Status.SUCCESS
        done.record(me.lane)
        me.device.touch(reads=[span(source)], label=f"attend {hop}")
        if order_compute or hop == hops - 1:
            me.compute.wait_event(done)
    last = slots[hops % 2]
    me.device.touch(reads=[span(last)], label=f"attend {hops}")
    return int(last[0])

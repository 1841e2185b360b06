"""The simulated NCCL detects memory that is freed too early. `test_nccl_memory.py` relies on this.

`test_nccl_races.py` shows that the simulator also detects a wrong order of a pass's work.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from ringattn.transport.nccl.binding import CommConfig, NcclError, Status
from tests.transport.simulated.device import SimDevice, span
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import SimWorld

Part = tuple[str, torch.Tensor, int]
"""An operation of a group: kind ("send" or "recv"), buffer and peer."""


class Rank:
    """A rank of a simulated world, with a library, a device, a communicator and a communication stream."""

    def __init__(self, world: SimWorld, rank: int, unique_id: bytes) -> None:
        self.world, self.rank = world, rank
        self.device, self.library = SimDevice(world, rank), SimLibrary(world, rank)
        self.lane = self.device.new_stream()
        self._kept: list[torch.Tensor] = []
        self.comm = self.library.init(world.world_size, unique_id, rank, CommConfig())

    def settle(self) -> int:
        """Poll the communicator as often as it may be in progress. Return its first other status, or IN_PROGRESS."""
        statuses = [self.library.state(self.comm) for _ in range(self.world.polls + 1)]
        return next((status for status in statuses if status != Status.IN_PROGRESS), Status.IN_PROGRESS)

    def group(self, *parts: Part) -> int:
        """Launch one group, and return its status."""
        self.library.group_start()
        for kind, buffer, peer in parts:
            call = getattr(self.library, kind)
            call(buffer.data_ptr(), buffer.nbytes, peer, self.comm, self.lane.cuda_stream)
        status = self.library.group_end()
        return self.settle() if status == Status.IN_PROGRESS else status

    def filled(self, value: int, nbytes: int = 16) -> torch.Tensor:
        """Return device memory full of `value`. It lives as long as this rank."""
        self._kept.append(self.device.empty(nbytes).fill_(value))
        return self._kept[-1]

    def nccl_buffer(self) -> torch.Tensor:
        return self.device.wrap(self.library.mem_alloc(16), 16, None)


def pair() -> tuple[Rank, Rank]:
    """Return two ranks of one world. The calling thread makes the calls of both."""
    world = SimWorld(2)
    unique_id = SimLibrary(world, 0).unique_id()
    a, b = Rank(world, 0, unique_id), Rank(world, 1, unique_id)
    assert a.settle() == b.settle() == Status.SUCCESS
    return a, b


def test_nothing_is_buffered_and_the_kth_send_matches_the_kth_receive() -> None:
    a, b = pair()
    received = [b.filled(0) for _ in range(2)]
    assert a.group(("send", a.filled(1), 1), ("send", a.filled(2), 1)) == Status.SUCCESS
    sent = a.device.new_event()
    sent.record(a.lane)
    assert not sent.query() and not received[0].any()
    for buffer in received:
        b.group(("recv", buffer, 0))
    assert sent.query() and [int(buffer[0]) for buffer in received] == [1, 2] and a.world.violations == []


def assert_refused(call: Callable[[], object]) -> None:
    with pytest.raises(NcclError):
        call()


def plain_memory_dropped_in_flight(a: Rank, b: Rank) -> None:
    dropped = a.device.empty(16).fill_(1)
    a.group(("send", dropped, 1))
    del dropped
    gc.collect()
    b.group(("recv", b.filled(0), 0))


def freed_while_registered(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    a.library.register(a.comm, buffer.data_ptr(), 16)
    assert_refused(lambda: a.library.mem_free(buffer.data_ptr()))


def freed_in_flight(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    a.group(("send", buffer, 1))
    assert_refused(lambda: a.library.mem_free(buffer.data_ptr()))


def freed_under_compute(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    with a.device.on(a.device.user_stream()):
        a.device.kernel(reads=[span(buffer[4:8])], label="attend", held=True)
    assert_refused(lambda: a.library.mem_free(buffer.data_ptr()))


def compute_on_freed_memory(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    a.library.mem_free(buffer.data_ptr())
    a.device.kernel(reads=[span(buffer)], label="attend")


def deregistered_in_flight(a: Rank, b: Rank) -> None:
    buffers = [rank.nccl_buffer() for rank in (a, b)]
    handles = [r.library.register(r.comm, buffer.data_ptr(), 16) for r, buffer in zip((a, b), buffers, strict=True)]
    a.group(("send", buffers[0], 1))
    assert_refused(lambda: a.library.deregister(a.comm, handles[0]))


def one_end_registered(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    a.library.register(a.comm, buffer.data_ptr(), 16)
    a.group(("send", buffer, 1))
    b.group(("recv", b.filled(0), 0))


WRONG: dict[Callable[[Rank, Rank], None], str] = {
    plain_memory_dropped_in_flight: "freed while in flight: send of 16 bytes to rank 1",
    freed_while_registered: "is still registered",
    freed_in_flight: "is still in flight",
    freed_under_compute: "is still used by compute 'attend' on stream user 1",
    compute_on_freed_memory: "compute 'attend' reads memory that was freed",
    deregistered_in_flight: "is still in flight",
    one_end_registered: "only one end is registered",
}


@pytest.mark.parametrize(("program", "rule"), WRONG.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_program_is_a_violation(program: Callable[[Rank, Rank], None], rule: str) -> None:
    a, b = pair()
    program(a, b)
    assert len(a.world.violations) == 1 and rule in a.world.violations[0]

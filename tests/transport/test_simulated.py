"""The simulated NCCL refuses wrong programs: without that, the tests of the NCCL transport over it would prove nothing.

A wrong order of a whole pass is in `test_nccl_races.py`; scripted faults that do not strike fail `test_nccl_faults.py`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from ringattn.transport.nccl.binding import CommConfig, NcclError, Status
from tests.transport.simulated.device import SimDevice, SimEvent, span
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.races import find_races
from tests.transport.simulated.world import Deadlock, SimWorld

Part = tuple[str, torch.Tensor, int]
"""send or recv, buffer, peer."""


class Rank:
    """One rank of a world with its library, its device, one ready communicator and one communication stream."""

    def __init__(self, world: SimWorld, rank: int, unique_id: bytes) -> None:
        self.world, self.rank = world, rank
        self.device, self.library = SimDevice(world, rank), SimLibrary(world, rank)
        self.lane, self.compute = self.device.new_stream(), self.device.current_stream()
        self._kept: list[torch.Tensor] = []
        self.comm = self.library.init(world.world_size, unique_id, rank, CommConfig())

    def settle(self) -> int:
        """Poll the communicator while it is in progress, at most a few times. Returns its last status."""
        statuses = [self.library.state(self.comm) for _ in range(self.world.polls + 1)]
        return next((status for status in statuses if status != Status.IN_PROGRESS), Status.IN_PROGRESS)

    def post(self, *parts: Part) -> list[int]:
        """The statuses of these calls."""
        return [
            getattr(self.library, kind)(buffer.data_ptr(), buffer.nbytes, peer, self.comm, self.lane.cuda_stream)
            for kind, buffer, peer in parts
        ]

    def group(self, *parts: Part) -> int:
        """One group, launched. Returns its status once it has been accepted."""
        self.library.group_start()
        self.post(*parts)
        status = self.library.group_end()
        return self.settle() if status == Status.IN_PROGRESS else status

    def recorded(self) -> SimEvent:
        """An event behind everything that the communication stream holds."""
        event = self.device.new_event()
        event.record(self.lane)
        return event

    def filled(self, value: int, nbytes: int = 16) -> torch.Tensor:
        """Device memory full of `value`, which lives as long as this rank."""
        self._kept.append(self.device.empty(nbytes).fill_(value))
        return self._kept[-1]

    def nccl_buffer(self) -> torch.Tensor:
        return self.device.wrap(self.library.mem_alloc(16), 16, None)


def pair(**options: object) -> tuple[Rank, Rank]:
    """Two ranks, driven by the calling thread."""
    world = SimWorld(2, **options)  # type: ignore[arg-type]
    unique_id = SimLibrary(world, 0).unique_id()
    a, b = Rank(world, 0, unique_id), Rank(world, 1, unique_id)
    assert a.settle() == b.settle() == Status.SUCCESS
    return a, b


# --- what obeys moves its bytes, and only then -----------------------------------------------------------------------


def test_nothing_is_buffered_and_the_kth_send_meets_the_kth_receive() -> None:
    a, b = pair()
    came = [b.filled(0) for _ in range(2)]
    assert a.group(("send", a.filled(1), 1), ("send", a.filled(2), 1)) == Status.SUCCESS
    sent = a.recorded()
    assert not sent.query() and not came[0].any()
    for buffer in came:
        b.group(("recv", buffer, 0))
    assert sent.query() and [int(buffer[0]) for buffer in came] == [1, 2] and a.world.violations == []


def test_a_group_is_launched_when_state_says_success() -> None:
    a, b = pair()
    came = b.filled(0)
    b.group(("recv", came, 0))
    a.library.group_start()
    a.post(("send", a.filled(7), 1))
    assert a.library.group_end() == Status.IN_PROGRESS and not came.any()
    assert a.settle() == Status.SUCCESS and int(came[0]) == 7


@pytest.mark.parametrize("waits", [True, False])
def test_a_lazy_run_reads_old_bytes_where_a_wait_is_missing(waits: bool) -> None:
    a, b = pair(lazy=True)
    came = b.filled(255)
    a.group(("send", a.filled(7), 1))
    b.group(("recv", came, 0))
    arrived = b.recorded()
    if waits:
        b.compute.wait_event(arrived)
    assert int(came[0]) == (7 if waits else 255)


def test_a_wait_that_no_rank_can_satisfy_says_who_waits_for_whom() -> None:
    a, b = pair(limit_s=0.05)
    for me, peer in ((a, 1), (b, 0)):
        me.group(("send", me.filled(0), peer))
    with pytest.raises(Deadlock, match=r"send of 16 bytes to rank 1(.|\n)*circle: 0 -> 1 -> 0"):
        a.compute.wait_event(a.recorded())


# --- wrong programs --------------------------------------------------------------------------------------------------


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(NcclError):
        call()


def other_bytes(a: Rank, b: Rank) -> None:
    came = b.filled(0, 8)
    a.group(("send", a.filled(7), 1))
    b.group(("recv", came, 0))
    assert a.settle() == Status.REMOTE_ERROR and b.settle() == Status.INVALID_USAGE and not came.any()


def posted_too_early(a: Rank, b: Rank) -> None:
    a.library.group_start()
    a.post(("send", a.filled(1), 1))
    a.library.group_end()
    assert a.post(("send", a.filled(1), 1)) == [Status.INVALID_ARGUMENT]


def recorded_too_early(a: Rank, b: Rank) -> None:
    a.library.group_start()
    a.post(("send", a.filled(1), 1))
    a.library.group_end()
    a.recorded()


def two_threads(a: Rank, b: Rank) -> None:
    a.library.group_start()
    a.post(("send", a.filled(1), 1))
    intruder = threading.Thread(target=a.post, args=(("send", a.filled(2), 1),))
    intruder.start()
    intruder.join()


def on_the_compute_stream(a: Rank, b: Rank) -> None:
    a.lane = a.compute
    assert a.post(("send", a.filled(1), 1)) == [Status.INVALID_ARGUMENT]


def memory_of_a_peer(a: Rank, b: Rank) -> None:
    assert a.post(("send", b.filled(1), 1)) == [Status.INVALID_ARGUMENT]


def memory_that_was_freed(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    a.library.mem_free(buffer.data_ptr())
    assert a.post(("send", buffer, 1)) == [Status.INVALID_ARGUMENT]


def plain_memory_dropped_in_flight(a: Rank, b: Rank) -> None:
    dropped = a.device.empty(16).fill_(1)
    a.group(("send", dropped, 1))
    del dropped
    gc.collect()
    b.group(("recv", b.filled(0), 0))


def freed_while_registered(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    a.library.register(a.comm, buffer.data_ptr(), 16)
    refused(lambda: a.library.mem_free(buffer.data_ptr()))


def freed_in_flight(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    a.group(("send", buffer, 1))
    refused(lambda: a.library.mem_free(buffer.data_ptr()))


def freed_twice(a: Rank, b: Rank) -> None:
    pointer = a.nccl_buffer().data_ptr()
    a.library.mem_free(pointer)
    refused(lambda: a.library.mem_free(pointer))


def freed_under_compute(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    with a.device.on(a.device.user_stream()):
        a.device.kernel(reads=[span(buffer[4:8])], label="attend", held=True)
    refused(lambda: a.library.mem_free(buffer.data_ptr()))


def compute_on_freed_memory(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    a.library.mem_free(buffer.data_ptr())
    a.device.kernel(reads=[span(buffer)], label="attend")


def deregistered_in_flight(a: Rank, b: Rank) -> None:
    buffers = [me.nccl_buffer() for me in (a, b)]
    handles = [me.library.register(me.comm, each.data_ptr(), 16) for me, each in zip((a, b), buffers, strict=True)]
    a.group(("send", buffers[0], 1))
    refused(lambda: a.library.deregister(a.comm, handles[0]))


def one_end_registered(a: Rank, b: Rank) -> None:
    buffer = a.nccl_buffer()
    a.library.register(a.comm, buffer.data_ptr(), 16)
    a.group(("send", buffer, 1))
    b.group(("recv", b.filled(0), 0))


def one_end_captured(a: Rank, b: Rank) -> None:
    with a.world.capture(0) as graph:
        a.group(("send", a.filled(1), 1))
    b.group(("recv", b.filled(0), 0))
    graph.replay()


def query_of_a_captured_event(a: Rank, b: Rank) -> None:
    with a.world.capture(0):
        event = a.recorded()
    assert not event.query()


def capture_waits_for_an_outside_event(a: Rank, b: Rank) -> None:
    event = a.recorded()
    with a.world.capture(0):
        a.lane.wait_event(event)


def aborted_before_its_graph(a: Rank, b: Rank) -> None:
    with a.world.capture(0):
        a.group(("send", a.filled(1), 1))
    refused(lambda: a.library.abort(a.comm))


def used_after_abort(a: Rank, b: Rank) -> None:
    a.library.abort(a.comm)
    assert a.post(("send", a.filled(1), 1)) == [Status.INVALID_ARGUMENT]


def handle_of_another_rank(a: Rank, b: Rank) -> None:
    assert b.library.state(a.comm) == Status.INVALID_ARGUMENT


WRONG: dict[Callable[[Rank, Rank], None], str] = {
    other_bytes: "the bytes of both ends differ",
    posted_too_early: "is still in progress",
    recorded_too_early: "whose group is still in progress",
    two_threads: "two threads use communicator #0 at once",
    on_the_compute_stream: "is no communication stream of this rank",
    memory_of_a_peer: "illegal address",
    memory_that_was_freed: "illegal address",
    plain_memory_dropped_in_flight: "freed while in flight: send of 16 bytes to rank 1",
    freed_while_registered: "is still registered",
    freed_in_flight: "is still in flight",
    freed_twice: "is no living NCCL memory",
    freed_under_compute: "is still used by compute 'attend' on stream user 1",
    compute_on_freed_memory: "compute 'attend' reads memory that was freed",
    deregistered_in_flight: "is still in flight",
    one_end_registered: "only one end is registered",
    one_end_captured: "only one end is in a graph",
    query_of_a_captured_event: "query of an event that was recorded in a capture",
    capture_waits_for_an_outside_event: "outside of the capture",
    aborted_before_its_graph: "reset the graph first",
    used_after_abort: "communicator #0 is aborted",
    handle_of_another_rank: "is no communicator of this rank",
}


@pytest.mark.parametrize(("program", "rule"), WRONG.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_program_is_a_violation(program: Callable[[Rank, Rank], None], rule: str) -> None:
    a, b = pair()
    program(a, b)
    assert len(a.world.violations) == 1 and rule in a.world.violations[0]


def test_nobody_is_ready_or_destroyed_alone() -> None:
    world = SimWorld(2, limit_s=0.05)
    alone = Rank(world, 0, SimLibrary(world, 0).unique_id())
    assert alone.settle() == Status.IN_PROGRESS
    a, _ = pair(limit_s=0.05)
    with pytest.raises(Deadlock, match="destroy of communicator #0"):
        a.library.destroy(a.comm)


# --- races -----------------------------------------------------------------------------------------------------------


def test_a_query_orders_nothing_and_a_wait_does() -> None:
    for waits in (False, True):
        a, b = pair()
        buffer = a.filled(0)
        a.group(("recv", buffer, 1))
        b.group(("send", b.filled(1), 0))
        arrived = a.recorded()
        assert arrived.query()
        if waits:
            a.compute.wait_event(arrived)
        a.device.touch(reads=[span(buffer)], label="attend")
        assert len(find_races(a.world.trace)) == (not waits)


def test_neighboring_bytes_do_not_race_and_a_shared_byte_does() -> None:
    a, _ = pair()
    buffer = a.filled(0, 32)
    a.group(("recv", buffer[8:16], 1))
    a.device.touch(writes=[span(buffer[:8]), span(buffer[16:])])
    assert find_races(a.world.trace) == []
    a.device.touch(writes=[span(buffer[:9])])
    assert len(find_races(a.world.trace)) == 1


def test_passes_on_two_streams_race_unless_an_event_orders_them() -> None:
    for ordered in (False, True):
        world = SimWorld(1)
        gpu = SimDevice(world, 0)
        first, second, ended = gpu.user_stream(), gpu.user_stream(), gpu.new_event()
        slot = gpu.empty(16)
        with gpu.on(first):
            gpu.kernel(reads=[span(slot)], label="first pass")
            ended.record(first)
        with gpu.on(second):
            if ordered:
                second.wait_event(ended)
            gpu.kernel(writes=[span(slot)], label="second pass")
        assert bool(find_races(world.trace)) == (not ordered)

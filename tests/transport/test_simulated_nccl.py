"""The simulator's rules of a hop: rendezvous, groups, order, streams. One test a rule.

Not covered: communicators' lives (`test_simulated_lifetimes.py`), races.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ringattn.transport.nccl.binding import CommConfig, Status
from tests.transport.simulated.exchange import Rank, on_ranks, open_ranks, ring_hops
from tests.transport.simulated.faults import AsyncError
from tests.transport.simulated.hosts import Deadlock
from tests.transport.simulated.world import PeerCall, SimWorld


def values(buffer: torch.Tensor) -> set[int]:
    return set(buffer.tolist())


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_ring_that_obeys_moves_the_right_bytes(world_size: int, blocking: bool, lazy: bool) -> None:
    world = SimWorld(world_size, lazy=lazy, supervised=False)
    assert on_ranks(world, lambda me: ring_hops(me, 5), blocking=blocking) == [
        (rank - 5) % world_size for rank in range(world_size)
    ]
    assert world.violations == []
    for rank in range(world_size):
        hop = [PeerCall("send", (rank + 1) % world_size, 16), PeerCall("recv", (rank - 1) % world_size, 16)]
        assert world.calls(rank) == 5 * hop


def test_fifty_hops_of_four_ranks_take_less_than_half_a_second() -> None:
    # Time of the processor, so that a busy machine does not decide.
    world = SimWorld(4, supervised=False)
    began_s = time.process_time()
    assert on_ranks(world, lambda me: ring_hops(me, 50, 1 << 20)) == [2, 3, 0, 1]
    assert time.process_time() - began_s < 0.5


# --- rendezvous ------------------------------------------------------------------------------------------------------


def test_nothing_is_buffered() -> None:
    a, b = open_ranks(SimWorld(2))
    came = b.filled(0)
    assert a.group([("send", a.filled(7), 1)]) == Status.SUCCESS
    sent = a.recorded()
    assert not sent.query() and values(came) == {0}
    assert b.group([("recv", came, 0)]) == Status.SUCCESS
    assert sent.query() and values(came) == {7}


def test_the_kth_send_meets_the_kth_receive() -> None:
    a, b = open_ranks(SimWorld(2))
    first, second, third = b.filled(0, 4), b.filled(0, 8), b.filled(0, 4)
    a.group([("send", a.filled(1, 4), 1), ("send", a.filled(2, 8), 1)])
    a.group([("send", a.filled(3, 4), 1)])
    b.group([("recv", first, 0)])
    b.group([("recv", second, 0), ("recv", third, 0)])
    assert [values(buffer) for buffer in (first, second, third)] == [{1}, {2}, {3}]
    assert a.recorded().query() and b.recorded().query() and a.world.violations == []


def test_peers_of_one_group_progress_independently() -> None:
    world = SimWorld(3)
    a, _, c = open_ranks(world)
    came = c.filled(0)
    a.group([("send", a.filled(1), 1), ("send", a.filled(2), 2)])
    c.group([("recv", came, 0)])
    assert values(came) == {2} and c.recorded().query()
    assert not a.recorded().query()


def test_different_bytes_fail_both_ranks() -> None:
    world = SimWorld(2, faults=[AsyncError(rank=0, polls=7, status=Status.SYSTEM_ERROR)])
    a, b = open_ranks(world)
    came = b.filled(0, 8)
    a.group([("send", a.filled(7, 16), 1)])
    b.group([("recv", came, 0)])
    assert (a.library.state(a.comm), b.library.state(b.comm)) == (Status.REMOTE_ERROR, Status.INVALID_USAGE)
    assert values(came) == {0} and not a.recorded().query() and not b.recorded().query()
    assert len(world.violations) == 1
    for words in ("send of 16 bytes to rank 1", "recv of 8 bytes from rank 0"):
        assert words in world.violations[0] and words in a.library.last_error(a.comm)
    assert a.post([("send", a.filled(7), 1)]) == [Status.REMOTE_ERROR]
    assert a.library.state(a.comm) == Status.REMOTE_ERROR  # the first error stays


def test_zero_bytes_need_a_partner() -> None:
    a, b = open_ranks(SimWorld(2))
    a.group([("send", a.filled(0, 0), 1)])
    assert not a.recorded().query()
    b.group([("recv", b.filled(0, 0), 0)])
    assert a.recorded().query() and a.world.violations == []


def test_a_cyclic_exchange_without_a_group_is_a_deadlock_in_words() -> None:
    world = SimWorld(2, supervised=False)

    def ungrouped(me: Rank) -> None:
        for part in (("send", me.filled(0), me.after), ("recv", me.filled(0), me.before)):
            me.post([part])
            me.settle()
        me.wait()

    with pytest.raises(Deadlock) as stuck:
        on_ranks(world, ungrouped)
    report = str(stuck.value)
    assert "rank 0: host: wait for an event of stream lane 1; stream lane 1: send of 16 bytes to rank 1" in report
    assert "rank 1: host: wait for an event of stream lane 1; stream lane 1: send of 16 bytes to rank 0" in report
    assert "circle: 0 -> 1 -> 0" in report


@pytest.mark.parametrize(
    ("supervised", "words"), [(True, r"rank \d: wait .*: not within 0\.05 s\n"), (False, "nothing can move\n")]
)
def test_a_wait_that_no_rank_can_satisfy_ends_at_the_limit_or_at_once(supervised: bool, words: str) -> None:
    def receive(me: Rank) -> None:
        me.group([("recv", me.filled(0), me.after)])
        me.wait()

    with pytest.raises(Deadlock, match=words + r"(.|\n)*recv of 16 bytes from rank 1"):
        on_ranks(SimWorld(2, supervised=supervised, limit_s=0.05 if supervised else 30.0), receive)


# --- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_self_messages_need_both_ends_in_one_group(world_size: int) -> None:
    world = SimWorld(world_size)
    a = open_ranks(world)[0]
    came = a.filled(0)
    assert a.group([("send", a.filled(7), 0), ("recv", came, 0)]) == Status.SUCCESS
    assert a.recorded().query() and values(came) == {7} and world.violations == []
    assert a.group([("send", a.filled(8), 0)]) == Status.INVALID_USAGE
    assert a.post([("recv", came, 0)]) == [Status.INVALID_USAGE]
    assert len(world.violations) == 2 and all("in one group" in words for words in world.violations)
    assert values(came) == {7}


def test_nested_groups_count() -> None:
    a, b = open_ranks(SimWorld(2))
    came = b.filled(0)
    b.group([("recv", came, 0)])
    for _ in range(2):
        a.library.group_start()
    a.post([("send", a.filled(7), 1)])
    assert a.library.group_end() == Status.SUCCESS
    assert values(came) == {0}
    assert a.library.group_end() == Status.IN_PROGRESS
    assert a.settle() == Status.SUCCESS and values(came) == {7}


def test_a_group_that_was_not_started_cannot_end() -> None:
    a, _ = open_ranks(SimWorld(2))
    assert a.library.group_end() == Status.INVALID_USAGE
    assert a.library.group_start() == Status.SUCCESS
    assert a.library.group_end() == Status.SUCCESS
    assert a.library.group_end() == Status.INVALID_USAGE


def test_a_wrong_argument_leaves_the_group_usable() -> None:
    a, b = open_ranks(SimWorld(2))
    came = b.filled(0)
    b.group([("recv", came, 0)])
    a.library.group_start()
    assert a.post([("send", a.filled(1), 2), ("send", a.filled(1), -1), ("send", a.filled(7), 1)]) == [
        Status.INVALID_ARGUMENT,
        Status.INVALID_ARGUMENT,
        Status.SUCCESS,
    ]
    assert a.library.send(a.filled(1).data_ptr(), 16, 1, 0, a.lane.cuda_stream) == Status.INVALID_ARGUMENT
    a.library.group_end()
    assert a.settle() == Status.SUCCESS and values(came) == {7}


def test_blocking_and_nonblocking_communicators_share_no_group() -> None:
    a, b = open_ranks(SimWorld(2, supervised=False))

    def child(me: Rank) -> int:
        return me.library.split(me.comm, 0, me.rank, CommConfig(blocking=True))

    children = a.world.run(lambda rank: child((a, b)[rank]))
    a.library.group_start()
    a.post([("send", a.filled(1), 1)])
    a.post([("send", a.filled(2), 1)], children[0] or 0)
    assert a.library.group_end() == Status.INVALID_USAGE
    assert a.world.calls(0) == [] and "share a group" in a.world.violations[0]


def test_a_group_of_one_communicator_has_one_stream() -> None:
    a, _ = open_ranks(SimWorld(2))
    a.library.group_start()
    a.post([("send", a.filled(1), 1)])
    a.lane = a.device.new_stream()
    a.post([("send", a.filled(1), 1)])
    assert a.library.group_end() == Status.INVALID_USAGE
    assert "two streams in one group" in a.world.violations[0]


# --- one communicator, several communicators -------------------------------------------------------------------------


def test_groups_of_one_communicator_are_serial_whatever_the_stream() -> None:
    a, b, c = open_ranks(SimWorld(3))
    came = c.filled(0)
    a.group([("send", a.filled(1), 1)])
    first, a.lane = a.lane, a.device.new_stream()
    a.group([("send", a.filled(2), 2)])
    c.group([("recv", came, 0)])
    assert values(came) == {0}
    b.group([("recv", b.filled(0), 0)])
    assert values(came) == {2} and first is not a.lane and a.world.violations == []


def test_a_second_thread_in_a_group_is_seen() -> None:
    world = SimWorld(2)
    a, _ = open_ranks(world)
    a.library.group_start()
    a.post([("send", a.filled(1), 1)])
    answers: list[int] = []
    intruder = threading.Thread(target=lambda: answers.extend(a.post([("send", a.filled(2), 1)])))
    intruder.start()
    intruder.join()
    assert answers == [Status.INVALID_ARGUMENT]
    assert world.violations == ["rank 0: send: two threads use communicator #0 at once"]
    assert a.library.group_end() == Status.IN_PROGRESS and a.settle() == Status.SUCCESS


@pytest.mark.parametrize("inverted", [False, True])
def test_two_communicators_need_one_order_on_all_ranks(inverted: bool) -> None:
    world = SimWorld(2)
    a, b = open_ranks(world)
    children = [me.library.split(me.comm, 0, me.rank, CommConfig()) for me in (a, b)]
    for me, child in zip((a, b), children, strict=True):
        assert me.settle(child) == Status.SUCCESS
    for number, me in enumerate((a, b)):
        comms = [me.comm, children[number]]
        for comm in reversed(comms) if inverted and number else comms:
            me.group([("send", me.filled(1), me.after), ("recv", me.filled(0), me.before)], comm)
    assert any("need one order" in words for words in world.violations) == inverted
    assert bool(world.violations) == inverted


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_nonblocking_group_is_launched_when_state_says_success() -> None:
    a, b = open_ranks(SimWorld(2, polls=3))
    came = b.filled(0)
    b.group([("recv", came, 0)])
    a.library.group_start()
    a.post([("send", a.filled(7), 1)])
    assert a.library.group_end() == Status.IN_PROGRESS
    assert [a.library.state(a.comm) for _ in range(3)] == 3 * [Status.IN_PROGRESS]
    assert values(came) == {0} and "not launched, for state() has not said SUCCESS" in a.world.report()
    assert a.library.state(a.comm) == Status.SUCCESS
    assert values(came) == {7} and a.world.violations == []


def test_nothing_may_be_posted_before_state_says_success() -> None:
    world = SimWorld(2)
    a, _ = open_ranks(world)
    event = a.device.new_event()
    event.record(a.compute)
    a.library.group_start()
    a.post([("send", a.filled(1), 1)])
    assert a.library.group_end() == Status.IN_PROGRESS
    assert a.post([("send", a.filled(1), 1)]) == [Status.INVALID_ARGUMENT]
    a.recorded()
    a.lane.wait_event(event)
    assert ["in progress" in words for words in world.violations] == 3 * [True]


@pytest.mark.parametrize("which", ["compute", "foreign", "unknown"])
def test_groups_go_on_a_communication_stream_of_their_rank(which: str) -> None:
    a, b = open_ranks(SimWorld(2))
    handle = {"compute": a.compute.cuda_stream, "foreign": b.lane.cuda_stream, "unknown": 5}[which]
    assert a.library.send(a.filled(1).data_ptr(), 16, 1, a.comm, handle) == Status.INVALID_ARGUMENT
    assert "is no communication stream of this rank" in a.world.violations[0]


def test_streams_are_in_order_and_wait_for_events() -> None:
    a, b = open_ranks(SimWorld(2))
    a.group([("recv", a.filled(0), 1)])
    arrived, other = a.recorded(), a.device.new_stream()
    other.wait_event(arrived)
    behind = a.device.new_event()
    behind.record(other)
    assert not arrived.query() and not behind.query()
    b.group([("send", b.filled(1), 0)])
    assert arrived.query() and behind.query()


def test_an_event_on_the_compute_stream_is_complete_and_a_new_one_waits_for_nothing() -> None:
    a, _ = open_ranks(SimWorld(2, limit_s=0.05))
    event = a.device.new_event()
    assert event.query()
    a.compute.wait_event(event)
    event.record(a.compute)
    assert event.query() and len(a.world.trace[0]) == 1


def test_a_lazy_world_moves_only_what_somebody_waits_for() -> None:
    a, b = open_ranks(SimWorld(2, lazy=True))
    first, second = b.filled(0), b.filled(0)
    came = []
    for value, buffer in ((1, first), (2, second)):
        a.group([("send", a.filled(value), 1)])
        b.group([("recv", buffer, 0)])
        came.append(b.recorded())
    assert (values(first), values(second)) == ({0}, {0})
    b.compute.wait_event(came[0])
    assert (values(first), values(second)) == ({1}, {0})
    behind = b.device.new_stream()
    behind.wait_event(came[1])
    came[1] = b.device.new_event()
    came[1].record(behind)
    assert values(second) == {0}
    assert came[1].query() and values(second) == {2}

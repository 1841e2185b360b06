"""Scripted faults of the simulated world: each strikes where it is told, and only there."""

from __future__ import annotations

import threading
import time

import pytest

from ringattn.transport.nccl.binding import CommConfig, NcclError, Status
from tests.transport.simulated.exchange import Rank, on_ranks, open_ranks, ring_hops, until
from tests.transport.simulated.faults import Answer, AsyncError, Delay, Die, Died, Fault, MortalStore, Stall
from tests.transport.simulated.hosts import Deadlock
from tests.transport.simulated.world import SimWorld

HOPS = 5


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("after", "launched"), [(False, 2), (True, 3)])
def test_a_rank_dies_at_its_hop_and_its_peers_hang(after: bool, launched: int, blocking: bool) -> None:
    world = SimWorld(3, supervised=False, faults=[Die(rank=1, hop=2, after=after)])
    reached: dict[int, list[int]] = {rank: [] for rank in range(3)}

    def body(me: Rank) -> None:
        for hop in range(HOPS):
            assert me.group([("send", me.filled(hop), me.after), ("recv", me.filled(0), me.before)]) == Status.SUCCESS
            me.wait()
            reached[me.rank].append(hop)

    with pytest.raises(Deadlock, match=r"rank 1: died"):
        on_ranks(world, body, blocking=blocking)
    assert len(world.calls(1)) == 2 * launched
    assert reached[1] == [0, 1] and all(reached[rank][:2] == [0, 1] for rank in (0, 2))
    # A message of hop 2 may have left before the death, but both neighbors need both directions.
    assert all(len(reached[rank]) <= launched for rank in (0, 2)) and world.violations == []


def test_a_dead_rank_is_silent() -> None:
    world = SimWorld(2, faults=[Die(rank=0, hop=0)])
    a, b = open_ranks(world)
    store = MortalStore(world, 0, {"key": "value"})
    assert store.get("key") == "value"
    event = a.recorded()
    with pytest.raises(Died):
        a.group([("send", a.filled(1), 1)])
    for call in (
        lambda: a.library.state(a.comm),
        lambda: a.library.group_start(),
        lambda: a.library.abort(a.comm),
        lambda: a.device.empty(8),
        lambda: a.device.activate(),
        a.recorded,
        event.query,
    ):
        with pytest.raises(Died):
            call()
    with pytest.raises(RuntimeError, match="rank 0 died"):
        store.get("key")
    with pytest.raises(RuntimeError, match="rank 0 died"):
        MortalStore(world, 1, MortalStore(world, 0, {})).get("key")
    assert b.library.state(b.comm) == Status.SUCCESS


def test_a_death_leaves_what_was_posted_unanswered() -> None:
    world = SimWorld(2, faults=[Die(rank=0, hop=1)])
    a, b = open_ranks(world)
    came = b.filled(0)
    a.group([("send", a.filled(7), 1)])
    with pytest.raises(Died):
        a.group([("send", a.filled(7), 1)])
    b.group([("recv", came, 0)])
    assert int(came[0]) == 0 and not b.recorded().query()


def test_a_death_ends_the_waits_of_the_other_threads() -> None:
    world = SimWorld(2, faults=[Die(rank=0, hop=1)])
    a, _ = open_ranks(world)
    a.group([("send", a.filled(7), 1)])
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            a.wait()
        except Died as death:
            ends.append(death)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: "host: wait" in world.report())
    with pytest.raises(Died):
        a.group([("send", a.filled(7), 1)])
    waiting.join(10.0)
    assert [str(death) for death in ends] == ["rank 0 died"]


def test_a_stalled_call_returns_when_it_is_released() -> None:
    world = SimWorld(2, faults=[Stall(rank=0, function="group_end", call=1)])
    a, b = open_ranks(world)
    done: list[int] = []

    def two_groups() -> None:
        for value in (1, 2):
            done.append(a.group([("send", a.filled(value), 1)]))

    stalled = threading.Thread(target=two_groups)
    stalled.start()
    until(lambda: len(done) == 1)
    for _ in range(2):
        b.group([("recv", b.filled(0), 0)])
    assert not b.recorded().query() and done == [Status.SUCCESS]
    world.release(0)
    stalled.join(10.0)
    assert done == 2 * [Status.SUCCESS] and b.recorded().query()


def test_a_stall_that_nobody_ends_is_an_error_at_the_limit() -> None:
    me = open_ranks(SimWorld(1, limit_s=0.05, faults=[Stall(rank=0, function="split")]))[0]
    with pytest.raises(TimeoutError, match="rank 0 was stalled and never released"):
        me.library.split(me.comm, 0, 0, CommConfig())


def test_a_delay_takes_its_time_once() -> None:
    me = open_ranks(SimWorld(1, faults=[Delay(rank=0, function="mem_alloc", delay_s=0.2, call=1)]))[0]
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        me.library.mem_alloc(8)
        took_s.append(time.monotonic() - began_s)
    assert took_s[1] >= 0.2 and took_s.index(max(took_s)) == 1


def test_an_answer_comes_at_its_call_and_nothing_is_done() -> None:
    faults = [
        Answer(0, "send", Status.SYSTEM_ERROR, call=1),
        Answer(0, "register", Status.INTERNAL_ERROR),
        Answer(1, "group_start", Status.INTERNAL_ERROR),
    ]
    a, b = open_ranks(SimWorld(2, faults=faults))
    a.library.group_start()
    assert a.post([("send", a.filled(value), 1) for value in (1, 2, 3)]) == [
        Status.SUCCESS,
        Status.SYSTEM_ERROR,
        Status.SUCCESS,
    ]
    a.library.group_end()
    a.settle()
    assert len(a.world.calls(0)) == 2
    with pytest.raises(NcclError) as error:
        a.library.register(a.comm, a.filled(0).data_ptr(), 16)
    assert error.value.status == Status.INTERNAL_ERROR
    assert b.library.group_start() == Status.INTERNAL_ERROR
    assert b.library.group_end() == Status.INVALID_USAGE


def test_a_group_that_fails_at_its_end_poisons_its_communicators() -> None:
    a, _ = open_ranks(SimWorld(2, faults=[Answer(0, "group_end", Status.SYSTEM_ERROR)]))
    assert a.group([("send", a.filled(1), 1)]) == Status.SYSTEM_ERROR
    assert a.library.state(a.comm) == Status.SYSTEM_ERROR and a.world.calls(0) == []
    answers: list[int] = []
    other = threading.Thread(target=lambda: answers.extend(a.post([("send", a.filled(1), 1)])))
    other.start()
    other.join()
    assert answers == [Status.SYSTEM_ERROR] and a.world.violations == []
    assert a.library.group_end() == Status.INVALID_USAGE


def test_an_asynchronous_error_comes_after_its_polls() -> None:
    faults = [AsyncError(rank=0, polls=4, status=Status.REMOTE_ERROR)]
    a, b = open_ranks(SimWorld(2, polls=2, faults=faults))  # opening takes three polls
    assert [a.library.state(a.comm) for _ in range(3)] == [Status.SUCCESS, Status.REMOTE_ERROR, Status.REMOTE_ERROR]
    assert b.library.state(b.comm) == Status.SUCCESS


def test_a_fault_of_one_rank_is_none_of_another() -> None:
    error = Status.SYSTEM_ERROR
    faults: list[Fault] = [Answer(2, "send", error), Die(rank=2, hop=0), Stall(2, "state"), AsyncError(2, 0, error)]
    world = SimWorld(2, supervised=False, faults=faults)
    assert on_ranks(world, lambda me: ring_hops(me, HOPS)) == [1, 0]

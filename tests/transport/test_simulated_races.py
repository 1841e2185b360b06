"""The race detector: what obeys has no race, each dropped edge has, and each broken exchange is caught somehow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringattn.transport.nccl.binding import CommConfig, Status
from tests.transport.simulated.device import span
from tests.transport.simulated.exchange import Rank, on_ranks, open_ranks, ring_hops
from tests.transport.simulated.hosts import Deadlock
from tests.transport.simulated.races import find_races
from tests.transport.simulated.world import SimWorld

HOPS = 5


def races(world: SimWorld) -> list[str]:
    return [str(race) for race in find_races(world.trace)]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_ring_that_obeys_has_no_race(world_size: int, blocking: bool, lazy: bool) -> None:
    world = SimWorld(world_size, lazy=lazy, supervised=False)
    on_ranks(world, lambda me: ring_hops(me, HOPS), blocking=blocking)
    assert races(world) == [] and len(world.trace[0]) == 6 * HOPS + 2


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("mistake", "one", "other"),
    [
        ({"order_lane": False}, "compute 'pack' writes", "send of 16 bytes to rank 2 reads"),
        ({"order_lane": False}, "compute 'attend 1' reads", "recv of 16 bytes from rank 0 writes"),
        ({"order_compute": False}, "compute 'attend 1' reads", "recv of 16 bytes from rank 0 writes"),
        ({"swap_at": 2}, "send of 16 bytes to rank 2 reads", "recv of 16 bytes from rank 0 writes"),
        ({"swap_at": 2}, "compute 'attend 2' reads", "recv of 16 bytes from rank 0 writes"),
    ],
)
def test_a_mistake_of_one_rank_is_a_race_of_that_rank(mistake: dict, one: str, other: str, lazy: bool) -> None:
    world = SimWorld(3, lazy=lazy, supervised=False)
    on_ranks(world, lambda me: ring_hops(me, HOPS, **(mistake if me.rank == 1 else {})))
    found = races(world)
    assert found and all(text.startswith("rank 1: ") for text in found)
    assert any(one in text and other in text for text in found)


def test_the_verdict_does_not_depend_on_the_run() -> None:
    # Which accesses race follows from what was issued: eager, lazy, blocking and not.
    verdicts = []
    for lazy in (False, True):
        for blocking in (False, True):
            world = SimWorld(3, lazy=lazy, supervised=False)
            on_ranks(world, lambda me: ring_hops(me, HOPS, order_compute=False), blocking=blocking)
            found = [(race.one, race.other) for race in find_races(world.trace)]
            verdicts.append(sorted(tuple(sorted((each.rank, each.what) for each in pair)) for pair in found))
    assert verdicts[0] and all(verdict == verdicts[0] for verdict in verdicts)


def test_a_lazy_run_reads_old_bytes_where_a_wait_is_missing() -> None:
    def first_slot(me: Rank, waits: bool) -> int:
        came = me.filled(255)
        me.group([("send", me.filled(me.rank), me.after), ("recv", came, me.before)])
        arrived = me.recorded()
        if waits:
            me.compute.wait_event(arrived)
        return int(came[0])

    assert on_ranks(SimWorld(3, lazy=True), lambda me: first_slot(me, True)) == [2, 0, 1]
    assert on_ranks(SimWorld(3, lazy=True), lambda me: first_slot(me, False)) == [255, 255, 255]


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reads", "writes", "raced"), [(True, False, False), (False, True, True)], ids=["both read", "one writes"]
)
def test_what_never_completes_holds_its_buffer_for_ever(reads: bool, writes: bool, raced: bool) -> None:
    a, _ = open_ranks(SimWorld(2))
    buffer = a.filled(0)
    a.group([("send", buffer, 1)])
    held = [span(buffer[12:])]
    a.device.touch(held if reads else (), held if writes else (), "late")
    found = races(a.world)
    assert len(found) == raced and all("compute 'late' writes" in text for text in found)


def test_neighboring_bytes_do_not_race() -> None:
    a, _ = open_ranks(SimWorld(2))
    buffer = a.filled(0, 32)
    a.group([("recv", buffer[8:16], 1)])
    a.device.touch(writes=[span(buffer[4:8]), span(buffer[16:])])
    a.device.touch(writes=[span(buffer[:8])])
    assert races(a.world) == []
    a.device.touch(writes=[span(buffer[:9])])
    assert len(races(a.world)) == 1


def test_behind_an_aborted_launch_races_are_still_seen() -> None:
    a, b = open_ranks(SimWorld(2))
    children = [me.library.split(me.comm, 0, me.rank, CommConfig()) for me in (a, b)]
    assert a.settle(children[0]) == Status.SUCCESS
    buffer = a.filled(0)
    a.group([("recv", buffer[:8], 1)])
    arrived = a.recorded()
    a.library.abort(a.comm)
    a.compute.wait_event(arrived)
    a.device.touch(writes=[span(buffer)], label="attend")
    assert races(a.world) == []
    a.lane = a.device.new_stream()
    a.group([("recv", buffer[8:], 1)], children[0])
    found = races(a.world)
    assert len(found) == 1 and "compute 'attend' writes" in found[0] and "recv of 8 bytes from rank 1" in found[0]


@pytest.mark.parametrize("same_comm", [True, False])
def test_one_communicator_orders_its_launches_over_two_streams(same_comm: bool) -> None:
    a, b = open_ranks(SimWorld(2))
    children = [me.library.split(me.comm, 0, me.rank, CommConfig()) for me in (a, b)]
    assert [me.settle(child) for me, child in zip((a, b), children, strict=True)] == 2 * [Status.SUCCESS]
    buffer = a.filled(0)
    for comms in ([a.comm, b.comm], [a.comm, b.comm] if same_comm else children):
        a.group([("recv", buffer, 1)], comms[0])
        b.group([("send", b.filled(1), 0)], comms[1])
        a.lane = a.device.new_stream()
    assert bool(races(a.world)) != same_comm


@pytest.mark.parametrize("token", [True, False])
def test_a_rendezvous_orders_what_came_before_it_on_the_peer(token: bool) -> None:
    # Rank 0 writes a buffer and then sends; rank 1 answers on another communicator, behind which rank 0 receives.
    a, b = open_ranks(SimWorld(2))
    answers = [me.library.split(me.comm, 0, me.rank, CommConfig()) for me in (a, b)]
    assert [me.settle(child) for me, child in zip((a, b), answers, strict=True)] == 2 * [Status.SUCCESS]
    buffer = a.filled(0)
    a.device.touch(writes=[span(buffer)], label="early")
    ready = a.device.new_event()
    ready.record(a.compute)
    a.lane.wait_event(ready)
    a.group([("send", a.filled(0), 1)])
    b.group([("recv", b.filled(0), 0)])
    seen, b.lane, a.lane = b.recorded(), b.device.new_stream(), a.device.new_stream()
    if token:
        b.lane.wait_event(seen)
    for into in (a.filled(0), buffer):
        b.group([("send", b.filled(2), 0)], answers[1])
        a.group([("recv", into, 1)], answers[0])
    found = races(a.world)
    assert bool(found) != token and all("compute 'early' writes" in text for text in found)


def test_a_query_orders_nothing() -> None:
    a, b = open_ranks(SimWorld(2))
    buffer = a.filled(0)
    a.group([("recv", buffer, 1)])
    b.group([("send", b.filled(1), 0)])
    assert a.recorded().query()
    a.device.touch(reads=[span(buffer)], label="attend")
    assert len(races(a.world)) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_replays_are_traced_like_calls(waits: bool) -> None:
    world = SimWorld(2, supervised=False)

    def body(me: Rank) -> None:
        sent, came = me.filled(0), me.filled(0)
        with world.capture(me.rank) as graph:
            me.group([("send", sent, me.after), ("recv", came, me.before)])
            if waits:
                me.wait()
            me.device.touch(reads=[span(came)], label="attend")
        graph.replay()
        me.wait()
        graph.reset()

    on_ranks(world, body)
    assert len(races(world)) == (0 if waits else 2)


# --- mutations: whatever one rank breaks is caught somewhere ---------------------------------------------------------


def reversed_order(me: Rank) -> None:
    """Two messages of different sizes per hop, posted the other way round on rank 1."""
    sends = [("send", me.filled(1, 16), me.after), ("send", me.filled(2, 32), me.after)]
    recvs = [("recv", me.filled(0, 16), me.before), ("recv", me.filled(0, 32), me.before)]
    me.group([*(reversed(sends) if me.rank == 1 else sends), *recvs])
    me.wait()


def wrong_count(me: Rank) -> None:
    """One receive too many on rank 1."""
    extra = [("recv", me.filled(0), me.before)] if me.rank == 1 else []
    me.group([("send", me.filled(1), me.after), ("recv", me.filled(0), me.before), *extra])
    me.wait()


def wrong_peer(me: Rank) -> None:
    """Rank 1 sends against the ring."""
    me.group([("send", me.filled(1), me.before if me.rank == 1 else me.after), ("recv", me.filled(0), me.before)])
    me.wait()


def ungrouped(me: Rank) -> None:
    """Every rank sends first and receives then."""
    for part in (("send", me.filled(1), me.after), ("recv", me.filled(0), me.before)):
        me.group([part])
    me.wait()


@pytest.mark.parametrize(
    ("mutation", "report"),
    [
        (reversed_order, r"rank 2: host: .*recv of 16 bytes from rank 1"),
        (wrong_count, r"rank 1: host: .*stream lane 1: recv of 16 bytes from rank 0 on communicator #0"),
        (wrong_peer, r"rank 2: host: .*recv of 16 bytes from rank 1"),
        (ungrouped, r"circle: 0 -> 1 -> 2 -> 0"),
    ],
)
def test_a_broken_exchange_is_a_deadlock_that_names_the_op(mutation: Callable[[Rank], None], report: str) -> None:
    world = SimWorld(3, supervised=False)
    with pytest.raises(Deadlock, match=report):
        on_ranks(world, mutation)
    assert bool(world.violations) == (mutation is reversed_order)


def test_the_reversed_issue_order_of_two_hops_is_caught() -> None:
    world = SimWorld(2, supervised=False)

    def body(me: Rank) -> None:
        hops = [[("send", me.filled(1, n), me.after), ("recv", me.filled(0, n), me.before)] for n in (16, 32)]
        for hop in reversed(hops) if me.rank else hops:
            me.group(hop)
        me.wait()

    with pytest.raises(Deadlock):
        on_ranks(world, body)
    assert any("the bytes of both ends differ" in words for words in world.violations)

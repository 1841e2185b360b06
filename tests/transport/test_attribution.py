"""Who is named when an exchange reached its deadline, and who is not; by how many requests; and how soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn import Ring
from ringattn.errors import DeadlineError
from ringattn.transport.control_store import ControlStore
from ringattn.transport.diagnosis import Diagnosis
from ringattn.transport.heartbeat import Heartbeat, HeartbeatMonitor, interval_s, silence_s
from ringattn.transport.nccl.attribution import Attribution, Place, Waits, at_fault
from tests.transport.attribution import named_at_fault
from tests.transport.nccl_rings import on_rings
from tests.transport.simulated.faults import Stall
from tests.transport.simulated.world import SimWorld

HOST, LAUNCH, COMPUTE, PEERS = Waits.HOST, Waits.LAUNCH, Waits.COMPUTE, Waits.PEERS
Ranks = dict[int, tuple[int, Waits, set[int] | None]]
RING: Ranks = {rank: (5, PEERS, {(rank - 1) % 4, (rank + 1) % 4}) for rank in range(4)}


def places(ranks: Ranks) -> dict[int, Place]:
    return {
        rank: Place("forward step 1", call, waits, None if peers is None else frozenset(peers))
        for rank, (call, waits, peers) in ranks.items()
    }


@pytest.mark.parametrize(
    ("ranks", "silent", "named"),
    [
        (RING, {1}, {1}),
        (RING, {1, 2}, {1, 2}),
        # In the first pass of `direct` others connect to the one that is gone.
        (RING | {0: (5, LAUNCH, {1}), 3: (5, LAUNCH, {1})}, {1}, {1}),
        (RING | {0: (5, COMPUTE, {1})}, {1}, {1}),
        (RING | {1: (4, HOST, set()), 0: (5, LAUNCH, {1}), 2: (5, LAUNCH, {1})}, (), {1}),
        (RING | {1: (5, COMPUTE, {2}), 0: (5, LAUNCH, {1})}, (), {1}),
        (RING | {1: (5, LAUNCH, {0, 2})}, (), {1}),
        # Behind, but in an exchange: it waits as all do.
        (RING | {1: (4, PEERS, {0})}, (), set()),
        (RING, (), set()),
    ],
)
def test_only_ranks_that_nothing_else_explains_are_named(ranks: Ranks, silent: Any, named: set[int]) -> None:
    words = "; ".join(at_fault(places(ranks), silent))
    assert named_at_fault(words) == named, words


@pytest.mark.parametrize("peers", [{1, 2, 3}, None])
def test_of_ranks_that_connect_to_each_other_none_is_accused(peers: set[int] | None) -> None:
    both = places(RING | {1: (5, LAUNCH, {2} if peers else None), 2: (5, LAUNCH, {1} if peers else None)})
    (words,) = at_fault(both, ())
    assert words == "one of ranks [1, 2] is stuck in a launch, and the others of them wait for it there"
    assert named_at_fault(words) == set()


def test_a_rank_that_has_left_is_not_behind() -> None:
    here = places(RING | {1: (4, HOST, set())})
    here[1] = Place("idle", 4, HOST, left=True)
    assert at_fault(here, ()) == []
    assert named_at_fault("; ".join(at_fault({**here, 3: Place("idle", 5, HOST)}, (), missing={3}))) == {3}


@pytest.mark.parametrize("ranks", [2, 64, 534, 1024])
def test_a_silent_rank_can_be_named_before_the_callers_are_told(ranks: int) -> None:
    control = ControlStore(HashStore(), 0, ranks)
    monitor = HeartbeatMonitor(control, lambda: "")
    assert monitor.interval_s == interval_s(ranks) and 2 * ranks / monitor.interval_s <= 5000
    assert 2 * monitor.interval_s < silence_s(monitor.interval_s) < Attribution(control, str, monitor).limit_s < 2.0


# --- one investigator ------------------------------------------------------------------------------------------------


class Counted:
    """Counts the requests to a store."""

    def __init__(self, store: Any, counts: list[int]) -> None:
        self._store, self._counts = store, counts

    def clone(self) -> Counted:
        return Counted(self._store.clone(), self._counts)

    def __getattr__(self, name: str) -> Any:
        self._counts[0] += 1
        return getattr(self._store, name)


STATUS = '{"at":"forward step 1","waits":"peers","peers":[0],"call":1,"words":"","calls":["00"]}'


class Job:
    """Ranks that only send heartbeats, all but one; the others look for it."""

    def __init__(self, ranks: int, silent: int, beats: str = STATUS) -> None:
        self.store, self.ranks, self.requests, self._beats = HashStore(), ranks, [0], beats
        self._hearts = [Heartbeat(self.store, rank) for rank in range(ranks) if rank != silent]
        Heartbeat(self.store, silent).send(STATUS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._beat()
        self._thread.start()

    def investigator(self, rank: int) -> tuple[HeartbeatMonitor, Attribution]:
        control = ControlStore(Counted(self.store, self.requests), rank, self.ranks)
        monitor = HeartbeatMonitor(control.clone(), lambda: STATUS)
        return monitor, Attribution(control, lambda: STATUS, monitor)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _live(self) -> None:
        while not self._ended.wait(interval_s(self.ranks)):
            self._beat()

    def _beat(self) -> None:
        for heart in self._hearts:
            heart.send(self._beats)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(600, 7)
    yield made
    made.end()


@pytest.mark.alone
@pytest.mark.parametrize(("waited_s", "named"), [(None, set()), (0.0, {0, 1})])
def test_only_at_a_deadline_a_rank_is_behind(waited_s: float | None, named: set[int]) -> None:
    job = Job(3, 2, beats=STATUS.replace('"waits":"peers"', '"waits":"host"').replace('"call":1', '"call":0'))
    _, attribution = job.investigator(2)
    words = attribution.words({1}, waited_s=waited_s)
    job.end()
    assert named_at_fault(words) == named and ("rank 1 lives" in words) == (waited_s is None), words


@pytest.mark.alone
def test_one_investigator_names_the_silent_one_of_six_hundred(job: Job) -> None:
    told: dict[int, str] = {}

    def at_the_deadline(rank: int) -> None:
        monitor, attribution = job.investigator(rank)
        monitor.start()
        time.sleep(0.3)
        words = attribution.words({rank + 1})
        ControlStore(job.store, rank, job.ranks).publish_cause(DeadlineError(f"no answer{words}"))
        told[rank] = words
        monitor.stop()

    start = time.monotonic()
    threads = [threading.Thread(target=at_the_deadline, args=(rank,)) for rank in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert time.monotonic() - start < 3.0
    assert [named_at_fault(told[rank]) for rank in (100, 200, 300)] == [{7}] * 3, told
    assert sum("failed first: DeadlineError" in words for words in told.values()) == 2
    assert job.requests[0] < 300  # one of them reads all heartbeats, and no rank asks for one after another


@pytest.mark.alone
def test_on_gloo_too_one_rank_reads_all_heartbeats(job: Job) -> None:
    told: dict[int, str] = {}

    def at_the_deadline(rank: int) -> None:
        control = ControlStore(Counted(job.store, job.requests), rank, job.ranks)
        diagnosis = Diagnosis(control)
        told[rank] = diagnosis.of_loss(rank + 1, OSError("reset")) if rank == 300 else diagnosis.of_deadline([rank + 1])
        control.publish_cause(DeadlineError(f"no answer; {told[rank]}"))

    threads = [threading.Thread(target=at_the_deadline, args=(rank,)) for rank in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert [named_at_fault(told[rank]) for rank in (100, 200, 300)] == [{7}] * 3, told
    assert job.requests[0] < 200


@pytest.mark.alone
def test_the_next_of_a_silent_rank_names_it_at_once(job: Job) -> None:
    monitor, attribution = job.investigator(6)
    monitor.start()
    while not monitor.silent():
        time.sleep(0.05)
    start = time.monotonic()
    words = attribution.words({5, 7})
    assert time.monotonic() - start < 0.3 and named_at_fault(words) == {7}
    monitor.stop()


def test_a_rank_that_was_silent_for_a_while_is_not_accused_later() -> None:
    store, now = HashStore(), [0.0]
    monitor = HeartbeatMonitor(ControlStore(store, 0, 4), lambda: STATUS)
    other = Heartbeat(store, 2)
    other.send(STATUS)
    Heartbeat(store, 1).end(STATUS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringattn.transport.heartbeat.time.monotonic", lambda: now[0])
        monitor.wanted = {2}
        for now[0] in (0.0, 0.4, 0.8, 1.2):
            monitor.read()
        assert monitor.silent() == {2} and monitor.silent(at_least_s=2.0) == set()
        now[0] = 10.0  # nothing was read meanwhile
        assert monitor.silent() == set()
        monitor.wanted = set()
        monitor.read()
        now[0] = 10.1
        assert monitor.silent() == set()
        monitor.wanted = {2}
        other.send(STATUS)
        for now[0] in (11.0, 11.4):
            monitor.read()
        assert monitor.silent() == set()


# --- told in time ----------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_caller_is_told_while_the_abort_goes_on() -> None:
    world = SimWorld(3, faults=[Stall(0, "abort")], limit_s=20.0)
    told, took = threading.Barrier(3), dict[int, float]()

    def body(ring: Ring) -> None:
        if ring.rank == 1:
            told.wait(15.0)
            return
        start = time.monotonic()
        try:
            ring.barrier()
        finally:
            took[ring.rank] = time.monotonic() - start
            told.wait(15.0)
            world.release(0)

    outcomes = on_rings(world, body, deadline_s=0.6, hard_s=30.0)
    for rank in (0, 2):
        assert "rank 1 is behind" in str(outcomes[rank].error) and named_at_fault(str(outcomes[rank].error)) == {1}
        assert took[rank] < 0.6 + 2.0


def test_a_rank_that_is_wanted_again_is_counted_from_then_on() -> None:
    """Its heartbeat stands still meanwhile, and what was seen of it before says nothing."""
    store = HashStore()
    Heartbeat(store, 2).send(STATUS)
    monitor = HeartbeatMonitor(ControlStore(store, 0, 4), lambda: STATUS)
    for wanted in ({2}, set[int](), {2}):
        monitor.wanted = wanted
        monitor.read()
    assert monitor.rounds == 3 and monitor.heartbeats[2].status == STATUS and not monitor.silent()

"""What a rank observes of the others in the store, and by its own clock that it stood still itself."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn import Ring
from ringattn.errors import DeadlineError
from ringattn.transport.control_store import ControlStore
from ringattn.transport.health.feeds import Feed, StoreFeed, heartbeat_key, interval_s, silence_s
from ringattn.transport.health.health import Health
from ringattn.transport.health.verdict import ENDED, Beat, Place, Waits
from tests.transport.attribution import named_at_fault
from tests.transport.nccl_rings import on_rings
from tests.transport.simulated.faults import Stall
from tests.transport.simulated.world import SimWorld

ROOT = Path(__file__).resolve().parents[2]
PLACE = Place("forward step 1", 1, Waits.PEERS, frozenset({0}))


class LostStore:
    """A store whose host is gone."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("connection reset")


class Counted:
    """Counts the requests to a store."""

    def __init__(self, store: Any, counts: list[int]) -> None:
        self._store, self._counts = store, counts

    def clone(self) -> Counted:
        return Counted(self._store.clone(), self._counts)

    def __getattr__(self, name: str) -> Any:
        self._counts[0] += 1
        return getattr(self._store, name)


def until(ready: Callable[[], object], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < end_s
        time.sleep(0.01)


# --- readings --------------------------------------------------------------------------------------------------------


def test_only_a_beat_that_was_read_again_and_again_is_unchanged() -> None:
    feed = Feed[int](gap_s=0.5)
    for now_s in (0.0, 0.4, 0.8, 1.2):
        feed.note(1, 7, now_s)
        feed.note(2, int(now_s * 10), now_s)
    assert feed.unchanged(1.0, 1.0) == {1} and feed.unchanged(2.0, 1.0) == set() and feed.new(1.0) == {2}
    assert feed.unchanged(1.0, 2.0) == set()  # not read lately
    feed.note(1, 7, 9.0)  # nothing was read meanwhile: this rank stood still, or the feed did not answer
    assert feed.unchanged(1.0, 0.0) == set() and feed.new(8.0) == set()
    feed.keep({2})
    feed.note(1, 7, 9.1)
    assert feed.unchanged(0.1, 0.0) == set()


# --- shared pages ----------------------------------------------------------------------------------------------------


class PagesOfAFailure:
    """Pages of three ranks: rank 1 runs Python in call 6, rank 2 has failed because of that."""

    def __init__(self, cause: str | None) -> None:
        self.gone: set[int] = set()
        self._cause, self._count = cause, 0

    def exchange(self, beat: Beat) -> dict[int, Beat]:
        self._count += 1
        return {1: Beat(self._count, Place("idle", 6)), 2: Beat(ENDED)}

    def first_cause(self) -> str | None:
        return self._cause


@pytest.mark.parametrize("cause", [None, "rank 2 failed first: DeadlineError: rank 1 is behind, in 'idle' of call 6"])
def test_a_rank_that_failed_as_well_is_not_called_behind(cause: str | None) -> None:
    health = Health(ControlStore(HashStore(), 0, 3))
    health.pages = PagesOfAFailure(cause)
    health.attach(job := object(), lambda: Place("all-gather 6", 7, Waits.PEERS, frozenset({1, 2})))
    time.sleep(0.3)
    said = health.explain({1}, waited_s=4.0)
    health.detach(job)
    assert said == (cause or "rank 1 is behind, in 'idle' of call 6, others in call 7")


# --- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 64, 534, 1024])
def test_a_silent_rank_can_be_named_before_the_callers_are_told(ranks: int) -> None:
    health = Health(ControlStore(HashStore(), 0, ranks))
    interval = health.store.interval_s
    assert interval == interval_s(ranks) and 2 * ranks / interval <= 5000
    assert 2 * interval < silence_s(interval) == health.silence_s < health.limit_s < 2.0


class Job:
    """Ranks that only send heartbeats, all but one; the others look for it."""

    def __init__(self, ranks: int, silent: int, place: Place = PLACE) -> None:
        self.store, self.ranks, self.requests = HashStore(), ranks, [0]
        self._living, self._place, self._count = [rank for rank in range(ranks) if rank != silent], place, 0
        self.store.set(heartbeat_key(silent), Beat(1, PLACE).text())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._beat()
        self._thread.start()

    def health(self, rank: int, place: Place = PLACE) -> Health:
        health = Health(ControlStore(Counted(self.store, self.requests), rank, self.ranks))  # type: ignore[arg-type]
        health.attach(self, lambda: place)
        return health

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _live(self) -> None:
        while not self._ended.wait(interval_s(self.ranks)):
            self._beat()

    def _beat(self) -> None:
        self._count += 1
        text = Beat(self._count, self._place).text()
        for rank in self._living:
            self.store.set(heartbeat_key(rank), text)


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(600, 7)
    yield made
    made.end()


@pytest.mark.alone
@pytest.mark.parametrize("lost", [False, True])
def test_one_rank_reads_all_heartbeats_and_names_the_silent_one_of_six_hundred(job: Job, lost: bool) -> None:
    said: dict[int, str] = {}

    def at_the_deadline(rank: int) -> None:
        health = job.health(rank)
        time.sleep(0.3)
        loss = (rank + 1, "reset") if lost and rank == 300 else None
        said[rank] = health.explain({rank + 1}, lost=loss, waited_s=1.0)
        health.publish(DeadlineError(f"no answer; {said[rank]}"))
        health.detach(job)

    start = time.monotonic()
    threads = [threading.Thread(target=at_the_deadline, args=(rank,)) for rank in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert time.monotonic() - start < 4.0
    assert [named_at_fault(said[rank]) for rank in (100, 200, 300)] == [{7}] * 3, said
    # One of them reads all heartbeats, the others wait for its cause; no rank reads one after another.
    assert sum("failed first: DeadlineError" in words for words in said.values()) == 2, said
    assert job.requests[0] < 400


@pytest.mark.alone
def test_the_neighbour_of_a_silent_rank_names_it_at_once(job: Job) -> None:
    health = job.health(6)
    until(health.silent)
    start = time.monotonic()
    assert named_at_fault(health.explain({5, 7})) == {7} and time.monotonic() - start < 0.3
    health.detach(job)


@pytest.mark.parametrize(("at_deadline", "named"), [(False, set()), (True, {0, 1})])
def test_only_at_a_deadline_a_rank_is_behind(at_deadline: bool, named: set[int]) -> None:
    job = Job(3, 2, Place("idle", 0))
    health = job.health(2)
    said = health.explain({1}, at_deadline=at_deadline)
    health.detach(job)
    job.end()
    assert named_at_fault(said) == named and ("rank 1 is alive" in said) != at_deadline, said


def test_who_was_heard_shortly_before_the_deadline_is_not_called_silent() -> None:
    job = Job(3, 1)
    health = job.health(0)
    job.store.set(heartbeat_key(1), Beat(2, PLACE).text())
    time.sleep(0.3)
    said = health.explain({1}, waited_s=20.0)
    assert said.startswith("rank 1 is not heard at the moment, last in") and named_at_fault(said) == set(), said
    # The same silence is long enough after a short wait, and after a connection was lost.
    assert named_at_fault(health.explain({1}, waited_s=1.0)) == {1}
    assert named_at_fault(health.explain({1}, waited_s=20.0, lost=(1, "reset"))) == {1}
    health.detach(job)
    job.end()


def test_a_cause_is_read_in_every_round_and_told_once() -> None:
    store, heard = HashStore(), list[str]()
    health = Health(ControlStore(store, 0, 2))
    health.attach("test", Place, heard.append)
    until(lambda: health.store.rounds > 2)
    assert not heard and health.cause is None
    began_s = time.monotonic()
    ControlStore(store, 1, 2).publish_cause(ValueError("no heads"))
    until(lambda: heard)
    assert time.monotonic() - began_s < 1.0 and heard == [health.cause] == ["rank 1 failed first: ValueError: no heads"]
    time.sleep(0.3)
    assert len(heard) == 1
    health.detach("test")


def test_two_transports_have_one_heartbeat_which_ends_with_the_last() -> None:
    store = HashStore()
    health = Health(ControlStore(store, 0, 2))
    health.attach("inside", lambda: Place("idle", 3))
    health.attach("between", lambda: PLACE)
    until(lambda: store.check([heartbeat_key(0)]) and Beat.parse(store.get(heartbeat_key(0))).place == PLACE)
    health.detach("between")
    health.detach("between")
    until(lambda: Beat.parse(store.get(heartbeat_key(0))).place == Place("idle", 3))
    assert Beat.parse(store.get(heartbeat_key(0))).count != ENDED
    health.closed = True
    health.detach("inside")
    last = Beat.parse(store.get(heartbeat_key(0)))
    assert last.count == ENDED and last.closed
    assert not [thread for thread in threading.enumerate() if thread is health._thread and thread.is_alive()]


def test_a_lost_store_is_said_and_ends_no_thread(capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    health = Health(ControlStore(store, 0, 2))
    health.store = StoreFeed(ControlStore(LostStore(), 0, 2), 0.1)  # type: ignore[arg-type]
    health.attach(store, Place)
    until(lambda: health.store.gone)
    assert health._thread is not None and health._thread.is_alive()
    said = health.explain({1}, lost=(1, "reset"))
    assert said.startswith(
        "the connection to rank 1 was lost (reset), and no first cause can be read; the store's host"
    )
    assert said.endswith("is gone") and named_at_fault(said) == set()
    health.detach(store)
    assert capfd.readouterr().err == ""


LEAVES = """
from torch.distributed import TCPStore
from ringattn.transport.control_store import ControlStore
from ringattn.transport.health import feeds, health
from ringattn.transport.health.verdict import Place
health.INTERVAL_S = feeds.INTERVAL_S = 1e-6
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
ranks = [health.Health(ControlStore(store.clone(), rank, 16)) for rank in range(16)]
for each in ranks:
    each.attach(each, Place)
store.wait([f"heartbeat/{rank}" for rank in range(16)])
"""


def test_a_process_leaves_in_the_middle_of_a_heartbeat() -> None:
    # A thread that is inside the store when the interpreter ends takes the process down; one of many always is.
    done = subprocess.run([sys.executable, "-c", LEAVES], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# --- own standstill --------------------------------------------------------------------------------------------------


def test_a_rank_that_stood_still_during_a_wait_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3, 1)
    health = job.health(0)
    until(health.silent)
    assert named_at_fault(health.explain({1}, waited_s=1.0)) == {1}
    hold, held = threading.Event(), threading.Event()

    def stands_still() -> Place:
        held.set()
        hold.wait(10.0)
        return PLACE

    health._users[job] = stands_still, lambda cause: None
    held.wait(10.0)
    time.sleep(2.5)
    hold.set()
    said = health.explain({1}, waited_s=2.0)
    assert said.startswith("rank 0 itself stood still for 2.") and named_at_fault(said) == set(), said
    # One that was longer than the deadline is why the others failed, also if this rank waited only afterwards.
    assert health.explain({1}, waited_s=0.0, timeout_s=2.0, lost=(1, "reset")).startswith("rank 0 itself stood still")
    # A wait that began afterwards has nothing to do with a shorter one.
    assert "stood still" not in health.explain({1}, waited_s=0.0, timeout_s=20.0, lost=(1, "reset"))
    until(lambda: health.silent() == {1})
    assert named_at_fault(health.explain({1}, waited_s=0.0)) == {1}
    health.detach(job)
    job.end()


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

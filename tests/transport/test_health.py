"""What a rank observes of the others: by the store, by datagrams of its neighbours, by its own clock; and RAS."""

from __future__ import annotations

import json
import socket
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
from ringattn.transport.health import health as health_module
from ringattn.transport.health.health import Health
from ringattn.transport.health.heard import Feed
from ringattn.transport.health.neighbours import Neighbours
from ringattn.transport.health.place import ENDED, Beat, Place, Waits
from ringattn.transport.health.ras import WITHIN_S, ras_address, ras_report
from ringattn.transport.health.store_feed import StoreFeed, heartbeat_key, interval_s, silence_s
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
from ringattn.transport.health import health, store_feed
from ringattn.transport.health.place import Place
health.INTERVAL_S = store_feed.INTERVAL_S = 1e-6
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
    # A wait that began afterwards has nothing to do with it.
    until(lambda: health.silent() == {1})
    assert named_at_fault(health.explain({1}, waited_s=0.0)) == {1}
    health.detach(job)
    job.end()


# --- neighbours ------------------------------------------------------------------------------------------------------


class Side:
    """The datagrams of one rank, on loopback."""

    def __init__(self, rank: int, world_size: int, store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.store, self.count = rank, store, 0
        self.neighbours = Neighbours(rank, world_size, "lo", 0.5)

    def round(self, now_s: float, observed: dict[int, str] | None = None) -> None:
        self.neighbours.meet(self.store)
        self.count += 1
        self.neighbours.exchange(Beat(self.count, PLACE), observed or {}, now_s)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Side]]:
    store = HashStore()
    made = [Side(rank, 6, store, monkeypatch) for rank in range(6)]
    yield made
    for side in made:
        side.neighbours.close(Beat(ENDED))


def rounds(sides: list[Side], times: list[float], observed: dict[int, dict[int, str]] | None = None) -> None:
    for now_s in times:
        for side in sides:
            side.round(now_s, (observed or {}).get(side.rank))


def test_neighbours_hear_each_other_and_nobody_else(sides: list[Side]) -> None:
    rounds(sides, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert [set(side.neighbours.heard) for side in sides] == [{1, 5}, {0, 2}, {1, 3}, {2, 4}, {3, 5}, {4, 0}]
    assert all(side.neighbours._socket.getsockname()[0] == "127.0.0.1" for side in sides)  # type: ignore[union-attr]
    assert not sides[0].neighbours.unchanged(0.2, 0.0)
    rounds(sides[1:], [0.1 * n for n in range(6, 20)])  # rank 0 is stopped
    assert [side.neighbours.unchanged(1.0, 1.0) for side in sides[1:]] == [{0}, set(), set(), set(), {0}]


def test_what_one_rank_observes_all_ranks_learn_and_forget(sides: list[Side]) -> None:
    rounds(sides, [0.1 * n for n in range(8)])
    living = sides[1:]
    # Rank 1 and rank 5 observe that rank 0 is silent; there is no way past it.
    rounds(living, [0.8 + 0.1 * n for n in range(6)], {1: {0: "silent"}, 5: {0: "gone"}})
    for side in living[1:-1]:
        reports = {how: side.neighbours.reported(how, 1.3, 1.0) for how in ("silent", "gone")}
        assert reports == {"silent": {0}, "gone": {0}}, side.rank
    # Nobody repeats what nobody observes any more.
    rounds(sides, [1.4 + 0.1 * n for n in range(12)])
    assert not any(side.neighbours.reported(how, 2.5, 1.0) for side in sides for how in ("silent", "gone"))


def test_reports_of_a_neighbour_that_is_silent_itself_do_not_count(sides: list[Side]) -> None:
    rounds(sides, [0.1 * n for n in range(8)], {1: {4: "silent"}})
    assert sides[2].neighbours.reported("silent", 0.8, 1.0) == {4}
    assert sides[2].neighbours.reported("silent", 3.0, 1.0) == set()


FORGED: list[Callable[[str], Any]] = [
    lambda nonce: b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.",
    lambda nonce: b"",
    lambda nonce: b"[" * 5000,
    lambda nonce: json.dumps(["other", 1, Beat(99, PLACE).text(), []]).encode(),
    lambda nonce: json.dumps([nonce, 3, Beat(99, PLACE).text(), []]).encode(),
    lambda nonce: json.dumps([nonce, [], Beat(99, PLACE).text(), []]).encode(),
    lambda nonce: json.dumps([nonce, 1, "[]", []]).encode(),
    lambda nonce: json.dumps([nonce, 1, Beat(99, PLACE).text(), [[1, 2]]]).encode(),
    lambda nonce: json.dumps([nonce, 1]).encode(),
]


@pytest.mark.parametrize("forge", FORGED, ids=range(len(FORGED)))
def test_a_datagram_of_another_ring_or_form_is_dropped(sides: list[Side], forge: Callable[[str], bytes]) -> None:
    rounds(sides, [0.0, 0.1, 0.2, 0.3])
    target = sides[0].neighbours
    target.exchange(Beat(49, PLACE), {}, 0.35)
    before = target.heard[1].beat
    assert before.count == 4
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(forge(target._nonce), target._socket.getsockname())  # type: ignore[union-attr]
    target.exchange(Beat(50, PLACE), {}, 0.4)
    assert target.heard[1].beat == before and not target.reported("silent", 0.4, 1.0)


def test_silence_of_datagrams_alone_is_no_reason_while_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    health = Health(ControlStore(store, 0, 3))
    monkeypatch.setattr(
        Feed, "unchanged", lambda feed, limit_s, since_s: {1} if isinstance(feed, Neighbours) else set()
    )
    assert health.silent() == set()
    monkeypatch.setattr(StoreFeed, "unanswered", "the store's host did not answer")
    assert health.silent() == {1}
    monkeypatch.setattr(Neighbours, "reported", lambda feed, how, now_s, limit_s: {2} if how == "silent" else set())
    assert health.silent() == {1, 2}
    assert named_at_fault(health.explain({1})) == {1, 2}


# --- RAS -------------------------------------------------------------------------------------------------------------

RAS_STATUS = """
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data
"""


class RasStub:
    """A server that answers one request as RAS does, or only a part of it and then nothing more."""

    def __init__(self, status: str, hangs: bool = False) -> None:
        self.asked, self._status, self._hangs = b"", status, hangs
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            self.asked = connection.recv(100)
            connection.sendall(self._status.encode())
            if self._hangs:
                self._ended.wait(10.0)

    def end(self) -> None:
        self._ended.set()
        self._thread.join(5.0)
        self._listener.close()


def test_what_ras_says_of_dead_ranks_is_one_line() -> None:
    stub = RasStub(RAS_STATUS)
    said = ras_report(stub.address)
    stub.end()
    assert stub.asked == b"verbose status\n"
    assert said.startswith("NCCL RAS reports: DEAD, 1 job process is considered dead")
    assert "managing GPU 5" in said and said.endswith("The missing rank: 21") and "TIMEOUT" not in said


@pytest.mark.parametrize("status", ["", RAS_STATUS.partition("Errors")[0], "Errors\n======\n\nWarnings\n========\n"])
def test_without_errors_ras_adds_nothing(status: str) -> None:
    stub = RasStub(status)
    assert ras_report(stub.address) == ""
    stub.end()


def test_ras_is_not_waited_for() -> None:
    stub = RasStub(RAS_STATUS, hangs=True)
    start = time.monotonic()
    said = ras_report(stub.address)
    assert "managing GPU 5" in said and WITHIN_S - 0.1 < time.monotonic() - start < WITHIN_S + 0.4
    stub.end()
    assert ras_report(stub.address) == ras_report("nowhere") == ras_report("127.0.0.1:port") == ""


def test_ras_is_where_the_environment_says() -> None:
    assert ras_address({}, 22400) == "localhost:28028" and ras_address({}, 22304) is None
    assert ras_address({"NCCL_RAS_ADDR": "127.0.0.1:5"}, 22809) == "127.0.0.1:5"
    assert ras_address({"NCCL_RAS_ENABLE": "0"}, 22809) is None


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


def test_a_limit_is_kept_for_every_size() -> None:
    assert health_module.SHORTEST_S + health_module.PUBLISH_S + WITHIN_S < 3.0

"""What a rank observes of the other ranks (by store, shared pages, datagrams and its own clock), and whom it blames."""

from __future__ import annotations

import json
import socket
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
from ringattn.transport.health import feeds
from ringattn.transport.health.feeds import Feed, Neighbours, StoreFeed, heartbeat_key, interval_s, silence_s
from ringattn.transport.health.health import PUBLISH_S, Health
from ringattn.transport.health.verdict import ENDED, Beat, Evidence, Place, Waits, at_fault, explain
from ringattn.transport.location import Address
from ringattn.transport.nccl.supervisor import WITHIN_S, ras_address, ras_report
from tests.transport.attribution import named_at_fault
from tests.transport.nccl_rings import on_rings
from tests.transport.simulated.world import SimWorld, Stall

ROOT = Path(__file__).resolve().parents[2]
PLACE = Place("forward step 1", 1, Waits.PEERS, frozenset({0}))


class LostStore:
    """A store whose host has ended."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("connection reset")


class Counted:
    """A store that counts its requests."""

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


def test_a_heartbeat_is_unchanged_only_if_it_was_read_repeatedly() -> None:
    feed = Feed[int](gap_s=0.5)
    for now_s in (0.0, 0.4, 0.8, 1.2):
        feed.note(1, 7, now_s)
        feed.note(2, int(now_s * 10), now_s)
    assert feed.unchanged(1.0, 1.0) == {1} and feed.unchanged(2.0, 1.0) == set() and feed.new(1.0) == {2}
    assert feed.unchanged(1.0, 2.0) == set()  # the last heartbeat was read too long ago
    feed.note(1, 7, 9.0)  # no heartbeat was read in between: this rank was stopped, or the feed did not answer
    assert feed.unchanged(1.0, 0.0) == set() and feed.new(8.0) == set()
    feed.keep({2})
    feed.note(1, 7, 9.1)
    assert feed.unchanged(0.1, 0.0) == set()


def test_a_rank_closed_in_one_feed_has_closed_whatever_other_feeds_read_later() -> None:
    health = Health(ControlStore(HashStore(), 0, 3))
    health.store.note(1, Beat(ENDED, closed=True), 0.0)
    health._neighbours.note(1, Beat(9), 0.0)
    assert health.beats()[1].closed and health.left() == {1}


# --- shared pages ----------------------------------------------------------------------------------------------------


class PagesOfAFailure:
    """Fake shared pages of three ranks: rank 1 is still in call 6, and rank 2 has failed because of that."""

    def __init__(self, cause: str | None) -> None:
        self.gone: set[int] = set()
        self._cause, self._count = cause, 0

    def exchange(self, beat: Beat) -> dict[int, Beat]:
        self._count += 1
        return {1: Beat(self._count, Place("idle", 6)), 2: Beat(ENDED)}

    def first_cause(self) -> str | None:
        return self._cause


@pytest.mark.parametrize("cause", [None, "rank 2 failed first: DeadlineError: rank 1 is behind, in 'idle' of call 6"])
def test_a_failed_rank_is_not_called_behind(cause: str | None) -> None:
    health = Health(ControlStore(HashStore(), 0, 3))
    health.pages = PagesOfAFailure(cause)
    health.attach(job := object(), lambda: Place("all-gather 6", 7, Waits.PEERS, frozenset({1, 2})))
    time.sleep(0.3)
    explanation = health.explain({1}, waited_s=4.0)
    health.detach(job)
    assert explanation == (cause or "rank 1 is behind, in 'idle' of call 6, others in call 7")


# --- the store -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 64, 534, 1024])
def test_a_silent_rank_is_detected_before_the_explanation_must_end(ranks: int) -> None:
    health = Health(ControlStore(HashStore(), 0, ranks))
    interval = health.store.interval_s
    assert interval == interval_s(ranks) and 2 * ranks / interval <= 5000
    assert 2 * interval < silence_s(interval) == health.silence_s < health.limit_s < 2.0


class Job:
    """The ranks of a job, which send heartbeats and do nothing else. The rank `silent` sends none."""

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
    job = Job(600, 7)
    yield job
    job.end()


@pytest.mark.alone
@pytest.mark.parametrize("lost", [False, True])
def test_one_rank_reads_all_heartbeats_and_names_the_silent_one_of_six_hundred(job: Job, lost: bool) -> None:
    messages: dict[int, str] = {}

    def at_the_deadline(rank: int) -> None:
        health = job.health(rank)
        time.sleep(0.3)
        loss = (rank + 1, "reset") if lost and rank == 300 else None
        messages[rank] = health.explain({rank + 1}, lost=loss, waited_s=1.0)
        health.publish(DeadlineError(f"no answer; {messages[rank]}"))
        health.detach(job)

    start = time.monotonic()
    threads = [threading.Thread(target=at_the_deadline, args=(rank,)) for rank in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert time.monotonic() - start < 4.0
    assert [named_at_fault(messages[rank]) for rank in (100, 200, 300)] == [{7}] * 3, messages
    # One of the three ranks reads all heartbeats. The other two wait for the cause that it publishes, and read none.
    assert sum("failed first: DeadlineError" in message for message in messages.values()) == 2, messages
    assert job.requests[0] < 400


@pytest.mark.alone
def test_the_neighbour_of_a_silent_rank_names_it_at_once(job: Job) -> None:
    health = job.health(6)
    until(health.silent)
    start = time.monotonic()
    assert named_at_fault(health.explain({5, 7})) == {7} and time.monotonic() - start < 0.3
    health.detach(job)


@pytest.mark.parametrize(("at_deadline", "named"), [(False, set()), (True, {0, 1})])
def test_a_rank_is_called_behind_only_at_a_deadline(at_deadline: bool, named: set[int]) -> None:
    job = Job(3, 2, Place("idle", 0))
    health = job.health(2)
    text = health.explain({1}, at_deadline=at_deadline)
    health.detach(job)
    job.end()
    assert named_at_fault(text) == named and ("rank 1 is alive" in text) != at_deadline, text


def test_a_rank_waits_for_the_cause_of_a_living_peer_whose_connection_broke() -> None:
    job = Job(3, 0)
    health = job.health(0)
    # The peer takes the longest allowed time to explain its own failure, and so does its request to the store.
    cause = DeadlineError("rank 2 is silent")
    late = threading.Timer(health.limit_s + PUBLISH_S, ControlStore(job.store, 1, 3).publish_cause, (cause,))
    late.start()
    text = health.explain({1}, lost=(1, "reset"))
    late.join()
    health.detach(job)
    job.end()
    assert text == "rank 1 failed first: DeadlineError: rank 2 is silent"


def test_a_silence_that_is_short_for_the_wait_is_not_called_one() -> None:
    job = Job(3, 1)
    health = job.health(0)
    job.store.set(heartbeat_key(1), Beat(2, PLACE).text())
    time.sleep(0.3)
    text = health.explain({1}, waited_s=20.0)
    assert text.startswith("rank 1 is not heard at the moment, last in") and named_at_fault(text) == set(), text
    # After a shorter wait, or if the connection to rank 1 is lost, the same silence is long enough to blame rank 1.
    assert named_at_fault(health.explain({1}, waited_s=1.0)) == {1}
    assert named_at_fault(health.explain({1}, waited_s=20.0, lost=(1, "reset"))) == {1}
    health.detach(job)
    job.end()


def test_a_cause_is_read_within_a_round_and_reported_once() -> None:
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


def test_two_transports_share_one_heartbeat_that_ends_with_the_second() -> None:
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


def test_a_lost_store_is_reported_and_the_thread_keeps_running(capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    health = Health(ControlStore(store, 0, 2))
    health.store = StoreFeed(ControlStore(LostStore(), 0, 2), 0.1)  # type: ignore[arg-type]
    health.attach(store, Place)
    until(lambda: health.store.gone)
    assert health._thread is not None and health._thread.is_alive()
    text = health.explain({1}, lost=(1, "reset"))
    assert text.startswith(
        "the connection to rank 1 was lost (reset), and no first cause can be read; the store's host"
    )
    assert text.endswith("is gone") and named_at_fault(text) == set()
    health.detach(store)
    assert capfd.readouterr().err == ""


# --- stops of this rank itself ------------------------------------------------------------------------------------


def test_a_rank_that_was_stopped_during_its_wait_blames_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3, 1)
    health = job.health(0)
    until(health.silent)
    assert named_at_fault(health.explain({1}, waited_s=1.0)) == {1}
    hold, is_held = threading.Event(), threading.Event()

    def stands_still() -> Place:
        is_held.set()
        hold.wait(10.0)
        return PLACE

    health._users[job] = stands_still, lambda cause: None
    is_held.wait(10.0)
    time.sleep(2.5)
    hold.set()
    text = health.explain({1}, waited_s=2.0)
    assert (
        text.startswith("rank 0 itself was stopped or got no processor time for 2.") and named_at_fault(text) == set()
    ), text
    # A stop of this rank that is longer than the deadline made the others fail, even if the wait began after the stop.
    assert health.explain({1}, waited_s=0.0, timeout_s=2.0, lost=(1, "reset")).startswith("rank 0 itself was stopped")
    # A shorter stop has nothing to do with a wait that began after the stop.
    assert "got no processor time" not in health.explain({1}, waited_s=0.0, timeout_s=20.0, lost=(1, "reset"))
    until(lambda: health.silent() == {1})
    assert named_at_fault(health.explain({1}, waited_s=0.0)) == {1}
    health.detach(job)
    job.end()


# --- in time ---------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_the_call_raises_while_the_abort_still_runs() -> None:
    world = SimWorld(3, faults=[Stall(0, "abort")], limit_s=20.0)
    reported, took = threading.Barrier(3), dict[int, float]()

    def body(ring: Ring) -> None:
        if ring.rank == 1:
            reported.wait(15.0)
            return
        start = time.monotonic()
        try:
            ring.barrier()
        finally:
            took[ring.rank] = time.monotonic() - start
            reported.wait(15.0)
            world.release(0)

    outcomes = on_rings(world, body, deadline_s=0.6, hard_s=30.0)
    for rank in (0, 2):
        assert "rank 1 is behind" in str(outcomes[rank].error) and named_at_fault(str(outcomes[rank].error)) == {1}
        assert took[rank] < 0.6 + 2.0


HOST, LAUNCH, COMPUTE, PEERS = Waits.HOST, Waits.LAUNCH, Waits.COMPUTE, Waits.PEERS
Ranks = dict[int, tuple[int, Waits, set[int] | None]]
RING: Ranks = {rank: (5, PEERS, {(rank - 1) % 4, (rank + 1) % 4}) for rank in range(4)}
STORE = "the store's host (rank 0 of the job, or torchrun's agent, at h:1) did not answer within 0.8 s"
CAUSE = "rank 3 failed first: ValueError: k has no heads"


def places(ranks: Ranks) -> dict[int, Place]:
    return {
        rank: Place("forward step 1", call, waits, None if peers is None else frozenset(peers))
        for rank, (call, waits, peers) in ranks.items()
    }


def evidence(ranks: Ranks = RING, **facts: Any) -> Evidence:
    return Evidence(rank=0, places=places(ranks), **facts)


BEHIND = RING | {1: (4, HOST, set())}

CASES: list[tuple[str, Evidence, set[int]]] = [
    ("all only wait", evidence(), set()),
    ("silent", evidence(silent={1}), {1}),
    ("two silent", evidence(silent={1, 2}), {1, 2}),
    ("gone", evidence(gone={2}), {2}),
    ("gone and silent", evidence(gone={2}, silent={1, 2}), {1, 2}),
    # In the first pass of the schedule `direct`, ranks that are not its neighbours connect to the dead rank 1 as well.
    ("silent before launches", evidence(RING | {0: (5, LAUNCH, {1}), 3: (5, LAUNCH, {1})}, silent={1}), {1}),
    ("silent before computing", evidence(RING | {0: (5, COMPUTE, {1})}, silent={1}), {1}),
    ("silent before behind", evidence(BEHIND, silent={2}), {2}),
    ("behind before launches", evidence(BEHIND | {0: (5, LAUNCH, {1}), 2: (5, LAUNCH, {1})}), {1}),
    ("computing", evidence(RING | {1: (5, COMPUTE, {2}), 0: (5, LAUNCH, {1})}), {1}),
    ("in a launch", evidence(RING | {1: (5, LAUNCH, {0, 2})}), {1}),
    # Rank 1 is behind, but it is in an exchange, in which it waits as all other ranks do.
    ("behind in an exchange", evidence(RING | {1: (4, PEERS, {0})}), set()),
    ("behind without a deadline", evidence(BEHIND, at_deadline=False), set()),
    ("behind and closed", evidence(BEHIND, closed={1}), set()),
    ("behind and failed", evidence(BEHIND | {2: (0, HOST, set())}, failed={2}), {1}),
    ("in a launch and failed", evidence(RING | {1: (5, LAUNCH, {0, 2})}, failed={1}), set()),
    ("missing", evidence(RING | {3: (5, HOST, set())}, missing={3}), {3}),
    ("missing, but it waits", evidence(missing={3}), set()),
    ("cause before silent", evidence(cause=CAUSE, silent={1}), {3}),
    ("cause before gone", evidence(cause=CAUSE, gone={1}), {3}),
    ("own standstill before all", evidence(stood_still_s=4.0, gone={1}, silent={2}, store=STORE), set()),
    ("own standstill and cause", evidence(stood_still_s=4.0, silent={2}, cause=CAUSE), {3}),
    # If the store does not answer, the positions of ranks that it returned earlier are out of date.
    ("no store", evidence(BEHIND, store=STORE), set()),
    ("no store, silent for the neighbours", evidence(store=STORE, silent={0}), {0}),
    ("lost and silent", evidence(lost=(2, "reset"), silent={2}, at_deadline=False), {2}),
    ("lost and alive", evidence(lost=(2, "reset"), at_deadline=False), set()),
    ("lost because of another", evidence(lost=(2, "reset"), silent={1}, at_deadline=False), {1}),
    ("lost and closed", evidence(lost=(2, "reset"), closed={2}, at_deadline=False), set()),
    ("lost without a store", evidence(lost=(2, "reset"), store=STORE, at_deadline=False), set()),
    ("late, but not for long", evidence(unheard={1}), set()),
]


@pytest.mark.parametrize(("given", "named"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_ranks_named_at_fault(given: Evidence, named: set[int]) -> None:
    assert named_at_fault("; ".join(at_fault(given))) == named
    assert named_at_fault(explain(given)) == named, explain(given)


@pytest.mark.parametrize("peers", [{1, 2, 3}, None])
def test_ranks_that_connect_to_each_other_are_not_named(peers: set[int] | None) -> None:
    both = RING | {1: (5, LAUNCH, {2} if peers else None), 2: (5, LAUNCH, {1} if peers else None)}
    (phrase,) = at_fault(evidence(both))
    assert phrase == "one of ranks [1, 2] is stuck in a launch, and the others of them wait for it there"
    assert named_at_fault(phrase) == set()


def test_the_host_of_an_unanswering_store_is_named_after_the_ranks() -> None:
    assert at_fault(evidence(silent={1}, store=STORE))[-1] == STORE
    assert explain(evidence(store=STORE, waited_for={2})).startswith(f"{STORE}; rank 2 is alive in 'forward step 1'")


def test_ranks_that_are_not_at_fault_are_reported_with_their_position() -> None:
    assert explain(evidence(waited_for={1, 3}, closed={3})) == (
        "rank 1 is alive in 'forward step 1' of call 5; rank 3 has left its ring"
    )
    assert explain(evidence(waited_for={1}, failed={1})) == "rank 1 has failed as well"
    assert explain(evidence(unheard={1}, waited_for={2})).startswith("rank 1 is not heard at the moment, last in")
    assert "silent" not in explain(evidence(unheard={1}))
    assert explain(evidence({}, waited_for={1})) == "rank 1 was never heard"
    assert explain(evidence(lost=(2, "reset"), at_deadline=False)) == (
        "the connection to rank 2 was lost (reset); rank 2 is alive in 'forward step 1' of call 5"
    )
    assert "never heard" in explain(evidence({}, silent={1}))


def test_a_stopped_rank_reports_how_long_it_was_stopped() -> None:
    alone = explain(evidence(stood_still_s=4.25, silent={1}))
    assert alone == (
        "rank 0 itself was stopped or got no processor time for 4.2 s; so it cannot report which rank failed"
    )


@pytest.mark.parametrize("place", [Place(), Place("ü" * 120, 7, PEERS, frozenset({3, 1})), Place("x", 1, LAUNCH, None)])
def test_a_heartbeat_survives_encoding(place: Place) -> None:
    beat = Beat(3, place, True, {"call": 2})
    assert Beat.parse(beat.text()) == Beat.parse(beat.text().encode()) == beat
    assert Place.make("x" * 500, 1, PEERS, range(17)) == Place("x" * 120, 1, PEERS, None)


NO_BEATS = ["", "1", "{}", "[1]", '[1,"a",1,"nothing",[],false,null]', "[[],1,1,1,1,1,1]", "0 poison", "[" * 5000]


@pytest.mark.parametrize("text", NO_BEATS, ids=range(len(NO_BEATS)))
def test_text_that_is_no_heartbeat_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError, RecursionError)):
        Beat.parse(text)
    assert Beat.parse_or_none(text) is Beat.parse_or_none(None) is None


# --- neighbours ------------------------------------------------------------------------------------------------------


class Side:
    """One rank that exchanges datagrams with its neighbours, over loopback."""

    def __init__(self, rank: int, world_size: int, store: HashStore) -> None:
        self.rank, self.store, self.count = rank, store, 0
        self.neighbours = Neighbours(rank, world_size, "lo", 1.0)

    def round(self, now_s: float, observed: dict[int, str] | None = None) -> None:
        self.neighbours.meet(self.store)
        self.count += 1
        self.neighbours.exchange(Beat(self.count, PLACE), observed or {}, now_s)


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    store = HashStore()
    all_sides = [Side(rank, 6, store) for rank in range(6)]
    yield all_sides
    for side in all_sides:
        side.neighbours.close(Beat(ENDED))


def rounds(sides: list[Side], times: list[float], observed: dict[int, dict[int, str]] | None = None) -> None:
    for now_s in times:
        for side in sides:
            side.round(now_s, (observed or {}).get(side.rank))


def test_heartbeats_reach_the_neighbours_and_no_other_rank(sides: list[Side]) -> None:
    rounds(sides, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert [set(side.neighbours.heard) for side in sides] == [{1, 5}, {0, 2}, {1, 3}, {2, 4}, {3, 5}, {4, 0}]
    assert all(side.neighbours._socket.getsockname()[0] == "127.0.0.1" for side in sides)  # type: ignore[union-attr]
    assert not sides[0].neighbours.unchanged(0.2, 0.0)
    rounds(sides[1:], [0.1 * n for n in range(6, 20)])  # rank 0 is stopped
    assert [side.neighbours.unchanged(1.0, 1.0) for side in sides[1:]] == [{0}, set(), set(), set(), {0}]


ADDRESSES = {
    "all on one machine": [("127.0.0.1", "127.0.0.1")] * 3,
    "a neighbour with a named interface": [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("10.0.0.2", "")],
    "a neighbour without an address": [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("", "")],
}


@pytest.mark.parametrize("addresses", ADDRESSES.values(), ids=ADDRESSES)
def test_ranks_bind_to_an_address_that_their_neighbours_reach(
    addresses: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sides = HashStore(), [Neighbours(rank, 3, "", 1.0) for rank in range(3)]
    for _ in range(3):
        for side, (own, meeting) in zip(sides, addresses, strict=True):
            monkeypatch.setattr(feeds, "find_address", lambda store, interface, a=own, m=meeting: Address(a, m, ""))
            side.meet(store)
    bound = [side._socket.getsockname()[0] if side._socket else "" for side in sides]
    assert bound == ["127.0.0.1", "127.0.0.1", addresses[2][0].replace("10.0.0.2", "")]
    assert all(set(side._targets) == (side.ranks if bound[2] else set()) for side in sides)
    for side in sides:
        side.close(Beat(ENDED))


def test_an_observation_reaches_all_ranks_and_expires(sides: list[Side]) -> None:
    rounds(sides, [0.1 * n for n in range(8)])
    living = sides[1:]
    # Ranks 1 and 5, the neighbours of rank 0, observe that rank 0 is silent. No report can pass through rank 0.
    rounds(living, [0.8 + 0.1 * n for n in range(6)], {1: {0: "silent"}, 5: {0: "gone"}})
    for side in living[1:-1]:
        reports = {how: side.neighbours.reported(how, 1.3) for how in ("silent", "gone")}
        assert reports == {"silent": {0}, "gone": {0}}, side.rank
    # A report expires when no rank observes its content any more.
    rounds(sides, [1.4 + 0.1 * n for n in range(12)])
    assert not any(side.neighbours.reported(how, 2.5) for side in sides for how in ("silent", "gone"))


def test_reports_of_a_neighbour_that_is_silent_itself_do_not_count(sides: list[Side]) -> None:
    rounds(sides, [0.1 * n for n in range(8)], {1: {4: "silent"}})
    assert sides[2].neighbours.reported("silent", 0.8) == {4}
    assert sides[2].neighbours.reported("silent", 3.0) == set()


@pytest.mark.parametrize("closed", [False, True])
def test_the_last_report_of_a_neighbour_that_failed_is_kept(sides: list[Side], closed: bool) -> None:
    rounds(sides, [0.1 * n for n in range(8)], {1: {0: "silent"}})
    sides[1].neighbours.close(Beat(ENDED, PLACE, closed))
    rounds(sides[2:], [0.8 + 0.1 * n for n in range(30)])
    assert sides[2].neighbours.reported("silent", 3.8) == (set() if closed else {0})


def test_a_report_of_a_neighbour_that_is_silent_is_not_passed_on(sides: list[Side]) -> None:
    rounds(sides, [0.1 * n for n in range(8)], {1: {4: "silent"}})
    assert sides[3].neighbours.reported("silent", 0.8) == {4}
    rounds([sides[0], *sides[2:]], [0.8 + 0.1 * n for n in range(30)])  # rank 1 is stopped
    assert not any(side.neighbours.reported("silent", 3.8) for side in sides)


FORGED: list[Callable[[str], bytes]] = [
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
    assert target.heard[1].beat == before and not target.reported("silent", 0.4)


def test_missing_datagrams_are_ignored_while_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    health = Health(ControlStore(store, 0, 3))
    monkeypatch.setattr(
        Feed, "unchanged", lambda feed, limit_s, since_s: {1} if isinstance(feed, Neighbours) else set()
    )
    assert health.silent() == set()
    monkeypatch.setattr(StoreFeed, "unanswered", "the store's host did not answer")
    assert health.silent() == {1}
    monkeypatch.setattr(Neighbours, "reported", lambda feed, how, now_s: {2} if how == "silent" else set())
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
    """A server that answers one request with `status`, as RAS does. If `hangs`, it does not close the connection."""

    def __init__(self, status: str, hangs: bool = False) -> None:
        self.request, self._status, self._hangs = b"", status, hangs
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            self.request = connection.recv(100)
            connection.sendall(self._status.encode())
            if self._hangs:
                self._ended.wait(10.0)

    def end(self) -> None:
        self._ended.set()
        self._thread.join(5.0)
        self._listener.close()


def test_the_ras_report_of_dead_ranks_is_one_line() -> None:
    stub = RasStub(RAS_STATUS)
    report = ras_report(stub.address)
    stub.end()
    assert stub.request == b"verbose status\n"
    assert report.startswith("NCCL RAS reports: DEAD, 1 job process is considered dead")
    assert "managing GPU 5" in report and report.endswith("The missing rank: 21") and "TIMEOUT" not in report


@pytest.mark.parametrize("status", ["", RAS_STATUS.partition("Errors")[0], "Errors\n======\n\nWarnings\n========\n"])
def test_without_errors_ras_adds_nothing(status: str) -> None:
    stub = RasStub(status)
    assert ras_report(stub.address) == ""
    stub.end()


def test_a_hanging_ras_server_delays_nothing() -> None:
    stub = RasStub(RAS_STATUS, hangs=True)
    start = time.monotonic()
    report = ras_report(stub.address)
    assert "managing GPU 5" in report and WITHIN_S - 0.1 < time.monotonic() - start < WITHIN_S + 0.4
    stub.end()
    assert ras_report(stub.address) == ras_report("nowhere") == ras_report("127.0.0.1:port") == ""


def test_the_ras_address_comes_from_the_environment() -> None:
    assert ras_address({}, 22400) == "localhost:28028" and ras_address({}, 22304) is None
    assert ras_address({"NCCL_RAS_ADDR": "127.0.0.1:5"}, 22809) == "127.0.0.1:5"
    assert ras_address({"NCCL_RAS_ENABLE": "0"}, 22809) is None

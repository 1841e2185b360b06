"""Datagrams between neighbours, which need no store, and what NCCL's RAS reports."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from ringattn.transport.control_store import ControlStore
from ringattn.transport.health import feeds
from ringattn.transport.health.feeds import Feed, Neighbours, StoreFeed
from ringattn.transport.health.health import Health
from ringattn.transport.health.verdict import ENDED, Beat, Place, Waits
from ringattn.transport.location import Address
from ringattn.transport.nccl.supervisor import WITHIN_S, ras_address, ras_report
from tests.transport.attribution import named_at_fault

PLACE = Place("forward step 1", 1, Waits.PEERS, frozenset({0}))

# --- neighbours ------------------------------------------------------------------------------------------------------


class Side:
    """The datagrams of one rank, on loopback."""

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
    made = [Side(rank, 6, store) for rank in range(6)]
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


def test_what_one_rank_observes_all_ranks_learn_and_forget(sides: list[Side]) -> None:
    rounds(sides, [0.1 * n for n in range(8)])
    living = sides[1:]
    # Rank 1 and rank 5 observe that rank 0 is silent; there is no way past it.
    rounds(living, [0.8 + 0.1 * n for n in range(6)], {1: {0: "silent"}, 5: {0: "gone"}})
    for side in living[1:-1]:
        reports = {how: side.neighbours.reported(how, 1.3) for how in ("silent", "gone")}
        assert reports == {"silent": {0}, "gone": {0}}, side.rank
    # Nobody repeats what nobody observes any more.
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


def test_silence_of_datagrams_alone_is_no_reason_while_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
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

"""Simulated ranks of a large ring: the real heartbeats, opening and attribution, many ranks in one process.

A rank is not a thread: its rounds are run in turn by one thread of the process, over a few connections that all its
ranks share. Where ranks wait for each other, at opening and at a deadline, each gets a thread.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from ringattn.errors import DeadlineError
from ringattn.transport.control_store import BoundedStore, ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.health.health import PUBLISH_S, Health
from ringattn.transport.health.verdict import Place, Waits
from ringattn.transport.location import Location
from ringattn.transport.nccl.bootstrap import Arrival, all_ready, meet, share_unique_id
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nccl.supervisor import CallHistory

PREFIX = "ringattn/0123456789abcdef/0"
CONNECTIONS = 8
CALLS = 5000
"""Calls that each rank has made: a heartbeat tells of some of them."""
NODE = 8
OPENING_S = 120.0


class Counted:
    """Counts the calls of a store, the messages that torch makes of them, and their bytes."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def clone(self) -> Counted:
        """The same connection: a process of many ranks has few."""
        return self

    def has_extended_api(self) -> bool:
        """See `dist.Store.has_extended_api`."""
        return True

    def set(self, key: str, value: str | bytes) -> None:
        """See `dist.Store.set`."""
        self._count(1, [key], len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """See `dist.Store.get`: torch waits for the key first."""
        value: bytes = self._store.get(key)
        self._count(2, [key, key], len(value))
        return value

    def check(self, keys: list[str]) -> bool:
        """See `dist.Store.check`."""
        self._count(1, keys, 0)
        return bool(self._store.check(keys))

    def add(self, key: str, n: int) -> int:
        """See `dist.Store.add`."""
        self._count(1, [key], 8)
        return int(self._store.add(key, n))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See `dist.Store.multi_get`: torch waits for the keys first."""
        values: list[bytes] = self._store.multi_get(keys)
        self._count(2, [*keys, *keys], sum(map(len, values)))
        return values

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `dist.Store.compare_set`."""
        self._count(1, [key], len(desired))
        return bytes(self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """See `dist.Store.delete_key`."""
        self._count(1, [key], 0)
        return bool(self._store.delete_key(key))

    def _count(self, messages: int, keys: Sequence[str], nbytes: int) -> None:
        self._counts["requests"] += 1
        self._counts["messages"] += messages
        self._counts["bytes"] += sum(map(len, keys)) + len(keys) * len(PREFIX) + nbytes


class SimRank:
    """One rank: what the transport makes of the store, without the threads."""

    def __init__(
        self, store: BoundedStore, rank: int, ranks: int, calls: CallHistory, locations: Sequence[Location]
    ) -> None:
        self.rank, self.ranks, self._locations = rank, ranks, locations
        self.control = ControlStore(store, rank, ranks)
        self.health = Health(self.control)
        self.health.calls = calls.told
        neighbours = {(rank - 1) % ranks, (rank + 1) % ranks}
        # Without a thread: the rounds of all ranks run in turn.
        self.health._users[self] = (
            lambda: Place.make("forward step 1", CALLS, Waits.PEERS, neighbours),
            lambda cause: None,
        )
        self.interval_s = self.health.store.interval_s

    def round(self) -> None:
        """What the health thread does once in an interval."""
        self.health.round(time.monotonic())

    def open(self) -> None:
        """From the store to the point where communicators are made, and from there until all are ready."""
        mine = Arrival(self.rank, f"node{self.rank // NODE}", f"GPU-{self.rank}", 22809, "0", True, NcclOptions())
        deadline = Deadline(OPENING_S)
        meet(self.control, mine, self._locations, deadline, lambda: None)
        share_unique_id(self.control, lambda: bytes(128), deadline, lambda: None)
        all_ready(self.control, deadline, lambda: None)

    def attributed(self) -> str:
        """What a rank does at its deadline, until it knows who is at fault."""
        start_s = time.monotonic()
        words = self.health.explain({(self.rank + 1) % self.ranks})
        self.health.publish(DeadlineError(f"no answer; {words}"))
        return words if time.monotonic() - start_s < self.health.limit_s + PUBLISH_S else ""


def live(port: int, mine: Sequence[int], ranks: int, told: Connection) -> None:
    """The life of one process: answers `(what, *arguments)` until it is told None."""
    counts: Counter[str] = Counter()
    connections = [PrefixStore(PREFIX, TCPStore("127.0.0.1", port, is_master=False)) for _ in range(CONNECTIONS)]
    stores = [BoundedStore(Counted(each, counts), OPENING_S) for each in connections]  # type: ignore[arg-type]
    calls = CallHistory()
    for number in range(1, CALLS):
        calls.announce(number, bytes([number % 250]), "attention of (1, 8192, 32, 128) bfloat16, causal, ring")
    locations = [Location(f"node{rank // NODE}", f"node{rank // NODE}", rank, 0) for rank in range(ranks)]
    members = [SimRank(stores[n % CONNECTIONS], rank, ranks, calls, locations) for n, rank in enumerate(mine)]
    rounds = Rounds(members)
    told.send("ready")
    while (asked := told.recv()) is not None:
        match asked:
            case ("open", start_s):
                told.send(_together(members, start_s, SimRank.open))
            case ("live", silent):
                rounds.silent = silent
                rounds.start()
                told.send("living")
            case ("count",):
                told.send({**counts, "rounds": rounds.done, "at_s": time.monotonic()})
            case ("deadline", at_s, silent):
                told.send(_together([one for one in members if one.rank != silent], at_s, SimRank.attributed))
    rounds.end()


class Rounds:
    """Runs the rounds of all ranks of a process, each at its interval."""

    def __init__(self, members: Sequence[SimRank]) -> None:
        self.silent: int | None = None
        self.done = 0
        self.ended = threading.Event()
        self._members = members
        self._thread = threading.Thread(target=self._live, daemon=True)

    def start(self) -> None:
        """Once; then `silent` may be changed."""
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Before the store's host ends."""
        self.ended.set()
        self._thread.join(5.0)

    def _live(self) -> None:
        now = time.monotonic()
        due = [(now + random.random() * one.interval_s, one.rank, one) for one in self._members]
        heapq.heapify(due)
        while not self.ended.is_set():
            at_s, _, one = heapq.heappop(due)
            time.sleep(max(at_s - time.monotonic(), 0.0))
            if one.rank != self.silent:
                one.round()
                self.done += 1
            heapq.heappush(due, (time.monotonic() + one.interval_s, one.rank, one))


def _together(
    members: Sequence[SimRank], start_s: float, body: Callable[[SimRank], Any]
) -> list[tuple[int, float, Any]]:
    """`body` of all ranks at once, each on a thread: (rank, seconds after `start_s`, what it returned)."""
    found: list[tuple[int, float, Any]] = []

    def run(member: SimRank) -> None:
        time.sleep(max(start_s - time.monotonic(), 0.0))
        try:
            said = body(member)
        except RuntimeError as error:
            said = str(error)
        found.append((member.rank, time.monotonic() - start_s, said))

    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(OPENING_S + 10.0)
    return found

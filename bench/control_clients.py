"""Simulated ranks of a large ring: the real heartbeats, rendezvous and failure attribution, many ranks in one process.

A rank has no thread of its own. One thread of the process runs the health rounds of all its ranks in turn, over a few
connections that they share. When ranks wait for each other, at the rendezvous and at a deadline, each rank gets a
thread.
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
"""Calls that each rank has already made; a heartbeat reports some of them."""
NODE = 8
OPENING_S = 120.0


class Counted:
    """A store that counts its calls, the messages that torch sends for them, and their bytes."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def clone(self) -> Counted:
        """Return this store, so that all ranks of the process share its connection."""
        return self

    def has_extended_api(self) -> bool:
        """See `dist.Store.has_extended_api`."""
        return True

    def set(self, key: str, value: str | bytes) -> None:
        """See `dist.Store.set`."""
        self._count(1, [key], len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """See `dist.Store.get`. torch first waits for the key."""
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
        """See `dist.Store.multi_get`. torch first waits for the keys."""
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
    """One simulated rank, which uses the store as the transport does but has no threads."""

    def __init__(
        self, store: BoundedStore, rank: int, ranks: int, calls: CallHistory, locations: Sequence[Location]
    ) -> None:
        self.rank, self.ranks, self._locations = rank, ranks, locations
        self.control = ControlStore(store, rank, ranks)
        self.health = Health(self.control)
        self.health.calls = calls.report
        neighbours = {(rank - 1) % ranks, (rank + 1) % ranks}
        # Register with the health monitor without starting its thread, because the rounds of all ranks run in turn.
        self.health._users[self] = (
            lambda: Place.make("forward step 1", CALLS, Waits.PEERS, neighbours),
            lambda cause: None,
        )
        self.interval_s = self.health.store.interval_s

    def round(self) -> None:
        """Run one interval of the health thread."""
        self.health.round(time.monotonic())

    def open(self) -> None:
        """Run the store's part of the rendezvous, before and after the communicators are created."""
        arrival = Arrival(self.rank, f"node{self.rank // NODE}", f"GPU-{self.rank}", 22809, "0", True, NcclOptions())
        deadline = Deadline(OPENING_S)
        meet(self.control, arrival, self._locations, deadline, lambda: None)
        share_unique_id(self.control, lambda: bytes(128), deadline, lambda: None)
        all_ready(self.control, deadline, lambda: None)

    def attributed(self) -> str:
        """Return the failure attribution of this rank at its deadline, or an empty text if it took too long."""
        start_s = time.monotonic()
        explanation = self.health.explain({(self.rank + 1) % self.ranks})
        self.health.publish(DeadlineError(f"no answer; {explanation}"))
        return explanation if time.monotonic() - start_s < self.health.limit_s + PUBLISH_S else ""


def live(port: int, local_ranks: Sequence[int], ranks: int, connection: Connection) -> None:
    """Run one process of simulated ranks: answer requests `(name, *arguments)` until the request None."""
    counts: Counter[str] = Counter()
    connections = [PrefixStore(PREFIX, TCPStore("127.0.0.1", port, is_master=False)) for _ in range(CONNECTIONS)]
    stores = [BoundedStore(Counted(store, counts), OPENING_S) for store in connections]  # type: ignore[arg-type]
    calls = CallHistory()
    for number in range(1, CALLS):
        calls.announce(number, bytes([number % 250]), "attention of (1, 8192, 32, 128) bfloat16, causal, ring")
    locations = [Location(f"node{rank // NODE}", f"node{rank // NODE}", rank, 0) for rank in range(ranks)]
    members = [SimRank(stores[n % CONNECTIONS], rank, ranks, calls, locations) for n, rank in enumerate(local_ranks)]
    rounds = Rounds(members)
    connection.send("ready")
    while (request := connection.recv()) is not None:
        match request:
            case ("open", start_s):
                connection.send(_together(members, start_s, SimRank.open))
            case ("live", silent):
                rounds.silent = silent
                rounds.start()
                connection.send("living")
            case ("count",):
                connection.send({**counts, "rounds": rounds.done, "at_s": time.monotonic()})
            case ("deadline", at_s, silent):
                connection.send(
                    _together([member for member in members if member.rank != silent], at_s, SimRank.attributed)
                )
    rounds.end()


class Rounds:
    """A thread that runs the health rounds of all ranks of a process, each at its own interval."""

    def __init__(self, members: Sequence[SimRank]) -> None:
        self.silent: int | None = None
        self.done = 0
        self.ended = threading.Event()
        self._members = members
        self._thread = threading.Thread(target=self._live, daemon=True)

    def start(self) -> None:
        """Start the thread if it does not run yet. `silent`, the rank that stops its rounds, may change later."""
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Stop the thread. Call it before the host of the store ends."""
        self.ended.set()
        self._thread.join(5.0)

    def _live(self) -> None:
        now = time.monotonic()
        due = [(now + random.random() * member.interval_s, member.rank, member) for member in self._members]
        heapq.heapify(due)
        while not self.ended.is_set():
            at_s, _, member = heapq.heappop(due)
            time.sleep(max(at_s - time.monotonic(), 0.0))
            if member.rank != self.silent:
                member.round()
                self.done += 1
            heapq.heappush(due, (time.monotonic() + member.interval_s, member.rank, member))


def _together(
    members: Sequence[SimRank], start_s: float, body: Callable[[SimRank], Any]
) -> list[tuple[int, float, Any]]:
    """Run `body` for all ranks at once, each on a thread; return (rank, seconds after `start_s`, result) of each."""
    results: list[tuple[int, float, Any]] = []

    def run(member: SimRank) -> None:
        time.sleep(max(start_s - time.monotonic(), 0.0))
        try:
            result = body(member)
        except RuntimeError as error:
            result = str(error)
        results.append((member.rank, time.monotonic() - start_s, result))

    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(OPENING_S + 10.0)
    return results

"""Heartbeats in the control store, and the monitor that reads them.

Each rank writes a counter and a status at an interval for as long as its process runs. A rank whose counter does not
change is stopped, stuck in a call that holds the interpreter, or gone; one whose counter changes is alive, and its
status says where it is. One that ended its heartbeat on purpose is neither.
Guarantees: clocks of different machines are never compared.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist

from ringattn.transport.bounded_store import BoundedStore
from ringattn.transport.control_store import CAUSE, ControlStore

ENDED = 0
CLOSED = "c"
POLL_S = 0.1
END_S = 1.0
"""How long the thread may take to end: one heartbeat takes far less, unless the store's host stands still."""


INTERVAL_S = 0.1
REQUESTS_PER_S = 4500.0
"""What the heartbeats of a whole job may ask of its one store, which serves some ten thousand requests a second."""


def interval_s(job_size: int, shortest_s: float = INTERVAL_S, requests: int = 2) -> float:
    """Seconds between two rounds of a rank, each of which is so many `requests`, in a job of `job_size` ranks."""
    return max(shortest_s, requests * job_size / REQUESTS_PER_S)


def silence_s(interval: float, shortest_s: float = 10 * INTERVAL_S) -> float:
    """How long a heartbeat that is sent every `interval` seconds must not change: two of them may be late."""
    return max(shortest_s, 2.2 * interval + 0.2)


def heartbeat_key(rank: int) -> str:
    """Where a rank's heartbeat is in the store."""
    return f"heartbeat/{rank}"


@dataclass(frozen=True)
class LastHeartbeat:
    """The newest heartbeat of a rank. `count` is `ENDED` once it ended on purpose; `closed`: it needs nobody more."""

    count: int
    status: str
    closed: bool = False

    @classmethod
    def parse(cls, text: bytes) -> LastHeartbeat:
        """The inverse of `text`."""
        count, _, status = text.decode().partition(" ")
        return cls(int(count.rstrip(CLOSED)), status, count.endswith(CLOSED))

    def text(self) -> str:
        """For the store."""
        return f"{self.count}{CLOSED if self.closed else ''} {self.status}"


def silence(rank: int, last: str | None) -> str:
    """A silent rank, in words. `last`: where it was in its last heartbeat, None before its first."""
    heard = "never heard" if last is None else f"last heard in {last}"
    return f"rank {rank} is silent (stopped, stuck, gone or out of reach), {heard}"


class Heartbeat:
    """Writes one rank's heartbeat and reads those of others. One thread uses `store`: clone it for another."""

    def __init__(self, store: dist.Store | BoundedStore, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._count = ENDED
        self.closed = False
        """Whether this rank has closed its ring."""
        self._begun: set[int] = set()

    def send(self, status: str) -> None:
        """Write that this rank is alive. Raises `RuntimeError` when the store's host is gone."""
        self._count += 1
        # A counter and no time of day: a reader only asks whether it changes.
        self._store.set(heartbeat_key(self._rank), LastHeartbeat(self._count, status, self.closed).text())

    def end(self, status: str) -> None:
        """Write that this rank sends no more heartbeats and that nothing is wrong with it. Raises as `send` does."""
        self._store.set(heartbeat_key(self._rank), LastHeartbeat(ENDED, status, self.closed).text())

    def last(self, rank: int) -> LastHeartbeat | None:
        """The newest heartbeat of `rank`, None before its first. Raises `RuntimeError` without the store's host."""
        return self.last_of([rank]).get(rank)

    def last_of(self, ranks: Iterable[int]) -> dict[int, LastHeartbeat]:
        """The newest heartbeats of those of `ranks` that have sent one: one request, once all have."""
        begun = self.begun(ranks)
        texts = self._store.multi_get([heartbeat_key(rank) for rank in begun]) if begun else []
        return {rank: LastHeartbeat.parse(text) for rank, text in zip(begun, texts, strict=True)}

    def begun(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that have sent a heartbeat: what may be read without waiting for it."""
        asked = list(ranks)
        self._begun.update(self._found([rank for rank in asked if rank not in self._begun]))
        return [rank for rank in asked if rank in self._begun]

    def _found(self, ranks: list[int]) -> list[int]:
        """Those of `ranks` whose key is there, with few requests where most are."""
        if not ranks or self._store.check([heartbeat_key(rank) for rank in ranks]):
            return ranks
        half = len(ranks) // 2
        return [*self._found(ranks[:half]), *self._found(ranks[half:])] if half else []

    def silent(self, ranks: Iterable[int], wait_s: float, ended: Callable[[], bool] = lambda: False) -> list[int]:
        """Those of `ranks` whose heartbeat does not change for `wait_s`, which must be a few intervals of theirs.

        `ended` cuts the wait short; what is returned then says nothing.
        """
        check = SilenceCheck(self, ranks)
        until = time.monotonic() + wait_s
        # Ends early when all have changed; a quiet rank costs the whole time.
        while check.quiet and time.monotonic() < until and not ended():
            time.sleep(min(POLL_S, wait_s))
            check.update()
        return sorted(check.quiet)


class SilenceCheck:
    """Which of some ranks have sent no heartbeat since it began: `quiet` holds them and shrinks with every `update`."""

    def __init__(self, reader: Heartbeat, ranks: Iterable[int]) -> None:
        """Raises `RuntimeError` when the store's host is gone, and so does `update`."""
        self._reader = reader
        ranks = list(ranks)
        self._before = reader.last_of(ranks)
        # A rank that ended on purpose is not silent, whatever its counter does.
        self.quiet = {rank for rank in ranks if rank not in self._before or self._before[rank].count != ENDED}

    def update(self) -> None:
        """Take out the ranks that have sent or ended their heartbeat since."""
        now = self._reader.last_of(self.quiet)
        self.quiet = {rank for rank in self.quiet if now.get(rank) == self._before.get(rank)}


class HeartbeatThread:
    """A daemon thread that sends a heartbeat every `interval_s` with whatever `status()` says, until `stop`.

    It calls `then()` after each one, and `lost(error)` once when the store's host is gone.
    """

    def __init__(
        self,
        store: dist.Store | BoundedStore,
        rank: int,
        interval_s: float,
        status: Callable[[], str],
        then: Callable[[], None] = lambda: None,
        lost: Callable[[RuntimeError], None] = lambda error: None,
    ) -> None:
        self.heartbeat = Heartbeat(store, rank)
        self._interval_s = interval_s
        self._status, self._then, self._lost = status, then, lost
        self._stopped = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._live, name=f"ringattn-heartbeat-{rank}", daemon=True)
        self._thread.start()
        # A thread inside a store call while the interpreter ends can take the whole process down.
        atexit.register(self._halt)

    def stop(self, patience_s: float = END_S) -> None:
        """End the heartbeat on purpose; returns when the thread has ended or its store does not answer. Idempotent."""
        self._ends = True
        self._halt(patience_s)
        atexit.unregister(self._halt)

    def _halt(self, patience_s: float = END_S) -> None:
        """End the thread and write nothing: a rank that only leaves the process counts as silent."""
        self._stopped.set()
        # Bounded: a thread that waits for a dead store must not hold up the caller.
        self._thread.join(patience_s)

    def _live(self) -> None:
        try:
            while not self._stopped.is_set():
                # Sent before reading, so that this rank looks alive while it reads.
                self.heartbeat.send(self._status())
                self._then()
                self._stopped.wait(self._interval_s)
            # By this thread: a heartbeat after the final one would undo it.
            if self._ends:
                self.heartbeat.end(self._status())
        except RuntimeError as error:
            self._lost(error)  # the store's host is gone: nothing can be written


READ_AT_ONCE = 8
"""Ranks whose heartbeats one round reads. Of more that are wanted, each round reads others."""


class HeartbeatMonitor:
    """The newest heartbeats of other ranks, read from the thread that sends this rank's.

    Only this thread waits for the store, so a store whose host has stopped holds up no caller with a deadline.
    Guarantees: two requests a round, whatever is wanted; what is read is at most a round old, or the age says
    otherwise; the next rank and those that are `wanted` are read, never all of them at once.
    """

    def __init__(self, control: ControlStore, status: Callable[[], str], job_size: int | None = None) -> None:
        """`status` is what this rank's heartbeat says of it; `job_size` ranks share the store. See `start`."""
        self.cause: str | None = None
        self.lost: str | None = None
        """Why the store cannot be read any more."""
        self.heartbeats: dict[int, LastHeartbeat] = {}
        self.wanted: set[int] = set()
        """Ranks to read besides the next one; replaced, never changed."""
        self.rounds = 0
        """Rounds that the store has answered."""
        self.interval_s = interval_s(job_size or control.world_size)
        self._control = control
        self._reader = Heartbeat(control.store, control.rank)
        self._unchanged: dict[int, tuple[float, float]] = {}
        """When the newest heartbeat of a rank was read first and last, on the monotonic clock."""
        self._turn = 0
        # Empty for a ring of one.
        self._next = {(control.rank + 1) % control.world_size} - {control.rank}
        self._status = status
        self._sender: HeartbeatThread | None = None

    @property
    def silence_s(self) -> float:
        """How long a heartbeat must not change."""
        return silence_s(self.interval_s)

    def silent(self, at_least_s: float = 0.0) -> set[int]:
        """Of the ranks that are read in these rounds, those that have sent nothing for `silence_s` and `at_least_s`."""
        limit_s, recent_s = max(self.silence_s, at_least_s), time.monotonic() - self.silence_s
        return {
            rank
            for rank, (first_s, last_s) in list(self._unchanged.items())
            if last_s - first_s >= limit_s and last_s >= recent_s and self.heartbeats[rank].count != ENDED
        }

    @property
    def closed(self) -> set[int]:
        """Of the ranks that are read, those that have closed their ring."""
        return {rank for rank, heartbeat in list(self.heartbeats.items()) if heartbeat.closed}

    def leave(self) -> None:
        """Say in every heartbeat from the next on that this rank has closed its ring."""
        if self._sender is not None:
            self._sender.heartbeat.closed = True

    def start(self) -> None:
        """Send and read from now on."""
        control = self._control
        self._sender = HeartbeatThread(
            control.store, control.rank, self.interval_s, self._status, self.read, self._lose
        )

    def stop(self, patience_s: float = END_S) -> None:
        """End the heartbeat. Idempotent."""
        if self._sender is not None:
            self._sender.stop(patience_s)

    def read(self) -> None:
        """One round: the first cause, and the heartbeats of the next rank and of some that are wanted."""
        if not self._turn:
            self._control.make_cause()
        ranks = self._reader.begun(self._chosen())
        cause, *texts = self._control.read_many([CAUSE, *map(heartbeat_key, ranks)])
        for rank, text in zip(ranks, texts, strict=True):
            self._take(rank, LastHeartbeat.parse(text), time.monotonic())
        # What was seen of a rank that is not read any more says nothing later.
        for rank in self._unchanged.keys() - self._next - self.wanted:
            del self._unchanged[rank]
        self.cause = cause.decode() or None
        self.rounds += 1

    def _chosen(self) -> list[int]:
        """The next rank, and as many of the wanted ones as a round reads."""
        wanted = sorted(self.wanted - self._next)
        first = self._turn * READ_AT_ONCE % max(len(wanted), 1)
        self._turn += 1
        return [*self._next, *[*wanted, *wanted][first : first + min(READ_AT_ONCE, len(wanted))]]

    def _take(self, rank: int, heartbeat: LastHeartbeat, now_s: float) -> None:
        # A rank that was not wanted for a while has a heartbeat and no times.
        same = rank in self._unchanged and self.heartbeats[rank] == heartbeat
        first_s = self._unchanged[rank][0] if same else now_s
        self.heartbeats[rank] = heartbeat
        self._unchanged[rank] = first_s, now_s

    def _lose(self, error: RuntimeError) -> None:
        self.lost = str(error)

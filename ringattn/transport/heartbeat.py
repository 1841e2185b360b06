"""Heartbeats in the control store, the monitor that reads them, and failure attribution for gloo.

Each rank writes a counter and a status at an interval for as long as its process runs. A rank whose counter does not
change is stopped, stuck in a call that holds the interpreter, or gone; one whose counter changes is alive, and its
status says where it is. One that ended its heartbeat on purpose is neither. When a wait fails, every rank is checked:
the peer that a rank waits for may itself wait for another.
Guarantees: clocks of different machines are never compared.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ringattn.errors import DeadlineError
from ringattn.transport.bounded_store import BoundedStore
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline

ENDED = 0
POLL_S = 0.05
END_S = 1.0
"""How long the thread may take to end: one heartbeat takes far less, unless the store's host stands still."""


@dataclass(frozen=True)
class LastHeartbeat:
    """The newest heartbeat of a rank. `count` is `ENDED` once it ended on purpose."""

    count: int
    status: str


class Heartbeat:
    """Writes one rank's heartbeat and reads those of others. One thread uses `store`: clone it for another."""

    def __init__(self, store: dist.Store | BoundedStore, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._count = ENDED

    def send(self, status: str) -> None:
        """Write that this rank is alive. Raises `RuntimeError` when the store's host is gone."""
        self._count += 1
        # A counter and no time of day: a reader only asks whether it changes.
        self._store.set(f"heartbeat/{self._rank}", f"{self._count} {status}")

    def end(self, status: str) -> None:
        """Write that this rank sends no more heartbeats and that nothing is wrong with it. Raises as `send` does."""
        self._store.set(f"heartbeat/{self._rank}", f"{ENDED} {status}")

    def last(self, rank: int) -> LastHeartbeat | None:
        """The newest heartbeat of `rank`, None before its first. Raises `RuntimeError` without the store's host."""
        # `get` would wait for a key that is not there.
        if not self._store.check([f"heartbeat/{rank}"]):
            return None
        count, _, status = self._store.get(f"heartbeat/{rank}").decode().partition(" ")
        return LastHeartbeat(int(count), status)

    def silent(self, ranks: Iterable[int], wait_s: float) -> list[int]:
        """Those of `ranks` whose heartbeat does not change for `wait_s`, which must be a few intervals of theirs."""
        check = SilenceCheck(self, ranks)
        until = time.monotonic() + wait_s
        # Ends early when all have changed; a quiet rank costs the whole time.
        while check.quiet and time.monotonic() < until:
            time.sleep(min(POLL_S, wait_s))
            check.update()
        return sorted(check.quiet)


class SilenceCheck:
    """Which of some ranks have sent no heartbeat since it began: `quiet` holds them and shrinks with every `update`."""

    def __init__(self, reader: Heartbeat, ranks: Iterable[int]) -> None:
        """Raises `RuntimeError` when the store's host is gone, and so does `update`."""
        self._reader = reader
        self._before = {rank: reader.last(rank) for rank in ranks}
        # A rank that ended on purpose is not silent, whatever its counter does.
        self.quiet = {rank for rank, heartbeat in self._before.items() if heartbeat is None or heartbeat.count != ENDED}

    def update(self) -> None:
        """Take out the ranks that have sent or ended their heartbeat since."""
        self.quiet -= {rank for rank in self.quiet if self._reader.last(rank) != self._before[rank]}


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
        self._heartbeat = Heartbeat(store, rank)
        self._interval_s = interval_s
        self._status, self._then, self._lost = status, then, lost
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"ringattn-heartbeat-{rank}", daemon=True)
        self._thread.start()
        # A thread inside a store call while the interpreter ends can take the whole process down.
        atexit.register(self._halt)

    def stop(self) -> None:
        """End the heartbeat on purpose; returns when the thread has ended or its store does not answer. Idempotent."""
        if self._stopped.is_set():
            return
        # The thread first: a heartbeat after the final one would undo it.
        self._halt()
        if not self._thread.is_alive():
            try:
                self._heartbeat.end(self._status())
            except RuntimeError:
                pass  # the store's host is gone: nothing can be written
        atexit.unregister(self._halt)

    def _halt(self) -> None:
        """End the thread and write nothing: a rank that only leaves the process counts as silent."""
        self._stopped.set()
        # Bounded: a thread that waits for a dead store must not hold up the caller.
        self._thread.join(END_S)

    def _live(self) -> None:
        try:
            while not self._stopped.is_set():
                # Sent before reading, so that this rank looks alive while it reads.
                self._heartbeat.send(self._status())
                self._then()
                self._stopped.wait(self._interval_s)
        except RuntimeError as error:
            self._lost(error)  # the store's host is gone: nothing can be written


INTERVAL_S = 0.1
PER_RANK_S = 0.5e-3
"""Added to a round for each rank of the ring: one store serves them all."""


class HeartbeatMonitor:
    """The newest heartbeats of other ranks, read from the thread that sends this rank's.

    Only this thread waits for the store, so a store whose host has stopped holds up no caller with a deadline.
    Guarantees: what is read is at most a round old, or the age says otherwise; the next rank and those that are
    `wanted` are read, never all of them.
    """

    def __init__(self, control: ControlStore, status: Callable[[], str]) -> None:
        """`status` is what this rank's heartbeat says of it. Starts at once."""
        self.cause: str | None = None
        self.lost: str | None = None
        """Why the store cannot be read any more."""
        self.heartbeats: dict[int, LastHeartbeat] = {}
        self.closed: set[int] = set()
        self.wanted: set[int] = set()
        """Ranks to read besides the next one; replaced, never changed."""
        self._control = control
        self._heartbeat = Heartbeat(control.store, control.rank)
        # Empty for a ring of one.
        self._next = {(control.rank + 1) % control.world_size} - {control.rank}
        self._sender = HeartbeatThread(
            control.store, control.rank, INTERVAL_S + PER_RANK_S * control.world_size, status, self._round, self._lose
        )

    def stop(self) -> None:
        """End the heartbeat. Idempotent."""
        self._sender.stop()

    def _round(self) -> None:
        self.cause = self._control.cause()
        # One set is built for each round, so `wanted` may be replaced meanwhile.
        for rank in self.wanted | self._next:
            heartbeat = self._heartbeat.last(rank)
            if heartbeat is not None:
                self.heartbeats[rank] = heartbeat
            if self._control.holds(f"closed/{rank}"):
                self.closed.add(rank)

    def _lose(self, error: RuntimeError) -> None:
        self.lost = str(error)


HEARTBEAT_S = 0.25
"""Seconds between two heartbeats of a rank."""
SILENCE_S = 0.8
"""How long a heartbeat must not change: three intervals."""
# A rank publishes its cause just before its connections fall, except that gloo drops the pair of a timed-out wait by
# itself, before that rank has read the heartbeats. So its neighbor looks for the cause this long.
CAUSE_S = SILENCE_S + 0.5
CAUSE_POLL_S = 0.02
HOST_LOST = "the store's host (rank 0) is gone"
DIAGNOSIS_S = 1.5
"""How long a diagnosis may take after a deadline, also where the store does not answer."""


class Diagnosis:
    """One rank's view of the others. Used by the thread that uses the transport. Where the store does not answer in
    time, what is known until then is told."""

    def __init__(self, control: ControlStore) -> None:
        """`control` is read, never written."""
        self._control = control
        self._others = [rank for rank in control.everyone() if rank != control.rank]

    def of_deadline(self, waited_for: Sequence[int]) -> str:
        """After a missed deadline: the silent among all ranks, where the others of `waited_for` are, the first cause.

        Returns one line; reads for `SILENCE_S` unless every heartbeat changes before.
        """
        control, found = self._control.until(Deadline(DIAGNOSIS_S)), list[str]()
        reader = Heartbeat(control.store, control.rank)
        try:
            # Silence first: it takes the longest, and a cause may be published meanwhile.
            silent = reader.silent(self._others, SILENCE_S)
            found += _silences(reader, silent)
            # A rank that is waited for and alive waits itself for another: its status says where.
            found += [_whereabouts(reader, rank) for rank in waited_for if rank not in silent]
            if cause := control.cause():
                found.append(cause)
        except RuntimeError as error:
            found.append(_lost_store(error))
        return "; ".join(found)

    def of_loss(self, peer: int, error: BaseException) -> str:
        """After the connection to `peer` was lost with `error`: the first cause, else who closed, else who is silent.

        Returns one line. A peer that lives and says nothing fell because of another, which then is the silent one.
        """
        # A peer may drop its connection before its cause is in the store.
        until = time.monotonic() + CAUSE_S
        control = self._control.until(Deadline(DIAGNOSIS_S))
        reader = Heartbeat(control.store, control.rank)
        try:
            check = SilenceCheck(reader, self._others)
            while time.monotonic() < until:
                # Asked in this order: a rank that fails publishes its cause before it ends.
                closed = control.holds(f"closed/{peer}")
                if cause := control.cause():
                    return cause
                if closed:
                    return f"rank {peer} closed its ring"
                time.sleep(CAUSE_POLL_S)
                check.update()
            # Nobody has published anything: the heartbeats say who is gone.
            lost = f"rank {peer} {'is gone' if peer in check.quiet else 'dropped its connection'} ({error})"
            return "; ".join([lost, *_silences(reader, sorted(check.quiet))])
        except RuntimeError as lost_store:
            # The peer may be innocent: where the store's host fails, every rank drops its connections.
            why = f"{_lost_store(lost_store)}, so no first cause can be read"
            return f"the connection to rank {peer} was lost ({error}), and {why}"


def _lost_store(error: RuntimeError) -> str:
    """Why the store told nothing."""
    return str(error) if isinstance(error, DeadlineError) else HOST_LOST


def _silences(reader: Heartbeat, silent: Iterable[int]) -> list[str]:
    found = {rank: reader.last(rank) for rank in silent}
    last = {rank: f"last heard in '{one.status}'" if one else "never heard" for rank, one in found.items()}
    return [f"rank {rank} is silent (stopped, stuck or gone), {words}" for rank, words in last.items()]


def _whereabouts(reader: Heartbeat, rank: int) -> str:
    heartbeat = reader.last(rank)
    if heartbeat is None or heartbeat.count == ENDED:
        return f"rank {rank} has left its ring"
    return f"rank {rank} is alive in '{heartbeat.status}'"

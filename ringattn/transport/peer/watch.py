"""Watches one rank's exchanges from a thread of its own, and ends the ring when one of them cannot end.

Guarantees: every exchange has a deadline that counts from the moment that this rank is ready for it; a failure of any
rank, a rank that is gone and a rank that has closed are told to the caller at its next call; whatever is raised on the
thread ends the ring; the poison stands in every page before a wait is released.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ringattn import errors
from ringattn.errors import DeadlineError, RingError
from ringattn.observe.flight import DONE, FAILED, RUNNING, FlightRecord
from ringattn.transport.base import Operation, listed
from ringattn.transport.device import Device, Event
from ringattn.transport.peer.hop import PeerWorkHandle
from ringattn.transport.peer.lane import ABORT_S, Lane
from ringattn.transport.shared.group import SharedGroup

INTERVAL_S = 0.02
END_S = 1.0


class Watch:
    """The watch of one rank."""

    def __init__(
        self,
        group: SharedGroup,
        lane: Lane,
        gpu: Device,
        record: FlightRecord,
        timeout_s: float,
        flight_dir: Path | None,
        leave: Callable[[str], None],
    ) -> None:
        """`leave` is called with the reason when even an abort is stuck, and ends the process."""
        self.failure: BaseException | None = None
        self.handles: deque[PeerWorkHandle] = deque()
        self.free: deque[tuple[Event, Event]] = deque()
        self.ended = threading.Event()
        """The abort has ended, or is stuck."""
        self.drained = False
        """It has ended, so nothing of this rank is under way."""
        self.report: Callable[[BaseException], None] = self.end
        """What a failure is told to: another transport of the rank, where there is one, which then calls `end`."""
        self.before_paint: Callable[[], object] = lambda: None
        """Returns when nothing that the device is given besides exchanges can carry spoiled bytes to other ranks."""
        self._group, self._lane, self._gpu, self._record = group, lane, gpu, record
        self._timeout_s, self._flight_dir, self._leave = timeout_s, flight_dir, leave
        self._unwaited: list[PeerWorkHandle] = []
        self._ticking = threading.Lock()
        # Taken by the first failure and never given back: locked means failed.
        self._first = threading.Lock()
        self._told, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"ringattn-watch-{group.rank}", daemon=True)

    def start(self) -> None:
        """Start the watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(END_S)

    def raise_failure(self) -> None:
        """Raise the failure, if there is one. What every wait on the host does between its naps."""
        if self._first.locked():
            # The caller may overwrite what is being sent as soon as it has the error: the poison comes first.
            self._told.wait(ABORT_S)
            raise copy.copy(self.failure) or RingError(f"rank {self._group.rank}: this ring is failing")

    def fail(self, error: BaseException) -> None:
        """End the ring, for `error` unless it has failed already. Returns when all ranks are told; `ended` is later."""
        self.report(error)

    def end(self, error: BaseException) -> None:
        """As `fail`, without a report."""
        if not self._first.acquire(blocking=False):
            self._told.wait(ABORT_S)
            return
        for handle in list(self.handles):
            handle.flight.state = FAILED
        self.failure = _bare(error)
        # First of all: what a painted word lets loose must find the poison in every page.
        self._group.fail(error)
        # On a thread of its own: it waits for what the device computes before the exchanges, and no caller should.
        threading.Thread(target=self._abort, name=f"ringattn-abort-{self._group.rank}", daemon=True).start()
        self._write_record(self.failure)
        self._told.set()

    def tick(self) -> None:
        """Tick off what has arrived, in order; let go of its buffers, and of its events once the caller has waited."""
        with self._ticking:
            while self.handles and self.handles[0].done.query():
                handle = self.handles.popleft()
                if handle.flight.state != FAILED:
                    handle.flight.state, handle.flight.done_s = DONE, time.time()
                handle.release()
                self._unwaited.append(handle)
            waited = [handle for handle in self._unwaited if handle.waited]
            self._unwaited = [handle for handle in self._unwaited if not handle.waited]
            # The newest event says whether the lane is empty: it is not recorded anew before another is newest.
            self.free.extend((handle.ready, handle.done) for handle in waited if handle.done is not self._lane.newest)

    def awaited(self) -> set[int]:
        """The ranks that this one waits for; none where it is only computing."""
        oldest = next(iter(list(self.handles)[:1]), None)
        return _peers(oldest.pending()) if oldest is not None and oldest.started_at else set(self._lane.awaited)

    def where(self) -> str:
        """Where this rank is, for its heartbeat."""
        oldest = next(iter(list(self.handles)[:1]), None)
        computing = "computing before " if oldest is not None and not oldest.started_at else ""
        return computing + (oldest.flight.label if oldest is not None else self._record.where())

    def _abort(self) -> None:
        try:
            self.before_paint()
            self.drained = self._lane.abort()
        except Exception as trouble:  # a device that is lost raises whatever it likes, and then nothing waits on it
            print(f"ringattn rank {self._group.rank}: the device is lost: {trouble}", file=sys.stderr, flush=True)
            self.drained = True
        self.ended.set()
        if not self.drained:
            self._leave(f"rank {self._group.rank}: the abort is stuck, so the process ends after: {self.failure}")

    def _live(self) -> None:
        try:
            self._gpu.activate()
            self._gpu.watch_captures()
            while not self._stopped.wait(INTERVAL_S):
                self._look()
        except BaseException as error:
            if not self._stopped.is_set():
                self.fail(error)

    def _look(self) -> None:
        """One round. Raises what ends the ring."""
        self.tick()
        handle = next(iter(list(self.handles)[:1]), None)
        pending = handle.pending if handle is not None else list
        if self._group.trouble(_peers(pending())) is not None:
            # Again: what arrived just before its sender closed or went away is there now.
            late = pending()
            self._group.check(_peers(late), lambda: self._said(handle, late))
        if handle is None or handle.done.query():
            return
        # Own computation before the exchange does not count.
        if not handle.started_at:
            if handle.ready.query():
                handle.started_at = time.monotonic()
                handle.flight.started_s, handle.flight.state = time.time(), RUNNING
            return
        if time.monotonic() - handle.started_at >= self._timeout_s:
            late = pending()
            peers = sorted(_peers(late))
            raise DeadlineError(
                f"{self._said(handle, late)}: no answer from ranks {peers} within {self._timeout_s:g} s; "
                f"{self._group.diagnosis(peers)}"
            )

    def _said(self, handle: PeerWorkHandle | None, late: list[Operation]) -> str:
        """Whose error it is, and what was pending."""
        rank = self._group.rank
        return f"rank {rank}: exchange {handle.flight.sequence}, pending {listed(late)}" if handle else f"rank {rank}"

    def _write_record(self, failure: BaseException) -> None:
        if self._flight_dir is None:
            return
        try:
            failure.add_note(f"flight record: {self._record.dump(self._flight_dir, str(failure))}")
        except OSError as trouble:
            print(f"ringattn rank {self._group.rank}: no flight record: {trouble}", file=sys.stderr, flush=True)


def _peers(pending: list[Operation]) -> set[int]:
    return {operation.peer for operation in pending}


def _bare(error: BaseException) -> BaseException:
    """The error without its traceback, whose frames may view memory; what is not ringattn's own is a `RingError`."""
    if isinstance(error, RingError) and type(error).__module__ == errors.__name__:
        return copy.copy(error)
    return RingError(f"{type(error).__name__}: {error}")

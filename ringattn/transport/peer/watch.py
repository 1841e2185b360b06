"""Watches one rank's exchanges from a thread of its own, and ends the ring when one of them cannot end.

Guarantees: every exchange has a deadline that counts from the moment that this rank is ready for it; a failure of any
rank, a rank that is gone and a rank that has closed are told to the caller at its next call; whatever is raised on the
thread ends the ring; the poison stands in every page before a wait is released.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ringattn import errors
from ringattn.errors import DeadlineError, RingError
from ringattn.observe.flight import FlightRecord
from ringattn.transport.base import Operation, listed
from ringattn.transport.device import Device, Event
from ringattn.transport.health.place import STUCK_S, Place, Waits
from ringattn.transport.peer.hop import PeerWorkHandle
from ringattn.transport.peer.lane import ABORT_S, Lane
from ringattn.transport.shared.group import SharedGroup
from ringattn.transport.stream import StreamWatch, bare


class Watch(StreamWatch[PeerWorkHandle]):
    """The watch of one rank."""

    interval_s = 0.02
    stop_s = 1.0
    # The caller may overwrite what is being sent as soon as it has the error: the poison comes first.
    patience_s = ABORT_S

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
        """See `StreamWatch`."""
        super().__init__(group.rank, gpu, record, timeout_s, flight_dir, leave)
        self.drained = False
        """The abort has ended, so nothing of this rank is under way."""
        self.report: Callable[[BaseException], None] = self.end
        """What a failure is told to: another transport of the rank, where there is one, which then calls `end`."""
        self.before_paint: Callable[[], object] = lambda: None
        """Returns when nothing that the device is given besides exchanges can carry spoiled bytes to other ranks."""
        self._group, self._lane = group, lane

    def fail(self, error: BaseException) -> None:
        """End the ring, for `error` unless it has failed already. Returns when all ranks are told; `ended` is later."""
        self.report(error)

    def end(self, error: BaseException) -> None:
        """As `fail`, without a report."""
        if not self._is_first():
            return
        self.failure = _our_error(error)
        # First of all: what a painted word lets loose must find the poison in every page.
        self._group.fail(error)
        # On a thread of its own: it waits for what the device computes before the exchanges, and no caller should.
        threading.Thread(target=self._abort, name=f"ringattn-abort-{self._rank}", daemon=True).start()
        self._write_record(self.failure)
        self._told.set()

    def place(self) -> Place:
        """Where this rank is, for its heartbeats."""
        oldest, call = self.oldest, self._group.health.call
        if oldest is None:
            waits = Waits.PEERS if self._lane.awaited else Waits.HOST
            return Place.make(self._record.where(), call, waits, self._lane.awaited)
        if oldest.started_at:
            return Place.make(oldest.flight.label, call, Waits.PEERS, _peers(oldest.pending()))
        waits = Waits.COMPUTE if time.time() - oldest.flight.posted_s >= STUCK_S else Waits.PEERS
        return Place.make(f"computing before {oldest.flight.label}", call, waits)

    def _may_reuse(self, done: Event) -> bool:
        """The newest event says whether the lane is empty: it is not recorded anew before another is newest."""
        return done is not self._lane.newest

    def _abort(self) -> None:
        try:
            self.before_paint()
            self.drained = self._lane.abort()
        except Exception as trouble:  # a device that is lost raises whatever it likes, and then nothing waits on it
            print(f"ringattn rank {self._rank}: the device is lost: {trouble}", file=sys.stderr, flush=True)
            self.drained = True
        self.ended.set()
        if not self.drained:
            self._leave(f"rank {self._rank}: the abort is stuck, so the process ends after: {self.failure}")

    def _look(self) -> None:
        """One round. Raises what ends the ring."""
        self.tick()
        handle = self.oldest
        pending = handle.pending if handle is not None else list
        if self._group.trouble(_peers(pending())) is not None:
            # Again: what arrived just before its sender closed or went away is there now.
            late = pending()
            self._group.check(_peers(late), lambda: self._said(handle, late))
        if handle is None or handle.done.query():
            return
        if not handle.started_at:
            handle.look()
            return
        if time.monotonic() - handle.started_at >= self._timeout_s:
            late = pending()
            peers = sorted(_peers(late))
            raise DeadlineError(
                f"{self._said(handle, late)}: no answer from ranks {peers} within {self._timeout_s:g} s; "
                f"{self._group.health.explain(peers, waited_s=self._timeout_s)}"
            )

    def _said(self, handle: PeerWorkHandle | None, late: list[Operation]) -> str:
        """Whose error it is, and what was pending."""
        rank = self._rank
        return f"rank {rank}: exchange {handle.flight.sequence}, pending {listed(late)}" if handle else f"rank {rank}"


def _peers(pending: list[Operation]) -> set[int]:
    return {operation.peer for operation in pending}


def _our_error(error: BaseException) -> BaseException:
    """The bare error, whose frames might view memory; what is not ringattn's own is a `RingError`."""
    if isinstance(error, RingError) and type(error).__module__ == errors.__name__:
        return bare(error)
    return RingError(f"{type(error).__name__}: {error}")

"""Watches one rank's exchanges from a thread of its own, for nobody else waits on the host.

It looks for the first cause of another rank's failure, asks NCCL for asynchronous errors, holds every exchange to its
deadline, compares calls with the peers that keep it waiting, and ends the ring when one of these says so: publish the
cause, write the flight record, abort the lanes. Promises: it launches nothing; it queries no event that was
recorded in a capture; after a failure everything it knows is in one error.
Does not know: schedules, what is exchanged.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ringattn.errors import DeadlineError, DisagreementError, PeerLostError, RingError
from ringattn.observe.flight import DONE, FAILED, RUNNING, FlightRecord
from ringattn.transport.board import Board
from ringattn.transport.nccl.binding import NcclError
from ringattn.transport.nccl.calls import CallWindow
from ringattn.transport.nccl.communicator import Communicator
from ringattn.transport.nccl.device import Device, Event
from ringattn.transport.nccl.hop import NcclTicket
from ringattn.transport.pulse import Beating, Pulse

INTERVAL_S = 0.1
LISTEN_S = 5 * INTERVAL_S


class Supervisor:
    """The watch of one rank. `lanes` may be filled after it has started: opening is watched too."""

    def __init__(
        self,
        board: Board,
        lanes: Sequence[Communicator],
        gpu: Device,
        record: FlightRecord,
        calls: CallWindow,
        timeout_s: float,
        flight_dir: Path | None,
        leave: Callable[[str], None],
    ) -> None:
        """`leave` is told why when even an abort is stuck, and ends the process."""
        self.failure: RingError | None = None
        self.where = "opening"
        self.started = 0
        self.tickets: deque[NcclTicket] = deque()
        self.free: deque[tuple[Event, Event]] = deque()
        self._own, self._lanes, self._gpu, self._record, self._calls = board, lanes, gpu, record, calls
        self._board = board.clone()
        self._others = {rank for rank in board.everyone() if rank != board.rank}
        self._pulse = Pulse(self._board.store, board.rank)
        self._timeout_s, self._flight_dir, self._leave = timeout_s, flight_dir, leave
        self._unwaited: list[NcclTicket] = []
        self._ending = threading.Lock()
        self._stopped = threading.Event()
        self._store_lost = False
        self._beating: Beating | None = None
        self._thread = threading.Thread(target=self._live, name=f"ringattn-watch-{board.rank}", daemon=True)

    def start(self) -> None:
        """Begin to watch, and to beat: on another thread, for this one listens and aborts too."""
        self._beating = Beating(
            self._own.clone().store, self._own.rank, INTERVAL_S, lambda: self._calls.status(self.where, self.started)
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopped.set()
        if self._beating is not None:
            self._beating.stop()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10 * INTERVAL_S)

    def watch(self) -> None:
        """Raise the failure, if there is one. What every wait on the host does between its naps."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException, board: Board) -> None:
        """End the ring: the first error stays. Returns when the lanes are aborted. Never raises."""
        with self._ending:
            if self.failure is not None:
                return
            board.publish_cause(error)
            failure = error if isinstance(error, RingError) else RingError(f"{type(error).__name__}: {error}")
            for ticket in list(self.tickets):
                ticket.flight.state = FAILED
            self.failure = failure
        self._write_record(error)
        for lane in self._lanes:
            if not lane.abort():
                self._leave(f"rank {self._own.rank}: the abort is stuck, so the process ends after: {error}")

    def diagnosis(self, pulse: Pulse) -> str:
        """Who is silent or behind, for an error message. `pulse` is the calling thread's."""
        try:
            silent = pulse.silent(self._others, LISTEN_S)
            beats = {rank: beat for rank in self._others if (beat := pulse.heard(rank)) is not None}
        except RuntimeError:
            return "; the store's host is gone"
        places = {rank: self._calls.place(beat.status) for rank, beat in beats.items()}
        words = [f"rank {rank} is silent (stopped, stuck or gone)" for rank in silent if rank not in places]
        least = min([started for started, _ in places.values()], default=self.started)
        for rank, (started, where) in places.items():
            last = f"at '{where}' after {started} exchanges, this rank after {self.started}"
            if rank in silent:
                words.append(f"rank {rank} is silent (stopped, stuck or gone), last heard {last}")
            elif started == least < self.started:
                words.append(f"rank {rank} is behind, {last}")
        return "".join(f"; {each}" for each in words)

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _live(self) -> None:
        self._gpu.activate()
        while not self._stopped.wait(INTERVAL_S):
            try:
                self._look()
            except RingError as error:
                if not self._stopped.is_set():
                    self.fail(error, self._board)
                return

    def _look(self) -> None:
        """One round. Raises what ends the ring."""
        try:
            cause = self._board.cause()
        except RuntimeError as error:
            if isinstance(error, RingError):
                raise
            raise PeerLostError(
                f"rank {self._own.rank}: the store's host (rank 0, or torchrun's agent) is gone: {error}"
            ) from error
        if cause is not None:
            raise PeerLostError(f"rank {self._own.rank}: {cause}{self._pending()}")
        for lane in self._lanes:
            if (broken := lane.error()) is not None:
                raise self._blame(broken)
        self._advance()
        if self.tickets:
            self._hold_to_deadline(self.tickets[0])

    def _advance(self) -> None:
        """Tick off what has arrived, in order, and reuse its events once the caller has waited too."""
        while self.tickets and self.tickets[0].done.query():
            ticket = self.tickets.popleft()
            ticket.flight.state, ticket.flight.done_s = DONE, time.time()
            self._unwaited.append(ticket)
        waited = [ticket for ticket in self._unwaited if ticket.waited]
        self._unwaited = [ticket for ticket in self._unwaited if not ticket.waited]
        self.free.extend((ticket.ready, ticket.done) for ticket in waited)

    def _hold_to_deadline(self, ticket: NcclTicket) -> None:
        """The oldest exchange may take `timeout_s` from the moment that this rank was ready for it."""
        flight = ticket.flight
        if not ticket.started_at:
            if ticket.ready.query():
                ticket.started_at, flight.started_s, flight.state = time.monotonic(), time.time(), RUNNING
            return
        age_s = time.monotonic() - ticket.started_at
        if age_s > 3 * INTERVAL_S:
            self._look_at_peers({part.peer for part in flight.parts} or self._others)
        if age_s >= self._timeout_s:
            peers = sorted({part.peer for part in flight.parts} or self._others)
            raise DeadlineError(
                f"rank {self._own.rank}: no answer from ranks {peers} within {self._timeout_s} s"
                f"{self._pending()}{self.diagnosis(self._pulse)}"
            )

    def _look_at_peers(self, peers: set[int]) -> None:
        """Raise when the peers of a waiting exchange have closed, or one of them makes another call than this rank."""
        if all(self._board.holds(f"closed/{peer}") for peer in peers):
            who = ", ".join(f"rank {peer}" for peer in sorted(peers))
            raise PeerLostError(f"rank {self._own.rank}: {who} closed its ring{self._pending()}")
        for peer in peers:
            beat = self._pulse.heard(peer)
            if beat is not None and (difference := self._calls.differs(beat.status)) is not None:
                raise DisagreementError(f"rank {peer} and rank {self._own.rank} do not ask for the same: {difference}")

    def _blame(self, broken: NcclError) -> RingError:
        """An asynchronous error with what is known about its origin: another rank's cause, or a silent rank."""
        return PeerLostError(f"rank {self._own.rank}: {broken}{self._pending()}{self.diagnosis(self._pulse)}")

    def _pending(self) -> str:
        """The oldest exchange that has not arrived."""
        if not self.tickets:
            return ""
        ticket = self.tickets[0]
        return f"; pending: exchange {ticket.flight.sequence}: {ticket.hop}"

    def _write_record(self, error: BaseException) -> None:
        if self._flight_dir is None:
            return
        try:
            error.add_note(f"flight record: {self._record.dump(self._flight_dir, str(error))}")
        except OSError as trouble:
            print(f"ringattn rank {self._own.rank}: no flight record: {trouble}", file=sys.stderr, flush=True)

"""Watches one rank's exchanges from a thread of its own, and the all-gather of bytes that it guards.

The thread holds every launch and every exchange to its deadline, asks NCCL for asynchronous errors, compares calls with
those in the other ranks' heartbeats, and on a failure aborts the communicators, attributes the failure to a rank,
publishes the cause and writes the flight record. Guarantees: it launches nothing, and waits for no store; it queries no
event that was recorded in a capture; whatever is raised on its thread ends the ring; callers see the failure within
`TELL_S` of its detection, even when the store does not answer. A rank whose own kernels never reach an exchange names
no other rank: its peers name it.
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
from ringattn.transport.control_store import Board
from ringattn.transport.heartbeat import INTERVAL_S, Ear, Pulse
from ringattn.transport.nccl.bootstrap import LISTEN_S, CallWindow, accuse
from ringattn.transport.nccl.communicator import ABORT_S, Communicator
from ringattn.transport.nccl.device import Deadline, Device, Event, wait_until
from ringattn.transport.nccl.hop import NcclHop, NcclTicket

TELL_S = LISTEN_S + 0.8
"""How long blaming and publishing may take before the failure is raised without."""


class BrokenLaneError(PeerLostError):
    """NCCL reports that a communicator is broken: some rank is to blame."""


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
        self.failure: BaseException | None = None
        self.where = "opening"
        self.tickets: deque[NcclTicket] = deque()
        self.free: deque[tuple[Event, Event]] = deque()
        self.launching: tuple[NcclHop, float] | None = None
        """The hop that NCCL is being given, and since when on the monotonic clock."""
        self._rank, self._lanes, self._gpu, self._record, self._calls = board.rank, lanes, gpu, record, calls
        self._others = {rank for rank in board.everyone() if rank != board.rank}
        self._board, self._telling = board, board.clone()
        self._timeout_s, self._flight_dir, self._leave = timeout_s, flight_dir, leave
        self._unwaited: list[NcclTicket] = []
        self._ticking = threading.Lock()
        self._first = threading.Lock()
        self._told, self._ended, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._ear: Ear | None = None
        self._thread = threading.Thread(target=self._live, name=f"ringattn-watch-{board.rank}", daemon=True)

    def start(self) -> None:
        """Begin to watch, to beat and to listen."""
        self._ear = Ear(self._board.clone(), self._status)
        self._thread.start()

    def stop(self) -> None:
        """End both threads. Idempotent."""
        self._stopped.set()
        if self._ear is not None:
            self._ear.stop()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10 * INTERVAL_S)

    def watch(self) -> None:
        """Raise the failure, if there is one. What every wait on the host does between its naps."""
        if self._first.locked():
            self._told.wait(2 * TELL_S)
            raise self.failure or RingError(f"rank {self._rank}: this ring is failing")

    def fail(self, error: BaseException, blame: bool = False) -> None:
        """End the ring, for `error` if nothing was first. Returns when the lanes are aborted, or stuck. Never raises.

        `blame`: find out which rank is at fault, and say it in the error.
        """
        if not self._first.acquire(blocking=False):
            self._ended.wait(ABORT_S + TELL_S)
            return
        for ticket in list(self.tickets):
            ticket.flight.state = FAILED
        stuck: list[Communicator] = []
        aborting = [threading.Thread(target=self._abort, args=(lane, stuck), daemon=True) for lane in self._lanes]
        for thread in aborting:
            thread.start()
        telling = threading.Thread(target=self._tell, args=(error, blame), name="ringattn-tell", daemon=True)
        telling.start()
        telling.join(TELL_S)
        if self.failure is None:
            self.failure = _said(error, "; the store does not answer: its host has stopped or is gone")
        self._told.set()
        self._write_record(self.failure)
        for thread in aborting:
            thread.join()
        self._ended.set()
        if stuck and threading.current_thread() is self._thread:
            self._leave(f"rank {self._rank}: the abort is stuck, so the process ends after: {self.failure}")

    def tick(self) -> None:
        """Tick off what has arrived, in order; let go of its buffers, and of its events once the caller has waited."""
        with self._ticking:
            while self.tickets and self.tickets[0].done.query():
                ticket = self.tickets.popleft()
                ticket.flight.state, ticket.flight.done_s = DONE, time.time()
                ticket.release()
                self._unwaited.append(ticket)
            waited = [ticket for ticket in self._unwaited if ticket.waited]
            self._unwaited = [ticket for ticket in self._unwaited if not ticket.waited]
            self.free.extend((ticket.ready, ticket.done) for ticket in waited)

    def _status(self) -> str:
        """For the pulse: where this rank is, inside a launch or computing before an exchange, and its calls."""
        computing = any(not ticket.started_at for ticket in list(self.tickets)[:1])
        return self._calls.status(at=self.where, launching=self.launching is not None, computing=computing)

    def _abort(self, lane: Communicator, stuck: list[Communicator]) -> None:
        if not lane.abort():
            stuck.append(lane)

    def _tell(self, error: BaseException, blame: bool) -> None:
        """Name the guilty, publish the cause; on a thread of its own, for the store may never answer."""
        words = accuse(self._telling, self._calls, self._waited_for()) if blame else ""
        failure = _said(error, words)
        self._telling.publish_cause(failure if words else error)
        self.failure = failure

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._gpu.activate()
            self._gpu.watch_captures()
            while not self._stopped.wait(INTERVAL_S):
                self._look()
        except (DeadlineError, BrokenLaneError) as error:
            self._end(error, blame=True)
        except BaseException as error:  # a device that is lost raises whatever it likes
            self._end(error, blame=False)

    def _end(self, error: BaseException, blame: bool) -> None:
        if not self._stopped.is_set():
            self.fail(error, blame)

    def _look(self) -> None:
        """One round. Raises what ends the ring."""
        ear = self._ear
        assert ear is not None
        if ear.cause is not None:
            raise PeerLostError(f"rank {self._rank}: {ear.cause}{self._pending()}")
        if ear.lost is not None:
            host = "the store's host (rank 0, or torchrun's agent) is gone"
            raise PeerLostError(f"rank {self._rank}: {host}: {ear.lost}{self._pending()}")
        for rank, beat in list(ear.beats.items()):
            if (difference := self._calls.differs(beat.status)) is not None:
                raise DisagreementError(f"rank {rank} and rank {self._rank} do not ask for the same: {difference}")
        for lane in self._lanes:
            if (broken := lane.error()) is not None:
                raise BrokenLaneError(f"rank {self._rank}: {broken}{self._pending()}")
        self.tick()
        ear.wanted = self._waited_for()
        self._hold_launch()
        self._hold_exchange(ear)

    def _hold_launch(self) -> None:
        """A launch may take `timeout_s`: NCCL connects peers inside it, and blocking communicators wait there."""
        launching = self.launching
        if launching is not None and time.monotonic() - launching[1] >= self._timeout_s:
            raise DeadlineError(f"rank {self._rank}: a launch did not end in {self._timeout_s} s: {launching[0]}")

    def _hold_exchange(self, ear: Ear) -> None:
        """The oldest exchange may take `timeout_s` from the moment that this rank was ready for it."""
        if not self.tickets:
            return
        ticket = self.tickets[0]
        if not ticket.started_at:
            if ticket.ready.query():
                ticket.started_at = time.monotonic()
                ticket.flight.started_s, ticket.flight.state = time.time(), RUNNING
            return
        peers, age_s = self._waited_for(), time.monotonic() - ticket.started_at
        if peers <= ear.closed and not ticket.done.query():
            who = ", ".join(f"rank {peer}" for peer in sorted(peers))
            raise PeerLostError(f"rank {self._rank}: {who} closed its ring{self._pending()}")
        if age_s >= self._timeout_s:
            raise DeadlineError(
                f"rank {self._rank}: no answer from ranks {sorted(peers)} within {self._timeout_s} s{self._pending()}"
            )

    def _waited_for(self) -> set[int]:
        """The peers of the oldest exchange or launch; of a replayed pass all."""
        launching = self.launching
        if launching is not None:
            return launching[0].peers
        if not self.tickets:
            return set()
        return self.tickets[0].hop.peers or self._others

    def _pending(self) -> str:
        """The oldest exchange that has not arrived."""
        if not self.tickets:
            return ""
        ticket = self.tickets[0]
        return f"; pending: exchange {ticket.flight.sequence}: {ticket.hop}"

    def _write_record(self, failure: BaseException) -> None:
        if self._flight_dir is None:
            return
        try:
            failure.add_note(f"flight record: {self._record.dump(self._flight_dir, str(failure))}")
        except OSError as trouble:
            print(f"ringattn rank {self._rank}: no flight record: {trouble}", file=sys.stderr, flush=True)


def _said(error: BaseException, words: str) -> BaseException:
    """The error with more words; what is not ringattn's own becomes a `RingError`."""
    if not isinstance(error, RingError):
        return RingError(f"{type(error).__name__}: {error}{words}").with_traceback(error.__traceback__)
    kind = PeerLostError if isinstance(error, BrokenLaneError) else type(error)
    return kind(f"{error}{words}") if words or kind is not type(error) else error


class Agreement:
    """One rank's agreements, counted from 0."""

    def __init__(self, board: Board, calls: CallWindow, supervisor: Supervisor, timeout_s: float) -> None:
        self._board, self._calls, self._supervisor, self._timeout_s = board, calls, supervisor, timeout_s
        self._pulse = Pulse(board.store, board.rank)
        self._number = 0
        self._next_look = Deadline(0.0)

    def agree(self, payload: bytes) -> list[bytes]:
        """Everyone's payload, by rank. Raises `DeadlineError`, `PeerLostError`, `DisagreementError`."""
        board, stem = self._board, f"agree/{self._number}"
        label = f"rank {board.rank} in agreement {self._number}"
        self._supervisor.where = f"agreement {self._number}"
        self._next_look = Deadline(3 * INTERVAL_S)
        try:
            board.write(f"{stem}/{board.rank}", payload)
            if not wait_until(lambda: board.complete(stem), Deadline(self._timeout_s), lambda: self._watch(stem)):
                missing = board.missing(stem)
                blamed = accuse(board, self._calls, set(missing))
                raise DeadlineError(f"no answer from ranks {missing} within {self._timeout_s} s{blamed}")
            answers = [board.read(f"{stem}/{rank}") for rank in board.everyone()]
            if self._number:  # all have come here, so nobody reads the one before any more
                board.store.delete_key(f"agree/{self._number - 1}/{board.rank}")
        except RingError as error:
            kind = type(error) if isinstance(error, DeadlineError | DisagreementError) else PeerLostError
            raise kind(f"{label}: {error}") from error
        except RuntimeError as error:
            raise PeerLostError(f"{label}: the store's host is gone: {error}") from error
        self._number += 1
        return answers

    def _watch(self, stem: str) -> None:
        """Raise a failure of the ring, or that a missing rank has closed or gone on without agreeing."""
        self._supervisor.watch()
        if not self._next_look.passed:
            return
        self._next_look = Deadline(3 * INTERVAL_S)
        for rank in self._board.missing(stem):
            if self._board.holds(f"closed/{rank}"):
                raise PeerLostError(f"rank {rank} closed its ring")
            beat = self._pulse.heard(rank)
            if beat is not None and (difference := self._calls.differs(beat.status)) is not None:
                raise DisagreementError(f"rank {rank} does not ask for the same: {difference}")

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
from ringattn.transport.control_store import ControlStore
from ringattn.transport.heartbeat import INTERVAL_S, Heartbeat, HeartbeatMonitor
from ringattn.transport.nccl.bootstrap import SILENCE_S, CallWindow, attribute_failure
from ringattn.transport.nccl.communicator import ABORT_S, Communicator
from ringattn.transport.nccl.device import Deadline, Device, Event, wait_until
from ringattn.transport.nccl.hop import NcclHop, NcclWorkHandle

TELL_S = SILENCE_S + 0.8
"""How long attribution and publishing may take before the failure is raised without."""


class BrokenCommunicatorError(PeerLostError):
    """NCCL reports that a communicator is broken: some rank is at fault."""


class Supervisor:
    """The watch of one rank. `communicators` may be filled after it has started: opening is watched too."""

    def __init__(
        self,
        control: ControlStore,
        communicators: Sequence[Communicator],
        gpu: Device,
        record: FlightRecord,
        calls: CallWindow,
        timeout_s: float,
        flight_dir: Path | None,
        leave: Callable[[str], None],
    ) -> None:
        """`leave` is called with the reason when even an abort is stuck, and ends the process."""
        self.failure: BaseException | None = None
        self.where = "opening"
        self.handles: deque[NcclWorkHandle] = deque()
        self.free: deque[tuple[Event, Event]] = deque()
        self.launching: tuple[NcclHop, float] | None = None
        """The hop that NCCL is being given, and since when on the monotonic clock."""
        self._rank, self._communicators, self._gpu, self._record, self._calls = (
            control.rank,
            communicators,
            gpu,
            record,
            calls,
        )
        self._others = {rank for rank in control.everyone() if rank != control.rank}
        # A clone for the thread that publishes: a store that does not answer holds up that one alone.
        self._control, self._telling = control, control.clone()
        self._timeout_s, self._flight_dir, self._leave = timeout_s, flight_dir, leave
        self._unwaited: list[NcclWorkHandle] = []
        self._ticking = threading.Lock()
        # Taken by the first failure and never given back: locked means failed.
        self._first = threading.Lock()
        self._told, self._ended, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._monitor: HeartbeatMonitor | None = None
        self._thread = threading.Thread(target=self._live, name=f"ringattn-watch-{control.rank}", daemon=True)

    def start(self) -> None:
        """Start the watch and the heartbeat."""
        self._monitor = HeartbeatMonitor(self._control.clone(), self._status)
        self._thread.start()

    def stop(self) -> None:
        """End both threads. Idempotent."""
        self._stopped.set()
        if self._monitor is not None:
            self._monitor.stop()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10 * INTERVAL_S)

    def watch(self) -> None:
        """Raise the failure, if there is one. What every wait on the host does between its naps."""
        # The failure may still be being attributed, so this waits for its words, but not for ever.
        if self._first.locked():
            self._told.wait(2 * TELL_S)
            raise self.failure or RingError(f"rank {self._rank}: this ring is failing")

    def fail(self, error: BaseException, attribute: bool = False) -> None:
        """End the ring, for `error` unless it has failed already. Returns when the aborts have ended or are stuck.

        Never raises.

        `attribute`: find out which rank is at fault, and name it in the error.
        """
        # A later failure follows from the first: it waits until that has ended the ring.
        if not self._first.acquire(blocking=False):
            self._ended.wait(ABORT_S + TELL_S)
            return
        for handle in list(self.handles):
            handle.flight.state = FAILED
        # Aborts begin before the store is asked: they free kernels that wait for a peer, whatever the store does.
        stuck: list[Communicator] = []
        aborting = [
            threading.Thread(target=self._abort, args=(communicator, stuck), daemon=True)
            for communicator in self._communicators
        ]
        for thread in aborting:
            thread.start()
        telling = threading.Thread(target=self._tell, args=(error, attribute), name="ringattn-tell", daemon=True)
        telling.start()
        # Callers are told in time, with or without the rank at fault.
        telling.join(TELL_S)
        if self.failure is None:
            self.failure = _said(error, "; the store does not answer: its host has stopped or is gone")
        self._told.set()
        self._write_record(self.failure)
        for thread in aborting:
            thread.join()
        self._ended.set()
        # Kernels still wait on the GPU and nothing can stop them: only the end of the process does.
        if stuck and threading.current_thread() is self._thread:
            self._leave(f"rank {self._rank}: the abort is stuck, so the process ends after: {self.failure}")

    def tick(self) -> None:
        """Tick off what has arrived, in order; let go of its buffers, and of its events once the caller has waited."""
        with self._ticking:
            # Hops run in order on one stream, so the first that has not arrived ends the search.
            while self.handles and self.handles[0].done.query():
                handle = self.handles.popleft()
                handle.flight.state, handle.flight.done_s = DONE, time.time()
                handle.release()
                self._unwaited.append(handle)
            # Events are used again only when the caller has waited: its wait may still be to come.
            waited = [handle for handle in self._unwaited if handle.waited]
            self._unwaited = [handle for handle in self._unwaited if not handle.waited]
            self.free.extend((handle.ready, handle.done) for handle in waited)

    def _status(self) -> str:
        """For the heartbeat: where this rank is, inside a launch or computing before an exchange, and its calls."""
        computing = any(not handle.started_at for handle in list(self.handles)[:1])
        return self._calls.status(at=self.where, launching=self.launching is not None, computing=computing)

    def _abort(self, communicator: Communicator, stuck: list[Communicator]) -> None:
        if not communicator.abort():
            stuck.append(communicator)

    def _tell(self, error: BaseException, attribute: bool) -> None:
        """Name the rank at fault, publish the cause; on a thread of its own, for the store may never answer."""
        words = attribute_failure(self._telling, self._calls, self._waited_for()) if attribute else ""
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
        except (DeadlineError, BrokenCommunicatorError) as error:
            self._end(error, attribute=True)
        except BaseException as error:  # a device that is lost raises whatever it likes
            self._end(error, attribute=False)

    def _end(self, error: BaseException, attribute: bool) -> None:
        if not self._stopped.is_set():
            self.fail(error, attribute)

    def _look(self) -> None:
        """One round. Raises what ends the ring."""
        monitor = self._monitor
        assert monitor is not None
        # Another rank's cause comes first: what is seen here may only follow from it.
        if monitor.cause is not None:
            raise PeerLostError(f"rank {self._rank}: {monitor.cause}{self._pending()}")
        if monitor.lost is not None:
            host = "the store's host (rank 0, or torchrun's agent) is gone"
            raise PeerLostError(f"rank {self._rank}: {host}: {monitor.lost}{self._pending()}")
        # Before the deadline: a rank that makes another call would else be reported as late.
        for rank, heartbeat in list(monitor.heartbeats.items()):
            if (difference := self._calls.differs(heartbeat.status)) is not None:
                raise DisagreementError(f"rank {rank} and rank {self._rank} do not ask for the same: {difference}")
        for communicator in self._communicators:
            if (broken := communicator.error()) is not None:
                raise BrokenCommunicatorError(f"rank {self._rank}: {broken}{self._pending()}")
        self.tick()
        # Besides the next rank, only peers that this one waits for are read from the store.
        monitor.wanted = self._waited_for()
        self._hold_launch()
        self._hold_exchange(monitor)

    def _hold_launch(self) -> None:
        """A launch may take `timeout_s`: NCCL connects peers inside it, and blocking communicators wait there."""
        launching = self.launching
        if launching is not None and time.monotonic() - launching[1] >= self._timeout_s:
            raise DeadlineError(f"rank {self._rank}: a launch did not end in {self._timeout_s} s: {launching[0]}")

    def _hold_exchange(self, monitor: HeartbeatMonitor) -> None:
        """The oldest exchange may take `timeout_s` from the moment that this rank was ready for it."""
        if not self.handles:
            return
        handle = self.handles[0]
        # Own computation before the exchange does not count: the time begins when `ready` has passed.
        if not handle.started_at:
            if handle.ready.query():
                handle.started_at = time.monotonic()
                handle.flight.started_s, handle.flight.state = time.time(), RUNNING
            return
        peers, age_s = self._waited_for(), time.monotonic() - handle.started_at
        # All peers have left and the bytes are not here: they are not going to be.
        if peers <= monitor.closed and not handle.done.query():
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
        if not self.handles:
            return set()
        return self.handles[0].hop.peers or self._others

    def _pending(self) -> str:
        """The oldest exchange that has not arrived."""
        if not self.handles:
            return ""
        handle = self.handles[0]
        return f"; pending: exchange {handle.flight.sequence}: {handle.hop}"

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
    kind = PeerLostError if isinstance(error, BrokenCommunicatorError) else type(error)
    return kind(f"{error}{words}") if words or kind is not type(error) else error


class StoreAllGather:
    """The all-gather of a few bytes through the control store, counted from 0.

    Guarantees: it ends at the deadline, at the first failure of any rank, or when a rank makes another call; the store
    keeps the bytes of two of them at most.
    """

    def __init__(self, control: ControlStore, calls: CallWindow, supervisor: Supervisor, timeout_s: float) -> None:
        self._control, self._calls, self._supervisor, self._timeout_s = control, calls, supervisor, timeout_s
        self._heartbeat = Heartbeat(control.store, control.rank)
        self._number = 0
        self._next_look = Deadline(0.0)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Everyone's payload, by rank. Raises `DeadlineError`, `PeerLostError`, `DisagreementError`."""
        control, stem = self._control, f"all_gather/{self._number}"
        label = f"rank {control.rank} in all-gather {self._number}"
        self._supervisor.where = f"all-gather {self._number}"
        self._next_look = Deadline(3 * INTERVAL_S)
        try:
            # Written before waiting, so that no rank waits for one that waits for it.
            control.write(f"{stem}/{control.rank}", payload)
            if not wait_until(lambda: control.complete(stem), Deadline(self._timeout_s), lambda: self._watch(stem)):
                missing = control.missing(stem)
                at_fault = attribute_failure(control, self._calls, set(missing))
                raise DeadlineError(f"no answer from ranks {missing} within {self._timeout_s} s{at_fault}")
            answers = [control.read(f"{stem}/{rank}") for rank in control.everyone()]
            if self._number:  # every rank has reached this one, so the one before is read no more
                control.store.delete_key(f"all_gather/{self._number - 1}/{control.rank}")
        except RingError as error:
            kind = type(error) if isinstance(error, DeadlineError | DisagreementError) else PeerLostError
            raise kind(f"{label}: {error}") from error
        except RuntimeError as error:
            raise PeerLostError(f"{label}: the store's host is gone: {error}") from error
        self._number += 1
        return answers

    def _watch(self, stem: str) -> None:
        """Raise a failure of the ring, or that a missing rank has closed or makes another call."""
        self._supervisor.watch()
        if not self._next_look.passed:
            return
        self._next_look = Deadline(3 * INTERVAL_S)
        # A missing rank is either late or gone or elsewhere: its heartbeat tells which.
        for rank in self._control.missing(stem):
            if self._control.holds(f"closed/{rank}"):
                raise PeerLostError(f"rank {rank} closed its ring")
            heartbeat = self._heartbeat.last(rank)
            if heartbeat is not None and (difference := self._calls.differs(heartbeat.status)) is not None:
                raise DisagreementError(f"rank {rank} does not ask for the same: {difference}")

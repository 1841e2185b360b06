"""Watches one rank's exchanges from a thread of its own.

The thread holds every launch and every exchange to its deadline, asks NCCL for asynchronous errors, compares calls with
those in the other ranks' heartbeats, and on a failure aborts the communicators, attributes the failure to a rank,
publishes the cause and writes the flight record. Guarantees: it launches nothing, and waits for no store; it queries no
event that was recorded in a capture; whatever is raised on its thread ends the ring; callers see the failure within
`tell_s` of its detection, even when the store does not answer or an abort takes long. A rank whose own kernels never
reach an exchange names no other rank: its peers name it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ringattn.errors import DeadlineError, DisagreementError, PeerLostError, RingError
from ringattn.observe.flight import FlightRecord
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.device import Device
from ringattn.transport.heartbeat import ENDED, INTERVAL_S, HeartbeatMonitor, LastHeartbeat
from ringattn.transport.nccl.attribution import Attribution, Beside, CallHistory, Waits, told_place
from ringattn.transport.nccl.communicator import Communicator
from ringattn.transport.stream import StreamHop, StreamWatch, StreamWorkHandle, bare

TELLING_S = 0.2
"""What publishing may take, besides the attribution."""
STANDSTILL_S = 2.0
"""How long an exchange may stand still after all its peers have closed: their bytes may have left and wait for room."""
LOST_S = 5.0
"""How long the heartbeat of a rank that has only to close stands still before it counts as lost."""
NOT_CLOSED = "is silent (stopped, stuck or gone) and has not closed its ring"
LOOK_S, LOOK_PER_RANK_S = 0.3, 4e-3
"""Seconds between two looks at who is missing: at least, and for each rank of the ring."""
WATCHED = 8
"""Ranks that have not closed which one that has watches, the next in the ring, so that all together watch all."""
ABORT_GRACE_S = 0.2
"""What a caller that is told of a failure grants the aborts."""
STUCK_S = 0.3
"""A launch or own kernels that take longer than this are told in the heartbeat."""


class BrokenCommunicatorError(PeerLostError):
    """NCCL reports that a communicator is broken: some rank is at fault."""


class Supervisor(StreamWatch[StreamWorkHandle]):
    """The watch of one rank. `communicators` may be filled after it has started: opening is watched too."""

    interval_s = INTERVAL_S
    stop_s = 0.3

    def __init__(
        self,
        control: ControlStore,
        communicators: Sequence[Communicator],
        gpu: Device,
        record: FlightRecord,
        calls: CallHistory,
        timeout_s: float,
        flight_dir: Path | None,
        leave: Callable[[str], None],
        job_size: int,
    ) -> None:
        """See `StreamWatch`. `job_size` ranks share the store."""
        super().__init__(control.rank, gpu, record, timeout_s, flight_dir, leave)
        self.where = "opening"
        self.launching: tuple[StreamHop, float] | None = None
        """The hop that NCCL is being given, and since when on the monotonic clock."""
        self.missing: frozenset[int] = frozenset()
        """Ranks that an all-gather through the store waits for."""
        self.leaving: frozenset[int] = frozenset()
        """Ranks that have not closed, while this one waits for all to close."""
        self.gathering = False
        self.stuck: list[Communicator] = []
        self.beside: Beside | None = None
        """Another transport of this rank, which ends with this one."""
        self._communicators, self._calls = communicators, calls
        self._others = {rank for rank in control.everyone() if rank != control.rank}
        # Clones: a store that does not answer holds up only the thread that waits for it.
        self._control, self._telling = control, control.clone()
        self._monitor = HeartbeatMonitor(control.clone(), self._status, job_size)
        self._attribution = Attribution(self._telling, self._status, self._monitor)
        self.patience_s = 2 * self.tell_s
        self._standing: tuple[StreamWorkHandle | None, float] = None, 0.0
        # By rank of `leaving`: its last heartbeat, and when it was new, by the clock and in rounds.
        self._beats: dict[int, tuple[LastHeartbeat | None, float, int]] = {}

    @property
    def tell_s(self) -> float:
        """How long attribution and publishing may take before the failure is raised without."""
        return self._attribution.limit_s + TELLING_S

    def start(self) -> None:
        """Start the watch and the heartbeat."""
        self._monitor.start()
        super().start()

    def leave(self, deadline: Deadline) -> None:
        """Say that this rank has closed its ring: it waits for no message any more."""
        self._monitor.leave()
        self._control.until(deadline).leave()

    def all_closed(self, control: ControlStore) -> Callable[[], bool]:
        """Whether all ranks have closed; asked again and again, those that have not are watched."""
        looked, look_s = 0.0, max(LOOK_S, LOOK_PER_RANK_S * control.world_size)
        # The last to close says so to all: each of them asks for one entry.
        if control.add("closed/count") == control.world_size:
            control.write("closed/all", "1")

        def asked() -> bool:
            nonlocal looked
            if control.holds("closed/all"):
                return True
            if time.monotonic() - looked >= look_s:
                looked = time.monotonic()
                missing = sorted(control.missing("closed"), key=lambda rank: (rank - self._rank) % control.world_size)
                self.leaving = frozenset(missing[:WATCHED])
                return not missing
            return False

        return asked

    def stop(self) -> None:
        """End both threads. Idempotent."""
        self._stopped.set()
        self._monitor.stop(self.stop_s)
        super().stop()

    @property
    def failed(self) -> bool:
        """Whether the ring has failed, or is failing."""
        return self._first.locked()

    def fail(self, error: BaseException, attribute: bool = False) -> None:
        """End the ring, for `error` unless it has failed already. Returns when the reason is known. Never raises.

        The aborts may go on: `ended` says when they have ended.

        `attribute`: find out which rank is at fault, and name it in the error.
        """
        if not self._is_first():
            self.ended.wait(ABORT_GRACE_S)
            return
        unasked = threading.current_thread() is self._thread
        aborting = threading.Thread(target=self._abort_all, args=(unasked,), name="ringattn-abort", daemon=True)
        # Aborts begin before the store is asked: they free kernels that wait for a peer, whatever the store does.
        if self.beside is None:
            aborting.start()
        if self._control.store.lost:
            self._telling.store.abandon()  # the caller has found that the store does not answer
        telling = threading.Thread(target=self._tell, args=(error, attribute), name="ringattn-tell", daemon=True)
        telling.start()
        # Callers are told in time, with or without the rank at fault.
        telling.join(self.tell_s)
        if self.failure is None:
            self.failure = _said(error, "; the store was not asked in time which rank is at fault")
        if self.beside is not None:
            # Ranks of the node first: an abort lets the device go on, and copy there what has not arrived.
            self.beside.end(self.failure if isinstance(error, RingError) else error)
            aborting.start()
        self._write_record(self.failure, error)
        self._told.set()
        # Most aborts end at once. One that does not must not keep the reason from the caller.
        self.ended.wait(ABORT_GRACE_S)

    @property
    def closed(self) -> set[int]:
        """Of the ranks whose heartbeats are read, those that have closed their ring."""
        return self._monitor.closed

    def let_go(self) -> None:
        """Let go of the buffers of exchanges that are not going to arrive. All communicators have ended."""
        with self._ticking:
            self.handles.clear()
            self._unwaited.clear()

    def _status(self) -> str:
        """For the heartbeat: where this rank is, what it waits for there, and its calls."""
        waits, peers = self._waits()
        return json.dumps({**told_place(self.where, waits, peers), **self._calls.told()}, separators=(",", ":"))

    def _waits(self) -> tuple[Waits, set[int]]:
        """What this rank waits for, and the peers of its oldest hop."""
        launching, handles = self.launching, list(self.handles)[:1]
        if launching is not None and time.monotonic() - launching[1] >= STUCK_S:
            return Waits.LAUNCH, launching[0].peers
        if self.beside is not None and (there := self.beside.awaited()):
            return Waits.PEERS, there
        if handles and not handles[0].started_at and time.time() - handles[0].flight.posted_s >= STUCK_S:
            return Waits.COMPUTE, self._waited_for()
        return (Waits.PEERS if handles or self.gathering else Waits.HOST), self._waited_for()

    def _abort_all(self, unasked: bool) -> None:
        """`unasked`: no caller of the ring has met the failure, so nobody would end the process if this is stuck."""
        threads = [threading.Thread(target=self._abort, args=(each,), daemon=True) for each in self._communicators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.ended.set()
        # Kernels still wait on the GPU and nothing can stop them: only the end of the process does.
        if self.stuck and unasked:
            self._told.wait(self.patience_s)
            self._leave(f"rank {self._rank}: the abort is stuck, so the process ends after: {self.failure}")

    def _abort(self, communicator: Communicator) -> None:
        if not communicator.abort():
            self.stuck.append(communicator)

    def _tell(self, error: BaseException, attribute: bool) -> None:
        """Name the rank at fault, publish the cause; on a thread of its own, for the store may not answer."""
        words = ""
        if attribute and not self._telling.store.lost:
            try:
                waited_s = self._timeout_s if isinstance(error, DeadlineError) else None
                words = self._attribution.words(self._waited_for(), self.missing, waited_s)
            except RuntimeError as unanswered:
                words = f"; {unanswered}"
        failure = _said(error, words)
        self._telling.until(Deadline(1.0)).publish_cause(failure if words else error)
        self.failure = failure

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _found(self, error: BaseException) -> None:
        self.fail(error, attribute=isinstance(error, (DeadlineError, BrokenCommunicatorError)))

    def _look(self) -> None:
        """One round. Raises what ends the ring."""
        monitor = self._monitor
        # Another rank's cause comes first: what is seen here may only follow from it.
        if monitor.cause is not None:
            raise PeerLostError(f"rank {self._rank}: {monitor.cause}{self._pending()}")
        if monitor.lost is not None:
            host = "the store's host (rank 0, or torchrun's agent) is gone"
            raise PeerLostError(f"rank {self._rank}: {host}: {monitor.lost}{self._pending()}")
        # Before the deadline: a rank that makes another call would else be reported as late.
        for rank, heartbeat in list(monitor.heartbeats.items()):
            if (difference := self._calls.differs(json.loads(heartbeat.status))) is not None:
                raise DisagreementError(f"rank {rank} and rank {self._rank} do not ask for the same: {difference}")
        for communicator in self._communicators:
            if (broken := communicator.error()) is not None:
                raise BrokenCommunicatorError(f"rank {self._rank}: {broken}{self._pending()}")
        self.tick()
        # Besides the next rank, only peers that this one waits for are read from the store.
        monitor.wanted = self._waited_for()
        self._hold_launch()
        self._hold_exchange(monitor)
        self._hold_leaving(monitor)

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
        if not handle.started_at:
            handle.look()
            return
        peers, age_s = self._waited_for(), time.monotonic() - handle.started_at
        # All peers have left, and what they sent before is not moving: it is not going to arrive.
        if not peers <= monitor.closed or handle.done.query():
            self._standing = None, 0.0
        elif self._standing[0] is not handle:
            self._standing = handle, time.monotonic()
        elif time.monotonic() - self._standing[1] >= STANDSTILL_S:
            who = ", ".join(f"rank {peer}" for peer in sorted(peers))
            raise PeerLostError(f"rank {self._rank}: {who} closed its ring{self._pending()}")
        if age_s >= self._timeout_s:
            raise DeadlineError(
                f"rank {self._rank}: no answer from ranks {sorted(peers)} within {self._timeout_s} s{self._pending()}"
            )

    def _hold_leaving(self, monitor: HeartbeatMonitor) -> None:
        """A rank that is only to close, and whose heartbeat stands still, is not going to."""
        now, limit_s = time.monotonic(), max(LOST_S, monitor.silence_s)
        for rank in self.leaving - monitor.closed:
            heartbeat = monitor.heartbeats.get(rank)
            before, since, rounds = self._beats.get(rank, (None, now, monitor.rounds))
            # The first look, changed, or ended on purpose.
            if rank not in self._beats or heartbeat != before or (heartbeat is not None and heartbeat.count == ENDED):
                self._beats[rank] = heartbeat, now, monitor.rounds
            # Rounds too: a store that stands still keeps all heartbeats as they were.
            elif now - since >= limit_s and monitor.rounds - rounds >= limit_s / monitor.interval_s / 2:
                raise PeerLostError(f"rank {self._rank}: rank {rank} {NOT_CLOSED}")

    def _waited_for(self) -> set[int]:
        """The peers of the oldest exchange or launch; of a replayed pass all; at the end those that have not closed."""
        launching = self.launching
        if launching is not None:
            return launching[0].peers
        if not self.handles:
            return (self.beside.awaited() if self.beside else set()) or set(self.missing | self.leaving)
        return self.handles[0].hop.peers or self._others

    def _pending(self) -> str:
        """The oldest exchange that has not arrived."""
        if not self.handles:
            return ""
        handle = self.handles[0]
        return f"; pending: exchange {handle.flight.sequence}: {handle.hop}"


def _said(error: BaseException, words: str) -> BaseException:
    """The error with more words, without its traceback; what is not ringattn's own becomes a `RingError`."""
    if not isinstance(error, RingError):
        return RingError(f"{type(error).__name__}: {error}{words}")
    kind = PeerLostError if isinstance(error, BrokenCommunicatorError) else type(error)
    return kind(f"{error}{words}") if words or kind is not type(error) else bare(error)

"""Watches one rank's exchanges from a thread of its own.

The thread holds every launch and every exchange to its deadline, asks NCCL for asynchronous errors, compares calls with
those in the other ranks' heartbeats, and on a failure aborts the communicators, asks `Health` which rank is at fault,
publishes the cause and writes the flight record. Guarantees: it launches nothing, and waits for no store; it queries no
event that was recorded in a capture; whatever is raised on its thread ends the ring; callers see the failure within
`tell_s` of its detection, even if the store does not answer or an abort takes long. A rank whose own kernels never
reach an exchange names no other rank: its peers name it.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Protocol

from ringattn.errors import DeadlineError, DisagreementError, PeerLostError, RingError
from ringattn.transport.base import COMPARED, Opening
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.device import CudaDevice, StreamHop, StreamWatch, StreamWorkHandle, bare
from ringattn.transport.health.feeds import INTERVAL_S
from ringattn.transport.health.health import PUBLISH_S
from ringattn.transport.health.verdict import STUCK_S, Place, Waits
from ringattn.transport.nccl.communicator import Communicator

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


class BrokenCommunicatorError(PeerLostError):
    """NCCL reports that a communicator is broken: some rank is at fault."""


class Beside(Protocol):
    """Another transport of the same rank, that of its node, which ends with this one."""

    def end(self, error: BaseException) -> None:
        """End it, for `error`. Returns when its ranks know."""
        ...


class Supervisor(StreamWatch[StreamWorkHandle]):
    """The watch of one rank, which watches the opening too."""

    interval_s = INTERVAL_S
    stop_s = 0.3

    def __init__(
        self,
        opening: Opening,
        communicator: Communicator,
        gpu: CudaDevice,
        calls: CallHistory,
        leave: Callable[[str], None] | None,
        ras: str | None,
    ) -> None:
        """See `StreamWatch`. `ras`: the address of NCCL's RAS, None where it has none."""
        super().__init__(opening, gpu, leave)
        self.where = "opening"
        self.launching: tuple[StreamHop, float] | None = None
        """The hop that NCCL is being given, and since when on the monotonic clock."""
        self.missing: frozenset[int] = frozenset()
        """Ranks that an all-gather through the store waits for."""
        self.leaving: frozenset[int] = frozenset()
        """Ranks that have not closed, while this one waits for all to close."""
        self.gathering = False
        self.stuck = False
        """The abort of the communicator does not end."""
        self.beside: Beside | None = None
        """Another transport of this rank, which ends with this one."""
        self._communicator, self._calls, self._ras = communicator, calls, ras
        self._others = set(range(opening.world_size)) - {opening.rank}
        self.health = opening.health
        self.health.calls = calls.told
        self.patience_s = 2 * self.tell_s
        self._standing: tuple[StreamWorkHandle | None, float] = None, 0.0

    @property
    def tell_s(self) -> float:
        """How long it may take from the detection of a failure until callers see it."""
        return self.health.limit_s + PUBLISH_S + (WITHIN_S if self._ras else 0.0)

    def start(self) -> None:
        """Start the watch and the heartbeat."""
        self.health.attach(self, self._place)
        super().start()

    def leave(self, deadline: Deadline) -> None:
        """Say that this rank has closed its ring: it waits for no message any more."""
        self.health.closed = True
        self._opening.control.until(deadline).leave()

    def all_closed(self, control: ControlStore) -> Callable[[], bool]:
        """Whether all ranks have closed; asked again and again, those that have not are watched."""
        looked, look_s = 0.0, max(LOOK_S, LOOK_PER_RANK_S * control.world_size)
        # The last to close says so to all: each of them asks for one entry.
        if control.add("closed/count") == control.world_size:
            control.set("closed/all", "1")

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
        self.health.detach(self, self.stop_s)
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
        aborting = threading.Thread(target=self._abort, args=(unasked,), name="ringattn-abort", daemon=True)
        # Aborts begin before the explanation: they free kernels that wait for a peer.
        if self.beside is None:
            aborting.start()
        words = ""
        if attribute:
            late = isinstance(error, DeadlineError)
            reasons = [
                self.health.explain(
                    self._waited_for(), waited_s=self._timeout_s if late else 0.0, timeout_s=self._timeout_s,
                    missing=self.missing, at_deadline=late,
                ),
                ras_report(self._ras) if self._ras and late else "",
            ]  # fmt: skip
            words = "".join(f"; {reason}" for reason in reasons if reason)
        self.failure = _said(error, words)
        self.health.publish(self.failure if words else error)
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
        return {rank for rank, beat in self.health.beats().items() if beat.closed}

    def let_go(self) -> None:
        """Let go of the buffers of exchanges that are not going to arrive. All communicators have ended."""
        with self._ticking:
            self.handles.clear()
            self._unwaited.clear()

    def _place(self) -> Place:
        """Where this rank is, what it waits for there, and the peers of its oldest hop."""
        call, awaited = self._calls.number, self._waited_for()
        launching, handles = self.launching, list(self.handles)[:1]
        if launching is not None and time.monotonic() - launching[1] >= STUCK_S:
            return Place.make(self.where, call, Waits.LAUNCH, awaited)
        if handles and not handles[0].started_at and time.time() - handles[0].flight.posted_s >= STUCK_S:
            return Place.make(self.where, call, Waits.COMPUTE, awaited)
        return Place.make(self.where, call, Waits.PEERS if handles or self.gathering else Waits.HOST, awaited)

    def _abort(self, unasked: bool) -> None:
        """`unasked`: no caller of the ring has met the failure, so nobody would end the process if this is stuck."""
        self.stuck = not self._communicator.abort()
        self.ended.set()
        # Kernels still wait on the GPU and nothing can stop them: only the end of the process does.
        if self.stuck and unasked:
            self._told.wait(self.patience_s)
            self._leave(f"rank {self._rank}: the abort is stuck, so the process ends after: {self.failure}")

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _found(self, error: BaseException) -> None:
        self.fail(error, attribute=isinstance(error, (DeadlineError, BrokenCommunicatorError)))

    def _look(self) -> None:
        """One round. Raises what ends the ring."""
        health = self.health
        # Another rank's cause comes first: what is seen here may only follow from it.
        if health.cause is not None:
            raise PeerLostError(f"rank {self._rank}: {health.cause}{self._pending()}")
        if health.store.gone is not None:
            raise PeerLostError(f"rank {self._rank}: {health.store.unanswered}: {health.store.gone}{self._pending()}")
        # Before the deadline: a rank that makes another call would else be reported as late.
        for rank, beat in health.beats().items():
            if beat.calls is not None and (difference := self._calls.differs(beat.calls)) is not None:
                raise DisagreementError(f"rank {rank} and rank {self._rank} do not ask for the same: {difference}")
        if (broken := self._communicator.error()) is not None:
            raise BrokenCommunicatorError(f"rank {self._rank}: {broken}{self._pending()}")
        self.tick()
        self._hold_launch()
        self._hold_exchange()
        self._hold_leaving()

    def _hold_launch(self) -> None:
        """A launch may take `timeout_s`: NCCL connects peers inside it, and blocking communicators wait there."""
        launching = self.launching
        if launching is not None and time.monotonic() - launching[1] >= self._timeout_s:
            raise DeadlineError(f"rank {self._rank}: a launch did not end in {self._timeout_s} s: {launching[0]}")

    def _hold_exchange(self) -> None:
        """The oldest exchange may take `timeout_s` from the moment that this rank was ready for it."""
        if not self.handles:
            return
        handle = self.handles[0]
        if not handle.started_at:
            handle.look()
            return
        peers, age_s = self._waited_for(), time.monotonic() - handle.started_at
        # All peers have left, and what they sent before is not moving: it is not going to arrive.
        if not peers <= self.closed or handle.done.query():
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

    def _hold_leaving(self) -> None:
        """A rank that is only to close, and whose heartbeat has stopped, is not going to."""
        for rank in sorted(self.leaving & self.health.silent(LOST_S)):
            raise PeerLostError(f"rank {self._rank}: rank {rank} {NOT_CLOSED}")

    def _waited_for(self) -> set[int]:
        """The peers of the oldest exchange or launch; of a replayed pass all; at the end those that have not closed."""
        launching = self.launching
        if launching is not None:
            return launching[0].peers
        if not self.handles:
            return set(self.missing | self.leaving)
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


# --- calls -----------------------------------------------------------------------------------------------------------


KEPT = 8192
"""Calls that a rank remembers."""
BACK = (0, 1, 2, 3, 5, 8, 16, 64, 256, 1024, 4096)
"""How far the calls lie back that a heartbeat tells of, besides the first: ranks are compared however far one is
ahead."""
WORDS = 120


GRADIENTS_DIFFER = (
    "needs gradients on one of the two ranks only, which the other cannot know of a call that was compared before; let "
    "an input require a gradient on every rank, as q.requires_grad_() does"
)
CHAIN, CALL = 16, 20
"""Hexadecimal digits of a call in a heartbeat: the chain ends at the first place, a digest of the call alone at the
second, and a chain of needed gradients follows."""


class CallHistory:
    """The calls of a rank, as its heartbeats report them, so that ranks need not compare a call again.

    Written by the thread that makes the calls, read by the supervisor and the heartbeat thread.

    The chain of a call is a digest of it and of all before it, so that one that is equal vouches for all before it.
    A call that the ranks compare themselves is the same in all chains, whatever each rank made of it: if they refuse it
    together, the ring goes on. What follows the chain says only how a difference came about.
    """

    def __init__(self) -> None:
        self._chains: dict[int, str] = {}
        self._chain = self._gradients = b""
        self.words = ""
        self.number = 0

    def announce(self, number: int, digest: bytes, words: str, gradients: str = "") -> None:
        """This rank now makes its call `number`."""
        link = b"" if gradients == COMPARED else digest
        self._chain = sha256(self._chain + link + gradients.encode()).digest()[:8]
        self._gradients = sha256(self._gradients + gradients.encode()).digest()[:2]
        self._chains[number] = self._chain.hex() + sha256(digest).hexdigest()[:4] + self._gradients.hex()
        self._chains.pop(number - KEPT, None)
        self.words, self.number = words.partition("\n")[0][:WORDS], number

    def told(self) -> dict[str, object]:
        """For the heartbeat: a few hundred bytes, however many calls there were."""
        number = self.number
        return {"call": number, "words": self.words, "calls": [self._chains.get(n, "") for n in _told_of(number)]}

    def differs(self, theirs: dict[str, Any]) -> str | None:
        """The first call that the rank which told `theirs` is known to have made otherwise, in words; None if none."""
        equal = 0
        for number, chain in zip(_told_of(theirs["call"]), theirs["calls"], strict=True):
            mine = self._chains.get(number, "")
            if mine and chain and mine[:CHAIN] != chain[:CHAIN]:
                if number == equal + 1 and mine[CHAIN:CALL] == chain[CHAIN:CALL]:
                    return f"call {number} {GRADIENTS_DIFFER}"
                which = f"call {number}" if number == equal + 1 else f"one of calls {equal + 1} to {number}"
                other = f"{which} is another there (now at '{theirs['words']}', here '{self.words}')"
                # Of several calls the first that differs is not known, only that needed gradients differ, too.
                several = number != equal + 1 and mine[CALL:] != chain[CALL:]
                return f"{other}, or {GRADIENTS_DIFFER}" if several else other
            equal = number if mine and chain else equal
        return None


def _told_of(number: int) -> list[int]:
    """The calls of which a rank tells that makes its call `number`, ascending."""
    return sorted({max(number - back, 1) for back in BACK}) if number else []


# --- NCCL RAS --------------------------------------------------------------------------------------------------------


WITHIN_S = 0.5
ADDRESS = "localhost:28028"
SINCE = 22400
LARGEST_BYTES = 1 << 20
ERRORS = re.compile(r"^\s*Errors\s*\n\s*=+\s*\n(.*?)(?=^\s*Warnings\s*\n\s*=+|\Z)", re.DOTALL | re.MULTILINE)


def ras_address(environment: Mapping[str, str], nccl_version: int) -> str | None:
    """Where RAS of this process's NCCL answers; None if NCCL has none or the user has turned it off."""
    if nccl_version < SINCE or environment.get("NCCL_RAS_ENABLE") == "0":
        return None
    return environment.get("NCCL_RAS_ADDR", ADDRESS)


def ras_report(address: str) -> str:
    """Return what NCCL's RAS reports of processes that are dead or do not answer, as one line; empty without any.

    RAS (NCCL 2.24 and later, on by default) is a thread in each process of an NCCL job, which serves a text protocol:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
    Its section `Errors` is quoted. Guarantee: it takes at most `WITHIN_S`, and a socket that does not answer is not an
    error. Unproven on a GPU.
    """
    host, _, port = address.rpartition(":")
    until, status = time.monotonic() + WITHIN_S, b""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), WITHIN_S) as connection:
            connection.sendall(b"verbose status\n")
            while (left_s := until - time.monotonic()) > 0 and len(status) < LARGEST_BYTES:
                connection.settimeout(left_s)
                if not (received := connection.recv(65536)):
                    break
                status += received
    except (OSError, ValueError):
        pass  # no RAS, or it is still collecting: what has arrived is used
    errors = ERRORS.search(status.decode(errors="replace"))
    lines = [" ".join(line.split()) for line in errors[1].splitlines() if line.strip()] if errors else []
    return f"NCCL RAS reports: {', '.join(lines)}" if lines else ""

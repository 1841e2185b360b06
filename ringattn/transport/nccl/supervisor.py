"""The supervisor: a thread that watches one rank's exchanges over NCCL.

It enforces the deadline of every launch and exchange, polls NCCL for asynchronous errors, and compares this rank's
calls with those in the other ranks' heartbeats. On a failure it aborts the communicators, gets from `Health` which rank
is at fault, publishes the cause and writes the flight record. Guarantees: it launches nothing and waits for no store.
It queries no event recorded in a capture. Any error on its thread ends the ring. Callers see a failure within `tell_s`
of its detection, even if the store does not answer or an abort takes long. A rank whose own kernels never reach an
exchange names no other rank: its peers name it.
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
"""How long an exchange may make no progress after all its peers have closed. Their bytes may still be in flight."""
LOST_S = 5.0
"""How long a heartbeat may stop before its rank counts as lost, if the only thing awaited from the rank is its close.
"""
NOT_CLOSED = "is silent (stopped, stuck or gone) and has not closed its ring"
LOOK_S, LOOK_PER_RANK_S = 0.3, 4e-3
"""Seconds between two lookups of the missing ranks: a minimum, and an addition for each rank of the ring."""
WATCHED = 8
"""Each closed rank watches this many ranks that have not closed, the next ones in the ring, so that all are watched."""
ABORT_GRACE_S = 0.2
"""How long a caller that receives a failure waits for the aborts."""


class BrokenCommunicatorError(PeerLostError):
    """The error for a communicator that NCCL reports as broken. Some rank is at fault for it."""


class NodeTransport(Protocol):
    """The same rank's transport inside its node, which ends together with this one."""

    def end(self, error: BaseException) -> None:
        """End the transport with `error`. Returns when its ranks are notified."""
        ...


class Supervisor(StreamWatch[StreamWorkHandle]):
    """The thread that watches one rank's exchanges over NCCL, and before them the opening of the ring."""

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
        """See `StreamWatch`. `ras`: the address of NCCL's RAS service; None if it has none."""
        super().__init__(opening, gpu, leave)
        self.where = "opening"
        self.launching: tuple[StreamHop, float] | None = None
        """The hop that is being launched, and the launch's start on the monotonic clock."""
        self.missing: frozenset[int] = frozenset()
        """Ranks that an all-gather through the store waits for."""
        self.leaving: frozenset[int] = frozenset()
        """Ranks that have not closed, while this one waits for all to close."""
        self.gathering = False
        self.stuck = False
        """Whether the abort of the communicator is stuck."""
        self.node_transport: NodeTransport | None = None
        """The transport of this rank inside its node, if there is one. It ends together with this one."""
        self._communicator, self._calls, self._ras = communicator, calls, ras
        self._others = set(range(opening.world_size)) - {opening.rank}
        self.health = opening.health
        self.health.calls = calls.report
        self.patience_s = 2 * self.tell_s
        self._standing: tuple[StreamWorkHandle | None, float] = None, 0.0

    @property
    def tell_s(self) -> float:
        """The longest time from the detection of a failure until callers see it."""
        return self.health.limit_s + PUBLISH_S + (WITHIN_S if self._ras else 0.0)

    def start(self) -> None:
        """Start the watch and the heartbeat."""
        self.health.attach(self, self._place)
        super().start()

    def leave(self, deadline: Deadline) -> None:
        """Announce that this rank has closed its ring and waits for no more messages."""
        self.health.closed = True
        self._opening.control.until(deadline).leave()

    def all_closed(self, control: ControlStore) -> Callable[[], bool]:
        """Return a function that returns whether all ranks have closed, and watches those that have not."""
        looked, look_s = 0.0, max(LOOK_S, LOOK_PER_RANK_S * control.world_size)
        # The last rank to close sets one entry, so that the others poll only that one.
        if control.add("closed/count") == control.world_size:
            control.set("closed/all", "1")

        def all_ranks_closed() -> bool:
            nonlocal looked
            if control.holds("closed/all"):
                return True
            if time.monotonic() - looked >= look_s:
                looked = time.monotonic()
                missing = sorted(control.missing("closed"), key=lambda rank: (rank - self._rank) % control.world_size)
                self.leaving = frozenset(missing[:WATCHED])
                return not missing
            return False

        return all_ranks_closed

    def stop(self) -> None:
        """End the thread of the supervisor and the heartbeat. Idempotent."""
        self._stopped.set()
        self.health.detach(self, self.stop_s)
        super().stop()

    @property
    def failed(self) -> bool:
        """Whether the ring has failed or is failing."""
        return self._first.locked()

    def fail(self, error: BaseException, attribute: bool = False) -> None:
        """End the ring with `error`, unless it has failed before. Returns when the cause is known. Never raises.

        The aborts may still be running: `ended` is set when they are complete.

        `attribute`: find out which rank is at fault, and name it in the error.
        """
        if not self._is_first():
            self.ended.wait(ABORT_GRACE_S)
            return
        unreported = threading.current_thread() is self._thread
        aborting = threading.Thread(target=self._abort, args=(unreported,), name="ringattn-abort", daemon=True)
        # Aborts start before the explanation: they release kernels that wait for a peer.
        if self.node_transport is None:
            aborting.start()
        attribution = ""
        if attribute:
            late = isinstance(error, DeadlineError)
            reasons = [
                self.health.explain(
                    self._waited_for(), waited_s=self._timeout_s if late else 0.0, timeout_s=self._timeout_s,
                    missing=self.missing, at_deadline=late,
                ),
                ras_report(self._ras) if self._ras and late else "",
            ]  # fmt: skip
            attribution = "".join(f"; {reason}" for reason in reasons if reason)
        self.failure = _extended(error, attribution)
        self.health.publish(self.failure if attribution else error)
        if self.node_transport is not None:
            # Notify the ranks of the node first: an abort lets the device continue, and copy data that never arrived.
            self.node_transport.end(self.failure if isinstance(error, RingError) else error)
            aborting.start()
        self._write_record(self.failure, error)
        self._reported.set()
        # Most aborts end at once. One that does not must not delay the cause for the caller.
        self.ended.wait(ABORT_GRACE_S)

    @property
    def closed(self) -> set[int]:
        """The ranks that have closed their ring, among those whose heartbeats this rank reads."""
        return {rank for rank, beat in self.health.beats().items() if beat.closed}

    def release_buffers(self) -> None:
        """Release the buffers of exchanges that will not arrive. All communicators must have ended."""
        with self._ticking:
            self.handles.clear()
            self._unwaited.clear()

    def _place(self) -> Place:
        """Return the state that this rank's heartbeats report: its current work, and the ranks that it waits for."""
        call, awaited = self._calls.number, self._waited_for()
        launching, oldest = self.launching, self.oldest
        if launching is not None and time.monotonic() - launching[1] >= STUCK_S:
            return Place.make(self.where, call, Waits.LAUNCH, awaited)
        if oldest is not None and not oldest.started_at and time.time() - oldest.flight.posted_s >= STUCK_S:
            return Place.make(self.where, call, Waits.COMPUTE, awaited)
        waits = Waits.HOST if oldest is None and not self.gathering else Waits.PEERS
        return Place.make(self.where, call, waits, awaited)

    def _abort(self, unreported: bool) -> None:
        """Abort the communicator.

        `unreported`: no call of the ring has raised the failure, so if the abort is stuck, it must end the process.
        """
        self.stuck = not self._communicator.abort()
        self.ended.set()
        # Kernels still wait on the GPU, and only the end of the process stops them.
        if self.stuck and unreported:
            self._reported.wait(self.patience_s)
            self._leave(f"rank {self._rank}: the abort is stuck, so the process ends after: {self.failure}")

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _end_ring(self, error: BaseException) -> None:
        self.fail(error, attribute=isinstance(error, (DeadlineError, BrokenCommunicatorError)))

    def _check_exchanges(self) -> None:
        """Check the exchanges once. Raises the error that ends the ring."""
        health = self.health
        # Another rank's cause comes first: what is observed here may be only a consequence.
        if health.cause is not None:
            raise PeerLostError(f"rank {self._rank}: {health.cause}{self._pending()}")
        if health.store.gone is not None:
            raise PeerLostError(f"rank {self._rank}: {health.store.unanswered}: {health.store.gone}{self._pending()}")
        # Compare calls before checking the deadline: a rank that makes a different call would be reported as late.
        for rank, beat in health.beats().items():
            if beat.calls is not None and (difference := self._calls.differs(beat.calls)) is not None:
                raise DisagreementError(f"rank {rank} and rank {self._rank} make different calls: {difference}")
        if (broken := self._communicator.error()) is not None:
            raise BrokenCommunicatorError(f"rank {self._rank}: {broken}{self._pending()}")
        self.tick()
        self._check_launch()
        self._check_oldest_exchange()
        self._check_leaving()

    def _check_launch(self) -> None:
        """Raise if a launch exceeds `timeout_s`. NCCL connects peers in it, and a blocking communicator waits in it."""
        launching = self.launching
        if launching is not None and time.monotonic() - launching[1] >= self._timeout_s:
            raise DeadlineError(f"rank {self._rank}: a launch did not end in {self._timeout_s} s: {launching[0]}")

    def _check_oldest_exchange(self) -> None:
        """Raise if the oldest exchange exceeds `timeout_s`, counted from the moment this rank was ready for it."""
        handle = self.oldest
        if handle is None:
            return
        if not handle.started_at:
            handle.note_start()
            return
        peers, age_s = self._waited_for(), time.monotonic() - handle.started_at
        # If all peers have closed and the exchange still has not arrived after `STANDSTILL_S`, it never will.
        if not peers <= self.closed or handle.done.query():
            self._standing = None, 0.0
        elif self._standing[0] is not handle:
            self._standing = handle, time.monotonic()
        elif time.monotonic() - self._standing[1] >= STANDSTILL_S:
            closed_peers = ", ".join(f"rank {peer}" for peer in sorted(peers))
            raise PeerLostError(f"rank {self._rank}: {closed_peers} closed its ring{self._pending()}")
        if age_s >= self._timeout_s:
            raise DeadlineError(
                f"rank {self._rank}: no answer from ranks {sorted(peers)} within {self._timeout_s} s{self._pending()}"
            )

    def _check_leaving(self) -> None:
        """Raise if the heartbeat of a rank whose close is awaited has stopped: the rank will not close any more."""
        for rank in sorted(self.leaving & self.health.silent(LOST_S)):
            raise PeerLostError(f"rank {self._rank}: rank {rank} {NOT_CLOSED}")

    def _waited_for(self) -> set[int]:
        """Return the ranks that this rank waits for.

        They are the peers of the launch in progress, else of the oldest exchange (all other ranks for a replayed pass),
        else the ranks that are missing in an all-gather or have not closed.
        """
        launching = self.launching
        if launching is not None:
            return launching[0].peers
        # Meanwhile another thread may remove the oldest exchange or release its hop.
        oldest = self.oldest
        hop = None if oldest is None else oldest.hop
        return set(self.missing | self.leaving) if hop is None else hop.peers or self._others

    def _pending(self) -> str:
        """Describe the oldest exchange that has not arrived."""
        oldest = self.oldest
        hop = None if oldest is None else oldest.hop
        return "" if oldest is None or hop is None else f"; pending: exchange {oldest.flight.sequence}: {hop}"


def _extended(error: BaseException, text: str) -> BaseException:
    """Return the error, extended by `text` and without its traceback. Other packages' errors become `RingError`."""
    if not isinstance(error, RingError):
        return RingError(f"{type(error).__name__}: {error}{text}")
    kind = PeerLostError if isinstance(error, BrokenCommunicatorError) else type(error)
    return kind(f"{error}{text}") if text or kind is not type(error) else bare(error)


# --- calls -----------------------------------------------------------------------------------------------------------


KEPT = 8192
"""The number of calls that a rank remembers."""
BACK = (0, 1, 2, 3, 5, 8, 16, 64, 256, 1024, 4096)
"""The distances of the earlier calls that a heartbeat reports, besides the first: enough to compare ranks that are any
number of calls apart."""
WORDS = 120


GRADIENTS_DIFFER = (
    "needs gradients on only one of the two ranks, and the other cannot know that of a call that was compared before; "
    "let an input require a gradient on every rank, as q.requires_grad_() does"
)
CHAIN, CALL = 16, 20
"""Offsets in the hexadecimal digits of a call in a heartbeat: the chain ends at the first, a digest of the call itself
at the second, and a chain of needed gradients follows."""


class CallHistory:
    """The calls of a rank, as its heartbeats report them, so that ranks need not compare a call twice.

    Written by the thread that makes the calls; read by the supervisor and the heartbeat thread.

    The chain of a call is a digest of it and all earlier calls, so equal chains imply equal earlier calls.
    A call that the ranks compare directly adds nothing of its own digest to the chain. So the chains stay equal if all
    ranks refuse different calls together, and the ring continues. The digits after the chain only explain a difference.
    """

    def __init__(self) -> None:
        self._chains: dict[int, str] = {}
        self._chain = self._gradients = b""
        self.words = ""
        self.number = 0

    def announce(self, number: int, digest: bytes, description: str, gradients: str = "") -> None:
        """Record that this rank now makes its call `number`."""
        link = b"" if gradients == COMPARED else digest
        self._chain = sha256(self._chain + link + gradients.encode()).digest()[:8]
        self._gradients = sha256(self._gradients + gradients.encode()).digest()[:2]
        self._chains[number] = self._chain.hex() + sha256(digest).hexdigest()[:4] + self._gradients.hex()
        self._chains.pop(number - KEPT, None)
        self.words, self.number = description.partition("\n")[0][:WORDS], number

    def report(self) -> dict[str, object]:
        """Return the fields for the heartbeat: a few hundred bytes, for any number of calls."""
        number = self.number
        return {
            "call": number,
            "words": self.words,
            "calls": [self._chains.get(n, "") for n in _reported_calls(number)],
        }

    def differs(self, fields: dict[str, Any]) -> str | None:
        """Describe the first known difference between this rank's calls and those of the rank that sent `fields`.

        Return None if no difference is known.
        """
        equal = 0
        for number, chain in zip(_reported_calls(fields["call"]), fields["calls"], strict=True):
            local_chain = self._chains.get(number, "")
            if local_chain and chain and local_chain[:CHAIN] != chain[:CHAIN]:
                if number == equal + 1 and local_chain[CHAIN:CALL] == chain[CHAIN:CALL]:
                    return f"call {number} {GRADIENTS_DIFFER}"
                calls = f"call {number}" if number == equal + 1 else f"one of calls {equal + 1} to {number}"
                difference = f"{calls} differs (that rank is now at '{fields['words']}', this rank at '{self.words}')"
                # Among several calls it is unknown which differs first, only that needed gradients differ as well.
                several = number != equal + 1 and local_chain[CALL:] != chain[CALL:]
                return f"{difference}, or {GRADIENTS_DIFFER}" if several else difference
            equal = number if local_chain and chain else equal
        return None


def _reported_calls(number: int) -> list[int]:
    """Return the calls that a rank reports while it makes call `number`, ascending."""
    return sorted({max(number - back, 1) for back in BACK}) if number else []


# --- NCCL RAS --------------------------------------------------------------------------------------------------------


WITHIN_S = 0.5
ADDRESS = "localhost:28028"
SINCE = 22400
LARGEST_BYTES = 1 << 20
ERRORS = re.compile(r"^\s*Errors\s*\n\s*=+\s*\n(.*?)(?=^\s*Warnings\s*\n\s*=+|\Z)", re.DOTALL | re.MULTILINE)


def ras_address(environment: Mapping[str, str], nccl_version: int) -> str | None:
    """Return the address of NCCL's RAS service in this process; None if NCCL has no RAS or the user has disabled it."""
    if nccl_version < SINCE or environment.get("NCCL_RAS_ENABLE") == "0":
        return None
    return environment.get("NCCL_RAS_ADDR", ADDRESS)


def ras_report(address: str) -> str:
    """Return NCCL RAS's report of processes that are dead or do not answer, as one line; empty if it reports none.

    RAS (NCCL 2.24 and later, on by default) is a thread in each process of an NCCL job. It answers a text protocol:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
    The result quotes the section `Errors` of its answer. Guarantee: the call takes at most `WITHIN_S`, and a socket
    that does not answer is not an error. Untested on a GPU.
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
        pass  # RAS is missing or still collecting: use what has arrived
    errors = ERRORS.search(status.decode(errors="replace"))
    lines = [" ".join(line.split()) for line in errors[1].splitlines() if line.strip()] if errors else []
    return f"NCCL RAS reports: {', '.join(lines)}" if lines else ""

"""The gloo transport: a ring whose ranks are processes on CPU, over a separate gloo group.

Guarantees: the user's process groups are never touched, and may be created before or after. Several rings may be open
at the same time. Every wait ends within the deadline; its error follows within two more seconds, in which the other
ranks' heartbeats are read. A wait ends at once when a signal handler raises. A rank that fails publishes its cause in
the store before it drops its connections, and every other rank re-states that first cause within about a second, even
in the middle of a wait. A stopped or killed rank publishes no cause; it is named because its heartbeat stops. If the
store's host does not answer, the error says so, and neighbours name a rank that hangs. Ranks use their addresses on the
route to the store's host, unless the user names an interface. A transport that has raised a failure cannot be used
again. If the two ends of a message differ in bytes, they are never matched, so both ranks reach the deadline. If a rank
dies while a large message to it is partly written, the sender notices only at the deadline, because gloo reports
nothing before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from ringattn.errors import ClosedError, DeadlineError, InputError, PeerLostError, TransportError
from ringattn.observe.files import descriptor_shortage
from ringattn.observe.flight import CONTROL_LANE, DONE, FAILED, RUNNING, Flight
from ringattn.transport.base import Message, Opening, Operation, ProcessTransport, listed, never_destroy, operations
from ringattn.transport.control_store import GRACE_S, bounded, host_of
from ringattn.transport.deadline import Deadline, InterruptibleCalls
from ringattn.transport.health.health import END_S
from ringattn.transport.health.verdict import Place, Waits
from ringattn.transport.location import ADVICE, Address, devices, find_address, reachable

INTERRUPT = timedelta(milliseconds=1)
STOP_S = 0.2
"""How long a failing rank waits for its heartbeat to end."""
PROBE_S = 0.5
"""If the store does not answer within this time, its host counts as the cause of a failed opening."""
DATA_LANE = 0
# Gloo kills the process if a message is longer than its receive, and reports a shorter one as success. So the length is
# part of the tag. Gloo's tags have 31 bits, and messages with equal tags stay in order.
CONTROL_TAG = 0
LENGTH_TAGS = 2**31 - 2
INTERRUPT_TAG = 2**31 - 1  # used by no message
HEAD_BYTES = 256
LENGTH_BYTES = 8


class _Operation(Operation):
    """An operation with gloo's work handle."""

    work: dist.Work | None = None

    @property
    def tag(self) -> int:
        """The message's tag, which must be equal on both ends."""
        # Tag 0 belongs to the control plane, so no length maps to it.
        return 1 + self.nbytes % LENGTH_TAGS

    def wait(self, deadline: float) -> None:
        """Wait until the operation is complete, or raise `RuntimeError`. A second call returns at once.

        `deadline` is a time on the monotonic clock.
        """
        if self.work is not None:
            # Gloo counts whole milliseconds, and 0 means "no deadline". Round up, because a wait that ends before the
            # deadline counts as a lost connection.
            remaining_ms = max(math.ceil((deadline - time.monotonic()) * 1e3), 1)
            self.work.wait(timedelta(milliseconds=remaining_ms))
            # Drop gloo's handle, which keeps the connection open.
            self.work = None


class _ControlOperation(_Operation):
    """An operation of an all-gather. Gloo never matches it with a message of an exchange."""

    tag = CONTROL_TAG


class GlooWorkHandle:
    """The operations of one exchange, with their flight record entry. `where` names the call in error messages."""

    arrived_s = None  # gloo does not report an arrival before the wait

    def __init__(self, transport: GlooTransport, operations: list[_Operation], flight: Flight, where: str) -> None:
        self._transport = transport
        self.operations = operations
        self.flight = flight
        self.where = where

    def wait(self, until: float | None = None) -> None:
        """See `WorkHandle.wait`. A second call returns at once. `until`: the deadline on the monotonic clock."""
        if self.operations:
            self._transport._finish(self, until)
            self.operations = []


class GlooTransport(ProcessTransport):
    """One rank of a ring of processes."""

    name = "gloo"
    device = torch.device("cpu")

    def __init__(self, opening: Opening, group: dist.ProcessGroupGloo) -> None:
        """Take over a connected group; see `open`."""
        super().__init__(opening)
        self._group: dist.ProcessGroupGloo | None = group
        self._all_gathers = 0
        # Gloo keeps a connection open while any handle on it lives, so closing must reach all handles.
        self._in_flight: set[_Operation] = set()
        self._calls = InterruptibleCalls()
        self._waiting: GlooWorkHandle | None = None
        self.health.attach(self, self._place, self._interrupt)

    @classmethod
    def open(cls, opening: Opening) -> GlooTransport:
        """Connect this rank with all others.

        Raises `DeadlineError` that names the ranks that did not arrive, or the addresses that could not be reached.
        """
        opening.name = opening.name or cls.name
        rank, timeout_s, deadline, control = opening.rank, opening.timeout_s, opening.until, opening.control
        opened = f"rank {rank} opened a ring of {opening.world_size}: "
        try:
            address = bounded(
                lambda: find_address(opening.store, opening.interface or ""),
                deadline.plus(GRACE_S),
                f"the name of {host_of(opening.store)} is not resolved within {timeout_s} s",
            )
            # Connecting waits for all ranks. Gather the addresses first, so that an error can name the missing ranks.
            addresses = [Address.parse(text) for text in control.gather("arrived", address.text(), deadline)]
        except DeadlineError as error:
            reason = str(error).removeprefix(f"rank {rank}: ").replace(" at 'arrived'", "")
            raise DeadlineError(opened + reason) from error
        if troubles := [f"rank {peer}: {each.trouble}" for peer, each in enumerate(addresses) if each.trouble]:
            raise InputError(f"{opened}{'; '.join(troubles)}")
        addresses = [reachable(peer, addresses) for peer in range(opening.world_size)]
        listed_addresses = ", ".join(f"rank {peer} at {each}" for peer, each in enumerate(addresses))
        late = (
            f"{opened}all ranks arrived, but could not connect within {timeout_s} s ({listed_addresses}); if one of "
            f"these cannot be reached by all others, {ADVICE}"
        )
        try:
            # The store's host may stop in the meantime, and gloo's own deadline does not cover calls of the store.
            group = bounded(lambda: _connect(opening, addresses[rank]), deadline.plus(GRACE_S), late)
        except RuntimeError as error:
            try:
                control.until(Deadline(PROBE_S)).holds("arrived/0")
            except DeadlineError as unanswered:
                raise DeadlineError(f"{opened}{unanswered}") from error
            raise DeadlineError(late) from error
        try:
            # Wait until all ranks have connected: a rank that closed now would disturb those that still connect.
            control.combine("connected", b"", lambda every: b"", deadline)
        except DeadlineError as error:
            raise DeadlineError(opened + str(error).removeprefix(f"rank {rank}: ")) from error
        return cls(opening, group)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 tensor of `nbytes` on the CPU."""
        self._check_open()
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> GlooWorkHandle:
        """See `Transport.exchange`. Raises `InputError`, `ClosedError`, `PeerLostError`."""
        posted = operations(_Operation, self.rank, self.world_size, self.device, sends, recvs)
        return self._post(posted, DATA_LANE, "")

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport.all_gather_bytes`. The n-th calls of all ranks belong together. A payload may have any length.

        The first message has a fixed size and holds the payload's length and start. If the payload is longer, a second
        message holds its rest.
        """
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        label = f"all-gather {self._all_gathers}"
        self._all_gathers += 1
        # head:  | length, 8 bytes | payload, up to 248 bytes |     rest:  the remainder of a longer payload
        framed = len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        framed += bytes(max(HEAD_BYTES - len(framed), 0))
        sent = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        answers = {peer: torch.empty(HEAD_BYTES, dtype=torch.uint8, device=self.device) for peer in peers}
        self._swap(peers, sent[:HEAD_BYTES], answers, label)

        # All first messages have arrived, so this rank knows how much each peer still sends.
        lengths = {peer: int.from_bytes(answers[peer][:LENGTH_BYTES].numpy().tobytes(), "little") for peer in peers}
        rests = {
            peer: torch.empty(max(lengths[peer] + LENGTH_BYTES - HEAD_BYTES, 0), dtype=torch.uint8, device=self.device)
            for peer in peers
        }
        self._swap(peers, sent[HEAD_BYTES:], rests, label)
        payloads = {self.rank: bytes(payload)}
        for peer in peers:
            whole = torch.cat([answers[peer], rests[peer]])
            payloads[peer] = whole[LENGTH_BYTES : LENGTH_BYTES + lengths[peer]].numpy().tobytes()
        return [payloads[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """See `Transport.close`. A peer that still waits for this rank gets `PeerLostError`."""
        if self._end is None:
            # Announce the end before the connections close, so that a waiting peer learns which rank closed.
            self.health.closed = True
            self.opening.control.leave()
            self.record.over = True
            self._drop(ClosedError(f"rank {self.rank} closed its ring"))

    def leave_to_parent(self) -> None:
        """See `ProcessBound`. The destructors of gloo need threads that the child does not have."""
        for resource in (self._group, *(operation.work for operation in self._in_flight)):
            never_destroy(resource)
        super().leave_to_parent()

    def _swap(self, peers: list[int], sent: torch.Tensor, received: dict[int, torch.Tensor], label: str) -> None:
        """Send one buffer to all `peers` and receive one from each."""
        sends = [Message(peer, sent, label) for peer in peers]
        recvs = [Message(peer, received[peer], label) for peer in peers]
        posted: list[_Operation] = operations(_ControlOperation, self.rank, self.world_size, self.device, sends, recvs)
        self._post(posted, CONTROL_LANE, f" in {label}").wait()

    def _post(self, posted: list[_Operation], lane: int, where: str) -> GlooWorkHandle:
        """Post operations to gloo, which keeps the order for each pair of ranks and direction.

        `lane`: the lane of the exchange in the flight record. `where`: the words in errors that name the call, or "".
        """
        self._check_open()
        if posted:  # otherwise ignore a failure: a rank that fails after its last message does not undo what arrived
            self._check_cause(where)
        parts = tuple(operation.record() for operation in posted)
        # An exchange without messages is not recorded.
        flight = self.record.begin(lane, parts, self.name) if parts else Flight(0, lane, parts)
        handle = GlooWorkHandle(self, posted, flight, where)
        for operation in posted:
            try:
                # Do not bind the group to a local variable: an error keeps this frame, and so the connections, alive.
                operation.work = (self._group.send if operation.sends else self._group.recv)(  # type: ignore[union-attr]
                    [operation.buffer.detach()], operation.peer, operation.tag
                )
            except RuntimeError as error:
                raise self._failure(operation, handle, error, None) from error
            self._in_flight.add(operation)
        flight.state, flight.started_s = RUNNING, time.time()
        return handle

    def _finish(self, handle: GlooWorkHandle, until: float | None = None) -> None:
        """Wait for every operation. The first failure ends this transport."""
        self._check_open()
        # One deadline for all operations of the exchange, not one for each.
        deadline = until if until is not None else time.monotonic() + self.opening.timeout_s
        self._waiting = handle
        self._check_cause(handle.where)  # a cause published after this check interrupts the wait
        waited: list[_Operation] = []

        def wait() -> None:
            for operation in handle.operations:
                waited.append(operation)
                operation.wait(deadline)

        try:
            self._calls.run(wait, lambda: any(map(_unfinished, handle.operations)))
        except RuntimeError as error:
            raise self._failure(waited[-1], handle, error, deadline) from error
        except BaseException as error:  # a signal handler has raised, for example KeyboardInterrupt
            self.abort(error)
            raise
        self._waiting = None
        # Forget operations only after success: `_drop` still needs those of a failed exchange.
        self._in_flight.difference_update(handle.operations)
        handle.flight.state, handle.flight.done_s = DONE, time.time()

    def _check_cause(self, where: str) -> None:
        """End this transport if another rank has published a cause. Raises `PeerLostError`. `where`: as for `_post`."""
        if (cause := self.health.cause) is not None:
            raise self._failed(PeerLostError(f"rank {self.rank} stopped{where} because of another rank: {cause}"))

    def _failure(
        self, failed: _Operation, handle: GlooWorkHandle, error: RuntimeError, deadline: float | None
    ) -> TransportError:
        """End this transport, and return an error with the most specific cause that is known."""
        handle.flight.state = FAILED
        kind: type[TransportError] = PeerLostError
        if deadline is not None and time.monotonic() >= deadline:
            kind = DeadlineError
            # Collect the late operations first: reading heartbeats takes time, in which more messages may arrive.
            pending = [operation for operation in handle.operations if _unfinished(operation)]
            late = sorted({operation.peer for operation in pending})
            message = (
                f"rank {self.rank}{handle.where}: no answer from ranks {late} within {self.opening.timeout_s} s; "
                f"pending: {listed(pending)}; {self.health.explain(late, waited_s=self.opening.timeout_s)}"
            )
        else:
            waited_s = 0.0 if deadline is None else self.opening.timeout_s - (deadline - time.monotonic())
            explanation = self.health.explain(
                [failed.peer], waited_s=waited_s, timeout_s=self.opening.timeout_s, lost=(failed.peer, str(error))
            )
            message = f"{failed}{handle.where}: {explanation}"
        message += f"; {shortage}" if (shortage := descriptor_shortage()) else ""
        return self._failed(kind(message))

    def _place(self) -> Place:
        """Return what this rank is doing and which ranks it waits for. Called from the health thread."""
        position, waiting = self.record.where(), self._waiting
        if waiting is None:
            return Place.make(position, self.health.call)
        return Place.make(position, self.health.call, Waits.PEERS, {operation.peer for operation in waiting.operations})

    def _interrupt(self, cause: str) -> None:
        """End the wait of the transport's thread, from the health thread, because a rank has published a cause.

        Gloo has no call that ends a wait. But a wait that times out closes its connection, which ends all waits on it.
        """
        if (waiting := self._waiting) is not None and (group := self._group) is not None:
            for peer in {operation.peer for operation in waiting.operations}:
                with suppress(RuntimeError):
                    group.recv(  # type: ignore[attr-defined]
                        [torch.empty(1, dtype=torch.uint8, device=self.device)], peer, INTERRUPT_TAG
                    ).wait(INTERRUPT)

    def _fail(self, cause: BaseException) -> None:
        """Publish the cause, then drop the connections: a neighbour whose wait ends can then read the cause."""
        self.health.publish(cause)
        self._drop(cause)

    def _drop(self, end: BaseException) -> None:
        """Release everything that keeps a connection open. Gloo then ends the neighbours' waits."""
        self._end = end
        # Include exchanges that were never waited for.
        for operation in self._in_flight:
            operation.work = None
        self._group = None
        self.health.detach(self, END_S if isinstance(end, ClosedError) else STOP_S)


def _unfinished(operation: _Operation) -> bool:
    """Return whether an operation is still pending after the deadline.

    The check may close the operation's connection, so the ring must end afterwards.
    """
    try:
        operation.wait(0.0)
    except RuntimeError:
        return True
    return False


def _connect(opening: Opening, address: Address) -> dist.ProcessGroupGloo:
    """Connect gloo's group. This waits for the other ranks, and indefinitely if the store's host is stopped."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = devices(address.own, address.interface)
    options._timeout = timedelta(seconds=max(opening.until.left_s, 0.1))
    store = opening.store.clone()  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, opening.rank, opening.world_size, options)

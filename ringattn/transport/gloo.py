"""A ring whose ranks are processes on CPU, over a gloo group of its own.

Guarantees: the user's process groups are never touched, whether they exist before or after; several rings may be open
at once; every wait ends within the deadline, and the error that it raises within two seconds more, in which the
heartbeats of the others are read; a wait ends at once when a signal handler raises; a rank that fails publishes its
cause in the store before it drops its connections, and every other rank re-states that first cause within about a
second, also in the middle of a wait; a rank that is stopped or killed publishes none, and is named because its
heartbeat stops; if the store's host does not answer, the error says so and the neighbours name a rank that hangs. Ranks
reach each other at their addresses on the route to the store's host, unless the user names an interface. A transport
that has raised a failure is dead. A message whose ends differ in bytes never meets its partner, so both ranks reach the
deadline. A rank that dies while a large message to it is half written is noticed at the deadline only; gloo does not
say it earlier.
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
"""How long a rank that fails waits for its heartbeat to end."""
PROBE_S = 0.5
"""How long the store has to answer before its host is taken for the reason of a failed opening."""
DATA_LANE = 0
# Gloo itself kills the process when a message is longer than its receive, and takes a shorter one for success. So the
# length is part of the tag. Gloo's tags have 31 bits and keep the order among equals.
CONTROL_TAG = 0
LENGTH_TAGS = 2**31 - 2
INTERRUPT_TAG = 2**31 - 1  # no message has it
HEAD_BYTES = 256
LENGTH_BYTES = 8


class _Operation(Operation):
    """An operation and gloo's handle of it."""

    work: dist.Work | None = None

    @property
    def tag(self) -> int:
        """What must be equal on both ends."""
        # 0 is the control plane's, so no length has it.
        return 1 + self.nbytes % LENGTH_TAGS

    def wait(self, deadline: float) -> None:
        """Wait once, until `deadline` on the monotonic clock; a second wait returns at once. Raises `RuntimeError`."""
        if self.work is not None:
            # Gloo counts whole milliseconds, and takes 0 for "no deadline". Rounded up, for a wait that ends before the
            # deadline is a lost connection.
            remaining_ms = max(math.ceil((deadline - time.monotonic()) * 1e3), 1)
            self.work.wait(timedelta(milliseconds=remaining_ms))
            # Lets go of gloo's handle, which keeps the connection.
            self.work = None


class _ControlOperation(_Operation):
    """An operation of the control plane, which never meets the messages of an exchange."""

    tag = CONTROL_TAG


class GlooWorkHandle:
    """The operations of one exchange, their entry in the flight record, and where they were posted, for errors."""

    arrived_s = None  # gloo does not say that a message has arrived before it is waited for

    def __init__(self, transport: GlooTransport, operations: list[_Operation], flight: Flight, where: str) -> None:
        self._transport = transport
        self.operations = operations
        self.flight = flight
        self.where = where

    def wait(self, until: float | None = None) -> None:
        """See `WorkHandle.wait`. A second wait returns at once. `until`: the deadline on the monotonic clock."""
        if self.operations:
            self._transport._finish(self, until)
            self.operations = []


class GlooTransport(ProcessTransport):
    """One rank of a ring of processes."""

    name = "gloo"
    device = torch.device("cpu")

    def __init__(self, opening: Opening, group: dist.ProcessGroupGloo) -> None:
        """Takes over a connected group; see `open`."""
        super().__init__(opening)
        self._group: dist.ProcessGroupGloo | None = group
        self._all_gathers = 0
        # Gloo keeps a connection for as long as any handle on it lives, so the end must reach all of them.
        self._in_flight: set[_Operation] = set()
        self._calls = InterruptibleCalls()
        self._waiting: GlooWorkHandle | None = None
        self.health.attach(self, self._place, self._interrupt)

    @classmethod
    def open(cls, opening: Opening) -> GlooTransport:
        """Connect this rank with all others.

        Raises `DeadlineError` that names the ranks which did not arrive, or the addresses that could not be reached.
        """
        opening.name = opening.name or cls.name
        rank, timeout_s, deadline, control = opening.rank, opening.timeout_s, opening.until, opening.control
        opened = f"rank {rank} opened a ring of {opening.world_size}: "
        try:
            mine = bounded(
                lambda: find_address(opening.store, opening.interface or ""),
                deadline.plus(GRACE_S),
                f"the name of {host_of(opening.store)} is not resolved within {timeout_s} s",
            )
            # Before connecting, which waits for all: so an error can tell who is missing.
            addresses = [Address.parse(text) for text in control.gather("arrived", mine.text(), deadline)]
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
            # The store's host may stop meanwhile, and gloo's own deadline does not bound its calls of the store.
            group = bounded(lambda: _connect(opening, addresses[rank]), deadline.plus(GRACE_S), late)
        except RuntimeError as error:
            try:
                control.until(Deadline(PROBE_S)).holds("arrived/0")
            except DeadlineError as unanswered:
                raise DeadlineError(f"{opened}{unanswered}") from error
            raise DeadlineError(late) from error
        try:
            # A rank that went on and closed would take connections away from one that still makes its own.
            control.combine("connected", b"", lambda every: b"", deadline)
        except DeadlineError as error:
            raise DeadlineError(opened + str(error).removeprefix(f"rank {rank}: ")) from error
        return cls(opening, group)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of `nbytes` on CPU, uninitialised."""
        self._check_open()
        return torch.empty(nbytes, dtype=torch.uint8)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> GlooWorkHandle:
        """See `Transport.exchange`. Raises `InputError`, `ClosedError`, `PeerLostError`."""
        posted = operations(_Operation, self.rank, self.world_size, self.device, sends, recvs)
        return self._post(posted, DATA_LANE, "")

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport.all_gather_bytes`. The n-th call of every rank meets the n-th of the others; any length.

        A head of fixed size holds the length and what fits of the payload; the rest, where there is one, follows.
        """
        others = [peer for peer in range(self.world_size) if peer != self.rank]
        label = f"all-gather {self._all_gathers}"
        self._all_gathers += 1
        # head:  | length, 8 bytes | payload, up to 248 bytes |     rest:  what is left of a longer payload
        framed = len(payload).to_bytes(LENGTH_BYTES, "little") + payload
        framed += bytes(max(HEAD_BYTES - len(framed), 0))
        sent = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        answers = {peer: torch.empty(HEAD_BYTES, dtype=torch.uint8) for peer in others}
        self._swap(others, sent[:HEAD_BYTES], answers, label)

        # All heads are here, so this rank knows what each other still sends.
        lengths = {peer: int.from_bytes(answers[peer][:LENGTH_BYTES].numpy().tobytes(), "little") for peer in others}
        rests = {
            peer: torch.empty(max(lengths[peer] + LENGTH_BYTES - HEAD_BYTES, 0), dtype=torch.uint8) for peer in others
        }
        self._swap(others, sent[HEAD_BYTES:], rests, label)
        payloads = {self.rank: bytes(payload)}
        for peer in others:
            whole = torch.cat([answers[peer], rests[peer]])
            payloads[peer] = whole[LENGTH_BYTES : LENGTH_BYTES + lengths[peer]].numpy().tobytes()
        return [payloads[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """See `Transport.close`. A peer that still waits for this rank gets `PeerLostError`."""
        if self._end is None:
            # Before the connections fall, so that a peer that still waits finds who closed.
            self.health.closed = True
            self.opening.control.leave()
            self.record.over = True
            self._drop(ClosedError(f"rank {self.rank} closed its ring"))

    def leave_to_parent(self) -> None:
        """See `ProcessBound`. The destructors of gloo need threads that the child does not have."""
        for thing in (self._group, *(operation.work for operation in self._in_flight)):
            never_destroy(thing)
        super().leave_to_parent()

    def _swap(self, peers: list[int], sent: torch.Tensor, received: dict[int, torch.Tensor], label: str) -> None:
        """Send one buffer to all `peers` and receive one from each."""
        sends = [Message(peer, sent, label) for peer in peers]
        recvs = [Message(peer, received[peer], label) for peer in peers]
        posted: list[_Operation] = operations(_ControlOperation, self.rank, self.world_size, self.device, sends, recvs)
        self._post(posted, CONTROL_LANE, f" in {label}").wait()

    def _post(self, posted: list[_Operation], lane: int, where: str) -> GlooWorkHandle:
        """Hand operations to gloo, which keeps the order of each pair of ranks and direction."""
        self._check_open()
        if posted:  # a rank that fails after its last message does not undo what has arrived
            self._check_cause(where)
        parts = tuple(operation.record() for operation in posted)
        # What sends and receives nothing is no exchange, and is not recorded.
        flight = self.record.begin(lane, parts, self.name) if parts else Flight(0, lane, parts)
        handle = GlooWorkHandle(self, posted, flight, where)
        for operation in posted:
            try:
                # No name may hold the group here: an error keeps this frame, and with it the connections.
                operation.work = (self._group.send if operation.sends else self._group.recv)(  # type: ignore[union-attr]
                    [operation.buffer.detach()], operation.peer, operation.tag
                )
            except RuntimeError as error:
                raise self._failure(operation, handle, error, None) from error
            self._in_flight.add(operation)
        flight.state, flight.started_s = RUNNING, time.time()
        return handle

    def _finish(self, handle: GlooWorkHandle, until: float | None = None) -> None:
        """Wait for every operation; the first that fails ends this transport."""
        self._check_open()
        # One deadline for all operations of the exchange, not one for each.
        deadline = until if until is not None else time.monotonic() + self.opening.timeout_s
        self._waiting = handle
        self._check_cause(handle.where)  # a cause that is published after this interrupts the wait
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
        # Only when all have arrived: those of a failed exchange are dropped by `_drop`.
        self._in_flight.difference_update(handle.operations)
        handle.flight.state, handle.flight.done_s = DONE, time.time()

    def _check_cause(self, where: str) -> None:
        """End this transport if another rank has published a cause. Raises `PeerLostError`."""
        if (cause := self.health.cause) is not None:
            raise self._failed(PeerLostError(f"rank {self.rank} must stop{where}: {cause}"))

    def _failure(
        self, failed: _Operation, handle: GlooWorkHandle, error: RuntimeError, deadline: float | None
    ) -> TransportError:
        """End this transport, and say why as well as can be known."""
        handle.flight.state = FAILED
        kind: type[TransportError] = PeerLostError
        if deadline is not None and time.monotonic() >= deadline:
            kind = DeadlineError
            # Asked before the heartbeats, which take time in which more may arrive.
            pending = [operation for operation in handle.operations if _unfinished(operation)]
            late = sorted({operation.peer for operation in pending})
            message = (
                f"rank {self.rank}{handle.where}: no answer from ranks {late} within {self.opening.timeout_s} s; "
                f"pending: {listed(pending)}; {self.health.explain(late, waited_s=self.opening.timeout_s)}"
            )
        else:
            waited_s = 0.0 if deadline is None else self.opening.timeout_s - (deadline - time.monotonic())
            said = self.health.explain(
                [failed.peer], waited_s=waited_s, timeout_s=self.opening.timeout_s, lost=(failed.peer, str(error))
            )
            message = f"{failed}{handle.where}: {said}"
        message += f"; {words}" if (words := descriptor_shortage()) else ""
        return self._failed(kind(message))

    def _place(self) -> Place:
        """Where this rank is. Called from the health thread."""
        at, waiting = self.record.where(), self._waiting
        if waiting is None:
            return Place.make(at, self.health.call)
        return Place.make(at, self.health.call, Waits.PEERS, {operation.peer for operation in waiting.operations})

    def _interrupt(self, cause: str) -> None:
        """End the wait of the thread that uses this transport, from the health thread: a rank has published a cause.

        Gloo has no call for that. A wait that times out closes its connection, and that ends every wait on it.
        """
        if (waiting := self._waiting) is not None and (group := self._group) is not None:
            for peer in {operation.peer for operation in waiting.operations}:
                with suppress(RuntimeError):
                    group.recv(  # type: ignore[attr-defined]
                        [torch.empty(1, dtype=torch.uint8)], peer, INTERRUPT_TAG
                    ).wait(INTERRUPT)

    def _fail(self, cause: BaseException) -> None:
        """Publish, then drop: a neighbor that wakes finds the cause."""
        self.health.publish(cause)
        self._drop(cause)

    def _drop(self, end: BaseException) -> None:
        """Let go of everything that keeps a connection open; gloo then wakes the neighbors."""
        self._end = end
        # Every handle, also of exchanges that nobody has waited for.
        for operation in self._in_flight:
            operation.work = None
        self._group = None
        self.health.detach(self, END_S if isinstance(end, ClosedError) else STOP_S)


def _unfinished(operation: _Operation) -> bool:
    """Whether an operation is still pending after the deadline. Asking may end it, so the ring must end too."""
    try:
        operation.wait(0.0)
    except RuntimeError:
        return True
    return False


def _connect(opening: Opening, address: Address) -> dist.ProcessGroupGloo:
    """Gloo's group, connected. Waits for the other ranks, and without end for a store whose host is stopped."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = devices(address.own, address.interface)
    options._timeout = timedelta(seconds=max(opening.until.left_s, 0.1))
    store = opening.store.clone()  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, opening.rank, opening.world_size, options)

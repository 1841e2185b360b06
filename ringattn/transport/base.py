"""The contract of a transport, and the checks that every transport makes on its messages.

A transport moves bytes between the ranks of one ring. Guarantees: all messages of one `exchange` are in flight at the
same time. The k-th message sent to a peer is received by the peer's k-th receive from this rank. Every wait has a
deadline. A failure raises an error that names rank, peer, label and bytes, on every rank. An invalid message raises
`InputError` before any message of its exchange is posted. A transport may run a rank's exchanges one after another, so
no exchange may depend on an exchange that is started later.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist

from ringattn.errors import ClosedError, DisagreementError, InputError, RingError, TransportError, UnsupportedError
from ringattn.observe.flight import FlightRecord, MessageRecord, leave_records
from ringattn.transport.control_store import GRACE_S, ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.health.health import Health
from ringattn.transport.location import Location

COMPARED = "compared"
"""See `Transport.announce`."""


class Message(NamedTuple):
    """A buffer to send to or to receive from one peer. `buffer` is contiguous; `label` describes it in errors."""

    peer: int
    buffer: torch.Tensor
    label: str = ""


class WorkHandle(Protocol):
    """An exchange in flight."""

    @property
    def arrived_s(self) -> float | None:
        """When the last message was sent or received, in seconds of `time.perf_counter()`, or None if unknown.

        Read this time after `wait`. It is unknown on a device, where completion follows stream order.
        """
        ...

    def wait(self) -> None:
        """Wait until every message of the exchange has been sent and received.

        Raises `DeadlineError` after the transport's timeout and `PeerLostError` if a peer fails.
        On a device, the call does not block the host: it orders the current stream after the exchange.
        """
        ...


class Hop(Protocol):
    """An exchange that is bound to its buffers once and can be started repeatedly, one start at a time."""

    def start(self) -> WorkHandle:
        """Start all sends and receives at once, like `Transport.exchange`."""
        ...


class Transport(Protocol):
    """One rank's end of the ring. Only one thread at a time may use it."""

    name: str
    rank: int
    world_size: int
    device: torch.device
    stream: Any
    """The device queue that exchanges run on; None if the host moves the bytes."""
    locations: tuple[Location, ...]
    """The location of each rank, by rank, as gathered at opening; empty if unknown."""

    @property
    def sm_margin(self) -> int:
        """The number of multiprocessors that an exchange occupies. Kernels should leave them free while it runs."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a flat uint8 tensor of `nbytes` that `exchange` can send from and receive into."""
        ...

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> WorkHandle:
        """Start all sends and receives at once. Buffers belong to the transport until the handle's `wait` returns."""
        ...

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Hop:
        """Check and prepare an exchange without starting it."""
        ...

    def announce(self, call: int, digest: bytes, description: str, gradients: str = "") -> bool:
        """Announce this rank's call number `call`. `digest`: a hash of the call. `description`: its text, for errors.

        `gradients`: `COMPARED` if the ranks themselves compare this call, so the transport need not compare it.
        Otherwise `gradients` says whether this rank needs gradients; ranks that differ in this are reported. Returns
        True if the transport notices in its waits when other ranks make a different call. Then a call that the ranks
        have compared once need not be compared again.
        """
        ...

    def drain(self) -> None:
        """Wait until all exchanges so far are complete, also on a device. Raises the ring's failure, if it failed."""
        ...

    def begin_pass(self) -> None:
        """On a device, order later work of the current stream after the last pass, whichever stream it ran on."""
        ...

    def end_pass(self) -> None:
        """Mark the end of the pass on the current stream. Called before the next pass begins."""
        ...

    def replay(self, run: Callable[[], None]) -> None:
        """Call `run`, which launches a captured CUDA graph of this ring's passes, under one deadline for all of them.

        Raises `UnsupportedError` on transports without graphs.
        """
        ...

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload, in rank order. The control plane carries this small all-gather."""
        ...

    def abort(self, cause: BaseException) -> None:
        """Publish `cause` as the cause of failure, close all connections and refuse further use. Never raises.

        Only the first call has an effect.
        """
        ...

    def close(self) -> None:
        """Close the ring gracefully. Idempotent. Raises a failure that no call has raised yet."""
        ...


@dataclass
class Opening:
    """The inputs with which one rank opens a transport. If a rank opens two transports, both share this object.

    Args:
        store: A fresh store, used by this ring only.
        timeout_s: Every wait of the open ring ends within this time.
        flight_dir: The folder for this rank's flight record after a failure, created if needed. None: no record.
        interface: The network interface that the user named (GLOO_SOCKET_IFNAME). Empty: the interface on the route to
            the store's host. None: neighbours exchange no heartbeat datagrams.
        job_size: The number of ranks that share the store. None: the ranks of this ring.
        locations: The location of every rank; empty if unknown.
        deadline: The deadline of the opening. None: `timeout_s` from now.
        name: The transport's name, for the flight record.
    """

    store: dist.Store
    rank: int
    world_size: int
    timeout_s: float
    flight_dir: Path | None = None
    interface: str | None = ""
    job_size: int | None = None
    locations: Sequence[Location] = ()
    deadline: Deadline | None = None
    name: str = ""

    def __post_init__(self) -> None:
        self.until = self.deadline or Deadline(self.timeout_s)

    @cached_property
    def control(self) -> ControlStore:
        """This rank's client of the store."""
        return ControlStore(self.store, self.rank, self.world_size, self.timeout_s)

    def leave_store(self) -> None:
        """Close this rank's connection to the store, for a ring that needs it only to open.

        Heartbeats use another connection.
        """
        for name in ("store", "control"):
            self.__dict__.pop(name, None)

    @cached_property
    def health(self) -> Health:
        """This rank's health monitor, shared by all its transports."""
        control = self.control.until(self.until.plus(GRACE_S))
        return Health(control, job_size=self.job_size, interface=self.interface)

    @cached_property
    def record(self) -> FlightRecord:
        """This rank's flight record, shared by all its transports. On SIGTERM it is written to `flight_dir`."""
        record = FlightRecord(self.rank, self.world_size, self.name)
        leave_records(record, self.flight_dir)
        return record


class Rebound:
    """A `Hop` that only stores its messages, for transports that gain nothing from binding."""

    def __init__(self, transport: Transport, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        self._transport, self._sends, self._recvs = transport, sends, recvs

    def start(self) -> WorkHandle:
        """See `Hop.start`."""
        return self._transport.exchange(self._sends, self._recvs)


FORKED = "a forked process cannot use the ring of its parent; open a ring after the fork"


class ProcessBound:
    """Base of rings and transports, which a forked child must not use.

    Guarantees: in a child of `os.fork` every use of the parent's ring or transport raises `ClosedError`, close and
    abort do nothing, and no destructor needs a thread that only the parent has. The parent continues unaffected.
    The fork marks every object, so calls need not look up the process id.
    """

    rank: Any
    forked = False
    """Whether this object is the copy in a forked child."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        instance = super().__new__(cls)
        _alive.add(instance)
        return instance

    def check_process(self) -> None:
        """Raise `ClosedError` in a forked child."""
        if self.forked:
            raise ClosedError(f"rank {self.rank}: {FORKED}")

    def leave_to_parent(self) -> None:
        """Detach from the parent's connections. Called in a forked child before anything else runs there."""


def never_destroy(target: object) -> None:
    """Keep the destructor of `target` from ever running in this process, also at its exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(target))


_alive: WeakSet[ProcessBound] = WeakSet()


def _mark_all() -> None:
    for bound in list(_alive):
        bound.forked = True
        bound.leave_to_parent()


os.register_at_fork(after_in_child=_mark_all)


class Ending(ProcessBound):
    """Base of transports that store why they have ended. In a forked child, the parent's transport counts as ended."""

    rank: int
    _end: BaseException | None = None

    def _check_open(self) -> None:
        """Raise `ClosedError` if the transport has ended or this is a forked child."""
        self.check_process()
        if self._end is not None:
            raise ClosedError(f"rank {self.rank}: this ring has ended ({self._end}); open a new ring") from self._end

    def leave_to_parent(self) -> None:
        """See `ProcessBound`. The transport counts as ended, so close and abort do nothing."""
        self._end = self._end or ClosedError(FORKED)

    def close_at_exit(self) -> None:
        """Close gracefully if the ring is still open when the process ends."""
        raise NotImplementedError


closed_at_exit: WeakValueDictionary[int, Ending] = WeakValueDictionary()
"""Open transports on devices by `id`, in the order in which they opened."""


@atexit.register
def _close_all() -> None:
    """Close the open rings, newest first, so that a ring over two transports closes before these transports."""
    for ring in reversed(list(closed_at_exit.values())):
        with suppress(RuntimeError, OSError):
            ring.close_at_exit()


def close_dropped(transport: Transport) -> None:
    """Close the transport of a garbage-collected ring. This is the ring's finalizer, which returns at once."""

    # Close on another thread: a garbage collection may run while any lock is held, or on a thread that `close` joins.
    def close() -> None:
        with suppress(RingError):  # no later call could raise it
            transport.close()

    # `Thread.start` takes a lock of `threading` that this thread may hold already, so a new thread calls it.
    thread = threading.Thread(target=close, name=f"ringattn-dropped-{transport.rank}", daemon=True)
    _thread.start_new_thread(thread.start, ())


AnyFailure = TypeVar("AnyFailure", bound=TransportError | DisagreementError)


class HostTransport(Ending):
    """Common parts of transports whose `wait` blocks the host until the bytes have arrived."""

    stream: Any = None
    locations: tuple[Location, ...] = ()

    @property
    def sm_margin(self) -> int:
        """0, because these transports run nothing on a device."""
        return 0

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Hop:
        """See `Transport.bind`; the messages are checked when the hop starts."""
        return Rebound(self, sends, recvs)  # type: ignore[arg-type]

    def announce(self, call: int, digest: bytes, description: str, gradients: str = "") -> bool:
        """See `Transport.announce`. Return False: a host transport does not notice different calls."""
        return False

    def begin_pass(self) -> None:
        """See `Transport.begin_pass`. The host runs passes one after another, so nothing is needed."""

    def end_pass(self) -> None:
        """See `Transport.end_pass`."""

    def replay(self, run: Callable[[], None]) -> None:
        """See `Transport.replay`."""
        raise UnsupportedError("passes on the host cannot be captured as CUDA graphs; use transport='nccl'")

    def drain(self) -> None:
        """See `Transport.drain`. Every wait has already blocked until its bytes arrived."""


class ProcessTransport(HostTransport):
    """A host transport between processes, each of which writes a flight record when it fails."""

    def __init__(self, opening: Opening) -> None:
        self.rank, self.world_size, self.locations = opening.rank, opening.world_size, tuple(opening.locations)
        self.opening, self.health, self.record = opening, opening.health, opening.record

    def announce(self, call: int, digest: bytes, description: str, gradients: str = "") -> bool:
        """See `Transport.announce`. Heartbeats carry the number of this rank's current call."""
        self.health.call = call
        return False

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`. The path of the flight record, if one is written, is added to `cause` as a note."""
        if self._end is None:
            # A ring that was closed has not failed and writes no record.
            if not isinstance(cause, ClosedError) and (note := self._write_record(cause)):
                cause.add_note(note)
            self._fail(cause)

    def _fail(self, cause: BaseException) -> None:
        """Notify the other ranks, and release everything."""
        raise NotImplementedError

    def _failed(self, error: AnyFailure) -> AnyFailure:
        """End this transport. Return the error, extended by the path of the flight record."""
        note = self._write_record(error)
        failure = type(error)(f"{error}; {note}") if note else error
        self._fail(failure)
        return failure

    def _write_record(self, cause: BaseException) -> str:
        """Write the flight record if there is a folder for it. Return a sentence with its path, or an empty string."""
        folder = self.opening.flight_dir
        if folder is None:
            return ""
        try:
            return f"flight record of rank {self.rank}: {self.record.dump(folder, f'{type(cause).__name__}: {cause}')}"
        except OSError as error:
            return f"rank {self.rank} could not write its flight record: {error}"


class Operation:
    """One end of one message: `rank` sends to or receives from `message.peer`."""

    def __init__(self, rank: int, sends: bool, message: Message) -> None:
        self.rank = rank
        self.sends = sends
        self.peer, self.buffer, self.label = message

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.buffer.numel() * self.buffer.element_size()

    def record(self) -> MessageRecord:
        """Return the operation as the flight record stores it."""
        op = "send" if self.sends else "recv"
        return MessageRecord(op, self.peer, self.nbytes, self.buffer.data_ptr(), self.label)

    def __str__(self) -> str:
        verb = "send to" if self.sends else "recv from"
        return f"rank {self.rank} {verb} rank {self.peer} '{self.label}' ({self.nbytes} bytes of {self.buffer.dtype})"


AnyOperation = TypeVar("AnyOperation", bound=Operation)


def operations(
    make: Callable[[int, bool, Message], AnyOperation],
    rank: int,
    world_size: int,
    device: torch.device,
    sends: Sequence[Message],
    recvs: Sequence[Message],
) -> list[AnyOperation]:
    """Return the operations of one exchange, receives first, each created by `make(rank, sends, message)`.

    Messages of zero bytes are left out; the peer leaves them out too. Raises `InputError` for a peer that is this rank
    or not a rank of the ring, and for a buffer that is not contiguous or not on `device`.
    """
    candidates = [make(rank, False, message) for message in recvs] + [make(rank, True, message) for message in sends]
    for operation in candidates:
        if operation.peer == rank:
            raise InputError(f"{operation}: a rank cannot exchange with itself")
        if not 0 <= operation.peer < world_size:
            raise InputError(f"{operation}: the ring has ranks 0 to {world_size - 1}")
        if not operation.buffer.is_contiguous():
            raise InputError(f"{operation}: the buffer is not contiguous; pack it first")
        if operation.buffer.device.type != device.type:
            raise InputError(f"{operation}: the buffer is on {operation.buffer.device}, the transport on {device}")
    return [operation for operation in candidates if operation.nbytes]


def listed(pending: Sequence[Operation]) -> str:
    """Describe the operations in one line of text."""
    return "; ".join(str(operation) for operation in pending) or "nothing pending"

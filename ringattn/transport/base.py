"""The contract of a transport, and what every transport checks about its messages.

A transport moves bytes between the ranks of one ring. Guarantees: all messages of one `exchange` are in flight at once;
the k-th message sent to a peer meets the k-th message received from it; every wait has a deadline; a failure is an
error that names rank, peer, label and bytes, on every rank; a message that no transport could carry raises `InputError`
before anything is posted. A transport may run the exchanges of a rank one after another, so no exchange may need one
that is started later.
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
    """One buffer to or from one peer. `buffer` is contiguous; `label` says what it is in errors and traces."""

    peer: int
    buffer: torch.Tensor
    label: str = ""


class WorkHandle(Protocol):
    """An exchange in flight."""

    @property
    def arrived_s(self) -> float | None:
        """When the last message left or arrived, in seconds of `time.perf_counter()`; None where that is unknown.

        Read it after `wait`. It is unknown on a device, where the order of streams decides.
        """
        ...

    def wait(self) -> None:
        """Return when every message of the exchange has left and arrived.

        Raises `DeadlineError` after the transport's timeout and `PeerLostError` when a peer fails.
        On a device, orders the current stream after the exchange instead of blocking the host.
        """
        ...


class Hop(Protocol):
    """An exchange that was bound to its buffers once and can be started again and again, one at a time."""

    def start(self) -> WorkHandle:
        """Start all sends and receives at once, like `Transport.exchange`."""
        ...


class Transport(Protocol):
    """One rank's end of the ring. Used by one thread at a time."""

    name: str
    rank: int
    world_size: int
    device: torch.device
    stream: Any
    """The queue of the device that exchanges run on; None where the host moves the bytes."""
    locations: tuple[Location, ...]
    """Where each rank runs, by rank, as opening has gathered it; empty where that is not known."""

    @property
    def sm_margin(self) -> int:
        """Multiprocessors of the device that an exchange works on, which kernels should leave free meanwhile."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of `nbytes` that `exchange` can send from and receive into."""
        ...

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> WorkHandle:
        """Start all sends and receives at once. Buffers belong to the transport until the handle's `wait` returns."""
        ...

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Hop:
        """Check and prepare an exchange without starting it."""
        ...

    def announce(self, call: int, digest: bytes, words: str, gradients: str = "") -> bool:
        """Say that this rank makes its `call`-th call, described by `digest` and, for errors, by `words`.

        `gradients`: `COMPARED` if the ranks compare this call now, so that no transport has to; else whether this rank
        needs gradients, of which a difference is reported as such.
        True if the transport itself notices, at its waits, when other ranks make another call; a call
        that the ranks have checked once need not be checked again.
        """
        ...

    def drain(self) -> None:
        """Return when everything exchanged so far has arrived, also on a device. Raises what has failed."""
        ...

    def begin_pass(self) -> None:
        """On a device: later work of the current stream follows the last pass, on whichever stream that ran."""
        ...

    def end_pass(self) -> None:
        """The pass is on the current stream as far as it came. Called before the next one begins."""
        ...

    def replay(self, run: Callable[[], None]) -> None:
        """Call `run`, which launches a captured CUDA graph of passes of this ring, under one deadline for all of it.

        Raises `UnsupportedError` where there are no graphs.
        """
        ...

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank: a small all-gather on the control plane, with the deadline."""
        ...

    def abort(self, cause: BaseException) -> None:
        """Publish `cause` as the reason, drop every connection and refuse further use. Idempotent, never raises."""
        ...

    def close(self) -> None:
        """Leave in good order. Idempotent. Raises a failure that no call has raised yet."""
        ...


@dataclass
class Opening:
    """One rank's end of a ring that opens: what every transport needs. Two transports of one rank share it.

    Args:
        store: Fresh, of this ring alone.
        timeout_s: Every wait of the open ring ends within it.
        flight_dir: The folder for this rank's flight record after a failure, made if need be. None: no record is left.
        interface: The network interface that the user named (GLOO_SOCKET_IFNAME). Empty: the one that routes to the
            store's host. None: the neighbours exchange no datagrams.
        job_size: Ranks that share the store. None: those of this ring.
        locations: Of all ranks; empty where they are not known.
        deadline: Of the opening. None: `timeout_s` from now.
        name: Of the transport, for the flight record.
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
        """This rank's view of the store."""
        return ControlStore(self.store, self.rank, self.world_size, self.timeout_s)

    def leave_store(self) -> None:
        """Close the connection to the store, for a ring that needs it only to open: heartbeats have their own."""
        for name in ("store", "control"):
            self.__dict__.pop(name, None)

    @cached_property
    def health(self) -> Health:
        """This rank's liveness, for all its transports."""
        control = self.control.until(self.until.plus(GRACE_S))
        return Health(control, job_size=self.job_size, interface=self.interface)

    @cached_property
    def record(self) -> FlightRecord:
        """This rank's flight record, for all its transports. On SIGTERM it is left in `flight_dir`."""
        record = FlightRecord(self.rank, self.world_size, self.name)
        leave_records(record, self.flight_dir)
        return record


class Rebound:
    """A `Hop` for transports that gain nothing from binding: it remembers the messages."""

    def __init__(self, transport: Transport, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        self._transport, self._sends, self._recvs = transport, sends, recvs

    def start(self) -> WorkHandle:
        """See `Hop.start`."""
        return self._transport.exchange(self._sends, self._recvs)


FORKED = "a forked process cannot use the ring of its parent; open a ring after the fork"


class ProcessBound:
    """Base of rings and transports, which a forked child refuses to use.

    Guarantees: in a child made by `os.fork` every use of a ring or a transport of the parent raises `ClosedError`, its
    close and its abort do nothing, and no destructor needs a thread that only the parent has; the parent goes on.
    The fork marks every object, so no call has to look up the process id.
    """

    rank: Any
    forked = False
    """Whether this is the copy of a forked child."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        _alive.add(made)
        return made

    def check_process(self) -> None:
        """Raise `ClosedError` in a forked child."""
        if self.forked:
            raise ClosedError(f"rank {self.rank}: {FORKED}")

    def leave_to_parent(self) -> None:
        """Called in a forked child before anything else runs there: nothing may touch the parent's connections."""


def never_destroy(thing: object) -> None:
    """Keep the destructor of `thing` from running in this process, at its end either."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_alive: WeakSet[ProcessBound] = WeakSet()


def _mark_all() -> None:
    for bound in list(_alive):
        bound.forked = True
        bound.leave_to_parent()


os.register_at_fork(after_in_child=_mark_all)


class Ending(ProcessBound):
    """Why a transport has ended, once it has. The transport of a parent has ended in a forked child."""

    rank: int
    _end: BaseException | None = None

    def _check_open(self) -> None:
        """Raise `ClosedError` if it has ended, or if this is a forked child."""
        self.check_process()
        if self._end is not None:
            raise ClosedError(f"rank {self.rank}: this ring has ended ({self._end}); open a new one") from self._end

    def leave_to_parent(self) -> None:
        """See `ProcessBound`: nothing is left to close or to abort."""
        self._end = self._end or ClosedError(FORKED)

    def close_at_exit(self) -> None:
        """Close in good order when the process ends with the ring open."""
        raise NotImplementedError


closed_at_exit: WeakValueDictionary[int, Ending] = WeakValueDictionary()
"""Transports on devices that are open, by their `id`, in the order in which they opened."""


@atexit.register
def _close_all() -> None:
    """Close the rings that are still open: a ring over two transports before these. In a fork they have ended."""
    for ring in reversed(list(closed_at_exit.values())):
        with suppress(RuntimeError, OSError):
            ring.close_at_exit()


def close_dropped(transport: Transport) -> None:
    """Close the transport of a ring that was garbage collected. The finalizer of the ring, which returns at once."""

    # On a thread: a collection may run inside any lock, and on a thread that closing waits for.
    def close() -> None:
        with suppress(RingError):  # no call is left that could raise it
            transport.close()

    # `Thread.start` takes a lock of `threading`, inside which a collection may run, so another thread calls it.
    thread = threading.Thread(target=close, name=f"ringattn-dropped-{transport.rank}", daemon=True)
    _thread.start_new_thread(thread.start, ())


AnyFailure = TypeVar("AnyFailure", bound=TransportError | DisagreementError)


class HostTransport(Ending):
    """What transports have in common whose `wait` holds the host until the bytes are there."""

    stream: Any = None
    locations: tuple[Location, ...] = ()

    @property
    def sm_margin(self) -> int:
        """None: nothing of theirs runs on a device."""
        return 0

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Hop:
        """See `Transport.bind`; the messages are checked when the hop starts."""
        return Rebound(self, sends, recvs)  # type: ignore[arg-type]

    def announce(self, call: int, digest: bytes, words: str, gradients: str = "") -> bool:
        """See `Transport.announce`: such a transport notices nothing."""
        return False

    def begin_pass(self) -> None:
        """See `Transport.begin_pass`: the host runs one after another."""

    def end_pass(self) -> None:
        """See `Transport.end_pass`."""

    def replay(self, run: Callable[[], None]) -> None:
        """See `Transport.replay`."""
        raise UnsupportedError("passes on the host cannot be captured as CUDA graphs; use transport='nccl'")

    def drain(self) -> None:
        """See `Transport.drain`: whatever has been waited for is there."""


class ProcessTransport(HostTransport):
    """A host transport between processes, each of which leaves a flight record when it fails."""

    def __init__(self, opening: Opening) -> None:
        self.rank, self.world_size, self.locations = opening.rank, opening.world_size, tuple(opening.locations)
        self.opening, self.health, self.record = opening, opening.health, opening.record

    def announce(self, call: int, digest: bytes, words: str, gradients: str = "") -> bool:
        """See `Transport.announce`. The heartbeat says which call this rank makes."""
        self.health.call = call
        return False

    def abort(self, cause: BaseException) -> None:
        """See `Transport.abort`. Where a flight record was left is a note of `cause`."""
        if self._end is None:
            # A ring that was closed has not failed and leaves no record.
            if not isinstance(cause, ClosedError) and (left := self._recorded(cause)):
                cause.add_note(left)
            self._fail(cause)

    def _fail(self, cause: BaseException) -> None:
        """Tell the other ranks, and let go of everything."""
        raise NotImplementedError

    def _failed(self, error: AnyFailure) -> AnyFailure:
        """End this transport. Returns the error, with where the flight record lies."""
        left = self._recorded(error)
        failure = type(error)(f"{error}; {left}") if left else error
        self._fail(failure)
        return failure

    def _recorded(self, cause: BaseException) -> str:
        """Leave the flight record where one is wanted. Returns where it lies, empty where none is wanted."""
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
        """As the flight record keeps it."""
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
    """The operations of one exchange, receives first, made by `make(rank, sends, message)`.

    Messages of zero bytes are left out on both sides alike. Raises `InputError` for a peer that is this rank or no rank
    of the ring, and for a buffer that is not contiguous or not on `device`.
    """
    found = [make(rank, False, message) for message in recvs] + [make(rank, True, message) for message in sends]
    for operation in found:
        if operation.peer == rank:
            raise InputError(f"{operation}: a rank cannot exchange with itself")
        if not 0 <= operation.peer < world_size:
            raise InputError(f"{operation}: the ring has ranks 0 to {world_size - 1}")
        if not operation.buffer.is_contiguous():
            raise InputError(f"{operation}: the buffer is not contiguous; pack it first")
        if operation.buffer.device.type != device.type:
            raise InputError(f"{operation}: the buffer is on {operation.buffer.device}, the transport on {device}")
    return [operation for operation in found if operation.nbytes]


def listed(pending: Sequence[Operation]) -> str:
    """The operations, in one line."""
    return "; ".join(str(operation) for operation in pending) or "nothing pending"

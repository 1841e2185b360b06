"""A ring whose ranks are processes of one machine: each receiver copies straight out of the sender's memory.

A start only says where its messages lie. The receiver copies them when it waits, once and without a helper thread, and
says that it has; the sender's wait returns when all receivers have. So a rank that computes between start and wait
holds up who waits for it, as a rank that comes late does.
Guarantees: bits are kept; every wait of a rank copies all that has come for it, in the order of each pair, so no order
of waits is a deadlock; both ends of a message must agree on bytes, dtype and label, or all ranks raise
`DisagreementError`; a copy counts only if the sender had neither failed nor closed when it was done; a rank that is
killed or stopped is named by the others, and no other rank is; a transport that has raised a failure is dead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from ringattn.errors import ClosedError, DisagreementError, TransportError, UnsupportedError
from ringattn.observe.flight import CONTROL_LANE, DONE, FAILED, RUNNING, Flight, MessageRecord
from ringattn.transport.base import Message, Opening, Operation, ProcessTransport, listed, operations
from ringattn.transport.health.verdict import Place, Waits
from ringattn.transport.location import Location
from ringattn.transport.shared.group import SharedGroup
from ringattn.transport.shared.page import ARRIVAL, CREDIT, FREED, GATHER_BYTES, LOG_ENTRIES, Entry, Segment, subject

DATA_LANE = 0


class _Operation(Operation):
    """One end of a message and what its log entry says, made once for all starts."""

    def __init__(self, rank: int, sends: bool, message: Message) -> None:
        super().__init__(rank, sends, message)
        self.buffer = self.buffer.detach()

    def prepare(self, arenas: Arenas) -> None:
        """Find the buffer. Not before all messages of the exchange have been checked."""
        self.address = self.buffer.data_ptr()
        self.size = self.nbytes
        self.place = arenas.place(self.address, self.size) if self.sends else None
        arena, offset = self.place or (0, 0)
        self.entry = Entry(0, arena, offset, self.size, str(self.buffer.dtype), subject(self.label, self.peer))
        self.packed = self.entry.packed()


class _Started:
    """An operation that has been started, and not yet taken."""

    __slots__ = ("handle", "number", "operation", "stage")

    def __init__(self, operation: _Operation, number: int, handle: ShmWorkHandle) -> None:
        self.operation, self.number, self.handle = operation, number, handle
        self.stage: tuple[int, Segment] | None = None


class ShmWorkHandle:
    """The operations of one exchange."""

    arrived_s = None  # bytes move inside waits, and nobody looks before

    def __init__(self, transport: ShmTransport, flight: Flight) -> None:
        self._transport = transport
        self.flight = flight
        self.pending: dict[_Started, None] = {}
        self._waited = False

    def taken(self, started: _Started) -> None:
        """One of its messages has left or arrived."""
        del self.pending[started]
        if not self.pending:
            self.flight.state, self.flight.done_s = DONE, time.time()

    def wait(self, until: float | None = None) -> None:
        """See `WorkHandle.wait`; `DisagreementError` where the ends of a message differ. A second does nothing.

        `until`: the deadline on the monotonic clock.
        """
        if not self._waited:
            self._transport._finish(self, until)
            self._waited = True


class ShmHop:
    """An exchange bound to its buffers."""

    def __init__(self, transport: ShmTransport, found: list[_Operation]) -> None:
        self._transport = transport
        for operation in found:
            operation.prepare(transport._arenas)
        self._recvs = [operation for operation in found if not operation.sends]
        self._sends = [operation for operation in found if operation.sends]
        self._parts = tuple(operation.record() for operation in found)

    def start(self) -> ShmWorkHandle:
        """See `Hop.start`. Raises `ClosedError`, `PeerLostError`."""
        return self._transport._start(self._sends, self._recvs, self._parts)


class ShmTransport(ProcessTransport):
    """One rank of a ring of processes that share memory."""

    name = "shm"
    device = torch.device("cpu")

    def __init__(self, opening: Opening, group: SharedGroup) -> None:
        """Takes over an open group; see `open`."""
        super().__init__(opening)
        self._group = group
        group.place = self._place
        self._all_gathers = 0
        self._awaited: Callable[[], Iterable[int]] | None = None
        self._arenas, self._imports = Arenas(group), Imports(group)
        ranks = group.ranks
        self._sent, self._received = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        self._incoming: dict[int, deque[_Started]] = {peer: deque() for peer in ranks}
        self._outgoing: dict[int, deque[_Started]] = {peer: deque() for peer in ranks}
        # Started, and not yet said: the log has no room before the receiver has taken older ones.
        self._unsaid: dict[int, deque[_Started]] = {peer: deque() for peer in ranks}
        self._send_logs = {peer: group.own.log(True, peer) for peer in ranks}
        self._recv_logs = {peer: group.own.log(False, peer) for peer in ranks}
        self._peer_logs = {peer: page.log(True, self.rank) for peer, page in group.pages.items()}
        self._arrivals = {peer: group.own.index(ARRIVAL, peer) for peer in ranks}
        self._credits = {peer: group.own.index(CREDIT, peer) for peer in ranks}

    @classmethod
    def open(cls, opening: Opening, members: Sequence[int] | None = None) -> ShmTransport:
        """Meet all ranks; a wait of the open ring needs no store.

        `members`: the only ranks that it exchanges with, None: all, whose locations are checked first.
        Raises `UnsupportedError` on all ranks where one cannot share memory, `DeadlineError` that names the ranks
        which did not arrive.
        """
        opening.name = opening.name or cls.name
        if members is None:
            # Shared pages join all ranks, so that the neighbours need no datagrams.
            opening = replace(opening, deadline=opening.until, interface=None, job_size=None)
            if why := obstacle(opening.locations):
                raise UnsupportedError(
                    f"rank {opening.rank}: transport='shm' needs one machine and one user: {why}; use gloo"
                )
        ring = cls(opening, SharedGroup.open(opening, members))
        if members is None:
            opening.leave_store()
        return ring

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of `nbytes` in memory that the other ranks can read. Raises `MemoryError`."""
        self._check_open()
        return self._arenas.tensor(nbytes)

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> ShmHop:
        """See `Transport.bind`."""
        return ShmHop(self, operations(_Operation, self.rank, self.world_size, self.device, sends, recvs))

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> ShmWorkHandle:
        """See `Transport.exchange`. Raises `InputError`, `ClosedError`, `PeerLostError`."""
        return self.bind(sends, recvs).start()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport.all_gather_bytes`. The n-th call of every rank meets the n-th of the others; any length."""
        self._check_open()
        until = time.monotonic() + self._group.timeout_s
        where = f"rank {self.rank} in all-gather {self._all_gathers}"
        # Both ends, or every answer would count as one that nobody took. An answer may have any length: its first part.
        others = [peer for peer in self._group.ranks if peer != self.rank]
        parts = tuple(MessageRecord(op, peer, GATHER_BYTES, 0, where) for op in ("send", "recv") for peer in others)
        flight = self.record.begin(CONTROL_LANE, parts, self.name)
        self._all_gathers += 1
        self._awaited = lambda: others
        try:
            answers = self._group.all_gather(payload, lambda: self._progress(until), lambda: where, until)
        except (TransportError, DisagreementError) as error:
            flight.state = FAILED
            raise self._failed(error) from error.__cause__
        finally:
            self._awaited = None
        flight.state, flight.done_s = DONE, time.time()
        return answers

    @property
    def group(self) -> SharedGroup:
        """The ranks that it exchanges with."""
        return self._group

    @property
    def under_way(self) -> bool:
        """Whether another rank may wait for this one to copy a message, or to say where one lies."""
        return any(self._incoming.values()) or any(self._unsaid.values())

    def copy_until(self, over: Callable[[], bool]) -> None:
        """Do what waits of this rank do for the others, until `over()`, asked when the rank rings itself.

        For a thread of its own, while the one that uses the transport is held elsewhere. What fails is left to that.
        """
        never = float("inf")

        def ready() -> bool:
            self._progress(time.monotonic() + self._group.timeout_s)
            return over()

        with suppress(TransportError, DisagreementError):
            self._group.hold(ready, tuple, lambda: f"rank {self.rank}", never)

    def close(self) -> None:
        """See `Transport.close`. A peer that still waits for this rank gets `PeerLostError`."""
        if self._end is None:
            self._group.leave()
            self.record.over = True
            self._drop(ClosedError(f"rank {self.rank} closed its ring"))

    def _start(
        self, sends: Sequence[_Operation], recvs: Sequence[_Operation], parts: tuple[MessageRecord, ...]
    ) -> ShmWorkHandle:
        self._check_open()
        try:
            self._group.check()
        except (TransportError, DisagreementError) as error:
            raise self._failed(error) from None
        # What sends and receives nothing is no exchange, and is not recorded.
        flight = self.record.begin(DATA_LANE, parts, self.name) if parts else Flight(0, DATA_LANE, parts)
        handle = ShmWorkHandle(self, flight)
        for operation in recvs:
            self._received[operation.peer] += 1
            started = _Started(operation, self._received[operation.peer], handle)
            handle.pending[started] = None
            self._recv_logs[operation.peer].write(started.number, operation.packed)
            self._incoming[operation.peer].append(started)
        for operation in sends:
            self._sent[operation.peer] += 1
            started = _Started(operation, self._sent[operation.peer], handle)
            handle.pending[started] = None
            self._unsaid[operation.peer].append(started)
            self._say(operation.peer)
        flight.state, flight.started_s = RUNNING, time.time()
        return handle

    def _say(self, peer: int) -> None:
        """Tell `peer` where the messages to it lie, as many as the log has room for."""
        unsaid, taken = self._unsaid[peer], self._group.own.words.load(self._credits[peer])
        while unsaid and unsaid[0].number <= taken + LOG_ENTRIES:
            started = unsaid.popleft()
            operation = started.operation
            packed = operation.packed
            if operation.place is None:
                started.stage = self._arenas.stage(operation.address, operation.size)
                packed = operation.entry._replace(arena=started.stage[0]).packed()
            self._send_logs[peer].write(started.number, packed)
            self._outgoing[peer].append(started)
            self._group.tell(peer, ARRIVAL, started.number)

    def _progress(self, until: float) -> None:
        """Take what has come, whoever waits for it, and note what others have taken."""
        words = self._group.own.words
        for peer, incoming in self._incoming.items():
            if incoming:
                arrived = words.load(self._arrivals[peer])
                while incoming and incoming[0].number <= arrived:
                    self._take(peer, incoming[0], until)
        for peer, outgoing in self._outgoing.items():
            if outgoing:
                taken = words.load(self._credits[peer])
                while outgoing and outgoing[0].number <= taken:
                    started = outgoing.popleft()
                    if started.stage is not None:
                        self._arenas.unstage(started.stage)
                    started.handle.taken(started)
                if self._unsaid[peer]:
                    self._say(peer)

    def _take(self, peer: int, started: _Started, until: float) -> None:
        """Copy one message out of the sender's memory, and say so."""
        operation = started.operation
        entry = self._peer_logs[peer].read(started.number)
        if entry is None:
            raise TransportError(f"{operation}: message {started.number} of rank {peer} is not in its log")
        if entry[3:] != operation.entry[3:]:  # bytes, dtype, label
            raise DisagreementError(
                f"two ends of one message do not match: {operation}, but rank {peer} sends it {entry}"
            )
        what = operation.__str__
        copy(operation.address, self._imports.address(peer, entry, what, until), operation.size)
        # After the copy: a sender that fails says so before it lets anybody write into its buffers again.
        self._group.check([peer], what)
        self._incoming[peer].popleft()
        self._group.tell(peer, CREDIT, started.number)
        started.handle.taken(started)

    def _finish(self, handle: ShmWorkHandle, deadline: float | None = None) -> None:
        """Wait for every message; the first that fails ends this transport."""
        self._check_open()
        until = deadline if deadline is not None else time.monotonic() + self._group.timeout_s

        def ready() -> bool:
            self._progress(until)
            return not handle.pending

        def awaited() -> Iterable[int]:
            return {started.operation.peer for started in list(handle.pending)}

        self._awaited = awaited
        try:
            self._group.hold(ready, awaited, lambda: listed([each.operation for each in handle.pending]), until)
        except (TransportError, DisagreementError) as error:
            handle.flight.state = FAILED
            raise self._failed(error) from error.__cause__
        finally:
            self._awaited = None

    def _place(self) -> Place:
        """Where this rank is. Called from the health thread."""
        at, call, awaited = self.record.where(), self.health.call, self._awaited
        return Place.make(at, call) if awaited is None else Place.make(at, call, Waits.PEERS, awaited())

    def _fail(self, cause: BaseException) -> None:
        """Tell the others first: from then on none of them takes a copy of this rank's buffers for good."""
        self._group.fail(cause)
        self._group.drop()
        self._drop(cause)

    def _drop(self, end: BaseException) -> None:
        self._end = end
        self._imports.clear()
        for queue in (*self._incoming.values(), *self._outgoing.values(), *self._unsaid.values()):
            queue.clear()


def obstacle(locations: Sequence[Location]) -> str | None:
    """Why ranks at these places cannot share memory, as far as the places tell; None where nothing does."""
    for rank, other in enumerate(locations):
        first = locations[0]
        if not first.same_machine(other):
            places = f"rank 0 is on {first.host} ({first.machine}), rank {rank} on {other.host} ({other.machine})"
            return f"{places}: not known to be one machine and one network namespace"
        if other.uid != first.uid:
            return f"rank 0 is user {first.uid}'s, rank {rank} user {other.uid}'s"
    return None


# --- memory that messages are sent from ------------------------------------------------------------------------------


STAGE_BYTES = 1 << 16
"""The smallest staging arena."""
STAGES_KEPT_BYTES = 1 << 26
"""How much unused staging memory stays for the next messages."""
VECTOR_BYTES = 1 << 24
"""From here on torch copies: with two ranks a core 64 MiB take 13 ms, where the C library's copy takes 16."""
SHORTAGES = {errno.ENOMEM, errno.ENOSPC}


class Arenas:
    """This rank's arenas, by number.

    Guarantees: an arena lives as long as a tensor in it, and its memory is given back when no rank maps it any more; a
    buffer that lies in no arena is copied into one before it is sent.
    """

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._arenas: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
        self._unused: list[tuple[int, Segment]] = []

    def tensor(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor in a new arena. Raises `MemoryError`."""
        _, segment = self._new(nbytes, populate=True)
        return torch.frombuffer(segment.buffer(0, nbytes), dtype=torch.uint8) if nbytes else torch.empty(0).byte()

    def place(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(arena, offset) of these bytes, None where no arena holds them."""
        for arena, segment in self._arenas.items():
            if segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
                return arena, address - segment.address
        return None

    def stage(self, address: int, nbytes: int) -> tuple[int, Segment]:
        """An arena with a copy of these bytes at its start. It is the caller's until `unstage`."""
        fitting = [each for each in self._unused if each[1].nbytes >= nbytes]
        if fitting:
            found = min(fitting, key=lambda each: each[1].nbytes)
            self._unused.remove(found)
        else:
            found = self._new(max(STAGE_BYTES, 1 << (nbytes - 1).bit_length()), populate=False)
        ctypes.memmove(found[1].address, address, nbytes)
        return found

    def unstage(self, stage: tuple[int, Segment]) -> None:
        """Keep a staging arena for the next message, unless enough is kept already."""
        if sum(segment.nbytes for _, segment in self._unused) + stage[1].nbytes <= STAGES_KEPT_BYTES:
            self._unused.append(stage)

    def _new(self, nbytes: int, populate: bool) -> tuple[int, Segment]:
        try:
            segment = Segment.create(f"arena-{self._group.rank}", nbytes)
            if populate:
                segment.populate()
        except OSError as error:
            if error.errno in SHORTAGES:
                raise MemoryError(f"no {nbytes} bytes of shared memory: {error}") from error
            raise TransportError(f"rank {self._group.rank}: no arena of {nbytes} bytes: {error}") from error
        arena = self._group.share(segment)
        self._arenas[arena] = segment
        # So that the others let go of their mappings, which would keep the memory.
        weakref.finalize(segment, _count_freed, self._group).atexit = False
        return arena, segment


class Imports:
    """Other ranks' arenas, mapped when a message first comes from there."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._freed = dict.fromkeys(group.ranks, 0)
        self._arenas: dict[tuple[int, int], Segment] = {}

    def address(self, rank: int, entry: Entry, what: Callable[[], str], until: float) -> int:
        """Where the bytes of another rank's message lie in this process. Raises what `SharedGroup.pull` raises."""
        freed = self._group.pages[rank].load(FREED)
        if freed != self._freed[rank]:
            self._freed[rank] = freed
            # All of the rank's, for which of them are gone is not told; what is still in use is mapped again.
            self._arenas = {key: segment for key, segment in self._arenas.items() if key[0] != rank}
        segment = self._arenas.get((rank, entry.arena))
        if segment is None:
            segment = self._arenas[rank, entry.arena] = Segment.attach(self._group.pull(rank, entry.arena, until, what))
        if entry.offset + entry.nbytes > segment.nbytes:
            raise TransportError(f"rank {rank} sent {entry} at {entry.offset} of an arena of {segment.nbytes} bytes")
        return segment.address + entry.offset

    def clear(self) -> None:
        """Unmap all."""
        self._arenas.clear()


def _count_freed(group: SharedGroup) -> None:
    if os.getpid() == group.pid:
        group.own.store(FREED, group.own.load(FREED) + 1)


def copy(into: int, source: int, nbytes: int) -> None:
    """Copy between two addresses, both of which must stay mapped meanwhile."""
    if nbytes < VECTOR_BYTES:
        ctypes.memmove(into, source, nbytes)
    else:
        # Tensors made here, for the caller's may be those of an inference mode that has ended.
        _bytes_at(into, nbytes).copy_(_bytes_at(source, nbytes))


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)

"""The shm transport: the ranks are processes of one machine, and a receiver copies directly from the sender's memory.

Starting an exchange only publishes where its messages are in memory. The receiver copies a message during one of its
waits, without a helper thread, and reports the copy. The sender's wait returns when all its messages have been copied.
So a rank that computes between start and wait delays the senders that wait for it, as a late rank does.
Guarantees: bits are preserved. Every wait of a rank copies all messages that have arrived for this rank, in order for
each sender, so no order of waits can deadlock. Both ends of a message must agree on bytes, dtype and label, or all
ranks raise `DisagreementError`. A copy is used only if the sender had neither failed nor closed when the copy was
complete. Only killed or stopped ranks are named at fault. A transport that has raised a failure cannot be used again.
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
    """One end of a message, with its log entry, prepared once for all starts."""

    def __init__(self, rank: int, sends: bool, message: Message) -> None:
        super().__init__(rank, sends, message)
        self.buffer = self.buffer.detach()

    def prepare(self, arenas: Arenas) -> None:
        """Locate the buffer in shared memory, and pack the log entry.

        Call this only after all messages of the exchange have been checked.
        """
        self.address = self.buffer.data_ptr()
        self.size = self.nbytes
        self.place = arenas.place(self.address, self.size) if self.sends else None
        arena, offset = self.place or (0, 0)
        self.entry = Entry(0, arena, offset, self.size, str(self.buffer.dtype), subject(self.label, self.peer))
        self.packed = self.entry.packed()


class _Started:
    """An operation that has started and is not complete."""

    __slots__ = ("handle", "number", "operation", "stage")

    def __init__(self, operation: _Operation, number: int, handle: ShmWorkHandle) -> None:
        self.operation, self.number, self.handle = operation, number, handle
        self.stage: tuple[int, Segment] | None = None


class ShmWorkHandle:
    """The operations of one exchange."""

    arrived_s = None  # bytes move during waits only, so no earlier arrival can be observed

    def __init__(self, transport: ShmTransport, flight: Flight) -> None:
        self._transport = transport
        self.flight = flight
        self.pending: dict[_Started, None] = {}
        self._waited = False

    def complete(self, started: _Started) -> None:
        """Record that one of the exchange's messages has been sent or received."""
        del self.pending[started]
        if not self.pending:
            self.flight.state, self.flight.done_s = DONE, time.time()

    def wait(self, until: float | None = None) -> None:
        """See `WorkHandle.wait`; raises `DisagreementError` if the ends of a message differ. Idempotent.

        `until`: the deadline on the monotonic clock.
        """
        if not self._waited:
            self._transport._finish(self, until)
            self._waited = True


class ShmHop:
    """An exchange bound to its buffers."""

    def __init__(self, transport: ShmTransport, operations: list[_Operation]) -> None:
        self._transport = transport
        for operation in operations:
            operation.prepare(transport._arenas)
        self._recvs = [operation for operation in operations if not operation.sends]
        self._sends = [operation for operation in operations if operation.sends]
        self._parts = tuple(operation.record() for operation in operations)

    def start(self) -> ShmWorkHandle:
        """See `Hop.start`. Raises `ClosedError`, `PeerLostError`."""
        return self._transport._start(self._sends, self._recvs, self._parts)


class ShmTransport(ProcessTransport):
    """One rank of a ring of processes that share memory."""

    name = "shm"
    device = torch.device("cpu")

    def __init__(self, opening: Opening, group: SharedGroup) -> None:
        """Take over an open group; see `open`."""
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
        # Started but not announced yet: the log has no free entry until the receiver has copied older messages.
        self._unannounced: dict[int, deque[_Started]] = {peer: deque() for peer in ranks}
        self._send_logs = {peer: group.own_page.log(True, peer) for peer in ranks}
        self._recv_logs = {peer: group.own_page.log(False, peer) for peer in ranks}
        self._peer_logs = {peer: page.log(True, self.rank) for peer, page in group.pages.items()}
        self._arrivals = {peer: group.own_page.index(ARRIVAL, peer) for peer in ranks}
        self._credits = {peer: group.own_page.index(CREDIT, peer) for peer in ranks}

    @classmethod
    def open(cls, opening: Opening, members: Sequence[int] | None = None) -> ShmTransport:
        """Connect all ranks. The waits of the open ring do not use the store.

        `members`: the ranks to exchange with. None: all ranks, whose locations are checked first.
        Raises `UnsupportedError` on all ranks if one cannot share memory, and `DeadlineError` that names the missing
        ranks.
        """
        opening.name = opening.name or cls.name
        if members is None:
            # Shared pages connect all ranks, so neighbours need no datagrams.
            opening = replace(opening, deadline=opening.until, interface=None, job_size=None)
            if reason := obstacle(opening.locations):
                raise UnsupportedError(
                    f"rank {opening.rank}: transport='shm' needs one machine and one user, but {reason}; use gloo"
                )
        ring = cls(opening, SharedGroup.open(opening, members))
        if members is None:
            opening.leave_store()
        return ring

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate a uint8 tensor of `nbytes` in memory that the other ranks can read. Raises `MemoryError`."""
        self._check_open()
        return self._arenas.tensor(nbytes)

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> ShmHop:
        """See `Transport.bind`."""
        return ShmHop(self, operations(_Operation, self.rank, self.world_size, self.device, sends, recvs))

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> ShmWorkHandle:
        """See `Transport.exchange`. Raises `InputError`, `ClosedError`, `PeerLostError`."""
        return self.bind(sends, recvs).start()

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Transport.all_gather_bytes`. The n-th calls of all ranks belong together; payloads have any length."""
        self._check_open()
        until = time.monotonic() + self._group.timeout_s
        where = f"rank {self.rank} in all-gather {self._all_gathers}"
        # Record both ends: otherwise every payload would look like a message without a receiver. Only the first part of
        # a payload is recorded, because its length is unknown here.
        peers = [peer for peer in self._group.ranks if peer != self.rank]
        parts = tuple(MessageRecord(op, peer, GATHER_BYTES, 0, where) for op in ("send", "recv") for peer in peers)
        flight = self.record.begin(CONTROL_LANE, parts, self.name)
        self._all_gathers += 1
        self._awaited = lambda: peers
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
        """The group of ranks that this rank exchanges with."""
        return self._group

    @property
    def under_way(self) -> bool:
        """Whether another rank may be waiting for this rank to copy or to announce a message."""
        return any(self._incoming.values()) or any(self._unannounced.values())

    def copy_until(self, over: Callable[[], bool]) -> None:
        """Copy and announce messages, as this rank's waits do, until `over()` is true.

        `over` is evaluated again whenever a word of this rank's page changes. A helper thread calls this method while
        the transport's own thread is blocked elsewhere. Failures are ignored here: the transport's own thread handles
        them.
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
        # A hop without messages is not an exchange, so it is not recorded.
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
            self._unannounced[operation.peer].append(started)
            self._announce(operation.peer)
        flight.state, flight.started_s = RUNNING, time.time()
        return handle

    def _announce(self, peer: int) -> None:
        """Announce the next messages to `peer`: as many as the log of messages to this peer has free entries for."""
        unannounced, taken = self._unannounced[peer], self._group.own_page.words.load(self._credits[peer])
        while unannounced and unannounced[0].number <= taken + LOG_ENTRIES:
            started = unannounced.popleft()
            operation = started.operation
            packed = operation.packed
            if operation.place is None:
                started.stage = self._arenas.stage(operation.address, operation.size)
                packed = operation.entry._replace(arena=started.stage[0]).packed()
            self._send_logs[peer].write(started.number, packed)
            self._outgoing[peer].append(started)
            self._group.tell(peer, ARRIVAL, started.number)

    def _progress(self, until: float) -> None:
        """Copy all messages that have arrived, of any exchange, and complete those that other ranks have copied."""
        words = self._group.own_page.words
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
                    started.handle.complete(started)
                if self._unannounced[peer]:
                    self._announce(peer)

    def _take(self, peer: int, started: _Started, until: float) -> None:
        """Copy one message from the sender's memory, and report the copy to the sender."""
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
        # Check after the copy: a failing sender reports it before its buffers may be overwritten.
        self._group.check([peer], what)
        self._incoming[peer].popleft()
        self._group.tell(peer, CREDIT, started.number)
        started.handle.complete(started)

    def _finish(self, handle: ShmWorkHandle, deadline: float | None = None) -> None:
        """Wait for every message. The first failure ends this transport."""
        self._check_open()
        until = deadline if deadline is not None else time.monotonic() + self._group.timeout_s

        def ready() -> bool:
            self._progress(until)
            return not handle.pending

        def awaited() -> Iterable[int]:
            return {started.operation.peer for started in list(handle.pending)}

        self._awaited = awaited
        try:
            self._group.hold(ready, awaited, lambda: listed([started.operation for started in handle.pending]), until)
        except (TransportError, DisagreementError) as error:
            handle.flight.state = FAILED
            raise self._failed(error) from error.__cause__
        finally:
            self._awaited = None

    def _place(self) -> Place:
        """Return what this rank is doing and which ranks it waits for. Called from the health thread."""
        position, call, awaited = self.record.where(), self.health.call, self._awaited
        return Place.make(position, call) if awaited is None else Place.make(position, call, Waits.PEERS, awaited())

    def _fail(self, cause: BaseException) -> None:
        """End the transport. Report the failure first: from then on no rank accepts a copy of this rank's buffers."""
        self._group.fail(cause)
        self._group.drop()
        self._drop(cause)

    def _drop(self, end: BaseException) -> None:
        self._end = end
        self._imports.clear()
        for queue in (*self._incoming.values(), *self._outgoing.values(), *self._unannounced.values()):
            queue.clear()


def obstacle(locations: Sequence[Location]) -> str | None:
    """Return why ranks at these locations cannot share memory, or None if the locations show no reason."""
    for rank, location in enumerate(locations):
        first = locations[0]
        if not first.same_machine(location):
            places = f"rank 0 is on {first.host} ({first.machine}), rank {rank} on {location.host} ({location.machine})"
            return f"{places}, which are not known to be one machine and one network namespace"
        if location.uid != first.uid:
            return f"rank 0 belongs to user {first.uid} and rank {rank} to user {location.uid}"
    return None


# --- memory that messages are sent from ------------------------------------------------------------------------------


STAGE_BYTES = 1 << 16
"""The smallest staging arena."""
STAGES_KEPT_BYTES = 1 << 26
"""The most unused staging memory that is kept for later messages."""
VECTOR_BYTES = 1 << 24
"""From this size on torch copies: with two ranks a core, 64 MiB take 13 ms, against 16 ms by the C library."""
SHORTAGES = {errno.ENOMEM, errno.ENOSPC}


class Arenas:
    """This rank's arenas, by number. An arena is a shared segment that messages are sent from.

    Guarantees: an arena lives as long as a tensor in it, and its memory is freed when no rank maps it any more. A
    buffer outside all arenas is copied into an arena before it is sent.
    """

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._arenas: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
        self._unused: list[tuple[int, Segment]] = []

    def tensor(self, nbytes: int) -> torch.Tensor:
        """Return a flat uint8 tensor in a new arena. Raises `MemoryError`."""
        _, segment = self._new(nbytes, populate=True)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(segment.buffer(0, nbytes), dtype=torch.uint8)

    def place(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (arena, offset) of `nbytes` bytes at `address`, or None if no arena contains them."""
        for arena, segment in self._arenas.items():
            if segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
                return arena, address - segment.address
        return None

    def stage(self, address: int, nbytes: int) -> tuple[int, Segment]:
        """Return an arena that starts with a copy of `nbytes` bytes at `address`. Give it back with `unstage`."""
        fitting = [stage for stage in self._unused if stage[1].nbytes >= nbytes]
        if fitting:
            chosen = min(fitting, key=lambda stage: stage[1].nbytes)
            self._unused.remove(chosen)
        else:
            chosen = self._new(max(STAGE_BYTES, 1 << (nbytes - 1).bit_length()), populate=False)
        ctypes.memmove(chosen[1].address, address, nbytes)
        return chosen

    def unstage(self, stage: tuple[int, Segment]) -> None:
        """Keep a staging arena for later messages, unless enough staging memory is kept already."""
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
        # Count freed arenas, so that the other ranks drop their mappings, which would keep the memory alive.
        weakref.finalize(segment, _count_freed, self._group).atexit = False
        return arena, segment


class Imports:
    """Mappings of other ranks' arenas. An arena is mapped when the first message in it is copied."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._freed = dict.fromkeys(group.ranks, 0)
        self._arenas: dict[tuple[int, int], Segment] = {}

    def address(self, rank: int, entry: Entry, what: Callable[[], str], until: float) -> int:
        """Return the address in this process of another rank's message. Raises what `SharedGroup.pull` raises."""
        freed = self._group.pages[rank].load(FREED)
        if freed != self._freed[rank]:
            self._freed[rank] = freed
            # The count does not say which arena was freed, so unmap all arenas of that rank. Later messages map the
            # live ones again.
            self._arenas = {key: segment for key, segment in self._arenas.items() if key[0] != rank}
        segment = self._arenas.get((rank, entry.arena))
        if segment is None:
            segment = self._arenas[rank, entry.arena] = Segment.attach(self._group.pull(rank, entry.arena, until, what))
        if entry.offset + entry.nbytes > segment.nbytes:
            raise TransportError(f"rank {rank} sent {entry} at {entry.offset} of an arena of {segment.nbytes} bytes")
        return segment.address + entry.offset

    def clear(self) -> None:
        """Unmap all arenas."""
        self._arenas.clear()


def _count_freed(group: SharedGroup) -> None:
    if os.getpid() == group.pid:
        group.own_page.store(FREED, group.own_page.load(FREED) + 1)


def copy(into: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` bytes between two addresses, which must stay mapped during the copy."""
    if nbytes < VECTOR_BYTES:
        ctypes.memmove(into, source, nbytes)
    else:
        # Create new tensors: the caller's may belong to an inference mode that has ended.
        _bytes_at(into, nbytes).copy_(_bytes_at(source, nbytes))


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)

"""Stream entries, communicators, device memory, and the rendezvous that copies the bytes.

Guarantees: nothing is buffered. The bytes of a message are copied at one instant, when the group of the send and the
group of the receive are both first in their streams and communicators. The k-th send from a to b matches the k-th
receive on b from a. A communicator is full when `world_size` different ranks have joined with its unique id. A rank
that has died moves no bytes.
Source of the rules: NCCL user guide, "Point-to-point communication" and "Group calls"; enqueue.cc of NCCL 2.28.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ringattn.transport.nccl.binding import CommConfig, Status

# --- entries ----------------------------------------------------------------------------------------------------------


COMPUTE = "compute"
"""The caller's default stream. The host thread executes its work immediately, so it has no queue."""


Range = tuple[int, int]
"""(address, bytes) of a range of device memory."""


@dataclass(eq=False)
class Entry:
    """Work on `stream` of `rank`."""

    rank: int
    stream: str
    complete: bool = field(default=False, init=False)


@dataclass(eq=False)
class Touch(Entry):
    """Compute that reads and writes memory ranges. It runs in the order of its stream, and not while it is `held`."""

    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    label: str
    held: bool = False

    def __str__(self) -> str:
        return f"compute '{self.label}'"


@dataclass(eq=False)
class Record(Entry):
    """An event record. It completes when all earlier work of its stream has completed."""

    captured: bool

    def __str__(self) -> str:
        return f"record of an event on stream {self.stream}"


@dataclass(eq=False)
class Wait(Entry):
    """A wait for an event: later work of the stream runs after `record`."""

    record: Record

    def __str__(self) -> str:
        return f"wait for an event of stream {self.record.stream}"


@dataclass(eq=False)
class Op:
    """One send or receive. `peer`: a rank of the communicator; `number` counts the ops of this kind with this peer."""

    kind: str
    peer: int
    nbytes: int
    address: int
    number: int = -1
    partner: Op | None = None
    launch: Launch = field(init=False)

    def __str__(self) -> str:
        return f"{self.kind} of {self.nbytes} bytes {'to' if self.kind == 'send' else 'from'} rank {self.peer}"


@dataclass(eq=False)
class Launch(Entry):
    """The ops of one group on one communicator. `group`: its number on this rank; `captured`: launched from a graph."""

    comm: Communicator
    ops: tuple[Op, ...]
    group: int
    captured: bool = False
    started: bool = field(default=False, init=False)
    aborted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for op in self.ops:
            op.launch = self

    def again(self, group: int) -> Launch:
        """Return a new launch of the same ops, for the replay of a graph."""
        ops = tuple(Op(op.kind, op.peer, op.nbytes, op.address) for op in self.ops)
        return Launch(self.rank, self.stream, self.comm, ops, group, captured=True)

    def pending(self) -> list[Op]:
        """Return the ops that have no partner yet."""
        return [op for op in self.ops if op.partner is None]

    def __str__(self) -> str:
        return f"{'; '.join(map(str, self.pending() or self.ops))} on {self.comm}, stream {self.stream}"


# --- communicators ----------------------------------------------------------------------------------------------------


FIRST_HANDLE = 0x1000


class Phase(Enum):
    """The state of one rank's end of a communicator."""

    OPENING = "opening"
    READY = "ready"
    FINALIZED = "finalized"
    LEAVING = "being destroyed"
    DESTROYED = "destroyed"
    ABORTED = "aborted"


@dataclass(eq=False)
class Clique:
    """The part of a communicator that all its ranks share. The keys of `ops` are (kind, rank, peer, number)."""

    name: str
    world_size: int
    members: dict[int, Communicator] = field(default_factory=dict)
    ops: dict[tuple[str, int, int, int], Op] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether every rank has joined."""
        return self.world_size == len(self.members)

    def reached(self, *phases: Phase) -> bool:
        """Return whether every rank is in one of these phases."""
        return all(member.phase in phases for member in self.members.values())

    def opposite(self, rank: int, op: Op) -> Op | None:
        """Return the matching op of the peer, or None if it has not been issued."""
        opposite_kind = "recv" if op.kind == "send" else "send"
        return self.ops.get((opposite_kind, op.peer, rank, op.number))


@dataclass(eq=False)
class Communicator:
    """One rank's end of a communicator: the part that belongs to this rank.

    `process`: the rank in the simulated world; `rank`: the rank in the communicator; `polls_left`: how many more calls
    of `state` return IN_PROGRESS; `unlaunched`: the group that is launched when `state` returns SUCCESS; `user`: the
    thread that is inside a call or has a group open.
    """

    handle: int
    process: int
    rank: int
    clique: Clique
    config: CommConfig
    polls_left: int
    phase: Phase = Phase.OPENING
    error: Status = Status.SUCCESS
    error_text: str = ""
    unlaunched: Launch | None = None
    user: int | None = None
    launches: deque[Launch] = field(default_factory=deque)
    registered: dict[int, Range] = field(default_factory=dict)
    _counts: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def gone(self) -> bool:
        """Whether the handle is freed, by destroy or abort."""
        return self.phase in (Phase.DESTROYED, Phase.ABORTED)

    def in_flight(self) -> list[Launch]:
        """Return the groups that `group_end` has ended but that have not completed."""
        return [*self.launches, *([self.unlaunched] if self.unlaunched else [])]

    def number(self, launch: Launch) -> None:
        """Number the ops of a launch per kind and peer, in the order in which this end issues them."""
        for op in launch.ops:
            op.number = self._counts[op.kind, op.peer]
            self._counts[op.kind, op.peer] += 1
            self.clique.ops[op.kind, self.rank, op.peer, op.number] = op

    def holds(self, address: int, nbytes: int) -> bool:
        """Return whether this memory is registered with this end."""
        return any(start <= address and address + nbytes <= start + size for start, size in self.registered.values())

    def fail(self, status: Status, text: str) -> None:
        """Set an asynchronous error: no more bytes move. The first error stays."""
        if self.error is Status.SUCCESS:
            self.error, self.error_text = status, text

    def __str__(self) -> str:
        return f"communicator {self.clique.name}"


class Registry:
    """All communicators of the simulated world."""

    def __init__(self, polls: int, violate: Callable[[int, str], None]) -> None:
        self.by_handle: dict[int, Communicator] = {}
        self.new_handle = itertools.count(FIRST_HANDLE).__next__
        self._polls, self._violate = polls, violate
        self._cliques: dict[object, Clique] = {}

    def of(self, process: int) -> list[Communicator]:
        """Return the ends that `process` has opened and not freed."""
        return [comm for comm in self.by_handle.values() if comm.process == process and not comm.gone]

    def join(self, unique_id: bytes, world_size: int, process: int, rank: int, config: CommConfig) -> Communicator:
        """Add an end to the communicator with this id and size, and return it."""
        clique = self._cliques.setdefault((unique_id, world_size), Clique(f"#{len(self._cliques)}", world_size))
        if rank in clique.members:
            self._violate(process, f"rank {rank} joined communicator {clique.name} a second time")
            clique = Clique(f"{clique.name} (second rank {rank})", world_size)
        comm = Communicator(self.new_handle(), process, rank, clique, config, self._polls)
        clique.members[rank] = self.by_handle[comm.handle] = comm
        return comm


# --- memory -----------------------------------------------------------------------------------------------------------


class Allocation:
    """One allocation. NCCL memory lives until `free`, plain memory until its last view is dropped.

    The pages stay mapped for as long as the record of the allocation, so that no later allocation reuses the address
    and a late access is detected.
    """

    def __init__(self, array: np.ndarray, kept: bool) -> None:
        self._pages = array.base
        self.address, self.nbytes = array.ctypes.data, array.nbytes
        self.freed = False
        self.kept = array if kept else None
        self._array = weakref.ref(array)

    @property
    def gone(self) -> bool:
        """Whether the memory was freed or its last view was dropped."""
        return self.freed or self._array() is None

    def bytes_at(self, address: int, nbytes: int) -> np.ndarray | None:
        """Return a view of this range, or None if it is not within this allocation or the memory is gone."""
        array = None if self.freed else self._array()
        offset = address - self.address
        if array is None or offset < 0 or offset + nbytes > self.nbytes:
            return None
        return array[offset : offset + nbytes]


class Memory:
    """The memory of all ranks.

    `any_address`: also accept addresses that no device allocated, unchecked. `capacity`: the bytes of each device that
    NCCL memory and torch's cache share. `cached`: the bytes in torch's cache, by rank.
    """

    def __init__(self, any_address: bool, capacity: int | None = None) -> None:
        self._any_address = any_address
        self.capacity = capacity
        self.cached: defaultdict[int, int] = defaultdict(int)
        self._allocations: defaultdict[int, list[Allocation]] = defaultdict(list)

    def plain(self, rank: int, nbytes: int) -> np.ndarray:
        """Return new memory that lives as long as it is referenced."""
        array = _pages(nbytes)
        self._allocations[rank].append(Allocation(array, kept=False))
        return array

    def nccl(self, rank: int, nbytes: int) -> int | None:
        """Return the address of new memory that lives until `free`, or None if the device is full."""
        if self.capacity is not None and self.nccl_bytes(rank) + self.cached[rank] + nbytes > self.capacity:
            return None
        self._allocations[rank].append(Allocation(_pages(max(nbytes, 1)), kept=True))
        return self._allocations[rank][-1].address

    def nccl_bytes(self, rank: int) -> int:
        """Return the bytes of NCCL memory that `rank` has allocated and not freed."""
        return sum(piece.nbytes for piece in self._allocations[rank] if piece.kept is not None and not piece.freed)

    def gone(self, rank: int, address: int, nbytes: int) -> bool:
        """Return whether any of these bytes are in memory that is gone (see `Allocation.gone`)."""
        pieces = (piece for piece in self._allocations[rank] if piece.gone)
        return any(piece.address < address + nbytes and address < piece.address + piece.nbytes for piece in pieces)

    def nccl_size(self, rank: int, address: int) -> int | None:
        """Return the size of the live NCCL allocation that begins at `address`, or None if none does."""
        for piece in self._allocations[rank]:
            if piece.kept is not None and not piece.freed and piece.address == address:
                return piece.nbytes
        return None

    def free(self, rank: int, address: int) -> None:
        """Free the NCCL allocation of `rank` that begins at `address`."""
        for piece in self._allocations[rank]:
            if piece.kept is not None and piece.address == address:
                piece.freed = True

    def view(self, rank: int, address: int, nbytes: int) -> np.ndarray | None:
        """Return a view of these bytes of `rank`, or None if they are not within one live allocation of `rank`."""
        if nbytes == 0:
            return np.empty(0, dtype=np.uint8)
        for piece in self._allocations[rank]:
            if (view := piece.bytes_at(address, nbytes)) is not None:
                return view
        if self._any_address:
            return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        return None


def _pages(nbytes: int) -> np.ndarray:
    """Return a new array of `nbytes` bytes. At least one byte is allocated, so that each array has its own address."""
    return np.empty(max(nbytes, 1), dtype=np.uint8)[:nbytes]


# --- queues -----------------------------------------------------------------------------------------------------------


class Queues:
    """The queues of all streams. A queue has the entries of its stream that have not completed."""

    def __init__(self, memory: Memory, violate: Callable[[int, str], None], dead: set[int]) -> None:
        self._memory, self._violate, self._dead = memory, violate, dead
        self._queues: defaultdict[tuple[int, str], deque[Entry]] = defaultdict(deque)
        self._moved = False

    def put(self, entry: Entry) -> None:
        """Append an entry to its stream, and a launch also to its communicator."""
        self._queues[entry.rank, entry.stream].append(entry)
        if isinstance(entry, Launch):
            entry.comm.launches.append(entry)

    def heads(self, rank: int) -> list[Entry]:
        """Return the first entry of each stream of `rank`."""
        return [queue[0] for (owner, _), queue in self._queues.items() if owner == rank and queue]

    def advance(self, allowed: set[Entry] | None = None) -> bool:
        """Run every entry that can run, or only the `allowed` ones. Return whether anything moved."""
        any_moved = False
        while True:
            self._moved = False
            for queue in self._queues.values():
                while queue and (allowed is None or queue[0] in allowed or queue[0].complete):
                    self._run(queue[0])
                    if not queue[0].complete:
                        break
                    queue.popleft()
                    self._moved = True
            if not self._moved:
                return any_moved
            any_moved = True

    def needed(self, entries: Iterable[Entry]) -> set[Entry]:
        """Return `entries` and every entry that must run before them."""
        required: set[Entry] = set()
        todo = list(entries)
        while todo:
            entry = todo.pop()
            if entry in required or entry.complete:
                continue
            required.add(entry)
            queue = self._queues[entry.rank, entry.stream]
            if entry in queue:
                todo.extend(list(queue)[: queue.index(entry)])
            if isinstance(entry, Wait):
                todo.append(entry.record)
            elif isinstance(entry, Launch):
                todo.extend(each for each in entry.comm.launches if each.group < entry.group)
                ends = (entry.comm.clique.opposite(entry.comm.rank, op) for op in entry.pending())
                todo.extend(end.launch for end in ends if end is not None)
        return required

    def touching(self, rank: int, memory: Range) -> Touch | None:
        """Return a pending compute entry of `rank` that reads or writes some of these bytes, or None."""
        address, nbytes = memory
        for entry in (entry for (owner, _), queue in self._queues.items() if owner == rank for entry in queue):
            if isinstance(entry, Touch) and not entry.complete:
                ranges = (*entry.reads, *entry.writes)
                if any(start < address + nbytes and address < start + size for start, size in ranges):
                    return entry
        return None

    def compute(self, touch: Touch) -> None:
        """Run a compute entry, and record a violation if any of its memory is gone."""
        touch.complete = True
        for verb, ranges in (("reads", touch.reads), ("writes", touch.writes)):
            for address, nbytes in ranges:
                if self._memory.gone(touch.rank, address, nbytes):
                    self._violate(touch.rank, f"illegal address {address:#x}: {touch} {verb} memory that was freed")

    def drop(self, launches: Iterable[Launch]) -> None:
        """Abort launches: their streams continue, and their pending sends and receives never match."""
        for launch in launches:
            launch.aborted = launch.complete = True

    def _run(self, entry: Entry) -> None:
        """Run the entry at the head of its stream if it can complete."""
        if isinstance(entry, Record):
            entry.complete = True
        elif isinstance(entry, Wait):
            entry.complete = entry.record.complete
        elif isinstance(entry, Touch) and not entry.held:
            self.compute(entry)
        elif isinstance(entry, Launch) and not entry.complete:
            self._drive(entry)

    def _drive(self, launch: Launch) -> None:
        """Start a launch if it is next on its communicator, and transfer its messages whose peers have started too."""
        comm = launch.comm
        if comm.launches[0] is not launch:
            return
        if not launch.started:
            launch.started = self._moved = True
        for op in launch.pending():
            partner = comm.clique.opposite(comm.rank, op)
            if op.partner is None and partner is not None and self._present(op) and self._present(partner):
                self._transfer(launch, op, partner)
        if not launch.pending():
            launch.complete = True
            comm.launches.popleft()

    def _present(self, op: Op) -> bool:
        """Return whether the launch of this op is running: started, not aborted, on a living rank, without an error."""
        launch = op.launch
        alive = launch.rank not in self._dead and not launch.aborted
        return alive and launch.started and launch.comm.error is Status.SUCCESS

    def _transfer(self, launch: Launch, op: Op, partner: Op) -> None:
        """Copy the bytes of one message, or fail the communicators of sender and receiver if they do not match."""
        send, recv = (op, partner) if op.kind == "send" else (partner, op)
        sender, receiver = (launch, partner.launch) if op.kind == "send" else (partner.launch, launch)
        where = f"{send} (from {sender.comm.rank}) and {recv} of {launch.comm}"
        if send.nbytes != recv.nbytes:
            self._violate(launch.rank, f"the bytes of both ends differ: {where}")
            sender.comm.fail(Status.REMOTE_ERROR, f"bytes differ: {where}")
            receiver.comm.fail(Status.INVALID_USAGE, f"bytes differ: {where}")
            return
        if sender.comm.holds(send.address, send.nbytes) != receiver.comm.holds(recv.address, recv.nbytes):
            self._violate(launch.rank, f"only one end is registered memory: {where}")
        if sender.captured != receiver.captured:
            self._violate(launch.rank, f"only one end is in a graph: {where}")
        source = self._memory.view(sender.rank, send.address, send.nbytes)
        target = self._memory.view(receiver.rank, recv.address, recv.nbytes)
        for end, failed, view in ((sender, send, source), (receiver, recv, target)):
            if view is None:
                self._violate(end.rank, f"illegal address {failed.address:#x}, freed while in flight: {failed}")
                end.comm.fail(Status.UNHANDLED_CUDA_ERROR, "an illegal memory access was encountered")
        if source is not None and target is not None:
            target[:] = source
            op.partner, partner.partner = partner, op
            self._moved = True

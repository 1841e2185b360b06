"""The streams of all ranks: in-order queues, and the rendezvous that moves the bytes.

Guarantees: nothing is buffered, both ends of a message are taken in the same instant and only when the groups of both
have reached the heads of their streams and communicators; a rank that has died moves nothing any more.
Source of the rules: NCCL user guide, "Point-to-point communication" and "Group calls"; enqueue.cc of NCCL 2.28.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from ringattn.transport.nccl.binding import Status
from tests.transport.simulated.entries import Entry, Launch, Op, Range, Record, Touch, Wait
from tests.transport.simulated.memory import Memory


class Queues:
    """What has been put on streams and has not completed."""

    def __init__(self, memory: Memory, violate: Callable[[int, str], None], dead: set[int]) -> None:
        self._memory, self._violate, self._dead = memory, violate, dead
        self._queues: defaultdict[tuple[int, str], deque[Entry]] = defaultdict(deque)
        self._moved = False

    def put(self, entry: Entry) -> None:
        """Behind everything that its stream holds; a launch also behind its communicator's."""
        self._queues[entry.rank, entry.stream].append(entry)
        if isinstance(entry, Launch):
            entry.comm.launches.append(entry)

    def heads(self, rank: int) -> list[Entry]:
        """What each stream of `rank` is at."""
        return [queue[0] for (owner, _), queue in self._queues.items() if owner == rank and queue]

    def advance(self, wanted: set[Entry] | None = None) -> bool:
        """Run all that can run, or of that only what is `wanted`. Whether anything moved."""
        ever = False
        while True:
            self._moved = False
            for queue in self._queues.values():
                while queue and (wanted is None or queue[0] in wanted or queue[0].complete):
                    self._run(queue[0])
                    if not queue[0].complete:
                        break
                    queue.popleft()
                    self._moved = True
            if not self._moved:
                return ever
            ever = True

    def needed(self, entries: Iterable[Entry]) -> set[Entry]:
        """All that must run before `entries` have: the least that a device may do for whoever asks for them."""
        found: set[Entry] = set()
        todo = list(entries)
        while todo:
            entry = todo.pop()
            if entry in found or entry.complete:
                continue
            found.add(entry)
            queue = self._queues[entry.rank, entry.stream]
            if entry in queue:
                todo.extend(list(queue)[: queue.index(entry)])
            if isinstance(entry, Wait):
                todo.append(entry.record)
            elif isinstance(entry, Launch):
                todo.extend(each for each in entry.comm.launches if each.group < entry.group)
                ends = (entry.comm.clique.opposite(entry.comm.rank, op) for op in entry.pending())
                todo.extend(end.launch for end in ends if end is not None)
        return found

    def touching(self, rank: int, held: Range) -> Touch | None:
        """Compute of `rank` that has not run and reads or writes some of these bytes."""
        address, nbytes = held
        for entry in (entry for (owner, _), queue in self._queues.items() if owner == rank for entry in queue):
            if isinstance(entry, Touch) and not entry.complete:
                if any(at < address + nbytes and address < at + size for at, size in (*entry.reads, *entry.writes)):
                    return entry
        return None

    def compute(self, touch: Touch) -> None:
        """Run compute, which must find all its memory."""
        touch.complete = True
        for what, ranges in (("reads", touch.reads), ("writes", touch.writes)):
            for address, nbytes in ranges:
                if self._memory.gone(touch.rank, address, nbytes):
                    self._violate(touch.rank, f"illegal address {address:#x}: {touch} {what} memory that was freed")

    def drop(self, launches: Iterable[Launch]) -> None:
        """Abort these: their streams go on, their ops meet nobody."""
        for launch in launches:
            launch.aborted = launch.complete = True

    def _run(self, entry: Entry) -> None:
        """Complete the entry at the head of its stream, if it can be."""
        if isinstance(entry, Record):
            entry.complete = True
        elif isinstance(entry, Wait):
            entry.complete = entry.record.complete
        elif isinstance(entry, Touch) and not entry.held:
            self.compute(entry)
        elif isinstance(entry, Launch) and not entry.complete:
            self._drive(entry)

    def _drive(self, launch: Launch) -> None:
        """Start a launch whose communicator is free, and meet the partners that have started too."""
        comm = launch.comm
        if comm.launches[0] is not launch:
            return
        if not launch.started:
            launch.started = self._moved = True
        for op in launch.pending():
            other = comm.clique.opposite(comm.rank, op)
            if op.partner is None and other is not None and self._present(op) and self._present(other):
                self._meet(launch, op, other)
        if not launch.pending():
            launch.complete = True
            comm.launches.popleft()

    def _present(self, op: Op) -> bool:
        """Whether this end is on its device now."""
        launch = op.launch
        alive = launch.rank not in self._dead and not launch.aborted
        return alive and launch.started and launch.comm.error is Status.SUCCESS

    def _meet(self, launch: Launch, op: Op, other: Op) -> None:
        """Take both ends of one message, or fail the communicators of both."""
        send, recv = (op, other) if op.kind == "send" else (other, op)
        sender, receiver = (launch, other.launch) if op.kind == "send" else (other.launch, launch)
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
        for end, found, view in ((sender, send, source), (receiver, recv, target)):
            if view is None:
                self._violate(end.rank, f"illegal address {found.address:#x}, freed while in flight: {found}")
                end.comm.fail(Status.UNHANDLED_CUDA_ERROR, "an illegal memory access was encountered")
        if source is not None and target is not None:
            target[:] = source
            op.partner, other.partner = other, op
            self._moved = True

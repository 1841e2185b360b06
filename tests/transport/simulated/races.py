"""Race detection: find unordered accesses to the same bytes in the traces of all ranks.

Each stream of each rank is a logical thread with a vector clock (Mattern 1988). Four things order work: the sequence of
a stream; a wait for an event, after its record; the launches of a communicator, which run one after another; and a
rendezvous, because a send and its receive complete after both have started. The order in which a host issues work to
two streams orders nothing.
Guarantees: the verdict depends on the issued work, never on which work ran first. A send reads and a receive writes its
buffer from the start of its launch to its completion, or forever if it never completed.
Not covered: compute that was not reported with `SimDevice.touch`. The detector is stricter than CUDA in one point: work
that a host issues after it has seen an event complete is not ordered after that event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.transport.simulated.streams import Communicator, Entry, Launch, Range, Record, Touch, Wait

Clock = list[int]
NEVER = 1 << 62


class Access(NamedTuple):
    """A read or write of `memory` by `what`, on a stream of `rank`.

    `thread`: the index of its logical thread. `begin`: the thread's vector clock when the access begins. `end`: the
    thread's own component of the clock when the access ends, or `NEVER`.
    """

    rank: int
    stream: str
    what: str
    writes: bool
    memory: Range
    thread: int
    begin: Clock
    end: int

    def before(self, later: Access) -> bool:
        """Return whether this access ends before `later` begins in every possible execution."""
        return later.begin[self.thread] >= self.end

    def __str__(self) -> str:
        address, nbytes = self.memory
        return f"{self.what} {'writes' if self.writes else 'reads'} [{address:#x}, +{nbytes}) on stream {self.stream}"


class Race(NamedTuple):
    """Two unordered accesses to the same bytes, at least one of them a write."""

    first: Access
    second: Access

    def __str__(self) -> str:
        return f"rank {self.first.rank}: {self.first}, and nothing orders it with: {self.second}"


def find_races(traces: Sequence[Sequence[Entry]]) -> list[Race]:
    """Return all races of a run. `traces`: the entries that each rank issued, as in `SimWorld.trace`."""
    return unordered(_Run(traces).accesses())


def unordered(accesses: Iterable[Access]) -> list[Race]:
    """Return all pairs of unordered accesses to the same bytes of a rank, at least one of them a write."""
    races = []
    by_address = sorted(accesses, key=lambda access: (access.rank, access.memory[0]))
    for n, first in enumerate(by_address):
        for second in by_address[n + 1 :]:
            if second.rank != first.rank or second.memory[0] >= sum(first.memory):
                break
            if (first.writes or second.writes) and not first.before(second) and not second.before(first):
                races.append(Race(first, second))
    return races


class _Run:
    """A replay of the traces that computes the vector clocks. Each entry runs after the entries that it depends on."""

    def __init__(self, traces: Sequence[Sequence[Entry]]) -> None:
        threads: defaultdict[tuple[int, str], list[Entry]] = defaultdict(list)
        self._previous: dict[Launch, Launch] = {}
        last: dict[Communicator, Launch] = {}
        for entry in (entry for trace in traces for entry in trace):
            threads[entry.rank, entry.stream].append(entry)
            if isinstance(entry, Launch):
                if entry.comm in last:
                    self._previous[entry] = last[entry.comm]
                last[entry.comm] = entry
        self._threads = list(threads.values())
        self._clocks: list[Clock] = [[0] * len(self._threads) for _ in self._threads]
        self._records: dict[Record, Clock] = {}
        self._starts: dict[Launch, Clock] = {}
        self._ends: dict[Launch, Clock] = {}
        self._accesses: list[Access] = []

    def accesses(self) -> list[Access]:
        """Return every access with its clocks."""
        reached = [0] * len(self._threads)
        moved = True
        while moved:
            moved = False
            for thread, entries in enumerate(self._threads):
                while reached[thread] < len(entries):
                    started = len(self._starts)
                    passed = self._pass(thread, entries[reached[thread]])
                    moved = moved or passed or len(self._starts) > started
                    if not passed:
                        break
                    reached[thread] += 1
        for thread, entries in enumerate(self._threads):
            for launch in entries:
                if isinstance(launch, Launch) and launch in self._starts and launch not in self._ends:
                    self._accesses.extend(_of_launch(launch, thread, self._starts[launch], NEVER))
        return self._accesses

    def _pass(self, thread: int, entry: Entry) -> bool:
        """Advance a thread past one entry if all entries that it depends on have been passed.

        Return whether the thread has advanced.
        """
        if isinstance(entry, Wait):
            if entry.record not in self._records:
                return False
            self._join(thread, self._records[entry.record])
        elif isinstance(entry, Launch):
            return self._pass_launch(thread, entry)
        now = self._tick(thread)
        if isinstance(entry, Record):
            self._records[entry] = now
        elif isinstance(entry, Touch):
            for ranges, writes in ((entry.reads, False), (entry.writes, True)):
                for memory in ranges:
                    access = Access(entry.rank, entry.stream, str(entry), writes, memory, thread, now, now[thread])
                    self._accesses.append(access)
        return True

    def _pass_launch(self, thread: int, launch: Launch) -> bool:
        """Start a launch after the previous launch of its communicator; complete it after all partners have started."""
        if launch not in self._starts:
            previous = self._previous.get(launch)
            if previous is not None:
                if previous not in self._ends:
                    return False
                self._join(thread, self._ends[previous])
            self._starts[launch] = self._tick(thread)
        if not launch.aborted:
            partners = [op.partner.launch for op in launch.ops if op.partner and op.partner.launch in self._starts]
            if len(partners) < len(launch.ops):
                return False
            for partner in partners:
                self._join(thread, self._starts[partner])
        self._ends[launch] = self._tick(thread)
        self._accesses.extend(_of_launch(launch, thread, self._starts[launch], self._ends[launch][thread]))
        return True

    def _join(self, thread: int, clock: Clock) -> None:
        self._clocks[thread] = list(map(max, self._clocks[thread], clock))

    def _tick(self, thread: int) -> Clock:
        self._clocks[thread][thread] += 1
        return list(self._clocks[thread])


def _of_launch(launch: Launch, thread: int, begin: Clock, end: int) -> Iterator[Access]:
    """Yield the accesses of the ops of a launch."""
    for op in launch.ops:
        memory = (op.address, op.nbytes)
        yield Access(launch.rank, launch.stream, str(op), op.kind == "recv", memory, thread, begin, end)

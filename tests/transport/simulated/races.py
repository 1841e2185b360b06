"""Races of a run: two accesses to the same bytes that nothing orders, found from the trace of all ranks.

Each stream of each rank is a logical thread with a vector clock (Mattern 1988). Order comes from: a stream's own
sequence; an event's record and its wait; a communicator's launches, which run one after another; a rendezvous, since
both ends of a message complete after both have started. The order in which a host issues to two streams orders nothing.
Guarantees: the verdict depends on what was issued, never on what happened to run first. A send reads and a receive
writes its buffer from its launch's start to its completion, without end where it never completed.
Not covered: the world; compute is what `SimDevice.touch` told. It is stricter than CUDA in one point: that a host saw
an event complete orders nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.transport.simulated.streams import Communicator, Entry, Launch, Range, Record, Touch, Wait

Clock = list[int]
NEVER = 1 << 62


class Access(NamedTuple):
    """`held` is read or written from the moment `begin` to tick `end` of the logical thread `thread`."""

    rank: int
    stream: str
    what: str
    writes: bool
    held: Range
    thread: int
    begin: Clock
    end: int

    def before(self, other: Access) -> bool:
        """Whether this has ended when the other begins, on every run."""
        return other.begin[self.thread] >= self.end

    def __str__(self) -> str:
        address, nbytes = self.held
        return f"{self.what} {'writes' if self.writes else 'reads'} [{address:#x}, +{nbytes}) on stream {self.stream}"


class Race(NamedTuple):
    """Two accesses that nothing orders, at least one of them a write."""

    one: Access
    other: Access

    def __str__(self) -> str:
        return f"rank {self.one.rank}: {self.one}, and nothing orders it with: {self.other}"


def find_races(traces: Sequence[Sequence[Entry]]) -> list[Race]:
    """All races of a run, `traces` by rank as `SimWorld.trace` has them."""
    return unordered(_Run(traces).accesses())


def unordered(accesses: Iterable[Access]) -> list[Race]:
    """Each two accesses to the same bytes of a rank that nothing orders, one of them a write."""
    races = []
    by_place = sorted(accesses, key=lambda access: (access.rank, access.held[0]))
    for n, one in enumerate(by_place):
        for other in by_place[n + 1 :]:
            if other.rank != one.rank or other.held[0] >= sum(one.held):
                break
            if (one.writes or other.writes) and not one.before(other) and not other.before(one):
                races.append(Race(one, other))
    return races


class _Run:
    """The run again, in an order that respects every edge, with clocks."""

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
        """Every access, with its clocks."""
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
        """Go past one entry, if all that comes before it on other threads has been passed."""
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
            for held, writes in [*((held, False) for held in entry.reads), *((held, True) for held in entry.writes)]:
                access = Access(entry.rank, entry.stream, str(entry), writes, held, thread, now, now[thread])
                self._accesses.append(access)
        return True

    def _pass_launch(self, thread: int, launch: Launch) -> bool:
        """A launch starts behind its communicator's previous one and completes when all its partners have started."""
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

    def _join(self, thread: int, other: Clock) -> None:
        self._clocks[thread] = list(map(max, self._clocks[thread], other))

    def _tick(self, thread: int) -> Clock:
        self._clocks[thread][thread] += 1
        return list(self._clocks[thread])


def _of_launch(launch: Launch, thread: int, begin: Clock, end: int) -> Iterator[Access]:
    """What the ops of a launch read and write."""
    for op in launch.ops:
        held = (op.address, op.nbytes)
        yield Access(launch.rank, launch.stream, str(op), op.kind == "recv", held, thread, begin, end)

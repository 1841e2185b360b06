"""The simulated machine that all ranks share: issued work, blocked threads, violations and scripted faults.

Ranks are threads of one process. Compute runs immediately on the calling thread, so that thread is the rank's compute
stream: an event recorded there is complete immediately, and a wait there blocks the host. All other streams, including
those of `SimDevice.user_stream`, are queues (`streams.py`). Each call into the world advances them, under one lock;
there is no background thread.
Guarantees: usage that NCCL leaves undefined, or tolerates only for small messages, is recorded as a violation. No wait
lasts longer than `limit_s`; its error then lists what every rank waits for.
Not covered: calls of the binding (`library.py`), torch (`device.py`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ringattn.transport.nccl.binding import Status
from tests.transport.simulated.streams import (
    COMPUTE,
    Communicator,
    Entry,
    Launch,
    Memory,
    Op,
    Queues,
    Range,
    Record,
    Registry,
    Touch,
    Wait,
)

if TYPE_CHECKING:
    from tests.transport.simulated.device import SimDevice

# --- scripted faults --------------------------------------------------------------------------------------------------


class Died(BaseException):
    """The error in the threads of a rank whose process died. A BaseException, so no `except Exception` catches it."""


@dataclass(frozen=True)
class Die:
    """A fault: the process of `rank` dies just before or after it launches hop `hop`.

    Hops are launched groups, counted from 0.
    """

    rank: int
    hop: int
    after: bool = False


@dataclass(frozen=True)
class Stall:
    """A fault: call number `call` (from 0) of `function` on `rank` does not return before `SimWorld.release`."""

    rank: int
    function: str
    call: int = 0


@dataclass(frozen=True)
class Answer:
    """A fault: call number `call` (from 0) of `function` on `rank` only returns or raises `status`."""

    rank: int
    function: str
    status: Status
    call: int = 0


Fault = Die | Stall | Answer


class Script:
    """The scripted faults, with the counts of calls and hops that trigger them."""

    def __init__(self, world: SimWorld, faults: Sequence[Fault]) -> None:
        self._world, self._faults = world, faults
        self._calls: Counter[tuple[int, str]] = Counter()
        self._hops: Counter[int] = Counter()
        self._released: set[int] = set()

    def check_alive(self, rank: int) -> None:
        """Raise `Died` if the process of `rank` is gone."""
        if rank in self._world.dead:
            raise Died(f"rank {rank} died")

    def enter(self, rank: int, function: str) -> Status | None:
        """Count a call and apply its scripted fault. Return the status that the call must return instead, or None.

        The caller must not hold the lock, because a fault may stall the call here.
        """
        with self._world.changed:
            self.check_alive(rank)
            call = self._calls[rank, function]
            self._calls[rank, function] += 1
        for fault in self._faults:
            if isinstance(fault, Die) or (fault.rank, fault.function, fault.call) != (rank, function, call):
                continue
            if isinstance(fault, Answer):
                return fault.status
            self._stall(rank)
        return None

    def ending_group(self, rank: int) -> None:
        """Let the rank die before its next hop is launched, if that is a scripted fault."""
        self._die_if(rank, Die(rank, self._hops[rank]))

    def launched(self, rank: int) -> None:
        """Count a launched hop."""
        self._hops[rank] += 1

    def leave(self, rank: int) -> None:
        """Let the rank die after its last launched hop, if that is a scripted fault."""
        self._die_if(rank, Die(rank, self._hops[rank] - 1, after=True))

    def release(self, rank: int) -> None:
        """End the stalls of `rank`, now and later."""
        with self._world.changed:
            self._released.add(rank)
            self._world.changed.notify_all()

    def _die_if(self, rank: int, death: Die) -> None:
        if death in self._faults:
            with self._world.changed:
                self._world.dead.add(rank)
                self._world.changed.notify_all()
            raise Died(f"rank {rank} died at hop {death.hop}")

    def _stall(self, rank: int) -> None:
        with self._world.changed:
            ended = self._world.changed.wait_for(
                lambda: rank in self._released or rank in self._world.dead, self._world.limit_s
            )
            self.check_alive(rank)
        if not ended:
            raise TimeoutError(f"rank {rank} was stalled and never released within {self._world.limit_s} s")


class MortalStore:
    """A rank's connection to a store. After the rank has died, every call raises `RuntimeError`, as torch's does."""

    def __init__(self, world: SimWorld, rank: int, store: Any) -> None:
        self._world, self._rank, self._store = world, rank, store

    def clone(self) -> MortalStore:
        """Return another connection of the same rank."""
        return MortalStore(self._world, self._rank, self._store.clone())

    def __getattr__(self, name: str) -> Any:
        if self._rank in self._world.dead:
            raise RuntimeError(f"rank {self._rank} died, and its connection to the store with it")
        return getattr(self._store, name)


# --- the world --------------------------------------------------------------------------------------------------------


class Deadlock(AssertionError):
    """The error of a wait that lasted longer than `SimWorld.limit_s`."""


class Waiter(NamedTuple):
    """A blocked thread. `ready`: whether it may continue; `needs`: the entries that it waits for."""

    rank: int
    what: str
    ready: Callable[[], bool]
    needs: Callable[[], Iterable[Entry]]


class Graph:
    """A CUDA graph: the entries that one rank issued during a capture. The graph is alive until `reset`.

    A capture runs none of the entries; a replay issues them in the captured order. The simulated compute is host code:
    it runs once, during the capture, and a replay only repeats its entries in the trace.
    Source: CUDA programming guide, "Stream capture"; NCCL user guide, "Using NCCL with CUDA graphs".
    """

    def __init__(self, world: SimWorld, rank: int) -> None:
        self.rank = rank
        self._world = world
        self._entries: list[Entry] = []
        self._alive = True

    def add(self, entry: Entry) -> None:
        """Capture one entry."""
        if isinstance(entry, Wait) and entry.record not in self._entries:
            self._world.violate(self.rank, f"{entry} that was recorded outside of the capture")
        self._entries.append(entry)

    def uses(self, comm: Communicator) -> bool:
        """Return whether the graph is alive and launches on `comm`. Then `comm` cannot be destroyed or aborted."""
        return self._alive and any(isinstance(entry, Launch) and entry.comm is comm for entry in self._entries)

    def replay(self) -> None:
        """Issue all entries again, from the calling thread. A wait on the compute stream blocks this thread."""
        world, records = self._world, {}
        for entry in self._entries:
            if isinstance(entry, Record):
                records[entry] = Record(self.rank, entry.stream, captured=False)
                world.issue(records[entry])
            elif isinstance(entry, Wait):
                world.issue(Wait(self.rank, entry.stream, records.get(entry.record, entry.record)))
            elif isinstance(entry, Touch):
                world.issue(Touch(self.rank, entry.stream, entry.reads, entry.writes, entry.label, entry.held))
            elif isinstance(entry, Launch):
                launch = entry.again(world.next_group(self.rank))
                launch.comm.number(launch)
                world.submit(launch)

    def reset(self) -> None:
        """Destroy the graph."""
        self._alive = False


class SimWorld:
    """`world_size` ranks with one GPU each.

    `polls`: how often `state` returns IN_PROGRESS after opening, finalizing and each group, before it returns SUCCESS.
    `lazy`: bytes move only when a host blocks on an event or queries it, and then only those that the event needs, so
    that a reader without the necessary wait reads old bytes. `connects`: a launch is in progress until each of its
    peers has launched a group to this rank, now or earlier. No wait lasts longer than `limit_s`. `any_memory`,
    `memory_bytes`: see `any_address` and `capacity` of `Memory`.
    """

    def __init__(
        self,
        world_size: int,
        *,
        polls: int = 2,
        lazy: bool = False,
        limit_s: float = 30.0,
        connects: bool = False,
        any_memory: bool = False,
        memory_bytes: int | None = None,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.world_size, self.polls, self.limit_s = world_size, polls, limit_s
        self.violations: list[str] = []
        self.trace: list[list[Entry]] = [[] for _ in range(world_size)]
        self.devices: dict[int, SimDevice] = {}
        self.streams: dict[int, tuple[int, str]] = {}
        self.dead: set[int] = set()
        self.memory = Memory(any_memory, memory_bytes)
        self.script = Script(self, faults)
        self.registry = Registry(polls, self.violate)
        self.changed = threading.Condition()
        self._waiters: list[Waiter] = []
        self._lazy = lazy
        self._queues = Queues(self.memory, self.violate, self.dead)
        self._launched_to: set[tuple[int, int]] | None = set() if connects else None
        self._capturing: dict[int, Graph] = {}
        self._graphs: list[Graph] = []
        self._groups: Counter[int] = Counter()

    # --- for tests ---------------------------------------------------------------------------------------------------

    def calls(self, rank: int) -> list[Op]:
        """Return the sends and receives of `rank`, in the order in which they were launched."""
        return [op for entry in self.trace[rank] if isinstance(entry, Launch) for op in entry.ops]

    @contextmanager
    def capture(self, rank: int) -> Iterator[Graph]:
        """Capture the entries that `rank` issues in a graph, instead of running them."""
        graph = self._capturing[rank] = Graph(self, rank)
        self._graphs.append(graph)
        try:
            yield graph
        finally:
            if any(comm.unlaunched for comm in self.registry.of(rank)):
                self.violate(rank, "the capture ends while a group is still in progress")
            del self._capturing[rank]

    def finish(self, touch: Touch) -> None:
        """Release held compute. It runs when it is the first entry of its stream."""
        with self.changed:
            touch.held = False
            self.settle()
            self.changed.notify_all()

    def touching(self, rank: int, memory: Range) -> Touch | None:
        """Return a pending compute entry of `rank` that reads or writes some of these bytes, or None."""
        return self._queues.touching(rank, memory)

    def release(self, rank: int) -> None:
        """End the stalls of `rank`, now and later."""
        self.script.release(rank)

    def report(self) -> str:
        """Return a text that says what every rank waits for, one line per rank."""
        with self.changed:
            lines: list[str] = []
            for rank in range(self.world_size):
                waits = ["died"] if rank in self.dead else []
                waits += [f"host: {waiter.what}" for waiter in self._waiters if waiter.rank == rank]
                waits += [f"stream {head.stream}: {head}" for head in self._queues.heads(rank)]
                for comm in self.registry.of(rank):
                    if comm.unlaunched is not None:
                        waits.append(f"not launched, because state() has not returned SUCCESS: {comm.unlaunched}")
                lines.append(f"rank {rank}: {'; '.join(waits) or 'waits for nothing'}")
            return "\n".join(lines)

    def connected(self, rank: int, peers: Iterable[int]) -> bool:
        """Record that `rank` launches to `peers`. Return whether all of them have launched to `rank`."""
        if self._launched_to is None:
            return True
        self._launched_to |= {(rank, peer) for peer in peers}
        return all((peer, rank) in self._launched_to for peer in peers)

    # --- for library, device and graph -------------------------------------------------------------------------------

    def violate(self, rank: int, text: str) -> None:
        """Record a violation."""
        self.violations.append(f"rank {rank}: {text}")

    def next_group(self, rank: int) -> int:
        """Count a group of `rank`, and return its number."""
        self._groups[rank] += 1
        return self._groups[rank]

    def capturing(self, rank: int) -> bool:
        """Return whether `rank` captures a graph."""
        return rank in self._capturing

    def in_graph(self, comm: Communicator) -> bool:
        """Return whether a graph that was not reset launches on `comm`."""
        return any(graph.uses(comm) for graph in self._graphs)

    def issue(self, entry: Entry) -> None:
        """Put an entry on its stream. An entry of the compute stream runs before this returns, and a wait blocks."""
        with self.changed:
            self.script.check_alive(entry.rank)
            for comm in self.registry.of(entry.rank):
                if comm.unlaunched is not None and comm.unlaunched.stream == entry.stream:
                    self.violate(entry.rank, f"{entry} on a stream whose group is still in progress")
            if entry.rank in self._capturing:
                self._capturing[entry.rank].add(entry)
                return
            self.trace[entry.rank].append(entry)
            if entry.stream != COMPUTE:
                self._put(entry)
                return
            if isinstance(entry, Wait):
                record = entry.record
                self.block(entry.rank, str(entry), lambda: record.complete, lambda: [record])
            if isinstance(entry, Touch):
                self._queues.compute(entry)
            entry.complete = True

    def submit(self, launch: Launch) -> None:
        """Put a launch on its stream, or in the graph that is being captured."""
        with self.changed:
            if launch.rank in self._capturing:
                self._capturing[launch.rank].add(launch)
                return
            self.trace[launch.rank].append(launch)
            self.script.launched(launch.rank)
            self._put(launch)

    def settle(self, needs: Iterable[Entry] = ()) -> None:
        """Advance the streams: run every entry that can run or, if lazy, only the ones that `needs` depend on."""
        if self._queues.advance(self._queues.needed(needs) if self._lazy else None):
            self.changed.notify_all()

    def drop(self, comm: Communicator) -> None:
        """Remove the groups of `comm` from their streams, which continue. The peers do not notice."""
        self._queues.drop(comm.in_flight())
        comm.launches.clear()
        comm.unlaunched = None
        self.settle()
        self.changed.notify_all()

    def block(
        self, rank: int, what: str, ready: Callable[[], bool], needs: Callable[[], Iterable[Entry]] = tuple
    ) -> None:
        """Block the calling thread until `ready()`, for the reason `what`.

        Raises `Deadlock` after `limit_s`, and `Died` if the rank dies. `needs()`: the entries that `ready` depends on.
        """
        waiter, until = Waiter(rank, what, ready, needs), time.monotonic() + self.limit_s
        with self.changed:
            self._waiters.append(waiter)
            try:
                while True:
                    self.settle(needs())
                    if ready():
                        return
                    self.script.check_alive(rank)
                    if (left_s := until - time.monotonic()) <= 0:
                        raise Deadlock(f"rank {rank}: {what}: not within {self.limit_s} s\n{self.report()}")
                    self.changed.wait(left_s)
            finally:
                self._waiters.remove(waiter)

    def _put(self, entry: Entry) -> None:
        """Put an entry on its stream, and wake the blocked threads, because one may wait for this entry."""
        self._queues.put(entry)
        self.settle()
        self.changed.notify_all()

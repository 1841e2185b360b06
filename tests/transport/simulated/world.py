"""The machine that all simulated ranks share: what they issued, who waits for whom, and what is forbidden.

Ranks are threads of one process. Compute runs at once on the calling thread, so that thread is the rank's compute
stream: an event recorded there is complete at once, and a wait there blocks the host. All other streams, the caller's
further ones among them (`SimDevice.user_stream`), are queues (`streams.py`). Whoever calls in advances them, under the
one lock; nothing runs by itself.
Guarantees: what NCCL leaves undefined, or forgives for small messages only, is a violation here, in words; no wait
outlasts `limit_s`, and then it says who waits for whom.
Not covered: the bindings' calls (`library.py`), torch (`device.py`).
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
    """The rank's process is gone. No code of a rank may catch it."""


@dataclass(frozen=True)
class Die:
    """The process of `rank` ends just before or after its hop `hop` is launched. Hops count launched groups from 0."""

    rank: int
    hop: int
    after: bool = False


@dataclass(frozen=True)
class Stall:
    """Call `call` (from 0) of a binding's `function` does not return before `SimWorld.release`."""

    rank: int
    function: str
    call: int = 0


@dataclass(frozen=True)
class Answer:
    """Call `call` of `function` does nothing and returns, or raises, `status`."""

    rank: int
    function: str
    status: Status
    call: int = 0


Fault = Die | Stall | Answer


class Script:
    """Counts calls and hops, and lets the faults happen."""

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
        """At each call, without the lock: what it must answer instead of working, None for nothing."""
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
        """Die before the hop that is about to be launched."""
        self._die_if(rank, Die(rank, self._hops[rank]))

    def launched(self, rank: int) -> None:
        """Count a hop that goes on its stream now."""
        self._hops[rank] += 1

    def leave(self, rank: int) -> None:
        """Die after the hop that was launched last."""
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
    """A rank's connection to a store, which ends with the rank: then every call raises `RuntimeError`, as torch's."""

    def __init__(self, world: SimWorld, rank: int, store: Any) -> None:
        self._world, self._rank, self._store = world, rank, store

    def clone(self) -> MortalStore:
        """Another connection of the same rank."""
        return MortalStore(self._world, self._rank, self._store.clone())

    def __getattr__(self, name: str) -> Any:
        if self._rank in self._world.dead:
            raise RuntimeError(f"rank {self._rank} died, and its connection to the store with it")
        return getattr(self._store, name)


# --- the world --------------------------------------------------------------------------------------------------------


class Deadlock(AssertionError):
    """A wait reached the world's limit."""


class Waiter(NamedTuple):
    """A blocked thread. `ready`: whether it may go on; `needs`: the entries that it waits for."""

    rank: int
    what: str
    ready: Callable[[], bool]
    needs: Callable[[], Iterable[Entry]]


class Graph:
    """A CUDA graph: what one rank issued during a capture, kept to be issued again. Alive until `reset`.

    A capture runs nothing of what the streams are given; a replay issues it in the captured order. The caller's own
    compute is host code here: it runs once, at the capture, and a replay only repeats what it told the trace.
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
        """Whether the graph lives and launches on `comm`: then the communicator cannot end."""
        return self._alive and any(isinstance(entry, Launch) and entry.comm is comm for entry in self._entries)

    def replay(self) -> None:
        """Issue everything again, from the thread that computes; its waits of the compute stream block."""
        world, fresh = self._world, {}
        for entry in self._entries:
            if isinstance(entry, Record):
                fresh[entry] = Record(self.rank, entry.stream, captured=False)
                world.issue(fresh[entry])
            elif isinstance(entry, Wait):
                world.issue(Wait(self.rank, entry.stream, fresh.get(entry.record, entry.record)))
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
    """`world_size` ranks with a GPU each.

    `polls`: answers IN_PROGRESS of `state` before SUCCESS, after opening, splitting, finalizing and each group.
    `lazy`: bytes move only when a host blocks on an event or queries it, and then only those that the event needs, so a
    missing wait reads old bytes. `connects`: a launch is in progress until each of its peers has launched something to
    this rank, now or before. No wait outlasts `limit_s`. `any_memory`, `memory_bytes`: see `Memory`.
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

    # --- what tests ask ----------------------------------------------------------------------------------------------

    def calls(self, rank: int) -> list[Op]:
        """The sends and receives of `rank` in the order in which they were launched."""
        return [op for entry in self.trace[rank] if isinstance(entry, Launch) for op in entry.ops]

    @contextmanager
    def capture(self, rank: int) -> Iterator[Graph]:
        """Keep what `rank` issues inside in a graph instead of running it."""
        graph = self._capturing[rank] = Graph(self, rank)
        self._graphs.append(graph)
        try:
            yield graph
        finally:
            if any(comm.unlaunched for comm in self.registry.of(rank)):
                self.violate(rank, "the capture ends while a group is still in progress")
            del self._capturing[rank]

    def finish(self, touch: Touch) -> None:
        """Let compute that was held run, as soon as its stream comes to it."""
        with self.changed:
            touch.held = False
            self.settle()
            self.changed.notify_all()

    def touching(self, rank: int, held: Range) -> Touch | None:
        """Compute of `rank` that has not run and reads or writes some of these bytes."""
        return self._queues.touching(rank, held)

    def release(self, rank: int) -> None:
        """End the stalls of `rank`, now and later."""
        self.script.release(rank)

    def report(self) -> str:
        """What every rank waits for, one line a rank."""
        with self.changed:
            lines: list[str] = []
            for rank in range(self.world_size):
                said = ["died"] if rank in self.dead else []
                said += [f"host: {waiter.what}" for waiter in self._waiters if waiter.rank == rank]
                said += [f"stream {head.stream}: {head}" for head in self._queues.heads(rank)]
                for comm in self.registry.of(rank):
                    if comm.unlaunched is not None:
                        said.append(f"not launched, for state() has not said SUCCESS: {comm.unlaunched}")
                lines.append(f"rank {rank}: {'; '.join(said) or 'waits for nothing'}")
            return "\n".join(lines)

    def connected(self, rank: int, peers: Iterable[int]) -> bool:
        """Whether `rank`, which launches to `peers` now or before, and all of them have met."""
        if self._launched_to is None:
            return True
        self._launched_to |= {(rank, peer) for peer in peers}
        return all((peer, rank) in self._launched_to for peer in peers)

    # --- for library, device and graph -------------------------------------------------------------------------------

    def violate(self, rank: int, text: str) -> None:
        """Keep a broken rule."""
        self.violations.append(f"rank {rank}: {text}")

    def next_group(self, rank: int) -> int:
        """The number of the group that `rank` ends now."""
        self._groups[rank] += 1
        return self._groups[rank]

    def capturing(self, rank: int) -> bool:
        """Whether `rank` captures a graph."""
        return rank in self._capturing

    def in_graph(self, comm: Communicator) -> bool:
        """Whether a living graph launches on `comm`."""
        return any(graph.uses(comm) for graph in self._graphs)

    def issue(self, entry: Entry) -> None:
        """Give `entry` to its stream. On the compute stream it has then run: a wait blocks for it."""
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
        """Put a launch on its stream, or into the graph that is being captured."""
        with self.changed:
            if launch.rank in self._capturing:
                self._capturing[launch.rank].add(launch)
                return
            self.trace[launch.rank].append(launch)
            self.script.launched(launch.rank)
            self._put(launch)

    def settle(self, needs: Iterable[Entry] = ()) -> None:
        """Let the streams run: all that can, or when lazy only what `needs` wait for."""
        if self._queues.advance(self._queues.needed(needs) if self._lazy else None):
            self.changed.notify_all()

    def drop(self, comm: Communicator) -> None:
        """Take the groups of an end off the streams, which go on. Its peers are not told."""
        self._queues.drop(comm.in_flight())
        comm.launches.clear()
        comm.unlaunched = None
        self.settle()
        self.changed.notify_all()

    def block(
        self, rank: int, what: str, ready: Callable[[], bool], needs: Callable[[], Iterable[Entry]] = tuple
    ) -> None:
        """Hold the calling thread until `ready()`. Raises `Deadlock`, and `Died` when the rank dies meanwhile."""
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
        """On its stream, where it may be what a waiting host needs."""
        self._queues.put(entry)
        self.settle()
        self.changed.notify_all()

"""Communicators: what all ranks of one share, what each rank's handle stands for, and how they come to be.

Guarantees: a communicator is full when as many ranks as it is made for have come to one key, each once; the k-th send
from a to b and the k-th receive on b from a are found under one key.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ringattn.transport.nccl.binding import CommConfig, Status
from tests.transport.simulated.entries import Launch, Op, Range

FIRST_HANDLE = 0x1000


class Phase(Enum):
    """The life of one rank's end."""

    OPENING = "opening"
    READY = "ready"
    FINALIZED = "finalized"
    LEAVING = "being destroyed"
    DESTROYED = "destroyed"
    ABORTED = "aborted"


@dataclass(eq=False)
class Clique:
    """One communicator as its ranks share it. `world_size` is 0 until it is known; `ops`: by kind, rank, peer, number.

    `splits`: for each split of it the colors and keys by rank.
    """

    name: str
    world_size: int
    members: dict[int, Communicator] = field(default_factory=dict)
    ops: dict[tuple[str, int, int, int], Op] = field(default_factory=dict)
    splits: defaultdict[int, dict[int, tuple[int, int]]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def full(self) -> bool:
        """Whether every rank has come."""
        return 0 < self.world_size == len(self.members)

    def reached(self, *phases: Phase) -> bool:
        """Whether every rank is in one of these phases."""
        return all(member.phase in phases for member in self.members.values())

    def opposite(self, rank: int, op: Op) -> Op | None:
        """The other end of an op of `rank`, if it has been issued."""
        other = "recv" if op.kind == "send" else "send"
        return self.ops.get((other, op.peer, rank, op.number))


@dataclass(eq=False)
class Communicator:
    """One rank's end. `process`: its rank in the simulated world; `rank`: in the communicator.

    `polls_left`: answers of `state` that are still IN_PROGRESS; `unlaunched`: the group that runs after them;
    `user`: the thread that is inside a call or has a group open.
    """

    handle: int
    process: int
    rank: int
    clique: Clique
    config: CommConfig
    polls_left: int
    phase: Phase = Phase.OPENING
    error: Status = Status.SUCCESS
    last_words: str = ""
    unlaunched: Launch | None = None
    user: int | None = None
    launches: deque[Launch] = field(default_factory=deque)
    registered: dict[int, Range] = field(default_factory=dict)
    split_count: int = 0
    _counts: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def gone(self) -> bool:
        """Whether the handle is freed."""
        return self.phase in (Phase.DESTROYED, Phase.ABORTED)

    def in_flight(self) -> list[Launch]:
        """Groups that were ended and have not completed."""
        return [*self.launches, *([self.unlaunched] if self.unlaunched else [])]

    def number(self, launch: Launch) -> None:
        """Give the ops of a launch their place in the order of this communicator."""
        for op in launch.ops:
            op.number = self._counts[op.kind, op.peer]
            self._counts[op.kind, op.peer] += 1
            self.clique.ops[op.kind, self.rank, op.peer, op.number] = op

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether this memory is registered with this end."""
        return any(at <= address and address + nbytes <= at + size for at, size in self.registered.values())

    def fail(self, status: Status, words: str) -> None:
        """An asynchronous error: nothing moves any more; the first one stays."""
        if self.error is Status.SUCCESS:
            self.error, self.last_words = status, words

    def __str__(self) -> str:
        return f"communicator {self.clique.name}"


class Registry:
    """All communicators. `uuid_of(process)` is None where several ranks may share a GPU."""

    def __init__(self, polls: int, violate: Callable[[int, str], None], uuid_of: Callable[[int], str] | None) -> None:
        self.by_handle: dict[int, Communicator] = {}
        self.new_handle = itertools.count(FIRST_HANDLE).__next__
        self._polls, self._violate, self._uuid_of = polls, violate, uuid_of
        self._cliques: dict[object, Clique] = {}

    def of(self, process: int) -> list[Communicator]:
        """The ends that `process` has opened and not freed."""
        return [comm for comm in self.by_handle.values() if comm.process == process and not comm.gone]

    def join(self, unique_id: bytes, world_size: int, process: int, rank: int, config: CommConfig) -> Communicator:
        """One more end of the communicator of this id and size."""
        clique = self._clique((unique_id, world_size), world_size)
        if rank in clique.members:
            self._violate(process, f"rank {rank} joined communicator {clique.name} a second time")
            clique = Clique(f"{clique.name} (second rank {rank})", world_size)
        comm = self._end(process, rank, clique, config)
        if clique.full:
            self._refuse_duplicates(clique)
        return comm

    def split(self, parent: Communicator, color: int, key: int, config: CommConfig) -> Communicator:
        """One more end of a child, whose ranks are known when all ranks of the parent have come."""
        split = parent.split_count
        parent.split_count += 1
        arrivals = parent.clique.splits[split]
        arrivals[parent.rank] = (color, key)
        child = self._end(parent.process, parent.rank, self._clique((parent.clique, split, color), 0), config)
        if len(arrivals) == parent.clique.world_size:
            for each in {color for color, _ in arrivals.values()}:
                self._settle(self._clique((parent.clique, split, each), 0), arrivals)
        return child

    def _clique(self, key: object, world_size: int) -> Clique:
        return self._cliques.setdefault(key, Clique(f"#{len(self._cliques)}", world_size))

    def _end(self, process: int, rank: int, clique: Clique, config: CommConfig) -> Communicator:
        comm = Communicator(self.new_handle(), process, rank, clique, config, self._polls)
        clique.members[rank] = self.by_handle[comm.handle] = comm
        return comm

    def _settle(self, clique: Clique, arrivals: dict[int, tuple[int, int]]) -> None:
        """Number the ranks of a child, which are known by their parent's ranks so far, by key and then by parent."""
        members = [clique.members[rank] for rank in sorted(clique.members, key=lambda r: (arrivals[r][1], r))]
        clique.members, clique.world_size = dict(enumerate(members)), len(members)
        for rank, member in clique.members.items():
            member.rank = rank

    def _refuse_duplicates(self, clique: Clique) -> None:
        """NCCL's check at opening (init.cc of 2.28): no two ranks on one GPU."""
        if self._uuid_of is None:
            return
        first: dict[str, int] = {}
        for rank, member in sorted(clique.members.items()):
            uuid = self._uuid_of(member.process)
            if uuid in first:
                for each in clique.members.values():
                    words = f"Duplicate GPU detected : rank {first[uuid]} and rank {rank} both on {uuid}"
                    each.fail(Status.INVALID_USAGE, words)
            first.setdefault(uuid, rank)

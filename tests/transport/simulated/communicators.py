"""Communicators: what all ranks of one share, what each rank's handle stands for, and how they come to be.

Guarantees: a communicator is full when as many ranks as it is made for have come to one key, each once; the k-th send
from a to b and the k-th receive on b from a are found under one key.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
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
    """One communicator as its ranks share it. `ops`: by kind, rank, peer, number."""

    name: str
    world_size: int
    members: dict[int, Communicator] = field(default_factory=dict)
    ops: dict[tuple[str, int, int, int], Op] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether every rank has come."""
        return self.world_size == len(self.members)

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
    """All communicators."""

    def __init__(self, polls: int, violate: Callable[[int, str], None]) -> None:
        self.by_handle: dict[int, Communicator] = {}
        self.new_handle = itertools.count(FIRST_HANDLE).__next__
        self._polls, self._violate = polls, violate
        self._cliques: dict[object, Clique] = {}

    def of(self, process: int) -> list[Communicator]:
        """The ends that `process` has opened and not freed."""
        return [comm for comm in self.by_handle.values() if comm.process == process and not comm.gone]

    def join(self, unique_id: bytes, world_size: int, process: int, rank: int, config: CommConfig) -> Communicator:
        """One more end of the communicator of this id and size."""
        clique = self._cliques.setdefault((unique_id, world_size), Clique(f"#{len(self._cliques)}", world_size))
        if rank in clique.members:
            self._violate(process, f"rank {rank} joined communicator {clique.name} a second time")
            clique = Clique(f"{clique.name} (second rank {rank})", world_size)
        comm = Communicator(self.new_handle(), process, rank, clique, config, self._polls)
        clique.members[rank] = self.by_handle[comm.handle] = comm
        return comm

"""How K/V blocks reach their readers: each block goes along a tree from its owner, and a rank knows its own edges.

A tree is a pure function of (owner, reader): who hands the block to the reader, in which step it is read there, and
whom else that message serves. So a rank finds its own messages without making those of the others, and the schedule of
all ranks is what these parts are together.
       4 ranks, the tree of KV0
       ring           0 > 1 > 2 > 3        a chain, one hop a step
       direct         0 > 1, 0 > 2, 0 > 3  a star, one message a step
       all_gather     0 > 1, 0 > 2, 0 > 3  a star, all in the first step
       bidirectional  0 > 1 > 2, 0 > 3     two chains
Guarantees: every row travels only to where it is read, or on the way there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import numpy as np

from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints
from ringattn.schedule.ops import Block, Copy, Kind, Schedule, Work, attend, ordered_step, work_of
from ringattn.schedule.passes import Delivery
from ringattn.schedule.read_sets import read_sets_of


class Trees(ABC):
    """The trees of all blocks of a problem."""

    def __init__(self, problem: Problem) -> None:
        """Asks nothing of the problem yet."""
        self.problem, self.ranks, self.reads = problem, problem.world_size, read_sets_of(problem)
        self._last_steps: dict[int, int] = {}

    @property
    def steps(self) -> int:
        """Steps of a forward pass: the farthest block is read in the last."""
        return 1 + int(np.max(self.step(np.arange(self.ranks), 0)))

    @abstractmethod
    def step(self, owner: int | Ints, reader: int) -> int | Ints:
        """The step in which the block of an owner, or of each of some, is read; it is sent in the step before."""

    @abstractmethod
    def source(self, owner: int, reader: int) -> int:
        """The rank that hands the block to another rank in a forward pass."""

    @abstractmethod
    def serves(self, owner: int, reader: int) -> Ints:
        """The ranks that get the block by this message: the reader, and all that get it from there."""

    def source_back(self, owner: int, reader: int) -> int:
        """The rank that hands the block to another rank in a backward pass."""
        return owner

    def neighbors(self, rank: int) -> Iterable[int]:
        """The ranks to which a rank may hand others' blocks, in either pass."""
        return ()

    def paced(self, part: Schedule, backward: bool) -> Schedule:
        """A part of a schedule in which slow messages have more steps."""
        return part

    def last_step(self, reader: int) -> int:
        """The last step in which a rank reads anything of another."""
        if reader not in self._last_steps:
            owners = self.reads.owners_read_by(reader)
            self._last_steps[reader] = int(np.max(self.step(owners, reader), initial=0))
        return self._last_steps[reader]


class Stars(Trees):
    """Every owner sends to every reader: one message a step, or all `at_once`."""

    def __init__(self, problem: Problem, at_once: bool) -> None:
        """Asks nothing of the problem yet."""
        super().__init__(problem)
        self.at_once = at_once

    def step(self, owner: int | Ints, reader: int) -> int | Ints:
        """As many steps as the reader is ranks farther; at once, all are read in step 1."""
        distance = (reader - owner) % self.ranks
        return np.minimum(distance, 1) if self.at_once else distance

    def source(self, owner: int, reader: int) -> int:
        """The owner."""
        return owner

    def serves(self, owner: int, reader: int) -> Ints:
        """The reader alone."""
        return np.array([reader])


class Chains(Trees):
    """A chain from each owner up the ring; or `both_ways`, half as long: up, and down.

    A backward begins with the farthest readers, so a block goes straight to the farthest and back along its chain, if
    that sends no more than its owner sending to each.
    """

    def __init__(self, problem: Problem, both_ways: bool) -> None:
        """Asks nothing of the problem yet."""
        super().__init__(problem)
        self.both_ways = both_ways
        self._back: dict[tuple[int, int], int] = {}

    def step(self, owner: int | Ints, reader: int) -> int | Ints:
        """The distance along the chain."""
        up = (reader - owner) % self.ranks
        return np.minimum(up, self.ranks - up) if self.both_ways else up

    def source(self, owner: int, reader: int) -> int:
        """The neighbor, which read the block one step earlier."""
        return (reader - self._way(owner, reader)[0]) % self.ranks

    def serves(self, owner: int, reader: int) -> Ints:
        """The rest of the chain."""
        way, distance = self._way(owner, reader)
        return self._chain(owner, way)[distance - 1 :]

    def source_back(self, owner: int, reader: int) -> int:
        """The rank one farther, or the owner."""
        way, distance = self._way(owner, reader)
        if (owner, way) not in self._back:
            readers = self._chain(owner, way)
            reach = self.reads.reach(owner, readers)
            # What nearer readers read must be among what the relay reads itself.
            self._back[owner, way] = reach if self.reads.grow(owner, readers[None, :reach]) else 0
        return (reader + way) % self.ranks if distance < self._back[owner, way] else owner

    def neighbors(self, rank: int) -> Iterable[int]:
        """Up and down the ring."""
        return {(rank + 1) % self.ranks, (rank - 1) % self.ranks}

    def _way(self, owner: int, reader: int) -> tuple[int, int]:
        """Up (1) or down (-1), and how far. Of an even number of ranks the opposite one is reached on the way up."""
        up = (reader - owner) % self.ranks
        return (-1, self.ranks - up) if self.both_ways and 2 * up > self.ranks else (1, up)

    def _chain(self, owner: int, way: int) -> Ints:
        length = self.ranks - 1 if not self.both_ways else self.ranks // 2 if way > 0 else (self.ranks - 1) // 2
        return (owner + way * np.arange(1, length + 1)) % self.ranks


def forward_part(trees: Trees, name: str, rank: int) -> Schedule:
    """What a rank does in a forward pass."""
    copies: list[list[Copy]] = [[] for _ in range(trees.steps)]
    work: list[list[Work]] = [[] for _ in copies]
    for owner, tiles in work_of(trees.problem, rank).items():
        work[_step(trees, owner, rank)].append(attend(rank, owner, tiles))
    for owner, source, reader in _edges(trees, rank, trees.source):
        if content := trees.reads.together(owner, trees.serves(owner, reader)):
            # The copy runs beside the work of the step before the one that reads it.
            copies[_step(trees, owner, reader) - 1].append(Copy(Block(Kind.KV, owner), source, reader, content))
    return trees.paced(Schedule(trees.problem, name, tuple(map(ordered_step, copies, work))), False)


def deliveries_of_part(trees: Trees, rank: int, keeps_last: bool) -> Iterator[Delivery]:
    """The K/V that a rank sends or receives in a backward pass, which may have kept what it read last."""
    for owner, source, reader in _edges(trees, rank, trees.source_back):
        step = _step(trees, owner, reader)
        # A relay hands on only what it reads itself, so each message is what its reader reads.
        content = trees.reads.read(owner, reader)
        if content and not (keeps_last and step == trees.last_step(reader)):
            # Beside the step before the one that reads it in the backward: that of the next forward step.
            yield step + 1, Copy(Block(Kind.KV, owner), source, reader, content)


def _edges(trees: Trees, rank: int, source: Callable[[int, int], int]) -> Iterator[tuple[int, int, int]]:
    """(owner, source, reader) of the messages that a rank may receive or send; `source` of owner and reader."""
    others = [other for other in range(trees.ranks) if other != rank]
    # What arrives, what leaves of its own, and what it hands on.
    spots = chain(
        ((owner, rank) for owner in others),
        ((rank, reader) for reader in others),
        ((owner, to) for to in trees.neighbors(rank) if to != rank for owner in others if owner != to),
    )
    for owner, reader in spots:
        sender = source(owner, reader)
        if rank in (sender, reader):
            yield owner, sender, reader


def _step(trees: Trees, owner: int, reader: int) -> int:
    return int(trees.step(owner, reader))


def together(parts: Iterable[Schedule]) -> Schedule:
    """The schedule of all ranks, from the part of each: a message is in two of them, and taken from its receiver's."""
    parts = list(parts)
    copies: dict[int, list[Copy]] = defaultdict(list)
    work: dict[int, list[Work]] = defaultdict(list)
    for rank, part in enumerate(parts):
        for at, step in enumerate(part.steps):
            copies[at] += (copy for copy in step.copies if copy.dst == rank)
            work[at] += step.work
    steps = tuple(ordered_step(copies[at], work[at]) for at in range(len(parts[0].steps)))
    kept = tuple(sorted(one for part in parts for one in part.kept))
    return Schedule(parts[0].problem, parts[0].name, steps, kept)

"""How K/V blocks reach their readers: each block goes along a tree from its owner, and a rank knows its own edges.

A tree is a pure function of (owner, reader): who hands the block to the reader, in which step it is read there, and
whom else that message serves. So a rank finds its own messages without making those of the others, and the schedule of
all ranks is what these parts are together.
       the tree of KV0     rank 2 receives 1 > 2 and sends 2 > 3 and 2 > 4: of the message to itself
       0 > 1 > 2 > 3       it knows that it serves 2, 3 and 4, so it carries what these three read
               2 > 4
Guarantees: every row travels only to where it is read, or on the way there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints
from ringattn.schedule.content import Content
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
    def content(self, owner: int, reader: int) -> Content:
        """What a forward message carries: what the reader reads, and all that get it from there."""

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


def forward_part(trees: Trees, name: str, rank: int) -> Schedule:
    """What a rank does in a forward pass."""
    copies: list[list[Copy]] = [[] for _ in range(trees.steps)]
    work: list[list[Work]] = [[] for _ in copies]
    for owner, tiles in work_of(trees.problem, rank).items():
        work[_step(trees, owner, rank)].append(attend(rank, owner, tiles))
    for owner, source, reader in _edges(trees, rank, trees.source):
        if content := trees.content(owner, reader):
            # The copy runs beside the work of the step before the one that reads it.
            copies[_step(trees, owner, reader) - 1].append(Copy(Block(Kind.KV, owner), source, reader, content))
    return trees.paced(Schedule(trees.problem, name, False, tuple(map(ordered_step, copies, work))), False)


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


def joined(parts: Iterable[Schedule]) -> Schedule:
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
    return replace(parts[0], steps=steps, kept=kept)

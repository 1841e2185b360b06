"""What a schedule is: a class that says what a rank does in a forward and in a backward pass.

A new schedule is a file in this folder: a frozen dataclass after `Route`, decorated with `register`, whose fields have
defaults. `routes` finds it. It also needs a row in docs/schedules.md and one in tests/fuzz/choices.py.

Most schedules send each K/V block along a tree from its owner. A tree is a pure function of (owner, reader): which rank
sends the block to the reader, in which step it is read there, and which other readers that message serves. So a rank
derives its own messages without those of the others.
       the tree of KV0     rank 2 receives 1 > 2 and sends 2 > 3 and 2 > 4
       0 > 1 > 2 > 3       it serves 2, 3 and 4, so the message to it carries what these three read
               2 > 4
Guarantees: every row travels only to the ranks that read it and to those on the way there.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import isqrt
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from ringattn.core.bounded_cache import bounded
from ringattn.core.problem import Problem
from ringattn.core.tiling import Ints
from ringattn.errors import InputError
from ringattn.schedule.content import Content, read_sets_of
from ringattn.schedule.ops import Block, Copy, Kind, Schedule, Work, attend, ordered_step, work_of
from ringattn.schedule.passes import Delivery, Prologue, arrived, last_read, split_local, transpose

# --- trees ------------------------------------------------------------------------------------------------------------


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


def forward_along_trees(trees: Trees, name: str, rank: int) -> Schedule:
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


# --- routes -----------------------------------------------------------------------------------------------------------


ROUTES: dict[str, Route] = {}
"""The schedules by name, in the order in which commands list them. `routes` fills it."""

SHOWN = 8
"""Nodes whose numbers of ranks an error lists."""

Grid = tuple[tuple[int, ...], ...]
"""Ranks by node or group, as many in each."""


@dataclass(frozen=True)
class Route(ABC):
    """A schedule as a value; equal values share their plans.

    `keeps`: a forward pass keeps what it received for its backward pass, instead of sending it again. `prologue`: what
    hides the first fetch of a backward pass, see `schedule.prologue`.
    """

    name: str
    keeps: bool = False
    prologue: Prologue = "fetched"

    order: ClassVar[int]
    """Its place in lists of schedules."""
    parameter: ClassVar[str] = ""
    """The letter of a number that may follow the name, as M in double_ring:M."""
    by_head: ClassVar[bool] = False
    """A row travels with a single head, so that pieces count for each head."""
    at_once: ClassVar[bool] = False
    """All K/V rows arrive in the first step, whole records."""
    arrives_at_once: ClassVar[bool] = False
    """All that a forward pass receives is there in the same step, so it may be kept."""
    moves_queries: ClassVar[bool] = False
    """Queries and outputs travel, and plans take long to make."""
    transposed: ClassVar[bool] = True
    """The backward pass is the transpose of the forward pass, with keys fetched anew for its first work."""
    undoes_steps: ClassVar[bool] = True
    """The backward pass undoes the steps of the forward pass from the last on."""
    extra_steps: ClassVar[int] = 0
    """Steps of a forward pass that are no turn of a ring."""
    by_classes: ClassVar[bool] = False
    """It may be simulated by classes of ranks, see `planner.classes`: a rank sends a few messages a step, or all at
    once, to ranks that follow from the step."""
    halves: ClassVar[bool] = False
    """Ranks half a ring away behave differently."""
    group_lines: ClassVar[tuple[int, int, int, int]] = (1, 1, 1, 1)
    """How far from each line of `planner.classes.Classes` groups of ranks may behave differently."""
    least_groups: ClassVar[int] = 0
    """How many groups show each class of groups."""

    @abstractmethod
    def forward_part(self, problem: Problem, rank: int) -> Schedule:
        """Return what `rank` does in the pruned forward pass."""

    @abstractmethod
    def backward_part(self, problem: Problem, rank: int) -> Schedule:
        """Return what `rank` does in the backward pass."""

    def text(self, problem: Problem) -> str:
        """Return the name that gives this schedule for this problem, with the number after it, if it has one."""
        return self.name

    def steps(self, ranks: int) -> int:
        """Return the number of steps of a forward pass: as many as ranks, unless a schedule says otherwise."""
        return ranks

    def whole(self, problem: Problem, backward: bool) -> Schedule:
        """Return what all ranks do in a pass."""
        return joined(part_of_rank(problem, self, rank, backward) for rank in range(problem.world_size))

    def kept(self, problem: Problem, rank: int) -> tuple[Block, ...]:
        """Return the remote blocks that a forward pass of `rank` keeps, in the order of the backward's `kept`."""
        return blocks_of(schedule_of(problem, self, True).kept, rank) if self.keeps or self.prologue == "kept" else ()

    def keeping_nothing(self) -> Route:
        """Return the same schedule with a forward pass that hands nothing on to its backward pass."""
        return replace(self, keeps=False, prologue="split" if self.prologue == "kept" else self.prologue)

    def with_parameter(self, number: int, ranks: int) -> Route:
        """Return the schedule with the number after its name. Raises `InputError` if it does not fit the ranks."""
        raise NotImplementedError

    def on_nodes(self, nodes: tuple[int, ...]) -> Route:
        """Return the schedule for ranks on these nodes. Raises `InputError` if it needs equally many on each."""
        return self

    def group_size(self, problem: Problem) -> int:
        """Return how many ranks form a node or a group of this schedule, 1 if it has none."""
        return 1

    def inner_steps(self, group: int) -> int:
        """Return the steps of a turn, in which groups of `group` ranks see the keys of the next group."""
        return 1

    def shared(self, problem: Problem) -> object:
        """Return what the plans of a group share. They find it for as long as a caller holds it."""
        return None

    def why_not(self, problem: Problem, nodes: int) -> str:
        """Return why a choice on so many nodes need not weigh this schedule, empty if it should."""
        return ""


AnyRoute = TypeVar("AnyRoute", bound=type[Route])


def register(order: int) -> Callable[[AnyRoute], AnyRoute]:
    """Make a schedule known by its name, at a place in the lists of schedules."""

    def add(route_class: AnyRoute) -> AnyRoute:
        route_class.order = order
        make: Any = route_class  # all fields have defaults
        route: Route = make()
        ROUTES[route.name] = route
        for known in sorted(ROUTES.values(), key=lambda known: known.order):
            ROUTES[known.name] = ROUTES.pop(known.name)
        return route_class

    return add


def parameter_of(text: str) -> int | None:
    """Return the number after the name of a schedule: ASCII digits without a leading zero. None for other text."""
    return int(text) if re.fullmatch("[1-9][0-9]*", text, re.ASCII) else None


@bounded
def forward_of_rank(problem: Problem, route: Route, rank: int) -> Schedule:
    """What `rank` does in the pruned forward schedule, without that of the others.

    Except for `sub_rings` and `ulysses`: which sub-rings there are, and who has which head in them, follows from the
    tiles of all ranks; and a rank that has heads works on the pairs of all ranks.
    """
    return route.forward_part(problem, rank)


def part_of_rank(problem: Problem, route: Route, rank: int, backward: bool) -> Schedule:
    """Return what `rank` does in a pass."""
    return route.backward_part(problem, rank) if backward else forward_of_rank(problem, route, rank)


@bounded
def schedule_of(problem: Problem, route: Route, backward: bool) -> Schedule:
    """What all ranks do in a pass, pruned."""
    return route.whole(problem, backward)


def blocks_of(kept: tuple[tuple[int, Block, Content], ...], rank: int) -> tuple[Block, ...]:
    """The blocks that `rank` keeps."""
    return tuple(block for owner, block, _ in kept if owner == rank)


class TreeRoute(Route):
    """A schedule whose blocks travel along trees from their owners, one tree for each owner."""

    @abstractmethod
    def trees(self, problem: Problem) -> Trees:
        """Return the trees of all blocks."""

    def forward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.forward_part`."""
        return forward_along_trees(self.trees(problem), self.name, rank)

    def backward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.backward_part`."""
        part, trees = forward_of_rank(problem, self, rank), self.trees(problem)
        # K/V that the forward pass kept is not delivered again; only gradients travel.
        deliveries = () if self.keeps else deliveries_of_part(trees, rank, self.prologue == "kept")
        back = trees.paced(transpose(part, deliveries).restricted_to(rank), True)
        back = replace(back, kept=self._kept(part, rank))
        return split_local(back) if self.prologue == "split" else back

    def kept(self, problem: Problem, rank: int) -> tuple[Block, ...]:
        """See `Route.kept`."""
        if not self.keeps and self.prologue != "kept":
            return ()
        return blocks_of(self._kept(forward_of_rank(problem, self, rank), rank), rank)

    def _kept(self, part: Schedule, rank: int) -> tuple[tuple[int, Block, Content], ...]:
        """What the part of a rank in a forward schedule keeps for its backward."""
        if not self.keeps and self.prologue != "kept":
            return ()
        kept = arrived(part, None if self.keeps else last_read(part))
        return tuple(each for each in kept if each[0] == rank)


class WholeRoute(Route):
    """A schedule that is made for all ranks at once, because a rank's part follows from the tiles of all."""

    @abstractmethod
    def whole(self, problem: Problem, backward: bool) -> Schedule:
        """See `Route.whole`."""

    def forward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.forward_part`."""
        return schedule_of(problem, self, False).restricted_to(rank)

    def backward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.backward_part`."""
        return schedule_of(problem, self, True).restricted_to(rank)


# --- groups of ranks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridRoute(Route):
    """A schedule that knows which ranks belong together. `grid`: the ranks of each group, empty: see `grid_for`."""

    grid: Grid = ()

    def grid_for(self, problem: Problem) -> Grid:
        """Return the ranks of each node or group: as given, else of equal neighbouring groups of `default_group`."""
        return self.grid or equal_groups(problem.world_size, self.default_group(problem))

    @abstractmethod
    def default_group(self, problem: Problem) -> int:
        """Return the number of ranks of a group, if neither the caller nor the nodes determine it."""

    def with_parameter(self, number: int, ranks: int) -> Self:
        """See `Route.with_parameter`: groups of `number` neighbouring ranks."""
        return replace(self, grid=equal_groups(ranks, number, self.name))

    def on_nodes(self, nodes: tuple[int, ...]) -> Self:
        """See `Route.on_nodes`: the ranks of a node belong together, unless the caller has named a number."""
        return self if self.grid or len(set(nodes)) == 1 else replace(self, grid=grid_of(nodes, self.name))

    def group_size(self, problem: Problem) -> int:
        """See `Route.group_size`."""
        return len(self.grid_for(problem)[0])

    def text(self, problem: Problem) -> str:
        """See `Route.text`. Groups of other than neighbouring ranks have no number."""
        size = self.group_size(problem)
        is_numbered = self.grid_for(problem) == equal_groups(problem.world_size, size, self.name)
        return f"{self.name}:{size}" if is_numbered else self.name


def grid_of(nodes: tuple[int, ...], name: str = "double_ring") -> Grid:
    """The ranks of each node, given the node of each rank. Raises `InputError` if nodes have different numbers."""
    grid = tuple(tuple(rank for rank, at in enumerate(nodes) if at == node) for node in dict.fromkeys(nodes))
    if len({len(ranks) for ranks in grid}) > 1:
        counts = ", ".join(str(len(ranks)) for ranks in grid[:SHOWN]) + (", ..." if len(grid) > SHOWN else "")
        counts += f", {len(grid[-1])}" if len(grid) > SHOWN else ""
        raise InputError(
            f"schedule='{name}' needs as many ranks on each node, and the nodes have {counts}; "
            f"choose schedule='ring', or say how many ranks belong together: schedule='{name}:2'"
        )
    return grid


def equal_groups(ranks: int, inner: int, name: str = "double_ring") -> Grid:
    """Groups of `inner` neighbouring ranks. Raises `InputError` if they do not divide the ranks."""
    if inner < 1 or ranks % inner:
        raise InputError(
            f"schedule='{name}:{inner}': {inner} ranks that belong together do not divide {ranks} ranks; "
            f"numbers that do: {', '.join(str(one) for one in range(1, ranks + 1) if not ranks % one)}"
        )
    return tuple(tuple(range(first, first + inner)) for first in range(0, ranks, inner))


def square_side(ranks: int) -> int:
    """The ranks of an inner ring as long as the outer one, or as near as the number of ranks allows."""
    return next(inner for inner in range(isqrt(ranks), 0, -1) if not ranks % inner)

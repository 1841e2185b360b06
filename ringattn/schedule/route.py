"""The interface of a schedule: a class that returns the steps of each rank in a forward and in a backward pass.

A new schedule is a file in this folder with a frozen dataclass that derives from `Route`, is decorated with `register`,
and has defaults for all fields. `routes` finds it. It also needs a row in docs/schedules.md and a row in
tests/fuzz/choices.py.

Most schedules send each K/V block along a tree from its owner. A tree is a pure function of (owner, reader): the rank
that sends the block to the reader, the step in which it is read there, and the other readers of the same message. So a
rank derives its messages without deriving those of other ranks.
       the tree of KV0     rank 2 receives 1 > 2 and sends 2 > 3 and 2 > 4
       0 > 1 > 2 > 3       the message to rank 2 carries the rows that 2, 3 and 4 read
               2 > 4
Guarantees: every row is sent only to the ranks that read it and to the relays on the way.
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
from weakref import WeakValueDictionary

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
    """The trees along which the blocks of a problem are sent, one tree for each owner."""

    def __init__(self, problem: Problem) -> None:
        """Keep the problem; steps and contents are computed at their first use."""
        self.problem, self.ranks, self.reads = problem, problem.world_size, read_sets_of(problem)
        self._last_steps: dict[int, int] = {}

    @property
    def steps(self) -> int:
        """Number of steps of a forward pass: the farthest block is read in the last step."""
        return 1 + int(np.max(self.step(np.arange(self.ranks), 0)))

    @abstractmethod
    def step(self, owner: int | Ints, reader: int) -> int | Ints:
        """Return the step in which `reader` reads the block of an owner (or of each owner in an array).

        The block is sent to the reader in the step before.
        """

    @abstractmethod
    def source(self, owner: int, reader: int) -> int:
        """Return the rank that sends the block to the reader in a forward pass."""

    @abstractmethod
    def content(self, owner: int, reader: int) -> Content:
        """Return the content of a forward message: the rows that the reader and all later ranks in the tree read."""

    def source_back(self, owner: int, reader: int) -> int:
        """Return the rank that sends the block to the reader in a backward pass."""
        return owner

    def delivery(self, owner: int, reader: int, keeps_last: bool) -> tuple[int, Content]:
        """Return when a backward pass sends the block to the reader, see `passes.Delivery`, and the content.

        `keeps_last`: see `deliveries_of_part`.
        """
        # The copy is concurrent with the backward step before the step that reads it. That step undoes the next forward
        # step. A relay sends only rows that it also reads, so each message has exactly the rows that its receiver
        # reads.
        return _step(self, owner, reader) + 1, self.reads.read(owner, reader)

    def neighbors(self, rank: int) -> Iterable[int]:
        """Return the ranks to which a rank may relay remote blocks, in either pass."""
        return ()

    def paced(self, part: Schedule, backward: bool) -> Schedule:
        """Return a rank's part of the schedule with its slow messages spread over several steps."""
        return part

    def last_step(self, reader: int) -> int:
        """Return the last step in which a rank reads a remote block."""
        if reader not in self._last_steps:
            owners = self.reads.owners_read_by(reader)
            self._last_steps[reader] = int(np.max(self.step(owners, reader), initial=0))
        return self._last_steps[reader]


def forward_along_trees(trees: Trees, name: str, rank: int) -> Schedule:
    """Return a rank's part of a forward pass."""
    copies: list[list[Copy]] = [[] for _ in range(trees.steps)]
    work: list[list[Work]] = [[] for _ in copies]
    for owner, tiles in work_of(trees.problem, rank).items():
        work[_step(trees, owner, rank)].append(attend(rank, owner, tiles))
    for owner, source, reader in _edges(trees, rank, trees.source):
        if content := trees.content(owner, reader):
            # The copy is concurrent with the work of the step before the step that reads it.
            copies[_step(trees, owner, reader) - 1].append(Copy(Block(Kind.KV, owner), source, reader, content))
    return trees.paced(Schedule(trees.problem, name, False, tuple(map(ordered_step, copies, work))), False)


def deliveries_of_part(trees: Trees, rank: int, keeps_last: bool) -> Iterator[Delivery]:
    """Yield the K/V copies that a rank sends or receives in a backward pass.

    `keeps_last`: whether ranks have kept the blocks that they read last in forward.
    """
    for owner, source, reader in _edges(trees, rank, trees.source_back):
        step, content = trees.delivery(owner, reader, keeps_last)
        if content and not (keeps_last and _step(trees, owner, reader) == trees.last_step(reader)):
            yield step, Copy(Block(Kind.KV, owner), source, reader, content)


def _edges(trees: Trees, rank: int, source: Callable[[int, int], int]) -> Iterator[tuple[int, int, int]]:
    """Yield (owner, source, reader) of the messages that a rank may receive or send.

    `source`: returns the sender for an owner and a reader.
    """
    peers = [peer for peer in range(trees.ranks) if peer != rank]
    # The messages that the rank receives, the messages with its local block, and the messages that it relays.
    pairs = chain(
        ((owner, rank) for owner in peers),
        ((rank, reader) for reader in peers),
        ((owner, to) for to in trees.neighbors(rank) if to != rank for owner in peers if owner != to),
    )
    for owner, reader in pairs:
        sender = source(owner, reader)
        if rank in (sender, reader):
            yield owner, sender, reader


def _step(trees: Trees, owner: int, reader: int) -> int:
    return int(trees.step(owner, reader))


def joined(parts: Iterable[Schedule]) -> Schedule:
    """Join the parts of all ranks into one schedule. A message is in two parts; the receiver's part provides it."""
    parts = list(parts)
    copies: dict[int, list[Copy]] = defaultdict(list)
    work: dict[int, list[Work]] = defaultdict(list)
    for rank, part in enumerate(parts):
        for index, step in enumerate(part.steps):
            copies[index] += (copy for copy in step.copies if copy.dst == rank)
            work[index] += step.work
    steps = tuple(ordered_step(copies[index], work[index]) for index in range(len(parts[0].steps)))
    kept = tuple(sorted(block for part in parts for block in part.kept))
    return replace(parts[0], steps=steps, kept=kept)


# --- routes -----------------------------------------------------------------------------------------------------------


ROUTES: dict[str, Route] = {}
"""The schedules by name, in the order in which commands list them. `routes` fills it."""

SHOWN = 8
"""Most nodes for which an error lists the number of ranks."""

Grid = tuple[tuple[int, ...], ...]
"""The ranks of each node or group, equally many in each."""


@dataclass(frozen=True)
class Route(ABC):
    """A schedule as a value; equal values share their plans.

    `keeps`: whether a forward pass keeps all received blocks for its backward pass, so that they are not sent again.
    `prologue`: how a backward pass hides its first fetch, see `schedule.passes`.
    """

    name: str
    keeps: bool = False
    prologue: Prologue = "fetched"

    order: ClassVar[int]
    """Its position in lists of schedules."""
    parameter: ClassVar[str] = ""
    """The letter of a number that may follow the name, as M in double_ring:M."""
    by_head: ClassVar[bool] = False
    """Each row is sent for a single head, so pieces count for each head."""
    at_once: ClassVar[bool] = False
    """K/V rows arrive as whole records and not in turns: in the first step, or in the second from another reader."""
    arrives_at_once: ClassVar[bool] = False
    """Everything that a forward pass receives is resident in the same step, so it may be kept."""
    moves_queries: ClassVar[bool] = False
    """Queries and outputs are sent, and plans are slow to make."""
    transposed: ClassVar[bool] = True
    """The backward pass is the transpose of the forward pass, and fetches keys again for its first work."""
    undoes_steps: ClassVar[bool] = True
    """The backward pass undoes the steps of the forward pass from the last to the first."""
    extra_steps: ClassVar[int] = 0
    """Steps of a forward pass in addition to the turns of a ring."""
    by_classes: ClassVar[bool] = False
    """It may be simulated by classes of ranks, see `planner.classes`: a rank sends a few messages per step, or all in
    one step, to ranks that depend only on the step."""
    halves: ClassVar[bool] = False
    """Ranks half a ring away behave differently."""
    group_lines: ClassVar[tuple[int, int, int, int]] = (1, 1, 1, 1)
    """The distance from each line of `planner.classes.Classes` up to which groups of ranks may behave differently."""
    least_groups: ClassVar[int] = 0
    """The number of groups that is enough to show every class of groups."""

    @abstractmethod
    def forward_part(self, problem: Problem, rank: int) -> Schedule:
        """Return the part of `rank` in the pruned forward pass."""

    @abstractmethod
    def backward_part(self, problem: Problem, rank: int) -> Schedule:
        """Return the part of `rank` in the backward pass."""

    def text(self, problem: Problem) -> str:
        """Return the name that selects this schedule for this problem, including its number if it has one."""
        return self.name

    def steps(self, ranks: int) -> int:
        """Return the number of steps of a forward pass. The default is the number of ranks."""
        return ranks

    def whole(self, problem: Problem, backward: bool) -> Schedule:
        """Return the schedule of all ranks in a pass."""
        return joined(part_of_rank(problem, self, rank, backward) for rank in range(problem.world_size))

    def kept(self, problem: Problem, rank: int) -> tuple[Block, ...]:
        """Return the remote blocks that a forward pass of `rank` keeps, in the order of `Schedule.kept` in backward."""
        return blocks_of(schedule_of(problem, self, True).kept, rank) if self.keeps or self.prologue == "kept" else ()

    def keeping_nothing(self) -> Route:
        """Return the same schedule with a forward pass that keeps nothing for its backward pass."""
        return replace(self, keeps=False, prologue="split" if self.prologue == "kept" else self.prologue)

    def with_parameter(self, number: int, ranks: int) -> Route:
        """Return the schedule with the number that follows its name, as 4 in double_ring:4.

        Raises `InputError` if the number does not fit the ranks.
        """
        raise NotImplementedError

    def on_nodes(self, nodes: tuple[int, ...]) -> Route:
        """Return the schedule for ranks on these nodes.

        Raises `InputError` if it needs the same number of ranks on each node and the nodes differ.
        """
        return self

    def group_size(self, problem: Problem) -> int:
        """Return the number of ranks in a node or group of this schedule, 1 if it has no groups."""
        return 1

    def inner_steps(self, group: int) -> int:
        """Return the number of steps of a turn.

        In a turn, each group of `group` ranks attends to the keys of one group.
        """
        return 1

    def shared(self, problem: Problem) -> object:
        """Return an object with the tables that the plans of several ranks share, or None if there are none.

        The same object is returned as long as a caller keeps a reference to it.
        """
        return None

    def why_not(self, problem: Problem, nodes: int) -> str:
        """Return why a choice on `nodes` nodes need not consider this schedule; empty if it should."""
        return ""


AnyRoute = TypeVar("AnyRoute", bound=type[Route])


def register(order: int) -> Callable[[AnyRoute], AnyRoute]:
    """Register a schedule by its name. `order`: its position in lists of schedules."""

    def add(route_class: AnyRoute) -> AnyRoute:
        route_class.order = order
        make: Any = route_class  # all fields have defaults
        route: Route = make()
        ROUTES[route.name] = route
        for registered in sorted(ROUTES.values(), key=lambda registered: registered.order):
            ROUTES[registered.name] = ROUTES.pop(registered.name)
        return route_class

    return add


def parameter_of(text: str) -> int | None:
    """Return the number after the name of a schedule: ASCII digits without a leading zero. None for other text."""
    return int(text) if re.fullmatch("[1-9][0-9]*", text, re.ASCII) else None


@bounded
def forward_of_rank(problem: Problem, route: Route, rank: int) -> Schedule:
    """Return the part of `rank` in the pruned forward schedule, without making the parts of other ranks.

    `sub_rings` and `ulysses` make the parts of all ranks. Their sub-rings, and the owner of each head in a sub-ring,
    depend on the tiles of all ranks, and the owner of a head works on the pairs of all ranks.
    """
    return route.forward_part(problem, rank)


def part_of_rank(problem: Problem, route: Route, rank: int, backward: bool) -> Schedule:
    """Return the part of `rank` in a pass."""
    return route.backward_part(problem, rank) if backward else forward_of_rank(problem, route, rank)


@bounded
def schedule_of(problem: Problem, route: Route, backward: bool) -> Schedule:
    """Return the pruned schedule of all ranks in a pass."""
    return route.whole(problem, backward)


def blocks_of(kept: tuple[tuple[int, Block, Content], ...], rank: int) -> tuple[Block, ...]:
    """Return the blocks that `rank` keeps."""
    return tuple(block for owner, block, _ in kept if owner == rank)


_trees: WeakValueDictionary[tuple[Problem, Route], Trees] = WeakValueDictionary()
_passes: WeakValueDictionary[tuple[Problem, Route], Passes] = WeakValueDictionary()


class TreeRoute(Route):
    """A schedule that sends each block along a tree from its owner, with one tree per owner."""

    @abstractmethod
    def trees(self, problem: Problem) -> Trees:
        """Return the trees of all blocks."""

    def shared(self, problem: Problem) -> Trees:
        """See `Route.shared`: the trees keep what they have computed about each owner."""
        trees = _trees.get((problem, self))
        if trees is None:
            trees = _trees[problem, self] = self.trees(problem)
        return trees

    def forward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.forward_part`."""
        return forward_along_trees(self.shared(problem), self.name, rank)

    def backward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.backward_part`."""
        part, trees = forward_of_rank(problem, self, rank), self.shared(problem)
        # K/V that the forward pass kept is not delivered again; only gradients are sent.
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
        """Return the blocks that a rank's part of a forward schedule keeps for backward."""
        if not self.keeps and self.prologue != "kept":
            return ()
        kept = arrived(part, None if self.keeps else last_read(part))
        return tuple(block for block in kept if block[0] == rank)


class Passes:
    """The schedules of all ranks for one problem, each made at its first use."""

    def __init__(self, problem: Problem, route: Route) -> None:
        """Keep the arguments; no schedule is made yet."""
        self._problem, self._route = problem, route
        self._made: dict[bool, Schedule] = {}

    def of(self, backward: bool) -> Schedule:
        """Return the schedule of a pass."""
        if backward not in self._made:
            self._made[backward] = schedule_of(self._problem, self._route, backward)
        return self._made[backward]


class WholeRoute(Route):
    """A schedule that is made for all ranks together, because a rank's part depends on the tiles of all ranks."""

    @abstractmethod
    def whole(self, problem: Problem, backward: bool) -> Schedule:
        """See `Route.whole`."""

    def shared(self, problem: Problem) -> Passes:
        """See `Route.shared`. The object holds the schedules, because the cache may drop them between two ranks."""
        passes = _passes.get((problem, self))
        if passes is None:
            passes = _passes[problem, self] = Passes(problem, self)
        return passes

    def forward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.forward_part`."""
        return self.shared(problem).of(False).restricted_to(rank)

    def backward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.backward_part`."""
        return self.shared(problem).of(True).restricted_to(rank)

    def kept(self, problem: Problem, rank: int) -> tuple[Block, ...]:
        """See `Route.kept`."""
        keeps = self.keeps or self.prologue == "kept"
        return blocks_of(self.shared(problem).of(True).kept, rank) if keeps else ()


# --- groups of ranks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridRoute(Route):
    """A schedule with groups of ranks. `grid`: the ranks of each group; if empty, see `grid_for`."""

    grid: Grid = ()

    def grid_for(self, problem: Problem) -> Grid:
        """Return the ranks of each group: `grid`, or if it is empty, groups of `default_group` neighbouring ranks."""
        return self.grid or equal_groups(problem.world_size, self.default_group(problem))

    @abstractmethod
    def default_group(self, problem: Problem) -> int:
        """Return the number of ranks per group, used if neither the caller nor the nodes determine it."""

    def with_parameter(self, number: int, ranks: int) -> Self:
        """See `Route.with_parameter`: groups of `number` neighbouring ranks."""
        return replace(self, grid=equal_groups(ranks, number, self.name))

    def on_nodes(self, nodes: tuple[int, ...]) -> Self:
        """See `Route.on_nodes`: the ranks of a node form a group, unless the caller has named a number."""
        return self if self.grid or len(set(nodes)) == 1 else replace(self, grid=grid_of(nodes, self.name))

    def group_size(self, problem: Problem) -> int:
        """See `Route.group_size`."""
        return len(self.grid_for(problem)[0])

    def text(self, problem: Problem) -> str:
        """See `Route.text`. Only groups of neighbouring ranks have a number."""
        size = self.group_size(problem)
        is_numbered = self.grid_for(problem) == equal_groups(problem.world_size, size, self.name)
        return f"{self.name}:{size}" if is_numbered else self.name


class GroupedTrees(Trees):
    """Trees that depend on the groups of ranks. `grid[group, place]` is a rank."""

    def __init__(self, problem: Problem, grid: Grid) -> None:
        """Compute the group and place of each rank, and nothing else yet."""
        super().__init__(problem)
        self.grid = np.array(grid)
        self._node, self._place = np.empty((2, self.ranks), np.int64)
        for node, ranks in enumerate(grid):
            self._node[list(ranks)], self._place[list(ranks)] = node, range(len(ranks))


def grid_of(nodes: tuple[int, ...], name: str = "double_ring") -> Grid:
    """Group ranks by node, given the node of each rank. Raises `InputError` if nodes differ in number of ranks."""
    grid = tuple(tuple(rank for rank, host in enumerate(nodes) if host == node) for node in dict.fromkeys(nodes))
    if len({len(ranks) for ranks in grid}) > 1:
        counts = ", ".join(str(len(ranks)) for ranks in grid[:SHOWN]) + (", ..." if len(grid) > SHOWN else "")
        counts += f", {len(grid[-1])}" if len(grid) > SHOWN else ""
        raise InputError(
            f"schedule='{name}' needs the same number of ranks on each node, but the nodes have {counts}; "
            f"choose schedule='ring', or name the number of ranks per group: schedule='{name}:2'"
        )
    return grid


def equal_groups(ranks: int, inner: int, name: str = "double_ring") -> Grid:
    """Return groups of `inner` neighbouring ranks. Raises `InputError` if `inner` does not divide the ranks."""
    if inner < 1 or ranks % inner:
        raise InputError(
            f"schedule='{name}:{inner}': groups of {inner} ranks do not divide {ranks} ranks; "
            f"numbers that do: {', '.join(str(divisor) for divisor in range(1, ranks + 1) if not ranks % divisor)}"
        )
    return tuple(tuple(range(first, first + inner)) for first in range(0, ranks, inner))


def square_side(ranks: int) -> int:
    """Return the largest divisor of `ranks` up to its square root: an inner ring nearly as long as the outer ring."""
    return next(inner for inner in range(isqrt(ranks), 0, -1) if not ranks % inner)

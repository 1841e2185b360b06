"""How K/V blocks travel: a route is a pure function of (turn, rank), and a schedule is a route unrolled.

In turn t every rank attends to the shard of (rank - t) mod ranks: its own first. A *relay* (ring) forwards the block it
received; otherwise the owner sends straight to the reader. *At once* (all-gather) sends everything in the first step.
       4 ranks, the keys that rank 3 attends to and who sends them
       turn         0      1       2       3
       owner        3      2       1       0
       ring         -      2 -> 3  2 -> 3  2 -> 3    the neighbour, one hop a step
       direct       -      2 -> 3  1 -> 3  0 -> 3    the owner, one message a step
       all_gather   -      2 -> 3  1 -> 3  0 -> 3    the owner, all in the first step
Where blocks travel along trees from their owners (these three, `bidirectional` and `double_ring`), see `trees`. Others
are `sub_rings`, `all_to_all`, `placed` and `ulysses_ring`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ringattn.core.problem import Problem
from ringattn.errors import InputError
from ringattn.schedule import all_to_all, double_ring, placed, sub_rings, ulysses_ring
from ringattn.schedule.chains import Chains, Stars
from ringattn.schedule.content import Content
from ringattn.schedule.groups import Groups, groups_of
from ringattn.schedule.opening import Opening, arrived, last_read, split_local, with_kept
from ringattn.schedule.ops import Block, Schedule
from ringattn.schedule.passes import prune, transpose
from ringattn.schedule.trees import Trees, deliveries_of_part, forward_part, together


@dataclass(frozen=True)
class Route:
    """One way for blocks to travel. `keeps`: what a forward pass received is kept for its backward, not sent again.

    `grid`: of a double ring the ranks of each node, of Ulysses x ring those of each group; empty: see `grid_for`.
    `opening`: what hides the first fetch of a backward, see `schedule.opening`.
    """

    name: str
    relay: bool = False
    at_once: bool = False
    by_segment: bool = False
    by_head: bool = False
    both_ways: bool = False
    by_node: bool = False
    place: placed.Place | None = None
    keeps: bool = False
    grid: double_ring.Grid = ()
    opening: Opening = "fetched"

    def trees(self, problem: Problem) -> Trees | None:
        """The trees along which blocks travel; None where they are not all that travels, or not one for each owner."""
        if self.by_segment or self.by_head or self.place:
            return None
        if self.by_node:
            return double_ring.GridTrees(problem, self.grid_for(problem))
        return Chains(problem, self.both_ways) if self.relay else Stars(problem, self.at_once)

    def groups(self, problem: Problem) -> Groups | None:
        """Who asks for what in the groups of Ulysses x ring; plans made while it is held share it. None for others."""
        return groups_of(problem, self.grid_for(problem)) if self.by_node and self.by_head else None

    @property
    def transposed(self) -> bool:
        """Whether a backward is the transpose of the forward, with keys fetched anew for its first work."""
        return not (self.by_head or self.place)

    def keeping_nothing(self) -> Route:
        """The same where a forward pass has nothing to hand on in."""
        return replace(self, keeps=False, opening="split" if self.opening == "kept" else self.opening)

    def grid_for(self, problem: Problem) -> double_ring.Grid:
        """The ranks of each node or group: as given, else as nearly square as can be, or as the K/V heads allow."""
        if self.grid:
            return self.grid
        ranks = problem.world_size
        if self.by_head:
            return double_ring.blocks_of(ranks, ulysses_ring.group_size(ranks, problem.kv_heads))
        return double_ring.square(ranks)

    def steps(self, ranks: int) -> int:
        """Steps of a forward pass; "ulysses_ring" must have its grid."""
        if self.by_head and self.by_node:
            return ulysses_ring.steps_of(self.grid)
        if self.by_head:
            return all_to_all.STEPS
        if self.place is not None:
            return placed.steps_of(self.place, ranks)
        if self.both_ways:
            return ranks // 2 + 1
        return min(ranks, 2) if self.at_once else ranks


RING = Route("ring", relay=True)
DIRECT = Route("direct")
ALL_GATHER = Route("all_gather", at_once=True)
SUB_RINGS = Route("sub_rings", relay=True, by_segment=True)
ULYSSES = Route("ulysses", by_head=True)
BIDIRECTIONAL = Route("bidirectional", relay=True, both_ways=True)
DOUBLE_RING = Route("double_ring", relay=True, by_node=True)
ULYSSES_RING = Route("ulysses_ring", relay=True, by_head=True, by_node=True)
PASS_Q = Route("pass_q", place=placed.pass_q)
BALANCED = Route("balanced", place=placed.balanced)
ROUTES = {
    route.name: route
    for route in (
        RING,
        ALL_GATHER,
        DIRECT,
        SUB_RINGS,
        ULYSSES,
        BIDIRECTIONAL,
        DOUBLE_RING,
        ULYSSES_RING,
        PASS_Q,
        BALANCED,
    )
}
ALIASES = {"all_to_all": ULYSSES.name}
"""Other names of schedules, taken wherever one is named."""
NUMBERED = tuple(name for name, route in ROUTES.items() if route.by_node)
"""Names that may be followed by a number of ranks, as double_ring:4."""
ScheduleName = Literal[
    "auto",
    "ring",
    "all_gather",
    "direct",
    "sub_rings",
    "ulysses",
    "all_to_all",
    "bidirectional",
    "double_ring",
    "ulysses_ring",
    "pass_q",
    "balanced",
]


def route_named(name: str, ranks: int | None = None) -> Route:
    """The route called `name`; "double_ring:M" has inner rings, "ulysses_ring:M" groups, of M neighboring ranks.

    Raises `InputError` for others.
    """
    word, colon, inner = name.partition(":") if isinstance(name, str) else ("", "", "")
    word = ALIASES.get(word, word)
    if word not in ROUTES or (colon and not (word in NUMBERED and inner.isdecimal())):
        raise InputError(
            f"schedule={name!r} is not known; choose auto or one of {', '.join(ROUTES)}, or double_ring:M, "
            "ulysses_ring:M for inner rings or groups of M ranks"
        )
    route = ROUTES[word]
    return replace(route, grid=double_ring.blocks_of(ranks, int(inner), word)) if colon and ranks else route


@lru_cache(maxsize=64)
def forward_of_rank(problem: Problem, route: Route, rank: int) -> Schedule:
    """What `rank` does in the pruned forward schedule, without that of the others.

    Except for `sub_rings` and `ulysses`: which sub-rings there are, and who has which head in them, follows from the
    tiles of all ranks; and a rank that has heads works on the pairs of all ranks.
    """
    if route.place is not None:
        return placed.part_of(problem, route.name, route.place, rank, backward=False)
    groups = route.groups(problem)
    if groups is not None:
        return ulysses_ring.forward_part(groups, route.name, rank)
    trees = route.trees(problem)
    if trees is not None:
        return forward_part(trees, route.name, rank)
    return schedule_of(problem, route, False).restricted_to(rank)


def backward_of_rank(problem: Problem, route: Route, rank: int) -> Schedule:
    """What `rank` does in the backward schedule, found as in `forward_of_rank`."""
    if route.place is not None:
        return placed.part_of(problem, route.name, route.place, rank, backward=True)
    groups = route.groups(problem)
    if groups is not None:
        return ulysses_ring.backward_part(groups, forward_of_rank(problem, route, rank), rank)
    trees = route.trees(problem)
    if trees is None:
        return schedule_of(problem, route, True).restricted_to(rank)
    part = forward_of_rank(problem, route, rank)
    # K/V that the forward pass kept is not delivered again; only gradients travel.
    deliveries = () if route.keeps else deliveries_of_part(trees, rank, route.opening == "kept")
    back = trees.paced(transpose(part, deliveries).restricted_to(rank), True)
    back = replace(back, kept=_kept(part, route, rank))
    return split_local(back) if route.opening == "split" else back


def kept_of_rank(problem: Problem, route: Route, rank: int) -> tuple[Block, ...]:
    """The others' blocks that a forward pass of `rank` keeps for its backward, in the order of that one's `kept`."""
    if not route.keeps and route.opening != "kept":
        return ()
    if route.trees(problem) is not None:
        kept = _kept(forward_of_rank(problem, route, rank), route, rank)
    else:
        kept = schedule_of(problem, route, True).kept
    return tuple(block for at, block, _ in kept if at == rank)


def _kept(part: Schedule, route: Route, rank: int) -> tuple[tuple[int, Block, Content], ...]:
    """What the part of a rank in a forward schedule keeps for its backward."""
    if not route.keeps and route.opening != "kept":
        return ()
    return tuple(one for one in arrived(part, None if route.keeps else last_read(part)) if one[0] == rank)


@lru_cache(maxsize=32)
def schedule_of(problem: Problem, route: Route, backward: bool) -> Schedule:
    """What all ranks do in a pass, pruned."""
    if route.place is not None or route.by_node or route.trees(problem) is not None:
        of_rank = backward_of_rank if backward else forward_of_rank
        return together(of_rank(problem, route, rank) for rank in range(problem.world_size))
    # Not the transpose: q, k, v and dout travel to the head's owner again, and dq, dk, dv return.
    if route.by_head:
        kept = arrived(schedule_of(problem, route, False)) if backward and route.keeps else ()
        return all_to_all.exchange(problem, route.name, backward, kept)
    if not backward:
        return prune(sub_rings.forward(problem, route.name))
    there = schedule_of(problem, route, False)
    back = transpose(there, () if route.keeps else None)
    if route.keeps:
        return replace(back, kept=arrived(there))
    if route.opening == "kept":
        return with_kept(back, arrived(there, last_read(there)))
    return split_local(back) if route.opening == "split" else back

"""How K/V blocks travel: a route is a pure function of (turn, rank), and a schedule is a route unrolled.

In turn t every rank attends to the shard of (rank - t) mod ranks: its own first. A *relay* (ring) forwards the block it
received; otherwise the owner sends straight to the reader. *At once* (all-gather) sends everything in the first step.
       4 ranks, the keys that rank 3 attends to and who sends them
       turn         0      1       2       3
       owner        3      2       1       0
       ring         -      2 -> 3  2 -> 3  2 -> 3    the neighbour, one hop a step
       direct       -      2 -> 3  1 -> 3  0 -> 3    the owner, one message a step
       all_gather   -      2 -> 3  1 -> 3  0 -> 3    the owner, all in the first step
Others are not made turn by turn: see `sub_rings`, `all_to_all`, `bidirectional`, `double_ring`, `placed` and
`ulysses_ring`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ringattn.core.problem import Problem
from ringattn.errors import InputError
from ringattn.schedule import all_to_all, bidirectional, double_ring, placed, sub_rings, ulysses_ring
from ringattn.schedule.content import Content, whole
from ringattn.schedule.opening import Opening, arrived, last_read, split_local, with_kept
from ringattn.schedule.ops import Block, Copy, Kind, Schedule, Work, attend, ordered_step, work_of
from ringattn.schedule.passes import Delivery, prune, transpose
from ringattn.schedule.read_sets import ReadSets, read_sets_of


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

    @property
    def by_turn(self) -> bool:
        """Whether each rank's part follows from the readers' read sets alone."""
        return not (self.by_segment or self.by_head or self.both_ways or self.by_node or self.place)

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

    def source(self, owner: int, reader: int, ranks: int) -> int:
        """The rank that hands `owner`'s block to `reader`."""
        # The neighbor before the reader attended to this block one turn earlier, so it holds it now.
        return (reader - 1) % ranks if self.relay else owner

    def read_step(self, turn: int) -> int:
        """The step in which the block of `turn` is attended; it is sent in the step before."""
        # Turn 0 is the rank's own block and needs no message; at once, all others are read in step 1.
        return min(turn, 1) if self.at_once else turn

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
        # The farthest block is read in the last step.
        return self.read_step(ranks - 1) + 1


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


def forward(problem: Problem, route: Route) -> Schedule:
    """The forward schedule before any pass: whole shards travel, every rank attends to all of them."""
    if route.by_node:
        way = ulysses_ring if route.by_head else double_ring
        return way.forward(problem, route.name, route.grid_for(problem))
    if route.by_segment:
        return sub_rings.forward(problem, route.name)
    if route.by_head:
        return all_to_all.exchange(problem, route.name, backward=False)
    if route.place is not None:
        return placed.exchange(problem, route.name, route.place, backward=False)
    if route.both_ways:
        return bidirectional.forward(problem, route.name)
    ranks = problem.world_size
    heads = [part.kv_heads for part in problem.parts]
    tiles = [work_of(problem, rank) for rank in range(ranks)]
    copies: list[list[Copy]] = [[] for _ in range(route.steps(ranks))]
    work: list[list[Work]] = [[] for _ in copies]
    for turn in range(ranks):
        step = route.read_step(turn)
        for rank in range(ranks):
            owner = (rank - turn) % ranks
            if turn:
                # The copy runs beside the work of the step before the one that reads it; `prune` cuts the payload.
                content = whole(problem.kv_layout.counts[owner], heads)
                copies[step - 1].append(Copy(Block(Kind.KV, owner), route.source(owner, rank, ranks), rank, content))
            work[step].append(attend(rank, owner, tiles[rank].get(owner, ())))
    return Schedule(problem, route.name, tuple(map(ordered_step, copies, work)))


@lru_cache(maxsize=256)
def forward_of_rank(problem: Problem, route: Route, rank: int) -> Schedule:
    """What `rank` does in the pruned forward schedule, where that can be found from the readers' read sets alone."""
    if not route.by_turn:
        return schedule_of(problem, route, False).restricted_to(rank)
    ranks, reads = problem.world_size, read_sets_of(problem)
    copies: list[list[Copy]] = [[] for _ in range(route.steps(ranks))]
    work: list[list[Work]] = [[] for _ in copies]
    # The turn of a block is its distance: in turn t this rank attends to the shard of rank - t.
    for owner, tiles in work_of(problem, rank).items():
        work[route.read_step((rank - owner) % ranks)].append(attend(rank, owner, tiles))
    for turn in range(1, ranks):
        # In turn t this rank receives one block and sends one. A relay sends to rank + 1 the block at distance t from
        # it; an owner sends its own block to rank + t. In both cases the block's owner is reader - turn.
        next_reader = (rank + 1 if route.relay else rank + turn) % ranks
        # First what arrives here, then what leaves here.
        for reader in (rank, next_reader):
            owner = (reader - turn) % ranks
            # A relayed block still carries what all farther readers read; a direct one only what this reader reads.
            content = reads.beyond(owner, turn) if route.relay else reads.read(owner, reader)
            if content:
                copy = Copy(Block(Kind.KV, owner), route.source(owner, reader, ranks), reader, content)
                copies[route.read_step(turn) - 1].append(copy)
    return Schedule(problem, route.name, tuple(map(ordered_step, copies, work)))


def backward_of_rank(problem: Problem, route: Route, rank: int) -> Schedule:
    """What `rank` does in the transposed schedule, found as in `forward_of_rank`."""
    if not route.by_turn:
        return schedule_of(problem, route, True).restricted_to(rank)
    forward_part = forward_of_rank(problem, route, rank)
    # K/V that the forward pass kept is not delivered again; only gradients travel.
    deliveries = () if route.keeps else _deliveries_of_rank(problem, route, rank)
    back = replace(transpose(forward_part, deliveries), kept=_kept(forward_part, route)).restricted_to(rank)
    return split_local(back) if route.opening == "split" else back


def kept_of_rank(problem: Problem, route: Route, rank: int) -> tuple[Block, ...]:
    """The others' blocks that a forward pass of `rank` keeps for its backward, in the order of that one's `kept`."""
    if not route.keeps and route.opening != "kept":
        return ()
    if route.by_turn:
        kept = _kept(forward_of_rank(problem, route, rank), route)
    else:
        kept = schedule_of(problem, route, True).kept
    return tuple(block for at, block, _ in kept if at == rank)


def _kept(part: Schedule, route: Route) -> tuple[tuple[int, Block, Content], ...]:
    """What the part of a rank in a forward schedule keeps for its backward."""
    if route.keeps:
        return arrived(part)
    return arrived(part, last_read(part)) if route.opening == "kept" else ()


@lru_cache(maxsize=32)
def schedule_of(problem: Problem, route: Route, backward: bool) -> Schedule:
    """What all ranks do in a pass, pruned."""
    if not backward:
        found = forward(problem, route)
        # Built from the rows that are read, so there is nothing to prune.
        return found if route.by_head or route.by_node or route.place else prune(found)
    if route.place is not None:
        return placed.exchange(problem, route.name, route.place, backward)
    there = schedule_of(problem, route, False)
    if route.by_node and route.by_head:
        return ulysses_ring.backward(there, route.grid_for(problem))
    # Not the transpose: q, k, v and dout travel to the head's owner again, and dq, dk, dv return.
    if route.by_head:
        return all_to_all.exchange(problem, route.name, backward, arrived(there) if route.keeps else ())
    if route.by_node:
        back = double_ring.backward(there, route.grid_for(problem))
    else:
        back = transpose(there, () if route.keeps else None)
    if route.keeps:
        return replace(back, kept=arrived(there))
    if route.opening == "kept":
        return with_kept(back, arrived(there, last_read(there)))
    return split_local(back) if route.opening == "split" else back


def _deliveries_of_rank(problem: Problem, route: Route, rank: int) -> Iterator[Delivery]:
    """The K/V copies of the backward that `rank` sends or receives."""
    ranks, reads = problem.world_size, read_sets_of(problem)
    for turn in range(ranks):
        owner = (rank - turn) % ranks
        reach = reads.reach(owner)
        # As `passes.deliveries_of`: straight to the farthest reader and back along the chain, if that sends no more.
        back = route.relay and reach > 1 and reads.relaying_home_costs_no_more(owner)
        distances: tuple[int, ...]
        if turn:
            # For another owner's block this rank is the reader at distance `turn`; on the way back it also sends to
            # turn - 1.
            distances = (turn, turn - 1) if back else (turn,)
        else:
            # For its own block: one message to the farthest reader, or one to each reader.
            distances = (reach,) if back else tuple(range(1, reach + 1))
        for distance in distances:
            reader = (owner + distance) % ranks
            # turn - 1 may be 0, the owner itself, which needs no delivery; beyond the reach nobody reads.
            if (
                1 <= distance <= reach
                and reads.read(owner, reader)
                and not _reader_keeps(reads, route, reader, distance)
            ):
                # The way back runs against the ring: from the rank one farther on.
                source = (reader + 1) % ranks if back and distance < reach else owner
                copy = Copy(Block(Kind.KV, owner), source, reader, reads.read(owner, reader))
                # Beside the step before the one that reads it in the backward: that of the next forward step.
                yield route.read_step(distance) + 1, copy


def _reader_keeps(reads: ReadSets, route: Route, reader: int, distance: int) -> bool:
    """Whether a reader kept the block that came from so far: it reads none in a later step."""
    if route.opening != "kept":
        return False
    step = route.read_step(distance)
    farther = (far for far in range(distance + 1, reads.ranks) if route.read_step(far) > step)
    return not any(reads.read((reader - far) % reads.ranks, reader) for far in farther)

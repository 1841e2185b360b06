"""Ulysses x ring: within each group of ranks by heads, and between the groups in rings.

`grid[group][place]` is a rank; G groups of U ranks. Queries, keys and values of a group go to the ranks of the group by
heads, as in `all_to_all`, and queries stay there. In turn t a group attends to the keys of the group t before it: each
rank passes the keys of its heads on to its place in the next group. Outputs return when all groups' keys have been
seen, so between groups only keys and values travel, and only those of a rank's heads.
       step     0                1                  ...  G                  G + 1               G + 2
       travels  q, k, v in group keys of turn 1                             outputs in group
       work     own keys, 1st h. received, turn 0        received, turn G-1 own keys, 2nd h.    log-sum-exp merge
The backward is the transpose: turns in reverse, dK and dV back along the rings, dQ when all turns are undone.
Guarantees: a schedule that needs no pass, forward or backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from ringattn.core.problem import Problem
from ringattn.schedule.groups import Groups, groups_of
from ringattn.schedule.ops import Attend, Block, Copy, Kind, Merge, Schedule, Work, attend, ordered_step, work_of
from ringattn.schedule.passes import Delivery, transpose
from ringattn.schedule.route import GridRoute, forward_of_rank, register

RING = 0
"""The name of the sub-ring in which all of it travels: what is received is told from a rank's own by it."""


@register(order=7)
@dataclass(frozen=True)
class UlyssesRing(GridRoute):
    """By heads within groups, and rings between the groups."""

    name: str = "ulysses_ring"
    parameter: ClassVar[str] = "M"
    by_head: ClassVar[bool] = True
    moves_queries: ClassVar[bool] = True
    transposed: ClassVar[bool] = False
    extra_steps: ClassVar[int] = 3

    def default_group(self, problem: Problem) -> int:
        """See `GridRoute.default_group`: the most that divide the ranks and the K/V heads, so that no head has two."""
        return gcd(problem.world_size, problem.kv_heads)

    def shared(self, problem: Problem) -> Groups:
        """See `Route.shared`."""
        return groups_of(problem, self.grid_for(problem))

    def forward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.forward_part`."""
        return forward_part(self.shared(problem), self.name, rank)

    def backward_part(self, problem: Problem, rank: int) -> Schedule:
        """See `Route.backward_part`."""
        return backward_part(self.shared(problem), forward_of_rank(problem, self, rank), rank)

    def steps(self, ranks: int) -> int:
        """See `Route.steps`: a first one, one for each turn, and two for the outputs. It must have its grid."""
        return len(self.grid) + self.extra_steps


def forward_part(groups: Groups, name: str, rank: int) -> Schedule:
    """What a rank does in a forward pass."""
    problem, back = groups.problem, groups.turns + 1
    group, place = groups.at[rank]
    copies: list[list[Copy]] = [[] for _ in range(groups.turns + 3)]
    work: list[list[Work]] = [[] for _ in copies]
    own = work_of(problem, rank).get(rank, ())
    half = -(-len(own) // 2)
    for step, some in ((0, own[:half]), (back, own[half:])):
        work[step] += [attend(rank, rank, some)] if some else []
    for asker in groups.grid[group].tolist():
        for owner, mine in groups.served(asker, place).items():
            if asker != owner:
                q, kv = Block(Kind.Q, asker, ring=RING), Block(Kind.KV, owner, ring=RING)
                item = Attend(rank, q, kv, Block(Kind.OUT, asker, rank, RING), mine)
                work[groups.turn(owner, rank) + 1].append(item)
    # In the group queries go out and outputs return, the same rows.
    for asker, server in [(rank, rank)] + [pair for to in groups.others(rank) for pair in ((rank, to), (to, rank))]:
        out = Block(Kind.OUT, asker, server, RING)
        if rows := groups.asked(asker, groups.at[server][1]):
            if asker != server:
                copies[0].append(Copy(Block(Kind.Q, asker, ring=RING), asker, server, rows))
                copies[back].append(Copy(out, server, asker, rows))
            if asker == rank:
                work[back + 1].append(Merge(rank, Block(Kind.OUT, rank), out))
    for owner, reader in _edges(groups, rank, 1):
        turn = groups.turn(owner, reader)
        source = int(groups.grid[groups.at[reader][0] - 1, groups.at[reader][1]]) if turn else owner
        # For its own group, and for all farther ones.
        rows = groups.read(owner, range(turn, groups.turns), groups.at[reader][1])
        if rank in (source, reader) and rows:
            copies[turn].append(Copy(Block(Kind.KV, owner, ring=RING), source, reader, rows))
    return Schedule(problem, name, False, tuple(map(ordered_step, copies, work)))


def backward_part(groups: Groups, part: Schedule, rank: int) -> Schedule:
    """What a rank does in the transposed schedule of which `part` is its forward.

    Keys of other groups go to the farthest group and back along the rings, or to each: whichever sends less.
    """
    return transpose(part, _deliveries(groups, rank)).restricted_to(rank)


def _deliveries(groups: Groups, rank: int) -> Iterator[Delivery]:
    """The K/V copies of the backward: turn t is undone beside the deliveries for turn t - 1."""
    back: dict[int, bool] = {}
    for owner, reader in _edges(groups, rank, -1):
        turn, (group, place) = groups.turn(owner, reader), groups.at[reader]
        source = owner
        if 0 < turn < groups.turns - 1:
            if owner not in back:
                back[owner] = groups.relays_back(owner)
            source = int(groups.grid[(group + 1) % groups.turns, place]) if back[owner] else owner
        if rank in (source, reader) and (rows := groups.read(owner, range(turn, turn + 1), place)):
            # Read in forward step turn + 1, so there when the step after it is undone.
            yield turn + 2, Copy(Block(Kind.KV, owner, ring=RING), source, reader, rows)


def _edges(groups: Groups, rank: int, way: int) -> Iterator[tuple[int, int]]:
    """(owner, reader) of the messages with keys that a rank may receive or send; others' go on `way` groups farther."""
    ranks = range(groups.problem.world_size)
    group, place = groups.at[rank]
    beside = int(groups.grid[(group + way) % groups.turns, place])
    yield from ((owner, rank) for owner in ranks if owner != rank)
    yield from ((rank, reader) for reader in ranks if reader != rank)
    if beside != rank:
        yield from ((owner, beside) for owner in ranks if owner not in (rank, beside))

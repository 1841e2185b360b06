"""Sub-rings: a ring of its own for each segment of each kind of branch, among the ranks that hold tokens of it.

All segments of a branch work side by side, and no rank relays another segment's rows: a ring over all ranks would send
a pair's keys through ranks that do not read them. A row that several branches need travels once for each.
       ranks       0   1   2   3   4   5
       segments    [---0---] [---1---]
       sub-rings   0>1>2>0   3>4>5>3
Guarantees: blocks are named by their sub-ring.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.core.tiling import TileTable, branch_tiles
from ringattn.schedule.content import Content, whole
from ringattn.schedule.ops import Block, Copy, HeadTiles, Kind, Schedule, Work, attend, ordered_step
from ringattn.schedule.passes import arrived, deliveries_of, last_read, prune, split_local, transpose
from ringattn.schedule.route import WholeRoute, register, schedule_of

Tables = dict[StridedRange, list[TileTable]]
"""By the K/V heads of a part."""


@register(order=3)
@dataclass(frozen=True)
class SubRings(WholeRoute):
    """A ring in each segment of each kind of branch."""

    name: str = "sub_rings"
    by_classes: ClassVar[bool] = True

    def whole(self, problem: Problem, backward: bool) -> Schedule:
        """See `Route.whole`."""
        if not backward:
            return prune(forward(problem, self.name))
        there = schedule_of(problem, self, False)
        kept: tuple[tuple[int, Block, Content], ...] = ()
        if self.keeps or self.prologue == "kept":
            kept = arrived(there, None if self.keeps else last_read(there))
        # What the forward pass kept is not delivered again.
        held = {(rank, block) for rank, block, _ in kept}
        deliveries = [(at, copy) for at, copy in deliveries_of(there) if (copy.dst, copy.block) not in held]
        back = replace(transpose(there, deliveries), kept=kept)
        return split_local(back) if self.prologue == "split" else back

    def why_not(self, problem: Problem, nodes: int) -> str:
        """See `Route.why_not`."""
        segments = any(branch.segment is not None or len(branch.bounds) > 2 for branch in problem.mask.branches)
        return "" if segments else "no segments or documents: it is the ring"


def forward(problem: Problem, name: str) -> Schedule:
    """Return the schedule before any pass.

    Own keys first, then one hop of each sub-ring a step: in step t its n-th member reads the (n - t)-th's keys.
    """
    ranks, heads = problem.world_size, [part.kv_heads for part in problem.parts]
    own, rings = tiles_by_ring(problem)
    # As many steps as ranks: a sub-ring of m members is done after m of them.
    copies: list[list[Copy]] = [[] for _ in range(ranks)]
    work: list[list[Work]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        # All branches' work on the rank's own keys is one item of step 0; it needs no message.
        work[0].append(attend(rank, rank, by_part(own[rank])))
    for number, pairs in enumerate(rings):
        members = sorted({rank for pair in pairs for rank in pair})
        for (rank, owner), tables in pairs.items():
            # Distance along the sub-ring, so also the step in which the owner's block has arrived.
            step = (members.index(rank) - members.index(owner)) % len(members)
            work[step].append(attend(rank, owner, by_part(tables), number))
        for owner in members:
            at = members.index(owner)
            # The members in ring order from the owner on: the block passes along this chain, one hop a step.
            chain = [*members[at:], *members[:at]]
            block, content = Block(Kind.KV, owner, ring=number), whole(problem.kv_layout.counts[owner], heads)
            # The copy to the member at distance t + 1 travels beside the work of step t and is read in step t + 1.
            for step, (src, dst) in enumerate(pairwise(chain)):
                copies[step].append(Copy(block, src, dst, content))
    return Schedule(problem, name, False, tuple(map(ordered_step, copies, work)))


def tiles_by_ring(problem: Problem) -> tuple[list[Tables], list[dict[tuple[int, int], Tables]]]:
    """The tiles of each rank with its own keys; and for each sub-ring those of (rank, owner of the keys)."""
    own: list[Tables] = [defaultdict(list) for _ in range(problem.world_size)]
    # Keyed by kind and segment; the order of insertion numbers the sub-rings, alike on every rank.
    rings: dict[tuple[object, ...], dict[tuple[int, int], Tables]] = {}
    for branch in problem.mask.branches:
        # Branches that differ in heads or offset only share a sub-ring: their rows travel between the same ranks.
        kind = branch.bounds, branch.kv_bounds, branch.band, branch.segment, branch.dilation
        for rank in range(problem.world_size):
            for (owner, part, segment), table in branch_tiles(problem, branch, rank, by_segment=True).items():
                heads = problem.parts[part].kv_heads
                if owner == rank:
                    own[rank][heads].append(table)
                else:
                    # A block is read by all branches of its kind; their tiles are told apart by heads alone.
                    pairs = rings.setdefault((*kind, segment), {})
                    pairs.setdefault((rank, owner), defaultdict(list))[heads].append(table)
    return own, list(rings.values())


def by_part(tables: Tables) -> tuple[HeadTiles, ...]:
    """The tiles of each head part."""
    return tuple(HeadTiles(heads, TileTable.together(tables[heads])) for heads in sorted(tables))

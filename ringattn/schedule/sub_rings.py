"""Sub-rings: a separate ring for each segment of each kind of branch, among the ranks that hold tokens of the segment.

Branches that differ only in heads or offset are of the same kind. All segments of a branch run concurrently, and no
rank relays rows of another segment. (A ring over all ranks would send keys through ranks that do not read them.) A row
that several kinds of branches need is sent once for each kind.
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
"""Tables by the K/V heads of a head part."""


@register(order=3)
@dataclass(frozen=True)
class SubRings(WholeRoute):
    """A schedule with a separate ring for each segment of each kind of branch."""

    name: str = "sub_rings"
    by_classes: ClassVar[bool] = True

    def whole(self, problem: Problem, backward: bool) -> Schedule:
        """See `Route.whole`."""
        if not backward:
            return prune(forward(problem, self.name))
        forward_schedule = schedule_of(problem, self, False)
        kept: tuple[tuple[int, Block, Content], ...] = ()
        if self.keeps or self.prologue == "kept":
            kept = arrived(forward_schedule, None if self.keeps else last_read(forward_schedule))
        # Blocks that the forward pass kept are not delivered again.
        present = {(rank, block) for rank, block, _ in kept}
        deliveries = [
            (step, copy) for step, copy in deliveries_of(forward_schedule) if (copy.dst, copy.block) not in present
        ]
        back = replace(transpose(forward_schedule, deliveries), kept=kept)
        return split_local(back) if self.prologue == "split" else back

    def why_not(self, problem: Problem, nodes: int) -> str:
        """See `Route.why_not`."""
        segments = any(len(branch.rectangles) > 1 for branch in problem.mask.branches)
        return "" if segments else "no segments or documents: equal to the ring"


def forward(problem: Problem, name: str) -> Schedule:
    """Return the unpruned forward schedule.

    Step 0 works on local keys. Each later step is one hop of every sub-ring: in step t the n-th member of a sub-ring
    reads the keys of member n - t.
    """
    ranks, heads = problem.world_size, [part.kv_heads for part in problem.parts]
    local, rings = tiles_by_ring(problem)
    # There is one step per rank; a sub-ring of m members is done after m steps.
    copies: list[list[Copy]] = [[] for _ in range(ranks)]
    work: list[list[Work]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        # The work of all branches on the rank's local keys is one item of step 0; it needs no message.
        work[0].append(attend(rank, rank, by_part(local[rank])))
    for number, pairs in enumerate(rings):
        members = sorted({rank for pair in pairs for rank in pair})
        for (rank, owner), tables in pairs.items():
            # The distance along the sub-ring is also the step in which the owner's block has arrived.
            step = (members.index(rank) - members.index(owner)) % len(members)
            work[step].append(attend(rank, owner, by_part(tables), number))
        for owner in members:
            start = members.index(owner)
            # The members in ring order, starting at the owner. The block moves along this chain, one hop per step.
            chain = [*members[start:], *members[:start]]
            block, content = Block(Kind.KV, owner, ring=number), whole(problem.kv_layout.counts[owner], heads)
            # The copy to the member at distance t + 1 is concurrent with the work of step t and is read in step t + 1.
            for step, (src, dst) in enumerate(pairwise(chain)):
                copies[step].append(Copy(block, src, dst, content))
    return Schedule(problem, name, False, tuple(map(ordered_step, copies, work)))


def tiles_by_ring(problem: Problem) -> tuple[list[Tables], list[dict[tuple[int, int], Tables]]]:
    """Return the tiles of each rank with its local keys, and for each sub-ring the tiles by (rank, owner of keys)."""
    local: list[Tables] = [defaultdict(list) for _ in range(problem.world_size)]
    # Keyed by kind and segment. The order of insertion numbers the sub-rings; it is the same on every rank.
    rings: dict[tuple[object, ...], dict[tuple[int, int], Tables]] = {}
    for branch in problem.mask.branches:
        # Branches that differ only in heads or offset share a sub-ring, because the same ranks exchange their rows.
        kind = branch.rectangles, branch.dilation
        for rank in range(problem.world_size):
            for (owner, part, segment), table in branch_tiles(problem, branch, rank, by_segment=True).items():
                heads = problem.parts[part].kv_heads
                if owner == rank:
                    local[rank][heads].append(table)
                else:
                    # All branches of the same kind may read this block; their tiles differ only in heads.
                    pairs = rings.setdefault((*kind, segment), {})
                    pairs.setdefault((rank, owner), defaultdict(list))[heads].append(table)
    return local, list(rings.values())


def by_part(tables: Tables) -> tuple[HeadTiles, ...]:
    """Return the tiles of each head part."""
    return tuple(HeadTiles(heads, TileTable.together(tables[heads])) for heads in sorted(tables))

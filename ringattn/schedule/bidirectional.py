"""Bidirectional ring: every block travels both ways round, so it arrives everywhere in half as many steps.

In step t a rank attends to the blocks of both ranks at distance t. Each rank sends as much as in a ring, half of it
each way: worth it where a link carries both directions at once, as on a ring of NVLinks or of network cables.
       5 ranks, the keys that rank 2 attends to and who sends them
       step         0      1               2
       owners       2      1, 3            0, 4
       from         -      1>2, 3>2        1>2, 3>2
Guarantees: a schedule before any pass, as `routes.forward`.
"""

from __future__ import annotations

from ringattn.core.problem import Problem
from ringattn.schedule.content import whole
from ringattn.schedule.ops import Block, Copy, Kind, Schedule, Work, attend, ordered_step, work_of


def forward(problem: Problem, name: str) -> Schedule:
    """Whole shards travel; of an even number of ranks the opposite one is reached on the way up."""
    ranks = problem.world_size
    heads = [part.kv_heads for part in problem.parts]
    copies: list[list[Copy]] = [[] for _ in range(ranks // 2 + 1)]
    work: list[list[Work]] = [[] for _ in copies]
    for rank in range(ranks):
        tiles = work_of(problem, rank)
        for owner in range(ranks):
            up, down = (rank - owner) % ranks, (owner - rank) % ranks
            distance, source = (up, rank - 1) if up <= down else (down, rank + 1)
            work[distance].append(attend(rank, owner, tiles.get(owner, ())))
            if distance:
                content = whole(problem.kv_layout.counts[owner], heads)
                copies[distance - 1].append(Copy(Block(Kind.KV, owner), source % ranks, rank, content))
    return Schedule(problem, name, tuple(map(ordered_step, copies, work)))

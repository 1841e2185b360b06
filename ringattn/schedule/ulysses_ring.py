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

from collections import Counter
from collections.abc import Iterator
from math import gcd

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.schedule.all_to_all import by_head, of_heads, rows_served, shares_of
from ringattn.schedule.content import Content, size, whole
from ringattn.schedule.double_ring import Grid
from ringattn.schedule.ops import Attend, Block, Copy, Kind, Merge, Schedule, Work, attend, ordered_step, work_of
from ringattn.schedule.passes import Delivery, is_on_received, prune, transpose

RING = 0
"""The name of the sub-ring in which all of it travels: what is received is told from a rank's own by it."""


def group_size(ranks: int, kv_heads: int) -> int:
    """The most ranks of a group that divide the ranks evenly, and the K/V heads too: none is sent to two of them."""
    return gcd(ranks, kv_heads)


def steps_of(grid: Grid) -> int:
    """Steps of a forward pass: a first one, one for each turn, and two for the outputs."""
    return len(grid) + 3


def forward(problem: Problem, name: str, grid: Grid) -> Schedule:
    """The pruned forward schedule."""
    turns, back = len(grid), len(grid) + 1
    copies: list[list[Copy]] = [[] for _ in range(steps_of(grid))]
    work: list[list[Work]] = [[] for _ in copies]
    shares = shares_of(problem, range(problem.q_heads), len(grid[0]))
    tiles = [work_of(problem, rank) for rank in range(problem.world_size)]
    single = [{owner: by_head({part.heads: [part.tiles] for part in parts}) for owner, parts in mine.items()}
              for mine in tiles]  # fmt: skip
    for group, ranks in enumerate(grid):
        for place, rank in enumerate(ranks):
            own = tiles[rank].get(rank, ())
            half = -(-len(own) // 2)
            work[0].append(attend(rank, rank, own[:half]))
            work[back].append(attend(rank, rank, own[half:]))
            # `prune` leaves of the whole shards what is read, here and farther on.
            queries = [StridedRange(head, 1) for head in shares[place]]
            for asker in ranks:
                if asker != rank:
                    rows = whole(problem.q_layout.counts[asker], queries)
                    copies[0].append(Copy(Block(Kind.Q, asker, ring=RING), asker, rank, rows))
            for turn in range(turns):
                for owner in grid[group - turn]:
                    kv = Block(Kind.KV, owner, ring=RING)
                    if owner != rank:
                        source = grid[group - 1][place] if turn else owner
                        copies[turn].append(Copy(kv, source, rank, _keys(problem, owner, shares[place])))
                    for asker in ranks:
                        mine = of_heads(problem, single[asker].get(owner, {}), shares[place])
                        if mine and asker != owner:
                            q, out = Block(Kind.Q, asker, ring=RING), Block(Kind.OUT, asker, rank, RING)
                            work[turn + 1].append(Attend(rank, q, kv, out, mine))
    received = [item for items in work for item in items if isinstance(item, Attend) and is_on_received(item)]
    for (rank, block), rows in rows_served(list(received))[1].items():
        if block.owner != rank:
            copies[back].append(Copy(block, rank, block.owner, rows))
        work[back + 1].append(Merge(block.owner, Block(Kind.OUT, block.owner), block))
    return prune(Schedule(problem, name, tuple(map(ordered_step, copies, work))))


def backward(forward_schedule: Schedule, grid: Grid) -> Schedule:
    """The transposed schedule. Keys of other groups go to the farthest group and back along the rings, or to each.

    Each block travels in the way that sends less, once what nobody reads is cut.
    """
    problem = forward_schedule.problem
    relayed, direct = (list(_deliveries(problem, grid, relay)) for relay in (True, False))
    if relayed == direct:
        return prune(transpose(forward_schedule, direct))
    sent_relayed, sent_direct = (_sent(prune(transpose(forward_schedule, one))) for one in (relayed, direct))
    best = [
        (at, copy)
        for deliveries, relay in ((relayed, True), (direct, False))
        for at, copy in deliveries
        if (sent_relayed[copy.block] <= sent_direct[copy.block]) is relay
    ]
    return prune(transpose(forward_schedule, best))


def _deliveries(problem: Problem, grid: Grid, relay: bool) -> Iterator[Delivery]:
    """The K/V copies of the backward: turn t is undone beside the deliveries for turn t - 1."""
    shares = shares_of(problem, range(problem.q_heads), len(grid[0]))
    for group, ranks in enumerate(grid):
        for place, rank in enumerate(ranks):
            for turn in range(len(grid)):
                for owner in grid[group - turn]:
                    if owner != rank:
                        relays = relay and 0 < turn < len(grid) - 1
                        source = grid[(group + 1) % len(grid)][place] if relays else owner
                        copy = Copy(
                            Block(Kind.KV, owner, ring=RING), source, rank, _keys(problem, owner, shares[place])
                        )
                        # Read in forward step turn + 1, so there when the step after it is undone.
                        yield turn + 2, copy


def _keys(problem: Problem, owner: int, share: list[int]) -> Content:
    heads = sorted({head // problem.group for head in share})
    return whole(problem.kv_layout.counts[owner], [StridedRange(head, 1) for head in heads])


def _sent(schedule: Schedule) -> Counter[Block]:
    """Rows times heads of each block that travel."""
    found: Counter[Block] = Counter()
    for step in schedule.steps:
        for copy in step.copies:
            found[copy.block] += size(copy.content)
    return found

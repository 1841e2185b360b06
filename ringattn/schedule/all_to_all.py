"""Queries, keys and values to the owner of a head, and outputs back: Ulysses within each segment of each branch.

The K/V heads that a segment's ranks need of each other are partitioned among these ranks; each receives the rows of its
heads, attends, and returns the outputs to their owners, where they are merged. For each token and head of a segment of
m ranks 4 (m - 1) / m rows travel (q, k, v, out), where a ring sends 2 (m - 1). A rank's queries attend to its own keys
locally, half of the head parts while the inputs travel, half while the outputs do.
       step     OUT                 SERVE               BACK                MERGE
       travels  q, k, v  ->                             out  ->
       work     own keys, 1st half  received heads      own keys, 2nd half  log-sum-exp merge
Guarantees: a schedule that needs no pass, forward or backward; every row travels with one head, and only if it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.core.tiling import TileTable
from ringattn.schedule.content import Content, union
from ringattn.schedule.ops import (
    Attend,
    AttendGrad,
    Block,
    Copy,
    HeadTiles,
    Kind,
    Merge,
    Schedule,
    Work,
    attend,
    attend_grad,
    ordered_step,
)
from ringattn.schedule.passes import inputs_of, result_of
from ringattn.schedule.sub_rings import Tables, by_part, tiles_by_ring

OUT, SERVE, BACK, MERGE = range(4)
STEPS = 4


def exchange(
    problem: Problem, name: str, backward: bool, kept: tuple[tuple[int, Block, Content], ...] = ()
) -> Schedule:
    """The whole schedule of a pass; `kept` need not travel."""
    own, rings = tiles_by_ring(problem)
    copies: list[list[Copy]] = [[] for _ in range(STEPS)]
    work: list[list[Work]] = [[] for _ in copies]
    for rank in range(problem.world_size):
        parts = by_part(own[rank])
        # Local work hides both exchanges: the first half of the parts runs beside the inputs, the second beside the
        # outputs.
        for step, some in ((OUT, parts[: -(-len(parts) // 2)]), (BACK, parts[-(-len(parts) // 2) :])):
            if some:
                item = attend(rank, rank, some)
                work[step].append(attend_grad(item) if backward else item)
    # The heads of a sub-ring are divided among its own ranks only: no other rank holds tokens of it.
    for number, pairs in enumerate(rings):
        for item in _served(problem, number, pairs):
            work[SERVE].append(grad_on_received(item) if backward else item)
    arrives, leaves = rows_served(work[SERVE])
    # What the forward pass kept is at its place and is not sent again; gradients of outputs are.
    there = {(rank, block) for rank, block, _ in kept}
    for (rank, block), content in arrives.items():
        # An owner of both the rows and the head reads its own tensors.
        if block.owner != rank and (rank, block) not in there:
            copies[OUT].append(Copy(block, block.owner, rank, content))
    for (rank, block), content in leaves.items():
        # A result of the rank's own queries needs no message, but it is merged all the same.
        if block.owner != rank:
            copies[BACK].append(Copy(block, rank, block.owner, content))
        # DKV has a partial sum for each rank (`origin`); OUT and DQ go straight into the owner's tensor.
        into = Block(block.kind, block.owner, block.owner if block.kind is Kind.DKV else None)
        work[MERGE].append(Merge(block.owner, into, block))
    return Schedule(problem, name, tuple(map(ordered_step, copies, work)), kept)


Rows = dict[tuple[int, Block], Content]
"""By rank and block."""


def rows_served(work: list[Work]) -> tuple[Rows, Rows]:
    """The rows that the work on received queries reads (inputs) and makes (results), on each rank."""
    arrives: dict[tuple[int, Block], list[Content]] = defaultdict(list)
    leaves: dict[tuple[int, Block], list[Content]] = defaultdict(list)
    for item in work:
        assert not isinstance(item, Merge)
        for block, rows in inputs_of(item):
            arrives[item.rank, block].append(rows)
        for block, rows in result_of(item):
            leaves[item.rank, block].append(rows)
    # A block that several items read or make travels once, with the union of their rows.
    return (
        {spot: union(contents) for spot, contents in arrives.items()},
        {spot: union(contents) for spot, contents in leaves.items()},
    )


def _served(problem: Problem, number: int, pairs: dict[tuple[int, int], Tables]) -> Iterator[Attend]:
    """The work of a sub-ring, each K/V head on its owner."""
    members = sorted({rank for pair in pairs for rank in pair})
    found = {pair: by_head(problem, tables) for pair, tables in pairs.items()}
    heads = sorted({head for tables in found.values() for head in tables})
    # Contiguous shares of the heads, differing by at most one:
    #    heads  0 1 2 3 4    members 2    at * 2 // 5 = 0 0 0 1 1
    shares = [[head for at, head in enumerate(heads) if at * len(members) // len(heads) == place]
             for place in range(len(members))]  # fmt: skip
    # `asker` owns the queries, `owner` the keys; `rank` computes and may be either of them or a third.
    for (asker, owner), tables in found.items():
        for rank, mine in zip(members, shares, strict=True):
            if tiles := tuple(HeadTiles(StridedRange(head, 1), tables[head]) for head in mine if head in tables):
                q, kv = Block(Kind.Q, asker, ring=number), Block(Kind.KV, owner, ring=number)
                yield Attend(rank, q, kv, Block(Kind.OUT, asker, rank, number), tiles)


def by_head(problem: Problem, tables: Tables) -> dict[int, TileTable]:
    """The tiles by K/V head, each of a single query head."""
    single = TileTable.together(table for some in tables.values() for table in some).with_single_heads()
    # Column 12 of a tile is its first query head, here its only one.
    kv_head = single.columns[:, 12] // problem.group
    return {head: single.take(kv_head == head) for head in sorted(set(kv_head.tolist()))}


def grad_on_received(item: Attend) -> AttendGrad:
    """The backward of work on received queries."""
    rank, ring = item.rank, item.q.ring
    # dQ, dK and dV made here are partial sums of this rank; their owners add them up.
    seed, dq = Block(Kind.GRAD_OUT, item.q.owner, ring=ring), Block(Kind.DQ, item.q.owner, rank, ring)
    return AttendGrad(rank, item.q, item.kv, seed, dq, Block(Kind.DKV, item.kv.owner, rank, ring), item.tiles)

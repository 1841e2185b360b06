"""Queries, keys and values to the owner of a head, and outputs back: Ulysses within each segment of each branch.

The heads that a segment's ranks need of each other are partitioned among these ranks; each receives the rows of its
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
from collections.abc import Iterable, Iterator

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.core.tiling import TileTable
from ringattn.schedule.content import Content, union
from ringattn.schedule.ops import (
    Attend,
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
from ringattn.schedule.passes import inputs_of, own_sum, result_of
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
            work[SERVE].append(attend_grad(item) if backward else item)
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
        work[MERGE].append(Merge(block.owner, own_sum(block), block))
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
    found = {pair: by_head(tables) for pair, tables in pairs.items()}
    shares = shares_of(problem, {head for tables in found.values() for head in tables}, len(members))
    # `asker` owns the queries, `owner` the keys; `rank` computes and may be either of them or a third.
    for (asker, owner), tables in found.items():
        for rank, mine in zip(members, shares, strict=True):
            if tiles := of_heads(problem, tables, mine):
                q, kv = Block(Kind.Q, asker, ring=number), Block(Kind.KV, owner, ring=number)
                yield Attend(rank, q, kv, Block(Kind.OUT, asker, rank, number), tiles)


def shares_of(problem: Problem, heads: Iterable[int], members: int) -> list[list[int]]:
    """Contiguous shares of query heads, one for each member: of whole K/V heads where these can be divided evenly.

    Else shares differ by at most one query head, and members that share a K/V head all receive it.
       K/V heads  0 0 1 1 2 2    members 2    shares 0 1 2 | 3 4 5
    """
    heads = sorted(heads)
    kv_heads = sorted({head // problem.group for head in heads})
    even = not len(kv_heads) % members
    # The place of a unit in the list of all says whose it is:  5 units, 2 members   at * 2 // 5 = 0 0 0 1 1
    units = {unit: at for at, unit in enumerate(kv_heads if even else heads)}
    shares: list[list[int]] = [[] for _ in range(members)]
    for head in heads:
        shares[units[head // problem.group if even else head] * members // len(units)].append(head)
    return shares


def by_head(tables: Tables) -> dict[int, TileTable]:
    """The tiles by query head."""
    single = TileTable.together(table for some in tables.values() for table in some).with_single_heads()
    # Column 12 of a tile is its first query head, here its only one.
    return {head: single.take(single.columns[:, 12] == head) for head in sorted(set(single.columns[:, 12].tolist()))}


def of_heads(problem: Problem, tables: dict[int, TileTable], heads: Iterable[int]) -> tuple[HeadTiles, ...]:
    """The tiles of some query heads, by the K/V head that they read."""
    found: dict[int, list[TileTable]] = defaultdict(list)
    for head in heads:
        if head in tables:
            found[head // problem.group].append(tables[head])
    return tuple(HeadTiles(StridedRange(head, 1), TileTable.together(found[head])) for head in sorted(found))

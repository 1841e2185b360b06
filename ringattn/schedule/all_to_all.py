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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np

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
from ringattn.schedule.passes import arrived, inputs_of, own_sum, result_of
from ringattn.schedule.route import WholeRoute, register, schedule_of
from ringattn.schedule.sub_rings import Tables, by_part, tiles_by_ring

Pair = TypeVar("Pair", bound=Hashable)

OUT, SERVE, BACK, MERGE = range(4)
STEPS = 4


@register(order=4)
@dataclass(frozen=True)
class Ulysses(WholeRoute):
    """All-to-all by head within each segment of each branch."""

    name: str = "ulysses"
    by_head: ClassVar[bool] = True
    arrives_at_once: ClassVar[bool] = True
    moves_queries: ClassVar[bool] = True
    transposed: ClassVar[bool] = False
    extra_steps: ClassVar[int] = 3

    def whole(self, problem: Problem, backward: bool) -> Schedule:
        """See `Route.whole`: q, k, v and dout travel to the head's owner again, and dq, dk, dv return."""
        kept = arrived(schedule_of(problem, self, False)) if backward and self.keeps else ()
        return exchange(problem, self.name, backward, kept)

    def steps(self, ranks: int) -> int:
        """See `Route.steps`."""
        return STEPS


def exchange(
    problem: Problem, name: str, backward: bool, kept: tuple[tuple[int, Block, Content], ...] = ()
) -> Schedule:
    """Return the whole schedule of a pass; `kept` need not travel."""
    own, rings = tiles_by_ring(problem)
    work: dict[int, list[Attend]] = {step: [] for step in range(STEPS)}
    for rank in range(problem.world_size):
        parts = by_part(own[rank])
        # Local work hides both exchanges: the first half of the parts runs while the inputs travel, the second while
        # the outputs do.
        half = -(-len(parts) // 2)
        for step, some in ((OUT, parts[:half]), (BACK, parts[half:])):
            work[step] += [attend(rank, rank, some)] if some else []
    # The heads of a sub-ring are divided among its own ranks only: no other rank holds tokens of it.
    for number, pairs in enumerate(rings):
        work[SERVE] += _served(problem, number, pairs)
    return with_exchanges(problem, name, backward, work, STEPS, kept, merge_own_after=2)


def with_exchanges(
    problem: Problem, name: str, backward: bool, work: Mapping[int, Iterable[Attend]], steps: int,
    kept: tuple[tuple[int, Block, Content], ...] = (), merge_own_after: int = 1,
) -> Schedule:  # fmt: skip
    """Return the pass with this work by step (of the forward pass), completed by what travels for it.

    Inputs travel one step before the work on them, results one step after it, and are merged in the step after that.
    `kept` is there already. Results of a rank's own rows need no message: they are merged `merge_own_after` steps after
    the work, or made in place if the queries were its own too.
    """
    copies: dict[int, list[Copy]] = defaultdict(list)
    every: dict[int, list[Work]] = defaultdict(list)
    there = {(rank, block) for rank, block, _ in kept}
    for step, attends in work.items():
        items = [attend_grad(item) if backward else item for item in attends]
        every[step] += items
        # A block that several items read or make travels once, with the union of their rows.
        read, made = (
            defaultdict[tuple[int, Block], list[Content]](list),
            defaultdict[tuple[int, Block], list[Content]](list),
        )
        for item in items:
            for found, blocks in ((read, inputs_of(item)), (made, result_of(item))):
                for block, rows in blocks:
                    found[item.rank, block].append(rows)
        for (rank, block), contents in read.items():
            if block.owner != rank and (rank, block) not in there:
                copies[step - 1].append(Copy(block, block.owner, rank, union(contents)))
        for (rank, block), contents in made.items():
            if block.owner != rank:
                copies[step + 1].append(Copy(block, rank, block.owner, union(contents)))
            elif block.ring is None:
                continue
            after = merge_own_after if block.owner == rank else 2
            every[step + after].append(Merge(block.owner, own_sum(block), block))
    in_order = tuple(ordered_step(copies[step], every[step]) for step in range(steps))
    return Schedule(problem, name, backward, in_order, kept)


def _served(problem: Problem, number: int, pairs: dict[tuple[int, int], Tables]) -> Iterator[Attend]:
    """The work of a sub-ring, each K/V head on its owner."""
    members = sorted({rank for pair in pairs for rank in pair})
    single = SingleHeads(problem, {pair: [one for some in tables.values() for one in some]
                                   for pair, tables in pairs.items()})  # fmt: skip
    # `asker` owns the queries, `owner` the keys; `rank` computes and may be either of them or a third.
    for rank, mine in zip(members, shares_of(problem, single.heads, len(members)), strict=True):
        for (asker, owner), tiles in single.of_heads(mine).items():
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


class SingleHeads(Generic[Pair]):
    """The tiles of some pairs of ranks, one for each query head, to be found by head."""

    def __init__(self, problem: Problem, tables: Mapping[Pair, Sequence[TileTable]]) -> None:
        """Takes the tiles of each pair. `heads`: the query heads that any of them has, ascending."""
        self._problem, self._pairs = problem, list(tables)
        every = TileTable.together([TileTable.of([]), *(table for some in tables.values() for table in some)])
        single = every.with_single_heads()
        pairs = np.repeat(np.arange(len(tables)), [sum(map(len, some)) for some in tables.values()])
        pairs = pairs.repeat(every.heads)
        order = np.lexsort((single.head, pairs))
        self._tiles, self._pair = single.take(order), pairs[order]
        self.heads = np.unique(single.head).tolist()

    def of_heads(self, heads: Sequence[int]) -> dict[Pair, tuple[HeadTiles, ...]]:
        """The tiles of some query heads, by the K/V head that they read; without the pairs that have none."""
        mine = np.isin(self._tiles.head, heads)
        tiles, pairs = self._tiles.take(mine), self._pair[mine]
        if not len(tiles):
            return {}
        reads = tiles.head // self._problem.group
        # A table ends where the next tile is of another pair or K/V head.
        firsts = np.flatnonzero(np.r_[True, (pairs[1:] != pairs[:-1]) | (reads[1:] != reads[:-1])])
        found: dict[Pair, list[HeadTiles]] = defaultdict(list)
        places = zip(firsts.tolist(), [*firsts[1:].tolist(), len(tiles)], pairs[firsts].tolist(),
                     reads[firsts].tolist(), strict=True)  # fmt: skip
        for first, end, pair, head in places:
            found[self._pairs[pair]].append(HeadTiles(StridedRange(head, 1), TileTable(tiles.array[first:end])))
        return {pair: tuple(parts) for pair, parts in found.items()}

"""Ulysses within each segment of each branch: all-to-all of Q, K, V by head, and of the outputs back.

The ranks of a segment partition the heads that they need from each other. Each rank receives the rows of its heads,
attends, and returns the outputs to their owners, where they are merged. For each token and head of a segment of m
ranks, 4 (m - 1) / m rows are sent (q, k, v, out), where a ring sends 2 (m - 1). A rank's queries attend to its local
keys without messages: half of the head parts while the inputs are sent, half while the outputs are sent.
       step     SEND                  ATTEND            RETURN                MERGE
       sent     q, k, v  ->                             out  ->
       work     local keys, 1st half  received heads    local keys, 2nd half  log-sum-exp merge
Guarantees: the schedules of both passes are already pruned; every row is sent for one head, and only if it is read.
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
from ringattn.schedule.passes import arrived, inputs_of, owner_sum, result_of
from ringattn.schedule.route import WholeRoute, register, schedule_of
from ringattn.schedule.sub_rings import Tables, by_part, tiles_by_ring

Pair = TypeVar("Pair", bound=Hashable)

SEND, ATTEND, RETURN, MERGE = range(4)
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
        """See `Route.whole`. Backward sends q, k, v and dout to the head's owner again, and returns dq, dk, dv."""
        kept = arrived(schedule_of(problem, self, False)) if backward and self.keeps else ()
        return exchange(problem, self.name, backward, kept)

    def steps(self, ranks: int) -> int:
        """See `Route.steps`."""
        return STEPS


def exchange(
    problem: Problem, name: str, backward: bool, kept: tuple[tuple[int, Block, Content], ...] = ()
) -> Schedule:
    """Return the whole schedule of a pass; the blocks in `kept` are not sent."""
    local, rings = tiles_by_ring(problem)
    work: dict[int, list[Attend]] = {step: [] for step in range(STEPS)}
    for rank in range(problem.world_size):
        parts = by_part(local[rank])
        # Local work hides both exchanges: the first half of the parts runs while the inputs are sent, the second half
        # while the outputs are sent.
        half = -(-len(parts) // 2)
        for step, half_parts in ((SEND, parts[:half]), (RETURN, parts[half:])):
            work[step] += [attend(rank, rank, half_parts)] if half_parts else []
    # Only the ranks of a sub-ring share its heads, because no other rank holds its tokens.
    for number, pairs in enumerate(rings):
        work[ATTEND] += _received_work(problem, number, pairs)
    return with_exchanges(problem, name, backward, work, STEPS, kept, merge_own_after=2)


def with_exchanges(
    problem: Problem, name: str, backward: bool, work: Mapping[int, Iterable[Attend]], steps: int,
    kept: tuple[tuple[int, Block, Content], ...] = (), merge_own_after: int = 1,
) -> Schedule:  # fmt: skip
    """Return a pass with the given work and the copies that the work needs.

    `work`: the work of the forward pass by step. A backward pass has the gradients of this work in the same steps.
    Inputs are sent one step before the work on them and results one step after it; results are merged in the step after
    that. Blocks in `kept` are not sent. Results for a rank's local rows need no message: they are merged
    `merge_own_after` steps after the work, or computed in place if the queries are local too.
    """
    copies: dict[int, list[Copy]] = defaultdict(list)
    all_work: dict[int, list[Work]] = defaultdict(list)
    present = {(rank, block) for rank, block, _ in kept}
    for step, attends in work.items():
        items = [attend_grad(item) if backward else item for item in attends]
        all_work[step] += items
        # A block that several items read or make is sent once, with the union of their rows.
        inputs, results = (
            defaultdict[tuple[int, Block], list[Content]](list),
            defaultdict[tuple[int, Block], list[Content]](list),
        )
        for item in items:
            for collected, blocks in ((inputs, inputs_of(item)), (results, result_of(item))):
                for block, rows in blocks:
                    collected[item.rank, block].append(rows)
        for (rank, block), contents in inputs.items():
            if block.owner != rank and (rank, block) not in present:
                copies[step - 1].append(Copy(block, block.owner, rank, union(contents)))
        for (rank, block), contents in results.items():
            if block.owner != rank:
                copies[step + 1].append(Copy(block, rank, block.owner, union(contents)))
            elif block.ring is None:
                continue
            after = merge_own_after if block.owner == rank else 2
            all_work[step + after].append(Merge(block.owner, owner_sum(block), block))
    in_order = tuple(ordered_step(copies[step], all_work[step]) for step in range(steps))
    return Schedule(problem, name, backward, in_order, kept)


def _received_work(problem: Problem, number: int, pairs: dict[tuple[int, int], Tables]) -> Iterator[Attend]:
    """Yield the work of sub-ring `number`, each head on its owner. `pairs`: the tables of its pairs of ranks."""
    members = sorted({rank for pair in pairs for rank in pair})
    single = SingleHeads(problem, {pair: [table for part_tables in tables.values() for table in part_tables]
                                   for pair, tables in pairs.items()})  # fmt: skip
    # `q_owner` owns the queries and `owner` the keys. `rank` computes; it may be either of them or a third rank.
    for rank, heads in zip(members, shares_of(problem, single.heads, len(members)), strict=True):
        for (q_owner, owner), tiles in single.of_heads(heads).items():
            q, kv = Block(Kind.Q, q_owner, ring=number), Block(Kind.KV, owner, ring=number)
            yield Attend(rank, q, kv, Block(Kind.OUT, q_owner, rank, number), tiles)


def shares_of(problem: Problem, heads: Iterable[int], members: int) -> list[list[int]]:
    """Return contiguous shares of the query heads, one share for each member.

    Shares have whole K/V heads if these can be divided evenly. Otherwise shares differ by at most one query head, and
    members that share a K/V head all receive it.
       K/V heads  0 0 1 1 2 2    members 2    shares 0 1 2 | 3 4 5
    """
    heads = sorted(heads)
    kv_heads = sorted({head // problem.group for head in heads})
    even = not len(kv_heads) % members
    # The index of a unit determines its member:  5 units, 2 members   index * 2 // 5 = 0 0 0 1 1
    units = {unit: index for index, unit in enumerate(kv_heads if even else heads)}
    shares: list[list[int]] = [[] for _ in range(members)]
    for head in heads:
        shares[units[head // problem.group if even else head] * members // len(units)].append(head)
    return shares


class SingleHeads(Generic[Pair]):
    """The tiles of pairs of ranks, one tile for each query head, indexed by head."""

    def __init__(self, problem: Problem, tables: Mapping[Pair, Sequence[TileTable]]) -> None:
        """Index the tiles of each pair. The attribute `heads` has the query heads of all tiles, ascending."""
        self._problem, self._pairs = problem, list(tables)
        tiles = TileTable.together([TileTable.of([]), *(table for of_pair in tables.values() for table in of_pair)])
        single = tiles.with_single_heads()
        pairs = np.repeat(np.arange(len(tables)), [sum(map(len, of_pair)) for of_pair in tables.values()])
        pairs = pairs.repeat(tiles.heads)
        order = np.lexsort((single.head, pairs))
        self._tiles, self._pair = single.take(order), pairs[order]
        self.heads = np.unique(single.head).tolist()

    def of_heads(self, heads: Sequence[int]) -> dict[Pair, tuple[HeadTiles, ...]]:
        """Return the tiles of some query heads for each pair that has any, in one table per K/V head."""
        selected = np.isin(self._tiles.head, heads)
        tiles, pairs = self._tiles.take(selected), self._pair[selected]
        if not len(tiles):
            return {}
        reads = tiles.head // self._problem.group
        # A table ends where the next tile is of another pair or K/V head.
        firsts = np.flatnonzero(np.r_[True, (pairs[1:] != pairs[:-1]) | (reads[1:] != reads[:-1])])
        by_pair: dict[Pair, list[HeadTiles]] = defaultdict(list)
        slices = zip(firsts.tolist(), [*firsts[1:].tolist(), len(tiles)], pairs[firsts].tolist(),
                     reads[firsts].tolist(), strict=True)  # fmt: skip
        for first, end, pair, head in slices:
            by_pair[self._pairs[pair]].append(HeadTiles(StridedRange(head, 1), TileTable(tiles.array[first:end])))
        return {pair: tuple(parts) for pair, parts in by_pair.items()}

"""Verify that a schedule computes its problem: direction, coverage, presence, payload and sums (see `verify`).

`verify` replays the schedule of all ranks on sets of rows, and raises `PlanError`, with the grid, at the first
violation. It trusts only the tiles of the mask (`core.tiling`), not the code that made the schedule.
Not covered: memory (see `planner.place`), torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import NoReturn

from ringattn.core.geometry import StridedRange, Tile
from ringattn.errors import PlanError
from ringattn.schedule.content import NOTHING, Content, common, contains, union
from ringattn.schedule.ops import INPUTS, Attend, AttendGrad, Block, Copy, HeadTiles, Kind, Merge, Schedule, work_of
from ringattn.schedule.passes import RankBlock, inputs_of, is_on_received, prune, result_of
from ringattn.schedule.text import grid

Fail = Callable[[int, int, str], NoReturn]


def verify(schedule: Schedule) -> None:
    """Raise `PlanError` unless the schedule, forward or backward, is complete and wastes nothing.

    Direction: all work belongs to the pass that the schedule names. Coverage: every tile of the mask is worked on
    exactly once. Presence: a rank holds all rows that it reads or sends. Payload: every sent row is read. Sums: a sum
    that is computed on another rank reaches its owner exactly once, after all additions to it.
    """

    def fail(step: int, rank: int, why: str) -> NoReturn:
        raise PlanError(f"{schedule.name}: step {step}, rank {rank}: {why}\n{grid(schedule)}")

    _check_direction(schedule, fail)
    _check_coverage(schedule, fail)
    _check_presence(schedule, fail)
    _check_payload(schedule, fail)
    _check_sums(schedule, fail)


def _check_direction(schedule: Schedule, fail: Fail) -> None:
    kind, name = (AttendGrad, "backward") if schedule.backward else (Attend, "forward")
    for index, step in enumerate(schedule.steps):
        for item in step.work:
            if not isinstance(item, (Merge, kind)):
                fail(
                    index, item.rank, f"works on {item.kv} as {type(item).__name__}, which a {name} pass does not have"
                )


def _check_coverage(schedule: Schedule, fail: Fail) -> None:
    # The tiles of the mask that no work has covered yet, by owner of the queries and owner of the keys.
    left = {
        (rank, owner): _single(parts)
        for rank in range(schedule.problem.world_size)
        for owner, parts in work_of(schedule.problem, rank).items()
    }
    for index, step in enumerate(schedule.steps):
        for item in step.work:
            if isinstance(item, Merge):
                continue
            if not is_on_received(item) and item.q.owner != item.rank:
                fail(index, item.rank, f"works on {item.q}, which is not local and was not sent")
            count = left.get((item.q.owner, item.kv.owner), Counter())
            for tile, times in _single(item.tiles).items():
                # A schedule may work on a part of a tile of the mask, for example of a split block. The rest of the
                # tile must then follow.
                if not all(_cut_out(count, tile) for _ in range(times - count[tile])):
                    why = "too often" if tile in count else "that the mask does not have"
                    fail(index, item.rank, f"works on a tile of {item.kv} {why}: {tile}")
                count[tile] -= times
    for (rank, owner), count in left.items():
        if missing := +count:
            fail(-1, rank, f"{missing.total()} tiles of KV{owner} are never worked on, first {next(iter(missing))}")


def _cut_out(count: Counter[Tile], piece: Tile) -> bool:
    """Find a tile in `count` with the queries of `piece` and more keys, and replace it by `piece` and the other keys.

    Return whether there is such a tile.
    """
    for tile in +count:
        # `whole` equals the piece if queries, band and heads are the same. `shared` shows whether the tile has the
        # positions of the piece's keys, and `pick` whether the rows at these positions are the piece's rows.
        shared = tile.k.positions.intersect(piece.k.positions)
        whole = tile._replace(k=piece.k)
        if tile == piece or whole != piece or shared != piece.k.positions:
            continue
        start = (piece.k.positions.start - tile.k.positions.start) // tile.k.positions.stride
        stop = start + shared.count
        if tile.k.pick(StridedRange(start, shared.count)) == piece.k:
            count[tile] -= 1
            count[piece] += 1
            # The keys before and after the piece must still be worked on.
            for rest in (StridedRange(0, start), StridedRange(stop, tile.k.positions.count - stop)):
                if rest.count:
                    count[tile._replace(k=tile.k.pick(rest))] += 1
            return True
    return False


def _single(parts: Iterable[HeadTiles]) -> Counter[Tile]:
    """Count tiles after splitting them by query head, so that the grouping of heads does not change the counts."""
    return Counter(tile for _, table in parts for tile in table.with_single_heads())


def _check_presence(schedule: Schedule, fail: Fail) -> None:
    problem = schedule.problem
    queries = problem.q_layout.counts
    counts = {Kind.KV: problem.kv_layout.counts, Kind.Q: queries, Kind.GRAD_OUT: queries}
    received: dict[RankBlock, Content] = defaultdict(
        tuple, {(rank, block): rows for rank, block, rows in schedule.kept}
    )

    def holds(rank: int, block: Block, rows: Content) -> bool:
        # A rank has all rows of its local shard from the start, and the remote rows received in earlier steps.
        if block.owner == rank:
            shard = StridedRange(0, counts[block.kind][rank])
            return all(run.intersect(shard) == run for part in rows for run in part.rows)
        return contains(received[rank, block], rows)

    for index, step in enumerate(schedule.steps):
        for item in step.work:
            for block, rows in () if isinstance(item, Merge) else inputs_of(item):
                if not holds(item.rank, block, rows):
                    fail(index, item.rank, f"reads rows of {block} that have not arrived")
        arrived: list[Copy] = []
        for copy in step.copies:
            if copy.block.kind in INPUTS:
                if not holds(copy.src, copy.block, copy.content):
                    fail(index, copy.src, f"sends rows of {copy.block} that it does not hold")
                arrived.append(copy)
        # The copies of a step are complete at its end, so their rows can be read or relayed from the next step on.
        for copy in arrived:
            received[copy.dst, copy.block] = union((received[copy.dst, copy.block], copy.content))


def _check_payload(schedule: Schedule, fail: Fail) -> None:
    # `prune` starts at the last step and drops from each copy the rows that no later work or copy reads.
    least = prune(schedule)
    for index, (step, pruned) in enumerate(zip(schedule.steps, least.steps, strict=True)):
        read = {(copy.block, copy.src, copy.dst): copy.content for copy in pruned.copies}
        for copy in (copy for copy in step.copies if copy.block.kind in INPUTS):
            if not contains(read.get((copy.block, copy.src, copy.dst), NOTHING), copy.content):
                fail(index, copy.src, f"sends rows of {copy.block} to rank {copy.dst} that are not read there")


def _check_sums(schedule: Schedule, fail: Fail) -> None:
    """Check the order of the operations on each partial sum.

    All additions to a sum come first. Then the sum is sent in one copy, or in one copy per piece, and the receiver
    merges each copy into its own sum. The receiver's sum is sent on in the same way, until the owner has it. A sum that
    the owner itself computes is only merged.
    """
    # `added`: the rows of a sum to which work has added. `arrived`: received sums that must still be merged. `sent`:
    # the rows of a sum that were sent.
    added: dict[Block, Content] = defaultdict(tuple)
    arrived: dict[RankBlock, Content] = {}
    sent: dict[Block, Content] = {}
    copies = [(index, copy) for index, step in enumerate(schedule.steps) for copy in step.copies]
    last_sent = {copy.block: index for index, copy in copies if copy.block.kind not in INPUTS}
    for index, step in enumerate(schedule.steps):
        incoming: dict[RankBlock, Content] = {}
        for copy in step.copies:
            if copy.block.kind in INPUTS:
                continue
            before = sent.get(copy.block, NOTHING)
            if copy.block.origin != copy.src or common(before, copy.content):
                fail(index, copy.src, f"sends {copy.block} twice or for another rank")
            sent[copy.block] = union((before, copy.content))
            if index == last_sent[copy.block] and not contains(sent[copy.block], added[copy.block]):
                fail(index, copy.src, f"leaves rows of {copy.block} behind")
            if not contains(added[copy.block], copy.content):
                fail(index, copy.src, f"sends rows of {copy.block} that nothing was added to")
            if (copy.dst, copy.block) in arrived:
                fail(index, copy.dst, f"{copy.block} arrived and was never merged")
            incoming[copy.dst, copy.block] = copy.content
        for item in step.work:
            if isinstance(item, Merge):
                # An owner may merge a sum that it computed itself without a copy; all other sums must be received.
                is_local = item.part.owner == item.part.origin == item.rank
                rows = added.pop(item.part, None) if is_local else arrived.pop((item.rank, item.part), None)
                if rows is None:
                    fail(index, item.rank, f"merges {item.part}, which was not received")
                sums = [(item.into, rows)]
            else:
                sums = result_of(item)
            for into, rows in sums:
                if into in sent:
                    fail(index, item.rank, f"adds to {into} after it was sent")
                added[into] = union((added[into], rows))
        arrived |= incoming
    # At the end, every received sum must have been merged, and every sum for another rank must have been sent.
    for (rank, block), _ in arrived.items():
        fail(-1, rank, f"{block} arrived and was never merged")
    for block, rows in added.items():
        if block.origin not in (None, block.owner) and block not in sent and rows:
            fail(-1, block.origin or 0, f"{block} was never returned to its owner")
        if block.ring is not None and block.origin == block.owner:
            fail(-1, block.owner, f"{block} was never merged")

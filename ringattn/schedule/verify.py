"""Proof that a schedule computes its problem: coverage, presence, payload.

`verify` replays a global schedule on sets and raises `PlanError`, with the marked grid, at the first violation. It
trusts only the tiles of the mask (`sweep`), not the code that made the schedule.
Does not know: memory (see `planner.place`), torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NoReturn

from ringattn.errors import PlanError
from ringattn.schedule.content import NOTHING, Content, contains, union, whole
from ringattn.schedule.ops import AttendGrad, Block, Copy, Kind, Merge, Schedule
from ringattn.schedule.passes import Spot, prune, rows_read
from ringattn.schedule.routes import work_of
from ringattn.schedule.text import grid

Fail = Callable[[int, int, str], NoReturn]


def verify(schedule: Schedule) -> None:
    """Raise `PlanError` unless the schedule, forward or backward, is complete and wastes nothing.

    Coverage: every tile of the mask is worked on exactly once, by its query's rank. Presence: whatever is read or
    sent is held. Payload: no K/V row travels that nobody reads. Backward also: every partial dK/dV reaches its home
    exactly once, after all that adds to it.
    """

    def fail(step: int, rank: int, why: str) -> NoReturn:
        raise PlanError(f"{schedule.name}: step {step}, rank {rank}: {why}\n{grid(schedule, mark=(step, rank))}")

    _check_coverage(schedule, fail)
    _check_presence(schedule, fail)
    _check_payload(schedule, fail)
    if any(isinstance(item, AttendGrad) for step in schedule.steps for item in step.work):
        _check_gradients(schedule, fail)


def _check_coverage(schedule: Schedule, fail: Fail) -> None:
    left = {
        (rank, owner): Counter((part, tile) for part, table in parts for tile in table)
        for rank in range(schedule.problem.world_size)
        for owner, parts in work_of(schedule.problem, rank).items()
    }
    for index, step in enumerate(schedule.steps):
        for item in step.work:
            if isinstance(item, Merge):
                continue
            count = left.get((item.rank, item.kv.owner), Counter())
            for key in ((part, tile) for part, table in item.tiles for tile in table):
                if count[key] < 1:
                    why = "once too often" if key in count else "that the mask does not have"
                    fail(index, item.rank, f"works on a tile of {item.kv} {why}: {key[1]}")
                count[key] -= 1
    for (rank, owner), count in left.items():
        if missing := +count:
            fail(-1, rank, f"{missing.total()} tiles of KV{owner} are never worked on, first {next(iter(missing))}")


def _check_presence(schedule: Schedule, fail: Fail) -> None:
    problem = schedule.problem
    heads = [part.kv_heads for part in problem.parts]
    at_home = [whole(count, heads) for count in problem.kv_layout.counts]
    came: dict[Spot, Content] = defaultdict(tuple)

    def held(rank: int, block: Block) -> Content:
        return at_home[rank] if block.owner == rank else came[rank, block]

    for index, step in enumerate(schedule.steps):
        for item in step.work:
            if not isinstance(item, Merge):
                if not contains(held(item.rank, item.kv), rows_read(problem, item.tiles)):
                    fail(index, item.rank, f"reads rows of {item.kv} that have not arrived")
        arrived: list[Copy] = []
        for copy in step.copies:
            if copy.block.kind is Kind.KV:
                if not contains(held(copy.src, copy.block), copy.content):
                    fail(index, copy.src, f"sends rows of {copy.block} that it does not hold")
                arrived.append(copy)
        for copy in arrived:
            came[copy.dst, copy.block] = union((came[copy.dst, copy.block], copy.content))


def _check_payload(schedule: Schedule, fail: Fail) -> None:
    least = prune(schedule)
    for index, (step, pruned) in enumerate(zip(schedule.steps, least.steps, strict=True)):
        read = {(copy.block, copy.src, copy.dst): copy.content for copy in pruned.copies}
        for copy in step.copies:
            if not contains(read.get((copy.block, copy.src, copy.dst), NOTHING), copy.content):
                fail(index, copy.src, f"sends rows of {copy.block} to rank {copy.dst} that nobody reads there")


def _check_gradients(schedule: Schedule, fail: Fail) -> None:
    """Each partial sum: all additions, then one copy, then one merge, up to the owner."""
    problem = schedule.problem
    added: dict[Block, Content] = defaultdict(tuple)
    arrived: dict[Spot, Content] = {}
    sent: set[Block] = set()
    for index, step in enumerate(schedule.steps):
        incoming: dict[Spot, Content] = {}
        for copy in step.copies:
            if copy.block.kind is not Kind.DKV:
                continue
            if copy.block.origin != copy.src or copy.block in sent:
                fail(index, copy.src, f"sends {copy.block} twice or for somebody else")
            if not contains(copy.content, added[copy.block]):
                fail(index, copy.src, f"leaves rows of {copy.block} behind")
            if not contains(added[copy.block], copy.content):
                fail(index, copy.src, f"sends rows of {copy.block} that nothing was added to")
            sent.add(copy.block)
            incoming[copy.dst, copy.block] = copy.content
        for item in step.work:
            if isinstance(item, Merge):
                into, rows = item.into, arrived.pop((item.rank, item.part), None)
                if rows is None:
                    fail(index, item.rank, f"merges {item.part}, which is not there")
            elif isinstance(item, AttendGrad):
                into, rows = item.dkv, rows_read(problem, item.tiles)
            else:
                continue
            if into in sent:
                fail(index, item.rank, f"adds to {into} after it was sent")
            added[into] = union((added[into], rows or NOTHING))
        arrived |= incoming
    for (rank, block), _ in arrived.items():
        fail(-1, rank, f"{block} arrived and was never merged")
    for block, rows in added.items():
        if block.origin != block.owner and block not in sent and rows:
            fail(-1, block.origin or 0, f"{block} was never sent home")


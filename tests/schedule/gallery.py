"""The generated parts of docs/schedules.md: what each schedule sends, and its steps on 4 and 8 ranks.

`python -m tests.schedule.gallery` writes them anew.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from ringattn.schedule.content import size
from ringattn.schedule.ops import Block, Kind, Merge, Schedule
from ringattn.schedule.routes import ROUTES, Route, schedule_of
from ringattn.schedule.text import cell, grid
from tests.schedule import formulas
from tests.schedules import RING
from tests.strategies import simple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"
HEADS, ROWS = 8, 8
SHARD = {Kind.KV: 1.0, Kind.DKV: 1.0, Kind.Q: 0.5, Kind.OUT: 0.5, Kind.GRAD_OUT: 0.5, Kind.DQ: 0.5}
"""Of a row of each kind: its share of a row of K and V, with as many query heads."""


def sent() -> str:
    """A table: shards that a rank sends, messages, steps with work, forward and backward."""
    lines = [
        "| schedule | ranks | forward: shards sent | messages | steps | backward: shards sent | messages | steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, route in ROUTES.items():
        for ranks in (4, 8):
            problem = simple("contiguous", ROWS * ranks, ranks, heads=heads_for(route, ranks, HEADS)).problem
            cells = [cell for backward in (False, True) for cell in _counts(schedule_of(problem, route, backward))]
            lines.append(f"| `{name}` | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _counts(schedule: Schedule) -> list[str]:
    ranks, shards, messages = schedule.problem.world_size, 0.0, Counter[int]()
    heads = schedule.problem.kv_heads
    for step in schedule.steps:
        for copy in step.copies:
            shards += SHARD[copy.block.kind] * size(copy.content) / (ROWS * heads)
            messages[copy.src] += 1
    works = sum(any(not isinstance(item, Merge) for item in step.work) for step in schedule.steps)
    return [f"{shards / ranks:.3g}", str(max(messages.values())), str(works)]


def heads_for(route: Route, ranks: int, heads: int) -> int:
    """So many heads that Ulysses x ring has two groups, where it is the route."""
    return ranks // 2 if route.by_head and route.parameter else heads


def grids() -> str:
    """The forward of each schedule on 4 and on 8 ranks."""
    found = []
    for name, route in ROUTES.items():
        found.append(f"`{name}`")
        for ranks in (4, 8):
            problem = simple(
                "contiguous", 4 * ranks, ranks, heads=heads_for(route, ranks, ranks), causal=name == "balanced"
            ).problem
            found.append(f"```text\n{drawn(schedule_of(problem, route, False), short=ranks == 8)}\n```")
    return "\n\n".join(found)


def backwards() -> str:
    """The backward of a ring, however it begins."""
    problem = simple("contiguous", 16, 4).problem
    found = (grid(schedule_of(problem, replace(RING, prologue=prologue), True)) for prologue in ("split", "kept"))
    return "\n\n".join(f"```text\n{one}\n```" for one in found)


def drawn(schedule: Schedule, short: bool) -> str:
    """The grid of a schedule; `short`: of one in which all ranks do alike, each turned by its number, rank 0 alone."""
    if not short or any(turned(schedule, by) != turned(schedule, 0) for by in range(1, schedule.problem.world_size)):
        return grid(schedule)
    head, rule, *rows = (line.rstrip() for line in column(schedule, 0))
    return "\n".join([f"{head} of {schedule.problem.world_size}; all others alike", rule, *rows])


def column(schedule: Schedule, rank: int) -> list[str]:
    """A rank's column of the grid, with the steps' numbers."""
    rows = [(str(at), cell(step, rank)) for at, step in enumerate(schedule.steps) if step.copies or step.work]
    return [f"step  rank {rank}", f"----  {'-' * max(len(text) for _, text in rows)}",
            *(f"{at:<4}  {text}" for at, text in rows)]  # fmt: skip


def turned(schedule: Schedule, by: int) -> list[tuple[set[tuple], set[tuple]]]:
    """What rank `by` sends and works on in each step, with ranks counted from itself."""
    ranks = schedule.problem.world_size

    def block(one: Block) -> tuple:
        return one.kind, (one.owner - by) % ranks, one.origin is not None and (one.origin - by) % ranks

    return [
        (
            {(block(copy.block), (copy.dst - by) % ranks) for copy in step.copies if copy.src == by},
            {(block(item.part),) if isinstance(item, Merge) else (block(item.q), block(item.kv))
             for item in step.work if item.rank == by},
        )
        for step in schedule.steps
    ]  # fmt: skip


def renewed(page: str) -> str:
    """The page with its parts as they should be."""
    for mark, text in (
        ("formulas", formulas.table()),
        ("sent", sent()),
        ("grids", grids()),
        ("backwards", backwards()),
    ):
        before, rest = page.split(f"<!-- {mark} -->\n")
        after = rest.split(f"<!-- end of {mark} -->")[1]
        page = f"{before}<!-- {mark} -->\n\n{text}\n\n<!-- end of {mark} -->{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""The generated parts of docs/schedules.md: what each schedule sends, and its steps on four ranks.

`python -m tests.schedule.gallery` writes them anew.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ringattn.schedule.content import size
from ringattn.schedule.ops import Kind, Merge, Schedule
from ringattn.schedule.routes import ROUTES, schedule_of
from ringattn.schedule.text import grid
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
            problem = simple("contiguous", ROWS * ranks, ranks, heads=HEADS).problem
            cells = [cell for backward in (False, True) for cell in _counts(schedule_of(problem, route, backward))]
            lines.append(f"| `{name}` | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _counts(schedule: Schedule) -> list[str]:
    ranks, shards, messages = schedule.problem.world_size, 0.0, Counter[int]()
    for step in schedule.steps:
        for copy in step.copies:
            shards += SHARD[copy.block.kind] * size(copy.content) / (ROWS * HEADS)
            messages[copy.src] += 1
    works = sum(any(not isinstance(item, Merge) for item in step.work) for step in schedule.steps)
    return [f"{shards / ranks:.3g}", str(max(messages.values())), str(works)]


def grids() -> str:
    """The forward of each schedule on four ranks."""
    found = []
    for name, route in ROUTES.items():
        problem = simple("contiguous", 16, 4, heads=4, causal=name == "balanced").problem
        found.append(f"`{name}`\n\n```text\n{grid(schedule_of(problem, route, False))}\n```\n")
    return "\n".join(found)


def renewed(page: str) -> str:
    """The page with both parts as they should be."""
    for mark, text in (("sent", sent()), ("grids", grids())):
        before, rest = page.split(f"<!-- {mark} -->\n")
        after = rest.split(f"<!-- end of {mark} -->")[1]
        page = f"{before}<!-- {mark} -->\n\n{text}\n\n<!-- end of {mark} -->{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Generate parts of docs/schedules.md: the bytes that each schedule sends, and its steps on 4 and on 8 ranks.

`python -m tests.schedule.gallery` writes these parts. In the formulas, P is the number of ranks. A double ring and a
node gather have N nodes of L ranks, and Ulysses x ring has N groups of L ranks. The other letters are bytes of one
shard: M of keys and values, Q of queries, O of partial outputs with their lse; in backward, G of key and value
gradients, D of output gradients with lse and delta, R of query gradients. Source: the papers on Ring Attention, Ulysses
and ring pass-Q.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ringattn.core.problem import ITEM_BYTES, Problem
from ringattn.schedule.content import size
from ringattn.schedule.ops import Block, Kind, Merge, Schedule
from ringattn.schedule.routes import ROUTES, Route, schedule_of
from ringattn.schedule.text import cell, grid
from tests.schedules import RING
from tests.strategies import simple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"
HEADS, ROWS = 8, 8
SHARD = {Kind.KV: 1.0, Kind.DKV: 1.0, Kind.Q: 0.5, Kind.OUT: 0.5, Kind.GRAD_OUT: 0.5, Kind.DQ: 0.5}
"""The size of a row of each kind, relative to a row of K and V with the same number of heads."""


class Formulas(NamedTuple):
    """Formulas for the bytes and messages that a rank sends on average. The module's docstring defines the letters."""

    forward_bytes: str
    forward_messages: str
    backward_bytes: str
    backward_messages: str


ALONG_THE_RING = Formulas("(P - 1) * M", "P - 1", "(P - 1) * (M + G)", "2 * (P - 1)")
"""The formulas of schedules in which every rank receives every block, relayed or from its owner."""

FORMULAS = {
    "ring": ALONG_THE_RING,
    "all_gather": ALONG_THE_RING,
    "direct": ALONG_THE_RING,
    "sub_rings": ALONG_THE_RING,
    "ulysses": Formulas("(P - 1) / P * (M + Q + O)", "3 * (P - 1)", "(P - 1) / P * (M + Q + D + R + G)", "5 * (P - 1)"),
    "bidirectional": ALONG_THE_RING,
    "double_ring": ALONG_THE_RING._replace(
        forward_messages="N * (L - 1) + (N - 1) * L",
        backward_messages="N * (L - 1) + (N - 1) * L + P - 1 + max(0, N - 2) * (L - 1)",
    ),
    "ulysses_ring": Formulas(
        "(L - 1) / L * (M + Q + O) + (N - 1) * M",
        "3 * (L - 1) + (N - 1) * L",
        "(L - 1) / L * (M + Q + D + R + G) + (N - 1) * (M + G)",
        "5 * (L - 1) + 2 * (N - 1) * L",
    ),
    "pass_q": Formulas("(P - 1) * (Q + O)", "2 * (P - 1)", "(P - 1) * (Q + D + R)", "3 * (P - 1)"),
    "balanced": Formulas(
        "P // 2 * M + (P - 1) // 2 * (Q + O)",
        "P // 2 + 2 * ((P - 1) // 2)",
        "P // 2 * (M + G) + (P - 1) // 2 * (Q + D + R)",
        "2 * (P // 2) + 3 * ((P - 1) // 2)",
    ),
    "node_gather": ALONG_THE_RING,
}


def quantities(problem: Problem, nodes: int) -> dict[str, int]:
    """Return the values of the letters in the formulas."""
    rows = problem.batch * problem.q_layout.counts[0]
    item, sums = ITEM_BYTES[problem.dtype], ITEM_BYTES[problem.accumulator_dtype]
    wire = ITEM_BYTES[problem.wire_dtype or problem.accumulator_dtype]
    out = ITEM_BYTES[problem.out_wire_dtype or problem.accumulator_dtype]
    queries, pair = rows * problem.q_heads, rows * problem.kv_heads * (problem.head_dim + problem.value_dim)
    return {
        "P": problem.world_size,
        "N": nodes,
        "L": problem.world_size // nodes,
        "M": pair * item,
        "G": pair * wire,
        "Q": queries * problem.head_dim * item,
        "O": queries * (problem.value_dim * out + sums),
        "D": queries * (problem.value_dim * item + 2 * sums),
        "R": queries * problem.head_dim * sums,
    }


def formulas() -> str:
    """Return a table of the bytes and messages that a rank sends with a full mask and equal shards."""
    lines = [
        "| schedule | forward: bytes | messages | backward: bytes | messages |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| `{name}` | {' | '.join(f'`{formula}`' for formula in row)} |" for name, row in FORMULAS.items()]
    return "\n".join(lines)


def sent() -> str:
    """Return a table of the shards and messages that a rank sends, and of the steps with work, for each pass."""
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
    """Return the number of heads for a grid: one for which Ulysses x ring has two groups; `heads` for other routes."""
    return ranks // 2 if route.by_head and route.parameter else heads


def grids() -> str:
    """Return the grids (steps by ranks) of each schedule's forward pass on 4 and on 8 ranks."""
    parts = []
    for name, route in ROUTES.items():
        parts.append(f"`{name}`")
        for ranks in (4, 8):
            problem = simple(
                "contiguous", 4 * ranks, ranks, heads=heads_for(route, ranks, ranks), causal=name == "balanced"
            ).problem
            parts.append(f"```text\n{drawn(schedule_of(problem, route, False), short=ranks == 8)}\n```")
    return "\n\n".join(parts)


def backwards() -> str:
    """Return the grids of a ring's backward pass with the prologues "split" and "kept"."""
    problem = simple("contiguous", 16, 4).problem
    texts = (grid(schedule_of(problem, replace(RING, prologue=prologue), True)) for prologue in ("split", "kept"))
    return "\n\n".join(f"```text\n{text}\n```" for text in texts)


def drawn(schedule: Schedule, short: bool) -> str:
    """Return the grid of a schedule as text.

    If `short`, and all ranks do the same relative to their own rank, return only the column of rank 0.
    """
    if not short or any(turned(schedule, by) != turned(schedule, 0) for by in range(1, schedule.problem.world_size)):
        return grid(schedule)
    head, rule, *rows = (line.rstrip() for line in column(schedule, 0))
    return "\n".join([f"{head} of {schedule.problem.world_size}; all others alike", rule, *rows])


def column(schedule: Schedule, rank: int) -> list[str]:
    """Return the lines of a rank's column of the grid, with the step numbers."""
    rows = [(str(number), cell(step, rank)) for number, step in enumerate(schedule.steps) if step.copies or step.work]
    return [f"step  rank {rank}", f"----  {'-' * max(len(text) for _, text in rows)}",
            *(f"{number:<4}  {text}" for number, text in rows)]  # fmt: skip


def turned(schedule: Schedule, by: int) -> list[tuple[set[tuple], set[tuple]]]:
    """Return the messages and the work of rank `by` in each step, with ranks renumbered so that `by` is 0."""
    ranks = schedule.problem.world_size

    def relative(block: Block) -> tuple:
        return block.kind, (block.owner - by) % ranks, block.origin is not None and (block.origin - by) % ranks

    return [
        (
            {(relative(copy.block), (copy.dst - by) % ranks) for copy in step.copies if copy.src == by},
            {(relative(item.part),) if isinstance(item, Merge) else (relative(item.q), relative(item.kv))
             for item in step.work if item.rank == by},
        )
        for step in schedule.steps
    ]  # fmt: skip


def renewed(page: str) -> str:
    """Return the page with new text in its generated parts."""
    for mark, text in (
        ("formulas", formulas()),
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

"""What it costs one rank to plan: 64 ranks, a million tokens, 64 documents, causal, from cold caches.

`python -m ringattn.bench.planning`. A time is from the layout's name to the finished plan of one rank, pruned payloads
and placement included. It is processor time: planning waits for nothing, and the machine may have other work.
The gate plans the same case at a small size and compares each plan with the projection of the whole schedule. That the
schedules and placements are valid is checked by the tests (tests/schedule, tests/planner).
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ringattn.bench.gate import GateError
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Say, Table, finish, progress, spread
from ringattn.core import tiling
from ringattn.core.layout import LAYOUTS, make_layout
from ringattn.core.mask import make_mask
from ringattn.core.problem import Problem
from ringattn.planner.choose import plan_of
from ringattn.planner.place import project
from ringattn.planner.plan import Plan
from ringattn.schedule.passes import merged_keys, merged_queries
from ringattn.schedule.read_sets import read_sets_of
from ringattn.schedule.routes import forward_of_rank, route_named, schedule_of

BARS_MS = {"contiguous": 5.0, "zigzag": 5.0, "striped": 25.0}
"""For as many ranks as are planned unless others are asked for."""
GATE_RANKS, GATE_TOKENS, GATE_DOCUMENTS = 6, 300, 7


@dataclass(frozen=True)
class PlanningOptions:
    """`rank` is the one whose plan is made; `seed` draws the documents' borders."""

    length_tokens: int = 1 << 20
    documents: int = 64
    ranks: int = 64
    rank: int = 31
    repeats: int = 20
    layouts: tuple[str, ...] = LAYOUTS
    schedules: tuple[str, ...] = ("ring", "direct")
    seed: int = 0
    results: str = RESULTS


def borders(length: int, documents: int, seed: int) -> tuple[int, ...]:
    """Cumulative lengths of documents, cut at random places."""
    cuts = random.Random(seed).sample(range(1, length), documents - 1)
    return 0, *sorted(cuts), length


def problem_of(layout: str, cuts: tuple[int, ...], ranks: int) -> Problem:
    """A causal bfloat16 problem on the documents between `cuts`."""
    lay = make_layout(layout, cuts[-1], ranks, cuts)
    mask = make_mask(cuts[-1], cuts[-1], causal=True, documents=cuts, kv_documents=cuts)
    return Problem(lay, lay, mask, 1, 32, 8, 128, 128, "bfloat16")


def plan_cold(
    layout: str, cuts: tuple[int, ...], ranks: int, schedule: str, rank: int, backward: bool
) -> tuple[Plan, float]:
    """A plan made as if for the first time in this process, and the milliseconds of processor time it took.

    A backward is planned after its forward, as it always is, and only the backward is timed.
    """
    for cached in (plan_of, forward_of_rank, schedule_of, read_sets_of, tiling.cut, merged_queries, merged_keys):
        cached.cache_clear()
    route = route_named(schedule)
    if backward:
        plan_of(problem_of(layout, cuts, ranks), route, rank, False)
    start = time.process_time()
    plan = plan_of(problem_of(layout, cuts, ranks), route, rank, backward)
    return plan, 1e3 * (time.process_time() - start)


def open_gate(options: PlanningOptions) -> None:
    """Raise `GateError` unless each rank's small plan is its part of the whole schedule."""
    cuts = borders(GATE_TOKENS, GATE_DOCUMENTS, options.seed)
    for layout in options.layouts:
        for schedule in options.schedules:
            for backward in (False, True):
                problem, route = problem_of(layout, cuts, GATE_RANKS), route_named(schedule)
                whole = schedule_of(problem, route, backward)
                for rank in range(GATE_RANKS):
                    plan, _ = plan_cold(layout, cuts, GATE_RANKS, schedule, rank, backward)
                    if plan != project(whole, rank):
                        raise GateError(f"{layout} {schedule}: rank {rank}'s plan is not its part of the schedule")


def measure(options: PlanningOptions, say: Say) -> dict[str, list[float]]:
    """Milliseconds of processor time by "layout schedule pass" and round; cases take turns, so noise meets all."""
    cuts = borders(options.length_tokens, options.documents, options.seed)
    cases = [(lay, sch, back) for lay in options.layouts for sch in options.schedules for back in (False, True)]
    found: dict[str, list[float]] = {_name(*case): [] for case in cases}
    for turn in range(options.repeats):
        say(f"round {turn + 1} of {options.repeats}")
        for layout, schedule, backward in cases:
            _, spent = plan_cold(layout, cuts, options.ranks, schedule, options.rank, backward)
            found[_name(layout, schedule, backward)].append(spent)
    return found


def _name(layout: str, schedule: str, backward: bool) -> str:
    return f"{layout} {schedule} {'backward' if backward else 'forward'}"


def table_of(options: PlanningOptions, found: dict[str, list[float]]) -> Table:
    """A line for each case, with its bar where it has one."""
    table = Table(
        f"Planning one rank of {options.ranks}: {options.length_tokens} tokens, {options.documents} documents, causal, "
        f"cold, {options.repeats} rounds",
        ("layout", "schedule", "pass", "ms (min / median / max)", "bar, ms", ""),
    )
    for name, times in found.items():
        bar = BARS_MS.get(name.split()[0]) if options.ranks == PlanningOptions.ranks else None
        verdict = "" if bar is None else "met" if median(times) <= bar else "MISSED"
        table.rows.append((*name.split(), spread(times, 1), f"{bar:.0f}" if bar else "", verdict))
    return table


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run, print, keep; returns what is kept."""
    options = parse(PlanningOptions(), words)
    with progress("planning") as say:
        say("gate: small plans against their schedules")
        open_gate(options)
        say("gate: green")
        data = {"ms": measure(options, say)}
    finish("planning", options, [table_of(options, data["ms"])], data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])

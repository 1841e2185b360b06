"""Packed documents: balance of pairs, rows sent and predicted times of each layout.

`python -m ringattn.bench.placement`. Lengths are drawn from a published distribution; nothing runs. A row counts once
for each rank that reads it. The gate compares `ringattn.core.documents` with the tiles and read sets of the planner.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

from ringattn.bench.gate import GateError
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Say, Table, finish, progress
from ringattn.core.documents import load_of, placed, placed_at_once
from ringattn.core.layout import LAYOUTS, make_layout
from ringattn.core.mask import make_mask
from ringattn.core.problem import Problem
from ringattn.core.tiling import tiles_of
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import CLUSTERS
from ringattn.planner.plan import record_bytes
from ringattn.planner.simulate import simulate
from ringattn.schedule.content import read_sets_of

LENGTHS = (
    ((1, 10), 30254), ((11, 50), 391188), ((51, 100), 699596), ((101, 200), 1377757), ((201, 500), 3794735),
    ((501, 1024), 3316785), ((1025, 2048), 2106566), ((2049, 4096), 988525), ((4097, 8192), 410002),
    ((8193, 16384), 173574), ((16385, 32768), 115007), ((32769, 65536), 18428), ((65537, 131072), 22513),
    ((131073, 196608), 18284),
)  # fmt: skip
"""Documents of a training corpus by their tokens (from, to), as SandAI-org/MagiAttention counts them for its benchmark:
exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv, commit 2c64135."""


AT_ONCE = "documents, at once"
"""The layout "documents" where it is placed for schedules that bring all rows at once, the others for steps."""


@dataclass(frozen=True)
class PlacementOptions:
    """`longest_tokens`: longer documents are cut into such pieces before they are packed, as the distribution's source
    cuts them at a quarter of the sequence; 0: they stay whole."""

    tokens: int = 131072
    ranks: tuple[int, ...] = (2, 4, 8, 16)
    seeds: int = 5
    longest_tokens: tuple[int, ...] = (0, 32768)
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    cluster: str = "h100"
    schedule: str = "auto"
    results: str = RESULTS


class Placed(NamedTuple):
    """Of a layout: the greatest share of pairs over the mean; rows that other ranks read, and those that the
    schedule sends, each at every hop; predicted times."""

    balance: float
    read: int
    sent: int
    forward_ms: float
    backward_ms: float


def drawn(tokens: int, seed: int, longest: int = 0) -> tuple[int, ...]:
    """Documents of drawn lengths, packed until there are so many tokens; the last one is cut there."""
    r, cuts = random.Random(seed), [0]
    spans, weights = zip(*LENGTHS, strict=True)
    while cuts[-1] < tokens:
        left = r.randint(*r.choices(spans, weights)[0])
        while left and cuts[-1] < tokens:
            count = min(left, longest or left, tokens - cuts[-1])
            cuts.append(cuts[-1] + count)
            left -= count
    return tuple(cuts)


def problem_of(cuts: tuple[int, ...], layout: str, ranks: int, options: PlacementOptions) -> Problem:
    """A causal bfloat16 call on these documents."""
    laid = make_layout(layout.split(",")[0], cuts[-1], ranks, cuts, at_once=layout == AT_ONCE)
    mask = make_mask(cuts[-1], cuts[-1], causal=True, documents=cuts, kv_documents=cuts)
    dim = options.head_dim
    return Problem(laid, laid, mask, 1, options.heads, options.kv_heads, dim, dim, "bfloat16")


def pairs_of(problem: Problem) -> list[int]:
    """Pairs of each rank, of one head."""
    tables = (tiles_of(problem, rank).values() for rank in range(problem.world_size))
    return [sum(table.area() for table in one) // problem.q_heads for one in tables]


def rows_of(problem: Problem) -> int:
    """Rows of K and V that ranks read of others, once each."""
    return read_sets_of(problem).totals[1] // problem.kv_heads


def placed_by(cuts: tuple[int, ...], layout: str, ranks: int, options: PlacementOptions) -> Placed:
    """What a layout makes of these documents."""
    problem, cluster = problem_of(cuts, layout, ranks, options), CLUSTERS[options.cluster]
    route = choose_route(problem, options.schedule, cluster)
    forward, backward = (tuple(plan_of(problem, route, rank, turn) for rank in range(ranks)) for turn in (False, True))
    row_bytes = problem.kv_heads * record_bytes(problem, problem.kv_dtype)
    pairs = pairs_of(problem)
    return Placed(
        max(pairs) * ranks / sum(pairs),
        rows_of(problem),
        sum(plan.bytes_sent for plan in forward) // row_bytes,
        *(simulate(plans, cluster).total_us / 1e3 for plans in (forward, backward)),
    )


def open_gate(cuts: tuple[int, ...], ranks: int, options: PlacementOptions) -> None:
    """Raise `GateError` unless pairs and rows are those of the planner."""
    for layout, shards in (("documents", placed(cuts, ranks)), (AT_ONCE, placed_at_once(cuts, ranks))):
        load, problem = load_of(cuts, shards), problem_of(cuts, layout, ranks, options)
        if list(load.pairs) != pairs_of(problem) or sum(load.sent) != rows_of(problem):
            raise GateError(f"{ranks} ranks, {layout}: pairs or rows differ from the planner's")


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run, print, keep; returns what is kept."""
    options = parse(PlacementOptions(), words)
    data: dict[str, Any] = {}
    with progress("placement") as say:
        tables = [_measure(longest, options, data, say) for longest in options.longest_tokens]
    finish("placement", options, tables, data, options.results)
    return data


def _measure(longest: int, options: PlacementOptions, data: dict[str, Any], say: Say) -> Table:
    told = f"longer ones cut at {longest}" if longest else "each as long as drawn"
    table = Table(
        f"Packed documents, {options.tokens} tokens, {told}; {options.seeds} sequences drawn. Pairs: the greatest "
        "share over the mean, of the worst sequence; others: means. Predicted for "
        f"{options.cluster}, {options.heads}:{options.kv_heads} heads of {options.head_dim}, causal",
        ("ranks", "layout", "pairs", "rows read", "rows sent", "forward ms", "backward ms"),
    )
    for ranks in options.ranks:
        found: dict[str, list[Placed]] = {name: [] for name in (*LAYOUTS, AT_ONCE)}
        for seed in range(options.seeds):
            say(f"{ranks} ranks, {told}: sequence {seed + 1} of {options.seeds}")
            cuts = drawn(options.tokens, seed, longest)
            open_gate(cuts, ranks, options)
            for name, all_placed in found.items():
                all_placed.append(placed_by(cuts, name, ranks, options))
        for name, lines in found.items():
            balance, read = max(line.balance for line in lines), mean(line.read for line in lines)
            ms = (mean(line.forward_ms for line in lines), mean(line.backward_ms for line in lines))
            sent = mean(line.sent for line in lines)
            figures = (f"{balance:.3f}", f"{read:.0f}", f"{sent:.0f}", *(f"{one:.2f}" for one in ms))
            table.rows.append((str(ranks), name, *figures))
        data[f"{longest} {ranks}"] = {name: [line._asdict() for line in lines] for name, lines in found.items()}
    return table


if __name__ == "__main__":
    main(sys.argv[1:])

"""Packed documents and trees: balance of pairs, rows sent, predicted times of each layout, and a bound on rows.

Run `python -m ringattn.bench.placement`; with `trees=1000` it draws trees too. Lengths of documents are drawn from a
published distribution, and the calls are only planned. A row counts once for each rank that reads it. The gate compares
`ringattn.core.areas` with the tiles and read sets of the planner.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple

from ringattn import masks
from ringattn.bench.gate import GateError
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Say, Table, finish, progress
from ringattn.core.areas import areas_of, fewest_rows
from ringattn.core.layout import LAYOUTS, causal_documents, make_layout
from ringattn.core.mask import make_mask
from ringattn.core.placement import EVEN, FILLS, placed, placed_at_once
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
"""The layout "documents" placed for schedules that deliver all rows at once; the others are placed for steps."""


@dataclass(frozen=True)
class PlacementOptions:
    """The options of the benchmark.

    Documents longer than `longest_tokens` are cut into parts of this length before packing; 0 leaves them whole. The
    source of the distribution cuts them at a quarter of the sequence. `trees`: the number of trees drawn for each
    number of ranks up to 8, of `tree_tokens` tokens. `even`: the largest ratio of a rank's pairs to the mean.
    `fills`: the limit of the search for a placement of a tree.
    """

    tokens: int = 131072
    ranks: tuple[int, ...] = (2, 4, 8, 16)
    seeds: int = 5
    trees: int = 0
    tree_tokens: int = 65536
    even: float = EVEN
    fills: int = FILLS
    longest_tokens: tuple[int, ...] = (0, 32768)
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    cluster: str = "h100"
    schedule: str = "auto"
    results: str = RESULTS


class LayoutFigures(NamedTuple):
    """The figures of a layout.

    `balance` is the largest number of pairs of a rank divided by the mean. `read` is the number of rows that other
    ranks read, and `sent` the number that the schedule sends, counted at every hop. Times are predicted.
    """

    balance: float
    read: int
    sent: int
    forward_ms: float
    backward_ms: float


def draw_documents(tokens: int, seed: int, longest: int = 0) -> tuple[int, ...]:
    """Draw documents and pack them until there are `tokens` tokens; return their boundaries.

    A document is cut into parts of `longest` tokens unless `longest` is 0, and the last is cut at the end.
    """
    r, cuts = random.Random(seed), [0]
    spans, weights = zip(*LENGTHS, strict=True)
    while cuts[-1] < tokens:
        remaining = r.randint(*r.choices(spans, weights)[0])
        while remaining and cuts[-1] < tokens:
            count = min(remaining, longest or remaining, tokens - cuts[-1])
            cuts.append(cuts[-1] + count)
            remaining -= count
    return tuple(cuts)


def problem_of(cuts: tuple[int, ...], layout: str, ranks: int, options: PlacementOptions) -> Problem:
    """Return a causal bfloat16 call on these documents."""
    token_layout = make_layout(layout.split(",")[0], cuts[-1], ranks, cuts, at_once=layout == AT_ONCE)
    mask = make_mask(cuts[-1], cuts[-1], causal=True, documents=cuts, kv_documents=cuts)
    dim = options.head_dim
    return Problem(token_layout, token_layout, mask, 1, options.heads, options.kv_heads, dim, dim, "bfloat16")


def pairs_of(problem: Problem) -> list[int]:
    """Return the number of (query, key) pairs of each rank, for one head."""
    tables = (tiles_of(problem, rank).values() for rank in range(problem.world_size))
    return [sum(table.area() for table in tables_) // problem.q_heads for tables_ in tables]


def rows_of(problem: Problem) -> int:
    """Return the number of rows of K and V that ranks read from other ranks, each counted once per reader."""
    return read_sets_of(problem).totals[1] // problem.kv_heads


def measure_layout(cuts: tuple[int, ...], layout: str, ranks: int, options: PlacementOptions) -> LayoutFigures:
    """Return the figures of a layout for these documents."""
    problem, cluster = problem_of(cuts, layout, ranks, options), CLUSTERS[options.cluster]
    route = choose_route(problem, options.schedule, cluster)
    forward, backward = (tuple(plan_of(problem, route, rank, turn) for rank in range(ranks)) for turn in (False, True))
    row_bytes = problem.kv_heads * record_bytes(problem, problem.kv_dtype)
    pairs = pairs_of(problem)
    return LayoutFigures(
        max(pairs) * ranks / sum(pairs),
        rows_of(problem),
        sum(plan.bytes_sent for plan in forward) // row_bytes,
        *(simulate(plans, cluster).total_us / 1e3 for plans in (forward, backward)),
    )


def open_gate(cuts: tuple[int, ...], ranks: int, options: PlacementOptions) -> None:
    """Raise `GateError` unless pairs and rows of `ringattn.core.areas` equal those of the planner."""
    mask = causal_documents(cuts)
    for layout, place in (("documents", placed), (AT_ONCE, placed_at_once)):
        load = areas_of(mask, cuts[-1]).load(place(mask, cuts[-1], ranks))
        problem = problem_of(cuts, layout, ranks, options)
        if list(load.pairs) != pairs_of(problem) or sum(load.sent) != rows_of(problem):
            raise GateError(f"{ranks} ranks, {layout}: pairs or rows differ from the planner's")


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run, print, save and return the record."""
    options = parse(PlacementOptions(), arguments)
    data: dict[str, Any] = {}
    with progress("placement") as say:
        tables = [_measure(longest, options, data, say) for longest in options.longest_tokens]
        if options.trees:
            tables.append(_trees_table(options, data, say))
    finish("placement", options, tables, data, options.results)
    return data


def _measure(longest: int, options: PlacementOptions, data: dict[str, Any], say: Say) -> Table:
    cut_note = f"longer ones cut at {longest}" if longest else "none cut"
    table = Table(
        f"Packed documents, {options.tokens} tokens, {cut_note}; {options.seeds} sequences drawn. Pairs: the largest "
        "share over the mean, of the worst sequence; others: means. Predicted for "
        f"{options.cluster}, {options.heads}:{options.kv_heads} heads of {options.head_dim}, causal",
        ("ranks", "layout", "pairs", "rows read", "rows sent", "forward ms", "backward ms"),
    )
    for ranks in options.ranks:
        by_layout: dict[str, list[LayoutFigures]] = {name: [] for name in (*LAYOUTS, AT_ONCE)}
        for seed in range(options.seeds):
            say(f"{ranks} ranks, {cut_note}: sequence {seed + 1} of {options.seeds}")
            cuts = draw_documents(options.tokens, seed, longest)
            open_gate(cuts, ranks, options)
            for name, all_placed in by_layout.items():
                all_placed.append(measure_layout(cuts, name, ranks, options))
        for name, lines in by_layout.items():
            balance, read = max(line.balance for line in lines), mean(line.read for line in lines)
            ms = (mean(line.forward_ms for line in lines), mean(line.backward_ms for line in lines))
            sent = mean(line.sent for line in lines)
            figures = (f"{balance:.3f}", f"{read:.0f}", f"{sent:.0f}", *(f"{time_ms:.2f}" for time_ms in ms))
            table.rows.append((str(ranks), name, *figures))
        data[f"{longest} {ranks}"] = {name: [line._asdict() for line in lines] for name, lines in by_layout.items()}
    return table


TREES = ("deep", "wide", "star", "chain", "any")
"""Shapes of drawn trees. In "any", a parent is drawn from the path of the node before."""


def draw_tree(draw: random.Random, nodes: int, tokens: int, shape: str) -> masks.Tree:
    """Draw a tree of one root whose nodes have exponentially distributed lengths."""
    parents, path = [-1], [0]
    for node in range(1, nodes):
        if shape == "star":
            parent = 0
        elif shape == "chain" or (shape == "deep" and draw.random() < 0.7):
            parent = node - 1
        elif shape == "wide":
            parent = path[min(len(path) - 1, draw.randrange(2))]
        else:
            parent = draw.choice(path)
        del path[path.index(parent) + 1 :]
        parents.append(parent)
        path.append(node)
    weights = [draw.expovariate(1) + 0.05 for _ in range(nodes)]
    lengths = [int(weight / sum(weights) * tokens) for weight in weights]
    lengths[0] += tokens - sum(lengths)
    return masks.tree(parents, lengths)


class TreeFigures(NamedTuple):
    """The figures of a placed tree. `fewest`: the lower bound on rows sent."""

    balance: float
    sent: int
    fewest: int
    planning_ms: float


def measure_tree(shape: str, seed: int, ranks: int, options: PlacementOptions) -> TreeFigures:
    """Place a drawn tree, and return its figures."""
    draw, tokens = random.Random(seed), options.tree_tokens
    mask = make_mask(tokens, tokens, mask=draw_tree(draw, draw.choice((4, 8, 16, 32, 64)), tokens, shape))
    areas_of.cache_clear()
    placed_at_once.cache_clear()
    started = time.perf_counter()
    shards = placed_at_once(mask, tokens, ranks, even=options.even, fills=options.fills)
    planning_ms = (time.perf_counter() - started) * 1e3
    load = areas_of(mask, tokens).load(shards)
    fewest = fewest_rows(mask, tokens, ranks, options.even)
    return TreeFigures(max(load.pairs) * ranks / sum(load.pairs), sum(load.sent), fewest, planning_ms)


def _trees_table(options: PlacementOptions, data: dict[str, Any], say: Say) -> Table:
    table = Table(
        f"Trees of {options.tree_tokens} tokens and 4 to 64 nodes, placed for all rows at once, pairs even to "
        f"{options.even}. Pairs: the largest share over the mean, of the worst tree. Over the bound: rows sent of all "
        "trees over the lower bound of all, and of the median tree",
        ("ranks", "trees", "shape", "pairs", "rows sent", "over the bound", "median", "within 1.15", "planning ms"),
    )
    for ranks in [ranks for ranks in options.ranks if ranks <= 8]:
        for number, shape in enumerate(TREES):
            seeds = range(number, options.trees, len(TREES))
            say(f"{ranks} ranks: {len(seeds)} trees, {shape}")
            lines = [measure_tree(shape, seed, ranks, options) for seed in seeds]
            sent, fewest = sum(line.sent for line in lines), sum(line.fewest for line in lines)
            ratios = [line.sent / max(1, line.fewest) for line in lines]
            table.rows.append((
                str(ranks), str(len(lines)), shape, f"{max(line.balance for line in lines):.3f}",
                f"{sent / len(lines):.0f}", f"{sent / max(1, fewest):.3f}", f"{median(ratios):.3f}",
                f"{sum(ratio <= 1.15 for ratio in ratios) / len(lines):.2f}",
                f"{mean(line.planning_ms for line in lines):.0f}",
            ))  # fmt: skip
            data[f"{shape} {ranks}"] = [line._asdict() for line in lines]
    return table


if __name__ == "__main__":
    main(sys.argv[1:])

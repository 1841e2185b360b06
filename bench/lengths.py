"""Packed documents of published length distributions: our step over the work bound, and next to static parallelism.

Run `python -m ringattn.bench.lengths`. All times are simulated with the constants of a preset; nothing runs. A batch is
one packed sequence over all ranks, forward and backward. The bound is the time of its pairs, divided evenly, without
messages, launches and memory traffic. The published ratios are those of the papers, on their own data and baselines.

Static context parallelism cuts the same batch into sequences of equal length, one for each group of ranks, and each
sequence over the ranks of its group, in one of several layouts. The step ends with the slowest group. Its messages are
pruned to the rows that a rank reads, as ours are; the ring of TransformerEngine sends all rows (`bench.published`).
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from statistics import mean
from typing import Any, NamedTuple

from ringattn.bench import published_points as points
from ringattn.bench.options import parse
from ringattn.bench.placement import LENGTHS
from ringattn.bench.published import Call, ring_s
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.core.areas import areas_of
from ringattn.core.layout import causal_documents, make_layout
from ringattn.core.mask import make_mask
from ringattn.core.placement import placed_at_once
from ringattn.core.problem import Problem
from ringattn.errors import InputError
from ringattn.integers import whole_number
from ringattn.launch.capacity.hardware import hardware
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import CLUSTERS, Cluster, attention_s
from ringattn.planner.layouts import suits_at_once
from ringattn.planner.simulate import simulate

PASSES = 3
"""A backward pass of matrix products takes as long as two forward passes."""
MET = 1.05
"""The aim: the largest ratio of a step and its bound."""
Histogram = Sequence[tuple[tuple[int, int], int]]

WLB: Histogram = (
    ((1, 10), 148), ((11, 50), 637), ((51, 100), 775), ((101, 200), 1538), ((201, 500), 4618), ((501, 1024), 8169),
    ((1025, 2048), 15712), ((2049, 4096), 31793), ((4097, 8192), 33768), ((8193, 16384), 1031), ((16385, 32768), 449),
    ((32769, 65536), 353), ((65537, 131072), 528),
)  # fmt: skip
PROLONG: Histogram = (
    ((501, 1024), 11669), ((1025, 2048), 29937), ((2049, 4096), 21002), ((4097, 8192), 11227), ((8193, 16384), 3329),
    ((16385, 32768), 607), ((32769, 65536), 114), ((65537, 131072), 47),
)  # fmt: skip


@dataclass(frozen=True)
class Distribution:
    """A published distribution of lengths, and a model and static groups to train with it.

    `draw` returns the length of a document. `group`: ranks of a static group. `tokens`: tokens of a rank; a document is
    at most as long as the sequence of a group. `parameters`: those of a layer's matrix products.
    """

    name: str
    source: str
    draw: Callable[[random.Random], int]
    group: int
    tokens: int
    heads: int
    kv_heads: int
    parameters: int


def from_histogram(counts: Histogram) -> Callable[[random.Random], int]:
    """Return a function that draws a length: a bin by its count, and a length of the bin, all equally likely."""
    spans, weights = zip(*counts, strict=True)
    return lambda r: r.randint(*r.choices(spans, weights)[0])


def megatron_mock(r: random.Random) -> int:
    """Draw a length as Megatron's mock data set does: lognormal with mean 1,024 and sigma 1.5, clipped."""
    sigma = 1.5
    return int(min(max(r.lognormvariate(math.log(1024) - sigma**2 / 2, sigma), 128), 8192))


LLAMA_8B = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
"""Parameters of the matrix products of a layer of Llama-3 8B."""
MEGATRON_MOCK = (12 * 12 * 2048**2 + 2048 * 131072) // 12
"""A twelfth of the products of the model of Megatron's benchmark: 12 layers of width 2,048, and the vocabulary."""

DISTRIBUTIONS = (
    Distribution("WLB-LLM", "distca/simulator/data/dist_wlbllm.json, hao-ai-lab/distca commit 039f2e4",
                 from_histogram(WLB), 8, 16384, 32, 8, LLAMA_8B),
    Distribution("ProLong", "distca/simulator/data/dist_prolong.json, the same commit",
                 from_histogram(PROLONG), 8, 16384, 32, 8, LLAMA_8B),
    Distribution("MagiAttention", "see bench/placement.py",
                 from_histogram(LENGTHS), 8, 16384, 32, 8, LLAMA_8B),
    Distribution("Megatron, mock", "examples/dynamic_context_parallel, NVIDIA/Megatron-LM commit 10ce7bc",
                 megatron_mock, 4, 2048, 16, 16, MEGATRON_MOCK),
)  # fmt: skip

DCP = "LongAlign-10k, Long-Data-Collections (chenyu-jiang/dcp, commit 942a2c7), whose lengths are not published"
PUBLISHED = (
    ("FCP (arXiv:2605.08524)", "attention MFU, to 256 GPUs", "1.13 to 2.21", "not read: abstract only"),
    ("DCP (arXiv:2510.10620)", "attention, causal, micro-benchmarks", "1.19 to 2.45", DCP),
    ("DCP", "training, causal", "0.94 to 1.16", DCP),
    ("FlashCP (arXiv:2606.08476)", "over other frameworks", "at most 1.63", "not read: abstract only"),
    ("ByteScale (arXiv:2502.21231)", "training", "at most 7.89", "not read: abstract only"),
    ("DistCA (arXiv:2510.18121)", "training, to 512 H200", "at most 1.35",
     "WLB-LLM and ProLong, of its code; baseline not read"),
    ("Megatron, dynamic CP (README)", "iteration, 4, 8, 16, 32, 64 GPUs", "1.29, 1.41, 1.21, 1.38, 1.50",
     "Megatron, mock; packed sequences over static groups of 4"),
    ("Megatron, dynamic CP (blog of January 2026)", "training", "at most 1.48", "not published as numbers"),
)  # fmt: skip
"""Published speed-ups: source, what was timed, the ratio to the baseline, and the distribution and the baseline."""


@dataclass(frozen=True)
class LengthsOptions:
    """The options of the benchmark.

    `seeds`: the number of batches for each distribution and number of ranks. `tokens_scale`: the tokens of a rank, as a
    multiple of those of the distribution; documents may be longer by the same factor.
    """

    ranks: tuple[int, ...] = (8, 16, 32, 64)
    seeds: int = 3
    tokens_scale: int = 1
    cluster: str = "h100"
    results: str = RESULTS


def draw_batch(lengths: Distribution, ranks: int, seed: int) -> tuple[int, ...]:
    """Draw documents until the batch is full; return their boundaries.

    A document ends with the sequence of its group, so that every method has the same documents.
    """
    r, cuts, sequence = random.Random(seed), [0], lengths.group * lengths.tokens
    while cuts[-1] < ranks * lengths.tokens:
        cuts.append(cuts[-1] + min(lengths.draw(r), sequence - cuts[-1] % sequence))
    return tuple(cuts)


def problem_of(
    lengths: Distribution, cuts: tuple[int, ...], layout: str, ranks: int, at_once: bool, ranks_per_node: int = 0
) -> Problem:
    """Return a causal bfloat16 call on these documents."""
    laid = make_layout(layout, cuts[-1], ranks, cuts, at_once=at_once, ranks_per_node=ranks_per_node)
    mask = make_mask(cuts[-1], cuts[-1], causal=True, documents=cuts, kv_documents=cuts)
    return Problem(laid, laid, mask, 1, lengths.heads, lengths.kv_heads, 128, 128, "bfloat16")


def pairs_of(cuts: tuple[int, ...]) -> int:
    """Return the number of causal pairs of documents."""
    return sum((stop - start) * (stop - start + 1) // 2 for start, stop in pairwise(cuts))


class Step(NamedTuple):
    """A simulated step of attention, forward and backward.

    `exposed_ms`: of the rank that waits longest for messages. `received`: bytes that ranks receive in forward, and
    `across` those from other nodes. `kept`: the most bytes that a rank keeps for backward.
    """

    total_ms: float
    exposed_ms: float
    received: int
    across: int
    kept: int


def step_of(problem: Problem, schedule: str, cluster: Cluster) -> Step:
    """Simulate both passes of a call."""
    route, total_us, exposed_us = choose_route(problem, schedule, cluster), 0.0, 0.0
    received = across = kept = 0
    for backward in (False, True):
        plans = tuple(plan_of(problem, route, rank, backward) for rank in range(problem.world_size))
        played = simulate(plans, cluster)
        total_us, exposed_us = total_us + played.total_us, exposed_us + max(played.exposed_us)
        kept = max(plan.kept_bytes for plan in plans)
        for plan in () if backward else plans:
            for message in (message for step in plan.steps for message in step.recvs):
                nbytes = message.elements * plan.element_bytes(message.buffer)
                received += nbytes
                across += nbytes * (cluster.node_of(message.peer) != cluster.node_of(plan.rank))
    return Step(total_us / 1e3, exposed_us / 1e3, received, across, kept)


def groups_of(cuts: tuple[int, ...], tokens: int) -> list[tuple[int, ...]]:
    """Return the documents of each static sequence of `tokens` tokens."""
    return [
        tuple(cut - start for cut in cuts if start <= cut <= start + tokens) for start in range(0, cuts[-1], tokens)
    ]


def te_ring_ms(lengths: Distribution, cuts: tuple[int, ...], cluster: Cluster) -> float:
    """Return the milliseconds of TransformerEngine's ring on one group, as `bench.published` predicts it."""
    share = 2 * pairs_of(cuts) / cuts[-1] ** 2
    call = Call(lengths.group, cuts[-1], lengths.heads, lengths.kv_heads, causal=True, share=share)
    return 1e3 * sum(ring_s(call, cluster, points.FA3, points.TE_RING, back) for back in (False, True))


STATIC = (
    ("per_document", "ring"), ("per_document", "all_gather"), ("zigzag", "all_gather"), ("documents", "all_gather"),
)  # fmt: skip
"""Layout and schedule of static groups."""
TE = "TransformerEngine's ring"


class Figures(NamedTuple):
    """The figures of a batch, in milliseconds.

    `one_gpu_ms`: the whole batch on one GPU, divided by the ranks. `keeping`: the step of a ring with `keep_received`.
    `busiest`: pairs of the busiest rank over the mean.
    `rows`: rows of K and V that ranks receive, per token.
    """

    bound_ms: float
    one_gpu_ms: float
    linear_ms: float
    ours: Step
    keeping: Step
    busiest: float
    rows: float
    auto_at_once: bool
    static_ms: dict[str, float]


def measure(lengths: Distribution, ranks: int, seed: int, cluster: Cluster) -> Figures:
    """Return the figures of a drawn batch."""
    cuts = draw_batch(lengths, ranks, seed)
    per_node = cluster.ranks_of_equal_nodes(ranks)
    problem = problem_of(lengths, cuts, "documents", ranks, True, per_node)
    pairs, mask = pairs_of(cuts) * lengths.heads, causal_documents(cuts)
    load = areas_of(mask, cuts[-1]).load(placed_at_once(mask, cuts[-1], ranks, per_node))
    alone = step_of(problem_of(lengths, cuts, "contiguous", 1, False), "ring", cluster)
    groups = groups_of(cuts, lengths.group * lengths.tokens)
    static_ms = {
        f"{layout}, {schedule}": max(
            step_of(problem_of(lengths, group, layout, lengths.group, True), schedule, cluster).total_ms
            for group in groups
        )
        for layout, schedule in STATIC
    }
    static_ms[TE] = max(te_ring_ms(lengths, group, cluster) for group in groups)
    schedule = "node_gather" if per_node else "all_gather"
    linear_s = PASSES * 2 * lengths.parameters * lengths.tokens / hardware("h100").reached.products
    return Figures(
        1e3 * sum(attention_s(problem, pairs / ranks, cluster, back) for back in (False, True)),
        alone.total_ms / ranks,
        1e3 * linear_s,
        step_of(problem, schedule, cluster),
        step_of(replace(problem, keep_received=True), schedule, cluster),
        max(load.pairs) * ranks / sum(load.pairs),
        sum(load.received) / cuts[-1],
        suits_at_once(mask, cuts[-1], ranks, "auto", cluster),
        static_ms,
    )


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run, print, save and return the record."""
    options = parse(LengthsOptions(), arguments)
    whole_number(options.tokens_scale, "tokens_scale must be a whole number", 1)
    for lengths, ranks in product(DISTRIBUTIONS, options.ranks):
        if ranks % lengths.group:
            raise InputError(
                f"ranks={ranks}: must be a multiple of {lengths.group}, the static group of {lengths.name}"
            )
    cluster, data = CLUSTERS[options.cluster], dict[str, Any]()
    drawn: dict[tuple[str, int], list[Figures]] = {}
    with progress("lengths") as say:
        for lengths, ranks in product(DISTRIBUTIONS, options.ranks):
            say(f"{lengths.name}, {ranks} ranks")
            scaled = replace(lengths, tokens=lengths.tokens * options.tokens_scale)
            batches = [measure(scaled, ranks, seed, cluster) for seed in range(options.seeds)]
            drawn[lengths.name, ranks] = batches
            data[f"{lengths.name} {ranks}"] = [figures._asdict() for figures in batches]
    finish(
        "lengths",
        options,
        [_bound_table(drawn), _keeping_table(drawn), _static_table(drawn), _published_table()],
        data,
        options.results,
        "" if options.tokens_scale == 1 else f"lengths_{options.tokens_scale}x",
    )
    return data


def _bound_table(drawn: dict[tuple[str, int], list[Figures]]) -> Table:
    table = Table(
        "Attention of a packed batch over all ranks, forward and backward: simulated step over the work bound",
        ("lengths", "ranks", "bound ms", "step / bound", "worst", "one GPU / bound", "step / one GPU", "busiest pairs",
         "exposed", "rows", "other nodes", "with products", "met"),
        notes=[
            "- Step and bound: sums over the batches; worst: of a batch. Layout: documents. Schedule: "
            "all_gather, and node_gather on several nodes.",
            "- One GPU: the whole batch on one GPU without messages, divided by the ranks. It exceeds the bound by "
            "blocks of keys that are partly masked, and by the traffic of outputs and gradients.",
            "- Busiest pairs: of the busiest rank over the mean, in the worst batch. Exposed: the share of the step in "
            "which the rank that waits longest waits for messages. Rows: received per token; other nodes: their share "
            "from other nodes of 8 ranks. With products: step and bound with the matrix products of the layer. Met: "
            f"batches within {MET} of the bound, attention alone and with products.",
        ],
    )  # fmt: skip
    for (name, ranks), batches in drawn.items():
        bound, step = sum(figures.bound_ms for figures in batches), sum(figures.ours.total_ms for figures in batches)
        alone = sum(figures.one_gpu_ms for figures in batches)
        received, across = (
            sum(figures.ours.received for figures in batches), sum(figures.ours.across for figures in batches)
        )  # fmt: skip
        table.rows.append((
            name, str(ranks), f"{bound / len(batches):.2f}", f"{step / bound:.3f}",
            f"{max(figures.ours.total_ms / figures.bound_ms for figures in batches):.3f}", f"{alone / bound:.3f}",
            f"{step / alone:.3f}", f"{max(figures.busiest for figures in batches):.3f}",
            f"{mean(figures.ours.exposed_ms / figures.ours.total_ms for figures in batches):.1%}",
            f"{mean(figures.rows for figures in batches):.2f}", f"{across / max(1, received):.1%}",
            *_layers(batches, [figures.ours for figures in batches]),
        ))  # fmt: skip
    return table


def _layers(batches: Sequence[Figures], steps: Sequence[Step]) -> tuple[str, str]:
    """Return steps over bounds, both with the products of the layer, and how many batches meet the aim."""
    bounds = [(figures.bound_ms, figures.linear_ms) for figures in batches]
    total_ms = sum(step.total_ms for step in steps) + sum(linear for _, linear in bounds)
    pairs = [(step.total_ms, *bound) for step, bound in zip(steps, bounds, strict=True)]
    met = sum(step <= MET * bound for step, bound, _ in pairs)
    met_layers = sum(step + linear <= MET * (bound + linear) for step, bound, linear in pairs)
    return f"{total_ms / sum(map(sum, bounds)):.3f}", f"{met}, {met_layers} of {len(batches)}"


def _keeping_table(drawn: dict[tuple[str, int], list[Figures]]) -> Table:
    table = Table(
        "The same with Ring(keep_received=True)",
        ("lengths", "ranks", "step / bound", "worst", "exposed", "kept MiB", "with products", "met"),
        notes=["- Kept: by the rank that keeps most, until the backward pass of the call; the largest batch."],
    )
    for (name, ranks), batches in drawn.items():
        steps = [figures.keeping for figures in batches]
        table.rows.append((
            name, str(ranks),
            f"{sum(step.total_ms for step in steps) / sum(figures.bound_ms for figures in batches):.3f}",
            f"{max(figures.keeping.total_ms / figures.bound_ms for figures in batches):.3f}",
            f"{mean(step.exposed_ms / step.total_ms for step in steps):.1%}",
            f"{max(step.kept for step in steps) / 2**20:.0f}", *_layers(batches, steps),
        ))  # fmt: skip
    return table


def _static_table(drawn: dict[tuple[str, int], list[Figures]]) -> Table:
    names = [f"{layout}, {schedule}" for layout, schedule in STATIC] + [TE]
    table = Table(
        "Simulated speed-up over static context parallelism in groups: attention; with the products of the layer",
        ("lengths", "ranks", *names, "auto places at once"),
        notes=[
            "- Sums over the batches. Groups of 8 ranks (Megatron, mock: 4), whose sequences have equally many tokens.",
            "- Auto places at once: batches for which schedule='auto' takes the placement that is simulated here. For "
            "the others, name the schedule.",
        ],
    )
    for (name, ranks), batches in drawn.items():
        step, linear = sum(figures.ours.total_ms for figures in batches), sum(figures.linear_ms for figures in batches)
        totals = [sum(figures.static_ms[static] for figures in batches) for static in names]
        table.rows.append((
            name, str(ranks), *(f"{total / step:.2f}; {(total + linear) / (step + linear):.2f}" for total in totals),
            f"{sum(figures.auto_at_once for figures in batches)} of {len(batches)}",
        ))  # fmt: skip
    return table


def _published_table() -> Table:
    table = Table("Published speed-ups", ("source", "timed", "ratio", "lengths and baseline"), rows=[*PUBLISHED])
    table.notes += [f"- {lengths.name}: {lengths.source}." for lengths in DISTRIBUTIONS]
    return table


if __name__ == "__main__":
    main(sys.argv[1:])

"""`ringattn simulate`: how long one attention call takes on 1 to 16,384 ranks of a cluster, and who waits for whom.

Nothing is run. Few ranks are simulated with the plans that would run, thousands by classes of ranks that behave alike.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ringattn.core.geometry import Band, StridedRange, count_pairs
from ringattn.core.layout import LAYOUTS, make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.core.span import COMM, COMPUTE, Span
from ringattn.errors import InputError, UnsupportedError
from ringattn.launch.calls import MOST_HEADS, TORCH_DTYPES, CallConfig, schedule_option, tokens_option
from ringattn.launch.options import DTYPES, MOST, help_text, load_plain, option
from ringattn.launch.outputs import writing
from ringattn.observe.files import write_file
from ringattn.planner.candidates import check_extent
from ringattn.planner.choose import choose_route, without_collector
from ringattn.planner.classes import (
    MOST_GROUPED,
    SERVED,
    Learned,
    check_reach,
    classes_of,
    group_of,
    learned_from,
    opening_on,
    plans_of_group,
    routes_on,
)
from ringattn.planner.cluster import CLUSTERS, Cluster, cluster_named
from ringattn.planner.recurrence import PassTimes, play
from ringattn.planner.simulate import Disturbance, duration, simulate
from ringattn.planner.work import attention_s
from ringattn.schedule.routes import route_named

PURPOSE = """\
Simulates one attention call on so many ranks of a cluster: how long it takes, how long ranks work and wait, what they
hold, and what stragglers, slow links and jitter cost. Nothing is run; 16,384 ranks take seconds.
Examples: ringattn simulate ranks=16384 tokens=1B cluster=h100
          ringattn simulate ranks=1,8,64,512,4096 tokens=1B scaling=both cluster=gb200 picture=scaling.png
          ringattn simulate ranks=64 tokens=1M slow_rank=3:1.5 slow_link=7-8:4 jitter=0.05 seed=1"""
SCALINGS = "strong", "weak", "both"
PASSES = "forward", "backward"
MOST_RANKS = 2**14
PLANNED = 16
"""Up to so many ranks, each has its own plan; classes are learned from more."""
MOST_PLANNED = 64
"""As many of a schedule that classes do not serve: plans have an entry for each pair of ranks."""


@dataclass
class SimulateConfig(CallConfig):
    """One attention call, simulated."""

    DEFAULT_TOKENS: ClassVar[int] = 131072

    tokens: int | None = tokens_option(131072, most=MOST)
    heads: int = option(32, "query heads", least=1, most=MOST_HEADS)
    kv_heads: int = option(8, "key and value heads; divides heads", least=1, most=MOST_HEADS)
    head_dim: int = option(128, "of queries, keys and values", least=1, most=MOST)
    dtype: str = option("bf16", "of queries, keys and values", choices=DTYPES)
    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS[:3]))
    schedule: str = schedule_option("ring")
    ranks: str = option("8", "ranks of the ring; several as 1,8,64")
    scaling: str = option("strong", "several ranks share the same tokens, or have as many each; tokens are those of "
                          "the largest ring where scaling is weak", choices=SCALINGS)  # fmt: skip
    cluster: str = option("h100", "machines: a file of `ringattn calibrate`, or one of " + ", ".join(CLUSTERS),
                          names=tuple(CLUSTERS))  # fmt: skip
    overlap: bool = option(True, "messages travel beside the work of their step; else they follow it")
    sm_margin: int = option(0, "multiprocessors of a GPU that attention leaves to exchanges, as NCCL takes 8", least=0)
    slow_rank: str = option("", "ranks whose work takes longer, as 3:1.5 or 3:1.5,9:2")
    slow_link: str = option("", "pairs whose messages take longer, either way, as 7-8:4")
    jitter: float = option(0.0, "work takes up to this share longer, drawn anew for each rank and step", least=0.0)
    seed: int = option(0, "what jitter is drawn from", least=0, most=2**32 - 1)
    json: str = option("", "file to write everything into (JSON)", writes="file")
    picture: str = option("", "file to draw curves or, of one number of ranks, a timeline into (PNG)", writes="picture")


def main(argv: Sequence[str]) -> int:
    """The command. Raises `InputError` for bad options and `UnsupportedError` for what cannot be simulated."""
    if "--help" in argv or "-h" in argv:
        print(help_text("simulate", PURPOSE, SimulateConfig))
        return 0
    began = time.perf_counter()
    config = load_plain(argv, SimulateConfig)
    config.check()
    ranks = counts(config.ranks)
    slow_ranks = [(rank, factor) for (rank,), factor in factors("slow_rank", config.slow_rank, 1)]
    slow_links = [(rank, peer, factor) for (rank, peer), factor in factors("slow_link", config.slow_link, 2)]
    cluster = cluster_named(config.cluster).leaving(config.sm_margin)
    print(f"on {cluster.name}", flush=True)
    disturbance = Disturbance(tuple(slow_ranks), tuple(slow_links), config.jitter, config.seed)
    simulator = Simulator(config, cluster, disturbance)
    curves: dict[str, list[Simulated]] = {}
    points: dict[tuple[int, int], Simulated] = {}
    for scaling in SCALINGS[:2] if config.scaling == "both" else (config.scaling,):
        if len(ranks) > 1:
            print(f"\n{scaling} scaling", flush=True)
        curves[scaling] = []
        for count, tokens in zip(ranks, shared_out(config.length, ranks, scaling == "weak"), strict=True):
            traced = traced_ranks(count, [rank for rank, _ in slow_ranks]) if len(ranks) == 1 else []
            # Both curves have the largest number of ranks with all tokens.
            if (count, tokens) not in points:
                points[count, tokens] = simulator.run(tokens, count, traced)
            # What cannot be simulated is refused without a table.
            print(*([] if curves[scaling] else [HEADER]), line(points[count, tokens]), sep="\n", flush=True)
            curves[scaling].append(points[count, tokens])
    everything = [point for curve in curves.values() for point in curve]
    print("\n".join(notes(everything)))
    if len(everything) == 1:
        print("\n" + table(everything[0]))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"simulated in {time.perf_counter() - began:.1f} s, at most {peak_mib:,.0f} MiB of this process")
    print("\n".join(wrap(f"constants: {cluster.source or 'of no stated source'}", 120, subsequent_indent="  ")))
    if config.json:
        with writing("json", config.json):
            write_file(Path(config.json), json.dumps(record(config, cluster, curves), indent=1) + "\n")
        print(f"written into {config.json}")
    if config.picture:
        from ringattn.launch.pictures.simulated import draw_curves, draw_point

        title = f"{config.schedule} on {cluster.name}"
        with writing("picture", config.picture):
            if len(everything) == 1:
                draw_point(config.picture, everything[0], title)
            else:
                draw_curves(config.picture, curves, title)
        print(f"drawn into {config.picture}")
    return 0


# --- options ---------------------------------------------------------------------------------------------------------


def counts(text: str) -> list[int]:
    """Return numbers of ranks, in order. Raises `InputError` for other text."""
    words = text.strip("[]").split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= MOST_RANKS for word in words):
        raise InputError(f"ranks={text}: give numbers from 1 to {MOST_RANKS:,}, as ranks=1,8,64")
    return sorted({int(word) for word in words})


def factors(key: str, text: str, ranks: int) -> list[tuple[tuple[int, ...], float]]:
    """Return ranks, `ranks` of them together, and factors. Raises `InputError` for other text."""
    pairs = []
    for word in filter(None, text.strip("[]").split(",")):
        match = re.fullmatch("-".join([r"(\d+)"] * ranks) + r":(\d+(?:\.\d+)?)", word.strip())
        if match is None:
            example = "3:1.5 for rank 3 and times half as long again" if ranks == 1 else "7-8:4 for four times as long"
            raise InputError(f"{key}={word}: write {example}")
        *named, factor = match.groups()
        pairs.append((tuple(map(int, named)), float(factor)))
    return pairs


def traced_ranks(ranks: int, slow: Sequence[int]) -> list[int]:
    """Return the ranks whose timelines are drawn: the first, the last, some between, and the slow ones."""
    spread = {0, ranks // 4, ranks // 2, 3 * ranks // 4, ranks - 1}
    return sorted({*spread, *slow[:3]})


def shared_out(tokens: int, ranks: Sequence[int], weak: bool) -> list[int]:
    """Return the tokens for each number of ranks: all, or (weak) as many for each rank as the most ranks have.

    Raises `InputError` where a rank would have none.
    """
    if weak and tokens < max(ranks):
        raise InputError(f"tokens={tokens}: leaves nothing for some of {max(ranks)} ranks")
    return [max(1, tokens * count // max(ranks)) if weak else tokens for count in ranks]


# --- simulation ------------------------------------------------------------------------------------------------------


class Simulated(NamedTuple):
    """A call on `ranks` ranks. `tokens`: as many as were simulated, which `asked` rounds up to shards of one length.

    `classes`: whether ranks were simulated by classes, else each by its plan. `held_bytes`: least, median and greatest
    staging buffers of a rank in addition to its own tensors. `ideal_s`: of the allowed pairs alone, shared evenly by
    the processors, at the kernel's rate; `spans`: by pass what some ranks did. `took_s`: of the simulation itself.
    """

    ranks: int
    tokens: int
    asked: int
    classes: bool
    passes: Sequence[PassTimes]
    held_bytes: Sequence[int]
    ideal_s: float
    spans: Sequence[Mapping[int, Sequence[Span]]]
    took_s: float

    @property
    def total_s(self) -> float:
        """Of all passes, one after another."""
        return sum(each.total_s for each in self.passes)

    @property
    def efficiency(self) -> float:
        """Ideal over simulated time."""
        return self.ideal_s / self.total_s


@dataclass
class Simulator:
    """Simulates one call on a cluster for several numbers of tokens and ranks; classes of ranks are learned once."""

    config: SimulateConfig
    cluster: Cluster
    disturbance: Disturbance = field(default_factory=Disturbance)
    _learned: dict[Any, Learned] = field(default_factory=dict)
    _first: dict[Any, Learned] = field(default_factory=dict)
    """The classes of the first length of shards: those of other lengths differ from them in the length alone."""

    @without_collector()
    def run(self, tokens: int, ranks: int, traced: Sequence[int] = ()) -> Simulated:
        """Simulate the call on so many ranks. `traced`: ranks whose steps are kept.

        Raises `UnsupportedError` for what can be simulated neither by plans nor by classes.
        """
        began = time.perf_counter()
        self.disturbance.check_ranks(ranks)
        classes = not self._each_planned(ranks)
        used = self.shard_tokens(tokens, ranks) * ranks if classes else tokens
        simulated = self._by_classes if classes else self._by_plans
        passes, spans, held = simulated(used, ranks, traced)
        problem = self.problem(used, ranks)
        pairs = _pairs(problem) * self.config.heads / _processors(self.cluster, ranks)
        ideal_s = sum(attention_s(problem, pairs, self.cluster, bool(number)) for number in range(len(passes)))
        held_bytes = [int(each) for each in np.percentile(held, (0, 50, 100))]
        took_s = time.perf_counter() - began
        return Simulated(ranks, used, tokens, classes, passes, held_bytes, ideal_s, spans, took_s)

    def problem(self, tokens: int, ranks: int) -> Problem:
        """Return the call on so many tokens and ranks. Raises `InputError` for options that contradict each other."""
        config = self.config
        layout = make_layout(config.layout, tokens, ranks, purpose=self._purpose)
        mask = Banded(config.causal, config.bounds).mask(tokens, tokens, None, None, config.heads, config.kv_heads)
        sizes = config.batch, config.heads, config.kv_heads, config.head_dim, config.head_dim
        return Problem(layout, layout, mask, *sizes, TORCH_DTYPES[config.dtype])

    def shard_tokens(self, tokens: int, ranks: int) -> int:
        """Return the tokens of each of shards of one length, at least as many as there are."""
        chunks = 2 if make_layout(self.config.layout, tokens, ranks, purpose=self._purpose).name == "zigzag" else 1
        return -(-tokens // (ranks * chunks)) * chunks

    @property
    def _purpose(self) -> str:
        return "window" if self.config.bounds else "causal" if self.config.causal else "full"

    @property
    def _served(self) -> bool:
        """Whether classes of ranks describe this schedule on this cluster."""
        return self.config.schedule.partition(":")[0] in SERVED and self.cluster.cores is None

    def _each_planned(self, ranks: int) -> bool:
        """Whether every rank's plan is made: of few ranks, and where classes do not serve."""
        if ranks <= PLANNED or not self._served:
            return True
        group = group_of(self.problem(ranks * 2, ranks), self.config.schedule, self.cluster)
        return 1 < group <= MOST_GROUPED and ranks <= learned_from(self.config.schedule, ranks // group, 0, group)[1]

    def _by_plans(self, tokens: int, ranks: int, traced: Sequence[int]) -> tuple[list[PassTimes], list[Any], Any]:
        """Simulate every rank with its plan. Returns the passes, the spans of traced ranks, and the bytes held."""
        config, cluster = self.config, self.cluster
        route = route_named(config.schedule)
        if ranks > MOST_PLANNED and not self._served:
            shares = f"cluster={cluster.name!r}, whose ranks share processors,"
            what = f"schedule={config.schedule!r}" if cluster.cores is None else shares
            why = ""
            if route.by_head:
                why = (f" It moves each head to one rank, so of {config.heads} heads no more than {config.heads} ranks "
                       "have work: many ranks take schedule='ulysses_ring'.")  # fmt: skip
            raise UnsupportedError(
                f"ranks={ranks}: {what} is simulated with a plan for each rank, up to {MOST_PLANNED}.{why} Simulate "
                f"fewer, or by classes of ranks: schedules {', '.join(SERVED)} on clusters with a processor for "
                "each rank"
            )
        _show_progress(f"{ranks} ranks: planning each of them")
        problem = self.problem(tokens, ranks)
        size = group_of(problem, config.schedule, cluster) if route.parameter else ranks
        check_extent(problem, by_head=route.by_head, groups=ranks // size)
        route = choose_route(problem, config.schedule, cluster)
        groups = [range(first, first + size) for first in range(0, ranks, size)]
        every = [plan for group in groups for plan in plans_of_group(problem, route, group, 1 + config.backward)]
        passes, spans, held = [], [], np.zeros(ranks)
        for backward in (False, True)[: 1 + config.backward]:
            plans = tuple(plan for plan in every if plan.backward == backward)
            timeline = simulate(plans, cluster, config.overlap, self.disturbance)
            busy_s, waiting_s, exposed_s = np.array([timeline.busy_us, timeline.waiting_us, timeline.exposed_us]) / 1e6
            sent = np.array([plan.bytes_sent for plan in plans], float)
            passes.append(PassTimes(timeline.total_us / 1e6, busy_s, waiting_s, exposed_s, sent, {}))
            spans.append({rank: timeline.spans[rank] for rank in traced})
            held = np.maximum(held, [plan.arena_bytes + plan.kept_bytes for plan in plans])
        return passes, spans, held

    def _by_classes(self, tokens: int, ranks: int, traced: Sequence[int]) -> tuple[list[PassTimes], list[Any], Any]:
        """Simulate the ranks by classes that behave alike; the result is that of `_by_plans`."""
        _show_progress(f"{ranks:,} ranks: learning classes of ranks")
        learned = self._classes(tokens // ranks, ranks, group_of(self.problem(tokens, ranks), self.config.schedule,
                                                                 self.cluster))  # fmt: skip
        passes = []
        for backward, name in enumerate(PASSES[: 1 + self.config.backward]):
            _show_progress(f"{ranks:,} ranks: {name}")
            options = self.config.overlap, self.disturbance, traced
            passes.append(play(learned[bool(backward)], self.cluster, ranks, *options))
        spans = [{rank: spans_of(marks) for rank, marks in each.traced.items()} for each in passes]
        return passes, spans, np.max([learned[bool(n)].held_spread(ranks) for n in range(len(passes))], axis=0)

    def _classes(self, shard: int, ranks: int, group: int) -> Learned:
        """Return the classes of ranks with shards of so many tokens, learned or known from another number of ranks."""

        def problem_of(count: int) -> Problem:
            return self.problem(shard * count, count)

        schedule, cluster, quarter, reach = self.config.schedule, self.cluster, ranks // group % 4, self._reach(shard)
        learned_on = learned_from(schedule, quarter, reach, group)
        routes = routes_on(problem_of, schedule, cluster, learned_on, group, None)
        opening = opening_on(problem_of, routes, cluster, ranks)
        key = quarter, opening, group
        if (shard, key) not in self._learned:
            # A window reaches other ranks from shards of another length.
            first = None if self.config.bounds else self._first.get(key)
            learned = classes_of(problem_of, schedule, cluster, quarter, reach, group, opening, first)
            self._learned[shard, key] = learned
            self._first.setdefault(key, learned)
        return self._learned[shard, key]

    def _reach(self, shard: int) -> int:
        """Return how many shards a window reaches. Raises `UnsupportedError` for those that classes do not describe."""
        if self.config.bounds is None:
            return 0
        layout = self.problem(shard * 4, 4).q_layout
        sides = [0 if self.config.causal and side is None else side for side in self.config.bounds]
        if None in sides or layout.name == "striped":
            raise UnsupportedError(
                f"layout={layout.name!r} with a window of {self.config.bounds}: classes of ranks are told apart "
                "by windows bounded on both sides, over contiguous or zigzag shards"
            )
        run = min(part.count for part in layout.shards[0])
        reach = -(-max(side for side in sides if side is not None) // run)
        check_reach(reach)
        return reach


def _processors(cluster: Cluster, ranks: int) -> int:
    """Return how many ranks work at full speed at once: all, or on each machine as many as it has processors."""
    if cluster.cores is None:
        return ranks
    return sum(min(cluster.cores, sharing) for sharing in Counter(map(cluster.node_of, range(ranks))).values())


def _pairs(problem: Problem) -> int:
    """Return the number of pairs that the mask allows."""
    everything = StridedRange(0, problem.q_layout.length)
    return sum(count_pairs(everything, everything, Band(*branch.band)) for branch in problem.mask.branches)


def spans_of(marks: np.ndarray) -> tuple[Span, ...]:
    """Return what a rank did, from the moments of its steps (see `PassTimes.traced`)."""
    spans = []
    for number, (entered, went, worked, landed) in enumerate((marks * 1e6).tolist()):
        lanes = (("pack", COMPUTE, entered, went), ("attend", COMPUTE, went, worked), ("exchange", COMM, went, landed))
        spans += [Span(f"step {number} {name}", lane, start, end) for name, lane, start, end in lanes if end > start]
    return tuple(spans)


# --- what is printed and written -------------------------------------------------------------------------------------


HEADER = (f"{'ranks':>7}{'tokens':>16}{'time':>16}{'efficiency':>12}{'exposed':>14}{'waiting':>14}"
          f"{'MiB held':>11}{'took s':>9}  simulated")  # fmt: skip


def line(point: Simulated) -> str:
    """Return a line for one number of ranks: all passes together, of the rank that waits longest and holds most."""
    exposed, waiting = (sum(getattr(each, name).max() for each in point.passes) for name in ("exposed_s", "waiting_s"))
    how = "by classes of ranks" if point.classes else "by the plan of each rank"
    return (
        f"{point.ranks:>7,}{point.tokens:>16,}{duration(point.total_s):>16}{point.efficiency:>12.1%}"
        f"{duration(exposed):>14}{duration(waiting):>14}{point.held_bytes[2] / 2**20:>11,.0f}"
        f"{point.took_s:>9.2f}  {how}"
    )


def notes(points: Sequence[Simulated]) -> list[str]:
    """Return what the figures are, and what was rounded."""
    lines = ["efficiency: the allowed pairs alone, shared evenly, at the kernel's rate, over the simulated time; "
             "exposed, waiting, MiB held: of the rank that has most"]  # fmt: skip
    worst = max(points, key=lambda point: point.tokens / point.asked)
    if (more := worst.tokens / worst.asked - 1) > 0:
        share = f"{worst.tokens / worst.asked:,.1f} times as many" if more >= 1 else f"{max(more, 1e-6):.4%} more"
        lines.append(
            f"shards are of one length: tokens are rounded up, on {worst.ranks:,} ranks {worst.asked:,} to "
            f"{worst.tokens:,}, {share}"
        )
    return lines


def table(point: Simulated) -> str:
    """Return the least, median and greatest of all ranks, by pass."""
    rows: list[tuple[str, str, Sequence[str]]] = [("pass", "of all ranks", ("least", "median", "greatest"))]
    for name, each in zip(PASSES, point.passes, strict=False):
        times = ("work", each.busy_s), ("waiting", each.waiting_s), ("exposed", each.exposed_s)
        rows += [(name, what, [duration(value) for value in quantiles(values)]) for what, values in times]
        rows.append((name, "MiB sent", _mib(quantiles(each.sent_bytes))))
    rows.append(("greatest", "MiB held", _mib(point.held_bytes)))
    return "\n".join(f"{name:<10}{what:<14}" + "".join(f"{cell:>17}" for cell in cells) for name, what, cells in rows)


def _mib(sizes_bytes: Sequence[float]) -> list[str]:
    return [f"{size / 2**20:,.1f}" for size in sizes_bytes]


def quantiles(values: Any) -> list[float]:
    """Return the least, median and greatest."""
    ordered = sorted(values.tolist())
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def record(config: SimulateConfig, cluster: Cluster, curves: Mapping[str, Sequence[Simulated]]) -> dict[str, Any]:
    """Return everything for JSON; seconds and bytes."""
    times = ("busy_s", "waiting_s", "exposed_s", "sent_bytes")
    return {
        "config": {**asdict(config), "tokens": config.length},
        "cluster": {"name": cluster.name, "source": cluster.source},
        "curves": {
            scaling: [
                {
                    "ranks": point.ranks, "tokens": point.tokens, "asked_tokens": point.asked,
                    "by": "classes" if point.classes else "plans", "total_s": point.total_s, "ideal_s": point.ideal_s,
                    "efficiency": point.efficiency, "held_bytes": list(point.held_bytes), "took_s": point.took_s,
                    "passes": [
                        {name: quantiles(getattr(each, name)) for name in times} | {"total_s": each.total_s}
                        for each in point.passes
                    ],
                }
                for point in points
            ]
            for scaling, points in curves.items()
        },
    }  # fmt: skip


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)

"""Is the schedule that prediction chooses the fastest one? Drawn calls, every schedule that serves them, measured.

After `ringattn calibrate`: calls on two to four ranks are drawn from a seed; all schedules of a call run in turns in
the same processes, each exact at a small size before. Schedules with the same plans are measured once. A call is good
where the schedule of the least predicted time, forward and backward, is measured within 10 % of the fastest; beside it,
the one that `schedule="auto"` takes. `python -m ringattn.bench.choice`, or with `cluster=FILE` and no calibration.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any, NamedTuple

from ringattn.bench.clock import Sample, kept, wall
from ringattn.bench.options import parse
from ringattn.bench.prediction import calibrated
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.bench.timed_calls import PASSES, Shape, plans_of, samples_of, timed
from ringattn.errors import InputError, UnsupportedError
from ringattn.planner.cluster import FORWARD_FLOPS_PER_DIM, Cluster
from ringattn.planner.plan import Plan
from ringattn.planner.simulate import simulate
from ringattn.ring import Ring
from ringattn.schedule.routes import ROUTES

PROGRAM = "ringattn.bench.choice:on_rank"
NEAR_FASTEST = 1.1
GOOD_SHARE = 0.9
BAR = 0.10
"""The median error of a pass's predicted time that is allowed."""
FORWARD_FLOPS = 8e9, 6e10
"""Least and most of a drawn call: long enough to be timed, short enough to be timed often."""


@dataclass(frozen=True)
class ChoiceOptions:
    """`cases`: how many calls are drawn, from `seed`. `cluster`: constants; empty: measured first, in `rounds`."""

    cluster: str = ""
    cases: int = 10
    seed: int = 23
    repeats: int = 4
    rounds: int = 30
    transport: str = "auto"
    results: str = RESULTS


class Case(NamedTuple):
    """A call on so many ranks, and its schedules that differ."""

    ranks: int
    shapes: tuple[Shape, ...]


def drawn(cases: int, seed: int) -> list[tuple[int, Shape]]:
    """Ranks, and calls of unlike size, mask, layout and heads."""
    random, found = Random(seed), list[tuple[int, Shape]]()
    while len(found) < cases:
        # In turns, so that few calls too have every kind of mask and every number of ranks.
        mask = ("causal", "full", "documents", "window")[len(found) % 4]
        ranks = 2 + len(found) % 3
        tokens = random.choice((2048, 3072, 4096, 6144, 8192))
        kv_heads, group = random.choice((1, 2, 4, 8)), random.choice((1, 1, 2, 4))
        layouts = {"full": ("contiguous",), "documents": ("per_document", "contiguous", "zigzag")}
        shape = Shape(
            tokens, kv_heads * group, kv_heads, random.choice((32, 64, 128)),
            random.choice(layouts.get(mask, ("zigzag", "contiguous", "striped"))), "ring", mask != "full",
            tokens // random.choice((4, 8)) if mask == "window" else 0,
            documents=_documents(random, tokens) if mask == "documents" else (),
        )  # fmt: skip
        if FORWARD_FLOPS[0] <= flops(shape) <= FORWARD_FLOPS[1]:
            found.append((ranks, shape))
    return found


def _documents(random: Random, tokens: int) -> tuple[int, ...]:
    """A few of unlike lengths."""
    cuts = [0, *sorted(random.sample(range(1, tokens), random.randint(3, 7))), tokens]
    return tuple(stop - start for start, stop in pairwise(cuts))


def flops(shape: Shape) -> float:
    """Of a forward pass, without a band's edges."""
    causal = 0.5 if shape.causal else 1.0
    pairs = sum(causal * count * count for count in shape.documents or (shape.tokens,))
    pairs = min(pairs, shape.tokens * shape.window) if shape.window else pairs
    return pairs * shape.heads * shape.head_dim * FORWARD_FLOPS_PER_DIM


def different(call: Shape, ranks: int) -> tuple[Shape, ...]:
    """The call by every schedule that serves it; of those with the same plans the first."""
    found: list[tuple[Shape, list[Any]]] = []
    for name in ROUTES:
        shape = call._replace(schedule=name)
        try:
            same = signature(shape, ranks)
        except (InputError, UnsupportedError):
            continue
        if all(same != other for _, other in found):
            found.append((shape, same))
    return tuple(shape for shape, _ in found)


def signature(shape: Shape, ranks: int) -> list[Any]:
    """What is equal where all ranks do the same in both passes."""
    return [_doing(plan) for backward in (False, True) for plan in plans_of(shape, ranks, backward)]


def _doing(plan: Plan) -> Any:
    return plan.steps, plan.buffers, plan.kept, plan.own_sums


def on_rank(ring: Ring, **spec: Any) -> dict[str, Any]:
    """One rank's part."""
    return timed(ring, [Shape.read(words) for words in spec["shapes"]], spec["repeats"])


class Judged(NamedTuple):
    """A case: its seconds by schedule and pass, measured and predicted, and what is chosen."""

    case: Case
    took: dict[str, dict[str, float]]
    said: dict[str, dict[str, float]]
    auto: str

    @property
    def chosen(self) -> str:
        """The schedule of the least predicted time."""
        return min(self.said, key=lambda name: sum(self.said[name].values()))

    def over_fastest(self, name: str) -> float:
        """Its measured time over the least."""
        sums = {name: sum(by_pass.values()) for name, by_pass in self.took.items()}
        return sums[name] / min(sums.values())

    @property
    def fastest(self) -> str:
        """The schedule of the least measured time."""
        return min(self.took, key=self.over_fastest)

    def errors(self) -> list[float]:
        """Predicted over measured, less one, of every schedule and pass."""
        return [self.said[name][one] / self.took[name][one] - 1 for name in self.took for one in PASSES]


def judged(case: Case, found: Sequence[dict[str, list[Sample]]], cluster: Cluster) -> Judged:
    """One case from its samples by schedule."""
    took = {
        shape.schedule: {name: wall(by_pass[name]) for name in PASSES}
        for shape, by_pass in zip(case.shapes, found, strict=True)
    }
    said = {
        shape.schedule: {
            name: simulate(plans_of(shape, case.ranks, name == "backward", cluster), cluster).total_us / 1e6
            for name in PASSES
        }
        for shape in case.shapes
    }
    auto = case.shapes[0]._replace(schedule="auto")
    by_auto = [_doing(plan) for plan in plans_of(auto, case.ranks, False, cluster)]
    same = (s.schedule for s in case.shapes if by_auto == [_doing(plan) for plan in plans_of(s, case.ranks, False)])
    return Judged(case, took, said, next(same, ""))


def tables_of(options: ChoiceOptions, cluster: Cluster, found: list[list[dict[str, list[Sample]]]],
              cases: list[Case]) -> list[Table]:  # fmt: skip
    """A row for each case with the verdict, and a row for each of its schedules."""
    every = [judged(case, samples, cluster) for case, samples in zip(cases, found, strict=True)]
    choices = Table(
        f"The choice, {options.repeats} rounds, constants: {cluster.name}",
        ("ranks", "tokens, heads, mask, layout", "schedules", "fastest measured", "chosen", "over fastest", "auto",
         "over fastest", "slowest over fastest", "median error"),
    )  # fmt: skip
    for one in every:
        slowest = max(map(one.over_fastest, one.took))
        auto = f"{one.over_fastest(one.auto):.2f}" if one.auto else "-"
        choices.rows.append((
            str(one.case.ranks), one.case.shapes[0].call, str(len(one.took)), one.fastest, one.chosen,
            f"{one.over_fastest(one.chosen):.2f}", one.auto or "-", auto, f"{slowest:.2f}",
            f"{median(map(abs, one.errors())):.1%}",
        ))  # fmt: skip
    good = sum(one.over_fastest(one.chosen) <= NEAR_FASTEST for one in every)
    by_auto = sum(bool(one.auto) and one.over_fastest(one.auto) <= NEAR_FASTEST for one in every)
    off = median(abs(error) for one in every for error in one.errors())
    choices.notes += [
        f"- chosen within {NEAR_FASTEST - 1:.0%} of the fastest in {good} of {len(every)}; the bar is "
        f"{GOOD_SHARE:.0%}: {'met' if good >= GOOD_SHARE * len(every) else 'MISSED'}. By auto: {by_auto}.",
        f"- median error of a pass's predicted time {off:.1%}; the bar is {BAR:.0%}: "
        f"{'met' if off <= BAR else 'MISSED'}.",
        "- times: forward and backward together. Schedules that give the same plans are counted once.",
    ]
    passes = Table(
        "Every schedule",
        ("ranks", "tokens, heads, mask, layout", "schedule", "pass", "predicted, ms", "measured, ms", "error",
         "foreign"),
    )  # fmt: skip
    for one, by_shape in zip(every, found, strict=True):
        for shape, by_pass in zip(one.case.shapes, by_shape, strict=True):
            for name in PASSES:
                said_s, took_s = one.said[shape.schedule][name], one.took[shape.schedule][name]
                passes.rows.append((
                    str(one.case.ranks), shape.call, shape.schedule, name, f"{1e3 * said_s:.1f}", f"{1e3 * took_s:.1f}",
                    f"{said_s / took_s - 1:+.1%}", f"{median(s.foreign for s in kept(by_pass[name])):.2f}",
                ))  # fmt: skip
    return [choices, passes]


def main(words: Sequence[str]) -> dict[str, Any]:
    """Calibrate, draw, run, print, keep; returns what is kept."""
    options = parse(ChoiceOptions(), words)
    if options.cases < 1 or options.repeats < 1:
        raise InputError("cases and repeats must be positive")
    # By ranks, so that each number of processes starts once.
    calls = sorted(drawn(options.cases, options.seed), key=lambda call: call[0])
    cases = [Case(ranks, different(call, ranks)) for ranks, call in calls]
    found: list[list[dict[str, list[Sample]]]] = []
    largest = 0.0
    with progress("choice") as say:
        cluster = calibrated(options, say)
        for ranks in sorted({case.ranks for case in cases}):
            mine = [case for case in cases if case.ranks == ranks]
            spec = {"shapes": [shape for case in mine for shape in case.shapes], "repeats": options.repeats}
            by_rank = run_in_processes(ranks, PROGRAM, spec, say, options.transport)
            by_shape = iter(samples_of(by_rank))
            found += [[next(by_shape) for _ in case.shapes] for case in mine]
            largest = max(largest, *(rank["error"] for rank in by_rank))
    data: dict[str, Any] = {
        "cluster": asdict(cluster),
        "cases": [{"ranks": case.ranks, "shapes": case.shapes, "samples": by_shape}
                  for case, by_shape in zip(cases, found, strict=True)],
        "sample_fields": Sample._fields,
        "largest_error": largest,
    }  # fmt: skip
    finish("choice", options, tables_of(options, cluster, found, cases), data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])

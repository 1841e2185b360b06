"""A test of the choice of schedules: random calls are measured with every schedule that supports them.

After `ringattn calibrate`, calls on two to four ranks are drawn from a seed. All schedules of a call run in turns in
the same processes, and each is first checked for exactness at a small size. Schedules with the same plans are measured
once. The choice for a call counts as good if the schedule with the least predicted time, forward plus backward, takes
at most 10 % longer than the fastest. The table also lists the schedule that `schedule="auto"` takes.
Run `python -m ringattn.bench.choice`, or add `cluster=FILE` to use existing constants instead of a calibration.
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
"""The largest allowed median error of a pass's predicted time."""
FORWARD_FLOPS = 8e9, 6e10
"""The fewest and the most FLOPs of a drawn call: long enough to time, short enough to repeat."""


@dataclass(frozen=True)
class ChoiceOptions:
    """The options of the benchmark.

    `cases` is the number of calls that are drawn from `seed`. `cluster` names the constants of predictions; if it is
    empty, they are measured first, in `rounds` rounds.
    """

    cluster: str = ""
    cases: int = 10
    seed: int = 23
    repeats: int = 4
    rounds: int = 30
    transport: str = "auto"
    results: str = RESULTS


class Case(NamedTuple):
    """A call on `ranks` ranks, with each of its distinct schedules."""

    ranks: int
    shapes: tuple[Shape, ...]


def drawn(cases: int, seed: int) -> list[tuple[int, Shape]]:
    """Draw calls with varied sizes, masks, layouts and heads, each with its number of ranks."""
    random, calls = Random(seed), list[tuple[int, Shape]]()
    while len(calls) < cases:
        # Masks and numbers of ranks alternate, so that even a few calls cover all of them.
        mask = ("causal", "full", "documents", "window")[len(calls) % 4]
        ranks = 2 + len(calls) % 3
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
            calls.append((ranks, shape))
    return calls


def _documents(random: Random, tokens: int) -> tuple[int, ...]:
    """Draw a few documents of different lengths."""
    cuts = [0, *sorted(random.sample(range(1, tokens), random.randint(3, 7))), tokens]
    return tuple(stop - start for start, stop in pairwise(cuts))


def flops(shape: Shape) -> float:
    """Return the approximate FLOPs of a forward pass. Windows count in full, even at the start of the sequence."""
    causal = 0.5 if shape.causal else 1.0
    pairs = sum(causal * count * count for count in shape.documents or (shape.tokens,))
    pairs = min(pairs, shape.tokens * shape.window) if shape.window else pairs
    return pairs * shape.heads * shape.head_dim * FORWARD_FLOPS_PER_DIM


def distinct_schedules(call: Shape, ranks: int) -> tuple[Shape, ...]:
    """Return the call with every schedule that supports it; of schedules with the same plans, only the first."""
    distinct: list[tuple[Shape, list[Any]]] = []
    for name in ROUTES:
        shape = call._replace(schedule=name)
        try:
            plans = signature(shape, ranks)
        except (InputError, UnsupportedError):
            continue
        if all(plans != known_plans for _, known_plans in distinct):
            distinct.append((shape, plans))
    return tuple(shape for shape, _ in distinct)


def signature(shape: Shape, ranks: int) -> list[Any]:
    """Return a value that is equal for two calls if all ranks run the same operations in both passes."""
    return [_operations(plan) for backward in (False, True) for plan in plans_of(shape, ranks, backward)]


def _operations(plan: Plan) -> Any:
    return plan.steps, plan.buffers, plan.kept, plan.own_sums


def on_rank(ring: Ring, **spec: Any) -> dict[str, Any]:
    """Run one rank's part of the benchmark."""
    return timed(ring, [Shape.read(fields) for fields in spec["shapes"]], spec["repeats"])


class Judgement(NamedTuple):
    """The seconds of a case by schedule and pass, measured and predicted, and the schedule that `auto` takes."""

    case: Case
    measured: dict[str, dict[str, float]]
    predicted: dict[str, dict[str, float]]
    auto: str

    @property
    def chosen(self) -> str:
        """Return the schedule with the least predicted time."""
        return min(self.predicted, key=lambda name: sum(self.predicted[name].values()))

    def over_fastest(self, name: str) -> float:
        """Return the measured time of a schedule divided by that of the fastest."""
        sums = {name: sum(by_pass.values()) for name, by_pass in self.measured.items()}
        return sums[name] / min(sums.values())

    @property
    def fastest(self) -> str:
        """Return the schedule with the least measured time."""
        return min(self.measured, key=self.over_fastest)

    def errors(self) -> list[float]:
        """Return the relative error of the prediction for every schedule and pass."""
        return [
            self.predicted[name][pass_name] / self.measured[name][pass_name] - 1
            for name in self.measured
            for pass_name in PASSES
        ]


def judge(case: Case, by_shape: Sequence[dict[str, list[Sample]]], cluster: Cluster) -> Judgement:
    """Compare measured and predicted times of one case; `by_shape` holds the samples of each schedule."""
    measured = {
        shape.schedule: {name: wall(by_pass[name]) for name in PASSES}
        for shape, by_pass in zip(case.shapes, by_shape, strict=True)
    }
    predicted = {
        shape.schedule: {
            name: simulate(plans_of(shape, case.ranks, name == "backward", cluster), cluster).total_us / 1e6
            for name in PASSES
        }
        for shape in case.shapes
    }
    auto = case.shapes[0]._replace(schedule="auto")
    by_auto = [_operations(plan) for plan in plans_of(auto, case.ranks, False, cluster)]
    same = (
        s.schedule for s in case.shapes if by_auto == [_operations(plan) for plan in plans_of(s, case.ranks, False)]
    )
    return Judgement(case, measured, predicted, next(same, ""))


def tables_of(options: ChoiceOptions, cluster: Cluster, samples: list[list[dict[str, list[Sample]]]],
              cases: list[Case]) -> list[Table]:  # fmt: skip
    """Return two tables: one row per case with the verdict, and one row per schedule of each case."""
    verdicts = [judge(case, case_samples, cluster) for case, case_samples in zip(cases, samples, strict=True)]
    choices = Table(
        f"The choice, {options.repeats} rounds, constants: {cluster.name}",
        ("ranks", "tokens, heads, mask, layout", "schedules", "fastest measured", "chosen", "over fastest", "auto",
         "over fastest", "slowest over fastest", "median error"),
    )  # fmt: skip
    for verdict in verdicts:
        slowest = max(map(verdict.over_fastest, verdict.measured))
        auto = f"{verdict.over_fastest(verdict.auto):.2f}" if verdict.auto else "-"
        choices.rows.append((
            str(verdict.case.ranks), verdict.case.shapes[0].call, str(len(verdict.measured)),
            verdict.fastest, verdict.chosen,
            f"{verdict.over_fastest(verdict.chosen):.2f}", verdict.auto or "-", auto, f"{slowest:.2f}",
            f"{median(map(abs, verdict.errors())):.1%}",
        ))  # fmt: skip
    good = sum(verdict.over_fastest(verdict.chosen) <= NEAR_FASTEST for verdict in verdicts)
    by_auto = sum(bool(verdict.auto) and verdict.over_fastest(verdict.auto) <= NEAR_FASTEST for verdict in verdicts)
    off = median(abs(error) for verdict in verdicts for error in verdict.errors())
    choices.notes += [
        f"- chosen within {NEAR_FASTEST - 1:.0%} of the fastest in {good} of {len(verdicts)}; the bar is "
        f"{GOOD_SHARE:.0%}: {'met' if good >= GOOD_SHARE * len(verdicts) else 'MISSED'}. By auto: {by_auto}.",
        f"- median error of a pass's predicted time {off:.1%}; the bar is {BAR:.0%}: "
        f"{'met' if off <= BAR else 'MISSED'}.",
        "- times: forward and backward together. Schedules that give the same plans are counted once.",
    ]
    passes = Table(
        "Every schedule",
        ("ranks", "tokens, heads, mask, layout", "schedule", "pass", "predicted, ms", "measured, ms", "error",
         "foreign"),
    )  # fmt: skip
    for verdict, by_shape in zip(verdicts, samples, strict=True):
        for shape, by_pass in zip(verdict.case.shapes, by_shape, strict=True):
            for name in PASSES:
                predicted_s, measured_s = (
                    verdict.predicted[shape.schedule][name],
                    verdict.measured[shape.schedule][name],
                )
                passes.rows.append((
                    str(verdict.case.ranks), shape.call, shape.schedule, name,
                    f"{1e3 * predicted_s:.1f}", f"{1e3 * measured_s:.1f}",
                    f"{predicted_s / measured_s - 1:+.1%}", f"{median(s.foreign for s in kept(by_pass[name])):.2f}",
                ))  # fmt: skip
    return [choices, passes]


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Calibrate, draw and run the cases, print the tables, save the record and return it."""
    options = parse(ChoiceOptions(), arguments)
    if options.cases < 1 or options.repeats < 1:
        raise InputError("cases and repeats must be positive")
    # Sort the calls by ranks, so that each number of processes is started once.
    calls = sorted(drawn(options.cases, options.seed), key=lambda call: call[0])
    cases = [Case(ranks, distinct_schedules(call, ranks)) for ranks, call in calls]
    samples: list[list[dict[str, list[Sample]]]] = []
    largest = 0.0
    with progress("choice") as say:
        cluster = calibrated(options, say)
        for ranks in sorted({case.ranks for case in cases}):
            same_ranks = [case for case in cases if case.ranks == ranks]
            spec = {"shapes": [shape for case in same_ranks for shape in case.shapes], "repeats": options.repeats}
            by_rank = run_in_processes(ranks, PROGRAM, spec, say, options.transport)
            by_shape = iter(samples_of(by_rank))
            samples += [[next(by_shape) for _ in case.shapes] for case in same_ranks]
            largest = max(largest, *(rank["error"] for rank in by_rank))
    data: dict[str, Any] = {
        "cluster": asdict(cluster),
        "cases": [{"ranks": case.ranks, "shapes": case.shapes, "samples": by_shape}
                  for case, by_shape in zip(cases, samples, strict=True)],
        "sample_fields": Sample._fields,
        "largest_error": largest,
    }  # fmt: skip
    finish("choice", options, tables_of(options, cluster, samples, cases), data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])

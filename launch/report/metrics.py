"""What the charts of a report show: each figure with its unit, the curves that are drawn of it, and a sentence.

Guarantees: bytes and waits are those of the worst rank; a prediction names the machines it was made for, and is not
drawn where it is for others than those that were measured.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from ringattn.launch.report.points import Point, Sweep

MIB = 2**20
FAR = 10.0
"""Predictions this many times off would flatten what was measured; they are told in the tables and not drawn."""

Value = Callable[[Point], float | None]


class Curve(NamedTuple):
    """What is drawn of every series: `spread` as a bar from low to high; `dashed` lines have hollow markers."""

    value: Value
    name: str = ""
    dashed: bool = False
    spread: Callable[[Point], tuple[float, float]] | None = None


class Metric(NamedTuple):
    """One chart: its title, the label of its axis with the unit, what is drawn, whether the axis is logarithmic, a
    sentence, and a value to compare with, if there is one."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    logarithmic: bool = False
    note: str = ""
    aim: float | None = None


def metrics_of(sweep: Sweep) -> list[Metric]:
    """What is shown of every panel besides speed-up and efficiency."""
    both, words, drawn = " + ".join(sweep.passes), prediction_words(sweep), comparable(sweep)
    if words and not drawn:
        words += " They are far from these times, and not drawn."

    def predicted(point: Point) -> float | None:
        return predicted_ms(sweep, point)

    def of_measured(part: Value) -> Value:
        return lambda p: None if (value := part(p)) is None else value / sweep.pass_ms(p)

    beside = (Curve(predicted, "predicted", dashed=True),) if drawn else ()
    ratio = Metric("Prediction", "% of measured", (Curve(of_measured(predicted), dashed=True),),
                   note=f"100 is right, less is too hopeful. {words}", aim=1.0)  # fmt: skip
    return [
        Metric("Throughput", "tokens/s", (Curve(sweep.tokens_per_s),), logarithmic=True),
        Metric(
            "Time of a pass, and its prediction" if drawn else "Time of a pass",
            "ms",
            (Curve(sweep.pass_ms, "measured", spread=sweep.pass_spread), *beside),
            logarithmic=True,
            note=f"{both}, slowest rank, with p10 to p90. {words}",
        ),
        *([ratio] if drawn else []),
        Metric("Exposed communication", "% of the pass", (Curve(of_measured(lambda p: p.exposed_ms(sweep.passes))),),
               note="Time in which the rank that waited longest stood still for messages."),
        Metric(
            "Memory of a rank",
            "MiB",
            (
                Curve(lambda p: _mib(p.most("peak_bytes")), "peak"),
                Curve(lambda p: _mib(p.most("pool_bytes")), "the ring's own pool", dashed=True),
            ),
            note="The rank that needs most. Peak: growth of the whole rank.",
        ),
        Metric("Sent by a rank", "MiB", (Curve(lambda p: _mib(p.most("bytes_sent"))),),
               note="Forward and backward of one pass, of the rank that sends most."),
        Metric(overlap_name(sweep).capitalize(), "% of the communication", (Curve(lambda p: p.number("overlap")),),
               note="Communication that ran while the same rank computed; the rank with least." + _bounds(sweep)),
    ]  # fmt: skip


def overlap_name(sweep: Sweep) -> str:
    """`overlap`, where every transport told when messages arrived; else it is an upper bound, and is called so."""
    return "overlap, at most" if any(point.overlap_is_bound for point in sweep.ok) else "overlap"


def _bounds(sweep: Sweep) -> str:
    if overlap_name(sweep) == "overlap":
        return ""
    return " An upper bound: over gloo nobody learns when a message arrived that work hid. Exposed time is measured."


def predicted_ms(sweep: Sweep, point: Point) -> float | None:
    """What was predicted for the same passes as `Sweep.pass_ms`."""
    parts = [point.predicted(f"{name}_ms") for name in sweep.passes]
    return None if None in parts else sum(map(float, parts))


def comparable(sweep: Sweep) -> bool:
    """Whether predictions are near enough to be drawn beside what was measured; else they are of other machines."""
    ratios = [value / sweep.pass_ms(p) for p in sweep.ok if (value := predicted_ms(sweep, p)) is not None]
    return bool(ratios) and 1 / FAR <= median(ratios) <= FAR


def prediction_words(sweep: Sweep) -> str:
    """What the predictions are made for, in a sentence; empty if there are none."""
    made = {
        f"{point.predicted('cluster')} ({'calibrated' if point.predicted('calibrated') else 'not calibrated'})"
        for point in sweep.ok
        if point.predicted("cluster")
    }
    return f"Predictions are for: {'; '.join(sorted(made))}." if made else ""


def _mib(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / MIB

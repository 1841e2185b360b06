"""Pictures of training runs: loss curves laid over each other, and memory by rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ringattn.launch.outputs import save_picture

INK, QUIET, GRID = "#22303c", "#5b6b79", "#dfe4e8"
ALONE, SHARED, EXACT, REPLICATED = "#9ecae1", "#08519c", "#2e8b57", "#b8c2cc"


class CurveDistance(NamedTuple):
    """The relative differences of two loss curves, step by step, and the bound they must keep."""

    dtype: str
    differences: Sequence[float]
    bound: float


class Bars(NamedTuple):
    """Memory of the ranks of one run, in bytes: what every rank has anyway, and all of it."""

    title: str
    replicated_bytes: int
    total_bytes: Sequence[int]


def draw_losses(path: str | Path, curves: Mapping[str, Sequence[float]], agreements: Sequence[CurveDistance]) -> None:
    """Write a PNG: the first two loss curves over each other, and below them how far runs differ, on a log axis.

    A difference of exactly 0 has no place on a log axis; it is drawn at the bottom, as a hollow mark.
    """
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 6.8), height_ratios=(3, 2), layout="constrained"
    )
    styles = ({"color": ALONE, "linewidth": 6}, {"color": SHARED, "linewidth": 1.6})
    for (name, losses), style in zip(curves.items(), styles, strict=True):
        above.plot(range(1, len(losses) + 1), losses, label=name, solid_capstyle="round", **style)
    above.set_ylabel("loss, nats per byte")
    above.set_title("The same training run, in one process and shared by several", loc="left", color=INK)
    above.legend(frameon=False)
    lowest = _draw_agreements(below, agreements)
    highest = max(max(agreement.bound, *agreement.differences) for agreement in agreements)
    below.set(xlabel="step", ylabel="relative difference", ylim=(lowest / 2, highest * 10))
    below.xaxis.get_major_locator().set_params(integer=True)
    _finish(figure, [above, below], path)


def _draw_agreements(axes: Axes, agreements: Sequence[CurveDistance]) -> float:
    """Differences and their bounds; returns the height at which zeros are drawn."""
    positive = [value for agreement in agreements for value in agreement.differences if value > 0]
    floor = min(positive, default=1e-17) / 3
    axes.set_yscale("log")
    for agreement, color in zip(agreements, (SHARED, EXACT), strict=False):
        numbered = list(enumerate(agreement.differences, start=1))
        lines = [value or math.nan for _, value in numbered]
        axes.plot(range(1, len(lines) + 1), lines, "o-", color=color, markersize=4, linewidth=1, label=agreement.dtype)
        zeros = [step for step, value in numbered if value == 0]
        axes.scatter(zeros, [floor] * len(zeros), s=16, facecolors="white", edgecolors=color, zorder=3)
        axes.axhline(agreement.bound, color=color, linestyle=(0, (5, 4)), linewidth=1)
        axes.annotate(
            f"bound for {agreement.dtype}: {agreement.bound:.0e}",
            (0.0, agreement.bound), xycoords=axes.get_yaxis_transform(), xytext=(5, 3), textcoords="offset points",
            fontsize=8, color=color,
        )  # fmt: skip
    axes.scatter([], [], s=16, facecolors="white", edgecolors=QUIET, label="exactly equal")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.06), ncols=len(agreements) + 1)
    return floor


def draw_memory(path: str | Path, runs: Sequence[Bars], method: str) -> None:
    """Write a PNG: one bar per rank of each run, with the part that every rank has anyway set apart."""
    figure, axes = plt.subplots(figsize=(9, 4.6), layout="constrained")
    middles, place = [], 0.0
    for bars, color in zip(runs, (ALONE, SHARED), strict=True):
        places = [place + rank for rank in range(len(bars.total_bytes))]
        total = [size / 2**20 for size in bars.total_bytes]
        kept = bars.replicated_bytes / 2**20
        axes.bar(places, total, width=0.7, color=color)
        axes.bar(places, [min(kept, size) for size in total], width=0.7, color=REPLICATED)
        for x, height in zip(places, total, strict=True):
            axes.annotate(f"{height:.0f} MiB", (x, height), xytext=(0, 3), textcoords="offset points", ha="center")
        middles.append((sum(places) / len(places), bars.title))
        place = places[-1] + 2.0
    axes.bar([0], [0], color=REPLICATED, label="weights, gradients, optimizer: the same on every rank (computed)")
    axes.set_xticks(*zip(*middles, strict=True))
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("peak growth, MiB")
    axes.set_title("Memory of training, one bar per process", loc="left", color=INK)
    axes.legend(frameon=False, loc="upper right")
    figure.supxlabel(method, fontsize=8, color=QUIET)
    _finish(figure, [axes], path)


def _finish(figure: Figure, all_axes: Sequence[Axes], path: str | Path) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, labelcolor=INK)
    save_picture(figure, path, 150)
    plt.close(figure)

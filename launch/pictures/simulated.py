"""Pictures of simulations: curves over ranks, and what some ranks do in a pass.

Colors are Okabe and Ito's ("Color Universal Design", 2008), told apart by color-blind readers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from ringattn.core.span import COMPUTE, Span
from ringattn.launch.outputs import save_picture
from ringattn.launch.pictures.simulation import PASSES, Simulated

INK, QUIET, GRID = "#22303c", "#5b6b79", "#dfe4e8"
COLORS = {"strong": "#0072B2", "weak": "#D55E00"}
WORK, MESSAGES, WAITING = "#0072B2", "#C9CED3", "#D55E00"
BINS = 400
"""Stretches of a whole pass, each drawn with its mean."""
NEAR_STEPS = 6
"""Steps that are drawn one by one: as long as the first rank drawn takes for so many."""

MEASURES: tuple[tuple[str, str, Callable[[Simulated], float]], ...] = (
    ("time of a call", "s", lambda one: one.total_s),
    ("efficiency", "% of the kernel's rate", lambda one: 100 * one.efficiency),
    ("waiting, of the rank that waits most", "% of the time",
     lambda one: 100 * sum(each.waiting_s.max() for each in one.passes) / one.total_s),
    ("staging buffers, of the rank that holds most", "GiB", lambda one: one.held_bytes[2] / 2**30),
)  # fmt: skip
LOGARITHMIC = "s", "GiB"


def draw_curves(path: str | Path, curves: Mapping[str, Sequence[Simulated]], words: str) -> None:
    """Write a picture: four measures over the number of ranks; hollow: simulated by the plan of each rank."""
    figure, grid = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axes, (title, unit, value) in zip(grid.flat, MEASURES, strict=True):
        for scaling, points in curves.items():
            xs, ys = [one.ranks for one in points], [value(one) for one in points]
            if unit in LOGARITHMIC:  # where 0 has no place: one rank holds no buffers
                ys = [y or math.nan for y in ys]
            axes.plot(xs, ys, color=COLORS[scaling], linewidth=1.6, label=f"{scaling} scaling", zorder=2)
            faces = [COLORS[scaling] if one.classes else "white" for one in points]
            axes.scatter(xs, ys, s=26, color=faces, edgecolors=COLORS[scaling], zorder=3)
        axes.set_xscale("log", base=2)
        axes.set_title(title, loc="left", color=INK)
        axes.set(xlabel="ranks", ylabel=unit)
        if unit in LOGARITHMIC:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, max(1.0, 1.08 * axes.get_ylim()[1]))
        ranks = sorted({one.ranks for points in curves.values() for one in points})
        axes.set_xticks(ranks[:: -(-len(ranks) // 8)])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.minorticks_off()
        axes.grid(color=GRID, linewidth=0.8)
        _plain(axes)
    grid[0][0].legend(frameon=False)
    figure.suptitle(words, color=INK)
    figure.supxlabel("filled: simulated by classes of ranks; hollow: by the plan of each rank", fontsize=8, color=QUIET)
    save_picture(figure, path, 120)
    plt.close(figure)


def draw_point(path: str | Path, point: Simulated, words: str) -> None:
    """Write a picture: for some ranks the share of work over each pass, and below it the first steps one by one."""
    ranks = sorted(point.spans[0])
    height = 2.6 + 0.75 * len(ranks)
    figure, grid = plt.subplots(2, len(point.passes), figsize=(13, height), squeeze=False, layout="constrained")
    image = None
    for column, (one, spans) in enumerate(zip(point.passes, point.spans, strict=True)):
        above, below = grid[0][column], grid[1][column]
        shares = np.stack([work_shares(spans[rank], one.total_s * 1e6) for rank in ranks])
        image = above.imshow(
            100 * shares, aspect="auto", cmap="Blues", vmin=0, vmax=100, interpolation="nearest",
            extent=(0, one.total_s * 1e3, len(ranks) - 0.5, -0.5),
        )  # fmt: skip
        above.set_title(f"{PASSES[column]}, {one.total_s * 1e3:,.2f} ms: share of work", loc="left", color=INK)
        _draw_first_steps(below, [spans[rank] for rank in ranks])
        below.set_title("its first steps", loc="left", color=INK)
        for axes in (above, below):
            axes.set_yticks(range(len(ranks)), [f"rank {rank:,}" for rank in ranks])
            axes.set_xlabel("ms")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
            _plain(axes)
    assert image is not None
    figure.colorbar(image, ax=list(grid[0]), label="% of the time at work")
    handles = [Patch(color=WORK, label="work"), Patch(color=MESSAGES, label="messages beside it"),
               Patch(color=WAITING, label="waiting for messages")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{words}: {point.tokens:,} tokens on {point.ranks:,} ranks", color=INK)
    save_picture(figure, path, 120)
    plt.close(figure)


def work_shares(spans: Sequence[Span], total_us: float, bins: int = BINS) -> np.ndarray:
    """The share of each of `bins` equal stretches of a pass in which a rank works."""
    edges = np.linspace(0.0, total_us, bins + 1)
    # Work done before a moment grows evenly within a span; its differences between edges are the work between them.
    moments, done = [0.0], [0.0]
    for span in spans:
        if span.lane == COMPUTE:
            moments += [span.start_us, span.end_us]
            done += [done[-1], done[-1] + span.end_us - span.start_us]
    return np.diff(np.interp(edges, moments, done)) / (total_us / bins)


def _draw_first_steps(axes: Axes, ranks: Sequence[Sequence[Span]]) -> None:
    attends = [span for span in ranks[0] if span.name.endswith("attend")][:NEAR_STEPS]
    until = attends[-1].end_us if attends else 1.0
    for row, spans in enumerate(ranks):
        near = [span for span in spans if span.start_us < until]
        work = [(span.start_us / 1e3, (span.end_us - span.start_us) / 1e3) for span in near if span.lane == COMPUTE]
        messages = [(span.start_us / 1e3, (span.end_us - span.start_us) / 1e3) for span in near if span.lane != COMPUTE]
        axes.broken_barh([(0, until / 1e3)], (row - 0.38, 0.44), facecolor=WAITING, zorder=1)
        axes.broken_barh(work, (row - 0.38, 0.44), facecolor=WORK, edgecolor="white", linewidth=0.4, zorder=2)
        axes.broken_barh(messages, (row + 0.1, 0.26), facecolor=MESSAGES, edgecolor="white", linewidth=0.4, zorder=2)
    axes.set_xlim(0, until / 1e3)
    axes.set_ylim(len(ranks) - 0.5, -0.5)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelcolor=INK)
    axes.set_axisbelow(True)

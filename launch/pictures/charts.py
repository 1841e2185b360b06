"""The pictures of the commands: training runs, simulations, timelines, rows of dilated branches, and schedules.

Colors that carry meaning are those of Okabe and Ito ("Color Universal Design", 2008).
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from ringattn.core.geometry import StridedRange
from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.span import COMM, COMPUTE, Span, exposed
from ringattn.core.tiling import branch_tiles
from ringattn.errors import InputError
from ringattn.launch.folders import save_picture
from ringattn.launch.pictures.simulation import PASSES, Simulated
from ringattn.planner.simulate import duration
from ringattn.schedule.ops import Kind, Merge, Schedule, Step, Work
from ringattn.schedule.passes import is_on_received
from ringattn.schedule.text import busy_steps
from ringattn.schedule.text import spans as owners_text

if TYPE_CHECKING:  # they import torch, which a simulation does not need
    from ringattn.explain import Explanation
    from ringattn.launch.pictures.trace import ByRank, Track

INK, QUIET, GRID = "#22303c", "#5b6b79", "#dfe4e8"
BLUE, SKY, ORANGE, GREY = "#0072B2", "#56B4E9", "#D55E00", "#C9CED3"


def _tidy(axes: Axes, grid: Literal["x", "y", "both"] | None = None) -> None:
    """Hide the upper and the right spine, and draw a grid along `grid` (x, y or both)."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelcolor=INK)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=GRID, linewidth=0.8)


# --- training runs ----------------------------------------------------------------------------------------------------


ALONE, SHARED, EXACT, REPLICATED = "#9ecae1", "#08519c", "#2e8b57", "#b8c2cc"
ROOMY_BARS, MOST_LABELLED = 9, 40
"""Up to the first number of bars, each has room for its value and unit; up to the second, for its value."""


class CurveDistance(NamedTuple):
    """The relative difference of two loss curves at each step, and the upper bound of the differences."""

    dtype: str
    differences: Sequence[float]
    bound: float


class Bars(NamedTuple):
    """Memory of the ranks of one run, in bytes: the part that every rank replicates, and the total of each rank."""

    title: str
    replicated_bytes: int
    total_bytes: Sequence[int]


def draw_losses(path: str | Path, curves: Mapping[str, Sequence[float]], agreements: Sequence[CurveDistance]) -> None:
    """Write a PNG: the first two loss curves, and below them the relative differences of runs on a log axis.

    A log axis has no 0: a difference of exactly 0 is drawn at the bottom, as a hollow mark.
    """
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 6.8), height_ratios=(3, 2), layout="constrained"
    )
    styles = ({"color": ALONE, "linewidth": 6}, {"color": SHARED, "linewidth": 1.6})
    for (name, losses), style in zip(curves.items(), styles, strict=True):
        above.plot(range(1, len(losses) + 1), losses, label=name, solid_capstyle="round", **style)
    above.set_ylabel("loss, nats per byte")
    above.set_title("The same training run, in one process and in several", loc="left", color=INK)
    above.legend(frameon=False)
    lowest = _draw_agreements(below, agreements)
    highest = max(max(agreement.bound, *agreement.differences) for agreement in agreements)
    below.set(xlabel="step", ylabel="relative difference", ylim=(lowest / 2, highest * 10))
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes in (above, below):
        _tidy(axes, "y")
    save_picture(figure, path, 150)


def _draw_agreements(axes: Axes, agreements: Sequence[CurveDistance]) -> float:
    """Draw the differences and their bounds. Return the height at which zeros are drawn."""
    positive = [value for agreement in agreements for value in agreement.differences if value > 0]
    floor = min(positive, default=1e-17) / 3
    axes.set_yscale("log")
    for number, (agreement, color) in enumerate(zip(agreements, (SHARED, EXACT), strict=False)):
        numbered = list(enumerate(agreement.differences, start=1))
        lines = [value or math.nan for _, value in numbered]
        axes.plot(range(1, len(lines) + 1), lines, "o-", color=color, markersize=4, linewidth=1, label=agreement.dtype)
        zeros = [step for step, value in numbered if value == 0]
        axes.scatter(zeros, [floor] * len(zeros), s=16, facecolors="white", edgecolors=color, zorder=3)
        axes.axhline(agreement.bound, color=color, linestyle=(0, (5, 4)), linewidth=1)
        # Draw the label of the second bound below its line, because the differences of the first run are above it.
        axes.annotate(
            f"bound for {agreement.dtype}: {agreement.bound:.0e}",
            (0.0, agreement.bound), xycoords=axes.get_yaxis_transform(), xytext=(5, -3 if number else 3),
            textcoords="offset points", va="top" if number else "bottom", fontsize=8, color=color,
        )  # fmt: skip
    axes.scatter([], [], s=16, facecolors="white", edgecolors=QUIET, label="exactly equal")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.06), ncols=len(agreements) + 1)
    return floor


def draw_memory(path: str | Path, runs: Sequence[Bars], method: str) -> None:
    """Write a PNG with a bar for each rank of each run. The part of a bar that ranks replicate has its own color."""
    save_picture(memory_figure(runs, method), path, 150)


def memory_figure(runs: Sequence[Bars], method: str) -> Figure:
    """Return the picture that `draw_memory` writes."""
    figure, axes = plt.subplots(figsize=(9, 4.6), layout="constrained")
    count = sum(len(bars.total_bytes) for bars in runs)
    unit, size = " MiB" if count <= ROOMY_BARS else "", min(10.0, 200 / count)
    middles, first_x = [], 0.0
    for bars, color in zip(runs, (ALONE, SHARED), strict=True):
        xs = [first_x + rank for rank in range(len(bars.total_bytes))]
        total = [nbytes / 2**20 for nbytes in bars.total_bytes]
        replicated = bars.replicated_bytes / 2**20
        axes.bar(xs, total, width=0.7, color=color)
        axes.bar(xs, [min(replicated, height) for height in total], width=0.7, color=REPLICATED)
        for x, height in zip(xs, total, strict=True) if count <= MOST_LABELLED else ():
            axes.annotate(f"{height:.0f}{unit}", (x, height), xytext=(0, 3), textcoords="offset points", ha="center",
                          fontsize=size, color=INK)  # fmt: skip
        middles.append((sum(xs) / len(xs), bars.title))
        first_x = xs[-1] + 2.0
    axes.bar(
        [0], [0], color=REPLICATED, label="weights, gradients and optimizer state, the same on every rank (computed)"
    )
    axes.set_xticks(*zip(*middles, strict=True))
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("peak growth, MiB", color=INK)
    axes.set_ylim(0, 1.22 * axes.get_ylim()[1])  # room for the legend above the bars
    most = " and ".join(f"{max(bars.total_bytes) / 2**20:.0f} MiB with {bars.title}" for bars in runs)
    axes.set_title(f"Memory of training, one bar per process: at most {most}", loc="left", color=INK, fontsize=11)
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    figure.supxlabel(method, fontsize=8, color=QUIET)
    _tidy(axes, "y")
    return figure


# --- simulations ------------------------------------------------------------------------------------------------------


COLORS = {"strong": BLUE, "weak": ORANGE}
WORK, MESSAGES, WAITING = BLUE, GREY, ORANGE
BINS = 400
"""Equal intervals of a pass; each is drawn with the mean of its time."""
MOST_MS = 10_000.0
"""An axis of this many milliseconds or more counts seconds."""
NEAR_STEPS = 6
"""The lower panels show the time that the first drawn rank takes for this number of steps."""

MEASURES: tuple[tuple[str, str, Callable[[Simulated], float]], ...] = (
    ("time of a call", "s", lambda point: point.total_s),
    ("efficiency", "ideal / simulated time, %", lambda point: 100 * point.efficiency),
    ("sent, largest value of any rank", "GiB",
     lambda point: sum(times.sent_bytes.max() for times in point.passes) / 2**30),
    ("waiting, largest value of any rank", "% of the time",
     lambda point: 100 * sum(times.waiting_s.max() for times in point.passes) / point.total_s),
    ("exposed messages, largest value of any rank", "% of the time",
     lambda point: 100 * sum(times.exposed_s.max() for times in point.passes) / point.total_s),
    ("staging buffers, largest value of any rank", "GiB", lambda point: point.held_bytes[2] / 2**30),
)  # fmt: skip
LOGARITHMIC = "s", "GiB"
MOST_RATIO = 200
"""A logarithmic axis whose ends have a smaller ratio has ticks also at 2 and 5 times each power of ten."""
MOST_PLAIN = 1e5
"""A logarithmic axis that stays between 1 / `MOST_PLAIN` and `MOST_PLAIN` writes its ticks without powers of ten."""


def draw_curves(path: str | Path, curves: Mapping[str, Sequence[Simulated]], title: str) -> None:
    """Write a picture of `MEASURES` over the number of ranks. Points simulated with each rank's plan are hollow."""
    save_picture(curves_figure(curves, title), path, 120)


def curves_figure(curves: Mapping[str, Sequence[Simulated]], title: str) -> Figure:
    """Return the picture that `draw_curves` writes."""
    figure, grid = plt.subplots(2, 3, figsize=(14, 7.2), layout="constrained")
    ranks = sorted({point.ranks for points in curves.values() for point in points})
    for axes, (name, unit, value) in zip(grid.flat, MEASURES, strict=True):
        for scaling, points in curves.items():
            xs, ys = [point.ranks for point in points], [value(point) for point in points]
            if unit in LOGARITHMIC:  # a log axis has no 0, and a single rank has no staging buffers
                ys = [y or math.nan for y in ys]
            axes.plot(xs, ys, color=COLORS[scaling], linewidth=1.6, label=f"{scaling} scaling", zorder=2)
            faces = [COLORS[scaling] if point.classes else "white" for point in points]
            axes.scatter(xs, ys, s=26, color=faces, edgecolors=COLORS[scaling], zorder=3)
        axes.set_xscale("log", base=2)
        axes.set_title(name, loc="left", color=INK, fontsize=11)
        axes.set_xlabel("ranks", color=INK)
        axes.set_ylabel(unit, color=INK)
        if unit in LOGARITHMIC:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            powers = LogLocator(subs=(1, 2, 5) if high < MOST_RATIO * low else (1,), numticks=8)
            axes.yaxis.set_major_locator(MaxNLocator(6) if high < 10 * low else powers)
            if high < MOST_PLAIN and low > 1 / MOST_PLAIN:
                axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
        else:
            axes.set_ylim(0, max(1.0, 1.08 * axes.get_ylim()[1]))
        axes.set_xlim(ranks[0] / 1.4, ranks[-1] * 1.4)
        axes.set_xticks(ranks[:: -(-len(ranks) // 8)])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.minorticks_off()
        _tidy(axes, "both")
    handles = [Line2D([], [], color=COLORS[scaling], linewidth=1.6, label=f"{scaling} scaling") for scaling in curves]
    for classes, face, how in ((True, QUIET, "by classes of ranks"), (False, "white", "by the plan of each rank")):
        if any(point.classes == classes for points in curves.values() for point in points):
            handles.append(Line2D([], [], color=QUIET, marker="o", linestyle="none", markerfacecolor=face,
                                  label=f"simulated {how}"))  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, labelcolor=INK)
    figure.suptitle(title, color=INK, fontsize=12)
    return figure


def draw_point(path: str | Path, point: Simulated, title: str, names: Mapping[int, str]) -> None:
    """Write a picture of one number of ranks: how much the traced ranks work over each pass, and their first steps.

    `names` has the labels of the disturbed ranks.
    """
    save_picture(point_figure(point, title, names), path, 120)


def point_figure(point: Simulated, title: str, names: Mapping[int, str]) -> Figure:
    """Return the picture that `draw_point` writes. Both passes have the same time scale."""
    ranks = sorted(point.spans[0])
    labels = [names.get(rank, f"rank {rank:,}") for rank in ranks]
    totals_ms = [times.total_s * 1e3 for times in point.passes]
    shown_ms = same_scale(totals_ms)
    near = max(_first_steps_ms(spans[ranks[0]]) / shown for spans, shown in zip(point.spans, shown_ms, strict=True))
    near = min(near, 1.0)
    figure, grid = plt.subplots(
        2, len(point.passes), figsize=(13, 3.4 + 0.75 * len(ranks)), squeeze=False, layout="constrained",
        width_ratios=shown_ms, sharey=True,
    )  # fmt: skip
    image = None
    for column, (total_ms, spans) in enumerate(zip(totals_ms, point.spans, strict=True)):
        above, below = grid[0][column], grid[1][column]
        shares = np.stack([work_shares(spans[rank], total_ms * 1e3) for rank in ranks])
        image = above.imshow(
            100 * shares, aspect="auto", cmap="Blues", vmin=0, vmax=100, interpolation="nearest",
            extent=(0, total_ms, len(ranks) - 0.5, -0.5),
        )  # fmt: skip
        above.set_title(f"{PASSES[column]}, {duration(total_ms / 1e3)}", loc="left", color=INK, fontsize=11)
        until_ms = min(total_ms, near * shown_ms[column])
        _draw_first_steps(below, [spans[rank] for rank in ranks], until_ms)
        part = f"the first {duration(until_ms / 1e3)} of it" if until_ms < total_ms else "its steps"
        below.set_title(part, loc="left", color=INK, fontsize=11)
        for axes, row_ms in ((above, shown_ms), (below, [near * shown for shown in shown_ms])):
            ticks = MaxNLocator(TICKS, steps=(1, 2, 5, 10)).tick_values(0, max(row_ms))
            axes.set_xlim(0, row_ms[column])
            axes.set_xticks([tick for tick in ticks if tick <= row_ms[column]])
            axes.set_yticks(range(len(ranks)), labels)
            unit, size = ("s", 1e3) if max(row_ms) >= MOST_MS else ("ms", 1.0)
            axes.set_xlabel(unit, color=INK)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _, size=size: f"{x / size:,.10g}"))
            _tidy(axes)
    assert image is not None
    fraction = 0.4 / len(ranks)  # the height of the upper panels grows with the number of ranks
    bar = figure.colorbar(image, ax=list(grid[0]), location="bottom", fraction=fraction, aspect=60, shrink=0.4)
    bar.set_label("% of the time computing", color=INK)
    handles = [Patch(color=WORK, label="work"), Patch(color=MESSAGES, label="messages in flight"),
               Patch(color=WAITING, label="waiting")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, labelcolor=INK)
    figure.suptitle(title, color=INK, fontsize=12)
    return figure


def work_shares(spans: Sequence[Span], total_us: float, bins: int = BINS) -> np.ndarray:
    """Return the share of each of `bins` equal intervals of a pass in which a rank works."""
    edges = np.linspace(0.0, total_us, bins + 1)
    # The cumulative work grows linearly within a span. Its difference between two edges is the work of their interval.
    moments, done = [0.0], [0.0]
    for span in spans:
        if span.lane == COMPUTE:
            moments += [span.start_us, span.end_us]
            done += [done[-1], done[-1] + span.end_us - span.start_us]
    return np.diff(np.interp(edges, moments, done)) / (total_us / bins)


def _first_steps_ms(spans: Sequence[Span]) -> float:
    """Return the milliseconds after which a rank has computed its first NEAR_STEPS steps; infinity without attention.

    A layer with a state has few steps, which are all drawn.
    """
    attends = [span for span in spans if span.name.endswith("attend")][:NEAR_STEPS]
    return attends[-1].end_us / 1e3 if attends else math.inf


def _draw_first_steps(axes: Axes, ranks: Sequence[Sequence[Span]], until_ms: float) -> None:
    """Draw all spans that begin before `until_ms`, a row for each rank. Time without work is drawn as waiting."""
    for row, spans in enumerate(ranks):
        near = [span for span in spans if span.start_us < until_ms * 1e3]
        work = [(span.start_us / 1e3, (span.end_us - span.start_us) / 1e3) for span in near if span.lane == COMPUTE]
        messages = [(span.start_us / 1e3, (span.end_us - span.start_us) / 1e3) for span in near if span.lane != COMPUTE]
        axes.broken_barh([(0, until_ms)], (row - 0.38, 0.44), facecolor=WAITING, zorder=1)
        axes.broken_barh(work, (row - 0.38, 0.44), facecolor=WORK, edgecolor="white", linewidth=0.4, zorder=2)
        axes.broken_barh(messages, (row + 0.1, 0.26), facecolor=MESSAGES, edgecolor="white", linewidth=0.4, zorder=2)
    axes.set_ylim(len(ranks) - 0.5, -0.5)


# --- timelines --------------------------------------------------------------------------------------------------------


ATTEND, OTHER, EXPOSED = BLUE, SKY, ORANGE
BAND = "#f4f6f8"
FAINT = 0.45
"""The opacity of predicted bars."""
LEAST_SHARE = 0.2
"""The panel of a pass shows at least this share of the time of all passes."""
MOST_NUMBERS = 75
"""The number of step numbers that fit next to each other."""
TICKS = 10
"""The axis of the longest pass has at most this number of intervals."""
NOTE_WIDTH = 170
"""Characters of a line below the panels."""
FEW_RANKS = 8
"""Up to this number of ranks, bars have room for the numbers of their steps."""


def draw_timeline(
    path: str | Path, tracks: Sequence[Track], predicted: Sequence[ByRank] = (), predictor: str = ""
) -> None:
    """Write a PNG of recorded passes, and below each rank its predicted spans.

    `predicted` has the predicted spans by rank for each pass of the tracks. `predictor` names the predicted machines.
    """
    save_picture(timeline_figure(tracks, predicted, predictor), path, 150)


def timeline_figure(tracks: Sequence[Track], predicted: Sequence[ByRank] = (), predictor: str = "") -> Figure:
    """Return the picture of `draw_timeline`: a panel for each pass and a row for each rank, all on one time scale."""
    ranks, passes = len(tracks), tracks[0].passes
    begins = [min(track.passes[number].start_us for track in tracks) for number in range(len(passes))]
    lasts_ms = [_last_us(tracks, predicted, number, begin) / 1e3 for number, begin in enumerate(begins)]
    shown_ms = same_scale(lasts_ms)
    height = 2.1 + ranks * ((0.62 if predicted else 0.42) if ranks > FEW_RANKS else (0.95 if predicted else 0.65))
    figure, axes = plt.subplots(
        1, len(passes), figsize=(13, height), squeeze=False, width_ratios=shown_ms, sharey=True, layout="constrained"
    )
    ticks = MaxNLocator(TICKS, steps=(1, 2, 5, 10)).tick_values(0, max(shown_ms))
    numbered_us = sum(shown_ms) * 1e3 / MOST_NUMBERS if ranks <= FEW_RANKS else math.inf
    for number, (ax, begin) in enumerate(zip(axes[0], begins, strict=True)):
        for track in tracks:
            recorded = track.passes[number]
            predicted_spans = predicted[number][track.rank] if predicted else ()
            _draw_rank(ax, track.rank, recorded.spans, recorded.start_us - begin, predicted_spans, numbered_us)
            ax.annotate(
                f"{recorded.exposed_us / 1e3:.2f} ms", (1.0, track.rank), xycoords=("axes fraction", "data"),
                xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, color=EXPOSED,
            )  # fmt: skip
        ax.set_xticks([tick for tick in ticks if tick <= shown_ms[number]])
        _finish(ax, passes[number].name, shown_ms[number], ranks)
    axes[0][0].set_yticks(range(ranks), [f"rank {track.rank}" for track in tracks])
    _describe(figure, tracks, bool(predicted), predictor)
    return figure


def _last_us(tracks: Sequence[Track], predicted: Sequence[ByRank], number: int, begin_us: float) -> float:
    """Return the microseconds after `begin_us` at which the last rank ends pass `number`, measured or predicted."""
    measured = [track.passes[number].end_us - begin_us for track in tracks]
    expected = [span.end_us for spans in predicted[number] for span in spans] if predicted else []
    return max(0.0, *measured, *expected)


def same_scale(lasts_ms: Sequence[float]) -> list[float]:
    """Return the milliseconds that the panel of each pass shows. The width of a panel is proportional to them.

    The panel of a short pass shows more time than the pass took, because it would be too narrow otherwise.
    """
    whole = sum(lasts_ms) or 1.0
    return [1.005 * max(last, LEAST_SHARE * whole) for last in lasts_ms]


def _draw_rank(
    ax: Axes, rank: int, spans: Sequence[Span], later_us: float, predicted: Sequence[Span], numbered_us: float
) -> None:
    """Draw the measured spans of a rank and below them its predicted spans.

    The measured spans of attention that last `numbered_us` or longer are labelled with their step.
    """
    if rank % 2:
        ax.axhspan(rank - 0.5, rank + 0.5, color=BAND, zorder=0)
    if not predicted:
        _draw_spans(ax, spans, later_us, top=rank - 0.4, lane=0.4, strong=True, numbered_us=numbered_us)
        return
    _draw_spans(ax, spans, later_us, top=rank - 0.42, lane=0.25, strong=True, numbered_us=numbered_us)
    _draw_spans(ax, predicted, 0.0, top=rank + 0.14, lane=0.14, strong=False, numbered_us=math.inf)


def _draw_spans(
    ax: Axes, spans: Sequence[Span], later_us: float, top: float, lane: float, strong: bool, numbered_us: float
) -> None:
    """Draw the work as bars of height `lane` from `top` on, and the messages below it, `later_us` to the right.

    If `strong` is False, the bars are faint. Attention that lasts `numbered_us` or longer is labelled with its step.
    """
    alpha = 1.0 if strong else FAINT

    def draw_bars(intervals: list[tuple[float, float]], y: float, color: str, hatch: str | None = None) -> None:
        ax.broken_barh(
            [((start + later_us) / 1e3, (end - start) / 1e3) for start, end in intervals], (y, lane * 0.94),
            facecolor=color, edgecolor="white", linewidth=0.4, alpha=alpha, hatch=hatch, zorder=2,
        )  # fmt: skip

    for attends, color in ((True, ATTEND), (False, OTHER)):
        work = (span for span in spans if span.lane == COMPUTE and span.name.endswith("attend") == attends)
        draw_bars([(span.start_us, span.end_us) for span in work], top, color)
    draw_bars([(span.start_us, span.end_us) for span in spans if span.lane == COMM], top + lane, MESSAGES)
    draw_bars(exposed(spans), top + lane, EXPOSED, "//////")
    for span in spans:
        if span.name.endswith("attend") and span.end_us - span.start_us >= numbered_us:
            middle = (span.start_us + span.end_us) / 2 + later_us
            ax.text(middle / 1e3, top + lane * 0.47, span.name.split()[1], ha="center", va="center", fontsize=8,
                    color="white", zorder=3)  # fmt: skip


def _finish(ax: Axes, title: str, shown_ms: float, ranks: int) -> None:
    ax.set(xlim=(0, shown_ms), ylim=(ranks - 0.5, -0.5), xlabel="milliseconds since the start of the pass")
    ax.set_title(title, loc="left", color=INK, fontsize=11)
    ax.annotate("exposed", (1.0, 1.0), xycoords="axes fraction", xytext=(6, 4), textcoords="offset points", fontsize=8,
                color=EXPOSED)  # fmt: skip
    _tidy(ax, "x")
    ax.tick_params(length=0)
    ax.spines["left"].set_visible(False)


def _describe(figure: plt.Figure, tracks: Sequence[Track], predicted: bool, predictor: str) -> None:
    """Draw the title and the legend."""
    least = min(track.overlap for track in tracks)
    sign = "" if all(track.arrivals_known for track in tracks) else "at most "
    over = f", over {tracks[0].transport}" if tracks[0].transport else ""
    unsure_us = max(track.uncertainty_us for track in tracks)
    aligned = f"; clocks of the ranks agree within {unsure_us:.0f} us" if unsure_us else ""
    figure.suptitle(
        f"Timeline of {len(tracks)} ranks{over}: lowest share of hidden communication {sign}{least:.1%}{aligned}",
        x=0.01, ha="left", color=INK, fontsize=12.5,
    )  # fmt: skip
    handles = [
        Patch(facecolor=ATTEND, label="attention" + (", with its step" if len(tracks) <= FEW_RANKS else "")),
        Patch(facecolor=OTHER, label="packing, merging"),
        Patch(facecolor=MESSAGES, label="messages in flight" + (", at most" if sign else "")),
        Patch(facecolor=EXPOSED, edgecolor="white", hatch="//////", label="exposed: messages only, no computation"),
    ]
    if predicted:
        handles.append(Patch(facecolor=ATTEND, alpha=FAINT, label="pale, below: predicted"))
    legend = figure.legend(
        handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8.5, labelcolor=INK,
        title=textwrap.fill(f"predicted for {predictor}", NOTE_WIDTH) if predicted and predictor else None,
        title_fontsize=8.5, alignment="left",
    )  # fmt: skip
    legend.get_title().set_color(QUIET)


# --- rows of dilated branches -----------------------------------------------------------------------------------------


EMPTY = "#f4f6f7"
ROWS_DPI = 120
COLUMNS = 1024
"""The largest number of bins. A bin of positions is colored if any of its positions is read or sent."""


class Rows(NamedTuple):
    """The rows that one rank reads, and the rows that it sends, for one branch, by bin of positions.

    The value of a bin is 1 plus the rank that owns its rows, or 0 if no row of the bin is read or sent.
    """

    read: np.ndarray
    sent: np.ndarray


def rows_of(problem: Problem, branch: Branch, rank: int, width: int = 1) -> Rows:
    """Return the rows of a branch that `rank` reads, local rows included, and its local rows that other ranks read.

    A bin of `width` positions has the largest value of its positions.
    """
    read, sent = (np.zeros(-(-problem.kv_layout.length // width), np.int64) for _ in range(2))
    for reader in range(problem.world_size):
        for (owner, _, _), table in branch_tiles(problem, branch, reader, by_segment=False).items():
            for tile in table if rank in (reader, owner) else ():
                _mark(read if reader == rank else sent, tile.k.positions, width, owner + 1)
    return Rows(read, sent)


def _mark(line: np.ndarray, positions: StridedRange, width: int, value: int) -> None:
    """Set the bins of these positions to `value`, unless their value is larger."""
    if positions.stride <= width:  # each bin from the first to the last has a position
        bins: slice | np.ndarray = slice(positions.start // width, positions.last // width + 1)
    else:
        bins = np.arange(positions.start, positions.stop, positions.stride) // width
    line[bins] = np.maximum(line[bins], value)


def _whole_pixels(figure: Figure, axes: Sequence[Axes], bins: int) -> None:
    """Resize the figure so that each bin has the same whole number of pixels. Otherwise the widths of bins differ."""
    box = axes[0].get_position()
    pixels = figure.get_figwidth() * ROWS_DPI
    bin_pixels = max(1, int(box.width * pixels / bins))
    left, right = round(box.x0 * pixels), round((1 - box.x1) * pixels)
    new_pixels = left + bin_pixels * bins + right
    figure.set_figwidth(new_pixels / ROWS_DPI)
    for ax in axes:
        box = ax.get_position()
        ax.set_position((left / new_pixels, box.y0, bin_pixels * bins / new_pixels, box.height))


def branches_of(problem: Problem, head: int) -> list[Branch]:
    """Return the branches of the mask that apply to one query head."""
    branches = problem.mask.branches
    return [branch for branch in branches if branch.heads is None or branch.heads.start <= head < branch.heads.stop]


def bin_width(problem: Problem) -> int:
    """Return the number of positions in a bin, for at most about `COLUMNS` bins.

    Each dilation rate is at most this width or a multiple of it, so that the rows of a branch look evenly spaced.
    """
    rates = {branch.dilation for branch in problem.mask.branches}
    least = max(1, -(-problem.kv_layout.length // COLUMNS))
    return next(width for width in range(least, max(least, *rates) + 1)
                if all(rate <= width or rate % width == 0 for rate in rates))  # fmt: skip


def draw_rows(explanation: Explanation, path: str | Path, head: int = 0) -> None:
    """Write a PNG with a panel for each rank, and in it a line of read and a line of sent rows for each branch.

    Raises `InputError` if no branch is dilated.
    """
    problem = explanation.problem
    branches, ranks = branches_of(problem, head), problem.world_size
    if all(branch.dilation == 1 for branch in problem.mask.branches):
        raise InputError("rows_picture: needs dilated branches; give segment_lengths= and dilation_rates=")
    of_ranks = plt.get_cmap("tab10" if ranks <= 10 else "tab20")
    colors = ListedColormap([EMPTY, *(to_hex(of_ranks(rank % 20)) for rank in range(ranks))])
    figure, axes = plt.subplots(ranks, 1, figsize=(13, 1.1 + ranks * (0.45 + 0.42 * len(branches))), squeeze=False)
    labels = [f"w={branch.rectangles.longest} r={branch.dilation} {what}"
              for branch in branches for what in ("reads", "sends")]  # fmt: skip
    width = bin_width(problem)
    bins = -(-problem.kv_layout.length // width)
    for rank, ax in enumerate(axes[:, 0]):
        lines = [line for branch in branches for line in rows_of(problem, branch, rank, width)]
        ax.imshow(np.stack(lines), aspect="auto", interpolation="nearest", cmap=colors, vmin=0, vmax=ranks,
                  extent=(0, bins * width, len(lines) - 0.5, -0.5))  # fmt: skip
        ax.hlines(np.arange(len(lines) - 1) + 0.5, 0, bins * width, color="white", linewidth=2)
        ax.set_yticks(range(len(labels)), labels, fontsize=7, color=INK)
        ax.set_title(f"rank {rank}", loc="left", fontsize=9, color=INK)
        ax.tick_params(length=0)
        if rank < ranks - 1:
            ax.set_xticks([])
    axes[-1, 0].set_xlabel("position", color=INK)
    figure.suptitle(f"Rows of head {head} that each rank reads and sends, {problem.q_layout.name} layout", color=INK)
    owners = [Patch(facecolor=colors(owner + 1), label=f"rank {owner}'s") for owner in range(min(ranks, 10))]
    figure.legend(handles=owners, loc="lower center", ncols=len(owners), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 0.99))
    _whole_pixels(figure, list(axes[:, 0]), bins)
    save_picture(figure, path, ROWS_DPI)


# --- schedules --------------------------------------------------------------------------------------------------------


FAINT_INK, NEUTRAL = "#7a8894", "#eef1f4"
NAMES = {Kind.Q: "Q", Kind.KV: "KV", Kind.OUT: "OUT", Kind.GRAD_OUT: "dOUT", Kind.DQ: "dQ", Kind.DKV: "dKV"}
TRAVELS = {  # the color and the legend text of an arrow, by the kind of block that it carries
    Kind.KV: ("#5b6b79", "K and V"), Kind.Q: ("#0072b2", "Q"), Kind.OUT: ("#009e73", "OUT and its softmax sums"),
    Kind.GRAD_OUT: ("#b8860b", "dOUT"), Kind.DQ: ("#8e44ad", "dQ"), Kind.DKV: ("#c0392b", "dK and dV"),
}  # fmt: skip
BOX_WIDTH, BOX_HEIGHT = 0.72, 0.52
PALE = 0.58
"""The share of white in the colors of more than 8 ranks."""
FONT, LEAST_FONT, LETTERS = 9.0, 5.5, 11
"""The usual and the least font size of a label, in points, and the letters that fit into a box at the usual size."""


def draw_schedule(explanation: Explanation, path: str | Path) -> None:
    """Write a PNG of the forward schedule and, if it was explained, the backward schedule."""
    figure = schedule_figure(explanation)
    save_picture(figure, path, 150)


def schedule_figure(explanation: Explanation) -> Figure:
    """Return the picture that `draw_schedule` writes."""
    schedules = [("forward", explanation.forward)]
    if explanation.backward is not None:
        schedules.append(("backward", explanation.backward))
    ranks = explanation.problem.world_size
    passes = [(title, schedule, drawn_rows(schedule)) for title, schedule in schedules]
    rows = max(len(each) for _, _, each in passes)
    size = (1.5 + max(1.45 * ranks * len(passes), 6.0), 2.1 + 0.82 * rows)
    figure, axes = plt.subplots(1, len(passes), figsize=size, squeeze=False)
    for ax, (title, schedule, steps) in zip(axes[0], passes, strict=True):
        _draw_pass(ax, title, schedule, steps, rows)
    problem = explanation.problem
    figure.suptitle(
        f"{explanation.schedule} schedule, {problem.q_layout.name} layout, {problem.q_layout.length} tokens on "
        f"{ranks} ranks:\n{sum(explanation.bytes_sent) / 1e6:.3g} MB sent, balance {explanation.balance:.2f}",
        color=INK, fontsize=12,
    )  # fmt: skip
    adds = "; + gradients that it adds" if len(passes) > 1 else ""
    box = Patch(facecolor=_color(0, ranks), label=f"box: the K and V that a rank attends to{adds}")
    handles = [box, *_arrow_legend(schedule for _, schedule in schedules)]
    if len(passes) > 1 and rows - len(passes[0][2]) >= 2:  # below the shorter forward pass
        axes[0][0].legend(handles=handles, loc="lower center", frameon=False, fontsize=9)
        figure.tight_layout()
    else:
        figure.legend(handles=handles, loc="lower center", ncols=2 if size[0] < 9 else 4, frameon=False, fontsize=9)
        figure.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    return figure


def _arrow_legend(schedules: Iterable[Schedule]) -> list[Line2D]:
    """Return a legend entry for each kind of block that is sent."""
    carried = {copy.block.kind for schedule in schedules for step in schedule.steps for copy in step.copies}
    return [Line2D([], [], color=color, marker=">", label=f"arrow: {content}")
            for kind, (color, content) in TRAVELS.items() if kind in carried]  # fmt: skip


def drawn_rows(schedule: Schedule) -> list[Step]:
    """Return the rows of the picture: the steps of the schedule without idle steps.

    A step that only merges received blocks is joined to the row after it, except at the end of the pass.
    """
    rows: list[Step] = []
    added: tuple[Work, ...] = ()
    for number in busy_steps(schedule):
        step = schedule.steps[number]
        if not step.copies and all(isinstance(item, Merge) for item in step.work):
            added += step.work
        else:
            rows.append(step._replace(work=(*step.work, *added)))
            added = ()
    return [*rows, Step((), added)] if added else rows


def _draw_pass(ax: Axes, title: str, schedule: Schedule, rows: Sequence[Step], height: int) -> None:
    ranks = schedule.problem.world_size
    keys = Counter((item.rank, item.kv) for step in rows for item in step.work if not isinstance(item, Merge)
                   and not is_on_received(item))  # fmt: skip
    parts = {block for block, count in keys.items() if count > 1}
    for y, step in enumerate(rows):
        for rank in range(ranks):
            work = [item for item in step.work if item.rank == rank]
            sends = any(copy.src == rank for copy in step.copies)
            if work or sends:
                is_part = any(not isinstance(item, Merge) and (rank, item.kv) in parts for item in work)
                _box(ax, rank, y, work, ranks, is_part)
        kinds = sorted({copy.block.kind for copy in step.copies}, key=list(TRAVELS).index)
        for copy in step.copies:
            shift = 0.14 * (kinds.index(copy.block.kind) - (len(kinds) - 1) / 2)
            _arrow(ax, (copy.src + shift, y), (copy.dst + shift, y + 1), TRAVELS[copy.block.kind][0])
    ax.set_xlim(-0.6, ranks - 0.4)
    ax.set_ylim(height - 0.3, -0.6)
    ax.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], color=INK)
    names = [f"step {y}" for y in range(len(rows))]
    if rows and not rows[-1].copies and all(isinstance(item, Merge) for item in rows[-1].work):
        names[-1] = "end"
    ax.set_yticks(range(len(rows)), names, color=INK)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.set_title(title, color=INK, pad=18, fontsize=12)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _box(ax: Axes, rank: int, y: int, work: Sequence[Work], ranks: int, is_part: bool = False) -> None:
    """Draw the work of a rank in a step as a box, whose center is at height `y`.

    If `is_part`, only half of the box is filled, because another step attends to the rest of the block.
    """
    owners = {item.kv.owner for item in work if not isinstance(item, Merge)}
    color = _color(min(owners), ranks) if len(owners) == 1 else NEUTRAL
    left, bottom = rank - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
    box = FancyBboxPatch(
        (left, bottom), BOX_WIDTH, BOX_HEIGHT, boxstyle="round,pad=0.02,rounding_size=0.08",
        facecolor=color if work and not is_part else "white", edgecolor=INK if work else FAINT_INK, linewidth=0.8,
        linestyle="-" if work else (0, (3, 3)), zorder=3,
    )  # fmt: skip
    ax.add_patch(box)
    if is_part:
        half = Rectangle(
            (left - 0.02, bottom - 0.02), BOX_WIDTH / 2 + 0.02, BOX_HEIGHT + 0.04, color=color, zorder=3, lw=0
        )
        half.set_clip_path(box)
        ax.add_patch(half)
    lines = label_of(work)
    if is_part:
        lines[0] = f"part of {lines[0]}"
    size = max(LEAST_FONT, FONT * min(1.0, LETTERS / max(map(len, lines)), 2 / len(lines)))
    color = INK if work else FAINT_INK
    ax.text(rank, y, "\n".join(lines), ha="center", va="center", fontsize=size, color=color, zorder=4, linespacing=1.1)


def label_of(work: Sequence[Work]) -> list[str]:
    """Return the text lines of a box: the owners of the keys and queries of the step, and the merged blocks."""
    attends = [item for item in work if not isinstance(item, Merge)]
    lines = []
    if kv_owners := {item.kv.owner for item in attends if not is_on_received(item)}:
        lines.append(f"KV{owners_text(kv_owners)}")
    if received := [item for item in attends if is_on_received(item)]:
        q_owners, kv_owners = ({getattr(item, side).owner for item in received} for side in ("q", "kv"))
        lines.append(f"Q{owners_text(q_owners)} × KV{owners_text(kv_owners)}")
    merged: dict[Kind, set[int]] = {}
    for item in work:
        if isinstance(item, Merge):
            merged.setdefault(item.into.kind, set()).add(item.into.owner)
    lines += [f"+ {NAMES[kind]}{owners_text(owners)}" for kind, owners in merged.items()]
    return lines or ["only sends"]


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    ax.add_patch(
        FancyArrowPatch(
            (start[0], start[1] + BOX_HEIGHT / 2), (end[0], end[1] - BOX_HEIGHT / 2),
            arrowstyle="-|>", mutation_scale=9, color=color, linewidth=1.1, alpha=0.75, zorder=2,
            connectionstyle="arc3,rad=0.0",
        )
    )  # fmt: skip


def _color(owner: int, ranks: int) -> Any:
    """Return the color of a rank's keys and values, light enough for dark text."""
    if ranks <= 8:
        return plt.get_cmap("Set2")(owner % 8)
    red, green, blue, _ = plt.get_cmap("viridis")(owner / ranks)
    return tuple(PALE + (1 - PALE) * part for part in (red, green, blue))

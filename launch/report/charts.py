"""The charts of a report: each one an SVG that lies inside the page and takes the page's colors of ink.

Guarantees: lines are told apart by color and by marker; the colors are those of Okabe and Ito, "Color universal design"
(2008), without black and yellow, which vanish on a dark or a light page; every axis names its unit; a prediction is
dashed and hollow.
Not covered: pages, tables, what the figures mean (`report_metrics`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ringattn.launch.report.metrics import Curve, Metric, metrics_of
from ringattn.launch.report.points import Panel, Series, Sweep, scaling

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"))
"""Of each line: matplotlib's name, and the same form as a character for the legend."""
INK = "#0badf0"
"""Stands for the page's own color of text: becomes `currentColor` in the SVG."""
SIZE_INCHES = (4.4, 2.9)


class Chart(NamedTuple):
    """A picture with what it shows in words; `svg` is an element for a page of HTML."""

    title: str
    note: str
    svg: str


def charts_of(sweep: Sweep, panel: Panel) -> list[Chart]:
    """The charts of one panel, without those that have nothing to show."""
    charts = [_ratio(sweep, panel, "speed-up"), _ratio(sweep, panel, "efficiency")] if panel.view.ratio else []
    draw = _lines if panel.view.axis else _bars
    charts += [draw(panel, metric) for metric in metrics_of(sweep)]
    return [chart for chart in charts if chart is not None]


def _ratio(sweep: Sweep, panel: Panel, what: str) -> Chart | None:
    """Speed-up or efficiency of each series against its own smallest number of ranks."""
    figure, axes = _figure("ranks", "times" if what == "speed-up" else "% of perfect")
    xs: set[int] = set()
    for number, (_, series) in enumerate(panel.lines):
        values = [one and getattr(one, what.replace("-", "_")) for one in scaling(sweep, series)]
        xs |= set(_draw(axes, number, series, values, Curve(lambda _: None)))
    if not xs:
        plt.close(figure)
        return None
    ends = [min(xs), max(xs)]
    _aim(axes, ends, ends if what == "speed-up" else [1.0, 1.0])
    _ticks(axes, xs)
    if what == "speed-up":
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    else:
        axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    rate = "" if panel.view.name == "strong" else " By the rate of work (pairs that the mask keeps per second)."
    note = f"Against the fewest ranks of the same series, which count as perfect; dotted: perfect.{rate}"
    return _chart(figure, what.capitalize(), note)


def _lines(panel: Panel, metric: Metric) -> Chart | None:
    figure, axes = _figure(panel.view.axis, metric.unit)
    xs: set[int] = set()
    for number, (_, series) in enumerate(panel.lines):
        for curve in metric.curves:
            xs |= set(_draw(axes, number, series, [curve.value(p) for p in series.points], curve))
    if not xs:
        plt.close(figure)
        return None
    _ticks(axes, xs)
    if metric.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
    else:
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(_formatter(metric))
    if metric.aim is not None:
        _aim(axes, sorted(xs), [metric.aim] * len(xs))
    return _chart(figure, metric.title, _note(metric, "Dashed"))


def over_ranks(
    title: str, note: str, unit: str, lines: Sequence[tuple[Sequence[int], Sequence[float]]], logarithmic: bool
) -> Chart:
    """Lines over numbers of ranks, each (ranks, values), in the order of `COLORS`."""
    figure, axes = _figure("ranks", unit)
    for (xs, ys), color, (marker, _) in zip(lines, COLORS, MARKERS, strict=False):
        axes.plot(xs, ys, color=color, marker=marker, markersize=5.5, linewidth=1.6, zorder=3)
    _ticks(axes, {x for xs, _ in lines for x in xs})
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(y)))
    else:
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    return _chart(figure, title, note)


def _aim(axes: Axes, xs: Sequence[int], ys: Sequence[float]) -> None:
    axes.plot(xs, ys, color=INK, linewidth=1, linestyle=(0, (1, 2)), zorder=1)


def _note(metric: Metric, form: str) -> str:
    """The sentence below a chart, with what the second form that is drawn stands for."""
    return metric.note + "".join(f" {form}: {curve.name}." for curve in metric.curves[1:])


def _draw(axes: Axes, number: int, series: Series, values: Sequence[float | None], curve: Curve) -> list[int]:
    """One line; returns where on the axis it has points."""
    known = [(x, y, p) for x, y, p in zip(series.xs(), values, series.points, strict=True) if y is not None]
    if not known:
        return []
    xs, ys = [x for x, _, _ in known], [y for _, y, _ in known]
    color, marker = COLORS[number], MARKERS[number][0]
    form = {"linestyle": "--", "markerfacecolor": "none", "zorder": 2} if curve.dashed else {"zorder": 3}
    axes.plot(xs, ys, color=color, marker=marker, markersize=5.5, linewidth=1.6, **form)
    if curve.spread:
        low, high = zip(*(curve.spread(point) for _, _, point in known), strict=True)
        axes.vlines(xs, low, high, color=color, linewidth=3, alpha=0.35, zorder=2)
    return xs


def _bars(panel: Panel, metric: Metric) -> Chart | None:
    """Each series is one bar, and what is dashed elsewhere is a hollow mark on it."""
    solid, *hollow = metric.curves
    values = [solid.value(series.points[0]) for _, series in panel.lines]
    if not any(value is not None for value in values):
        return None
    figure, axes = _figure(metric.unit, "")
    rows = range(len(values))
    axes.barh(rows, [value or 0.0 for value in values], height=0.55, color=COLORS[: len(values)])
    for row, (_, series) in enumerate(panel.lines):
        if solid.spread:
            axes.hlines(row, *solid.spread(series.points[0]), color=INK, linewidth=1.5)
    for curve in hollow:
        for row, (_, series) in enumerate(panel.lines):
            value = curve.value(series.points[0])
            if value is not None:
                axes.plot([value], [row], marker="D", markersize=7, color=INK, markerfacecolor="none", linestyle="none")
    axes.set_yticks(rows, [MARKERS[row][1] for row in rows])
    for label, color in zip(axes.get_yticklabels(), COLORS, strict=False):
        label.set_color(color)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(_formatter(metric))
    axes.grid(axis="y", visible=False)
    return _chart(figure, metric.title, _note(metric, "Diamonds"))


def _figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=SIZE_INCHES)
    figure.subplots_adjust(left=0.15, right=0.97, bottom=0.17, top=0.96)  # a layout engine would take half of the time
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.tick_params(colors=INK, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.grid(color=INK, alpha=0.15, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _ticks(axes: Axes, xs: set[int]) -> None:
    """An axis of powers of two, with a tick at every value there is, as far as they have room."""
    ordered = sorted(xs)
    step = -(-len(ordered) // 8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ordered[::step], [short(x) for x in ordered[::step]])
    axes.minorticks_off()
    if len(ordered) == 1:
        axes.set_xlim(ordered[0] / 2, ordered[0] * 2)


def _formatter(metric: Metric) -> FuncFormatter:
    return FuncFormatter(_percent if metric.unit.startswith("%") else lambda y, _: short(y))


def _percent(value: float, _: int) -> str:
    return f"{100 * value:.3g}"


def short(value: float) -> str:
    """A number with a letter: 1,500 is 1.5k, and 4,096 is 4096 since it is a power of two; 2.5 stays."""
    if value == int(value) and 0 < value <= 16384 and int(value) & (int(value) - 1) == 0:
        return str(int(value))
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _chart(figure: Figure, title: str, note: str) -> Chart:
    """The figure as an SVG element: text stays text, ink becomes the page's, and no two charts share an id."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    plt.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg).replace(INK, "currentColor")
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)  # the page decides how large
    return Chart(title, note, f'{opening} role="img" aria-label="{title}">{rest}')

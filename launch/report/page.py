"""The HTML page of a report, with its charts.

The page needs no network and no other file. Each chart is an SVG element whose text has the page's text color. Lines
differ by color and by marker. The colors are those of Okabe and Ito, "Color universal design" (2008), without black and
yellow, which are invisible on a dark or a light page. Every axis names its unit. A prediction is drawn dashed with
hollow markers, and its chart names the predicted machines. It is not drawn if it is far from the measured times. Bytes
and waiting times are those of the worst rank. Guarantee: text of a record is text on the page, never markup.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from jinja2 import Environment, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ringattn.errors import InputError
from ringattn.launch.pictures.simulation import ATTENTION
from ringattn.launch.report.points import SINGLE, Panel, Point, Sweep, panels_of, scaling, series_of
from ringattn.launch.report.tables import (
    MIB,
    commands,
    environments_of,
    facts_of,
    overlap_name,
    predicted_ms,
    prediction_text,
    tables_of,
)

TEMPLATE = "page.html"
OPEN_PANELS = 4
"""Panels of a view that are unfolded at first."""
DRAWN_PANELS = 12
"""Panels of a page: about a hundred charts, two megabytes."""
SIMULATED = "simulated*.json"
DISTURBANCES = "slow_rank", "slow_link", "jitter"
"""Keys of a simulation that its heading shows if they are set."""


def page_of(sweep: Sweep, title: str, summary: str, say: Callable[[str], None]) -> str:
    """Return the page as HTML. Call `say` with a line of progress for each panel that is drawn."""
    all_series = series_of(sweep)
    panels = [panel for panel in panels_of(all_series) if panel.view is not SINGLE or len(panel.lines) > 1]
    drawn = []
    for number, panel in enumerate(panels[:DRAWN_PANELS], 1):
        say(f"panel {number} of {min(len(panels), DRAWN_PANELS)}")
        drawn.append((panel.view, _panel(panel.title, [name for name, _ in panel.lines], charts_of(sweep, panel))))
    template = resources.files("ringattn.launch.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        title=title,
        summary=summary,
        facts=facts_of(sweep),
        commands=commands(sweep),
        views=[(view, [panel for _, panel in group]) for view, group in groupby(drawn, key=lambda pair: pair[0])],
        open_panels=OPEN_PANELS,
        undrawn=max(0, len(panels) - DRAWN_PANELS),
        simulations=[simulated_panel(file) for file in sorted(sweep.folder.glob(SIMULATED))],
        tables=tables_of(sweep, all_series),
        environments=environments_of(sweep),
    )


def _panel(title: str, names: Sequence[str], charts: Sequence[Any], note: str = "") -> dict[str, Any]:
    legend = [(name, color, marker) for name, color, (_, marker) in zip(names, COLORS, MARKERS, strict=False)]
    return {"title": title, "note": note, "legend": legend, "charts": charts}


def simulated_panel(file: Path) -> dict[str, Any]:
    """Return the panel of a simulation, with a line for each kind of scaling.

    Raises `InputError` if `file` was not written by `ringattn simulate`.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        curves, config = record["curves"], record["config"]
        measures = {
            ("Time of a call, simulated", "Nothing of it was measured.", "s"): lambda point: point["total_s"],
            ("Efficiency, simulated",
             "Time of the computation in one process, divided evenly, as a share of the simulated time.", "%"):
                lambda point: point["efficiency"],
            ("Waiting, simulated", "Largest value of any rank.", "% of the time"):
                lambda point: sum(each["waiting_s"][2] for each in point["passes"]) / point["total_s"],
        }  # fmt: skip
        charts = []
        for (title, note, unit), value in measures.items():
            lines = [Line(number, [point["ranks"] for point in points], [value(point) for point in points])
                     for number, points in enumerate(curves.values())]  # fmt: skip
            charts.append(line_chart(title, note, "ranks", unit, lines, log_base=10 if unit == "s" else 0))
        what = config["schedule"] if config["layer"] == ATTENTION else f"{config['layer']} layer"
        heading = f"{what}, {config['tokens']:,} tokens, {record['cluster']['name']}"
        heading += "".join(f", {key}={config[key]}" for key in DISTURBANCES if config[key])
        return _panel(heading, [f"{name} scaling" for name in curves], charts, record["cluster"]["source"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(
            f"{file} is not a simulation of this version of ringattn: {error!r}; write it again with `ringattn "
            f"simulate json={file}`, or move it away"
        ) from error


# --- the charts ------------------------------------------------------------------------------------------------------


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"))
"""The marker of each line: its name in matplotlib, and the same shape as a character for the legend."""
INK = "#0badf0"
"""Stands for the page's own color of text: becomes `currentColor` in the SVG."""
SIZE_INCHES = (4.4, 2.9)
MOST_RATIO = 200
"""If the ratio of its ends is below this, a logarithmic axis also has ticks at 2 and 5 times each power of ten."""
FAR = 10.0
"""If the median prediction is wrong by more than this factor, the tables list the predictions, but no chart shows them,
because they would flatten the measured curves."""

Value = Callable[[Point], float | None]


class Chart(NamedTuple):
    """A picture with its title and a note about what it shows. `svg` is an element for an HTML page."""

    title: str
    note: str
    svg: str


class Curve(NamedTuple):
    """A value to draw for each point of a series. `spread` is drawn as a bar; `dashed` lines have hollow markers."""

    value: Value
    name: str = ""
    dashed: bool = False
    spread: Callable[[Point], tuple[float, float]] | None = None


class Metric(NamedTuple):
    """The contents of one chart: its title, the unit of its axis, and the curves to draw.

    `logarithmic` says how the axis is scaled, `note` is a sentence below the chart, and `aim` is the perfect value, if
    there is one.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    logarithmic: bool = False
    note: str = ""
    aim: float | None = None


class Line(NamedTuple):
    """One line of a chart. `number` determines its color and marker; `spread` has (low, high) for each x."""

    number: int
    xs: Sequence[int]
    ys: Sequence[float]
    dashed: bool = False
    spread: Sequence[tuple[float, float]] = ()


def charts_of(sweep: Sweep, panel: Panel) -> list[Chart]:
    """Return the charts of one panel, without those that have nothing to show."""
    charts = [_ratio(sweep, panel, "speed-up"), _ratio(sweep, panel, "efficiency")] if panel.view.ratio else []
    draw = _curves if panel.view.axis else _bars
    charts += [draw(panel, metric) for metric in metrics_of(sweep)]
    return [chart for chart in charts if chart is not None]


# --- the metrics -----------------------------------------------------------------------------------------------------


def metrics_of(sweep: Sweep) -> list[Metric]:
    """Return the metrics that are drawn for each panel in addition to speed-up and efficiency."""

    def predicted(point: Point) -> float | None:
        return predicted_ms(sweep, point)

    def of_measured(part: Value) -> Value:
        return lambda point: None if (value := part(point)) is None else value / sweep.pass_ms(point)

    def mib(key: str) -> Value:
        return lambda point: None if (most := point.most(key)) is None else most / MIB

    ratios = [ratio for point in sweep.ok if (ratio := of_measured(predicted)(point)) is not None]
    drawn = bool(ratios) and 1 / FAR <= median(ratios) <= FAR
    note = prediction_text(sweep)
    if note and not drawn:
        note += " They are far from the measured times, so they are not drawn."
    bound = " An upper bound: the transport does not report when a hidden message arrived. Exposed time is measured."
    metrics = [
        Metric("Throughput", "tokens/s", (Curve(sweep.tokens_per_s),), logarithmic=True),
        Metric(
            "Time of a pass, and its prediction" if drawn else "Time of a pass",
            "ms",
            (Curve(sweep.pass_ms, "measured", spread=sweep.pass_spread),
             *((Curve(predicted, "predicted", dashed=True),) if drawn else ())),
            logarithmic=True,
            note=f"{' + '.join(sweep.passes).capitalize()}, slowest rank, with p10 to p90. {note}",
        ),
        Metric("Prediction", "% of measured", (Curve(of_measured(predicted), dashed=True),),
               note=f"100 is exact; below 100 the prediction is too optimistic. {note}", aim=1.0),
        Metric("Exposed communication", "% of the pass", (Curve(of_measured(lambda p: p.exposed_ms(sweep.passes))),),
               note="Time in which the rank that waited longest did nothing but wait for messages."),
        Metric("Memory of a rank", "MiB",
               (Curve(mib("peak_bytes"), "peak"), Curve(mib("pool_bytes"), "the ring's pool", dashed=True)),
               note="Largest value of any rank. Peak: growth of the memory of the process."),
        Metric("Sent by a rank", "MiB", (Curve(mib("bytes_sent")),),
               note="Forward and backward of one pass, largest value of any rank."),
        Metric(overlap_name(sweep).capitalize(), "% of the communication", (Curve(lambda p: p.number("overlap")),),
               note="Communication that ran while the same rank computed, lowest value of any rank."
               + (bound if overlap_name(sweep) != "overlap" else "")),
    ]  # fmt: skip
    return [metric for metric in metrics if drawn or metric.title != "Prediction"]


def _ratio(sweep: Sweep, panel: Panel, what: str) -> Chart | None:
    """Draw the speed-up or efficiency of each series relative to its point with the fewest ranks."""
    lines = []
    for number, (_, series) in enumerate(panel.lines):
        values = {x: getattr(each, what.replace("-", "_"))
                  for x, each in zip(series.xs(), scaling(sweep, series), strict=True) if each}  # fmt: skip
        lines.append(Line(number, list(values), list(values.values())))
    rate = (
        ""
        if panel.view.name == "strong"
        else " Computed from the rate of work (pairs that the mask allows, per second)."
    )
    note = f"Relative to the fewest ranks of the same series, which count as perfect. The dotted line is perfect.{rate}"
    if what == "speed-up":
        return line_chart("Speed-up", note, "ranks", "times", lines, log_base=2, aim=float)
    return line_chart("Efficiency", note, "ranks", "% of perfect", lines, aim=lambda _: 1.0)


def _curves(panel: Panel, metric: Metric) -> Chart | None:
    lines = []
    for number, (_, series) in enumerate(panel.lines):
        for curve in metric.curves:
            drawn_points = [(x, y, point) for x, point in zip(series.xs(), series.points, strict=True)
                  if (y := curve.value(point)) is not None]  # fmt: skip
            spread = [curve.spread(point) for _, _, point in drawn_points] if curve.spread else ()
            lines.append(
                Line(number, [x for x, _, _ in drawn_points], [y for _, y, _ in drawn_points], curve.dashed, spread)
            )
    aim = metric.aim
    perfect = None if aim is None else lambda _: aim
    log_base = 10 if metric.logarithmic else 0
    return line_chart(metric.title, _note(metric, "Dashed"), panel.view.axis, metric.unit, lines, log_base, perfect)


def _note(metric: Metric, form: str) -> str:
    """Return the note below a chart, with the name of the second curve, which is drawn in the form `form`."""
    return metric.note + "".join(f" {form}: {curve.name}." for curve in metric.curves[1:])


# --- drawing ---------------------------------------------------------------------------------------------------------


def line_chart(
    title: str, note: str, axis: str, unit: str, lines: Sequence[Line], log_base: int = 0,
    aim: Callable[[int], float] | None = None,
) -> Chart | None:  # fmt: skip
    """Draw lines over an x axis of powers of two; return None if they have no points.

    `log_base` is the base of the y axis; if it is 0, the y axis is linear and begins at 0. `aim` returns the perfect
    value at an x, which is drawn as a dotted line.
    """
    xs = sorted({x for line in lines for x in line.xs})
    if not xs:
        return None
    figure, axes = _figure(axis, unit)
    for line in lines:
        color, marker = COLORS[line.number], MARKERS[line.number][0]
        form = {"linestyle": "--", "markerfacecolor": "none", "zorder": 2} if line.dashed else {"zorder": 3}
        axes.plot(line.xs, line.ys, color=color, marker=marker, markersize=5.5, linewidth=1.6, **form)
        if line.spread:
            axes.vlines(line.xs, *zip(*line.spread, strict=True), color=color, linewidth=3, alpha=0.35, zorder=2)
    if aim:
        ends = [xs[0], xs[-1]]
        axes.plot(ends, [aim(x) for x in ends], color=INK, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    axes.set_xscale("log", base=2)
    ticks = xs[:: -(-len(xs) // 8)]
    axes.set_xticks(ticks, [short(x) for x in ticks])
    axes.minorticks_off()
    if len(xs) == 1:
        axes.set_xlim(xs[0] / 2, xs[0] * 2)
    if log_base:
        axes.set_yscale("log", base=log_base)
        if log_base == 10:
            low, high = axes.get_ylim()
            # If the axis spans many powers of ten, ticks at 1, 2 and 5 times each would be too many.
            subs = (1, 2, 5) if high < MOST_RATIO * low else (1,)
            axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(_formatter(unit))
    return _chart(figure, title, note)


def _bars(panel: Panel, metric: Metric) -> Chart | None:
    """Draw each series as one bar, with a hollow mark for each curve that other charts draw dashed."""
    solid, *hollow = metric.curves
    points = [series.points[0] for _, series in panel.lines]
    values = [solid.value(point) for point in points]
    if not any(value is not None for value in values):
        return None
    figure, axes = _figure(metric.unit, "")
    rows = range(len(values))
    axes.barh(rows, [value or 0.0 for value in values], height=0.55, color=COLORS[: len(values)])
    for row, point in enumerate(points):
        if solid.spread:
            axes.hlines(row, *solid.spread(point), color=INK, linewidth=1.5)
        for curve in hollow:
            if (value := curve.value(point)) is not None:
                axes.plot([value], [row], marker="D", markersize=7, color=INK, markerfacecolor="none", linestyle="none")
    axes.set_yticks(rows, [MARKERS[row][1] for row in rows])
    for label, color in zip(axes.get_yticklabels(), COLORS, strict=False):
        label.set_color(color)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(_formatter(metric.unit))
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


def _formatter(unit: str) -> FuncFormatter:
    """Return the formatter of an axis. It writes shares as percentages, and other numbers as `short` does."""
    return FuncFormatter(lambda value, _: f"{100 * value:.3g}" if unit.startswith("%") else short(value))


def short(value: float) -> str:
    """Return a number as a short text: 1,500 becomes 1.5k, and 2.5 stays. Powers of two up to 16,384 are in full."""
    if value == int(value) and 0 < value <= 16384 and int(value) & (int(value) - 1) == 0:
        return str(int(value))
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _chart(figure: Figure, title: str, note: str) -> Chart:
    """Return the figure as an SVG element. Its text is not converted to paths, and its ink is the page's text color.

    The ids within the SVG depend on the title, so that charts with different titles do not share an id.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Type": None, "Format": None})
    plt.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg).replace(INK, "currentColor")
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height)="[^"]*"', "", opening)  # the style of the page sets the size
    return Chart(title, note, f'{opening} role="img" aria-label="{title}">{rest}')

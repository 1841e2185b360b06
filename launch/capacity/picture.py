"""The picture of `ringattn plan`: the memory of one rank by component, compared with the accelerator's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from ringattn.launch.capacity.hardware import GIB
from ringattn.launch.folders import save_picture

INK, LIMIT = "#22303c", "#c0392b"
VISIBLE = 1 / 1000
"""Share of its bar below which a component is left out."""
BAR = 0.5
"""Height of a bar, as a share of the distance between two bars."""
FONT, PAD = 8.5, 4.0
"""The font size of a value and the space around it, in points."""
DARK = 0.55
"""On a color with a luminance below this, values are written in white."""
COLUMNS = 5
"""The number of entries in a row of the legend."""


class Segment(NamedTuple):
    """One component of a bar, in GiB."""

    name: str
    left: float
    width: float
    color: str


def draw_capacity(figures: dict[str, Any], path: str | Path) -> None:
    """Write a PNG of what `plan` returned."""
    save_picture(capacity_figure(figures), path, 120)


def capacity_figure(figures: dict[str, Any]) -> Figure:
    """Return the picture: a bar for the run, a bar with all suggested settings, a line at the accelerator's memory.

    A dashed line is at the memory without the reserve, which must stay free.
    """
    bars = {"as given": figures["bytes_by_component"]}
    if figures["steps"]:
        bars["with the\nsuggested settings"] = figures["after_steps"]["bytes_by_component"]
    names = [name for name in figures["bytes_by_component"]
             if any(bar[name] > VISIBLE * sum(bar.values()) for bar in bars.values())]  # fmt: skip
    of_index = plt.get_cmap("tab10")
    colors = {name: to_hex(of_index(index)) for index, name in enumerate(figures["bytes_by_component"])}
    figure, ax = plt.subplots(figsize=(9, 1.9 + 1.0 * len(bars)), layout="constrained")
    limit = figures["hardware"]["memory_bytes"] / GIB
    totals = [sum(parts.values()) / GIB for parts in bars.values()]
    ax.set_xlim(0, 1.15 * max(limit, *totals))
    ax.set_ylim(len(bars) - 0.55, -0.75)
    ax.axvline(limit, color=LIMIT, linewidth=1.5, zorder=1)
    reserve = figures["reserve_bytes"] / GIB
    ax.axvline(limit - reserve, color=LIMIT, linewidth=1.0, linestyle="--", zorder=1)
    free = f", {reserve:,.1f} must stay free" if reserve else ""
    ax.annotate(f"memory: {limit:,.0f} GiB{free}", (limit, 1.0), xycoords=("data", "axes fraction"), color=LIMIT,
                ha="center", va="bottom", fontsize=9)  # fmt: skip
    rows = []
    for row, parts in enumerate(bars.values()):
        segments, left = [], 0.0
        for name in names:
            segments.append(Segment(name, left, parts[name] / GIB, colors[name]))
            left += parts[name] / GIB
        for segment in segments:
            ax.barh(row, segment.width, BAR, segment.left, color=segment.color, edgecolor="white", linewidth=0.6)
        rows.append(segments)
    for name in names:
        ax.barh(0, 0, color=colors[name], label=name.replace("_", " "))
    ax.set_yticks(range(len(bars)), list(bars), color=INK)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("GiB on one rank", color=INK)
    ax.spines[["top", "right", "left"]].set_visible(False)
    run = figures["run"]
    what = f"{figures['model']['name']} on {figures['hardware']['name']}"
    figure.suptitle(f"{what}: {run['tokens']:,} tokens over a ring of {run['ranks']:,}", color=INK, fontsize=11)
    figure.legend(loc="outside lower center", ncols=min(len(names), COLUMNS), frameon=False, fontsize=8.5)
    # Write the values last, because the space for them depends on the layout of the figure.
    figure.canvas.draw()
    figure.set_layout_engine("none")
    for row, (segments, total) in enumerate(zip(rows, totals, strict=True)):
        _write_total(ax, row, total, limit)
        _write_values(ax, row, [segment for segment in segments if segment.width > VISIBLE * total])
    return figure


def _write_total(ax: Axes, row: int, total: float, limit: float) -> None:
    """Write the total to the right of the bar, or to the right of the memory line if the text would cover the line."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    text = ax.text(total, row, f"{total:,.1f} GiB", fontsize=10, color=INK, va="center", bbox=box)
    pad, width = _gib(ax, PAD), _gib_width(ax, text)
    start = total + pad
    text.set_x(limit + pad if total <= limit < start + width + pad else start)


def _write_values(ax: Axes, row: int, segments: Sequence[Segment]) -> None:
    """Write the GiB of each segment: inside it if the text fits, else above the bar with a line to the segment."""
    pad, outside = _gib(ax, PAD), []
    for segment in segments:
        middle = segment.left + segment.width / 2
        text = ax.text(middle, row, _digits(segment.width), fontsize=FONT, ha="center", va="center")
        if _gib_width(ax, text) + pad <= segment.width:
            text.set_color("white" if _luminance(segment.color) < DARK else INK)
        else:
            text.set(y=row - BAR / 2 - 0.17, color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
            outside.append((middle, text))
    widths = [_gib_width(ax, text) + 1.5 * pad for _, text in outside]
    for (middle, text), x in zip(outside, spread([middle for middle, _ in outside], widths), strict=True):
        text.set_x(x)
        ax.plot([middle, x], [row - BAR / 2, row - BAR / 2 - 0.08], color=INK, linewidth=0.6)


def spread(middles: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Return the center of each label: near the middle of its segment, in order, without overlap, and not below 0.

    `middles` are those of the segments, and `widths` are those of the labels. Labels that would overlap form a group,
    whose members are placed side by side around the mean of their segments' middles.
    """
    groups: list[tuple[list[int], float, float]] = []  # members, where the group begins, its width
    for index, (middle, width) in enumerate(zip(middles, widths, strict=True)):
        members, start, total = [index], max(0.0, middle - width / 2), width
        while groups and groups[-1][1] + groups[-1][2] > start:
            before, _, more = groups.pop()
            members, total = before + members, total + more
            start = max(0.0, sum(middles[member] for member in members) / len(members) - total / 2)
        groups.append((members, start, total))
    places = []
    for members, start, _ in groups:
        for member in members:
            places.append(start + widths[member] / 2)
            start += widths[member]
    return places


def _digits(gib: float) -> str:
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.1f}" if gib >= 0.95 else f"{gib:.2g}"


def _gib(ax: Axes, points: float) -> float:
    """Return the GiB on the axis that correspond to a length of `points` in the picture."""
    pixels_per_gib = ax.transData.transform((1, 0))[0] - ax.transData.transform((0, 0))[0]
    return float(points / 72 * ax.figure.dpi / pixels_per_gib)


def _gib_width(ax: Axes, text: Any) -> float:
    box = text.get_window_extent().transformed(ax.transData.inverted())
    return float(box.width)


def _luminance(color: str) -> float:
    red, green, blue = to_rgb(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

"""The picture of a schedule: steps downwards, ranks across, one color for each owner of keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from ringattn.explain import Explanation
from ringattn.launch.outputs import save_picture
from ringattn.schedule.ops import Kind, Merge, Schedule, Work
from ringattn.schedule.passes import is_on_received
from ringattn.schedule.text import busy_steps, idle_steps, spans

INK, QUIET, NEUTRAL = "#22303c", "#7a8894", "#eef1f4"
NAMES = {Kind.Q: "Q", Kind.KV: "KV", Kind.OUT: "OUT", Kind.GRAD_OUT: "dOUT", Kind.DQ: "dQ", Kind.DKV: "dKV"}
TRAVELS = {  # what an arrow carries: its color and its words
    Kind.KV: ("#5b6b79", "K and V"), Kind.Q: ("#0072b2", "Q"), Kind.OUT: ("#009e73", "OUT and its softmax sums"),
    Kind.GRAD_OUT: ("#b8860b", "dOUT"), Kind.DQ: ("#8e44ad", "dQ"), Kind.DKV: ("#c0392b", "dK and dV"),
}  # fmt: skip
BOX_WIDTH, BOX_HEIGHT = 0.72, 0.52
FONT, LEAST_FONT, LETTERS = 9.0, 5.5, 11
"""Points of a label, at least; so many letters fit into a box at the first size."""


def draw_schedule(explanation: Explanation, path: str | Path) -> None:
    """Write a PNG of the forward and, where explained, the backward schedule."""
    figure = figure_of(explanation)
    save_picture(figure, path, 150)
    plt.close(figure)


def figure_of(explanation: Explanation) -> Figure:
    """The picture before it is written."""
    schedules = [("forward", explanation.forward)]
    if explanation.backward is not None:
        schedules.append(("backward", explanation.backward))
    ranks = explanation.problem.world_size
    rows = max(len(busy_steps(schedule)) for _, schedule in schedules)
    size = (1.5 + max(1.45 * ranks * len(schedules), 6.0), 2.1 + 0.82 * rows)
    figure, axes = plt.subplots(1, len(schedules), figsize=size, squeeze=False)
    for ax, (title, schedule) in zip(axes[0], schedules, strict=True):
        _draw(ax, title, schedule, rows)
    problem = explanation.problem
    figure.suptitle(
        f"{explanation.forward.name} schedule, {problem.q_layout.name} layout, {problem.q_layout.length} tokens on "
        f"{ranks} ranks:\n{sum(explanation.bytes_sent) / 1e6:.3g} MB sent, balance {explanation.balance:.2f}",
        color=INK, fontsize=12,
    )  # fmt: skip
    box = Patch(facecolor=_color(0, ranks), label="box: whose K and V the rank attends to; + what it adds up")
    handles = [box, *_arrows_told(schedule for _, schedule in schedules)]
    figure.legend(handles=handles, loc="lower center", ncols=2 if size[0] < 9 else 4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    return figure


def _arrows_told(schedules: Iterable[Schedule]) -> list[Line2D]:
    """What the arrows of these schedules carry."""
    carried = {copy.block.kind for schedule in schedules for step in schedule.steps for copy in step.copies}
    return [Line2D([], [], color=color, marker=">", label=f"arrow: {words}")
            for kind, (color, words) in TRAVELS.items() if kind in carried]  # fmt: skip


def _draw(ax: Axes, title: str, schedule: Schedule, height: int) -> None:
    ranks, shown = schedule.problem.world_size, busy_steps(schedule)
    for y, number in enumerate(shown):
        step = schedule.steps[number]
        for rank in range(ranks):
            work = [item for item in step.work if item.rank == rank]
            sends = any(copy.src == rank for copy in step.copies)
            if work or sends:
                _box(ax, rank, y, work, ranks)
        kinds = sorted({copy.block.kind for copy in step.copies}, key=list(TRAVELS).index)
        for copy in step.copies:
            shift = 0.14 * (kinds.index(copy.block.kind) - (len(kinds) - 1) / 2)
            _arrow(ax, (copy.src + shift, y), (copy.dst + shift, y + 1), TRAVELS[copy.block.kind][0])
    ax.set_xlim(-0.6, ranks - 0.4)
    ax.set_ylim(height - 0.3, -0.6)
    ax.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], color=INK)
    # The schedule's own numbers, with their gaps: texts, errors and recordings name a step by them.
    ax.set_yticks(range(len(shown)), [f"step {number}" for number in shown], color=INK)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    idle = idle_steps(schedule)
    ax.set_title(f"{title}; {idle}" if idle else title, color=INK, pad=18, fontsize=12 if len(idle) < 30 else 10)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _box(ax: Axes, rank: int, y: int, work: Sequence[Work], ranks: int) -> None:
    owners = {item.kv.owner for item in work if not isinstance(item, Merge)}
    color = _color(min(owners), ranks) if len(owners) == 1 else NEUTRAL
    box = FancyBboxPatch(
        (rank - BOX_WIDTH / 2, y - BOX_HEIGHT / 2), BOX_WIDTH, BOX_HEIGHT, boxstyle="round,pad=0.02,rounding_size=0.08",
        facecolor=color if work else "white", edgecolor=INK if work else QUIET, linewidth=0.8, zorder=3,
        linestyle="-" if work else (0, (3, 3)),
    )  # fmt: skip
    ax.add_patch(box)
    lines = label_of(work)
    size = max(LEAST_FONT, FONT * min(1.0, LETTERS / max(map(len, lines)), 2 / len(lines)))
    ax.text(rank, y, "\n".join(lines), ha="center", va="center", fontsize=size, color=INK if work else QUIET, zorder=4,
            linespacing=1.1)  # fmt: skip


def label_of(work: Sequence[Work]) -> list[str]:
    """What a rank does in a step, in lines: whose queries meet whose keys, and what it adds to its sums."""
    attends = [item for item in work if not isinstance(item, Merge)]
    lines = []
    if own := {item.kv.owner for item in attends if not is_on_received(item)}:
        lines.append(f"KV{spans(own)}")
    if received := [item for item in attends if is_on_received(item)]:
        askers, owners = ({getattr(item, side).owner for item in received} for side in ("q", "kv"))
        lines.append(f"Q{spans(askers)} × KV{spans(owners)}")
    merged: dict[Kind, set[int]] = {}
    for item in work:
        if isinstance(item, Merge):
            merged.setdefault(item.into.kind, set()).add(item.into.owner)
    lines += [f"+ {NAMES[kind]}{spans(owners)}" for kind, owners in merged.items()]
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
    return plt.get_cmap("Set2")(owner % 8) if ranks <= 8 else plt.get_cmap("viridis")(0.25 + 0.7 * owner / ranks)

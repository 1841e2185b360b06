"""The picture of a schedule: steps downwards, ranks across, one color for each owner of keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from ringattn.explain import Explanation
from ringattn.schedule.ops import Kind, Merge, Schedule

INK = "#22303c"
KV_COLOR, DKV_COLOR = "#5b6b79", "#c0392b"
BOX_WIDTH, BOX_HEIGHT = 0.66, 0.52


def draw_schedule(explanation: Explanation, path: str | Path) -> None:
    """Write a PNG of the forward and, where explained, the backward schedule."""
    schedules = [("forward", explanation.forward)]
    if explanation.backward is not None:
        schedules.append(("backward", explanation.backward))
    ranks = explanation.problem.world_size
    heights = [len(_visible(schedule)) for _, schedule in schedules]
    size = (1.5 + 1.45 * ranks * len(schedules), 1.9 + 0.82 * max(heights))
    figure, axes = plt.subplots(1, len(schedules), figsize=size, squeeze=False)
    for ax, (title, schedule) in zip(axes[0], schedules, strict=True):
        _draw(ax, title, schedule, max(heights))
    problem = explanation.problem
    figure.suptitle(
        f"{explanation.forward.name} schedule, {problem.q_layout.name} layout, {problem.q_layout.length} tokens "
        f"on {ranks} ranks: {sum(explanation.bytes_sent) / 1e6:.3g} MB sent, balance {explanation.balance:.2f}",
        color=INK, fontsize=12,
    )  # fmt: skip
    figure.legend(
        handles=[
            Patch(facecolor=_color(0, ranks), label="box: whose keys and values the rank works on"),
            Patch(facecolor=KV_COLOR, label="arrow: K and V travel"),
            Patch(facecolor=DKV_COLOR, label="arrow: dK and dV travel"),
        ][: 2 + len(schedules) - 1],
        loc="lower center", ncols=3, frameon=False, fontsize=9,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.06, 1, 0.97))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _visible(schedule: Schedule) -> list[int]:
    """The numbers of the steps in which anything happens."""
    return [n for n, step in enumerate(schedule.steps) if step.copies or step.work]


def _draw(ax: Axes, title: str, schedule: Schedule, height: int) -> None:
    ranks = schedule.problem.world_size
    for y, number in enumerate(_visible(schedule)):
        step = schedule.steps[number]
        for rank in range(ranks):
            work = [item for item in step.work if item.rank == rank]
            _box(ax, rank, y, work, ranks)
        for copy in step.copies:
            gradient = copy.block.kind is Kind.DKV
            _arrow(ax, (copy.src, y), (copy.dst, y + 1), DKV_COLOR if gradient else KV_COLOR, gradient)
    ax.set_xlim(-0.6, ranks - 0.4)
    ax.set_ylim(height - 0.3, -0.6)
    ax.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], color=INK)
    ax.set_yticks(range(len(_visible(schedule))), [f"step {n}" for n in _visible(schedule)], color=INK)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.set_title(title, color=INK, pad=18)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _box(ax: Axes, rank: int, y: int, work: list[Any], ranks: int) -> None:
    merges = [item for item in work if isinstance(item, Merge)]
    folds = [item for item in work if not isinstance(item, Merge)]
    owner = folds[0].kv.owner if folds else None
    many = len(folds) > 1
    color = "#eef1f4" if owner is None or many else _color(owner, ranks)
    box = FancyBboxPatch(
        (rank - BOX_WIDTH / 2, y - BOX_HEIGHT / 2), BOX_WIDTH, BOX_HEIGHT, boxstyle="round,pad=0.02,rounding_size=0.08",
        facecolor=color, edgecolor=INK if folds else "#c8d0d8", linewidth=0.8, zorder=3,
    )  # fmt: skip
    ax.add_patch(box)
    if merges:
        label = "+ " + " ".join(f"dKV{item.into.owner}" for item in merges[:2]) + (" ..." if len(merges) > 2 else "")
    else:
        label = " ".join(f"KV{item.kv.owner}" for item in folds[:3]) + (" ..." if len(folds) > 3 else "")
    ax.text(rank, y, label, ha="center", va="center", fontsize=9, color=INK, zorder=4)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str, gradient: bool) -> None:
    shift = 0.09 if gradient else -0.09
    ax.add_patch(
        FancyArrowPatch(
            (start[0] + shift, start[1] + BOX_HEIGHT / 2), (end[0] + shift, end[1] - BOX_HEIGHT / 2),
            arrowstyle="-|>", mutation_scale=9, color=color, linewidth=1.1, alpha=0.75, zorder=2,
            connectionstyle="arc3,rad=0.0",
        )
    )  # fmt: skip


def _color(owner: int, ranks: int) -> Any:
    return plt.get_cmap("Set2")(owner % 8) if ranks <= 8 else plt.get_cmap("viridis")(0.25 + 0.7 * owner / ranks)

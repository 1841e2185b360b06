"""The picture of dilated branches: for each rank and branch the rows of one head that it keeps, receives and sends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ringattn.core.geometry import StridedRange
from ringattn.core.mask import Branch
from ringattn.core.problem import Problem
from ringattn.core.tiling import branch_tiles
from ringattn.errors import InputError
from ringattn.explain import Explanation
from ringattn.launch.outputs import save_picture

INK, NOTHING = "#22303c", "#f4f6f7"
DPI = 120
COLUMNS = 1024
"""Bins of positions, at most: a bin is colored if any of its positions is."""


class Rows(NamedTuple):
    """Of one branch and rank, by bin of positions: whose its queries read (owner + 1, or 0), and which it sends."""

    read: np.ndarray
    sent: np.ndarray


def rows_of(problem: Problem, branch: Branch, rank: int, width: int = 1) -> Rows:
    """The rows of a branch that `rank` reads, its own included, and those of its own that others read.

    In bins of `width` positions; a bin has the greatest value of its positions.
    """
    read, sent = (np.zeros(-(-problem.kv_layout.length // width), np.int64) for _ in range(2))
    for reader in range(problem.world_size):
        for (owner, _, _), table in branch_tiles(problem, branch, reader, by_segment=False).items():
            for tile in table if rank in (reader, owner) else ():
                _mark(read if reader == rank else sent, tile.k.positions, width, owner + 1)
    return Rows(read, sent)


def _mark(line: np.ndarray, positions: StridedRange, width: int, value: int) -> None:
    """Raise the bins of these positions to `value`."""
    if positions.stride <= width:  # no bin between the first and the last is without one
        at: slice | np.ndarray = slice(positions.start // width, positions.last // width + 1)
    else:
        at = np.arange(positions.start, positions.stop, positions.stride) // width
    line[at] = np.maximum(line[at], value)


def _whole_pixels(figure: Figure, axes: Sequence[Axes], bins: int) -> None:
    """As many pixels for each bin, and whole ones: else bins of one width are drawn one pixel wider or not."""
    box = axes[0].get_position()
    whole = figure.get_figwidth() * DPI
    each = max(1, int(box.width * whole / bins))
    left, right = round(box.x0 * whole), round((1 - box.x1) * whole)
    pixels = left + each * bins + right
    figure.set_figwidth(pixels / DPI)
    for ax in axes:
        box = ax.get_position()
        ax.set_position((left / pixels, box.y0, each * bins / pixels, box.height))


def branches_of(problem: Problem, head: int) -> list[Branch]:
    """The mask's branches of one query head."""
    return [one for one in problem.mask.branches if one.heads is None or one.heads.start <= head < one.heads.stop]


def bin_width(problem: Problem) -> int:
    """Positions of a bin, such that rows of one rate look alike: each rate is a multiple of it, or not more than it."""
    rates = {branch.dilation for branch in problem.mask.branches}
    least = max(1, -(-problem.kv_layout.length // COLUMNS))
    return next(width for width in range(least, max(least, *rates) + 1)
                if all(rate <= width or rate % width == 0 for rate in rates))  # fmt: skip


def draw_rows(explanation: Explanation, path: str | Path, head: int = 0) -> None:
    """Write a PNG: a panel for each rank, two lines for each branch. Raises `InputError` without dilation."""
    problem = explanation.problem
    branches, ranks = branches_of(problem, head), problem.world_size
    if all(branch.dilation == 1 for branch in problem.mask.branches):
        raise InputError("rows_picture draws dilated branches; give segment_lengths= and dilation_rates=")
    of_ranks = plt.get_cmap("tab10" if ranks <= 10 else "tab20")
    colors = ListedColormap([NOTHING, *(to_hex(of_ranks(rank % 20)) for rank in range(ranks))])
    figure, axes = plt.subplots(ranks, 1, figsize=(13, 1.1 + ranks * (0.45 + 0.42 * len(branches))), squeeze=False)
    labels = [f"w={branch.segment or problem.kv_layout.length} r={branch.dilation} {what}"
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
    save_picture(figure, path, DPI)
    plt.close(figure)

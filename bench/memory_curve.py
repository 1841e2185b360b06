"""The memory curve: peak memory of a rank against the length of the sequence, measured points on predicted lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

INK = "#22303c"
POINTS = 60
MARKERS = "osD^vPX*"
NEAR, DASH = 0.15, 4.0
"""Lines nearer than this share lie on each other; units of line width that a dash has."""


def draw_curve(
    methods: Sequence[str],
    records: Sequence[dict[str, Any]],
    predicted: Callable[[str, int], int],
    title: str,
    path: Path,
) -> None:
    """Write a PNG. `records`: length_tokens, method, storages_bytes; `predicted`: bytes of a method at a length."""
    lengths = sorted({record["length_tokens"] for record in records})
    at = np.unique(np.geomspace(lengths[0], lengths[-1], POINTS).astype(int) // 8 * 8)
    sizes = {method: np.array([predicted(method, int(length)) / 2**20 for length in at]) for method in methods}
    figure, ax = plt.subplots(figsize=(9, 5.5))
    for number, method in enumerate(methods):
        color, marker = f"C{number}", MARKERS[number % len(MARKERS)]
        # Methods that need the same share a line: each has its own dashes of it, and a ring around its points.
        same = [other for other in methods if np.allclose(sizes[other], sizes[method], rtol=NEAR)]
        place, dashes = same.index(method), (DASH, DASH * (len(same) - 1))
        style = (place * DASH, dashes) if len(same) > 1 else "-"
        ax.plot(at, sizes[method], color=color, linewidth=2, linestyle=style)
        found = [one for one in records if one["method"] == method]
        tokens, growth = ([one[key] for one in found] for key in ("length_tokens", "storages_bytes"))
        mebibytes = [nbytes / 2**20 for nbytes in growth]
        outer = 40 * (1 + 1.6 * (len(same) - 1 - place))
        inner = "none" if place < len(same) - 1 else color
        ax.scatter(tokens, mebibytes, facecolors=inner, edgecolors=color, marker=marker, label=method, zorder=3,
                   s=outer, linewidths=1.5)  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel("tokens of the whole sequence", color=INK)
    ax.set_ylabel("MiB: lines predicted, points measured", color=INK)
    ax.set_title(title, loc="left", fontsize=10, color=INK)
    ax.grid(True, which="major", color="#dfe4e8", linewidth=0.7)
    ax.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)

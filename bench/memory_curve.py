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


def draw_curve(
    methods: Sequence[str],
    records: Sequence[dict[str, Any]],
    predicted: Callable[[str, int], int],
    title: str,
    path: Path,
) -> None:
    """Write a PNG. `records`: length_tokens, method, storages_bytes; `predicted`: bytes of a method at a length."""
    lengths = sorted({record["length_tokens"] for record in records})
    figure, ax = plt.subplots(figsize=(9, 5.5))
    for number, method in enumerate(methods):
        color, marker = f"C{number}", MARKERS[number % len(MARKERS)]
        at = np.unique(np.geomspace(lengths[0], lengths[-1], POINTS).astype(int) // 8 * 8)
        # Two methods may need the same: the later ones are narrower and above, so that each is seen.
        width, size = 1.5 + 2.5 * (len(methods) - 1 - number), 40 + 60 * (len(methods) - 1 - number)
        sizes = [predicted(method, int(length)) / 2**20 for length in at]
        ax.plot(at, sizes, color=color, linewidth=width, alpha=0.8, zorder=2 + number / 10)
        found = [one for one in records if one["method"] == method]
        tokens, growth = ([one[key] for one in found] for key in ("length_tokens", "storages_bytes"))
        mebibytes = [nbytes / 2**20 for nbytes in growth]
        ax.scatter(tokens, mebibytes, color=color, marker=marker, label=method, zorder=3 + number / 10, s=size)
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

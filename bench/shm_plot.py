"""The picture of `ringattn.bench.shm`: bandwidth and time of a hop against the size of the message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK = "#22303c"
STYLES = {"shm": "-", "gloo": "--", "copy": ":"}


def draw(found: dict[str, dict[str, dict[str, dict[str, float]]]], path: Path) -> None:
    """Write a PNG. `found`: seconds of an exchange, `median` and `p10`, by processes, transport or copy, and bytes."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
    for number, (ranks, by_name) in enumerate(found.items()):
        for name, by_size in by_name.items():
            sizes = sorted(by_size, key=int)
            look: dict[str, Any] = {
                "color": f"C{number}", "linestyle": STYLES[name], "marker": "o", "markersize": 4,
                "label": f"{'bare copy' if name == 'copy' else name}, {ranks} processes",
            }  # fmt: skip
            kib = [int(size) / 1024 for size in sizes]
            left.plot(kib, [int(size) / by_size[size]["median"] / 1e9 for size in sizes], **look)
            right.plot(kib, [1e6 * by_size[size]["median"] for size in sizes], **look)
            fastest = [1e6 * by_size[size]["p10"] for size in sizes]
            right.plot(kib, fastest, **{**look, "alpha": 0.35, "label": None, "marker": ""})
    for ax, title in ((left, "GB/s each way, median"), (right, "µs of a hop: median, and pale the fastest tenth")):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks([64, 256, 1024, 4096, 16384, 65536], ["64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB"])
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set_title(title, loc="left", fontsize=10, color=INK)
        ax.grid(True, which="major", color="#dfe4e8", linewidth=0.7)
    left.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)

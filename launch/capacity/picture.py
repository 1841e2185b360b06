"""The picture of a capacity plan: stacked bars of what a rank holds, before and after the advised steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ringattn.launch.outputs import save_picture

INK, LIMIT = "#22303c", "#c0392b"
GIB = 2**30
VISIBLE = 1 / 1000
"""Share of the longest bar below which a component is left out."""


def draw_capacity(found: dict[str, Any], path: str | Path) -> None:
    """Write a PNG of what `launch.plan.plan` returned: a bar as given, one after all steps, and the memory's line."""
    bars = {"as given": found["bytes_by_component"]}
    if found["steps"]:
        bars["after the steps"] = found["after_steps"]["bytes_by_component"]
    visible = VISIBLE * max(sum(bar.values()) for bar in bars.values())
    names = [name for name in found["bytes_by_component"] if any(bar[name] > visible for bar in bars.values())]
    colors = plt.get_cmap("tab10")
    figure, ax = plt.subplots(figsize=(9, 1.6 + 0.9 * len(bars)))
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for name in names:
            width = parts[name] / GIB
            color = colors(list(found["bytes_by_component"]).index(name))
            label = None if row else name.replace("_", " ")
            ax.barh(row, width, left=left, color=color, edgecolor="white", label=label)
            left += width
        ax.text(left, row, f"  {left:,.1f} GiB", va="center", fontsize=9, color=INK, zorder=3,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    limit = found["hardware"]["memory_bytes"] / GIB
    ax.axvline(limit, color=LIMIT, linewidth=1.5)
    ax.annotate(f"{limit:,.0f} GiB", (limit, 1.0), xycoords=("data", "axes fraction"), color=LIMIT, ha="center",
                va="bottom", fontsize=9)  # fmt: skip
    ax.set_yticks(range(len(bars)), list(bars), color=INK)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * max(limit, *(sum(parts.values()) / GIB for parts in bars.values())))
    ax.set_xlabel("GiB on one rank", color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    run = found["run"]
    what = f"{found['model']['name']} on {found['hardware']['name']}"
    figure.suptitle(f"{what}: {run['tokens']:,} tokens over a ring of {run['ranks']:,}", color=INK, fontsize=11)
    figure.legend(loc="lower center", ncols=min(len(names), 5), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.05 + 0.08 * (len(names) > 5), 1, 0.98))
    save_picture(figure, path, 120)
    plt.close(figure)

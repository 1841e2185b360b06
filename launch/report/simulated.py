"""The section of a report's page with what was simulated: files of `ringattn simulate` that lie beside the sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ringattn.errors import InputError
from ringattn.launch.report.charts import COLORS, MARKERS, over_ranks

FILES = "simulated*.json"


def simulations(folder: Path) -> list[dict[str, Any]]:
    """A panel for each file, with a line for each way of scaling. Raises `InputError` for a file that is none."""
    return [_panel(file) for file in sorted(folder.glob(FILES))]


def _panel(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        curves, config = found["curves"], found["config"]
        ranks = [[point["ranks"] for point in points] for points in curves.values()]
        seconds = [[point["total_s"] for point in points] for points in curves.values()]
        shares = [[100 * point["efficiency"] for point in points] for points in curves.values()]
        waits = [[100 * sum(each["waiting_s"][2] for each in point["passes"]) / point["total_s"] for point in points]
                 for points in curves.values()]  # fmt: skip
        heading = f"{config['schedule']}, {config['tokens']:,} tokens, {found['cluster']['name']}"
        source = found["cluster"]["source"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(
            f"{file} is not a simulation of this version of ringattn: {error!r}; write it again with `ringattn "
            f"simulate json={file}`, or move it away"
        ) from error
    rate = "Allowed pairs alone, at the kernel's rate, over the simulated time."
    measures = (
        ("Time of a call, simulated", "Nothing of it was measured.", "s", seconds),
        ("Efficiency, simulated", rate, "%", shares),
        ("Waiting, simulated", "Of the rank that waits most.", "% of the time", waits),
    )
    charts = [
        over_ranks(title, note, unit, list(zip(ranks, values, strict=True)), logarithmic=unit == "s")
        for title, note, unit, values in measures
    ]
    legend = [(f"{name} scaling", COLORS[n], MARKERS[n][1]) for n, name in enumerate(curves)]
    return {"title": heading, "note": source, "legend": legend, "charts": charts}

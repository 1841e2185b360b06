"""One page of HTML that shows a sweep: no network, no other file, light and dark, screen and paper.

Files of `ringattn simulate` in the folder of the sweep get a section of their own.
Guarantees: text of a record is text on the page, never markup.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ringattn.errors import InputError
from ringattn.launch.report.charts import COLORS, MARKERS, charts_of, over_ranks
from ringattn.launch.report.points import SINGLE, Panel, Sweep, panels_of, series_of
from ringattn.launch.report.tables import commands, environments_of, facts_of, tables_of

TEMPLATE = "page.html"
OPEN_PANELS = 4
"""Panels of a view that are unfolded at first."""
DRAWN_PANELS = 12
"""Panels of a page: about a hundred charts, two megabytes."""


def page_of(sweep: Sweep, title: str, summary: str, say: Callable[[str], None]) -> str:
    """The page as HTML. `say` is told what is drawn, a line at a time."""
    found = series_of(sweep)
    panels = [panel for panel in panels_of(found) if panel.view is not SINGLE or len(panel.lines) > 1]
    drawn: list[tuple[Panel, dict[str, Any]]] = []
    for number, panel in enumerate(panels[:DRAWN_PANELS], 1):
        say(f"panel {number} of {min(len(panels), DRAWN_PANELS)}")
        drawn.append((panel, _panel(sweep, panel)))
    views = [(view, [shown for _, shown in group]) for view, group in groupby(drawn, key=lambda one: one[0].view)]
    template = resources.files("ringattn.launch.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        title=title,
        summary=summary,
        facts=facts_of(sweep),
        commands=commands(sweep),
        views=views,
        open_panels=OPEN_PANELS,
        undrawn=max(0, len(panels) - DRAWN_PANELS),
        simulations=simulations(sweep.folder),
        tables=tables_of(sweep, found),
        environments=environments_of(sweep),
    )


def _panel(sweep: Sweep, panel: Panel) -> dict[str, Any]:
    legend = [(name, COLORS[n], MARKERS[n][1]) for n, (name, _) in enumerate(panel.lines)]
    return {"title": panel.title, "legend": legend, "charts": charts_of(sweep, panel)}


# --- simulations -----------------------------------------------------------------------------------------------------


FILES = "simulated*.json"


def simulations(folder: Path) -> list[dict[str, Any]]:
    """A panel for each file, with a line for each way of scaling. Raises `InputError` for a file that is none."""
    return [_simulated_panel(file) for file in sorted(folder.glob(FILES))]


def _simulated_panel(file: Path) -> dict[str, Any]:
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

"""One page of HTML that shows a sweep: no network, no other file, light and dark, screen and paper.

Guarantees: whatever a record says is text on the page, never markup.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import Environment, StrictUndefined

from ringattn.launch.report.charts import COLORS, MARKERS, charts_of
from ringattn.launch.report.points import Sweep
from ringattn.launch.report.series import SINGLE, Panel, panels_of, series_of
from ringattn.launch.report.simulated import simulations
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

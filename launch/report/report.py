"""`ringattn report`: what a sweep found, as Markdown, as one page of HTML, and as a table on the terminal.

The page needs no network and no other file. Files of `ringattn simulate` in the folder of the sweep get a section.
Guarantees: an unfinished sweep and one of failures alone are reported as well; a report reads its folder and writes two
files there, nothing else; text of a record is text on the page, never markup.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringattn.errors import InputError
from ringattn.launch.outputs import writing
from ringattn.launch.report.points import SINGLE, Sweep, differing, panels_of, read_sweep, series_of
from ringattn.launch.report.tables import commands, console_of, environments_of, facts_of, markdown_table, tables_of
from ringattn.observe.files import write_file

if TYPE_CHECKING:
    from rich.console import Console

HELP = """usage: ringattn report DIR

Show what a sweep found: a table here, DIR/report.md, and DIR/report.html with charts, which opens in any browser.

  DIR  folder of a sweep, finished or not

Returns 0, or 2 if there is nothing to report."""
WIDTH = 200
"""Columns of a table where the output has no width of its own."""
TEMPLATE = "page.html"
OPEN_PANELS = 4
"""Panels of a view that are unfolded at first."""
DRAWN_PANELS = 12
"""Panels of a page: about a hundred charts, two megabytes."""
SIMULATED = "simulated*.json"


def main(argv: Sequence[str]) -> int:
    """The command. Raises `InputError` for bad options, and for a folder without points."""
    if "--help" in argv or "-h" in argv:
        print(HELP)
        return 0
    if len(argv) != 1:
        raise InputError(f"expected one folder, got {' '.join(argv) or 'nothing'}; --help says more")
    sweep = read_sweep(Path(argv[0]))
    console = console_of(WIDTH)
    console.print(summary_of(sweep), highlight=False, markup=False)
    for table in tables_of(sweep, series_of(sweep), brief=True):
        console.print(table.for_terminal())
    with _drawing(console) as say:
        page = page_of(sweep, say)
    for name, text in (("report.md", markdown_of(sweep)), ("report.html", page)):
        with writing("report", sweep.folder / name):
            write_file(sweep.folder / name, text)
        print(f"written: {sweep.folder / name}")
    return 0


@contextmanager
def _drawing(console: Console) -> Iterator[Callable[[str], None]]:
    """Show what is drawn: one line that changes on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield lambda line: print(f"drawing: {line}", flush=True)
        return
    with console.status("drawing") as status:
        yield lambda line: status.update(f"drawing: {line}")


def title_of(sweep: Sweep) -> str:
    """Return the heading of a report."""
    return f"Sweep {sweep.folder.resolve().name}"


def summary_of(sweep: Sweep) -> str:
    """Return how many points there are, how they ended, when and with which code they ran."""
    words = f"{len(sweep.points)} point{'s'[: len(sweep.points) > 1]}: {len(sweep.ok)} with results"
    if sweep.failed:
        words += f", {len(sweep.failed)} without"
    if sweep.repeated:
        words += f"; {sweep.repeated} run more than once, the last time counts"
    if sweep.unreadable:
        words += f"; {sweep.unreadable} lines could not be read"
    days = sorted({_day(point.record["started"]) for point in sweep.points if point.record.get("started")})
    if days:
        words += f". Run {' to '.join(dict.fromkeys((days[0], days[-1])))}"
    if commits := sorted({_commit(point.record["commit"]) for point in sweep.points if point.record.get("commit")}):
        words += f", commit {', '.join(commits)}"
    if different := differing(sweep.environments.values()):
        words += f", in {len(sweep.environments)} environments that differ in {', '.join(different)}"
    return words + "."


def _commit(name: str) -> str:
    """Return a commit's first digits, with what follows them, as -dirty."""
    digits, dash, rest = name.partition("-")
    return f"{digits[:12]}{dash}{rest}"


def _day(started: str) -> str:
    try:
        return datetime.fromisoformat(started).date().isoformat()
    except ValueError:
        return started


def markdown_of(sweep: Sweep) -> str:
    """Return the report as Markdown: the head, the tables, the environments."""
    parts = [f"# {title_of(sweep)}", summary_of(sweep), "Charts: `report.html` beside this file."]
    for heading, rows in facts_of(sweep):
        parts += [f"## {heading}", _list(rows)]
    for table in tables_of(sweep, series_of(sweep)):
        parts += [f"## {table.title}", markdown_table(table), table.note]
    for name, rows in environments_of(sweep):
        parts += [f"## Environment {name}", _list(rows)]
    if found := commands(sweep):
        parts += ["## To repeat a point", "\n".join(["```sh", *found, "```"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _list(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- {key}: {value}" for key, value in rows)


# --- the page --------------------------------------------------------------------------------------------------------


def page_of(sweep: Sweep, say: Callable[[str], None]) -> str:
    """Return the page as HTML. `say` is told what is drawn, a line at a time."""
    from jinja2 import Environment, StrictUndefined

    from ringattn.launch.report.charts import charts_of

    found = series_of(sweep)
    panels = [panel for panel in panels_of(found) if panel.view is not SINGLE or len(panel.lines) > 1]
    drawn = []
    for number, panel in enumerate(panels[:DRAWN_PANELS], 1):
        say(f"panel {number} of {min(len(panels), DRAWN_PANELS)}")
        drawn.append((panel.view, _panel(panel.title, [name for name, _ in panel.lines], charts_of(sweep, panel))))
    template = resources.files("ringattn.launch.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        title=title_of(sweep),
        summary=summary_of(sweep),
        facts=facts_of(sweep),
        commands=commands(sweep),
        views=[(view, [panel for _, panel in group]) for view, group in groupby(drawn, key=lambda pair: pair[0])],
        open_panels=OPEN_PANELS,
        undrawn=max(0, len(panels) - DRAWN_PANELS),
        simulations=[simulated_panel(file) for file in sorted(sweep.folder.glob(SIMULATED))],
        tables=tables_of(sweep, found),
        environments=environments_of(sweep),
    )


def _panel(title: str, names: Sequence[str], charts: Sequence[Any], note: str = "") -> dict[str, Any]:
    from ringattn.launch.report.charts import COLORS, MARKERS

    legend = [(name, color, marker) for name, color, (_, marker) in zip(names, COLORS, MARKERS, strict=False)]
    return {"title": title, "note": note, "legend": legend, "charts": charts}


def simulated_panel(file: Path) -> dict[str, Any]:
    """Return the panel of a simulation, a line for each scaling. Raises `InputError` for a file of another kind."""
    from ringattn.launch.report.charts import Line, line_chart

    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        curves, config = found["curves"], found["config"]
        measures = {
            ("Time of a call, simulated", "Nothing of it was measured.", "s"): lambda point: point["total_s"],
            ("Efficiency, simulated", "Allowed pairs alone, at the kernel's rate, over the simulated time.", "%"):
                lambda point: point["efficiency"],
            ("Waiting, simulated", "Of the rank that waits most.", "% of the time"):
                lambda point: sum(each["waiting_s"][2] for each in point["passes"]) / point["total_s"],
        }  # fmt: skip
        charts = []
        for (title, note, unit), value in measures.items():
            lines = [Line(number, [point["ranks"] for point in points], [value(point) for point in points])
                     for number, points in enumerate(curves.values())]  # fmt: skip
            charts.append(line_chart(title, note, "ranks", unit, lines, log_base=10 if unit == "s" else 0))
        heading = f"{config['schedule']}, {config['tokens']:,} tokens, {found['cluster']['name']}"
        return _panel(heading, [f"{name} scaling" for name in curves], charts, found["cluster"]["source"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(
            f"{file} is not a simulation of this version of ringattn: {error!r}; write it again with `ringattn "
            f"simulate json={file}`, or move it away"
        ) from error

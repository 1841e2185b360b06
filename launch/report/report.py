"""`ringattn report`: print the results of a sweep as tables, and write them as Markdown and as an HTML page.

Each file of `ringattn simulate` in the folder of the sweep becomes a section of the page. Guarantees: unfinished sweeps
and sweeps without any result are reported too. A report reads only its folder, and writes only two files there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ringattn.errors import InputError
from ringattn.launch.folders import writing
from ringattn.launch.options import wrapped
from ringattn.launch.report.points import (
    Sweep,
    differing,
    read_sweep,
    series_of,
)
from ringattn.launch.report.tables import (
    commands,
    console_of,
    environments_of,
    facts_of,
    markdown_table,
    tables_of,
)
from ringattn.observe.files import write_file

if TYPE_CHECKING:
    from rich.console import Console

HELP = """usage: ringattn report DIR

Show the results of a sweep: a table here, DIR/report.md, and DIR/report.html with charts, which opens in any browser.

  DIR  folder of a sweep, finished or not

Returns 0, or 2 if there is nothing to report."""
WIDTH = 200
"""Columns of a table if the output is not a terminal."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises `InputError` for bad options, and for a folder without points."""
    if "--help" in argv or "-h" in argv:
        print("\n".join(wrapped(HELP)))
        return 0
    if len(argv) != 1:
        raise InputError(f"expected one folder, got {' '.join(argv) or 'nothing'}; see --help")
    sweep = read_sweep(Path(argv[0]))
    console = console_of(WIDTH)
    console.print(summary_of(sweep), highlight=False, markup=False)
    for table in tables_of(sweep, series_of(sweep), brief=True):
        console.print(table.for_terminal())
    from ringattn.launch.report.page import page_of  # loads matplotlib, which --help need not wait for

    with _drawing(console) as say:
        page = page_of(sweep, title_of(sweep), summary_of(sweep), say)
    for name, text in (("report.md", markdown_of(sweep)), ("report.html", page)):
        with writing("report", sweep.folder / name):
            write_file(sweep.folder / name, text)
        print(f"written: {sweep.folder / name}")
    return 0


@contextmanager
def _drawing(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the progress of drawing: one changing line on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield lambda line: print(f"drawing: {line}", flush=True)
        return
    with console.status("drawing") as status:
        yield lambda line: status.update(f"drawing: {line}")


def title_of(sweep: Sweep) -> str:
    """Return the heading of a report."""
    return f"Sweep {sweep.folder.resolve().name}"


def summary_of(sweep: Sweep) -> str:
    """Return a text about the sweep: the number of points, how they ended, and when and with which code they ran."""
    text = f"{len(sweep.points)} point{'s'[: len(sweep.points) > 1]}: {len(sweep.ok)} with results"
    if sweep.failed:
        text += f", {len(sweep.failed)} without results"
    if sweep.repeated:
        text += f"; {sweep.repeated} run more than once, of which the last run is shown"
    if sweep.unreadable:
        text += f"; {sweep.unreadable} lines could not be read"
    days = sorted({_day(point.record["started"]) for point in sweep.points if point.record.get("started")})
    if days:
        text += f". Run {' to '.join(dict.fromkeys((days[0], days[-1])))}"
    if commits := sorted({_commit(point.record["commit"]) for point in sweep.points if point.record.get("commit")}):
        text += f", commit {', '.join(commits)}"
    if different := differing(sweep.environments.values()):
        text += f", in {len(sweep.environments)} environments that differ in {', '.join(different)}"
    return text + "."


def _commit(name: str) -> str:
    """Return a commit shortened to 12 digits, with its suffix such as -dirty."""
    digits, dash, rest = name.partition("-")
    return f"{digits[:12]}{dash}{rest}"


def _day(started: str) -> str:
    try:
        return datetime.fromisoformat(started).date().isoformat()
    except ValueError:
        return started


def markdown_of(sweep: Sweep) -> str:
    """Return the report as Markdown: the summary, tables, configuration, environments, and commands."""
    parts = [f"# {title_of(sweep)}", summary_of(sweep), "Charts: `report.html` in the same folder."]
    for table in tables_of(sweep, series_of(sweep)):
        parts += [f"## {table.title}", markdown_table(table), table.note]
    for heading, rows in facts_of(sweep):
        parts += [f"## {heading}", _list(rows)]
    for name, rows in environments_of(sweep):
        parts += [f"## Environment {name}", _list(rows)]
    if lines := commands(sweep):
        parts += ["## To repeat a point", "\n".join(["```sh", *lines, "```"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _list(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- {key}: {value}" for key, value in rows)

"""The tables of a report, as text: results with the best of each group, scaling, failures, options, environments.

Guarantees: a column without any value is left out; an unknown value is a dash; predictions are labelled as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ringattn.launch.report.points import (
    AXES,
    CHOICES,
    STARTING,
    Point,
    Series,
    Sweep,
    by_size,
    differing,
    flat,
    groups_of,
    scaling,
)

BEST, UNKNOWN = "★", "–"
MIB = 2**20
ALWAYS_SHOWN = ("causal", "window", "mask", "schedule", "layout", "dtype", "transport", "engine", "heads", "kv_heads",
                "head_dim")  # fmt: skip
"""Options at the top of the list of shared options, in this order; the rest follow by name."""


class Table(NamedTuple):
    """A table with rows of text.

    `marked` has the numbers of the rows to emphasize, and `note` is a sentence below the table. The first `texts`
    columns are words; the others are numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    marked: frozenset[int] = frozenset()
    note: str = ""
    texts: int = 1

    def for_terminal(self) -> RichTable:
        """Return the table for a terminal; marked rows are bold."""
        shown = RichTable(title=self.title, caption=self.note, box=box.SIMPLE_HEAD, title_justify="left")
        for number, column in enumerate(self.columns):
            shown.add_column(column, justify="left" if number < self.texts else "right", overflow="fold")
        for number, row in enumerate(self.rows):
            shown.add_row(*map(escape, row), style="bold" if number in self.marked else "")
        return shown


def markdown_table(table: Table) -> str:
    """Return the table as Markdown."""
    rule = [":--" if n < table.texts else "--:" for n in range(len(table.columns))]
    cells = [table.columns, rule, *([cell.replace("|", "\\|") for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def console_of(width: int) -> Console:
    """Return a console for standard output. If that is not a terminal, its lines have `width` columns."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def tables_of(sweep: Sweep, every: Sequence[Series], brief: bool = False) -> list[Table]:
    """Return the tables of results, scaling and failures that are not empty. If `brief`, they fit into a terminal."""
    tables = [results(sweep, brief), scalings(sweep, every), failures(sweep)]
    return [table for table in tables if table.rows]


def results(sweep: Sweep, brief: bool = False) -> Table:
    """Return a table with a row for each point with results, grouped by workload and ranks and sorted by time."""
    columns = [column for column in _columns(sweep, brief) if any(column[1](point) != UNKNOWN for point in sweep.ok)]
    rows: list[tuple[str, ...]] = []
    marked: set[int] = set()
    close = False
    for group in groups_of(sweep):
        ok = [point for point in group if point.ok]
        if is_best(sweep, ok):
            marked.add(len(rows))
        else:
            close = close or (len(ok) > 1 and ok[0].world_size > 1)
        rows += [(*_options(sweep, point), *(show(point) for _, show in columns)) for point in ok]
    spread = "" if brief else ", with p10 to p90"
    note = f"Times are medians of the slowest rank{spread}; bytes are the largest value of any rank."
    if marked:
        choices = ", ".join(key for key in CHOICES if key in sweep.varying)
        rows = [(BEST if n in marked else "", *row) for n, row in enumerate(rows)]
        note += f" {BEST}: the fastest of the points that differ only in {choices}"
        note += ", unless its p10 to p90 overlaps that of the next." if close else "."
    elif close:
        note += (
            " No point is marked as the fastest, because p10 to p90 of the two fastest points of each group overlap."
        )
    head = (*(("best",) if marked else ()), *sweep.columns, "tokens", "ranks")
    names = tuple(name for name, _ in columns)
    return Table("Results", (*head, *names), rows, frozenset(marked), f"{note} {prediction_text(sweep)}".strip(),
                 texts=len(head) - 2)  # fmt: skip


def is_best(sweep: Sweep, fastest_first: Sequence[Point]) -> bool:
    """Return whether the first point is faster than the second beyond noise: their p10 to p90 do not overlap.

    The result is False for points of one rank, on which the choices have no effect.
    """
    if len(fastest_first) < 2 or fastest_first[0].world_size == 1:
        return False
    return sweep.pass_spread(fastest_first[0])[1] < sweep.pass_spread(fastest_first[1])[0]


def _columns(sweep: Sweep, brief: bool) -> list[tuple[str, Callable[[Point], str]]]:
    """Return the heading of each column of results, with the function that returns a point's text.

    If `brief`, only the most important columns are returned.
    """

    def timed(key: str) -> Callable[[Point], str]:
        def show(point: Point) -> str:
            median, (low, high) = point.median(key), point.spread(key)
            return figure(median) if brief or median is None else f"{figure(median)} ({figure(low)}–{figure(high)})"

        return show

    def mib(key: str) -> Callable[[Point], str]:
        return lambda point: UNKNOWN if (most := point.most(key)) is None else figure(most / MIB)

    all_columns: list[tuple[str, Callable[[Point], str]]] = [
        ("forward ms", timed("forward_ms")),
        ("predicted forward ms", lambda point: figure(point.predicted("forward_ms"))),
        ("backward ms", timed("backward_ms")),
        ("predicted backward ms", lambda point: figure(point.predicted("backward_ms"))),
        ("predicted ms", lambda point: figure(predicted_ms(sweep, point))),
        ("tokens/s", lambda point: figure(sweep.tokens_per_s(point))),
        ("TFLOP/s", lambda point: figure(point.number("tflops"))),
        ("exposed ms", lambda point: figure(point.exposed_ms(sweep.passes))),
        (overlap_name(sweep), lambda point: figure(point.number("overlap"))),
        ("peak MiB", mib("peak_bytes")),
        ("pool MiB", mib("pool_bytes")),
        ("sent MiB", mib("bytes_sent")),
        ("messages", lambda point: figure(point.most("messages"))),
        ("largest error", _error),
    ]
    first = ("forward ms", "backward ms", "predicted ms", "tokens/s", "exposed ms", "peak MiB", "largest error")
    return [column for column in all_columns if (column[0] in first if brief else column[0] != "predicted ms")]


def _error(point: Point) -> str:
    errors = [value for value in (point.record.get("error") or {}).values() if value is not None]
    return f"{max(errors):.1e}" if errors else UNKNOWN


def _options(sweep: Sweep, point: Point) -> tuple[str, ...]:
    return (*(sweep.shown(point, key) or UNKNOWN for key in sweep.columns), f"{point.tokens:,}", str(point.world_size))


def scalings(sweep: Sweep, every: Sequence[Series]) -> Table:
    """Return a table of the speed-up and efficiency of each point of the strong and weak scaling series."""
    rows = []
    for series in every:
        if series.view.ratio:
            for point, ratio in zip(series.points, scaling(sweep, series), strict=True):
                figures = (UNKNOWN, UNKNOWN) if ratio is None else (f"{ratio.speed_up:.2f}", f"{ratio.efficiency:.0%}")
                sizes = (str(point.world_size), f"{point.tokens:,}", figure(sweep.pass_ms(point)))
                rows.append((series.view.name, series.label, *sizes, *figures))
    note = (
        "Compared with the fewest ranks of the same series, which count as perfect. One rank is the same for every "
        "schedule, layout, transport and number of nodes. Strong: the same tokens; speed-up is the ratio of times. "
        "Weak: the same tokens per rank; speed-up is the ratio of the rates of work, because the pairs of a rank grow "
        "with the sequence."
    )
    columns = ("scaling", "series", "ranks", "tokens", f"{' + '.join(sweep.passes)} ms", "speed-up", "efficiency")
    return Table("Scaling", columns, rows, note=note, texts=2)


def failures(sweep: Sweep) -> Table:
    """Return a table with a row for each point without results."""
    rows = []
    for point in sweep.failed:
        message = " ".join(str(point.record.get("message") or UNKNOWN).split())
        rows.append((*_options(sweep, point), str(point.record["status"]), message))
    note = "These configurations ran out of memory, failed or timed out."
    return Table("Points without results", (*sweep.columns, "tokens", "ranks", "status", "message"), rows, note=note,
                 texts=len(sweep.columns) + 4)  # fmt: skip


def shared_options(sweep: Sweep) -> list[tuple[str, str]]:
    """Return the options that all points share and their values, or the values that auto took. Omit empty values."""
    options = sweep.points[0].options
    keys = [key for key in options if key not in (*sweep.varying, *AXES, *STARTING) and options[key]]
    order = {key: place for place, key in enumerate(ALWAYS_SHOWN)}

    def value(key: str) -> str:
        taken = {point.taken(key) for point in sweep.ok if sweep.option(point, key) == "auto"}
        return f"auto: {', '.join(sorted(taken))}" if taken - {"auto"} else options[key]

    return [(key, value(key)) for key in sorted(keys, key=lambda key: (order.get(key, len(order)), key))]


def swept_options(sweep: Sweep) -> list[tuple[str, str]]:
    """Return each option that differs, with its values in order."""
    sizes = {"ranks": {p.world_size for p in sweep.points}, "tokens": {p.tokens for p in sweep.points}}
    numbers = [(key, ", ".join(f"{value:,}" for value in sorted(values))) for key, values in sizes.items()]
    texts = [(key, {point.options.get(key) or UNKNOWN for point in sweep.points}) for key in sweep.varying]
    return numbers + [(key, ", ".join(sorted(values, key=by_size))) for key, values in texts]


def facts_of(sweep: Sweep) -> list[tuple[str, Sequence[tuple[str, str]]]]:
    """Return two sections of a report with their headings: the options that differ, and those that all points share."""
    return [("Swept", swept_options(sweep)), ("The same in all points", shared_options(sweep))]


def environments_of(sweep: Sweep) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the facts of each environment that are not empty; after the first, only those that differ."""
    different = differing(sweep.environments.values())
    result: list[tuple[str, list[tuple[str, str]]]] = []
    for name, facts in sweep.environments.items():
        rows = [(key, value) for key, value in flat(facts) if value and (not result or key in different)]
        result.append((name, rows))
    return result


def commands(sweep: Sweep) -> list[str]:
    """Return the commands that repeat the points, those with results first."""
    return list(dict.fromkeys(p.record["command"] for p in (*sweep.ok, *sweep.failed) if p.record.get("command")))


def figure(value: float | None) -> str:
    """Return a number with three significant digits, or as an integer if it is 100 or more; a dash for None."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def overlap_name(sweep: Sweep) -> str:
    """Return the name of the overlap column, which says "at most" if a transport does not report arrivals."""
    bound = any(point.record.get("arrivals_known") is False for point in sweep.ok)
    return "overlap, at most" if bound else "overlap"


def predicted_ms(sweep: Sweep, point: Point) -> float | None:
    """Return the prediction for the same passes as `Sweep.pass_ms`."""
    parts = [point.predicted(f"{name}_ms") for name in sweep.passes]
    return None if None in parts else sum(map(float, parts))


def prediction_text(sweep: Sweep) -> str:
    """Return a sentence that names the machines of the predictions; empty if there are no predictions."""
    machines = {
        f"{point.predicted('cluster')} ({'calibrated' if point.predicted('calibrated') else 'not calibrated'})"
        for point in sweep.ok
        if point.predicted("cluster")
    }
    return f"Predictions are for: {'; '.join(sorted(machines))}." if machines else ""

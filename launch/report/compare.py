"""`ringattn compare`: two sweeps, point by point; did anything get worse?

Points meet by the hash of their configuration. Guarantees: a time counts as changed only if its median moved by more
than the threshold and by more than either side's own spread from p10 to p90, so that noise is no verdict; bytes have no
spread, and a point that no longer has results is worse, whatever the threshold.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from ringattn.errors import InputError
from ringattn.launch.config import keys_of, load
from ringattn.launch.options import help_text, option
from ringattn.launch.outputs import writing
from ringattn.launch.report.points import Point, Sweep, differing, read_sweep
from ringattn.launch.report.report import terminal_table
from ringattn.launch.report.tables import UNKNOWN, Table, figure
from ringattn.launch.words import no_option
from ringattn.observe.files import write_file

WORSE, BETTER, SAME, NOTHING = "worse", "better", "same", "no results"
TIMES, BYTES = ("forward_ms", "backward_ms"), ("peak_bytes", "bytes_sent")
MIB = 2**20
WIDTH = 160
"""Columns of the table where the output has no width of its own."""


@dataclass
class CompareConfig:
    """What counts as a difference."""

    threshold: float = option(0.05, "share by which a figure may grow before it counts as worse", above=0.0)
    json: str = option("", "file to write everything into (JSON)", writes="file")


class Change(NamedTuple):
    """One figure of a point, before and after: milliseconds, or bytes of the rank that has most. `noise`: the greater
    spread of the two; `verdict`: worse, better or same."""

    before: float
    after: float
    noise: float
    verdict: str

    @property
    def share(self) -> float:
        """Growth as a share of what was before; infinite from nothing to something."""
        if self.before == 0:
            return 0.0 if self.after == 0 else float("inf")
        return self.after / self.before - 1


@dataclass(frozen=True)
class Pair:
    """A point of both sweeps. `changes`: by the name of the figure, those that both sides have."""

    before: Point
    after: Point
    verdict: str
    changes: dict[str, Change] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Two sweeps. `only_before` and `only_after`: the points that the other side lacks."""

    pairs: list[Pair]
    only_before: list[Point]
    only_after: list[Point]

    def count(self, verdict: str) -> int:
        """How many pairs have this verdict."""
        return sum(pair.verdict == verdict for pair in self.pairs)


def main(argv: Sequence[str]) -> int:
    """The command: 0 if nothing got worse, 1 if something did. Raises `InputError` for bad options and folders."""
    if "--help" in argv or "-h" in argv:
        about = "Compare the sweep in folder B with the one in folder A. Returns 1 if a point got worse, 0 if none did."
        print(help_text("compare A B", about, CompareConfig))
        return 0
    if flags := [at for at, word in enumerate(argv) if word.startswith("-")]:
        raise no_option(argv, flags[0], keys_of(CompareConfig))
    folders = [word for word in argv if "=" not in word]
    if len(folders) != 2:
        raise InputError(f"expected two folders, got {' '.join(folders) or 'none'}; --help says more")
    config = load([word for word in argv if "=" in word], CompareConfig)
    before, after = (read_sweep(Path(folder)) for folder in folders)
    found = compare(before, after, config.threshold)
    if not found.pairs:
        raise InputError(f"{folders[0]} and {folders[1]} have no configuration in common, so nothing can be compared")
    _show(before, after, found, config)
    if config.json:
        with writing("json", config.json):
            write_file(Path(config.json), json.dumps(_as_data(before, after, found, config), indent=1) + "\n")
        print(f"written: {config.json}")
    return 1 if found.count(WORSE) else 0


def compare(before: Sweep, after: Sweep, threshold: float) -> Comparison:
    """Every point of `before` with the same one of `after`. `threshold`: see `CompareConfig`."""
    old = {point.record["hash"]: point for point in before.points}
    new = {point.record["hash"]: point for point in after.points}
    return Comparison(
        [_pair(point, new[key], threshold) for key, point in old.items() if key in new],
        [point for key, point in old.items() if key not in new],
        [point for key, point in new.items() if key not in old],
    )


def _pair(before: Point, after: Point, threshold: float) -> Pair:
    if not (before.ok and after.ok):
        verdict = {(True, False): WORSE, (False, True): BETTER}.get((before.ok, after.ok), NOTHING)
        return Pair(before, after, verdict)
    changes = {}
    for key in TIMES:
        old, new = before.median(key), after.median(key)
        if old is not None and new is not None:
            noise = max(high - low for low, high in (before.spread(key) or (0, 0), after.spread(key) or (0, 0)))
            changes[key] = _change(old, new, noise, threshold)
    for key in BYTES:
        old, new = before.most(key), after.most(key)
        if old is not None and new is not None:
            changes[key] = _change(old, new, 0.0, threshold)
    verdicts = {change.verdict for change in changes.values()}
    return Pair(before, after, next((one for one in (WORSE, BETTER) if one in verdicts), SAME), changes)


def _change(before: float, after: float, noise: float, threshold: float) -> Change:
    difference = after - before
    counts = abs(difference) > max(noise, threshold * before)
    return Change(before, after, noise, (WORSE if difference > 0 else BETTER) if counts else SAME)


def _show(before: Sweep, after: Sweep, found: Comparison, config: CompareConfig) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for words in _differences(before, after):
        print(f"note: {words}")
    console.print(terminal_table(table_of(before, found, config.threshold)))
    for points, folder in ((found.only_before, before.folder), (found.only_after, after.folder)):
        for point in points:
            print(f"only in {folder}: {_words(before, after, point)}")
    print(
        f"{len(found.pairs)} points: {found.count(WORSE)} worse, {found.count(BETTER)} better, {found.count(SAME)} the "
        f"same, {found.count(NOTHING)} without results on both sides; {len(found.only_before) + len(found.only_after)} "
        "on one side alone"
    )


def table_of(sweep: Sweep, found: Comparison, threshold: float) -> Table:
    """A row for each pair, what got worse first; those rows are marked."""
    order = (WORSE, NOTHING, BETTER, SAME)
    pairs = sorted(found.pairs, key=lambda pair: order.index(pair.verdict))
    rows = []
    for pair in pairs:
        options = [sweep.option(pair.before, key) or UNKNOWN for key in sweep.varying]
        sizes = [f"{pair.before.tokens:,}", str(pair.before.world_size)]
        figures = [_cell(pair, key) for key in (*TIMES, *BYTES)]
        rows.append((*options, *sizes, *figures, _verdict(pair)))
    head = (*sweep.varying, "tokens", "ranks", "forward ms", "backward ms", "peak MiB", "sent MiB", "verdict")
    marked = frozenset(n for n, pair in enumerate(pairs) if pair.verdict == WORSE)
    note = f"Before → after. A change counts beyond {threshold:.0%} and, for times, beyond p10 to p90 of either side."
    return Table("Compared", head, rows, marked, note, texts=len(sweep.varying))


def _cell(pair: Pair, key: str) -> str:
    if key not in pair.changes:
        return UNKNOWN
    change = pair.changes[key]
    scale = MIB if key in BYTES else 1
    return f"{figure(change.before / scale)} → {figure(change.after / scale)} ({change.share:+.1%})"


def _verdict(pair: Pair) -> str:
    if not pair.changes:
        return f"{pair.verdict}: {pair.before.record['status']} → {pair.after.record['status']}"
    names = [name.rsplit("_", 1)[0] for name, change in pair.changes.items() if change.verdict == pair.verdict != SAME]
    return f"{pair.verdict}: {', '.join(names)}" if names else pair.verdict


def _words(before: Sweep, after: Sweep, point: Point) -> str:
    keys = dict.fromkeys((*before.varying, *after.varying))
    words = [f"{key} {before.option(point, key)}" for key in keys if point.options.get(key)]
    return ", ".join([*words, f"{point.tokens:,} tokens", f"{point.world_size} ranks", point.record["status"]])


def _differences(before: Sweep, after: Sweep) -> list[str]:
    """Facts of the environments that differ, since times of different machines say little about code."""
    keys = differing([*before.environments.values(), *after.environments.values()])
    return [f"the environments differ in {', '.join(keys)}"] if keys else []


def _as_data(before: Sweep, after: Sweep, found: Comparison, config: CompareConfig) -> dict[str, Any]:
    return {
        "before": str(before.folder),
        "after": str(after.folder),
        "threshold": config.threshold,
        "counts": {verdict: found.count(verdict) for verdict in (WORSE, BETTER, SAME, NOTHING)},
        "points": [
            {
                "hash": pair.before.record["hash"],
                "options": pair.before.options,
                "status": [pair.before.record["status"], pair.after.record["status"]],
                "verdict": pair.verdict,
                "changes": {key: change._asdict() for key, change in pair.changes.items()},
            }
            for pair in found.pairs
        ],
        "only_before": [point.record["hash"] for point in found.only_before],
        "only_after": [point.record["hash"] for point in found.only_after],
        "environments": _differences(before, after),
    }

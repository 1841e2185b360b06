"""`ringattn compare`: compare two sweeps point by point and report what got worse.

Points are matched by the hash of their configuration. Guarantees: a time counts as changed only if its median moved by
more than the threshold and by more than the distance from p10 to p90 in either sweep, so noise is not reported. Bytes
have no spread. A point that had results in the first sweep and has none in the second is worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ringattn.errors import InputError
from ringattn.launch.calls import AUTOMATIC
from ringattn.launch.config import keys_of, load
from ringattn.launch.folders import json_output
from ringattn.launch.options import help_text, json_option, no_option, option
from ringattn.launch.report.points import Point, Sweep, differing, read_sweep
from ringattn.launch.report.tables import MIB, UNKNOWN, Table, console_of, figure

WORSE, BETTER, SAME, NOTHING = "worse", "better", "same", "no results"
TIMES, BYTES = ("forward_ms", "backward_ms"), ("peak_bytes", "bytes_sent")
WIDTH = 160
"""Columns of the table if the output is not a terminal."""


@dataclass
class CompareConfig:
    """The options of `ringattn compare`."""

    threshold: float = option(0.05, "share by which a figure may grow before it counts as worse", above=0.0)
    json: str = json_option()


class Change(NamedTuple):
    """One figure of a point in the first and the second sweep: milliseconds, or bytes of the rank that has the most.

    `noise` is the larger of the distances from p10 to p90 in the two sweeps. `verdict` is worse, better or same.
    """

    before: float
    after: float
    noise: float
    verdict: str

    @property
    def share(self) -> float:
        """Return the growth relative to `before`; infinite if only `before` is 0."""
        if self.before == 0:
            return 0.0 if self.after == 0 else float("inf")
        return self.after / self.before - 1


class Pair(NamedTuple):
    """A point that is in both sweeps, and the changes of its figures by name."""

    before: Point
    after: Point
    verdict: str
    changes: dict[str, Change]


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if no point got worse, else 1. Raises `InputError` for bad options and folders."""
    if "--help" in argv or "-h" in argv:
        about = "Compare the sweep in folder B with the one in folder A. Returns 1 if a point got worse, 0 if none did."
        print(help_text("compare A B", about, CompareConfig))
        return 0
    if flags := [index for index, word in enumerate(argv) if word.startswith("-")]:
        raise no_option(argv, flags[0], keys_of(CompareConfig))
    folders = [word for word in argv if "=" not in word]
    if len(folders) != 2:
        raise InputError(f"expected two folders, got {' '.join(folders) or 'none'}; see --help")
    config = load([word for word in argv if "=" in word], CompareConfig)
    with json_output(config.json) as write:
        before, after = (read_sweep(Path(folder)) for folder in folders)
        figures = compared(before, after, config.threshold)
        write(figures)
    return 1 if figures["counts"][WORSE] else 0


def compared(before: Sweep, after: Sweep, threshold: float) -> dict[str, Any]:
    """Print the comparison of two sweeps and return its figures. Raises `InputError` if they share no configuration."""
    old, new = ({point.record["hash"]: point for point in sweep.points} for sweep in (before, after))
    pairs = [_pair(old[key], new[key], threshold) for key in old if key in new]
    if not pairs:
        raise InputError(f"{before.folder} and {after.folder} have no configuration in common: nothing can be compared")
    alone = [[old[key] for key in old if key not in new], [new[key] for key in new if key not in old]]
    different = differing([*before.environments.values(), *after.environments.values()])
    notes = [*different_choices(pairs), *([f"the environments differ in {', '.join(different)}"] if different else [])]
    verdicts = Counter(pair.verdict for pair in pairs)
    for note in notes:
        print(f"note: {note}")
    console_of(WIDTH).print(table_of(before, pairs, threshold).for_terminal())
    for points, sweep in zip(alone, (before, after), strict=True):
        for point in points:
            print(f"only in {sweep.folder}: {_point_text(before, after, point)}")
    print(
        f"{len(pairs)} points: {verdicts[WORSE]} worse, {verdicts[BETTER]} better, {verdicts[SAME]} the "
        f"same, {verdicts[NOTHING]} without results on both sides; {sum(map(len, alone))} in one sweep only"
    )
    return {
        "before": str(before.folder),
        "after": str(after.folder),
        "threshold": threshold,
        "counts": {verdict: verdicts[verdict] for verdict in (WORSE, BETTER, SAME, NOTHING)},
        "points": [_as_data(pair) for pair in pairs],
        "only_before": [point.record["hash"] for point in alone[0]],
        "only_after": [point.record["hash"] for point in alone[1]],
        "notes": notes,
    }


def different_choices(pairs: Sequence[Pair]) -> list[str]:
    """Return a line for each option for which auto took different values in the two sweeps."""
    changes: dict[tuple[str, str, str], int] = Counter(
        (key, pair.before.taken(key), pair.after.taken(key))
        for pair in pairs
        if pair.before.ok and pair.after.ok
        for key in AUTOMATIC
    )
    return [
        f"auto chose another {key} ({before} before, {after} after) in {count} of {len(pairs)} points, so their "
        "times belong to different calls"
        for (key, before, after), count in changes.items()
        if before != after
    ]


def _pair(before: Point, after: Point, threshold: float) -> Pair:
    if not (before.ok and after.ok):
        verdict = {(True, False): WORSE, (False, True): BETTER}.get((before.ok, after.ok), NOTHING)
        return Pair(before, after, verdict, {})
    changes = {}
    for key in (*TIMES, *BYTES):
        old, new = ((point.median if key in TIMES else point.most)(key) for point in (before, after))
        if old is None or new is None:
            continue
        spreads = [point.spread(key) for point in (before, after)] if key in TIMES else [(0.0, 0.0)]
        noise = max(high - low for low, high in spreads)
        counts = abs(new - old) > max(noise, threshold * old)
        changes[key] = Change(old, new, noise, (WORSE if new > old else BETTER) if counts else SAME)
    verdicts = {change.verdict for change in changes.values()}
    return Pair(before, after, next((verdict for verdict in (WORSE, BETTER) if verdict in verdicts), SAME), changes)


def table_of(sweep: Sweep, pairs: Sequence[Pair], threshold: float) -> Table:
    """Return a table with a row for each pair. Pairs that got worse are at the top and marked."""
    pairs = sorted(pairs, key=lambda pair: (WORSE, NOTHING, BETTER, SAME).index(pair.verdict))
    rows = []
    for pair in pairs:
        options = [sweep.shown(pair.before, key) or UNKNOWN for key in sweep.columns]
        sizes = [f"{pair.before.tokens:,}", str(pair.before.world_size)]
        rows.append((*options, *sizes, *(_cell(pair, key) for key in (*TIMES, *BYTES)), _verdict(pair)))
    head = (*sweep.columns, "tokens", "ranks", "forward ms", "backward ms", "peak MiB", "sent MiB", "verdict")
    marked = frozenset(n for n, pair in enumerate(pairs) if pair.verdict == WORSE)
    note = f"Before → after. A change counts beyond {threshold:.0%} and, for times, beyond p10 to p90 of either side."
    return Table("Compared", head, rows, marked, note, texts=len(sweep.columns))


def _cell(pair: Pair, key: str) -> str:
    if key not in pair.changes:
        return UNKNOWN
    change, scale = pair.changes[key], MIB if key in BYTES else 1
    return f"{figure(change.before / scale)} → {figure(change.after / scale)} ({change.share:+.1%})"


def _verdict(pair: Pair) -> str:
    if not pair.changes:
        return f"{pair.verdict}: {pair.before.record['status']} → {pair.after.record['status']}"
    names = [name.rsplit("_", 1)[0] for name, change in pair.changes.items() if change.verdict == pair.verdict != SAME]
    return f"{pair.verdict}: {', '.join(names)}" if names else pair.verdict


def _point_text(before: Sweep, after: Sweep, point: Point) -> str:
    keys = dict.fromkeys((*before.varying, *after.varying))
    options = [f"{key} {before.option(point, key)}" for key in keys if point.options.get(key)]
    return ", ".join([*options, f"{point.tokens:,} tokens", f"{point.world_size} ranks", point.record["status"]])


def _as_data(pair: Pair) -> Mapping[str, Any]:
    return {
        "hash": pair.before.record["hash"],
        "options": pair.before.options,
        "resolved": [pair.before.record.get("resolved"), pair.after.record.get("resolved")],
        "status": [pair.before.record["status"], pair.after.record["status"]],
        "verdict": pair.verdict,
        "changes": {key: change._asdict() for key, change in pair.changes.items()},
    }

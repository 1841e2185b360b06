"""Read the folder of a sweep: its points, its environments, the options that differ, and the series of points.

A series is a line of points that share every option except the one on the axis. A sweep has four views. In strong
scaling, points have more ranks and the same tokens. In weak scaling, they have more ranks and the same tokens per rank.
In the view "length", they have more tokens and the same ranks. In the view "single", each series is one point.
Guarantees: a folder that cannot be reported raises `InputError` with the reason. A line that a killed sweep left
unfinished is counted and skipped. If several lines have the same configuration, the last counts. Every point with
results is in at least one series, except points of one rank that repeat the work of another point. Series that do the
same work on one rank share that point.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ringattn.errors import InputError
from ringattn.launch.measure.points import ENVIRONMENTS, POINTS, read_lines

REQUIRED = ("hash", "status", "config", "world_size", "tokens")
"""Fields that every point must have; other missing fields are unknown."""
CHOICES = ("schedule", "layout", "engine", "transport")
"""Options that change how a result is computed, but not the result. A reader compares these."""
BETWEEN = ("schedule", "layout", "transport", "nnodes")
"""Options that have no effect on a single rank, which sends nothing and owns all tokens."""
ANY = "any"
AXES = ("ranks", "tokens")
"""Options that an axis shows, so they are not part of the name of a series."""
STARTING = ("nnodes", "tokens_per_rank", "node_rank", "rdzv_endpoint", "timeout_s", "limit_s", "threads_per_rank",
            "json")  # fmt: skip
"""Options that usually follow from the numbers of ranks and tokens. A sweep that varies one of them apart from these
numbers has points that differ in nothing else.
"""


@dataclass(frozen=True)
class Point:
    """One configuration that was run, with or without results.

    `record` is its line of `points.jsonl`; the value of a missing field is None. Times are milliseconds of the slowest
    rank, and lists of a record are indexed by rank.
    """

    record: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Return whether the point has results."""
        return self.record["status"] == "ok" and self.median("forward_ms") is not None

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return int(self.record["world_size"])

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the whole sequence."""
        return int(self.record["tokens"])

    @property
    def tokens_per_rank(self) -> int:
        """Return the number of tokens of the rank that has the most."""
        return -(-self.tokens // self.world_size)

    def median(self, key: str) -> float | None:
        """Return the median of `forward_ms`, `backward_ms` or `pass_ms`."""
        timed = self.record.get(key)
        return None if timed is None else float(timed["median"])

    def spread(self, key: str) -> tuple[float, float]:
        """Return the 10th and the 90th percentile of `forward_ms`, `backward_ms` or `pass_ms`; zeros if not timed."""
        timed = self.record.get(key) or {"p10": 0, "p90": 0}
        return float(timed["p10"]), float(timed["p90"])

    def most(self, key: str) -> float | None:
        """Return the largest value over all ranks of a field such as `peak_bytes`."""
        by_rank = self.record.get(key)
        return max(map(float, by_rank)) if by_rank else None

    def number(self, key: str) -> float | None:
        """Return a field of the record that is a number, such as `tflops`."""
        value = self.record.get(key)
        return None if value is None else float(value)

    def exposed_ms(self, passes: Sequence[str]) -> float | None:
        """Return the waiting time for messages, summed over `passes`, of the rank that waited longest."""
        by_pass = self.record.get("exposed_ms") or {}
        parts = [by_pass.get(name) for name in passes]
        return max(sum(rank) for rank in zip(*parts, strict=True)) if parts and all(parts) else None

    def predicted(self, key: str) -> Any:
        """Return the field `key` of the prediction, or None if there is none."""
        return (self.record.get("predicted") or {}).get(key)

    @cached_property
    def options(self) -> dict[str, str]:
        """Return the values of all options as text, by dotted key."""
        return dict(flat(self.record["config"]))

    def taken(self, key: str) -> str:
        """Return the value with which an option ran: the value that auto took, or that of the configuration."""
        return str((self.record.get("resolved") or {}).get(key) or self.options.get(key, ""))


@dataclass(frozen=True)
class Sweep:
    """All points of a folder, with the numbers of unreadable lines and of lines that a later one replaced."""

    folder: Path
    points: Sequence[Point]
    environments: Mapping[str, Mapping[str, Any]]
    unreadable: int = 0
    repeated: int = 0

    @cached_property
    def ok(self) -> list[Point]:
        """Return the points that have results."""
        return [point for point in self.points if point.ok]

    @cached_property
    def failed(self) -> list[Point]:
        """Return the points without results."""
        return [point for point in self.points if not point.ok]

    @cached_property
    def varying(self) -> list[str]:
        """Return the options that differ between points, `CHOICES` first, without `AXES`.

        An option of `STARTING` is included only if points differ in it that otherwise have the same options, tokens and
        ranks.
        """
        keys = {key for point in self.points for key in point.options} - {*AXES, *STARTING}
        differ = [key for key in sorted(keys) if len({point.options.get(key) for point in self.points}) > 1]
        alike: dict[tuple[Any, ...], list[Point]] = defaultdict(list)
        for point in self.points:
            alike[(*(self.option(point, key) for key in differ), point.tokens, point.world_size)].append(point)
        for key in STARTING:
            if any(len({self.option(point, key) for point in points}) > 1 for points in alike.values()):
                differ.append(key)
        return sorted(differ, key=lambda key: CHOICES.index(key) if key in CHOICES else len(CHOICES))

    @cached_property
    def passes(self) -> tuple[str, ...]:
        """Return the passes that were timed in each point with results: forward, or forward and backward."""
        both = bool(self.ok) and all(point.median("backward_ms") is not None for point in self.ok)
        return ("forward", "backward") if both else ("forward",)

    @property
    def _time(self) -> str:
        return "pass_ms" if len(self.passes) > 1 else "forward_ms"

    def pass_ms(self, point: Point) -> float:
        """Return the total time of `passes`: the median over repetitions of their sum."""
        return point.median(self._time) or 0.0

    def pass_spread(self, point: Point) -> tuple[float, float]:
        """Return p10 and p90 of `pass_ms`."""
        return point.spread(self._time)

    def tokens_per_s(self, point: Point) -> float | None:
        """Return the tokens per second of all sequences of the batch, based on `pass_ms`."""
        taken_ms = self.pass_ms(point)
        return int(point.options.get("batch") or 1) * point.tokens / taken_ms * 1e3 if taken_ms else None

    def option(self, point: Point, key: str) -> str:
        """Return an option's value as text. If the point has one rank and the option no effect on it, return `any`."""
        return ANY if point.world_size == 1 and key in BETWEEN else point.options.get(key, "")

    def shown(self, point: Point, key: str) -> str:
        """Return the text of `option`. If it is auto, append the value that auto took, as in `auto: ring`."""
        text = self.option(point, key)
        taken = point.taken(key)
        return f"{text}: {taken}" if text == "auto" != taken else text

    @cached_property
    def columns(self) -> list[str]:
        """Return the options that tables show: those that differ, and those for which auto took several values."""
        taken = {key: {self.shown(point, key) for point in self.ok if self.option(point, key) == "auto"}
                 for key in CHOICES}  # fmt: skip
        return [*(key for key in CHOICES if len(taken[key]) > 1 and key not in self.varying), *self.varying]

    @cached_property
    def alone(self) -> dict[tuple[str, ...], Point]:
        """Return the points of one rank by options and tokens. They are the baselines of all other points.

        One rank does the same work whatever the options `BETWEEN`. Of such points, the fastest is returned.
        """
        baselines: dict[tuple[str, ...], Point] = {}
        for point in sorted((point for point in self.ok if point.world_size == 1), key=self.pass_ms):
            baselines.setdefault((*(self.option(point, key) for key in self.varying), str(point.tokens)), point)
        return baselines


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep in `folder`. Raises `InputError` if the folder has no sweep, or if no line is a point."""
    try:
        records = read_lines(folder)
    except OSError as error:
        why = f"holds no {POINTS}" if folder.is_dir() else "is not a folder"
        raise InputError(f"{folder} {why}; name the folder that `ringattn sweep` wrote") from error
    readable = [record for record in records if record is not None and all(record.get(key) for key in REQUIRED)]
    points = {record["hash"]: Point(record) for record in readable}
    if not points:
        raise InputError(f"{folder / POINTS}: none of its {len(records)} lines is a point of a sweep")

    def order(point: Point) -> tuple[Any, ...]:
        return point.tokens, point.world_size, *(point.options.get(key, "") for key in CHOICES)

    unreadable, repeated = len(records) - len(readable), len(readable) - len(points)
    return Sweep(folder, sorted(points.values(), key=order), _environments(folder), unreadable, repeated)


def _environments(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the environments by id, or {} if the file is missing, because a report needs only the points."""
    try:
        read = json.loads((folder / ENVIRONMENTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / ENVIRONMENTS} cannot be read: {error}") from error
    if not isinstance(read, dict) or not all(isinstance(facts, dict) for facts in read.values()):
        raise InputError(f"{folder / ENVIRONMENTS} holds no environments by id; remove it to report without them")
    return read


def differing(environments: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the dotted keys of the facts in which the environments differ."""
    facts = [dict(flat(environment)) for environment in environments]
    keys = sorted({key for environment in facts for key in environment})
    return [key for key in keys if len({environment.get(key) for environment in facts}) > 1]


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield (dotted key, value as text) of a nested configuration; None is an empty text."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
            yield f"{prefix}{key}", text


# --- series ----------------------------------------------------------------------------------------------------------


LINES = 6
"""The most series in one panel, so that each has a different color and marker."""


class View(NamedTuple):
    """One way to read a sweep.

    `axis` names the axis, and `along` returns the position of a point on it. `ratio` says whether speed-up and
    efficiency are meaningful. `same` is what stays the same along a series: its name and its value.
    """

    name: str
    title: str
    axis: str
    ratio: bool
    same: tuple[str, Callable[[Point], int]]
    along: Callable[[Point], int]


def _ranks(point: Point) -> int:
    return point.world_size


def _tokens(point: Point) -> int:
    return point.tokens


STRONG = View("strong", "Strong scaling: the same tokens, more ranks", "ranks", True, ("tokens", _tokens), _ranks)
WEAK = View("weak", "Weak scaling: the same tokens per rank, more ranks", "ranks", True,
            ("tokens per rank", lambda point: point.tokens_per_rank), _ranks)  # fmt: skip
LENGTH = View("length", "Longer sequences on the same ranks", "tokens", False, ("ranks", _ranks), _tokens)
SINGLE = View("single", "Side by side", "", False, ("", _tokens), _ranks)


class Series(NamedTuple):
    """Points along one axis. `key` holds the options that name the series and the size that all its points share."""

    view: View
    key: Mapping[str, str]
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        """Return the name of the series."""
        return named(self.key)

    def xs(self) -> list[int]:
        """Return the position of each point on the axis."""
        return [self.view.along(point) for point in self.points]


class Panel(NamedTuple):
    """Series that are drawn together, each with its name.

    `title` says what distinguishes them from other panels; it is empty if the view has a single panel.
    """

    view: View
    title: str
    lines: tuple[tuple[str, Series], ...]


class Scaling(NamedTuple):
    """A point compared with the point of its series that has the fewest ranks, whose efficiency counts as 1.

    A series that starts on two ranks therefore starts with a speed-up of 2. `efficiency` is the speed-up divided by the
    number of ranks.
    """

    speed_up: float
    efficiency: float


def named(key: Mapping[str, str]) -> str:
    """Return options as words: `schedule ring, tokens 4,096`."""
    texts = {name: f"{int(value):,}" if value.isdigit() else value or "none" for name, value in key.items()}
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def by_size(text: str) -> tuple[int, str]:
    """Return a sort key for the values of an option: numbers sort by size and words alphabetically."""
    return (int(text), "") if text.isdigit() else (0, text)


def series_of(sweep: Sweep) -> list[Series]:
    """Return the series of all points with results.

    A view shows only series with a point that no earlier view shows. Among points of one rank that did the same work,
    only the fastest is in a series.
    """
    result: list[Series] = []
    fastest = {point.record["hash"] for point in sweep.alone.values()}
    ok = [point for point in sweep.ok if point.world_size > 1 or point.record["hash"] in fastest]
    placed: set[str] = set()
    for view in (STRONG, WEAK, LENGTH):
        groups: dict[tuple[str, ...], dict[int, Point]] = defaultdict(dict)
        for point in ok:
            options = (*(sweep.option(point, key) for key in sweep.varying), str(view.same[1](point)))
            groups[options][view.along(point)] = point
        of_view: set[str] = set()
        for options in sorted(groups, key=lambda options: list(map(by_size, options))):
            members = groups[options]
            if view.ratio and set(members) != {1}:
                # One rank does the same work whatever the options `BETWEEN`, so its point is in each series.
                alike = (ANY if key in BETWEEN else value for key, value in zip(sweep.varying, options, strict=False))
                if baseline := sweep.alone.get((*alike, options[-1])):
                    members[1] = baseline
            hashes = {point.record["hash"] for point in members.values()}
            if len(members) > 1 and hashes - placed:
                key = dict(zip((*sweep.varying, view.same[0]), options, strict=True))
                result.append(Series(view, key, tuple(members[x] for x in sorted(members))))
                of_view |= hashes
        placed |= of_view
    for point in ok:
        if point.record["hash"] not in placed:
            key = {key: sweep.option(point, key) for key in sweep.varying}
            sizes = {"tokens": str(point.tokens), "ranks": str(point.world_size)}
            result.append(Series(SINGLE, {**key, **sizes}, (point,)))
    return result


def panels_of(every: Sequence[Series]) -> list[Panel]:
    """Return panels of at most `LINES` series. As few options as possible form the names of their lines."""
    panels: list[Panel] = []
    for view in (STRONG, WEAK, LENGTH, SINGLE):
        members = [series for series in every if series.view is view]
        varying = [key for key in (members[0].key if members else ()) if len({s.key[key] for s in members}) > 1]
        within = _line_keys(members, varying)
        groups: dict[str, list[Series]] = defaultdict(list)
        for series in members:
            apart = [key for key in varying if key not in within]
            apart += [view.same[0]] if view.same[0] and view.same[0] not in varying else []
            groups[named({key: series.key[key] for key in apart})].append(series)
        for title, together in groups.items():
            lines = tuple((named({key: s.key[key] for key in within}) or "measured", s) for s in together)
            panels += [Panel(view, title, lines[n : n + LINES]) for n in range(0, len(lines), LINES)]
    return panels


def _line_keys(members: Sequence[Series], varying: Sequence[str]) -> list[str]:
    """Return the options that distinguish the lines of a panel.

    There is at least one if any varies. More are added, `CHOICES` first, while a panel has at most `LINES` lines.
    """
    within: list[str] = []
    for key in sorted(varying, key=lambda key: key not in CHOICES):
        lines: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
        for series in members:
            panel = tuple(series.key[name] for name in varying if name not in (*within, key))
            lines[panel].add(tuple(series.key[name] for name in (*within, key)))
        if not within or max(map(len, lines.values())) <= LINES:
            within.append(key)
    return within


def scaling(sweep: Sweep, series: Series) -> list[Scaling | None]:
    """Compare the rate of work of each point of a series with that of its first point.

    In strong scaling, the rate is the inverse of the time. In weak scaling, the work of a rank grows with the sequence,
    so the rate is `tflops`, which counts the pairs that the mask allows. A comparison is None if the rate is unknown.
    """

    def rate(point: Point) -> float | None:
        return 1 / sweep.pass_ms(point) if series.view is STRONG else point.number("tflops")

    first, scalings = series.points[0], list[Scaling | None]()
    for point in series.points:
        base, reached = rate(first), rate(point)
        speed_up = reached / base * first.world_size if reached and base else None
        scalings.append(None if speed_up is None else Scaling(speed_up, speed_up / point.world_size))
    return scalings


def groups_of(sweep: Sweep) -> list[list[Point]]:
    """Group the points with the same workload and ranks, which differ only in `CHOICES`; sort each group by time."""
    groups: dict[tuple[Any, ...], list[Point]] = defaultdict(list)
    workload = [key for key in sweep.varying if key not in CHOICES]
    for point in sweep.points:
        groups[(*(sweep.option(point, name) for name in workload), point.tokens, point.world_size)].append(point)
    return [sorted(group, key=lambda p: sweep.pass_ms(p) if p.ok else float("inf")) for group in groups.values()]

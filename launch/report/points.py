"""Reads a sweep's folder: its points, its environments, which options differ, and the series that the points form.

A series is a line of points that share every option but the one on the axis. A sweep has four views. Strong scaling:
more ranks, the same tokens. Weak scaling: more ranks, the same tokens of each. Length: more tokens, the same ranks.
Single: one point by itself.
Guarantees: a folder that cannot be reported raises `InputError` with the reason. A line that a killed sweep left
unfinished is counted, not fatal. Of several lines with the same configuration the last counts. Every point with results
is in at least one series, except points of one rank that repeat the work of another; series of the same work share the
point of one rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ringattn.errors import InputError
from ringattn.launch.measure.points import ENVIRONMENTS, POINTS

REQUIRED = ("hash", "status", "config", "world_size", "tokens")
"""Without these a line is no point; whatever else is missing is unknown."""
CHOICES = ("schedule", "layout", "engine", "transport")
"""Options that change how a result is computed and never the result: what a reader compares."""
BETWEEN = ("schedule", "layout", "transport")
"""Of those: what is between ranks. One rank alone sends nothing and owns all tokens, so they are all the same there."""
ANY = "any"
AXES = ("ranks", "nnodes", "tokens", "tokens_per_rank")
"""What an axis shows, in one way of writing it or another; no part of the name of a series."""
BESIDE = ("node_rank", "rdzv_endpoint", "timeout_s", "limit_s", "threads_per_rank")
"""What says how ranks were started, and follows the number of ranks."""


@dataclass(frozen=True)
class Point:
    """One configuration that was tried. `record` is the line of `points.jsonl`; what is missing or null reads as None.

    Times are in milliseconds, of the slowest rank; lists of a record go by rank.
    """

    record: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether it has results."""
        return self.record["status"] == "ok" and self.median("forward_ms") is not None

    @property
    def world_size(self) -> int:
        """Ranks."""
        return int(self.record["world_size"])

    @property
    def tokens(self) -> int:
        """Tokens of the whole sequence."""
        return int(self.record["tokens"])

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of the rank that has most."""
        return -(-self.tokens // self.world_size)

    def median(self, key: str) -> float | None:
        """The median of `forward_ms` or `backward_ms`."""
        timed = self.record.get(key)
        return None if timed is None else float(timed["median"])

    def spread(self, key: str) -> tuple[float, float] | None:
        """The 10th and the 90th percentile."""
        timed = self.record.get(key)
        return None if timed is None else (float(timed["p10"]), float(timed["p90"]))

    def most(self, key: str) -> float | None:
        """The greatest of a list by rank, as of `peak_bytes`."""
        by_rank = self.record.get(key)
        return max(map(float, by_rank)) if by_rank else None

    def number(self, key: str) -> float | None:
        """A plain number, as `tokens_per_s`."""
        value = self.record.get(key)
        return None if value is None else float(value)

    def exposed_ms(self, passes: Sequence[str]) -> float | None:
        """Time that the rank which waited longest stood still for messages, over the `passes` together."""
        by_pass = self.record.get("exposed_ms") or {}
        parts = [by_pass.get(name) for name in passes]
        return max(sum(rank) for rank in zip(*parts, strict=True)) if parts and all(parts) else None

    @property
    def overlap_is_bound(self) -> bool:
        """Whether `overlap` is an upper bound: the transport did not tell when messages arrived. Lines of earlier
        versions do not say; then it is one, unless nothing was sent."""
        if (known := self.record.get("arrivals_known")) is not None:
            return not known
        return self.number("overlap") is not None and self.world_size > 1

    def predicted(self, key: str) -> Any:
        """A value of the prediction."""
        return (self.record.get("predicted") or {}).get(key)

    @cached_property
    def options(self) -> dict[str, str]:
        """The configuration, values as text."""
        return dict(flat(self.record["config"]))

    @property
    def batch(self) -> int:
        """Sequences."""
        return int(self.options.get("batch") or 1)


@dataclass(frozen=True)
class Sweep:
    """All points of one folder. `unreadable`: lines that are no points. `repeated`: lines that a later one replaced."""

    folder: Path
    points: Sequence[Point]
    environments: Mapping[str, Mapping[str, Any]]
    unreadable: int = 0
    repeated: int = 0

    @cached_property
    def ok(self) -> list[Point]:
        """The points that have results."""
        return [point for point in self.points if point.ok]

    @cached_property
    def failed(self) -> list[Point]:
        """The others."""
        return [point for point in self.points if not point.ok]

    @cached_property
    def varying(self) -> list[str]:
        """The options that differ between points, the ones of `CHOICES` first; without those of `AXES` and `BESIDE`."""
        seen: dict[str, set[str | None]] = {}
        for key in {key for point in self.points for key in point.options}:
            seen[key] = {point.options.get(key) for point in self.points}
        keys = sorted(key for key, values in seen.items() if len(values) > 1 and key not in (*AXES, *BESIDE))
        return sorted(keys, key=lambda key: CHOICES.index(key) if key in CHOICES else len(CHOICES))

    @cached_property
    def passes(self) -> tuple[str, ...]:
        """Which passes every point with results has timed: forward, or forward and backward."""
        both = bool(self.ok) and all(point.median("backward_ms") is not None for point in self.ok)
        return ("forward", "backward") if both else ("forward",)

    def pass_ms(self, point: Point) -> float:
        """The time of `passes` together: the median over repeats of their sum, from which tokens/s are too.

        What earlier versions wrote has it in its tokens/s.
        """
        if self.passes == ("forward",):
            return point.median("forward_ms") or 0.0
        if (found := point.median("pass_ms")) is not None:
            return found
        if rate := point.number("tokens_per_s"):
            return point.batch * point.tokens / rate * 1e3
        return sum(point.median(f"{name}_ms") or 0.0 for name in self.passes)

    def pass_spread(self, point: Point) -> tuple[float, float]:
        """p10 and p90 of `pass_ms`; where they are not recorded, of each pass by itself, together."""
        if len(self.passes) > 1 and (found := point.spread("pass_ms")) is not None:
            return found
        low, high = zip(*(point.spread(f"{name}_ms") or (0.0, 0.0) for name in self.passes), strict=True)
        return sum(low), sum(high)

    def tokens_per_s(self, point: Point) -> float | None:
        """Tokens over `pass_ms`, of all sequences."""
        taken = self.pass_ms(point)
        return point.batch * point.tokens / taken * 1e3 if taken else None

    def option(self, point: Point, key: str) -> str:
        """An option's value as text; `any` for what makes no difference to one rank alone."""
        return ANY if point.world_size == 1 and key in BETWEEN else point.options.get(key, "")

    @cached_property
    def alone(self) -> dict[tuple[str, ...], Point]:
        """The points of one rank, which every schedule, layout and transport is compared with, by their options and
        tokens. Of several of the same work, which earlier versions ran, the fastest."""
        found: dict[tuple[str, ...], Point] = {}
        for point in sorted((one for one in self.ok if one.world_size == 1), key=self.pass_ms):
            found.setdefault((*(self.option(point, key) for key in self.varying), str(point.tokens)), point)
        return found


def read_sweep(folder: Path) -> Sweep:
    """The sweep in `folder`. Raises `InputError` where there is none, or none of its lines is a point."""
    try:
        lines = (folder / POINTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        why = f"holds no {POINTS}" if folder.is_dir() else "is not a folder"
        raise InputError(f"{folder} {why}; name the folder that `ringattn sweep` wrote") from error
    points: dict[str, Point] = {}
    unreadable, written = 0, [line for line in lines if line.strip()]
    for line in written:
        point = _point(line)
        if point is None:
            unreadable += 1
        else:
            points[point.record["hash"]] = point
    if not points:
        raise InputError(f"{folder / POINTS}: none of its {len(written)} lines is a point of a sweep")
    ordered = sorted(points.values(), key=lambda point: (point.tokens, point.world_size, *_natural(point)))
    return Sweep(folder, ordered, _environments(folder), unreadable, len(written) - unreadable - len(points))


def _natural(point: Point) -> tuple[str, ...]:
    return tuple(point.options.get(key, "") for key in CHOICES)


def _point(line: str) -> Point | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return Point(record) if isinstance(record, dict) and all(record.get(key) for key in REQUIRED) else None


def _environments(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The environments by id, or none where the file is missing: a report needs only the points."""
    try:
        read = json.loads((folder / ENVIRONMENTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / ENVIRONMENTS} cannot be read: {error}") from error
    if not isinstance(read, dict) or not all(isinstance(one, dict) for one in read.values()):
        raise InputError(f"{folder / ENVIRONMENTS} holds no environments by id; remove it, and the report does without")
    return read


def differing(environments: Iterable[Mapping[str, Any]]) -> list[str]:
    """The facts in which environments are not all the same."""
    facts = [dict(flat(environment)) for environment in environments]
    keys = sorted({key for one in facts for key in one})
    return [key for key in keys if len({one.get(key) for one in facts}) > 1]


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """(dotted key, value as text) of a nested configuration; None is an empty text."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
            yield f"{prefix}{key}", text


# --- series ----------------------------------------------------------------------------------------------------------


LINES = 6
"""Series in one panel at most, so that each has a color and a marker of its own."""


class View(NamedTuple):
    """One way to read a sweep. `axis`: along what; `ratio`: whether speed-up and efficiency mean something."""

    name: str
    title: str
    axis: str
    ratio: bool


STRONG = View("strong", "Strong scaling: the same tokens, more ranks", "ranks", True)
WEAK = View("weak", "Weak scaling: the same tokens of each rank, more ranks", "ranks", True)
LENGTH = View("length", "Longer sequences on the same ranks", "tokens", False)
SINGLE = View("single", "Side by side", "", False)

# What stays the same along a series, and what goes along it.
FIXED: dict[View, tuple[str, Callable[[Point], int], Callable[[Point], int]]] = {
    STRONG: ("tokens", lambda point: point.tokens, lambda point: point.world_size),
    WEAK: ("tokens per rank", lambda point: point.tokens_per_rank, lambda point: point.world_size),
    LENGTH: ("ranks", lambda point: point.world_size, lambda point: point.tokens),
}


@dataclass(frozen=True)
class Series:
    """Points along one axis. `key`: the options that name it among the others, with what is fixed along it."""

    view: View
    key: dict[str, str]
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        """Its name."""
        return named(self.key)

    def xs(self) -> list[int]:
        """Where each point lies on the axis."""
        along = FIXED[self.view][2] if self.view in FIXED else FIXED[STRONG][2]
        return [along(point) for point in self.points]


@dataclass(frozen=True)
class Panel:
    """Series that are drawn together. `key`: what they have in common and other panels have not."""

    view: View
    key: dict[str, str]
    lines: tuple[tuple[str, Series], ...]

    @property
    def title(self) -> str:
        """Its name; empty if there is only one panel of the view."""
        return named(self.key)


class Scaling(NamedTuple):
    """A point against the one of its series with the fewest ranks, which counts as perfect: a series that starts on two
    ranks starts with a speed-up of 2. `efficiency`: speed-up over ranks."""

    speed_up: float
    efficiency: float


def named(key: dict[str, str]) -> str:
    """Options as words: `schedule ring, tokens 4,096`."""
    return ", ".join(f"{name} {_grouped(value)}" for name, value in key.items())


def by_size(text: str) -> tuple[int, str]:
    """A key to sort the values of an option by: numbers by size, words by letters."""
    return (int(text), "") if text.isdigit() else (0, text)


def _grouped(value: str) -> str:
    return f"{int(value):,}" if value.isdigit() else value or "none"


def series_of(sweep: Sweep) -> list[Series]:
    """The series of all points with results; a view shows only series with a point that no view before it has.

    Of points of one rank that do the same work only the fastest is in a series.
    """
    found: list[Series] = []
    fastest = {point.record["hash"] for point in sweep.alone.values()}
    ok = [point for point in sweep.ok if point.world_size > 1 or point.record["hash"] in fastest]
    placed: set[str] = set()
    for view, (name, fixed, along) in FIXED.items():
        groups: dict[tuple[Any, ...], dict[int, Point]] = {}
        for point in ok:
            options = tuple(sweep.option(point, key) for key in sweep.varying)
            groups.setdefault((*options, fixed(point)), {})[along(point)] = point
        if view.ratio:
            _share_baselines(sweep, groups)
        here: set[str] = set()
        for key in sorted(groups, key=lambda key: [by_size(str(value)) for value in key]):
            members = groups[key]
            hashes = {point.record["hash"] for point in members.values()}
            if len(members) > 1 and hashes - placed:
                words = dict(zip((*sweep.varying, name), map(str, key), strict=True))
                found.append(Series(view, words, tuple(members[x] for x in sorted(members))))
                here |= hashes
        placed |= here
    for point in ok:
        if point.record["hash"] not in placed:
            words = {key: sweep.option(point, key) for key in sweep.varying}
            fixed_words = {"tokens": str(point.tokens), "ranks": str(point.world_size)}
            found.append(Series(SINGLE, {**words, **fixed_words}, (point,)))
    return found


def _share_baselines(sweep: Sweep, groups: dict[tuple[Any, ...], dict[int, Point]]) -> None:
    """Put the point of one rank into every group of its work: it is the same for every schedule, layout, transport."""
    for key, members in groups.items():
        options = (ANY if name in BETWEEN else value for name, value in zip(sweep.varying, key[:-1], strict=True))
        first = sweep.alone.get((*options, str(key[-1])))
        if first is not None and set(members) != {1}:
            members[1] = first


def panels_of(found: Sequence[Series]) -> list[Panel]:
    """Series put together, at most `LINES` in a panel, by as few options as name them."""
    panels: list[Panel] = []
    for view in (*FIXED, SINGLE):
        members = [series for series in found if series.view is view]
        varying = [key for key in (members[0].key if members else ()) if len({s.key[key] for s in members}) > 1]
        within = _line_keys(members, varying)
        groups: dict[tuple[str, ...], list[Series]] = {}
        for series in members:
            groups.setdefault(tuple(series.key[key] for key in varying if key not in within), []).append(series)
        for values, together in groups.items():
            shared = dict(zip((key for key in varying if key not in within), values, strict=True))
            lines = tuple((named({key: s.key[key] for key in within}) or "measured", s) for s in together)
            fixed = FIXED[view][0] if view in FIXED else ""
            if fixed and fixed not in varying:
                shared[fixed] = together[0].key[fixed]
            panels += [Panel(view, shared, lines[n : n + LINES]) for n in range(0, len(lines), LINES)]
    return panels


def _line_keys(members: Sequence[Series], varying: Sequence[str]) -> list[str]:
    """The options that tell the lines of one panel apart: one at least, choices first, while the lines are few."""
    within: list[str] = []
    for key in sorted(varying, key=lambda key: key not in CHOICES):
        counts: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
        for series in members:
            panel = tuple(series.key[other] for other in varying if other not in (*within, key))
            counts.setdefault(panel, set()).add(tuple(series.key[one] for one in (*within, key)))
        if not within or max(map(len, counts.values())) <= LINES:
            within.append(key)
    return within


def scaling(sweep: Sweep, series: Series) -> list[Scaling | None]:
    """Each point of a series against its first one, by the rate of work.

    With the same tokens the rate is that of time. With the same tokens of each rank the work of a rank grows with the
    sequence, so that the rate is counted in the pairs that the mask keeps (`tflops`); None where that is unknown.
    """
    first = series.points[0]
    found: list[Scaling | None] = []
    for point in series.points:
        speed_up: float | None = None
        if series.view is STRONG:
            speed_up = sweep.pass_ms(first) / sweep.pass_ms(point)
        elif (base := first.number("tflops")) and (rate := point.number("tflops")):
            speed_up = rate / base
        speed_up = None if speed_up is None else speed_up * first.world_size
        found.append(None if speed_up is None else Scaling(speed_up, speed_up / point.world_size))
    return found


def groups_of(sweep: Sweep) -> list[list[Point]]:
    """Points of one workload on as many ranks: they differ in `CHOICES` alone, the fastest first."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    workload = [key for key in sweep.varying if key not in CHOICES]
    for point in sweep.points:
        key = (*(sweep.option(point, name) for name in workload), point.tokens, point.world_size)
        groups.setdefault(key, []).append(point)
    return [sorted(group, key=lambda p: sweep.pass_ms(p) if p.ok else float("inf")) for group in groups.values()]

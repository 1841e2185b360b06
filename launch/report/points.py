"""Reads what a sweep left behind: its points, its environments, and which options differ from point to point.

Guarantees: a folder that cannot be reported raises `InputError` and says why; a line that a killed sweep left
unfinished is counted, not fatal; of several lines with the same configuration the last one counts, which is the one
that a resumed sweep has written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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

"""Puts the points of a sweep in series: lines that share every option but one, which goes along the axis.

Four ways to read a sweep. Strong scaling: more ranks, the same tokens. Weak scaling: more ranks, the same tokens of
each. Length: more tokens, the same ranks. Single: one point by itself.
Guarantees: every point with results is in at least one series, those that repeat the work of another on one rank aside;
a series is as long as the sweep allows; series of the same work have the same point of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringattn.launch.report.points import ANY, BETWEEN, CHOICES, Point, Sweep

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

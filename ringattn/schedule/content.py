"""What a message or a held block contains: for some heads, some rows of the owner's shard.

A content is a tuple of `Part`s, ordered by head; a part's rows are disjoint ascending runs with gaps between them, so
equal sets are equal values. Wire order is part after part, in each rows outermost.
Does not know: schedules, bytes, torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ringattn.geometry import Run


class Part(NamedTuple):
    """Rows of some K/V heads."""

    heads: Run
    rows: tuple[Run, ...]

    @property
    def row_count(self) -> int:
        """Rows."""
        return sum(run.count for run in self.rows)

    def offsets(self, rows: np.ndarray) -> np.ndarray:
        """Where the given owner rows (each a member) lie in the packed part: int64, same shape."""
        starts = np.array([run.start for run in self.rows])
        counts = np.array([run.count for run in self.rows])
        at = np.searchsorted(starts, rows, side="right") - 1
        return (np.cumsum(counts) - counts)[at] + rows - starts[at]


Content = tuple[Part, ...]
NOTHING: Content = ()


def whole(rows: int, heads: Iterable[Run]) -> Content:
    """All rows of a shard, for head parts `heads`."""
    return tuple(Part(run, (Run(0, rows),)) for run in heads) if rows else NOTHING


def size(content: Content) -> int:
    """Rows times K/V heads: proportional to bytes."""
    return sum(part.heads.count * part.row_count for part in content)


def union(contents: Iterable[Content]) -> Content:
    """What is in any of them. Head parts of equal start are the same part."""
    found: dict[Run, list[Run]] = {}
    for content in contents:
        for heads, rows in content:
            found.setdefault(heads, []).extend(rows)
    return tuple(Part(heads, merge_runs(found[heads])) for heads in sorted(found))


def merge_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The union of runs of stride 1, as ascending runs that do not touch."""
    merged: list[Run] = []
    first = stop = 0
    for start, count, _ in sorted(runs):
        if merged and start <= stop:
            merged.pop()
            start, count = first, max(stop, start + count) - first
        if count:
            merged.append(Run(start, count))
            first, stop = start, start + count
    return tuple(merged)


def contains(outer: Content, inner: Content) -> bool:
    """Whether everything in `inner` is in `outer`."""
    return all(spot is not None for spot in _locations(outer, inner))


def piece_of(outer: Content, inner: Content) -> int | None:
    """Where packed `inner` lies inside packed `outer`, in rows times heads, if it lies there in one piece."""
    if outer == inner:
        return 0
    sizes = (size((part,)) for part in outer)
    bases = dict(zip((part.heads for part in outer), accumulate(sizes, initial=0), strict=False))
    spots = _locations(outer, inner)
    first = end = None
    for heads, rows in inner:
        for run, row in zip(rows, spots, strict=False):
            at = None if row is None else bases[heads] + row * heads.count
            if at is None or end not in (None, at):
                return None
            first, end = at if first is None else first, at + run.count * heads.count
    return first


def _locations(outer: Content, inner: Content) -> Iterator[int | None]:
    """For each run of `inner`, the packed row of `outer`'s same part where it starts; None where it is missing."""
    by_heads = {part.heads: part.rows for part in outer}
    for heads, rows in inner:
        held = by_heads.get(heads, ())
        starts = [run.start for run in held]
        offsets = list(accumulate((run.count for run in held), initial=0))
        for run in rows:
            at = bisect_right(starts, run.start) - 1
            missing = at < 0 or run.start + run.count > starts[at] + held[at].count
            yield None if missing else offsets[at] + run.start - starts[at]


def describe(content: Content) -> str:
    """Text form: `rows 0..7,12..15` or, with several head parts, `heads 0..1 rows ...; heads ...`."""
    if not content:
        return "nothing"
    rows = ["rows " + ",".join(map(str, part.rows)) for part in content]
    if len(content) == 1 and content[0].heads.start == 0:
        return rows[0]
    return "; ".join(f"heads {part.heads} {text}" for part, text in zip(content, rows, strict=True))

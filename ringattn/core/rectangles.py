"""Rectangles of pairs (query, key) with bands: the form to which every mask is lowered.

A table of rectangles is a few integers for each, whatever the number of tokens: chunks and dilated segments are copies
of one rectangle. A pair that two rectangles allow counts twice; masks except dilated ones have disjoint rectangles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from ringattn.core.geometry import FULL, UNBOUNDED, Band, StridedRange, count_pairs

PAIRS = 1 << 20
"""Pairs of rectangles that are compared at a time."""

SHOWN_ROWS = 4
"""Rows that the text of a table shows; a longer table ends with its digest."""


class Rectangle(NamedTuple):
    """The pairs of a rectangle whose distance is in a band, and repetitions of it.

    The queries are positions q .. q_stop - 1 and the keys k .. k_stop - 1, with lo <= query - key <= hi. There are
    `copies` of the rectangle and its band, each `period` positions after the one before on both axes.
    """

    q: int
    q_stop: int
    k: int
    k_stop: int
    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    copies: int = 1
    period: int = 0

    def __str__(self) -> str:
        repeated = f", {self.copies} times, every {self.period}" if self.copies > 1 else ""
        band = Band(self.lo, self.hi)
        distance = "any distance" if band == FULL else f"distance {band}"
        return f"q {self.q}..{self.q_stop - 1} k {self.k}..{self.k_stop - 1}, {distance}{repeated}"


def rectangle(q: int, q_stop: int, k: int, k_stop: int, band: Band = FULL) -> Rectangle:
    """Return a rectangle whose band counts positions from its first query and its first key."""
    return Rectangle(q, q_stop, k, k_stop, *band.shifted(q - k))


def segments(
    documents: Iterable[tuple[int, int, int, int]], band: Band, length: int | None = None
) -> Iterator[Rectangle]:
    """Yield the rectangles of paired documents, cut into segments of `length` tokens; the last may be shorter.

    `documents`: start and end of the queries, then of the keys. The n-th segment of the queries pairs with the n-th of
    the keys.
    """
    for q, q_stop, k, k_stop in documents:
        if length is None:
            yield rectangle(q, q_stop, k, k_stop, band)
            continue
        whole = min(q_stop - q, k_stop - k) // length
        if whole:
            period = length if whole > 1 else 0
            yield rectangle(q, q + length, k, k + length, band)._replace(copies=whole, period=period)
        q, k = q + whole * length, k + whole * length
        # One of the two sides is shorter than a segment here, or ends.
        yield rectangle(q, min(q + length, q_stop), k, min(k + length, k_stop), band)


class Rectangles:
    """An immutable table of rectangles, kept as an int64 array with a row for each; empty rectangles are dropped.

    Equal tables are equal and have the same hash. The text of a table differs if the table does.
    """

    def __init__(self, rows: Iterable[Rectangle] | np.ndarray) -> None:
        """Take ownership of `rows` if it is an array."""
        array = rows if isinstance(rows, np.ndarray) else np.array([*rows], np.int64)
        array = array.reshape(-1, len(Rectangle._fields))
        q, q_stop, k, k_stop = array.T[:4]
        self.array = np.ascontiguousarray(array[(q < q_stop) & (k < k_stop)], np.int64)
        self.array.setflags(write=False)

    def __len__(self) -> int:
        """Return the number of rectangles, copies included."""
        return int(self.array[:, 6].sum())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rectangles) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Rectangles], tuple[np.ndarray]]:
        return Rectangles, (self.array,)

    def __repr__(self) -> str:
        rows = [str(Rectangle(*row)) for row in self.array[:SHOWN_ROWS].tolist()]
        if len(self.array) > SHOWN_ROWS:
            rows.append(f"... {len(self.array)} rows [{sha256(self.array.tobytes()).hexdigest()[:16]}]")
        return "; ".join(rows) or "nothing"

    @cached_property
    def _hash(self) -> int:
        return hash(self.array.tobytes())

    @cached_property
    def expanded(self) -> np.ndarray:
        """The rectangles with their copies as separate rows: q, q_stop, k, k_stop, lo, hi."""
        copies = self.array[:, 6]
        if (copies == 1).all():
            return self.array[:, :6]
        rows = np.repeat(self.array, copies, axis=0)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(copies) - copies, copies)
        moved = rows[:, :6].copy()
        # The band counts q - k, so it moves with neither side.
        moved[:, :4] += (nth * rows[:, 7])[:, None]
        return moved

    @cached_property
    def one_sided(self) -> np.ndarray:
        """For each row of `expanded`, whether its band is unbounded on one side at least."""
        return (self.expanded[:, 4] <= -UNBOUNDED) | (self.expanded[:, 5] >= UNBOUNDED)

    def pairs(self) -> int:
        """Return the number of pairs, copies included."""
        total = 0
        for q, q_stop, k, k_stop, lo, hi, copies, _ in self.array.tolist():
            total += copies * count_pairs(StridedRange(q, q_stop - q), StridedRange(k, k_stop - k), Band(lo, hi))
        return total

    @property
    def longest(self) -> int:
        """The largest number of queries of a rectangle."""
        return int((self.array[:, 1] - self.array[:, 0]).max(initial=0))

    @property
    def is_causal(self) -> bool:
        """Whether no query attends to a key that is later in its rectangle than the query."""
        q, _, k, _, lo, *_ = self.array.T
        return bool((lo >= q - k).all())

    def overlap(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Return two rectangles and a pair (query, key) that both have, or None. The table has no copies."""
        rows = self.array
        # Two rectangles have a common pair if and only if a distance q - k of their common box is in both bands.
        for earlier, later in min(_Meeting(rows[:, 0], rows[:, 1]), _Meeting(rows[:, 2], rows[:, 3]), key=len):
            q, k = np.maximum(rows[earlier, 0], rows[later, 0]), np.maximum(rows[earlier, 2], rows[later, 2])
            q_last = np.minimum(rows[earlier, 1], rows[later, 1]) - 1
            k_last = np.minimum(rows[earlier, 3], rows[later, 3]) - 1
            lo = np.maximum(np.maximum(rows[earlier, 4], rows[later, 4]), q - k_last)
            hi = np.minimum(np.minimum(rows[earlier, 5], rows[later, 5]), q_last - k)
            common = np.flatnonzero((q <= q_last) & (k <= k_last) & (lo <= hi))
            if len(common):
                n = common[0]
                query = int(max(q[n], k[n] + lo[n]))
                first, second = sorted((int(earlier[n]), int(later[n])))
                return (first, second), (query, query - int(lo[n]))
        return None

    @cached_property
    def keys_disjoint(self) -> bool:
        """Whether no key belongs to two rectangles."""
        start, stop = self.expanded[:, 2:4][np.argsort(self.expanded[:, 2], kind="stable")].T
        return bool((start[1:] >= stop[:-1]).all())


class _Meeting:
    """The pairs of intervals start .. stop - 1 that have a common member, in blocks; its length counts the pairs."""

    def __init__(self, start: np.ndarray, stop: np.ndarray) -> None:
        self.order = np.argsort(start, kind="stable")
        # In order of their starts, an interval overlaps those that start after it and before its end.
        after = np.arange(1, len(start) + 1)
        self.counts = np.maximum(0, np.searchsorted(start[self.order], stop[self.order]) - after)

    def __len__(self) -> int:
        return int(self.counts.sum())

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        ends = np.cumsum(self.counts)
        borders = np.searchsorted(ends, np.arange(PAIRS, len(self), PAIRS))
        for block in np.split(np.arange(len(ends)), borders):
            counts = self.counts[block]
            earlier = np.repeat(block, counts)
            later = earlier + 1 + np.arange(len(earlier)) - np.repeat(np.cumsum(counts) - counts, counts)
            yield self.order[earlier], self.order[later]

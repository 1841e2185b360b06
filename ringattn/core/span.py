"""Spans (intervals of a pass in which a rank computed or its messages were under way), and hidden communication.

Measured and predicted spans have the same type, so the same functions draw and sum up both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

COMPUTE, COMM = "compute", "comm"
Interval = tuple[float, float]
"""Start and end in microseconds."""


class Span(NamedTuple):
    """An interval in microseconds from the beginning of the pass. `lane`: compute or comm.

    `name`: for example "step 2 attend" or "step 2 exchange". `nbytes`: bytes that an exchange sends, 0 for work.
    """

    name: str
    lane: str
    start_us: float
    end_us: float
    nbytes: int = 0


def under_way(spans: Iterable[Span]) -> list[Interval]:
    """Return the intervals in which messages of a rank were under way, in order and disjoint."""
    return _union(span for span in spans if span.lane == COMM)


def exposed(spans: Iterable[Span]) -> list[Interval]:
    """Return the intervals in which messages were under way while the rank did not compute, in order and disjoint."""
    spans = list(spans)
    computing = _union(span for span in spans if span.lane == COMPUTE)
    return [part for interval in under_way(spans) for part in _without(interval, computing)]


def total_us(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of intervals."""
    return sum(end - start for start, end in intervals)


def overlap(comm_us: float, exposed_us: float) -> float:
    """Return the hidden share of communication: 1.0 if nothing is exposed or there is no communication."""
    return 1.0 - exposed_us / comm_us if comm_us else 1.0


def _union(spans: Iterable[Span]) -> list[Interval]:
    """Return the union of spans as disjoint intervals in order."""
    joined: list[Interval] = []
    for start, end in sorted((span.start_us, span.end_us) for span in spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _without(interval: Interval, holes: list[Interval]) -> list[Interval]:
    """Return the parts of an interval that are outside all holes, which are disjoint and in order."""
    left, (start, end) = [], interval
    for hole_start, hole_end in holes:
        if hole_end <= start or hole_start >= end:
            continue
        if hole_start > start:
            left.append((start, hole_start))
        start = hole_end
    if start < end:
        left.append((start, end))
    return left

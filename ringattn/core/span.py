"""A span: what one rank did, or what its messages did, between two moments of a pass; and what of it was hidden.

Measured and predicted spans are alike, so both are drawn and summed up by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

COMPUTE, COMM = "compute", "comm"
Interval = tuple[float, float]
"""From, to."""


class Span(NamedTuple):
    """Times in microseconds from the pass's beginning; `lane`: compute or comm.

    `name` is such as "step 2 attend" or "step 2 exchange". `nbytes`: what an exchange sends, 0 for work.
    """

    name: str
    lane: str
    start_us: float
    end_us: float
    nbytes: int = 0


def under_way(spans: Iterable[Span]) -> list[Interval]:
    """When messages of a rank were under way, in order and apart from each other."""
    return _union(span for span in spans if span.lane == COMM)


def exposed(spans: Iterable[Span]) -> list[Interval]:
    """When messages of a rank were under way while it computed nothing, in order and apart from each other."""
    spans = list(spans)
    computing = _union(span for span in spans if span.lane == COMPUTE)
    return [part for interval in under_way(spans) for part in _without(interval, computing)]


def total_us(intervals: Iterable[Interval]) -> float:
    """The sum of their lengths."""
    return sum(end - start for start, end in intervals)


def overlap(comm_us: float, exposed_us: float) -> float:
    """Hidden over total communication: 1.0 where none is exposed, or none there is."""
    return 1.0 - exposed_us / comm_us if comm_us else 1.0


def _union(spans: Iterable[Span]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted((span.start_us, span.end_us) for span in spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _without(interval: Interval, holes: list[Interval]) -> list[Interval]:
    """What the holes, in order and apart, leave of an interval."""
    left, (at, end) = [], interval
    for hole_start, hole_end in holes:
        if hole_end <= at or hole_start >= end:
            continue
        if hole_start > at:
            left.append((at, hole_start))
        at = hole_end
    if at < end:
        left.append((at, end))
    return left

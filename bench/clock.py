"""What a piece of work took: seconds on the wall, on this process's processors, and on the whole machine's.

A machine is seldom alone with a benchmark. What all its processors did less what the ranks did is what others took, and
samples in which others took much are set aside, whatever they measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

QUIET = 0.05
"""Processors that others may take, of one processor's time, in a sample that is always kept."""


class Lap(NamedTuple):
    """Seconds of one rank's piece of work; `busy_s` is of all processors and programs, 0 where that is unknown."""

    wall_s: float
    cpu_s: float
    busy_s: float


class Sample(NamedTuple):
    """All ranks' laps of the same work: wall of rank 0, processor time of the greatest rank, others' processors."""

    wall_s: float
    cpu_s: float
    foreign: float


def lap(barrier: Callable[[], None], work: Callable[[], Any]) -> Lap:
    """Times `work` from a barrier to a barrier; processor time is this rank's own work alone."""
    barrier()
    busy, start = _busy_s(), time.perf_counter()
    cpu = time.process_time()
    work()
    cpu = time.process_time() - cpu
    barrier()
    return Lap(time.perf_counter() - start, cpu, _busy_s() - busy)


def samples(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[Sample]:
    """Each rank's laps of the same rounds, put together."""
    rounds = [[Lap(*one) for one in laps] for laps in zip(*by_rank, strict=True)]
    return [
        Sample(
            laps[0].wall_s,
            max(one.cpu_s for one in laps),
            max(0.0, laps[0].busy_s - sum(one.cpu_s for one in laps)) / laps[0].wall_s,
        )
        for laps in rounds
    ]


def kept(found: Sequence[Sample]) -> list[Sample]:
    """The samples with little or no foreign load, and at least the quieter half."""
    ordered = sorted(found, key=lambda sample: sample.foreign)
    at_least = (len(ordered) + 1) // 2
    return [sample for n, sample in enumerate(ordered) if n < at_least or sample.foreign <= QUIET]


def wall(found: Sequence[Sample]) -> float:
    """Median seconds of the kept samples."""
    return median(sample.wall_s for sample in kept(found))


def cpu(found: Sequence[Sample]) -> float:
    """Median processor seconds of the greatest rank, of the kept samples."""
    return median(sample.cpu_s for sample in kept(found))


def _busy_s() -> float:
    """Processor seconds of the whole machine since its start, stolen ones included."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

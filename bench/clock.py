"""The time that work takes: wall-clock seconds, processor seconds of this process, and those of the whole machine.

Other programs usually run during a benchmark. The foreign load of a sample is the processor time of the whole machine
minus that of the ranks. Samples with much foreign load are not used, whatever they measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

QUIET = 0.05
"""Foreign load, in processors, up to which a sample is always kept."""


class Lap(NamedTuple):
    """Seconds of one rank's piece of work. `busy_s` counts all processors and programs; 0 if unknown."""

    wall_s: float
    cpu_s: float
    busy_s: float


class Sample(NamedTuple):
    """The laps of all ranks for the same work, combined.

    `wall_s` is that of rank 0, `cpu_s` that of the busiest rank, and `foreign` the number of processors that other
    programs used.
    """

    wall_s: float
    cpu_s: float
    foreign: float


def lap(barrier: Callable[[], None], work: Callable[[], Any]) -> Lap:
    """Time `work` between two barriers. The processor time covers only the work of this rank."""
    barrier()
    busy, start = _busy_s(), time.perf_counter()
    cpu = time.process_time()
    work()
    cpu = time.process_time() - cpu
    barrier()
    return Lap(time.perf_counter() - start, cpu, _busy_s() - busy)


def samples(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[Sample]:
    """Combine the laps of all ranks into one sample for each round."""
    rounds = [[Lap(*lap_) for lap_ in laps] for laps in zip(*by_rank, strict=True)]
    return [
        Sample(
            laps[0].wall_s,
            max(lap_.cpu_s for lap_ in laps),
            max(0.0, laps[0].busy_s - sum(lap_.cpu_s for lap_ in laps)) / laps[0].wall_s,
        )
        for laps in rounds
    ]


def kept(measured: Sequence[Sample]) -> list[Sample]:
    """Return the samples with little or no foreign load, and at least the quieter half."""
    ordered = sorted(measured, key=lambda sample: sample.foreign)
    at_least = (len(ordered) + 1) // 2
    return [sample for n, sample in enumerate(ordered) if n < at_least or sample.foreign <= QUIET]


def wall(measured: Sequence[Sample]) -> float:
    """Return the median wall-clock seconds of the kept samples."""
    return median(sample.wall_s for sample in kept(measured))


def cpu(measured: Sequence[Sample]) -> float:
    """Return the median processor seconds of the busiest rank in the kept samples."""
    return median(sample.cpu_s for sample in kept(measured))


def _busy_s() -> float:
    """Return the processor seconds of the whole machine since it started, including stolen ones."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

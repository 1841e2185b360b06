"""A soak: random calls on a ring for a long time, with ranks that are stopped for a while and rings that are dropped.

Run `python -m ringattn.bench soak seconds=3600 transport=gloo`. Every result is compared with dense float64 attention.
The bar: after the warm-up, which is the first third of the time, the descriptors, threads and mappings of no rank
increase, and the memory of each rank grows by less than `GROWTH_MIB`.
Guarantees: raises `RingError` if the bar is missed, a result is off or a rank fails.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from ringattn.bench.options import parse
from ringattn.bench.processes import run_torchrun
from ringattn.bench.report import RESULTS, Say, Table, finish, mib, progress
from ringattn.errors import InputError, RingError

PROGRAM = "ringattn.bench.soak_ranks"
COUNTS = ("descriptors", "threads", "maps")
GROWTH_MIB = 16.0
"""How much the memory of a rank may grow from the end of the warm-up to the end."""
SAY_EVERY_S = 1.0
MOST_KEPT = 200
"""How many samples per rank are saved with the results."""
END_S = 120.0
"""How long starting and ending may take."""

Samples = list[dict[str, float]]
"""The resources that a rank used, by time."""


@dataclass(frozen=True)
class SoakOptions:
    """The options of the soak. A random rank is stopped `stops_per_minute` times a minute, for at most `stop_s`."""

    seconds: float = 60.0
    transport: str = "gloo"
    ranks: int = 4
    seed: int = 0
    timeout_s: float = 60.0
    stops_per_minute: float = 12.0
    stop_s: float = 2.0
    results: str = RESULTS


class Stops:
    """An object that stops random ranks for a while and reports progress. It must be called periodically."""

    def __init__(self, options: SoakOptions, folder: Path, say: Say) -> None:
        self.options, self.folder, self.say = options, folder, say
        self.random = random.Random(options.seed)
        self.stopped: tuple[int, float] | None = None
        self.count = 0
        self.next_stop_s = self.began_s = self.said_s = time.monotonic()

    def __call__(self) -> None:
        """Stop a rank, continue the stopped rank, and report progress, each if its time has come."""
        now = time.monotonic()
        if now >= self.said_s:
            self.said_s = now + SAY_EVERY_S
            last = samples_of(self.folder, 0)[-1:]
            state = f"{last[0]['calls']:.0f} calls, {mib(last[0]['rss_bytes'])} MiB" if last else "ranks start"
            self.say(f"{now - self.began_s:.0f} s of {self.options.seconds:.0f}: {state}, {self.count} stops")
        if self.stopped is not None:
            if now >= self.stopped[1]:
                self.resume()
        elif now >= self.next_stop_s and self.options.stops_per_minute > 0:
            self.next_stop_s = now + self.random.expovariate(self.options.stops_per_minute / 60)
            pid = self.folder / f"pid-{self.random.randrange(self.options.ranks)}"
            if pid.exists():
                self.stopped = int(pid.read_text(encoding="utf-8")), now + self.random.uniform(0, self.options.stop_s)
                self.count += 1
                with suppress(ProcessLookupError):
                    os.kill(self.stopped[0], signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the rank that is stopped."""
        if self.stopped is not None:
            with suppress(ProcessLookupError):
                os.kill(self.stopped[0], signal.SIGCONT)
            self.stopped = None


def samples_of(folder: Path, rank: int) -> Samples:
    """Return the samples of a rank so far."""
    path = folder / f"rank-{rank}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def judge(ranks: Sequence[Samples]) -> list[str]:
    """Return one sentence for everything that grew beyond the bar."""
    complaints = []
    for rank, samples in enumerate(ranks):
        third = len(samples) // 3
        if not third:
            complaints.append(f"rank {rank} has {len(samples)} samples, too few to judge")
            continue
        # Compare medians, because a second ring that is open during a sample is not a leak.
        before, after = samples[third : 2 * third], samples[-third:]
        for name in COUNTS:
            first, last = max(sample[name] for sample in before), median(sample[name] for sample in after)
            if last > first:
                complaints.append(f"rank {rank}: {name} grew from at most {first:.0f} to {last:.0f}")
        growth = median(sample["rss_bytes"] for sample in after) - median(sample["rss_bytes"] for sample in before)
        if growth > GROWTH_MIB * 2**20:
            complaints.append(f"rank {rank}: memory grew by {mib(growth)} MiB, more than {GROWTH_MIB:.0f}")
    return complaints


def slope_bytes(samples: Samples) -> float:
    """Return the growth of a rank's memory, in bytes per 1,000 calls, after the warm-up."""
    later = samples[len(samples) // 3 :]
    if len(later) < 2:
        return 0.0
    calls = [sample["calls"] for sample in later]
    return 1000 * linear_regression(calls, [sample["rss_bytes"] for sample in later]).slope


def tabulate(ranks: Sequence[Samples], stops: int, complaints: Sequence[str]) -> Table:
    """Return a table of about ten moments, with the largest count and the most memory of any rank.

    Notes below the table contain the number of `stops`, the largest error, the growth of memory, and the `complaints`.
    """
    table = Table("What the ranks hold, most of all ranks", ("seconds", "calls", *COUNTS, "RSS MiB"))
    rows = min(map(len, ranks))
    for index in sorted({round(n * (rows - 1) / 9) for n in range(10)}) if rows else ():
        at_index = [samples[index] for samples in ranks]
        table.rows.append((
            f"{at_index[0]['seconds']:.0f}", f"{at_index[0]['calls']:.0f}",
            *(f"{max(sample[name] for sample in at_index):.0f}" for name in COUNTS),
            mib(max(sample["rss_bytes"] for sample in at_index)),
        ))  # fmt: skip
    slopes = ", ".join(mib(slope_bytes(samples)) for samples in ranks)
    error = max((sample["error"] for samples in ranks for sample in samples), default=0.0)
    table.notes += [
        f"- {stops} stops; largest error {error:.1e}; MiB in 1,000 calls after the warm-up, by rank: {slopes}.",
        f"- The bar: no more descriptors, threads and mappings, and less than {GROWTH_MIB:.0f} MiB: "
        f"{'MISSED' if complaints else 'met'}.",
        *(f"- {complaint}" for complaint in complaints),
    ]
    return table


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run, print, save and return the record. Raises `RingError` if the bar is missed or a rank fails."""
    options = parse(SoakOptions(), arguments)
    if options.seconds <= 0 or options.ranks < 2 or options.timeout_s <= options.stop_s:
        raise InputError("seconds must be positive, ranks at least 2 and timeout_s more than stop_s")
    with tempfile.TemporaryDirectory(prefix="ringattn-soak-") as name, progress("soak") as say:
        folder = Path(name)
        job = folder / "job.json"
        job.write_text(json.dumps(asdict(options)), encoding="utf-8")
        stops = Stops(options, folder, say)
        try:
            ended = run_torchrun(
                ["-m", PROGRAM, str(job)], job, stops, ranks=options.ranks, job_s=options.seconds + END_S
            )
        finally:
            stops.resume()
        ranks = [samples_of(folder, rank) for rank in range(options.ranks)]
    if ended.code:
        raise RingError(f"a rank failed (exit code {ended.code}):\n{ended.printed}")
    complaints = judge(ranks)
    kept = [samples[:: len(samples) // MOST_KEPT + 1] for samples in ranks]
    data: dict[str, Any] = {"complaints": complaints, "stops": stops.count, "samples": kept}
    finish("soak", options, [tabulate(ranks, stops.count, complaints)], data, options.results)
    if complaints:
        raise RingError("; ".join(complaints))
    return data


if __name__ == "__main__":
    main(sys.argv[1:])

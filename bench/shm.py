"""Shared memory compared with gloo between processes of one machine: messages and calls.

Run `python -m ringattn.bench.shm`. Every rank sends to the next rank and receives from the previous one at the same
time. Both transports run in turns in the same processes, together with bare copies of the same bytes, which are a lower
bound of the time. Calls are compared with torch's own ring over gloo, round by round.
The gate: every byte of the first exchange and of the first copy of each size is right, and calls are exact.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import comb, inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import torch

from ringattn.bench.baselines import OurRing, TorchRing
from ringattn.bench.gate import Baseline, open_gate, random_inputs
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.bench.shm_ways import copies, copying, exchanges, exchanging
from ringattn.ring import Ring
from ringattn.transport.shared.transport import ShmTransport

matplotlib.use("Agg")

COPY = "copy"
SIZES = tuple(1 << power for power in range(16, 27, 2))
BAR = 4.0
"""How many times faster than gloo messages must be at every size."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
PASSES = ("forward", "backward")
OURS = "ringattn over shm"


@dataclass(frozen=True)
class ShmOptions:
    """The options of the benchmark.

    `blocks` is the number of rounds of messages at each size, and `calls` the number of rounds of calls with `tokens`
    tokens. Six rounds cover all orders of the three candidates.
    """

    blocks: int = 12
    calls: int = 120
    tokens: int = 1024
    results: str = RESULTS


def messages_on_rank(ring: Ring, blocks: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each exchange by transport and bytes, and those of bare copies under the name `COPY`.

    Copies are timed in batches; their figure is the mean of a batch.
    """
    shm = ring.transport
    assert isinstance(shm, ShmTransport)
    with Ring(transport="gloo", timeout_s=600.0) as gloo_ring:
        turns: dict[str, Callable[[int], list[float]]] = {
            "shm": lambda nbytes: exchanges(exchanging(shm, nbytes)),
            "gloo": lambda nbytes: exchanges(exchanging(gloo_ring.transport, nbytes)),
            COPY: lambda nbytes: copies(copying(shm, nbytes)),
        }
        times_s: dict[str, dict[str, list[float]]] = {name: {str(n): [] for n in SIZES} for name in turns}
        orders = list(permutations(turns))
        for block in range(blocks):
            for nbytes in sorted(SIZES):
                for name in orders[block % len(orders)]:
                    times_s[name][str(nbytes)] += turns[name](nbytes)
            if ring.rank == 0:
                print(f"{ring.world_size} processes: block {block + 1} of {blocks}", flush=True)
        return times_s


def calls_on_rank(ring: Ring, calls: int, tokens: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round, by baseline and pass."""
    shape = 8, 2, 64, torch.float32
    with Ring(transport="gloo", timeout_s=600.0) as gloo_ring:
        ours, over_gloo, peer = OurRing(ring), OurRing(gloo_ring), TorchRing(ring, "alltoall")
        ours.name, over_gloo.name = OURS, "ringattn over gloo"
        baselines: list[Baseline] = [ours, over_gloo, peer]
        open_gate(baselines, random_inputs(96 * ring.world_size, *shape))
        inputs = random_inputs(tokens, *shape)
        for baseline in baselines:
            baseline.load(inputs)
        times_s: dict[str, dict[str, list[float]]] = {
            baseline.name: {name: [] for name in PASSES} for baseline in baselines
        }
        orders = list(permutations(baselines))  # so that each follows each other equally often
        for turn in range(calls):
            for baseline in orders[turn % len(orders)]:
                for name in PASSES:
                    ring.barrier()
                    start = time.perf_counter()
                    getattr(baseline, name)()
                    ring.barrier()
                    times_s[baseline.name][name].append(time.perf_counter() - start)
        return times_s


def p10(times: Sequence[float]) -> float:
    """Return the 10th percentile, which other programs affect the least."""
    return sorted(times)[len(times) // 10]


def messages_table(ranks: int, by_transport: dict[str, dict[str, list[float]]]) -> Table:
    """Return a table with one row per size."""
    table = Table(
        f"Messages, {ranks} processes, each to the next and from the one before at once",
        ("KiB", "shm, µs", "p10", "gloo, µs", "p10", "shm, GB/s", "gloo, GB/s", "faster, medians", "p10",
         "bare copy, µs", "p10", "shm / copy"),
        notes=[
            "- µs: one exchange, median and 10th percentile; GB/s: of one direction, by the median.",
            "- bare copy: the same bytes from the same neighbour's memory without any transport, all ranks at once; of "
            "the slowest rank, mean of a batch.",
        ],
    )  # fmt: skip
    for nbytes in sorted(SIZES):
        shm, gloo, copied = (by_transport[name][str(nbytes)] for name in ("shm", "gloo", COPY))
        table.rows.append((
            f"{nbytes >> 10}", f"{1e6 * median(shm):.0f}", f"{1e6 * p10(shm):.0f}", f"{1e6 * median(gloo):.0f}",
            f"{1e6 * p10(gloo):.0f}", f"{nbytes / median(shm) / 1e9:.2f}", f"{nbytes / median(gloo) / 1e9:.2f}",
            f"{median(gloo) / median(shm):.1f}", f"{p10(gloo) / p10(shm):.1f}", f"{1e6 * median(copied):.0f}",
            f"{1e6 * p10(copied):.0f}", f"{median(shm) / median(copied):.2f}",
        ))  # fmt: skip
    table.notes.append(messages_verdict(by_transport))
    return table


def messages_verdict(by_transport: dict[str, dict[str, list[float]]]) -> str:
    """Return the verdict on all sizes, by medians and by 10th percentiles.

    A size is listed separately if the bare copy also misses the bar there, in every measure in which shm misses it. The
    bar is not met at such a size either.
    """
    least = float("inf")
    missed: list[str] = []
    above: list[str] = []
    for nbytes in sorted(SIZES):
        shm, gloo, copied = (by_transport[name][str(nbytes)] for name in ("shm", "gloo", COPY))
        # Check first the measure in which the bare copy is faster than gloo by the larger factor.
        measures = sorted(
            ((measure(gloo) / measure(copied), measure(gloo) / measure(shm)) for measure in (median, p10)), reverse=True
        )
        least = min(least, *(faster for _, faster in measures))
        for allowed, faster in measures:
            if faster < BAR:
                sizes = above if allowed < BAR else missed
                sizes.append(f"{nbytes >> 10} KiB ({faster:.1f} times, the bare copy {allowed:.1f})")
                break
    parts = [f"MISSED at {', '.join(missed)}"] if missed else []
    if above:
        parts.append(f"above what copying allows here, so not met either, at {', '.join(above)}")
    return f"- At least {least:.1f} times gloo, the bar is {BAR:g} at every size: {'; '.join(parts) or 'met'}."


def calls_table(tokens: int, by_baseline: dict[str, dict[str, list[float]]]) -> Table:
    """Return a table with one row per pass and baseline."""
    table = Table(
        f"Calls of {tokens} tokens, causal, heads 8:2 of 64, float32, 2 processes of one thread",
        ("pass", "attention", "ms, median", "p10", "over shm, medians", "p10", "by round"),
        notes=["- by round: the median of the ratios of the same rounds, and the interval that holds it with 95 %."],
    )
    ours = by_baseline[OURS]
    for name in PASSES:
        for baseline, by_pass in by_baseline.items():
            times = by_pass[name]
            by_round = "" if baseline == OURS else str(paired(ours[name], times))
            table.rows.append((
                name, baseline, f"{1e3 * median(times):.2f}", f"{1e3 * p10(times):.2f}",
                f"{median(times) / median(ours[name]):.2f}", f"{p10(times) / p10(ours[name]):.2f}", by_round,
            ))  # fmt: skip
    table.notes.append(calls_verdict(by_baseline))
    return table


def calls_verdict(by_baseline: dict[str, dict[str, list[float]]]) -> str:
    """Return the verdict: missed if ours is certainly slower than torch's ring, open if the rounds cannot decide."""
    torch_ring = next(by_pass for baseline, by_pass in by_baseline.items() if baseline.startswith("torch"))
    ratios = {name: paired(by_baseline[OURS][name], torch_ring[name]) for name in PASSES}
    verdicts = {ratio.verdict for ratio in ratios.values()}
    met = "MISSED" if "slower" in verdicts else "OPEN" if "undecided" in verdicts else "met"
    details = ", ".join(f"{name} {ratio}: {ratio.verdict}" for name, ratio in ratios.items())
    return f"- At least level with torch's ring: {met}; {details}. Above 1 shm is faster, and level if 1 is inside."


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run, print, save, draw and return the record."""
    options = parse(ShmOptions(), arguments)
    with progress("shm") as say:
        messages = {
            ranks: run_in_processes(ranks, "ringattn.bench.shm:messages_on_rank", {"blocks": options.blocks}, say)[0]
            for ranks in (2, 4)
        }
        spec = {"calls": options.calls, "tokens": options.tokens}
        calls = run_in_processes(2, "ringattn.bench.shm:calls_on_rank", spec, say)[0]
        loads = [round(load, 1) for load in os.getloadavg()]  # the load of the machine meanwhile
    tables = [messages_table(ranks, by_transport) for ranks, by_transport in messages.items()]
    tables[0].notes.append(
        f"- Then the mean number of processes that wanted a processor was {loads[0]} over one minute, {loads[2]} "
        f"over fifteen; this benchmark has up to 4, the machine {os.cpu_count()}."
    )
    if HUGE_PAGES.exists():
        chosen = HUGE_PAGES.read_text(encoding="utf-8").split("[")[1].split("]")[0]
        tables[0].notes.append(f"- Huge pages for shared memory ({HUGE_PAGES}): {chosen}.")
    tables.append(calls_table(options.tokens, calls))
    data: dict[str, Any] = {
        "messages_s": {
            str(ranks): {
                name: {size: {"median": median(times), "p10": p10(times), "count": len(times)}
                       for size, times in by_size.items()}
                for name, by_size in by_transport.items()
            }
            for ranks, by_transport in messages.items()
        },
        "calls_s": calls,
        "load_average": loads,
    }  # fmt: skip
    finish("shm", options, tables, data, options.results)
    if options.results:
        draw(data["messages_s"], Path(options.results) / "shm.png")
    return data


# --- ratios of rounds -------------------------------------------------------------------------------------------------


LEVEL = 0.95
NEAR = 0.05
"""Two series count as level if the first is slower by at most this share."""


class Ratio(NamedTuple):
    """The median of the ratios of all rounds, and the confidence interval of the true median.

    A ratio above 1 means that the first of the two compared series is faster.
    """

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Return slower, faster or level, or undecided if the rounds differ too much or are too few."""
        if self.high < 1 or self.low > 1:
            return "slower" if self.high < 1 else "faster"
        return "level" if self.low >= 1 - NEAR else "undecided"

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def paired(first_s: Sequence[float], second_s: Sequence[float]) -> Ratio:
    """Return the ratio of the second series of times to the first, from the seconds of the same rounds.

    Raises `ValueError` if the series have different lengths.
    """
    ratios = sorted(second / first for first, second in zip(first_s, second_s, strict=True))
    # The number of ratios below the true median is binomial(n, 1/2). The true median lies outside the k-th ratio from
    # either end with twice the probability of fewer than k.
    count, below, outside = len(ratios), 0.0, 0
    while (below := below + comb(count, outside) / 2**count) <= (1 - LEVEL) / 2:
        outside += 1
    if not outside:  # too few rounds to say anything
        return Ratio(median(ratios), 0.0, inf)
    return Ratio(median(ratios), ratios[outside - 1], ratios[-outside])


# --- the picture ------------------------------------------------------------------------------------------------------


INK = "#22303c"
STYLES = {"shm": "-", "gloo": "--", "copy": ":"}


def draw(by_ranks: dict[str, dict[str, dict[str, dict[str, float]]]], path: Path) -> None:
    """Write a PNG with the rates and the times of exchanges.

    `by_ranks` has the seconds of an exchange (`median` and `p10`) by number of processes, transport or copy, and bytes.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
    for number, (ranks, by_name) in enumerate(by_ranks.items()):
        for name, by_size in by_name.items():
            sizes = sorted(by_size, key=int)
            look: dict[str, Any] = {
                "color": f"C{number}", "linestyle": STYLES[name], "marker": "o", "markersize": 4,
                "label": f"{'bare copy' if name == 'copy' else name}, {ranks} processes",
            }  # fmt: skip
            kib = [int(size) / 1024 for size in sizes]
            left.plot(kib, [int(size) / by_size[size]["median"] / 1e9 for size in sizes], **look)
            right.plot(kib, [1e6 * by_size[size]["median"] for size in sizes], **look)
            fastest = [1e6 * by_size[size]["p10"] for size in sizes]
            right.plot(kib, fastest, **{**look, "alpha": 0.35, "label": None, "marker": ""})
    for ax, title in ((left, "GB/s each way, median"), (right, "µs of a hop: median, and pale the fastest tenth")):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks([64, 256, 1024, 4096, 16384, 65536], ["64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB"])
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set_title(title, loc="left", fontsize=10, color=INK)
        ax.grid(True, which="major", color="#dfe4e8", linewidth=0.7)
    left.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])

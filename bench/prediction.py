"""The accuracy of predicted times of passes after `ringattn calibrate`, for ten shapes on two and four ranks.

Run `python -m ringattn.bench.prediction repeats=4`, or add `cluster=FILE` to use existing constants instead of a
calibration. All shapes run in turns in the same processes, one thread each. A time is measured between two barriers, so
it is that of the slowest rank.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ringattn.bench.clock import Sample, cpu, kept, wall
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.bench.timed_calls import Shape, plans_of, processor_s, samples_of, timed
from ringattn.errors import RingError
from ringattn.planner.cluster import Cluster, cluster_named
from ringattn.planner.simulate import simulate
from ringattn.ring import Ring

PROGRAM = "ringattn.bench.prediction:on_rank"
BAR = 0.10
"""The largest allowed median error, as a share of the measured time."""


@dataclass(frozen=True)
class PredictionOptions:
    """The options of the benchmark.

    `cluster` names the constants of predictions; if it is empty, they are measured first, on two ranks in `rounds`
    rounds. `shapes` is the number of `SHAPES` to run.
    """

    cluster: str = ""
    ranks: tuple[int, ...] = (2, 4)
    shapes: int = 10
    repeats: int = 4
    rounds: int = 30
    transport: str = "auto"
    results: str = RESULTS


SHAPES = (
    Shape(4096, 8, 8, 64, "zigzag", "ring"),
    Shape(8192, 8, 2, 64, "zigzag", "ring"),
    Shape(4096, 8, 2, 64, "contiguous", "double_ring", causal=False),
    Shape(4096, 4, 4, 128, "contiguous", "balanced"),
    Shape(6144, 8, 8, 32, "zigzag", "all_gather"),
    Shape(8192, 8, 8, 64, "contiguous", "direct", window=1024),
    Shape(8192, 8, 8, 64, "contiguous", "auto", causal=False, dilated=True),
    Shape(2048, 16, 4, 64, "zigzag", "direct"),
    Shape(3072, 4, 1, 128, "contiguous", "pass_q", causal=False),
    Shape(4096, 8, 4, 64, "zigzag", "ulysses"),
)


def on_rank(ring: Ring, **spec: Any) -> dict[str, Any]:
    """Run one rank's part of the benchmark."""
    return timed(ring, SHAPES[: spec["shapes"]], spec["repeats"])


def calibrated(options: Any, say: Callable[[str], None]) -> Cluster:
    """Return the constants that `options.cluster` names, or run `ringattn calibrate` to measure them.

    Raises `RingError` if calibration fails.
    """
    if options.cluster:
        return cluster_named(options.cluster)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "calibrated.json")
        arguments = [
            "calibrate",
            "ranks=2",
            f"rounds={options.rounds}",
            f"transport={options.transport}",
            f"out='{file}'",
        ]
        command = [sys.executable, "-m", "ringattn", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None
            for line in process.stdout:
                say(line.rstrip())
        if process.returncode:
            raise RingError("ringattn calibrate failed; its message is above")
        return cluster_named(str(file))


def table_of(options: PredictionOptions, cluster: Cluster, by_ranks: dict[int, list[dict[str, list[Sample]]]]) -> Table:
    """Return a table with a row per shape, pass and number of ranks. Its notes have the verdict."""
    table = Table(
        f"Predicted and measured, {options.repeats} rounds, constants: {cluster.name}",
        ("ranks", "tokens, heads, mask, layout, schedule", "pass", "predicted, ms", "measured, ms", "error",
         "by processor", "foreign"),
        notes=[
            "- error: predicted over measured, minus one. By processor: the same for processor seconds of the busiest "
            "rank, which other programs barely affect.",
            "- foreign: processors that other programs used in the kept rounds, median.",
        ],
    )  # fmt: skip
    for ranks, by_shape in by_ranks.items():
        errors, busy_errors = [], []
        for shape, by_pass in zip(SHAPES, by_shape, strict=False):
            for name, taken in by_pass.items():
                plans = plans_of(shape, ranks, name == "backward")
                predicted_s = simulate(plans, cluster).total_us / 1e6
                errors.append(predicted_s / wall(taken) - 1)
                busy_errors.append(processor_s(plans, cluster) / cpu(taken) - 1)
                table.rows.append((
                    str(ranks), str(shape), name, f"{1e3 * predicted_s:.1f}", f"{1e3 * wall(taken):.1f}",
                    f"{errors[-1]:+.1%}", f"{busy_errors[-1]:+.1%}", f"{median(s.foreign for s in kept(taken)):.2f}",
                ))  # fmt: skip
        off, busy_off = (median(map(abs, errors_)) for errors_ in (errors, busy_errors))
        table.notes.append(
            f"- {ranks} ranks: median error {off:.1%}; the bar is {BAR:.0%}: {'met' if off <= BAR else 'MISSED'}. "
            f"By processor time: {busy_off:.1%}."
        )
    return table


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Calibrate, run, print, save and return the record."""
    options = parse(PredictionOptions(), arguments)
    with progress("prediction") as say:
        cluster = calibrated(options, say)
        answers = {
            ranks: run_in_processes(ranks, PROGRAM, asdict(options), say, options.transport) for ranks in options.ranks
        }
    samples = {ranks: samples_of(by_rank) for ranks, by_rank in answers.items()}
    data: dict[str, Any] = {
        "cluster": asdict(cluster),
        "samples": samples,
        "sample_fields": Sample._fields,
        "largest_error": max(rank["error"] for by_rank in answers.values() for rank in by_rank),
    }
    finish("prediction", options, [table_of(options, cluster, samples)], data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])

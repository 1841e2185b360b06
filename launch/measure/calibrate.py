"""`ringattn calibrate`: measure the constants of this machine and write them to a file for predictions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from ringattn.core.geometry import CAUSAL, FULL, StridedRange, Tile, TokenRange
from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.core.tiling import TileTable
from ringattn.errors import InputError, RingError
from ringattn.launch.folders import writing
from ringattn.launch.measure.environment import CALIBRATION_FILE, hardware
from ringattn.launch.options import help_text, load_plain, option
from ringattn.launch.ranks import run_ranks_in_processes
from ringattn.observe.files import write_file
from ringattn.planner.cluster import BACKWARD_OVER_FORWARD, COPIED, FORWARD_FLOPS_PER_DIM, UNITS, Cluster, call_work

PURPOSE = """\
Measure on this machine what prediction needs: attention FLOP/s, copies, latency and bandwidth of messages, processors.
Run it while nothing else runs; it takes about a minute. `run`, `sweep`, `explain` and `timeline` in this folder then
predict for this machine."""


@dataclass
class CalibrateConfig:
    """The options of `ringattn calibrate`."""

    ranks: int = option(2, "ranks, each a process with one thread, and with one GPU for nccl", least=2)
    out: str = option(CALIBRATION_FILE, "file to write (JSON)", writes="file")
    transport: str = option("auto", "transport of the messages", choices=("auto", "shm", "gloo", "nccl"))
    dtype: str | None = option(
        None,
        "dtype of the inputs; if not set float32 on CPUs, bfloat16 with nccl",
        choices=("float32", "bfloat16", "float16"),
    )
    rounds: int = option(30, "number of measurements", least=1)
    timeout_s: float = option(120.0, "deadline of every wait for another rank, in seconds", above=0.0)


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises `InputError` for bad options, `RanksError` if a rank fails."""
    if "--help" in argv or "-h" in argv:
        print(help_text("calibrate", PURPOSE, CalibrateConfig))
        return 0
    import torch

    config = load_plain(argv, CalibrateConfig)
    gpus = torch.cuda.device_count()
    nccl = config.transport == "nccl" or (config.transport == "auto" and gpus > 0)
    if nccl and config.ranks > gpus:
        raise InputError(f"ranks={config.ranks}: there are {gpus} GPUs; use fewer ranks, or transport=shm")
    dtype = config.dtype or ("bfloat16" if nccl else "float32")
    out = Path(config.out)
    spec = {
        "rounds": config.rounds, "dtype": dtype, "transport": "nccl" if nccl else config.transport,
        "timeout_s": config.timeout_s,
    }  # fmt: skip
    by_rank = run_ranks_in_processes("ringattn.launch.measure.calibration:worker", spec, config.ranks, None, 1)
    described = description(by_rank, spec)
    with writing("out", out):
        write_file(out, json.dumps(described, indent=1) + "\n")
    _show(described)
    processors = len(os.sched_getaffinity(0))
    if not nccl and described["constants"]["cores"] < processors:
        print(f"only {described['constants']['cores']} of {processors} processors were free: calibrate again when "
            "nothing else runs, unless this machine limits the number")  # fmt: skip
    is_default = config.out == CALIBRATION_FILE
    use = "commands that start in this folder use it for predictions" if is_default else f"use it as cluster={out}"
    print(f"written: {out}; {use}")
    return 0


def description(by_rank: list[dict[str, Any]], spec: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the file: constants with units, the errors of their fit, and how they were measured."""
    import torch

    scale = GPU_SCALE if spec["transport"] == "nccl" else 1
    seconds = finalized(by_rank)
    constants, kernel, link = constants_of(seconds, spec["dtype"], scale, by_rank[0]["jobs"])
    date, machine = datetime.now(UTC).date().isoformat(), hardware()
    cluster = Cluster(
        name=f"{machine}, {by_rank[0]['transport']}, {spec['dtype']} (calibrated {date})",
        source=f"ringattn calibrate, {len(by_rank)} ranks of one thread, engine {by_rank[0]['engine']}, {date}",
        calibrated=True,
        **constants,
    )
    return {
        "constants": asdict(cluster), "units": UNITS, "date": date, "hardware": machine, "torch": torch.__version__,
        "ranks": len(by_rank), "transport": by_rank[0]["transport"], "engine": by_rank[0]["engine"],
        "dtype": spec["dtype"], "fit": {"kernel": _errors(kernel), "messages": _errors(link)}, "shapes": SHAPES,
        "message_bytes": MESSAGE_BYTES, "seconds": seconds,
    }  # fmt: skip


def _errors(fit: Fit) -> dict[str, Any]:
    """Return the differences between measured and fitted times, as shares."""
    return {"median_error": fit.median_error, "greatest_error": max(map(abs, fit.errors)), "errors": fit.errors}


def _show(described: dict[str, Any]) -> None:
    """Print the constants as a table, and the errors of their fit."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=described["constants"]["name"])
    for column in ("constant", "value", "unit"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for key, unit in UNITS.items():
        if (value := described["constants"][key]) is not None:
            table.add_row(key, f"{value:.4g}", unit)
    Console().print(table)
    for name, fit in described["fit"].items():
        print(
            f"{name}: median difference between measured and fitted values {fit['median_error']:.1%}, largest "
            f"{fit['greatest_error']:.1%}"
        )


# --- what is measured -------------------------------------------------------------------------------------------------


GPU_SCALE = 8
"""On a GPU, shards must be longer, so that a kernel takes longer than its launch."""
COPY_BYTES = 8 << 20
ON_PROCESSOR = ("forward", "backward", "copy")
"""Work in which a rank does not wait for other ranks."""
NEAR, FAR = "message", "far message"
"""Names of messages: between ranks of a node, and between nodes."""
MESSAGE_BYTES = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


class Shape(NamedTuple):
    """One engine call on `tiles` tiles along the diagonal, each with `rows` query rows and `keys` keys.

    If `received`, the queries were received from other ranks, to which their outputs return.
    """

    rows: int
    keys: int
    heads: int = 4
    kv_heads: int = 4
    dim: int = 64
    causal: bool = False
    tiles: int = 1
    received: bool = False

    def problem(self, dtype: str) -> Problem:
        """Return the call as a `Problem` of the planner."""
        rows, keys = self.rows * self.tiles, self.keys * self.tiles
        layouts = make_layout("contiguous", rows, 1), make_layout("contiguous", keys, 1)
        mask = Banded().mask(rows, keys, None, None, self.heads, self.kv_heads)
        return Problem(*layouts, mask, 1, self.heads, self.kv_heads, self.dim, self.dim, dtype)

    def table(self) -> TileTable:
        """Return the tiles of the call."""
        band, heads = CAUSAL if self.causal else FULL, StridedRange(0, self.heads)
        q, k = ([StridedRange(n * size, size) for n in range(self.tiles)] for size in (self.rows, self.keys))
        return TileTable.of([Tile(TokenRange(a, a), TokenRange(b, b), band, heads) for a, b in zip(q, k, strict=True)])


SHAPES = (
    Shape(64, 64), Shape(64, 64, tiles=16), Shape(256, 256), Shape(512, 512), Shape(1024, 1024), Shape(2048, 512),
    Shape(512, 512, causal=True), Shape(1024, 1024, causal=True), Shape(2048, 2048, causal=True),
    Shape(1024, 1024, heads=8, kv_heads=2), Shape(512, 512, dim=32), Shape(1024, 1024, dim=32),
    Shape(512, 512, dim=128), Shape(1024, 1024, dim=128, causal=True),
    Shape(1024, 1024, 1, 1, dim=32, tiles=4, received=True), Shape(1024, 1024, 1, 1, dim=64, tiles=4, received=True),
    Shape(2048, 2048, 1, 1, dim=64, causal=True, received=True),
    Shape(1024, 1024, 1, 1, dim=128, tiles=2, received=True),
)  # fmt: skip


def finalized(by_rank: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each measurement: the median over rounds of the mean over ranks."""
    seconds = {}
    for name in by_rank[0]["seconds"]:
        rounds = zip(*(rank["seconds"][name] for rank in by_rank), strict=True)
        seconds[name] = median(fmean(of_ranks) for of_ranks in rounds)
    return seconds


# --- from seconds to constants: least squares on the formulas that predict --------------------------------------------


BLOCKS = (0, 64, 128, 256, 512, 1024)
SOFTMAX_DIMS = range(0, 68, 4)


class Sample(NamedTuple):
    """One engine call and its time."""

    shape: Shape
    backward: bool
    seconds: float


class Fit(NamedTuple):
    """Fitted constants by name, and the error of each sample: measured over fitted seconds, minus one."""

    constants: dict[str, Any]
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Return the median of the absolute errors."""
        return median(map(abs, self.errors))


def kernel_fit(samples: Sequence[Sample], copy_bytes_s: float, dtype: str) -> Fit:
    """Fit flops, backward_flops, received_dims, call_s and tile_s, and pick the best block_keys and softmax_dims."""
    seconds = np.array([sample.seconds for sample in samples])
    best: tuple[float, list[float], int, int, list[float]] | None = None
    for block_keys in BLOCKS:
        works = [
            call_work(sample.shape.problem(dtype), sample.shape.table(), sample.backward, block_keys)
            for sample in samples
        ]
        moved_s = np.array([work.moved_bytes for work in works]) / copy_bytes_s
        for softmax_dims in SOFTMAX_DIMS:
            columns = np.zeros((len(samples), 5))
            for row, (sample, work) in enumerate(zip(samples, works, strict=True)):
                flops = work.pairs * (sample.shape.dim + softmax_dims) * FORWARD_FLOPS_PER_DIM
                columns[row, int(sample.backward)] = flops * (BACKWARD_OVER_FORWARD if sample.backward else 1)
                columns[row, 2:4] = work.calls, work.tiles
                if sample.backward and sample.shape.received:
                    columns[row, 4] = work.pairs * FORWARD_FLOPS_PER_DIM * BACKWARD_OVER_FORWARD
            costs = least_squares(columns, seconds - moved_s, seconds)
            fitted = columns @ costs + moved_s
            off = float((((fitted - seconds) / seconds) ** 2).sum())
            if best is None or off < best[0]:
                best = off, costs.tolist(), block_keys, softmax_dims, (seconds / fitted - 1).tolist()
    assert best is not None
    _, (forward, backward, call_s, tile_s, received), block_keys, softmax_dims, errors = best
    constants = {"flops": _rate(forward), "backward_flops": _rate(backward), "call_s": call_s, "tile_s": tile_s,
                 "received_dims": received / backward if backward else 0.0,
                 "block_keys": block_keys, "softmax_dims": float(softmax_dims)}  # fmt: skip
    return Fit(constants, tuple(errors))


def link_fit(nbytes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Fit latency_s and bandwidth of messages."""
    taken = np.array(seconds)
    columns = np.stack([np.ones(len(nbytes)), np.array(nbytes, float)], 1)
    costs = least_squares(columns, taken, taken)
    latency_s, per_byte = costs.tolist()
    constants = {"latency_s": latency_s, "bandwidth": _rate(per_byte)}
    return Fit(constants, tuple((taken / (columns @ costs) - 1).tolist()))


def least_squares(columns: np.ndarray, targets: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return costs (n,) >= 0 that minimize the error of columns (m, n) @ costs to `targets` (m,), relative to `scale`.

    While some cost would be negative, the column with the most negative cost is dropped; its cost is 0.
    """
    kept = list(range(columns.shape[1]))
    costs = np.zeros(columns.shape[1])
    sizes = np.abs(columns / scale[:, None]).max(0)
    while kept:
        scaled = columns[:, kept] / scale[:, None] / sizes[kept]
        solution = np.linalg.lstsq(scaled, targets / scale, rcond=None)[0] / sizes[kept]
        if (solution >= 0).all():
            costs[kept] = solution
            break
        del kept[int(np.argmin(solution * sizes[kept]))]
    return costs


def _rate(cost_s: float) -> float:
    """Return the units per second if a unit takes `cost_s` seconds. Raises `RingError` if `cost_s` is not positive."""
    if not cost_s > 0:
        raise RingError("measured times did not grow with the work: calibrate again when nothing else runs")
    return 1 / cost_s


def constants_of(seconds: dict[str, float], dtype: str, scale: int, jobs: int) -> tuple[dict[str, Any], Fit, Fit]:
    """Return the constants of a cluster, with the fits of kernel and link, from the result of `finalized`.

    `scale` is the factor by which the rows and keys of the shapes were multiplied. `jobs` is the number of calls that
    ran at the same time in the measurement "crowd".
    """
    copy_bytes_s = COPIED * COPY_BYTES / seconds["copy"]
    samples = [
        Sample(shape._replace(rows=shape.rows * scale, keys=shape.keys * scale), backward,
               seconds[f"{'backward' if backward else 'forward'} {number}"])
        for (number, shape), backward in product(enumerate(SHAPES), (False, True))
    ]  # fmt: skip
    kernel = kernel_fit(samples, copy_bytes_s, dtype)
    link = link_fit(MESSAGE_BYTES, [seconds[f"{NEAR} {nbytes}"] for nbytes in MESSAGE_BYTES])
    constants = {**kernel.constants, **link.constants, "copy_bytes_s": copy_bytes_s, "pass_s": seconds["pass"]}
    if f"{FAR} {MESSAGE_BYTES[0]}" in seconds:
        far = link_fit(MESSAGE_BYTES, [seconds[f"{FAR} {nbytes}"] for nbytes in MESSAGE_BYTES])
        constants |= {f"node_{key}": value for key, value in far.constants.items()}
    if "crowd" in seconds:
        largest = f"{NEAR} {MESSAGE_BYTES[-1]}"
        constants["cores"] = max(1, round(jobs * seconds["alone"] / seconds["crowd"]))
        constants["wire_cores"] = seconds[f"processor {largest}"] / seconds[largest]
    return constants, kernel, link

"""From measured seconds to the constants of a cluster: least squares on the formulas that predict.

Guarantees: relative errors are what is made small, so that short calls count as much as long ones; no constant is
negative; the residuals are told; times that do not grow with the work raise `RingError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ringattn.errors import RingError
from ringattn.launch.measure.calibration import COPY_BYTES, FAR, MESSAGE_BYTES, NEAR, SHAPES, Shape
from ringattn.planner.work import BACKWARD_OVER_FORWARD, COPIED, FORWARD_FLOPS_PER_DIM, call_work

BLOCKS = (0, 64, 128, 256, 512, 1024)
SOFTMAX_DIMS = range(0, 68, 4)


class Sample(NamedTuple):
    """One engine call and what it took."""

    shape: Shape
    backward: bool
    seconds: float


class Fit(NamedTuple):
    """Constants by name, and measured over fitted seconds less one, for each sample."""

    constants: dict[str, Any]
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Of the errors' sizes."""
        return median(map(abs, self.errors))


def kernel_fit(samples: Sequence[Sample], copy_bytes_s: float, dtype: str) -> Fit:
    """flops, backward_flops, received_dims, call_s, tile_s; block_keys and softmax_dims, the best of a few values."""
    seconds = np.array([sample.seconds for sample in samples])
    best: tuple[float, list[float], int, int, list[float]] | None = None
    for block_keys in BLOCKS:
        works = [call_work(one.shape.problem(dtype), one.shape.table(), one.backward, block_keys) for one in samples]
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
    """latency_s and bandwidth of messages."""
    taken = np.array(seconds)
    columns = np.stack([np.ones(len(nbytes)), np.array(nbytes, float)], 1)
    costs = least_squares(columns, taken, taken)
    latency_s, per_byte = costs.tolist()
    constants = {"latency_s": latency_s, "bandwidth": _rate(per_byte)}
    return Fit(constants, tuple((taken / (columns @ costs) - 1).tolist()))


def least_squares(columns: np.ndarray, wanted: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Costs (n,), none negative, such that columns (m, n) @ costs is near `wanted` (m,), in units of `scale` (m,).

    A column whose cost would be negative is left out, the most negative first.
    """
    kept = list(range(columns.shape[1]))
    costs = np.zeros(columns.shape[1])
    sizes = np.abs(columns / scale[:, None]).max(0)
    while kept:
        scaled = columns[:, kept] / scale[:, None] / sizes[kept]
        found = np.linalg.lstsq(scaled, wanted / scale, rcond=None)[0] / sizes[kept]
        if (found >= 0).all():
            costs[kept] = found
            break
        del kept[int(np.argmin(found * sizes[kept]))]
    return costs


def _rate(cost_s: float) -> float:
    """Of something that costs so many seconds each."""
    if not cost_s > 0:
        raise RingError("measured times did not grow with the work: calibrate again when nothing else runs")
    return 1 / cost_s


def constants_of(seconds: dict[str, float], dtype: str, scale: int, jobs: int) -> tuple[dict[str, Any], Fit, Fit]:
    """The constants of a cluster from finalized seconds, with the fits of kernel and link.

    `scale`: what the shapes' rows and keys were multiplied by; `jobs`: how many calls ran at once in the crowd.
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

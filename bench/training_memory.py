"""The memory of training: the peak of a rank for combinations of recompute, optimizer and ring size.

Run `python -m ringattn.bench.training_memory`. For each row, the training loop of `ringattn train` runs in new
processes. The row has the growth of the resident size from before the model exists to the end, for the rank with the
most; the growth of torch's storages; and the prediction. Before anything is printed, the losses of rows that must be
equal are compared. The picture shows the storages of rank 0 over the second half of the operators, next to the planned
moments.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from ringattn.bench.gate import GateError
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Say, Table, finish, mib, progress
from ringattn.bench.storage_meter import StorageMeter
from ringattn.engine import aten
from ringattn.launch.capacity.account import Account, training_bytes
from ringattn.launch.capacity.model_shapes import ModelShape
from ringattn.launch.capacity.training_bytes import TrainingSetup
from ringattn.launch.train.config import SHARDING, load_train
from ringattn.launch.train.loop import train
from ringattn.layers import tiled
from ringattn.ring import Ring

PROGRAM = "ringattn.bench.training_memory:weigh_rank"
M_MMAP_THRESHOLD = -3
"""The parameter of glibc's mallopt (malloc.h)."""
MAPPED_FROM_BYTES = 1 << 16


class Sizes(NamedTuple):
    """The sizes of a model and its sequence."""

    tokens: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden_dim: int


LONG = Sizes(16384, 2, 128, 8, 4, 256)
"""A long sequence for a small model, so that activations take most of the memory, as with millions of tokens."""
SHORT = Sizes(64, 6, 256, 4, 2, 1024)
"""A short sequence for a larger model, so that weights and gradients take most of the memory."""
SHORT_BATCH = 4
"""The short sequences of one step."""
BF16_TOKENS = 8192
"""The tokens of a long sequence in bf16, whose arithmetic is slow on CPUs."""


class Combination(NamedTuple):
    """The settings of one run. `tile_tokens` is the size of the tiles of the feed-forward and of the loss; 0: no tiles.

    `is_long` and `is_short`: the sizes are those of `LONG` or `SHORT` instead of the options. `dtype`: that of
    activations. `micro_batches`: the parts into which the batch of short sequences is divided.
    """

    recompute: str
    optimizer: str
    ranks: int
    head_groups: int = 1
    tile_tokens: int = 0
    is_long: bool = False
    dtype: str = "fp32"
    is_short: bool = False
    sharding: str = "none"
    micro_batches: int = 1

    @property
    def batch(self) -> int:
        """Return the number of sequences of a step."""
        return SHORT_BATCH if self.is_short else 1

    @property
    def micro_batch(self) -> int:
        """Return the number of sequences of a micro batch."""
        return self.batch // self.micro_batches

    def sizes(self, options: TrainingMemoryOptions) -> Sizes:
        """Return the sizes of the model and its sequence."""
        if self.is_short:
            return SHORT
        if self.is_long:
            return LONG if self.dtype == "fp32" else LONG._replace(tokens=BF16_TOKENS)
        model = options.layers, options.dim, options.heads, options.kv_heads, options.hidden_dim
        return Sizes(options.length_tokens, *model)


SWITCHES = (
    ("none", 1, 0), ("none", 4, 0), ("full", 1, 64), ("full", 4, 64), ("offloaded", 4, 64),
)  # fmt: skip
"""Recompute, head groups and tiles of the long sequence."""
COMBINATIONS = (
    *(Combination(recompute, "adamw", ranks) for ranks in (1, 2, 4) for recompute in ("none", "selective", "full")),
    Combination("none", "sgd", 2),
    Combination("selective", "sgd", 2),
    Combination("full", "adafactor", 2),
    *(
        Combination(recompute, "sgd", ranks, groups, tiles, is_long=True)
        for recompute, groups, tiles in SWITCHES for ranks in (1, 2, 4, 8)
    ),
    Combination("none", "adamw", 1, dtype="bf16"),
    Combination("full", "adamw", 2, dtype="bf16"),
    *(
        Combination(recompute, "sgd", ranks, groups, tiles, is_long=True, dtype="bf16")
        for recompute, groups, tiles in SWITCHES for ranks in (2, 8)
    ),
    *(
        Combination("none", "sgd", 2, is_short=True, sharding=sharding, micro_batches=count)
        for sharding in SHARDING for count in (1, SHORT_BATCH)
    ),
    *(
        Combination("full", "adamw", 2, is_short=True, sharding=sharding, micro_batches=count)
        for sharding in ("zero2", "zero3") for count in (1, SHORT_BATCH)
    ),
    *(Combination("full", "adamw", 2, dtype="bf16", sharding=sharding) for sharding in ("zero2", "zero3")),
    *(Combination("none", "sgd", 2, is_long=True, sharding=sharding) for sharding in ("zero2", "zero3")),
)  # fmt: skip
BYTES = 256
"""The vocabulary: `ringattn train` reads bytes."""

POINTS = 400
"""The number of points of a rank's history that are kept."""

SAME = "is_long", "is_short", "dtype"
"""The settings on which losses depend, except for rounding."""

SAME_LOSS = {"fp32": 1e-5, "bf16": 2**-8}
"""Largest relative difference of losses: rings of different sizes sum in different orders. For bf16, its epsilon."""
PRECISION = {"fp32": "fp32", "bf16": "bf16_cast"}
"""The planner's name of a dtype."""
ZERO_STAGE = {"none": 0, "zero2": 2, "zero3": 3}
"""The planner's number of a sharding."""


@dataclass(frozen=True)
class TrainingMemoryOptions:
    """The options of the benchmark, which trains a decoder with float32 weights for two steps.

    The second step includes the optimizer state. Only the first `combinations` of `COMBINATIONS` run.
    """

    length_tokens: int = 2048
    layers: int = 4
    dim: int = 256
    heads: int = 4
    kv_heads: int = 2
    hidden_dim: int = 768
    combinations: int = len(COMBINATIONS)
    results: str = RESULTS


def arguments_of(run: Combination, options: TrainingMemoryOptions) -> list[str]:
    """Return the run as arguments of `ringattn train`."""
    sizes = run.sizes(options)._asdict()
    tiles = [f"tiled_mlp_tokens={run.tile_tokens}", f"chunked_loss_tokens={run.tile_tokens}"] if run.tile_tokens else []
    same = "recompute", "optimizer", "ranks", "head_groups", "dtype", "sharding"
    return [
        *(f"{key}={getattr(run, key)}" for key in same), *tiles, f"batch={run.batch}",
        f"micro_batch={run.micro_batch}", f"tokens={sizes.pop('tokens')}",
        *(f"model.{key}={size}" for key, size in sizes.items()),
        "steps=2", "warmup_steps=0", "learning_rate=1e-4",
    ]  # fmt: skip


def planned(run: Combination, options: TrainingMemoryOptions) -> Account:
    """Return the memory that the capacity planner predicts for the rank that needs the most."""
    tokens, layers, dim, heads, kv_heads, hidden_dim = run.sizes(options)
    whole = TrainingSetup(
        ModelShape(layers, dim, heads, kv_heads, hidden_dim, BYTES, tied=True), tokens, run.ranks,
        run.micro_batch, micro_batches=run.micro_batches, zero_stage=ZERO_STAGE[run.sharding],
        precision=PRECISION[run.dtype], optimizer=run.optimizer, recompute=run.recompute,
        head_groups=run.head_groups, tiled_mlp_tokens=run.tile_tokens, chunked_loss_tokens=run.tile_tokens,
        gradients_kept=run.micro_batches > 1, data="whole",
    )  # fmt: skip
    return training_bytes(whole)


def weigh_rank(ring: Ring, arguments: Sequence[str]) -> dict[str, Any]:
    """Train on this rank with `arguments` (key=value of `ringattn train`), and measure memory by two meters.

    The process must be new. Return the peak growth of resident memory and of torch's storages, the bytes that remain
    between steps (`kept_bytes`), the storages over the second half of the operators, and the losses.
    """
    # Without this, glibc would keep freed tensors in its heap, and the resident size would include earlier use.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
    _stand_in_for_host_memory()
    _keep_half()
    with StorageMeter(_inside_of_kernels) as storages:
        result = train(ring, load_train(arguments))
    return {
        "resident_bytes": result["memory_growth_bytes"][ring.rank],
        "storage_bytes": storages.peak_bytes,
        "history_bytes": largest_of_parts(storages.history[len(storages.history) // 2 :], POINTS),
        "kept_bytes": result["replicated_bytes"],
        "losses": result["losses"],
    }


def _stand_in_for_host_memory() -> None:
    """Copy inputs of layers to numpy arrays, which are the host memory of this process: the meter does not count them.

    The arrays have the bytes of a tensor, because numpy has no bf16.
    """
    stand_in: Any = tiled
    stand_in.check_device = lambda device, option: None
    stand_in.to_host = lambda x: (x.detach().contiguous().view(torch.uint8).numpy().copy(), x.dtype)
    stand_in.from_host = lambda copy: tiled.DeviceCopy(torch.from_numpy(copy[0]).clone().view(copy[1]), None)


def _keep_half() -> None:
    """Give the attention of torch bf16 operands, as on a GPU. On a CPU they are cast to float32 otherwise."""
    stand_in: Any = aten
    stand_in.CPU = aten.CPU._replace(keeps_half=True)


def _inside_of_kernels(op: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that cuDNN would take inside of an operator: its backward of attention in 16 bits.

    It takes dQ in float32, and dK and dV of all query heads (cudnn-frontend, CompositeSDPABackwardNode).
    """
    if op is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 0
    _, q, k = args[:3]
    if q.element_size() > 2:
        return 0
    whole_heads = 2 * 2 * k.numel() // k.shape[1] * q.shape[1] if q.shape[1] > k.shape[1] else 0
    return 4 * q.numel() + whole_heads


def largest_of_parts(values: Sequence[int], parts: int) -> list[int]:
    """Return the largest value of each of `parts` parts of equal length, or all values if there are fewer."""
    parts = min(parts, len(values))
    starts = [part * len(values) // parts for part in range(parts + 1)]
    return [max(values[start:stop]) for start, stop in pairwise(starts)]


def weigh(options: TrainingMemoryOptions, say: Say) -> list[dict[str, Any]]:
    """Measure every combination; return one record for each."""
    records = []
    for run in COMBINATIONS[: options.combinations]:
        name = ", ".join(f"{key}={value}" for key, value in run._asdict().items())
        say(name)
        # Use gloo. Over shm, the resident memory of a process would include buffers of other ranks and copies of sent
        # tensors.
        by_rank = run_in_processes(run.ranks, PROGRAM, {"arguments": arguments_of(run, options)}, say, transport="gloo")
        histories, account = [rank.pop("history_bytes") for rank in by_rank], planned(run, options)
        plan = {"predicted_bytes": int(account.peak.total), "moments": account.totals}
        records.append({**run._asdict(), **plan, "by_rank": by_rank, "history_bytes": histories[0]})
        check_losses(records, name)
    return records


def check_losses(records: Sequence[dict[str, Any]], name: str) -> None:
    """Raise `GateError` unless the losses of the last record equal those of the first with the same sizes and dtype.

    With another optimizer, only the loss of the first step is compared.
    """
    last = records[-1]
    first = next(record for record in records if all(record[key] == last[key] for key in SAME))
    same = 2 if last["optimizer"] == first["optimizer"] else 1
    for rank in last["by_rank"]:
        for expected, loss in zip(first["by_rank"][0]["losses"][:same], rank["losses"], strict=False):
            if not abs(loss - expected) <= SAME_LOSS[last["dtype"]] * expected:
                raise GateError(f"{name}: loss {loss}, {expected} expected; nothing is measured")


def table(options: TrainingMemoryOptions, records: Sequence[dict[str, Any]]) -> Table:
    """Return the table of all combinations."""
    result = Table(
        f"Peak growth of the largest rank in training, MiB; {options.length_tokens} tokens in all, "
        f"{options.layers} layers of {options.dim}; long: {LONG.tokens} tokens ({BF16_TOKENS} in bf16), {LONG.layers} "
        f"layers of {LONG.dim}; short: {SHORT_BATCH} x {SHORT.tokens} tokens, {SHORT.layers} layers of {SHORT.dim}",
        ("dtype", "recompute", "head groups", "tiles", "optimizer", "sizes", "ranks", "sharding", "micro batches",
         "kept", "predicted", "storages", "predicted / storages", "resident"),
        notes=[
            "- kept: weights, gradients and optimizer state of a rank. storages: torch's, by a dispatch mode.",
            "- tiles: tokens of a tile of the feed-forward and of a chunk of the loss. offloaded: the inputs of layers "
            "are in numpy arrays, which storages do not count. bf16: attention has bf16 operands and "
            "takes the memory of cuDNN's backward, as on a GPU.",
        ],
    )  # fmt: skip
    for record in records:
        kept, storages, resident = (
            max(rank[key] for rank in record["by_rank"]) for key in ("kept_bytes", "storage_bytes", "resident_bytes")
        )
        predicted = record["predicted_bytes"]
        settings = (str(record[key]) for key in ("dtype", "recompute", "head_groups", "tile_tokens", "optimizer"))
        sizes = mib(kept), mib(predicted), mib(storages), f"{predicted / storages:.3f}", mib(resident)
        length = "long" if record["is_long"] else "short" if record["is_short"] else ""
        ranks = str(record["ranks"]), record["sharding"], str(record["micro_batches"])
        result.rows.append((*settings, length, *ranks, *sizes))
    return result


# --- the picture ------------------------------------------------------------------------------------------------------


def shown(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs of the long sequence on 2 ranks, or else the last run."""
    usual = {"is_long": True, "ranks": 2, "dtype": "fp32", "sharding": "none"}
    long = [record for record in records if all(record[key] == value for key, value in usual.items())]
    return long or list(records[-1:])


def history_figure(records: Sequence[dict[str, Any]]) -> Figure:
    """Return the picture: the storages of rank 0 over a step, and a line for each planned moment."""
    figure, axes = plt.subplots(len(records), 1, figsize=(9, 2.4 * len(records)), layout="constrained", squeeze=False)
    for ax, record in zip(axes[:, 0], records, strict=True):
        history = [nbytes / 2**20 for nbytes in record["history_bytes"]]
        ax.fill_between(range(len(history)), history, step="mid", color="tab:blue", alpha=0.6)
        heights = sorted((nbytes / 2**20, moment) for moment, nbytes in record["moments"].items())
        least = 0.0
        for height, moment in heights:
            ax.axhline(height, color="tab:red", linewidth=0.8, linestyle="--")
            # Names of moments with nearly the same memory are written above each other.
            least = max(height, least)
            ax.annotate(f"{moment} {height:,.1f}", (1.01, least), xycoords=("axes fraction", "data"), fontsize=8,
                        color="tab:red", va="center")  # fmt: skip
            least += heights[-1][0] / 12
        tiles = f", tiles of {record['tile_tokens']}" if record["tile_tokens"] else ""
        ax.set_title(f"recompute={record['recompute']}, head_groups={record['head_groups']}{tiles}", fontsize=10)
        ax.set_ylim(0, 1.1 * max(heights[-1][0], *history))
        ax.set_xlim(0, len(history) - 1)
        ax.set_xticks([])
        ax.set_ylabel("MiB")
    axes[-1, 0].set_xlabel("operators of the second half of two steps, in order")
    figure.suptitle("Storages of rank 0, and the planned moments (dashed)", fontsize=11)
    return figure


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run, print, save and return the record."""
    options = parse(TrainingMemoryOptions(), arguments)
    with progress("training_memory") as say:
        data = {"runs": weigh(options, say)}
    figure = history_figure(shown(data["runs"]))
    for record in data["runs"]:
        del record["history_bytes"]  # thousands of numbers, which the picture has
    finish("training_memory", options, [table(options, data["runs"])], data, options.results)
    figure.savefig(Path(options.results, "training_memory.png"), dpi=110)
    plt.close(figure)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])

"""The memory that a rank needs on one device, in a ring and in an all-gather, predicted and measured.

Run `python -m ringattn.bench.memory length_tokens=4096,8192,16384`. Each row of the first table is a run in new
processes. It shows the storages of the rank that needs the most and the growth of its resident size, measured from
before its inputs exist to the end, and the predicted sum of tensor sizes and of the plan's arena. The second table
shows the high-water mark of the pool at fixed tokens per rank. The picture compares forward and backward on one device
and in the ring.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from ringattn.bench.attention_memory import attention_scratch_bytes
from ringattn.bench.baselines import OurRing
from ringattn.bench.gate import Baseline, Inputs, open_gate, random_inputs
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Say, Table, finish, mib, progress
from ringattn.bench.storage_meter import StorageMeter
from ringattn.core.layout import make_layout
from ringattn.core.mask import make_mask
from ringattn.core.problem import Problem
from ringattn.observe.memory import reset_peak, status_bytes
from ringattn.planner.choose import plan_of
from ringattn.ring import Ring
from ringattn.schedule.routes import route_named
from ringattn.testing import run_ranks

matplotlib.use("Agg")

WITH_BACKWARD = " with backward"
ALONE = "one device"
"""The method that runs on one rank, which has the whole sequence."""
METHODS = ("one device with backward", "ring", "ring with backward", "all_gather with backward")
PICTURED = ("one device with backward", "ring with backward")
PROGRAM = "ringattn.bench.memory:on_rank"
GATE_TOKENS_PER_RANK = 64
ITEM_BYTES = 4


@dataclass(frozen=True)
class MemoryOptions:
    """The options of the benchmark. `pool_tokens_per_rank` and `pool_ranks` belong to the second table."""

    length_tokens: tuple[int, ...] = (2048, 4096, 8192, 16_384)
    methods: tuple[str, ...] = METHODS
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    ranks: int = 8
    pool_tokens_per_rank: int = 512
    pool_ranks: tuple[int, ...] = (2, 4, 8, 16)
    results: str = RESULTS


def baseline(ring: Ring, method: str) -> Baseline:
    """Return the baseline of a method on this rank."""
    return OurRing(ring, "zigzag", schedule_of(method), backward=method.endswith(WITH_BACKWARD))


def schedule_of(method: str) -> str:
    """Return the schedule of a method. For one device it is "ring", which sends nothing there."""
    name = method.removesuffix(WITH_BACKWARD)
    return "ring" if name == ALONE else name


def ranks_of(method: str, options: MemoryOptions) -> int:
    """Return how many ranks share the sequence."""
    return 1 if method.startswith(ALONE) else options.ranks


def on_rank(ring: Ring, method: str, length_tokens: int, shape: list[int]) -> dict[str, int]:
    """Run the gate, then measure the growth of this rank's memory in bytes, by three meters."""
    method_baseline = baseline(ring, method)
    heads, kv_heads, head_dim = shape
    open_gate(
        [method_baseline],
        random_inputs(GATE_TOKENS_PER_RANK * ring.world_size, heads, kv_heads, head_dim, torch.float32),
    )
    small = random_inputs(1, heads, kv_heads, head_dim, torch.float32)
    # All tokens are views of one token, so the problem takes no memory and only the method's own memory is measured.
    inputs = Inputs(*(x.expand(-1, length_tokens, -1, -1) for x in small))
    ring.barrier()
    gc.collect()
    reset_peak()
    resident, max_resident = status_bytes("VmRSS"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    method_baseline.load(inputs)
    kept = method_baseline.forward(), method_baseline.backward()
    ring.barrier()
    growth = {
        "peak_growth_bytes": status_bytes("VmHWM") - resident,
        "ru_maxrss_growth_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - max_resident,
    }
    # Measure storages in a second run with a newly allocated pool, because this meter itself takes resident memory.
    del kept, method_baseline
    ring.pool.release_arena()
    method_baseline = baseline(ring, method)
    with StorageMeter(attention_scratch_bytes) as storages:
        method_baseline.load(inputs)
        kept = method_baseline.forward(), method_baseline.backward()
    ring.barrier()
    del kept
    return {"storages_bytes": storages.peak_bytes, **growth}


def predicted(method: str, length: int, options: MemoryOptions) -> dict[str, int]:
    """Return the predicted bytes, at its peak, of the rank that needs the most.

    They are those of the kept tensors, of the arena with K/V in transit, and of the block being computed.
    """
    ranks, dim = ranks_of(method, options), options.head_dim
    local_tokens = -(-length // ranks)
    query, key = options.heads * dim * ITEM_BYTES, options.kv_heads * dim * ITEM_BYTES  # bytes of a row
    problem, backward = _problem(length, options, ranks), method.endswith(WITH_BACKWARD)
    arena = max(_largest_arena(problem, schedule_of(method), back) for back in {False, backward})
    kept = local_tokens * (2 * query + 2 * key)
    if backward:
        kept += local_tokens * (2 * query + 2 * key)  # dout and the gradients
    # In a ring, the largest block is two chunks of queries by one of keys, or the reverse. On one device it is the
    # whole sequence.
    keys = local_tokens if ranks == 1 else local_tokens // 2
    block = local_tokens * query + (keys * 2 * key if backward else 0)
    return {"kept": kept, "travelling": arena, "working": block}


def _largest_arena(problem: Problem, schedule: str, backward: bool) -> int:
    """Return the arena bytes of the rank whose plan needs most."""
    route = route_named(schedule)
    return max(plan_of(problem, route, rank, backward).arena_bytes for rank in range(problem.world_size))


def _problem(length: int, options: MemoryOptions, ranks: int) -> Problem:
    layout = make_layout("zigzag", length, ranks)
    sizes = 1, options.heads, options.kv_heads, options.head_dim, options.head_dim
    return Problem(layout, layout, make_mask(length, length, causal=True), *sizes, "float32")


def weigh(options: MemoryOptions, say: Say) -> list[dict[str, Any]]:
    """Measure each method at each length, and return one record for each run."""
    records = []
    for length in options.length_tokens:
        for method in options.methods:
            say(f"{length} tokens: {method}")
            spec = {"method": method, "length_tokens": length,
                    "shape": [options.heads, options.kv_heads, options.head_dim]}  # fmt: skip
            # Use gloo, whose arena is a tensor. The meter would miss memory that is shared between ranks.
            by_rank = run_in_processes(ranks_of(method, options), PROGRAM, spec, say, transport="gloo")
            greatest = {key: max(figures[key] for figures in by_rank) for key in by_rank[0]}
            records.append({"length_tokens": length, "method": method, "ranks": ranks_of(method, options),
                            "predicted": predicted(method, length, options), **greatest})  # fmt: skip
    return records


def pool_high_water(options: MemoryOptions, say: Say) -> list[dict[str, int]]:
    """Return the pool bytes of the rank that needs the most, planned and measured, for each number of ranks.

    The number of tokens per rank is fixed.
    """
    records = []
    for ranks in options.pool_ranks:
        say(f"pool at {ranks} ranks of {options.pool_tokens_per_rank} tokens")
        length = ranks * options.pool_tokens_per_rank
        problem = _problem(length, options, ranks)
        plans = {
            f"{schedule} {name}": _largest_arena(problem, schedule, name == "backward")
            for schedule in ("all_gather", "ring")
            for name in ("forward", "backward")
        }
        records.append({"ranks": ranks, "length_tokens": length,
                        **plans,
                        "measured": max(run_ranks(ranks, _pool_pass(length, options)))})  # fmt: skip
    return records


def _pool_pass(length: int, options: MemoryOptions) -> Callable[[Ring], int]:
    """Return the function that each rank runs on a thread.

    The function runs the gate, forward and backward, and returns the pool's high-water mark.
    """
    shape = options.heads, options.kv_heads, options.head_dim, torch.float32

    def run(ring: Ring) -> int:
        ring_baseline = OurRing(ring)
        open_gate([ring_baseline], random_inputs(4 * ring.world_size, *shape))
        ring.reset_counters()
        ring_baseline.load(random_inputs(length, *shape))
        ring_baseline.forward()
        ring_baseline.backward()
        return ring.memory_info()["pool_high_water_bytes"]

    return run


def tables(options: MemoryOptions, weights: list[dict[str, Any]], pools: list[dict[str, int]]) -> list[Table]:
    """Return both tables."""
    weights_table = Table(
        f"Peak memory of the rank that needs most, MiB; heads {options.heads}:{options.kv_heads} of "
        f"{options.head_dim}, float32, causal",
        (
            "tokens",
            "method",
            "ranks",
            "kept",
            "travelling",
            "working",
            "predicted",
            "storages",
            "resident",
            "by ru_maxrss",
            "KiB a token",
        ),
        notes=[
            "- kept: inputs, results; travelling: the plan's arena; working: a block.",
            "- storages: torch's and its kernels' scratch, by a dispatch mode. resident: growth of the process in a",
            "  run before; it is less where pages that the gate left are used again.",
        ],
    )
    for record in weights:
        parts = record["predicted"].values()
        measured = (record[f"{meter}_bytes"] for meter in ("storages", "peak_growth", "ru_maxrss_growth"))
        cells = map(mib, (*parts, sum(parts), *measured))
        per_token = f"{record['storages_bytes'] / record['length_tokens'] / 1024:.1f}"
        weights_table.rows.append(
            (str(record["length_tokens"]), record["method"], str(record["ranks"]), *cells, per_token)
        )
    pool_table = Table(
        f"High water of the ring's pool at {options.pool_tokens_per_rank} tokens per rank, MiB",
        (
            "ranks",
            "tokens",
            "all_gather forward",
            "all_gather backward",
            "ring forward",
            "ring backward",
            "ring, measured",
        ),
        notes=[
            "- measured: the pool's own high water after a forward and a backward on threads; the others are plans."
        ],
    )
    for pool in pools:
        ranks, length, *sizes = pool.values()
        pool_table.rows.append((str(ranks), str(length), *(f"{nbytes / 2**20:.3f}" for nbytes in sizes)))
    return [weights_table, pool_table]


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run, print, save and return the record."""
    options = parse(MemoryOptions(), arguments)
    with progress("memory") as say:
        data = {"weights": weigh(options, say), "pools": pool_high_water(options, say)}
    finish("memory", options, tables(options, data["weights"], data["pools"]), data, options.results)
    if set(PICTURED) <= set(options.methods):
        figure = memory_figure(data["weights"], options)
        figure.savefig(Path(options.results, "memory.png"), dpi=120)
        plt.close(figure)
    return data


# --- the picture ------------------------------------------------------------------------------------------------------


INK, GRID = "#22303c", "#dfe4e8"
COLORS = {ALONE: "#D55E00", "ring": "#0072B2", "bound": "#5b6b79"}
POINTS = 60


def memory_figure(records: Sequence[dict[str, Any]], options: MemoryOptions) -> Figure:
    """Return the picture: forward and backward on one device and in the ring, and the least that a rank can hold.

    Lines are predictions, and points are the storages measured in `records`. The least memory of a rank is its share of
    the tensors that attention reads and returns.
    """
    alone, ring = PICTURED
    lengths = sorted({record["length_tokens"] for record in records})
    curve_lengths = np.union1d(np.geomspace(lengths[0], lengths[-1], POINTS).astype(int) // 8 * 8, lengths)
    measured = {(record["method"], record["length_tokens"]): record["storages_bytes"] / 2**20 for record in records}
    figure, ax = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for method, name in ((alone, ALONE), (ring, "ring")):
        mebibytes = [sum(predicted(method, int(length), options).values()) / 2**20 for length in curve_lengths]
        ax.plot(curve_lengths, mebibytes, color=COLORS[name], linewidth=2)
        ax.scatter(lengths, [measured[method, length] for length in lengths], color=COLORS[name], s=40, zorder=3)
    least = [predicted(ring, int(length), options)["kept"] / 2**20 for length in curve_lengths]
    ax.plot(curve_lengths, least, color=COLORS["bound"], linewidth=2, linestyle="--")
    last = lengths[-1]
    ratio = measured[alone, last] / measured[ring, last]
    labels = (
        (f"one device\n{measured[alone, last]:,.0f} MiB", measured[alone, last], ALONE),
        (f"each of {options.ranks} ranks, ring\n{measured[ring, last]:,.0f} MiB: {ratio:.1f} times less",
         measured[ring, last], "ring"),
        (f"least: a rank's share of inputs,\noutput and gradients\n{least[-1]:,.0f} MiB: "
         f"{measured[alone, last] / least[-1]:.1f} times less", least[-1], "bound"),
    )  # fmt: skip
    for text, y, name in labels:
        ax.annotate(text, (last, y), xytext=(12, 0), textcoords="offset points", va="center", fontsize=9,
                    color=COLORS[name])  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel("tokens of the whole sequence", color=INK)
    ax.set_ylabel("MiB; lines predicted, points measured", color=INK)
    heads = f"{options.heads} query and {options.kv_heads} K/V heads of {options.head_dim}"
    title = f"Peak memory of a rank, attention forward and backward\n{heads}, float32, causal"
    ax.set_title(title, loc="left", fontsize=11, color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, which="major", color=GRID, linewidth=0.7)
    return figure


if __name__ == "__main__":
    main(sys.argv[1:])

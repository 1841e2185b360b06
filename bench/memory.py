"""How much memory a rank needs, in a ring and in an all-gather; predicted and measured.

`python -m ringattn.bench.memory length_tokens=4096,8192,16384`. Every line of the first table is a run in fresh
processes: the greater rank's storages, and the growth of its resident size from before its inputs exist to the end,
beside the sum of the tensors' sizes and of the plan's arena. The second table is the pool's high water at fixed tokens
per rank.
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
METHODS = ("ring", "ring with backward", "all_gather", "all_gather with backward")
PROGRAM = "ringattn.bench.memory:on_rank"
GATE_TOKENS_PER_RANK = 64
ITEM_BYTES = 4


@dataclass(frozen=True)
class MemoryOptions:
    """Causal float32 attention; `pool_tokens_per_rank` and `pool_ranks` are of the second table."""

    length_tokens: tuple[int, ...] = (4096, 8192, 16_384)
    methods: tuple[str, ...] = METHODS
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ranks: int = 2
    pool_tokens_per_rank: int = 512
    pool_ranks: tuple[int, ...] = (2, 4, 8, 16)
    results: str = RESULTS


def baseline(ring: Ring, method: str) -> Baseline:
    """The method called `method`, on this rank."""
    return OurRing(ring, "zigzag", method.removesuffix(WITH_BACKWARD), backward=method.endswith(WITH_BACKWARD))


def on_rank(ring: Ring, method: str, length_tokens: int, shape: list[int]) -> dict[str, int]:
    """One rank's growth in bytes, by three meters, of one method at one length; the gate first."""
    one = baseline(ring, method)
    heads, kv_heads, head_dim = shape
    open_gate([one], random_inputs(GATE_TOKENS_PER_RANK * ring.world_size, heads, kv_heads, head_dim, torch.float32))
    small = random_inputs(1, heads, kv_heads, head_dim, torch.float32)
    # One token seen many times: the whole problem takes no memory, so only what the method keeps is weighed.
    inputs = Inputs(*(x.expand(-1, length_tokens, -1, -1) for x in small))
    ring.barrier()
    gc.collect()
    reset_peak()
    resident, most = status_bytes("VmRSS"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    one.load(inputs)
    kept = one.forward(), one.backward()
    ring.barrier()
    found = {
        "peak_growth_bytes": status_bytes("VmHWM") - resident,
        "ru_maxrss_growth_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - most,
    }
    # Once more under the meter of storages, which itself takes resident memory; with a pool that is made anew.
    del kept, one
    ring.pool.release_arena()
    one = baseline(ring, method)
    with StorageMeter(attention_scratch_bytes) as storages:
        one.load(inputs)
        kept = one.forward(), one.backward()
    ring.barrier()
    del kept
    return {"storages_bytes": storages.peak_bytes, **found}


def predicted(method: str, length: int, options: MemoryOptions) -> dict[str, int]:
    """Bytes of the greater rank at its peak, by what they hold: kept tensors, travelling K/V, the working block."""
    ranks, dim = options.ranks, options.head_dim
    own = -(-length // ranks)
    query, key = options.heads * dim * ITEM_BYTES, options.kv_heads * dim * ITEM_BYTES  # bytes of a row
    problem, backward = _problem(length, options, ranks), method.endswith(WITH_BACKWARD)
    arena = max(_greatest_arena(problem, method.removesuffix(WITH_BACKWARD), back) for back in {False, backward})
    kept = own * (2 * query + 2 * key)
    if backward:
        kept += own * (2 * query + 2 * key)  # dout and the gradients
    # The largest rectangle: two chunks of queries by one of keys, or the reverse.
    block = own * query + (own // 2 * 2 * key if backward else 0)
    return {"kept": kept, "travelling": arena, "working": block}


def _greatest_arena(problem: Problem, schedule: str, backward: bool) -> int:
    """Bytes of the rank whose plan needs most."""
    route = route_named(schedule)
    return max(plan_of(problem, route, rank, backward).arena_bytes for rank in range(problem.world_size))


def _problem(length: int, options: MemoryOptions, ranks: int) -> Problem:
    layout = make_layout("zigzag", length, ranks)
    sizes = 1, options.heads, options.kv_heads, options.head_dim, options.head_dim
    return Problem(layout, layout, make_mask(length, length, causal=True), *sizes, "float32")


def weigh(options: MemoryOptions, say: Say) -> list[dict[str, Any]]:
    """One record for each length and method."""
    records = []
    for length in options.length_tokens:
        for method in options.methods:
            say(f"{length} tokens: {method}")
            spec = {"method": method, "length_tokens": length,
                    "shape": [options.heads, options.kv_heads, options.head_dim]}  # fmt: skip
            # Over gloo the arena is a tensor; memory that ranks share is no storage, and its meter would not see it.
            by_rank = run_in_processes(options.ranks, PROGRAM, spec, say, transport="gloo")
            greatest = {key: max(found[key] for found in by_rank) for key in by_rank[0]}
            records.append(
                {"length_tokens": length, "method": method, "predicted": predicted(method, length, options), **greatest}
            )
    return records


def pool_high_water(options: MemoryOptions, say: Say) -> list[dict[str, int]]:
    """The pool of the greatest rank at fixed tokens per rank, for each number of ranks: planned and run; bytes."""
    records = []
    for ranks in options.pool_ranks:
        say(f"pool at {ranks} ranks of {options.pool_tokens_per_rank} tokens")
        length = ranks * options.pool_tokens_per_rank
        problem = _problem(length, options, ranks)
        plans = {
            f"{schedule} {name}": _greatest_arena(problem, schedule, name == "backward")
            for schedule in ("all_gather", "ring")
            for name in ("forward", "backward")
        }
        records.append({"ranks": ranks, "length_tokens": length,
                        **plans,
                        "measured": max(run_ranks(ranks, _pool_pass(length, options)))})  # fmt: skip
    return records


def _pool_pass(length: int, options: MemoryOptions) -> Callable[[Ring], int]:
    """What each thread does: the gate, then forward and backward of `length` tokens; its pool's high water in bytes."""
    shape = options.heads, options.kv_heads, options.head_dim, torch.float32

    def run(ring: Ring) -> int:
        one = OurRing(ring)
        open_gate([one], random_inputs(4 * ring.world_size, *shape))
        ring.reset_counters()
        one.load(random_inputs(length, *shape))
        one.forward()
        one.backward()
        return ring.memory_info()["pool_high_water_bytes"]

    return run


def tables(options: MemoryOptions, weights: list[dict[str, Any]], pools: list[dict[str, int]]) -> list[Table]:
    """Both tables."""
    one = Table(
        f"Peak memory of the greater of {options.ranks} ranks, MiB; heads {options.heads}:{options.kv_heads} of "
        f"{options.head_dim}, float32, causal",
        (
            "tokens",
            "method",
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
        one.rows.append((str(record["length_tokens"]), record["method"], *cells, per_token))
    two = Table(
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
        two.rows.append((str(ranks), str(length), *(f"{nbytes / 2**20:.3f}" for nbytes in sizes)))
    return [one, two]


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run, print, keep; returns what is kept."""
    options = parse(MemoryOptions(), words)
    with progress("memory") as say:
        data = {"weights": weigh(options, say), "pools": pool_high_water(options, say)}
    finish("memory", options, tables(options, data["weights"], data["pools"]), data, options.results)
    draw_curve(
        options.methods, data["weights"], lambda method, length: sum(predicted(method, length, options).values()),
        f"Peak memory of the greater of {options.ranks} ranks, heads {options.heads}:{options.kv_heads} of "
        f"{options.head_dim}, float32, causal", Path(options.results, "memory.png"),
    )  # fmt: skip
    return data


# --- the picture ------------------------------------------------------------------------------------------------------


INK = "#22303c"
POINTS = 60
MARKERS = "osD^vPX*"
NEAR, DASH = 0.15, 4.0
"""Lines nearer than this share lie on each other; units of line width that a dash has."""


def draw_curve(
    methods: Sequence[str],
    records: Sequence[dict[str, Any]],
    predicted: Callable[[str, int], int],
    title: str,
    path: Path,
) -> None:
    """Write a PNG. `records`: length_tokens, method, storages_bytes; `predicted`: bytes of a method at a length."""
    lengths = sorted({record["length_tokens"] for record in records})
    at = np.unique(np.geomspace(lengths[0], lengths[-1], POINTS).astype(int) // 8 * 8)
    sizes = {method: np.array([predicted(method, int(length)) / 2**20 for length in at]) for method in methods}
    figure, ax = plt.subplots(figsize=(9, 5.5))
    for number, method in enumerate(methods):
        color, marker = f"C{number}", MARKERS[number % len(MARKERS)]
        # Methods that need the same share a line: each has its own dashes of it, and a ring around its points.
        same = [other for other in methods if np.allclose(sizes[other], sizes[method], rtol=NEAR)]
        place, dashes = same.index(method), (DASH, DASH * (len(same) - 1))
        style = (place * DASH, dashes) if len(same) > 1 else "-"
        ax.plot(at, sizes[method], color=color, linewidth=2, linestyle=style)
        found = [one for one in records if one["method"] == method]
        tokens, growth = ([one[key] for one in found] for key in ("length_tokens", "storages_bytes"))
        mebibytes = [nbytes / 2**20 for nbytes in growth]
        outer = 40 * (1 + 1.6 * (len(same) - 1 - place))
        inner = "none" if place < len(same) - 1 else color
        ax.scatter(tokens, mebibytes, facecolors=inner, edgecolors=color, marker=marker, label=method, zorder=3,
                   s=outer, linewidths=1.5)  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel("tokens of the whole sequence", color=INK)
    ax.set_ylabel("MiB: lines predicted, points measured", color=INK)
    ax.set_title(title, loc="left", fontsize=10, color=INK)
    ax.grid(True, which="major", color="#dfe4e8", linewidth=0.7)
    ax.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Attention kernels on one GPU: TFLOP/s of ours beside cuDNN, FlashAttention 2 and 3, and what a ring step costs.

`python -m ringattn.bench.kernels [key=value ...]`. Three tables: forward and backward by sequence length; eight ring
steps against one launch of the same work, carried in the kernel and merged outside; and the host's cost of a launch.
Promises: an engine is timed only after its out, dQ, dK and dV have passed a dense float64 truth at 1.25 times the error
of torch's own kernel; device time by events, the median of the repetitions; FLOPs are those of the visible pairs, 4 a
pair and element forward and 10 backward. Engines that are missing or refuse are listed with their reason.
Does not know: several GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringattn.bench.contestants import Contestant, Inputs, contestants, made_inputs, passes
from ringattn.bench.device_clock import device_facts, device_us, host_us
from ringattn.bench.options import parse
from ringattn.bench.report import Table, finish, progress
from ringattn.engine import measured
from ringattn.engine.base import KV, Softmax
from ringattn.engine.measured import TABLE, Measurement, measurements
from ringattn.engine.triton import TritonEngine
from ringattn.geometry import CAUSAL, FULL, Band, Run, Strip, Tile
from ringattn.kernels.merge import merge_call

BANDS: dict[str, Band] = {"full": FULL, "causal": CAUSAL}


@dataclass(frozen=True)
class Options:
    """`tokens`: sequence lengths; `total`: batch times tokens; `steps`, `step_tokens`: of the ring; `ms`: per timing.

    `measured`: put the engines' times into the table that engine="auto" reads.
    """

    tokens: tuple[int, ...] = (4096, 8192, 16384, 32768)
    total: int = 32768
    heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    masks: tuple[str, ...] = ("full", "causal")
    only: tuple[str, ...] = ("",)
    steps: int = 8
    step_tokens: int = 8192
    ms: int = 60
    measured: bool = False
    results: str = "bench/results/gpu"


def attention_flops(inputs: Inputs, tokens: int, mask: str) -> float:
    """4 for each visible pair and element of a head, forward; backward takes 2.5 times as many."""
    pairs = tokens * tokens if mask == "full" else tokens * (tokens + 1) // 2
    return 4.0 * inputs.q.shape[0] * inputs.q.shape[2] * inputs.q.shape[3] * pairs


def speeds(options: Options, entrants: list[Contestant], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Microseconds and TFLOP/s by mask, tokens and contestant."""
    found = []
    for mask in options.masks:
        for tokens in options.tokens:
            inputs = made_inputs(
                max(1, options.total // tokens), tokens, options.heads, options.head_dim, options.dtype
            )
            flops = attention_flops(inputs, tokens, mask)
            for one in entrants:
                say(f"{mask}, {tokens} tokens: {one.name}")
                row: dict[str, Any] = {"mask": mask, "tokens": tokens, "engine": one.name}
                try:
                    forward, backward = one.passes(inputs, mask == "causal")
                    for name, work, factor in (("forward", forward, 1.0), ("backward", backward, 2.5)):
                        row[f"{name}_us"] = device_us(work, options.ms)
                        row[f"{name}_tflops"] = factor * flops / row[f"{name}_us"] / 1e6
                except Exception as error:  # a contestant that cannot do one size is a result, not an end
                    row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                found.append(row)
            torch.cuda.empty_cache() if torch.cuda.is_available() else None
    return found


def put_measured(options: Options, rows: list[dict[str, Any]]) -> None:
    """Replace this device's rows of the table that engine="auto" reads, for this dtype and head dimension."""
    here = torch.cuda.get_device_name(), options.dtype, options.head_dim
    kept = [row._asdict() for row in measurements() if (row.device, row.dtype, row.head_dim) != here]
    commit = os.environ.get("GPU_CHECK_COMMIT", "unknown")
    for row in rows:
        if row["mask"] == "causal" and row["engine"].startswith("engine ") and "failed" not in row:
            name = row["engine"].removeprefix("engine ")
            found = Measurement(*here, row["tokens"], name, row["forward_us"], row["backward_us"], commit)
            kept.append(found._asdict())
    lines = ",\n".join(json.dumps(row) for row in kept)
    Path(measured.__file__).with_name(TABLE).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def ring_steps(options: Options, engine: TritonEngine) -> dict[str, float]:
    """Microseconds of one launch over all keys, of carried steps, and of steps that are merged outside."""
    rows, steps = options.step_tokens, options.steps
    inputs = made_inputs(1, rows, options.heads, options.head_dim, options.dtype, k_tokens=rows * steps)
    q, k, v = (x.transpose(0, 1) for x in inputs[:3])
    heads = Run(0, options.heads)
    tiles = [
        Tile(Strip(Run(0, rows), Run(0, rows)), Strip(Run(0, rows), Run(0, rows)), FULL, heads) for _ in range(steps)
    ]
    every = Strip(Run(0, rows * steps), Run(0, rows * steps))
    softmax = Softmax(options.head_dim**-0.5)
    blocks = [KV(k[i * rows : (i + 1) * rows], v[i * rows : (i + 1) * rows]) for i in range(steps)]
    whole = engine.prepare([(tiles[0]._replace(k=every),)], softmax, rows, options.heads)
    carried = engine.prepare([(tile,) for tile in tiles], softmax, rows, options.heads)
    alone = [engine.prepare([(tile,)], softmax, rows, options.heads) for tile in tiles]

    def one_launch() -> Tensor:
        carry = engine.begin(whole, q, options.head_dim, None)
        engine.attend(q, KV(k, v), carry, whole[0])
        return carry.out.settled(q.dtype)

    def steps_carried() -> Tensor:
        carry = engine.begin(carried, q, options.head_dim, None)
        for kv, work in zip(blocks, carried, strict=True):
            engine.attend(q, kv, carry, work)
        return carry.out.settled(q.dtype)

    def steps_merged() -> Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full((q.shape[1], q.shape[2], rows), float("-inf"), device=q.device)
        for kv, works in zip(blocks, alone, strict=True):
            carry = engine.begin(works, q, options.head_dim, None)
            engine.attend(q, kv, carry, works[0])
            merge_call(out, lse, carry.out.settled(q.dtype).float(), carry.lse).run()
        return out.to(q.dtype)

    truth = one_launch().double()
    for work in (steps_carried, steps_merged):
        error = float((work().double() - truth).norm() / truth.norm())
        if not error < 0.01:
            raise ArithmeticError(f"{work.__name__} is off by {error:.2e}: not timed")
    timed = {work.__name__: device_us(work, options.ms) for work in (one_launch, steps_carried, steps_merged)}
    return timed | {
        "efficiency_carried": timed["one_launch"] / timed["steps_carried"],
        "efficiency_merged": timed["one_launch"] / timed["steps_merged"],
    }


def launch_costs(engine: TritonEngine) -> dict[str, float]:
    """Microseconds of host time for one engine call, and of a captured graph's replay for each call in it."""
    inputs = made_inputs(1, 64, 2, 64, "bfloat16")
    q, k, v = (x.transpose(0, 1) for x in inputs[:3])
    tile = Tile(Strip(Run(0, 64), Run(0, 64)), Strip(Run(0, 64), Run(0, 64)), CAUSAL, Run(0, 2))
    works = engine.prepare([(tile,)], Softmax(0.1), 64, 2)
    carry = engine.begin(works, q, 64, None)
    call = partial(engine.attend, q, KV(k, v), carry, works[0])
    call()
    found = {"engine call by kept handle": host_us(call)}
    if torch.cuda.is_available():
        graph, count = torch.cuda.CUDAGraph(), 100
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        found["call in a graph, host"] = host_us(graph.replay) / count
        found["call in a graph, device"] = device_us(graph.replay, 50) / count
    return found


def tables(options: Options, rows: list[dict[str, Any]], ring: dict[str, dict[str, float]], costs: dict[str, float],
           refused: dict[str, str]) -> list[Table]:  # fmt: skip
    """What a person reads."""
    speed = Table("TFLOP/s, and the share of cuDNN's", ["mask", "tokens", "engine", "forward", "", "backward", ""])
    base = {(row["mask"], row["tokens"]): row for row in rows if row["engine"] == "cudnn"}
    for row in rows:
        cudnn = base.get((row["mask"], row["tokens"]), {})
        cells = []
        for name in ("forward_tflops", "backward_tflops"):
            share = row[name] / cudnn[name] if name in row and name in cudnn else None
            cells += [f"{row[name]:.0f}" if name in row else "-", f"{share:.2f}" if share else ""]
        speed.rows.append([row["mask"], str(row["tokens"]), row["engine"], *cells])
    speed.notes += [f"not timed: {name}: {why}" for name, why in refused.items()]
    steps = Table(
        f"{options.steps} ring steps of {options.step_tokens} tokens, full mask",
        ["form", "one launch us", "carried us", "merged outside us", "efficiency carried", "merged outside"],
        [[form, *(f"{found[name]:.0f}" for name in ("one_launch", "steps_carried", "steps_merged")),
          *(f"{found[name]:.3f}" for name in ("efficiency_carried", "efficiency_merged"))]
         for form, found in ring.items()],
    )  # fmt: skip
    launches = Table("launch cost", ["what", "us"], [[name, f"{cost:.2f}"] for name, cost in costs.items()])
    return [speed, steps, launches]


def main(words: list[str]) -> None:
    """Gate, time, print, keep."""
    options = parse(Options(), words)
    with progress("kernels") as say:
        entrants, refused = contestants(options.head_dim, options.dtype, tuple(name for name in options.only if name))
        able = []
        for one in entrants:
            say(f"gate: {one.name}")
            why = passes(one, options.head_dim, options.dtype)
            if why is None:
                able.append(one)
            else:
                refused[one.name] = why
        rows = speeds(options, able, say)
        ring = {}
        for one in able:
            if one.engine is not None and not one.name.startswith("engine "):
                say(f"ring steps: {one.name}")
                ring[one.name] = ring_steps(options, one.engine)
        costs = launch_costs(TritonEngine())
    if options.measured:
        put_measured(options, rows)
    data = {"measured on": device_facts(), "speed": rows, "ring steps": ring, "launch": costs, "refused": refused}
    finish("kernels", options, tables(options, rows, ring, costs, refused), data, options.results)


if __name__ == "__main__":
    main(sys.argv[1:])

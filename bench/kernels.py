"""Attention kernels on one GPU: TFLOP/s of ours, cuDNN, FlashAttention 2 and 3, and the cost of a ring step.

`python -m ringattn.bench.kernels [key=value ...]`. Three tables: forward and backward by sequence length; eight ring
steps compared with one launch of the same work, accumulated in the kernel and merged outside; and the host's cost of a
launch.
Guarantees: an implementation is timed only after its out, dQ, dK and dV have passed a dense float64 reference at 1.25
times the error of torch's own kernel. Device time comes from events; the figure is the median of the repetitions. Each
implementation runs in a separate process. Every job has a time limit, and its result is saved immediately: an
implementation that fails, hangs or breaks its CUDA context loses only its own figures. Whatever is missing is listed
with its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringattn.bench.crash_proof import Budget, JobFailed, Worker
from ringattn.bench.device_clock import device_facts, device_us, host_us
from ringattn.bench.kernel_baselines import (
    Inputs,
    KernelBaseline,
    check_baseline,
    implementation,
    kernel_baselines,
    make_inputs,
)
from ringattn.bench.options import parse
from ringattn.bench.report import Table, finish, keep, progress
from ringattn.core.geometry import CAUSAL, FULL, StridedRange, Tile, TokenRange
from ringattn.engine.base import KV, Softmax
from ringattn.engine.triton import TritonEngine
from ringattn.kernels.rows import merge_call

MOST_FAILURES = 2
"""After this many failed sizes the other sizes are skipped, because each may cost a whole time limit."""


class Results:
    """The figures measured so far; `keep` writes them."""

    def __init__(self, options: KernelJobsOptions) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []
        self.ring: dict[str, dict[str, float]] = {}
        self.costs: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.facts = device_facts()

    def keep(self, how: Callable[..., None] = keep, complete: bool = False) -> None:
        """Write the results with `how`: `report.keep` writes only files, and `report.finish` also prints them."""
        data = {
            "measured on": self.facts, "complete": complete, "speed": self.rows, "ring steps": self.ring,
            "launch": self.costs, "refused": self.refused,
        }  # fmt: skip
        shown = tables(self.options, self.rows, self.ring, self.costs, self.refused)
        how("kernels", self.options, shown, data, self.options.results, self.options.file)


def measure(baseline: KernelBaseline, results: Results, budget: Budget, say: Callable[[str], None]) -> None:
    """Check and time an implementation in a separate process. For a missing result, record the reason."""
    options, failures = results.options, 0

    def run_job(job: Callable[..., Any], *arguments: Any) -> Any:
        return worker.ask(job, *arguments, limit_s=budget.limit(options.limit_s))

    with Worker() as worker:
        say(f"gate: {baseline.name}")
        try:
            reason = run_job(gate, options, baseline.name)
        except JobFailed as error:
            reason = str(error)
        if reason:
            results.refused[baseline.name] = reason
            results.keep()
            return
        for mask in options.masks:
            for tokens in options.tokens:
                say(f"{mask}, {tokens} tokens: {baseline.name}")
                row = {"mask": mask, "tokens": tokens, "engine": baseline.name}
                try:
                    if failures == MOST_FAILURES:
                        raise JobFailed(f"not tried: {failures} sizes have failed")
                    for part in ("forward", "backward"):
                        row |= run_job(speed, options, baseline.name, mask, tokens, part)
                except JobFailed as error:  # a size that fails is a result and does not end the benchmark
                    row["failed"] = str(error)
                    failures = min(failures + 1, MOST_FAILURES)
                results.rows.append(row)
                results.keep()
        if baseline.engine is not None and not baseline.name.startswith("engine "):
            say(f"ring steps: {baseline.name}")
            try:
                results.ring[baseline.name] = run_job(ring_steps, options, baseline.name)
            except JobFailed as error:
                results.refused[f"ring steps, {baseline.name}"] = str(error)
            results.keep()


def tables(
    options: KernelJobsOptions,
    rows: list[dict[str, Any]],
    ring: dict[str, dict[str, float]],
    costs: dict[str, float],
    refused: dict[str, str],
) -> list[Table]:
    """Return the tables of speed, ring steps and launch cost."""
    speed = Table("TFLOP/s, and the share of cuDNN's", ["mask", "tokens", "engine", "forward", "", "backward", ""])
    base = {(row["mask"], row["tokens"]): row for row in rows if row["engine"] == "cudnn"}
    speed.notes += [f"failed: {row['engine']}, {row['mask']}, {row['tokens']}: {row['failed']}"
                    for row in rows if "failed" in row]  # fmt: skip
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
        [[form, *(f"{times[name]:.0f}" for name in ("one_launch", "steps_carried", "steps_merged")),
          *(f"{times[name]:.3f}" for name in ("efficiency_carried", "efficiency_merged"))]
         for form, times in ring.items()],
    )  # fmt: skip
    launches = Table("launch cost", ["what", "us"], [[name, f"{cost:.2f}"] for name, cost in costs.items()])
    return [speed, steps, launches]


def main(arguments: list[str]) -> None:
    """Check and time all implementations, save the results and print the tables."""
    options = parse(KernelJobsOptions(), arguments)
    budget, results = Budget(options.budget_s), Results(options)
    with progress("kernels") as say:
        say(f"{options.budget_s:.0f} s at most, {options.limit_s:.0f} s for each figure")
        baselines, results.refused = kernel_baselines(
            options.head_dim, options.dtype, tuple(name for name in options.only if name)
        )
        for baseline in baselines:
            measure(baseline, results, budget, say)
        say("launch cost")
        with Worker() as worker:
            try:
                results.costs = worker.ask(launch_costs, limit_s=budget.limit(options.limit_s))
            except JobFailed as error:
                results.refused["launch cost"] = str(error)
    results.keep(finish, complete=True)


# --- what is timed ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelJobsOptions:
    """The options of the benchmark.

    `tokens` are the sequence lengths, and `total` is batch times tokens. The ring has `steps` steps of `step_tokens`
    tokens. Each timing is repeated for `ms` milliseconds. `only` names the implementations to run. `limit_s` limits one
    figure or gate, including compilation, and `budget_s` limits the whole run. `file` is the name of the result files.
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
    limit_s: float = 60.0
    budget_s: float = 420.0
    file: str = "kernels"
    results: str = "bench/results/gpu"


def attention_flops(inputs: Inputs, tokens: int, mask: str) -> float:
    """Return the FLOPs of forward: 4 per visible pair and element of a head. Backward takes 2.5 times that."""
    pairs = tokens * tokens if mask == "full" else tokens * (tokens + 1) // 2
    return 4.0 * inputs.q.shape[0] * inputs.q.shape[2] * inputs.q.shape[3] * pairs


def gate(options: KernelJobsOptions, name: str) -> str | None:
    """Return why an implementation must not be timed, or None."""
    return check_baseline(implementation(name, options.head_dim, options.dtype), options.head_dim, options.dtype)


def speed(options: KernelJobsOptions, name: str, mask: str, tokens: int, part: str) -> dict[str, float]:
    """Return microseconds and TFLOP/s of an implementation; `part`: "forward" or "backward"."""
    inputs = make_inputs(max(1, options.total // tokens), tokens, options.heads, options.head_dim, options.dtype)
    forward, backward = implementation(name, options.head_dim, options.dtype).passes(inputs, mask == "causal")
    us = device_us(forward if part == "forward" else backward, options.ms)
    flops = attention_flops(inputs, tokens, mask) * (1.0 if part == "forward" else 2.5)
    return {f"{part}_us": us, f"{part}_tflops": flops / us / 1e6}


def ring_steps(options: KernelJobsOptions, name: str) -> dict[str, float]:
    """Time one launch over all keys, steps with carried accumulators, and steps whose outputs are merged outside.

    Return the microseconds of each, and the efficiency of the steps compared with the single launch.
    """
    engine = implementation(name, options.head_dim, options.dtype).engine
    assert engine is not None
    rows, steps = options.step_tokens, options.steps
    inputs = make_inputs(1, rows, options.heads, options.head_dim, options.dtype, k_tokens=rows * steps)
    q, k, v = (x.transpose(0, 1) for x in inputs[:3])
    heads = StridedRange(0, options.heads)
    tiles = [
        Tile(
            TokenRange(StridedRange(0, rows), StridedRange(0, rows)),
            TokenRange(StridedRange(0, rows), StridedRange(0, rows)),
            FULL,
            heads,
        )
        for _ in range(steps)
    ]
    every = TokenRange(StridedRange(0, rows * steps), StridedRange(0, rows * steps))
    softmax = Softmax(options.head_dim**-0.5)
    blocks = [KV(k[i * rows : (i + 1) * rows], v[i * rows : (i + 1) * rows]) for i in range(steps)]
    whole = engine.prepare([(tiles[0]._replace(k=every),)], softmax, rows, options.heads)
    stepped = engine.prepare([(tile,) for tile in tiles], softmax, rows, options.heads)
    alone = [engine.prepare([(tile,)], softmax, rows, options.heads) for tile in tiles]

    def one_launch() -> Tensor:
        state = engine.begin(whole, q, options.head_dim, None)
        engine.attend(q, KV(k, v), state, whole[0])
        return state.out.finalized(q.dtype)

    def steps_carried() -> Tensor:
        state = engine.begin(stepped, q, options.head_dim, None)
        for kv, work in zip(blocks, stepped, strict=True):
            engine.attend(q, kv, state, work)
        return state.out.finalized(q.dtype)

    def steps_merged() -> Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full((q.shape[1], q.shape[2], rows), float("-inf"), device=q.device)
        for kv, works in zip(blocks, alone, strict=True):
            state = engine.begin(works, q, options.head_dim, None)
            engine.attend(q, kv, state, works[0])
            merge_call(out, lse, state.out.finalized(q.dtype).float(), state.lse).run()
        return out.to(q.dtype)

    reference = one_launch().double()
    for work in (steps_carried, steps_merged):
        error = float((work().double() - reference).norm() / reference.norm())
        if not error < 0.01:
            raise ArithmeticError(f"{work.__name__} is off by {error:.2e}: not timed")
    timed = {work.__name__: device_us(work, options.ms) for work in (one_launch, steps_carried, steps_merged)}
    return timed | {
        "efficiency_carried": timed["one_launch"] / timed["steps_carried"],
        "efficiency_merged": timed["one_launch"] / timed["steps_merged"],
    }


def launch_costs() -> dict[str, float]:
    """Return the host's microseconds for one engine call, and per call in the replay of a captured graph."""
    engine = TritonEngine()
    inputs = make_inputs(1, 64, 2, 64, "bfloat16")
    q, k, v = (x.transpose(0, 1) for x in inputs[:3])
    tile = Tile(
        TokenRange(StridedRange(0, 64), StridedRange(0, 64)),
        TokenRange(StridedRange(0, 64), StridedRange(0, 64)),
        CAUSAL,
        StridedRange(0, 2),
    )
    works = engine.prepare([(tile,)], Softmax(0.1), 64, 2)
    state = engine.begin(works, q, 64, None)
    call = partial(engine.attend, q, KV(k, v), state, works[0])
    call()
    costs = {"engine call by kept handle": host_us(call)}
    if torch.cuda.is_available():
        graph, count = torch.cuda.CUDAGraph(), 100
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        costs["call in a graph, host"] = host_us(graph.replay) / count
        costs["call in a graph, device"] = device_us(graph.replay, 50) / count
    return costs


if __name__ == "__main__":
    main(sys.argv[1:])

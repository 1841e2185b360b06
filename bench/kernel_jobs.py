"""What the kernel benchmark asks of one implementation, each a job for a worker process.

Guarantees: FLOPs are those of the visible pairs, 4 a pair and element forward and 10 backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ringattn.bench.device_clock import device_us, host_us
from ringattn.bench.kernel_baselines import Inputs, implementation, made_inputs, passes
from ringattn.core.geometry import CAUSAL, FULL, StridedRange, Tile, TokenRange
from ringattn.engine.base import KV, Softmax
from ringattn.engine.triton import TritonEngine
from ringattn.kernels.rows import merge_call


@dataclass(frozen=True)
class KernelJobsOptions:
    """`tokens`: sequence lengths; `total`: batch times tokens; `steps`, `step_tokens`: of the ring; `ms`: per timing.

    `only`: names of implementations. `limit_s`: for one figure or gate, compiling included; `budget_s`: for all.
    `file`: what the results are kept as.
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
    """4 for each visible pair and element of a head, forward; backward takes 2.5 times as many."""
    pairs = tokens * tokens if mask == "full" else tokens * (tokens + 1) // 2
    return 4.0 * inputs.q.shape[0] * inputs.q.shape[2] * inputs.q.shape[3] * pairs


def gate(options: KernelJobsOptions, name: str) -> str | None:
    """Why an implementation must not be timed."""
    return passes(implementation(name, options.head_dim, options.dtype), options.head_dim, options.dtype)


def speed(options: KernelJobsOptions, name: str, mask: str, tokens: int, part: str) -> dict[str, float]:
    """Microseconds and TFLOP/s of an implementation; `part`: "forward" or "backward"."""
    inputs = made_inputs(max(1, options.total // tokens), tokens, options.heads, options.head_dim, options.dtype)
    forward, backward = implementation(name, options.head_dim, options.dtype).passes(inputs, mask == "causal")
    us = device_us(forward if part == "forward" else backward, options.ms)
    flops = attention_flops(inputs, tokens, mask) * (1.0 if part == "forward" else 2.5)
    return {f"{part}_us": us, f"{part}_tflops": flops / us / 1e6}


def ring_steps(options: KernelJobsOptions, name: str) -> dict[str, float]:
    """Microseconds of one launch over all keys, of carried steps, and of steps that are merged outside."""
    engine = implementation(name, options.head_dim, options.dtype).engine
    assert engine is not None
    rows, steps = options.step_tokens, options.steps
    inputs = made_inputs(1, rows, options.heads, options.head_dim, options.dtype, k_tokens=rows * steps)
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
    """Microseconds of host time for one engine call, and of a captured graph's replay for each call in it."""
    engine = TritonEngine()
    inputs = made_inputs(1, 64, 2, 64, "bfloat16")
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
    found = {"engine call by kept handle": host_us(call)}
    if torch.cuda.is_available():
        graph, count = torch.cuda.CUDAGraph(), 100
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        found["call in a graph, host"] = host_us(graph.replay) / count
        found["call in a graph, device"] = device_us(graph.replay, 50) / count
    return found

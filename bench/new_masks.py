"""What a new mask or new documents in each step cost: the stall of its first call, with and without `plan_ahead`.

Run `python -m ringattn.bench.new_masks [key=value ...]`. Each step draws a new tree (or new documents), and runs the
same layers over it, forward and backward. The stall is the time until the first layer has run, from the first line of
the step, minus the median time of the other layers. It includes the placement of tokens and the wait for the thread.
`plan_ahead` is called after the first layer.
Steps with and without `plan_ahead` alternate in blocks on the same ranks. The gate: outputs and gradients of both are
equal bit by bit, on every rank and in every step.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from itertools import pairwise, product
from statistics import median
from typing import Any

import torch

from ringattn.bench.gate import GateError
from ringattn.bench.options import parse
from ringattn.bench.placement import TREES, draw_tree
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.core import bounded_cache
from ringattn.ring import Ring
from ringattn.sequence import Sequence as ShardedSequence

BLOCK, UNCOUNTED = 7, 2
"""The number of steps in a row with, or without, `plan_ahead`, and of the first ones that are not counted: no pass
has run before them that could be planned."""
TIMES = ("stall", "stall_cpu", "step")


@dataclass(frozen=True)
class NewMasksOptions:
    """The options of the benchmark.

    `cases`: a tree or documents, and their layout. `nodes`: of a tree, or documents. `layers`: calls of a step.
    `blocks`: blocks of steps, without and with `plan_ahead` each.
    """

    ranks: tuple[int, ...] = (2, 8)
    cases: tuple[str, ...] = ("tree zigzag", "tree mask", "documents per_document", "documents documents")
    schedule: str = "ring"
    nodes: int = 64
    tokens: int = 2048
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    layers: int = 4
    blocks: int = 4
    results: str = RESULTS


def main(arguments: Sequence[str] = ()) -> None:
    """Run, print and save the record."""
    options = parse(NewMasksOptions(), arguments)
    table = Table(
        f"A new mask in each step: {options.nodes} nodes or documents, {options.tokens} tokens, {options.layers} "
        f"layers, {options.heads}:{options.kv_heads} heads of {options.head_dim}, float32, {options.schedule}, "
        "transport shm. ms, medians of rank 0; the second of two figures is with plan_ahead. Processor time is that of "
        "the calling thread",
        ("ranks", "mask", "layout", "steps", "stall", "ahead", "processor", "ahead", "step", "ahead"),
    )
    data: dict[str, Any] = {}
    with progress("new_masks") as say:
        for ranks, case in product(options.ranks, options.cases):
            say(f"{ranks} ranks, {case}")
            kind, _, layout = case.partition(" ")
            spec = {**asdict(options), "kind": kind, "layout": layout}
            by_rank = run_in_processes(ranks, "ringattn.bench.new_masks:measure", {"spec": spec}, say, "shm")
            if any(alone["digests"] != ahead["digests"] for alone, ahead in by_rank):
                raise GateError(f"{ranks} ranks, {case}: plans made ahead change the results")
            alone, ahead = data[f"{ranks} {case}"] = by_rank[0]
            ms = {name: [f"{1e3 * median(steps[name]):.2f}" for steps in (alone, ahead)] for name in TIMES}
            table.rows.append((str(ranks), kind, layout, str(len(alone["stall"])), *ms["stall"],
                               *ms["stall_cpu"], *ms["step"]))  # fmt: skip
    finish("new_masks", options, [table], data, options.results)


def measure(ring: Ring, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the times of this rank's steps without and with `plan_ahead`, and digests of their results."""
    results: list[dict[str, list[Any]]] = [{name: [] for name in (*TIMES, "digests")} for _ in range(2)]
    values = torch.Generator().manual_seed(0)
    heads = spec["heads"], spec["kv_heads"], spec["kv_heads"]
    options: dict[str, Any] = {"causal": spec["kind"] == "documents", "schedule": spec["schedule"]}
    full = [torch.randn(1, spec["tokens"], n, spec["head_dim"], generator=values) for n in heads]
    for block in range(2 * spec["blocks"]):
        ahead, future = block % 2, None
        # The two blocks of a pair draw the same masks, and each plans all of them.
        forget(ring)
        for step in range(BLOCK):
            draw = partial(sequence, ring, spec, BLOCK * (block // 2) + step)
            ring.barrier()
            start = time.perf_counter(), time.thread_time()
            seq = draw() if future is None else future.result()
            laps, parts = [start], [seq.shard(x).requires_grad_() for x in full]
            for layer in range(spec["layers"]):
                if ahead and layer == 1:
                    future = ring.plan_ahead(partial(sequence, ring, spec, BLOCK * (block // 2) + step + 1))
                out = ring.attention(parts[0], parts[1], parts[2], seq, **options)
                grads = torch.autograd.grad(out.square().sum(), parts)
                laps.append((time.perf_counter(), time.thread_time()))
            tensors = [x.detach().contiguous().numpy().tobytes() for x in (out, *grads)]
            results[ahead]["digests"].append(sha256(b"".join(tensors)).hexdigest())
            wall, cpu = ([after[clock] - before[clock] for before, after in pairwise(laps)] for clock in range(2))
            if step >= UNCOUNTED:
                for name, seconds in zip(TIMES, (stall(wall), stall(cpu), sum(wall)), strict=True):
                    results[ahead][name].append(seconds)
        if future is not None:
            future.result()
    return results


def sequence(ring: Ring, spec: dict[str, Any], seed: int) -> ShardedSequence:
    """Draw the tree or the documents of a step, and return their sequence."""
    draw, tokens = random.Random(seed), spec["tokens"]
    if spec["kind"] == "tree":
        tree = draw_tree(draw, spec["nodes"], tokens, TREES[seed % len(TREES)])
        return ring.sequence(
            tokens, mask=tree, layout=spec["layout"], for_="full" if spec["layout"] == "mask" else "causal"
        )
    cuts = sorted(draw.sample(range(1, tokens), spec["nodes"] - 1))
    return ring.sequence(cu_seqlens=[0, *cuts, tokens], layout=spec["layout"])


def stall(laps: list[float]) -> float:
    """Return how much longer the first lap took than the median of the others."""
    return laps[0] - median(laps[1:])


def forget(ring: Ring) -> None:
    """Drop all plans."""
    bounded_cache._shared.clear()
    ring._executors.clear()


if __name__ == "__main__":
    main(sys.argv[1:])

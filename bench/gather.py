"""Gather and shard at memory speed: their time over shared memory next to the time of the memory that they must write.

Run `python -m ringattn.bench.gather [key=value ...]`. The figures are processor seconds of rank 0, because other
programs slow down memory and waits; the wall-clock minimum is next to them. A gather writes the whole tensor once to
fresh pages, and copies this rank's part once into shared memory for each of its peers.
The gate: gathered tensors and gradients are exact.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ringattn.bench.gate import GateError
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.ring import Ring

CUTS = 37
"""The number of packed documents."""


@dataclass(frozen=True)
class GatherOptions:
    """The options of the benchmark. `mib`: the size of the whole tensor. `row_bytes`: of a token."""

    ranks: tuple[int, ...] = (2, 4)
    layouts: tuple[str, ...] = ("contiguous", "zigzag", "striped", "documents")
    mib: int = 128
    row_bytes: int = 16384
    count: int = 7
    results: str = RESULTS


def main(arguments: Sequence[str] = ()) -> None:
    """Run, print and save the record."""
    options = parse(GatherOptions(), arguments)
    names = ("copy", "fresh copy", "first touch", "gather", "its backward", "shard", "its backward")
    table = Table(
        f"{options.mib} MiB in rows of {options.row_bytes} bytes, transport shm; processor ms of rank 0 (smallest wall "
        "time). Copies are of the whole tensor; a fresh copy and a first touch write to memory that is not mapped yet",
        ("ranks", "layout", *names),
    )
    data: dict[str, Any] = {}
    with progress("gather") as say:
        for ranks in options.ranks:
            by_rank = run_in_processes(ranks, "ringattn.bench.gather:measure", {"spec": asdict(options)}, say, "shm")
            data[str(ranks)] = by_rank[0]
            for layout, cells in by_rank[0].items():
                table.rows.append((str(ranks), layout, *(f"{cpu:.0f} ({wall:.0f})" for cpu, wall in cells)))
    finish("gather", options, [table], data, options.results)


def measure(ring: Ring, spec: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return for each layout (processor ms, smallest wall ms) of each column. Raises `GateError` for a wrong result."""
    tokens = spec["mib"] * 2**20 // spec["row_bytes"]
    full = torch.randn(1, tokens, spec["row_bytes"] // 4, generator=torch.Generator().manual_seed(0))
    used = torch.empty_like(full)

    def timed(work: Callable[[], Tensor]) -> tuple[float, float]:
        laps = []
        for _ in range(spec["count"] + 1):  # the first is not counted
            ring.barrier()
            wall, cpu = time.perf_counter(), time.thread_time()
            result = work()
            laps.append((1e3 * (time.thread_time() - cpu), 1e3 * (time.perf_counter() - wall)))
            del result
        return median(cpu for cpu, _ in laps[1:]), min(wall for _, wall in laps[1:])

    memory = [
        timed(lambda: used.copy_(full)),
        timed(lambda: torch.empty_like(full).copy_(full)),
        timed(lambda: torch.empty_like(full).fill_(1)),
    ]
    return {layout: [*memory, *map(timed, calls(ring, layout, full))] for layout in spec["layouts"]}


def calls(ring: Ring, layout: str, full: Tensor) -> list[Callable[[], Tensor]]:
    """Return gather, its backward, shard and its backward. Raises `GateError` if one of them is wrong."""
    tokens = full.shape[1]
    cuts = [tokens * n // CUTS for n in range(CUTS + 1)] if layout == "documents" else None
    seq = ring.sequence(tokens, cu_seqlens=cuts, layout=layout)
    x, part = full.clone().requires_grad_(), seq.shard(full).requires_grad_()
    sharded, gathered, grad = seq.shard(x), seq.gather(part), torch.ones_like(part)

    def of_gather() -> Tensor:
        return torch.autograd.grad(gathered, part, full, retain_graph=True)[0]

    def of_shard() -> Tensor:
        return torch.autograd.grad(sharded, x, grad, retain_graph=True)[0]

    if not torch.equal(gathered, full) or not torch.equal(seq.shard(of_shard()), grad):
        raise GateError(f"{layout}: a gather or the gradient of shard is wrong")
    if (of_gather() - ring.world_size * part).abs().max() > 1e-5:
        raise GateError(f"{layout}: the gradient of gather is wrong")
    return [lambda: seq.gather(part.detach()), of_gather, lambda: seq.shard(full), of_shard]


if __name__ == "__main__":
    main(sys.argv[1:])

"""Measures on the ranks of this machine what prediction needs: the attention kernel, copies, messages, empty passes.

All ranks do the same at once, as in a pass. Each round measures everything, so that a change of the machine's speed
meets all of it; a figure is the median of its rounds, as a pass that it predicts is timed: the faster rounds would
predict a machine that is always as fast as it is at times. On the CPU, kernel and copies are measured in seconds of the
rank's processor, which others cannot take.
Not covered: what is made of the figures (`ringattn.launch.measure.calibrate`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import ringattn
from ringattn.engine.base import KV, BackwardInputs, Engine, Softmax
from ringattn.launch.measure.calibrate import COPY_BYTES, GPU_SCALE, MESSAGE_BYTES, NEAR, ON_PROCESSOR, SHAPES, Shape
from ringattn.transport.base import Message


def worker(spec: dict[str, Any]) -> dict[str, Any]:
    """One process: what `measured` finds on a ring of its own."""
    torch.set_num_threads(1)
    with ringattn.Ring(timeout_s=spec["timeout_s"], transport=spec["transport"], cluster=None) as ring:
        return measured(ring, spec["dtype"], spec["rounds"])


def measured(
    ring: ringattn.Ring, dtype: str, rounds: int, links: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, Any]:
    """Seconds of each thing on this rank, by round.

    `links`: names of messages, with the ranks that they go to and come from. None: `NEAR` from neighbor to neighbor.
    """
    ranks = ring.world_size
    peers = links or {NEAR: ((ring.rank + 1) % ranks, (ring.rank - 1) % ranks)}
    works, found = _works(ring, dtype, peers), dict[str, list[float]]()
    for work in works.values():
        work()  # compiles, allocates, connects
    for _ in _rounds(rounds, ring.rank == 0):
        for name, work in works.items():
            ring.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            work()
            ring.synchronize()
            wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
            alone = ring.device.type == "cpu" and name.split()[0] in ON_PROCESSOR
            found.setdefault(name, []).append(cpu_s if alone else wall_s)
            found.setdefault(f"processor {name}", []).append(cpu_s)
    return {"seconds": found, "transport": ring.transport.name, "engine": _engine(ring, dtype).name,
            "jobs": _jobs(ring) * ring.world_size}  # fmt: skip


def _works(ring: ringattn.Ring, dtype: str, peers: Mapping[str, tuple[int, int]]) -> dict[str, Callable[[], Any]]:
    """What is measured, by its name."""
    found: dict[str, Callable[[], Any]] = {}
    engine, scale = _engine(ring, dtype), GPU_SCALE if ring.device.type == "cuda" else 1
    for number, shape in enumerate(SHAPES):
        larger = shape._replace(rows=shape.rows * scale, keys=shape.keys * scale)
        found[f"forward {number}"], found[f"backward {number}"] = _passes(engine, larger, ring.device, dtype)
    one = torch.zeros(COPY_BYTES // 4, device=ring.device)
    other = torch.zeros_like(one)
    found["copy"] = lambda: other.copy_(one)
    for (name, (to, source)), nbytes in product(peers.items(), MESSAGE_BYTES):
        found[f"{name} {nbytes}"] = _exchange(ring, nbytes, to, source)
    found["pass"] = _empty_pass(ring, dtype)
    if ring.device.type == "cpu":
        crowd = [_passes(engine, Shape(512, 512), ring.device, dtype)[0] for _ in range(_jobs(ring))]
        pool = ThreadPoolExecutor(len(crowd))
        found["alone"], found["crowd"] = crowd[0], lambda: list(pool.map(lambda work: work(), crowd))
    return found


def _engine(ring: ringattn.Ring, dtype: str) -> Engine:
    return ring.engine_for(ring.device, getattr(torch, dtype), 64, 64, None)


def _jobs(ring: ringattn.Ring) -> int:
    """Threads of this rank that together with the others' want twice the processors there are."""
    return -(-2 * len(os.sched_getaffinity(0)) // ring.world_size)


def _passes(
    engine: Engine, shape: Shape, device: torch.device, dtype: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """One call of the engine forward, and one backward."""
    generator = torch.Generator().manual_seed(0)

    def made(rows: int, heads: int) -> torch.Tensor:
        values = torch.randn(rows, 1, heads, shape.dim, generator=generator)
        return values.to(device, getattr(torch, dtype))

    rows, keys = shape.rows * shape.tiles, shape.keys * shape.tiles
    q, dout = made(rows, shape.heads), made(rows, shape.heads)
    kv = KV(made(keys, shape.kv_heads), made(keys, shape.kv_heads))
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (kv.k, kv.v))
    softmax = Softmax(shape.dim**-0.5, shape.heads // shape.kv_heads)
    # More steps than one, so that the engine carries accumulators, as it does in a ring.
    works = engine.prepare([tuple(shape.table())] * 2, softmax, rows, shape.heads, more=shape.received)
    carry, dq = engine.begin(works, q, shape.dim, None), engine.begin_grad(works, q, shape.dim)
    engine.attend(q, kv, carry, works[0])
    out, lse = carry.out.finalized(q.dtype), carry.lse
    delta = engine.delta(dout, out, None)
    seed = BackwardInputs(dout, out, lse, None, delta)
    if shape.received:  # as they reach the engine in a pass: delta stands for the output
        seed = BackwardInputs(dout, torch.zeros_like(dout), lse, -delta, delta)
    return (
        lambda: engine.attend(q, kv, carry, works[0]),
        lambda: engine.attend_grad(q, kv, seed, dq, KV(dk, dv), works[0]),
    )


def _exchange(ring: ringattn.Ring, nbytes: int, to: int, source: int) -> Callable[[], None]:
    """One message to a rank, and one from a rank."""
    sent, came = (ring.transport.allocate(nbytes) for _ in range(2))
    sends, recvs = [Message(to, sent, "calibration")], [Message(source, came, "calibration")]
    return lambda: ring.transport.exchange(sends, recvs).wait()


def _empty_pass(ring: ringattn.Ring, dtype: str) -> Callable[[], Any]:
    """Forward of one token a rank that meets itself alone: what a pass costs beside its steps."""
    seq = ring.sequence(ring.world_size, layout="contiguous")
    x = torch.zeros(1, 1, 1, 64, dtype=getattr(torch, dtype), device=ring.device)
    return lambda: ring.attention(x, x, x, seq, window=(0, 0))


def _rounds(rounds: int, shown: bool) -> Iterator[int]:
    """Counts, and shows how far it is: a bar on a terminal, about ten lines elsewhere."""
    console = Console()
    if shown and console.is_terminal:
        yield from track(range(rounds), "calibrate", console=console)
        return
    for number in range(rounds):
        if shown and (number % max(1, rounds // 10) == 0 or number == rounds - 1):
            print(f"calibrate: round {number + 1} of {rounds}", flush=True)
        yield number

"""Measure what predictions are computed from: the times of the attention kernel, copies, messages and empty passes.

In an empty pass, each rank's only token attends to itself.

All ranks of this machine do the same work at the same time, as in a pass. Each round measures everything, so that a
change of the machine's speed affects all figures alike. A figure is the median of its rounds, because a pass is timed
like that too; the fastest rounds would predict a machine that is always at its fastest. On CPUs, kernel and copies are
measured in processor seconds of the rank, to which other processes add nothing.
Not covered: fitting constants to the figures (`ringattn.launch.measure.calibrate`).
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
    """Run one process of the calibration: open a ring and measure."""
    torch.set_num_threads(1)
    with ringattn.Ring(timeout_s=spec["timeout_s"], transport=spec["transport"], cluster=None) as ring:
        return measured(ring, spec["dtype"], spec["rounds"])


def measured(
    ring: ringattn.Ring, dtype: str, rounds: int, links: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, Any]:
    """Return the seconds of each measurement on this rank, by round.

    `links` maps the name of each kind of message to the ranks that this rank sends to and receives from. None stands
    for `NEAR` messages between neighbors.
    """
    ranks = ring.world_size
    peers = links or {NEAR: ((ring.rank + 1) % ranks, (ring.rank - 1) % ranks)}
    works, seconds = _works(ring, dtype, peers), dict[str, list[float]]()
    for work in works.values():
        work()  # compiles, allocates, connects
    for _ in _rounds(rounds, ring.rank == 0):
        for name, work in works.items():
            ring.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            work()
            ring.synchronize()
            wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
            is_local = ring.device.type == "cpu" and name.split()[0] in ON_PROCESSOR
            seconds.setdefault(name, []).append(cpu_s if is_local else wall_s)
            seconds.setdefault(f"processor {name}", []).append(cpu_s)
    return {"seconds": seconds, "transport": ring.transport.name, "engine": _engine(ring, dtype).name,
            "jobs": _jobs(ring) * ring.world_size}  # fmt: skip


def _works(ring: ringattn.Ring, dtype: str, peers: Mapping[str, tuple[int, int]]) -> dict[str, Callable[[], Any]]:
    """Return the functions to measure, by name."""
    works: dict[str, Callable[[], Any]] = {}
    engine, scale = _engine(ring, dtype), GPU_SCALE if ring.device.type == "cuda" else 1
    for number, shape in enumerate(SHAPES):
        larger = shape._replace(rows=shape.rows * scale, keys=shape.keys * scale)
        works[f"forward {number}"], works[f"backward {number}"] = _passes(engine, larger, ring.device, dtype)
    source_buffer = torch.zeros(COPY_BYTES // 4, device=ring.device)
    copy = torch.zeros_like(source_buffer)
    works["copy"] = lambda: copy.copy_(source_buffer)
    for (name, (to, source)), nbytes in product(peers.items(), MESSAGE_BYTES):
        works[f"{name} {nbytes}"] = _exchange(ring, nbytes, to, source)
    works["pass"] = _empty_pass(ring, dtype)
    if ring.device.type == "cpu":
        crowd = [_passes(engine, Shape(512, 512), ring.device, dtype)[0] for _ in range(_jobs(ring))]
        pool = ThreadPoolExecutor(len(crowd))
        works["alone"], works["crowd"] = crowd[0], lambda: list(pool.map(lambda work: work(), crowd))
    return works


def _engine(ring: ringattn.Ring, dtype: str) -> Engine:
    return ring.engine_for(ring.device, getattr(torch, dtype), 64, 64, None)


def _jobs(ring: ringattn.Ring) -> int:
    """Return the threads per rank in the measurement "crowd": all ranks together have two threads per processor."""
    return -(-2 * len(os.sched_getaffinity(0)) // ring.world_size)


def _passes(
    engine: Engine, shape: Shape, device: torch.device, dtype: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions, one that calls the engine's forward and one that calls its backward."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, heads: int) -> torch.Tensor:
        values = torch.randn(rows, 1, heads, shape.dim, generator=generator)
        return values.to(device, getattr(torch, dtype))

    rows, keys = shape.rows * shape.tiles, shape.keys * shape.tiles
    q, dout = drawn(rows, shape.heads), drawn(rows, shape.heads)
    kv = KV(drawn(keys, shape.kv_heads), drawn(keys, shape.kv_heads))
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (kv.k, kv.v))
    softmax = Softmax(shape.dim**-0.5, shape.heads // shape.kv_heads)
    # Prepare two steps, so that the engine carries accumulators from one to the next, as in a ring.
    works = engine.prepare([tuple(shape.table())] * 2, softmax, rows, shape.heads, more=shape.received)
    carry, dq = engine.begin(works, q, shape.dim, None), engine.begin_grad(works, q, shape.dim)
    engine.attend(q, kv, carry, works[0])
    out, lse = carry.out.finalized(q.dtype), carry.lse
    delta = engine.delta(dout, out, None)
    inputs = BackwardInputs(dout, out, lse, None, delta)
    if shape.received:  # as in a pass, where delta is received instead of the output
        inputs = BackwardInputs(dout, torch.zeros_like(dout), lse, -delta, delta)
    return (
        lambda: engine.attend(q, kv, carry, works[0]),
        lambda: engine.attend_grad(q, kv, inputs, dq, KV(dk, dv), works[0]),
    )


def _exchange(ring: ringattn.Ring, nbytes: int, to: int, source: int) -> Callable[[], None]:
    """Return a function that sends one message and receives one."""
    sent, received = (ring.transport.allocate(nbytes) for _ in range(2))
    sends, recvs = [Message(to, sent, "calibration")], [Message(source, received, "calibration")]
    return lambda: ring.transport.exchange(sends, recvs).wait()


def _empty_pass(ring: ringattn.Ring, dtype: str) -> Callable[[], Any]:
    """Return a forward pass in which each rank's only token attends to itself. Its time is the fixed cost of a pass."""
    seq = ring.sequence(ring.world_size, layout="contiguous")
    x = torch.zeros(1, 1, 1, 64, dtype=getattr(torch, dtype), device=ring.device)
    return lambda: ring.attention(x, x, x, seq, window=(0, 0))


def _rounds(rounds: int, shown: bool) -> Iterator[int]:
    """Yield the rounds and show progress: a bar on a terminal, about ten lines elsewhere."""
    console = Console()
    if shown and console.is_terminal:
        yield from track(range(rounds), "calibrate", console=console)
        return
    for number in range(rounds):
        if shown and (number % max(1, rounds // 10) == 0 or number == rounds - 1):
            print(f"calibrate: round {number + 1} of {rounds}", flush=True)
        yield number

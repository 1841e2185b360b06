"""The ranks of `ringattn.bench.many`. Under torchrun they run one case after another, each on a new ring.

A case is a dictionary: `kind` names a function of this module, which gets the dictionary. Guarantees: the received
bytes are checked before a hop is timed, and attention is compared with that of torch before a pass is timed. Ranks
begin together, and a figure is that of the slowest rank. A case that fails ends the process, because its rings and
device may be broken.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ringattn.bench.crash_proof import one_line
from ringattn.bench.gate import GateError
from ringattn.core.geometry import FULL, StridedRange, Tile, TokenRange
from ringattn.engine.base import KV, Engine, Softmax
from ringattn.errors import InputError, RingError, UnsupportedError
from ringattn.ring import Ring
from ringattn.transport.base import Message
from ringattn.transport.nccl.options import NcclOptions

OPEN_S = 60.0
"""The deadline of every wait."""
WARM = 3
RELATIVE_ERROR = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""The largest relative error (in norm) of a pass, compared with torch's attention in one call. A bfloat16 has 8
significant bits, a float16 11.
"""

TORCH_KERNELS = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
"""Torch's kernels, the fastest first. By default torch prefers FlashAttention 2 to cuDNN."""

Case = dict[str, Any]


def open_ring(case: Case) -> Ring:
    """Open a ring with the transport, its options and the engine of a case."""
    transport = case["transport"]
    nccl = NcclOptions(**case["nccl"]) if transport == "nccl" else None
    return Ring(transport=transport, engine=case.get("engine", "auto"), timeout_s=OPEN_S, nccl=nccl)


def finish(ring: Ring) -> None:
    """Wait until exchanges and the device have finished."""
    ring.synchronize()
    if ring.device.type == "cuda":
        torch.cuda.synchronize()


def slowest(ring: Ring, value: float) -> float:
    """Return the maximum over all ranks."""
    return max(json.loads(encoded) for encoded in ring.transport.all_gather_bytes(json.dumps(value).encode()))


def timed_us(ring: Ring, work: Callable[[], Any], count: int) -> float:
    """Return the microseconds of one call of `work`, averaged over `count` calls in a row."""
    for _ in range(WARM):
        work()
    finish(ring)
    ring.barrier()
    start = time.perf_counter()
    for _ in range(count):
        work()
    finish(ring)
    return slowest(ring, (time.perf_counter() - start) / count * 1e6)


def bind_ring_hop(ring: Ring, nbytes: int) -> Callable[[], Any]:
    """Bind a hop of `nbytes` to the next rank and from the previous one. Raises `GateError` if wrong bytes arrive."""
    next_rank, previous_rank = (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size
    sent, received = (ring.transport.allocate(nbytes) for _ in range(2))
    sent.fill_(ring.rank + 1)
    received.zero_()
    hop = ring.transport.bind([Message(next_rank, sent, "sent")], [Message(previous_rank, received, "received")])
    hop.start().wait()
    finish(ring)
    if not bool((received == previous_rank + 1).all()):
        raise GateError(f"rank {ring.rank}: {nbytes} bytes did not arrive from rank {previous_rank}; nothing is timed")
    return hop.start


def hop(case: Case) -> Any:
    """Return microseconds and GB/s of a hop, by bytes."""
    figures = {}
    with open_ring(case) as ring:
        for nbytes in case["bytes"]:
            start = bind_ring_hop(ring, nbytes)
            us = timed_us(ring, partial(_whole, start), case["count"])
            figures[str(nbytes)] = {"us": us, "gb_s": nbytes / us / 1e3}
    return figures


def _whole(start: Callable[[], Any]) -> None:
    start().wait()


def inputs(ring: Ring, case: Case, rows: int) -> list[Tensor]:
    """Return q, k and v (1, rows, heads, dim), the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    sizes = [(1, rows, heads, case["head_dim"]) for heads in (case["heads"], case["kv_heads"], case["kv_heads"])]
    return [torch.randn(size, generator=generator).to(ring.device, dtype) for size in sizes]


def step_of(engine: Engine, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    """Return a function that computes attention of all queries to all keys, as one step of a pass does."""
    rows = TokenRange(StridedRange(0, q.shape[1]), StridedRange(0, q.shape[1]))
    tile = Tile(rows, rows, FULL, StridedRange(0, q.shape[2]))
    softmax = Softmax(q.shape[3] ** -0.5, q.shape[2] // k.shape[2])
    works = engine.prepare([(tile,)], softmax, q.shape[1], q.shape[2])
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))

    def attend() -> None:
        engine.attend(q, KV(k, v), engine.begin(works, q, v.shape[3], None), works[0])

    return attend


def overlap(case: Case) -> Any:
    """Time a step's attention, a hop with the same bytes of K and V, and both at the same time.

    `hidden` is the time saved by doing both at the same time, as a share of the shorter of the two.
    """
    with open_ring(case) as ring:
        q, k, v = inputs(ring, case, case["rows"])
        engine = ring.engine_for(q.device, q.dtype, q.shape[3], v.shape[3], None)
        attend, start = step_of(engine, q, k, v), bind_ring_hop(ring, 2 * k.numel() * k.element_size())

        def both() -> None:
            handle = start()
            attend()
            handle.wait()

        works = (attend, partial(_whole, start), both)
        attend_us, hop_us, both_us = (timed_us(ring, work, case["count"]) for work in works)
        hidden = (attend_us + hop_us - both_us) / min(attend_us, hop_us)
        return {"attend_us": attend_us, "hop_us": hop_us, "both_us": both_us, "hidden": hidden,
                "sm_margin": engine.sm_margin}  # fmt: skip


def ring(case: Case) -> Any:
    """Time a causal pass, forward and backward, and the same pass of torch's attention on one device.

    On one device torch runs the first kernel of `TORCH_KERNELS` that supports the call. `efficiency` is the speed-up
    divided by the number of ranks.
    """
    with open_ring(case) as ring:
        seq = ring.sequence(case["tokens"], layout="zigzag")
        whole = inputs(ring, case, case["tokens"])
        q, k, v = (seq.shard(x).requires_grad_() for x in whole)
        all_q, all_k, all_v = (x.transpose(1, 2).detach().requires_grad_() for x in whole)

        def passes() -> Tensor:
            out = ring.attention(q, k, v, seq, causal=True, schedule="ring")
            out.backward(out.detach())
            return out.detach()

        def one_device() -> Tensor:
            with sdpa_kernel(TORCH_KERNELS, set_priority=True):
                out = scaled_dot_product_attention(all_q, all_k, all_v, is_causal=True, enable_gqa=True)
            out.backward(out.detach())
            return out.detach().transpose(1, 2)

        expected = seq.shard(one_device()).double()
        error = slowest(ring, float((passes().double() - expected).norm() / expected.norm()))
        if not error <= RELATIVE_ERROR[case["dtype"]]:
            raise GateError(f"off by {error:.1e} compared with torch's own; nothing is timed")
        ring_us, one_us = (timed_us(ring, work, case["count"]) for work in (passes, one_device))
        return {"ring_us": ring_us, "one_us": one_us, "efficiency": one_us / ring_us / ring.world_size, "error": error}


def fsdp(case: Case) -> Any:
    """Time a training step of two linear layers around ring attention, with and without FSDP2 on the layers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    width = case["heads"] * case["head_dim"]
    with open_ring(case) as ring:
        seq, losses, figures = ring.sequence(case["tokens"], layout="zigzag"), [], {}
        generator = torch.Generator().manual_seed(1)
        x = seq.shard(torch.randn(1, case["tokens"], width, generator=generator).to(ring.device))
        for name in ("alone", "beside FSDP2"):
            torch.manual_seed(2)
            layers = torch.nn.ModuleList([torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)])
            layers.to(ring.device)
            if name != "alone":
                mesh = init_device_mesh(ring.device.type, (ring.world_size,))
                for layer in layers:
                    fully_shard(layer, mesh=mesh).set_force_sum_reduction_for_comms(True)

            def step(layers: Any = layers) -> float:
                q, k, v = layers[0](x).view(1, -1, 3, case["heads"], case["head_dim"]).unbind(2)
                out = ring.attention(q.contiguous(), k.contiguous(), v.contiguous(), seq, causal=True)
                loss = layers[1](out.flatten(2)).square().mean()
                loss.backward()
                return float(loss.detach())

            losses.append(step())
            figures[f"{name}, us"] = timed_us(ring, step, case["count"])
    if not abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[0]):
        raise GateError(f"the loss is {losses[0]} without FSDP2 and {losses[1]} with it; nothing is kept")
    return figures | {"loss": losses[0]}


def life(case: Case) -> Any:
    """Open and close rings with a hop in between. Return the median milliseconds of both, and lost device bytes."""
    open_ms, close_ms, free = [], [], []
    for _ in range(case["cycles"]):
        start = time.perf_counter()
        ring = open_ring(case)
        open_ms.append((time.perf_counter() - start) * 1e3)
        cuda = ring.device.type == "cuda"
        bind_ring_hop(ring, 1 << 20)().wait()
        ring.barrier()
        start = time.perf_counter()
        ring.close()
        close_ms.append((time.perf_counter() - start) * 1e3)
        free.append(torch.cuda.mem_get_info()[0] if cuda else 0)
    # Compare with the second opening, after which libraries have made their permanent allocations.
    lost = free[min(1, len(free) - 1)] - free[-1]
    return {"cycles": len(free), "open_ms": median(open_ms), "close_ms": median(close_ms), "lost_bytes": lost}


def abort(case: Case) -> Any:
    """Let rank 0 start an exchange that no other rank joins, and then abort.

    Return the seconds of the abort, and the seconds until the device of rank 0 is free.
    """
    ring = open_ring(case)
    if ring.rank:
        try:
            ring.barrier()
        except RingError as error:
            if "rank 0 gives up" not in str(error):
                raise
        return {}
    buffer = ring.transport.allocate(1 << 20)
    handle = ring.transport.bind([], [Message(1, buffer, "never sent")]).start()
    if ring.device.type == "cuda":
        handle.wait()
    time.sleep(1.0)
    start = time.perf_counter()
    ring.transport.abort(ValueError("rank 0 gives up"))
    abort_s = time.perf_counter() - start
    if ring.device.type == "cuda":
        torch.cuda.synchronize()
    return {"abort_s": abort_s, "device_free_s": time.perf_counter() - start}


def main(job: Path) -> None:
    """Run one rank: run the cases of the job in order and write an answer for each. Stop after a failed case."""
    rank, folder = os.environ["RANK"], job.parent
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # for FSDP2 next to a ring; NCCL reads it once
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    for number, case in enumerate(json.loads(job.read_text(encoding="utf-8"))):
        try:
            answer = globals()[case["kind"]](case)
        except (UnsupportedError, InputError) as error:  # on all ranks, before any exchange is in flight
            answer = {"failed": one_line(error), "goes on": True}
        except Exception as error:
            answer = {"failed": one_line(error)}
        partial = folder / f"partial-{rank}"
        partial.write_text(json.dumps(answer), encoding="utf-8")
        partial.rename(folder / f"answer-{number}-{rank}.json")
        if "failed" in answer and "goes on" not in answer:
            break
    sys.stdout.flush()
    os._exit(0)  # unfinished work on the device must not block the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))

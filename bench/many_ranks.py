"""What each rank does for `ringattn.bench.many`: one case after another, each on a ring of its own, under torchrun.

A case is a dictionary: `kind`, a function here, and what that asks for. Guarantees: bytes are looked at before a hop is
timed, attention is compared with torch's own before a pass is; ranks begin together, and a figure is the slowest
rank's; a case that fails ends the process, whose rings and device may be broken.
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
from torch.nn.functional import scaled_dot_product_attention

from ringattn.bench.crash_proof import told
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
"""Of a pass against torch's own in one call, by norm: a bfloat16 keeps 8 bits, a float16 11."""

Case = dict[str, Any]


def opened(case: Case) -> Ring:
    """A ring with the transport, its options and the engine of a case."""
    transport = case["transport"]
    nccl = NcclOptions(**case["nccl"]) if transport == "nccl" else None
    return Ring(transport=transport, engine=case.get("engine", "auto"), timeout_s=OPEN_S, nccl=nccl)


def finish(ring: Ring) -> None:
    """Return when exchanges and the device have ended."""
    ring.synchronize()
    if ring.device.type == "cuda":
        torch.cuda.synchronize()


def slowest(ring: Ring, value: float) -> float:
    """The greatest of all ranks' values."""
    return max(json.loads(one) for one in ring.transport.all_gather_bytes(json.dumps(value).encode()))


def timed_us(ring: Ring, work: Callable[[], Any], count: int) -> float:
    """Microseconds of one `work`, of `count` in a row."""
    for _ in range(WARM):
        work()
    finish(ring)
    ring.barrier()
    start = time.perf_counter()
    for _ in range(count):
        work()
    finish(ring)
    return slowest(ring, (time.perf_counter() - start) / count * 1e6)


def around(ring: Ring, nbytes: int) -> Callable[[], Any]:
    """A hop of `nbytes` to the next rank and from the one before. Raises `GateError` if the bytes are not theirs."""
    after, before = (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size
    sent, came = (ring.transport.allocate(nbytes) for _ in range(2))
    sent.fill_(ring.rank + 1)
    came.zero_()
    hop = ring.transport.bind([Message(after, sent, "sent")], [Message(before, came, "came")])
    hop.start().wait()
    finish(ring)
    if not bool((came == before + 1).all()):
        raise GateError(f"rank {ring.rank}: {nbytes} bytes did not arrive from rank {before}; nothing is timed")
    return hop.start


def hop(case: Case) -> Any:
    """Microseconds and GB/s of a hop, by bytes."""
    found = {}
    with opened(case) as ring:
        for nbytes in case["bytes"]:
            start = around(ring, nbytes)
            us = timed_us(ring, partial(_whole, start), case["count"])
            found[str(nbytes)] = {"us": us, "gb_s": nbytes / us / 1e3}
    return found


def _whole(start: Callable[[], Any]) -> None:
    start().wait()


def inputs(ring: Ring, case: Case, rows: int) -> list[Tensor]:
    """q, k and v (1, rows, heads, dim), the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    sizes = [(1, rows, heads, case["head_dim"]) for heads in (case["heads"], case["kv_heads"], case["kv_heads"])]
    return [torch.randn(size, generator=generator).to(ring.device, dtype) for size in sizes]


def step_of(engine: Engine, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    """All queries with all keys, as a step of a pass computes them."""
    rows = TokenRange(StridedRange(0, q.shape[1]), StridedRange(0, q.shape[1]))
    tile = Tile(rows, rows, FULL, StridedRange(0, q.shape[2]))
    softmax = Softmax(q.shape[3] ** -0.5, q.shape[2] // k.shape[2])
    works = engine.prepare([(tile,)], softmax, q.shape[1], q.shape[2])
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))

    def attend() -> None:
        engine.attend(q, KV(k, v), engine.begin(works, q, v.shape[3], None), works[0])

    return attend


def overlap(case: Case) -> Any:
    """A step's attention, a hop of the same K and V, and both at once; the share of the shorter that is hidden."""
    with opened(case) as ring:
        q, k, v = inputs(ring, case, case["rows"])
        engine = ring.engine_for(q.device, q.dtype, q.shape[3], v.shape[3], None)
        attend, start = step_of(engine, q, k, v), around(ring, 2 * k.numel() * k.element_size())

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
    """A causal pass, forward and backward, beside torch's own on one device; `efficiency`: of all ranks."""
    with opened(case) as ring:
        seq = ring.sequence(case["tokens"], layout="zigzag")
        whole = inputs(ring, case, case["tokens"])
        q, k, v = (seq.shard(x).requires_grad_() for x in whole)
        all_q, all_k, all_v = (x.transpose(1, 2).detach().requires_grad_() for x in whole)

        def passes() -> Tensor:
            out = ring.attention(q, k, v, seq, causal=True, schedule="ring")
            out.backward(out.detach())
            return out.detach()

        def one_device() -> Tensor:
            out = scaled_dot_product_attention(all_q, all_k, all_v, is_causal=True, enable_gqa=True)
            out.backward(out.detach())
            return out.detach().transpose(1, 2)

        want = seq.shard(one_device()).double()
        error = slowest(ring, float((passes().double() - want).norm() / want.norm()))
        if not error <= RELATIVE_ERROR[case["dtype"]]:
            raise GateError(f"off by {error:.1e} of torch's own; nothing is timed")
        ring_us, one_us = (timed_us(ring, work, case["count"]) for work in (passes, one_device))
        return {"ring_us": ring_us, "one_us": one_us, "efficiency": one_us / ring_us / ring.world_size, "error": error}


def fsdp(case: Case) -> Any:
    """A training step of two linear layers around ring attention: alone, and with the layers under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    width = case["heads"] * case["head_dim"]
    with opened(case) as ring:
        seq, losses, found = ring.sequence(case["tokens"], layout="zigzag"), [], {}
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
            found[f"{name}, us"] = timed_us(ring, step, case["count"])
    if not abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[0]):
        raise GateError(f"the loss is {losses[0]} alone and {losses[1]} beside FSDP2; nothing is kept")
    return found | {"loss": losses[0]}


def life(case: Case) -> Any:
    """Openings and closings with a hop between: milliseconds of both, and bytes of the device that are gone."""
    open_ms, close_ms, free = [], [], []
    for _ in range(case["cycles"]):
        start = time.perf_counter()
        ring = opened(case)
        open_ms.append((time.perf_counter() - start) * 1e3)
        cuda = ring.device.type == "cuda"
        around(ring, 1 << 20)().wait()
        ring.barrier()
        start = time.perf_counter()
        ring.close()
        close_ms.append((time.perf_counter() - start) * 1e3)
        free.append(torch.cuda.mem_get_info()[0] if cuda else 0)
    # What libraries keep for good, they have taken by the second opening.
    lost = free[min(1, len(free) - 1)] - free[-1]
    return {"cycles": len(free), "open_ms": median(open_ms), "close_ms": median(close_ms), "lost_bytes": lost}


def abort(case: Case) -> Any:
    """Rank 0 waits for a message that nobody sends, and aborts: seconds of that, and until its device is free."""
    ring = opened(case)
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
    """One rank's life: the cases of the job in order, an answer each; the first that fails is the last."""
    rank, folder = os.environ["RANK"], job.parent
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # for FSDP2 beside a ring; NCCL reads it once
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    for number, case in enumerate(json.loads(job.read_text(encoding="utf-8"))):
        try:
            answer = globals()[case["kind"]](case)
        except (UnsupportedError, InputError) as error:  # on all ranks, before anything is in flight
            answer = {"failed": told(error), "goes on": True}
        except Exception as error:
            answer = {"failed": told(error)}
        partial = folder / f"partial-{rank}"
        partial.write_text(json.dumps(answer), encoding="utf-8")
        partial.rename(folder / f"answer-{number}-{rank}.json")
        if "failed" in answer and "goes on" not in answer:
            break
    sys.stdout.flush()
    os._exit(0)  # whatever still runs on the device must not hold the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))

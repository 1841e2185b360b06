"""The ranks of a soak, started by torchrun: `python -m ringattn.bench.soak_ranks JOB.json`.

One ring stays open for the whole time and makes random calls, forward and backward. From time to time another ring is
opened, used, and closed or dropped. Every result is compared with dense float64 attention.
Guarantees: all ranks draw the same calls; a result that is off raises `GateError`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringattn.bench.gate import GateError
from ringattn.observe.memory import status_bytes
from ringattn.ring import Ring
from ringattn.testing import dense_attention

EXACT = 1e-10
LAYOUTS = ("contiguous", "zigzag", "striped")
SCHEDULES = ("auto", "ring", "all_gather", "direct", "bidirectional", "pass_q", "sub_rings")
CALLS_PER_SAMPLE = 5
"""Calls between two samples; after each sample the ranks check whether the time is over."""
SECOND_RING_EVERY = 4
"""Samples between two rings that are opened next to the first."""


def draw_call(random_: random.Random) -> dict[str, Any]:
    """Draw one call: lengths, documents, layout, heads, mask and schedule."""
    tokens = random_.randint(40, 160)
    documents = None
    if random_.random() < 0.5:
        cuts = sorted(random_.sample(range(1, tokens), random_.randint(1, 5)))
        documents = [0, *cuts, tokens]
    mask: dict[str, Any] = random_.choice([
        {}, {"causal": True}, {"window": (random_.randint(1, 30), random_.randint(0, 20))},
        {"causal": True, "window": (random_.randint(1, 40), 0)},
    ])  # fmt: skip
    return {
        "tokens": tokens, "documents": documents, "mask": mask, "kv_heads": random_.choice([1, 2]),
        "layout": random_.choice([*LAYOUTS, *(("per_document", "documents") if documents else ())]),
        "schedule": random_.choice(SCHEDULES), "seed": random_.getrandbits(30),
    }  # fmt: skip


def check(ring: Ring, call: dict[str, Any]) -> float:
    """Make one call and return the largest error of its output and gradients. Raises `GateError` if it is not exact."""
    generator = torch.Generator().manual_seed(call["seed"])
    heads = (4, call["kv_heads"], call["kv_heads"], 4)
    q, k, v, dout = (torch.randn(1, call["tokens"], n, 8, dtype=torch.float64, generator=generator) for n in heads)
    seq = ring.sequence(call["tokens"], cu_seqlens=call["documents"], layout=call["layout"])
    local = [seq.shard(x).detach().requires_grad_() for x in (q, k, v)]
    attend: Any = ring.attention
    out = attend(*local, seq, schedule=call["schedule"], **call["mask"])
    out.backward(seq.shard(dout))

    whole = [x.requires_grad_() for x in (q, k, v)]
    expected = dense_attention(*whole, **call["mask"], cu_seqlens=call["documents"])[0]
    expected.backward(dout)
    pairs: list[tuple[Tensor, Tensor]] = [(out.detach(), seq.shard(expected.detach()))]
    for local_input, reference in zip(local, whole, strict=True):
        assert local_input.grad is not None and reference.grad is not None
        pairs.append((local_input.grad, seq.shard(reference.grad)))
    error = max((float((x - y).abs().max()) for x, y in pairs if x.numel()), default=0.0)
    if not error <= EXACT:
        raise GateError(f"rank {ring.rank}: a result is off by {error:.1e}: {call}")
    return error


def sample(calls: int, began_s: float) -> dict[str, float]:
    """Return the present descriptors, threads, mappings and memory of this process."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        maps = sum("ringattn-" in line for line in lines)
    return {
        "calls": calls, "seconds": time.monotonic() - began_s, "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(), "maps": maps, "rss_bytes": status_bytes("VmRSS"),
    }  # fmt: skip


def soak(options: dict[str, Any], folder: Path) -> None:
    """Make calls until `seconds` have passed on rank 0. Write each sample as a line of `rank-N.jsonl`."""
    rank, transport, timeout_s = int(os.environ["RANK"]), options["transport"], options["timeout_s"]
    random_ = random.Random(options["seed"])
    torch.set_num_threads(1)
    calls, began_s, rounds = 0, time.monotonic(), 0
    with (
        open(folder / f"rank-{rank}.jsonl", "w", encoding="utf-8", buffering=1) as lines,
        Ring(transport=transport, timeout_s=timeout_s) as ring,
    ):
        (folder / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")
        over = False
        while not over:
            error = max(check(ring, draw_call(random_)) for _ in range(CALLS_PER_SAMPLE))
            calls, rounds = calls + CALLS_PER_SAMPLE, rounds + 1
            if rounds % SECOND_RING_EVERY == 0:
                second_ring = Ring(transport=transport, timeout_s=timeout_s)
                error = max(error, check(second_ring, draw_call(random_)))
                if random_.random() < 0.5:
                    second_ring.close()
                del second_ring  # dropped, if it is still open
            lines.write(json.dumps({**sample(calls, began_s), "error": error}) + "\n")
            over = ring.all_gather_text(str(time.monotonic() - began_s > options["seconds"]))[0] == "True"


if __name__ == "__main__":
    job = Path(sys.argv[1])
    soak(json.loads(job.read_text(encoding="utf-8")), job.parent)

"""Measure one attention call on all ranks: the exactness gate, warm-up, timed passes, bytes and memory.

Guarantees: nothing is timed unless the same call at a small size was exact on the same ranks. A time is that of the
slowest rank, and starts at a barrier. Every rank returns the same facts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.errors import OutOfMemoryError, RingError
from ringattn.explain import Explanation
from ringattn.launch.calls import RunConfig
from ringattn.launch.measure.environment import cluster_for, environment
from ringattn.launch.measure.exactness import (
    DTYPES,
    absolute_error,
    attended,
    drawn,
    error_of,
    reference_and_bounds,
)
from ringattn.launch.memory import PeakMemory
from ringattn.observe.memory import is_shortage
from ringattn.planner.cluster import BACKWARD_OVER_FORWARD, FORWARD_FLOPS_PER_DIM, Cluster, cluster_named
from ringattn.planner.simulate import duration, simulate
from ringattn.ring import Ring
from ringattn.sequence import Sequence

GATE_TOKENS = 251
"""Length of the gate's problem: prime, so that shards differ in length, and small enough for a dense reference."""
GATE_TOKENS_PER_RANK = 4
"""The least tokens per rank of the gate's problem, which determine its length if there are many ranks."""

Say = Callable[[str], None]


class GateError(RingError):
    """The error if the call is not exact at a small size and therefore must not be measured."""


def on_rank(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run one process of the job. `spec` holds `config` (a `RunConfig` as a dict) and `quiet`."""
    config = RunConfig(**spec["config"])
    try:
        with Ring(transport=config.transport, engine=config.engine, timeout_s=config.timeout_s) as ring:
            silent = spec["quiet"] or ring.rank > 0
            say: Say = (lambda line: None) if silent else (lambda line: print(line, flush=True))
            return measure(ring, config, say)
    except Exception as error:
        if is_shortage(error):
            size = f"{config.tokens} tokens on {config.world_size} ranks"
            raise OutOfMemoryError(f"no memory for {size}: {error}; use fewer tokens or more ranks") from error
        raise


def measure(ring: Ring, config: RunConfig, say: Say) -> dict[str, Any]:
    """Measure a point and return the facts of its record. This is a collective call.

    Raises `GateError` on every rank if the call is not exact at a small size.
    """
    errors = _gate(ring, config)
    say("exactness check at a small size: exact; " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    seq: Sequence = config.sequence_on(ring, config.length)
    memory = PeakMemory(ring.device)
    leaves, dout = _inputs(ring, config, seq)
    attend: Any = ring.dilated_attention if config.dilated else ring.attention

    def forward() -> Tensor:
        out: Tensor = attend(*leaves, seq, schedule=config.schedule, **config.options(config.length, ring.device))
        return out

    def backward(out: Tensor) -> Any:
        return torch.autograd.grad(out, leaves, dout)

    times: list[list[float]] = []
    for number in range(config.warmup + config.repeats):
        if number == config.warmup:
            ring.reset_counters()
        times.append(_timed_pass(ring, forward, backward if config.backward else None))
        say(f"pass {number + 1} of {config.warmup + config.repeats}: {duration(sum(times[-1]))} on this rank")
    counted = ring.counters()
    local_facts = {
        "times_s": times[config.warmup :],
        "bytes_sent": counted["bytes_sent"] // config.repeats,
        "messages": counted["messages"] // config.repeats,
        "peak_bytes": memory.growth_bytes(),
        "pool_bytes": counted["pool_high_water_bytes"],
        "exposed": _exposed(ring, forward, backward if config.backward else None),
        "planned": _planned(ring, config, seq) if ring.rank == 0 else None,
        "environment": environment() if ring.rank == 0 else None,
    }
    by_rank = [json.loads(facts) for facts in ring.all_gather_text(json.dumps(local_facts))]
    return {"error": errors, **_facts(config, by_rank)}


def _gate(ring: Ring, config: RunConfig) -> dict[str, float]:
    """Run the same call at a small size, and return the largest absolute error of out, dq, dk and dv.

    Raises `GateError` on every rank if an error exceeds its bound.
    """
    length = min(config.length, max(GATE_TOKENS, GATE_TOKENS_PER_RANK * ring.world_size + 1))
    heads, dims = (config.heads, config.kv_heads), (config.head_dim, config.head_dim)
    inputs = tuple(x.to(ring.device) for x in drawn(1, length, heads, dims, DTYPES[config.dtype], config.seed))
    got = attended(ring, config, inputs, config.sequence_on(ring, length), config.schedule)
    verdict: dict[str, Any] = {}
    if ring.rank == 0:
        reference, bounds = reference_and_bounds(config, inputs, config.engine)
        for name, x, y, bound in zip(("out", "dq", "dk", "dv"), got, reference, bounds, strict=True):
            verdict[name] = [absolute_error(x, y), error_of(x, y) <= bound]  # a NaN is not within any bound
    verdict = json.loads(ring.all_gather_text(json.dumps(verdict))[0])
    if wrong := [f"{error:.1e} in {name}" for name, (error, right) in verdict.items() if not right]:
        raise GateError(f"not exact at {length} tokens: the error is {', '.join(wrong)}; nothing is measured")
    return {name: error for name, (error, _) in verdict.items()}


def _inputs(ring: Ring, config: RunConfig, seq: Sequence) -> tuple[list[Tensor], Tensor]:
    """Draw this rank's shards of q, k, v, and of the gradient of the output."""
    generator = torch.Generator(ring.device).manual_seed(config.seed + ring.rank)
    tokens = seq.counts[ring.rank]

    def drawn_rows(heads: int) -> Tensor:
        sizes = config.batch, tokens, heads, config.head_dim
        return torch.randn(sizes, generator=generator, device=ring.device).to(DTYPES[config.dtype])

    heads = config.heads, config.kv_heads, config.kv_heads
    leaves = [drawn_rows(count).requires_grad_(config.backward) for count in heads]
    return leaves, drawn_rows(config.heads)


def _timed_pass(ring: Ring, forward: Callable[[], Tensor], backward: Callable[[Tensor], Any] | None) -> list[float]:
    """Return the seconds of this rank's forward, and of its backward if there is one, each after a barrier."""
    start = _start(ring)
    out = forward()
    seconds = [_stop(ring) - start]
    if backward is not None:
        start = _start(ring)
        backward(out)
        seconds.append(_stop(ring) - start)
    return seconds


def _start(ring: Ring) -> float:
    ring.barrier()
    return time.perf_counter()


def _stop(ring: Ring) -> float:
    ring.synchronize()
    if ring.device.type == "cuda":
        torch.cuda.synchronize(ring.device)
    return time.perf_counter()


def _exposed(
    ring: Ring, forward: Callable[[], Tensor], backward: Callable[[Tensor], Any] | None
) -> dict[str, float | bool | None]:
    """Run another pass; return the milliseconds that this rank waited for messages, and the overlap.

    The overlap is the lower of forward and backward. If `arrivals_known` is False, it is an upper bound.
    """
    with ring.recording() as first:
        out = forward()
    if backward is None:
        return {"forward": first.exposed_us / 1e3, "backward": None, "overlap": first.overlap,
                "arrivals_known": first.arrivals_known}  # fmt: skip
    with ring.recording() as second:
        backward(out)
    overlap = min(first.overlap, second.overlap)
    return {"forward": first.exposed_us / 1e3, "backward": second.exposed_us / 1e3, "overlap": overlap,
            "arrivals_known": first.arrivals_known and second.arrivals_known}  # fmt: skip


def _planned(ring: Ring, config: RunConfig, seq: Sequence) -> dict[str, Any]:
    """Return the allowed pairs of all heads, the prediction or why there is none, and the choices of `auto`."""
    options = config.options(seq.length, ring.device)
    cluster, reason = (cluster_named(config.cluster), "") if config.cluster else cluster_for(ring)
    explained = ring.explain(
        seq, batch=config.batch, q_heads=config.heads, kv_heads=config.kv_heads,
        head_dim=config.head_dim, dtype=DTYPES[config.dtype], backward=config.backward,
        schedule=config.schedule, **options,
    )  # fmt: skip
    predicted = _predicted(explained, cluster.joined(ring.links)) if cluster else None
    resolved = {
        "schedule": explained.schedule,
        "layout": explained.problem.q_layout.name,
        "engine": explained.engine,
        "transport": ring.transport.name,
        "sm_margin": explained.sm_margin,
    }
    return {"pairs": sum(explained.pairs), "predicted": predicted, "not_predicted": reason, "resolved": resolved}


def _predicted(explained: Explanation, cluster: Cluster) -> dict[str, Any]:
    """Return the times on `cluster` that a simulation of the plans predicts."""
    forward, *backward = (simulate(plans, cluster) for plans in explained.plans)
    return {
        "cluster": cluster.name,
        "calibrated": cluster.calibrated,
        "forward_ms": forward.total_us / 1e3,
        "backward_ms": backward[0].total_us / 1e3 if backward else None,
        "exposed_ms": {
            "forward": _ms(forward.exposed_us),
            "backward": _ms(backward[0].exposed_us) if backward else None,
        },
        "pool_bytes": [max(plan.arena_bytes for plan in plans) for plans in zip(*explained.plans, strict=True)],
    }


def _ms(times_us: Iterable[float]) -> list[float]:
    return [time_us / 1e3 for time_us in times_us]


def _facts(config: RunConfig, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the measured fields of the record from the facts of each rank."""
    seconds = np.max([facts["times_s"] for facts in by_rank], axis=0)  # (repeats, passes), of the slowest rank
    both_s = float(np.median(seconds.sum(1)))
    planned, exposed = by_rank[0]["planned"], [facts["exposed"] for facts in by_rank]
    forward_flops = planned["pairs"] * config.batch * config.head_dim * FORWARD_FLOPS_PER_DIM
    flops = forward_flops * (1 + BACKWARD_OVER_FORWARD * config.backward)
    return {
        "forward_ms": _spread(seconds[:, 0]),
        "backward_ms": _spread(seconds[:, 1]) if config.backward else None,
        "pass_ms": _spread(seconds.sum(1)),
        "tokens_per_s": config.batch * config.length / both_s,
        "tflops": flops / both_s / 1e12,
        **{key: [facts[key] for facts in by_rank] for key in ("bytes_sent", "messages", "peak_bytes", "pool_bytes")},
        "exposed_ms": {
            "forward": [waits["forward"] for waits in exposed],
            "backward": [waits["backward"] for waits in exposed] if config.backward else None,
        },
        "overlap": min(waits["overlap"] for waits in exposed),
        "arrivals_known": all(waits["arrivals_known"] for waits in exposed),
        "predicted": planned["predicted"],
        "not_predicted": planned["not_predicted"],
        "resolved": planned["resolved"],
        "environment": by_rank[0]["environment"],
    }


def _spread(seconds: np.ndarray) -> dict[str, float | int]:
    """Return the median, the 10th and the 90th percentile in milliseconds, and the number of samples."""
    p10, median, p90 = (float(percentile) * 1e3 for percentile in np.percentile(seconds, (10, 50, 90)))
    return {"median": median, "p10": p10, "p90": p90, "samples": len(seconds)}

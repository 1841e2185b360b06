"""Measured and predicted times of schedules on two nodes of two ranks, with slow links between the nodes.

The nodes are network namespaces (`hosts.py`). Ranks of a node share memory, and each has a separate rail to its peer on
the other node, limited to `rate_mb` megabytes a second. The same ranks first measure kernel, memory and both kinds of
messages. The prediction simulates the plans that run, and uses only these measured constants.
Run `python -m ringattn.bench.two_nodes` as root.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ringattn.bench.clock import Sample, kept, wall
from ringattn.bench.hosts import NODES, RailedNodes
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.bench.timed_calls import PASSES, Shape, plans_of, samples_of, timed
from ringattn.errors import InputError
from ringattn.launch.measure.calibrate import FAR, NEAR, constants_of, finalized
from ringattn.launch.measure.calibration import measured
from ringattn.planner.cluster import Cluster
from ringattn.planner.simulate import simulate
from ringattn.ring import Ring

PROGRAM = "ringattn.bench.two_nodes:on_rank"
PLACES = 2
RANKS = NODES * PLACES
FLAT = "ring"
SCHEDULES = (FLAT, "double_ring", "all_gather", "direct", "ulysses", "ulysses_ring")
CALLS = (
    Shape(4096, 8, 8, 64, "contiguous", FLAT, causal=False),
    Shape(4096, 8, 8, 64, "zigzag", FLAT),
    Shape(8192, 8, 4, 64, "zigzag", FLAT),
)


@dataclass(frozen=True)
class TwoNodesOptions:
    """The options of the benchmark.

    `rate_mb` is the megabytes/s of a rail in each direction. `calls` is the number of calls to measure, and `rounds`
    the number of rounds that measure the constants.
    """

    rate_mb: float = 25.0
    calls: int = 3
    repeats: int = 5
    rounds: int = 10
    results: str = RESULTS


def shapes(calls: int) -> list[Shape]:
    """Return each call with each schedule."""
    return [call._replace(schedule=name) for call in CALLS[:calls] for name in SCHEDULES]


def on_rank(ring: Ring, **spec: Any) -> dict[str, Any]:
    """Run this rank: measure the constants, then the calls."""
    if ring.rank == 0:
        print("measuring kernel, memory and messages of this machine", flush=True)
    near, far = ring.rank ^ 1, (ring.rank + PLACES) % RANKS
    constants = measured(ring, "float32", spec["rounds"], {NEAR: (near, near), FAR: (far, far)})
    return {"constants": constants, **timed(ring, shapes(spec["calls"]), spec["repeats"])}


def cluster_of(measurements: list[dict[str, Any]], cores: int, rate_mb: float) -> Cluster:
    """Return the two nodes as a cluster of the planner. `cores` is the number of processors of a node."""
    constants, _, _ = constants_of(finalized(measurements), "float32", 1, measurements[0]["jobs"])
    constants |= {"cores": cores, "ranks_per_node": PLACES}
    return Cluster(
        name=f"two nodes of {PLACES} ranks, rails of {rate_mb:g} MB/s (measured)",
        source="measured by the same ranks immediately before", calibrated=True, **constants,
    )  # fmt: skip


def table_of(options: TwoNodesOptions, cluster: Cluster, by_shape: list[dict[str, list[Sample]]]) -> Table:
    """Return a table with a row per call, pass and schedule, with the speed-up over the flat ring.

    Its notes have the verdict.
    """
    table = Table(
        f"{RANKS} ranks on {NODES} nodes, rails of {options.rate_mb:g} MB/s, {options.repeats} rounds",
        ("tokens, heads, mask, layout", "pass", "schedule", "over rails, MiB", "measured, ms", "predicted, ms", "error",
         "ring over it", "predicted", "foreign"),
        notes=[
            "- over rails: bytes of the busiest rank to the other node. error: predicted over measured, minus one. "
            "Ring over it: the flat ring's time over this schedule's, measured, and next to it predicted.",
            f"- {cluster.cores} processors a node; foreign: processors that other programs used in the kept rounds.",
            f"- messages, measured: inside a node {1e6 * cluster.latency_s:.0f} us and {cluster.bandwidth / 1e6:.0f} "
            f"MB/s; between nodes {1e6 * (cluster.node_latency_s or 0):.0f} us and "
            f"{(cluster.node_bandwidth or 0) / 1e6:.1f} MB/s.",
        ],
    )  # fmt: skip
    errors, right = [], 0
    samples_by_shape = dict(zip(shapes(options.calls), by_shape, strict=True))
    for call in CALLS[: options.calls]:
        for name in PASSES:
            backward = name == "backward"
            call_shapes = [call._replace(schedule=schedule) for schedule in SCHEDULES]
            plans = {shape: plans_of(shape, RANKS, backward, cluster) for shape in call_shapes}
            predicted_s = {shape: simulate(plans[shape], cluster).total_us / 1e6 for shape in call_shapes}
            measured_s = {shape: wall(samples_by_shape[shape][name]) for shape in call_shapes}
            right += measured_s[min(call_shapes, key=predicted_s.__getitem__)] <= 1.1 * min(measured_s.values())
            for shape in call_shapes:
                errors.append(predicted_s[shape] / measured_s[shape] - 1)
                table.rows.append((
                    call.call, name, shape.schedule, f"{crossing_bytes(plans[shape], cluster) / 2**20:.1f}",
                    f"{1e3 * measured_s[shape]:.0f}", f"{1e3 * predicted_s[shape]:.0f}", f"{errors[-1]:+.1%}",
                    f"{measured_s[call_shapes[0]] / measured_s[shape]:.2f}",
                    f"{predicted_s[call_shapes[0]] / predicted_s[shape]:.2f}",
                    f"{median(sample.foreign for sample in kept(samples_by_shape[shape][name])):.2f}",
                ))  # fmt: skip
    table.notes.append(
        f"- median error {median(map(abs, errors)):.1%}, greatest {max(map(abs, errors)):.1%}; the schedule of the "
        f"least predicted time is within 10 % of the fastest measured in {right} of {2 * options.calls} passes."
    )
    return table


def crossing_bytes(plans: Sequence[Any], cluster: Cluster) -> int:
    """Return the bytes that a rank sends to the other node, for the rank that sends the most."""
    return max(
        sum(
            send.elements * plan.element_bytes(send.buffer)
            for step in plan.steps
            for send in step.sends
            if cluster.node_of(send.peer) != cluster.node_of(plan.rank)
        )
        for plan in plans
    )


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run, print, save and return the record. Raises `UnsupportedError` if namespaces or `tc` are not permitted."""
    options = parse(TwoNodesOptions(), arguments)
    if options.rate_mb <= 0 or options.repeats < 1 or options.rounds < 1 or not 1 <= options.calls <= len(CALLS):
        raise InputError(f"rate_mb, repeats and rounds must be positive, and calls from 1 to {len(CALLS)}")
    with progress("two_nodes") as say, RailedNodes(PLACES, options.rate_mb * 1e6) as nodes:
        by_rank = nodes.run(PROGRAM, asdict(options), say, "shm")
        cores = len(nodes.processors[0])
    cluster = cluster_of([rank["constants"] for rank in by_rank], cores, options.rate_mb)
    by_shape = samples_of(by_rank)
    data: dict[str, Any] = {
        "cluster": asdict(cluster),
        "samples": {str(shape): by_pass for shape, by_pass in zip(shapes(options.calls), by_shape, strict=True)},
        "sample_fields": Sample._fields,
        "largest_error": max(rank["error"] for rank in by_rank),
    }
    finish("two_nodes", options, [table_of(options, cluster, by_shape)], data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])

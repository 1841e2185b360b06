"""Which links the messages of a pass cross, and which message is the slowest."""

from __future__ import annotations

from typing import NamedTuple

from ringattn.planner.cluster import Cluster
from ringattn.planner.links import LinkClass
from ringattn.planner.plan import Plan


class Crossed(NamedTuple):
    """The messages of all ranks over links of one class.

    `pairs`: (sender, receiver), each once. `slowest`: the pair whose messages of one step take longest alone on their
    link, `slowest_us` microseconds, of which `latency_us` are latency.
    """

    kind: LinkClass
    pairs: tuple[tuple[int, int], ...]
    nbytes: int
    slowest: tuple[int, int]
    slowest_us: float
    latency_us: float


def crossed(plans: tuple[Plan, ...], cluster: Cluster) -> tuple[Crossed, ...]:
    """By class of link, the slowest first."""
    loads: dict[LinkClass, dict[tuple[int, int, int], int]] = {}  # bytes by sender, receiver and step
    for rank, plan in enumerate(plans):
        for step in plan.steps:
            for send in step.sends:
                by_hop = loads.setdefault(cluster.link_class(rank, send.peer), {})
                key = rank, send.peer, step.number
                by_hop[key] = by_hop.get(key, 0) + send.elements * plan.element_bytes(send.buffer)
    found = []
    for kind, by_hop in loads.items():
        latency_s, _ = cluster.link(kind)
        src, dst, step_number = max(by_hop, key=lambda hop: (by_hop[hop], -hop[0]))
        most = by_hop[src, dst, step_number]
        seconds = cluster.travel_s(kind, most, most)
        pairs = tuple(sorted({(src, dst) for src, dst, _ in by_hop}))
        found.append(Crossed(kind, pairs, sum(by_hop.values()), (src, dst), seconds * 1e6, latency_s * 1e6))
    return tuple(sorted(found, key=lambda one: -one.slowest_us))

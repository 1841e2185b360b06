"""Opens a ring over any transport in the processes of a test, or on threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import HashStore

from ringattn.transport.base import Opening, Transport
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.health.health import Health
from ringattn.transport.location import Location
from ringattn.transport.nodes import HostNodesTransport, open_shm_and_gloo
from ringattn.transport.shared.transport import ShmTransport
from tests.contract.meeting import store_of
from tests.transport.peers import rings

EVEN, LATE, EARLY = (0, 0, 1, 1), (0, 0, 1), (0, 1, 1)
"""The node of each rank."""
# Each ring opens within 20 s and then gets the deadline of its test, which may be shorter than a busy machine needs to
# connect.


def locations(nodes: tuple[int, ...]) -> list[Location]:
    """Locations of ranks on these nodes."""
    return [Location(f"host-{node}", f"boot/{node}", os.getpid(), os.getuid()) for node in nodes]


def meet_gloo(rank: int, world_size: int, members: list[int], timeout_s: float) -> GlooTransport:
    """A gloo ring of the processes `members`."""
    store = store_of(rank, world_size, members)
    ring = GlooTransport.open(Opening(store, members.index(rank), len(members), 20.0))
    ring.opening.timeout_s = timeout_s
    return ring


def meet_shm(rank: int, world_size: int, members: list[int], timeout_s: float) -> ShmTransport:
    """A ring over shared memory of the processes `members`."""
    store = store_of(rank, world_size, members)
    ring = ShmTransport.open(Opening(store, members.index(rank), len(members), 20.0))
    ring.opening.timeout_s = timeout_s
    return ring


def meet_nodes(rank: int, world_size: int, nodes: tuple[int, ...], timeout_s: float) -> HostNodesTransport:
    """A ring over both of the first processes, one for each entry of `nodes`."""
    store = store_of(rank, world_size, list(range(len(nodes))))
    ring = open_shm_and_gloo(Opening(store, rank, len(nodes), 20.0, locations=locations(nodes)))
    ring.inside.opening.timeout_s = timeout_s
    return ring


def meet(
    transport: str, rank: int, world_size: int, timeout_s: float, nodes: tuple[int, ...] = EVEN
) -> tuple[Transport, Health]:
    """A ring of all processes, and this rank's health."""
    everyone = list(range(world_size))
    if transport == "gloo":
        gloo = meet_gloo(rank, world_size, everyone, timeout_s)
        return gloo, gloo.health
    if transport == "shm":
        shm = meet_shm(rank, world_size, everyone, timeout_s)
        return shm, shm.group.health
    if transport == "peer":
        peer = rings.meet(rank, world_size, timeout_s)
        return peer, peer.group.health
    both = meet_nodes(rank, world_size, nodes, timeout_s)
    return both, both.between.health


def on_node_threads(nodes: tuple[int, ...], body: Callable[[HostNodesTransport], Any]) -> list[Any]:
    """`body` on ranks that are threads of this process, over real shared memory and real gloo; results by rank."""
    store = HashStore()

    def live(rank: int) -> Any:
        ring = open_shm_and_gloo(
            Opening(store.clone(), rank, len(nodes), 30.0, interface="lo", locations=locations(nodes))
        )
        try:
            return body(ring)
        finally:
            ring.close()

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(live, range(len(nodes))))

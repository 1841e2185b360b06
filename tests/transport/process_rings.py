"""Open a ring over any transport. The ranks are processes or threads of a test."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch.distributed import HashStore

from ringattn.transport.base import Opening, Transport
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.health.health import Health
from ringattn.transport.location import Location, gather_locations, machine_id
from ringattn.transport.nodes import HostNodesTransport, open_shm_and_gloo
from ringattn.transport.peer.opening import open_peer
from ringattn.transport.peer.transport import PeerTransport
from ringattn.transport.shared.transport import ShmTransport
from tests.contract.processes import store_of
from tests.transport.peers.sim_driver import SimGpu

EVEN, LATE, EARLY = (0, 0, 1, 1), (0, 0, 1), (0, 1, 1)
"""The node of each rank: two nodes of two ranks, or three ranks of which the last or the first has its own node."""
# Each ring opens with a deadline of 20 s, because a busy machine may connect slowly. Then it gets the deadline of its
# test.
OPENING_S = 20.0


def locations(nodes: tuple[int, ...]) -> list[Location]:
    """Return the location of each rank. `nodes`: the node of each rank."""
    return [Location(f"host-{node}", f"boot/{node}", os.getpid(), os.getuid()) for node in nodes]


def location(**facts: Any) -> Location:
    """Return the location of this process, on the only simulated GPU of the machine."""
    return replace(Location(socket.gethostname(), machine_id(), os.getpid(), os.getuid(), "one"), **facts)


def meet_gloo(rank: int, world_size: int, timeout_s: float) -> GlooTransport:
    """Open a gloo ring of all processes."""
    ring = GlooTransport.open(Opening(store_of(rank, world_size), rank, world_size, OPENING_S))
    ring.opening.timeout_s = timeout_s
    return ring


def meet_shm(rank: int, world_size: int, timeout_s: float) -> ShmTransport:
    """Open a ring of all processes over shared memory."""
    ring = ShmTransport.open(Opening(store_of(rank, world_size), rank, world_size, OPENING_S))
    ring.opening.timeout_s = timeout_s
    return ring


def meet_nodes(rank: int, world_size: int, nodes: tuple[int, ...], timeout_s: float) -> HostNodesTransport:
    """Open a ring over shared memory within nodes and gloo between them.

    `nodes`: the node of each rank. The ranks are the first `len(nodes)` of the `world_size` processes.
    """
    store = store_of(rank, world_size, len(nodes))
    ring = open_shm_and_gloo(Opening(store, rank, len(nodes), OPENING_S, locations=locations(nodes)))
    ring.inside.opening.timeout_s = timeout_s
    return ring


def meet_peer(
    rank: int,
    world_size: int,
    timeout_s: float = 20.0,
    *,
    gpu: SimGpu | None = None,
    where: Location | None = None,
    rounds: int = 2,
) -> PeerTransport:
    """Open a ring of all processes over the copy engines of simulated GPUs.

    `where`: the location of this process. `rounds`: the number of exchanges in the transport's self-test.
    """
    store, gpu = store_of(rank, world_size), gpu or SimGpu()
    gathered = gather_locations(ControlStore(store, rank, world_size), where or location(), Deadline(OPENING_S))
    opening = Opening(store, rank, world_size, OPENING_S, interface=None, locations=gathered)
    ring = open_peer(opening, lambda: (gpu.driver, gpu), rounds=rounds)
    ring.opening.timeout_s = timeout_s
    return ring


def meet(
    transport: str, rank: int, world_size: int, timeout_s: float, nodes: tuple[int, ...] = EVEN
) -> tuple[Transport, Health]:
    """Open a ring over `transport`, and return it with this rank's `Health`. `nodes` only applies to shm+gloo."""
    if transport == "shm+gloo":
        both = meet_nodes(rank, world_size, nodes, timeout_s)
        return both, both.between.health
    ring: Any = {"gloo": meet_gloo, "shm": meet_shm, "peer": meet_peer}[transport](rank, world_size, timeout_s)
    return ring, ring.health if transport == "gloo" else ring.group.health


def on_node_threads(nodes: tuple[int, ...], body: Callable[[HostNodesTransport], Any]) -> list[Any]:
    """Run `body(ring)` on one thread per rank, over real shared memory and gloo. Return the results by rank."""
    store = HashStore()

    def run_rank(rank: int) -> Any:
        ring = open_shm_and_gloo(
            Opening(store.clone(), rank, len(nodes), 30.0, interface="lo", locations=locations(nodes))
        )
        try:
            return body(ring)
        finally:
            ring.close()

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(run_rank, range(len(nodes))))

"""Opens the unchanged peer transport over a simulated GPU in the calling process."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

from ringattn.transport.base import Opening
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.location import Location, gather_locations, machine_id
from ringattn.transport.peer.opening import open_peer
from ringattn.transport.peer.transport import PeerTransport
from tests.contract.meeting import store_of
from tests.transport.peers.sim_driver import SimGpu


def location(**facts: Any) -> Location:
    """This process's, on the one simulated GPU of the machine."""
    return replace(Location(socket.gethostname(), machine_id(), os.getpid(), os.getuid(), "one"), **facts)


def meet(
    rank: int,
    world_size: int,
    timeout_s: float = 20.0,
    *,
    gpu: SimGpu | None = None,
    where: Location | None = None,
    rounds: int = 2,
) -> PeerTransport:
    """A ring of all processes, opened when all are there, with waits of `timeout_s`."""
    store = store_of(rank, world_size, list(range(world_size)))
    gpu = gpu or SimGpu()
    control = ControlStore(store, rank, world_size)
    locations = gather_locations(control, where or location(), Deadline(20.0))
    opening = Opening(store, rank, world_size, 20.0, interface=None, locations=locations)
    ring = open_peer(opening, lambda: (gpu.driver, gpu), rounds=rounds)
    # Shorter than a busy machine may need to open.
    ring.opening.timeout_s = timeout_s
    return ring

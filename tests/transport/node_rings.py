"""Runs the real peer and NCCL transports as one ring over two nodes, one thread a rank, over simulated GPUs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import HashStore

from ringattn.observe.flight import FlightRecord
from ringattn.transport import nodes
from ringattn.transport.control_store import ControlStore
from ringattn.transport.health.health import Health
from ringattn.transport.location import Location
from ringattn.transport.nccl import transport as nccl_transport
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nccl.transport import NcclTransport
from ringattn.transport.nodes import DeviceNodesTransport
from ringattn.transport.peer import transport as peer_transport
from ringattn.transport.peer.opening import open_peer
from tests.transport.nccl_rings import EVERYTHING, Outcome, _forgive_the_dead, set_deadline
from tests.transport.peers.sim_driver import SimGpu
from tests.transport.simulated.device import SimDevice
from tests.transport.simulated.faults import Died, MortalStore
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import SimWorld


def places(layout: tuple[int, ...]) -> list[Location]:
    """The ranks of a node share its one GPU."""
    return [Location(f"host-{n}", f"boot/{n}", os.getpid(), os.getuid(), f"gpu-{n}") for n in layout]


def open_on(
    world: SimWorld, rank: int, store: Any, layout: tuple[int, ...], gpu: SimGpu, flight_dir: Path | None = None
) -> DeviceNodesTransport:
    """The transport of one rank, with waits of 20 s."""
    locations, record = places(layout), FlightRecord(rank, len(layout), "peer+nccl")
    control = ControlStore(store, rank, len(layout))
    health = Health(control)
    inside = open_peer(
        control, locations, lambda: (gpu.driver, gpu), 20.0,
        flight_dir=flight_dir, rounds=1, record=record, health=health,
    )  # fmt: skip
    try:
        between = NcclTransport.open(
            store, rank, len(layout), 20.0, binding=SimLibrary(world, rank, EVERYTHING), gpu=SimDevice(world, rank),
            options=NcclOptions(), locations=locations, nccl_id=f"{layout[rank]}", flight_dir=flight_dir,
            leave=lambda why: world.script.check_alive(rank), record=record, health=health,
        )  # fmt: skip
    except BaseException as error:
        inside.abort(error)
        raise
    return DeviceNodesTransport(inside, between)


def on_nodes(
    layout: tuple[int, ...],
    body: Callable[[DeviceNodesTransport], Any],
    *,
    deadline_s: float | None = None,
    together: bool = True,
    hard_s: float = 60.0,
    flight_dir: Path | None = None,
) -> tuple[list[Outcome], list[SimGpu]]:
    """`body(transport)` of every rank, opening and closing included: outcomes and GPUs, by rank."""
    _forgive_the_dead()
    world = SimWorld(len(layout), any_memory=True)
    store, gpus, outcomes = HashStore(), [SimGpu() for _ in layout], [Outcome() for _ in layout]

    def live(rank: int) -> None:
        outcome, ring = outcomes[rank], None
        try:
            ring = open_on(world, rank, MortalStore(world, rank, store.clone()), layout, gpus[rank], flight_dir)
            if deadline_s is not None:
                inside = ring.inside
                set_deadline(ring.between, deadline_s)
                inside._timeout_s = inside.lane._timeout_s = inside.watch._timeout_s = deadline_s
                inside.group.timeout_s = deadline_s
            if together:  # on a busy machine ranks open seconds apart
                ring.all_gather_bytes(b"")
            outcome.began_s = time.monotonic()
            outcome.result = body(ring)
            ring.close()
        except BaseException as error:
            outcome.error = error
            if ring is not None and not isinstance(error, Died):
                ring.abort(error)
        outcome.ended_s = time.monotonic()

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(len(layout))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + hard_s
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} hang\n{world.report()}"
    assert world.violations == []
    return outcomes, gpus


def lose(ring: DeviceNodesTransport, hangs_up: bool) -> None:
    """This rank is killed, or only stopped: no thread of it does anything any more. Ends the calling one."""
    world, inside = ring.between.gpu._world, ring.inside  # type: ignore[attr-defined]
    inside.watch._stopped.set()
    inside.group._left = True
    inside.group.health._stopped.set()
    inside.group._service.wake()
    time.sleep(0.2)  # its threads have come to their ends
    with world.changed:
        world.dead.add(ring.rank)
        world.changed.notify_all()
    inside._closing.acquire()  # and nothing at the end of this process
    peer_transport._open.discard(inside)
    nccl_transport._open.discard(ring.between)
    nodes._open.discard(ring)
    if hangs_up:
        inside.group._service.close()
    raise Died(f"rank {ring.rank} is lost")

"""Run rings of the real NCCL transport on simulated GPUs, one thread per rank.

Either NCCL connects all ranks, or NCCL connects two nodes and the peer transport connects the ranks of a node.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from ringattn import Ring
from ringattn.errors import RingError
from ringattn.transport.base import Message, Opening, closed_at_exit
from ringattn.transport.location import Location
from ringattn.transport.nccl.binding import Capability
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nccl.transport import NcclTransport
from ringattn.transport.nodes import DeviceNodesTransport
from ringattn.transport.peer.opening import open_peer
from tests.transport.peers.sim_driver import SimGpu
from tests.transport.simulated.device import SimDevice
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import Died, MortalStore, SimWorld

EVERYTHING = frozenset(Capability)


@dataclass
class Outcome:
    """The result of one rank, or the error that it raised, with the start and end times."""

    result: Any = None
    error: BaseException | None = None
    began_s: float = 0.0
    ended_s: float = 0.0


def open_on(
    world: SimWorld,
    rank: int,
    store: Any,
    timeout_s: float = 20.0,
    options: NcclOptions | None = None,
    capabilities: frozenset[Capability] = EVERYTHING,
    flight_dir: Path | None = None,
) -> NcclTransport:
    """Open the transport of one rank."""
    locations = [Location("node", "node", each, 0) for each in range(world.world_size)]
    return NcclTransport.open(
        Opening(store, rank, world.world_size, timeout_s, flight_dir, interface=None, locations=locations),
        binding=SimLibrary(world, rank, capabilities),
        gpu=SimDevice(world, rank),
        options=options or NcclOptions(),
        nccl_id="node",
        leave=lambda why: world.script.check_alive(rank),
    )


def on_gpus(
    world: SimWorld,
    body: Callable[[NcclTransport], Any],
    *,
    hard_s: float = 60.0,
    deadline_s: float | None = None,
    **opening: Any,
) -> list[Outcome]:
    """Open a transport on every rank, run `body(transport)`, close it, and return the outcomes by rank.

    The test fails if a rank takes longer than `hard_s`. `deadline_s` replaces the ring's deadline as soon as a rank is
    open. The opening has a longer deadline, because opening many worlds at once is slow.
    """

    def open_rank(rank: int, store: Any) -> NcclTransport:
        ring = open_on(world, rank, store, **opening)
        if deadline_s is not None:
            ring.opening.timeout_s = deadline_s
        return ring

    return _run(world, open_rank, body, [Outcome() for _ in range(world.world_size)], hard_s)


def _run(
    world: SimWorld,
    open_rank: Callable[[int, Any], Any],
    body: Callable[[Any], Any],
    outcomes: list[Outcome],
    hard_s: float,
) -> list[Outcome]:
    """Run `body(open_rank(rank, store))` on a thread for each rank, close the transports, and fill in `outcomes`."""
    _hide_deaths()
    store = HashStore()

    def run_rank(rank: int) -> None:
        outcome, ring = outcomes[rank], None
        outcome.began_s = time.monotonic()
        try:
            ring = open_rank(rank, MortalStore(world, rank, store.clone()))
            outcome.result = body(ring)
            ring.close()
        except BaseException as error:
            outcome.error = error
            if ring is not None and not isinstance(error, Died):
                ring.abort(error)
        outcome.ended_s = time.monotonic()

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(world.world_size)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + hard_s
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} hang\n{world.report()}"
    return outcomes


def results(outcomes: list[Outcome]) -> list[Any]:
    """Return the results by rank. Raise the first error if any rank failed."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.result for outcome in outcomes]


def on_rings(
    world: SimWorld, body: Callable[[Ring], Any], *, ring: dict[str, Any] | None = None, **opening: Any
) -> list[Outcome]:
    """Run `body(ring)` as `on_gpus` does, with a `Ring` over each transport. `ring`: the options of the `Ring`."""

    def run_ring(transport: NcclTransport) -> Any:
        with Ring(transport=transport, **(ring or {})) as opened:
            return body(opened)

    return on_gpus(world, run_ring, **opening)


def ring_hop(ring: NcclTransport, sent: torch.Tensor, received: torch.Tensor) -> Any:
    """Bind a hop that sends to the next rank and receives from the previous one."""
    after, before = (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size
    return ring.bind([Message(after, sent, "out")], [Message(before, received, "in")])


def ring_error(call: Any) -> str:
    """Return the message of the `RingError` that `call` raises, or an empty string."""
    try:
        call()
    except RingError as error:
        return str(error)
    return ""


def attend(ring: Ring, tokens: int = 24) -> None:
    """Run one causal forward pass over `tokens` tokens."""
    seq = ring.sequence(tokens)
    x = seq.shard(torch.ones(1, tokens, 2, 8))
    ring.attention(x, x, x, seq, causal=True)


def _hide_deaths() -> None:
    """Print no traceback for threads that end with `Died`."""
    if threading.excepthook is not _print_unless_died:
        global _print_traceback
        _print_traceback, threading.excepthook = threading.excepthook, _print_unless_died


_print_traceback = threading.excepthook


def _print_unless_died(args: Any) -> None:
    if not issubclass(args.exc_type, Died):
        _print_traceback(args)


# --- a ring over two nodes -------------------------------------------------------------------------------------------


def node_locations(layout: tuple[int, ...]) -> list[Location]:
    """Return the location of each rank. `layout`: the node of each rank. The ranks of a node share one GPU."""
    return [Location(f"host-{n}", f"boot/{n}", os.getpid(), os.getuid(), f"gpu-{n}") for n in layout]


def open_on_nodes(
    world: SimWorld, rank: int, store: Any, layout: tuple[int, ...], gpu: SimGpu, flight_dir: Path | None = None
) -> DeviceNodesTransport:
    """Open the transport of one rank, with a deadline of 20 s. `layout`: the node of each rank."""
    opening = Opening(
        store, rank, len(layout), 20.0, flight_dir, interface=None, locations=node_locations(layout), name="peer+nccl"
    )
    inside = open_peer(opening, lambda: (gpu.driver, gpu), rounds=1)
    try:
        between = NcclTransport.open(
            opening, binding=SimLibrary(world, rank, EVERYTHING), gpu=SimDevice(world, rank), options=NcclOptions(),
            nccl_id=f"{layout[rank]}", leave=lambda why: world.script.check_alive(rank),
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
    """Open a transport on every rank, run `body(transport)` and close it. Return outcomes and GPUs by rank.

    `layout`: the node of each rank. `deadline_s` replaces the ring's deadline as soon as a rank is open. If `together`,
    no rank runs `body` before all are open.
    """
    world = SimWorld(len(layout), any_memory=True)
    gpus, outcomes = [SimGpu() for _ in layout], [Outcome() for _ in layout]

    def open_rank(rank: int, store: Any) -> DeviceNodesTransport:
        ring = open_on_nodes(world, rank, store, layout, gpus[rank], flight_dir)
        if deadline_s is not None:
            ring.inside.opening.timeout_s = deadline_s
        return ring

    def run_rank(ring: DeviceNodesTransport) -> Any:
        if together:  # on a busy machine, ranks finish opening seconds apart
            ring.all_gather_bytes(b"")
        outcomes[ring.rank].began_s = time.monotonic()
        return body(ring)

    _run(world, open_rank, run_rank, outcomes, hard_s)
    assert world.violations == []
    return outcomes, gpus


def lose_rank(ring: DeviceNodesTransport, killed: bool) -> None:
    """Stop all threads of the calling rank, as if its process were killed or stopped, and raise `Died`."""
    world, inside = ring.between.gpu._world, ring.inside  # type: ignore[attr-defined]
    inside.watch._stopped.set()
    inside.group._left = True
    inside.group.health._stopped.set()
    inside.group._service.wake()
    time.sleep(0.2)  # let its threads end
    with world.changed:
        world.dead.add(ring.rank)
        world.changed.notify_all()
    inside._closing.acquire()  # never released, so that nothing is closed when this process ends
    for transport in (inside, ring.between, ring):
        closed_at_exit.pop(id(transport), None)
    if killed:  # the operating system closes the sockets of a killed process
        inside.group._service.close()
    raise Died(f"rank {ring.rank} is lost")

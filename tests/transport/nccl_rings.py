"""Runs the real NCCL transport, one thread a rank, over the simulated library and GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import HashStore

from ringattn import Ring
from ringattn.transport.location import Location
from ringattn.transport.nccl.binding import Capability
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nccl.transport import NcclTransport
from tests.transport.simulated.device import SimDevice
from tests.transport.simulated.faults import Died, MortalStore
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import SimWorld

EVERYTHING = frozenset(Capability)


@dataclass
class Outcome:
    """What became of one rank: its result, or its error and how long after `Outcome.began_s` it came."""

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
    """The transport of one rank."""
    return NcclTransport.open(
        store,
        rank,
        world.world_size,
        timeout_s,
        binding=SimLibrary(world, rank, capabilities),
        gpu=SimDevice(world, rank),
        options=options or NcclOptions(),
        locations=[Location("node", "node", each, 0) for each in range(world.world_size)],
        nccl_id="node",
        flight_dir=flight_dir,
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
    """`body(transport)` of every rank; its outcome by rank, opening and closing included. Fails when a rank hangs.

    `deadline_s` replaces the deadline once all are open, for opening many worlds at once takes its time.
    """
    _forgive_the_dead()
    store = HashStore()
    outcomes = [Outcome() for _ in range(world.world_size)]

    def live(rank: int) -> None:
        outcome = outcomes[rank]
        outcome.began_s = time.monotonic()
        ring = None
        try:
            ring = open_on(world, rank, MortalStore(world, rank, store.clone()), **opening)
            if deadline_s is not None:
                set_deadline(ring, deadline_s)
            outcome.result = body(ring)
            ring.close()
        except BaseException as error:
            outcome.error = error
            if ring is not None and not isinstance(error, Died):
                ring.abort(error)
        outcome.ended_s = time.monotonic()

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(world.world_size)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + hard_s
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} hang\n{world.report()}"
    return outcomes


def set_deadline(ring: NcclTransport, deadline_s: float) -> None:
    """Replace the deadline of a ring that is open."""
    ring._timeout_s = ring.supervisor._timeout_s = ring._all_gather._timeout_s = deadline_s
    ring.communicator._timeout_s = deadline_s


def results(outcomes: list[Outcome]) -> list[Any]:
    """The results by rank; raises the first error."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.result for outcome in outcomes]


def on_rings(
    world: SimWorld, body: Callable[[Ring], Any], *, ring: dict[str, Any] | None = None, **opening: Any
) -> list[Outcome]:
    """Like `on_gpus`, with a `Ring` over each transport; `ring` are its options."""

    def inside(transport: NcclTransport) -> Any:
        with Ring(transport=transport, **(ring or {})) as made:
            return body(made)

    return on_gpus(world, inside, **opening)


def _forgive_the_dead() -> None:
    """A dead rank's other threads end with it, without a word."""
    if threading.excepthook is not _quiet:
        global _told
        _told, threading.excepthook = threading.excepthook, _quiet


_told = threading.excepthook


def _quiet(args: Any) -> None:
    if not issubclass(args.exc_type, Died):
        _told(args)

"""The NCCL transport over simulated GPUs: the contract of all transports, and exact attention.

What this proves: the real transport, communicator, supervisor and bootstrap obey NCCL's rules as the simulator knows
them. What it does not: that NCCL has no others.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from ringattn import Ring
from ringattn.errors import RingError
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nccl.transport import NcclTransport
from tests.contract.transport_contract import (
    ONE_AFTER_ANOTHER,
    WORLD_SIZE,
    Check,
    bad_messages_are_refused,
    timeout_s,
)
from tests.transport.nccl_rings import on_gpus, on_rings, results
from tests.transport.simulated.world import SimWorld
from tests.transport.test_nccl_life import around, failure

# How late the device moves bytes matters to checks of bytes; those of failures take seconds each.
BYTES = ONE_AFTER_ANOTHER[: ONE_AFTER_ANOTHER.index(bad_messages_are_refused)]


@pytest.mark.parametrize(
    ("check", "lazy"),
    [*((check, False) for check in ONE_AFTER_ANOTHER), *((check, True) for check in BYTES)],
    ids=lambda value: value.__name__ if callable(value) else "lazy" if value else "eager",
)
def test_contract(check: Check, lazy: bool) -> None:
    world = SimWorld(WORLD_SIZE, lazy=lazy, any_memory=True, limit_s=8.0)
    results(on_gpus(world, check, timeout_s=timeout_s(check), options=NcclOptions(register=False)))
    assert world.violations == []


# --- CUDA graphs -----------------------------------------------------------------------------------------------------


def test_a_captured_pass_is_replayed() -> None:
    world = SimWorld(3)

    def body(ring: NcclTransport) -> None:
        slots = ring.allocate(3 * 512).view(3, 512)
        hops = [around(ring, slots[0], slots[1]), around(ring, slots[1], slots[2])]
        with world.capture(ring.rank) as graph:
            for hop in hops:
                hop.start().wait()
            with pytest.raises(RingError, match="run it, then capture it"):
                ring.allocate(64)
        for value in (3, 5):
            slots[0].fill_(10 * value + ring.rank)
            ring.replay(graph.replay)
            ring.drain()
            assert bool((slots[2] == 10 * value + (ring.rank - 2) % 3).all())
        time.sleep(0.3)  # the supervisor looks meanwhile, and asks no captured event
        graph.reset()

    results(on_gpus(world, body))
    assert world.violations == []


def test_a_replay_has_a_deadline() -> None:
    world = SimWorld(3)

    def body(ring: NcclTransport) -> str:
        slots = ring.allocate(1024).view(2, 512)
        hop = around(ring, slots[0], slots[1])
        compute = ring.gpu.new_stream()  # one that does not hold the host
        ring.gpu.current_stream = lambda: compute  # type: ignore[method-assign]
        with world.capture(ring.rank) as graph:
            hop.start().wait()
        if ring.rank == 1:
            time.sleep(2.0)
        else:
            ring.replay(graph.replay)
        said = failure(ring.drain)
        graph.reset()
        return said

    said = results(on_gpus(world, body, timeout_s=1.0))
    assert all("a replayed pass" in message and "rank 1 is alive in" in message for message in (said[0], said[2]))


def test_rings_replay_together() -> None:
    world = SimWorld(2)

    def body(ring: Ring) -> int:
        runs = []
        for _ in range(3):
            ring.replay(SimpleNamespace(replay=lambda: runs.append(1)))
        ring.synchronize()
        return len(runs)

    assert results(on_rings(world, body)) == [3, 3]

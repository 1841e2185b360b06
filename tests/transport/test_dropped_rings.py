"""Rings that are dropped without a close leave no descriptor, no thread and no mapping."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from ringattn import Ring
from ringattn.transport.base import Opening, Transport
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.location import Location
from ringattn.transport.nodes import open_shm_and_gloo
from ringattn.transport.shared.transport import ShmTransport
from tests.contract.meeting import rendezvous_store
from tests.contract.processes import Processes
from tests.transport.test_shared import descriptors, mappings

RINGS = 15
SETTLE_S = 20.0


def opened(rank: int, world_size: int, name: str) -> Transport:
    store = rendezvous_store(rank, world_size, 60.0)
    if name == "gloo":
        return GlooTransport.open(Opening(store, rank, world_size, 60.0))
    if name == "shm":
        return ShmTransport.open(Opening(store, rank, world_size, 60.0))
    nodes = [Location(f"host-{node}", f"boot/{node}", 1, 1) for node in (0, 0, 1)]
    return open_shm_and_gloo(Opening(store, rank, 3, 60.0, locations=nodes))


def counted() -> tuple[int, int, int]:
    """Descriptors, threads and mappings of this process."""
    gc.collect()  # transports are cycles
    return len(descriptors()), threading.active_count(), mappings()


def drops(rank: int, world_size: int, name: str) -> list[tuple[int, int, int]]:
    """`counted` after the first rings and after all, when it is no more than it was or `SETTLE_S` have passed."""
    rounds: list[tuple[int, int, int]] = []
    for _ in range(2):
        for _ in range(RINGS):
            ring = Ring(transport=opened(rank, world_size, name), timeout_s=60.0)
            seq = ring.sequence(24)
            q = torch.ones(1, 8, 1, 4, requires_grad=True)
            ring.attention(q, q, q, seq, causal=True).sum().backward()
            del ring, seq, q
        until = time.monotonic() + (SETTLE_S if rounds else 1.0)
        counts = counted()
        while time.monotonic() < until and not (rounds and within(counts, rounds[0])):
            time.sleep(0.05)
            counts = counted()
        rounds.append(counts)
    return rounds


def within(counts: tuple[int, ...], limits: tuple[int, ...]) -> bool:
    return all(count <= limit for count, limit in zip(counts, limits, strict=True))


@pytest.mark.parametrize(
    "name", ["shm", pytest.param("gloo", marks=pytest.mark.slow), pytest.param("shm+gloo", marks=pytest.mark.slow)]
)
def test_dropped_rings_leave_nothing(name: str) -> None:
    with Processes(3) as processes:
        for first, last in processes.run(drops, name, hard_s=120.0).values():
            assert within(last, first), (first, last)
            assert within(first, (80, 12, 12)), first

"""The contract over shared memory, and what only it can suffer: ranks killed and stopped, ends that differ, forks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from ringattn.transport.control_store import rendezvous_store
from ringattn.transport.shm.transport import ShmTransport
from tests.contract import transport_contract as contract
from tests.contract.processes import Processes


def meet(rank: int, world_size: int, members: list[int], timeout_s: float) -> ShmTransport:
    """A ring of the processes `members`, opened when all of them are there, with waits of `timeout_s`."""
    store = rendezvous_store(rank, world_size, 60.0)
    store.set(f"ready/{rank}", "1")
    store.wait([f"ready/{other}" for other in members], timedelta(seconds=60.0))
    ring = ShmTransport.open(store, members.index(rank), len(members), 20.0)
    ring._group.timeout_s = timeout_s  # shorter than a busy machine may need to connect
    return ring


def run_check(rank: int, world_size: int, name: str) -> None:
    check = getattr(contract, name)
    ring = meet(rank, world_size, list(range(world_size)), contract.timeout_s(check))
    try:
        check(ring)
    finally:
        ring.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(contract.WORLD_SIZE) as started:
        yield started


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(processes: Processes, check: contract.Check) -> None:
    processes.run(run_check, check.__name__)

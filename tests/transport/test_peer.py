"""The peer transport in real processes over simulated GPUs: the contract of all transports, and exact bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract import transport_contract as contract
from tests.contract.processes import Processes
from tests.transport.peers.rings import meet


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(contract.WORLD_SIZE) as started:
        yield started


def run_check(rank: int, world_size: int, name: str) -> None:
    check = getattr(contract, name)
    ring = meet(rank, world_size, contract.timeout_s(check))
    try:
        check(ring)
    finally:
        ring.close()


@pytest.mark.parametrize("check", contract.ONE_AFTER_ANOTHER, ids=lambda check: check.__name__)
def test_contract(processes: Processes, check: contract.Check) -> None:
    processes.run(run_check, check.__name__)

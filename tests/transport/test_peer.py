"""The peer transport in real processes over simulated GPUs: the contract of all transports, and exact bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.launch.measure.check import CheckConfig, check_rank, paired_cases
from ringattn.schedule.routes import ROUTES
from tests.contract import transport_contract as contract
from tests.contract.processes import Processes
from tests.test_exact_nccl import EXACT, TRIALS
from tests.transport.peers.rings import meet
from tests.trial import greatest_error, joined, on_rank, reference


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


# --- attention -------------------------------------------------------------------------------------------------------


def attend(rank: int, world_size: int, name: str) -> list[Any]:
    trial, layout = TRIALS[name]
    with Ring(transport=meet(rank, world_size), engine="plain", timeout_s=30.0, poison=True) as ring:
        return [on_rank(ring, trial, layout, schedule, torch.float64) for schedule in ROUTES]


# In a node of several, beside NCCL, it is in test_nodes_gpus.py.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_attention_is_exact(processes: Processes, name: str) -> None:
    found = processes.run(attend, name)
    for schedule, parts in zip(ROUTES, zip(*(found[rank] for rank in sorted(found)), strict=True), strict=True):
        error = greatest_error(joined(list(parts)), reference(TRIALS[name][0], torch.float64))
        assert error <= EXACT, schedule


def check_all_pairs(rank: int, world_size: int, spec: dict[str, Any]) -> dict[str, Any]:
    with Ring(transport=meet(rank, world_size), engine="plain", timeout_s=30.0, poison=True) as ring:
        return check_rank(ring, spec)


@pytest.mark.slow
def test_every_pair_of_mask_layout_and_schedule_is_exact(processes: Processes) -> None:
    spec = vars(CheckConfig(dtype="fp64", engine="plain", tokens=61, combinations="pairs"))
    assert (
        list(processes.run(check_all_pairs, spec, hard_s=240.0).values())
        == [{"cases": len(list(paired_cases())), "failed": 0}] * contract.WORLD_SIZE
    )

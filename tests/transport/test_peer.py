"""The peer transport in real processes over simulated GPUs: bytes, memory, failures, lost ranks, exact attention."""

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
from tests.transport.peers import ranks
from tests.transport.peers.rings import meet
from tests.trial import greatest_error, joined, on_rank, reference

NOTHING = {"handles": 0, "mappings": 0, "registered": 0}


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as started:
        yield started


@pytest.mark.parametrize("switches", [{}, {"one_queue": True, "async_engines": 1}], ids=["streams", "one queue"])
def test_every_byte_arrives(two: Processes, switches: dict[str, object]) -> None:
    for whole in two.run(ranks.sizes, [1, 3, 8, 255, 4096, 65_537, 1 << 20], switches).values():
        assert len(whole) == 7 * 2 * len(ranks.OFFSETS) and all(whole)


@pytest.mark.slow
def test_every_byte_of_a_long_message_arrives(two: Processes) -> None:
    for whole in two.run(ranks.sizes, [64 << 20], {}).values():
        assert len(whole) == 2 * len(ranks.OFFSETS) and all(whole)


def test_nothing_is_left_however_often_a_ring_opens(two: Processes) -> None:
    for left, descriptors, mappings in two.run(ranks.again_and_again, 8).values():
        assert left == [NOTHING] * 8
        # Connections of one opening may be closed during the next; one kept at each opening would be seven more.
        assert descriptors[-1] <= min(descriptors) + 2, descriptors
        assert len(set(mappings)) == 1, mappings


def test_a_receiver_may_be_far_ahead(two: Processes) -> None:
    assert two.run(ranks.ahead, 200) == {0: [True] * 200, 1: [True] * 200}


def test_memory_grows_in_mid_run(two: Processes) -> None:
    for found in two.run(ranks.growing).values():
        assert all(found["whole"])
        assert found["left"] == NOTHING
        assert found["mapped"] <= 4, "memory that its owner has freed stays mapped"


def test_memory_that_runs_out_is_named_and_the_ring_goes_on(two: Processes) -> None:
    for rank, said in two.run(ranks.out_of_memory).items():
        assert said.startswith(f"1 rank {rank}: no {1 << 30} bytes") and "CUDA_ERROR_OUT_OF_MEMORY" in said


def test_memory_stays_while_it_is_viewed_after_an_abort(two: Processes) -> None:
    for viewed, gone in two.run(ranks.kept_by_the_caller).values():
        assert viewed == {"handles": 1, "mappings": 1, "registered": 0}
        assert gone == NOTHING


@pytest.mark.parametrize("what", ["bytes", "label", "rank"])
def test_unlike_ends_are_a_disagreement_on_both_ranks(two: Processes, what: str) -> None:
    for said in two.run(ranks.unlike_ends, what).values():
        assert said.startswith("DisagreementError")
        assert ("k to rank 2" if what == "rank" else "k to rank 1") in said
        assert {"bytes": "16 bytes", "label": "v from rank 0", "rank": "k from rank 0"}[what] in said


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_spoiled_result_is_never_called_good(two: Processes) -> None:
    found = two.run(ranks.spoiled)[1]
    assert 2 in found["seen"], "the stray copy did not run, so nothing was tested"
    assert found["said"].startswith("PeerLostError")
    assert "rank 0 failed first: ValueError: rank 0 gives up" in found["said"]


def test_an_abort_paints_until_its_stream_is_empty(two: Processes) -> None:
    assert two.run(ranks.overwritten)[0] == {"ended": True, "drained": True}


@pytest.mark.slow
def test_a_caller_does_not_wait_for_what_the_device_computes(two: Processes) -> None:
    for found in two.run(ranks.busy).values():
        assert found["told_s"] < 1.5 < found["ended_s"]
        assert found["registered"] == 0


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(contract.WORLD_SIZE) as started:
        yield started


# --- attention -------------------------------------------------------------------------------------------------------


def attend(rank: int, world_size: int, name: str) -> list[Any]:
    trial, layout = TRIALS[name]
    with Ring(transport=meet(rank, world_size), engine="plain", timeout_s=30.0, poison=True) as ring:
        return [on_rank(ring, trial, layout, schedule, torch.float64) for schedule in ROUTES]


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

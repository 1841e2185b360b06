"""The peer transport's bytes and memory, and what a failure may do to them, in real processes over simulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.processes import Processes
from tests.transport.peers import ranks

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


@pytest.mark.parametrize("what", ["bytes", "label"])
def test_unlike_ends_are_a_disagreement_on_both_ranks(two: Processes, what: str) -> None:
    for said in two.run(ranks.unlike_ends, what).values():
        assert said.startswith("DisagreementError")
        assert "k to rank 1" in said
        assert ("16 bytes" if what == "bytes" else "v from rank 0") in said


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_spoiled_result_is_never_called_good(two: Processes) -> None:
    found = two.run(ranks.spoiled)[1]
    assert 2 in found["seen"], "the stray copy did not run, so nothing was tested"
    assert found["said"].startswith("PeerLostError")
    assert "rank 0 failed first: ValueError: rank 0 gives up" in found["said"]


def test_an_abort_paints_until_its_stream_is_empty(two: Processes) -> None:
    assert two.run(ranks.overwritten)[0] == {"ended": True, "drained": True}

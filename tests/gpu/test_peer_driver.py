"""The peer transport's assumptions about the CUDA driver hold between two processes on a single GPU.

The checks cover symbols and attributes, a flag that becomes visible after its bytes, a wait that the host releases, a
killed peer, and data that a failing rank overwrites. The rehearsal runs the same checks on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.processes import Processes
from tests.gpu import peer_driver
from tests.gpu.kept import keep

FILE = "peer_driver"


def numbers_are_known(two: Processes, kind: str) -> dict[str, Any]:
    attributes = two.run(peer_driver.numbers, kind)[0]
    assert attributes["version"] >= 12000 and not attributes["partition"] and attributes["granularity"] >= 1 << 16
    assert attributes["STREAM_MEMORY_OPERATIONS_64"] == attributes["VIRTUAL_MEMORY"] == attributes["POSIX_HANDLES"] == 1
    return attributes


def bytes_come_before_their_flag(two: Processes, kind: str, rounds: int) -> int:
    assert two.run(peer_driver.ordering, kind, rounds, hard_s=150.0) == {0: rounds, 1: rounds}
    return rounds


def a_message_goes_there_and_back(two: Processes, kind: str, count: int) -> float:
    return max(two.run(peer_driver.ping_pong, kind, count, hard_s=120.0).values())


def a_store_of_the_host_releases_a_wait(two: Processes, kind: str, one_queue: bool) -> float:
    outcomes = two.run(peer_driver.released, kind, one_queue)
    assert outcomes[0]["blocked"], "nothing was blocked, so nothing was released"
    assert outcomes[0]["drained"] and outcomes[0]["sum"] == outcomes[1]["sum"] == 1000.0
    assert outcomes[0]["abort_s"] < 5.0
    return outcomes[0]["abort_s"]


def a_killed_peer_leaves_the_device_whole(two: Processes, kind: str) -> float:
    outcome = two.run(peer_driver.killed, kind, exits=1)[0]
    assert outcome["said"].startswith("PeerLostError") and "rank 1 is gone" in outcome["said"], outcome
    assert outcome["sum"] == 1000.0 and outcome["lost_bytes"] == 0, outcome
    return outcome["after_s"]


def a_spoiled_result_is_not_called_good(two: Processes, kind: str) -> None:
    outcome = two.run(peer_driver.spoiled, kind)[1]
    assert 2 in outcome["seen"], "the stray copy did not run, so nothing was tested"
    assert outcome["said"].startswith("PeerLostError") and "rank 0 gives up" in outcome["said"], outcome


@pytest.fixture
def two() -> Iterator[Processes]:
    """Start new processes for each test, so that a fault that breaks a CUDA context does not affect the next test."""
    with Processes(2) as started:
        yield started


# --- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_numbers_are_known(two: Processes) -> None:
    keep(FILE, "what the device answers", numbers_are_known(two, "cuda"))


@pytest.mark.gpu
def test_a_message_goes_there_and_back(two: Processes) -> None:
    keep(FILE, "8 bytes there and back, us", a_message_goes_there_and_back(two, "cuda", 1000))


@pytest.mark.gpu
@pytest.mark.parametrize("one_queue", [False, True], ids=["32 queues", "one queue"])
def test_a_store_of_the_host_releases_a_wait(one_queue: bool) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if one_queue else "32"
    try:
        with Processes(2) as two:
            took_s = a_store_of_the_host_releases_a_wait(two, "cuda", one_queue)
    finally:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    keep(FILE, f"abort with a blocked wait, {'one queue' if one_queue else '32 queues'}, s", took_s)


@pytest.mark.gpu
def test_a_killed_peer_leaves_the_device_whole(two: Processes) -> None:
    keep(FILE, "kill -9 with copies under way: s to the error", a_killed_peer_leaves_the_device_whole(two, "cuda"))


@pytest.mark.gpu
def test_a_spoiled_result_is_not_called_good(two: Processes) -> None:
    a_spoiled_result_is_not_called_good(two, "cuda")
    keep(FILE, "a stray copy is found by drain", True)


@pytest.mark.gpu
def test_bytes_come_before_their_flag(two: Processes) -> None:
    """In many rounds of the self-test, no flag is visible before its bytes.

    This test is the last, because it is the longest: on a shared GPU each round takes several time slices.
    """
    keep(FILE, "rounds of 1 MiB without a difference", bytes_come_before_their_flag(two, "cuda", 2000))


# --- rehearsed -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rehearsal(two: Processes) -> None:
    numbers_are_known(two, "simulated")
    bytes_come_before_their_flag(two, "simulated", 4)
    assert 0 < a_message_goes_there_and_back(two, "simulated", 20) < 1e6
    for one_queue in (False, True):
        a_store_of_the_host_releases_a_wait(two, "simulated", one_queue)
    a_spoiled_result_is_not_called_good(two, "simulated")
    a_killed_peer_leaves_the_device_whole(two, "simulated")

"""What the peer transport takes for granted of CUDA's driver, between two processes on one GPU.

In the order in which a failure would end it: symbols and numbers, a flag behind its bytes, a wait that the host
releases, a peer that is killed, a result that a failing rank spoils. The rehearsals run the same on CPU.
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
    found = two.run(peer_driver.numbers, kind)[0]
    assert found["version"] >= 12000 and not found["partition"] and found["granularity"] >= 1 << 16
    assert found["STREAM_MEMORY_OPERATIONS_64"] == found["VIRTUAL_MEMORY"] == found["POSIX_HANDLES"] == 1
    return found


def bytes_come_before_their_flag(two: Processes, kind: str, rounds: int) -> int:
    assert two.run(peer_driver.ordering, kind, rounds, hard_s=150.0) == {0: rounds, 1: rounds}
    return rounds


def a_message_goes_there_and_back(two: Processes, kind: str, count: int) -> float:
    return max(two.run(peer_driver.ping_pong, kind, count, hard_s=120.0).values())


def a_store_of_the_host_releases_a_wait(two: Processes, kind: str, one_queue: bool) -> float:
    found = two.run(peer_driver.released, kind, one_queue)
    assert found[0]["blocked"], "nothing was blocked, so nothing was released"
    assert found[0]["drained"] and found[0]["sum"] == found[1]["sum"] == 1000.0
    assert found[0]["abort_s"] < 5.0
    return found[0]["abort_s"]


def a_killed_peer_leaves_the_device_whole(two: Processes, kind: str) -> float:
    found = two.run(peer_driver.killed, kind, exits=1)[0]
    assert found["said"].startswith("PeerLostError") and "rank 1 is gone" in found["said"], found
    assert found["sum"] == 1000.0 and found["lost_bytes"] == 0, found
    return found["after_s"]


def a_spoiled_result_is_not_called_good(two: Processes, kind: str) -> None:
    found = two.run(peer_driver.spoiled, kind)[1]
    assert 2 in found["seen"], "the stray copy did not run, so nothing was tested"
    assert found["said"].startswith("PeerLostError") and "rank 0 gives up" in found["said"], found


@pytest.fixture
def two() -> Iterator[Processes]:
    """Fresh ones for each test: a fault that breaks a context ends with its processes."""
    with Processes(2) as started:
        yield started


# --- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_numbers_are_known(two: Processes) -> None:
    keep(FILE, "what the device answers", numbers_are_known(two, "cuda"))


@pytest.mark.gpu
def test_bytes_come_before_their_flag(two: Processes) -> None:
    keep(FILE, "rounds of 1 MiB without a difference", bytes_come_before_their_flag(two, "cuda", 20_000))


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

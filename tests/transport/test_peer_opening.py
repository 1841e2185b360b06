"""Where the peer transport is refused: by the same words on all ranks, which name the rank and the step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.errors import RingError
from ringattn.planner.cluster import LinkClass
from ringattn.transport.base import Message
from ringattn.transport.location import Location
from ringattn.transport.peer.driver import Attribute, DriverError
from ringattn.transport.peer.opening import Facts, refusal, warnings_of
from ringattn.transport.rendezvous import open_transport
from tests.contract.processes import Processes
from tests.transport.peers.rings import meet
from tests.transport.peers.sim_driver import SimGpu

GOOD = Facts(version=13000)
HERE = Location("a", "boot/1", 1, 1000, "one")


def over(link: LinkClass) -> Location:
    return replace(HERE, gpu="two", links=(("one", link),))


@pytest.mark.parametrize(
    ("facts", "place", "words"),
    [
        (GOOD, HERE, None),
        (GOOD, over(LinkClass.NVLINK), None),
        (Facts("no CUDA driver"), HERE, "rank 1: no CUDA driver"),
        (GOOD, replace(HERE, machine="boot/2", host="b"), "no two ranks share a machine"),
        (GOOD, replace(HERE, machine=None), "rank 1 cannot tell which machine it is on (a)"),
        (GOOD, replace(HERE, uid=1001), "different users, 1000 and 1001"),
        (replace(GOOD, version=11080), HERE, "rank 1: the CUDA driver is of version 11.8, and 12.0 is needed"),
        (replace(GOOD, partition=True), HERE, "rank 1 has an instance of a partitioned GPU"),
        (replace(GOOD, lacks=("stream memory",)), HERE, "rank 1: the GPU lacks stream memory"),
        (GOOD, over(LinkClass.PCIE), "ranks 0 and 1 are joined by PCIe"),
        (GOOD, over(LinkClass.UNKNOWN), "ranks 0 and 1 are joined by unknown"),
    ],
)
def test_ranks_that_copy_engines_cannot_join(facts: Facts, place: Location, words: str | None) -> None:
    why = refusal([GOOD, facts], [HERE, place])
    assert why is None if words is None else why is not None and words in why


def test_what_costs_time_is_a_warning() -> None:
    assert warnings_of({}, SimGpu().driver) == []
    assert warnings_of({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, SimGpu().driver) == []
    (slow,) = warnings_of({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, SimGpu().driver)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in slow
    (shared,) = warnings_of({}, SimGpu(attributes={Attribute.MULTI_PROCESS_SERVER: 1}).driver)
    assert "MPS" in shared


def test_links_matter_inside_a_node_only() -> None:
    # Two nodes of two: no link is known between them, and none is needed.
    places = [replace(HERE, machine=f"boot/{node}", gpu=f"gpu-{node}") for node in (1, 1, 2, 2)]
    assert refusal([GOOD] * 4, places) is None
    places[3] = replace(places[3], gpu="another", links=(("gpu-2", LinkClass.PCIE),))
    assert "ranks 2 and 3 are joined by PCIe" in (refusal([GOOD] * 4, places) or "")


# --- in processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as started:
        yield started


def told(rank: int, world_size: int, fault: str) -> dict[str, Any]:
    """What opening raises where rank 1 has a fault."""
    gpu = SimGpu(attributes={Attribute.STREAM_MEMORY_OPERATIONS_64: 0} if rank and fault == "memops" else None)
    driver: Any = gpu.driver

    def fails(*arguments: Any) -> Any:
        raise DriverError(f"cu{fault}", 101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal")

    if rank and fault in ("adopt", "register"):
        setattr(driver, fault, fails)
    if rank and fault == "bytes":
        copy = driver.copy
        driver.copy = lambda dst, src, nbytes, stream: copy(dst, src, nbytes - 1, stream)
    try:
        ring = meet(rank, world_size, gpu=gpu)
    except RingError as error:
        return {"kind": type(error).__name__, "words": str(error), "left": driver.leftovers()["registered"]}
    ring.close()
    return {"kind": "", "words": "", "left": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("memops", "rank 1: the GPU lacks stream memory operations on 64-bit words"),
        ("register", "rank 1: registering the shared pages: curegister: CUDA_ERROR_INVALID_DEVICE (101)"),
        ("adopt", "rank 1: the memory of rank 0: cuadopt: CUDA_ERROR_INVALID_DEVICE (101)"),
        ("bytes", "rank 0: patterns of the self-test arrived with differences"),
    ],
)
def test_all_ranks_refuse_alike(two: Processes, fault: str, words: str) -> None:
    found = two.run(told, fault)
    assert found[0]["words"] == found[1]["words"]
    for answer in found.values():
        assert answer["kind"] == "UnsupportedError"
        assert words in answer["words"] and answer["words"].endswith("transport='nccl' does without")


def by_name(rank: int, world_size: int) -> str:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        open_transport(None, "peer", 20.0)
    except RingError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


@pytest.mark.slow
def test_processes_without_a_gpu_are_refused_by_name(two: Processes) -> None:
    answers = two.run(by_name)
    assert answers[0] == answers[1]
    assert (
        "UnsupportedError: transport='peer' cannot join these ranks: rank 0: torch finds no CUDA device" in answers[0]
    )


def captured(rank: int, world_size: int) -> list[str]:
    gpu = SimGpu()
    ring = meet(rank, world_size, gpu=gpu)
    hop = ring.bind(*_pair(ring))
    said = []
    gpu.capturing = True
    pair = _pair(ring)
    for call in (hop.start, lambda: ring.exchange(*pair), lambda: ring.allocate(8), lambda: ring.replay(lambda: None)):
        try:
            call()
        except RingError as error:
            said.append(f"{type(error).__name__}: {error}")
    gpu.capturing = False
    ring.exchange(*pair).wait()  # nothing of the refused exchanges is under way
    hop.start().wait()
    ring.close()
    return said


def _pair(ring: Any) -> Any:
    peer, buffers = 1 - ring.rank, torch.zeros(2, 8)
    return [Message(peer, buffers[0], "k")], [Message(peer, buffers[1], "k")]


@pytest.mark.slow
def test_graphs_are_refused(two: Processes) -> None:
    for said in two.run(captured).values():
        assert len(said) == 4
        assert all("cannot be captured" in words and "transport='nccl'" in words for words in said)

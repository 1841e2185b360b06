"""Hops of the real NCCL library on one GPU: a communicator with one rank, which sends to itself.

`tests/gpu/test_rehearsal.py` runs the same functions over the simulated library on the CPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ringattn.launch.doctor.network import network_facts
from ringattn.planner.cluster import LinkClass
from ringattn.transport import location as nvml
from ringattn.transport.base import Opening
from ringattn.transport.deadline import Deadline, wait_until
from ringattn.transport.device import CudaDevice
from ringattn.transport.location import my_location
from ringattn.transport.nccl.binding import Binding, Capability, CommConfig
from ringattn.transport.nccl.communicator import Communicator, PeerCall
from ringattn.transport.nccl.options import BINDINGS, NcclOptions, open_binding
from tests.gpu.kept import keep

pytestmark = pytest.mark.gpu

SIZES = (4 << 10, 64 << 10, 8 << 20, 80 << 20)


def nothing() -> None:
    """Do nothing. Communicators call this while they wait; a real watch raises if the ring has failed."""


@pytest.fixture(params=BINDINGS)
def binding(request: pytest.FixtureRequest) -> Binding:
    if request.param == "cupy":
        pytest.importorskip("cupy", reason="cupy is not installed")
    return open_binding(NcclOptions(binding=request.param))


@pytest.fixture
def gpu() -> CudaDevice:
    torch.cuda.set_device(0)
    return CudaDevice(0)


@pytest.fixture
def lane(binding: Binding, gpu: CudaDevice) -> Iterator[Communicator]:
    communicator = Communicator(Opening(HashStore(), 0, 1, 60.0), binding, gpu, CommConfig())
    communicator.open(binding.unique_id(), nothing)
    yield communicator
    communicator.close(Deadline(10.0))


def arrived(gpu: CudaDevice, stream: Any) -> bool:
    event = gpu.new_event()
    event.record(stream)
    return wait_until(event.query, Deadline(30.0))


def hop(lane: Communicator, gpu: CudaDevice, stream: Any, calls: list[PeerCall]) -> None:
    """Launch a group on `stream` after the work of the current stream, which then waits for the group."""
    ready, done = gpu.new_event(), gpu.new_event()
    ready.record(gpu.current_stream())
    stream.wait_event(ready)
    lane.launch(calls, stream.cuda_stream, nothing)
    done.record(stream)
    gpu.current_stream().wait_event(done)


# --- functions that are rehearsed on the CPU -------------------------------------------------------------------------


def bytes_of_every_size(lane: Communicator, gpu: CudaDevice, sizes: tuple[int, ...] = SIZES) -> None:
    """Check that messages of each size arrive whole and in order, three in a group."""
    stream = gpu.new_stream()
    for nbytes in sizes:
        sent = [gpu.empty(nbytes).fill_(n + 1) for n in range(3)]
        received = [gpu.empty(nbytes).zero_() for _ in range(3)]
        pairs = zip(sent, received, strict=True)
        calls = [
            call
            for out, into in pairs
            for call in (PeerCall(True, out.data_ptr(), nbytes, 0), PeerCall(False, into.data_ptr(), nbytes, 0))
        ]
        hop(lane, gpu, stream, calls)
        assert arrived(gpu, stream)
        assert [bool((buffer == n + 1).all()) for n, buffer in enumerate(received)] == [True] * 3, nbytes


# --- on the GPU ------------------------------------------------------------------------------------------------------


def test_messages_of_every_size_arrive(lane: Communicator, gpu: CudaDevice, binding: Binding) -> None:
    bytes_of_every_size(lane, gpu)
    keep("nccl_loopback", f"bytes of every size, {binding.name}", list(SIZES))


@pytest.mark.parametrize("blocking", [False, True], ids=["nonblocking", "blocking"])
def test_cost_of_a_hop_on_the_host(blocking: bool, binding: Binding, gpu: CudaDevice) -> None:
    """Record how long the host takes for a group of a send and a receive, including the events before and after it."""
    if not blocking and Capability.NONBLOCKING not in binding.capabilities:
        pytest.skip(f"{binding.name} has no non-blocking communicators")
    lane = Communicator(Opening(HashStore(), 0, 1, 60.0), binding, gpu, CommConfig(blocking=blocking))
    lane.open(binding.unique_id(), nothing)
    stream, buffers = gpu.new_stream(), [gpu.empty(1 << 20) for _ in range(2)]
    calls = [
        PeerCall(sends, buffer.data_ptr(), 1 << 20, 0) for sends, buffer in zip((False, True), buffers, strict=True)
    ]
    took_us = []
    for n in range(220):
        start = time.perf_counter()
        hop(lane, gpu, stream, calls)
        if n >= 20:
            took_us.append((time.perf_counter() - start) * 1e6)
    assert arrived(gpu, stream)
    lane.close(Deadline(10.0))
    keep("nccl_loopback", f"host cost of a hop, {binding.name}, {'' if blocking else 'non-'}blocking, us",
         {"median": round(median(took_us), 1), "least": round(min(took_us), 1)})  # fmt: skip


@pytest.mark.parametrize("blocking", [False, True], ids=["nonblocking", "blocking"])
def test_a_hop_is_captured_and_replayed(blocking: bool, gpu: CudaDevice) -> None:
    binding = open_binding(NcclOptions())
    lane = Communicator(Opening(HashStore(), 0, 1, 60.0), binding, gpu, CommConfig(blocking=blocking))
    lane.open(binding.unique_id(), nothing)
    sent, received = gpu.empty(1 << 16), gpu.empty(1 << 16)
    calls = [PeerCall(True, sent.data_ptr(), 1 << 16, 0), PeerCall(False, received.data_ptr(), 1 << 16, 0)]
    stream = gpu.new_stream()

    hop(lane, gpu, stream, calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        hop(lane, gpu, stream, calls)
    for value in (3, 5, 7):
        sent.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((received == value).all())
    del graph
    lane.close(Deadline(10.0))
    keep("nccl_loopback", f"captured and replayed, {'' if blocking else 'non-'}blocking", "exact in 3 replays")


def test_the_location_of_this_gpu() -> None:
    gpu_location, driver = my_location(0), ctypes.CDLL(nvml.LIBRARY)
    assert driver.nvmlInit_v2() == 0
    gpus = set(nvml._handles(driver))
    driver.nvmlShutdown()
    assert gpu_location.gpu in gpus, "torch and the driver spell a GPU's UUID alike"
    assert {uuid for uuid, _ in gpu_location.links} == gpus - {gpu_location.gpu}
    assert all(kind in (LinkClass.NVLINK, LinkClass.PCIE) for _, kind in gpu_location.links)
    assert gpu_location.bus is not None and gpu_location.bus in network_facts().gpus, (
        "torch and /sys spell its bus id alike"
    )

"""The NCCL transport over simulated GPUs: the contract of all transports, and exact attention.

The tests show that the real transport, communicator, supervisor and bootstrap obey those rules of NCCL that the
simulator checks. NCCL may have other rules.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.engine.plain import PlainEngine
from ringattn.errors import RingError
from ringattn.transport.device import CudaDevice
from ringattn.transport.nccl.transport import NcclTransport
from tests.transport.nccl_rings import attend, on_gpus, on_rings, results, ring_error, ring_hop
from tests.transport.simulated.device import SimDevice, span
from tests.transport.simulated.races import find_races
from tests.transport.simulated.streams import Touch
from tests.transport.simulated.world import SimWorld
from tests.transport.test_nccl_races import Touching

# --- CUDA graphs -----------------------------------------------------------------------------------------------------


def test_a_captured_pass_is_replayed() -> None:
    world = SimWorld(3)

    def body(ring: NcclTransport) -> None:
        slots = ring.allocate(3 * 512).view(3, 512)
        hops = [ring_hop(ring, slots[0], slots[1]), ring_hop(ring, slots[1], slots[2])]
        with world.capture(ring.rank) as graph:
            for hop in hops:
                hop.start().wait()
            with pytest.raises(RingError, match="run it, then capture it"):
                ring.allocate(64)
        for value in (3, 5):
            slots[0].fill_(10 * value + ring.rank)
            ring.replay(graph.replay)
            ring.drain()
            assert bool((slots[2] == 10 * value + (ring.rank - 2) % 3).all())
        time.sleep(0.3)  # the supervisor runs meanwhile, and must not query a captured event
        graph.reset()

    results(on_gpus(world, body))
    assert world.violations == []


def test_a_replay_has_a_deadline() -> None:
    world = SimWorld(3)

    def body(ring: NcclTransport) -> str:
        slots = ring.allocate(1024).view(2, 512)
        hop = ring_hop(ring, slots[0], slots[1])
        compute = ring.gpu.new_stream()  # a stream that does not block the host
        ring.gpu.current_stream = lambda: compute  # type: ignore[method-assign]
        with world.capture(ring.rank) as graph:
            hop.start().wait()
        if ring.rank == 1:
            time.sleep(2.0)
        else:
            ring.replay(graph.replay)
        message = ring_error(ring.drain)
        graph.reset()
        return message

    first, _, third = results(on_gpus(world, body, timeout_s=1.0))
    assert all("a replayed pass" in message and "rank 1 is alive in" in message for message in (first, third))


def test_rings_replay_together() -> None:
    world = SimWorld(2)

    def body(ring: Ring) -> int:
        runs = []
        for _ in range(3):
            ring.replay(SimpleNamespace(replay=lambda: runs.append(1)))
        ring.synchronize()
        return len(runs)

    assert results(on_rings(world, body)) == [3, 3]


# --- passes on several streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", ["two", "host and one"])
def test_a_pass_on_another_stream_follows_the_last_one(streams: str) -> None:
    world = SimWorld(2)

    def body(ring: Ring) -> None:
        gpu: SimDevice = ring.transport.gpu  # type: ignore[attr-defined]
        engine = Touching(PlainEngine(), gpu)
        ring.engine_for = lambda *_: engine  # type: ignore[method-assign, assignment, return-value]
        first = gpu.user_stream() if streams == "two" else gpu.current_stream()
        for stream in (first, gpu.user_stream(), first):
            with gpu.on(stream):
                attend(ring)
        ring.synchronize()

    results(on_rings(world, body, ring={"engine": "plain"}))
    touched = {entry.stream for entry in world.trace[0] if isinstance(entry, Touch)}
    assert len(touched) == 2
    assert [str(race) for race in find_races(world.trace)[:3]] == [] and world.violations == []


def test_a_replay_follows_the_last_pass_and_the_next_pass_follows_it() -> None:
    world = SimWorld(2)

    def body(ring: NcclTransport) -> None:
        gpu: SimDevice = ring.gpu  # type: ignore[assignment]
        slots = ring.allocate(1024).view(2, 512)
        streams = [gpu.user_stream() for _ in range(3)]

        def run_pass(label: str) -> None:
            ring.begin_pass()
            gpu.kernel(writes=[span(slots)], label=label)
            ring.end_pass()

        with gpu.on(streams[0]):
            run_pass("before")
        # A capture cannot wait for work outside of the capture. So the replay must wait for the pass "before".
        with world.capture(ring.rank) as graph, gpu.on(streams[1]):
            run_pass("captured")
        with gpu.on(streams[1]):
            ring.replay(graph.replay)
        with gpu.on(streams[2]):
            run_pass("after")
        ring.drain()
        graph.reset()

    results(on_gpus(world, body))
    assert [str(race) for race in find_races(world.trace)[:3]] == [] and world.violations == []


class Streams:
    """A fake `torch.cuda.Stream` that records its arguments. Torch supports four of the six priorities of a GPU."""

    created: list[Any] = []  # noqa: RUF012

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.created.append((device, priority))

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -3


def test_the_communication_stream_has_the_highest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(torch.cuda, "Stream", Streams)
    CudaDevice(0).new_stream()
    assert Streams.created == [(torch.device("cuda", 0), -3)]

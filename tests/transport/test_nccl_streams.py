"""Work on the caller's own streams, which runs later than the host issues it: its order, and waiting for it.

The real transport runs over simulated GPUs. Not covered: when memory is given back (`test_nccl_memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.engine.base import KV
from ringattn.engine.plain import PlainEngine
from ringattn.transport.nccl.transport import NcclTransport
from tests.transport.nccl_rings import on_gpus, on_rings, results
from tests.transport.simulated.device import SimDevice, span
from tests.transport.simulated.entries import Touch
from tests.transport.simulated.races import find_races
from tests.transport.simulated.world import SimWorld
from tests.transport.test_nccl_memory import attend

# --- passes on several streams ---------------------------------------------------------------------------------------


class Touching(PlainEngine):
    """Says what it reads, on whichever stream is current."""

    def __init__(self, gpu: SimDevice, nccl: Callable[[int], bool]) -> None:
        super().__init__()
        self._gpu, self._nccl = gpu, nccl

    def attend(self, q: torch.Tensor, kv: KV, *rest: Any) -> None:
        reads = [
            (x.data_ptr(), (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size())
            for x in (kv.k, kv.v)
        ]
        self._gpu.kernel(reads=[each for each in reads if self._nccl(each[0])], label="attend")
        super().attend(q, kv, *rest)


@pytest.mark.parametrize("streams", ["two", "host and one"])
def test_a_pass_on_another_stream_follows_the_last_one(streams: str) -> None:
    world = SimWorld(2)

    def body(ring: Ring) -> None:
        gpu: SimDevice = ring.transport.gpu  # type: ignore[attr-defined]
        engine = Touching(gpu, lambda pointer: world.memory.view(ring.rank, pointer, 1) is not None)
        ring.engine_for = lambda *_: engine  # type: ignore[method-assign, assignment, return-value]
        first = gpu.user_stream() if streams == "two" else gpu.current_stream()
        for stream in (first, gpu.user_stream(), first):
            with gpu.on(stream):
                attend(ring)
        ring.synchronize()

    results(on_rings(world, body, ring={"engine": "plain"}))
    touched = {entry.stream for entry in world.trace[0] if isinstance(entry, Touch) and entry.reads}
    assert len(touched) == 2
    assert [str(race) for race in find_races(world.trace)[:3]] == [] and world.violations == []


def test_a_replay_follows_the_last_pass_and_the_next_pass_follows_it() -> None:
    world = SimWorld(2)

    def body(ring: NcclTransport) -> None:
        gpu: SimDevice = ring.gpu  # type: ignore[assignment]
        slots = ring.allocate(1024).view(2, 512)
        streams = [gpu.user_stream() for _ in range(3)]

        def one_pass(label: str) -> None:
            ring.begin_pass()
            gpu.kernel(writes=[span(slots)], label=label)
            ring.end_pass()

        with gpu.on(streams[0]):
            one_pass("before")
        # A capture can wait for nothing outside of it: its replay does.
        with world.capture(ring.rank) as graph, gpu.on(streams[1]):
            one_pass("captured")
        with gpu.on(streams[1]):
            ring.replay(graph.replay)
        with gpu.on(streams[2]):
            one_pass("after")
        ring.drain()
        graph.reset()

    results(on_gpus(world, body))
    assert [str(race) for race in find_races(world.trace)[:3]] == [] and world.violations == []

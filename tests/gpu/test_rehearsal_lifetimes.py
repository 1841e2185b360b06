"""The bodies of the GPU checks of memory, run on CPU over the simulated library."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn.transport.nccl.transport import NcclTransport
from tests.gpu import test_lifetimes as lifetimes
from tests.transport.nccl_rings import open_on
from tests.transport.simulated.device import span
from tests.transport.simulated.world import SimWorld


class SimMachine:
    """A simulated GPU of 16 units; see `lifetimes.Machine`."""

    unit = 1024

    def __init__(self) -> None:
        self.world = SimWorld(1, memory_bytes=16 * self.unit, limit_s=20.0)

    def open(self, timeout_s: float) -> NcclTransport:
        return open_on(self.world, 0, HashStore(), timeout_s)

    def read_late(self, ring: NcclTransport, slots: Any, late_s: float) -> Callable[[], bool]:
        gpu: Any = ring.gpu
        with gpu.on(gpu.user_stream()):
            ring.begin_pass()
            reader = gpu.kernel(reads=[span(slots)], label="late", held=True)
            ring.end_pass()
        threading.Timer(late_s, lambda: self.world.finish(reader)).start()
        return lambda: reader.complete and self.world.violations == []

    def free_bytes(self) -> int:
        gc.collect()
        self.world.memory.cached[0] = 0
        return 16 * self.unit - self.world.memory.nccl_bytes(0)

    def cache(self, leaving: int) -> None:
        self.world.memory.cached[0] = self.free_bytes() - leaving


@pytest.mark.parametrize(
    "body",
    [
        lifetimes.close_waits_for_compute,
        lifetimes.a_stuck_gpu_keeps_its_memory,
        lifetimes.growth_waits_for_the_pass,
        lifetimes.a_full_gpu,
    ],
    ids=lambda body: body.__name__,
)
def test_memory_of_a_ring_of_one(body: Callable[[SimMachine], None]) -> None:
    machine = SimMachine()
    body(machine)
    assert machine.world.violations == []


@pytest.mark.parametrize(
    "fails", [pytest.param(False, id="closed"), pytest.param(True, id="aborted", marks=pytest.mark.slow)]
)
def test_openings_leave_nothing(fails: bool) -> None:
    machine = SimMachine()
    assert set(lifetimes.openings_leave_nothing(machine, fails, openings=lifetimes.SETTLED + 1)) == {16 * machine.unit}
    assert machine.world.violations == [] and machine.world.registry.of(0) == []

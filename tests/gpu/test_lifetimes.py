"""On one GPU with one rank, the memory of a ring is always freed after its last use, and never earlier.

`tests/gpu/test_rehearsal.py` runs the same functions over the simulated library on the CPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from torch.distributed import HashStore

from ringattn.observe.memory import is_shortage
from ringattn.transport.base import Opening
from ringattn.transport.device import CudaDevice
from ringattn.transport.location import my_location
from ringattn.transport.nccl.binding import NcclError
from ringattn.transport.nccl.options import NcclOptions, open_binding
from ringattn.transport.nccl.transport import NcclTransport
from tests.gpu.kept import keep

pytestmark = pytest.mark.gpu

SOON_S = 20.0
OPENINGS = 20
SETTLED = 3
"""The number of openings after which the driver and NCCL have allocated everything that they keep permanently."""


class Machine(Protocol):
    """A GPU, real or simulated."""

    unit: int
    """A number of bytes that is large compared with the driver's granularity and small compared with the memory."""

    def open(self, timeout_s: float) -> NcclTransport:
        """Open a ring of one rank."""
        ...

    def read_late(self, ring: NcclTransport, slots: torch.Tensor, late_s: float) -> Callable[[], bool]:
        """Start a pass on a separate stream that reads `slots` after `late_s` seconds.

        Return a function that returns whether the pass has read the right content.
        """
        ...

    def free_bytes(self) -> int:
        """Return the bytes that NCCL could allocate if torch's cache were empty."""
        ...

    def cache(self, leaving: int) -> None:
        """Let torch's allocator cache all memory except `leaving` bytes, without using it."""
        ...


class Gpu:
    """The first GPU."""

    unit = 64 << 20

    def __init__(self) -> None:
        torch.cuda.set_device(0)
        self.binding = open_binding(NcclOptions())

    def open(self, timeout_s: float) -> NcclTransport:
        """See `Machine.open`."""
        return NcclTransport.open(
            Opening(HashStore(), 0, 1, timeout_s, interface=None, locations=[my_location(0)]),
            binding=self.binding, gpu=CudaDevice(0), options=NcclOptions(), nccl_id="one",
        )  # fmt: skip

    def read_late(self, ring: NcclTransport, slots: torch.Tensor, late_s: float) -> Callable[[], bool]:
        """See `Machine.read_late`."""
        slots.fill_(7)
        slots.sum(dtype=torch.int64)  # the first launch of a kernel loads it, which waits until no kernel runs
        torch.cuda.synchronize()
        expected, stream, read = 7 * slots.numel(), torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            ring.begin_pass()
            torch.cuda._sleep(int(late_s * 2e9))  # cycles, at most 2 GHz
            total = slots.sum(dtype=torch.int64)
            ring.end_pass()
            read.record()
        return lambda: read.query() and int(total) == expected

    def free_bytes(self) -> int:
        """See `Machine.free_bytes`."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def cache(self, leaving: int) -> None:
        """See `Machine.cache`."""
        cached = torch.empty(self.free_bytes() - leaving, dtype=torch.uint8, device="cuda")
        del cached


# --- functions that are rehearsed on the CPU -------------------------------------------------------------------------


def close_waits_for_compute(machine: Machine) -> None:
    """Check that closing a ring waits for a pass that still reads."""
    ring = machine.open(30.0)
    slots = ring.allocate(machine.unit)
    done = machine.read_late(ring, slots, 0.5)
    assert not done()
    del slots
    ring.close()
    assert done()


def a_stuck_gpu_keeps_its_memory(machine: Machine) -> None:
    """Check that closing a ring gives up if a pass reads for longer than the deadline, and that the pass reads well."""
    ring = machine.open(0.3)
    slots = ring.allocate(machine.unit)
    done = machine.read_late(ring, slots, 1.5)
    del slots
    start_s = time.monotonic()
    ring.close()
    assert time.monotonic() - start_s < 1.2 and not done()
    end_s = time.monotonic() + SOON_S
    while not done() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert done()


def growth_waits_for_the_pass(machine: Machine) -> None:
    """Check that allocating a larger arena waits for a pass that reads the smaller one, which is freed then."""
    ring = machine.open(30.0)
    slots = ring.allocate(machine.unit)
    before = machine.free_bytes()
    done = machine.read_late(ring, slots, 0.5)
    assert not done()
    del slots
    grown = ring.allocate(2 * machine.unit)
    assert done() and grown.nbytes == 2 * machine.unit
    assert machine.free_bytes() <= before - machine.unit // 2  # the ring uses one unit more than before, not two
    assert machine.free_bytes() >= before - 3 * machine.unit // 2
    del grown
    ring.close()


def a_full_gpu(machine: Machine) -> None:
    """Check that a ring can allocate memory that torch has cached, and that it reports a shortage and still works."""
    ring = machine.open(30.0)
    machine.cache(leaving=machine.unit)
    slots = ring.allocate(4 * machine.unit)
    assert slots.nbytes == 4 * machine.unit
    with pytest.raises(NcclError) as caught:
        ring.allocate(machine.free_bytes() + machine.unit)
    assert is_shortage(caught.value), caught.value
    assert ring.allocate(machine.unit).nbytes == machine.unit  # the shortage has broken nothing
    del slots
    ring.close()


def openings_leave_nothing(machine: Machine, fails: bool, openings: int = OPENINGS) -> list[int]:
    """Open many rings in turn, and close (or abort, if `fails`) each. Check that this leaks no memory.

    Return the free bytes after each ring.
    """
    free = []
    for _ in range(openings):
        ring = machine.open(30.0)
        done = machine.read_late(ring, ring.allocate(machine.unit), 0.01)
        if fails:
            ring.abort(ValueError("done"))
        else:
            ring.close()
        freeing = ring._memory._ending  # after a failure a thread frees the memory when the pass has ended
        del ring
        if freeing is not None:
            freeing.join(SOON_S)
        end_s = time.monotonic() + SOON_S
        enough = max(free, default=0) - machine.unit // 2
        while time.monotonic() < end_s and not (done() and machine.free_bytes() >= enough):
            time.sleep(0.01)
        assert done()
        free.append(machine.free_bytes())
    assert min(free[SETTLED:]) >= free[SETTLED - 1], free
    return free


# --- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine() -> Gpu:
    return Gpu()


def test_close_waits_for_compute(machine: Gpu) -> None:
    close_waits_for_compute(machine)
    torch.cuda.synchronize()
    keep("nccl_lifetimes", "close behind running compute", "waits")


def test_a_stuck_gpu_keeps_its_memory(machine: Gpu) -> None:
    a_stuck_gpu_keeps_its_memory(machine)
    torch.cuda.synchronize()


def test_growth_waits_for_the_pass(machine: Gpu) -> None:
    growth_waits_for_the_pass(machine)
    torch.cuda.synchronize()
    keep("nccl_lifetimes", "growth behind a pass", "waits")


def test_a_full_gpu(machine: Gpu) -> None:
    a_full_gpu(machine)
    keep("nccl_lifetimes", "out of memory in slots", "torch's cache is taken, then told")


@pytest.mark.parametrize("fails", [False, True], ids=["closed", "aborted"])
def test_openings_leave_nothing(machine: Gpu, fails: bool) -> None:
    free = openings_leave_nothing(machine, fails)
    keep("nccl_lifetimes", f"free bytes after each of {OPENINGS} rings, {'aborted' if fails else 'closed'}", free)

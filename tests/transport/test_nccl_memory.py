"""The memory of an NCCL ring is never freed while compute or an exchange uses it, but always freed later.

The real transport runs over simulated GPUs whose compute runs later than the host issues it.
Not covered: CUDA's own allocator (`tests/gpu/test_lifetimes.py`).
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.engine.base import KV
from ringattn.engine.plain import PlainEngine
from ringattn.errors import OutOfMemoryError, PeerLostError
from ringattn.observe.memory import is_shortage
from ringattn.runtime import runtime
from ringattn.transport.nccl.binding import NcclError, Status
from ringattn.transport.nccl.communicator import Communicator
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nccl.transport import NcclTransport
from tests.transport.nccl_rings import attend, on_gpus, on_rings, results, ring_hop
from tests.transport.simulated.device import SimDevice, SimStream, span
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.streams import Touch
from tests.transport.simulated.world import SimWorld, Stall

MEMORY = pytest.mark.parametrize("register", [True, False], ids=["registered", "plain"])
SOON_S = 30.0
"""The limit for actions that take no time on an idle machine."""


def until(what: Callable[[], bool]) -> bool:
    """Wait until `what()` is true, and return whether that happened within `SOON_S`.

    Collect garbage meanwhile, because tracebacks that keep memory alive form reference cycles.
    """
    end_s = time.monotonic() + SOON_S
    while not what():
        gc.collect()
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def held_reader(ring: NcclTransport, slots: torch.Tensor, as_pass: bool = False) -> tuple[SimStream, Touch]:
    """Enqueue compute that reads `slots` on a new stream of the caller, and hold it. Return the stream and the compute.

    If `as_pass`, the compute is a pass of the ring; otherwise the ring does not know about it.
    """
    gpu: SimDevice = ring.gpu  # type: ignore[assignment]
    stream = gpu.user_stream()
    with gpu.on(stream):
        if as_pass:
            ring.begin_pass()
        reader = gpu.kernel(reads=[span(slots)], label="attend", held=True)
        if as_pass:
            ring.end_pass()
    return stream, reader


def gone(world: SimWorld, rank: int, addresses: tuple[int, int]) -> bool:
    with world.changed:
        return world.memory.gone(rank, *addresses)


# --- at close --------------------------------------------------------------------------------------------------------


@MEMORY
@pytest.mark.parametrize("where", ["on the stream of the pass", "on another"])
def test_close_waits_for_compute_that_still_reads(where: str, register: bool) -> None:
    world = SimWorld(2)

    def body(ring: NcclTransport) -> tuple[bool, bool]:
        slots = ring.allocate(1024).view(2, 512)
        addresses = span(slots)
        ring_hop(ring, slots[0], slots[1]).start().wait()
        elsewhere = where == "on another"
        stream, reader = held_reader(ring, slots, as_pass=elsewhere)
        del slots
        released: list[bool] = []

        def finish() -> None:
            released.append(gone(world, ring.rank, addresses))
            world.finish(reader)

        threading.Timer(0.3, finish).start()
        with ring.gpu.on(ring.gpu.current_stream() if elsewhere else stream):  # type: ignore[attr-defined]
            ring.close()
        return released == [False], gone(world, ring.rank, addresses)

    assert results(on_gpus(world, body, options=NcclOptions(register=register))) == [(True, True)] * 2
    assert world.violations == [] and world.memory.nccl_bytes(0) == 0


@MEMORY
def test_close_leaves_memory_that_a_stuck_gpu_reads(register: bool, capsys: pytest.CaptureFixture[str]) -> None:
    world, readers = SimWorld(2), []

    def body(ring: NcclTransport) -> bool:
        slots = ring.allocate(1024).view(2, 512)
        addresses = span(slots)
        ring_hop(ring, slots[0], slots[1]).start().wait()
        ring.drain()
        _, reader = held_reader(ring, slots, as_pass=True)
        del slots
        began_s = time.monotonic()
        ring.close()
        assert time.monotonic() - began_s < SOON_S
        readers.append((ring.rank, addresses, reader))
        return not gone(world, ring.rank, addresses)

    assert results(on_gpus(world, body, deadline_s=0.5, options=NcclOptions(register=register))) == [True, True]
    gc.collect()  # the memory must stay even after the ring is collected
    assert not any(gone(world, rank, addresses) for rank, addresses, _ in readers)
    for _, _, reader in readers:
        world.finish(reader)
    assert world.violations == []
    printed = capsys.readouterr().err
    assert all(f"rank {rank}: the GPU was still computing after 0.5 s, so memory" in printed for rank in range(2))


def test_an_executor_that_outlives_its_ring_keeps_no_memory() -> None:
    world, kept = SimWorld(2), []

    def body(ring: Ring) -> None:
        seq = ring.sequence(24)
        x = seq.shard(torch.ones(1, 24, 2, 8)).requires_grad_()
        ring.attention(x, x, x, seq, causal=True).sum().backward()
        kept.extend(ring._executors.values())

    results(on_rings(world, body, ring={"engine": "plain"}))
    assert until(lambda: not any(world.memory.nccl_bytes(rank) for rank in range(2)))
    assert world.violations == [] and len(kept) >= 4


# --- on growth -------------------------------------------------------------------------------------------------------


def test_growth_never_holds_two_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    world, allocated, allocate = SimWorld(2), [], SimLibrary.mem_alloc

    def record_and_allocate(library: SimLibrary, nbytes: int) -> int:
        allocated.append(world.memory.nccl_bytes(library._rank))
        return allocate(library, nbytes)

    monkeypatch.setattr(SimLibrary, "mem_alloc", record_and_allocate)
    results(on_rings(world, lambda ring: [attend(ring, tokens) for tokens in (16, 64, 256)], ring={"engine": "plain"}))
    assert len(allocated) >= 6 and not any(allocated) and world.violations == []
    assert not any(world.memory.nccl_bytes(rank) for rank in range(2))


@MEMORY
def test_growth_waits_for_compute_that_still_reads(register: bool) -> None:
    world = SimWorld(2)

    def body(ring: NcclTransport) -> tuple[bool, bool]:
        slots = ring.allocate(1024).view(2, 512)
        addresses = span(slots)
        ring_hop(ring, slots[0], slots[1]).start().wait()
        _, reader = held_reader(ring, slots, as_pass=True)
        del slots
        released: list[bool] = []

        def finish() -> None:
            released.append(gone(world, ring.rank, addresses))
            world.finish(reader)

        threading.Timer(0.3, finish).start()
        grown = ring.allocate(2048)
        freed = gone(world, ring.rank, addresses)
        return released == [False] and grown.nbytes == 2048, freed

    assert results(on_gpus(world, body, options=NcclOptions(register=register))) == [(True, True)] * 2
    assert world.violations == []


@MEMORY
def test_growth_behind_a_stuck_gpu_leaves_the_old_memory(register: bool, capsys: pytest.CaptureFixture[str]) -> None:
    world = SimWorld(2)

    def body(ring: NcclTransport) -> tuple[bool, bool]:
        slots = ring.allocate(1024).view(2, 512)
        addresses = span(slots)
        _, reader = held_reader(ring, slots, as_pass=True)
        del slots
        grown = ring.allocate(2048)
        left = not gone(world, ring.rank, addresses)
        world.finish(reader)
        del grown
        ring.allocate(4096)  # frees the dropped memory
        return left, gone(world, ring.rank, addresses)

    options = NcclOptions(register=register)
    assert results(on_gpus(world, body, deadline_s=0.4, options=options)) == [(True, True)] * 2
    assert world.violations == [] and "rank 1: the GPU was still computing after 0.4 s" in capsys.readouterr().err


@MEMORY
def test_a_graph_can_be_replayed_after_growth(register: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured pass keeps its arena, and its buffers with their row lists, until the ring is closed."""
    world, this = SimWorld(2), threading.local()
    monkeypatch.setattr(runtime, "is_capturing", lambda: world.capturing(this.rank))

    def body(ring: Ring) -> None:
        this.rank = ring.rank
        attend(ring)
        with world.capture(ring.rank) as graph:
            attend(ring)
        (executor,) = ring._executors.values()
        arena = ring.pool.view(0, ring.pool.nbytes)
        storage, addresses = weakref.ref(arena.untyped_storage()), span(arena)
        buffers = [weakref.ref(buffer) for buffer in executor._bound.buffers]
        del executor, arena
        before = ring.pool.growths
        attend(ring, 480)
        ring.synchronize()
        assert ring.pool.growths == before + 1
        assert buffers and all(buffer() is not None for buffer in buffers)
        assert not gone(world, ring.rank, addresses) and storage() is not None
        ring.replay(graph)
        ring.synchronize()
        graph.reset()

    results(on_rings(world, body, ring={"engine": "plain"}, options=NcclOptions(register=register)))
    assert world.violations == []
    assert until(lambda: not any(world.memory.nccl_bytes(rank) for rank in range(2)))


# --- after failures --------------------------------------------------------------------------------------------------


class Breaking(PlainEngine):
    """An engine that raises an error on rank 1 in its second step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._calls = rank, 0

    def attend(self, q: torch.Tensor, kv: KV, *rest: Any) -> None:
        self._calls += 1
        if self._rank == 1 and self._calls == 2:
            raise ValueError("of the user's")
        super().attend(q, kv, *rest)


@pytest.mark.parametrize("inside", [True, False], ids=["in a pass", "between passes"])
def test_an_error_of_the_user_frees_all_memory(inside: bool) -> None:
    world, rings = SimWorld(2), []

    def body(ring: Ring) -> None:
        rings.append(ring)  # keep the ring, as a program that continues does
        if inside:
            ring.engine = Breaking(ring.rank)
        attend(ring)
        ring.synchronize()
        if ring.rank == 1:
            raise ValueError("of the user's")
        attend(ring, 48)
        ring.synchronize()

    outcomes = on_rings(world, body, ring={"engine": "plain"})
    assert [type(outcome.error) for outcome in outcomes] == [PeerLostError, ValueError]
    assert "rank 1 failed first: ValueError: of the user's" in str(outcomes[0].error)
    outcomes.clear()  # the tracebacks of the errors keep the arena alive
    assert until(lambda: not any(world.memory.nccl_bytes(rank) for rank in range(2)))
    assert world.violations == [] and len(rings) == 2


@MEMORY
def test_a_failure_frees_no_memory_under_compute(register: bool) -> None:
    world, readers, read_spans = SimWorld(2), [], []

    def body(ring: NcclTransport) -> None:
        slots = ring.allocate(1024).view(2, 512)
        read_spans.append((ring.rank, span(slots)))
        ring_hop(ring, slots[0], slots[1]).start().wait()
        readers.append(held_reader(ring, slots, as_pass=True)[1])
        ring.abort(ValueError("done"))

    on_gpus(world, body, options=NcclOptions(register=register))
    time.sleep(0.3)
    assert not any(gone(world, rank, addresses) for rank, addresses in read_spans) and world.violations == []
    for reader in readers:
        world.finish(reader)
    assert until(lambda: all(gone(world, rank, addresses) for rank, addresses in read_spans)) and world.violations == []


def test_a_failure_releases_exchanges_that_never_arrive() -> None:
    world, rings = SimWorld(2), []

    def body(ring: NcclTransport) -> None:
        rings.append(ring)
        slots = ring.allocate(1024).view(2, 512)
        if ring.rank == 0:
            with ring.gpu.on(ring.gpu.user_stream()):  # type: ignore[attr-defined]
                ring_hop(ring, slots[0], slots[1]).start()
        ring.abort(ValueError("done"))

    on_gpus(world, body)
    assert until(lambda: not any(world.memory.nccl_bytes(rank) for rank in range(2)))
    assert world.violations == [] and len(rings) == 2


def test_an_abort_that_is_stuck_leaves_the_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world, abort = SimWorld(2, faults=[Stall(0, "abort")]), Communicator.abort
    monkeypatch.setattr(Communicator, "abort", lambda self: abort(self, 0.3))

    def body(ring: NcclTransport) -> None:
        slots = ring.allocate(1024).view(2, 512)
        with ring.gpu.on(ring.gpu.user_stream()):  # type: ignore[attr-defined]
            ring_hop(ring, slots[0], slots[1]).start()
        ring.abort(ValueError("done"))

    on_gpus(world, body)
    assert until(lambda: not world.memory.nccl_bytes(1))
    printed = ""
    deadline = time.monotonic() + SOON_S
    while "rank 0: a communicator does not end" not in printed and time.monotonic() < deadline:
        printed += capsys.readouterr().err
        time.sleep(0.05)
    assert "rank 0: a communicator does not end, so memory of the ring is not freed" in printed
    assert world.memory.nccl_bytes(0) == 1024 and world.violations == []
    world.release(0)


# --- out of memory ---------------------------------------------------------------------------------------------------


def test_memory_in_the_cache_of_torch_is_used() -> None:
    world = SimWorld(2, memory_bytes=4096)

    def body(ring: NcclTransport) -> tuple[int, int]:
        world.memory.cached[ring.rank] = 3000
        slots = ring.allocate(2048)
        return slots.nbytes, ring.gpu.emptied  # type: ignore[attr-defined]

    assert results(on_gpus(world, body)) == [(2048, 1)] * 2
    assert world.violations == []


def test_only_an_out_of_memory_error_is_retried() -> None:
    world, errors = SimWorld(1, memory_bytes=4096), []

    def body(ring: NcclTransport) -> None:
        with pytest.raises(NcclError) as caught:
            ring.allocate(8192)
        errors.append((caught.value, ring.gpu.emptied))  # type: ignore[attr-defined]
        ring._memory._binding.mem_alloc = lambda nbytes: (_ for _ in ()).throw(access)  # type: ignore[method-assign]
        with pytest.raises(NcclError) as caught:
            ring.allocate(1024)
        errors.append((caught.value, ring.gpu.emptied))  # type: ignore[attr-defined]
        del ring._memory._binding.mem_alloc

    access = NcclError("ncclMemAlloc", Status.UNHANDLED_CUDA_ERROR, "Cuda failure 700 'an illegal memory access'")
    results(on_gpus(world, body))
    assert [(is_shortage(error), emptied) for error, emptied in errors] == [(True, 1), (False, 1)]


def test_an_out_of_memory_error_explains_only_the_memory_of_its_rank() -> None:
    world = SimWorld(2, memory_bytes=40_000)

    def body(ring: Ring) -> None:
        attend(ring)
        if ring.rank == 1:
            world.memory.cached[1] = 0
            with world.changed:
                ring.transport._held = ring.transport._binding.mem_alloc(30_000)  # type: ignore[attr-defined]
        attend(ring, 240)
        ring.synchronize()

    short, lost = reversed(on_rings(world, body, ring={"engine": "plain"}))
    assert isinstance(short.error, OutOfMemoryError) and isinstance(short.error.__cause__, NcclError)
    for part in ("rank 1: out of memory in an attention pass: ncclMemAlloc", "the pool holds", "to change:"):
        assert part in str(short.error)
    assert isinstance(lost.error, PeerLostError) and "rank 1 failed first: NcclError: ncclMemAlloc" in str(lost.error)


@pytest.mark.parametrize("message", ["ncclMemAlloc: 'out of memory'", "CPUAllocator: can't allocate memory"])
def test_an_out_of_memory_error_of_another_rank_is_not_a_local_one(message: str) -> None:
    assert not is_shortage(PeerLostError(f"rank 0: rank 1 failed first: RuntimeError: Default{message}"))
    assert not is_shortage(NcclError("ncclCommRegister", Status.SYSTEM_ERROR, message))

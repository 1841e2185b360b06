"""The simulator's rules of compute that runs later than the host issues it. One test a rule.

Not covered: what races (`test_simulated_races.py`), what the transport does about it (`test_nccl_memory.py`).
"""

from __future__ import annotations

import gc

import pytest
import torch

from ringattn.transport.nccl.binding import NcclError, Status
from tests.transport.simulated.device import SimDevice, span
from tests.transport.simulated.exchange import Rank, open_ranks
from tests.transport.simulated.races import find_races
from tests.transport.simulated.world import SimWorld


def nccl_buffer(me: Rank, nbytes: int = 16) -> torch.Tensor:
    return me.device.wrap(me.library.mem_alloc(nbytes), nbytes, None)


def passed(gpu: SimDevice, stream: object) -> bool:
    event = gpu.new_event()
    event.record(stream)  # type: ignore[arg-type]
    return event.query()


@pytest.mark.parametrize("lazy", [False, True])
def test_compute_runs_in_its_turn_and_not_while_it_is_held(lazy: bool) -> None:
    world = SimWorld(1, lazy=lazy)
    gpu = SimDevice(world, 0)
    stream, host = gpu.user_stream(), gpu.current_stream()
    with gpu.on(stream):
        assert gpu.current_stream() is stream
        first, second = gpu.kernel(label="first", held=True), gpu.kernel(label="second")
    assert gpu.current_stream() is host and passed(gpu, host)
    assert not passed(gpu, stream) and not second.complete
    world.finish(first)
    assert passed(gpu, stream) and first.complete and second.complete


def test_a_stream_waits_for_compute_of_another() -> None:
    world = SimWorld(1)
    gpu = SimDevice(world, 0)
    one, other, ended = gpu.user_stream(), gpu.user_stream(), gpu.new_event()
    with gpu.on(one):
        held = gpu.kernel(held=True)
        ended.record(one)
    other.wait_event(ended)
    assert not passed(gpu, other)
    world.finish(held)
    assert passed(gpu, other)


@pytest.mark.parametrize("access", ["reads", "writes"])
def test_memory_is_not_freed_under_compute(access: str) -> None:
    me = open_ranks(SimWorld(1))[0]
    buffer = nccl_buffer(me)
    with me.device.on(me.device.user_stream()):
        held = me.device.kernel(**{access: [span(buffer[4:8])]}, label="attend", held=True)
    with pytest.raises(NcclError):
        me.library.mem_free(buffer.data_ptr())
    assert len(me.world.violations) == 1
    assert "is still used by compute 'attend' on stream user 1" in me.world.violations[0]
    me.world.finish(held)
    me.library.mem_free(buffer.data_ptr())
    assert len(me.world.violations) == 1


@pytest.mark.parametrize("stream", ["user", "host"])
@pytest.mark.parametrize("kind", ["nccl", "plain"])
def test_compute_finds_no_memory_that_was_freed(kind: str, stream: str) -> None:
    me = open_ranks(SimWorld(1))[0]
    buffer = nccl_buffer(me) if kind == "nccl" else me.device.empty(16)
    there, pointer = span(buffer), buffer.data_ptr()
    if kind == "nccl":
        me.library.mem_free(pointer)
    del buffer
    gc.collect()
    with me.device.on(me.device.user_stream() if stream == "user" else me.compute):
        me.device.kernel(reads=[there], label="attend")
    assert len(me.world.violations) == 1 and "compute 'attend' reads memory that was freed" in me.world.violations[0]


def test_memory_that_is_used_again_under_compute_is_a_race() -> None:
    for ordered in (False, True):
        world = SimWorld(1)
        gpu = SimDevice(world, 0)
        one, other, ended = gpu.user_stream(), gpu.user_stream(), gpu.new_event()
        slot = gpu.empty(16)
        with gpu.on(one):
            gpu.kernel(reads=[span(slot)], label="first pass")
            ended.record(one)
        with gpu.on(other):
            if ordered:
                other.wait_event(ended)
            gpu.kernel(writes=[span(slot)], label="second pass")
        assert bool(find_races(world.trace)) == (not ordered)


def test_a_device_has_only_so_much_memory() -> None:
    world = SimWorld(1, memory_bytes=100)
    me = open_ranks(world)[0]
    pointer = me.library.mem_alloc(60)
    world.memory.cached[0] = 30
    with pytest.raises(NcclError) as caught:
        me.library.mem_alloc(40)
    assert caught.value.status == Status.UNHANDLED_CUDA_ERROR and "out of memory" in caught.value.text
    me.device.release_cached()
    assert me.library.mem_alloc(40) and world.memory.nccl_bytes(0) == 100
    me.library.mem_free(pointer)
    assert world.memory.nccl_bytes(0) == 40 and world.violations == []

"""Two processes on a single GPU that check the peer transport's assumptions about CUDA's driver.

`kind` is "cuda", or "simulated" for a rehearsal on the CPU. Each function that takes a rank runs in both processes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ringattn.errors import RingError
from ringattn.transport.base import Message
from ringattn.transport.device import CudaDevice
from ringattn.transport.location import my_location
from ringattn.transport.peer.driver import Attribute, CudaDriver
from ringattn.transport.peer.transport import PeerTransport
from tests.transport.peers.sim_driver import SimGpu
from tests.transport.process_rings import location, meet_peer

SLEEP_CYCLES = 1 << 32  # a kernel that sleeps for this number of cycles takes about two seconds
BIG = 64 << 20


def device(kind: str, **switches: Any) -> Any:
    """Return the real GPU, or a simulated one with `switches`. Its attribute `driver` is its driver."""
    if kind == "simulated":
        return SimGpu(**switches)
    torch.zeros(1, device="cuda")
    gpu: Any = CudaDevice(0)
    gpu.driver = CudaDriver(0)
    return gpu


def open_ring(
    rank: int, world_size: int, kind: str, gpu: Any, timeout_s: float = 20.0, rounds: int = 64
) -> PeerTransport:
    where = location() if kind == "simulated" else my_location(0)
    return meet_peer(rank, world_size, timeout_s, gpu=gpu, where=where, rounds=rounds if kind == "cuda" else 2)


def numbers(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """Resolve the driver's symbols. Return the device's attributes and what else the driver reports about it."""
    driver = device(kind).driver
    attributes: dict[str, Any] = {which.name: driver.attribute(which) for which in Attribute}
    return {
        **attributes,
        "version": driver.version,
        "partition": driver.is_partition(),
        "granularity": driver.granularity(),
    }


def ordering(rank: int, world_size: int, kind: str, rounds: int) -> int:
    """Open a ring whose self-test has `rounds` rounds. The test raises if a flag is visible before its bytes."""
    open_ring(rank, world_size, kind, device(kind), rounds=rounds).close()
    return rounds


def ping_pong(rank: int, world_size: int, kind: str, count: int) -> float:
    """Return the microseconds of a round trip of 8 bytes (mean of `count` trips), including the host code."""
    gpu = device(kind)
    ring = open_ring(rank, world_size, kind, gpu)
    word = ring.allocate(8)
    forth = ring.bind([Message(1 - rank, word, "k")], [])
    back = ring.bind([], [Message(1 - rank, word, "k")])
    took_s = 0.0
    for timed in (False, True):
        ring.all_gather_bytes(b"")
        began = time.perf_counter()
        for _ in range(count if timed else 10):
            for hop in (forth, back) if rank == 0 else (back, forth):
                hop.start().wait()
        ring.drain()
        took_s = time.perf_counter() - began
    ring.close()
    return took_s / count * 1e6


def released(rank: int, world_size: int, kind: str, one_queue: bool) -> dict[str, Any]:
    """Let rank 0's device wait for a message that is never sent. Then abort: stores of the host must end the wait.

    Return whether the device was blocked, how long the abort took and whether it drained the queue, and a sum that
    shows that the device still works.
    """
    gpu = device(kind, **({"one_queue": one_queue} if kind == "simulated" else {}))
    ring = open_ring(rank, world_size, kind, gpu)
    received = ring.allocate(64)
    if rank == 0:
        ring.exchange([], [Message(1, received, "never sent")])
    ring.all_gather_bytes(b"")
    time.sleep(0.5)
    blocked = ring.lane.newest is not None and not ring.lane.newest.query()
    began = time.perf_counter()
    if rank == 0:
        ring.abort(ValueError("rank 0 gives up"))
        ring.watch.ended.wait(20.0)
    else:
        time.sleep(1.0)
    took_s = time.perf_counter() - began
    return {"blocked": blocked, "abort_s": took_s, "drained": ring.watch.drained, "sum": alive(received)}


def alive(like: torch.Tensor) -> float:
    """Compute the sum of 1000 ones on the device of `like`, and return it. Raises if its context has a sticky error."""
    answer = float(torch.ones(1000, device=like.device).sum())
    if like.device.type == "cuda":
        torch.cuda.synchronize()
    return answer


def killed(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """Kill rank 1 while copies run.

    Return what rank 0 raises and after how long, a sum that shows that its device works, and the bytes that were not
    freed.
    """
    gpu = device(kind)
    before = free_bytes(kind)
    ring = open_ring(rank, world_size, kind, gpu)
    room = ring.allocate(2 * BIG).view(2, -1)
    ring.all_gather_bytes(b"")
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    reported, began = "nothing", time.monotonic()
    try:
        for number in range(100_000):
            ring.exchange(
                [Message(1 - rank, room[0], f"n {number}")], [Message(1 - rank, room[1], f"n {number}")]
            ).wait()
            if number % 8 == 0:
                ring.drain()
    except RingError as error:
        reported = f"{type(error).__name__}: {error}"
    took_s, answer = time.monotonic() - began, alive(room)
    del room
    until = time.monotonic() + 10.0
    while lost_bytes(kind, gpu, before) > 0 and time.monotonic() < until:
        time.sleep(0.05)
    return {"said": reported, "after_s": took_s, "sum": answer, "lost_bytes": lost_bytes(kind, gpu, before)}


def free_bytes(kind: str) -> int:
    return torch.cuda.mem_get_info()[0] if kind == "cuda" else 0


def lost_bytes(kind: str, gpu: Any, before: int) -> int:
    """Return the bytes that were not freed, given the free bytes `before`. On a simulated GPU, count its resources.

    On a real GPU, `BIG` bytes are subtracted, because the context of another process may take that much.
    """
    if kind == "simulated":
        return sum(gpu.driver.leftovers().values())
    torch.cuda.empty_cache()
    return max(before - free_bytes(kind) - BIG, 0)


def slow_read(kind: str, gpu: Any, slot: torch.Tensor) -> Callable[[], list[int]]:
    """Enqueue a kernel on the caller's stream that sleeps for two seconds and then reads `slot`.

    Return a function that returns the distinct values that were read.
    """
    if kind == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
        values = slot.clone()
        return lambda: sorted(set(values.tolist()))
    gpu.caller = gpu.new_stream()
    seen: list[int] = []

    def body() -> None:
        time.sleep(2.0)
        seen.extend(sorted(set(slot.tolist())))

    gpu.caller.compute(body)
    return lambda: seen


def spoiled(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """Let rank 0 fail while rank 1's kernel reads a buffer into which a queued copy of rank 0 writes.

    Return what this rank reports, and the values that its kernel read.
    """
    gpu = device(kind)
    ring = open_ring(rank, world_size, kind, gpu)
    slot = ring.allocate(1 << 16)
    if rank == 0:
        slot.fill_(1)
        ring.exchange([Message(1, slot, "first")], []).wait()
        ring.drain()
        second = torch.full((1 << 16,), 2, dtype=torch.uint8, device=ring.device)
        ring.exchange([Message(1, second, "second")], [])
        ring.all_gather_bytes(b"queued")
        ring.abort(ValueError("rank 0 gives up"))
        time.sleep(4.0)
        return {"said": "aborted", "seen": []}
    ring.exchange([], [Message(0, slot, "first")]).wait()
    seen = slow_read(kind, gpu, slot)
    ring.watch.stop()  # so that only `drain` can see the poison
    ring.exchange([], [Message(0, slot, "second")])
    ring.all_gather_bytes(b"queued")
    try:
        ring.drain()
        reported = "success"
    except RingError as error:
        reported = f"{type(error).__name__}: {error}"
    return {"said": reported, "seen": seen()}

"""What ranks of the peer transport do in `test_peer.py`."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import torch

from ringattn.errors import RingError
from ringattn.transport.base import Message
from ringattn.transport.peer.transport import PeerTransport
from ringattn.transport.shared.page import ARRIVAL
from tests.transport.peers.rings import meet
from tests.transport.peers.sim_driver import SimGpu

OFFSETS = (0, 1, 7, 64)


def neighbors(ring: PeerTransport) -> tuple[int, int]:
    return (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """No power of two divides its period, so bytes that are shifted are seen."""
    period = torch.arange(251, dtype=torch.uint8).roll(seed)
    return period.repeat(-(-nbytes // 251))[:nbytes]


def around(ring: PeerTransport, sent: torch.Tensor, received: torch.Tensor, label: str = "x") -> Any:
    after, before = neighbors(ring)
    return ring.exchange([Message(after, sent, label)], [Message(before, received, label)])


def sizes(rank: int, world_size: int, wanted: list[int], switches: dict[str, Any]) -> list[bool]:
    """Bytes of every size, at odd offsets, into exchanged and into plain memory."""
    ring, whole = meet(rank, world_size, gpu=SimGpu(**switches)), []
    before = neighbors(ring)[1]
    for nbytes in wanted:
        for offset in OFFSETS:
            room = ring.allocate(2 * (nbytes + offset)).view(2, -1)
            plain = torch.zeros(nbytes + offset, dtype=torch.uint8)
            sent = room[0, offset:]
            sent.copy_(pattern(nbytes, rank))
            for received in (room[1, offset:], plain[offset:]):
                received.zero_()
                around(ring, sent, received).wait()
                whole.append(torch.equal(received, pattern(nbytes, before)))
    ring.close()
    return whole


def again_and_again(rank: int, world_size: int, times: int) -> tuple[list[dict[str, int]], list[int], list[int]]:
    """Open and close: what the driver still has, open descriptors, and mappings after each time but the first."""
    left, descriptors, mappings = [], [], []
    for number in range(times + 1):
        gpu = SimGpu()
        ring = meet(rank, world_size, gpu=gpu, rounds=1)
        room = ring.allocate(1 << 16).view(2, -1)
        around(ring, room[0], room[1]).wait()
        del room
        ring.close()
        if number:
            left.append(gpu.driver.leftovers())
            gc.collect()  # a ring holds its page until it is collected
            descriptors.append(len(os.listdir("/proc/self/fd")))
            with open("/proc/self/maps") as maps:
                mappings.append(sum("memfd" in line for line in maps))
    return left, descriptors, mappings


def growing(rank: int, world_size: int) -> dict[str, Any]:
    """Memory is let go of and taken anew in mid-run, on one rank more often than on the other."""
    gpu = SimGpu()
    ring = meet(rank, world_size, gpu=gpu)
    before, whole, mapped = neighbors(ring)[1], [], []
    room = None
    for number in range(6):
        if room is None or rank == 0 or number % 2:
            room = None
            room = ring.allocate((number + 1) << 16)
        half = room[: 1 << 16].view(2, -1)
        half[0] = 10 * number + rank
        around(ring, half[0], half[1], f"n {number}").wait()
        whole.append(bool((half[1] == 10 * number + before).all()))
        mapped.append(len(gpu.driver._mapped))
        del half
    del room
    ring.close()
    return {"whole": whole, "mapped": max(mapped), "left": gpu.driver.leftovers()}


def ahead(rank: int, world_size: int, count: int) -> list[bool]:
    """The receiver starts many more messages than its log holds before the sender starts the first."""
    ring = meet(rank, world_size)
    buffers = ring.allocate(64 * count).view(count, 64)
    ring.all_gather_bytes(b"")
    if rank == 0:
        time.sleep(0.5)
        for number in range(count):
            buffers[number] = number % 251
            ring.exchange([Message(1, buffers[number], f"n {number}")], [])
    else:
        for number in range(count):
            ring.exchange([], [Message(0, buffers[number], f"n {number}")])
    ring.drain()
    whole = [bool((buffers[number] == number % 251).all()) for number in range(count)]
    del buffers
    ring.close()
    return whole


def out_of_memory(rank: int, world_size: int) -> str:
    gpu = SimGpu(memory=8 << 20)
    ring = meet(rank, world_size, gpu=gpu, rounds=1)
    try:
        ring.allocate(1 << 30)
        said = "nothing"
    except torch.OutOfMemoryError as error:
        said = f"{gpu.driver.released} {error}"
    room = ring.allocate(1 << 16).view(2, -1)
    around(ring, room[0], room[1]).wait()
    del room
    ring.close()
    return said


def kept_by_the_caller(rank: int, world_size: int) -> list[dict[str, int]]:
    """After an abort the memory stays while it is viewed, and goes afterwards."""
    gpu = SimGpu()
    ring = meet(rank, world_size, gpu=gpu)
    room = ring.allocate(1 << 16)
    around(ring, room[: 1 << 15], room[1 << 15 :]).wait()
    ring.all_gather_bytes(b"")
    ring.abort(ValueError("enough"))
    until = time.monotonic() + 5.0
    while gpu.driver.leftovers()["registered"] and time.monotonic() < until:
        time.sleep(0.01)
    found = [gpu.driver.leftovers()]
    room[0] = 7  # still there
    del room
    while any(gpu.driver.leftovers().values()) and time.monotonic() < until:
        time.sleep(0.01)
    return [*found, gpu.driver.leftovers()]


def unlike_ends(rank: int, world_size: int, what: str) -> str:
    ring = meet(rank, world_size)
    room = ring.allocate(64)
    count, label = (16, "v") if what == "label" and rank == 1 else (32, "k")
    if what == "bytes" and rank == 1:
        count = 16
    try:
        if rank == 0:
            ring.exchange([Message(1, room[:count], f"{label} to rank {2 if what == 'rank' else 1}")], []).wait()
        else:
            ring.exchange(
                [], [Message(0, room[:count] if what == "bytes" else room[:32], f"{label} from rank 0")]
            ).wait()
        ring.drain()
    except RingError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- faults ----------------------------------------------------------------------------------------------------------


def ended(gpu: SimGpu) -> dict[str, int]:
    """What the driver still has when the abort has ended: the memory that the caller views."""
    until = time.monotonic() + 5.0
    while gpu.driver.leftovers()["registered"] and time.monotonic() < until:
        time.sleep(0.01)
    return gpu.driver.leftovers()


def overwritten(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 goes on to write small numbers over what rank 0 paints, for a while."""
    ring = meet(rank, world_size)
    room = ring.allocate(64)
    page = ring.group.pages[0]
    ring.all_gather_bytes(b"")
    if rank == 1:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            page.store(ARRIVAL, 0, 1)
        time.sleep(1.0)
        return {}
    ring.exchange([], [Message(1, room, "never sent")])
    time.sleep(0.2)
    ring.abort(ValueError("enough"))
    ended = ring.watch.ended.wait(5.0)
    return {"ended": ended, "drained": ring.watch.drained}


def busy(rank: int, world_size: int) -> dict[str, float]:
    """A failure while the device still computes: the caller is told at once, the abort ends when it can."""
    gpu = SimGpu()
    ring = meet(rank, world_size, gpu=gpu)
    room = ring.allocate(64)
    caller = gpu.caller = gpu.new_stream()
    caller.compute(lambda: time.sleep(3.0))
    ring.exchange([Message(1 - rank, room[:8], "k")], [Message(1 - rank, room[8:16], "k")])
    ring.all_gather_bytes(b"")
    began = time.monotonic()
    ring.abort(ValueError("enough"))
    told_s = time.monotonic() - began
    ring.watch.ended.wait(10.0)
    return {"told_s": told_s, "ended_s": time.monotonic() - began, **ended(gpu)}


def spoiled(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 0 fails while rank 1 computes on a slot that rank 0's queued copy then runs into."""
    gpu = SimGpu()
    ring = meet(rank, world_size, gpu=gpu)
    caller = gpu.caller = gpu.new_stream()
    slot = ring.allocate(1 << 16)
    release, seen = threading.Event(), []
    if rank == 0:
        slot.fill_(1)
        ring.exchange([Message(1, slot, "first")], []).wait()
        ring.drain()
        other = torch.full((1 << 16,), 2, dtype=torch.uint8)
        ring.exchange([Message(1, other, "second")], [])
        ring.all_gather_bytes(b"queued")
        ring.abort(ValueError("rank 0 gives up"))
        time.sleep(2.0)
        return {"said": "aborted"}
    ring.exchange([], [Message(0, slot, "first")]).wait()

    def compute() -> None:
        release.wait(5.0)
        seen.append(sorted(set(slot.tolist())))

    caller.compute(compute)
    ring.watch.stop()  # so that only `drain` can see the poison
    ring.exchange([], [Message(0, slot, "second")])
    ring.all_gather_bytes(b"queued")
    time.sleep(0.5)  # the stray copy has run
    release.set()
    try:
        ring.drain()
        said = "success"
    except RingError as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said, "seen": seen[0]}

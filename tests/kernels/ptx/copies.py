"""Copies from global to shared memory by the threads of a warp (`cp.async`), and additions to it by TMA, in groups.

A copy happens when its group is waited for, which is as late as the program allows, or as soon as it is started. An
addition (`cp.reduce.async.bulk.tensor`) reads shared memory in the same way. It reaches global memory later, at a time
that nothing in the launch can know.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from tests.kernels.ptx.arithmetic import Lanes
from tests.kernels.ptx.memory import Fault, GlobalMemory, SharedMemory, TensorMap, swizzled
from tests.kernels.ptx.races import RaceDetector


class LaneCopies(NamedTuple):
    """The copies of one instruction: for each active lane the offset in shared memory, and the address.

    `size`: the bytes of each copy. `reads`: whether a lane reads its source; others write zeros.
    """

    targets: Lanes
    sources: Lanes
    size: int
    reads: Lanes


class CopyUnit:
    """The copies that a warp has started and not waited for."""

    def __init__(self, threads: Lanes, shared: SharedMemory, memory: GlobalMemory, detector: RaceDetector) -> None:
        self._threads, self._shared, self._memory, self._detector = threads, shared, memory, detector
        self._open: list[LaneCopies] = []
        self._groups: deque[list[LaneCopies]] = deque()
        self._committed = self._ended = 0

    def start(self, threads: Lanes, copies: LaneCopies, late: bool) -> None:
        """Start copies of some threads, in the group that is open."""
        words = (copies.targets[:, None] + np.arange(0, copies.size, 4)) // 4
        self._detector.start_copies(np.broadcast_to(threads[:, None], words.shape), words, self._committed + 1)
        if late:
            self._open.append(copies)
        else:
            self._land(copies)

    def commit(self) -> None:
        """End the group of the copies that were started since the last one."""
        self._groups.append(self._open)
        self._open = []
        self._committed += 1

    def wait(self, most: int) -> None:
        """Wait until at most `most` groups are in flight."""
        while len(self._groups) > most:
            for copies in self._groups.popleft():
                self._land(copies)
            self._ended += 1
        self._detector.copied(self._threads, self._ended)

    def _land(self, copies: LaneCopies) -> None:
        for byte in range(0, copies.size, 4):
            values = np.zeros(len(copies.targets), np.uint32)
            if copies.reads.any():
                sources = copies.sources[copies.reads] + np.uint64(byte)
                values[copies.reads] = self._memory.copy(sources, np.uint32)
            self._shared.store(copies.targets + byte, values)

    def finish(self) -> None:
        """Raise Fault if a copy is still in flight when the warp ends."""
        if self._open or any(self._groups):
            raise Fault("a warp ends while a copy is in flight")


class Addition(NamedTuple):
    """The addition of a box, through the map at an address, to global memory. `source`: the box in shared memory."""

    map_address: int
    tensor_map: TensorMap
    column: int
    row: int
    source: int


class AddingUnit:
    """The additions that a warp has started and that may still read shared memory. One thread starts them all."""

    def __init__(self, shared: SharedMemory, detector: RaceDetector) -> None:
        self._shared, self._detector = shared, detector
        self.landing: list[tuple[Addition, Lanes]] = []
        """Additions that have read shared memory and have not reached global memory, with their values."""
        self._thread: int | None = None
        self._open: list[Addition] = []
        self._groups: deque[list[Addition]] = deque()
        self._committed = self._ended = 0

    def start(self, thread: int, addition: Addition, late: bool) -> None:
        """Start an addition of a thread, in the group that is open."""
        if self._thread not in (None, thread):
            raise Fault("additions of two threads of a warp")
        self._thread = thread
        words = self._shared.offsets(self._places(addition), 4) // 4
        self._detector.add(thread, words.reshape(-1), self._committed + 1)
        if late:
            self._open.append(addition)
        else:
            self._read(addition)

    def commit(self, threads: Lanes) -> None:
        """End the group of the additions that were started since the last one, if their thread is one of `threads`."""
        if self._thread in threads:
            self._groups.append(self._open)
            self._open = []
            self._committed += 1

    def wait(self, threads: Lanes, most: int) -> None:
        """Wait until at most `most` groups read shared memory, if their thread is one of `threads`."""
        if self._thread is None or self._thread not in threads:
            return
        while len(self._groups) > most:
            for addition in self._groups.popleft():
                self._read(addition)
            self._ended += 1
        self._detector.added(self._thread, self._ended)

    def _places(self, addition: Addition) -> Lanes:
        rows, columns = np.indices(addition.tensor_map.box[::-1])
        return swizzled(addition.source + rows * 128 + columns * 4).astype(np.uint64)

    def _read(self, addition: Addition) -> None:
        offsets = self._shared.offsets(self._places(addition), 4)
        self.landing.append((addition, self._shared.load(offsets, np.float32)))

    def reads(self, map_address: int) -> bool:
        """Return whether an addition may still read the tensor map at an address."""
        return any(x.map_address == map_address for group in (self._open, *self._groups) for x in group)

    def finish(self) -> None:
        """Raise Fault if an addition may still read shared memory when the warp ends."""
        if self._open or any(self._groups):
            raise Fault("a warp ends while an addition reads shared memory")

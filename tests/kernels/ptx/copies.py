"""Copies from global to shared memory by the threads of a warp (`cp.async`), in groups.

A copy happens when its group is waited for, which is as late as the program allows, or as soon as it is started.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from tests.kernels.ptx.arithmetic import Lanes
from tests.kernels.ptx.memory import Fault, GlobalMemory, SharedMemory
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

"""What the warps of a thread block wait for: mbarriers, named barriers and the pool of registers."""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx.arithmetic import Lanes
from tests.kernels.ptx.memory import Fault
from tests.kernels.ptx.races import RaceDetector

LARGEST_TRANSFER = (1 << 20) - 1


class Mbarrier:
    """A barrier in shared memory: a phase ends after `count` arrivals and when all expected bytes have arrived."""

    def __init__(self, count: int, engine: int, initialized: tuple[int, int], detector: RaceDetector) -> None:
        self.count, self.engine, self.initialized, self._detector = count, engine, initialized, detector
        self.pending, self.bytes, self.phase = count, 0, 0
        self._current, self._previous = detector.nothing(), detector.nothing()
        self.copies = 0
        """The number of copies that were started."""
        self._landed: set[int] = set()
        self._all_landed = 0
        """All copies up to this number have landed."""

    def check(self, thread: int, fenced: bool = False) -> None:
        """Raise Fault if a thread (or a copy that it starts) may use the barrier before it is initialized."""
        if not self._detector.knows(thread, self.initialized, fenced):
            raise Fault(f"race: an mbarrier may be used before its initialization{' is fenced' if fenced else ''}")

    def arrive(self, threads: Lanes) -> None:
        """Arrive once for each thread."""
        for thread in threads:
            self.check(int(thread))
        if len(threads) > self.pending:
            raise Fault(f"{len(threads)} arrivals at an mbarrier that expects {self.pending}")
        self._merge(self._detector.release(threads))
        self.pending -= len(threads)
        self._turn()

    def expect(self, count: int) -> None:
        """Expect more bytes in this phase."""
        self.bytes += count
        if abs(self.bytes) > LARGEST_TRANSFER:
            raise Fault(f"{self.bytes} bytes expected by an mbarrier")

    def start_copy(self) -> int:
        """Return the number of a new copy that will arrive here."""
        self.copies += 1
        return self.copies

    def continue_copies(self, old: Mbarrier) -> None:
        """Take the copy engine of a barrier that has ended, all of whose copies have landed."""
        self.copies, self._all_landed = old.copies, old._all_landed

    def land(self, copy: int, count: int) -> None:
        """Let a copy arrive with its bytes."""
        self._landed.add(copy)
        while self._all_landed + 1 in self._landed:
            self._all_landed += 1
            self._landed.remove(self._all_landed)
        self.bytes -= count
        self._turn()

    def multiplied(self, warp: int, group: int, clocks: tuple[Lanes, Lanes]) -> None:
        """Arrive for the products of a warp up to a group (`tcgen05.commit`). `clocks`: what happened before them."""
        if not self.pending:
            raise Fault("an arrival of products at an mbarrier that expects none")
        self._merge(clocks)
        for clock in self._current:
            unit = self._detector.first_matrix_unit + warp
            clock[unit] = max(clock[unit], group)
        self.pending -= 1
        self._turn()

    def _merge(self, clocks: tuple[Lanes, Lanes]) -> None:
        for clock, released in zip(self._current, clocks, strict=True):
            np.maximum(clock, released, out=clock)

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            for clock in self._current:
                clock[self._detector.first_copy_engine + self.engine] = self._all_landed
            self._previous, self._current = self._current, self._detector.nothing()
            self.phase ^= 1
            self.pending = self.count

    def has_passed(self, parity: int) -> bool:
        """Return whether the phase of a parity has ended and the next one has not."""
        return self.phase != parity

    def acquire(self, threads: Lanes) -> None:
        """Let threads know what happened before the end of the last phase."""
        self._detector.acquire(threads, self._previous)


class NamedBarrier:
    """A barrier with a number (`bar.sync`), for a given number of threads."""

    def __init__(self) -> None:
        self.count = 0
        self.waiting: list[int] = []
        """The warps that have arrived."""
        self.turns = 0
        """How often all threads have arrived."""

    def arrive(self, warp: int, count: int, detector: RaceDetector) -> None:
        """Let the 32 threads of a warp arrive."""
        if self.waiting and self.count != count:
            raise Fault(f"a named barrier for {self.count} threads is used for {count}")
        if warp in self.waiting:
            raise Fault("a warp arrives twice at a named barrier")
        self.count = count
        self.waiting.append(warp)
        if 32 * len(self.waiting) == count:
            detector.join(np.concatenate([np.arange(32 * x, 32 * x + 32) for x in self.waiting]))
            self.waiting = []
            self.turns += 1


class RegisterPool:
    """The registers of a thread block, which warps give back and take by `setmaxnreg`."""

    def __init__(self, warps: int, registers: int) -> None:
        self.limits = [registers] * warps
        self.free = 0

    def give(self, warp: int, limit: int) -> None:
        """Reduce the registers of each thread of a warp."""
        if limit > self.limits[warp]:
            raise Fault(f"setmaxnreg.dec from {self.limits[warp]} to {limit} registers")
        self.free += self.limits[warp] - limit
        self.limits[warp] = limit

    def take(self, warp: int, limit: int) -> bool:
        """Increase the registers of each thread of a warp. Return False if too few are free."""
        if limit < self.limits[warp]:
            raise Fault(f"setmaxnreg.inc from {self.limits[warp]} to {limit} registers")
        if limit - self.limits[warp] > self.free:
            return False
        self.free -= limit - self.limits[warp]
        self.limits[warp] = limit
        return True

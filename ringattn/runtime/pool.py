"""The one piece of memory that a ring's passes work in.

Guarantees: nothing is allocated inside a pass; one pass at a time; with `poison`, memory that nobody has written in
this pass, or that was released, reads as NaN in every floating dtype, so that a test notices, and a write past the end
of a pass's memory, or before its start, ends the pass with an error (canaries).
Not covered: what the slots hold; the placement of a plan says where they are.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch

from ringattn.errors import PlanError, RingError

ALIGNMENT_BYTES = 256
POISON = 0xFF
CANARY = 0xA5


class Pool:
    """An arena that `allocate(nbytes)` gave, a flat uint8 tensor such as `Transport.allocate` returns.

    `high_water_bytes`: of the largest pass; `passes`: begun so far; `growths`: times that new memory was taken. All
    other passes used again what was there.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], poison: bool = False) -> None:
        self._allocate = allocate
        self._poison = poison
        self._running = threading.Lock()
        self._edges: tuple[torch.Tensor, ...] = ()
        self._canaries: tuple[torch.Tensor, ...] = ()
        self._nothing = self._aligned(0).clone()
        self._arena = self._nothing
        self.taken_bytes = 0
        """Bytes of the arena, or those that it had when it was let go."""
        self.high_water_bytes = self.passes = self.growths = 0

    @property
    def nbytes(self) -> int:
        """Bytes that a pass can use without growth."""
        return self._arena.numel()

    @property
    def reuses(self) -> int:
        """Passes that found enough memory."""
        return self.passes - self.growths

    def report(self) -> dict[str, int]:
        """Bytes now and in the largest pass, and how many passes needed no new memory."""
        return {
            "pool_bytes": self.nbytes, "pool_high_water_bytes": self.high_water_bytes, "pool_reuses": self.reuses,
        }  # fmt: skip

    def reserve(self, nbytes: int) -> None:
        """Make room for `nbytes`. Growth makes all former views stale. Raises `RingError` while a pass is running."""
        if self._running.locked():
            raise RingError("the pool cannot grow while a pass is running")
        self._grow(nbytes)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """The uint8 bytes [offset, offset + nbytes). Raises `PlanError` outside the arena or off the alignment."""
        if offset % ALIGNMENT_BYTES or not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise PlanError(
                f"no slot of {nbytes} bytes at {offset}: the arena has {self.nbytes}, slots align to {ALIGNMENT_BYTES}"
            )
        return self._arena[offset : offset + nbytes]

    def slot(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of `shape` at `offset` bytes; its contents are whatever was written there."""
        return self.view(offset, math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))

    def release(self, offset: int, nbytes: int) -> None:
        """Say that these bytes are not read before they are written again."""
        if self._poison:
            self.view(offset, nbytes).fill_(POISON)

    def begin_pass(self, nbytes: int) -> None:
        """Start a pass that uses [0, nbytes), growing if need be. Raises `RingError` while another is running."""
        if not self._running.acquire(blocking=False):
            raise RingError("one pass at a time: another is still running on this ring")
        try:
            self._grow(nbytes)
        except BaseException:
            self._running.release()
            raise
        self.passes += 1
        self.high_water_bytes = max(self.high_water_bytes, nbytes)
        self.release(0, nbytes)
        if self._poison:
            self._canaries = (*self._edges, self._arena[nbytes:])
            for canary in self._canaries:
                canary.fill_(CANARY)

    def end_pass(self) -> None:
        """End the running pass, whether it succeeded or not.

        Raises `RingError` when none is running, and `PlanError` when it wrote outside its memory.
        """
        if not self._running.locked():
            raise RingError("no pass is running")
        intact = all(bool((canary == CANARY).all()) for canary in self._canaries)
        self.release(0, self.nbytes)
        self._running.release()
        if not intact:
            raise PlanError("a pass wrote outside the bytes that its plan asked for; the plan or a kernel is wrong")

    def release_arena(self) -> None:
        """Let go of the memory. Views that still exist keep it."""
        self._arena, self._edges, self._canaries = self._nothing, (), ()

    def reset_high_water(self) -> None:
        """Forget the largest pass so far."""
        self.high_water_bytes = 0

    def _grow(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            self.release_arena()  # the old memory must be free before the new is taken
            self.taken_bytes = 0
            self._arena = self._aligned(nbytes)
            self.taken_bytes = nbytes
            self.growths += 1
            self.release(0, nbytes)

    def _aligned(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):  # it outlives the pass that needs it: the next one may be a training step's
            memory = self._allocate(nbytes + ALIGNMENT_BYTES)
            start = -memory.data_ptr() % ALIGNMENT_BYTES
            self._edges = memory[:start], memory[start + nbytes :]
            return memory[start : start + nbytes]

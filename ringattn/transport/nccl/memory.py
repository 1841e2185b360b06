"""The device memory of one ring: NCCL's own, registered, where all libraries have it, else torch's.

Guarantees: a piece is given back when nothing views it any more and the device has done what may still touch it, and
never from a destructor; where the device has no room, torch's cache is emptied once before that is an error.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import torch

from ringattn.observe.memory import is_shortage
from ringattn.transport.deadline import Deadline, wait_until
from ringattn.transport.device import Device, PassOrder
from ringattn.transport.nccl.binding import Binding, NcclError
from ringattn.transport.nccl.communicator import Communicator, State


def say(rank: int, words: str) -> None:
    """For the user, where no call is left that could raise."""
    print(f"ringattn rank {rank}: {words}", file=sys.stderr, flush=True)


_left: list[RingMemory] = []
"""Kept until the process ends: torch too would hand the memory out again."""


class _View:
    """What every view of a piece keeps alive."""


class _Piece:
    """One allocation. `plain`: torch's memory, None for NCCL's."""

    def __init__(self, plain: torch.Tensor | None) -> None:
        self.plain = plain
        self.registrations: list[tuple[Communicator, int]] = []


class RingMemory:
    """The memory of one ring, used by the thread that uses the ring, and after its end by a thread of its own."""

    def __init__(
        self,
        binding: Binding,
        device: Device,
        communicators: Sequence[Communicator],
        registered: bool,
        rank: int = 0,
    ) -> None:
        self.registered, self.order = registered, PassOrder(device)
        self._rank = rank
        self._binding, self._device, self._communicators = binding, device, communicators
        self._pieces: dict[int, _Piece] = {}
        # Addresses whose last view has gone. A queue that a destructor may write to, whatever its thread holds.
        self._unused: SimpleQueue[int] = SimpleQueue()
        self._ending: threading.Thread | None = None

    @property
    def is_empty(self) -> bool:
        """Whether all has been given back."""
        return not self._pieces

    def computed(self) -> Callable[[], bool]:
        """Whether the caller's streams have run what is on them now and may touch this memory."""
        order = self.order
        # Nothing asks for an event of a capture, nor does the capture's work run before a replay.
        if self._device.is_capturing():
            return order.passed
        now = self._device.new_event()
        try:
            now.record(self._device.current_stream())
        except RuntimeError:  # a device that is lost comes to no event
            return lambda: False
        return lambda: now.query() and order.passed()

    def wait(self, computed: Callable[[], bool], limit_s: float) -> bool:
        """Wait for compute; when that does not end, say so and that memory is left."""
        if self.is_empty or wait_until(computed, Deadline(limit_s)):
            return True
        say(self._rank, f"the GPU was still computing after {limit_s} s, so memory of the ring is not given back")
        return False

    def allocate(self, nbytes: int, quiet: Callable[[], bool]) -> torch.Tensor:
        """A flat uint8 tensor.

        Memory without a view is given back first, if `quiet`: it lets go of what has arrived, and returns whether the
        device can touch none of that any more; it may wait. Raises `NcclError`, or torch's error, when the device has
        no room.
        """
        if not nbytes:
            return self._device.empty(0)
        if self._pieces and quiet():
            self.free()
        self._device.activate()
        plain = None if self.registered else self._device.empty(nbytes)
        pointer = self._take(nbytes) if plain is None else plain.data_ptr()
        piece = self._pieces[pointer] = _Piece(plain)
        view = _View()
        # A view's end only notes the address: giving back here could call NCCL from any thread, at any time.
        weakref.finalize(view, self._unused.put, pointer).atexit = False
        if self.registered:
            for communicator in self._communicators:
                handle = self._binding.register(communicator.handle, pointer, nbytes)
                piece.registrations.append((communicator, handle))
        return self._device.wrap(pointer, nbytes, view)

    def free(self) -> None:
        """Give back what has no view any more. The device can touch none of it."""
        while True:
            try:
                pointer = self._unused.get_nowait()
            except Empty:
                return
            self._give_back(pointer)

    def end(self, name: str, quiet: Callable[[], bool]) -> None:
        """Give back each piece when its last view goes, and `quiet` says that the device can touch it no more.

        Returns at once: an error that a caller keeps has views, by the frames of its traceback.
        """
        if self._ending is None and not self.is_empty:
            self._ending = threading.Thread(target=self._run_out, args=(quiet,), name=name, daemon=True)
            self._ending.start()

    def leave(self) -> None:
        """Give nothing back any more: the device may touch it for ever."""
        _left.append(self)

    def _run_out(self, quiet: Callable[[], bool]) -> None:
        try:
            self._device.activate()
            # Also before the first view has gone, for it lets go of what this package itself still views.
            calm = quiet()
            while calm and self._pieces:
                pointer = self._unused.get()
                if calm := quiet():
                    self._give_back(pointer)
        except RuntimeError as error:  # a device that is lost: its memory went with it
            say(self._rank, f"memory of the ring is not given back: {error}")
        if self._pieces:
            self.leave()

    def _take(self, nbytes: int) -> int:
        try:
            return self._binding.mem_alloc(nbytes)
        except NcclError as error:
            if not is_shortage(error):
                raise
            # Torch empties its cache by itself where its own allocations find no room; NCCL knows nothing of it.
            self._device.release_cached()
            return self._binding.mem_alloc(nbytes)

    def _give_back(self, pointer: int) -> None:
        piece = self._pieces.pop(pointer)
        # Communicators that have ended took their registrations with them.
        for communicator, handle in piece.registrations:
            if communicator.state is State.READY:
                self._binding.deregister(communicator.handle, handle)
        # Last: NCCL may not hold a registration of memory that is gone.
        if piece.plain is None:
            self._binding.mem_free(pointer)

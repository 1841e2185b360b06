"""Device memory that exchanges send from and receive into.

NCCL's own memory, registered with every lane, where the ring agreed on it; plain device memory otherwise. Guarantees:
memory is given back only when nobody views it and nothing is under way, and never from a destructor; what NCCL was
given outlives the communicators' end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from ringattn.transport.nccl.binding import Binding
from ringattn.transport.nccl.communicator import Communicator, State
from ringattn.transport.nccl.device import Device


class _Block:
    """One allocation; whoever views it holds this object."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer


class Slots:
    """The memory of one ring."""

    def __init__(self, binding: Binding, device: Device, lanes: Sequence[Communicator], registered: bool) -> None:
        self.registered = registered
        self._binding, self._device, self._lanes = binding, device, lanes
        self._registrations: dict[int, list[tuple[Communicator, int]]] = {}
        self._unused: list[int] = []

    def allocate(self, nbytes: int, quiet: Callable[[], None]) -> torch.Tensor:
        """A flat uint8 tensor. `quiet` returns when the device can touch nothing unused any more; that is given back
        first.

        Raises `NcclError` when the device has no room.
        """
        if not self.registered or not nbytes:
            return self._device.empty(nbytes)
        if self._registrations:
            quiet()
            self.free()
        self._device.activate()
        pointer = self._binding.mem_alloc(nbytes)
        self._registrations[pointer] = []
        block = _Block(pointer)
        weakref.finalize(block, self._unused.append, pointer).atexit = False
        for lane in self._lanes:
            self._registrations[pointer].append((lane, self._binding.register(lane.handle, pointer, nbytes)))
        return self._device.wrap(pointer, nbytes, block)

    def free(self) -> None:
        """Give back what nobody views any more; lanes that have ended took their registrations with them."""
        while self._unused:
            pointer = self._unused.pop()
            for lane, handle in self._registrations.pop(pointer):
                if lane.state is State.READY:
                    self._binding.deregister(lane.handle, handle)
            self._binding.mem_free(pointer)

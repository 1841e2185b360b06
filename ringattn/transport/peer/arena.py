"""Device memory that other ranks write into, and their memory as this rank has mapped it.

Guarantees: an allocation is freed only when nothing views it, nothing is under way, and never from a destructor; a
mapping of another rank's memory goes when its owner has freed memory, when the ring fails, and at its close, and only
behind everything that the lane was given. Memory that this rank frees while others map it stays theirs until they let
go of it: the driver counts references.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from ringattn.transport.device import CudaDevice, ViewedMemory
from ringattn.transport.peer.driver import OUT_OF_MEMORY, CudaDriver, DriverError


class ArenaPlace(NamedTuple):
    """A part of an arena that other ranks can map. `arena_bytes`: of the whole, which is what they map."""

    arena: int
    arena_bytes: int
    offset: int


class Allocation:
    """What the driver gave. Other ranks are served its descriptor until it is given back."""

    def __init__(self, handle: int, address: int, nbytes: int, fd: int) -> None:
        self.handle, self.address, self.nbytes = handle, address, nbytes
        self.fd: int | None = fd
        self.arena = 0


class Arena(ViewedMemory[Allocation]):
    """The memory of one rank."""

    def __init__(
        self,
        driver: CudaDriver,
        gpu: CudaDevice,
        share: Callable[[Allocation], int],
        freed: Callable[[int], None],
        emptied: Callable[[], None],
    ) -> None:
        """`share` serves an allocation to the other ranks while it lives, and gives its number; `freed` is told how
        often memory was given back; `emptied` gives back to the device what others in this process keep for later.
        """
        super().__init__(gpu)
        self._driver, self._share, self._freed, self._emptied = driver, share, freed, emptied
        self._given_back = 0
        self._granularity = driver.granularity()

    def allocate(self, nbytes: int, quiet: Callable[[], None]) -> torch.Tensor:
        """A flat uint8 tensor. `quiet` returns when the device can touch nothing unused any more.

        Raises `DriverError` when the device has no room.
        """
        if not nbytes:
            return self._gpu.empty(0)
        if not self._unused.empty():
            quiet()
            self.free()
        whole = -(-nbytes // self._granularity) * self._granularity
        try:
            made = self._make(whole)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            # What torch keeps for later is memory, too; once.
            self._emptied()
            made = self._make(whole)
        return self._viewed(made.address, nbytes, made)

    def place(self, address: int, nbytes: int) -> ArenaPlace | None:
        """Where other ranks find this memory; None if it is no part of an allocation."""
        for start, made in self._pieces.items():
            if start <= address and address + nbytes <= start + made.nbytes:
                return ArenaPlace(made.arena, made.nbytes, address - start)
        return None

    def free_later(self, quiet: Callable[[], None]) -> None:
        """For a thread of its own, when the ring has ended: free the rest as its views end, behind `quiet`."""

        def is_quiet() -> bool:
            quiet()
            return True

        self._free_each(is_quiet)

    def _make(self, nbytes: int) -> Allocation:
        """Create, map and export. A step that fails undoes those before."""
        driver = self._driver
        handle = driver.create(nbytes)
        try:
            address = driver.map(handle, nbytes)
            try:
                made = Allocation(handle, address, nbytes, driver.export(handle))
            except DriverError:
                driver.unmap(address, nbytes)
                raise
        except DriverError:
            driver.release(handle)
            raise
        made.arena = self._share(made)
        return made

    def _give_back(self, piece: Allocation) -> None:
        fd, piece.fd = piece.fd, None
        if fd is not None:
            os.close(fd)
        self._driver.unmap(piece.address, piece.nbytes)
        self._driver.release(piece.handle)
        self._given_back += 1
        self._freed(self._given_back)


class _Import(NamedTuple):
    handle: int
    address: int
    nbytes: int


class Imports:
    """Other ranks' memory, mapped at the first message into it. Used by one thread at a time."""

    def __init__(self, driver: CudaDriver, pull: Callable[[int, int], int], freed: Callable[[int], int]) -> None:
        """`pull(rank, arena)`: a file descriptor of its memory; `freed(rank)`: how often it has freed memory."""
        self._driver, self._pull, self._freed = driver, pull, freed
        self._mapped: dict[tuple[int, int], _Import] = {}
        self._seen: dict[int, int] = {}
        self._stale: list[_Import] = []

    def __len__(self) -> int:
        return len(self._mapped) + len(self._stale)

    def address(self, rank: int, place: ArenaPlace) -> int:
        """Where this rank writes to reach `place` of `rank`."""
        found = self._mapped.get((rank, place.arena))
        if found is None:
            found = self._mapped[rank, place.arena] = self._map(rank, place)
        return found.address + place.offset

    def review(self, ranks: set[int], quiet: Callable[[], bool]) -> None:
        """Let go of the memory of those that have freed some since; `quiet`: whether the lane has run empty."""
        for rank in ranks:
            # The owner counts in its page how often it has freed memory.
            count = self._freed(rank)
            if count != self._seen.setdefault(rank, count):
                self._seen[rank] = count
                # Which of its arenas went is not said: what lives is mapped again at its next message.
                for key in [key for key in self._mapped if key[0] == rank]:
                    self._stale.append(self._mapped.pop(key))
        # A copy that is under way may still write into a stale mapping, so it is unmapped behind all of them.
        if self._stale and quiet():
            self._drop(self._stale)

    def drop(self) -> None:
        """Let go of everything. Nothing may be under way."""
        gone = [*self._mapped.values(), *self._stale]
        self._mapped.clear()
        self._stale.clear()
        self._drop(gone)

    def _map(self, rank: int, place: ArenaPlace) -> _Import:
        fd = self._pull(rank, place.arena)
        try:
            handle = self._driver.adopt(fd)
            try:
                return _Import(handle, self._driver.map(handle, place.arena_bytes), place.arena_bytes)
            except DriverError:
                self._driver.release(handle)
                raise
        finally:
            os.close(fd)

    def _drop(self, gone: list[_Import]) -> None:
        while gone:
            handle, address, nbytes = gone.pop()
            self._driver.unmap(address, nbytes)
            self._driver.release(handle)

"""Device memory for peer exchanges: this rank's arena, and its mappings of the other ranks' arenas.

Guarantees: an allocation is freed only when no tensor views it and no operation on it is in flight, and never from a
destructor. A mapping of another rank's memory is dropped after its owner has freed memory, when the ring fails, and at
its close, and only after everything enqueued on the lane has run. Memory that this rank frees while others map it
stays valid for them until they unmap it, because the driver counts references.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from ringattn.transport.device import CudaDevice, ViewedMemory
from ringattn.transport.peer.driver import OUT_OF_MEMORY, CudaDriver, DriverError


class ArenaPlace(NamedTuple):
    """The position of a buffer in memory that other ranks can map: its `offset` in allocation number `arena`.

    Other ranks map the whole allocation, of `arena_bytes`.
    """

    arena: int
    arena_bytes: int
    offset: int


class Allocation:
    """A driver allocation. Other ranks can fetch its file descriptor until it is freed."""

    def __init__(self, handle: int, address: int, nbytes: int, fd: int) -> None:
        self.handle, self.address, self.nbytes = handle, address, nbytes
        # The driver's memory lives while any process holds a handle, a mapping or a descriptor of it. So closing this
        # descriptor stops new imports, and never invalidates those that exist.
        self.fd: int | None = fd
        # Other ranks request the descriptor by this number, which is assigned when the allocation is shared.
        self.arena = 0


class Arena(ViewedMemory[Allocation]):
    """The exportable memory of one rank."""

    def __init__(
        self,
        driver: CudaDriver,
        gpu: CudaDevice,
        share: Callable[[Allocation], int],
        freed: Callable[[int], None],
        emptied: Callable[[], None],
    ) -> None:
        """Create an empty arena.

        `share` offers an allocation to the other ranks while it lives, and returns its number.
        `freed` receives the number of allocations freed so far, which other ranks compare to drop stale mappings.
        `emptied` returns cached memory of this process (torch's) to the device.
        """
        super().__init__(gpu)
        self._driver, self._share, self._freed, self._emptied = driver, share, freed, emptied
        self._given_back = 0
        self._granularity = driver.granularity()

    def allocate(self, nbytes: int, quiet: Callable[[], None]) -> torch.Tensor:
        """Return a flat uint8 tensor. `quiet` returns once the device cannot touch memory that no tensor views.

        Raises `DriverError` if the device is out of memory.
        """
        # The driver refuses allocations of 0 bytes, and no message of 0 bytes is ever sent into one.
        if not nbytes:
            return self._gpu.empty(0)
        if not self._unused.empty():
            # Memory whose views have ended is freed only here: `quiet` synchronizes, and a destructor must never wait.
            quiet()
            self.free()
        whole = -(-nbytes // self._granularity) * self._granularity
        try:
            allocation = self._make(whole)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            # Torch's caching allocator may hold free device memory. Release it, and try a second time.
            self._emptied()
            allocation = self._make(whole)
        return self._viewed(allocation.address, nbytes, allocation)

    def place(self, address: int, nbytes: int) -> ArenaPlace | None:
        """Return where other ranks find this memory, or None if it is not part of an allocation."""
        for start, allocation in self._pieces.items():
            if start <= address and address + nbytes <= start + allocation.nbytes:
                return ArenaPlace(allocation.arena, allocation.nbytes, address - start)
        return None

    def free_later(self, quiet: Callable[[], None]) -> None:
        """Free each remaining allocation after its last view has ended and `quiet` has returned.

        Runs on a separate thread once the ring has ended.
        """

        def is_quiet() -> bool:
            quiet()
            return True

        self._free_each(is_quiet)

    def _make(self, nbytes: int) -> Allocation:
        """Create, map and export an allocation. If a step fails, undo those before it."""
        driver = self._driver
        handle = driver.create(nbytes)
        try:
            address = driver.map(handle, nbytes)
            try:
                allocation = Allocation(handle, address, nbytes, driver.export(handle))
            except DriverError:
                driver.unmap(address, nbytes)
                raise
        except DriverError:
            driver.release(handle)
            raise
        # Offer it last: only a complete allocation may be fetched by other ranks.
        allocation.arena = self._share(allocation)
        return allocation

    def _give_back(self, piece: Allocation) -> None:
        # Stop offering the memory before it is unmapped. Ranks that have mapped it keep it alive through their handles.
        # The attribute is cleared before the close, because another thread sends the descriptor that it finds there.
        fd, piece.fd = piece.fd, None
        if fd is not None:
            os.close(fd)
        self._driver.unmap(piece.address, piece.nbytes)
        self._driver.release(piece.handle)
        self._given_back += 1
        # Publish the count after the free: a rank that reads it drops its mappings and cannot map this one again.
        self._freed(self._given_back)


class _Import(NamedTuple):
    """A mapping of another rank's allocation in this process."""

    handle: int
    address: int
    nbytes: int


class Imports:
    """The mappings of other ranks' memory, each made at the first message into it. For one thread at a time."""

    def __init__(self, driver: CudaDriver, pull: Callable[[int, int], int], freed: Callable[[int], int]) -> None:
        """Create an object without mappings.

        `pull(rank, arena)` fetches the file descriptor of allocation number `arena` of `rank`. `freed(rank)` reads how
        many allocations `rank` has freed.
        """
        self._driver, self._pull, self._freed = driver, pull, freed
        # The keys are a rank and the number of its allocation.
        self._mapped: dict[tuple[int, int], _Import] = {}
        # For each rank, how many allocations it had freed at the last review.
        self._reviewed: dict[int, int] = {}
        # No later copy uses these mappings, but copies in flight may.
        self._stale: list[_Import] = []

    def __len__(self) -> int:
        return len(self._mapped) + len(self._stale)

    def address(self, rank: int, place: ArenaPlace) -> int:
        """Return the address at which this rank writes to reach `place` of `rank`."""
        mapping = self._mapped.get((rank, place.arena))
        if mapping is None:
            mapping = self._mapped[rank, place.arena] = self._map(rank, place)
        return mapping.address + place.offset

    def review(self, ranks: set[int], quiet: Callable[[], bool]) -> None:
        """Drop the mappings of those `ranks` that have freed memory since the last call.

        The memory is unmapped once `quiet` returns True, that is, once the lane is empty: now or at a later call.
        """
        for rank in ranks:
            # The owner publishes in its page how many allocations it has freed.
            count = self._freed(rank)
            if count != self._reviewed.setdefault(rank, count):
                self._reviewed[rank] = count
                # The count does not say which allocation was freed, so drop all. The next message maps its target.
                for key in [key for key in self._mapped if key[0] == rank]:
                    self._stale.append(self._mapped.pop(key))
        # A copy in flight may still write into a stale mapping, so unmap only when the lane has run empty.
        if self._stale and quiet():
            self._drop(self._stale)

    def drop(self) -> None:
        """Unmap everything. No operation may be in flight."""
        imports = [*self._mapped.values(), *self._stale]
        self._mapped.clear()
        self._stale.clear()
        self._drop(imports)

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
            # The imported handle keeps the memory alive without the descriptor.
            os.close(fd)

    def _drop(self, gone: list[_Import]) -> None:
        # Remove each mapping from the list first, so that a call after a driver error does not unmap it twice.
        while gone:
            handle, address, nbytes = gone.pop()
            self._driver.unmap(address, nbytes)
            self._driver.release(handle)

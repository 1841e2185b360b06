"""Device memory of all ranks: which addresses are whose, and since when they are gone.

Guarantees: no byte is read or written through an address that its rank does not own; memory that was freed is never
handed out again as long as anything may look at it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict

import numpy as np


class Allocation:
    """One piece. NCCL's memory lives until it is freed, plain memory until its last view is gone; its pages stay."""

    def __init__(self, array: np.ndarray, kept: bool) -> None:
        self._pages = array.base
        self.address, self.nbytes = array.ctypes.data, array.nbytes
        self.freed = False
        self.kept = array if kept else None
        self._array = weakref.ref(array)

    @property
    def gone(self) -> bool:
        """Whether it has been freed or dropped."""
        return self.freed or self._array() is None

    def bytes_at(self, address: int, nbytes: int) -> np.ndarray | None:
        """A view of this range; None unless it lies within this piece and the piece lives."""
        array = None if self.freed else self._array()
        offset = address - self.address
        if array is None or offset < 0 or offset + nbytes > self.nbytes:
            return None
        return array[offset : offset + nbytes]


class Memory:
    """The memory of all ranks. `any_address`: also take addresses that no device handed out, unchecked.

    `capacity`: bytes of each device, for NCCL's memory and what torch holds in its cache, `cached` by rank.
    """

    def __init__(self, any_address: bool, capacity: int | None = None) -> None:
        self._any_address = any_address
        self.capacity = capacity
        self.cached: defaultdict[int, int] = defaultdict(int)
        self._allocations: defaultdict[int, list[Allocation]] = defaultdict(list)

    def plain(self, rank: int, nbytes: int) -> np.ndarray:
        """New memory that is gone when nobody holds it."""
        array = _pages(nbytes)
        self._allocations[rank].append(Allocation(array, kept=False))
        return array

    def nccl(self, rank: int, nbytes: int) -> int | None:
        """The address of new memory that lives until `free`; None where there is no room."""
        if self.capacity is not None and self.nccl_bytes(rank) + self.cached[rank] + nbytes > self.capacity:
            return None
        self._allocations[rank].append(Allocation(_pages(max(nbytes, 1)), kept=True))
        return self._allocations[rank][-1].address

    def nccl_bytes(self, rank: int) -> int:
        """The bytes of NCCL's memory that `rank` has taken and not freed."""
        return sum(piece.nbytes for piece in self._allocations[rank] if piece.kept is not None and not piece.freed)

    def gone(self, rank: int, address: int, nbytes: int) -> bool:
        """Whether any of these bytes belong to memory that was freed or dropped."""
        pieces = (piece for piece in self._allocations[rank] if piece.gone)
        return any(piece.address < address + nbytes and address < piece.address + piece.nbytes for piece in pieces)

    def nccl_size(self, rank: int, address: int) -> int | None:
        """The bytes of the living NCCL memory that begins at `address`, None if there is none."""
        for piece in self._allocations[rank]:
            if piece.kept is not None and not piece.freed and piece.address == address:
                return piece.nbytes
        return None

    def free(self, rank: int, address: int) -> None:
        """End NCCL memory. Its pages stay, so that a late reader meets an error and not another's bytes."""
        for piece in self._allocations[rank]:
            if piece.kept is not None and piece.address == address:
                piece.freed = True

    def view(self, rank: int, address: int, nbytes: int) -> np.ndarray | None:
        """These bytes of `rank`, None if it does not own them all."""
        if nbytes == 0:
            return np.empty(0, dtype=np.uint8)
        for piece in self._allocations[rank]:
            if (found := piece.bytes_at(address, nbytes)) is not None:
                return found
        if self._any_address:
            return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        return None


def _pages(nbytes: int) -> np.ndarray:
    """New memory as a view of its pages; one byte at least, so that each has an address of its own."""
    return np.empty(max(nbytes, 1), dtype=np.uint8)[:nbytes]

"""Memory that messages are sent from: this rank's arenas, and those of other ranks as they are mapped here.

Guarantees: an arena lives as long as a tensor in it, and its memory is given back when no rank maps it any more; a
buffer that lies in no arena is copied into one before it is sent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Callable

import torch

from ringattn.errors import TransportError
from ringattn.transport.shared.group import SharedGroup
from ringattn.transport.shared.page import FREED, Entry
from ringattn.transport.shared.segment import Segment

STAGE_BYTES = 1 << 16
"""The smallest staging arena."""
STAGES_KEPT_BYTES = 1 << 26
"""How much unused staging memory stays for the next messages."""
VECTOR_BYTES = 1 << 24
"""From here on torch copies: with two ranks a core 64 MiB take 13 ms, where the C library's copy takes 16."""
SHORTAGES = {errno.ENOMEM, errno.ENOSPC}


class Arenas:
    """This rank's arenas, by number."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._arenas: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
        self._unused: list[tuple[int, Segment]] = []

    def tensor(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor in a new arena. Raises `MemoryError`."""
        _, segment = self._new(nbytes, populate=True)
        return torch.frombuffer(segment.buffer(0, nbytes), dtype=torch.uint8) if nbytes else torch.empty(0).byte()

    def place(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(arena, offset) of these bytes, None where no arena holds them."""
        for arena, segment in self._arenas.items():
            if segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
                return arena, address - segment.address
        return None

    def stage(self, address: int, nbytes: int) -> tuple[int, Segment]:
        """An arena with a copy of these bytes at its start. It is the caller's until `unstage`."""
        fitting = [each for each in self._unused if each[1].nbytes >= nbytes]
        if fitting:
            found = min(fitting, key=lambda each: each[1].nbytes)
            self._unused.remove(found)
        else:
            found = self._new(max(STAGE_BYTES, 1 << (nbytes - 1).bit_length()), populate=False)
        ctypes.memmove(found[1].address, address, nbytes)
        return found

    def unstage(self, stage: tuple[int, Segment]) -> None:
        """Keep a staging arena for the next message, unless enough is kept already."""
        if sum(segment.nbytes for _, segment in self._unused) + stage[1].nbytes <= STAGES_KEPT_BYTES:
            self._unused.append(stage)

    def _new(self, nbytes: int, populate: bool) -> tuple[int, Segment]:
        try:
            segment = Segment.create(f"arena-{self._group.rank}", nbytes)
            if populate:
                segment.populate()
        except OSError as error:
            if error.errno in SHORTAGES:
                raise MemoryError(f"no {nbytes} bytes of shared memory: {error}") from error
            raise TransportError(f"rank {self._group.rank}: no arena of {nbytes} bytes: {error}") from error
        arena = self._group.share(segment)
        self._arenas[arena] = segment
        # So that the others let go of their mappings, which would keep the memory.
        weakref.finalize(segment, _count_freed, self._group).atexit = False
        return arena, segment


class Imports:
    """Other ranks' arenas, mapped when a message first comes from there."""

    def __init__(self, group: SharedGroup) -> None:
        self._group = group
        self._freed = dict.fromkeys(group.ranks, 0)
        self._arenas: dict[tuple[int, int], Segment] = {}

    def address(self, rank: int, entry: Entry, what: Callable[[], str], until: float) -> int:
        """Where the bytes of another rank's message lie in this process. Raises what `SharedGroup.pull` raises."""
        freed = self._group.pages[rank].load(FREED)
        if freed != self._freed[rank]:
            self._freed[rank] = freed
            # All of the rank's, for which of them are gone is not told; what is still in use is mapped again.
            self._arenas = {key: segment for key, segment in self._arenas.items() if key[0] != rank}
        segment = self._arenas.get((rank, entry.arena))
        if segment is None:
            segment = self._arenas[rank, entry.arena] = Segment.attach(self._group.pull(rank, entry.arena, until, what))
        if entry.offset + entry.nbytes > segment.nbytes:
            raise TransportError(f"rank {rank} sent {entry} at {entry.offset} of an arena of {segment.nbytes} bytes")
        return segment.address + entry.offset

    def clear(self) -> None:
        """Unmap all."""
        self._arenas.clear()


def _count_freed(group: SharedGroup) -> None:
    if os.getpid() == group.pid:
        group.own.store(FREED, group.own.load(FREED) + 1)


def copy(into: int, source: int, nbytes: int) -> None:
    """Copy between two addresses, both of which must stay mapped meanwhile."""
    if nbytes < VECTOR_BYTES:
        ctypes.memmove(into, source, nbytes)
    else:
        # Tensors made here, for the caller's may be those of an inference mode that has ended.
        _bytes_at(into, nbytes).copy_(_bytes_at(source, nbytes))


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)

"""Anonymous memory that processes share by file descriptor, and the C library's calls that it needs.

Guarantees: a segment has no name, so nothing is left when every process that holds it is gone; it never changes its
size, so no other process can make a read of it fault; it stays mapped while anything that was made of it lives.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref

from ringattn.errors import InputError

PAGE_BYTES = mmap.PAGESIZE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# <linux/mman.h>; the mmap module of Python 3.11 does not name them.
MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
MAP_FAILED = 2**64 - 1

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_uint64
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_uint64, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int)


class Segment:
    """One mapping of a shared segment. It is unmapped, and its descriptor closed, when nothing refers to it."""

    def __init__(self, fd: int, nbytes: int, writable: bool, keep_fd: bool) -> None:
        """Takes over `fd`, and closes it at once unless it is to be kept for other processes."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        if address == MAP_FAILED:
            number = ctypes.get_errno()
            os.close(fd)
            raise OSError(number, f"mmap of {nbytes} bytes: {os.strerror(number)}")
        if not keep_fd:
            os.close(fd)
        self.address: int = address
        self.nbytes = nbytes
        self.fd = fd if keep_fd else None
        # Bound to the process: after a fork the child's copy of the mapping goes when the child does.
        self._end = weakref.finalize(self, _release, address, nbytes, self.fd)
        self._end.atexit = False

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """A new segment of at least `nbytes`, zero and sealed, whose descriptor is kept. Raises `OSError`."""
        nbytes = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        fd = os.memfd_create(f"ringattn-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            os.close(fd)
            raise
        return cls(fd, nbytes, writable=True, keep_fd=True)

    @classmethod
    def attach(cls, fd: int, writable: bool = False) -> Segment:
        """Map all of another process's segment and close `fd`. Raises `InputError` for one that could shrink."""
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            os.close(fd)
            raise InputError("a shared segment came without its seals: it could shrink while it is read")
        return cls(fd, os.fstat(fd).st_size, writable, keep_fd=False)

    def buffer(self, offset: int = 0, nbytes: int | None = None) -> ctypes.Array[ctypes.c_ubyte]:
        """These bytes as a ctypes array, which has the buffer protocol and keeps the segment mapped."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        array = (ctypes.c_ubyte * nbytes).from_address(self.address + offset)
        array.segment = self  # type: ignore[attr-defined]
        return array

    def populate(self) -> None:
        """Take the memory now, so that no first write has to; in huge pages where the system gives them.

        Raises `OSError` where there is none. A kernel before 5.14 takes it at the first writes.
        """
        libc.madvise(self.address, self.nbytes, MADV_HUGEPAGE)
        if libc.madvise(self.address, self.nbytes, MADV_POPULATE_WRITE) and ctypes.get_errno() != errno.EINVAL:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _release(address: int, nbytes: int, fd: int | None) -> None:
    libc.munmap(address, nbytes)
    if fd is not None:
        os.close(fd)

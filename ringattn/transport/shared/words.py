"""64-bit words that processes store and load, and the futex they sleep on.

Guarantees: a load sees a whole stored value; what a rank wrote before a store is seen by whoever has loaded that
store. On x86-64 plain aligned accesses give both; elsewhere libatomic's calls do, and where it is missing words are
refused.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from typing import Protocol

from ringattn.errors import UnsupportedError
from ringattn.transport.shared.segment import Segment

WORD_BYTES = 8
YIELD_S = 50e-6
"""How long a wait yields the processor before it sleeps. More costs more where the awaited rank needs it."""
SLICE_S = 0.02
"""The longest sleep: then a wait looks at its deadline, and Python at its signals."""
FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYBODY = 2**31 - 1
ACQUIRE, RELEASE = 2, 3  # __ATOMIC_ACQUIRE, __ATOMIC_RELEASE


class Words(Protocol):
    """The words of one segment, by index: byte offset / 8."""

    def load(self, index: int) -> int:
        """A whole value; reads after it see what the storing rank wrote before."""
        ...

    def store(self, index: int, value: int) -> None:
        """Store a whole value, after everything that this rank wrote before."""
        ...


class PlainWords:
    """For x86-64, which keeps the order of stores and of loads."""

    def __init__(self, segment: Segment) -> None:
        self._words = memoryview(segment.buffer()).cast("B").cast("Q")
        # One indexed access of a memoryview is one 8-byte move.
        self.load = self._words.__getitem__
        self.store = self._words.__setitem__


class AtomicWords:
    """By libatomic, for processors that reorder."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        # PyDLL keeps the interpreter's lock: the calls take nanoseconds.
        library = ctypes.PyDLL("libatomic.so.1")
        # Not as attributes: in a class Python changes names that begin so.
        self._load, self._store = library["__atomic_load_8"], library["__atomic_store_8"]
        self._load.restype = ctypes.c_uint64
        self._load.argtypes = (ctypes.c_uint64, ctypes.c_int)
        self._store.restype = None
        self._store.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)

    def load(self, index: int) -> int:
        """See `Words.load`."""
        return int(self._load(self._segment.address + index * WORD_BYTES, ACQUIRE))

    def store(self, index: int, value: int) -> None:
        """See `Words.store`."""
        self._store(self._segment.address + index * WORD_BYTES, value, RELEASE)


def words_of(segment: Segment, machine: str = platform.machine()) -> Words:
    """The words of a segment. Raises `UnsupportedError` on a processor for which this cannot be done safely."""
    if machine not in FUTEX_CALLS:
        raise UnsupportedError(f"words in shared memory are known for {' and '.join(FUTEX_CALLS)}, not for {machine}")
    if machine == "x86_64":
        return PlainWords(segment)
    try:
        return AtomicWords(segment)
    except (OSError, AttributeError) as error:
        raise UnsupportedError(f"words in shared memory need libatomic.so.1 on {machine}: {error}") from None


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_FUTEX = FUTEX_CALLS.get(platform.machine(), 0)
_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32,
)  # fmt: skip


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word. Without a word of who sleeps: to keep one would need a full fence."""
    _syscall(_FUTEX, address, FUTEX_WAKE, EVERYBODY, None, None, 0)


def pause(words: Words, index: int, address: int, seen: int, until: float) -> None:
    """Return soon after the word is not `seen` any more, at the latest after a slice or at `until`, monotonic.

    Only the low half is compared while asleep, so two values in a row must differ there.
    """
    yields = time.monotonic() + YIELD_S
    while words.load(index) == seen:
        now = time.monotonic()
        if now >= yields:
            left_s = min(SLICE_S, until - now)
            if left_s > 0:
                span = _Time(0, int(left_s * 1e9))
                _syscall(_FUTEX, address, FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(span), None, 0)
            return
        os.sched_yield()

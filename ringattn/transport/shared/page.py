"""Shared memory segments, 64-bit words in them, and pages. A page is the segment that a rank shares with its node.

A word that a rank waits for is in that rank's page, on a cache line of its own, and only one rank writes it (except
BELL and ALARM). A page belongs to one ring, so all its words start at zero, and message and round numbers start at 1.
Texts in a page are only used in errors, and a number or a word shows when a text is complete.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ringattn.errors import InputError, UnsupportedError

# --- memory ----------------------------------------------------------------------------------------------------------


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
    """One mapping of anonymous memory that processes share by file descriptor.

    Guarantees: a segment has no name, so nothing remains when every process that maps it has ended. Its size never
    changes, so no other process can cause a fault when this process reads the segment. The segment is unmapped and its
    descriptor closed when nothing refers to the segment or to an array made from it.
    """

    def __init__(self, fd: int, nbytes: int, writable: bool, keep_fd: bool) -> None:
        """Map `fd` and take it over. `keep_fd`: keep `fd` open so that it can be sent to other processes."""
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
        # For this process only: a forked child's copy of the mapping ends with the child.
        self._end = weakref.finalize(self, _release, address, nbytes, self.fd)
        self._end.atexit = False

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Create a zeroed, sealed segment of at least `nbytes`, and keep its descriptor. Raises `OSError`."""
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
        """Map another process's whole segment and close `fd`. Raises `InputError` if the segment could shrink."""
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            os.close(fd)
            raise InputError("a shared segment arrived without its seals, so it could shrink during a read")
        return cls(fd, os.fstat(fd).st_size, writable, keep_fd=False)

    def buffer(self, offset: int = 0, nbytes: int | None = None) -> ctypes.Array[ctypes.c_ubyte]:
        """Return `nbytes` bytes from `offset` on (None: all) as a ctypes array, which keeps the segment mapped."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        array = (ctypes.c_ubyte * nbytes).from_address(self.address + offset)
        array.segment = self  # type: ignore[attr-defined]
        return array

    def populate(self) -> None:
        """Allocate the memory now, so that first writes are fast; in huge pages if the system provides them.

        Raises `OSError` if there is not enough memory. A kernel before 5.14 allocates at the first writes instead.
        """
        libc.madvise(self.address, self.nbytes, MADV_HUGEPAGE)
        if libc.madvise(self.address, self.nbytes, MADV_POPULATE_WRITE) and ctypes.get_errno() != errno.EINVAL:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _release(address: int, nbytes: int, fd: int | None) -> None:
    libc.munmap(address, nbytes)
    if fd is not None:
        os.close(fd)


# --- words -----------------------------------------------------------------------------------------------------------


WORD_BYTES = 8
YIELD_S = 50e-6
"""How long a wait yields the processor before it sleeps. Yielding longer takes time from the rank it waits for."""
SLICE_S = 0.02
"""The longest sleep. After it a wait checks its deadline, and Python its signals."""
FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT, FUTEX_WAKE = 0, 1
ALL_SLEEPERS = 2**31 - 1
ACQUIRE, RELEASE = 2, 3  # __ATOMIC_ACQUIRE, __ATOMIC_RELEASE


class Words(Protocol):
    """The 64-bit words of one segment, by index: byte offset / 8.

    Guarantees: a load returns a whole stored value. Everything that a rank wrote before a store is visible to a rank
    that has loaded the stored value. On x86-64, plain aligned accesses guarantee both. Other processors need libatomic;
    without it shared words are refused.
    """

    def load(self, index: int) -> int:
        """Return the value of a word. Later reads see everything that the storing rank wrote before that value."""
        ...

    def store(self, index: int, value: int) -> None:
        """Store the value of a word. It becomes visible after everything that this rank wrote before."""
        ...


class PlainWords:
    """Words with plain memory accesses, for x86-64, which keeps stores in order and loads in order."""

    def __init__(self, segment: Segment) -> None:
        self._words = memoryview(segment.buffer()).cast("B").cast("Q")
        # One indexed access of a memoryview is one 8-byte move.
        self.load = self._words.__getitem__
        self.store = self._words.__setitem__


class AtomicWords:
    """Words accessed through libatomic, for processors that reorder memory accesses."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        # PyDLL keeps the interpreter lock, because the calls take only nanoseconds.
        library = ctypes.PyDLL("libatomic.so.1")
        # Indexed, not as attributes: inside a class Python mangles names that start with two underscores.
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
    """Return the words of a segment. Raises `UnsupportedError` on processors for which this is not implemented."""
    if machine not in FUTEX_CALLS:
        raise UnsupportedError(f"words in shared memory need {' or '.join(FUTEX_CALLS)}, not {machine}")
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
    """Wake every sleeper on the word at `address`. Do not count sleepers first: that would need a full fence."""
    _syscall(_FUTEX, address, FUTEX_WAKE, ALL_SLEEPERS, None, None, 0)


def pause(words: Words, index: int, address: int, seen: int, until: float) -> None:
    """Wait until the word differs from `seen`, but no longer than `SLICE_S` or until `until` (monotonic clock).

    `address` is that of the word. The kernel compares only the low 32 bits of a word, so two successive values must
    differ in these.
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


# --- the page --------------------------------------------------------------------------------------------------------


LINE_BYTES = 128  # two cache lines, because processors prefetch them in pairs
MAGIC, VERSION = 0x676E69722D6E7461, 3
HEADER = struct.Struct("<QQQQQQQ16s")  # magic, version, rank, world size, uid, pid, inode of the pid namespace; nonce

# Words that a page has once. The page's rank writes them; other ranks also write BELL and ALARM.
BEAT, BELL, ALARM, FREED, GATHERED = range(1, 6)
SINGLE_WORDS = 6  # includes the line of the header
# Words that a page has once for each rank, which writes its own.
ARRIVAL, CREDIT, POISON, CLOSED = range(6, 10)
RANK_WORDS = 4

STATUS_BYTES = 1024
CAUSE_BYTES = 8192
GATHER_BYTES = 16384
LOG_ENTRIES = 64
ENTRY_BYTES = 256
_ENTRY = struct.Struct("<QQQQ16sH198s")  # all fields except the number
LABEL_BYTES = 198
_CAUSE = struct.Struct("<QQ")  # nanoseconds of the host's clock, length


class Header(NamedTuple):
    """The start of a page, which identifies the rank, process and ring that the page belongs to."""

    magic: int
    version: int
    rank: int
    world_size: int
    uid: int
    pid: int
    pid_namespace: int
    nonce: bytes


class Entry(NamedTuple):
    """One end of a started message, in a log. `arena` and `offset` locate its bytes in the memory of the log's rank.

    `bound`: for a receive of the peer transport, the size of the arena in bytes; otherwise 0.
    """

    bound: int
    arena: int
    offset: int
    nbytes: int
    dtype: str
    label: str

    def packed(self) -> bytes:
        """Return the entry as bytes for `Log.write`. A label that is too long is truncated."""
        label = self.label.encode()[:LABEL_BYTES]
        return _ENTRY.pack(
            self.bound, self.arena, self.offset, self.nbytes, self.dtype.encode()[:16], len(label), label
        )

    def __str__(self) -> str:
        return f"'{self.label}' ({self.nbytes} bytes of {self.dtype})"


def subject(label: str, peer: int) -> str:
    """Return the part of a label that both ends share: one end has `to rank 1` where the other has `from rank 0`.

    A label that names a rank other than `peer` is not shortened, so a misdirected message is refused.
    """
    return label.removesuffix(f" to rank {peer}").removesuffix(f" from rank {peer}")


class Log:
    """The last messages that a rank started with a peer in one direction. Message n is entry n modulo `LOG_ENTRIES`."""

    def __init__(self, page: Page, offset: int) -> None:
        self._words, self._bytes = page.words, page.bytes
        self._offset = offset

    def write(self, number: int, packed: bytes) -> None:
        """Write the entry of message `number`. It overwrites that of message `number - LOG_ENTRIES`."""
        # The number is 0 while the entry is being written, and is read before and after the entry.
        start = self._offset + number % LOG_ENTRIES * ENTRY_BYTES
        self._words.store(start // WORD_BYTES, 0)
        self._bytes[start + WORD_BYTES : start + WORD_BYTES + _ENTRY.size] = packed
        self._words.store(start // WORD_BYTES, number)

    def read(self, number: int) -> Entry | None:
        """Return the entry of message `number`, or None if it has not been started or is already overwritten."""
        start = self._offset + number % LOG_ENTRIES * ENTRY_BYTES
        if self._words.load(start // WORD_BYTES) != number:
            return None
        bound, arena, offset, nbytes, dtype, length, label = _ENTRY.unpack_from(self._bytes, start + WORD_BYTES)
        if self._words.load(start // WORD_BYTES) != number:
            return None
        kind, text = dtype.rstrip(b"\0").decode(), label[:length].decode(errors="replace")
        return Entry(bound, arena, offset, nbytes, kind, text)


class Page:
    """A mapped page of this rank or of another rank."""

    def __init__(self, segment: Segment, ranks: Sequence[int]) -> None:
        """Wrap the page in `segment`. `ranks`: all ranks that share pages; words and logs are looked up by rank."""
        self.segment, self.count = segment, len(ranks)
        self._places = {rank: index for index, rank in enumerate(ranks)}
        self.words = words_of(segment)
        self.bytes = memoryview(segment.buffer()).cast("B")
        self.bell_address = self.word_address(BELL)

    @staticmethod
    def size(count: int) -> int:
        """Return the size in bytes of a page that `count` ranks share."""
        logs = 2 * count * LOG_ENTRIES * ENTRY_BYTES
        return -(-(_logs_at(count) + logs) // PAGE_BYTES) * PAGE_BYTES

    def index(self, word: int, rank: int = 0) -> int:
        """Return the index of a word in `words`, which is the same in every page.

        `rank` is ignored for words that a page has only once.
        """
        line = word
        if word >= SINGLE_WORDS:
            line = SINGLE_WORDS + (word - SINGLE_WORDS) * self.count + self._places[rank]
        return line * LINE_BYTES // WORD_BYTES

    def word_address(self, word: int, rank: int = 0) -> int:
        """Return the memory address of a word in this process."""
        return self.segment.address + self.index(word, rank) * WORD_BYTES

    def load(self, word: int, rank: int = 0) -> int:
        """Return the value of a word."""
        return self.words.load(self.index(word, rank))

    def store(self, word: int, value: int, rank: int = 0) -> None:
        """Store a word without waking a rank that waits for it."""
        self.words.store(self.index(word, rank), value)

    def log(self, sends: bool, peer: int) -> Log:
        """Return the log of messages that the page's rank started to send to `peer`, or to receive from it."""
        start = (2 * self._places[peer] + sends) * LOG_ENTRIES * ENTRY_BYTES
        return Log(self, _logs_at(self.count) + start)

    @property
    def header(self) -> Header:
        """Read the page's header."""
        return Header(*HEADER.unpack_from(self.bytes, 0))

    def write_header(self, header: Header) -> None:
        """Write the header, once, before another rank maps the page."""
        HEADER.pack_into(self.bytes, 0, *header)

    def write_beat(self, count: int, text: str) -> None:
        """Publish heartbeat number `count` of the page's rank. Raises `ValueError` if `text` is too long."""
        encoded = text.encode()
        if len(encoded) > STATUS_BYTES - 2:
            raise ValueError(f"a heartbeat of {len(encoded)} bytes does not fit in a shared page: {text}")
        start = _status_at(self.count) + count % 2 * STATUS_BYTES
        self.bytes[start : start + 2 + len(encoded)] = len(encoded).to_bytes(2, "little") + encoded
        self.store(BEAT, count)

    @property
    def beat(self) -> str:
        """Return the newest heartbeat of the page's rank."""
        start = _status_at(self.count) + self.load(BEAT) % 2 * STATUS_BYTES
        return _text(self.bytes, start + 2, int.from_bytes(self.bytes[start : start + 2], "little"))

    def write_cause(self, when_ns: int, text: str) -> None:
        """Write why the page's rank fails, once, before it stores POISON."""
        encoded = text.encode()[: CAUSE_BYTES - _CAUSE.size]
        start = _cause_at(self.count)
        self.bytes[start + _CAUSE.size : start + _CAUSE.size + len(encoded)] = encoded
        _CAUSE.pack_into(self.bytes, start, when_ns, len(encoded))

    @property
    def cause(self) -> tuple[int, str]:
        """Return when and why the page's rank failed."""
        start = _cause_at(self.count)
        when_ns, length = _CAUSE.unpack_from(self.bytes, start)
        return when_ns, _text(self.bytes, start + _CAUSE.size, length)

    def write_part(self, turn: int, part: bytes) -> None:
        """Write this rank's part for round `turn` of the all-gathers. It overwrites the part of round `turn - 2`."""
        start = _gather_at(self.count) + turn % 2 * GATHER_BYTES
        self.bytes[start : start + len(part)] = part

    def read_part(self, turn: int, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes of the part that the page's rank wrote for round `turn`."""
        start = _gather_at(self.count) + turn % 2 * GATHER_BYTES
        return bytes(self.bytes[start : start + nbytes])


def _text(data: memoryview, start: int, length: int) -> str:
    return bytes(data[start : start + length]).decode(errors="replace")


def _status_at(count: int) -> int:
    return (SINGLE_WORDS + RANK_WORDS * count) * LINE_BYTES


def _cause_at(count: int) -> int:
    return _status_at(count) + 2 * STATUS_BYTES


def _gather_at(count: int) -> int:
    return _cause_at(count) + CAUSE_BYTES


def _logs_at(count: int) -> int:
    return _gather_at(count) + 2 * GATHER_BYTES

"""One rank's page: the words, texts and logs that it shares with the others of its node, at fixed places.

A word that a rank waits on lies in its own page, in a line of its own, and has one writer. A page belongs to one ring,
so it starts at zero and numbers count from 1. Texts are for errors; a number or a word always says that one is whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ringattn.transport.shared.segment import PAGE_BYTES, Segment
from ringattn.transport.shared.words import WORD_BYTES, words_of

LINE_BYTES = 128  # two cache lines, for processors fetch them in pairs
MAGIC, VERSION = 0x676E69722D6E7461, 2
HEADER = struct.Struct("<QQQQQQQ16s")  # magic, version, rank, world size, uid, pid, inode of the pid namespace; nonce

# One word a page, written by the page's rank; others also write BELL and ALARM.
BEAT, BELL, ALARM, FREED = range(1, 5)
SINGLE_WORDS = 5  # with the header's line
# One word a page and rank, written by that rank.
ARRIVAL, CREDIT, POISON, CLOSED, GATHERED = range(5, 10)
RANK_WORDS = 5

STATUS_BYTES = 1024
CAUSE_BYTES = 8192
GATHER_BYTES = 16384
LOG_ENTRIES = 64
ENTRY_BYTES = 256
_ENTRY = struct.Struct("<QQQQ16sH198s")  # all but the number
LABEL_BYTES = 198
_CAUSE = struct.Struct("<QQ")  # nanoseconds of the host's clock, length


class Header(NamedTuple):
    """Whose page it is."""

    magic: int
    version: int
    rank: int
    world_size: int
    uid: int
    pid: int
    pid_namespace: int
    nonce: bytes


class Entry(NamedTuple):
    """One end of one started message. `arena` and `offset` say where its bytes lie in the starting rank's memory."""

    bound: int
    arena: int
    offset: int
    nbytes: int
    dtype: str
    label: str

    def packed(self) -> bytes:
        """For `Log.write`. A label that is too long loses its end."""
        label = self.label.encode()[:LABEL_BYTES]
        return _ENTRY.pack(
            self.bound, self.arena, self.offset, self.nbytes, self.dtype.encode()[:16], len(label), label
        )

    def __str__(self) -> str:
        return f"'{self.label}' ({self.nbytes} bytes of {self.dtype})"


def subject(label: str, peer: int) -> str:
    """What both ends of a message call it: its label without the end that says where it goes or comes from."""
    return label.removesuffix(f" to rank {peer}").removesuffix(f" from rank {peer}")


class Log:
    """The last messages that one rank started with one peer in one direction: message n at n modulo `LOG_ENTRIES`."""

    def __init__(self, page: Page, offset: int) -> None:
        self._words, self._bytes = page.words, page.bytes
        self._offset = offset

    def write(self, number: int, packed: bytes) -> None:
        """Put up message `number`, over that which is `LOG_ENTRIES` older."""
        start = self._offset + number % LOG_ENTRIES * ENTRY_BYTES
        self._words.store(start // WORD_BYTES, 0)
        self._bytes[start + WORD_BYTES : start + WORD_BYTES + _ENTRY.size] = packed
        self._words.store(start // WORD_BYTES, number)

    def read(self, number: int) -> Entry | None:
        """Message `number`, None where it has not been started, or so long ago that it is overwritten."""
        start = self._offset + number % LOG_ENTRIES * ENTRY_BYTES
        if self._words.load(start // WORD_BYTES) != number:
            return None
        bound, arena, offset, nbytes, dtype, length, label = _ENTRY.unpack_from(self._bytes, start + WORD_BYTES)
        if self._words.load(start // WORD_BYTES) != number:
            return None
        kind, text = dtype.rstrip(b"\0").decode(), label[:length].decode(errors="replace")
        return Entry(bound, arena, offset, nbytes, kind, text)


class Page:
    """A mapped page, one's own or another rank's."""

    def __init__(self, segment: Segment, ranks: Sequence[int]) -> None:
        """`ranks`: all that share pages, by whose numbers its words and logs are asked for."""
        self.segment, self.count = segment, len(ranks)
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self.words = words_of(segment)
        self.bytes = memoryview(segment.buffer()).cast("B")
        self.bell_address = self.word_address(BELL)

    @staticmethod
    def size(count: int) -> int:
        """Bytes of a page that `count` ranks share."""
        logs = 2 * count * LOG_ENTRIES * ENTRY_BYTES
        return -(-(_logs_at(count) + logs) // PAGE_BYTES) * PAGE_BYTES

    def index(self, word: int, rank: int = 0) -> int:
        """The place of a word among `words`, the same in every page. `rank` does not matter for a single word."""
        line = word
        if word >= SINGLE_WORDS:
            line = SINGLE_WORDS + (word - SINGLE_WORDS) * self.count + self._places[rank]
        return line * LINE_BYTES // WORD_BYTES

    def word_address(self, word: int, rank: int = 0) -> int:
        """Where a word lies in this process."""
        return self.segment.address + self.index(word, rank) * WORD_BYTES

    def load(self, word: int, rank: int = 0) -> int:
        """The value of a word."""
        return self.words.load(self.index(word, rank))

    def store(self, word: int, value: int, rank: int = 0) -> None:
        """Store a word; who sleeps sleeps on."""
        self.words.store(self.index(word, rank), value)

    def log(self, sends: bool, peer: int) -> Log:
        """What the page's rank started to send to `peer`, or to receive from it."""
        place = (2 * self._places[peer] + sends) * LOG_ENTRIES * ENTRY_BYTES
        return Log(self, _logs_at(self.count) + place)

    @property
    def header(self) -> Header:
        """Whose page it is."""
        return Header(*HEADER.unpack_from(self.bytes, 0))

    def write_header(self, header: Header) -> None:
        """Once, before anybody else maps the page."""
        HEADER.pack_into(self.bytes, 0, *header)

    def write_beat(self, count: int, text: str) -> None:
        """Show heartbeat number `count` of the page's rank. Raises `ValueError` if it has no room."""
        encoded = text.encode()
        if len(encoded) > STATUS_BYTES - 2:
            raise ValueError(f"a heartbeat of {len(encoded)} bytes has no room in a shared page: {text}")
        at = _status_at(self.count) + count % 2 * STATUS_BYTES
        self.bytes[at : at + 2 + len(encoded)] = len(encoded).to_bytes(2, "little") + encoded
        self.store(BEAT, count)

    @property
    def beat(self) -> str:
        """The newest heartbeat of the page's rank."""
        at = _status_at(self.count) + self.load(BEAT) % 2 * STATUS_BYTES
        return _text(self.bytes, at + 2, int.from_bytes(self.bytes[at : at + 2], "little"))

    def write_cause(self, when_ns: int, text: str) -> None:
        """Why the page's rank fails; once, before its POISON."""
        encoded = text.encode()[: CAUSE_BYTES - _CAUSE.size]
        at = _cause_at(self.count)
        self.bytes[at + _CAUSE.size : at + _CAUSE.size + len(encoded)] = encoded
        _CAUSE.pack_into(self.bytes, at, when_ns, len(encoded))

    @property
    def cause(self) -> tuple[int, str]:
        """When and why the page's rank failed."""
        at = _cause_at(self.count)
        when_ns, length = _CAUSE.unpack_from(self.bytes, at)
        return when_ns, _text(self.bytes, at + _CAUSE.size, length)

    def write_part(self, turn: int, part: bytes) -> None:
        """This rank's part of a turn of an all-gather. The turn before the last is overwritten."""
        at = _gather_at(self.count) + turn % 2 * GATHER_BYTES
        self.bytes[at : at + len(part)] = part

    def read_part(self, turn: int, nbytes: int) -> bytes:
        """The first bytes of a part."""
        at = _gather_at(self.count) + turn % 2 * GATHER_BYTES
        return bytes(self.bytes[at : at + nbytes])


def _text(data: memoryview, at: int, length: int) -> str:
    return bytes(data[at : at + length]).decode(errors="replace")


def _status_at(count: int) -> int:
    return (SINGLE_WORDS + RANK_WORDS * count) * LINE_BYTES


def _cause_at(count: int) -> int:
    return _status_at(count) + 2 * STATUS_BYTES


def _gather_at(count: int) -> int:
    return _cause_at(count) + CAUSE_BYTES


def _logs_at(count: int) -> int:
    return _gather_at(count) + 2 * GATHER_BYTES

"""The flight record: the last exchanges of a rank, kept in a fixed ring and written out when something goes wrong.

Guarantees: recording an exchange costs a few microseconds and no memory beyond the ring; a dump is JSON that
`ringattn flight` merges over the ranks, and counts what the ring has dropped, so that the k-th send still meets the
k-th receive. On SIGTERM, which torchrun sends to the ranks that outlive another, a process writes its records at once,
also while its main thread waits in a call of C++. Then it does what it would have done: it ends, or runs the handler
that was installed before. Nothing is installed without `leave_records`, and nothing in a fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ringattn.observe.files import write_file

CAPACITY = 2048
LAUNCHING, POSTED, RUNNING, DONE, FAILED, CAPTURED = "launching", "posted", "running", "done", "failed", "captured"
"""LAUNCHING: inside the library's call, so peers cannot meet it; CAPTURED: in a CUDA graph, where nobody watches it."""
CONTROL_LANE = -1
"""The lane of agreements, which never meet the messages of an exchange."""


class MessageRecord(NamedTuple):
    """One message of an exchange. `op`: send or recv; `slot`: address of the buffer."""

    op: str
    peer: int
    nbytes: int
    slot: int
    label: str


class Flight:
    """One exchange. Times in seconds of this host's clock; `sequence` counts the exchanges of the rank from 0.

    `transport`: what carries it. An exchange whose messages go over two of them is two flights.
    """

    __slots__ = ("done_s", "lane", "parts", "posted_s", "sequence", "started_s", "state", "transport")

    def __init__(self, sequence: int, lane: int, parts: tuple[MessageRecord, ...], transport: str = "") -> None:
        self.sequence, self.lane, self.parts, self.transport = sequence, lane, parts, transport
        self.posted_s, self.started_s, self.done_s = time.time(), 0.0, 0.0
        self.state = POSTED

    @property
    def label(self) -> str:
        """The label of its first message."""
        return self.parts[0].label if self.parts else ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = {name: getattr(self, name) for name in self.__slots__ if name != "parts"}
        return {**facts, "parts": [part._asdict() for part in self.parts]}


class FlightRecord:
    """The last `CAPACITY` exchanges of one rank. `over`: it was written, or its ring was closed."""

    def __init__(self, rank: int, world_size: int, transport: str) -> None:
        self.rank, self.world_size, self.transport = rank, world_size, transport
        self.count, self.over = 0, False
        self._ring: list[Flight | None] = [None] * CAPACITY
        self._dropped: Counter[tuple[int, str, int]] = Counter()

    def begin(self, lane: int, parts: tuple[MessageRecord, ...], transport: str = "") -> Flight:
        """A new entry, in the state POSTED. `transport`: where the record is of two of them, which one it is."""
        flight = Flight(self.count, lane, parts, transport or self.transport)
        oldest = self._ring[self.count % CAPACITY]
        if oldest is not None:
            self._dropped.update((oldest.lane, part.op, part.peer) for part in oldest.parts)
        self._ring[self.count % CAPACITY] = flight
        self.count += 1
        return flight

    def last(self) -> Flight | None:
        """The newest entry."""
        return self._ring[(self.count - 1) % CAPACITY] if self.count else None

    def where(self) -> str:
        """Where this rank is, for heartbeats: its last exchange, or `idle after` it. May be read anytime."""
        flight = self.last()
        if flight is None:
            return "idle"
        return f"idle after {flight.label}" if flight.state == DONE else flight.label

    def entries(self) -> list[Flight]:
        """Oldest first."""
        first = max(0, self.count - CAPACITY)
        return [flight for n in range(first, self.count) if (flight := self._ring[n % CAPACITY]) is not None]

    def dump(self, folder: Path, cause: str) -> Path:
        """Write `flight-<rank>.json` into `folder` and return its path. Raises `OSError`.

        `dropped` counts the messages, by lane, direction and peer, of the exchanges that are no longer in the ring.
        """
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "rank": self.rank,
            "world_size": self.world_size,
            "transport": self.transport,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "written_s": time.time(),
            "cause": cause,
            "exchanges": self.count,
            "dropped": [
                {"lane": lane, "op": op, "peer": peer, "messages": count}
                for (lane, op, peer), count in sorted(self._dropped.items())
            ],
            "flights": [flight.as_dict() for flight in self.entries()],
        }
        path = write_file(folder / f"flight-{self.rank}.json", json.dumps(content))
        self.over = True
        return path


# --- SIGTERM ---------------------------------------------------------------------------------------------------------


CAUSE = "received SIGTERM (from torchrun after another rank failed, from the parent process, or from a user)"

_records: WeakKeyDictionary[FlightRecord, Path] = WeakKeyDictionary()
_lock = threading.Lock()
_before: Any = None
_installed = False


def leave_records(record: FlightRecord, folder: Path | None) -> None:
    """On SIGTERM, write `record` into `folder`, unless it was written or its ring was closed before. None: do nothing.

    A handler can be installed by the main thread alone; called in others, it serves where the main thread called too.
    """
    global _before, _installed
    if folder is None:
        return
    _records[record] = folder
    if _installed or threading.current_thread() is not threading.main_thread():
        return
    _before, _installed = signal.getsignal(signal.SIGTERM), True
    os.register_at_fork(after_in_child=_not_in_a_fork)
    signal.signal(signal.SIGTERM, _on_signal)
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    if (other := signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(other)  # an event loop's; then the main thread must come back from C++ by itself
        return
    wakes.detach()
    threading.Thread(target=_watch, args=(woken,), name="ringattn-sigterm", daemon=True).start()


def _not_in_a_fork() -> None:
    """A fork has no ring; and it shares the socket, so that its own end would be taken for that of its parent."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, _before if _before is not None else signal.SIG_DFL)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """What the main thread does, where it is not in C++."""
    _write()
    if callable(_before):
        _before(number, frame)
    elif _before != signal.SIG_IGN:
        _end(number)


def _watch(woken: socket.socket) -> None:
    """Python's own C handler writes the number of each signal into the socket, whatever the main thread does."""
    while numbers := woken.recv(16):
        if signal.SIGTERM in numbers:
            _write()
            if _before in (signal.SIG_DFL, None):
                _end(signal.SIGTERM)


def _write() -> None:
    with _lock:
        left = [(record, folder) for record, folder in list(_records.items()) if not record.over]
        # Of several rings of a process the one that waits is written last, and stays.
        left.sort(key=lambda one: (flight := one[0].last()) is not None and flight.state != DONE)
        for record, folder in left:
            try:
                record.dump(folder, CAUSE)
            except OSError as error:
                print(f"ringattn rank {record.rank}: no flight record: {error}", file=sys.stderr, flush=True)


def _end(number: int) -> None:
    """As if there had never been a handler: `signal.signal` serves the main thread alone, this any."""
    ctypes.pythonapi.PyOS_setsig(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)

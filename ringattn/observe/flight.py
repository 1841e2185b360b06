"""The flight record: the last exchanges of a rank, kept in a fixed-size ring buffer and written when something fails.

Guarantees: recording an exchange costs a few microseconds and no memory beyond the buffer. A dump is JSON that
`ringattn flight` merges over the ranks. It counts the messages that the buffer has dropped, so the k-th send can still
be matched with the k-th receive. On SIGTERM, which torchrun sends to the ranks that outlive a failed rank, a process
writes its records at once, even while its main thread is inside a C++ call. Then it proceeds as without records: it
ends, or runs the handler that was installed before. Only `leave_records` installs a signal handler, and a forked child
has none.
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
"""LAUNCHING: inside the library's call, where peers cannot receive it yet. CAPTURED: in a CUDA graph, not watched."""
CONTROL_LANE = -1
"""The lane of all-gathers, whose messages are never matched with those of an exchange."""


class MessageRecord(NamedTuple):
    """One message of an exchange. `op`: "send" or "recv"; `slot`: the address of the buffer."""

    op: str
    peer: int
    nbytes: int
    slot: int
    label: str


class Flight:
    """One exchange. Times are in seconds of this host's clock; `sequence` counts the rank's exchanges from 0.

    `transport`: the transport that carries it. An exchange over two transports has two flights.
    """

    __slots__ = ("done_s", "lane", "parts", "posted_s", "sequence", "started_s", "state", "transport")

    def __init__(self, sequence: int, lane: int, parts: tuple[MessageRecord, ...], transport: str = "") -> None:
        self.sequence, self.lane, self.parts, self.transport = sequence, lane, parts, transport
        self.posted_s, self.started_s, self.done_s = time.time(), 0.0, 0.0
        self.state = POSTED

    @property
    def label(self) -> str:
        """The label of the first message."""
        return self.parts[0].label if self.parts else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the flight as a dict for JSON."""
        facts = {name: getattr(self, name) for name in self.__slots__ if name != "parts"}
        return {**facts, "parts": [part._asdict() for part in self.parts]}


class FlightRecord:
    """The last `CAPACITY` exchanges of one rank. `over`: whether the record was written or its ring was closed."""

    def __init__(self, rank: int, world_size: int, transport: str) -> None:
        self.rank, self.world_size, self.transport = rank, world_size, transport
        self.count, self.over = 0, False
        self._ring: list[Flight | None] = [None] * CAPACITY
        self._dropped: Counter[tuple[int, str, int]] = Counter()

    def begin(self, lane: int, parts: tuple[MessageRecord, ...], transport: str = "") -> Flight:
        """Add an entry in the state POSTED, and return it. `transport`: the one that carries it, if a ring uses two."""
        flight = Flight(self.count, lane, parts, transport or self.transport)
        oldest = self._ring[self.count % CAPACITY]
        if oldest is not None:
            self._dropped.update((oldest.lane, part.op, part.peer) for part in oldest.parts)
        self._ring[self.count % CAPACITY] = flight
        self.count += 1
        return flight

    def last(self) -> Flight | None:
        """Return the newest entry, or None."""
        return self._ring[(self.count - 1) % CAPACITY] if self.count else None

    def where(self) -> str:
        """Return what the rank is doing, for heartbeats: its last exchange, or "idle after" it. For any thread."""
        flight = self.last()
        if flight is None:
            return "idle"
        return f"idle after {flight.label}" if flight.state == DONE else flight.label

    def entries(self) -> list[Flight]:
        """Return the entries, oldest first."""
        first = max(0, self.count - CAPACITY)
        return [flight for n in range(first, self.count) if (flight := self._ring[n % CAPACITY]) is not None]

    def dump(self, folder: Path, cause: str) -> Path:
        """Write `flight-<rank>.json` into `folder` and return its path. Raises `OSError`.

        `dropped` counts the messages of exchanges no longer in the buffer, by lane, direction and peer.
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
_previous_handler: Any = None
_installed = False


def leave_records(record: FlightRecord, folder: Path | None) -> None:
    """Have SIGTERM write `record` into `folder`, unless it was written or its ring was closed before. None: do nothing.

    Only the main thread can install the signal handler. If another thread calls this function, the record is written
    only if the main thread calls this function too.
    """
    global _previous_handler, _installed
    if folder is None:
        return
    _records[record] = folder
    if _installed or threading.current_thread() is not threading.main_thread():
        return
    _previous_handler, _installed = signal.getsignal(signal.SIGTERM), True
    os.register_at_fork(after_in_child=_restore_in_fork)
    signal.signal(signal.SIGTERM, _handle_signal)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    if (previous_fd := signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)) != -1:
        # The descriptor belongs to an event loop. Then SIGTERM is handled only when the main thread returns from C++.
        signal.set_wakeup_fd(previous_fd)
        return
    writer.detach()
    threading.Thread(target=_watch, args=(reader,), name="ringattn-sigterm", daemon=True).start()


def _restore_in_fork() -> None:
    """Uninstall the handler in a forked child, which has no ring.

    The child shares the socket, so a SIGTERM of the child would look to the parent like its own.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, _previous_handler if _previous_handler is not None else signal.SIG_DFL)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    """Handle the signal on the main thread, if it is not inside C++."""
    _write()
    if callable(_previous_handler):
        _previous_handler(number, frame)
    elif _previous_handler != signal.SIG_IGN:
        _end_process(number)


def _watch(reader: socket.socket) -> None:
    """Write the records on SIGTERM. Python's C handler sends each signal's number to `reader`, at any moment."""
    while numbers := reader.recv(16):
        if signal.SIGTERM in numbers:
            _write()
            if _previous_handler in (signal.SIG_DFL, None):
                _end_process(signal.SIGTERM)


def _write() -> None:
    """Write every record that has not been written and whose ring has not been closed."""
    with _lock:
        unwritten = [(record, folder) for record, folder in list(_records.items()) if not record.over]
        # The rings of a process share a file name, so write the record of a ring that is waiting last: that one stays.
        unwritten.sort(key=lambda entry: (flight := entry[0].last()) is not None and flight.state != DONE)
        for record, folder in unwritten:
            try:
                record.dump(folder, CAUSE)
            except OSError as error:
                print(f"ringattn rank {record.rank}: no flight record: {error}", file=sys.stderr, flush=True)


def _end_process(number: int) -> None:
    """End the process as the signal would without a handler. Unlike `signal.signal`, this works on any thread."""
    ctypes.pythonapi.PyOS_setsig(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)

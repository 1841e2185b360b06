"""A process that is told to end leaves its flight records first: torchrun ends so the ranks that outlive another.

Guarantees: records are written at once, also while the main thread waits in a call of C++; then the process does what
it would have done: ends, or runs the handler that was there before. Nothing is installed without `leave_records`, and
nothing of it is in a fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from ringattn.observe.flight import DONE, FlightRecord

CAUSE = "SIGTERM: told to end, by torchrun because another rank failed, by its parent, or by somebody"

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

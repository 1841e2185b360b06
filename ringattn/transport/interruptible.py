"""Waits in C++ that a signal interrupts.

Python runs signal handlers on the main thread, between two of its own instructions. A main thread that waits inside a
C++ library therefore handles Ctrl-C and SIGTERM only when that wait ends. Here another thread makes the call, and the
main thread waits for it on a lock, where Python runs handlers at once.
Guarantees: a handler that returns changes nothing; a handler that raises cuts the call short, and its error is raised.
The detour costs about 25 microseconds.
"""

from __future__ import annotations

import _thread
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

CUT_S = 1.0
"""How long a call that was cut short may take to end."""


class _Request(Generic[T]):
    """One call and its result."""

    result: T

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self.answered = _thread.allocate_lock()
        self.answered.acquire()

    def serve(self) -> None:
        """Make the call."""
        try:
            self.result = self._call()
        except BaseException as error:
            self._error = error
        self.answered.release()

    def outcome(self) -> T:
        """Return the result, or raise what the call raised."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this frame
        return self.result


class InterruptibleCalls:
    """The daemon thread that makes the calls of one transport. It starts at the first call of the main thread."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # The thread refers to the queue and not to this object, so it ends when this object is collected.
        weakref.finalize(self, self._requests.put, None).atexit = False

    def run(self, call: Callable[[], T], cut: Callable[[], object]) -> T:
        """Return `call()`. `cut` makes a call that is under way end soon; what comes of that call is dropped."""
        if threading.current_thread() is not threading.main_thread():
            return call()  # no handler runs on this thread
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._requests,), name="ringattn-interruptible", daemon=True
            )
            self._thread.start()
        request = _Request(call)
        try:
            self._requests.put(request)
            request.answered.acquire()
        except BaseException:
            cut()
            request.answered.acquire(timeout=CUT_S)
            raise
        return request.outcome()


def _serve(requests: queue.SimpleQueue[_Request | None]) -> None:
    while (request := requests.get()) is not None:
        request.serve()
        del request  # an idle thread keeps no buffer alive

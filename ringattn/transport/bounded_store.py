"""A torch store whose calls end in time.

A call of torch's `TCPStore` blocks without end, whatever timeout the store was given, while its host is stopped or
cannot be reached: the connection stays up and no answer arrives. So each connection is used by a thread of its own, and
the caller waits for the answer of that thread. Guarantees: no method waits longer than its deadline; once a call was
not answered in time, the connection is never used again, and every later call on it fails at once; a process that
leaves in the middle of a call leaves in good order.
"""

from __future__ import annotations

import _thread
import atexit
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from ringattn.errors import DeadlineError, RingError
from ringattn.transport.deadline import Deadline

T = TypeVar("T")

LOOK_S = 0.1
"""How often a caller that waits looks whether the connection was given up meanwhile."""
RESUMED_S = 0.05
"""An answer has this long after its deadline: a process that was itself stopped finds it here when it is continued."""
PROBE_S = 0.5
"""How long a plain connection may take."""
EXIT_S = 1.0
"""How long the end of the process waits for calls that other threads are in."""


class Request(Generic[T]):
    """One call, its answer, and the lock that is released when the answer is there."""

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        self._answer: T | None = None
        self._error: BaseException | None = None
        self.answered = _thread.allocate_lock()  # half the cost of a threading.Event
        self.answered.acquire()

    def serve(self) -> None:
        """Run it, on the thread that owns the connection."""
        try:
            self._answer = self._run()
        except BaseException as error:
            self._error = error
        self.answered.release()

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return not self.answered.locked()

    def wait_shortly(self, timeout_s: float) -> bool:
        """Whether the answer is there after at most `timeout_s`."""
        if self.answered.acquire(timeout=timeout_s):
            self.answered.release()
        return self.done

    def wait(self, deadline: Deadline, ended: Callable[[], bool] = lambda: False) -> bool:
        """Whether the answer arrived in time, and before `ended()`."""
        while not self.answered.acquire(timeout=min(max(deadline.left_s, 0.0), LOOK_S)):
            if ended():
                return False
            if deadline.passed:
                return self.answered.acquire(timeout=RESUMED_S)
        return True

    def result(self) -> T:
        """The answer, or what the call raised."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # the traceback holds this frame
        return self._answer  # type: ignore[return-value]


class _Connection:
    """One torch store and the daemon thread that alone calls it. The thread starts at the first call."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.lost = ""
        self._pid = os.getpid()
        self._requests: queue.SimpleQueue[Request[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        # The thread holds the queue and not this object, so an unused connection ends its thread.
        weakref.finalize(self, self._requests.put, None).atexit = False

    def begin(self, run: Callable[[], T]) -> Request[T]:
        """Ask for `run()` and return at once. Raises `DeadlineError` if the connection was given up."""
        if self.lost:
            raise DeadlineError(self.lost)
        if os.getpid() != self._pid:
            raise RingError("a forked process cannot use the store of its parent; open the ring after the fork")
        if self._thread is None:
            self._start()
        request = Request(run)
        self._requests.put(request)
        return request

    def ask(self, run: Callable[[], T], deadline: Deadline) -> T:
        """`run()`, answered by `deadline`. Raises `DeadlineError`, and what `run` raises."""
        if not self.lost and deadline.passed:  # nothing was asked, so nothing is known of the host
            raise DeadlineError(f"the store was not asked: the deadline of {deadline.timeout_s:g} s has passed")
        request = self.begin(run)
        if not request.wait(deadline, lambda: bool(self.lost)):
            self.lost = self.lost or (
                f"{host_of(self.store)} did not answer within {deadline.timeout_s:g} s (stopped, or out of reach)"
            )
            raise DeadlineError(self.lost)
        return request.result()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_serve, args=(self._requests,), name="ringattn-store", daemon=True
                )
                self._thread.start()
                _connections.add(self)

    def settle(self, until: float) -> None:
        """Wait for the calls that are under way, and let no other begin."""
        if self.lost or self._thread is None or os.getpid() != self._pid:
            return
        self.lost = "the process ends"
        self._requests.put(None)
        self._thread.join(max(until - time.monotonic(), 0.0))


def _serve(requests: queue.SimpleQueue[Request[Any] | None]) -> None:
    while (request := requests.get()) is not None:
        request.serve()
        del request  # an idle thread keeps no store alive


_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    """A thread inside a store call while the interpreter ends can take the whole process down."""
    until = time.monotonic() + EXIT_S
    for connection in list(_connections):
        connection.settle(until)


class BoundedStore:
    """The methods of `dist.Store` that ringattn uses, each of which ends by its deadline.

    They raise `DeadlineError` when the store's host does not answer, and torch's `RuntimeError` when it is gone.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        """The limit of each call is `timeout_s`. Nothing else may use `store` from here on, except to clone it."""
        self._connection, self._timeout_s = _Connection(store), timeout_s
        self._deadline: Deadline | None = None

    def until(self, deadline: Deadline) -> BoundedStore:
        """The same connection; each call ends by `deadline` too."""
        known = self._deadline
        nearer = known if known is not None and known.left_s < deadline.left_s else deadline
        view = object.__new__(BoundedStore)
        view._connection, view._timeout_s, view._deadline = self._connection, self._timeout_s, nearer
        return view

    @property
    def host(self) -> str:
        """The store's host, in words."""
        return host_of(self._connection.store)

    @property
    def lost(self) -> bool:
        """Whether a call was not answered in time."""
        return bool(self._connection.lost)

    def set(self, key: str, value: str | bytes) -> None:
        """See `dist.Store.set`."""
        self._ask(lambda store: store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """See `dist.Store.get`; the key is known to be up."""
        return self._ask(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        """See `dist.Store.check`."""
        return self._ask(lambda store: store.check(keys))

    def add(self, key: str, n: int) -> int:
        """See `dist.Store.add`."""
        return self._ask(lambda store: store.add(key, n))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are known to be up."""
        return self._ask(lambda store: read_many(store, keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `dist.Store.compare_set`."""
        return self._ask(lambda store: store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """See `dist.Store.delete_key`."""
        return self._ask(lambda store: store.delete_key(key))

    def begin(self, run: Callable[[dist.Store], T]) -> Request[T]:
        """Run `run(store)` on the thread of the connection; return at once. Raises `DeadlineError` if it was given up.

        The request has no deadline: the caller looks whether it is done.
        """
        store = self._connection.store
        return self._connection.begin(lambda: run(store))

    def clone(self) -> BoundedStore:
        """The same store over a connection of its own."""
        try:
            return BoundedStore(self._ask(lambda store: store.clone()), self._timeout_s)  # type: ignore[attr-defined]
        except DeadlineError:
            # Torch tries to connect until its timeout, also if nothing listens there any more.
            if refuses(self._connection.store):
                raise dist.DistNetworkError(f"{self.host} is gone") from None
            raise

    def _ask(self, run: Callable[[dist.Store], T]) -> T:
        deadline = self._deadline
        if deadline is None or deadline.left_s > self._timeout_s:
            deadline = Deadline(self._timeout_s)
        store = self._connection.store
        return self._connection.ask(lambda: run(store), deadline)


def bounded(make: Callable[[], T], deadline: Deadline, late: str) -> T:
    """`make()` on a daemon thread of its own, for what blocks without end. Raises what it raises.

    After `deadline` a `DeadlineError` of `late` is raised, and what is made later is dropped.
    """
    request = Request(make)
    threading.Thread(target=request.serve, name="ringattn-bounded", daemon=True).start()
    if not request.wait(deadline):
        raise DeadlineError(late)
    return request.result()


hosts: dict[tuple[str, int], str] = {}
"""Who hosts the store at an address and port, where that is known."""


def refuses(store: dist.Store) -> bool:
    """Whether nothing listens at the address of a TCP store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        with suppress(OSError):
            try:
                socket.create_connection((store.host, store.port), PROBE_S).close()
            except ConnectionRefusedError:
                return True
    return False


def host_of(store: dist.Store) -> str:
    """Who serves a store, in words."""
    who, where = "rank 0 of the job, or torchrun's agent", ""
    try:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            who = hosts.get((store.host, store.port), who)
            where = f", at {store.host}:{store.port}"
    except RuntimeError:
        pass  # the address is not known
    return f"the store's host ({who}{where})"


def read_many(store: dist.Store, keys: Sequence[str]) -> list[bytes]:
    """Entries that are known to exist: one request for all if the store can; a `FileStore` cannot."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        return store.multi_get(list(keys))
    return [store.get(key) for key in keys]

"""The control store of a ring: one of torch's stores, with deadlines on all calls and a key prefix for each ring.

A call of torch's `TCPStore` blocks indefinitely, whatever timeout the store was given, while the process that hosts the
store is stopped or unreachable: the connection stays up and no answer arrives. So each connection is used by a separate
thread, and the caller waits for that thread's answer.
Keys of one ring, apart from heartbeats: `arrived/RANK`, `cause`, `closed/RANK`, `all_gather/N/RANK`, and the keys that
`gather` and a transport add.
Guarantees: no method waits longer than its deadline. Once a call was not answered in time, the connection is never used
again, and every later call on it fails at once. A process can end while another thread is inside a call. The cause of
failure that is published first is kept and never changes. Any number of rings may be open at the same time, and next to
the user's own process groups, whenever those are created. A restarted job never reads the keys of an earlier run.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import os
import re
import socket
import struct
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Self, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ringattn.errors import DeadlineError, InputError, PeerLostError, RingError
from ringattn.transport.deadline import LONGEST_NAP_S, CallingThread, Deadline, Request, bounded, wait_until

T = TypeVar("T")

CAUSE = "cause"
CALL_S = 30.0
"""The limit of a call without an earlier deadline."""
GRACE_S = 1.0
"""Extra time after a deadline for calls whose answer decides the outcome: a call that began just before the deadline
must not count as unanswered."""
NAPS_PER_RANK_S = 4e-5, 5e-4
"""The first and the longest nap between checks of `gather`, per rank. All ranks together check up to 25,000
times a second at first, and up to 2,000 times later."""
CAUSE_PER_RANK_S = 1e-3
CAUSE_S = 0.5
"""How often a rank that waits for the others checks whether one has failed; less often with many ranks."""
LOST = dist.DistNetworkError, dist.DistStoreError
"""Torch's errors for a store whose host process is gone."""
RESTATED = re.compile(r"(?:rank \d+ failed first|the ring of \d+ ranks cannot (?:open|go on)): .*", re.DOTALL)
PROBE_S = 0.5
"""The limit for opening a plain connection."""
EXIT_S = 1.0
"""How long the end of the process waits for calls of other threads."""


def first_cause(rank: int, cause: BaseException) -> str:
    """Return the sentence by which all other ranks re-state the failure of `rank`.

    A `cause` that already re-states another rank's failure, or that describes the whole ring, is returned unchanged.
    """
    restated = RESTATED.search(str(cause)) if isinstance(cause, RingError) else None
    return restated[0] if restated else f"rank {rank} failed first: {type(cause).__name__}: {cause}"


class _Connection:
    """One torch store and the only thread that calls it."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.lost = ""
        self._pid = os.getpid()
        self._calls = CallingThread("ringattn-store")
        _connections.add(self)

    def begin(self, run: Callable[[dist.Store], T]) -> Request[T]:
        """Request `run(store)` and return at once. Raises `DeadlineError` if the connection is no longer used."""
        if self.lost:
            raise DeadlineError(self.lost)
        if os.getpid() != self._pid:
            raise RingError("a forked process cannot use the store of its parent; open the ring after the fork")
        store = self.store
        return self._calls.submit(Request(lambda: run(store)))

    def call(self, run: Callable[[dist.Store], T], deadline: Deadline) -> T:
        """Return the result of `run(store)`. Raises `DeadlineError` at `deadline`, and what `run` raises."""
        if not self.lost and deadline.passed:  # without a call, the state of the host stays unknown
            raise DeadlineError(f"the store was not called: the deadline of {deadline.timeout_s:g} s has passed")
        request = self.begin(run)
        if not request.wait(deadline, lambda: bool(self.lost)):
            self.lost = self.lost or (
                f"{host_of(self.store)} did not answer within {deadline.timeout_s:g} s (stopped, or out of reach)"
            )
            raise DeadlineError(self.lost)
        return request.result()

    def settle(self, until: float) -> None:
        """Refuse new calls, and wait for the calls in progress until the time `until` on the monotonic clock."""
        if self.lost or self._calls.thread is None or os.getpid() != self._pid:
            return
        self.lost = "the process ends"
        self._calls.end()
        self._calls.thread.join(max(until - time.monotonic(), 0.0))


_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    """Finish the store calls in progress: a thread inside such a call can crash the process when Python exits."""
    until = time.monotonic() + EXIT_S
    for connection in list(_connections):
        connection.settle(until)


class BoundedStore:
    """The methods of `dist.Store` that ringattn uses, each of which ends by its deadline.

    They raise `DeadlineError` if the store's host does not answer, and torch's `RuntimeError` if it is gone.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        """Limit each call to `timeout_s`. From now on, nothing else may use `store`, except to clone it."""
        self._connection, self._timeout_s = _Connection(store), timeout_s
        self._deadline: Deadline | None = None

    def until(self, deadline: Deadline) -> Self:
        """Return a view of the same connection on which each call also ends by `deadline`."""
        view = copy.copy(self)
        if self._deadline is None or self._deadline.left_s >= deadline.left_s:
            view._deadline = deadline
        return view

    def clone(self) -> Self:
        """Return a view of the same store over a separate connection, without a deadline."""
        view = copy.copy(self)
        try:
            view._connection = _Connection(self._call(lambda store: store.clone()))  # type: ignore[attr-defined]
        except DeadlineError:
            # Torch tries to connect until its timeout, even if nothing listens there any more.
            if refuses(self._connection.store):
                raise dist.DistNetworkError(f"{self.host} is gone") from None
            raise
        view._deadline = None
        return view

    @property
    def host(self) -> str:
        """A description of the store's host."""
        return host_of(self._connection.store)

    @property
    def lost(self) -> bool:
        """Whether a call was not answered in time."""
        return bool(self._connection.lost)

    def set(self, key: str, value: str | bytes) -> None:
        """See `dist.Store.set`."""
        self._call(lambda store: store.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return the value of an existing key."""
        return self._call(lambda store: store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of existing keys."""
        return self._call(lambda store: read_many(store, keys)) if keys else []

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._call(lambda store: store.check(keys))

    def add(self, key: str, n: int = 1) -> int:
        """Add to a counter that starts at 0, and return its new value."""
        return self._call(lambda store: store.add(key, n))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `dist.Store.compare_set`."""
        return self._call(lambda store: store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """See `dist.Store.delete_key`."""
        return self._call(lambda store: store.delete_key(key))

    def begin(self, run: Callable[[dist.Store], T]) -> Request[T]:
        """Start `run(store)` on the connection's thread and return at once.

        The request has no deadline: the caller checks whether it is done. Raises `DeadlineError` if an earlier call was
        not answered in time, because the connection is then no longer used.
        """
        return self._connection.begin(run)

    def _call(self, run: Callable[[dist.Store], T]) -> T:
        deadline = self._deadline
        if deadline is None or deadline.left_s > self._timeout_s:
            deadline = Deadline(self._timeout_s)
        return self._connection.call(run, deadline)


class ControlStore(BoundedStore):
    """One rank's client of the store. Only one thread at a time may use it; `clone` returns another client.

    All methods except `publish_cause` and `leave` raise `DeadlineError` if the store's host does not answer, and
    another `RuntimeError` if it is gone.
    """

    def __init__(self, store: dist.Store | BoundedStore, rank: int, world_size: int, timeout_s: float = CALL_S) -> None:
        """Limit each call to `timeout_s`. From now on, nothing else may use `store`, except to clone it.

        If `store` is a `BoundedStore`, share its connection and its limit, and ignore `timeout_s`.
        """
        if isinstance(store, BoundedStore):
            self._connection, self._timeout_s, self._deadline = store._connection, store._timeout_s, store._deadline
        else:
            super().__init__(store, timeout_s)
        self.rank, self.world_size = rank, world_size

    def holds(self, key: str) -> bool:
        """Return whether a key exists."""
        return self.check([key])

    def missing(self, stem: str) -> list[int]:
        """Return the ranks whose entry `stem/RANK` does not exist. This takes few requests if few ranks are missing."""
        return missing_ranks(self.check, self.everyone(), lambda rank: f"{stem}/{rank}")

    def everyone(self) -> range:
        """Return all ranks."""
        return range(self.world_size)

    def gather(
        self, name: str, payload: bytes, deadline: Deadline, watch: Callable[[], None] | None = None
    ) -> list[bytes]:
        """Return every rank's payload, in rank order. All ranks together make O(ranks) requests.

        `name`: a name that this ring uses only once. `watch`: a function that is called during the wait and may raise;
        None: raise `PeerLostError` once a rank has published a cause. Raises `DeadlineError` that names the missing
        ranks.
        """
        return _split(self.combine(name, payload, _joined, deadline, watch))

    def combine(
        self,
        name: str,
        payload: bytes,
        combined: Callable[[list[bytes]], bytes],
        deadline: Deadline,
        watch: Callable[[], None] | None = None,
    ) -> bytes:
        """Gather the payloads as `gather` does, apply `combined` to them on one rank, and return the result on all."""
        control, entry = self.until(deadline.plus(GRACE_S)), f"{name}/all"
        control.set(f"{name}/{self.rank}", payload)
        keys = [f"{name}/{rank}" for rank in self.everyone()]
        # The last rank to arrive knows that all payloads are there, and reads them for the other ranks.
        arrived = control.add(f"{name}/count")
        if arrived > self.world_size:
            raise InputError(
                f"rank {self.rank}: the ring of {self.world_size} ranks cannot open: {arrived} processes arrived at "
                f"'{name}'; two jobs use one store, or a rank was started twice"
            )
        if arrived == self.world_size:
            result = combined(control.multi_get(keys))
            control.set(entry, result)
            return result
        try:
            if control.appears(entry, deadline, watch or control.cause_watch()):
                return control.get(entry)
        except DeadlineError:
            if self.lost:
                raise
            # This process was suspended for so long that it made no call before the deadline.
        control = self.until(Deadline(GRACE_S))
        if missing := control.missing(name):
            raise DeadlineError(
                f"rank {self.rank}: ranks {missing} did not arrive at '{name}' within {deadline.timeout_s} s"
            )
        return combined(control.multi_get(keys))  # the last rank to arrive died before it could read for the others

    def appears(self, key: str, deadline: Deadline, watch: Callable[[], None] | None = None) -> bool:
        """Wait until the entry `key` exists, and return True; return False at the deadline.

        All ranks wait for this entry, so each polls less often if there are many. `watch` is called during the wait and
        may raise.
        """
        return wait_until(lambda: self.holds(key), deadline, watch, self.naps_s)

    def cause_watch(self) -> Callable[[], None]:
        """Return a `watch` for waits: a function that raises `PeerLostError` once a rank has published a cause."""
        interval_s = max(CAUSE_S, CAUSE_PER_RANK_S * self.world_size)
        looked_s = time.monotonic()

        def watch() -> None:
            nonlocal looked_s
            if time.monotonic() > looked_s + interval_s:
                looked_s = time.monotonic()
                if cause := self.cause():
                    raise PeerLostError(f"rank {self.rank}: {cause}")

        return watch

    @property
    def naps_s(self) -> tuple[float, float]:
        """The first and longest pause between polls if all ranks wait for the same entry. Both grow with the ranks."""
        first, longest = (self.world_size * factor for factor in NAPS_PER_RANK_S)
        return first, max(longest, LONGEST_NAP_S)

    def forget(self, name: str) -> None:
        """Delete this rank's entry, and on rank 0 also the common entries, of a `gather` that all ranks completed."""
        common = [f"{name}/count", f"{name}/all"] if not self.rank else []
        for key in (f"{name}/{self.rank}", *common):
            self.delete_key(key)

    def put_first(self, key: str, value: str) -> str:
        """Store an entry unless it exists; return its value afterwards."""
        return self.compare_set(key, "", value).decode()

    def publish_cause(self, error: BaseException) -> None:
        """Publish why this rank fails, unless another rank was first. Never raises."""
        try:
            self.compare_set(CAUSE, "", first_cause(self.rank, error))
        except RuntimeError:
            pass  # the store's host is gone or does not answer, so the cause cannot be published

    def cause(self) -> str | None:
        """Return the first cause of failure that a rank has published, or None."""
        return (self.get(CAUSE).decode() or None) if self.holds(CAUSE) else None

    def leave(self) -> None:
        """Announce that this rank closes gracefully. Never raises."""
        try:
            self.set(f"closed/{self.rank}", "1")
        except RuntimeError:
            pass


def missing_ranks(check: Callable[[list[str]], bool], ranks: Sequence[int], key: Callable[[int], str]) -> list[int]:
    """Return the ranks whose key does not exist. This takes few requests if few keys are missing."""
    if not ranks or check([key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [ranks[0]]
    half = len(ranks) // 2
    return missing_ranks(check, ranks[:half], key) + missing_ranks(check, ranks[half:], key)


def _joined(payloads: Sequence[bytes]) -> bytes:
    """Join entries into one: their number, their lengths, and then the bytes of each."""
    return struct.pack(f"<{len(payloads) + 1}I", len(payloads), *map(len, payloads)) + b"".join(payloads)


def _split(entry: bytes) -> list[bytes]:
    """Split the result of `_joined`."""
    (count,) = struct.unpack_from("<I", entry)
    ends = list(itertools.accumulate(struct.unpack_from(f"<{count}I", entry, 4), initial=4 + 4 * count))
    return [entry[start:end] for start, end in itertools.pairwise(ends)]


# The n-th ring that a process opens belongs to the n-th of every other process, so openings are counted per origin.
_openings: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def group_store(group: dist.ProcessGroup | None = None, timeout_s: float = CALL_S) -> tuple[dist.Store, int, int]:
    """Return (store, rank, world size) for a new ring over the ranks of a user's group; None: the default group.

    Every process of the group must open its rings in the same order. Raises `InputError` without a default process
    group, or if this process is not in `group`, and `DeadlineError` if the store's host does not answer.
    """
    if not dist.is_initialized():
        raise InputError("there is no default process group; call init_process_group, or pass no group")
    members = dist.get_process_group_ranks(group)
    if dist.get_rank() not in members:
        raise InputError(f"rank {dist.get_rank()} is not in the group of ranks {members}")
    name = dist.distributed_c10d._get_process_group_name(group or dist.distributed_c10d._get_default_group())
    # A digest of the members: a list would make each key of a ring of 1,024 ranks 4 KB long.
    origin = f"ringattn/group/{sha256(repr((name, members)).encode()).hexdigest()[:16]}"
    rank = members.index(dist.get_rank())
    return ring_store(origin, _get_default_store(), rank, Deadline(timeout_s)), rank, len(members)


def ring_store(origin: str, store: dist.Store, rank: int, deadline: Deadline) -> dist.Store:
    """Return a store whose keys belong to a new ring of `origin`.

    The store has a connection of its own, because a client that waits blocks its connection.
    """
    number = next(_openings[origin])  # counted even if the next line fails: other ranks have counted this ring
    connection = bounded(
        lambda: store.clone(),  # type: ignore[attr-defined]
        deadline,
        f"rank {rank}: {host_of(store)} accepts a connection but does not answer",
    )
    return dist.PrefixStore(f"{origin}/{number}", connection)


hosts: dict[tuple[str, int], str] = {}
"""The host of the store at each address and port, if known."""


def refuses(store: dist.Store) -> bool:
    """Return whether nothing listens at the address of a TCP store."""
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
    """Describe the process that hosts a store."""
    host, where = "rank 0 of the job, or torchrun's agent", ""
    try:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            host = hosts.get((store.host, store.port), host)
            where = f", at {store.host}:{store.port}"
    except RuntimeError:
        pass  # the address is unknown
    return f"the store's host ({host}{where})"


def read_many(store: dist.Store, keys: Sequence[str]) -> list[bytes]:
    """Return the values of existing keys, by a single request if the store supports that (a `FileStore` does not)."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        return store.multi_get(list(keys))
    return [store.get(key) for key in keys]

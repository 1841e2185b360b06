"""The control store: a key-value store of torch's, under a prefix that no other ring has.

Keys of one ring, besides heartbeats: `arrived/RANK`, `cause`, `closed/RANK`, `all_gather/N/RANK`, what `gather`
and a transport add. Guarantees: the first cause wins and never changes; every method ends by its deadline, also
when the store's host is stopped or cannot be reached; any number of rings may be open at once, beside the user's own
process groups and before or after them; a restarted job never reads the keys of the run before it.
"""

from __future__ import annotations

import itertools
import re
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ringattn.errors import DeadlineError, InputError, PeerLostError, RingError
from ringattn.transport.bounded_store import BoundedStore, bounded, host_of
from ringattn.transport.deadline import LONGEST_NAP_S, Deadline, wait_until

CAUSE = "cause"
CALL_S = 30.0
"""The limit of a call that has no nearer deadline."""
GRACE_S = 1.0
"""What a call that decides a deadline has after it: one that began just before it must not count as unanswered."""
NAPS_PER_RANK_S = 4e-5, 5e-4
"""The first and the longest nap between two looks of `gather`, for each rank: all together ask 2,000 times a second."""
CAUSE_PER_RANK_S = 1e-3
CAUSE_S = 0.5
"""How often a rank that waits for the others looks whether one of them has failed; many ranks look less often."""
LOST = dist.DistNetworkError, dist.DistStoreError
"""What torch raises if the process that hosts the store is gone."""
RESTATED = re.compile(r"(?:rank \d+ failed first|the ring of \d+ ranks cannot (?:open|go on)): .*", re.DOTALL)


def first_cause(rank: int, cause: BaseException) -> str:
    """How all other ranks re-state the failure of `rank`.

    What re-states another's, or says something of the whole ring, is handed on as it is.
    """
    handed_on = RESTATED.search(str(cause)) if isinstance(cause, RingError) else None
    return handed_on[0] if handed_on else f"rank {rank} failed first: {type(cause).__name__}: {cause}"


class ControlStore:
    """One rank's view. Used by one thread at a time: `clone` makes another.

    All methods but `publish_cause` and `leave` raise `DeadlineError` when the store's host does not answer, and another
    `RuntimeError` when it is gone.
    """

    def __init__(self, store: dist.Store | BoundedStore, rank: int, world_size: int, timeout_s: float = CALL_S) -> None:
        """`timeout_s` is the limit of each call. Nothing else may use `store` from here on, except to clone it."""
        self.store = store if isinstance(store, BoundedStore) else BoundedStore(store, timeout_s)
        self.rank, self.world_size = rank, world_size

    def clone(self) -> ControlStore:
        """The same store over a connection of its own."""
        return ControlStore(self.store.clone(), self.rank, self.world_size)

    def until(self, deadline: Deadline) -> ControlStore:
        """The same connection; each call ends by `deadline` too."""
        return ControlStore(self.store.until(deadline), self.rank, self.world_size)

    def write(self, key: str, value: str | bytes) -> None:
        """Put one entry up."""
        self.store.set(key, value)

    def read(self, key: str) -> bytes:
        """An entry that is known to be up."""
        return self.store.get(key)

    def read_many(self, keys: Sequence[str]) -> list[bytes]:
        """Entries that are known to be up, in one request."""
        return self.store.multi_get(keys) if keys else []

    def add(self, key: str, n: int = 1) -> int:
        """Add to a counter, which begins at 0; returns what it is then."""
        return self.store.add(key, n)

    def holds(self, key: str) -> bool:
        """Whether an entry is up."""
        return self.store.check([key])

    def complete(self, stem: str) -> bool:
        """Whether every rank's entry `stem/RANK` is up."""
        return self.store.check([f"{stem}/{rank}" for rank in self.everyone()])

    def missing(self, stem: str) -> list[int]:
        """The ranks whose entry `stem/RANK` is not up: few requests where few are missing."""
        return self._missing(stem, self.everyone())

    def everyone(self) -> range:
        """All ranks."""
        return range(self.world_size)

    def gather(
        self, name: str, payload: bytes, deadline: Deadline, watch: Callable[[], None] | None = None
    ) -> list[bytes]:
        """Every rank's payload, by rank, by O(ranks) requests. A name is used once in a ring.

        `watch` is called while it waits and may raise; None: raises `PeerLostError` once a rank has published a cause.
        Raises `DeadlineError` that names the ranks which are missing.
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
        """Like `gather`, but one rank makes `combined` of all payloads, and every rank returns that."""
        control, entry = self.until(deadline.plus(GRACE_S)), f"{name}/all"
        control.write(f"{name}/{self.rank}", payload)
        keys = [f"{name}/{rank}" for rank in self.everyone()]
        # The last to arrive knows that all have, and reads for the others.
        arrived = control.add(f"{name}/count")
        if arrived > self.world_size:
            raise InputError(
                f"rank {self.rank}: the ring of {self.world_size} ranks cannot open: {arrived} processes arrived at "
                f"'{name}'; two jobs use one store, or a rank was started twice"
            )
        if arrived == self.world_size:
            made = combined(control.read_many(keys))
            control.write(entry, made)
            return made
        try:
            if control.appears(entry, deadline, watch or control.cause_watch()):
                return control.read(entry)
        except DeadlineError:
            if self.store.lost:
                raise
            # This process was not run for so long that it did not ask.
        control = self.until(Deadline(GRACE_S))
        if missing := control.missing(name):
            raise DeadlineError(
                f"rank {self.rank}: ranks {missing} did not arrive at '{name}' within {deadline.timeout_s} s"
            )
        return combined(control.read_many(keys))  # the last to arrive ended before it had read for the others

    def appears(self, key: str, deadline: Deadline, watch: Callable[[], None] | None = None) -> bool:
        """Wait for an entry that all ranks wait for: they ask less often the more they are. False at the deadline.

        `watch` is called while it waits and may raise.
        """
        return wait_until(lambda: self.holds(key), deadline, watch, self.naps_s)

    def cause_watch(self) -> Callable[[], None]:
        """Return a function for waits that raises `PeerLostError` once a rank has published why the ring fails."""
        every_s = max(CAUSE_S, CAUSE_PER_RANK_S * self.world_size)
        looked_s = time.monotonic()

        def watch() -> None:
            nonlocal looked_s
            if time.monotonic() > looked_s + every_s:
                looked_s = time.monotonic()
                if cause := self.cause():
                    raise PeerLostError(f"rank {self.rank}: {cause}")

        return watch

    @property
    def naps_s(self) -> tuple[float, float]:
        """The first nap and the longest of a rank that looks for what all wait for."""
        first, longest = (self.world_size * each for each in NAPS_PER_RANK_S)
        return first, max(longest, LONGEST_NAP_S)

    def forget(self, name: str) -> None:
        """Delete what a `gather` has left that every rank has ended: each rank its own, rank 0 what is common."""
        common = [f"{name}/count", f"{name}/all"] if not self.rank else []
        for key in (f"{name}/{self.rank}", *common):
            self.store.delete_key(key)

    def put_first(self, key: str, value: str) -> str:
        """Put one entry up unless it is up already; return what it is then."""
        return self.store.compare_set(key, "", value).decode()

    def make_cause(self) -> None:
        """Let `CAUSE` be up from now on, empty as long as nothing has failed: it can be read without a question."""
        self.store.compare_set(CAUSE, "", "")

    def publish_cause(self, error: BaseException) -> None:
        """Say why this rank fails, unless another was first. Never raises."""
        try:
            self.store.compare_set(CAUSE, "", first_cause(self.rank, error))
        except RuntimeError:
            pass  # the store's host is gone or does not answer, so the cause cannot be published

    def cause(self) -> str | None:
        """The first cause."""
        return (self.read(CAUSE).decode() or None) if self.holds(CAUSE) else None

    def leave(self) -> None:
        """Say that this rank closes in good order. Never raises."""
        try:
            self.store.set(f"closed/{self.rank}", "1")
        except RuntimeError:
            pass

    def _missing(self, stem: str, ranks: range) -> list[int]:
        if self.store.check([f"{stem}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return [ranks[0]]
        half = len(ranks) // 2
        return self._missing(stem, ranks[:half]) + self._missing(stem, ranks[half:])


def _joined(payloads: Sequence[bytes]) -> bytes:
    """One entry of many: their number, their lengths, and then the bytes of each."""
    return struct.pack(f"<{len(payloads) + 1}I", len(payloads), *map(len, payloads)) + b"".join(payloads)


def _split(entry: bytes) -> list[bytes]:
    """The inverse of `_joined`."""
    (count,) = struct.unpack_from("<I", entry)
    ends = list(itertools.accumulate(struct.unpack_from(f"<{count}I", entry, 4), initial=4 + 4 * count))
    return [entry[start:end] for start, end in itertools.pairwise(ends)]


# The n-th ring that a process opens must meet the n-th of every other process, so openings are counted per origin.
_openings: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def group_store(group: dist.ProcessGroup | None = None, timeout_s: float = CALL_S) -> tuple[dist.Store, int, int]:
    """(store, rank, world size) for one more ring over the ranks of a user's group, None for the default group.

    Every process of the group must open its rings in the same order. Raises `InputError` without a default process
    group, or when this process is not in `group`, and `DeadlineError` when the store's host does not answer.
    """
    if not dist.is_initialized():
        raise InputError("there is no default process group; call init_process_group, or pass no group")
    members = dist.get_process_group_ranks(group)
    if dist.get_rank() not in members:
        raise InputError(f"rank {dist.get_rank()} is not in the group of ranks {members}")
    name = dist.distributed_c10d._get_process_group_name(group or dist.distributed_c10d._get_default_group())
    # A digest of the members: listed, they would make each key of a ring of 1,024 ranks 4 KB long.
    origin = f"ringattn/group/{sha256(repr((name, members)).encode()).hexdigest()[:16]}"
    rank = members.index(dist.get_rank())
    return ring_store(origin, _get_default_store(), rank, Deadline(timeout_s)), rank, len(members)


def ring_store(origin: str, store: dist.Store, rank: int, deadline: Deadline) -> dist.Store:
    """Return the keys of one more ring of `origin`, over a connection of its own, which a waiting client blocks."""
    number = next(_openings[origin])  # also if the next line fails: other ranks have counted this ring
    own = bounded(
        lambda: store.clone(),  # type: ignore[attr-defined]
        deadline,
        f"rank {rank}: {host_of(store)} takes a connection and does not answer",
    )
    return dist.PrefixStore(f"{origin}/{number}", own)

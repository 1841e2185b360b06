"""The control store: a key-value store of torch's, under a prefix that no other ring has.

Keys of one ring, besides its heartbeats: `arrived/RANK`, `cause`, `closed/RANK`, `all_gather/N/RANK`, and what a
transport adds. Guarantees: the first cause wins and never changes; no method waits, except `read`; any number of rings
may be open at once, beside the user's own process groups and before or after them; a restarted job never reads the keys
of the run before it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ringattn.errors import DeadlineError, InputError
from ringattn.transport.base import first_cause


class ControlStore:
    """One rank's view. Used by one thread at a time: `clone` makes another. All methods but `publish_cause` and
    `leave` raise `RuntimeError` when the store's host is gone."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size

    def clone(self) -> ControlStore:
        """The same store over a connection of its own."""
        return ControlStore(self.store.clone(), self.rank, self.world_size)  # type: ignore[attr-defined]

    def write(self, key: str, value: str | bytes) -> None:
        """Put one entry up."""
        self.store.set(key, value)  # type: ignore[arg-type]

    def read(self, key: str) -> bytes:
        """An entry that is known to be up."""
        return self.store.get(key)

    def holds(self, key: str) -> bool:
        """Whether an entry is up."""
        return self.store.check([key])

    def complete(self, stem: str) -> bool:
        """Whether every rank's entry `stem/RANK` is up."""
        return self.store.check([f"{stem}/{rank}" for rank in self.everyone()])

    def missing(self, stem: str) -> list[int]:
        """The ranks whose entry `stem/RANK` is not up."""
        return [rank for rank in self.everyone() if not self.holds(f"{stem}/{rank}")]

    def everyone(self) -> range:
        """All ranks."""
        return range(self.world_size)

    def publish_cause(self, error: BaseException) -> None:
        """Say why this rank fails, unless another was first. Never raises."""
        try:
            self.store.compare_set("cause", "", first_cause(self.rank, error))
        except RuntimeError:
            pass  # the store's host is gone, so the cause cannot be published

    def cause(self) -> str | None:
        """The first cause."""
        return self.read("cause").decode() if self.holds("cause") else None

    def leave(self) -> None:
        """Say that this rank closes in good order. Never raises."""
        try:
            self.store.set(f"closed/{self.rank}", "1")
        except RuntimeError:
            pass


# The n-th ring that a process opens must meet the n-th of every other process, so openings are counted per origin.
_openings: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
# The process that hosts the store must go on hosting it for the other rings when one closes.
_met: dict[tuple[int, int], dist.Store] = {}


def rendezvous_store(
    rank: int, world_size: int, timeout_s: float, *, run_id: str = "", restart_count: str = ""
) -> dist.Store:
    """A store for one more ring over all processes that MASTER_ADDR and MASTER_PORT bring together.

    `run_id` and `restart_count` are torchrun's. Every process must open its rings in the same order. Raises
    `DeadlineError` when the store's host does not answer.
    """
    origin = f"ringattn/{run_id}/{restart_count}"
    if (rank, world_size) not in _met:
        timeout = timedelta(seconds=timeout_s)
        try:
            _met[rank, world_size], _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
        except RuntimeError as error:
            raise DeadlineError(f"rank {rank}: no store at MASTER_ADDR within {timeout_s} s: {error}") from error
    return _prefixed(origin, _met[rank, world_size])


def group_store(group: dist.ProcessGroup | None = None) -> tuple[dist.Store, int, int]:
    """(store, rank, world size) for one more ring over the ranks of a user's group, None for the default group.

    Every process of the group must open its rings in the same order. Raises `InputError` without a default process
    group, or when this process is not in `group`.
    """
    if not dist.is_initialized():
        raise InputError("there is no default process group; call init_process_group, or pass no group")
    members = dist.get_process_group_ranks(group)
    if dist.get_rank() not in members:
        raise InputError(f"rank {dist.get_rank()} is not in the group of ranks {members}")
    name = dist.distributed_c10d._get_process_group_name(group or dist.distributed_c10d._get_default_group())
    origin = f"ringattn/group/{name}/{'-'.join(map(str, members))}"
    return _prefixed(origin, _get_default_store()), members.index(dist.get_rank()), len(members)


def _prefixed(origin: str, store: dist.Store) -> dist.Store:
    """One more ring's own keys, over a connection of its own: a client that waits blocks all its other users."""
    return dist.PrefixStore(f"{origin}/{next(_openings[origin])}", store.clone())  # type: ignore[attr-defined]

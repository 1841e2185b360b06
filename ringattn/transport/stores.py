"""Where the processes of a ring meet: a key-value store of torch's, under a prefix that no other ring has.

Guarantees: any number of rings may be opened, one after another or together, beside the user's own process groups and
before or after them; a restarted job never reads the keys of its former life.
Not covered: environment variables of its own (torch reads MASTER_ADDR and MASTER_PORT), connections, messages.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ringattn.errors import DeadlineError, InputError

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

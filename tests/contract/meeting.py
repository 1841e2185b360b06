"""Where the test processes meet for a ring of some of them."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ringattn.transport.control_store import rendezvous_store

WITHIN_S = 60.0


def store_of(rank: int, world_size: int, members: list[int]) -> dist.Store:
    """The processes' store, once all `members` are there."""
    store = rendezvous_store(rank, world_size, WITHIN_S)
    store.set(f"ready/{rank}", "1")
    store.wait([f"ready/{other}" for other in members], timedelta(seconds=WITHIN_S))
    return store

"""Where the test processes meet for a ring of some of them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from ringattn.transport.control_store import ring_store
from ringattn.transport.deadline import Deadline
from ringattn.transport.meeting import job_of, job_store

WITHIN_S = 60.0


def rendezvous_store(rank: int, world_size: int, timeout_s: float, **variables: str) -> dist.Store:
    """The store of one more ring over all processes that MASTER_ADDR and MASTER_PORT bring together."""
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    job, deadline = job_of({**os.environ, **ranks, **variables}), Deadline(timeout_s)
    assert job is not None
    return ring_store(f"ringattn/{job.restart_count}", job_store(job, deadline), rank, deadline)


def store_of(rank: int, world_size: int, members: list[int]) -> dist.Store:
    """The processes' store, once all `members` are there."""
    store = rendezvous_store(rank, world_size, WITHIN_S)
    store.set(f"ready/{rank}", "1")
    store.wait([f"ready/{other}" for other in members], timedelta(seconds=WITHIN_S))
    return store

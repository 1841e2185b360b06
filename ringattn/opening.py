"""Where a rank finds the others: a process group, a device mesh, torchrun's variables, or nobody.

The only room that reads environment variables.
Does not know: attention, schedules.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from ringattn.errors import InputError, RingError, UnsupportedError
from ringattn.transport.base import Transport
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.local import LocalWorld
from ringattn.transport.stores import group_store, rendezvous_store

TRANSPORTS = ("auto", "local", "gloo", "nccl")


def open_transport(group: Any, transport: str, timeout_s: float) -> Transport:
    """The transport of this rank."""
    if transport not in TRANSPORTS:
        raise InputError(f"transport={transport!r} is not known; choose one of {', '.join(TRANSPORTS)}")
    if transport == "nccl":
        raise UnsupportedError("transport='nccl' is not built yet; use gloo for several processes")
    if isinstance(group, dist.DeviceMesh):
        group = group.get_group("cp" if group.mesh_dim_names and "cp" in group.mesh_dim_names else None)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if group is not None or (dist.is_available() and dist.is_initialized()):
        store, rank, world_size = group_store(group)
    elif world_size > 1:
        try:
            rank = int(os.environ["RANK"])
        except KeyError:
            raise RingError("WORLD_SIZE is set and RANK is not: start the ranks with torchrun") from None
        store = rendezvous_store(
            rank,
            world_size,
            timeout_s,
            run_id=os.environ.get("TORCHELASTIC_RUN_ID", ""),
            restart_count=os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
        )
    if world_size == 1:
        return LocalWorld(1, timeout_s).transport(0)
    if transport == "local":
        raise InputError(
            f"transport='local' joins threads of one process, and there are {world_size} processes; "
            "use gloo, or ringattn.testing.run_ranks for threads"
        )
    return GlooTransport.open(store, rank, world_size, timeout_s)

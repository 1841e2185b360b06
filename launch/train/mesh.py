"""Who trains together: a mesh of all processes, of replicas that train different sequences and ranks that share each.

Its dimensions are `dp`, the replicas, and `cp`, the ring of each; ranks of one ring have neighboring numbers, so that a
ring stays within a machine where it can. Sums over all processes go through a second ring, over the whole mesh.
Guarantees: with one replica there is one ring, and torch's process group is opened only by what needs it.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringattn import Ring
from ringattn.errors import InputError
from ringattn.launch.ranks import place_in_torchrun, restarts_of_torchrun
from ringattn.launch.train.alike import check_keys
from ringattn.launch.train.config import TrainConfig
from ringattn.runtime.rank_group import RankGroup
from ringattn.transport.local import LocalTransport


class Groups(NamedTuple):
    """The groups of this rank: those that share its sequences, and all of the mesh, in the order of their numbers."""

    ring: Ring
    everyone: RankGroup


def device_type(transport: str) -> str:
    """Where tensors of a run live: cuda where there is a GPU, unless `transport` is one of the CPU; else cpu."""
    return "cuda" if torch.cuda.is_available() and transport not in ("shm", "gloo") else "cpu"


def agreed_ranks_of_ring(ranks: int | None, replicas: int) -> int:
    """How many ranks share a sequence: torchrun's processes divided among `replicas`, else `ranks`, else 1.

    Raises `InputError`, with the key first, if torchrun started another number of processes than the two make.
    """
    place = place_in_torchrun()
    if place is None:
        return ranks or 1
    if place.world_size % replicas:
        raise InputError(f"replicas={replicas}: torchrun started {place.world_size} processes; start a multiple")
    if ranks is not None and ranks * replicas != place.world_size:
        raise InputError(
            f"ranks={ranks}: with replicas={replicas} these are {ranks * replicas} processes, and torchrun started "
            f"{place.world_size}; leave ranks out"
        )
    return place.world_size // replicas


@contextmanager
def opened_mesh(config: TrainConfig) -> Iterator[Groups]:
    """The groups of this process, which has torchrun's environment or is alone; closed at the end.

    Raises `DisagreementError` on all ranks where they have other configurations than each other.
    """
    options: dict[str, Any] = {"transport": config.transport, "engine": config.engine, "timeout_s": config.timeout_s}
    with Ring(**options) as everyone:
        check_keys(everyone, config)  # before the mesh, which ranks with other words would not meet in
        if config.replicas == 1:
            yield Groups(everyone, everyone)
            return
        kind = device_type(config.transport)
        _open_process_group(kind, everyone.rank, everyone.world_size, config.timeout_s)
        shape = (config.replicas, everyone.world_size // config.replicas)
        with Ring(init_device_mesh(kind, shape, mesh_dim_names=("dp", "cp")), **options) as ring:
            yield Groups(ring, everyone)


def replica_of(everyone: RankGroup, ring: RankGroup) -> int:
    """Which replica this rank belongs to, 0 .. replicas - 1."""
    return everyone.rank // ring.world_size


def join_process_group(everyone: RankGroup, key: str, timeout_s: float = 600.0) -> None:
    """Torch's default process group over all ranks, opened here if nobody has, and left open while the process lives.

    Raises `InputError`, beginning with the `key` that needs it, where ranks are threads: a process has one such group.
    """
    if everyone.world_size > 1 and isinstance(everyone.transport, LocalTransport):
        raise InputError(f"{key}: the ranks are threads and it needs processes, as `ringattn train` starts them")
    _open_process_group(everyone.device.type, everyone.rank, everyone.world_size, timeout_s)
    if dist.get_world_size() != everyone.world_size:
        raise InputError(
            f"{key}: torch's process group has {dist.get_world_size()} ranks and this run {everyone.world_size}; "
            "train with all processes"
        )


def _open_process_group(kind: str, rank: int, world_size: int, timeout_s: float) -> None:
    """Open it on every process alike."""
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        # torchrun's agent hosts one store for all its restarts, and torch would find the addresses of ranks that died.
        store, rank, world_size = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
        store = dist.PrefixStore(f"ringattn-train/restart-{restarts_of_torchrun()}", store)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    atexit.register(dist.destroy_process_group)

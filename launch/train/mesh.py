"""The groups of ranks that train together, and checks that all of them train the same run.

The mesh of all processes has two dimensions: `dp`, the replicas, which train different sequences, and `cp`, the ring of
each replica, whose ranks share its sequences. Ranks of one ring have neighboring numbers, so that a ring stays within a
machine if possible. Sums over all processes use a second ring over the whole mesh.

Guarantees: before the first step, all ranks compare their keys, their text and their folder. If something differs, or
if a single rank cannot take part, all ranks raise an error that begins with the key. With one replica there is one
ring, and torch's process group is opened only if a feature needs it.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringattn import Ring
from ringattn.errors import DisagreementError, InputError
from ringattn.launch.folders import FolderLock, locked
from ringattn.launch.options import leaves
from ringattn.launch.ranks import place_in_torchrun, restarts_of_torchrun
from ringattn.launch.train.config import TrainConfig, check_switches
from ringattn.launch.train.data import Documents, check_limit, load
from ringattn.transport.local import LocalTransport

PROCESS_KEYS = frozenset({"text", "tokenizer", "threads_per_rank", "timeout_s", "limit_s"})
"""Keys whose values may differ between ranks. A file may have another path on each machine; its content is compared."""
DYING_S = 5.0
"""How long to wait for the lock of a run's folder: the ranks of a killed command take a while to end and release it."""


# --- the mesh --------------------------------------------------------------------------------------------------------


def device_type(transport: str) -> str:
    """Return the device type of a run: cuda if there is a GPU and `transport` is not one for CPUs, else cpu."""
    return "cuda" if torch.cuda.is_available() and transport not in ("shm", "gloo") else "cpu"


def agreed_ranks_of_ring(ranks: int | None, replicas: int) -> int:
    """Return how many ranks share a sequence: torchrun's processes divided by `replicas`, else `ranks`, else 1.

    Raises `InputError`, with the key first, if torchrun did not start `ranks` times `replicas` processes, or if
    `replicas` does not divide their number.
    """
    place = place_in_torchrun()
    if place is None:
        return ranks or 1
    if place.world_size % replicas:
        raise InputError(
            f"replicas={replicas}: torchrun started {place.world_size} processes; start a multiple of replicas"
        )
    if ranks is not None and ranks * replicas != place.world_size:
        raise InputError(
            f"ranks={ranks}: with replicas={replicas} this needs {ranks * replicas} processes, but torchrun started "
            f"{place.world_size}; leave ranks out"
        )
    return place.world_size // replicas


@contextmanager
def opened_mesh(config: TrainConfig) -> Iterator[tuple[Ring, Ring]]:
    """Yield two rings of this process and close them at the end: the ranks of its replica, and all ranks.

    Raises `DisagreementError` on all ranks if their configurations differ.
    """
    options: dict[str, Any] = {"transport": config.transport, "engine": config.engine, "timeout_s": config.timeout_s}
    with Ring(**options) as everyone:
        # Compare keys before the mesh is made. Ranks with different keys would wait there until the deadline.
        _compare(everyone, config, _keys(config))
        if config.replicas == 1:
            yield everyone, everyone
            return
        kind = device_type(config.transport)
        _open_process_group(kind, everyone.rank, everyone.world_size, config.timeout_s)
        shape = (config.replicas, everyone.world_size // config.replicas)
        with Ring(init_device_mesh(kind, shape, mesh_dim_names=("dp", "cp")), **options) as ring:
            yield ring, everyone


def replica_of(everyone: Ring, ring: Ring) -> int:
    """Return the number of this rank's replica, from 0 to replicas - 1."""
    return everyone.rank // ring.world_size


def join_process_group(everyone: Ring, key: str, timeout_s: float = 600.0) -> None:
    """Open torch's default process group over all ranks, unless it is open. It stays open until the process ends.

    Raises `InputError`, beginning with the option `key` that needs the group, if the ranks are threads, because a
    process can have only one such group, or if the group has another number of ranks.
    """
    if everyone.world_size > 1 and isinstance(everyone.transport, LocalTransport):
        raise InputError(
            f"{key}: needs ranks that are processes, as `ringattn train` starts them, but these ranks are threads"
        )
    _open_process_group(everyone.device.type, everyone.rank, everyone.world_size, timeout_s)
    if dist.get_world_size() != everyone.world_size:
        raise InputError(
            f"{key}: torch's process group has {dist.get_world_size()} ranks but this run has {everyone.world_size}; "
            "train with all processes"
        )


def _open_process_group(kind: str, rank: int, world_size: int, timeout_s: float) -> None:
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        # torchrun's agent hosts one store for all restarts, in which torch would find the addresses of ranks that died.
        # The prefix separates the restarts.
        store, rank, world_size = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
        store = dist.PrefixStore(f"ringattn-train/restart-{restarts_of_torchrun()}", store)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    atexit.register(dist.destroy_process_group)


# --- whether all ranks train the same run ----------------------------------------------------------------------------


def load_on_all_ranks(everyone: Ring, ring: Ring, config: TrainConfig) -> Documents:
    """Load the text, and check that all ranks of `everyone` have the same text and configuration.

    `ring` has the ranks that share this rank's sequences. This is a collective call. Raises `InputError`, with the key
    first, on all ranks if one of them refuses the configuration or the text, and `DisagreementError` for a key that
    differs.
    """
    text, refusal = None, None
    try:
        check_switches(config, ring.device.type)
        if everyone.world_size != config.replicas * ring.world_size:
            rings = f"{everyone.world_size} ranks train in rings of {ring.world_size}"
            raise InputError(f"replicas={config.replicas}: {rings}")
        text = load(config)
        check_limit(text, config, ring.world_size)
    except InputError as error:
        refusal = error
    everyone.check_consistency("what to train", refusal, always=True)
    assert text is not None
    # Compare the keys here too, because `train` may be called with rings that `opened_mesh` has not opened.
    _compare(everyone, config, {**_keys(config), "text": text.digest()})
    return text


@contextmanager
def folder_of_run(everyone: Ring, config: TrainConfig, keeps_result: bool) -> Iterator[FolderLock | None]:
    """Lock the folder `out` for this run, and yield the lock on rank 0 and None on other ranks.

    If the run writes nothing to the folder, it is not locked. This is a collective call. Raises `InputError` on all
    ranks if the folder cannot be written or another run has locked it.
    """
    if not keeps_result and config.checkpoint_every_steps is None:
        yield None
        return
    with ExitStack() as stack:
        lock, refusal = None, None
        try:
            if everyone.rank == 0:
                lock = stack.enter_context(locked_folder(config.out))
        except InputError as error:
            refusal = error
        everyone.check_consistency("where the result goes", refusal, always=True)
        yield lock


def locked_folder(path: str) -> AbstractContextManager[FolderLock]:
    """Lock the folder of a run's results and checkpoints for this process; see `locked`."""
    return locked(Path(path), "out", "run", "give this run a separate folder", DYING_S)


def _keys(config: TrainConfig) -> dict[str, Any]:
    """Return the options that must be the same on all ranks.

    `replicas` comes first, so that it is reported before `ranks`, which is derived from it under torchrun.
    """
    facts = {key: value for key, value, _ in leaves(config) if key not in PROCESS_KEYS}
    return {"replicas": config.replicas, **facts}


def _compare(everyone: Ring, config: TrainConfig, facts: dict[str, Any]) -> None:
    """Raise `DisagreementError` on all ranks for the first key in which a rank's facts differ from rank 0's."""
    # All ranks compare the same gathered facts, so they find the same first difference and raise the same error.
    first, *others = [json.loads(message) for message in everyone.all_gather_text(json.dumps(facts))]
    for rank, theirs in enumerate(others, 1):
        key = next((key for key in theirs if theirs[key] != first.get(key)), None)
        if key == "text":
            raise DisagreementError(
                f"text={config.text}: the tokens or documents of rank {rank} differ from those of rank 0; give every "
                "machine the same text and tokenizer"
            )
        if key is not None:
            raise DisagreementError(
                f"{key}: rank {rank} has {theirs[key]} but rank 0 has {first.get(key)}; start all ranks with the "
                "same arguments"
            )

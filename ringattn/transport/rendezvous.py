"""The opening of a rank's transport: over a process group, a device mesh, or torchrun's ranks, or for one rank alone.

This is the only module that reads environment variables.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ringattn.errors import InputError, UnsupportedError
from ringattn.transport.base import Opening, Transport
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.device import CudaDevice
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.local import LocalWorld
from ringattn.transport.location import (
    VARIABLE,
    Location,
    gather_locations,
    my_location,
    one_machine,
    order_advice,
    own_calibration,
)
from ringattn.transport.meeting import Meeting, publish_refusal
from ringattn.transport.nccl.library import mismatch
from ringattn.transport.nccl.options import (
    LateGroups,
    NcclOptions,
    check_environment,
    open_binding,
    overlap_warnings,
    warnings_beside_torch,
)
from ringattn.transport.nccl.supervisor import ras_address
from ringattn.transport.nccl.transport import NcclTransport
from ringattn.transport.nodes import DeviceNodesTransport, open_shm_and_gloo
from ringattn.transport.peer.driver import CudaDriver
from ringattn.transport.peer.opening import open_peer
from ringattn.transport.peer.opening import warnings_of as peer_warnings
from ringattn.transport.peer.transport import PeerTransport
from ringattn.transport.shared.transport import ShmTransport, obstacle

TRANSPORTS = ("auto", "local", "shm", "gloo", "nccl", "peer")
REFUSED_S = 5.0
"""How long a rank whose arguments are refused tries to notify the others before it raises."""
TransportName = Literal["auto", "local", "shm", "gloo", "nccl", "peer"]


def open_transport(
    group: Any, transport: str, timeout_s: float, nccl: NcclOptions | None = None, calibrated: bool = False
) -> Transport:
    """Open this rank's transport.

    `auto` is local for a ring of one rank. For more ranks it is nccl if there is a CUDA device, otherwise shm if all
    ranks are known to belong to one user on one machine, and otherwise gloo. If the transport that `auto` has chosen
    cannot be opened, no other is tried.
    `calibrated`: add the constants that `ringattn calibrate` stored to this rank's location, which all ranks read.
    """
    with refusals_published(group):
        _check_names(transport, nccl)
    meeting = Meeting.of(group, timeout_s, os.environ)
    rank, world_size, deadline = meeting.rank, meeting.world_size, meeting.deadline
    if world_size == 1 and transport != "nccl":
        return LocalWorld(1, timeout_s).transport(0)
    # For peer, a rank without a GPU reports that to the others when the transport opens.
    on_gpu = transport == "nccl" or (transport in ("auto", "peer") and torch.cuda.is_available())
    try:
        meeting.claim()
        if transport == "local":
            raise InputError(
                f"transport='local' joins threads of one process, and there are {world_size} processes; "
                "use shm or gloo, or ringattn.testing.run_ranks for threads"
            )
        gpu = _gpu_index(rank) if on_gpu else None
        local_calibration = own_calibration(os.environ.get(VARIABLE)) if calibrated else None
        locations = _located(meeting.control, gpu, deadline, local_calibration)
        folder = os.environ.get("RINGATTN_FLIGHT_DIR")
        opening = Opening(
            meeting.store,
            rank,
            world_size,
            timeout_s,
            flight_dir=Path(folder) if folder else None,
            interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
            job_size=job_size(world_size),
            locations=locations,
            deadline=deadline,
        )
        if transport == "peer":
            return _open_peer(opening, nccl, gpu)
        if gpu is not None:
            if one_machine(locations):
                opening.interface = "lo"
            return _open_nccl(opening, nccl or NcclOptions(), gpu)
        if transport == "shm" and not one_machine(locations):
            return open_shm_and_gloo(opening)
        if transport == "shm" or (transport == "auto" and obstacle(locations) is None):
            return ShmTransport.open(opening)
        return GlooTransport.open(opening)
    except Exception as error:  # the other ranks are already waiting for this one
        failure = meeting.fail(error)
        if failure is error:
            raise
        raise failure from error


@contextmanager
def refusals_published(group: Any) -> Iterator[None]:
    """Run the block. If it raises because this rank's arguments are wrong, report the error to the other ranks."""
    try:
        yield
    except Exception as error:
        publish_refusal(group, error, REFUSED_S, os.environ)
        raise


def _check_names(transport: str, nccl: NcclOptions | None) -> None:
    """Raise `InputError` if there is no such transport, or if it takes no NCCL options and some were given."""
    if transport not in TRANSPORTS:
        raise InputError(f"transport={transport!r} is not known; choose one of {', '.join(TRANSPORTS)}")
    if nccl is not None and transport not in ("auto", "nccl", "peer"):
        raise InputError(f"nccl={nccl} was given, but transport={transport!r} takes no NCCL options")


def _located(
    control: ControlStore, gpu: int | None, deadline: Deadline, calibration: str | None
) -> tuple[Location, ...]:
    """Gather all ranks' locations. On rank 0, warn if the order of the ranks makes a ring slow."""
    location = replace(my_location(gpu), calibration=calibration)
    locations = gather_locations(control, location, deadline)
    if control.rank == 0 and (advice := order_advice(locations)):
        warnings.warn(f"rank 0: {advice}", stacklevel=4)
    return locations


def _open_nccl(opening: Opening, options: NcclOptions, gpu: int) -> NcclTransport:
    """Open NCCL on this process's GPU."""
    rank, locations = opening.rank, opening.locations
    if unfit := mismatch(torch.version.cuda):
        warnings.warn(f"rank {rank}: {unfit}", stacklevel=4)
    binding = open_binding(options)
    check_environment(os.environ)
    for warning in [] if len(locations) == 1 else overlap_warnings(os.environ, options, binding.capabilities):
        warnings.warn(f"rank {rank}: {warning}", stacklevel=4)

    def beside_torch() -> None:
        for warning in warnings_beside_torch(os.environ, binding.version):
            warnings.warn(f"rank {rank}: {warning}", stacklevel=4)

    late_groups = LateGroups(beside_torch)
    late_groups.check()
    nccl_id = os.environ.get("NCCL_HOSTID", locations[rank].host)
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":  # NCCL then allows ranks to share a GPU
        nccl_id += f"/{rank}"
    ras = ras_address(os.environ, binding.version)
    ring = NcclTransport.open(opening, binding=binding, gpu=CudaDevice(gpu), options=options, nccl_id=nccl_id, ras=ras)
    ring.check_groups = late_groups.check
    return ring


def _open_peer(opening: Opening, options: NcclOptions | None, gpu: int | None) -> Transport:
    """Open the peer transport, which uses the copy engines of this process's GPU, and NCCL if there are other nodes."""
    spans = not one_machine(opening.locations)
    if options is not None and not spans:
        raise InputError(f"nccl={options} was given, but transport='peer' takes no NCCL options inside one node")

    def make() -> tuple[CudaDriver, CudaDevice]:
        if gpu is None:
            raise UnsupportedError("torch finds no CUDA device")
        device = CudaDevice(gpu)
        device.activate()
        torch.cuda.current_stream(gpu).synchronize()  # creates the context
        driver = CudaDriver(gpu)
        for warning in peer_warnings(os.environ, driver):
            warnings.warn(f"rank {opening.rank}: {warning}", stacklevel=7)
        return driver, device

    if not spans:
        # Shared pages connect all ranks, so neighbours need no datagrams.
        return open_peer(replace(opening, interface=None, job_size=None), make)
    opening.name = f"{PeerTransport.name}+{NcclTransport.name}"
    inside = open_peer(opening, make)
    assert gpu is not None  # if a rank had none, all ranks were refused
    try:
        return DeviceNodesTransport(inside, _open_nccl(opening, options or NcclOptions(), gpu))
    except BaseException as error:
        inside.abort(error)
        raise


def job_size(world_size: int) -> int:
    """Return the number of ranks that share the store of a ring of `world_size`: those of the whole job."""
    group = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    variable = os.environ.get("WORLD_SIZE", "")
    return max(world_size, group, int(variable) if variable.isdecimal() else 1)


def _gpu_index(rank: int) -> int:
    """Return the index of this rank's GPU: the one that torchrun's LOCAL_RANK names, unless the caller chose another.

    If the current GPU is not GPU 0, the caller has chosen it. Without LOCAL_RANK, or with a single GPU, return the
    current GPU. Raises `UnsupportedError` if torch finds no GPU, and `InputError` if LOCAL_RANK names none.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"rank {rank}: transport='nccl' needs a CUDA device, and torch finds none; use gloo for tensors on CPU"
        )
    count, current, local = torch.cuda.device_count(), torch.cuda.current_device(), os.environ.get("LOCAL_RANK")
    if current != 0 or local is None or count == 1:
        return current
    if not local.isdecimal() or int(local) >= count:
        raise InputError(f"rank {rank}: LOCAL_RANK is {local}, but this host shows {count} GPUs; start one rank a GPU")
    return int(local)

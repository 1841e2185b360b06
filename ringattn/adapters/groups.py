"""Rings of process groups that a host made: each is opened at its first use and closed when its group is collected.

Guarantees: one group has one ring in this process; the table here holds groups by weak references only.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringattn.errors import InputError
from ringattn.ring import Ring
from ringattn.runtime.runtime import shared_ring_is_open


class _Environment:
    """Key of the ring over torchrun's environment, used while no process group is initialized."""


_ENVIRONMENT = _Environment()
_rings: WeakKeyDictionary[Any, Ring] = WeakKeyDictionary()


def ring_of(group: Any = None) -> Ring:
    """Return the ring of `group`. A collective call of the group's ranks at its first use.

    A ring that has failed is returned unchanged: it raises when it is used.

    Args:
        group: A Ring, a ProcessGroup, a DeviceMesh (its dimension `cp`), or None, as for `Ring`.

    Returns:
        The ring, the same at every call.

    Raises:
        InputError: A mesh of several dimensions has no dimension `cp`; or `group` is None, the default group has only
            this rank, and a ring of several ranks is open, so that each rank would attend to its own shard only.
        RingError: What `Ring` raises when it is opened.

    Example:
        ring = ring_of(mesh)
    """
    if isinstance(group, Ring):
        return group
    if isinstance(group, dist.DeviceMesh):
        names = group.mesh_dim_names or ()
        if group.ndim != 1 and "cp" not in names:
            raise InputError(f"the mesh has dimensions {names}; context parallelism needs one called cp, or mesh[name]")
        group = group.get_group("cp" if "cp" in names else None)
    is_default = group is None
    if is_default:
        group = dist.group.WORLD if dist.is_initialized() else _ENVIRONMENT
    if group not in _rings:
        # `finalize` closes the ring when Python collects the group.
        ring = _rings[group] = Ring(None if group is _ENVIRONMENT else group)
        finalize(group, ring.close)
    if is_default and _rings[group].world_size == 1 and shared_ring_is_open():
        raise InputError(
            "group=None is a ring of this process only, but a ring of several ranks is open and the tensors may be its "
            "shards: pass that ring as group"
        )
    return _rings[group]


def ring_of_ranks(size: int | None, device_type: str) -> Ring:
    """Return this rank's ring of `size` consecutive ranks of the default group. A collective call of all ranks.

    Args:
        size: The ranks of a ring. None: all ranks.
        device_type: The type of the ranks' devices, as for `DeviceMesh`.

    Returns:
        The ring, as `ring_of`.

    Raises:
        InputError: The number of ranks is not a multiple of `size`.
        RingError: What `Ring` raises when it is opened.

    Example:
        ring = ring_of_ranks(4, "cuda")
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if size is None or size == ranks:
        return ring_of()
    if size < 1 or ranks % size:
        raise InputError(f"{ranks} ranks cannot form rings of {size}: the number of ranks must be a multiple of it")
    return ring_of(init_device_mesh(device_type, (ranks // size, size), mesh_dim_names=("dp", "cp")))


def close_rings() -> None:
    """Close every ring that `ring_of` opened, before `destroy_process_group`; the next call opens new ones.

    Raises:
        RingError: What `Ring.close` raises.

    Example:
        close_rings()
        torch.distributed.destroy_process_group()
    """
    # Popped one by one: closing a ring may collect a group, which changes the table.
    while _rings:
        _rings.popitem()[1].close()

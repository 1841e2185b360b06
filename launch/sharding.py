"""Weights, gradients and optimizer state dealt out over the ranks of a ring, by torch's FSDP2.

zero2 gathers the weights once for forward and backward together; zero3 drops each block's again after its forward pass
and gathers them a second time. Gradients and optimizer state are sharded in both (ZeRO, arXiv:1910.02054).
Promises: gradients are summed over the ranks, not averaged, as `Ring.all_reduce` would have.
Does not know: optimizers, losses.
"""

from __future__ import annotations

import atexit

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ringattn import Ring
from ringattn.errors import InputError
from ringattn.launch.model import Transformer
from ringattn.transport.local import LocalTransport


def shard_model(ring: Ring, model: Transformer, sharding: str) -> None:
    """Shard the model's weights over the ring, in place; every rank calls it with the same weights.

    Raises `InputError` for a ring of threads: FSDP speaks through torch's process group, which a process has once.
    """
    _open_process_group(ring)
    mesh = init_device_mesh(ring.device.type, (ring.world_size,))
    again = sharding == "zero3"
    # What is left for the model itself is not dropped after forward: its backward begins at once.
    sharded = [*(fully_shard(block, mesh=mesh, reshard_after_forward=again) for block in model.blocks),
               fully_shard(model, mesh=mesh, reshard_after_forward=False)]  # fmt: skip
    for part in sharded:
        part.set_gradient_divide_factor(1.0)  # of that part alone; the default divides by the ranks


def _open_process_group(ring: Ring) -> None:
    """Torch's default process group over the ranks of the ring, left open while the process lives."""
    if not dist.is_initialized():
        if ring.world_size > 1 and isinstance(ring.transport, LocalTransport):
            raise InputError("sharding: the ranks are threads; FSDP needs processes, as `ringattn train` starts them")
        backend = "nccl" if ring.device.type == "cuda" else "gloo"
        alone = dist.HashStore() if ring.world_size == 1 else None
        dist.init_process_group(backend, store=alone, rank=ring.rank, world_size=ring.world_size)
        atexit.register(dist.destroy_process_group)
    if dist.get_world_size() != ring.world_size:
        raise InputError(
            f"sharding: torch's process group has {dist.get_world_size()} ranks and the ring {ring.world_size}; "
            "shard over the ring of all processes"
        )

"""Weights, gradients and optimizer state sharded over all ranks of a run, by torch's FSDP2.

zero2 gathers the weights once for forward and backward together; zero3 drops each block's again after its forward pass
and gathers them a second time. Gradients and optimizer state are sharded in both (ZeRO, arXiv:1910.02054). A rank's
part is one of all processes, replicas times ranks of a ring: weights are the same everywhere.
Guarantees: gradients are summed over the ranks, not averaged, as `Ring.all_reduce` would have.
"""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ringattn.launch.train.mesh import join_process_group
from ringattn.launch.train.model import Transformer
from ringattn.runtime.rank_group import RankGroup


def shard_model(everyone: RankGroup, model: Transformer, sharding: str, timeout_s: float) -> None:
    """Shard the model's weights over all ranks, in place; every rank calls it with the same weights.

    Raises `InputError` for ranks that are threads: FSDP speaks through torch's process group, which a process has once.
    """
    join_process_group(everyone, "sharding", timeout_s)
    mesh = init_device_mesh(everyone.device.type, (everyone.world_size,), mesh_dim_names=("dp_cp",))
    again = sharding == "zero3"
    # What is left for the model itself is not dropped after forward: its backward begins at once.
    sharded = [*(fully_shard(block, mesh=mesh, reshard_after_forward=again) for block in model.blocks),
               fully_shard(model, mesh=mesh, reshard_after_forward=False)]  # fmt: skip
    for part in sharded:
        part.set_gradient_divide_factor(1.0)  # of that part alone; the default divides by the ranks
        # Else float32 and bf16 gradients are reduced by PREMUL_SUM, which gloo does not have.
        part.set_force_sum_reduction_for_comms(True)

"""What a rank's loss is multiplied by, so that the reduced gradients are those of the one-process mean.

A rank sums its loss over its own labels. The mean of the whole batch divides that by the labels of *all* ranks, and a
stack that averages gradients (DDP, FSDP) divides once more by the number of ranks, which has to be undone. A mean of
the ranks' means is another loss, and looks fine in a log.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.errors import InputError
from ringattn.ring import Ring

GRADIENTS = ("mean", "sum")
GradientReduction = Literal["mean", "sum"]


def count_labels(
    labels: Tensor | Many[Tensor], ring: Ring, *, data_parallel: Any = None, ignore_index: int = -100
) -> int:
    """Labels that count, over all ranks of the ring and of `data_parallel`. A collective call.

    Args:
        labels: Integers of any shape, this rank's (`Sequence.shard_labels`), or those of all micro batches of a step.
        ring: The ring.
        data_parallel: The process group of the ranks that hold the same place in other rings. None: there are none.
        ignore_index: The label that does not count.

    Returns:
        Their number, the same on all ranks.

    Raises:
        RingError: What `Ring.all_reduce` raises.
    """
    parts = [labels] if isinstance(labels, Tensor) else list(labels)
    valid = torch.zeros(1, dtype=torch.int64, device=ring.device)
    for part in parts:
        valid += (part != ignore_index).sum().to(valid.device)
    ring.all_reduce([valid])
    if data_parallel is not None:
        dist.all_reduce(valid, group=data_parallel)
    return int(valid)


def loss_scale(
    labels: Tensor | Many[Tensor],
    ring: Ring,
    *,
    gradients: GradientReduction,
    data_parallel: Any = None,
    ignore_index: int = -100,
) -> float:
    """The factor of a loss that is *summed* over this rank's labels. A collective call.

    The scaled losses of all ranks have, by the same reduction, the mean loss of the whole batch as their value.

    Args:
        labels: Integers of any shape, this rank's (`Sequence.shard_labels`), or those of all micro batches of a step.
        ring: The ring.
        gradients: What reduces gradients over the ranks of the ring and of `data_parallel` together: mean (DDP, FSDP as
            they come) or sum (`Ring.all_reduce`, FSDP2 with `set_gradient_divide_factor(1.0)` and
            `set_force_sum_reduction_for_comms(True)`).
        data_parallel: The process group of the ranks that hold the same place in other rings. None: there are none.
        ignore_index: The label that does not count.

    Returns:
        The factor; finite where there are no labels at all.

    Raises:
        InputError: `gradients` is not known.
        RingError: What `Ring.all_reduce` raises.

    Example:
        loss = F.cross_entropy(logits, labels, reduction="sum") * loss_scale(labels, ring, gradients="mean")
    """
    if gradients not in GRADIENTS:
        raise InputError(f"gradients={gradients!r} is not known; choose one of {', '.join(GRADIENTS)}")
    valid = count_labels(labels, ring, data_parallel=data_parallel, ignore_index=ignore_index)
    replicas = 1 if data_parallel is None else dist.get_world_size(data_parallel)
    return (ring.world_size * replicas if gradients == "mean" else 1) / max(1, valid)

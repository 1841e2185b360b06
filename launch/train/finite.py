"""Steps that are not finite: what is said of them, and whether a model is still worth saving."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ringattn.errors import NonFiniteError
from ringattn.launch.train.model import Transformer
from ringattn.runtime.rank_group import RankGroup


def nonfinite_step(step: str, loss: float, norm: float) -> NonFiniteError | None:
    """The error of a step, `step` in words, whose loss or gradient norm is not finite, or None."""
    if isfinite(loss) and isfinite(norm):
        return None
    found = [f"{name} is {value}" for name, value in (("loss", loss), ("gradient norm", norm)) if not isfinite(value)]
    return NonFiniteError(
        f"{step}: its {' and its '.join(found)}, so the weights were left as they were; lower learning_rate or "
        "clip_norm and resume from the last checkpoint, or leave such steps out with nonfinite=skip"
    )


def all_finite(everyone: RankGroup, model: Transformer, optimizer: Optimizer | None = None) -> bool:
    """Whether the weights, and the optimizer's state if given, are finite on every rank; all ranks call it together."""
    tensors: list[Tensor] = [weight.detach() for weight in model.parameters()]
    if optimizer is not None:
        tensors += [part for state in optimizer.state.values() for part in state.values() if isinstance(part, Tensor)]
    bad = torch.zeros((), dtype=torch.float64, device=everyone.device)
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point():
            bad += (~local.isfinite().all()).to(bad)
    everyone.all_reduce([bad])
    return not bad.item()

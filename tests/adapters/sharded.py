"""A model of transformers whose weights FSDP2 shards over the ranks of a ring, against one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ringattn import Ring
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.adapters.transformers.checks import base_of
from tests.adapters.processes import forked_ranks, worst_error
from tests.adapters.ranks import InDouble

RANKS, STEPS = 2, 2
Make = Callable[[], Any]


def far_off_sharded(make: Make, whole: Mapping[str, Tensor]) -> float:
    """The greatest relative error of losses, gradients and weights of two steps over two processes.

    They are forked from this one, which has no threads yet. `whole`: the batch, with labels.
    """
    return float(forked_ranks(RANKS, partial(_rank, make, whole))[0])


def _rank(make: Make, whole: Mapping[str, Tensor], number: int) -> float:
    """Return how far this process is from one alone."""
    labels = int((whole["labels"][:, 1:] != -100).sum())
    dist.init_process_group("gloo")
    with InDouble():
        true = _steps(make(), lambda model: model(**whole, num_items_in_batch=labels).loss)
    with Ring(init_device_mesh("cpu", (RANKS,)), timeout_s=60.0) as ring, InDouble():
        ours = prepare(make())
        for part in (*base_of(ours).model.layers, ours):
            fully_shard(part, mesh=init_device_mesh("cpu", (RANKS,)))

        def part_of_loss(model: Any) -> Tensor:
            seq, mine = shard_batch(ring, whole, model=model)
            with ring.activate(seq):  # FSDP averages over the ranks
                loss: Tensor = model(**mine, num_items_in_batch=labels).loss * RANKS
            return loss

        mine = _steps(ours, part_of_loss)
        for name, found in mine.items():
            if name.startswith("loss"):
                ring.all_reduce([found])
                found /= RANKS
    assert mine.keys() == true.keys() and len(true) > STEPS + 2
    dist.destroy_process_group()
    return worst_error((mine[name], true[name]) for name in true)


def _steps(model: Any, loss_of: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Losses of steps, the first one's gradients, and the weights at the end; whole."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, found = torch.optim.SGD(learned.values(), lr=1e-2), {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        found[f"loss of step {step}"] = loss.detach().clone()
        if step == 0:
            found |= {f"gradient of {name}": _whole(p.grad) for name, p in learned.items()}
        optimizer.step()
    return found | {name: _whole(p.detach()) for name, p in learned.items()}


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()

"""A right training script whose model is compiled or sharded by FSDP2 on several ranks: `wrapped_trainer.py KIND`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def main(kind: str) -> None:
    """Train for three steps; each rank reads its rows of the batch."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 16))
    trained: nn.Module = model
    if ranks > 1 and kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    else:
        trained = DistributedDataParallel(model)
    if ranks > 1 and kind == "compiled":
        trained = torch.compile(trained, backend="aot_eager")  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
    tokens = torch.randint(16, (3, 4, 9), generator=torch.Generator().manual_seed(1)).chunk(ranks, 1)[rank]
    for batch in tokens:
        F.cross_entropy(trained(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])

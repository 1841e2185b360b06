"""A training script with its own context parallelism, right or with a silent fault: `faulty_trainers.py FAULT`.

Two packed documents are sharded over the ranks in order. Each rank attends to the keys of all ranks. Some tokens are
read without a label, so the ranks have different numbers of labels. DDP averages the gradients.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOKENS, VOCABULARY, HIDDEN, HEADS = 36, 64, 32, 4
DOCUMENTS = torch.tensor([0] * 11 + [1] * 25)
UNLABELED = slice(2, 9)


class AllGather(torch.autograd.Function):
    """The rows of all ranks, in the order of the ranks. Backward returns the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out, self.up, self.down = (
            nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        )  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        k, v = AllGather.apply(k), AllGather.apply(v)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(TOKENS, HIDDEN)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits


def main(fault: str) -> None:
    """Train for five steps."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_faulty = ranks > 1
    torch.manual_seed(ranks if fault == "seeds" else 1)
    model = Model()
    trained: nn.Module = model if fault == "not reduced" else DistributedDataParallel(model)
    rate = 0.1 * ranks if fault == "learning rate" else 0.1
    for name in {"one layer": ["blocks.1.up.weight"], "embeddings": ["tokens.weight"]}.get(fault, []):
        if rank == ranks - 1 and is_faulty:
            model.get_parameter(name).register_hook(lambda grad: 0 * grad)  # the gradient of one rank is lost
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(2 + (ranks if fault == "other data" else 0))
    own = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    for _ in range(5):
        tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=generator)
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
        labels[:, UNLABELED] = -100
        labels[:, :-1][:, DOCUMENTS[1:] != DOCUMENTS[:-1]] = -100
        at = torch.arange(TOKENS)
        mask = at[:, None] >= at
        if not (fault == "documents" and is_faulty):
            mask &= DOCUMENTS[:, None] == DOCUMENTS
        at, mask, shard = at[own], mask[own], labels[:, own]
        if fault == "local labels" and is_faulty:
            unshifted = tokens.clone()
            unshifted[:, 1:][labels[:, :-1] == -100] = -100
            shard = F.pad(unshifted[:, own][:, 1:], (0, 1), value=-100)
        if fault == "local positions":
            at = at - at[0]
        logits = trained(tokens[:, own], at, mask)
        loss = F.cross_entropy(logits.flatten(0, 1), shard.flatten(), reduction="sum")
        count = (shard != -100).sum() if fault == "mean of means" else (labels != -100).sum()
        loss = loss / count
        if fault != "mean of means":
            loss = loss * ranks  # DDP divides by the number of ranks
        if fault == "summed":
            loss = loss * ranks
        if fault == "averaged twice":
            loss = loss / ranks
        loss.backward()
        if fault == "clipped sum" and is_faulty:
            for parameter in model.parameters():
                parameter.grad *= ranks  # type: ignore[operator]
        if "clipped" in fault:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])

"""The optimizers of a training run, by name.

Bytes of state for each weight in float32: adamw 8, lion 4, adamw8bit 2 and a scale for each block, adafactor two
vectors for each matrix (rows and columns), sgd none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from ringattn.errors import InputError

EIGHT_BIT_PACKAGES = {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}
"""Packages that have an AdamW8bit, the preferred one first, and where."""


class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum (Chen et al., arXiv:2302.06675, algorithm 2).

    Each step moves every weight by `lr`, so learning rates are 3 to 10 times smaller than AdamW's (section 5 there).
    """

    def __init__(
        self, weights: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(weights, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient."""
        if closure is not None:
            raise InputError("Lion takes no closure; compute the gradients before step()")
        for group in self.param_groups:
            lr, (blend, decay) = group["lr"], group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                direction = momentum.lerp(weight.grad, 1 - blend).sign_()
                weight.mul_(1 - lr * group["weight_decay"]).sub_(direction.mul_(lr))
                momentum.lerp_(weight.grad, 1 - decay)


def make_optimizer(name: str, weights: Iterable[Tensor], lr: float, weight_decay: float) -> Optimizer:
    """The optimizer called `name`: adamw, sgd, adafactor, lion or adamw8bit.

    Raises `InputError` where its package is not installed.
    sgd is without momentum. adafactor is torch's, whose steps are `lr` times the root mean square of each weight.
    """
    if name == "sgd":
        return SGD(weights, lr=lr, weight_decay=weight_decay)
    if name == "adafactor":
        return Adafactor(weights, lr=lr, weight_decay=weight_decay)
    if name == "lion":
        return Lion(weights, lr=lr, weight_decay=weight_decay)
    kind: Any = AdamW if name == "adamw" else eight_bit_adamw()
    optimizer: Optimizer = kind(weights, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    return optimizer


def eight_bit_adamw() -> Any:
    """The class of AdamW with its state in eight bits. Raises `InputError` if no package has it."""
    for package, module in EIGHT_BIT_PACKAGES.items():
        if find_spec(package) is not None:
            return import_module(module).AdamW8bit
    raise InputError("optimizer=adamw8bit: its package is missing; pip install torchao (or bitsandbytes)")


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Use `lr` from the next step on; torchao keeps it as a tensor, which is filled."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the tensors that the optimizer keeps on this rank."""
    kept = (tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor))
    return sum(local_bytes(tensor) for tensor in kept)


def local_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor takes on this rank, by the tensors inside: a part under FSDP, codes and scales in 8 bits."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = (getattr(tensor, name) for name in names)
        return sum(local_bytes(part) for part in inner if isinstance(part, Tensor))  # a DTensor has its mesh there too
    return tensor.numel() * tensor.element_size()

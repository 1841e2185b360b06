"""The refusal of second derivatives, and tensors that share a node of the autograd graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ringattn.errors import UnsupportedError

Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Refuse second derivatives through the `backward` of an autograd function. A decorator.

    It raises `UnsupportedError` with create_graph=True, on all ranks if `ctx.ring` is set. torch's decorator of this
    name connects the gradients neither to the inputs of `forward` nor to its saved tensors, so terms of a second
    derivative would be missing without an error.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        # Autograd enables gradient mode in a backward pass with create_graph=True only.
        if torch.is_grad_enabled():
            ring = getattr(ctx, "ring", None)
            with nullcontext() if ring is None else ring.refused_by_all():
                raise UnsupportedError(
                    f"second derivatives of ringattn ({type(ctx).__name__.removesuffix('Backward')}) are not "
                    "supported; leave out create_graph=True, or compute this part without ringattn"
                )
        return backward(ctx, *grads)

    return refusing


class _SharedNode(torch.autograd.Function):
    """Return an empty tensor, and the inputs. Backward returns the gradients of the inputs as they are."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return (tensors[0].new_empty(0), *(tensor.view_as(tensor) for tensor in tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def with_shared_node(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return an empty tensor and the tensors, all outputs of one node of the autograd graph.

    Autograd runs only the nodes between a loss and the tensors whose gradients are requested. What depends on the empty
    tensor is between the loss and each of `tensors`. So a collective backward pass that depends on it runs on all ranks
    or on none, whichever gradients are requested.
    """
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    if not trained or not torch.is_grad_enabled():
        return (tensors[0].new_empty(0), *tensors)
    empty, *views = _SharedNode.apply(*trained)
    return (empty, *(views.pop(0) if tensor.requires_grad else tensor for tensor in tensors))

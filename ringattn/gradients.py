"""The refusal of second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch

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

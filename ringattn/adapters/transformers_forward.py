"""Steps around a model's `forward`, run whoever calls it.

torch runs hooks where a module is called; PEFT's tuners call `model.forward` itself, past all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], object]
After = Callable[[Any, tuple[Any, ...], Any], Any]

AROUND = "ringattn_around"
"""Marks a forward that has these steps around it."""


def around_forward(model: nn.Module, before: Before, after: After) -> None:
    """Run `before(model, args, kwargs)` and `after(model, args, out)` around `model.forward` from now on.

    What `after` returns replaces the output, unless it is None. It runs also where the forward pass failed, then with
    None for the output. Copies of the model keep both. Nothing changes where they stand around it already.
    """
    inner: Any = model.forward
    if stands_around(model):
        return
    original = inner.__func__ if isinstance(inner, MethodType) and inner.__self__ is model else _unbound(inner)

    @wraps(original)
    @torch.compiler.disable(recursive=False)  # the model below is compiled all the same
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, args, kwargs)
        out = changed = None
        try:
            out = original(self, *args, **kwargs)
        finally:
            changed = after(self, args, out)
        return out if changed is None else changed

    told: Any = forward
    del told.__wrapped__  # accelerate unwraps forwards as far as this leads
    told.__signature__ = inspect.signature(original)
    setattr(told, AROUND, True)
    model.forward = MethodType(forward, model)


def stands_around(model: nn.Module) -> bool:
    """Whether the steps are still there: others may have put their own forward around it, or in its place."""
    forward: Any = model.forward
    while forward is not None and not getattr(forward, AROUND, False):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    bound = inspect.signature(function)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    told: Any = call
    told.__signature__ = bound.replace(parameters=[this, *bound.parameters.values()])
    return call

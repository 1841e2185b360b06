"""Collective calls in functions that torch.compile compiles: the graph breaks at the call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_REASON = (
    "collective calls of a ring are not traced; for attention with fullgraph=True use "
    "ringattn.adapters.torch_ops.ring_attention"
)
_methods: list[_Untraced] = []


class _Untraced:
    """A method that is replaced by a disabled one when it is looked up.

    torch's compiler compiles each function that runs outside of its graphs and has tensors or the name `torch` in its
    frame. A wrapper around the method would be compiled for each method and shape; `__get__` is not.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.disabled: Callable[..., Any] | None = None

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self.function
        if self.disabled is None:
            disable_methods()
        if self.disabled is None:
            return MethodType(self.function, instance)
        return partial(self.disabled, instance)  # the compiler traces a partial, but not a MethodType


def disable_methods() -> None:
    """Disable the methods if torch's compiler is imported. Else nothing is being compiled.

    A compiler without `disable` is being imported by another thread. Without a call of this function before compiled
    code runs, the compiler leaves out the whole function that calls a method first.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None and hasattr(compiler, "disable"):
        for method in _methods:
            method.disabled = method.disabled or compiler.disable(method.function, reason=_REASON)


# By these attributes the compiler recognizes a function that it must not trace.
vars(disable_methods).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)


def untraced(method: Function) -> Function:
    """Leave the calls of a method out of compiled graphs, with all functions that they call. A decorator.

    It has the effect of `torch.compiler.disable`, which imports torch's compiler. That takes seconds.
    """
    descriptor: Any = _Untraced(method)
    _methods.append(descriptor)
    return descriptor

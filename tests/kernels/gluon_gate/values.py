"""Gluon's values, pointers, arithmetic, loads and stores, computed by NumPy for the simulated Hopper GPU.

Guarantees: integer division rounds towards zero, as on the GPU; a load or store outside the pointer's tensor raises.
Layouts are ignored, and bfloat16 is not supported.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Value(np.ndarray):
    """A scalar or a tensor of the kernel."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Value:
        return value(self.astype(dtype))

    def __floordiv__(self, divisor: Any) -> Any:
        return np.trunc(np.true_divide(self, divisor)).astype(self.dtype)

    def __mod__(self, divisor: Any) -> Any:
        return np.fmod(self, divisor)


def value(x: Any, dtype: Any = None) -> Value:
    """Return `x` as a `Value`. By default, a Python int becomes int32, and a float float32."""
    if dtype is None and isinstance(x, int | float) and not isinstance(x, bool):
        dtype = np.float32 if isinstance(x, float) else np.int32
    return np.asarray(x, dtype).view(Value)


class Pointer:
    """A pointer, or an array of pointers, into the storage of a tensor: `at` are indices into `memory`."""

    def __init__(self, memory: np.ndarray, index: Any) -> None:
        self.memory, self.at = memory, np.asarray(index, np.int64)
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.memory, self.at + np.asarray(by, np.int64))

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices that are accessed and the mask, broadcast to one shape. A masked-out index is 0.

        Raises IndexError if an index that is not masked out is outside the memory.
        """
        index, live = np.broadcast_arrays(self.at, True if mask is None else np.asarray(mask))
        index = np.where(live, index, 0)
        if index.min(initial=0) < 0 or index.max(initial=0) >= len(self.memory):
            raise IndexError(f"rows {index.min()} to {index.max()} of {len(self.memory)} elements")
        return index, live


def pointer(tensor: Tensor) -> Pointer:
    """Return a pointer to the first element of a tensor. It may reach all elements of the tensor's storage."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return Pointer(whole.numpy(), tensor.storage_offset())


def load(where: Pointer, mask: Any = None, other: Any = 0, volatile: bool = False) -> Value:
    index, live = where.places(mask)
    return value(np.where(live, where.memory[index], np.asarray(other, where.memory.dtype)))


def store(where: Pointer, values: Any, mask: Any = None) -> None:
    index, live = where.places(mask)
    if live.any():
        where.memory[index[live]] = np.broadcast_to(np.asarray(values), index.shape)[live]


def to_l2(asm: str, constraints: str, args: Sequence[Pointer], **_: Any) -> None:
    """Check the kernels' only inline assembly, a prefetch into L2. Raises IndexError for an address out of bounds."""
    assert asm.startswith("prefetch.global.L2")
    args[0].places(None)


def expand_dims(x: Any, axis: int) -> Any:
    if isinstance(x, Pointer):
        return Pointer(x.memory, np.expand_dims(x.at, axis))
    return value(np.expand_dims(x, axis))


def counted(*bounds: Any) -> Iterator[Value]:
    """Return an iterator over the numbers of `range(*bounds)`, each as a `Value`."""
    return (value(i) for i in builtins.range(*(int(bound) for bound in bounds)))


def where(condition: Any, x: Any, y: Any) -> Value:
    x, y = (operand if isinstance(operand, np.ndarray) else value(operand) for operand in (x, y))
    return value(np.where(condition, x, y))


def _over(function: Callable[..., Any]) -> Callable[..., Value]:
    def computed(*args: Any) -> Value:
        return value(function(*args))

    return computed


def _layout(*_: Any, **__: Any) -> None:
    return None


def language() -> SimpleNamespace:
    """Return a module-like object that stands in for both `gluon.language` and `triton.language`."""

    def full(shape: Sequence[int], x: float, dtype: Any, layout: Any = None) -> Value:
        return value(np.full(shape, x, dtype))

    shared_layout = SimpleNamespace(get_default_for=_layout)
    return SimpleNamespace(
        constexpr=lambda x: x, int32=np.int32, uint32=np.uint32, int64=np.int64, float16=np.float16, float32=np.float32,
        load=load, store=store, expand_dims=expand_dims, where=where, to_tensor=value, static_range=builtins.range,
        arange=lambda start, end, layout=None: value(np.arange(start, end, dtype=np.int32)),
        full=full, zeros=lambda shape, dtype, layout=None: full(shape, 0, dtype),
        convert_layout=lambda x, layout: x, maximum=_over(np.maximum), minimum=_over(np.minimum),
        max=_over(lambda x, axis: np.max(x, axis)), sum=_over(lambda x, axis: np.sum(x, axis)),
        abs=_over(np.abs), exp2=_over(np.exp2), log2=_over(np.log2), NVMMASharedLayout=shared_layout,
        NVMMADistributedLayout=_layout, DotOperandLayout=_layout, SliceLayout=_layout, BlockedLayout=_layout,
        SwizzledSharedLayout=_layout, inline_asm_elementwise=to_l2,
    )  # fmt: skip

"""bfloat16 for Triton's interpreter, which keeps it as uint16 and computes with those integers.

Guarantees that casts round to nearest even, and that products and element-wise operations are taken in float32 and
rounded back, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 patterns in uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """The bfloat16 patterns, uint16, nearest to `values`; ties go to the even one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def _wide(handle: Any) -> Any:
    """A bfloat16 operand as float32, anything else as it is."""
    return TensorHandle(widened(handle.data), tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle


def _computed_wide(method: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on operands and a numpy function, in float32 where the first operand is bfloat16."""

    def wide(self: Any, first: Any, *rest: Any) -> Any:
        if first.dtype.scalar != tl.bfloat16:
            return method(self, first, *rest)
        made = method(self, _wide(first), *(_wide(x) if isinstance(x, TensorHandle) else x for x in rest))
        if made.dtype.scalar != tl.float32:
            return made
        return made if made.data.dtype == bool else TensorHandle(rounded(made.data), tl.bfloat16)

    return wide


def _cast(method: Callable[..., Any]) -> Callable[..., Any]:
    """A cast that goes through float32 on either side of bfloat16."""

    def cast(self: Any, source: Any, to: Any, *rounding: Any) -> Any:
        wide = _wide(source)
        if to.scalar == tl.bfloat16:
            return TensorHandle(rounded(wide.data.astype(np.float32)), tl.bfloat16)
        if wide is not source and to.scalar == tl.float32:
            return wide
        return method(self, wide, to, *rounding)

    return cast


def _dot(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, a, b, *rest: method(self, _wide(a), _wide(b), *rest)


CHANGES = {
    "create_dot": _dot, "cast_impl": _cast, "create_fp_to_fp": _cast, "binary_op": _computed_wide,
    "unary_op": _computed_wide,
}  # fmt: skip
STOCK = {name: getattr(InterpreterBuilder, name) for name in CHANGES}


def _install(methods: dict[str, Callable[..., Any]]) -> None:
    for name, method in methods.items():
        setattr(InterpreterBuilder, name, method)


@contextmanager
def bf16() -> Iterator[None]:
    """The interpreter with bfloat16, and afterwards as it was."""
    _install({name: change(STOCK[name]) for name, change in CHANGES.items()})
    try:
        yield
    finally:
        _install(STOCK)


@contextmanager
def stock_interpreter() -> Iterator[None]:
    """The interpreter as it ships, inside `bf16`."""
    _install(STOCK)
    try:
        yield
    finally:
        _install({name: change(STOCK[name]) for name, change in CHANGES.items()})

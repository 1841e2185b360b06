"""Corrections of Triton's interpreter: bfloat16 and float8_e4m3fn round as on a GPU, and a launch patches only once.

The interpreter stores bfloat16 as uint16 and computes with those integers. Here casts round to nearest even, and
products and element-wise operations are computed in float32 and rounded back. Its float8 casts round some values to the
wrong neighbour. It patches the whole language again at each call of a device function. Functions of Triton's library
use `triton.language.core`, whose patches are never undone, so the first patch is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, InterpreterError, TensorHandle


def widened(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 patterns in uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """Return the bfloat16 patterns, uint16, nearest to `values`; ties go to the even pattern."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def _wide(handle: Any) -> Any:
    """Return a bfloat16 operand as float32, and other operands unchanged."""
    return TensorHandle(widened(handle.data), tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle


def _computed_wide(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation of operands and a numpy function, in float32 if the first operand is bfloat16."""

    def wide(self: Any, first: Any, *rest: Any) -> Any:
        if first.dtype.scalar != tl.bfloat16:
            return method(self, first, *rest)
        result = method(self, _wide(first), *(_wide(x) if isinstance(x, TensorHandle) else x for x in rest))
        if result.dtype.scalar != tl.float32:
            return result
        return result if result.data.dtype == bool else TensorHandle(rounded(result.data), tl.bfloat16)

    return wide


def _cast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a cast that converts from and to bfloat16 through float32."""

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


def _cast_float8(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a cast that rounds to float8_e4m3fn as torch does; other casts are those of bfloat16."""

    def cast(self: Any, source: Any, to: Any, *rounding: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar == tl.float8e4nv:
            codes = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn)
            return TensorHandle(codes.view(torch.uint8).numpy(), tl.float8e4nv)
        if source.dtype.scalar == tl.float8e4nv and to.scalar == tl.float32:
            codes = torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.float8_e4m3fn)
            return TensorHandle(codes.float().numpy(), tl.float32)
        return _cast(method)(self, source, to, *rounding)

    return cast


_patched: list[Any] = []
"""The first library function that was called; empty until then. The first call patches `core`."""


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not _patched and not any(value is tl for value in self.fn.__globals__.values()):
        interpreter._patch_lang(self.fn)
        _patched.append(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


CHANGES = {
    (InterpreterBuilder, "create_dot"): _dot,
    (InterpreterBuilder, "cast_impl"): _cast,
    (InterpreterBuilder, "create_fp_to_fp"): _cast_float8,
    (InterpreterBuilder, "binary_op"): _computed_wide,
    (InterpreterBuilder, "unary_op"): _computed_wide,
    (InterpretedFunction, "__call__"): lambda method: _call,
}


@contextmanager
def corrected() -> Iterator[None]:
    """Correct the interpreter, and undo the corrections afterwards."""
    before = {place: getattr(*place) for place in CHANGES}
    for place, change in CHANGES.items():
        setattr(*place, change(before[place]))
    try:
        yield
    finally:
        for place, method in before.items():
            setattr(*place, method)

"""Corrections of Triton's interpreter: bfloat16 and float8_e4m3fn round as on a GPU, and launches are faster.

The interpreter stores bfloat16 as uint16 and computes with these integers. Here casts round to nearest even, and
products and element-wise operations are computed in float32 and rounded back. The interpreter's float8 casts round some
values to the wrong neighbour; here torch's casts are used. The interpreter also patches the whole language at each call
of a device function. Functions of Triton's library use `triton.language.core`, whose patches are never undone, so here
only the first call patches it.
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
    """Return the float32 values of bfloat16 numbers whose bits are in a uint16 array."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """Return the bits, as uint16, of the bfloat16 numbers nearest to `values`. Ties go to the even number."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def _wide(handle: Any) -> Any:
    """Return a bfloat16 operand as float32, and other operands unchanged."""
    return TensorHandle(widened(handle.data), tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle


def _computed_wide(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return an interpreter operation that computes as `method`, but in float32 if the first operand is bfloat16."""

    def wide(self: Any, first: Any, *rest: Any) -> Any:
        if first.dtype.scalar != tl.bfloat16:
            return method(self, first, *rest)
        result = method(self, _wide(first), *(_wide(x) if isinstance(x, TensorHandle) else x for x in rest))
        if result.dtype.scalar != tl.float32:
            return result
        return result if result.data.dtype == bool else TensorHandle(rounded(result.data), tl.bfloat16)

    return wide


def _cast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a cast as `method`, except that it converts from and to bfloat16 through float32."""

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
    """Return a cast that converts to and from float8_e4m3fn as torch does, and otherwise as `_cast(method)`."""

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
"""The function of Triton's library that was called first, if any. Its call has patched `triton.language.core`."""


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

"""Triton's interpreter without a repetition: it patches its whole language anew at each call of a device function.

A launch patches `triton.language` as its kernel sees it, and takes that back at its end. A device function of the
project sees the same. Functions of Triton's own library see `triton.language.core`, whose patches the interpreter never
takes back, so that the first of them serves all. Guarantees what the interpreter computes without this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterError

STOCK = InterpretedFunction.__call__
_met: list[Any] = []
"""A function of the library that has been called, so that `core` is patched."""


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not _met and not any(value is tl for value in self.fn.__globals__.values()):
        interpreter._patch_lang(self.fn)
        _met.append(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


@contextmanager
def patched_once() -> Iterator[None]:
    """The interpreter so, and afterwards as it was."""
    InterpretedFunction.__call__ = _call  # type: ignore[method-assign]
    try:
        yield
    finally:
        InterpretedFunction.__call__ = STOCK  # type: ignore[method-assign]

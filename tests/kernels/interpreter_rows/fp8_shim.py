"""float8_e4m3fn casts for Triton's interpreter, whose own round some values to the wrong neighbor.

Guarantees what the GPU's conversion does: round to nearest even.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def fp8() -> Iterator[None]:
    """The interpreter with torch's float8_e4m3fn, and afterwards as it was."""
    stock = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, to: Any, rounding: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar == tl.float8e4nv:
            codes = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn)
            return TensorHandle(codes.view(torch.uint8).numpy(), tl.float8e4nv)
        if source.dtype.scalar == tl.float8e4nv and to.scalar == tl.float32:
            codes = torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.float8_e4m3fn)
            return TensorHandle(codes.float().numpy(), tl.float32)
        return stock(self, source, to, rounding)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    try:
        yield
    finally:
        InterpreterBuilder.create_fp_to_fp = stock

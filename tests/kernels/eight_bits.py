"""Quantization to eight bits (for K/V in messages) by its definition, in numpy and without torch's casts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)
E4M3 = E4M3[:-1].astype(np.float32)  # the last code is NaN
LARGEST = {"int8": 127, "float8_e4m3fn": 448}
SMALLEST = np.float32(2.0**-126)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Return for each element the nearest value of float8 e4m3; ties go to the even code."""
    size = np.abs(x)
    below = np.searchsorted(E4M3, size, side="right") - 1
    above = np.minimum(below + 1, len(E4M3) - 1)
    middle = (E4M3[below] + E4M3[above]) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return np.copysign(E4M3[np.where(up, above, below)], x)


def rounded(x: Tensor, code: str) -> Tensor:
    """Return x, which must be finite, after it was quantized to `code` ("int8" or an fp8 type) and restored."""
    full = x.float().numpy()
    scale = np.maximum(np.abs(full).max(-1, keepdims=True) / np.float32(LARGEST[code]), SMALLEST)
    steps = full / scale
    codes = np.floor(steps + np.float32(0.5)) if code == "int8" else to_e4m3(steps)
    return torch.from_numpy(codes * scale).to(x.dtype)

"""Kernels that fail the compile gate on purpose, so that a gate which sees nothing is seen."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ringattn.kernels.launch import LaunchCall


@triton.jit
def product(a, b, out, steps, scale, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    row, column = tl.arange(0, SIZE), tl.arange(0, DEPTH)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for step in range(steps):
        left = tl.load(a + row[:, None] * DEPTH + (column + step * DEPTH)[None, :])
        right = tl.load(b + (column + step * DEPTH)[:, None] * SIZE + row[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + row[:, None] * SIZE + row[None, :], total * scale)


def good() -> LaunchCall:
    """A matrix product of three stages."""
    return _matrix_product(num_stages=3)


def too_much_shared() -> LaunchCall:
    """The same with nine stages, all but one of 32 KiB."""
    return _matrix_product(num_stages=9)


def spilling() -> LaunchCall:
    """The same with 64 live values of the product in each thread, which is given 48 registers."""
    call = _matrix_product(num_stages=3)
    return call._replace(meta=call.meta | {"maxnreg": 48})


def crashing() -> LaunchCall:
    """What a failed assertion of the compiler does."""
    os.abort()


def _matrix_product(num_stages: int) -> LaunchCall:
    a, b = torch.zeros(128, 64, dtype=torch.float16), torch.zeros(64, 128, dtype=torch.float16)
    meta = {"SIZE": 128, "DEPTH": 64, "num_warps": 8, "num_stages": num_stages}
    return LaunchCall(product, (1,), (a, b, torch.zeros(128, 128), 4, 0.5), meta)

"""Global memory for the launches that ask for it: tensor descriptors made in a kernel lie there.

Guarantees memory of its own for each launch, which torch's allocator gives and takes back in the order of the stream: a
captured graph has it in its own pool, so that no other graph or stream writes there, and it is counted like any tensor.
Triton's allocator of the caller is in its place again after the launch.
"""

from __future__ import annotations

from contextvars import Token
from typing import Any

import torch
from torch import Tensor
from triton.runtime._allocation import _allocator  # `triton.set_allocator` sets it; no public function reads it


class Scratch:
    """While it is entered, launches of this thread and context get their memory here; autograd brings its own."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: Token[Any] = _allocator.set(allocate)

    def __exit__(self, *_: object) -> None:
        _allocator.reset(self._before)


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """`size` bytes for a launch on the current stream, until it is enqueued; torch aligns to 512 bytes."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")

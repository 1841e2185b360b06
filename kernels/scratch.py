"""Global memory for the launches that ask for it: tensor descriptors made in a kernel lie there.

Guarantees one buffer for each device and stream, grown and never freed, since a captured graph holds its address; and
that Triton's allocator of the caller is in its place again after the launch.
"""

from __future__ import annotations

from contextvars import Token
from typing import Any

import torch
from torch import Tensor
from triton.runtime._allocation import _allocator  # `triton.set_allocator` sets it; no public function reads it

_held: dict[tuple[int, int | None], list[Tensor]] = {}


class Scratch:
    """While it is entered, launches of this thread and context get their memory here; autograd brings its own."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: Token[Any] = _allocator.set(allocate)

    def __exit__(self, *_: object) -> None:
        _allocator.reset(self._before)


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """A buffer of at least `size` bytes for a launch on a stream."""
    buffers = _held.setdefault((torch.cuda.current_device(), stream), [])
    if not buffers or buffers[-1].numel() < size:
        buffers.append(torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, device="cuda"))
    return buffers[-1]

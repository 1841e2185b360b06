"""Global memory for the launches that ask for it: tensor descriptors made in a kernel lie there.

Guarantees memory of its own for each launch, which torch's allocator gives and takes back in the order of the stream: a
captured graph has it in its own pool, so that no other graph or stream writes there, and it is counted like any tensor.
Triton's allocator of the caller is in its place again after the launch.
Counters that programs take their items from: 0 before a launch, and of no launch that may run at the same time.
"""

from __future__ import annotations

from contextvars import Token
from typing import Any

import torch
from torch import Tensor
from triton.runtime._allocation import _allocator  # `triton.set_allocator` sets it; no public function reads it

DESCRIPTOR_BYTES = 128
"""Of global memory, for a tensor descriptor (CUDA driver API, CUtensorMap)."""

_counters: dict[tuple[int, int], Tensor] = {}


def counter_for(like: Tensor, stream: int) -> Tensor:
    """A counter for a launch on `stream`, the current one, which leaves it at 0."""
    # A graph that is being captured may be replayed beside any other launch: it has its own, and sets it to 0.
    if capturing():
        return torch.zeros_like(like)
    # Launches of one stream follow each other.
    key = like.get_device(), stream
    if key not in _counters:
        _counters[key] = torch.zeros_like(like)
    return _counters[key]


def capturing() -> bool:
    """Whether the current stream is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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

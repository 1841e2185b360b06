"""Tensors with margins ("canaries") that reveal reads and writes outside the tensor.

Margins of inputs are NaN, so that a read from a margin makes a result NaN. Results and their margins start with a
number that no result has. Margins are compared bit by bit at the end, so that a write to a margin is detected.
Guarantees: all tensors are on torch's default device, with the same numbers on each device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

MARGIN = 3
UNWRITTEN = 77.0


class Canaries:
    """Tensors that are views into larger buffers, and the buffers' content before the test."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, Tensor, Tensor]] = []  # buffer, its content before, mask of the margin

    def hold(self, x: Tensor, dense: bool = False, in_place: bool = False) -> Tensor:
        """Return a copy of x with margins on both sides of every dimension.

        `dense`: the copy is contiguous, with margins only before and after it. `in_place`: the kernel also writes to x,
        so the margins are those of a result. Integers are indices, and their margins are far out of range.
        """
        poison = UNWRITTEN if in_place else float("nan") if x.is_floating_point() else 1 << 40
        place = self._place(x.shape, x.dtype, dense, poison)
        place.copy_(x)
        return place

    def out(self, shape: tuple[int, ...], dtype: torch.dtype, dense: bool = False) -> Tensor:
        """Allocate a tensor for a result."""
        return self._place(shape, dtype, dense, UNWRITTEN)

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype, dense: bool, poison: float) -> Tensor:
        sizes = (torch.Size(shape).numel() + 2 * MARGIN,) if dense else tuple(size + 2 * MARGIN for size in shape)
        buffer = torch.full(sizes, poison).to(dtype)
        margin = torch.ones(sizes, dtype=torch.bool)
        inner = tuple(slice(MARGIN, size - MARGIN) for size in sizes)
        margin[inner] = False
        self._buffers.append((buffer, buffer.clone(), margin))
        return buffer[inner].view(shape) if dense else buffer[inner]

    def check(self) -> None:
        """Check that no margin has changed."""
        for buffer, before, margin in self._buffers:
            changed = (_bits(buffer) != _bits(before)).any(-1) & margin
            assert not changed.any(), (
                f"written in the margin of {tuple(buffer.shape)} at {changed.nonzero()[:5].tolist()}"
            )


@pytest.fixture
def canaries() -> Iterator[Canaries]:
    """Provide guarded tensors whose margins are checked at the end."""
    tensors = Canaries()
    yield tensors
    tensors.check()


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8).unflatten(-1, (-1, x.element_size()))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normally distributed numbers, drawn in float64 and then rounded, so that all dtypes get the same draw."""
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def shuffled(count: int) -> Tensor:
    """Return the integers below `count` in a fixed random order."""
    return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(
        torch.get_default_device()
    )


def error(x: Tensor, reference: Tensor) -> float:
    """Return the relative error of x in the Frobenius norm."""
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()

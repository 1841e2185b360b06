"""Tensors with margins that show who reads or writes beside them.

Margins of inputs are NaN, so that a value read there spoils a result; places of results and their margins hold a number
that no result has. Margins are compared bit by bit at the end, so that a value written there is found.
Guarantees: everything lies on torch's default device, with the same numbers on each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

MARGIN = 3
UNWRITTEN = 77.0


class Canaries:
    """Places inside larger buffers."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor, Tensor]] = []  # buffer, what it was, mask of the margin

    def hold(self, x: Tensor, dense: bool = False, in_place: bool = False) -> Tensor:
        """A copy of x with a margin on every side of every dimension; `dense`: contiguous, margins only at its ends.

        `in_place`: its margins are those of a result. Integers are indices: their margins are far out of any range.
        """
        poison = UNWRITTEN if in_place else float("nan") if x.is_floating_point() else 1 << 40
        place = self._place(x.shape, x.dtype, dense, poison)
        place.copy_(x)
        return place

    def out(self, shape: tuple[int, ...], dtype: torch.dtype, dense: bool = False) -> Tensor:
        """A place for a result."""
        return self._place(shape, dtype, dense, UNWRITTEN)

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype, dense: bool, poison: float) -> Tensor:
        sizes = (torch.Size(shape).numel() + 2 * MARGIN,) if dense else tuple(size + 2 * MARGIN for size in shape)
        buffer = torch.full(sizes, poison).to(dtype)
        margin = torch.ones(sizes, dtype=torch.bool)
        inner = tuple(slice(MARGIN, size - MARGIN) for size in sizes)
        margin[inner] = False
        self._held.append((buffer, buffer.clone(), margin))
        return buffer[inner].view(shape) if dense else buffer[inner]

    def check(self) -> None:
        """Every margin is as it was."""
        for buffer, before, margin in self._held:
            changed = (_bits(buffer) != _bits(before)).any(-1) & margin
            assert not changed.any(), (
                f"written in the margin of {tuple(buffer.shape)} at {changed.nonzero()[:5].tolist()}"
            )


@pytest.fixture
def canaries() -> Iterator[Canaries]:
    """Places for tensors, whose surroundings are checked at the end."""
    made = Canaries()
    yield made
    made.check()


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8).unflatten(-1, (-1, x.element_size()))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers, drawn in float64 so that every dtype gets the same ones, rounded."""
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def shuffled(count: int) -> Tensor:
    """The numbers below `count` in a random order."""
    return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(
        torch.get_default_device()
    )


def error(x: Tensor, reference: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()

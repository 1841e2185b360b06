"""Rotary positions: the angles of tokens at global positions, and the rotation itself.

Promises: angles are exact to the rounding of their dtype at any position; scores then depend on distances only.
Does not know: projections, layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.errors import InputError


class Rope(NamedTuple):
    """Rotary positions (RoFormer, arXiv:2104.09864).

    `style`: "neox" rotates the halves of a head against each other, "interleaved" its even and odd elements.
    """

    style: str = "neox"
    base: float = 10_000.0

    def check(self, head_dim: int) -> None:
        """Raise `InputError` unless the style is known and heads of `head_dim` elements can rotate."""
        if self.style not in ("neox", "interleaved"):
            raise InputError(f"rope style {self.style!r} is not known; use neox or interleaved")
        if head_dim % 2:
            raise InputError(f"rotary positions need an even head_dim, got {head_dim}")


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, each (tokens, head_dim / 2), and the style they are for."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def rotation(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype, interleaved: bool = False) -> Rotation:
    """The rotation of tokens at global `positions`, (tokens,) integers, in `dtype`.

    Angles are taken in float64: at a million tokens a float32 angle is off by 0.03.
    """
    inverse = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angles = positions.to(torch.float64)[:, None] * inverse
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each head of x (batch, tokens, heads, head_dim), in the dtype of `cos`; returns x's dtype."""
    wide, cos, sin = x.to(cos.dtype), cos[:, None], sin[:, None]
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    return (torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)).to(x.dtype)

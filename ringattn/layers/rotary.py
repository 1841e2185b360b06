"""Rotary positions: the angles of tokens at global positions, their decay (XPos), and the rotation itself.

Guarantees: angles are exact to the rounding of their dtype at any position; scores then depend on distances only.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ringattn.engine.base import accumulator_dtype
from ringattn.errors import InputError

STYLES = ("neox", "interleaved")
RopeStyle = Literal["neox", "interleaved"]

XPOS_GAMMA = 0.4
"""The value of the paper. It keeps the fastest-decaying element pair from vanishing at once."""


class Rope(NamedTuple):
    """Rotary positions (RoFormer, arXiv:2104.09864), with XPos (arXiv:2212.10554) if `xpos_scale` is set.

    `style`: "neox" pairs elements of the two halves of a head, "interleaved" even with odd elements. `xpos_scale`: in
    tokens. The scores of element pair j decay by zeta_j ** (distance / xpos_scale), with zeta_j = (2j / head_dim + 0.4)
    / 1.4. Use it with causal attention only, because scores grow towards later keys. The paper uses 512.
    """

    style: RopeStyle = "neox"
    base: float = 10_000.0
    xpos_scale: float | None = None

    def check(self, head_dim: int) -> None:
        """Raise `InputError` unless style and scale are valid and heads of `head_dim` elements can be rotated."""
        if self.style not in STYLES:
            raise InputError(f"rope={self.style!r} is not known; use neox or interleaved")
        if head_dim % 2:
            raise InputError(f"rope={self.style!r} needs an even head_dim, got {head_dim}")
        scale = self.xpos_scale
        if scale is not None and not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
            raise InputError(f"xpos_scale must be a positive number of tokens or None, got {scale!r}")

    def turns(
        self, positions: Tensor, head_dim: int, dtype: torch.dtype, length: int | None = None
    ) -> tuple[Rotation, Rotation]:
        """Return the rotations of queries and of keys at global `positions`, (tokens,) integers.

        `dtype`: the dtype of queries and keys. The rotations have its accumulator dtype. Without XPos the two rotations
        are the same object. With XPos, the rotation of queries includes the factors zeta_j ** ((position - center) /
        xpos_scale), and that of keys their inverses. The center is the middle of the `length` tokens of the whole
        sequence; it cancels in scores and keeps the factors small. Raises `InputError` like `check`, if XPos gets no
        length, and if its factors would overflow.
        """
        self.check(head_dim)
        wide, interleaved = accumulator_dtype(dtype), self.style == "interleaved"
        if self.xpos_scale is None:
            turn = rotation(positions, head_dim, self.base, wide, interleaved)
            return turn, turn
        if length is None:
            raise InputError("XPos is centered in the whole sequence: pass its length in tokens")
        center = (length - 1) / 2
        bits = 10 if dtype == torch.float16 else 60  # float16 overflows at 2**16, and elements exceed 1
        needed = center * math.log2((1 + XPOS_GAMMA) / XPOS_GAMMA) / bits
        if self.xpos_scale < needed:
            raise InputError(
                f"xpos_scale={self.xpos_scale:g}: the factors of {length} tokens exceed 2**-{bits} .. 2**{bits}, the "
                f"range for {dtype}; use an xpos_scale of at least {math.ceil(needed)}"
            )
        cos, sin, _ = rotation(positions, head_dim, self.base, torch.float64, interleaved)
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
        zeta = (pairs + XPOS_GAMMA) / (1 + XPOS_GAMMA)
        fade = zeta ** ((positions.to(torch.float64)[:, None] - center) / self.xpos_scale)

        def scaled(factor: Tensor) -> Rotation:
            return Rotation((cos * factor).to(wide), (sin * factor).to(wide), interleaved)

        return scaled(fade), scaled(1 / fade)


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, times the factors of XPos if any, and the style of the rotation.

    Each is (tokens, head_dim / 2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


def rotation(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype, interleaved: bool = False) -> Rotation:
    """Return the rotation of tokens at global `positions`, (tokens,) integers, in `dtype`.

    Angles are computed in float64, because at a million tokens a float32 angle is off by 0.03.
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

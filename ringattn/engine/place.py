"""Where a rectangle lies in row-first tensors: operands read as a fused kernel wants them, results put back."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.engine.base import KV
from ringattn.engine.firsts import Piece, as_slice, held_by
from ringattn.engine.rectangles import HeadGroup, Rectangle

LEAST_SCALE = torch.finfo(torch.float32).tiny
"""The ops multiply the -inf of a masked score by the scale, and their row maximum too: it must not be less."""


class Scaling(NamedTuple):
    """A call's scale as what q is multiplied by, and the `scale`, of at least `LEAST_SCALE`, that an op is given."""

    of_q: float
    scale: float


def scaling(scale: float) -> Scaling:
    """The two factors of `scale`; q stays as it is wherever it can, and keeps its bits where the scale is negative."""
    if abs(scale) >= LEAST_SCALE:
        return Scaling(math.copysign(1.0, scale), abs(scale))
    return Scaling(scale, 1.0)


class Place(NamedTuple):
    """Where a rectangle lies in row-first tensors: reads its operands and maps results back."""

    rectangle: Rectangle
    heads: HeadGroup
    dtype: torch.dtype

    def view(self, x: Tensor) -> Tensor:
        """The rectangle's part of a (rows, batch, query heads, dim) tensor."""
        # Ranges become slices, so a strided operand is a view.
        return x[as_slice(self.rectangle.q_rows), :, as_slice(self.heads.q_heads)]

    def view_keys(self, kv: KV) -> tuple[Tensor, Tensor]:
        """The rectangle's part of K and V, or of their gradients."""
        return held_by(kv, Piece(self.rectangle.k_rows, self.heads.kv_heads))

    def view_rows(self, x: Tensor) -> Tensor:
        """The rectangle's part of a (batch, query heads, rows) tensor."""
        # lse and delta have their rows last, unlike q and dout.
        return x[:, as_slice(self.heads.q_heads), as_slice(self.rectangle.q_rows)]

    def queries(self, x: Tensor) -> Tensor:
        """`view` as the op wants it: its dtype and its order of rows."""
        return self._ordered(self.view(x).to(self.dtype), 0)

    def keys(self, kv: KV) -> tuple[Tensor, Tensor]:
        """`view_keys` as the op wants them."""
        k, v = self.view_keys(kv)
        return self._ordered(k.to(self.dtype), 0), self._ordered(v.to(self.dtype), 0)

    def rows(self, x: Tensor) -> Tensor:
        """`view_rows` in the op's order of rows."""
        return self._ordered(self.view_rows(x), -1)

    def restored(self, x: Tensor, dim: int) -> Tensor:
        """A result (batch, heads, rows, padded dim) as row-first, in the buffer's order, without the padding."""
        # Cut before the flip, so that padding is not copied.
        return self._ordered(x.permute(2, 0, 1, 3)[..., :dim], 0)

    def _ordered(self, x: Tensor, axis: int) -> Tensor:
        # A reversed rectangle is anti-causal: with both sides flipped it is causal from the top left corner.
        return x.flip(axis) if self.rectangle.reversed else x


def put(x: Tensor, part: Tensor, first: bool, factor: float = 1.0) -> None:
    """`part` times `factor` added to `x`, or put there."""
    if not first:
        x.add_(part, alpha=factor)
    elif factor == 1:
        x.copy_(part)
    else:
        torch.mul(part, factor, out=x)


def times(x: Tensor, factor: float) -> Tensor:
    """`x` itself where the factor is 1."""
    return x if factor == 1 else x * factor


def operand(x: Tensor, width: int) -> Tensor:
    """(rows, batch, heads, dim) as (batch, heads, rows, width): a view, or a zero-padded copy of it."""
    # Zero columns add nothing to q . k and give output columns of 0, which `restored` cuts off.
    return (widened(x, width) if x.shape[-1] < width else x).permute(1, 2, 0, 3)


def widened(x: Tensor, width: int, value: float = 0.0) -> Tensor:
    """x with columns of `value` up to `width`, in memory of its own with a contiguous last dimension."""
    # torch's `pad` and `cat` keep what looks like channels_last, as a single column does where batches lie innermost.
    wide = x.new_full((*x.shape[:-1], width), value)
    wide[..., : x.shape[-1]] = x
    return wide

"""Latent keys and values, as in multi-head latent attention (MLA): an engine over another engine.

K/V blocks hold one latent and one rotary key per token, and travel as such. Each step expands the latents of its block
into keys and values of all heads, calls the other engine, and in backward contracts their gradients again. So a rank
never holds the expanded keys and values of more than one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.core.geometry import Tile
from ringattn.engine.base import (
    KV,
    BackwardInputs,
    Engine,
    Output,
    Sizes,
    Softmax,
    SoftmaxState,
    Visit,
    accumulator_dtype,
)
from ringattn.engine.rectangles import Piece, accumulators, as_slice, finish, key_pieces


class LatentWork(NamedTuple):
    """A step: the work of the other engine, and the key rows of its tiles, all of the single stored head.

    `rows`: the same rows without repetitions, as slices.
    """

    work: Any
    keys: tuple[Piece, ...]
    rows: tuple[slice, ...]
    visit: Visit


class LatentEngine:
    """An engine for blocks of rotary keys (rows, batch, 1, d_rope) and latents (rows, batch, 1, d_latent).

    Equal to any other over the same engine, because plans do not depend on weights.
    """

    def __init__(self, engine: Engine, *weights: Tensor, sums: tuple[Tensor, ...] = ()) -> None:
        """Create an engine that prepares works, or with weights an engine for one pass.

        Args:
            engine: The engine that attends to the expanded keys and values.
            weights: (heads, d_k - d_rope, d_latent), which expands a latent into the other part of each head's key, and
                (heads, d_v, d_latent), which expands it into each head's value.
            sums: The sums of the gradients of the weights, in the accumulator dtype. For a backward pass.
        """
        self.engine, self.weights, self.sums = engine, weights, sums
        self.name, self.sm_margin = engine.name, engine.sm_margin

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LatentEngine) and self.engine is other.engine

    def __hash__(self) -> int:
        return hash((LatentEngine, self.engine))

    def prepare(
        self,
        steps: Sequence[Sequence[Tile]],
        softmax: Softmax,
        rows: int,
        heads: int,
        *,
        more: bool = False,
        visits: Sequence[Visit] = (),
    ) -> list[LatentWork]:
        """Prepare the tiles for one K/V head per query head. The expanded gradients of a step are always new sums."""
        works = self.engine.prepare(steps, softmax._replace(group=1), rows, heads, more=more)
        keys = [key_pieces(tiles, softmax.group) for tiles in steps]
        return [
            LatentWork(work, pieces, _union(pieces), visit)
            for work, pieces, visit in zip(works, keys, visits or [Visit()] * len(steps), strict=True)
        ]

    def begin(self, works: Sequence[LatentWork], q: Tensor, value_dim: int, sinks: Tensor | None) -> SoftmaxState:
        """See `Engine`."""
        return self.engine.begin([each.work for each in works], q, value_dim, sinks)

    def attend(self, q: Tensor, kv: KV, state: SoftmaxState, work: LatentWork) -> None:
        """Expand the block, and accumulate the tiles into the state."""
        self.engine.attend(q, self._expanded(kv), state, work.work)

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
        """See `Engine`."""
        return self.engine.delta(dout, out, dlse)

    def begin_grad(self, works: Sequence[LatentWork], q: Tensor, value_dim: int) -> Output:
        """See `Engine`."""
        return self.engine.begin_grad([each.work for each in works], q, value_dim)

    def attend_grad(
        self,
        q: Tensor,
        kv: KV,
        inputs: BackwardInputs,
        dq: Output,
        dkv: KV | None,
        work: LatentWork,
        result: KV | None = None,
    ) -> None:
        """Add the gradients of the tiles to `dq`, to those of the block, and to those of the weights."""
        (w_k, w_v), (dw_k, dw_v) = self.weights, self.sums
        expanded = self._expanded(kv)
        wide = accumulator_dtype(q.dtype)
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in expanded[:2])
        self.engine.attend_grad(q, expanded, inputs, dq, KV(dk, dv), work.work)
        del expanded
        sums = accumulators(dkv, result, work.keys, work.visit)
        latents, rope = kv.v[:, :, 0].to(wide), kv.k.shape[3]
        dk_latent, dk_rope = dk.split([dk.shape[3] - rope, rope], 3)
        d_latent = torch.einsum("nbhk,hkl->nbl", dk_latent, w_k.to(wide))
        d_latent += torch.einsum("nbhv,hvl->nbl", dv, w_v.to(wide))
        dw_k.add_(torch.einsum("nbhk,nbl->hkl", dk_latent, latents))
        dw_v.add_(torch.einsum("nbhv,nbl->hvl", dv, latents))
        for rows in work.rows:
            sums.k[rows] += dk_rope[rows].sum(2, keepdim=True)
            sums.v[rows] += d_latent[rows, :, None]
        finish(sums, result, work.keys)

    def workspace_bytes(self, work: LatentWork, sizes: Sizes, backward: bool, dlse: bool = False) -> int:
        """See `Engine`. Adds the expanded block, and in backward its gradients and those that are contracted."""
        rows = max((piece.rows.stop for piece in work.keys), default=0)
        expanded = rows * sizes.batch * sizes.heads * (sizes.head_dim + sizes.value_dim)
        nbytes = expanded * (sizes.dtype.itemsize + (accumulator_dtype(sizes.dtype).itemsize if backward else 0))
        return nbytes + self.engine.workspace_bytes(work.work, sizes, backward, dlse)

    def _expanded(self, kv: KV) -> KV:
        """Return the keys and values of all heads of a block, in the dtype of the block."""
        return KV(*expand(kv.v[:, :, 0], kv.k[:, :, 0], *self.weights))


def expand(latents: Tensor, rotary: Tensor, w_k: Tensor, w_v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all heads, contiguous in memory, as engines need their last dimension.

    Shape:
        latents: (..., d_latent), with two leading dimensions
        rotary: (..., d_rope)
        w_k: (heads, d_k - d_rope, d_latent)
        w_v: (heads, d_v, d_latent)
        returns: (..., heads, d_k) and (..., heads, d_v)
    """
    # Not einsum: for d_latent = 1 the memory order of its result is that of its operands.
    parts, values = (F.linear(latents, w.flatten(0, 1)).unflatten(-1, w.shape[:2]) for w in (w_k, w_v))
    return torch.cat([parts, rotary[:, :, None].expand(-1, -1, len(w_k), -1)], 3), values


def _union(pieces: Sequence[Piece]) -> tuple[slice, ...]:
    """Return the rows of the pieces as contiguous slices that do not overlap."""
    present = np.zeros(1 + max((piece.rows.stop for piece in pieces), default=0), np.int8)
    for piece in pieces:
        present[as_slice(piece.rows)] = 1
    edges = np.flatnonzero(np.diff(present, prepend=0))
    return tuple(slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2))

"""The readable engine: scores of a tile as one dense matrix, a few query rows at a time.

Promises every feature (any dtype up to float64, softcap, any strides of positions), arithmetic in the accumulator
dtype, and at most `SCORES_BYTES` for a score matrix, of which three live at once in backward. It is what the faster
engines are compared with, and what runs where torch ships no fused kernel.
Does not know: ranks, schedules, which device it runs on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.engine.base import KV, Accumulating, Carry, Output, Seed, Softmax
from ringattn.engine.rectangles import HeadGroup, head_groups
from ringattn.geometry import Run, Tile
from ringattn.partial import NEG_INF, accumulator_dtype, merge_, weights

SCORES_BYTES = 64 << 20


class PlainWork(NamedTuple):
    """The tiles of one step with their heads cut into groups."""

    tiles: tuple[tuple[Tile, HeadGroup], ...]
    softmax: Softmax


class _Chunk(NamedTuple):
    """Some query rows of a tile with the keys that any of them sees, as rows and as positions."""

    q_rows: slice
    k_rows: slice
    forbidden: Tensor | None  # (q rows, k rows), or None where every pair is allowed.


class PlainEngine(Accumulating):
    """Dense attention, chunked over query rows."""

    name = "plain"

    def prepare(
        self, steps: Sequence[Sequence[Tile]], softmax: Softmax, rows: int, heads: int, *, more: bool = False
    ) -> list[PlainWork]:
        """Cut the heads of each tile so that every part reads whole K/V heads evenly."""
        return [
            PlainWork(tuple((tile, part) for tile in tiles for part in head_groups(tile.heads, softmax.group)), softmax)
            for tiles in steps
        ]

    def attend(self, q: Tensor, kv: KV, carry: Carry, work: PlainWork) -> None:
        """Fold the tiles into the carry, in place."""
        out, lse = carry.out.carried, carry.lse
        assert out is not None
        for tile, heads in work.tiles:
            q_heads, k, v = as_slice(heads.q_heads), *_kv_heads(kv, heads)
            for chunk in _chunks(tile, heads.q_heads.count * q.shape[1], out):
                rows, cols = chunk.q_rows, chunk.k_rows
                s = _scores(_grouped(q[rows, :, q_heads], heads), k[cols].to(out.dtype), chunk, work.softmax)[0]
                part_lse = s.logsumexp(-1)
                p = weights(s, part_lse.unsqueeze(-1))
                part_out = torch.einsum("bhgnm,mbhd->nbhgd", p, v[cols].to(p.dtype)).flatten(2, 3)
                merge_(out[rows, :, q_heads], lse[:, q_heads, rows], part_out, part_lse.flatten(1, 2))

    def attend_grad(self, q: Tensor, kv: KV, seed: Seed, dq: Output, dkv: KV, work: PlainWork) -> None:
        """Add the tiles' gradients to `dq` and `dkv`, in place."""
        softmax, into = work.softmax, dq.carried
        assert into is not None
        for tile, heads in work.tiles:
            q_heads, (k, v), (dk, dv) = as_slice(heads.q_heads), _kv_heads(kv, heads), _kv_heads(dkv, heads)
            for chunk in _chunks(tile, heads.q_heads.count * q.shape[1], into):
                rows, cols = chunk.q_rows, chunk.k_rows
                q_part, dout = (_grouped(x[rows, :, q_heads], heads) for x in (q, seed.dout))
                k_part, v_part = k[cols].to(into.dtype), v[cols].to(into.dtype)
                s, slope = _scores(q_part, k_part, chunk, softmax)
                p = weights(s, _grouped_rows(seed.lse[:, q_heads, rows], heads))
                dv[cols].add_(torch.einsum("bhgnm,nbhgd->mbhd", p, dout))
                ds = torch.einsum("nbhgd,mbhd->bhgnm", dout, v_part)
                ds.sub_(_grouped_rows(seed.delta[:, q_heads, rows], heads)).mul_(p).mul_(softmax.scale)
                if slope is not None:
                    ds.mul_(slope)
                into[rows, :, q_heads].add_(torch.einsum("bhgnm,mbhd->nbhgd", ds, k_part).flatten(2, 3))
                dk[cols].add_(torch.einsum("bhgnm,nbhgd->mbhd", ds, q_part))


def as_slice(run: Run) -> slice:
    """A run of indices as a slice, so that indexing with it gives a view."""
    return slice(run.start, run.stop, run.stride)


def _kv_heads(kv: KV, heads: HeadGroup) -> tuple[Tensor, Tensor]:
    """Views of K and V, or of their gradients, for the K/V heads of a group."""
    chosen = as_slice(heads.kv_heads._replace(start=heads.kv_heads.start - kv.first_head))
    return kv.k[:, :, chosen], kv.v[:, :, chosen]


def _chunks(tile: Tile, matrices: int, like: Tensor) -> Iterator[_Chunk]:
    """The tile a few query rows at a time, `matrices` score matrices of the dtype of `like` together in bounds."""
    q, k, band = tile.q.positions, tile.k.positions, tile.band
    step = max(1, SCORES_BYTES // max(1, matrices * k.count * like.element_size()))
    for first in range(0, q.count, step):
        rows = Run(first, min(step, q.count - first))
        q_part = q.pick(rows)
        # The keys that the first to the last of these queries see; between them all are seen by some or masked below.
        cols = k.between(q_part.start - band.hi, q_part.last - band.lo)
        if not cols.count:
            continue
        part = Tile(tile.q.pick(rows), tile.k.pick(cols), band, tile.heads)
        forbidden = None if part.is_full() else _forbidden(part, like.device)
        yield _Chunk(as_slice(part.q.rows), as_slice(part.k.rows), forbidden)


def _forbidden(tile: Tile, device: torch.device) -> Tensor:
    """(q, k) booleans: the pairs outside the band."""
    runs = (tile.q.positions, tile.k.positions)
    q, k = (torch.arange(run.start, run.stop, run.stride, device=device) for run in runs)
    distance = q[:, None] - k[None, :]
    return (distance < tile.band.lo) | (distance > tile.band.hi)


def _grouped(x: Tensor, heads: HeadGroup) -> Tensor:
    """(rows, batch, q heads, dim) as (rows, batch, kv heads, q heads per kv head, dim), in the accumulator dtype."""
    return x.to(accumulator_dtype(x.dtype)).unflatten(2, (heads.kv_heads.count, -1))


def _grouped_rows(x: Tensor, heads: HeadGroup) -> Tensor:
    """(batch, q heads, rows) as (batch, kv heads, q heads per kv head, rows, 1)."""
    return x.unflatten(1, (heads.kv_heads.count, -1)).unsqueeze(-1)


def _scores(q: Tensor, k: Tensor, chunk: _Chunk, softmax: Softmax) -> tuple[Tensor, Tensor | None]:
    """Scores (batch, kv heads, q heads per kv head, q rows, k rows), -inf where forbidden; the softcap's derivative."""
    s, slope = torch.einsum("nbhgd,mbhd->bhgnm", q, k).mul_(softmax.scale), None
    if softmax.softcap is not None:
        s.div_(softmax.softcap).tanh_()
        slope = 1 - s * s
        s.mul_(softmax.softcap)
    if chunk.forbidden is not None:
        s.masked_fill_(chunk.forbidden, NEG_INF)
    return s, slope

"""Which pieces of a pass are the first to meet their rows, so that nothing has to be set before they do.

Guarantees: pieces are told first only where every wanted row has one, which meets no row that another met before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ringattn.core.geometry import StridedRange, Tile
from ringattn.engine.base import KV, Sizes, Visit
from ringattn.engine.rectangles import head_groups
from ringattn.engine.softmax_state import accumulator_dtype


class Piece(NamedTuple):
    """Rows of some heads: of queries, or of keys and values."""

    rows: StridedRange
    heads: StridedRange


def as_slice(run: StridedRange) -> slice:
    """A strided range of indices as a slice, so that indexing with it gives a view."""
    return slice(run.start, run.stop, run.stride)


def first_pieces(steps: Sequence[Sequence[Piece]], wanted: Sequence[Piece]) -> list[tuple[bool, ...]] | None:
    """For each piece of each step, in their order, whether no other met its rows before.

    None where some piece meets rows of both kinds, or none meets a `wanted` row.
    """
    every = [*wanted, *(piece for step in steps for piece in step)]
    # Heads cut at all borders: a piece holds all heads between two or none.
    borders = sorted({edge for piece in every for run in _unstrided(piece.heads) for edge in (run.start, run.stop)})
    met = np.zeros((len(borders), max((piece.rows.stop for piece in every), default=0)), bool)

    def cells(piece: Piece) -> list[np.ndarray]:
        spans = (np.searchsorted(borders, (run.start, run.stop)) for run in _unstrided(piece.heads))
        return [met[first:end, as_slice(piece.rows)] for first, end in spans]

    found = []
    for step in steps:
        firsts = []
        for piece in step:
            mine = cells(piece)
            firsts.append(not any(one.any() for one in mine))
            if not firsts[-1] and not all(one.all() for one in mine):
                return None
            for one in mine:
                one[...] = True
        found.append(tuple(firsts))
    return found if all(one.all() for piece in wanted for one in cells(piece)) else None


def _unstrided(heads: StridedRange) -> Iterator[StridedRange]:
    yield from (heads,) if heads.stride == 1 else (StridedRange(head, 1) for head in heads.members())


def key_pieces(tiles: Iterable[Tile], group: int) -> tuple[Piece, ...]:
    """The key rows of the tiles, each once for every range of K/V heads that read it. `group`: as in `Softmax`."""
    pieces = (Piece(tile.k.rows, part.kv_heads) for tile in tiles for part in head_groups(tile.heads, group))
    return tuple(dict.fromkeys(pieces))


def accumulators(dkv: KV | None, result: KV | None, pieces: Sequence[Piece], visit: Visit) -> KV:
    """Where a step sums dK and dV: `dkv`, else the result itself or memory of its own; a first one's rows are zero."""
    if dkv is None:
        assert result is not None
        dkv = result if not narrower(result.k.dtype) else _wide(result, pieces)
    if visit.first:
        for piece in pieces:
            for x in held_by(dkv, piece):
                x.zero_()
    return dkv


def finish(sums: KV, result: KV | None, pieces: Iterable[Piece]) -> None:
    """Write the sums of a last step to its result, if it has one."""
    if result is None or result is sums:
        return
    for piece in pieces:
        for x, into in zip(held_by(sums, piece), held_by(result, piece), strict=True):
            into.copy_(x)


def own_sums_bytes(pieces: Iterable[Piece], visit: Visit, sizes: Sizes) -> int:
    """Bytes of the memory of its own in which a step sums that is the first and the last on its rows."""
    if not (visit.first and visit.last and narrower(sizes.dtype)):
        return 0
    rows, heads = _extent(pieces)
    elements = rows * sizes.batch * heads.count * (sizes.head_dim + sizes.value_dim)
    return elements * accumulator_dtype(sizes.dtype).itemsize


def _extent(pieces: Iterable[Piece]) -> tuple[int, StridedRange]:
    """Rows from the first one to the last of any piece, and heads from the least to the greatest of all."""
    rows, first, end = 0, 0, 0
    for at, piece in enumerate(pieces):
        rows, end = max(rows, piece.rows.stop), max(end, piece.heads.stop)
        first = min(first, piece.heads.start) if at else piece.heads.start
    return rows, StridedRange(first, end - first)


def narrower(dtype: torch.dtype) -> bool:
    """Whether sums of `dtype` inputs are held in a wider one."""
    return accumulator_dtype(dtype) != dtype


def held_by(kv: KV, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V, or of their gradients, at a piece of keys."""
    # Received K/V may begin at a later head than 0.
    rows, heads = as_slice(piece.rows), as_slice(piece.heads._replace(start=piece.heads.start - kv.first_head))
    return kv.k[rows, :, heads], kv.v[rows, :, heads]


def _wide(result: KV, pieces: Iterable[Piece]) -> KV:
    rows, heads = _extent(pieces)
    k, v = (
        torch.empty((rows, x.shape[1], heads.count, x.shape[3]), dtype=accumulator_dtype(x.dtype), device=x.device)
        for x in result[:2]
    )
    return KV(k, v, heads.start)

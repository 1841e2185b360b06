"""The readable engine: the scores of a tile as a dense matrix, a few query rows at a time.

Guarantees: support for every feature (any dtype up to float64, softcap, ALiBi, dropout, any strides of positions),
arithmetic in the accumulator dtype, and at most `SCORES_BYTES` for a score matrix, of which backward holds three at
once. The faster engines are compared with this engine, and it runs if torch has no fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.core.geometry import StridedRange, Tile
from ringattn.engine.base import (
    KV,
    NEG_INF,
    Accumulating,
    BackwardInputs,
    Output,
    Sizes,
    Softmax,
    SoftmaxState,
    Visit,
    accumulator_dtype,
    merge_,
    weights,
)
from ringattn.engine.philox import PAIR_BYTES, is_dropped
from ringattn.engine.rectangles import (
    HeadGroup,
    Piece,
    accumulators,
    as_slice,
    finish,
    head_groups,
    key_pieces,
    piece_views,
    temporary_sums_bytes,
)

SCORES_BYTES = 64 << 20


class PlainWork(NamedTuple):
    """The tiles of a step with their heads cut into groups. `keys`: the dK/dV rows that `visit` describes."""

    tiles: tuple[tuple[Tile, HeadGroup], ...]
    softmax: Softmax
    keys: tuple[Piece, ...]
    visit: Visit


class _Chunk(NamedTuple):
    """Some query rows of a tile, the keys that they attend to, and the mask, bias and dropout of the pairs."""

    q_rows: slice
    k_rows: slice
    forbidden: Tensor | None  # (q rows, k rows), or None where every pair is allowed.
    bias: _Bias | None
    dropout: _Dropout | None


class _Bias(NamedTuple):
    """The ALiBi bias as two factors: slopes (kv heads, q heads per kv head, 1, 1) and distances (q rows, k rows)."""

    slopes: Tensor
    distance: Tensor


class _Dropout(NamedTuple):
    """The dropped weights as booleans of the scores' shape, and `kept_share`, which divides the other weights."""

    dropped: Tensor
    kept_share: float

    def apply_(self, p: Tensor) -> Tensor:
        """Apply the dropout to a tensor of the scores' shape, in place."""
        return p.masked_fill_(self.dropped, 0.0).div_(self.kept_share)


class PlainEngine(Accumulating):
    """The engine that computes dense attention, a few query rows at a time."""

    name = "plain"

    def prepare(
        self,
        steps: Sequence[Sequence[Tile]],
        softmax: Softmax,
        rows: int,
        heads: int,
        *,
        more: bool = False,
        visits: Sequence[Visit] = (),
    ) -> list[PlainWork]:
        """Cut the heads of each tile so that all K/V heads of a part have the same number of query heads."""
        group = softmax.group
        return [
            PlainWork(
                tuple((tile, part) for tile in tiles for part in head_groups(tile.heads, group)),
                softmax,
                key_pieces(tiles, group),
                visit,
            )
            for tiles, visit in zip(steps, visits or [Visit()] * len(steps), strict=True)
        ]

    def attend(self, q: Tensor, kv: KV, state: SoftmaxState, work: PlainWork) -> None:
        """Accumulate the tiles into the state, in place."""
        assert state.out.carried is not None
        for tile, heads in work.tiles:
            # The score matrices of all batches and query heads of the group exist at once.
            for part in _parts(tile, heads.q_heads.count * q.shape[1], state.lse.element_size()):
                chunk = _chunk(part, heads, work.softmax, q, state.dropout_seed)
                _attend_part(q, _group_views(kv, heads), heads, state, chunk, work.softmax)
                del chunk  # free it before the next chunk is allocated

    def attend_grad(
        self,
        q: Tensor,
        kv: KV,
        inputs: BackwardInputs,
        dq: Output,
        dkv: KV | None,
        work: PlainWork,
        result: KV | None = None,
    ) -> None:
        """Add the tiles' gradients to `dq` and `dkv`, in place, or write the last sums to `result`."""
        assert dq.carried is not None
        sums = accumulators(dkv, result, work.keys, work.visit)
        for tile, heads in work.tiles:
            for part in _parts(tile, heads.q_heads.count * q.shape[1], inputs.lse.element_size()):
                chunk = _chunk(part, heads, work.softmax, q, inputs.dropout_seed)
                sums_part = _group_views(sums, heads)
                _grad_of_part(q, _group_views(kv, heads), heads, inputs, dq.carried, sums_part, chunk, work.softmax)
                del chunk  # free it before the next chunk is allocated
        finish(sums, result, work.keys)

    def workspace_bytes(self, work: PlainWork, sizes: Sizes, backward: bool, dlse: bool = False) -> int:
        """See `Engine`. The result includes the copies that torch's einsum makes, as measured with torch 2.13."""
        item = accumulator_dtype(sizes.dtype).itemsize
        most = max(
            (
                _part_bytes(part, heads, sizes, work.softmax, backward)
                for tile, heads in work.tiles
                for part in _parts(tile, heads.q_heads.count * sizes.batch, item)
            ),
            default=0,
        )
        return most + (temporary_sums_bytes(work.keys, work.visit, sizes) if backward else 0)


def _attend_part(q: Tensor, kv: KV, heads: HeadGroup, state: SoftmaxState, chunk: _Chunk, softmax: Softmax) -> None:
    """Accumulate a chunk into the state. A separate function, so that its tensors are freed before the next chunk."""
    out, lse, rows, cols = state.out.carried, state.lse, chunk.q_rows, chunk.k_rows
    assert out is not None
    q_heads = as_slice(heads.q_heads)
    s, _ = _scores(_grouped(q[rows, :, q_heads], heads), kv.k[cols].to(out.dtype), chunk, softmax, False)
    # The lse over the keys of this part. A row whose keys are all masked gets -inf and has weight 0 in the merge.
    part_lse = s.logsumexp(-1)
    p = weights(s, part_lse.unsqueeze(-1))
    # Dropout comes after the lse, which includes the dropped weights.
    if chunk.dropout is not None:
        chunk.dropout.apply_(p)
    # Letters: n query rows, m key rows, b batches, h K/V heads, g query heads of one K/V head, d dims.
    part_out = torch.einsum("bhgnm,mbhd->nbhgd", p, kv.v[cols].to(p.dtype)).flatten(2, 3)
    merge_(out[rows, :, q_heads], lse[:, q_heads, rows], part_out, part_lse.flatten(1, 2))


def _grad_of_part(
    q: Tensor, kv: KV, heads: HeadGroup, inputs: BackwardInputs, into: Tensor, dkv: KV, chunk: _Chunk, softmax: Softmax
) -> None:
    """Add the gradients of a chunk, in place. A separate function for the same reason as `_attend_part`."""
    rows, cols, q_heads = chunk.q_rows, chunk.k_rows, as_slice(heads.q_heads)
    q_part, dout = (_grouped(x[rows, :, q_heads], heads) for x in (q, inputs.dout))
    k_part, v_part = kv.k[cols].to(into.dtype), kv.v[cols].to(into.dtype)
    s, slope = _scores(q_part, k_part, chunk, softmax, True)
    # The merged lse gives the weights among all keys of a row, so the gradients of the parts add up.
    p = weights(s, _grouped_rows(inputs.lse[:, q_heads, rows], heads))
    # dV = D(P)^T dO, with the dropout D; the sum over g adds the query heads of a K/V head.
    kept = p if chunk.dropout is None else chunk.dropout.apply_(p.clone())
    dkv.v[cols].add_(torch.einsum("bhgnm,nbhgd->mbhd", kept, dout))
    del kept
    # dS = P * (D(dO V^T) - delta) * scale, in place, so that at most three score matrices exist at once.
    ds = torch.einsum("nbhgd,mbhd->bhgnm", dout, v_part)
    if chunk.dropout is not None:
        chunk.dropout.apply_(ds)
    ds.sub_(_grouped_rows(inputs.delta[:, q_heads, rows], heads)).mul_(p).mul_(softmax.scale)
    # The softcap's derivative: S = cap * tanh(x / cap).
    if slope is not None:
        ds.mul_(slope)
    # dQ = dS K, then dK = dS^T Q.
    into[rows, :, q_heads].add_(torch.einsum("bhgnm,mbhd->nbhgd", ds, k_part).flatten(2, 3))
    dkv.k[cols].add_(torch.einsum("bhgnm,nbhgd->mbhd", ds, q_part))


def _part_bytes(part: Tile, heads: HeadGroup, sizes: Sizes, softmax: Softmax, backward: bool) -> int:
    """Return the peak memory of a part, from the order of the operations above."""
    item = accumulator_dtype(sizes.dtype).itemsize
    rows, cols = part.q.rows.count, part.k.rows.count
    per_q, per_k = (sizes.batch * head_range.count * item for head_range in (heads.q_heads, heads.kv_heads))
    scores, lse, q, out = (rows * per_q * width for width in (cols, 1, sizes.head_dim, sizes.value_dim))
    k, v = (cols * per_k * dim for dim in (sizes.head_dim, sizes.value_dim))
    converted = sizes.dtype.itemsize != item
    # einsum copies an operand that cannot be viewed as a batch of matrices.
    grouped, apart = heads.q_heads.count > heads.kv_heads.count, sizes.batch > 1 and heads.kv_heads.count > 1
    chunk = 0 if part.is_full() else rows * cols
    if softmax.alibi_slopes is not None:
        chunk += (rows * cols + heads.q_heads.count) * item
    drawing = 0
    if softmax.dropout_p is not None:
        chunk += scores // item
        drawing = _drawing_bytes(part, heads, sizes.batch)
    # Live throughout: the scores, and in backward the derivative of the softcap. `weights` adds two score matrices and
    # a mask.
    live, weighing = scores * (1 + (backward and softmax.softcap is not None)), 2 * scores + scores // item
    scores_copy, k_copy, v_copy = scores * grouped, k * apart, v * apart
    if backward:
        q_copy, out_copy = (x * (grouped or apart) for x in (q, out))
        # Conversion to the accumulator dtype copies the operands.
        more = (q + out + k + v) * converted
        ends = max(scores_copy + q + k_copy, out_copy + v_copy, q_copy + k)  # dq, the gradient of the scores, dk
        if softmax.dropout_p is not None:
            ends = max(ends, out_copy + v)  # dv, while the weights exist with and without dropout
        return chunk + max(drawing, more + live + max(weighing, 2 * scores + ends))
    more = (q + k) * converted
    weighed = scores + scores_copy + out + v_copy + v * converted
    return chunk + max(drawing, more + q + scores, live + lse + max(weighing, weighed))


def _drawing_bytes(part: Tile, heads: HeadGroup, batch: int) -> int:
    """Return the temporary memory of `_dropout` in bytes.

    It holds the random state of each pair of the rows that are drawn at a time, and the positions of rows and keys.
    """
    rows, cols, q_heads = part.q.rows.count, part.k.rows.count, heads.q_heads.count
    rows = min(rows, _rows_drawn(cols * q_heads * batch))
    return rows * cols * q_heads * batch * PAIR_BYTES + 8 * (rows + q_heads + batch) + 17 * cols


def _rows_drawn(pairs_of_a_row: int) -> int:
    return max(1, SCORES_BYTES // (PAIR_BYTES * pairs_of_a_row))


def _group_views(kv: KV, heads: HeadGroup) -> KV:
    """Return the views of K and V, or of their gradients, for the K/V heads of a group."""
    every = Piece(StridedRange(0, kv.k.shape[0]), heads.kv_heads)
    return KV(*piece_views(kv, every), heads.kv_heads.start)


def _parts(tile: Tile, matrices: int, item_bytes: int) -> Iterator[Tile]:
    """Cut the tile into parts of a few query rows, so that `matrices` score matrices fit into `SCORES_BYTES`."""
    q, k, band = tile.q.positions, tile.k.positions, tile.band
    # At least one row, whatever the size of its scores.
    step = max(1, SCORES_BYTES // max(1, matrices * k.count * item_bytes))
    for first in range(0, q.count, step):
        rows = StridedRange(first, min(step, q.count - first))
        q_part = q.pick(rows)
        # Take the keys from the first to the last key that any of these queries attends to. The mask removes the pairs
        # that are not allowed.
        cols = k.between(q_part.start - band.hi, q_part.last - band.lo)
        if cols.count:
            yield tile._replace(q=tile.q.pick(rows), k=tile.k.pick(cols))


def _chunk(part: Tile, heads: HeadGroup, softmax: Softmax, q: Tensor, dropout_seed: int) -> _Chunk:
    forbidden = None if part.is_full() else _forbidden(part, q.device)
    bias = _bias(part, heads, softmax, q)
    dropout = _dropout(part, heads, softmax, q, dropout_seed)
    return _Chunk(as_slice(part.q.rows), as_slice(part.k.rows), forbidden, bias, dropout)


def _forbidden(tile: Tile, device: torch.device) -> Tensor:
    """Return (q, k) booleans that are true for the pairs outside the band lo <= q - k <= hi."""
    ahead = _ahead(tile, device)
    return (ahead < tile.band.lo) | (ahead > tile.band.hi)


def _bias(tile: Tile, heads: HeadGroup, softmax: Softmax, like: Tensor) -> _Bias | None:
    if softmax.alibi_slopes is None:
        return None
    dtype = accumulator_dtype(like.dtype)
    each = [softmax.alibi_slopes[tile.first_head + head] for head in heads.q_heads.members()]
    slopes = torch.tensor(each, dtype=dtype, device=like.device).view(heads.kv_heads.count, -1, 1, 1)
    distance = _ahead(tile, like.device).sub_(softmax.shift(tile.q.positions.start)).abs_()
    return _Bias(slopes, distance.to(dtype))


def _dropout(tile: Tile, heads: HeadGroup, softmax: Softmax, like: Tensor, seed: int) -> _Dropout | None:
    if softmax.dropout_p is None:
        return None
    queries, keys, batch, q_heads = tile.q.positions, tile.k.positions, like.shape[1], heads.q_heads
    of_call = q_heads._replace(start=tile.first_head + q_heads.start)
    dropped = torch.empty((batch, q_heads.count, queries.count, keys.count), dtype=torch.bool, device=like.device)
    step = _rows_drawn(keys.count * q_heads.count * batch)
    for first in range(0, queries.count, step):
        rows = StridedRange(first, min(step, queries.count - first))
        into = dropped[:, :, first : first + rows.count]
        is_dropped(into, of_call, queries.pick(rows), keys, seed, softmax.dropout_p)
    return _Dropout(dropped.unflatten(1, (heads.kv_heads.count, -1)), 1 - softmax.dropout_p)


def _ahead(tile: Tile, device: torch.device) -> Tensor:
    """Return the query's position minus the key's, (q, k) int64."""
    runs = (tile.q.positions, tile.k.positions)
    q, k = (torch.arange(run.start, run.stop, run.stride, device=device) for run in runs)
    return q[:, None] - k[None, :]


def _grouped(x: Tensor, heads: HeadGroup) -> Tensor:
    """Return (rows, batch, q heads, dim) as (rows, batch, kv heads, q heads per kv head, dim), in accumulator dtype."""
    return x.to(accumulator_dtype(x.dtype)).unflatten(2, (heads.kv_heads.count, -1))


def _grouped_rows(x: Tensor, heads: HeadGroup) -> Tensor:
    """View (batch, q heads, rows) as (batch, kv heads, q heads per kv head, rows, 1)."""
    return x.unflatten(1, (heads.kv_heads.count, -1)).unsqueeze(-1)


def _scores(q: Tensor, k: Tensor, chunk: _Chunk, softmax: Softmax, backward: bool) -> tuple[Tensor, Tensor | None]:
    """Return the scores (batch, kv heads, q heads per kv head, q rows, k rows), -inf for forbidden pairs.

    For backward, also return the derivative of the softcap, if there is a softcap.
    """
    s, slope = torch.einsum("nbhgd,mbhd->bhgnm", q, k).mul_(softmax.scale), None
    if softmax.softcap is not None:
        # S = cap * tanh(x / cap), in place. The derivative with respect to x is 1 - tanh^2.
        s.div_(softmax.softcap).tanh_()
        slope = 1 - s * s if backward else None
        s.mul_(softmax.softcap)
    if chunk.bias is not None:
        s.addcmul_(chunk.bias.slopes, chunk.bias.distance, value=-1)
    if chunk.forbidden is not None:
        s.masked_fill_(chunk.forbidden, NEG_INF)
    return s, slope

"""Inputs of the kernel cases: tables, guarded memory, random inputs and the dense reference in float64.

Tables are made by checking every pair, independently of the library's code. Memory that no launch may read is NaN, and
memory that no launch may write is compared bit for bit.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.kernels.launch import Config, Table

NAN = float("nan")
SCALE, GROUP, HEADS = 0.3, 2, 4
Q_ROWS, K_ROWS = 40, 80
FAR = 1 << 30


class Keys(NamedTuple):
    """A strided range of K/V rows: row `first` + j * `stride` has the key at the position `position` + j * `apart`."""

    first: int
    stride: int
    rows: int
    position: int
    apart: int = 1


class Pairs(NamedTuple):
    """Ranges of keys, and a mask. Query i is at the position `position` + i * `apart`.

    It attends to the keys at its own position and up to `most` positions before it.
    """

    keys: tuple[Keys, ...]
    position: int
    apart: int = 1
    most: int = FAR


# --- tables ----------------------------------------------------------------------------------------------------------


def seen(pairs: Pairs, keys: Keys) -> np.ndarray:
    """Return a mask (queries, keys of the range) that is true where the query attends to the key."""
    distance = pairs.position + pairs.apart * np.arange(Q_ROWS)[:, None]
    distance = distance - (keys.position + keys.apart * np.arange(keys.rows))[None, :]
    return np.asarray((distance >= 0) & (distance <= pairs.most))


def visited(sees: np.ndarray, rows: int) -> tuple[int, int, int, int]:
    """Return the blocks of `rows` columns that a tile reads: (first visible, first full, end of full, end of visible).

    A block is visible if any of its pairs is in the mask `sees`, and full if all are.
    """
    blocks = [sees[:, start : start + rows] for start in range(0, sees.shape[1], rows)]
    visible = [i for i, block in enumerate(blocks) if block.any()]
    full = [i for i in visible if blocks[i].all() and blocks[i].shape[1] == rows]
    if not visible:
        return 0, 0, 0, 0
    start, end = visible[0], visible[-1] + 1
    return (start, full[0], full[-1] + 1, end) if full else (start, start, start, end)


def by_query(pairs: Pairs, config: Config, flags: int = 0) -> Table:
    """Return a table of query blocks, each with all heads and an entry for each range of keys."""
    blocks, entries = [], []
    for first in range(0, Q_ROWS, config.block_m):
        rows = min(config.block_m, Q_ROWS - first)
        before = len(entries)
        for keys in pairs.keys:
            near = keys.position - pairs.position - first * pairs.apart
            visits = visited(seen(pairs, keys)[first : first + rows], config.block_n)
            entries.append((*keys[:3], pairs.apart, keys.apart, near, min(FAR, near + pairs.most), *visits, 0, 1))
        blocks.append((first, 1, rows, 0, HEADS, before, len(entries), flags))
    return table_of(blocks, entries, HEADS + 1)


def by_key(pairs: Pairs, config: Config, flags: int = 0) -> Table:
    """Return a table of key blocks, each within one range of keys, with all K/V heads and their query heads."""
    blocks, entries = [], []
    for keys in pairs.keys:
        for first in range(0, keys.rows, config.block_n):
            rows = min(config.block_n, keys.rows - first)
            near = pairs.position - keys.position - first * keys.apart
            visits = visited(seen(pairs, keys)[:, first : first + rows].T, config.block_m)
            band = (keys.apart, pairs.apart, max(-FAR, near - pairs.most), near)
            blocks.append((keys.first + first * keys.stride, keys.stride, rows, 0, HEADS // GROUP, len(entries)))
            entries.append((0, 1, Q_ROWS, *band, *visits, 0, GROUP))
            blocks[-1] += (len(entries), flags)
    return table_of(blocks, entries, HEADS // GROUP + 1)


def table_of(blocks: list[tuple[int, ...]], entries: list[tuple[int, ...]], slots: int) -> Table:
    """Return a table of these blocks and entries. `slots`: the work items per block, one for each head and more.

    The callers pass one more than the heads of any block, so that some items are idle.
    """
    padded = [(*entry, *(0,) * (16 - len(entry))) for entry in entries]
    return Table(torch.tensor(blocks, dtype=torch.int32), torch.tensor(padded, dtype=torch.int32), slots)


# --- memory and reference --------------------------------------------------------------------------------------------


class Guarded:
    """Tensors with margins that no launch may change."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self._guarded: list[tuple[Tensor, Tensor, Tensor]] = []

    def rows(self, rows: int, heads: int, dim: int, dtype: torch.dtype = torch.float32, fill: float = NAN) -> Tensor:
        """Return a (rows, batch, heads, dim) tensor of `fill` with margins. Its strides are multiples of 16 bytes."""
        return self._view(torch.full((rows + 2, self.batches, heads + 1, -(-dim // 8) * 8 + 8), fill, dtype=dtype), dim)

    def per_row(self, rows: int, heads: int, fill: float = NAN) -> Tensor:
        """Return a (batch, heads, rows) tensor of `fill` with margins."""
        buffer = torch.full((self.batches, heads + 1, rows + 2), fill)
        return self._guard(buffer, buffer[:, :heads, 1:-1])

    def _view(self, buffer: Tensor, dim: int) -> Tensor:
        return self._guard(buffer, buffer[1:-1, :, :-1, :dim])

    def _guard(self, buffer: Tensor, view: Tensor) -> Tensor:
        inside = torch.zeros(buffer.shape, dtype=torch.bool)
        inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        self._guarded.append((buffer, buffer.clone(), inside))
        return view

    def check(self) -> None:
        """Check that no margin has changed."""
        for buffer, before, inside in self._guarded:
            outside = ~inside
            assert torch.equal(buffer[outside].nan_to_num(7.0), before[outside].nan_to_num(7.0))


class Inputs:
    """Random q, k, v, dout and sinks. K/V rows outside all ranges of keys are NaN."""

    def __init__(self, pairs: Pairs, dtype: torch.dtype, d_k: int = 16, d_v: int = 16, batches: int = 1) -> None:
        self.pairs, self.dtype, self.memory, self.batches = pairs, dtype, Guarded(batches), batches
        kv_heads = HEADS // GROUP
        named = sorted({keys.first + keys.stride * j for keys in pairs.keys for j in range(keys.rows)})
        self.q, self.dout = (self._filled(Q_ROWS, HEADS, dim) for dim in (d_k, d_v))
        self.k, self.v = (self._filled(K_ROWS, kv_heads, dim, named) for dim in (d_k, d_v))
        self.sinks = torch.randn(HEADS)

    def _filled(self, rows: int, heads: int, dim: int, named: list[int] | None = None) -> Tensor:
        x = self.memory.rows(rows, heads, dim, self.dtype)
        named = named if named is not None else list(range(rows))
        x[named] = torch.randn(len(named), self.batches, heads, dim).to(self.dtype)
        return x

    def reference(self, softcap: float | None = None, sinks: bool = False) -> dict[str, Tensor]:
        """Return out, lse, delta, dq, dk, dv in float64, in the layout of the launches.

        `abs_dq`, `abs_dk` and `abs_dv` are the same sums of products with the absolute value of each factor.
        """
        picked = torch.tensor([keys.first + keys.stride * j for keys in self.pairs.keys for j in range(keys.rows)])
        mask = torch.from_numpy(np.concatenate([seen(self.pairs, keys) for keys in self.pairs.keys], axis=1))
        q, k, v = (x.double().clone().requires_grad_() for x in (self.q, self.k[picked], self.v[picked]))
        wide_k, wide_v = (x.repeat_interleave(GROUP, 2) for x in (k, v))
        logits = torch.einsum("ibhd,jbhd->bhij", q, wide_k) * SCALE
        s = logits if softcap is None else softcap * (logits / softcap).tanh()
        s = s.masked_fill(~mask, -inf)
        if sinks:
            s = torch.cat([s, self.sinks.double()[None, :, None, None].expand(self.batches, -1, Q_ROWS, 1)], 3)
        lse = s.logsumexp(3)
        p = (s - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()[..., : len(picked)]
        out = torch.einsum("bhij,jbhd->ibhd", p, wide_v)
        dq, dk, dv, ds = torch.autograd.grad(out, (q, k, v, logits), self.dout.double())
        delta = torch.einsum("ibhd,ibhd->bhi", out, self.dout.double())
        results = {"out": out, "lse": lse, "delta": delta, "dq": dq}
        results["abs_dq"] = torch.einsum("bhij,jbhd->ibhd", ds.abs(), wide_k.abs()) * SCALE
        abs_dk, abs_dv = (
            torch.einsum("bhij,ibhd->jbhd", left, right.double().abs()).unflatten(2, (-1, GROUP)).sum(3)
            for left, right in ((ds.abs() * SCALE, self.q), (p, self.dout))
        )
        for name, part in (("dk", dk), ("dv", dv), ("abs_dk", abs_dk), ("abs_dv", abs_dv)):
            results[name] = torch.zeros(K_ROWS, *part.shape[1:], dtype=torch.float64)
            results[name][picked] = part.detach()
        return {name: x.detach() for name, x in results.items()}


SILENT = slice(0, 10)


def silenced(inputs: Inputs) -> dict[str, Tensor]:
    """Make all logits of the rows SILENT -inf in float32, by overflow. Return the reference.

    In the reference, these rows attend to no key and add nothing to dK and dV.
    """
    large = 2.0**66  # exceeds float16
    inputs.k.copy_(-inputs.k.abs() * large - large), inputs.q.mul_(1 / large)
    dout = inputs.dout[SILENT].clone()
    inputs.dout[SILENT] = 0.0
    reference = inputs.reference()
    inputs.q[SILENT], inputs.dout[SILENT] = large, dout
    reference["out"][SILENT], reference["lse"][..., SILENT], reference["dq"][SILENT] = 0.0, -inf, 0.0
    return reference


def close(got: Tensor, true: Tensor, tolerance: float, sizes: Tensor | None = None) -> None:
    """Check the relative Frobenius error of the finite elements, and that the same elements are infinite.

    `sizes`: what the error is relative to instead of `true`.
    """
    assert torch.equal(got.isinf(), true.isinf()) and not got.isnan().any()
    got, true = got.double().nan_to_num(0, 0, 0), true.nan_to_num(0, 0, 0)
    error = float((got - true).norm() / (true if sizes is None else sizes).norm())
    assert error <= tolerance, error

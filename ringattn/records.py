"""Packed records: how a content lies in a flat buffer, and the copies into and out of it.

Wire order has head part after part, in each rows outermost, then batches, heads, and K beside V. Every view is
row-first, (rows, batch, heads, dim), and strided: nothing here allocates.
Does not know: schedules, ranks, tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ringattn.engine.base import KV
from ringattn.geometry import Run
from ringattn.schedule.content import Content, Part


class Records:
    """A buffer's flat tensor with one `KV` view for each head part of its content."""

    def __init__(self, flat: Tensor, content: Content, batch: int, head_dim: int, value_dim: int) -> None:
        """`flat`: contiguous, exactly as many elements as the content has."""
        self.flat, self.content = flat, content
        self.parts: dict[Run, KV] = {}
        at = 0
        for part in content:
            shape = part.row_count, batch, part.heads.count, head_dim + value_dim
            count = part.row_count * batch * part.heads.count * (head_dim + value_dim)
            block = flat[at : at + count].view(shape)
            self.parts[part.heads] = KV(block[..., :head_dim], block[..., head_dim:], part.heads.start)
            at += count

    def part(self, heads: Run) -> KV:
        """The rows of one head part."""
        return self.parts[heads]

    def rows(self, part: Part, run: Run) -> KV:
        """The given owner rows, which lie in one run of the content, for a part's heads."""
        held = next(mine for mine in self.content if mine.heads == part.heads)
        first = int(held.offsets(np.array([run.start]))[0])
        k, v, head = self.parts[part.heads]
        return KV(k[first : first + run.count], v[first : first + run.count], head)


class Home:
    """The rank's own K and V (or dK and dV), row-first views of the caller's tensors, addressed like `Records`."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        """`k`: (rows, batch, kv_heads, d_k); `v`: (rows, batch, kv_heads, d_v)."""
        self.k, self.v = k, v

    def part(self, heads: Run) -> KV:
        """All rows of one head part."""
        at = slice(heads.start, heads.stop)
        return KV(self.k[:, :, at], self.v[:, :, at], heads.start)

    def rows(self, part: Part, run: Run) -> KV:
        """The given rows, for a part's heads."""
        k, v, head = self.part(part.heads)
        return KV(k[run.start : run.stop], v[run.start : run.stop], head)


Place = Records | Home


def pack(source: Place, into: Records) -> None:
    """Gather `into`'s content out of `source`, converting the dtype where it differs."""
    for have, want in _pairs(source, into, into.content):
        want.k.copy_(have.k)
        want.v.copy_(have.v)


def add(part: Records, into: Place) -> None:
    """Add an arrived content into the same rows of `into`."""
    for have, want in _pairs(part, into, part.content):
        want.k.add_(have.k)
        want.v.add_(have.v)


def _pairs(source: Place, into: Place, content: Content) -> Iterator[tuple[KV, KV]]:
    for part in content:
        for run in part.rows:
            yield source.rows(part, run), into.rows(part, run)


def from_row(kv: KV, row: int) -> KV:
    """The same block from `row` on."""
    return KV(kv.k[row:], kv.v[row:], kv.first_head) if row else kv


TORCH_DTYPE = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}

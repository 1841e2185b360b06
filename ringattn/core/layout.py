"""Layouts: the owner of each token.

A layout assigns every rank a tuple of strided ranges of positions, its *shard*. The rank keeps the tokens in that
order, so the k-th row of a shard is the k-th position of its ranges. Every position has exactly one owner; counts may
be uneven.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from ringattn.core.geometry import CAUSAL, MOST_TOKENS, StridedRange
from ringattn.core.mask import Mask
from ringattn.core.placement import placed, placed_at_once
from ringattn.core.rectangles import segments
from ringattn.errors import InputError

LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "documents")
LayoutName = Literal["auto", "contiguous", "zigzag", "striped", "per_document", "documents", "mask"]
OF_DOCUMENTS = ("per_document", "documents")
"""The layouts that need documents: zigzag in each document, or whole documents if they fit (`core.placement`)."""
PLACED = ("documents", "mask")
"""The layouts that `core.placement` makes: for causal documents, or for the mask of the sequence."""
PURPOSES = ("causal", "full", "window", "dilated")
Purpose = Literal["causal", "full", "window", "dilated"]


@dataclass(frozen=True)
class Layout:
    """The distribution of `length` tokens over `world_size` ranks.

    `cuts`: the document boundaries (0, ..., length) for a layout of `OF_DOCUMENTS`, otherwise (0, length). `at_once`
    (only for `PLACED`): tokens are placed for schedules that receive all rows at once, not for schedules whose ranks
    wait for each other in every step; then `ranks_per_node` is the number of neighbouring ranks of each node, 0 for one
    node. `mask`: the mask for which "mask" places tokens. Equal fields mean equal shards, so hashing and comparing are
    cheap for any number of ranges.
    """

    name: str
    length: int
    world_size: int
    cuts: tuple[int, ...]
    at_once: bool = False
    mask: Mask | None = None
    ranks_per_node: int = 0

    @cached_property
    def shards(self) -> tuple[tuple[StridedRange, ...], ...]:
        """The ranges of positions of each rank, in row order; empty ranges are left out."""
        if self.name in PLACED:
            mask = causal_documents(self.cuts) if self.mask is None else self.mask
            pieces = (
                placed_at_once(mask, self.length, self.world_size, self.ranks_per_node)
                if self.at_once
                else placed(mask, self.length, self.world_size)
            )
            return tuple(tuple(StridedRange(start, stop - start) for start, stop in shard) for shard in pieces)
        shards: list[list[StridedRange]] = [[] for _ in range(self.world_size)]
        used = 0  # chunks that already took an extra token, so that many short documents do not all favor rank 0
        for start, stop in pairwise(self.cuts):
            if self.name == "striped":
                runs = [
                    StridedRange(start + r, len(range(start + r, stop, self.world_size)), self.world_size)
                    for r in range(self.world_size)
                ]
            else:
                chunks = self.world_size * (1 if self.name == "contiguous" else 2)
                size, extra = divmod(stop - start, chunks)
                counts = [size + ((c - used) % chunks < extra) for c in range(chunks)]
                used += extra
                runs = [StridedRange(s, c) for s, c in zip(accumulate(counts, initial=start), counts, strict=False)]
            for chunk, run in enumerate(runs):
                if run.count:
                    mirrored = 2 * self.world_size - 1 - chunk
                    shards[chunk if chunk < self.world_size else mirrored].append(run)
        return tuple(map(tuple, shards))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens of each rank."""
        return tuple(sum(run.count for run in shard) for shard in self.shards)

    def positions(self, rank: int) -> np.ndarray:
        """Return the positions of `rank`'s rows: int64, (counts[rank],)."""
        runs = [np.arange(run.start, run.stop, run.stride) for run in self.shards[rank]]
        return np.concatenate(runs) if runs else np.empty(0, np.int64)

    def order(self) -> np.ndarray:
        """Return the positions of all shards, concatenated: row i has position order()[i]. int64, (length,)."""
        return np.concatenate([self.positions(rank) for rank in range(self.world_size)])


def causal_documents(cuts: tuple[int, ...]) -> Mask:
    """Return the causal mask of documents with the boundaries `cuts` (0, ..., length)."""
    return Mask.of(segments(((start, stop, start, stop) for start, stop in pairwise(cuts)), CAUSAL))


def make_layout(
    name: str,
    length: int,
    world_size: int,
    cu_seqlens: tuple[int, ...] | None = None,
    purpose: str = "causal",
    at_once: bool = False,
    mask: Mask | None = None,
    ranks_per_node: int = 0,
) -> Layout:
    """Return the layout called `name`, or for "auto" the layout that suits `purpose` (causal, full, window, dilated).

    `auto` is contiguous for window and dilated; otherwise per_document with documents, zigzag for causal, and
    contiguous for full. `at_once` is used only for `PLACED`, `ranks_per_node` only with it, and `mask` only for "mask".
    Raises `InputError` for an unknown name or purpose, for a layout of documents without documents, for "mask" without
    a mask, and for more than `MOST_TOKENS`.
    """
    if length > MOST_TOKENS:
        raise InputError(f"length={length}: a sequence has at most {MOST_TOKENS} (2^50)")
    if purpose not in PURPOSES:
        raise InputError(f"for_={purpose!r} is not known; choose one of {', '.join(PURPOSES)}")
    if name == "auto":
        name = (
            "contiguous"
            if purpose in ("window", "dilated")
            else "per_document"
            if cu_seqlens
            else ("zigzag" if purpose == "causal" else "contiguous")
        )
    if name not in LAYOUTS and name != "mask":
        raise InputError(f"layout={name!r} is not known; choose auto or one of {', '.join(LAYOUTS)}, mask")
    if name == "mask" and mask is None:
        raise InputError("layout='mask' needs mask=, the mask for which tokens are placed")
    if name in OF_DOCUMENTS and cu_seqlens is None:
        raise InputError(f"layout={name!r} needs cu_seqlens=[0, ..., length]; without documents use 'zigzag'")
    cuts = cu_seqlens if name in OF_DOCUMENTS and cu_seqlens else (0, length)
    at_once = at_once and name in PLACED
    ranks_per_node = ranks_per_node if at_once and ranks_per_node < world_size else 0
    return Layout(name, length, world_size, cuts, at_once, mask if name == "mask" else None, ranks_per_node)

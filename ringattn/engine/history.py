"""Which launches of a pass are the first and the last to update a query row: they need not read, or keep, the state.

Guarantees flags only where they hold for whole blocks and every row has its first and its last block: then nothing has
to be set before the pass nor converted after it. Else there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ringattn.engine.blocks import Blocks, Ints
from ringattn.kernels.launch_call import FIRST, LAST

FLAGS = 7
"""The column of a block table that holds them."""


def flagged(steps: Sequence[Blocks], rows: int, heads: int) -> bool:
    """Set the flags in the query tables of a pass's steps, in their order, and say so; or set none.

    `rows`, `heads`: of the queries, all of which must be met.
    """
    # Heads cut at the borders of all blocks: within a piece, a block holds all heads or none.
    #    heads     0 1 2 3 4 5 6 7
    #    block A   |-------|
    #    block B       |---------|      borders 0 2 4 7 8
    borders = sorted({0, heads, *(edge for step in steps for edge in _edges(step.blocks))})
    # By (piece of heads, row): the first and last step that updates it; no step gives first = steps, last = -1.
    first = np.full((len(borders) - 1, rows), len(steps))
    last = np.full_like(first, -1)
    for number, step in enumerate(steps):
        for at, met, _ in _met(step.blocks, borders):
            first[at, met] = np.minimum(first[at, met], number)
            last[at, met] = number
    found = []
    for number, step in enumerate(steps):
        flags = np.zeros((2, len(step.blocks)), np.int64)
        for at, met, block in _met(step.blocks, borders):
            # Count for each block how many of its (piece, row) this step is the first, and the last, to update.
            for which, history in enumerate((first, last)):
                np.add.at(flags[which], block, history[at, met] == number)
        found.append(flags)
    # A flag holds for a whole block: all of its (piece, row) or none of them.
    sizes = [_heads(step.blocks, borders) * step.blocks[:, 2] for step in steps]
    whole = all(((flags == 0) | (flags == size)).all() for flags, size in zip(found, sizes, strict=True))
    if not whole or not rows or (last < 0).any():
        return False
    for flags, step in zip(found, steps, strict=True):
        step.blocks[:, FLAGS] = FIRST * (flags[0] > 0) + LAST * (flags[1] > 0)
    return True


def _edges(blocks: Ints) -> set[int]:
    return set(np.unique(blocks[:, 3]).tolist()) | set(np.unique(blocks[:, 3] + blocks[:, 4]).tolist())


def _heads(blocks: Ints, borders: Sequence[int]) -> Ints:
    """How many of the pieces of heads between borders each block holds."""
    return np.searchsorted(borders, blocks[:, 3] + blocks[:, 4]) - np.searchsorted(borders, blocks[:, 3])


def _met(blocks: Ints, borders: Sequence[int]) -> Iterator[tuple[int, Ints, Ints]]:
    """For each piece of heads: its number, the rows that blocks of it hold, and the block of each of these rows."""
    for at in range(len(borders) - 1):
        holds = (blocks[:, 3] <= borders[at]) & (borders[at] < blocks[:, 3] + blocks[:, 4])
        chosen = np.flatnonzero(holds)
        counts = blocks[chosen, 2]
        block = np.repeat(chosen, counts)
        # Rows of a block: first row + within * row stride, counted up within each block.
        within = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
        yield at, blocks[block, 0] + within * blocks[block, 1], block

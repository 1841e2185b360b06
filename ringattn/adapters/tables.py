"""Lower a mask that is given as a table, with a bool for each pair of query and key, to slices of `ringattn.masks`.

The keys of a query are a few runs. From one query to the next, the first key of a run stays or moves by one, and so
does its last key. The queries over which both do the same form one slice: full, causal, inverse-causal or bi-causal.

Guarantees: the slices allow exactly the pairs of the table, which is compared with the table of the slices at every
pair. A table that is too large, or needs too many slices, is refused by name.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from torch import Tensor

from ringattn.core.geometry import UNBOUNDED
from ringattn.core.rectangles import Rectangle, Rectangles
from ringattn.errors import UnsupportedError
from ringattn.masks import Slices

MOST_PAIRS = 1 << 28
"""Limit of the pairs of a table: all pairs of 16,384 tokens."""
MOST_SLICES = 4096
MOST_RUNS = 1 << 22
"""Limit of the runs of keys, summed over all queries. Lowering takes about 100 bytes for each."""
BLOCK_PAIRS = 1 << 24
"""The number of pairs that are read at a time."""


def slices_of(table: Tensor) -> Slices:
    """Return the mask of a table of pairs.

    Args:
        table: Whether each query attends to each key.

    Shape:
        table: (queries, keys), bool

    Returns:
        The mask.

    Raises:
        UnsupportedError: The table has more than `MOST_PAIRS` pairs or `MOST_RUNS` runs of keys, or needs more than
            `MOST_SLICES` slices.

    Example:
        mask = slices_of(torch.ones(n, n, dtype=torch.bool).tril())  # one causal slice
    """
    check_size(*table.shape)
    array = table.cpu().numpy()
    mask = Slices(Rectangles(_rectangles(*_runs(array))))
    for first in range(0, len(array), _block(array)):
        block = array[first : first + _block(array)]
        if not np.array_equal(_table(mask, first, len(block), array.shape[1]), block):
            raise UnsupportedError(
                f"the slices of the mask differ from its table in queries {first} to {first + len(block) - 1}; this is "
                "an error of ringattn, please report it"
            )
    return mask


def check_size(queries: int, keys: int) -> None:
    """Raise `UnsupportedError` for a table of too many pairs."""
    if queries * keys > MOST_PAIRS:
        raise UnsupportedError(
            f"a mask of {queries} queries and {keys} keys has more than {MOST_PAIRS:,} pairs, the limit for masks that "
            "are given pair by pair; use a mask of ringattn.masks"
        )


def connects(mask: Slices, bounds: tuple[int, ...]) -> bool:
    """Return whether a query attends to a key of another document. `bounds`: cumulative lengths, (0, ..., length)."""
    outside = [
        Rectangle(start, stop, *keys) for start, stop in pairwise(bounds) for keys in ((0, start), (stop, bounds[-1]))
    ]
    rows = np.array(outside, np.int64)
    return Rectangles(np.concatenate([mask.rectangles.array, rows])).overlap() is not None


def _block(array: np.ndarray) -> int:
    """Return the number of rows to read at a time."""
    return max(1, BLOCK_PAIRS // max(1, array.shape[1]))


def _runs(array: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the query, the first key and the key after the last of each run, in ascending order."""
    columns = array.shape[1] + 1
    parts, count = [], 0
    for first in range(0, len(array), _block(array)):
        block = array[first : first + _block(array)]
        # In flattened order, a run begins at every second edge and ends at the next.
        edges = np.flatnonzero(np.diff(block, axis=1, prepend=False, append=False))
        count += len(edges) // 2
        if count > MOST_RUNS:
            raise UnsupportedError(f"the mask has more than {MOST_RUNS:,} runs of keys, so it is not a few slices")
        parts.append(edges.reshape(-1, 2) + first * columns)
    edges = np.concatenate(parts) if parts else np.empty((0, 2), np.int64)
    return edges[:, 0] // columns, edges[:, 0] % columns, edges[:, 1] % columns


def _rectangles(query: np.ndarray, start: np.ndarray, stop: np.ndarray) -> list[Rectangle]:
    """Return the slices of these runs. Raises `UnsupportedError` for too many."""
    if (count := len(query)) == 0:
        return []
    # A run continues in the next query if its first key stays or moves by one, and its last key too. Runs of a query
    # have a key between them, so at most one run fits, in both directions.
    columns = int(stop.max()) + 2
    places = query * columns + start
    fit = np.minimum(np.searchsorted(places, places + columns), count - 1)
    later, longer = start[fit] - start, stop[fit] - stop
    continues = (query[fit] == query + 1) & (later >= 0) & (later <= 1) & (longer >= 0) & (longer <= 1)
    motion = np.where(continues, 2 * later + longer, -1)
    # The chain of each run, named by its first run: follow the runs before it in steps that double.
    chain = np.arange(count)
    chain[fit[continues]] = np.flatnonzero(continues)
    while (chain[chain] != chain).any():
        chain = chain[chain]
    order = np.argsort(chain, kind="stable")
    motion = motion[order]
    # A stretch has one motion; -1 ends a chain. A slice covers a stretch, and the first run of the next one.
    before = np.roll(motion, 1)  # the last run of all ends its chain
    begins = np.flatnonzero((motion != before) | (before == -1))
    if len(begins) > 3 * MOST_SLICES:  # a slice ends a chain, and covers at most two other stretches
        raise UnsupportedError(f"the mask needs more than {MOST_SLICES:,} slices")
    rows: list[Rectangle] = []
    free = 0  # the first run that is in no slice yet
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), count], strict=True):
        last = begin if motion[begin] < 0 else end
        if free <= last and not (motion[begin] >= 0 and free == last):
            rows.append(_slice(query, start, stop, order[free], order[last], int(motion[begin])))
            free = last + 1
    if len(rows) > MOST_SLICES:
        raise UnsupportedError(f"the mask needs {len(rows):,} slices, the limit is {MOST_SLICES:,}")
    return sorted(rows)


def _slice(
    query: np.ndarray, start: np.ndarray, stop: np.ndarray, first: int, last: int, motion: int
) -> Rectangle:  # fmt: skip
    """Return the slice of the runs from `first` to `last`. `motion`: 2 if the first key moves, plus 1 if the last."""
    q, q_stop, k, k_stop = (int(x) for x in (query[first], query[last] + 1, start[first], stop[last]))
    moves = max(motion, 0) if last != first else 0
    return Rectangle(
        q, q_stop, k, k_stop, q_stop - k_stop if moves & 1 else -UNBOUNDED, q - k if moves & 2 else UNBOUNDED
    )


def _table(mask: Slices, first: int, queries: int, keys: int) -> np.ndarray:
    """Return how many slices have each pair of some queries, from `first` on: (queries, keys) int8."""
    q, q_stop, k, k_stop, lo, hi = mask.rectangles.expanded.T
    q, q_stop = q.clip(first, first + queries), q_stop.clip(first, first + queries)
    counts = q_stop - q
    which = np.repeat(np.arange(len(q)), counts)
    query = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + q[which]
    # lo <= query - key <= hi bounds the keys of a query.
    start, stop = np.maximum(k[which], query - hi[which]), np.minimum(k_stop[which], query - lo[which] + 1)
    counted = np.zeros((queries, keys + 1), np.int8)
    np.add.at(counted, (query - first, start), 1)
    np.add.at(counted, (query - first, stop), -1)
    return counted.cumsum(axis=1, dtype=np.int8)[:, :-1]

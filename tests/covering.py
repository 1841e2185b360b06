"""Which cells of a grid of parameters are tried by `make test`; the others are marked slow.

Faults that need one certain value, or two certain values together, show in a selection in which every pair of values
that the grid holds stands beside each other once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Cell = Sequence[Hashable]


def parts(cell: Cell, strength: int) -> set[tuple[tuple[int, Hashable], ...]]:
    """The combinations of `strength` values of a cell, each value with its place."""
    return set(combinations(enumerate(cell), strength))


def covering_cells(cells: Sequence[Cell], strength: int = 2) -> list[Cell]:
    """Few of the cells, in their order, which hold every combination of `strength` values that the cells hold.

    Each next one is the first of those that add the most; no draw, so that every run takes the same.
    """
    missing = set().union(*(parts(cell, strength) for cell in cells))
    chosen = set[int]()
    while missing:
        best = max(range(len(cells)), key=lambda at: len(parts(cells[at], strength) & missing))
        chosen.add(best)
        missing -= parts(cells[best], strength)
    return [cells[at] for at in sorted(chosen)]


def thinned(cells: Iterable[Cell], strength: int = 2, quick: Callable[[Cell], bool] = lambda cell: True) -> list[Any]:
    """Parameters for every cell: those that do not belong to the covering ones of the `quick` are marked slow."""
    every = [tuple(cell) for cell in cells]
    chosen = set(covering_cells([cell for cell in every if quick(cell)], strength))
    return [pytest.param(*cell, marks=() if cell in chosen else pytest.mark.slow) for cell in every]


def thinned_by(kind: Callable[[Any], Cell], values: Sequence[Any], strength: int = 1) -> list[Any]:
    """The same for values of one parameter, each of which stands for the cell that `kind` says."""
    missing = covering_cells([kind(value) for value in values], strength)
    params = []
    for value in values:
        chosen = kind(value) in missing
        if chosen:
            missing.remove(kind(value))  # one value for each chosen cell
        params.append(pytest.param(value, marks=() if chosen else pytest.mark.slow))
    return params

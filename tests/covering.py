"""Selects the cells of a grid of parameters that `make test` runs; the others are marked slow.

The selected cells contain every pair of values that occurs together in the grid. So they show every fault that depends
on one value or on two values together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Cell = Sequence[Hashable]


def parts(cell: Cell, strength: int) -> set[tuple[tuple[int, Hashable], ...]]:
    """Return all combinations of `strength` values of a cell, each value with its position in the cell."""
    return set(combinations(enumerate(cell), strength))


def covering_cells(cells: Sequence[Cell], strength: int = 2) -> list[Cell]:
    """Return a small subset of the cells, in order, with every combination of `strength` values that the cells have.

    Each step takes the cell that adds the most missing combinations, the first one in a tie. There is no randomness, so
    every run selects the same cells.
    """
    missing = set().union(*(parts(cell, strength) for cell in cells))
    chosen = set[int]()
    while missing:
        best = max(range(len(cells)), key=lambda index: len(parts(cells[index], strength) & missing))
        chosen.add(best)
        missing -= parts(cells[best], strength)
    return [cells[index] for index in sorted(chosen)]


def thinned(cells: Iterable[Cell], strength: int = 2, quick: Callable[[Cell], bool] = lambda cell: True) -> list[Any]:
    """Return a pytest parameter for every cell. Those outside the covering subset of `quick` cells are marked slow."""
    every = [tuple(cell) for cell in cells]
    chosen = set(covering_cells([cell for cell in every if quick(cell)], strength))
    return [pytest.param(*cell, marks=() if cell in chosen else pytest.mark.slow) for cell in every]


def thinned_by(kind: Callable[[Any], Cell], values: Sequence[Any], strength: int = 1) -> list[Any]:
    """Return a pytest parameter for every value, each of which represents the cell `kind(value)`.

    One value of each cell in the covering subset runs in `make test`; the other values are marked slow.
    """
    missing = covering_cells([kind(value) for value in values], strength)
    params = []
    for value in values:
        chosen = kind(value) in missing
        if chosen:
            missing.remove(kind(value))  # one value for each chosen cell
        params.append(pytest.param(value, marks=() if chosen else pytest.mark.slow))
    return params

"""The selection that stands for a grid: whole, small, and the same each time."""

from __future__ import annotations

from itertools import product

import pytest

from tests.covering import covering_cells, thinned, thinned_by

GRID = list(product("abc", range(4), (True, False), "xyz"))
GAPS = [cell for cell in GRID if not (cell[0] == "a" and cell[1] > 1)]
"""Without the cells that make no sense: their pairs are not asked for."""


@pytest.mark.parametrize("cells", [GRID, GAPS])
def test_every_pair_of_values_is_there(cells: list[tuple]) -> None:
    chosen = covering_cells(cells)
    assert set(chosen) <= set(cells)
    for i in range(4):
        for j in range(i):
            assert {(cell[i], cell[j]) for cell in chosen} == {(cell[i], cell[j]) for cell in cells}
    assert len(chosen) <= 16  # twelve pairs of the two longest axes; the whole grid has 72 cells
    assert covering_cells(cells) == chosen == [cell for cell in cells if cell in chosen]


def test_every_value_is_there() -> None:
    chosen = covering_cells(GRID, strength=1)
    assert [set(values) for values in zip(*chosen, strict=True)] == [set(values) for values in zip(*GRID, strict=True)]
    assert len(chosen) == 4


def test_the_others_are_slow_and_none_is_lost() -> None:
    found = thinned(GRID)
    assert [param.values for param in found] == GRID
    chosen = covering_cells(GRID)
    assert [cell for param, cell in zip(found, GRID, strict=True) if not param.marks] == chosen
    assert {mark.name for param in found for mark in param.marks} == {"slow"}


def test_values_stand_for_their_cells() -> None:
    found = thinned_by(lambda number: (number % 2, number % 3), list(range(12)))
    assert [param.values for param in found] == [(number,) for number in range(12)]
    kept = [param.values[0] for param in found if not param.marks]
    assert {number % 2 for number in kept} == {0, 1} and {number % 3 for number in kept} == {0, 1, 2}
    assert len(kept) == 3

"""The flags of a pass's blocks against brute force: a row's first launch and its last, or no flags at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

import pytest

from ringattn.core.geometry import FULL, StridedRange, Tile
from ringattn.engine.blocks import Blocks, flagged, query_blocks
from ringattn.kernels.launch import FIRST, LAST, BlockColumn
from tests.contract.engine_scenarios import SCENARIOS, random_scenario, strip


def tables(steps: Sequence[Sequence[Tile]], own_rows: int) -> list[Blocks]:
    return [query_blocks(tiles, own_rows, 16) for tiles in steps]


def rows_of(block: list[int]) -> list[tuple[int, int]]:
    """(head, row) of a block."""
    row, stride, rows, head, heads = block[:5]
    return [(h, row + i * stride) for h in range(head, head + heads) for i in range(rows)]


def expected(made: list[Blocks], rows: int, heads: int) -> list[list[int]] | None:
    """The flags of each block, or None where some row is never met or some block's rows do not agree."""
    met = defaultdict(list)
    for number, step in enumerate(made):
        for block in step.blocks.tolist():
            for spot in rows_of(block):
                met[spot].append(number)
    if len(met) < rows * heads or not rows:
        return None
    flags: list[list[int]] = []
    for number, step in enumerate(made):
        flags.append([])
        for block in step.blocks.tolist():
            of_rows = {FIRST * (met[x][0] == number) + LAST * (met[x][-1] == number) for x in rows_of(block)}
            if len(of_rows) > 1:
                return None
            flags[-1] += of_rows
    return flags


def check(steps: Sequence[Sequence[Tile]], rows: int, heads: int, own_rows: int) -> bool:
    made = tables(steps, own_rows)
    wanted = expected(made, rows, heads)
    assert flagged(made, rows, heads) == (wanted is not None)
    found = [step.blocks[:, BlockColumn.FLAGS].tolist() for step in made]
    assert found == (wanted or [[0] * len(step.blocks) for step in made])
    return wanted is not None


@pytest.mark.parametrize("name", SCENARIOS)
def test_of_scenarios(name: str) -> None:
    scenario = SCENARIOS[name]
    holds = check([step.tiles for step in scenario.steps], scenario.q_rows, scenario.heads, 16)
    assert holds == name.startswith("whole-")


@pytest.mark.parametrize("seed", range(60))
def test_of_random_passes(seed: int) -> None:
    """Random tiles after a tile with every row, so that about half of the passes can be flagged."""
    scenario, rng = random_scenario(seed), Random(seed)
    rows = StridedRange(0, scenario.q_rows)
    every = Tile(strip(0, rows.count), strip(0, 20), FULL, StridedRange(0, scenario.heads))
    steps: list[Sequence[Tile]] = [step.tiles for step in scenario.steps]
    for at in {0, rng.randint(0, len(steps))}:
        steps.insert(at, (every,))
    check(steps, rows.count, scenario.heads, rng.choice((1, 4, 16)))


def test_a_row_more_than_are_met_leaves_no_flags() -> None:
    assert check([SCENARIOS["whole-pass"].steps[0].tiles], 30, 4, 16)
    assert not check([SCENARIOS["whole-pass"].steps[0].tiles], 31, 4, 16)
    assert not check([SCENARIOS["whole-pass"].steps[0].tiles], 30, 5, 16)
    assert not check([()], 0, 4, 16)

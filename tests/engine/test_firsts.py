"""First pieces against brute force, row by row and head by head."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from ringattn.core.geometry import FULL, StridedRange, Tile
from ringattn.engine.rectangles import Piece, first_pieces, key_pieces
from tests.contract.engine_scenarios import strip


def cells(piece: Piece) -> set[tuple[int, int]]:
    return {(head, row) for head in piece.heads.members() for row in piece.rows.members()}


def expected(steps: list[list[Piece]], wanted: list[Piece]) -> list[tuple[bool, ...]] | None:
    met: set[tuple[int, int]] = set()
    found = []
    for step in steps:
        firsts = []
        for piece in step:
            mine = cells(piece)
            if mine & met and not mine <= met:
                return None
            firsts.append(not mine & met)
            met |= mine
        found.append(tuple(firsts))
    return found if all(cells(piece) <= met for piece in wanted) else None


def drawn(rng: Random, most: int) -> StridedRange:
    start, stride = rng.randrange(most), rng.choice((1, 1, 1, 2, 3))
    return StridedRange(start, rng.randint(1, (most - start + stride - 1) // stride), stride)


def test_of_drawn_pieces() -> None:
    known = 0
    for seed in range(300):
        rng = Random(seed)
        cuts = sorted({0, 12, rng.randrange(1, 12)})
        # Half of the draws cut rows and heads alike throughout, so that many have first pieces.
        runs = [StridedRange(a, b - a) for a, b in pairwise(cuts)]
        heads = [StridedRange(0, 4)] if seed % 2 else [StridedRange(0, 1), StridedRange(1, 3), StridedRange(0, 2, 2)]
        steps = [
            [Piece(rng.choice(runs) if seed % 4 < 3 else drawn(rng, 12), rng.choice(heads)) for _ in range(3)]
            for _ in range(rng.randint(1, 3))
        ]
        wanted = [Piece(StridedRange(0, rng.choice((3, 12))), StridedRange(0, 4))]
        found = first_pieces(steps, wanted)
        assert found == expected(steps, wanted)
        known += found is not None
    assert 30 < known < 270


@pytest.mark.parametrize(("first", "count", "kv"), [(0, 4, [(0, 2)]), (1, 3, [(0, 1), (1, 1)]), (2, 2, [(1, 1)])])
def test_key_pieces_are_of_the_heads_that_are_read(first: int, count: int, kv: list[tuple[int, int]]) -> None:
    tile = Tile(strip(0, 4), strip(0, 6, row=2), FULL, StridedRange(first, count))
    assert [(p.heads.start, p.heads.count) for p in key_pieces([tile, tile], 2)] == kv
    assert all(piece.rows == StridedRange(2, 6) for piece in key_pieces([tile], 2))

"""The tiles of a mask have every allowed pair once, no other pair and no idle row, as brute force shows."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from ringattn.core.geometry import CAUSAL, FULL, MOST_TOKENS, UNBOUNDED, Band, StridedRange, Tile, TokenRange
from ringattn.core.tiling import TileTable, tiles_of
from tests.strategies import Case, covering, simple


def inside(tile: Tile) -> np.ndarray:
    """Return a mask (queries, keys) of the pairs of a tile that its band allows."""
    q, k = (np.array(strip.positions.members(), np.int64) for strip in (tile.q, tile.k))
    return (q[:, None] - k[None, :] >= tile.band.lo) & (q[:, None] - k[None, :] <= tile.band.hi)


@covering
def test_every_allowed_pair_is_computed_exactly_once(case: Case) -> None:
    done = np.zeros_like(case.reference)
    for rank in range(case.ranks):
        for table in tiles_of(case.problem, rank).values():
            for tile in table:
                q, k = list(tile.q.positions.members()), list(tile.k.positions.members())
                heads = list(tile.heads.members())
                done[np.ix_(heads, q, k)] += inside(tile)
    assert np.array_equal(done, case.reference)


@covering
def test_rows_hold_the_positions_they_say(case: Case) -> None:
    problem = case.problem
    for rank in range(case.ranks):
        for (owner, _), table in tiles_of(problem, rank).items():
            for tile in table:
                for strip, positions in ((tile.q, problem.q_layout.positions(rank)),
                                         (tile.k, problem.kv_layout.positions(owner))):  # fmt: skip
                    assert positions[list(strip.rows.members())].tolist() == list(strip.positions.members())


@covering
def test_every_row_of_a_tile_has_a_partner(case: Case) -> None:
    for rank in range(case.ranks):
        for (_, part), table in tiles_of(case.problem, rank).items():
            assert len(table) > 0 and table.area() == sum(tile.area() for tile in table)
            q_heads = case.problem.parts[part].q_heads
            for tile in table:
                pairs = inside(tile)
                assert pairs.any(0).all() and pairs.any(1).all()
                assert tile.area() == pairs.sum() * tile.heads.count > 0
                assert set(tile.heads.members()) <= set(q_heads.members())


@covering
def test_tiles_come_by_owner_then_part(case: Case) -> None:
    for rank in range(case.ranks):
        keys = list(tiles_of(case.problem, rank))
        assert keys == sorted(set(keys))


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_no_tile_where_nothing_is_to_do(name: str) -> None:
    assert tiles_of(simple(name, 0, 3).problem, 1) == {}
    lonely = simple(name, 1, 3).problem
    assert [len(tiles_of(lonely, rank)) for rank in range(3)] == [1, 0, 0]


def test_causal_zigzag_is_balanced() -> None:
    case = simple("zigzag", 64, 4, causal=True)
    areas = [sum(table.area() for table in tiles_of(case.problem, rank).values()) for rank in range(4)]
    assert areas == [64 * 65 // 2 // 4] * 4


def test_the_area_of_a_table_counts_every_pair() -> None:
    draw, tiles, expected = Random(0), [], 0
    for _ in range(300):
        # Query strides are multiples of key strides, as in the closed form; bands may be empty or unbounded.
        k_stride, slope = draw.randint(1, 3), draw.randint(1, 3)
        q, k = (
            StridedRange(draw.randint(0, 12), draw.randint(0, 7), stride) for stride in (k_stride * slope, k_stride)
        )
        lo, hi = draw.choice((-UNBOUNDED, draw.randint(-9, 9))), draw.choice((UNBOUNDED, draw.randint(-9, 9)))
        tile = Tile(TokenRange(q, q), TokenRange(k, k), Band(lo, hi), StridedRange(0, draw.randint(1, 4)))
        tiles.append(tile)
        expected += int(inside(tile).sum()) * tile.heads.count
    assert TileTable.of(tiles).area() == expected
    # A product of counts beyond 64 bits.
    whole = StridedRange(0, MOST_TOKENS)
    causal = Tile(TokenRange(whole, whole), TokenRange(whole, whole), CAUSAL, StridedRange(0, 1))
    assert TileTable.of([causal] * 3).area() == 3 * MOST_TOKENS * (MOST_TOKENS + 1) // 2


# --- tables ----------------------------------------------------------------------------------------------------------

TILES = [
    Tile(
        TokenRange(StridedRange(0, 4, 2), StridedRange(3, 4)),
        TokenRange(StridedRange(1, 5), StridedRange(0, 5)),
        CAUSAL,
        StridedRange(0, 2),
    ),
    Tile(
        TokenRange(StridedRange(9, 1), StridedRange(7, 1)),
        TokenRange(StridedRange(1, 3, 3), StridedRange(5, 3)),
        Band(-2, 8),
        StridedRange(2, 1),
    ),
]


def test_tables_are_values() -> None:
    first, equal = TileTable.of(TILES), TileTable.of(TILES)
    different = TileTable.of([TILES[0]._replace(band=FULL), TILES[1]])
    assert first == equal and hash(first) == hash(equal) and first != different
    with pytest.raises(ValueError, match="read-only"):
        first.q_start[0] = 1

"""Tiles are cut into rectangles, and rectangles are joined, without losing a pair, as brute force shows."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.core.geometry import CAUSAL, FULL, Band, StridedRange, Tile, TokenRange
from ringattn.engine.rectangles import (
    Piece,
    Rectangle,
    first_pieces,
    head_groups,
    join_rectangles,
    key_pieces,
    rectangles,
)
from tests.contract.engine_scenarios import strip
from tests.strategies import row_pairs, tiles

HEADS = StridedRange(0, 1)


def pairs_of(rectangle: Rectangle) -> list[tuple[int, int]]:
    """Return the (q row, k row) pairs that a kernel would compute for this rectangle."""
    q_rows, k_rows = list(rectangle.q_rows.members()), list(rectangle.k_rows.members())
    if rectangle.reversed:
        q_rows, k_rows = q_rows[::-1], k_rows[::-1]
    return [(q, k) for i, q in enumerate(q_rows) for j, k in enumerate(k_rows) if not rectangle.causal or j <= i]


@settings(max_examples=800, deadline=None)
@given(tiles(), st.booleans())
def test_rectangles_hold_every_allowed_pair_once_and_suit_the_kernels(tile: Tile, square_causal_only: bool) -> None:
    cut = list(rectangles(tile, square_causal_only))
    for rectangle in cut:
        assert rectangle.q_rows.count > 0 and rectangle.k_rows.count > 0
        assert not rectangle.causal or rectangle.q_rows.count >= rectangle.k_rows.count > 1
        assert rectangle.causal or not rectangle.reversed
        if rectangle.causal and square_causal_only:
            assert rectangle.q_rows.count == rectangle.k_rows.count
    counted = Counter(pair for rectangle in cut for pair in pairs_of(rectangle))
    assert set(counted) == set(row_pairs(tile))
    assert all(times == 1 for times in counted.values())


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(-300, 300), st.integers(0, 300))
def test_few_rectangles(q_count: int, k_count: int, lo: int, more: int) -> None:
    """A tile has at most two rectangles for each band width along its shorter side, and seven more for its ends."""
    tile = Tile(
        TokenRange(StridedRange(0, q_count), StridedRange(0, q_count)),
        TokenRange(StridedRange(0, k_count), StridedRange(0, k_count)),
        Band(lo, lo + more),
        HEADS,
    )
    stretches = min(q_count, k_count) // (more + 1)
    assert len(list(rectangles(tile))) <= 2 * stretches + 7


def test_causal_below_the_diagonal_is_full_columns_and_one_causal() -> None:
    tile = Tile(
        TokenRange(StridedRange(4, 8), StridedRange(0, 8)),
        TokenRange(StridedRange(0, 10), StridedRange(0, 10)),
        CAUSAL,
        HEADS,
    )
    assert list(rectangles(tile)) == [
        Rectangle(StridedRange(0, 8), StridedRange(0, 4), False, False, HEADS),
        Rectangle(StridedRange(0, 8), StridedRange(4, 6), True, False, HEADS),
    ]
    assert list(rectangles(tile, square_causal_only=True)) == [
        Rectangle(StridedRange(0, 8), StridedRange(0, 4), False, False, HEADS),
        Rectangle(StridedRange(0, 6), StridedRange(4, 6), True, False, HEADS),
        Rectangle(StridedRange(6, 2), StridedRange(4, 6), False, False, HEADS),
    ]


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 6), st.integers(1, 8))
def test_head_groups_keep_each_head_with_its_kv_head(start: int, count: int, stride: int, group: int) -> None:
    heads, pairs = StridedRange(start, count, stride), []
    for part in head_groups(heads, group):
        assert part.q_heads.count % part.kv_heads.count == 0
        group_size = part.q_heads.count // part.kv_heads.count
        kv_heads = [h for h in part.kv_heads.members() for _ in range(group_size)]
        pairs += list(zip(part.q_heads.members(), kv_heads, strict=True))
    assert pairs == [(h, h // group) for h in heads.members()]


def test_head_groups_are_few() -> None:
    assert len(list(head_groups(StridedRange(0, 32), 4))) == 1
    assert len(list(head_groups(StridedRange(3, 26), 4))) == 3
    assert len(list(head_groups(StridedRange(1, 8, 4), 4))) == 1
    assert len(list(head_groups(StridedRange(0, 16, 2), 4))) == 1
    assert len(list(head_groups(StridedRange(5, 2), 8))) == 1


def triples_of(all_rectangles: list[Rectangle]) -> Counter[tuple[int, int, int]]:
    """Count how often a kernel would compute each (q row, k row, query head)."""
    return Counter(
        (*pair, head)
        for rectangle in all_rectangles
        for pair in pairs_of(rectangle)
        for head in rectangle.heads.members()
    )


@st.composite
def crowded_rectangles(draw: st.DrawFn) -> list[Rectangle]:
    """Draw rectangles of all kinds over three adjacent ranges of rows and several ranges of heads.

    Most of the rectangles touch another rectangle.
    """
    count, q_stride, k_stride = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads = draw(
        st.lists(
            st.sampled_from([StridedRange(0, 1), StridedRange(1, 1), StridedRange(0, 2), StridedRange(0, 2, 2)]),
            min_size=1,
            max_size=3,
        )
    )
    cells = st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(["full", "causal", "reversed"]))
    drawn_rectangles = []
    for q, k, kind in draw(st.lists(cells, max_size=12)):
        q_rows, k_rows = (
            StridedRange(q * count * q_stride, count, q_stride),
            StridedRange(k * count * k_stride, count, k_stride),
        )
        chosen_heads = draw(st.sets(st.sampled_from(heads), min_size=1))
        drawn_rectangles += [
            Rectangle(q_rows, k_rows, kind != "full", kind == "reversed", head_range) for head_range in chosen_heads
        ]
    return drawn_rectangles


@settings(max_examples=200, deadline=None)
@given(crowded_rectangles())
def test_joining_neighbours_keeps_every_pair_of_every_head(separate: list[Rectangle]) -> None:
    joined = join_rectangles(separate)
    assert triples_of(joined) == triples_of(separate)
    assert len(joined) <= len(separate)


@st.composite
def dilated_shards(draw: st.DrawFn) -> list[Tile]:
    """Draw the local tiles of a shard that has up to three ranges of rows and dilated branches, each for some heads."""
    starts = sorted(draw(st.sets(st.integers(0, 30), min_size=1, max_size=3)))
    runs = [StridedRange(a, draw(st.integers(1, b - a))) for a, b in zip(starts, [*starts[1:], 40], strict=True)]
    rows = [StridedRange(sum(r.count for r in runs[:n]), run.count) for n, run in enumerate(runs)]
    drawn_tiles = []
    for _ in range(draw(st.integers(1, 3))):
        rate = draw(st.integers(1, 3))
        heads = StridedRange(draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2)))
        offset = draw(st.integers(0, rate - 1))
        strips = []
        for run, row in zip(runs, rows, strict=True):
            first = (offset - run.start) % rate
            branch = StridedRange(first, max(0, (run.count - first + rate - 1) // rate), rate)
            strips.append(TokenRange(run.pick(branch), row.pick(branch)))
        drawn_tiles += [Tile(q, k, draw(st.sampled_from([CAUSAL, FULL])), heads) for q in strips for k in strips]
    return [tile for tile in drawn_tiles if tile.area()]


@settings(max_examples=150, deadline=None)
@given(dilated_shards(), st.booleans())
def test_joined_dilated_branches_keep_every_pair_of_every_head(shard: list[Tile], square_causal_only: bool) -> None:
    separate = [rectangle for tile in shard for rectangle in rectangles(tile, square_causal_only)]
    assert triples_of(join_rectangles(separate)) == triples_of(separate)


def test_a_zigzag_shard_is_a_causal_square_and_its_remote_pair_a_rectangle_for_each_run_of_heads() -> None:
    """Rectangles of the same heads are joined even if rectangles of other heads are between them in the list."""

    def run(position: int, row: int) -> TokenRange:
        return TokenRange(StridedRange(position, 8), StridedRange(row, 8))

    head, tail, near, far = run(0, 0), run(56, 8), run(8, 0), run(48, 8)
    of_one, of_two = (StridedRange(0, 1), StridedRange(1, 1)), (StridedRange(0, 2, 2), StridedRange(1, 2, 2))
    for runs in ((StridedRange(0, 2),), of_one, of_two):
        local = [Tile(q, k, CAUSAL, heads) for heads in runs for q, k in ((head, head), (tail, head), (tail, tail))]
        remote = [Tile(tail, k, CAUSAL, heads) for heads in runs for k in (near, far)]
        squares = [Rectangle(StridedRange(0, 16), StridedRange(0, 16), True, False, heads) for heads in runs]
        full = [Rectangle(StridedRange(8, 8), StridedRange(0, 16), False, False, heads) for heads in runs]
        assert join_rectangles([r for tile in local for r in rectangles(tile)]) == squares
        assert join_rectangles([r for tile in remote for r in rectangles(tile)]) == full


# --- first pieces against brute force, row by row and head by head ---------------------------------------------------


def cells(piece: Piece) -> set[tuple[int, int]]:
    return {(head, row) for head in piece.heads.members() for row in piece.rows.members()}


def expected(steps: list[list[Piece]], required: list[Piece]) -> list[tuple[bool, ...]] | None:
    updated: set[tuple[int, int]] = set()
    flags = []
    for step in steps:
        firsts = []
        for piece in step:
            piece_cells = cells(piece)
            if piece_cells & updated and not piece_cells <= updated:
                return None
            firsts.append(not piece_cells & updated)
            updated |= piece_cells
        flags.append(tuple(firsts))
    return flags if all(cells(piece) <= updated for piece in required) else None


def draw_range(rng: Random, most: int) -> StridedRange:
    start, stride = rng.randrange(most), rng.choice((1, 1, 1, 2, 3))
    return StridedRange(start, rng.randint(1, (most - start + stride - 1) // stride), stride)


def test_first_pieces_of_random_passes() -> None:
    with_flags = 0
    for seed in range(300):
        rng = Random(seed)
        cuts = sorted({0, 12, rng.randrange(1, 12)})
        # In three quarters of the passes, pieces begin and end at the same rows in every step, so that many passes can
        # have flags for first pieces.
        runs = [StridedRange(a, b - a) for a, b in pairwise(cuts)]
        heads = [StridedRange(0, 4)] if seed % 2 else [StridedRange(0, 1), StridedRange(1, 3), StridedRange(0, 2, 2)]
        steps = [
            [Piece(rng.choice(runs) if seed % 4 < 3 else draw_range(rng, 12), rng.choice(heads)) for _ in range(3)]
            for _ in range(rng.randint(1, 3))
        ]
        required = [Piece(StridedRange(0, rng.choice((3, 12))), StridedRange(0, 4))]
        flags = first_pieces(steps, required)
        assert flags == expected(steps, required)
        with_flags += flags is not None
    assert 30 < with_flags < 270


@pytest.mark.parametrize(("first", "count", "kv"), [(0, 4, [(0, 2)]), (1, 3, [(0, 1), (1, 1)]), (2, 2, [(1, 1)])])
def test_key_pieces_are_of_the_heads_that_are_read(first: int, count: int, kv: list[tuple[int, int]]) -> None:
    tile = Tile(strip(0, 4), strip(0, 6, row=2), FULL, StridedRange(first, count))
    assert [(p.heads.start, p.heads.count) for p in key_pieces([tile, tile], 2)] == kv
    assert all(piece.rows == StridedRange(2, 6) for piece in key_pieces([tile], 2))

"""Operations on strided ranges, bands and tiles agree with brute force over their members."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.core.geometry import CAUSAL, FULL, UNBOUNDED, Band, StridedRange, Tile, TokenRange, count_pairs
from tests.strategies import bands, row_pairs, runs, tight_or_open, tiles


def allowed(q: StridedRange, k: StridedRange, band: Band) -> set[tuple[int, int]]:
    """Return the pairs of query and key positions that the band allows."""
    return {(a, b) for a in q.members() for b in k.members() if band.lo <= a - b <= band.hi}


@settings(max_examples=300, deadline=None)
@given(runs, runs)
def test_intersect(a: StridedRange, b: StridedRange) -> None:
    common = a.intersect(b)
    assert set(common.members()) == set(a.members()) & set(b.members())
    assert common.count or common == StridedRange(0, 0)


@settings(max_examples=500, deadline=None)
@given(runs, tight_or_open, tight_or_open)
def test_between(run: StridedRange, lo: int, hi: int) -> None:
    indices = run.between(lo, hi)
    assert list(indices.members()) == [i for i, m in enumerate(run.members()) if lo <= m <= hi]
    assert 0 <= indices.start and indices.count >= 0


@settings(max_examples=400, deadline=None)
@given(runs, runs, bands)
def test_count_pairs(q: StridedRange, k: StridedRange, band: Band) -> None:
    assert count_pairs(q, k, band) == len(allowed(q, k, band))


def test_count_pairs_of_a_million_tokens_is_closed_form() -> None:
    run = StridedRange(0, 1 << 20)
    assert count_pairs(run, run, CAUSAL) == (1 << 19) * ((1 << 20) + 1)
    assert count_pairs(run, StridedRange(0, 1 << 18, 4), CAUSAL) == 4 * sum(range(1, (1 << 18) + 1))
    assert count_pairs(run, run, Band(0, 9)) == 10 * (1 << 20) - 45


def test_a_band_whose_bounds_cross_holds_no_pair() -> None:
    run = StridedRange(0, 20)
    assert count_pairs(run, run, Band(5, 2)) == 0
    assert not list(
        Tile(TokenRange(run, run), TokenRange(StridedRange(0, 20, 3), run), Band(5, 2), StridedRange(0, 1)).aligned()
    )


@settings(max_examples=400, deadline=None)
@given(tiles())
def test_index_band_of_aligned_tiles(tile: Tile) -> None:
    for part in tile.aligned():
        q, k = part.q.positions, part.k.positions
        lo, hi = part.index_band()
        by_index = {
            (q.members()[i], k.members()[j]) for i in range(q.count) for j in range(k.count) if lo <= i - j <= hi
        }
        assert by_index == allowed(q, k, part.band)
        assert -1000 < lo and hi < 1000


def test_index_band_of_a_full_tile_of_unequal_strides() -> None:
    """`aligned` does not split a full tile whose keys have another stride than its queries."""
    tile = Tile(
        TokenRange(StridedRange(0, 2), StridedRange(0, 2)),
        TokenRange(StridedRange(1, 2, 2), StridedRange(0, 2)),
        Band(-UNBOUNDED, 0),
        StridedRange(0, 1),
    )
    assert list(tile.aligned()) == [tile] and tile.index_band() == Band(-1, 1)


@settings(max_examples=400, deadline=None)
@given(tiles())
def test_aligned_tiles_hold_each_pair_once(tile: Tile) -> None:
    parts = list(tile.aligned())
    pairs = [pair for part in parts for pair in row_pairs(part)]
    assert sorted(pairs) == sorted(row_pairs(tile))
    for part in parts:
        q, k = part.q.positions, part.k.positions
        assert q.stride == k.stride or 1 in (q.count, k.count) or part.is_full()
        assert part.heads == tile.heads
        assert part is tile or (q.count and k.count)


@settings(max_examples=300, deadline=None)
@given(tiles())
def test_is_full(tile: Tile) -> None:
    q, k = tile.q.positions, tile.k.positions
    if q.count and k.count:
        assert tile.is_full() == (len(allowed(q, k, tile.band)) == q.count * k.count)


@given(runs, runs, bands, st.integers(-40, 40))
def test_shifted_band(q: StridedRange, k: StridedRange, band: Band, by: int) -> None:
    moved = allowed(StridedRange(q.start + by, q.count, q.stride), k, band.shifted(by))
    assert moved == {(a + by, b) for a, b in allowed(q, k, band)}


def test_printing() -> None:
    assert [
        str(run) for run in (StridedRange(3, 4), StridedRange(3, 4, 2), StridedRange(3, 1, 2), StridedRange(3, 0))
    ] == ["3..6", "3..9:2", "3", "none"]
    assert [str(band) for band in (FULL, CAUSAL, Band(-3, 4))] == ["-inf..inf", "0..inf", "-3..4"]

"""The cut of tiles into rectangles, against brute force boolean masks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.core.geometry import CAUSAL, FULL, Band, StridedRange, Tile, TokenRange
from ringattn.engine.rectangles import Rectangle, head_groups, joined, rectangles

HEADS = StridedRange(0, 1)

counts = st.integers(0, 24)
strides = st.integers(1, 5)
bands = st.builds(
    Band, st.one_of(st.just(FULL.lo), st.integers(-40, 40)), st.one_of(st.just(FULL.hi), st.integers(-40, 40))
)


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    def strip() -> TokenRange:
        count = draw(counts)
        positions = StridedRange(draw(st.integers(0, 30)), count, draw(strides))
        return TokenRange(positions, StridedRange(draw(st.integers(0, 9)), count, draw(st.integers(1, 3))))

    return Tile(strip(), strip(), draw(bands), HEADS)


def square(count: int, band: Band, k_start: int = 0) -> Tile:
    return Tile(
        TokenRange(StridedRange(0, count), StridedRange(0, count)),
        TokenRange(StridedRange(k_start, count), StridedRange(0, count)),
        band,
        HEADS,
    )


def pairs_of(rectangle: Rectangle) -> list[tuple[int, int]]:
    """The (q row, k row) pairs that a kernel would compute."""
    q_rows, k_rows = list(rectangle.q_rows.members()), list(rectangle.k_rows.members())
    if rectangle.reversed:
        q_rows, k_rows = q_rows[::-1], k_rows[::-1]
    return [(q, k) for i, q in enumerate(q_rows) for j, k in enumerate(k_rows) if not rectangle.causal or j <= i]


def reference(tile: Tile) -> set[tuple[int, int]]:
    q = list(zip(tile.q.positions.members(), tile.q.rows.members(), strict=True))
    k = list(zip(tile.k.positions.members(), tile.k.rows.members(), strict=True))
    return {(qr, kr) for qp, qr in q for kp, kr in k if tile.band.lo <= qp - kp <= tile.band.hi}


@settings(max_examples=800, deadline=None)
@given(tiles(), st.booleans())
def test_every_allowed_pair_exactly_once_and_no_other(tile: Tile, square_causal_only: bool) -> None:
    made = list(rectangles(tile, square_causal_only))
    counted = Counter(pair for rectangle in made for pair in pairs_of(rectangle))
    assert set(counted) == reference(tile)
    assert all(times == 1 for times in counted.values())


@settings(max_examples=800, deadline=None)
@given(tiles(), st.booleans())
def test_kernels_may_be_called_with_every_rectangle(tile: Tile, square_causal_only: bool) -> None:
    for rectangle in rectangles(tile, square_causal_only):
        assert rectangle.q_rows.count > 0 and rectangle.k_rows.count > 0
        assert not rectangle.causal or rectangle.q_rows.count >= rectangle.k_rows.count > 1
        assert rectangle.causal or not rectangle.reversed
        if rectangle.causal and square_causal_only:
            assert rectangle.q_rows.count == rectangle.k_rows.count


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(-300, 300), st.integers(0, 300))
def test_few_rectangles(q_count: int, k_count: int, lo: int, more: int) -> None:
    """Two for each stretch as long as the band is wide, and at most three at each end and for the last stretch."""
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


def test_sliding_window_is_two_rectangles_a_stretch() -> None:
    assert len(list(rectangles(square(1024, Band(0, 127))))) == 2 * 8 - 1


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 6), st.integers(1, 8))
def test_head_groups_keep_each_head_with_its_kv_head(start: int, count: int, stride: int, group: int) -> None:
    heads, met = StridedRange(start, count, stride), []
    for part in head_groups(heads, group):
        assert part.q_heads.count % part.kv_heads.count == 0
        served = part.q_heads.count // part.kv_heads.count
        kv_heads = [h for h in part.kv_heads.members() for _ in range(served)]
        met += list(zip(part.q_heads.members(), kv_heads, strict=True))
    assert met == [(h, h // group) for h in heads.members()]


def test_head_groups_are_few() -> None:
    assert len(list(head_groups(StridedRange(0, 32), 4))) == 1
    assert len(list(head_groups(StridedRange(3, 26), 4))) == 3
    assert len(list(head_groups(StridedRange(1, 8, 4), 4))) == 1
    assert len(list(head_groups(StridedRange(0, 16, 2), 4))) == 1
    assert len(list(head_groups(StridedRange(5, 2), 8))) == 1


@st.composite
def shards(draw: st.DrawFn) -> list[Tile]:
    """All tiles of a shard of up to three runs with itself, causal or in a window, keys packed with or without gaps."""
    starts = sorted(draw(st.sets(st.integers(0, 30), min_size=1, max_size=3)))
    runs = [StridedRange(a, draw(st.integers(1, b - a))) for a, b in zip(starts, [*starts[1:], 40], strict=True)]
    gap = draw(st.integers(0, 1))
    band = Band(0, draw(st.sampled_from([5, 1 << 60])))
    rows = [StridedRange(sum(r.count + gap for r in runs[:n]), run.count) for n, run in enumerate(runs)]
    strips = [TokenRange(run, row) for run, row in zip(runs, rows, strict=True)]
    both = [Tile(q, k, band, StridedRange(0, 2)) for q in strips for k in strips]
    return [tile for tile in both if tile.area()] * draw(st.integers(1, 2))


@given(shards())
def test_joined_rectangles_hold_the_same_pairs(found: list[Tile]) -> None:
    apart = [rectangle for tile in found for rectangle in rectangles(tile)]
    together = joined(apart)
    assert Counter(p for r in together for p in pairs_of(r)) == Counter(p for r in apart for p in pairs_of(r))
    assert len(together) <= len(apart)


def triples_of(found: list[Rectangle]) -> Counter[tuple[int, int, int]]:
    """How often a kernel would compute each (q row, k row, query head)."""
    return Counter((*pair, head) for one in found for pair in pairs_of(one) for head in one.heads.members())


@st.composite
def crowded(draw: st.DrawFn) -> list[Rectangle]:
    """Rectangles of every kind over three adjacent runs of rows, for several runs of heads: most have neighbours."""
    count, q_stride, k_stride = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads = draw(
        st.lists(
            st.sampled_from([StridedRange(0, 1), StridedRange(1, 1), StridedRange(0, 2), StridedRange(0, 2, 2)]),
            min_size=1,
            max_size=3,
        )
    )
    cells = st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(["full", "causal", "reversed"]))
    made = []
    for q, k, kind in draw(st.lists(cells, max_size=12)):
        q_rows, k_rows = (
            StridedRange(q * count * q_stride, count, q_stride),
            StridedRange(k * count * k_stride, count, k_stride),
        )
        some = draw(st.sets(st.sampled_from(heads), min_size=1))
        made += [Rectangle(q_rows, k_rows, kind != "full", kind == "reversed", one) for one in some]
    return made


@settings(max_examples=200, deadline=None)
@given(crowded())
def test_joining_neighbours_keeps_every_pair_of_every_head(found: list[Rectangle]) -> None:
    together = joined(found)
    assert triples_of(together) == triples_of(found)
    assert len(together) <= len(found)


@st.composite
def dilated_shards(draw: st.DrawFn) -> list[Tile]:
    """The tiles of a shard of up to three runs with itself under dilated branches, each for its own run of heads."""
    starts = sorted(draw(st.sets(st.integers(0, 30), min_size=1, max_size=3)))
    runs = [StridedRange(a, draw(st.integers(1, b - a))) for a, b in zip(starts, [*starts[1:], 40], strict=True)]
    rows = [StridedRange(sum(r.count for r in runs[:n]), run.count) for n, run in enumerate(runs)]
    made = []
    for _ in range(draw(st.integers(1, 3))):
        rate = draw(st.integers(1, 3))
        heads = StridedRange(draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2)))
        offset = draw(st.integers(0, rate - 1))
        strips = []
        for run, row in zip(runs, rows, strict=True):
            first = (offset - run.start) % rate
            some = StridedRange(first, max(0, (run.count - first + rate - 1) // rate), rate)
            strips.append(TokenRange(run.pick(some), row.pick(some)))
        made += [Tile(q, k, draw(st.sampled_from([CAUSAL, FULL])), heads) for q in strips for k in strips]
    return [tile for tile in made if tile.area()]


@settings(max_examples=150, deadline=None)
@given(dilated_shards(), st.booleans())
def test_joined_dilated_branches_keep_every_pair_of_every_head(found: list[Tile], square_causal_only: bool) -> None:
    apart = [rectangle for tile in found for rectangle in rectangles(tile, square_causal_only)]
    assert triples_of(joined(apart)) == triples_of(apart)


def test_squares_of_other_heads_between_two_squares_do_not_keep_them_apart() -> None:
    """A zigzag shard of two runs of heads: one causal square for each."""
    head, tail = TokenRange(StridedRange(0, 8), StridedRange(0, 8)), TokenRange(StridedRange(56, 8), StridedRange(8, 8))
    for several in ((StridedRange(0, 1), StridedRange(1, 1)), (StridedRange(0, 2, 2), StridedRange(1, 2, 2))):
        home = [Tile(q, k, CAUSAL, heads) for heads in several for q, k in ((head, head), (tail, head), (tail, tail))]
        found = joined([r for tile in home for r in rectangles(tile)])
        assert found == [Rectangle(StridedRange(0, 16), StridedRange(0, 16), True, False, heads) for heads in several]


def test_a_zigzag_shard_is_one_causal_square_and_its_remote_pair_one_rectangle() -> None:
    head, tail, heads = (
        TokenRange(StridedRange(0, 8), StridedRange(0, 8)),
        TokenRange(StridedRange(56, 8), StridedRange(8, 8)),
        StridedRange(0, 2),
    )
    home = [Tile(q, k, CAUSAL, heads) for q, k in ((head, head), (tail, head), (tail, tail))]
    square = Rectangle(StridedRange(0, 16), StridedRange(0, 16), True, False, heads)
    assert joined([r for tile in home for r in rectangles(tile)]) == [square]
    near, far = TokenRange(StridedRange(8, 8), StridedRange(0, 8)), TokenRange(StridedRange(48, 8), StridedRange(8, 8))
    remote = [Tile(tail, near, CAUSAL, heads), Tile(tail, far, CAUSAL, heads)]
    full = Rectangle(StridedRange(8, 8), StridedRange(0, 16), False, False, heads)
    assert joined([r for tile in remote for r in rectangles(tile)]) == [full]

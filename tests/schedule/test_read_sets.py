"""The rows that each rank reads, and unions of them, agree with brute force."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn.core.geometry import StridedRange
from ringattn.core.layout import make_layout
from ringattn.core.mask import make_mask
from ringattn.core.problem import Problem
from ringattn.core.tiling import meeting_pieces
from ringattn.planner.choose import choose_route
from ringattn.schedule.content import (
    HeadRows,
    ReadSets,
    contains,
    describe,
    merge_runs,
    piece_of,
    size,
    union,
    whole,
    without,
)
from tests.strategies import NOTABLE, Case, cases, covering, plain_cases, simple, spots, wire_order


@covering
def test_reads_of_single_readers(case: Case) -> None:
    needs = ReadSets(case.problem)
    for owner in range(case.ranks):
        for reader in range(case.ranks):
            assert spots(needs.read(owner, reader)) == case.reads(owner, reader)


@covering
def test_unions_of_farther_readers(case: Case) -> None:
    needs = ReadSets(case.problem)
    for owner in range(case.ranks):
        for distance in range(1, case.ranks + 1):
            assert spots(needs.union_of(owner, slice(distance, None))) == case.reads_beyond(owner, distance)


@given(cases(), st.data())
def test_unions_of_any_readers(case: Case, data: st.DataObject) -> None:
    needs, ranks = ReadSets(case.problem), range(case.ranks)
    for owner in ranks:
        peers = [rank for rank in ranks if rank != owner]
        readers = data.draw(st.lists(st.sampled_from(peers), unique=True) if peers else st.just([]))
        reads = [case.reads(owner, reader) for reader in readers]
        distances = (np.array(readers, np.int64) - owner) % case.ranks
        assert spots(needs.union_of(owner, distances)) == frozenset[tuple[int, int]]().union(*reads)
        assert needs.reach(owner, distances) == max((n for n, rows in enumerate(reads, 1) if rows), default=0)
        grown = all(near <= far for near, far in pairwise(reads))
        assert needs.grow(owner, np.array([0, *distances])) == needs.grow(owner, distances) == grown
        assert needs.owners_read_by(owner).tolist() == [peer for peer in peers if case.reads(peer, owner)]


@pytest.mark.parametrize("block", [1, 2, 5])
def test_reads_are_found_block_by_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringattn.schedule.content.BLOCK_PIECES", block)
    for case in NOTABLE:
        needs, ranks = ReadSets(case.problem), range(case.ranks)
        assert all(spots(needs.read(owner, reader)) == case.reads(owner, reader) for owner in ranks for reader in ranks)


@covering
def test_contents_are_canonical(case: Case) -> None:
    # Parts ascend, no range is empty, and no row occurs twice. Equal sets are equal values, unless dilation or the
    # stride of the queries cuts the keys into residue classes.
    needs = ReadSets(case.problem)
    branches = case.problem.mask.branches
    is_cut = any((meeting_pieces(case.problem, branch)[1].row_stride > 1).any() for branch in branches)
    for owner in range(case.ranks):
        contents = [needs.read(owner, reader) for reader in range(case.ranks)]
        contents += [needs.union_of(owner, slice(distance, None)) for distance in range(1, case.ranks)]
        for content in contents:
            assert [part.heads for part in content] == sorted({part.heads for part in content})
            for part in content:
                rows = [row for run in part.rows for row in run.members()]
                assert rows and all(run.count for run in part.rows) and len(set(rows)) == len(rows)
                if not is_cut:
                    assert part.dense and part.rows == merge_runs(part.rows)


def test_keys_of_another_sequence_are_read_by_the_stride_of_the_queries() -> None:
    layout, kv_layout = make_layout("striped", 5, 2), make_layout("contiguous", 13, 2)
    mask = make_mask(5, 13, causal=True, window=(2, 0))
    needs = ReadSets(Problem(layout, kv_layout, mask, 1, 4, 1, 8, 4, "bfloat16"))
    # Rank 0 has the queries 0, 2 and 4, and rank 1 has 1 and 3. Rank 0 owns all keys that they read.
    for reader, rows in enumerate((("0,2,4", "1,3"), ("1,3", "0,2"))):
        (part,) = needs.read(0, reader)
        assert sorted(row for run in part.rows for row in run.members()) == list(range(5 - reader))
        assert {",".join(map(str, run.members())) for run in part.rows} == set(rows)


def rows_sent(case: Case) -> tuple[int, int]:
    """Return the rows that are sent if blocks are relayed, and if they are sent directly, by brute force."""
    spread = [(owner, distance) for owner in range(case.ranks) for distance in range(1, case.ranks)]
    relayed = sum(len(case.reads_beyond(owner, distance)) for owner, distance in spread)
    return relayed, sum(len(case.reads(owner, (owner + distance) % case.ranks)) for owner, distance in spread)


@given(plain_cases())
def test_totals_are_exact_if_reads_have_no_gaps(case: Case) -> None:
    relayed, direct = rows_sent(case)
    totals = ReadSets(case.problem).totals
    assert totals[0] >= relayed and totals[1] >= direct
    *_, lo, hi = case.problem.mask.branches[0].rectangles.expanded.T
    if (hi - lo >= case.problem.q_layout.length).all():  # effectively one-sided: reads leave no gaps
        assert totals == (relayed, direct)


@pytest.mark.parametrize(
    ("case", "route"),
    [
        (simple("contiguous", 64, 4), "ring"),
        (simple("contiguous", 64, 4, causal=True), "ring"),
        (simple("zigzag", 64, 4, causal=True), "ring"),
        (simple("contiguous", 64, 4, window=(5, 0)), "ring"),
        # Relaying would carry the rows of the farthest reader past all other ranks.
        (simple("contiguous", 64, 4, window=(0, 20)), "direct"),
        (simple("zigzag", 64, 8, window=(3, 0)), "direct"),
        (simple("zigzag", 1, 1), "ring"),
    ],
)
def test_auto_takes_direct_if_it_saves_a_quarter(case: Case, route: str) -> None:
    assert choose_route(case.problem, "auto").name == route
    relayed, direct = rows_sent(case)
    assert (direct < 0.75 * relayed) == (route == "direct")


# --- contents --------------------------------------------------------------------------------------------------------

ONE = (
    HeadRows(StridedRange(0, 2), (StridedRange(0, 3), StridedRange(5, 2))),
    HeadRows(StridedRange(2, 1), (StridedRange(4, 1),)),
)


@pytest.mark.parametrize(
    ("outer", "inner", "offset"),
    [
        (ONE, ONE, 0),
        (whole(9, [StridedRange(0, 2)]), (HeadRows(StridedRange(0, 2), (StridedRange(3, 2),)),), 6),
        (
            whole(9, [StridedRange(0, 2)]),
            (HeadRows(StridedRange(0, 2), (StridedRange(0, 1), StridedRange(3, 2))),),
            None,
        ),
        # The outer content has the same gap, so the inner rows are adjacent on the wire.
        ((ONE[0],), (HeadRows(StridedRange(0, 2), (StridedRange(1, 2), StridedRange(5, 1))),), 2),
        ((ONE[0],), (HeadRows(StridedRange(0, 2), (StridedRange(1, 3),)),), None),
        # The second part of a content follows its first part on the wire.
        (ONE, (ONE[1],), 10),
        (ONE, (ONE[0],), 0),
        (ONE, (HeadRows(StridedRange(0, 2), (StridedRange(6, 1),)), ONE[1]), 8),
        (ONE, (HeadRows(StridedRange(0, 2), (StridedRange(5, 1),)), ONE[1]), None),
        (ONE, (HeadRows(StridedRange(2, 1), (StridedRange(5, 1),)),), None),
        (ONE, (HeadRows(StridedRange(3, 1), (StridedRange(4, 1),)),), None),
    ],
)
def test_piece_of(outer: tuple[HeadRows, ...], inner: tuple[HeadRows, ...], offset: int | None) -> None:
    assert piece_of(outer, inner) == offset
    if offset is not None:
        assert wire_order(outer)[offset : offset + size(inner)] == wire_order(inner)


@given(st.lists(st.builds(StridedRange, st.integers(0, 30), st.integers(0, 9), st.integers(1, 7)), max_size=6))
def test_a_union_holds_each_member_once(runs: list[StridedRange]) -> None:
    merged = merge_runs(runs)
    members = [member for run in merged for member in run.members()]
    assert sorted(members) == sorted({member for run in runs for member in run.members()})


RUNS = st.lists(
    st.builds(StridedRange, st.integers(0, 30), st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=5
)


@given(RUNS, RUNS)
def test_rows_are_located_where_they_are_packed(part_rows: list[StridedRange], queries: list[StridedRange]) -> None:
    part = HeadRows(StridedRange(0, 1), merge_runs(part_rows))
    packed = [row for run in part.rows for row in run.members()]
    for run, overlaps in zip(queries, part.locate(queries), strict=True):
        members, seen = list(run.members()), []
        for overlap in overlaps:
            rows = [members[index] for index in overlap.indices.members()]
            assert rows == [packed[row] for row in overlap.packed.members()]
            seen += rows
        assert sorted(seen) == sorted(set(members) & set(packed))


def test_contents_as_sets() -> None:
    second = (HeadRows(StridedRange(0, 2), (StridedRange(3, 2),)),)
    both = union((ONE, second))
    assert spots(both) == spots(ONE) | spots(second) and both[0].rows == (StridedRange(0, 7),)
    assert contains(both, ONE) and contains(both, second) and not contains(ONE, second) and not contains((), second)
    assert size(ONE) == len(spots(ONE)) == 11
    assert describe(ONE) == "heads 0..1 rows 0..2,5..6; heads 2 rows 4"
    assert describe(second) == "rows 3..4" and describe(()) == "nothing"
    assert whole(0, [StridedRange(0, 2)]) == ()


def test_offsets_count_packed_rows() -> None:
    assert ONE[0].offsets(np.array([0, 2, 5, 6])).tolist() == [0, 2, 3, 4]


def test_the_difference_of_two_contents() -> None:
    def part(*runs: tuple[int, int, int]) -> HeadRows:
        return HeadRows(StridedRange(0, 2), tuple(StridedRange(*run) for run in runs))

    assert without((part((0, 10, 1)),), (part((2, 3, 2)),)) == (part((0, 2, 1), (3, 2, 2), (7, 3, 1)),)
    assert without((part((0, 4, 1)),), (part((0, 4, 1)),)) == ()
    assert without((part((0, 4, 1)),), ()) == (part((0, 4, 1)),)

"""The block tables of the kernels agree with brute force.

A table has every pair of query and key once and no row in two blocks. It marks the right blocks as full, and visits no
block without a pair.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn.core.geometry import CAUSAL, FULL, Band, StridedRange, Tile, TokenRange
from ringattn.core.tiling import tiles_of
from ringattn.engine.base import Softmax
from ringattn.engine.blocks import LIMIT, Blocks, key_blocks, query_blocks, set_flags
from ringattn.errors import UnsupportedError
from ringattn.kernels.launch import FIRST, LAST, BlockColumn
from tests.contract.engine_scenarios import SCENARIOS, random_scenario, strip
from tests.strategies import Case, covering

SIDES = ("query", "key")
SIZES = st.sampled_from([(1, 1), (2, 3), (3, 2), (4, 16), (16, 4)])

Pairs = Counter[tuple[int, int, int]]
"""How often each pair (query head, query row, key row) is computed."""


def table(tiles: Sequence[Tile], side: str, group: int, own_rows: int, other_rows: int) -> Blocks:
    if side == "query":
        return query_blocks(tiles, own_rows, other_rows)
    return key_blocks(tiles, group, own_rows, other_rows)


def pairs_of_tiles(tiles: Sequence[Tile]) -> Pairs:
    """Count the pairs in the tiles, by the definition of a tile."""
    pairs: Pairs = Counter()
    for tile in tiles:
        for q, q_row in zip(tile.q.positions.members(), tile.q.rows.members(), strict=True):
            for k, k_row in zip(tile.k.positions.members(), tile.k.rows.members(), strict=True):
                if tile.band.lo <= q - k <= tile.band.hi:
                    pairs.update((head, q_row, k_row) for head in tile.heads.members())
    return pairs


def pairs_of_table(blocks: Blocks, side: str, group: int, other_rows: int) -> Pairs:
    """Count the pairs that a kernel computes with this table. Assert what the table guarantees about rows and blocks.

    For each entry, a kernel visits a range of blocks, and masks those that are not marked full.
    """
    pairs: Pairs = Counter()
    owned: set[tuple[int, int]] = set()
    for row0, row_stride, rows, head0, heads, first, end, _ in blocks.blocks.tolist():
        own_row_numbers = [row0 + i * row_stride for i in range(rows)]
        owned_here = {(head, row) for head in range(head0, head0 + heads) for row in own_row_numbers}
        assert len(owned_here) == rows * heads and not owned_here & owned
        owned |= owned_here
        assert first < end and heads <= blocks.slots
        for entry in blocks.entries[first:end].tolist():
            other0, other_stride, count, own_step, other_step, lo, hi, *visits, head_off, served = entry[:13]
            start, full_start, full_end, stop = visits
            assert 0 <= start <= full_start <= full_end <= stop and start < stop
            for j in range(start * other_rows, min(count, stop * other_rows)):
                seen = [i for i in range(rows) if lo <= i * own_step - j * other_step <= hi]
                if full_start <= j // other_rows < full_end:
                    assert len(seen) == rows and (j // other_rows + 1) * other_rows <= count
                for head in range(head0, head0 + heads):
                    for i in seen:
                        pair = (own_row_numbers[i], other0 + j * other_stride)
                        if side == "query":
                            pairs[head, *pair] += 1
                        else:
                            firsts = head * group + head_off
                            pairs.update((q_head, *pair[::-1]) for q_head in range(firsts, firsts + served))
    return pairs


def check(tiles: Sequence[Tile], group: int, sizes: tuple[int, int]) -> None:
    expected = pairs_of_tiles(tiles)
    for side in SIDES:
        assert pairs_of_table(table(tiles, side, group, *sizes), side, group, sizes[1]) == expected, side


@covering
def test_every_pair_of_a_plan_once(case: Case) -> None:
    """The tables of a rank's tiles have every pair once, for zigzags, documents, windows and overlapping branches."""
    problem = case.problem
    rank = case.reference.size % problem.world_size
    for key, tiles in tiles_of(problem, rank).items():
        check(tuple(tiles), problem.group, (3, 4) if key[0] % 2 else (16, 2))


@given(st.integers(0, 400), SIZES)
def test_every_pair_of_random_tiles_once(seed: int, sizes: tuple[int, int]) -> None:
    """The tables of random tiles have every pair once.

    The tiles have strided rows and positions, may share rows, and may be for only some of the heads.
    """
    scenario = random_scenario(seed)
    for step in scenario.steps:
        check(step.tiles, scenario.group, sizes)


@given(st.integers(0, 400), SIZES)
def test_places_of_random_tiles(seed: int, sizes: tuple[int, int]) -> None:
    """The tables for ALiBi and dropout give the right distances of pairs, positions of rows, and first head."""
    scenario = random_scenario(seed, places=True)
    softmax = Softmax(1.0, scenario.group, alibi_slopes=(1.0,), starts=scenario.starts, dropout_p=0.5)
    for tiles in (step.tiles for step in scenario.steps):
        for side in SIDES:
            if side == "query":
                blocks = query_blocks(tiles[:1], *sizes, softmax=softmax)
            else:
                blocks = key_blocks(tiles[:1], scenario.group, *sizes, softmax=softmax)
            sides = [tiles[0].q, tiles[0].k][:: 1 if side == "query" else -1]
            position_of_row = [dict(zip(x.rows.members(), x.positions.members(), strict=True)) for x in sides]
            assert blocks.places is not None and blocks.positions is not None
            for row0, row_stride, rows, *_, first, end, _ in blocks.blocks.tolist():
                tables = (table[first:end].tolist() for table in (blocks.entries, blocks.places, blocks.positions))
                for entry, (ahead, own_step, other_step, head), (*position, of_call) in zip(*tables, strict=True):
                    shift = softmax.shift(0) * (1 if side == "query" else -1)
                    assert head == of_call == scenario.first_head
                    assert all(
                        position_of_row[0][row0 + i * row_stride] == position[0] + i * position[1] for i in range(rows)
                    )
                    assert all(
                        position_of_row[1][entry[0] + j * entry[1]] == position[2] + j * position[3]
                        for j in range(entry[2])
                    )
                    for i, j in product(range(rows), range(entry[2])):
                        apart = position_of_row[0][row0 + i * row_stride] - position_of_row[1][entry[0] + j * entry[1]]
                        assert ahead + i * own_step - j * other_step == apart - shift


def test_a_distance_beyond_the_kernels_is_refused() -> None:
    far = [Tile(strip(LIMIT, 8), strip(0, 8), FULL, StridedRange(0, 1))]
    assert query_blocks(far, 16, 16).places is None
    with pytest.raises(UnsupportedError, match=r"are 1,073,741,824 apart.*ALiBi.*; use engine='plain'"):
        query_blocks(far, 16, 16, softmax=Softmax(1.0, alibi_slopes=(1.0,)))


def test_positions_keep_their_low_bits() -> None:
    """For dropout a table has the low 32 bits of positions, which are all that the random counter contains.

    So dropout allows any distance, while ALiBi does not.
    """
    far = [Tile(strip((1 << 32) - 5, 40, 2), strip(3, 8), FULL, StridedRange(0, 1))]
    blocks = query_blocks(far, 16, 16, softmax=Softmax(1.0, dropout_p=0.5))
    assert blocks.places is None and blocks.positions is not None
    assert sorted(blocks.positions.tolist()) == [[start, 2, 3, 1, 0] for start in (-5, 27, 59)]


def causal(start: int, count: int, keys: int) -> Tile:
    return Tile(strip(start, count), strip(0, keys), CAUSAL, StridedRange(0, 2))


def test_only_blocks_with_a_pair_are_visited_and_only_the_diagonal_is_masked() -> None:
    table = query_blocks([causal(0, 256, 256)], 64, 32)
    visits = {int(row[0]): tuple(table.entries[row[5], 7:11]) for row in table.blocks}
    assert visits == {0: (0, 0, 0, 2), 64: (0, 0, 2, 4), 128: (0, 0, 4, 6), 192: (0, 0, 6, 8)}


def test_blocks_before_a_window_are_skipped() -> None:
    table = query_blocks([Tile(strip(0, 256), strip(0, 256), Band(0, 70), StridedRange(0, 1))], 64, 32)
    visits = {int(row[0]): tuple(table.entries[row[5], 7:11]) for row in table.blocks}
    assert visits == {0: (0, 0, 0, 2), 64: (0, 2, 2, 4), 128: (1, 4, 4, 6), 192: (3, 6, 6, 8)}


def test_longest_blocks_come_first() -> None:
    table = query_blocks([causal(0, 256, 256)], 64, 32)
    assert table.blocks[:, 0].tolist() == [192, 128, 64, 0]


def test_one_table_holds_both_halves_of_a_zigzag() -> None:
    """Both tiles of a row of a zigzag's second half are in the same block, as two entries."""
    tiles = [causal(0, 32, 32), Tile(strip(96, 32, row=32), strip(0, 64), CAUSAL, StridedRange(0, 2))]
    tiles.append(Tile(strip(96, 32, row=32), strip(96, 32, row=64), CAUSAL, StridedRange(0, 2)))
    table = query_blocks(tiles, 32, 32)
    assert [(int(row[0]), int(row[6] - row[5])) for row in table.blocks] == [(32, 2), (0, 1)]


def test_tiles_without_a_pair_make_no_block() -> None:
    blind = Tile(strip(0, 20), strip(100, 20), CAUSAL, StridedRange(0, 2))
    empty = Tile(strip(0, 0), strip(0, 20), FULL, StridedRange(0, 2))
    for tiles in ([], [blind], [empty], [blind, empty]):
        for side in SIDES:
            blocks = table(tiles, side, 1, 16, 16)
            assert blocks.blocks.shape == (0, 8) and blocks.entries.shape == (0, 16) and blocks.slots == 0


def test_positions_beyond_int32_stay_exact() -> None:
    """The table of a striped layout on 1,000 ranks is the same at position 2^40, because it contains only distances."""
    far, stride = 1 << 40, 1000
    near, moved = (
        Tile(strip(start + 7, 50, stride), strip(start + 3, 50, stride), CAUSAL, StridedRange(0, 1))
        for start in (0, far)
    )
    for side in SIDES:
        near_table, moved_table = table([near], side, 1, 16, 16), table([moved], side, 1, 16, 16)
        assert np.array_equal(near_table.blocks, moved_table.blocks) and np.array_equal(
            near_table.entries, moved_table.entries
        )


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("q", "k", "band"),
    [
        (TokenRange(StridedRange(0, 2, 1), StridedRange(0, 2, LIMIT)), strip(0, 2), FULL),
        (strip(0, 2), TokenRange(StridedRange(0, 2, 1), StridedRange(0, 2, LIMIT)), FULL),
        (strip(0, 2, LIMIT - 1), strip(0, 2, LIMIT), FULL),
        (strip(0, 16, LIMIT >> 3), strip(0, 3), Band(0, 5)),
        (strip(0, 3), strip(0, 16, LIMIT >> 3), Band(0, 5)),
    ],
    ids=["q-rows", "k-rows", "steps", "q-reach", "k-reach"],
)
def test_rows_and_distances_beyond_int32_are_refused(side: str, q: TokenRange, k: TokenRange, band: Band) -> None:
    tile = Tile(q, k, band, StridedRange(0, 1))
    with pytest.raises(UnsupportedError, match=r"int32.*engine='plain'"):
        table([tile], side, 1, 16, 16)


# --- the flags of a pass's blocks against brute force: the first and the last launch of each row, or no flags ---------


def tables(steps: Sequence[Sequence[Tile]], own_rows: int) -> list[Blocks]:
    return [query_blocks(tiles, own_rows, 16) for tiles in steps]


def rows_of(block: list[int]) -> list[tuple[int, int]]:
    """Return the (head, row) pairs of a block."""
    row, stride, rows, head, heads = block[:5]
    return [(h, row + i * stride) for h in range(head, head + heads) for i in range(rows)]


def expected(steps: list[Blocks], rows: int, heads: int) -> list[list[int]] | None:
    """Return the flags that each block must have, by brute force.

    Return None if a row is never updated, or if the rows of a block would need different flags.
    """
    updates = defaultdict(list)
    for number, step in enumerate(steps):
        for block in step.blocks.tolist():
            for head_row in rows_of(block):
                updates[head_row].append(number)
    if len(updates) < rows * heads or not rows:
        return None
    flags: list[list[int]] = []
    for number, step in enumerate(steps):
        flags.append([])
        for block in step.blocks.tolist():
            of_rows = {FIRST * (updates[x][0] == number) + LAST * (updates[x][-1] == number) for x in rows_of(block)}
            if len(of_rows) > 1:
                return None
            flags[-1] += of_rows
    return flags


def check_flags(steps: Sequence[Sequence[Tile]], rows: int, heads: int, own_rows: int) -> bool:
    blocks = tables(steps, own_rows)
    expected_flags = expected(blocks, rows, heads)
    assert set_flags(blocks, rows, heads) == (expected_flags is not None)
    flags = [step.blocks[:, BlockColumn.FLAGS].tolist() for step in blocks]
    assert flags == (expected_flags or [[0] * len(step.blocks) for step in blocks])
    return expected_flags is not None


@pytest.mark.parametrize("name", SCENARIOS)
def test_flags_of_scenarios(name: str) -> None:
    scenario = SCENARIOS[name]
    holds = check_flags([step.tiles for step in scenario.steps], scenario.q_rows, scenario.heads, 16)
    assert holds == name.startswith("whole-")


@pytest.mark.parametrize("seed", range(60))
def test_flags_of_random_passes(seed: int) -> None:
    """`set_flags` agrees with brute force on random passes.

    A tile with every row is added to the random tiles, so that about half of the passes can have flags.
    """
    scenario, rng = random_scenario(seed), Random(seed)
    rows = StridedRange(0, scenario.q_rows)
    every = Tile(strip(0, rows.count), strip(0, 20), FULL, StridedRange(0, scenario.heads))
    steps: list[Sequence[Tile]] = [step.tiles for step in scenario.steps]
    for index in {0, rng.randint(0, len(steps))}:
        steps.insert(index, (every,))
    check_flags(steps, rows.count, scenario.heads, rng.choice((1, 4, 16)))


def test_no_flags_if_a_row_or_a_head_is_never_updated() -> None:
    assert check_flags([SCENARIOS["whole-pass"].steps[0].tiles], 30, 4, 16)
    assert not check_flags([SCENARIOS["whole-pass"].steps[0].tiles], 31, 4, 16)
    assert not check_flags([SCENARIOS["whole-pass"].steps[0].tiles], 30, 5, 16)
    assert not check_flags([()], 0, 4, 16)

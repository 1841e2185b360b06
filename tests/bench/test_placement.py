"""The benchmark of placements: a published length distribution meets its bars, and the lower bound is one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest

from ringattn.bench import placement
from ringattn.core.documents import CHOICES, Piece, causal_pairs, load_of, place, placed
from ringattn.core.documents_at_once import EVEN, placed_at_once

TOKENS = 131072


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("longest", [0, TOKENS // 4])
def test_pairs_are_balanced_for_documents_of_a_published_distribution(ranks: int, longest: int) -> None:
    for seed in range(6):
        cuts = placement.drawn(TOKENS, seed, longest)
        pairs = load_of(cuts, placed(cuts, ranks)).pairs
        assert max(pairs) * ranks <= 1.05 * sum(pairs), f"seed {seed}"


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("seed", [0, 2])
def test_placed_at_once_pairs_are_even_and_rows_few(ranks: int, seed: int) -> None:
    """Beside what any placement so even sends, and the placement for steps."""
    cuts = placement.drawn(TOKENS, seed)
    load, steps = (load_of(cuts, place(cuts, ranks)) for place in (placed_at_once, placed))
    assert max(load.pairs) * ranks <= EVEN * sum(load.pairs)
    bound = placement.fewest_rows(cuts, ranks, max(load.pairs))
    assert bound <= sum(load.sent) <= (1.001 if seed == 2 else 1.1) * bound
    assert sum(load.sent) < sum(steps.sent)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", [2, 4])
def test_cut_at_its_end_one_document_that_outweighs_all_others_sends_as_few_rows_as_can_be(
    ranks: int, seed: int
) -> None:
    cuts = placement.drawn(TOKENS, seed)
    assert max(stop - start for start, stop in pairwise(cuts)) > TOKENS / 2
    load = load_of(cuts, place(cuts, ranks, CHOICES[1]))
    bound = placement.fewest_rows(cuts, ranks, max(load.pairs))
    assert bound <= sum(load.sent) <= 1.01 * bound
    fastest = load_of(cuts, placed(cuts, ranks))
    assert fastest.in_steps < load.in_steps and sum(fastest.sent) <= 1.15 * bound, "zigzag costs a few rows more"


def all_placements(tokens: int, ranks: int) -> Iterator[tuple[tuple[Piece, ...], ...]]:
    """Of single tokens, in equal shares; the first ranks have the extra ones."""

    def dealt(left: tuple[int, ...], ranks: int) -> Iterator[tuple[tuple[Piece, ...], ...]]:
        if not ranks:
            yield ()
        for own in combinations(left, -(-len(left) // ranks)) if ranks else ():
            for rest in dealt(tuple(at for at in left if at not in own), ranks - 1):
                yield tuple((at, at + 1) for at in own), *rest

    return dealt(tuple(range(tokens)), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cuts", [(0, 8), (0, 6, 8), (0, 5, 9), (0, 1, 2, 3, 9), (0, 3, 6, 9), (0, 8, 9), (0, 4, 8, 9)])
def test_no_placement_sends_fewer_rows_than_the_bound(cuts: tuple[int, ...], ranks: int) -> None:
    fewest: dict[int, int] = {}  # by the pairs of the fullest rank
    for shards in all_placements(cuts[-1], ranks):
        load = load_of(cuts, shards)
        most = max(load.pairs)
        fewest[most] = min(fewest.get(most, sum(load.sent)), sum(load.sent))
    for most in fewest:
        reached = min(rows for pairs, rows in fewest.items() if pairs <= most)
        assert placement.fewest_rows(cuts, ranks, most) <= reached


def test_the_bound_is_nearly_what_one_document_alone_sends() -> None:
    """Zigzag: 8 ranks of 16 tokens, the next one of which reads 8 tokens less far than the one before."""
    sent = sum(range(72, 128, 8))
    assert 0.995 * sent < placement.fewest_rows((0, 128), 8, causal_pairs(0, 128) / 8) <= sent


@pytest.mark.parametrize("rows", [0, 3, 8])
def test_the_filler_of_the_bound_has_no_more_pairs_than_any(rows: int) -> None:
    """Of a free document any tokens; of two others all, none, or for a row each their first."""
    filler, fewest = placement._Filler([12, 12, 8], 1), dict.fromkeys(range(33), 1 << 30)
    for own, *parts in product(range(13), range(13), range(9)):
        if sum(part for part, length in zip(parts, (12, 8), strict=True) if part < length) <= rows:
            count = own + sum(parts)
            fewest[count] = min(fewest[count], sum(causal_pairs(0, part) for part in (own, *parts)))
    for count, pairs in fewest.items():
        assert filler.pairs(count, 12, 12, rows) <= pairs
    assert filler.pairs(32, 12, 12, rows) > 0.8 * fewest[32]


@pytest.mark.parametrize("shape", [lambda r: 900 - 2 * r, lambda r: 900 - r // 2, lambda r: 40000 // (r + 30)])
def test_the_least_sum_is_found_from_below(shape: Callable[[int], int]) -> None:
    def cut(rows: int) -> int:
        return max(0, shape(rows))

    least = min(rows + cut(rows) for rows in range(2000))
    assert 0.99 * least <= placement._least_sum(cut, cut(0)) <= least


def test_direct_sends_what_is_read_and_nothing_more() -> None:
    options = placement.PlacementOptions(heads=2, kv_heads=1, head_dim=8, schedule="direct")
    cuts = placement.drawn(4096, 3)
    found = placement.placed_by(cuts, "documents", 4, options)
    assert found.sent == found.read == sum(load_of(cuts, placed(cuts, 4)).sent) > 0


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokens=2000", "ranks=2", "seeds=1", "longest_tokens=0", "heads=2", "kv_heads=1", "head_dim=8",
             f"results={tmp_path}"]  # fmt: skip
    data = placement.main(words)
    assert json.loads((tmp_path / "placement.json").read_text())["0 2"] == data["0 2"]
    assert set(data["0 2"]) == {"bounds", *placement.LAYOUTS, placement.AT_ONCE}
    assert 0 <= data["0 2 uneven"]["bounds"][0] <= data["0 2 uneven"]["rows"][0]
    assert "lower bound" in capsys.readouterr().out

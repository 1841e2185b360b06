"""The benchmark of placements: a published length distribution meets its bars."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ringattn.bench import placement
from ringattn.core.documents import CHOICES, EVEN, load_of, place, placed, placed_at_once

TOKENS = 131072


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("longest", [0, TOKENS // 4])
def test_pairs_are_balanced_for_documents_of_a_published_distribution(ranks: int, longest: int) -> None:
    for seed in range(6):
        cuts = placement.drawn(TOKENS, seed, longest)
        pairs = load_of(cuts, placed(cuts, ranks)).pairs
        assert max(pairs) * ranks <= 1.05 * sum(pairs), f"seed {seed}"


@pytest.mark.parametrize(("ranks", "seed", "fewest"), [(2, 0, 10_905), (2, 2, 90_974), (8, 0, 67_159), (8, 2, 634_840)])
def test_placed_at_once_pairs_are_even_and_rows_few(ranks: int, seed: int, fewest: int) -> None:
    """`fewest`: a lower bound on the rows that any placement as even as this sends."""
    cuts = placement.drawn(TOKENS, seed)
    load, steps = (load_of(cuts, place(cuts, ranks)) for place in (placed_at_once, placed))
    assert max(load.pairs) * ranks <= EVEN * sum(load.pairs)
    assert fewest <= sum(load.sent) <= (1.001 if seed == 2 else 1.1) * fewest
    assert sum(load.sent) < sum(steps.sent)


@pytest.mark.parametrize(("seed", "even", "most"), [(3, 1.05, 22_400), (5, 1.05, 173_800), (0, EVEN, 68_600)])
def test_placed_at_once_sends_no_more_rows_than_a_search_has_found(seed: int, even: float, most: int) -> None:
    """To fill ranks one after another, as the search before did, sent 24,259, 181,736 and 73,689."""
    cuts = placement.drawn(TOKENS, seed)
    load = load_of(cuts, placed_at_once(cuts, 8, even))
    assert max(load.pairs) * 8 <= even * sum(load.pairs)
    assert sum(load.sent) <= most


@pytest.mark.parametrize(
    ("ranks", "seed", "fewest"),
    [(2, 2, 91_266), (2, 4, 64_671), (4, 2, 273_793), (4, 4, 191_968), (8, 2, 638_836), (8, 4, 446_014)],
)
def test_cut_at_its_end_one_document_that_outweighs_all_others_sends_as_few_rows_as_can_be(
    ranks: int, seed: int, fewest: int
) -> None:
    cuts = placement.drawn(TOKENS, seed)
    assert max(stop - start for start, stop in pairwise(cuts)) > TOKENS / 2
    load = load_of(cuts, place(cuts, ranks, CHOICES[1]))
    assert fewest <= sum(load.sent) <= 1.01 * fewest
    fastest = load_of(cuts, placed(cuts, ranks))
    assert fastest.in_steps < load.in_steps and sum(fastest.sent) <= 1.15 * fewest, "zigzag costs a few rows more"


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
    assert set(data["0 2"]) == {*placement.LAYOUTS, placement.AT_ONCE}
    assert "rows sent" in capsys.readouterr().out

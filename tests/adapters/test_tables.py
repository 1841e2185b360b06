"""Tables of pairs that are lowered to slices, compared with the tables of these slices by an independent reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringattn import UnsupportedError, masks
from ringattn.adapters import tables
from ringattn.adapters.tables import connects, slices_of
from ringattn.core.rectangles import Rectangle
from tests.oracle import allowed_mask
from tests.strategies import cuts, mask_options, slice_sets, trees

LENGTH = 19


def drawn_table(draw: st.DrawFn) -> Tensor:
    """Draw the table of slices, a tree, options of attention within documents, a mixture of two tables, or noise."""
    kind = draw(st.sampled_from(["slices", "tree", "options", "both", "noise"]))
    if kind == "slices":
        return allowed_mask(LENGTH, LENGTH, mask=draw(slice_sets(LENGTH, LENGTH)))
    if kind == "tree":
        window = draw(st.one_of(st.none(), st.tuples(st.integers(0, 9), st.just(0))))
        return allowed_mask(LENGTH, LENGTH, causal=True, window=window, mask=draw(trees(LENGTH)))
    if kind == "options":
        bounds = draw(cuts(LENGTH))
        options = draw(mask_options(len(bounds) - 1, bounds))
        return allowed_mask(LENGTH, LENGTH, cu_seqlens=list(bounds), **options)
    if kind == "both":
        return drawn_table(draw) ^ drawn_table(draw)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.rand(LENGTH, LENGTH, generator=generator) < draw(st.floats(0, 1))


TABLES, SIDES = st.composite(drawn_table)(), st.sampled_from([LENGTH, LENGTH, 11, 1, 0])


@given(TABLES, SIDES, SIDES, st.sampled_from([1, 50, 1 << 24]))
def test_the_slices_are_the_table(table: Tensor, queries: int, keys: int, block: int) -> None:
    """The reference reads the text of the mask, so every slice is of a kind that the text has."""
    table = table[:queries, :keys]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BLOCK_PAIRS", block)
        mask = slices_of(table)
    assert torch.equal(allowed_mask(*table.shape, mask=mask), table)
    assert masks.from_text(mask.text) == mask


@given(TABLES, cuts(LENGTH))
def test_documents_are_connected_if_a_pair_is_in_two(table: Tensor, bounds: tuple[int, ...]) -> None:
    within = torch.zeros_like(table)
    for start, stop in pairwise(bounds):
        within[start:stop, start:stop] = True
    assert connects(slices_of(table), bounds) == bool((table & ~within).any())


def test_known_masks_have_few_slices() -> None:
    causal = torch.ones(600, 600, dtype=torch.bool).tril()
    star = masks.tree([-1, *[0] * 64], [88, *[8] * 64])
    documents = allowed_mask(600, 600, causal=True, cu_seqlens=[0, 50, 300, 600])
    tables_by_count = {
        0: torch.zeros_like(causal), 1: causal, 2: causal & ~causal.tril(-100), 3: documents,
        65: allowed_mask(600, 600, mask=star),
    }  # fmt: skip
    assert {count: len(slices_of(table).rectangles) for count, table in tables_by_count.items()} == {
        count: count for count in tables_by_count
    }


def test_noise_and_large_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.rand(512, 512, generator=torch.Generator().manual_seed(0)) < 0.5
    with pytest.raises(UnsupportedError, match="needs more than 4,096 slices"):
        slices_of(noise)
    # A staircase with one more key for every second query is one chain of runs, and needs a slice for each step.
    stairs = torch.arange(64)[:, None] // 2 >= torch.arange(64)
    assert len(slices_of(stairs).rectangles) == 32
    monkeypatch.setattr(tables, "MOST_SLICES", 31)
    with pytest.raises(UnsupportedError, match="needs 32 slices, the limit is 31"):
        slices_of(stairs)
    monkeypatch.setattr(tables, "MOST_RUNS", 63)
    with pytest.raises(UnsupportedError, match="more than 63 runs of keys"):
        slices_of(stairs)
    monkeypatch.setattr(tables, "MOST_PAIRS", 64 * 64 - 1)
    with pytest.raises(UnsupportedError, match="64 queries and 64 keys has more than 4,095 pairs"):
        slices_of(stairs)


@pytest.mark.parametrize("change", [{"lo": 1}, {"k": 1}, {"q_stop": 63}])
def test_slices_that_differ_from_the_table_are_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, int]
) -> None:  # fmt: skip
    right = tables._slice
    monkeypatch.setattr(tables, "_slice", lambda *arguments: Rectangle(**right(*arguments)._asdict() | change))
    with pytest.raises(UnsupportedError, match="differ from its table in queries 0 to 63"):
        slices_of(torch.ones(64, 64, dtype=torch.bool).tril())

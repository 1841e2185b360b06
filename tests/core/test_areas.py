"""Areas and reads of masks equal those of a dense mask; placements of trees and slices are whole and even."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from ringattn import masks
from ringattn.bench.placement import TREES, draw_tree
from ringattn.core.areas import Shards, areas_of, fewest_rows
from ringattn.core.geometry import Band
from ringattn.core.layout import causal_documents, make_layout
from ringattn.core.mask import Mask, make_mask
from ringattn.core.placement import placed, placed_at_once


def draw_mask(draw: Random, length: int) -> Mask:
    """Draw a mask over `length` tokens: a tree, slices, documents, a window, chunks, or masks of two heads."""
    edge = draw.randrange(1, length)
    bounds = sorted(draw.sample(range(length + 1), 4))
    slices = masks.slices(
        [(0, edge), (edge, length), (edge, length)],
        [(bounds[0], bounds[1]), (bounds[0], bounds[1]), (bounds[2], bounds[3])],
        [draw.choice(["full", "causal", "causal_from_start", "inverse_causal", "bi_causal"]) for _ in range(3)],
    )
    tree = draw_tree(draw, draw.randint(1, 12), length, draw.choice(TREES))
    documents = (0, *bounds, length)
    return draw.choice([
        lambda: make_mask(length, length, mask=tree),
        lambda: make_mask(length, length, mask=slices),
        lambda: make_mask(length, length, causal=True, documents=documents, kv_documents=documents),
        lambda: make_mask(length, length, window=(draw.randrange(length), draw.choice([None, 0, 3]))),
        lambda: make_mask(length, length, causal=draw.random() < 0.5, mask=masks.chunked(draw.randint(3, 50))),
        lambda: make_mask(length, length, mask=masks.by_head([(2, tree), (1, slices)]), q_heads=3),
    ])()  # fmt: skip


def dense(mask: Mask, length: int) -> np.ndarray:
    """Return the number of heads in which each query attends to each key."""
    allowed = np.zeros((length, length), int)
    for branch in mask.branches:
        for q, q_stop, k, k_stop, lo, hi in branch.rectangles.expanded.tolist():
            queries, keys = np.arange(q, q_stop)[:, None], np.arange(k, k_stop)
            inside = [[Band(lo, hi).lo <= q - k <= Band(lo, hi).hi for k in keys] for q in queries[:, 0]]
            allowed[q:q_stop, k:k_stop] += np.array(inside) * (branch.heads.count if branch.heads else 1)
    return allowed


def owners_of(shards: Shards, length: int) -> np.ndarray:
    owners = np.full(length, -1)
    for rank, shard in enumerate(shards):
        for start, stop in shard:
            assert (owners[start:stop] == -1).all()
            owners[start:stop] = rank
    assert (owners >= 0).all()
    return owners


@pytest.mark.parametrize("seed", range(60))
def test_loads_steps_and_bounds_equal_those_of_a_dense_mask(seed: int) -> None:
    draw = Random(seed)
    length, ranks = draw.choice([13, 40, 97]), draw.choice([1, 2, 3, 5])
    mask = draw_mask(draw, length)
    allowed = dense(mask, length)
    for shards in (placed(mask, length, ranks), placed_at_once(mask, length, ranks, fills=50 * ranks)):
        areas, owners = areas_of(mask, length), owners_of(shards, length)
        load, counts = areas.load(shards), np.bincount(owners, minlength=ranks)
        assert tuple(counts) == make_layout("contiguous", length, ranks).counts
        pairs = np.array([
            [allowed[owners == reader][:, owners == owner].sum() for owner in range(ranks)] for reader in range(ranks)
        ])  # fmt: skip
        rows = np.array([
            [(allowed[owners == reader][:, owners == owner] > 0).any(0).sum() for owner in range(ranks)]
            for reader in range(ranks)
        ])  # fmt: skip
        np.fill_diagonal(rows, 0)
        assert load.pairs == tuple(pairs.sum(1)) and load.received == tuple(rows.sum(1))
        assert load.sent == tuple(rows.sum(0))
        steps = [[pairs[rank, (rank - step) % ranks] for rank in range(ranks)] for step in range(ranks)]
        assert areas.in_steps(shards) == sum(map(max, steps))
        even = max(load.pairs) * ranks / max(1, sum(load.pairs))
        assert fewest_rows(mask, length, ranks, even) <= sum(load.sent)


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_placed_trees_are_even(shape: str, ranks: int) -> None:
    draw = Random(ranks)
    for nodes in (3, 20, 64):
        mask = make_mask(16384, 16384, mask=draw_tree(draw, nodes, 16384, shape))
        areas = areas_of(mask, 16384)
        for shards in (placed(mask, 16384, ranks), placed_at_once(mask, 16384, ranks, fills=100 * ranks)):
            pairs = areas.load(shards).pairs
            assert max(pairs) * ranks <= 1.05 * sum(pairs)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zigzag_sends_the_fewest_rows_that_even_ranks_can_send_for_one_causal_sequence(ranks: int) -> None:
    length = 96 * ranks
    mask, layout = causal_documents((0, length)), make_layout("zigzag", length, ranks)
    shards = tuple(tuple((run.start, run.stop) for run in shard) for shard in layout.shards)
    load = areas_of(mask, length).load(shards)
    assert len(set(load.pairs)) == 1
    assert fewest_rows(mask, length, ranks, 1.0) == sum(load.sent)
    assert fewest_rows(mask, length, ranks, 1.3) < 0.95 * sum(load.sent)


def test_rows_of_many_answers_to_a_long_prompt_are_near_the_bound() -> None:
    """64 answers of 1,024 tokens to a prompt of 32,768 on 8 ranks: zigzag has a busiest rank of 1.204 of the mean."""
    length = 98304
    mask = make_mask(length, length, mask=masks.tree([-1] + [0] * 64, [32768] + [1024] * 64))
    load = areas_of(mask, length).load(placed_at_once(mask, length, 8))
    assert max(load.pairs) * 8 <= 1.005 * sum(load.pairs)
    assert 1 <= sum(load.sent) / fewest_rows(mask, length, 8, 1.005) <= 1.04


@pytest.mark.parametrize("shape", ["documents", *TREES])
def test_a_thousand_ranks_are_even(shape: str) -> None:
    draw, length = Random(0), 1 << 20
    documents = (0, *sorted(draw.sample(range(1, length), 4095)), length)
    tree = draw_tree(draw, 64, length, shape)
    mask = causal_documents(documents) if shape == "documents" else make_mask(length, length, mask=tree)
    for place in (placed, placed_at_once):
        load = areas_of(mask, length).load(place(mask, length, 1024))
        assert max(load.pairs) * 1024 <= 1.05 * sum(load.pairs)

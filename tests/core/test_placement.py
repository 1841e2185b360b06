"""Placements of documents on ranks have each token once, equal counts, balanced pairs, and the expected costs."""

from __future__ import annotations

from itertools import accumulate, pairwise
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import masks
from ringattn.core.areas import (
    ACROSS,
    Areas,
    AreasOfMask,
    AreasOfPart,
    Load,
    Piece,
    Shards,
    areas_of,
    causal_pairs,
    fewest_rows,
)
from ringattn.core.filling import Choice, place
from ringattn.core.layout import causal_documents, make_layout
from ringattn.core.mask import Mask, make_mask
from ringattn.core.owners import Owners, Search
from ringattn.core.placement import (
    CHOICES,
    EVEN,
    FEW_ROWS,
    STARTING_CHOICES,
    _nodes_that_share_much,
    _spread,
    placed,
    placed_at_once,
    unevenness,
)
from ringattn.core.problem import Problem
from ringattn.core.tiling import tiles_of
from ringattn.schedule.content import read_sets_of
from tests.strategies import LENGTHS, WORLD_SIZES, cuts

ranks_of = st.sampled_from(WORLD_SIZES)


@st.composite
def documents(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw the bounds of few or many documents. Some are empty, have a single token, or exceed a rank's share."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 13, 40, 100]), min_size=1, max_size=30))
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return tuple(ends)


def areas(bounds: tuple[int, ...]) -> Areas:
    return areas_of(causal_documents(bounds), bounds[-1])


def load_of(bounds: tuple[int, ...], shards: Shards) -> Load:
    return areas(bounds).load(shards)


def in_steps(bounds: tuple[int, ...], ranks: int, shards: Shards | None = None) -> int:
    steps = areas(bounds).in_steps(in_turn(bounds, ranks) if shards is None else shards)
    assert steps is not None
    return steps


def in_turn(bounds: tuple[int, ...], ranks: int) -> Shards:
    """Return the placement for schedules in steps."""
    return placed(causal_documents(bounds), bounds[-1], ranks)


def at_once(bounds: tuple[int, ...], ranks: int, even: float = EVEN, fills: int = 20000) -> Shards:
    return placed_at_once(causal_documents(bounds), bounds[-1], ranks, even=even, fills=fills)


def problem_of(bounds: tuple[int, ...], ranks: int, layout: str = "documents") -> Problem:
    laid = make_layout(layout, bounds[-1], ranks, bounds)
    mask = make_mask(bounds[-1], bounds[-1], causal=True, documents=bounds, kv_documents=bounds)
    return Problem(laid, laid, mask, 1, 1, 1, 1, 1, "float32")


def pairs_of(problem: Problem) -> list[int]:
    return [sum(table.area() for table in tiles_of(problem, rank).values()) for rank in range(problem.world_size)]


@given(documents(), ranks_of, st.sampled_from(CHOICES))
def test_every_choice_gives_each_token_to_one_rank(bounds: tuple[int, ...], ranks: int, choice: Choice) -> None:
    shards = place(areas(bounds), ranks, choice)
    assert sorted(token for shard in shards for piece in shard for token in range(*piece)) == list(range(bounds[-1]))
    counts = [sum(stop - start for start, stop in shard) for shard in shards]
    assert tuple(counts) == make_layout("contiguous", bounds[-1], ranks).counts
    for shard in shards:
        assert all(start < stop for start, stop in shard)
        assert all(before[1] < after[0] for before, after in pairwise(shard)), "adjacent pieces are joined"


@given(LENGTHS.flatmap(cuts), ranks_of)
def test_loads_equal_those_of_tiles_and_read_sets(bounds: tuple[int, ...], ranks: int) -> None:
    load, problem = load_of(bounds, in_turn(bounds, ranks)), problem_of(bounds, ranks)
    reads = read_sets_of(problem)
    assert list(load.pairs) == pairs_of(problem)
    assert sum(load.sent) == sum(load.received) == reads.totals[1]
    by_owner = [dict.fromkeys(range(ranks), 0) for _ in range(ranks)]
    for rank, owners in enumerate(by_owner):
        for (owner, _), table in tiles_of(problem, rank).items():
            owners[owner] += table.area()
    assert in_steps(bounds, ranks) == sum(
        max(by_owner[r][(r - step) % ranks] for r in range(ranks)) for step in range(ranks)
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_single_document_costs_the_same_as_zigzag(ranks: int) -> None:
    length = 96 * ranks
    load, zigzag = load_of((0, length), in_turn((0, length), ranks)), problem_of((0, length), ranks, "zigzag")
    assert 0.99 * read_sets_of(zigzag).totals[1] <= sum(load.sent) <= read_sets_of(zigzag).totals[1]
    assert max(load.pairs) - min(load.pairs) < length  # they differ by less than the pairs of the last query


def test_a_long_document_is_cut_and_short_ones_are_not() -> None:
    short = tuple(range(4000, 8001, 50))
    bounds = (0, *short)
    load = load_of(bounds, in_turn(bounds, 4))
    assert max(load.pairs) <= 1.01 * sum(load.pairs) / 4
    assert in_steps(bounds, 4) <= 1.01 * sum(load.pairs) / 4, "no step waits for one rank"
    assert sum(load.sent) == 9000  # as zigzag of the long document: 6 + 5 + 4 + 3 chunks of 500
    # The second choice cuts the long document into four parts with equal numbers of pairs, at sqrt(k / 4) of its length
    # for k = 1, 2, 3. The part after a cut reads all tokens before the cut.
    shards = place(areas(bounds), 4, CHOICES[1])
    fewest = load_of(bounds, shards)
    assert sum(fewest.sent) <= 1.02 * 4000 * (0.25**0.5 + 0.5**0.5 + 0.75**0.5)
    assert in_steps(bounds, 4, shards) > 1.2 * in_steps(bounds, 4)
    per_document = read_sets_of(problem_of(bounds, 4, "per_document")).totals[1]
    assert per_document > 1.9 * sum(load.sent)


def assert_whole(bounds: tuple[int, ...], ranks: int, shards: Shards) -> None:
    """Assert that each token is on one rank, and that each rank has its number of tokens in the contiguous layout."""
    assert sorted(token for shard in shards for piece in shard for token in range(*piece)) == list(range(bounds[-1]))
    counts = tuple(sum(stop - start for start, stop in shard) for shard in shards)
    assert counts == make_layout("contiguous", bounds[-1], ranks).counts


@given(documents(), ranks_of)
def test_placed_at_once_each_token_has_one_rank(bounds: tuple[int, ...], ranks: int) -> None:
    assert_whole(bounds, ranks, at_once(bounds, ranks, fills=50 * ranks))


@given(documents(), ranks_of, st.randoms(use_true_random=False), st.sampled_from([1.0, 1.05, 2.0]))
def test_placed_at_once_any_owners_are_a_placement_and_the_search_counts_its_rows_and_pairs(
    bounds: tuple[int, ...], ranks: int, draw: Random, even: float
) -> None:
    search = Search(areas(bounds), ranks, even)
    count = len(search.items)
    ends = [draw.randrange(-1, min(count, ranks)) for _ in range(ranks)]
    assignment = Owners([0] * count, ends, [bounds[-1], *[0] * (ranks - 1)], [sum(search.pairs), *[0] * (ranks - 1)])
    for _ in range(3 * count):
        assignment = search.changed(assignment, draw.random)
    for rank in range(ranks):
        owned = [document for document, owner in enumerate(assignment.owners) if owner == rank]
        assert assignment.tokens[rank] == sum(search.tokens[document] for document in owned)
        assert assignment.pairs[rank] == sum(search.pairs[document] for document in owned)
    outcome, shards = search.outcome_of(assignment), search.shards(assignment)
    load = load_of(bounds, shards)
    assert_whole(bounds, ranks, shards)
    if not outcome.moved:
        assert outcome.over == sum(max(0, pairs - search.most) for pairs in load.pairs)
        # If a rank takes the end of a document that the rank itself owns, the search counts the rows of the document
        # twice.
        twice = any(end >= 0 and assignment.ends[assignment.owners[end]] == end for end in assignment.ends)
        assert sum(load.sent) == outcome.rows or (twice and sum(load.sent) < outcome.rows)


def test_placed_at_once_moved_first_tokens_cost_a_row_each() -> None:
    """If the first tokens of a document move to another rank to even out the counts, each costs a row to send.

    Here rank 0 has 20 tokens too few, rank 1 has 20 too many, and rank 2 has its share.
    """
    search = Search(areas((0, 80, 200, 300)), 3, 1.05)
    assignment = Owners([1, 2, 0], [-1] * 3, [80, 120, 100], [causal_pairs(0, n) for n in (80, 120, 100)])
    outcome, load = search.outcome_of(assignment), load_of((0, 80, 200, 300), search.shards(assignment))
    assert outcome.moved == [(1, 0, 20)]
    assert sum(load.sent) == outcome.rows == 20 and load.received == (0, 20, 0)
    assert outcome.over == sum(max(0, pairs - search.most) for pairs in load.pairs) > 0


@pytest.mark.parametrize("ranks", [4, 8])
def test_placed_at_once_no_single_even_choice_sends_fewer_rows(ranks: int) -> None:
    """The search sends fewer rows than any single starting choice whose pairs are as even.

    For these documents the choices differ, and moving a document to another rank saves rows.
    """
    lengths = (
        11, 31, 11, 25, 1096, 16, 969, 36, 148, 11, 53, 25, 32, 19, 1115, 38, 51, 43, 27, 82, 34, 29, 13, 28, 13, 31,
        21, 61, 31, 18,
    )  # fmt: skip
    bounds = tuple(accumulate(lengths, initial=0))
    load, mean = (
        load_of(bounds, at_once(bounds, ranks)),
        sum(causal_pairs(0, n) for n in lengths) / ranks,
    )
    single = [load_of(bounds, place(areas(bounds), ranks, choice)) for choice in STARTING_CHOICES]
    assert max(load.pairs) <= EVEN * mean
    fewest = min(sum(choice_load.sent) for choice_load in single if max(choice_load.pairs) <= EVEN * mean)
    assert FEW_ROWS * bounds[-1] < sum(load.sent) < fewest
    less_even = load_of(bounds, at_once(bounds, ranks, 1.05))
    assert sum(less_even.sent) < sum(load.sent) and EVEN * mean < max(less_even.pairs) <= 1.05 * mean


def joined_nodes(shards: Shards, ranks_per_node: int) -> Shards:
    """Return the pieces of each node."""
    nodes = range(0, len(shards), ranks_per_node)
    return tuple(tuple(sorted(sum(shards[node : node + ranks_per_node], ()))) for node in nodes)


@st.composite
def any_masks(draw: st.DrawFn) -> tuple[Mask, int]:
    """Draw a mask of any kind over some tokens."""
    kind = draw(st.sampled_from(["documents", "window", "full", "tree", "slices"]))
    bounds = draw(documents())
    if kind in ("documents", "full"):
        return make_mask(bounds[-1], bounds[-1], causal=kind != "full", documents=bounds, kv_documents=bounds), bounds[
            -1
        ]
    if kind == "window":
        return make_mask(bounds[-1], bounds[-1], causal=True, window=(draw(st.integers(0, 50)), 0)), bounds[-1]
    if kind == "tree":
        lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
        parents = [-1]
        for node in range(1, len(lengths)):  # depth first: the parent is the node before it, or one of its ancestors
            ancestors = [node - 1]
            while parents[ancestors[-1]] >= 0:
                ancestors.append(parents[ancestors[-1]])
            parents.append(draw(st.sampled_from([*ancestors, -1])))
        return make_mask(sum(lengths), sum(lengths), mask=masks.tree(parents, lengths)), sum(lengths)
    half = draw(st.integers(1, 200))
    kinds = draw(st.lists(st.sampled_from(["full", "causal", "inverse_causal", "bi_causal"]), min_size=2, max_size=2))
    ranges = [(0, half), (half, 2 * half)]
    return make_mask(2 * half, 2 * half, mask=masks.slices(ranges, [(0, 2 * half), (0, half)], kinds)), 2 * half


@settings(max_examples=25)
@given(any_masks(), st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 4), (9, 3)]))
def test_placed_by_node_each_token_has_one_rank(masked: tuple[Mask, int], sizes: tuple[int, int]) -> None:
    (mask, length), (ranks, ranks_per_node) = masked, sizes
    shards = placed_at_once(mask, length, ranks, ranks_per_node, fills=50 * ranks)
    assert sorted(token for shard in shards for piece in shard for token in range(*piece)) == list(range(length))
    counts = [sum(stop - start for start, stop in shard) for shard in shards]
    assert max(counts) - min(counts) <= 1


@settings(max_examples=15)
@given(documents(), st.sampled_from([(4, 2), (6, 3)]))
def test_a_part_has_the_pairs_and_rows_of_the_whole(bounds: tuple[int, ...], sizes: tuple[int, int]) -> None:
    """Pairs and received rows of a node's ranks are those in the whole placement. A row is sent to other nodes once."""
    ranks, ranks_per_node = sizes
    whole = areas(bounds)
    shards = placed_at_once(whole.mask, bounds[-1], ranks, ranks_per_node, fills=50 * ranks)
    nodes, load = joined_nodes(shards, ranks_per_node), load_of(bounds, shards)
    assert sum(item.pairs for tokens in nodes for item in AreasOfPart(whole, tokens, ()).items) == sum(load.pairs)
    for node in range(len(nodes)):
        part = AreasOfPart(whole, nodes[node], nodes[:node] + nodes[node + 1 :])
        first = node * ranks_per_node
        tokens = {position: n for n, position in enumerate(p for piece in nodes[node] for p in range(*piece))}
        assert part.length == len(tokens)
        ours = tuple(
            tuple((tokens[p], tokens[p] + 1) for piece in shard for p in range(*piece))
            for shard in shards[first : first + ranks_per_node]
        )
        found = part.load(ours)
        assert found.pairs == load.pairs[first : first + ranks_per_node]
        assert found.received == load.received[first : first + ranks_per_node]
        near, far = list(shards[first : first + ranks_per_node]), [*nodes[:node], *nodes[node + 1 :]]
        sent = [sent_to(bounds, shard, near) + ACROSS * sent_to(bounds, shard, far) for shard in near]
        assert found.sent == tuple(sent)


def sent_to(bounds: tuple[int, ...], shard: tuple[Piece, ...], readers: list[tuple[Piece, ...]]) -> int:
    """Count the tokens of a shard that each of `readers` reads, without the tokens that the reader has."""
    starts = [start for start, stop in pairwise(bounds) for _ in range(stop - start)]
    count = 0
    for reader in readers:
        own = {token for piece in reader for token in range(*piece)}
        read = {key for token in own for key in range(starts[token], token)} - own
        count += len(read & {token for piece in shard for token in range(*piece)})
    return count


@pytest.mark.parametrize(
    ("longest", "ranks", "most"), [(1600, 8, 0.3), pytest.param(4000, 16, 0.4, marks=pytest.mark.slow)]
)
def test_the_ranks_of_a_node_share_the_rows_that_other_nodes_read(longest: int, ranks: int, most: float) -> None:
    """With a single owner, the largest share is 0.5."""
    bounds, ranks_per_node = (0, longest, *range(longest + 50, longest + 3100, 50)), 4
    shards = placed_at_once(causal_documents(bounds), bounds[-1], ranks, ranks_per_node, fills=0)
    nodes = joined_nodes(shards, ranks_per_node)
    for node in range(len(nodes)):
        others = [*nodes[:node], *nodes[node + 1 :]]
        sent = [sent_to(bounds, shard, others) for shard in shards[node * ranks_per_node :][:ranks_per_node]]
        assert sum(sent) <= 200 or max(sent) <= most * sum(sent)


def pairs_with(bounds: tuple[int, ...], shard: tuple[Piece, ...], tokens: tuple[Piece, ...]) -> int:
    """Count the causal pairs of the queries of a shard and the keys in `tokens`."""
    starts = [start for start, stop in pairwise(bounds) for _ in range(stop - start)]
    has = np.zeros(bounds[-1] + 1, int)
    for start, stop in tokens:
        has[start + 1 : stop + 1] = 1
    before = np.cumsum(has)
    return int(sum(before[query + 1] - before[starts[query]] for piece in shard for query in range(*piece)))


@pytest.mark.parametrize("seed", range(6))
def test_the_ranks_of_a_node_have_equal_work_with_the_keys_of_other_nodes(seed: int) -> None:
    """Otherwise they do not end their steps together, and a rank sends on late the rows that other ranks wait for.

    With the fewest rows, the busiest rank has up to 1.24 times the mean.
    """
    draw = Random(seed)
    lengths = [draw.choice((40, 150, 600)) for _ in range(draw.randrange(8, 30))] + [draw.choice((2500, 4000))]
    draw.shuffle(lengths)
    bounds = tuple(accumulate(lengths, initial=0))
    shards = placed_at_once(causal_documents(bounds), bounds[-1], 8, 4)
    nodes = joined_nodes(shards, 4)
    for node in range(2):
        ranks = shards[4 * node : 4 * node + 4]
        across = [pairs_with(bounds, shard, nodes[1 - node]) for shard in ranks]
        assert sum(across) > 0 and max(across) <= 1.01 * sum(across) / 4
    assert max(load_of(bounds, shards).pairs) <= EVEN**2 * sum(load_of(bounds, shards).pairs) / 8


@pytest.mark.parametrize("seed", [4, 9])
def test_a_node_that_shares_little_sends_the_fewest_rows(seed: int) -> None:
    """These nodes share 1.5 to 4 % of the pairs. With equal parts of long documents, they send 1.3 to 1.8 rows a token.

    Attention then takes up to 1.4 times as long.
    """
    draw = Random(seed)
    bounds = tuple(accumulate((4 * draw.choice((300, 600, 900, 1500, 2500)) for _ in range(60)), initial=0))
    load = load_of(bounds, placed_at_once(causal_documents(bounds), bounds[-1], 16, 8))
    assert sum(load.received) <= 0.5 * bounds[-1] and unevenness(load) <= EVEN**2


def test_a_node_shares_much_that_it_reads_or_sends() -> None:
    bounds = (0, 1000, 2000)
    nodes: Shards = (((0, 990),), ((990, 2000),))
    whole = AreasOfMask(causal_documents(bounds), 2000)
    # The second node's last ten tokens of the first document read 990 tokens: 2 % of its pairs, but all tokens of the
    # first node are sent.
    assert _nodes_that_share_much(whole, nodes) == [True, False]
    assert _nodes_that_share_much(whole, (((0, 1000),), ((1000, 2000),))) == [False, False]
    assert _nodes_that_share_much(whole, (((0, 500), (1000, 1500)), ((500, 1000), (1500, 2000)))) == [True, True]
    reader: Shards = (((0, 30), (1000, 2000)), ((30, 1000),))
    assert _nodes_that_share_much(whole, reader) == [False, True]  # sends 3 % of its tokens; reads 6 % of its pairs


def test_only_items_whose_queries_have_unlike_keys_are_cut_into_equal_parts() -> None:
    documents = {"documents": (0, 2000, 4096), "kv_documents": (0, 2000, 4096)}
    for options, is_cut in (
        ({"causal": True, **documents}, True), (documents, False), ({"causal": True, "window": (127, 0)}, False),
    ):  # fmt: skip
        whole = areas_of(make_mask(4096, 4096, **cast("Any", options)), 4096)
        spread = _spread(AreasOfPart(whole, ((0, 1000), (3000, 4096)), ()), 4, EVEN)
        assert (spread is not None) == is_cut
        if spread is not None:
            pairs = AreasOfPart(whole, ((0, 1000), (3000, 4096)), ()).pairs_by_rank(spread)
            assert pairs.max() <= EVEN * pairs.sum() / 4


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_placed_by_node_few_rows_come_from_other_nodes(seed: int) -> None:
    draw = Random(seed)
    bounds = tuple(accumulate((draw.choice((5, 20, 60, 200, 400)) for _ in range(40)), initial=0))
    flat, by_node = (placed_at_once(causal_documents(bounds), bounds[-1], 16, size) for size in (0, 4))
    across = [sum(load_of(bounds, joined_nodes(shards, 4)).received) for shards in (flat, by_node)]
    assert across[1] < across[0] / 3, across
    load = load_of(bounds, by_node)
    assert max(load.pairs) <= EVEN**2 * sum(load.pairs) / 16


def test_placed_at_once_branches_that_fill_several_ranks_stay_together() -> None:
    """Two branches of nearly four ranks each. Placements without groups of ranks send 1.46 times the bound."""
    parents = [-1, 0, 1, 2, 3, 4, 5, 2, 0, 0, 9, 10, 11, 11, 13, 14]
    lengths = [4087, 8494, 776, 1105, 5012, 10850, 482, 468, 4684, 1401, 1752, 6956, 4614, 3676, 6736, 4443]
    tokens = sum(lengths)
    tree = make_mask(tokens, tokens, mask=masks.tree(parents, lengths))
    load = areas_of(tree, tokens).load(placed_at_once(tree, tokens, 8))
    assert sum(load.sent) <= 1.15 * fewest_rows(tree, tokens, 8, EVEN) and unevenness(load) <= EVEN


def test_equal_documents_are_placed_equally() -> None:
    bounds = (*range(0, 3001, 7), 5000)
    first = in_turn(bounds, 8)
    placed.cache_clear()
    assert in_turn(bounds, 8) == first

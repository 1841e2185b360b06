"""The lower bound on rows of packed documents: no placement of few tokens sends fewer, and some send hardly more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, product

import numpy as np
import pytest

from ringattn.bench import placement_bound
from ringattn.bench.placement import drawn
from ringattn.bench.placement_bound import fewest_rows
from ringattn.core.documents import causal_pairs, load_of, placed_at_once

TOKENS = 131072


def placements(tokens: int, ranks: int) -> np.ndarray:
    """The rank of each token, of all placements in equal shares; ranks in the order of their first tokens."""
    share = -(-tokens // ranks)
    found: list[tuple[int, ...]] = [()]
    for _ in range(tokens):
        found = [
            (*one, rank)
            for one in found
            for rank in range(min(ranks, max(one, default=-1) + 2))
            if one.count(rank) < share
        ]
    return np.array([one for one in found if min(map(one.count, range(ranks))) == tokens // ranks])


def documents(tokens: int, longest: int) -> Iterator[tuple[int, ...]]:
    """All lengths, descending, none longer than that."""
    if not tokens:
        yield ()
    for length in range(min(tokens, longest), 0, -1):
        yield from ((length, *rest) for rest in documents(tokens - length, length))


def fewest_of(rank_of: np.ndarray, ranks: int, lengths: tuple[int, ...]) -> dict[int, int]:
    """By the pairs of the fullest rank: the fewest rows of these placements with no more."""
    pairs, rows, start = np.zeros((ranks, len(rank_of)), int), np.full(len(rank_of), -sum(lengths)), 0
    for length in lengths:
        for rank in range(ranks):
            ends = (rank_of[:, start : start + length] == rank) * np.arange(1, length + 1)
            pairs[rank] += ends.sum(axis=1)
            rows = rows + ends.max(axis=1)
        start += length
    most = pairs.max(axis=0)
    return {int(limit): int(rows[most <= limit].min()) for limit in np.unique(most)}


@pytest.mark.parametrize(("tokens", "ranks"), [(8, 2), (9, 3), (10, 3), (8, 4), (9, 4)])
def test_no_placement_sends_fewer_rows_than_the_bound(tokens: int, ranks: int) -> None:
    rank_of = placements(tokens, ranks)
    fewest = found = 0
    for lengths in documents(tokens, tokens):
        for most, rows in fewest_of(rank_of, ranks, lengths).items():
            bound = fewest_rows(tuple(accumulate(lengths, initial=0)), ranks, most)
            assert bound <= rows, f"{lengths}, {most} pairs at most"
            fewest, found = fewest + rows, found + bound
    assert found > 0.8 * fewest


def test_the_bound_is_what_one_document_alone_sends() -> None:
    """Zigzag: 8 ranks of 16 tokens, the next one of which reads 8 tokens less far than the one before."""
    sent = sum(range(72, 128, 8))
    assert fewest_rows((0, 128), 8, causal_pairs(0, 128) / 8) == sent


@pytest.mark.parametrize(("seed", "least"), [(2, 602100), (5, 171950), (7, 122700)])
def test_the_bound_on_drawn_documents_is_high(seed: int, least: int) -> None:
    """One document over all ranks, with successive reaches; one over most; two long ones, with the same fill."""
    cuts = drawn(TOKENS, seed)
    load = load_of(cuts, placed_at_once(cuts, 8, 1.05))
    bound = fewest_rows(cuts, 8, max(max(load.pairs), 1.05 * sum(load.pairs) / 8))
    assert least <= bound <= sum(load.sent)


def test_a_document_that_is_cut_is_charged_no_less_than_the_bound_says() -> None:
    """Two ranks of a group and two others, with any tokens of one document; all rows, at their price, in the charge."""
    tokens = 6
    rank_of = np.array(list(product(range(4), repeat=tokens)))
    rows = -tokens + sum(((rank_of == rank) * np.arange(1, tokens + 1)).max(axis=1) for rank in range(4))
    held = rank_of < 2
    for price in np.linspace(0, 9, 25):
        for row in np.linspace(0, price, 9):
            charged = (held * (np.arange(tokens) + 0.5 - price)).sum(axis=1) + row * rows
            whole = placement_bound._whole(tokens, price)
            assert charged.min() >= np.minimum(np.minimum(0, whole), placement_bound._first(tokens, price - row)) - 1e-9


@pytest.mark.parametrize("rows", [0, 3, 8])
def test_a_group_is_charged_no_less_than_the_bound_says(rows: int) -> None:
    """Of a free document any first tokens; of two others all, none, or for a row each their first."""
    groups = placement_bound._Groups([12, 12, 8], 1, 2, 100)
    held = np.array(list(product(range(13), range(13), range(9))))
    cut = np.where(held[:, 1:] < [12, 8], held[:, 1:], 0).sum(axis=1)
    allowed = held[cut <= rows][..., None]
    charged = (allowed * allowed / 2 - groups.prices * allowed).sum(axis=1)
    assert (groups.charged(rows) <= charged.min(axis=0) + 1e-9).all()


PRICES = np.array([0.0, 3.0, 7.5, 20.0])


@pytest.mark.parametrize("lack", [[1, 1, 1, 1], [900, 640, 300, 0], [1000, -5, 500, 90], [2300, 0, 0, 2]])
def test_the_least_sum_of_several_reaches_is_below_all(lack: list[int]) -> None:
    low, high = (2, 9, 1), (30, 31, 24)
    spans = [np.arange(a, b + 1) for a, b in zip(low, high, strict=True)]
    z = np.stack(np.meshgrid(*spans), axis=-1)[..., None]
    enough = (np.square(np.maximum(0, z - PRICES)).sum(axis=-2) >= lack).all(axis=-1)
    least = int(z.sum(axis=(-1, -2))[enough].min())
    found = placement_bound._least_of_several(PRICES, np.array(lack, float), low, high)
    assert least - 4 <= found <= least


@pytest.mark.parametrize("first", [0, 11, 50])
@pytest.mark.parametrize("most", [1000, 3000, 4600])
def test_the_least_sum_of_successive_reaches_is_below_all(first: int, most: int) -> None:
    """Beside every u and v that the omitted tokens allow: of those before v, all worth it but so many from u on."""
    length, share = 90, 30
    groups = placement_bound._Groups([length], 1, length // share, most)
    groups.prices, lack = PRICES, np.array([most, most / 2, most / 8, 0.5])
    sums = []
    for u in range(first, length + 1):
        for v in range(length + 30):
            forced = range(u, max(u, v - share))
            places = np.array([x for x in range(v) if x not in forced])[:, None]
            if (2 * np.maximum(0, places + 0.5 - PRICES).sum(axis=0) >= lack).all():
                sums.append(u + v)
    found = groups._successive(length, first, 0, lack)
    assert min(sums) - 2 <= found <= min(sums)


@pytest.mark.parametrize("shape", [lambda r: 900 - 2 * r, lambda r: 900 - r // 2, lambda r: 40000 // (r + 30)])
def test_the_least_sum_is_found_from_below(shape: Callable[[int], int]) -> None:
    def cut(rows: int) -> int:
        return max(0, shape(rows))

    least = min(rows + cut(rows) for rows in range(2000))
    assert 0.99 * least <= placement_bound._least_sum(cut, cut(0)) <= least

"""Layouts follow their definitions: every token has one owner, and tokens are in the documented order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn.core.layout import LAYOUTS, Layout, make_layout
from ringattn.errors import InputError
from tests.strategies import LENGTHS, WORLD_SIZES, cuts, layouts

ranks_of = st.sampled_from(WORLD_SIZES)


def positions(layout: Layout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.world_size)]


@given(layouts())
def test_every_position_has_one_owner(layout: Layout) -> None:
    assert sorted(layout.order().tolist()) == list(range(layout.length))
    assert layout.order().tolist() == [token for shard in positions(layout) for token in shard]


@given(layouts())
def test_counts_runs_and_positions_agree(layout: Layout) -> None:
    assert len(layout.shards) == len(layout.counts) == layout.world_size
    for rank, shard in enumerate(layout.shards):
        assert all(run.count for run in shard)
        assert layout.positions(rank).dtype == np.int64
        assert layout.positions(rank).tolist() == [token for run in shard for token in run.members()]
        assert layout.counts[rank] == len(layout.positions(rank))


@given(LENGTHS, ranks_of)
def test_contiguous(length: int, ranks: int) -> None:
    want = [part.tolist() for part in np.array_split(np.arange(length), ranks)]
    assert positions(make_layout("contiguous", length, ranks)) == want


@given(LENGTHS, ranks_of)
def test_zigzag(length: int, ranks: int) -> None:
    chunks = [part.tolist() for part in np.array_split(np.arange(length), 2 * ranks)]
    want = [chunks[rank] + chunks[2 * ranks - 1 - rank] for rank in range(ranks)]
    assert positions(make_layout("zigzag", length, ranks)) == want


@given(LENGTHS, ranks_of)
def test_striped(length: int, ranks: int) -> None:
    assert positions(make_layout("striped", length, ranks)) == [list(range(r, length, ranks)) for r in range(ranks)]


@given(st.data(), LENGTHS, ranks_of)
def test_per_document_cuts_each_document_into_mirrored_chunks(data: st.DataObject, length: int, ranks: int) -> None:
    documents = data.draw(cuts(length))
    layout = make_layout("per_document", length, ranks, documents)
    for start, stop in pairwise(documents):
        # From the start of a document to its end, the owners of its chunks ascend through the ranks, then descend. The
        # numbers of its tokens on two ranks differ by at most two.
        owner = {
            token: rank for rank, shard in enumerate(positions(layout)) for token in shard if start <= token < stop
        }
        visits = [owner[token] for token in range(start, stop)]
        turn = [i for i, (before, after) in enumerate(pairwise(visits)) if after < before]
        rising = visits[: turn[0] + 1] if turn else visits
        assert rising == sorted(rising)
        assert visits[len(rising) :] == sorted(visits[len(rising) :], reverse=True)
        counts = np.bincount(visits, minlength=ranks) if visits else np.zeros(ranks)
        assert counts.max() - counts.min() <= 2
    assert max(layout.counts) - min(layout.counts) <= 2


@given(layouts())
def test_counts_are_as_even_as_chunks_allow(layout: Layout) -> None:
    gap = max(layout.counts) - min(layout.counts)
    assert gap <= (1 if layout.name in ("contiguous", "striped", "documents") else 2)


@pytest.mark.parametrize("name", ["contiguous", "striped", "documents"])
def test_the_first_ranks_take_the_extra_tokens(name: str) -> None:
    assert make_layout(name, 14, 4, (0, 3, 14)).counts == (4, 4, 3, 3)


def test_extra_tokens_of_many_documents_do_not_pile_up() -> None:
    # Each document has one token. Successive documents give their extra token to different chunks.
    assert make_layout("per_document", 8, 4, tuple(range(9))).counts == (2, 2, 2, 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_and_less_than_the_world(name: str) -> None:
    assert make_layout(name, 0, 3, (0, 0)).counts == (0, 0, 0)
    assert make_layout(name, 0, 3, (0, 0)).order().tolist() == []
    short = make_layout(name, 2, 5, (0, 2))
    assert short.counts == (1, 1, 0, 0, 0)
    assert short.positions(4).shape == (0,)


@pytest.mark.parametrize(
    ("purpose", "documents", "name"),
    [
        ("causal", None, "zigzag"),
        ("full", None, "contiguous"),
        ("window", None, "contiguous"),
        ("dilated", None, "contiguous"),
        ("causal", (0, 3, 8), "per_document"),
        ("full", (0, 3, 8), "per_document"),
        ("window", (0, 3, 8), "contiguous"),
        ("dilated", (0, 3, 8), "contiguous"),
    ],
)
def test_auto(purpose: str, documents: tuple[int, ...] | None, name: str) -> None:
    assert make_layout("auto", 8, 2, documents, purpose) == make_layout(name, 8, 2, documents)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "spiral"}, r"layout='spiral' is not known.*zigzag"),
        ({"name": "per_document"}, r"layout='per_document' needs cu_seqlens"),
        ({"name": "documents"}, r"layout='documents' needs cu_seqlens"),
        ({"name": "auto", "purpose": "speed"}, r"for_='speed' is not known.*causal"),
        ({"name": "zigzag", "purpose": "speed"}, r"for_='speed' is not known"),
    ],
)
def test_bad_names(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_layout(**arguments, length=8, world_size=2)

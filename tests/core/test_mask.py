"""Masks and problems: what the options mean, and errors that name invalid options."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn import masks
from ringattn.core.geometry import CAUSAL, FULL, UNBOUNDED, Band, StridedRange
from ringattn.core.layout import make_layout
from ringattn.core.mask import Branch, Mask, make_mask
from ringattn.core.problem import Problem
from ringattn.core.rectangles import Rectangle, Rectangles, segments
from ringattn.errors import InputError
from tests.fuzz.reference import plain_counts
from tests.oracle import allowed_mask
from tests.strategies import Case, branched_cases, cuts, mask_options, masks_by_head, reference_of, slice_sets, trees


@given(st.data(), st.integers(0, 12))
def test_options_mean_what_the_oracle_says(data: st.DataObject, length: int) -> None:
    documents = data.draw(st.one_of(st.none(), cuts(length)))
    options = data.draw(mask_options(1 if documents is None else len(documents) - 1, documents or (0, length)))
    mask = make_mask(length, length, documents=documents, kv_documents=documents, **options)
    assert reference_of(mask, 1, length, length).max(initial=0) <= 1
    cu_seqlens = None if documents is None else list(documents)
    expected = allowed_mask(length, length, cu_seqlens=cu_seqlens, **options)
    assert np.array_equal(reference_of(mask, 1, length, length)[0], expected.numpy())


@given(st.data(), st.integers(0, 12), st.integers(0, 12), st.integers(1, 3))
def test_cross_documents_pair_by_index(data: st.DataObject, length: int, kv_length: int, documents: int) -> None:
    cu, kv_cu = data.draw(cuts(length, documents)), data.draw(cuts(kv_length, documents))
    options = data.draw(mask_options(documents))
    mask = make_mask(length, kv_length, documents=cu, kv_documents=kv_cu, **options)
    expected = allowed_mask(length, kv_length, cu_seqlens=list(cu), kv_cu_seqlens=list(kv_cu), **options)
    assert np.array_equal(reference_of(mask, 1, length, kv_length)[0], expected.numpy())


@given(st.data(), st.integers(0, 12), st.integers(0, 12))
def test_slices_and_groups_of_heads_mean_what_the_oracle_says(data: st.DataObject, length: int, kv_length: int) -> None:
    value = data.draw(st.one_of(slice_sets(length, kv_length), masks_by_head(length, kv_length)))
    reference = reference_of(make_mask(length, kv_length, mask=value, q_heads=4), 4, length, kv_length)
    expected = plain_counts(length, None, kv_length, None, mask=value.text).pairs[0].expand(4, -1, -1)
    assert np.array_equal(reference, expected.numpy())


@given(st.data(), st.integers(0, 12))
def test_the_text_of_a_mask_reads_back(data: st.DataObject, length: int) -> None:
    drawn = st.one_of(slice_sets(length, length), masks_by_head(length, length), trees(length))
    value = data.draw(drawn)
    assert masks.from_text(value.text) == value


@given(st.data(), st.integers(1, 12))
def test_slices_that_overlap_are_refused(data: st.DataObject, length: int) -> None:
    """The error names a pair that both slices have, and disjoint slices raise none."""
    kinds = ["full", "causal", "causal_from_start", "inverse_causal", "bi_causal"]
    edges = st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted)
    ranges = [(data.draw(edges), data.draw(edges), data.draw(st.sampled_from(kinds))) for _ in range(3)]
    pairs = [plain_counts(length, None, length, None, mask=masks.slices([q], [k], kind).text).pairs[0, 0]
             for q, k, kind in ranges]  # fmt: skip
    counts = torch.stack(pairs).sum(0)
    if counts.max() <= 1:
        assert isinstance(masks.slices(*zip(*ranges, strict=True)), masks.Slices)
        return
    with pytest.raises(InputError, match="in two slices") as error:
        masks.slices(*zip(*ranges, strict=True))
    q, k = map(int, re.findall(r"query (\d+) attends to key (\d+)", str(error.value))[0])
    assert counts[q, k] > 1


@given(st.data(), st.integers(0, 12), st.integers(0, 12))
def test_slices_take_causal_if_it_excludes_none_of_their_pairs(
    data: st.DataObject, length: int, kv_length: int
) -> None:
    """The error names a pair that causal excludes."""
    value = data.draw(slice_sets(length, kv_length))
    pairs = plain_counts(length, None, kv_length, None, mask=value.text).pairs[0, 0]
    if not pairs.triu(1).any():
        assert make_mask(length, kv_length, mask=value, causal=True) == make_mask(length, kv_length, mask=value)
        return
    with pytest.raises(InputError, match=r"which causal excludes; leave causal out$") as error:
        make_mask(length, kv_length, mask=value, causal=True)
    q, k = map(int, re.findall(r"query (\d+) attends to the later key (\d+)", str(error.value))[0])
    assert pairs.triu(1)[q, k]


@pytest.mark.parametrize(
    ("options", "band"),
    [
        ({}, FULL),
        ({"causal": True}, CAUSAL),
        ({"window": (None, None)}, FULL),
        ({"window": (-1, -1)}, FULL),
        ({"window": (3, 2)}, Band(-2, 3)),
        ({"window": (0, 0)}, Band(0, 0)),
        ({"window": (3, None)}, Band(-UNBOUNDED, 3)),
        ({"window": (None, 2)}, Band(-2, UNBOUNDED)),
        ({"window": [3, 2]}, Band(-2, 3)),
        ({"window": (np.int64(3), np.int32(2))}, Band(-2, 3)),
        ({"window": (3, 0), "causal": True}, Band(0, 3)),
        ({"window": (3, -1), "causal": True}, Band(0, 3)),
        ({"window": (3, None), "causal": True}, Band(0, 3)),
    ],
)
def test_bands(options: dict[str, Any], band: Band) -> None:
    assert make_mask(9, 7, **options) == Mask.of(segments([(0, 9, 0, 7)], band))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": (-2, 0)}, r"window left side must be tokens >= 0, None or -1, got -2"),
        ({"window": (0, -7)}, r"window right side must be .*, got -7"),
        ({"window": (1.5, 0)}, r"window left side must be .*, got 1\.5"),
        ({"window": (True, 0)}, r"window left side must be .*, got True"),
        ({"window": (1, "2")}, r"window right side must be .*, got '2'"),
        ({"window": (1, 2, 3)}, r"window=\(1, 2, 3\): expected \(left, right\)"),
        ({"window": 4}, r"window=4: expected \(left, right\)"),
        ({"window": (4, 1), "causal": True}, r"window=\(4, 1\) looks ahead, causal=True forbids it"),
        ({"mask": "chunked:8"}, r"mask='chunked:8' is not a mask; make one with ringattn\.masks"),
        ({"mask": masks.prefix(2)}, r"masks\.prefix needs causal=True"),
        ({"mask": masks.prefix((1, 2)), "causal": True}, r"masks\.prefix has 2 numbers for 1 documents; give one, or"),
        ({"mask": masks.bidirectional_blocks([(1, 3)])}, r"masks\.bidirectional_blocks needs causal=True"),
        (
            {"mask": masks.bidirectional_blocks([(1, 3)]), "causal": True},
            r"masks\.bidirectional_blocks needs .* of the same tokens",
        ),
        ({"mask": masks.global_tokens(2)}, r"masks\.global_tokens needs a window"),
        ({"documents": (0, 9)}, r"^seq has documents and kv_seq has none"),
        ({"kv_documents": (0, 7)}, r"^kv_seq has documents and seq has none"),
        ({"documents": (0, 2, 9), "kv_documents": (0, 7)}, r"seq has 2 documents and kv_seq has 1"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_mask(9, 7, **options)


@pytest.mark.parametrize("block", [(2, 6), (7, 10), (12, 14)])
def test_a_block_lies_in_one_document(block: tuple[int, int]) -> None:
    with pytest.raises(
        InputError, match=rf"block from {block[0]} to {block[1]} is not inside one document of 9 tokens"
    ):
        make_mask(
            9, 9, causal=True, mask=masks.bidirectional_blocks([block]), documents=(0, 4, 9), kv_documents=(0, 4, 9)
        )


def test_a_block_of_one_token_leaves_the_mask_as_it_is() -> None:
    assert make_mask(9, 9, causal=True, mask=masks.bidirectional_blocks([(3, 4), (8, 9)])) == make_mask(
        9, 9, causal=True
    )


def test_a_chunk_that_cuts_nothing_leaves_the_mask_as_it_is() -> None:
    documents = (0, 4, 9)
    plain = make_mask(9, 9, causal=True, documents=documents, kv_documents=documents)
    five, four = (
        make_mask(9, 9, causal=True, mask=masks.chunked(n), documents=documents, kv_documents=documents) for n in (5, 4)
    )
    assert five == plain and four != plain


# --- head parts ------------------------------------------------------------------------------------------------------


@given(branched_cases())
def test_parts_cut_the_heads_where_branches_do(case: Case) -> None:
    problem = case.problem
    kv = [head for part in problem.parts for head in part.kv_heads.members()]
    q = [head for part in problem.parts for head in part.q_heads.members()]
    assert kv == list(range(problem.kv_heads)) and q == list(range(problem.q_heads))
    for part in problem.parts:
        assert {head // problem.group for head in part.q_heads.members()} == set(part.kv_heads.members())
        for branch in problem.mask.branches:
            heads = set(range(4)) if branch.heads is None else set(branch.heads.members())
            reading = {head // problem.group for head in heads} & set(part.kv_heads.members())
            assert reading in (set(), set(part.kv_heads.members()))


@pytest.mark.parametrize(
    ("heads", "parts"),
    [
        ([StridedRange(0, 3)], [(0, 2), (2, 1)]),  # query head 2 reads K/V head 1, so the branch has all of it
        ([StridedRange(3, 1)], [(0, 1), (1, 1), (2, 1)]),
        ([StridedRange(1, 2), StridedRange(4, 2)], [(0, 2), (2, 1)]),
        ([StridedRange(2, 0)], [(0, 3)]),
        ([None], [(0, 3)]),
    ],
)
def test_parts_of_six_heads_on_three(heads: list[StridedRange | None], parts: list[tuple[int, int]]) -> None:
    mask = Mask(tuple(Branch(Rectangles([Rectangle(0, 4, 0, 4)]), run) for run in heads))
    assert [part.kv_heads for part in mask.parts(6, 3)] == [StridedRange(*part) for part in parts]
    assert [part.q_heads for part in mask.parts(6, 3)] == [StridedRange(2 * start, 2 * count) for start, count in parts]


# --- problems --------------------------------------------------------------------------------------------------------

LAYOUT = make_layout("zigzag", 16, 2)
PROBLEM = Problem(LAYOUT, LAYOUT, make_mask(16, 16, causal=True), 1, 4, 2, 8, 8, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, r"q, k and v are int8, which is not supported; use one of float64"),
        ({"wire_dtype": "float8_e4m3fn"}, r"dkv_wire_dtype float8_e4m3fn is not supported"),
        ({"kv_heads": 3}, r"q_heads=4 is not a multiple of kv_heads=3"),
        ({"kv_heads": 0}, r"kv_heads=0, where attention needs at least 1"),
    ],
)
def test_facts_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(PROBLEM, **changes)

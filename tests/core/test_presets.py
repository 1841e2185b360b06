"""Presets of dilated branches: the published numbers, refusals, and warnings with the right fractions of queries."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringattn.core.dilation import (
    OFFSETS,
    Branches,
    check,
    coverage_warnings,
    geometric,
    head_offsets,
    longnet_32k,
    longvit_1m,
)
from ringattn.errors import InputError
from tests.core.dilated_reference import coverage


def test_published_branches() -> None:
    assert longnet_32k() == ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    assert longvit_1m() == ((1024, 4096, 32768, 262144, 1048576), (1, 2, 4, 8, 16))
    assert longnet_32k()._asdict().keys() == {"segment_lengths", "dilation_rates"}


def test_geometric_branches() -> None:
    whole = geometric(length=2**20)
    assert whole.pairs() == [(2048 << i, 1 << i) for i in range(10)]
    assert geometric(branches=10) == whole
    assert geometric(10, 3, length=90) == ((10, 30, 90), (1, 3, 9))
    assert geometric(10, 3, length=91) == ((10, 30, 90, 270), (1, 3, 9, 27))
    assert geometric(10, 3, length=10) == geometric(10, 3, branches=1) == ((10,), (1,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either length .* or branches"),
        ({"length": 10, "branches": 2}, "got 10 and 2"),
        ({"length": 0}, "length or branches must be a whole number of at least 1, got 0"),
        ({"branches": True}, "at least 1, got True"),
        ({"branches": 2, "ratio": 1}, "ratio must be a whole number of at least 2, got 1"),
        ({"branches": 2, "base_length": 2.0}, r"base_length must be a whole number of at least 1, got 2\.0"),
    ],
)
def test_geometric_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        geometric(**options)


def test_check_gives_plain_tuples() -> None:
    checked = check(np.array([4, 8]), iter([1, 2]))
    assert checked == ((4, 8), (1, 2)) and all(type(number) is int for numbers in checked for number in numbers)


@pytest.mark.parametrize(
    ("lengths", "rates", "message"),
    [
        ([], [], "every branch needs .* got 0 segment_lengths"),
        ([4, 8], [1], r"got 2 segment_lengths \(4, 8\) and 1 dilation_rates \(1,\)"),
        ([0], [1], "segment_lengths must be positive whole numbers, got 0"),
        ([4], [-1], "dilation_rates must be positive whole numbers, got -1"),
        ([4.0], [1], r"segment_lengths must be positive whole numbers, got 4\.0"),
        ([4], [True], "dilation_rates must be positive whole numbers, got True"),
        ("48", [1, 2], "segment_lengths must be a list .* got '48'"),
        (4, [1], "segment_lengths must be a list .* got 4"),
    ],
)
def test_check_refusals(lengths: Any, rates: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(lengths, rates)


def test_head_offsets() -> None:
    assert head_offsets("mod", 4, 6, 6) == (0, 1, 2, 3, 0, 1)
    assert head_offsets("block", 4, 6, 6) == (0, 0, 1, 1, 2, 2)
    assert head_offsets("kv_head", 2, 6, 3) == (0, 0, 1, 1, 0, 0)
    assert head_offsets("layer_rotated", 4, 6, 6, layer=3) == (2, 3, 0, 1, 2, 3)
    with pytest.raises(InputError, match="choose one of mod, block, kv_head, layer_rotated"):
        head_offsets("modulo", 4, 6, 6)


def percentages(warnings: list[str], phrase: str) -> list[float]:
    """Return the percentage in each warning that contains `phrase`."""
    return [float(re.search(r"([0-9.]+) %", text)[1]) for text in warnings if phrase in text]  # type: ignore[index]


branches = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=3).map(
    lambda pairs: Branches(*zip(*pairs, strict=True))
)


@example(Branches((2,), (3,)), 1, 3, "mod", 7)
@example(Branches((6, 4), (3, 2)), 2, 2, "block", 23)
@given(branches, st.integers(1, 3), st.integers(1, 3), st.sampled_from(OFFSETS), st.integers(1, 40))
def test_fractions_are_those_counted_one_by_one(
    given_branches: Branches, kv_heads: int, group: int, offset: str, length: int
) -> None:
    heads = kv_heads * group
    layer = 0 if offset == "layer_rotated" else None
    kept = coverage(length, heads, kv_heads, *given_branches, offset, layer)
    reached = [100 * part for part in kept.any(1).double().mean(1).tolist() if part < 1]
    blind = 100 * (1 - kept.any(0).double().mean().item())
    warnings = coverage_warnings(given_branches, heads, offset, kv_heads, length)
    assert percentages(warnings, "of the queries") == pytest.approx(reached, rel=5e-3)  # a warning has three digits
    assert percentages(warnings, "attend to no key") == pytest.approx([blind] if blind else [], rel=5e-3)


@given(branches, st.integers(1, 4), st.sampled_from(("mod", "block")))
def test_without_a_length_it_is_that_of_many_segments(given_branches: Branches, heads: int, offset: str) -> None:
    many = np.lcm.reduce([*given_branches.segment_lengths, *given_branches.dilation_rates]).item()
    assert coverage_warnings(given_branches, heads, offset) == coverage_warnings(
        given_branches, heads, offset, length=many
    )


def test_a_long_sequence_is_judged_by_its_first_tokens() -> None:
    (single,) = coverage_warnings(Branches((10**9, 10**12), (2, 4)), 4, length=10**13)
    assert single.startswith("no branch has r=1: 50 % of the rows")


def test_more_offsets_than_heads() -> None:
    warnings = coverage_warnings(geometric(length=2**20), 12, length=2**20)
    assert percentages(warnings, "of the queries") == [75, 37.5, 18.8, 9.38, 4.69, 2.34]
    assert len(warnings) == 6
    assert warnings[-1] == (
        "branch (w=1048576, r=512): 12 heads have 12 of 512 offsets, so it reaches 2.34 % of the queries; "
        "use an r of at most 12, or offset='layer_rotated', which changes in each layer"
    )
    (block,) = coverage_warnings(Branches((8, 8), (1, 8)), 12, "block", length=16)
    assert "12 heads have 6 of 8 offsets, so it reaches 75 % of the queries; use an r that divides 12, or" in block
    (grouped,) = coverage_warnings(Branches((8, 8), (1, 8)), 12, "kv_head", 2, length=16)
    assert "2 K/V heads have 2 of 8 offsets, so it reaches 25 % of the queries; use an r of at most 2, or" in grouped
    (rotated,) = coverage_warnings(Branches((8, 8), (1, 8)), 4, "layer_rotated", length=16)
    assert rotated.endswith("50 % of the queries; use an r of at most 4")


def test_published_branches_and_their_heads() -> None:
    assert coverage_warnings(longvit_1m(), 16, length=2**20) == []
    assert coverage_warnings(longnet_32k(), 12, length=32768) == []

"""Plans of sequences that are too long for any memory: their size depends on the pieces of shards, not on the tokens.

A piece is a range of a shard within one segment of a branch. Too many pieces are refused, with their number.

Not covered: the contents of plans (see test_ring_account, test_schedule).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from ringattn.cli import main
from ringattn.core.dilation import Dilated
from ringattn.core.geometry import FULL, MOST_TOKENS
from ringattn.core.layout import LAYOUTS, make_layout
from ringattn.core.mask import Mask
from ringattn.core.problem import Problem
from ringattn.core.rectangles import Rectangles, segments
from ringattn.core.tiling import cut, spanned, tiles_of
from ringattn.errors import InputError
from ringattn.launch.config import load
from ringattn.launch.pictures.show import ExplainConfig, explanation_of
from ringattn.observe.memory import reset_peak, status_bytes
from ringattn.planner import candidates
from ringattn.planner.candidates import excess
from tests.schedules import schedule_params

TRILLION = 10**12


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Check that each test takes less memory than one byte for each thousand tokens of a rank."""
    reset_peak()
    before = status_bytes("VmRSS")
    yield
    assert status_bytes("VmHWM") - before < TRILLION // 1000 // 8


@pytest.mark.parametrize(
    ("layout", "bounds", "segment"),
    list(product(LAYOUTS, ((0, 61), (0, 0, 7, 30, 30, 61)), (None, 4, 7, 100))),
)
def test_pieces_are_counted_without_making_them(layout: str, bounds: tuple[int, ...], segment: int | None) -> None:
    laid = make_layout(layout, 61, 3, bounds)
    rectangles = Rectangles(segments([(*pair, *pair) for pair in pairwise(bounds)], FULL, segment))
    starts = rectangles.expanded[:, 0]
    of_rows = [np.searchsorted(starts, run.members(), "right") for shard in laid.shards for run in shard]
    assert spanned(laid, rectangles, keys=True) == spanned(laid, rectangles, keys=False)
    assert spanned(laid, rectangles, keys=True) == sum(int(of[-1] - of[0]) + 1 for of in of_rows)
    assert spanned(laid, rectangles, keys=True) >= len(cut(laid, rectangles, keys=True).rank)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_are_counted_before_the_band(layout: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds, heads = (0, 20, 61), 4
    laid = make_layout(layout, 61, 3, bounds)
    full: Mask = Dilated((16, 61), (1, 2), causal).mask(61, 61, bounds, bounds, heads, 2)
    problem = Problem(laid, laid, full, 1, heads, 2, 8, 8, "float32")
    count = sum(len(table) for rank in range(3) for table in tiles_of(problem, rank).values())
    monkeypatch.setattr(candidates, "MOST_TILES", count - 1)
    assert excess(problem) and excess(problem, by_head=True)
    monkeypatch.setattr(candidates, "MOST_TILES", count)
    assert causal == bool(excess(problem))  # the count is exact unless a causal band hides tiles
    assert excess(problem, by_head=True)
    monkeypatch.setattr(candidates, "MOST_TILES", 1)
    assert "for each of 2 groups" in str(excess(problem, by_head=True, groups=2))
    assert not excess(problem, by_head=True, groups=10**6)  # groups are planned one at a time


WORDS = {
    "zigzag": [],
    "window": ["window=[4096,-1]"],
    "striped documents": ["layout=striped", "cu_seqlens=[0,300000000000,300000000007,1000000000000]"],
    "documents": ["cu_seqlens=[0,300000000000,300000000007,1000000000000]"],
    "full": ["layout=contiguous", "causal=false"],
    "dilated": ["segment_lengths=[1000000000000]", "dilation_rates=[1000000]", "heads=2"],
}


@pytest.mark.parametrize("name", WORDS)
def test_a_trillion_tokens_are_explained(name: str) -> None:
    length = [] if "documents" in name else [f"tokens={TRILLION}"]
    explanation = explanation_of(load(["ranks=8", *length, *WORDS[name]], ExplainConfig))
    assert sum(explanation.problem.q_layout.counts) == TRILLION and len(explanation.plans) == 2
    text = str(explanation)
    assert f"{TRILLION} tokens on 8 ranks" in text and "memory: not computed for more than 8,388,608" in text
    assert "peak_bytes" not in explanation.summary()["by_rank"]
    if name in ("zigzag", "striped documents"):
        pairs = [TRILLION] if name == "zigzag" else [300_000_000_000, 7, 699_999_999_993]
        assert sum(explanation.pairs) == 8 * sum(n * (n + 1) // 2 for n in pairs)


@pytest.mark.parametrize("schedule", schedule_params(quick=["balanced"]))
def test_every_schedule_of_a_trillion_tokens(schedule: str) -> None:
    explanation = explanation_of(load(["ranks=4", f"tokens={TRILLION}", f"schedule={schedule}"], ExplainConfig))
    small = explanation_of(load(["ranks=4", "tokens=4000", f"schedule={schedule}"], ExplainConfig))
    assert explanation.messages == small.messages and len(explanation.forward.steps) == len(small.forward.steps)
    pairs = zip(explanation.bytes_sent, small.bytes_sent, strict=True)
    # The number of rows sent is proportional to the length, except for half a row at the ends of chunks.
    assert all(abs(large / little / (TRILLION / 4000) - 1) < 1e-9 for large, little in pairs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"tokens={TRILLION}", "segment_lengths=[2048,8192]", "dilation_rates=[1,4]"],
         r"9 branches cut the contiguous layout of 1000000000000 tokens on 8 ranks into 1464843816 pieces, but at most "
         "262144 can be planned"),
        (["tokens=8000000000", "segment_lengths=[2048]", "dilation_rates=[1000000]"], "31250048 pieces"),
        (["tokens=1000000", "segment_lengths=[100]", "dilation_rates=[1]", "layout=striped"],
         r"form 640000 tiles, but at most 262144 can be planned; plan a sequence whose length"),
        (["schedule=all_to_all", "heads=4096", "kv_heads=4096"], "form 1048576 tiles, one for each head,"),
        ([f"tokens={MOST_TOKENS + 1}"], r"a sequence has at most 1125899906842624 \(2\^50\)"),
        (["ranks=1025"], "ranks=1025: must be at most 1024"),
    ],
)  # fmt: skip
def test_what_is_too_large_is_refused_with_the_count(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("no schedule may be built")

    monkeypatch.setattr("ringattn.explain.choose_route", fail)
    with pytest.raises(InputError, match=message):
        explanation_of(load([*(["ranks=8"] if "ranks" not in arguments[0] else []), *arguments], ExplainConfig))


def test_plan_of_a_trillion_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"tokens={TRILLION}", "ranks=64", "batch=1000000000000"]) == 1
    assert "15,625,000,000 tokens per rank" in capsys.readouterr().out


def test_rows_picture_in_bins() -> None:
    from ringattn.launch.pictures.charts import branches_of, rows_of

    laid = make_layout("striped", 61, 3)
    problem = Problem(laid, laid, Dilated((30, 61), (1, 9)).mask(61, 61, None, None, 2, 2), 1, 2, 2, 8, 8, "float32")
    for branch, rank, width in product(branches_of(problem, 1), range(3), (1, 2, 4, 11, 26, 100)):
        fine, coarse = rows_of(problem, branch, rank), rows_of(problem, branch, rank, width)
        for line, bins in zip(fine, coarse, strict=True):
            padded = np.pad(line, (0, -len(line) % width)).reshape(-1, width).max(1)
            assert np.array_equal(bins, padded)


def test_the_rows_picture_of_a_trillion_tokens() -> None:
    from ringattn.launch.pictures.charts import COLUMNS, rows_of

    laid = make_layout("contiguous", TRILLION, 4)
    mask = Dilated((TRILLION,), (4,)).mask(TRILLION, TRILLION, None, None, 1, 1)
    problem = Problem(laid, laid, mask, 1, 1, 1, 8, 8, "float32")
    read, sent = rows_of(problem, mask.branches[0], 1, -(-TRILLION // COLUMNS))
    assert read.tolist() == [owner + 1 for owner in range(4) for _ in range(COLUMNS // 4)]
    assert np.flatnonzero(sent).tolist() == list(range(COLUMNS // 4, COLUMNS // 2))

"""The picture of dilated branches, what it is made of, and what `explain` says beside it."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from ringattn.core.dilation import Dilated
from ringattn.core.layout import make_layout
from ringattn.core.problem import Problem
from ringattn.errors import InputError
from ringattn.launch.pictures.charts import branches_of, rows_of
from ringattn.launch.pictures.show import ExplainConfig, explanation_of, main
from tests.core.dilated_reference import coverage

TOKENS, RANKS, HEADS = 61, 3, 4
BRANCHES = ((8, 30, 61), (1, 3, 4))


@pytest.mark.parametrize("head", range(HEADS))
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_rows_are_those_of_the_definition(layout: str, head: int) -> None:
    lay = make_layout(layout, TOKENS, RANKS)
    mask = Dilated(*BRANCHES).mask(TOKENS, TOKENS, None, None, HEADS, HEADS)
    problem = Problem(lay, lay, mask, 1, HEADS, HEADS, 8, 8, "float32")
    kept = coverage(TOKENS, HEADS, HEADS, *BRANCHES).numpy()[:, head]
    owner = np.empty(TOKENS, np.int64)
    for rank in range(RANKS):
        owner[lay.positions(rank)] = rank
    for width, keeps, branch in zip(BRANCHES[0], kept, branches_of(problem, head), strict=True):
        meets = keeps[:, None] & keeps[None, :] & (np.arange(TOKENS)[:, None] // width == np.arange(TOKENS) // width)
        for rank in range(RANKS):
            read, sent = rows_of(problem, branch, rank)
            assert np.array_equal(read, np.where(meets[owner == rank].any(0), owner + 1, 0))
            assert np.array_equal(sent > 0, meets[owner != rank].any(0) & (owner == rank))


WORDS = ["ranks=4", "tokens=1024", "causal=false", "heads=4", "kv_heads=4", "segment_lengths=[128,512,1024]",
         "dilation_rates=[1,4,8]"]  # fmt: skip


@pytest.mark.slow
def test_the_command_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, f"rows_picture={tmp_path / 'rows.png'}"]) == 0
    image = matplotlib.image.imread(tmp_path / "rows.png")
    assert image.shape[0] > 500 and len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 20
    told = capsys.readouterr().out
    # In all of K and V: 512 rows of r = 4 cross one of two borders, 3 * 64 of r = 8 reach three ranks; 4 heads of 128.
    assert "forward sends 1.05MB in all; a full ring 6.29MB (6 times), an all-gather of the sparse rows 2.36MB" in told


def test_without_dilation_there_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give segment_lengths= and dilation_rates="):
        main(["tokens=64", f"rows_picture={tmp_path / 'rows.png'}"])


@pytest.mark.slow
def test_the_worked_example() -> None:
    """2^20 tokens on 8 ranks: a full ring sends 299 times, LongNet's all-gather 4.08 times as much."""
    powers = [1 << i for i in range(10)]
    config = ExplainConfig(
        ranks=8, tokens=1 << 20, causal=False, heads=12, kv_heads=12, head_dim=64, backward=False,
        segment_lengths=[2048 * power for power in powers], dilation_rates=powers,
    )  # fmt: skip
    explanation = explanation_of(config)
    assert explanation.forward.name == "all_gather" and set(explanation.bytes_sent) == {9_437_184}
    assert "(299 times)" in str(explanation) and "all-gather of the sparse rows 308MB (4.08 times)" in str(explanation)

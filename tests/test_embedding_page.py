"""docs/embedding.md and its pages of other packages do what they say, on processes that torchrun starts."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from ringattn.testing import dense_attention
from tests.adapters.hosts import record
from tests.doc_code import run_page, run_page_under_torchrun


def test_the_page_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run_page("embedding.md")
    assert "equal to one process (loss " in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    assert run_page_under_torchrun("embedding.md", tmp_path, 2).count("equal to one process (loss ") == 2


@pytest.mark.slow
def test_replicas_of_rings_train_like_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    printed = run_page_under_torchrun("embedding-fsdp.md", tmp_path, 4)
    assert printed.count("FSDP2: ") == 4 and printed.count("accelerate: the same gradients") == 4
    losses = [(float(mine), float(true)) for mine, true in re.findall(r"FSDP2: (\S+), one process: (\S+)", printed)]
    # Six decimals are printed, so a difference that is not seen may be as large as the last.
    worst = max(max(abs(mine - true), 1e-6) / true for mine, true in losses)
    words = "loss of a step to six decimals, float32; the norm of the gradients is compared in the page"
    record("transformers", version("transformers"), "FSDP2", "exact", ranks=4, worst=worst, words=words)


def test_the_page_for_users_of_other_packages() -> None:
    """What stands in its last example is attention of the documents that it names, whole on every rank."""
    names = run_page("embedding-coming-from.md")
    q, k, v = (names[name].detach() for name in "qkv")
    expected, lse = dense_attention(q, k, v, causal=True, cu_seqlens=[0, 200, 601])
    torch.testing.assert_close(names["whole"].double(), expected, rtol=1e-5, atol=1e-5)
    assert names["lse"].shape == lse.shape


@pytest.mark.slow
def test_the_page_for_users_of_other_packages_on_two_ranks(tmp_path: Path) -> None:
    run_page_under_torchrun("embedding-coming-from.md", tmp_path, 2)

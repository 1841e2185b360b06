"""docs/embedding.md and docs/embedding-fsdp.md do what they say, on processes that torchrun starts."""

from __future__ import annotations

from pathlib import Path

import pytest

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

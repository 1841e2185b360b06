"""docs/embedding.md does what it says, on one process and on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doc_code import run_page_under_torchrun


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_page_runs(tmp_path: Path, ranks: int) -> None:
    assert run_page_under_torchrun("embedding.md", tmp_path, ranks).count("equal to one process (loss ") == ranks

"""Activation checkpointing in training loops and Trainers over two ranks: every combination is that of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

from tests.adapters.checkpoint_cells import CELLS, Cell
from tests.adapters.processes import run_program
from tests.adapters.test_trl import with_trl

TOLERANCE = 1e-11
QUICK = [
    Cell("transformers", "reentrant", "none", "packed", 3),
    Cell("transformers", "non-reentrant", "inside", "changing", 2),
    Cell("RingTrainerMixin", "reentrant", "none", "packed"),
    Cell("RingParallelismConfig", "reentrant", "none", "packed"),
]


def check(folder: Path, cells: list[Cell]) -> None:
    verdicts = json.loads((folder / "cells.json").read_text(encoding="utf-8"))
    assert list(verdicts) == [str(cell) for cell in cells]
    wrong = {name: verdict for name, verdict in verdicts.items() if isinstance(verdict, str) or not verdict < TOLERANCE}
    assert not wrong


def test_some_cells(tmp_path: Path) -> None:
    """Batches with as many local tokens and other documents, which each step distinguishes by the sequence alone."""
    run_program("-m", "tests.adapters.checkpoint_cells", str(tmp_path), *map(str, QUICK), timeout_s=120.0)
    check(tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_packed_cells(tmp_path: Path) -> None:
    """Every host, kind and compiler setting. The other data and passes take too long; the module computes them."""
    cells = [cell for cell in CELLS if cell.data == "packed" and cell.passes in (1, 3)]
    assert len(CELLS) == 108 and len(cells) == 30
    arguments = "-m", "tests.adapters.checkpoint_cells", str(tmp_path), *map(str, cells)
    run_program(*arguments, timeout_s=580.0, **with_trl())
    check(tmp_path, cells)

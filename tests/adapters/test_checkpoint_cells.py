"""Activation checkpointing in training loops over two ranks: every combination equals one process."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.adapters.checkpoint_cells import CELLS, Cell
from tests.adapters.processes import call_in_program

QUICK = [Cell("reentrant", "none", "packed", 3), Cell("non-reentrant", "none", "changing", 2)]
PACKED = [cell for cell in CELLS if cell.data == "packed" and cell.passes in (1, 3)]
"""Every kind and compiler setting. The other data and passes take too long."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cells", [QUICK, pytest.param(PACKED, marks=pytest.mark.slow)], ids=["quick", "packed"])
def test_training_loops(cells: list[Cell]) -> None:
    """Every cell equals one process. Packed batches have equal shapes, so only the sequence tells their documents."""
    errors = call_in_program("tests.adapters.checkpoint_cells:compute_errors", *cells, timeout_s=580.0)
    assert len(errors) == len(cells)
    wrong = [(cell, error) for cell, error in zip(cells, errors, strict=True) if not error < 1e-11]
    assert not wrong

"""Activation checkpointing in training loops over two ranks: every combination equals one process."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.adapters.checkpoint_cells import CELLS, Cell
from tests.adapters.processes import call_in_program

SOME = [cell for cell in CELLS if cell.data == "packed" and cell.passes in (1, 3)]
SOME.append(Cell("non-reentrant", "none", "changing", 2))
"""Every kind and compiler setting. The other data and passes take too long."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_loops() -> None:
    """Every cell equals one process. Packed batches have equal shapes, so only the sequence tells their documents."""
    errors = call_in_program("tests.adapters.checkpoint_cells:compute_errors", *SOME, timeout_s=580.0)
    assert len(errors) == len(SOME)
    wrong = [(cell, error) for cell, error in zip(SOME, errors, strict=True) if not error < 1e-11]
    assert not wrong

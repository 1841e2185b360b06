"""The data-movement and projection kernels: their suites in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.interpreted import outcomes_of

pytestmark = pytest.mark.alone

FEWEST = 60  # tests; fewer have not been collected


@pytest.mark.unchanged("row kernels in the interpreter")
@pytest.mark.timeout(1200)
def test_in_the_interpreter(tmp_path: Path) -> None:
    outcomes = outcomes_of(["tests/kernels/interpreter_rows"], tmp_path)
    failed = {name: why for name, why in outcomes.items() if why}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert len(outcomes) >= FEWEST

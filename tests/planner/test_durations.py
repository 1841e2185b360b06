"""Durations in words: four digits, the unit that suits, and no powers of ten."""

from __future__ import annotations

import pytest

from ringattn.planner.simulate import duration


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "0 us"),
        (4e-9, "<0.01 us"),
        (2.5e-8, "0.025 us"),
        (163.24e-6, "163.2 us"),
        (0.99996e-3, "1 ms"),
        (15.325e-3, "15.32 ms"),
        (0.99999, "1 s"),
        (999.94, "999.9 s"),
        (999.96, "1,000 s"),
        (49_148_257.2, "49,148,257 s"),
    ],
)
def test_durations(seconds: float, told: str) -> None:
    assert duration(seconds) == told

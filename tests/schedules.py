"""The schedules that tests run.

In an expensive grid, each cell runs a different share of them. `NEWER` schedules are built from parts of the other
schedules, so some grids run them only in slow tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ringattn.schedule.routes import ROUTES

(
    RING, ALL_GATHER, DIRECT, SUB_RINGS, ULYSSES, BIDIRECTIONAL, DOUBLE_RING, ULYSSES_RING, PASS_Q, BALANCED,
    NODE_GATHER,
) = ROUTES.values()  # fmt: skip

NEWER = ("bidirectional", "double_ring", "ulysses_ring", "pass_q", "balanced", "node_gather")


def share_in_turn(number: int, parts: int) -> list[str]:
    """Return one of `parts` shares of the schedules. Any `parts` consecutive numbers cover all schedules."""
    return list(ROUTES)[number % parts :: parts]


def schedule_params(quick: Sequence[str] = ("double_ring", "balanced"), **values: Any) -> list[Any]:
    """Return a pytest parameter per schedule: its value in `values`, or its name.

    `NEWER` schedules are marked slow unless they are in `quick`.
    """
    slow = set(NEWER) - set(quick)
    return [
        pytest.param(values.get(name, name), marks=pytest.mark.slow if name in slow else (), id=name) for name in ROUTES
    ]

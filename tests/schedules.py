"""The schedules that a test tries.

Expensive grids try a share of them, in turn. `NEWER` schedules are built from parts of the others, so some grids try
them only in slow tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ringattn.schedule.routes import ROUTES

RING, ALL_GATHER, DIRECT, SUB_RINGS, ULYSSES, BIDIRECTIONAL, DOUBLE_RING, ULYSSES_RING, PASS_Q, BALANCED = (
    ROUTES.values()
)

NEWER = ("bidirectional", "double_ring", "ulysses_ring", "pass_q", "balanced")


def share_in_turn(number: int, parts: int) -> list[str]:
    """Return one of `parts` shares of the schedules; cells with consecutive numbers cover all of them."""
    return list(ROUTES)[number % parts :: parts]


def schedule_params(quick: Sequence[str] = ("double_ring", "balanced"), **values: Any) -> list[Any]:
    """Return a parameter per schedule, its name or its value in `values`; `NEWER` ones not in `quick` are slow."""
    slow = set(NEWER) - set(quick)
    return [
        pytest.param(values.get(name, name), marks=pytest.mark.slow if name in slow else (), id=name) for name in ROUTES
    ]

"""Which schedules a test tries.

`NEWER` schedules are made of the parts of the others: heavy grids try one of them, in turn; the slow tests try all,
`ringattn check` over processes among them.
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


OTHERS = tuple(name for name in ROUTES if name not in NEWER)


def schedules_in_turn(number: int) -> list[str]:
    """The others, and one of the `NEWER`."""
    return [*OTHERS, NEWER[number % len(NEWER)]]


def half_in_turn(number: int, half: int) -> list[str]:
    """Half of the others, and one of the `NEWER`."""
    return [*OTHERS[half::2], NEWER[(number + half) % len(NEWER)]]


def share_in_turn(number: int, parts: int) -> list[str]:
    """As many cells that follow each other take all of them."""
    return list(ROUTES)[number % parts :: parts]


def schedule_params(quick: Sequence[str] = ("double_ring", "balanced"), **values: Any) -> list[Any]:
    """A parameter for every schedule, its name or its value in `values`; `NEWER` ones that are not `quick` are slow."""
    slow = set(NEWER) - set(quick)
    return [
        pytest.param(values.get(name, name), marks=pytest.mark.slow if name in slow else (), id=name) for name in ROUTES
    ]

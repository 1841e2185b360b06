"""Plans that are broken on purpose: poison or the reference must show each fault.

A wait that is left out is in `test_nccl_races.py`; bytes that move as late as they may in `test_exact_nccl.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.planner.choose import plan_of
from ringattn.planner.plan import Add, AttendOp, Plan, PlanStep
from ringattn.testing import run_ranks
from tests.poison import unset_is_nan
from tests.trial import Trial, greatest_error, joined, on_rank, reference

TRIAL = Trial(tokens=32, causal=True, heads=(2, 1))


def with_first(whole: Plan, change: Callable[[PlanStep], dict[str, Any] | None]) -> Plan:
    """The plan with its first step changed for which `change` gives something."""
    at, changes = next((at, found) for at, step in enumerate(whole.steps) if (found := change(step)) is not None)
    return replace(whole, steps=(*whole.steps[:at], whole.steps[at]._replace(**changes), *whole.steps[at + 1 :]))


def without(what: type) -> Callable[[Plan], Plan]:
    """Leave out the first piece of work of some kind."""

    def change(step: PlanStep) -> dict[str, Any] | None:
        items = [item for item in step.work if isinstance(item, what)]
        return {"work": tuple(item for item in step.work if item is not items[0])} if items else None

    return lambda whole: with_first(whole, change)


def unzeroed(whole: Plan) -> Plan:
    """Rows of a relayed sum that the rank adds nothing to stay unset."""
    return with_first(whole, lambda step: {"zeros": ()} if step.zeros else None)


def with_flag(what: type, overwrite: bool) -> Callable[[Plan], Plan]:
    """The flag of the first work of some kind that has the other."""

    def change(step: PlanStep) -> dict[str, Any] | None:
        at = next(
            (n for n, item in enumerate(step.work) if isinstance(item, what) and item.overwrite != overwrite), None
        )
        if at is None:
            return None
        return {"work": (*step.work[:at], step.work[at]._replace(overwrite=overwrite), *step.work[at + 1 :])}

    return lambda whole: with_first(whole, change)


def unpacked(whole: Plan) -> Plan:
    return with_first(whole, lambda step: {"packs": ()} if step.packs else None)


@pytest.mark.parametrize(
    ("backward", "change"),
    [
        (False, without(AttendOp)),
        (True, without(AttendOp)),
        (True, without(Add)),
        (True, unzeroed),
        (True, with_flag(AttendOp, overwrite=False)),
        (True, with_flag(Add, overwrite=True)),
        (False, unpacked),
        (True, unpacked),
    ],
    ids=[
        "no attend",
        "no gradient",
        "no merge",
        "not zeroed",
        "not the first",
        "first too late",
        "not packed",
        "not packed, backward",
    ],
)
def test_a_broken_plan_gives_wrong_results(
    monkeypatch: pytest.MonkeyPatch, backward: bool, change: Callable[[Plan], Plan]
) -> None:
    # Rank 3 of a zigzag has all: a sum that it relays, of which it sees a part.
    def changed(problem: Any, route: Any, rank: int, back: bool) -> Plan:
        plan = plan_of(problem, route, rank, back)
        return change(plan) if rank == 3 and back == backward else plan

    def greatest() -> float:
        with unset_is_nan():
            parts = run_ranks(
                4, lambda ring: on_rank(ring, TRIAL, "zigzag", "ring", torch.float64), engine="plain", poison=True
            )
        return greatest_error(joined(parts), reference(TRIAL, torch.float64))

    assert greatest() <= 1e-10
    monkeypatch.setattr("ringattn.runtime.runtime.plan_of", changed)
    assert greatest() > 1e-3

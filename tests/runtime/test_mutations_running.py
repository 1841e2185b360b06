"""Poisoned memory, or the comparison with the reference, reveals the fault of each of these wrong plans.

Omitted waits are tested in `test_nccl_races.py`, and bytes that arrive as late as possible in `test_exact_nccl.py`.
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


def change_first_step(plan: Plan, change: Callable[[PlanStep], dict[str, Any] | None]) -> Plan:
    """Return the plan with one step changed.

    `change` returns new fields for a step, or None. The first step for which it returns fields is changed.
    """
    index, changes = next(
        (index, changes_of_step)
        for index, step in enumerate(plan.steps)
        if (changes_of_step := change(step)) is not None
    )
    return replace(plan, steps=(*plan.steps[:index], plan.steps[index]._replace(**changes), *plan.steps[index + 1 :]))


def leave_out(kind: type) -> Callable[[Plan], Plan]:
    """Return a mutation of plans that leaves out the first operation of type `kind`."""

    def change(step: PlanStep) -> dict[str, Any] | None:
        items = [item for item in step.work if isinstance(item, kind)]
        return {"work": tuple(item for item in step.work if item is not items[0])} if items else None

    return lambda whole: change_first_step(whole, change)


def leave_out_zeros(whole: Plan) -> Plan:
    """Return the plan without the zeroing of rows in its first relayed sum to which the rank adds nothing."""
    return change_first_step(whole, lambda step: {"zeros": ()} if step.zeros else None)


def flip_overwrite(kind: type, overwrite: bool) -> Callable[[Plan], Plan]:
    """Return a mutation of plans that flips the flag `overwrite` of an operation.

    The flag is set to the given value in the first operation of type `kind` that has the opposite value.
    """

    def change(step: PlanStep) -> dict[str, Any] | None:
        index = next(
            (n for n, item in enumerate(step.work) if isinstance(item, kind) and item.overwrite != overwrite), None
        )
        if index is None:
            return None
        return {"work": (*step.work[:index], step.work[index]._replace(overwrite=overwrite), *step.work[index + 1 :])}

    return lambda whole: change_first_step(whole, change)


def leave_out_packs(whole: Plan) -> Plan:
    return change_first_step(whole, lambda step: {"packs": ()} if step.packs else None)


@pytest.mark.parametrize(
    ("backward", "change"),
    [
        (False, leave_out(AttendOp)),
        (True, leave_out(AttendOp)),
        (True, leave_out(Add)),
        (True, leave_out_zeros),
        (True, flip_overwrite(AttendOp, overwrite=False)),
        (True, flip_overwrite(Add, overwrite=True)),
        (False, leave_out_packs),
        (True, leave_out_packs),
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
    # Rank 3 of a zigzag has every kind of operation: it relays sums of dK/dV, and adds only to some of their rows.
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

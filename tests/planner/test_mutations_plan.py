"""Mutation tests: `verify_placement` or `check_overwrites` finds the fault in each of these wrong plans.

test_place.py tests that every correct plan passes both checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ringattn.errors import PlanError
from ringattn.planner.choose import plan_of
from ringattn.planner.plan import LOCAL, Add, AttendOp, OwnSums, Plan
from ringattn.schedule.content import size
from ringattn.schedule.routes import ROUTES
from tests.planner.placement_verifier import verify_placement
from tests.planner.visit_check import adds_of, check_overwrites
from tests.strategies import simple

CASE = simple("zigzag", 32, 4, heads=4, causal=True)
each_route = pytest.mark.parametrize("route", ROUTES)
each_pass = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def plan(route: str, backward: bool) -> Plan:
    """Return a correct plan, to be mutated."""
    verified = plan_of(CASE.problem, ROUTES[route], 1, backward)
    verify_placement(verified)
    return verified


def with_plan_step(whole: Plan, index: int, **changes: Any) -> Plan:
    """Return the plan with `changes` to the fields of one step."""
    step = whole.steps[index]._replace(**changes)
    return replace(whole, steps=(*whole.steps[:index], step, *whole.steps[index + 1 :]))


def moved(whole: Plan, buffer: int, offset_bytes: int) -> Plan:
    """Return the plan with one buffer at another offset."""
    buffers = list(whole.buffers)
    buffers[buffer] = buffers[buffer]._replace(offset_bytes=offset_bytes)
    return replace(whole, buffers=tuple(buffers))


def concurrent_pairs(whole: Plan) -> list[tuple[int, int]]:
    """Return the pairs of buffers that live at the same time. Instead of fused buffers, their parts are returned."""
    spans, filled = [(buffer.first, buffer.last) for buffer in whole.buffers], leaves(whole)
    return [(a, b) for a in filled for b in filled
            if b < a and spans[a][0] <= spans[b][1] and spans[b][0] <= spans[a][1]]  # fmt: skip


def leaves(whole: Plan) -> list[int]:
    """Return the indices of the buffers that contain no other buffers."""
    outer = {buffer.inside.buffer for buffer in whole.buffers if buffer.inside is not None}
    return [index for index in range(len(whole.buffers)) if index not in outer]


@each_route
@each_pass
def test_two_live_buffers_in_the_same_bytes(route: str, backward: bool) -> None:
    whole = plan(route, backward)
    whole = replace(whole, arena_bytes=2 * whole.arena_bytes)
    for first, second in concurrent_pairs(whole):
        with pytest.raises(PlanError, match=r"rank 1: .* live at the same time in the same bytes"):
            verify_placement(moved(whole, first, whole.buffers[second].offset_bytes))


def test_a_part_outside_its_buffer() -> None:
    whole = plan("ulysses", False)
    part = next(index for index, buffer in enumerate(whole.buffers) if buffer.inside is not None)
    whole = replace(whole, arena_bytes=2 * whole.arena_bytes)
    with pytest.raises(PlanError, match=r"rank 1: .* is not inside \w+ received for step 1"):
        verify_placement(moved(whole, part, whole.arena_bytes // 2))


@each_route
@each_pass
def test_a_slot_outside_the_arena(route: str, backward: bool) -> None:
    whole = plan(route, backward)
    for offset_bytes in (-1, whole.arena_bytes):
        with pytest.raises(PlanError, match=r"is outside the arena"):
            verify_placement(moved(whole, leaves(whole)[0], offset_bytes))


@each_route
@each_pass
@pytest.mark.parametrize("field", ["packs", "recvs"])
def test_a_buffer_that_is_never_filled(route: str, backward: bool, field: str) -> None:
    whole = plan(route, backward)
    index = next(index for index, step in enumerate(whole.steps) if getattr(step, field))
    with pytest.raises(PlanError, match=r"is read too early|leaves a gap in its buffer"):
        verify_placement(with_plan_step(whole, index, **{field: ()}))


@each_route
def test_a_sum_that_is_never_initialized(route: str) -> None:
    whole = plan(route, True)
    assert not any(step.zeros or item.overwrite for step in plan(route, False).steps for item in step.work)
    begun = [any(not isinstance(item, Add) and item.overwrite and item.dkv != LOCAL for item in step.work)
             for step in whole.steps]  # fmt: skip
    index = begun.index(True)
    work = tuple(item._replace(overwrite=False) for item in whole.steps[index].work)
    with pytest.raises(PlanError, match=r"is read too early"):
        verify_placement(with_plan_step(whole, index, work=work, zeros=()))


@each_route
@each_pass
def test_a_message_past_the_end_of_its_buffer(route: str, backward: bool) -> None:
    whole = plan(route, backward)
    index = next(index for index, step in enumerate(whole.steps) if step.sends)
    for changes in ({"elements": 10**6}, {"first": 10**6}, {"first": -(10**6)}):
        sends = tuple(
            send._replace(**{name: getattr(send, name) + by for name, by in changes.items()})
            for send in whole.steps[index].sends
        )
        with pytest.raises(PlanError, match=r"rank 1, step \d: the message .*(KV|Q|OUT)\d.* ends outside its buffer"):
            verify_placement(with_plan_step(whole, index, sends=sends))


@each_route
def test_a_received_sum_added_too_early(route: str) -> None:
    whole = plan(route, True)
    received = {recv.buffer for step in whole.steps for recv in step.recvs}
    adds_by_step = [
        [item for item in step.work if isinstance(item, Add) and item.part in received] for step in whole.steps
    ]
    index, adds = next((index, adds) for index, adds in enumerate(adds_by_step) if adds)
    early = with_plan_step(whole, index, work=tuple(item for item in whole.steps[index].work if item not in adds))
    early = with_plan_step(early, index - 1, work=(*whole.steps[index - 1].work, *adds))
    with pytest.raises(PlanError, match=r"is read too early"):
        verify_placement(early)


@each_pass
def test_keys_read_in_the_step_that_receives_them(backward: bool) -> None:
    whole = plan("ring", backward)
    index = next(index for index, step in enumerate(whole.steps) if step.recvs)
    buffer = whole.steps[index].recvs[0].buffer
    updates = (item for step in whole.steps for item in step.work if isinstance(item, AttendOp))
    update = next(item for item in updates if item.kv == buffer)
    with pytest.raises(PlanError, match=r"is read too early"):
        verify_placement(with_plan_step(whole, index, work=(*whole.steps[index].work, update)))


def test_a_buffer_filled_twice() -> None:
    whole = plan("ring", False)
    index = next(index for index, step in enumerate(whole.steps) if step.recvs)
    with pytest.raises(PlanError, match=r"is filled twice"):
        verify_placement(with_plan_step(whole, index + 1, recvs=whole.steps[index].recvs))


# --- which work overwrites rows of dK/dV and which is the last to add to them: savings by hand, and wrong flags -------


RANKS = 4


def plans(layout: str, route: str, ranks: int = RANKS, **mask: object) -> list[Plan]:
    """Return the backward plans of all ranks."""
    problem = simple(layout, 64, ranks, heads=4, **mask).problem  # type: ignore[arg-type]
    return [plan_of(problem, ROUTES[route], rank, True) for rank in range(ranks)]


def zeroed(plan: Plan) -> int:
    """Return how many (row, K/V head) records of dK/dV buffers the plan sets to zero."""
    return sum(size(zero.rows) for step in plan.steps for zero in step.zeros)


@pytest.mark.parametrize("route", ["ring", "all_gather", "sub_rings", "ulysses"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_no_local_row_is_zeroed(layout: str, route: str) -> None:
    """No rank sets its accumulators of dK/dV to zero, because the first work on each row overwrites it.

    In a contiguous causal layout, no other rank reads the last rank's keys, so this rank needs no accumulators.
    """
    ends = OwnSums.NONE if layout == "contiguous" else OwnSums.UNSET
    assert [plan.own_sums for plan in plans(layout, route, causal=True)] == [OwnSums.UNSET] * (RANKS - 1) + [ends]


def test_local_rows_are_zeroed_if_a_work_touches_set_and_unset_rows() -> None:
    """A rank zeroes its accumulators if one work would write to rows that are set and to rows that are not.

    In a zigzag, rank 0 receives sums for its first keys from other ranks before its own work on all of its keys.
    """
    own_sums = [plan.own_sums for plan in plans("zigzag", "direct", causal=True)]
    assert own_sums == [OwnSums.ZEROED] + [OwnSums.UNSET] * (RANKS - 1)


def test_a_single_rank_has_no_sums() -> None:
    (plan,) = plans("contiguous", "ring", ranks=1, causal=True)
    assert plan.own_sums is OwnSums.NONE and zeroed(plan) == 0


def test_a_relay_zeroes_only_rows_to_which_it_adds_nothing() -> None:
    """A rank that relays sums of dK/dV zeroes only the rows that its own work does not write.

    In a zigzag, rank 3 reads only the first half of the blocks of ranks 1 and 2, but it relays the sums of all rows. So
    it zeroes 8 rows of 4 heads in each block.
    """
    assert [zeroed(plan) for plan in plans("zigzag", "ring", causal=True)] == [0, 0, 4 * 8, 2 * 4 * 8]
    assert [zeroed(plan) for plan in plans("contiguous", "ring", causal=True)] == [0] * RANKS


def changed(plan: Plan, change: Callable[[AttendOp], AttendOp], only_own: bool = False) -> Plan:
    """Return the plan with `change` applied to its attention updates, or only to those on the local dK/dV."""
    steps = [
        step._replace(work=tuple(
            change(item) if isinstance(item, AttendOp) and (item.dkv == LOCAL or not only_own) else item
            for item in step.work
        ))
        for step in plan.steps
    ]  # fmt: skip
    return replace(plan, steps=tuple(steps))


def first_missing(plan: Plan) -> Plan:
    return changed(plan, lambda item: item._replace(overwrite=False))


def first_too_late(plan: Plan) -> Plan:
    """Return the plan in which a received sum overwrites rows to which the rank's own work has already added."""
    ((now, n),) = adds_of(plan)
    work = list(plan.steps[now].work)
    work[n] = work[n]._replace(overwrite=True)
    return with_plan_step(plan, now, work=tuple(work))


def last_too_early(plan: Plan) -> Plan:
    return changed(plan, lambda item: item._replace(last=True), only_own=True)


def left_unset(plan: Plan) -> Plan:
    return replace(plan, steps=tuple(step._replace(zeros=()) for step in plan.steps))


@pytest.mark.parametrize(
    ("change", "rank", "message"),
    [
        (first_missing, 1, "adds to rows that are not set"),
        (first_too_late, 1, "Add overwrites rows that are set"),
        (last_too_early, 1, "Add adds to rows that are final"),
        (left_unset, 3, "rows that are (not|never) set"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_flag(change: Callable[[Plan], Plan], rank: int, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_overwrites(change(plans("zigzag", "ring", causal=True)[rank]))

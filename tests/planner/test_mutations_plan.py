"""Broken on purpose: plans with one fault each, which `verify_placement` must find.

Not covered: what a good plan looks like (see test_place.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ringattn.errors import PlanError
from ringattn.planner.choose import plan_of
from ringattn.planner.plan import LOCAL, Add, AttendOp, Plan, buffer_bytes
from ringattn.schedule.routes import ROUTES
from tests.planner.placement_verifier import verify_placement
from tests.strategies import simple

CASE = simple("zigzag", 32, 4, heads=4, causal=True)
each_route = pytest.mark.parametrize("route", ROUTES)
each_pass = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def plan(route: str, backward: bool) -> Plan:
    """A sound plan to break."""
    found = plan_of(CASE.problem, ROUTES[route], 1, backward)
    verify_placement(found)
    return found


def with_plan_step(whole: Plan, at: int, **changes: Any) -> Plan:
    """The plan with one step changed."""
    return replace(whole, steps=(*whole.steps[:at], whole.steps[at]._replace(**changes), *whole.steps[at + 1 :]))


def nbytes(whole: Plan, buffer: int) -> int:
    """Bytes of a buffer."""
    return buffer_bytes(whole.problem, whole.buffers[buffer])


def moved(whole: Plan, buffer: int, offset_bytes: int) -> Plan:
    """The plan with one buffer elsewhere."""
    buffers = list(whole.buffers)
    buffers[buffer] = buffers[buffer]._replace(offset_bytes=offset_bytes)
    return replace(whole, buffers=tuple(buffers))


def together(whole: Plan) -> list[tuple[int, int]]:
    """Pairs of buffers that live in a common step; of what lies in one buffer, the parts."""
    spans, filled = [(one.first, one.last) for one in whole.buffers], leaves(whole)
    return [(a, b) for a in filled for b in filled
            if b < a and spans[a][0] <= spans[b][1] and spans[b][0] <= spans[a][1]]  # fmt: skip


def leaves(whole: Plan) -> list[int]:
    """The buffers with no others inside."""
    outer = {one.inside.buffer for one in whole.buffers if one.inside is not None}
    return [index for index in range(len(whole.buffers)) if index not in outer]


@each_route
@each_pass
def test_two_live_buffers_in_the_same_bytes(route: str, backward: bool) -> None:
    whole = plan(route, backward)
    whole = replace(whole, arena_bytes=2 * whole.arena_bytes)
    for one, other in together(whole):
        with pytest.raises(PlanError, match=r"rank 1: .* live at the same time in the same bytes"):
            verify_placement(moved(whole, one, whole.buffers[other].offset_bytes))


def test_a_part_that_lies_elsewhere() -> None:
    whole = plan("ulysses", False)
    part = next(index for index, one in enumerate(whole.buffers) if one.inside is not None)
    whole = replace(whole, arena_bytes=2 * whole.arena_bytes)
    with pytest.raises(PlanError, match=r"rank 1: .* does not lie in \w+ received for step 1"):
        verify_placement(moved(whole, part, whole.arena_bytes // 2))


def test_swapped_slots() -> None:
    # Swapped with one that lives at another time, a buffer lands on a third that lives beside it.
    whole, found = plan("ring", True), 0
    for one in range(len(whole.buffers)):
        for other in range(one):
            offsets = whole.buffers[one].offset_bytes, whole.buffers[other].offset_bytes
            swapped = moved(moved(whole, one, offsets[1]), other, offsets[0])
            spans = [(b.offset_bytes, b.offset_bytes + nbytes(whole, n)) for n, b in enumerate(swapped.buffers)]
            clash = any(spans[a][0] < spans[b][1] and spans[b][0] < spans[a][1] for a, b in together(whole))
            if clash or max(end for _, end in spans) > whole.arena_bytes:
                found += 1
                with pytest.raises(PlanError, match=r"live at the same time|outside the arena"):
                    verify_placement(swapped)
            else:
                verify_placement(swapped)
    assert found > 5


@each_route
@each_pass
def test_a_slot_outside_the_arena(route: str, backward: bool) -> None:
    whole = plan(route, backward)
    for offset_bytes in (-1, whole.arena_bytes):
        with pytest.raises(PlanError, match=r"lies outside the arena"):
            verify_placement(moved(whole, leaves(whole)[0], offset_bytes))


@each_route
@each_pass
@pytest.mark.parametrize("what", ["packs", "recvs"])
def test_a_buffer_that_nobody_fills(route: str, backward: bool, what: str) -> None:
    whole = plan(route, backward)
    at = next(at for at, step in enumerate(whole.steps) if getattr(step, what))
    with pytest.raises(PlanError, match=r"is read too early|leaves a gap in its buffer"):
        verify_placement(with_plan_step(whole, at, **{what: ()}))


@each_route
def test_a_sum_that_nobody_begins(route: str) -> None:
    whole = plan(route, True)
    assert not any(step.zeros or item.first for step in plan(route, False).steps for item in step.work)
    begun = [any(not isinstance(item, Add) and item.first and item.dkv != LOCAL for item in step.work)
             for step in whole.steps]  # fmt: skip
    at = begun.index(True)
    work = tuple(item._replace(first=False) for item in whole.steps[at].work)
    with pytest.raises(PlanError, match=r"is read too early"):
        verify_placement(with_plan_step(whole, at, work=work, zeros=()))


@each_route
@each_pass
def test_a_message_past_the_end_of_its_buffer(route: str, backward: bool) -> None:
    whole = plan(route, backward)
    at = next(at for at, step in enumerate(whole.steps) if step.sends)
    for changes in ({"elements": 10**6}, {"first": 10**6}, {"first": -(10**6)}):
        sends = tuple(
            send._replace(**{name: getattr(send, name) + by for name, by in changes.items()})
            for send in whole.steps[at].sends
        )
        with pytest.raises(PlanError, match=r"rank 1, step \d: the message .*(KV|Q|OUT)\d.* ends outside its buffer"):
            verify_placement(with_plan_step(whole, at, sends=sends))


@each_route
def test_an_arrived_sum_added_too_early(route: str) -> None:
    whole = plan(route, True)
    received = {recv.buffer for step in whole.steps for recv in step.recvs}
    found = [[item for item in step.work if isinstance(item, Add) and item.part in received] for step in whole.steps]
    at, adds = next((at, adds) for at, adds in enumerate(found) if adds)
    early = with_plan_step(whole, at, work=tuple(item for item in whole.steps[at].work if item not in adds))
    early = with_plan_step(early, at - 1, work=(*whole.steps[at - 1].work, *adds))
    with pytest.raises(PlanError, match=r"is read too early"):
        verify_placement(early)


@each_pass
def test_keys_read_in_the_step_that_receives_them(backward: bool) -> None:
    whole = plan("ring", backward)
    at = next(at for at, step in enumerate(whole.steps) if step.recvs)
    buffer = whole.steps[at].recvs[0].buffer
    fold = next(item for step in whole.steps for item in step.work if isinstance(item, AttendOp) and item.kv == buffer)
    with pytest.raises(PlanError, match=r"is read too early"):
        verify_placement(with_plan_step(whole, at, work=(*whole.steps[at].work, fold)))


def test_a_buffer_filled_twice() -> None:
    whole = plan("ring", False)
    at = next(at for at, step in enumerate(whole.steps) if step.recvs)
    with pytest.raises(PlanError, match=r"is filled twice"):
        verify_placement(with_plan_step(whole, at + 1, recvs=whole.steps[at].recvs))

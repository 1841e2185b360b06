"""Broken on purpose: plans and transports with a fault each, which poison, transport or reference must show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.errors import TransportError
from ringattn.planner.choose import plan_of
from ringattn.planner.plan import Add, AttendOp, Plan, PlanStep
from ringattn.ring import Ring
from ringattn.testing import run_ranks
from ringattn.transport.base import Message, Rebound
from tests.poison import unset_is_nan
from tests.schedules import RING
from tests.strategies import simple
from tests.trial import Trial, greatest_error, joined, on_rank, reference

TRIAL = Trial(tokens=32, causal=True, heads=(2, 1))
CASE = simple("zigzag", 32, 4, causal=True)


def with_plan_step(whole: Plan, at: int, **changes: Any) -> Plan:
    """The plan with one step changed."""
    return replace(whole, steps=(*whole.steps[:at], whole.steps[at]._replace(**changes), *whole.steps[at + 1 :]))


def outcome(
    prepare: Callable[[Ring], None], trial: Trial = TRIAL, layout: str = "zigzag", schedule: str = "ring"
) -> float | str:
    """The greatest error of a trial on four ranks after `prepare(ring)` on each, or what the transport said."""

    def body(ring: Ring) -> dict[str, torch.Tensor]:
        prepare(ring)
        return on_rank(ring, trial, layout, schedule, torch.float64)

    try:
        with unset_is_nan():
            parts = run_ranks(4, body, engine="plain", poison=True, timeout_s=5.0)
    except TransportError as error:
        return str(error)
    return greatest_error(joined(parts), reference(trial, torch.float64))


class Late:
    """A transport whose messages arrive only at `wait`, as late as its promise allows; some waits may be skipped."""

    def __init__(self, inner: Any, skip: int | None) -> None:
        self._inner, self._skip, self._exchanges = inner, skip, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def bind(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        """Through this `exchange`, not the inner one's."""
        return Rebound(self, sends, recvs)  # type: ignore[arg-type]

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Any:
        """Receive into buffers of its own; `wait` hands their contents over, unless it is the one to skip."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        private = [message._replace(buffer=torch.empty_like(message.buffer)) for message in recvs]
        ticket = self._inner.exchange(sends, private)
        return Handover(ticket, recvs, private, skipped=number == self._skip)


class Handover:
    """The ticket of a late exchange."""

    def __init__(self, ticket: Any, recvs: Sequence[Message], private: Sequence[Message], skipped: bool) -> None:
        self._ticket, self._recvs, self._private, self._skipped = ticket, recvs, private, skipped

    def wait(self) -> None:
        """Return when everything has arrived; a skipped wait moves the bytes on and forgets to hand them over."""
        self._ticket.wait()
        for message, mine in zip(self._recvs, self._private, strict=True):
            if not self._skipped:
                message.buffer.copy_(mine.buffer)


def late(skip: int | None, rank: int = 1) -> Callable[[Ring], None]:
    """Every rank's messages arrive late; `rank` never gets those of exchange number `skip`."""

    def prepare(ring: Ring) -> None:
        ring.transport = Late(ring.transport, skip if ring.rank == rank else None)

    return prepare


STEPS = [step for backward in (False, True) for step in plan_of(CASE.problem, RING, 1, backward).steps]
EXCHANGES = sum(bool(step.sends or step.recvs) for step in STEPS)


def test_messages_may_arrive_as_late_as_their_wait() -> None:
    def prepare(ring: Ring) -> None:
        late(None)(ring)
        late_transports.append(ring.transport)

    late_transports: list[Any] = []
    assert outcome(prepare) == outcome(lambda ring: None) <= 1e-10
    assert max(transport._exchanges for transport in late_transports) == EXCHANGES


@pytest.mark.parametrize("skip", range(EXCHANGES))
def test_a_skipped_wait_shows(skip: int) -> None:
    found = outcome(late(skip))
    assert isinstance(found, float) and found > 1e-3  # poison, or rows of an earlier buffer


def break_plan(patch: pytest.MonkeyPatch, backward: bool, change: Callable[[Plan], Plan], broken: int = 1) -> None:
    """From now on rank `broken` runs a changed plan."""

    def changed(problem: Any, route: Any, rank: int, back: bool) -> Plan:
        found = plan_of(problem, route, rank, back)
        return change(found) if rank == broken and back == backward else found

    patch.setattr("ringattn.runtime.runtime.plan_of", changed)


def with_first(whole: Plan, change: Callable[[PlanStep], dict[str, Any] | None]) -> Plan:
    """The plan with its first step changed for which `change` gives something."""
    at, changes = next((at, found) for at, step in enumerate(whole.steps) if (found := change(step)) is not None)
    return with_plan_step(whole, at, **changes)


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
    break_plan(monkeypatch, backward, change, broken=3)
    found = outcome(lambda ring: None)
    assert isinstance(found, float) and found > 1e-3

"""All orders of a machine's operations, or one at random, and the properties of each."""

from __future__ import annotations

import random

from tests.transport.peer_model.machine import Machine
from tests.transport.peer_model.state import At, State, Violation


class Explored(Exception):
    """Too many states for the limit."""


def explore(machine: Machine, limit: int = 2_000_000) -> int:
    """Visit every state that any order reaches; how many there are. Raises `Violation` with the way to the first."""
    first = machine.settle(machine.first())
    seen: dict[State, tuple[State, str] | None] = {first: None}
    todo = [first]
    while todo:
        state = todo.pop()
        moved = False
        try:
            for what, after in machine.moves(state):
                moved = True
                _visit(machine.settle(after), state, what, seen, todo)
            if not moved and (stuck := machine.stuck(state)):
                raise Violation("liveness", stuck)
            for what, after in machine.faults(state):
                _visit(machine.settle(after), state, what, seen, todo)
        except Violation as found:
            raise Violation(found.rule, f"{found.args[0]}\n  after {'; '.join(_way(seen, state))}") from None
        if len(seen) > limit:
            raise Explored(f"more than {limit} states")
    return len(seen)


def _visit(
    state: State, before: State, what: str, seen: dict[State, tuple[State, str] | None], todo: list[State]
) -> None:
    if state not in seen:
        seen[state] = before, what
        todo.append(state)


def _way(seen: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    """What happened on the way to a state."""
    way = []
    while (step := seen[state]) is not None:
        state, what = step
        way.append(what)
    return way[::-1]


def drawn(machine: Machine, seed: int) -> tuple[list[tuple[bool, At]], State]:
    """Return one order at random, and the state in which it ends.

    An event is whether a copy completes, and the operation. A rank that reads what no rank sent to it ends the order.
    """
    chance, state = random.Random(seed), machine.first()
    events: list[tuple[bool, At]] = []
    while True:
        possible: list[tuple[bool, At]] = [
            (False, (thread, at)) for thread, at in enumerate(state.at) if machine.enabled(state, thread)
        ]
        possible += [(True, where) for where, _ in state.landing]
        if not possible:
            return events, state
        lands, where = chance.choice(possible)
        events.append((lands, where))
        try:
            if lands:
                state = machine.land(state, next(each for each in state.landing if each[0] == where))
            else:
                state = machine.run(state, where[0])
        except Violation:
            return events, state

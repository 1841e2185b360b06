"""Explore all orders of a machine's operations, or draw a random order and find its races.

Races are found with vector clocks. A logical thread is a thread of the machine, or a copy from its start to its
completion. An operation is ordered after the earlier operations of its thread and after the operations that it needs. A
wait is ordered after the first store that satisfies it, and a fence after the copies of its thread. Nothing else orders
a copy. The clocks do not cover failing ranks or detached copies.
"""

from __future__ import annotations

import random
from collections import defaultdict

from tests.transport.peer_model.machine import Kind, Machine, Op, Position, State, Violation
from tests.transport.simulated.races import NEVER, Access, Clock, Race, unordered

# --- all orders -------------------------------------------------------------------------------------------------------


class StateLimitError(Exception):
    """The exploration reached more states than its limit."""


def explore(machine: Machine, limit: int = 2_000_000) -> int:
    """Visit every reachable state, and return their number. Raises `Violation` with the path to the first violation."""
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
        except Violation as violation:
            path = "; ".join(_path(seen, state))
            raise Violation(violation.rule, f"{violation.args[0]}\n  after {path}") from None
        if len(seen) > limit:
            raise StateLimitError(f"more than {limit} states")
    return len(seen)


def _visit(
    state: State, before: State, what: str, seen: dict[State, tuple[State, str] | None], todo: list[State]
) -> None:
    if state not in seen:
        seen[state] = before, what
        todo.append(state)


def _path(seen: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    """Return the descriptions of the moves that led to a state."""
    path = []
    while (step := seen[state]) is not None:
        state, what = step
        path.append(what)
    return path[::-1]


def random_order(machine: Machine, seed: int) -> tuple[list[tuple[bool, Position]], State]:
    """Return one order at random, as a list of events, and the state in which it ends.

    An event (False, position) runs the operation at that position, and (True, position) completes the copy that the
    operation began. The order ends at the first violation.
    """
    chance, state = random.Random(seed), machine.first()
    events: list[tuple[bool, Position]] = []
    while True:
        possible: list[tuple[bool, Position]] = [
            (False, (thread, index)) for thread, index in enumerate(state.positions) if machine.enabled(state, thread)
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


# --- races of one order -----------------------------------------------------------------------------------------------


def races(machine: Machine, events: list[tuple[bool, Position]]) -> list[Race]:
    """Return the races of an order that `random_order` returned: pairs of conflicting accesses that nothing orders."""
    return unordered(_Clocks(machine, events).accesses())


class _Clocks:
    def __init__(self, machine: Machine, events: list[tuple[bool, Position]]) -> None:
        self._machine, self._events = machine, events
        copies = [where for lands, where in events if not lands and self._op(where).kind == Kind.COPY]
        self._thread = {where: len(machine.threads) + n for n, where in enumerate(copies)}
        width = len(machine.threads) + len(copies)
        self._clocks: list[Clock] = [[0] * width for _ in range(width)]
        self._passed: dict[Position, Clock] = {}
        self._landed: dict[Position, Clock] = {}
        self._stores: defaultdict[int, list[tuple[int, Clock]]] = defaultdict(list)

    def accesses(self) -> list[Access]:
        """Return every access to a slot. A copy that never completes accesses its target forever."""
        accesses = []
        for lands, where in self._events:
            if lands:
                self._landed[where] = self._tick(self._thread[where])
            else:
                accesses += self._run(where)
        for where, thread in self._thread.items():
            op, begin = self._op(where), self._passed[where]
            end = self._landed[where][thread] if where in self._landed else NEVER
            accesses.append(self._access(where, op, op.target, True, thread, begin, end))
        return accesses

    def _run(self, where: Position) -> list[Access]:
        op, thread = self._op(where), where[0]
        for need in op.needs:
            if need in self._passed:
                self._join(thread, self._passed[need])
        if op.kind == Kind.WAIT:
            satisfying = (
                clock
                for value, clock in self._stores[op.word]
                if (value == op.value if op.exact else value >= op.value)
            )
            self._join(thread, next(satisfying, self._clocks[thread]))
        if op.kind == Kind.WRITE and op.fence:
            for copy, clock in self._landed.items():
                if copy[0] == thread:
                    self._join(thread, clock)
        now = self._passed[where] = self._tick(thread)
        if op.kind == Kind.WRITE:
            self._stores[op.word].append((op.value, now))
        accesses = [self._access(where, op, slot, False, thread, now, now[thread]) for slot, _ in op.reads]
        accesses += [self._access(where, op, slot, True, thread, now, now[thread]) for slot, _ in op.writes]
        if op.kind == Kind.COPY:
            self._join(self._thread[where], now)
            self._passed[where] = self._tick(self._thread[where])
            accesses.append(self._access(where, op, op.source, False, thread, now, now[thread]))
        return accesses

    def _access(self, where: Position, op: Op, slot: int, writes: bool, thread: int, begin: Clock, end: int) -> Access:
        owner = slot * self._machine.world // self._machine.slots
        return Access(owner, f"{where[0] // 3}.{where[0] % 3}", op.what, writes, (slot, 1), thread, begin, end)

    def _op(self, where: Position) -> Op:
        return self._machine.threads[where[0]][where[1]]

    def _join(self, thread: int, clock: Clock) -> None:
        self._clocks[thread] = list(map(max, self._clocks[thread], clock))

    def _tick(self, thread: int) -> Clock:
        self._clocks[thread][thread] += 1
        return list(self._clocks[thread])

"""Vector clocks for one order of a machine's operations: a race is found wherever nothing orders two accesses.

Each thread is a logical thread, and so is each copy from its start to its completion. An operation is ordered after the
operations of its thread before it and after those that it needs. A wait is ordered after the first store that satisfies
it, a fence after the copies of its thread. Nothing else orders a copy.
Not covered: ranks that fail, detached copies.
"""

from __future__ import annotations

from collections import defaultdict

from tests.transport.peer_model.machine import Machine
from tests.transport.peer_model.state import At, Kind, Op
from tests.transport.simulated.races import NEVER, Access, Clock, Race, unordered


def races(machine: Machine, events: list[tuple[bool, At]]) -> list[Race]:
    """Return the unordered pairs of conflicting accesses of an order that `explore.drawn` returned."""
    return unordered(_Clocks(machine, events).accesses())


class _Clocks:
    def __init__(self, machine: Machine, events: list[tuple[bool, At]]) -> None:
        self._machine, self._events = machine, events
        copies = [where for lands, where in events if not lands and self._op(where).kind == Kind.COPY]
        self._thread = {where: len(machine.threads) + n for n, where in enumerate(copies)}
        width = len(machine.threads) + len(copies)
        self._clocks: list[Clock] = [[0] * width for _ in range(width)]
        self._passed: dict[At, Clock] = {}
        self._landed: dict[At, Clock] = {}
        self._stores: defaultdict[int, list[tuple[int, Clock]]] = defaultdict(list)

    def accesses(self) -> list[Access]:
        """Return every access to a slot. A copy that never completes keeps its target."""
        found = []
        for lands, where in self._events:
            if lands:
                self._landed[where] = self._tick(self._thread[where])
            else:
                found += self._run(where)
        for where, thread in self._thread.items():
            op, begin = self._op(where), self._passed[where]
            end = self._landed[where][thread] if where in self._landed else NEVER
            found.append(self._access(where, op, op.target, True, thread, begin, end))
        return found

    def _run(self, where: At) -> list[Access]:
        op, thread = self._op(where), where[0]
        for need in op.needs:
            if need in self._passed:
                self._join(thread, self._passed[need])
        if op.kind == Kind.WAIT:
            met = (
                clock
                for value, clock in self._stores[op.word]
                if (value == op.value if op.exact else value >= op.value)
            )
            self._join(thread, next(met, self._clocks[thread]))
        if op.kind == Kind.WRITE and op.fence:
            for copy, clock in self._landed.items():
                if copy[0] == thread:
                    self._join(thread, clock)
        now = self._passed[where] = self._tick(thread)
        if op.kind == Kind.WRITE:
            self._stores[op.word].append((op.value, now))
        found = [self._access(where, op, slot, False, thread, now, now[thread]) for slot, _ in op.reads]
        found += [self._access(where, op, slot, True, thread, now, now[thread]) for slot, _ in op.writes]
        if op.kind == Kind.COPY:
            self._join(self._thread[where], now)
            self._passed[where] = self._tick(self._thread[where])
            found.append(self._access(where, op, op.source, False, thread, now, now[thread]))
        return found

    def _access(self, where: At, op: Op, slot: int, writes: bool, thread: int, begin: Clock, end: int) -> Access:
        owner = slot * self._machine.world // self._machine.slots
        return Access(owner, f"{where[0] // 3}.{where[0] % 3}", op.what, writes, (slot, 1), thread, begin, end)

    def _op(self, where: At) -> Op:
        return self._machine.threads[where[0]][where[1]]

    def _join(self, thread: int, other: Clock) -> None:
        self._clocks[thread] = list(map(max, self._clocks[thread], other))

    def _tick(self, thread: int) -> Clock:
        self._clocks[thread][thread] += 1
        return list(self._clocks[thread])

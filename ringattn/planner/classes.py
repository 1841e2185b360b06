"""Ranks and steps that behave alike: what a schedule's plans are on any number of ranks, learned from two small ones.

A *cell* is what one rank does in one step: how long it packs and works, and what it sends. Of shards of one length,
cells depend on where rank and step lie to a few lines only: the first and the last ranks, the first and the last steps,
the ranks that a ring reaches when it comes round. Farther than `near` from all of them, cells are alike.
       step                            x: within `near` of a line
        |  x x x x x x x x             the square of all cells of a ring:
        |  x x . . . . x x             its edges, and the two diagonals,
        |  x . x . . x . x             step = rank and step = ranks - rank
        |  x . . x x . . x
        +----------------- rank
Guarantees: plans of two numbers of ranks, made as those that run, agree cell by cell, or the schedule is refused.
Not covered: that plans of more ranks agree too. It is assumed; the tests compare numbers that were not learned from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import isclose
from typing import NamedTuple

from ringattn.core.problem import Problem
from ringattn.errors import UnsupportedError
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import Cluster
from ringattn.planner.plan import Plan, PlanStep
from ringattn.planner.work import packing_s, step_s
from ringattn.schedule.routes import route_named

SERVED = "ring", "direct", "bidirectional", "pass_q", "balanced"
"""Schedules of which a rank sends a few messages a step, to ranks that follow from the step."""
HALVED = "direct", "bidirectional", "pass_q", "balanced"
"""Schedules in which what lies half a ring away makes a difference."""
NEAR = 3
"""How far from a line cells may differ; a window reaches as many shards farther."""
FARTHEST = 8
"""The farthest reach, in shards, of a window: plans are made of six times as many ranks."""
CLOSE = 1e-9
"""Relative difference of two times that are the same but for rounding."""


class Target(NamedTuple):
    """To which rank a message goes: `offset` plus `turns` times the turn of its step ranks farther."""

    turns: int
    offset: int

    def distance(self, turn: int, ranks: int) -> int:
        """How far behind the sender the receiver lies."""
        return (self.turns * turn + self.offset) % ranks


class Cell(NamedTuple):
    """What a rank does in a step. `sends`: bytes by target, messages to one rank together."""

    packing_s: float = 0.0
    work_s: float = 0.0
    sends: tuple[tuple[Target, int], ...] = ()

    def agrees(self, other: Cell) -> bool:
        """Whether both are the same but for rounding."""
        return self.sends == other.sends and all(
            isclose(a, b, rel_tol=CLOSE) for a, b in ((self.packing_s, other.packing_s), (self.work_s, other.work_s))
        )


EMPTY = Cell()


class Stretch(NamedTuple):
    """Ranks from `first` to before `end` that do the same in a step."""

    first: int
    end: int
    cell: Cell


class Steps(NamedTuple):
    """How the steps of a pass lie to the turns of its schedule, of which there are `turns`.

    `transposed`: a backward pass that undoes the forward's turns from the last on: an opening step, then a main and a
    merge step for each.
    """

    turns: int
    transposed: bool

    @property
    def in_all(self) -> int:
        """Steps of the pass."""
        return 1 + 2 * self.turns if self.transposed else self.turns

    def place(self, number: int) -> tuple[int, int]:
        """The phase of a step, and the turn that it belongs to."""
        if not self.transposed:
            return 0, number
        return (1 + (number - 1) % 2, self.turns - 1 - (number - 1) // 2) if number else (0, self.turns)


@lru_cache(maxsize=64)
def steps_of(schedule: str, ranks: int, backward: bool) -> Steps:
    """The steps of a pass of a schedule."""
    route = route_named(schedule)
    return Steps(route.steps(ranks), backward and route.place is None)


Where = tuple[int, ...]


class Classes:
    """One pass of a schedule on any number of ranks, whose shards are all as long as those that it was learned from."""

    def __init__(self, near: int, halves: bool, steps_of: Callable[[int], Steps]) -> None:
        """Knows nothing yet. `halves`: ranks and steps half a ring away make lines too."""
        self._near, self._halves, self.steps_of = near, halves, steps_of
        self._cells: dict[Where, Cell] = {}
        self._borders: dict[Where, list[tuple[int, int, Cell]]] = {}
        self.held_bytes: tuple[int, ...] = ()

    def learn(self, plans: tuple[Plan, ...], cluster: Cluster) -> None:
        """Take over the cells of all ranks. Raises `UnsupportedError` where a class has two that differ."""
        ranks = len(plans)
        steps = self.steps_of(ranks)
        for rank, plan in enumerate(plans):
            found = {step.number: _cell(plan, step, cluster, steps.place(step.number)[1], ranks) for step in plan.steps}
            for number in range(steps.in_all):
                cell = found.pop(number, EMPTY)
                known = self._cells.setdefault(self._where(rank, number, ranks), cell)
                if not known.agrees(cell):
                    raise _unlike(plan, f"step {number} of rank {rank} of {ranks} is unlike that of its class")
            if found:
                raise _unlike(plan, f"rank {rank} of {ranks} has steps {sorted(found)} beyond {steps.in_all}")
        held = sorted(plan.arena_bytes + plan.kept_bytes for plan in plans)
        least, most = (self.held_bytes[0], self.held_bytes[-1]) if self.held_bytes else (held[0], held[-1])
        if (held[0], held[-1]) != (least, most):
            raise _unlike(plans[0], f"of {ranks} ranks each holds {held[0]} to {held[-1]} bytes, not {least} to {most}")
        self.held_bytes = tuple(held)

    def stretches(self, number: int, ranks: int) -> list[Stretch]:
        """What all ranks do in a step of the pass. Raises `UnsupportedError` for a class that was not seen."""
        near, steps = self._near, self.steps_of(ranks)
        phase, turn = steps.place(number)
        lines = self._lines(turn, ranks)
        ends = self._ends(turn, steps, ranks)
        # Steps whose lines lie in one order, as far apart as it counts, have the same cells between the same lines.
        order = sorted(range(len(lines)), key=lines.__getitem__)
        apart = [min(lines[b] - lines[a], 2 * near + 2) for a, b in pairwise(order)]
        key = (phase, *(max(-near, min(near, end)) for end in ends), *order, *apart)
        borders = self._borders.get(key)
        if borders is None:
            borders = self._borders[key] = self._found(number, lines, ranks)
        firsts = [lines[line] + offset for line, offset, _ in borders]
        cells = (cell for _, _, cell in borders)
        return list(map(Stretch, firsts, [*firsts[1:], ranks], cells))

    def _found(self, number: int, lines: tuple[int, ...], ranks: int) -> list[tuple[int, int, Cell]]:
        """Where the stretches of a step begin, as (line, offset), and their cells."""
        near = self._near
        edges = {line + offset: (at, offset) for at, line in enumerate(lines) for offset in range(-near, near + 1)}
        found: list[tuple[int, int, Cell]] = []
        for first in sorted(edge for edge in edges if 0 <= edge < ranks):
            cell = self._cells.get(self._where(first, number, ranks))
            if cell is None:
                raise UnsupportedError(f"step {number} of rank {first} of {ranks} is of a class that was not learned")
            if not found or found[-1][2] != cell:
                found.append((*edges[first], cell))
        return found

    def _lines(self, turn: int, ranks: int) -> tuple[int, ...]:
        """The ranks at which a line meets a turn."""
        half = ranks // 2
        lines = 0, ranks - 1, turn, ranks - turn
        return (*lines, half, turn - half, turn + half, half - turn, ranks + half - turn) if self._halves else lines

    def _ends(self, turn: int, steps: Steps, ranks: int) -> tuple[int, ...]:
        """How far a turn lies behind those at which something begins or ends."""
        ends = turn, turn - steps.turns
        return (*ends, turn - ranks, turn - ranks // 2) if self._halves else ends

    def _where(self, rank: int, number: int, ranks: int) -> Where:
        """Where rank and step lie to the lines, as far as it counts."""
        near, steps = self._near, self.steps_of(ranks)
        phase, turn = steps.place(number)
        apart = [*(rank - line for line in self._lines(turn, ranks)), *self._ends(turn, steps, ranks)]
        return phase, *(max(-near, min(near, one)) for one in apart)


def _cell(plan: Plan, step: PlanStep, cluster: Cluster, turn: int, ranks: int) -> Cell:
    sends: dict[Target, int] = {}
    for send in step.sends:
        target = _target(send.peer - plan.rank, turn, ranks)
        if target is None:
            raise _unlike(plan, f"rank {plan.rank} of {ranks} sends to rank {send.peer} in step {step.number}")
        sends[target] = sends.get(target, 0) + send.elements * plan.element_bytes(send.buffer)
    return Cell(packing_s(plan, step, cluster), step_s(plan, step, cluster), tuple(sorted(sends.items())))


def _target(distance: int, turn: int, ranks: int) -> Target | None:
    """A neighbor, or a rank as far away as the turn, but for one or two."""
    for turns, most in ((0, 1), (1, 2), (-1, 2)):
        offset = (distance - turns * turn + ranks // 2) % ranks - ranks // 2
        if abs(offset) <= most:
            return Target(turns, offset)
    return None


def _unlike(plan: Plan, why: str) -> UnsupportedError:
    layout = plan.problem.q_layout
    return UnsupportedError(
        f"schedule={plan.name!r} with layout={layout.name!r} has no classes of ranks that behave alike: {why}; "
        "simulate as many ranks as can be planned one by one, or another schedule, layout or window"
    )


def classes_of(
    problem_of: Callable[[int], Problem], schedule: str, cluster: Cluster, quarter: int, reach: int = 0
) -> dict[bool, Classes]:
    """The classes of both passes (backward: True), for numbers of ranks that are `quarter` modulo 4.

    `problem_of(n)`: the call on n ranks, with shards of the same equal lengths for each n. `reach`: how many shards a
    window reaches. Raises `UnsupportedError` for schedules that have no such classes, and a window that reaches too
    far.
    """
    if schedule not in SERVED:
        raise UnsupportedError(
            f"schedule={schedule!r} cannot be simulated by classes of ranks; choose one of {', '.join(SERVED)}, or as "
            "many ranks as can be planned one by one"
        )
    if reach > FARTHEST:
        raise UnsupportedError(
            f"the window reaches {reach} shards and classes of ranks are told apart up to {FARTHEST}; choose a shorter "
            "window or fewer ranks"
        )
    near, halves = NEAR + reach, schedule in HALVED and not reach
    least = (12 if halves else 6) * near + 2
    least += (quarter - least) % 4  # lines cross at a quarter of the ranks, on a rank or between two
    found = {}
    for backward in (False, True):
        # Multiprocessors that messages hold depend on links, and so on nodes: `recurrence` counts them.
        bare = replace(cluster, message_sms=0.0)
        classes = Classes(near, halves, lambda count, backward=backward: steps_of(schedule, count, backward))  # type: ignore[misc]
        for count in (least, least + 4):
            problem = problem_of(count)
            route = choose_route(problem, schedule, cluster)
            classes.learn(tuple(plan_of(problem, route, rank, backward) for rank in range(count)), bare)
        found[backward] = classes
    return found

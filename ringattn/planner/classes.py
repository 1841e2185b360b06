"""Predict a schedule's plans on any number of ranks from plans of two small numbers of ranks.

A *cell* is the activity of one rank in one step: its seconds of packing and work, and its messages. For shards of equal
length, a cell depends only on the distance of its rank and step to a few lines: the first and the last ranks, the first
and the last steps, and the ranks where a ring wraps around. Farther than `near` from every line, all cells are equal.
       step                            x: within `near` of a line
        |  x x x x x x x x             the square of all cells of a ring:
        |  x x . . . . x x             its edges, and the two diagonals,
        |  x . x . . x . x             step = rank and step = ranks - rank
        |  x . . x x . . x
        +----------------- rank
Guarantees: the plans of both small numbers of ranks, made like plans that run, agree cell by cell; otherwise the
schedule is refused.
Not covered: that plans of more ranks agree too. This is assumed; tests compare numbers of ranks that were not learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import isclose
from typing import Any, NamedTuple

import numpy as np

from ringattn.core.problem import Problem
from ringattn.errors import UnsupportedError
from ringattn.planner.candidates import check_extent
from ringattn.planner.choose import choose_route, plan_of, plan_once, prologue_beyond, prologue_facts
from ringattn.planner.cluster import Cluster, packing_s, step_s
from ringattn.planner.plan import Plan, PlanStep
from ringattn.schedule.passes import Prologue
from ringattn.schedule.routes import ROUTES, Route, route_named

SERVED = tuple(name for name, route in ROUTES.items() if route.by_classes)
"""Schedules that are simulated by classes."""
NEAR = 3
"""Cells may differ up to this distance from a line, plus the reach of the window in shards."""
MOST_GROUPED = 16
"""Most ranks of a group: the number of plans that are made grows with it."""
FARTHEST = 8
"""Longest reach of a window in shards: six times this number of ranks is planned."""
CLOSE = 1e-9
"""Relative difference up to which two times are equal except for rounding."""


Times = np.ndarray
"""Seconds, or bytes, of each rank."""
Way = tuple[int, int]
"""The distance from a sender to its receiver: in groups, and in positions within the group."""
Messages = Iterable[tuple[Way, Times | float]]
"""The messages of a step: the bytes from each rank to the rank at distance `way`, or one number if all are equal. A
tuple, or an object that computes them on each iteration if there are too many to keep."""


class Target(NamedTuple):
    """The receiver of a message relative to its sender.

    The receiver's group is `turns` times the turn plus `offset` groups after the sender's group, and its position in
    the group is `place` positions after the sender's position.
    """

    turns: int
    offset: int
    place: int = 0

    def way(self, turn: int, groups: int) -> Way:
        """Return the distance to the receiver in a turn."""
        return (self.turns * turn + self.offset) % groups, self.place


TARGETS = tuple(Target(turns, offset) for turns, most in ((0, 1), (1, 2), (-1, 2)) for offset in range(-most, most + 1))
"""The possible receivers: a neighboring group, or a group `turn` groups away in either direction, up to two more
or fewer."""


class Cell(NamedTuple):
    """The activity of a rank in a step. `sends`: bytes by distance to the receiver."""

    packing_s: float = 0.0
    work_s: float = 0.0
    sends: tuple[tuple[Way, int], ...] = ()


class Row(NamedTuple):
    """The activity of the ranks of a group in a step, by position in the group. Equal groups share one row.

    `sends`: for each target the bytes that each rank of the group sends, or one number if all ranks send the same.
    """

    packing_s: np.ndarray
    work_s: np.ndarray
    sends: dict[Target, np.ndarray | float]


class Stretch(NamedTuple):
    """Consecutive groups, `first` to `end` - 1, that do the same in a step: the activity `row`."""

    first: int
    end: int
    row: Row


ClassKey = tuple[int, ...]
"""Names a class of cells: the distances of rank and step to all lines, cut off at `near`."""


@dataclass
class _LearnedCell:
    """What the cells of a class have in common, as far as it has been learned.

    `sends`: for each message the targets that fit all cells seen so far, and the message's bytes.
    """

    packing_s: float
    work_s: float
    sends: list[tuple[tuple[Target, ...], int]]

    def agrees(self, cell: Cell, turn: int, groups: int) -> bool:
        """Return whether `cell` equals this cell except for rounding, and remove the targets that do not fit `cell`."""
        times = (self.packing_s, cell.packing_s), (self.work_s, cell.work_s)
        if len(cell.sends) != len(self.sends) or not all(isclose(a, b, rel_tol=CLOSE) for a, b in times):
            return False
        sent = dict(cell.sends)
        self.sends = [
            (tuple(target for target in targets if sent.get(target.way(turn, groups)) == nbytes), nbytes)
            for targets, nbytes in self.sends
        ]
        return {targets[0].way(turn, groups) for targets, _ in self.sends if targets} == set(sent)


class Classes:
    """The cells of one pass of a schedule, learned from plans and valid for any number of ranks.

    All numbers of ranks have shards of the same length. The class of a rank depends on the distance of its group to the
    lines, and on its position among the `group` ranks of its group.
    """

    def __init__(self, near: Sequence[int], steps_of: Callable[[int], Steps], group: int = 1) -> None:
        """Start without any cells.

        `near`: for each line the distance up to which cells may differ. With more than four lines, the ranks and steps
        half a ring away are lines too.
        """
        self._near, self._halves, self.steps_of, self.group = near, len(near) > 4, steps_of, group
        self._ends_near = max(near)
        self._cells: dict[ClassKey, _LearnedCell] = {}
        self._rows: dict[tuple[tuple[float, float, tuple[tuple[Target, int], ...]], ...], Row] = {}
        self._borders: dict[ClassKey, list[tuple[int, int, Row]]] = {}
        self._held: dict[int, list[int]] = {}

    def learn(self, plan: Plan, cluster: Cluster, like: Classes | None = None) -> None:
        """Add the cells of one rank's plan. Call this for all ranks of a number of ranks, in order.

        `like`: classes learned with shards of another length; their messages have the same receivers. Raises
        `UnsupportedError` if a class would get two different cells. The last rank also raises it if the fewest or the
        most bytes that a rank holds differ from those on the first number of ranks.
        """
        rank, ranks = plan.rank, plan.problem.world_size
        steps, groups = self.steps_of(ranks), ranks // self.group
        cells = {step.number: self._cell(plan, step, cluster, ranks) for step in plan.steps}
        for number in range(steps.in_all):
            cell, turn = cells.pop(number, Cell()), steps.place(number)[1]
            key = self._class_key(rank, number, ranks)
            learned = self._cells.get(key)
            if learned is None:
                example = None if like is None else like._cells.get(key)
                targets = None if example is None else [targets for targets, _ in example.sends]
                sends = self._messages_to(cell, turn, groups, targets)
                if sends is None:
                    raise unlike(plan, f"rank {rank} of {ranks} sends to unexpected ranks in step {number}")
                self._cells[key] = _LearnedCell(cell.packing_s, cell.work_s, sends)
            elif not learned.agrees(cell, turn, groups):
                raise unlike(plan, f"step {number} of rank {rank} of {ranks} differs from others of its class")
        if cells:
            raise unlike(plan, f"rank {rank} of {ranks} has steps {sorted(cells)} beyond {steps.in_all}")
        held_bytes = self._held.setdefault(ranks, [])
        held_bytes.append(plan.arena_bytes + plan.kept_bytes)
        if len(held_bytes) == ranks and (min(held_bytes), max(held_bytes)) != (
            min(self.held_bytes),
            max(self.held_bytes),
        ):
            least, most = min(self.held_bytes), max(self.held_bytes)
            raise unlike(
                plan, f"each of {ranks} ranks holds {min(held_bytes)} to {max(held_bytes)} bytes, not {least} to {most}"
            )

    @property
    def held_bytes(self) -> list[int]:
        """The bytes that each rank holds, on the first number of ranks that was learned."""
        return next(iter(self._held.values()))

    def held_spread(self, ranks: int) -> np.ndarray:
        """Return percentiles of the bytes that ranks hold, see `spread`. They are the same on any number of `ranks`."""
        return spread(self.held_bytes)

    def step(self, number: int, ranks: int) -> tuple[Times, Times, Messages]:
        """Return the seconds that each rank packs and works in a step, and the messages of the step.

        Raises `UnsupportedError` for a class that was not learned.
        """
        stretches, groups = self._stretches(number, ranks), ranks // self.group
        turn = self.steps_of(ranks).place(number)[1]

        def by_rank(values: Sequence[Times | float]) -> Times:
            into = np.empty((groups, self.group))
            for value, (first, end, _) in zip(values, stretches, strict=True):
                into[first:end] = value
            return into.reshape(-1)

        packing, work = (
            by_rank([getattr(stretch.row, name) for stretch in stretches]) for name in ("packing_s", "work_s")
        )
        messages: dict[Way, Times | float] = {}
        for target in dict.fromkeys(target for stretch in stretches for target in stretch.row.sends):
            values = [stretch.row.sends.get(target, 0.0) for stretch in stretches]
            # In most steps of most schedules all ranks send the same number of bytes; one number describes them.
            alike = all(isinstance(value, float) and value == values[0] for value in values)
            nbytes, way = values[0] if alike else by_rank(values), target.way(turn, groups)
            messages[way] = messages[way] + nbytes if way in messages else nbytes
        return packing, work, tuple(messages.items())

    def _stretches(self, number: int, ranks: int) -> list[Stretch]:
        """Return the stretches of groups that do the same in a step."""
        ends_near, steps, groups = self._ends_near, self.steps_of(ranks), ranks // self.group
        phase, turn, inner = steps.place(number)
        lines = self._lines(turn, groups)
        ends = self._ends(turn, steps, groups)
        # If two steps have their lines in the same order and at the same distances, they have the same cells between
        # the same lines. Distances are cut off where a larger distance makes no difference.
        order = sorted(range(len(lines)), key=lines.__getitem__)
        apart = [min(lines[b] - lines[a], 2 * ends_near + 2) for a, b in pairwise(order)]
        key = (phase, inner, *(max(-ends_near, min(ends_near, end)) for end in ends), *order, *apart)
        borders = self._borders.get(key)
        if borders is None:
            borders = self._borders[key] = self._find_borders(number, lines, ranks)
        firsts = [lines[line] + offset for line, offset, _ in borders]
        return list(map(Stretch, firsts, [*firsts[1:], groups], (row for _, _, row in borders)))

    def _find_borders(self, number: int, lines: tuple[int, ...], ranks: int) -> list[tuple[int, int, Row]]:
        """Return (index of a line, offset, row) for each stretch of a step: its first group is the line plus offset."""
        groups = ranks // self.group
        edges = {
            line + offset: (index, offset)
            for index, (line, near) in enumerate(zip(lines, self._near, strict=True))
            for offset in range(-near, near + 1)
        }
        borders: list[tuple[int, int, Row]] = []
        for first in sorted(edge for edge in edges if 0 <= edge < groups):
            row = self._row(first, number, ranks)
            if not borders or borders[-1][2] is not row:
                borders.append((*edges[first], row))
        return borders

    def _row(self, group: int, number: int, ranks: int) -> Row:
        """Return the activity of a group in a step."""
        members = range(group * self.group, (group + 1) * self.group)
        cells = [self._cells.get(self._class_key(rank, number, ranks)) for rank in members]
        if None in cells:
            rank = members[cells.index(None)]
            raise UnsupportedError(f"step {number} of rank {rank} of {ranks} is of a class that was not learned")
        activity = tuple(
            (cell.packing_s, cell.work_s, tuple((targets[0], nbytes) for targets, nbytes in cell.sends))
            for cell in cells if cell is not None
        )  # fmt: skip
        if activity not in self._rows:
            sends: dict[Target, np.ndarray] = {}
            for place, (_, _, sent) in enumerate(activity):
                for target, nbytes in sent:
                    sends.setdefault(target, np.zeros(self.group))[place] = nbytes
            packing, work = (np.array([cell[n] for cell in activity]) for n in (0, 1))
            by_target = {to: float(of[0]) if (of == of[0]).all() else of for to, of in sends.items()}
            self._rows[activity] = Row(packing, work, by_target)
        return self._rows[activity]

    def _lines(self, turn: int, groups: int) -> tuple[int, ...]:
        """Return the group at which each line is in a turn."""
        half = groups // 2
        lines = 0, groups - 1, turn, groups - turn
        return (*lines, half, turn - half, turn + half, half - turn, groups + half - turn) if self._halves else lines

    def _ends(self, turn: int, steps: Steps, groups: int) -> tuple[int, ...]:
        """Return how many turns have passed since each turn in which a phase of the schedule begins or ends."""
        ends = turn, turn - steps.turns + steps.extra
        return (*ends, turn - groups, turn - groups // 2) if self._halves else ends

    def _class_key(self, rank: int, number: int, ranks: int) -> ClassKey:
        """Return the class of a rank's cell in a step."""
        ends, steps, groups = self._ends_near, self.steps_of(ranks), ranks // self.group
        group, place = divmod(rank, self.group)
        phase, turn, inner = steps.place(number)
        lines = zip(self._near, self._lines(turn, groups), strict=True)
        apart = (max(-near, min(near, group - line)) for near, line in lines)
        return phase, inner, place, *apart, *(max(-ends, min(ends, end)) for end in self._ends(turn, steps, groups))

    def _messages_to(
        self, cell: Cell, turn: int, groups: int, expected: list[tuple[Target, ...]] | None
    ) -> list[tuple[tuple[Target, ...], int]] | None:
        """Return for each message of a cell the targets that fit it, and its bytes.

        `expected`: the targets of each message; None for all targets that fit. Returns None if a message has no target.
        """
        if expected is None:
            expected = [self._targets(way, turn, groups) for way, _ in cell.sends]
        sent = dict(cell.sends)
        ways = [targets[0].way(turn, groups) if targets else None for targets in expected]
        if None in ways or set(ways) != set(sent):
            return None
        return [(targets, sent[way]) for targets, way in zip(expected, ways, strict=True) if way is not None]

    def _targets(self, way: tuple[int, int], turn: int, groups: int) -> tuple[Target, ...]:
        """Return all targets whose receiver is at distance `way` in a turn."""
        at_place = (target._replace(place=way[1]) for target in TARGETS)
        return tuple(target for target in at_place if target.way(turn, groups) == way)

    def _cell(self, plan: Plan, step: PlanStep, cluster: Cluster, ranks: int) -> Cell:
        """Return the cell of a plan's step."""
        sends: dict[tuple[int, int], int] = {}
        group, place = divmod(plan.rank, self.group)
        for send in step.sends:
            peer_group, peer_place = divmod(send.peer, self.group)
            way = (peer_group - group) % (ranks // self.group), (peer_place - place) % self.group
            sends[way] = sends.get(way, 0) + send.elements * plan.element_bytes(send.buffer)
        return Cell(packing_s(plan, step, cluster), step_s(plan, step, cluster), tuple(sorted(sends.items())))


def unlike(plan: Plan, why: str) -> UnsupportedError:
    """Return the error for plans whose ranks do not fall into classes."""
    layout = plan.problem.q_layout
    return UnsupportedError(
        f"schedule={plan.name!r} with layout={layout.name!r} has no classes of ranks that behave alike: {why}; "
        "simulate few enough ranks to plan them one by one, or choose another schedule, layout or window"
    )


def spread(held_bytes: Sequence[int]) -> np.ndarray:
    """Return 101 percentiles of the bytes that ranks hold, so that different numbers of ranks can be compared."""
    return np.percentile(held_bytes, np.linspace(0, 100, 101))


def check_reach(reach: int) -> None:
    """Raise `UnsupportedError` for a window that reaches too many shards."""
    if reach > FARTHEST:
        raise UnsupportedError(
            f"the window reaches {reach} shards, but classes of ranks support at most {FARTHEST}; choose a shorter "
            "window or fewer ranks"
        )


def classes_of(
    problem_of: Callable[[int], Problem],
    schedule: str,
    cluster: Cluster,
    quarter: int,
    reach: int = 0,
    group: int = 1,
    prologue: Prologue | None = None,
    like: Mapping[bool, Any] | None = None,
) -> Learned:
    """Return the classes of both passes (backward: True), for numbers of groups that are `quarter` modulo 4.

    `problem_of(n)`: the call on n ranks; all shards have the same length, which does not depend on n. `reach`: number
    of shards that the window reaches. `group`: number of ranks per group, see `group_of`. `prologue`: the prologue of
    backward passes, see `prologue_on`; None: the prologue that is chosen on the ranks to learn from. `like`: classes
    learned with shards of another length. Learning them has already shown that more ranks have the same classes, so one
    number of ranks is enough here. Raises `UnsupportedError` for a schedule without such classes, and for a window that
    reaches too far.
    """
    name = schedule.partition(":")[0]
    if name not in SERVED:
        raise UnsupportedError(
            f"schedule={schedule!r} cannot be simulated by classes of ranks; choose one of {', '.join(SERVED)}, or few "
            "enough ranks to plan them one by one"
        )
    check_reach(reach)
    if group > MOST_GROUPED:
        raise UnsupportedError(
            f"schedule={schedule!r}: classes are learned from the plans of many groups, and groups of {group} ranks "
            f"are too large to plan; name groups of up to {MOST_GROUPED} ranks, for example {name}:8"
        )
    counts = learned_from(schedule, quarter, reach, group)
    route = ROUTES[name]
    if route.at_once:
        return _at_once_of(problem_of, schedule, cluster, counts, reach, prologue)
    lines = 9 if route.halves and not reach else 4
    near = [NEAR + reach] * lines if group == 1 else [distance - (-reach // group) for distance in route.group_lines]
    if route.by_head:
        check_extent(problem_of(counts[-1]), by_head=True, groups=counts[-1] // group)
    routes = routes_on(problem_of, schedule, cluster, counts, group, prologue)
    # The SMs that messages occupy depend on links, and so on nodes; `recurrence` counts them.
    bare = replace(cluster, message_sms=0.0)
    learned = {
        backward: Classes(near, lambda count, backward=backward: steps_of(schedule, count, backward, group), group)  # type: ignore[misc]
        for backward in (False, True)
    }
    for count in counts[:1] if like is not None else counts:
        problem = problem_of(count)
        for first in range(0, count, group):
            for plan in plans_of_group(problem, routes[count], range(first, first + group)):
                learned[plan.backward].learn(plan, bare, None if like is None else like[plan.backward])
    return learned


def plans_of_group(problem: Problem, route: Route, ranks: range, passes: int = 2) -> Iterator[Plan]:
    """Yield the uncached plans of the ranks of a group: for each rank the forward plan, then the backward plan."""
    # Keep this object while planning, so that all plans share the group's tables; then free it, because it is large.
    groups = route.shared(problem)
    for rank, backward in product(ranks, range(passes)):
        yield plan_once(problem, route, rank, bool(backward))
    del groups


Learned = dict[bool, "Classes"] | dict[bool, "AtOnce"]
"""The classes of each pass; the key is True for backward."""
Routes = dict[int, Route]
"""Routes by number of ranks."""


def routes_on(
    problem_of: Callable[[int], Problem],
    schedule: str,
    cluster: Cluster,
    counts: Sequence[int],
    group: int,
    prologue: Prologue | None,
) -> Routes:
    """Return the route for each number of ranks in `counts`. `group` and `prologue`: as for `classes_of`."""
    name = schedule if group == 1 else f"{schedule.partition(':')[0]}:{group}"
    routes = {count: choose_route(problem_of(count), name, cluster) for count in counts}
    return {
        count: route if prologue is None else replace(route, prologue=prologue) for count, route in routes.items()
    }  # fmt: skip


def prologue_on(problem_of: Callable[[int], Problem], routes: Routes, cluster: Cluster, ranks: int) -> Prologue:
    """Return the prologue of a backward pass on `ranks` ranks, extrapolated from the routes on two smaller numbers."""
    fewer = [(count, prologue_facts(problem_of(count), route, cluster)) for count, route in routes.items()]
    return prologue_beyond(fewer, problem_of(ranks), cluster)


def learned_from(schedule: str, quarter: int, reach: int, group: int) -> tuple[int, ...]:
    """Return the numbers of ranks that classes are learned from: two, or three for schedules of one step.

    `quarter`: the number of groups modulo 4. `reach`: how many shards away the window reaches. `group`: the ranks of a
    group.
    """
    route, step = ROUTES[schedule.partition(":")[0]], 4
    if group > 1:
        # Lines cross on a group or between two groups.
        least, step = route.least_groups - 6 * (-reach // group), 2
    elif route.at_once:
        # The smallest number of ranks has every class of pairs. Whether buffers of one step fit between those of
        # another step depends on the ranks modulo 4.
        least = 3 * (NEAR + reach) + 3
    else:
        # Lines cross at a quarter of the ranks, on a rank or between two ranks.
        least = (12 if route.halves and not reach else 6) * (NEAR + reach) + 2
    least += (quarter - least) % step
    return tuple((least + more * step) * group for more in range(3 if route.at_once else 2))


# --- steps of a pass, by turn of the schedule ------------------------------------------------------------------------


class Steps(NamedTuple):
    """The steps of a pass, in turns of its schedule: `turns` turns of `inner` steps each.

    `extra`: the turns before and after the ring. `transposed`: the backward pass undoes the forward steps from the last
    to the first: a prologue step, then a main step and a merge step for each forward step.
    """

    turns: int
    transposed: bool
    inner: int = 1
    extra: int = 0

    @property
    def in_all(self) -> int:
        """Number of steps of the pass."""
        forward = self.turns * self.inner
        return 1 + 2 * forward if self.transposed else forward

    def place(self, number: int) -> tuple[int, int, int]:
        """Return the phase of a step, its turn, and its position in the turn.

        The phase is 0 for a forward step and for the prologue, 1 for a main step and 2 for a merge step.
        """
        if not self.transposed:
            return 0, *divmod(number, self.inner)
        forward = self.turns * self.inner
        return (1 + (number - 1) % 2, *divmod(forward - 1 - (number - 1) // 2, self.inner)) if number else (
            0, self.turns, 0)  # fmt: skip


@lru_cache(maxsize=64)
def steps_of(schedule: str, ranks: int, backward: bool, group: int = 1) -> Steps:
    """Return the steps of a pass of a schedule. `group`: ranks per group, see `group_of`."""
    route = route_named(schedule if group == 1 else f"{schedule.partition(':')[0]}:{group}", ranks)
    inner = route.inner_steps(group)
    return Steps(route.steps(ranks) // inner, backward and route.undoes_steps, inner, route.extra_steps)


def group_of(problem: Problem, schedule: str, cluster: Cluster) -> int:
    """Return the number of ranks per group: the ranks of a node if the schedule uses nodes, otherwise 1.

    Raises `InputError` if the schedule does not fit the ranks or the nodes.
    """
    ranks = problem.world_size
    nodes = tuple(map(cluster.node_of, range(ranks)))
    return route_named(schedule, ranks).on_nodes(nodes).group_size(problem)


# --- schedules that exchange everything in one step, learned from plans of three small numbers of ranks --------------
# The work of a rank in a step grows with the number of ranks, so its seconds and buffers are linear in (rank, ranks).
# The bytes that it sends to one other rank do not grow. Both depend on the distance of the ranks to the first and last
# rank, and to each other:
#        sender                           f, l: first and last `near` ranks, each a class of its own
#         |  f f f f f f l                =: sender and receiver less than `near` apart, by distance
#         |  f = . . . . l                .: all other pairs, the receiver before or behind the sender
#         |  f . = . . . l
#         |  l l l l l l l
#         +---------------- receiver
# The plans of all three numbers of ranks must agree with the learned planes, otherwise the schedule is refused. That
# plans of more ranks agree too is assumed; tests compare numbers of ranks that were not learned.


class AtOnce:
    """One pass of a schedule that exchanges everything in one step, learned from plans; see `Classes`."""

    group = 1

    def __init__(self, near: int, steps_of: Callable[[int], Steps]) -> None:
        """Start without any planes. A plane is a linear function of (rank, ranks) that returns seconds."""
        self.near, self.steps_of, self._steps = near, steps_of, steps_of(2).in_all
        self._planes: dict[tuple[str, int, int, int], np.ndarray] = {}
        self._sent: dict[tuple[int, ...], int] = {}
        self._held = np.zeros((2, 101))

    def learn(self, plans_of: dict[int, tuple[Plan, ...]], cluster: Cluster) -> None:
        """Fit the planes to the plans of all ranks. Raises `UnsupportedError` if a value is not on its plane."""
        points_by_plane: dict[tuple[str, int, int, int], list[tuple[int, int, float]]] = {}
        for ranks, plans in plans_of.items():
            for rank, plan in enumerate(plans):
                ends = self._end(rank, ranks)
                values = {(name, n): 0.0 for name in ("packing", "work") for n in range(self._steps)}
                sent: dict[tuple[int, int], int] = {}
                for step in plan.steps:
                    values["packing", step.number] = packing_s(plan, step, cluster)
                    values["work", step.number] = step_s(plan, step, cluster)
                    for send in step.sends:
                        pair = step.number, send.peer
                        sent[pair] = sent.get(pair, 0) + send.elements * plan.element_bytes(send.buffer)
                for name, number in values:
                    points_by_plane.setdefault((name, number, *ends), []).append((rank, ranks, values[name, number]))
                for number in range(self._steps):
                    for peer in range(ranks):
                        pair_key = (number, *self._pair(rank, peer, ranks))
                        if self._sent.setdefault(pair_key, sent.get((number, peer), 0)) != sent.get((number, peer), 0):
                            raise unlike(plan, f"in step {number} of {ranks} ranks, rank {rank} sends rank {peer} more "
                                               "or less than other pairs at these distances")  # fmt: skip
        for key, points in points_by_plane.items():
            coordinates = np.array([(rank, ranks, 1.0) for rank, ranks, _ in points])
            values_of = np.array([value for *_, value in points])
            plane = np.linalg.lstsq(coordinates, values_of, rcond=None)[0]
            if np.abs(coordinates @ plane - values_of).max() > CLOSE * np.abs(values_of).max():
                raise unlike(plans_of[max(plans_of)][0], f"{key[0]} of step {key[1]} does not grow linearly with ranks")
            self._planes[key] = plane
        counts = np.array(list(plans_of), float)
        self._held = np.polynomial.polynomial.polyfit(
            counts, [spread([plan.arena_bytes + plan.kept_bytes for plan in plans]) for plans in plans_of.values()], 1
        )

    def held_spread(self, ranks: int) -> np.ndarray:
        """Return the bytes that ranks hold, as `spread`: each percentile is linear in the number of ranks."""
        return self._held[0] + ranks * self._held[1]

    def step(self, number: int, ranks: int) -> tuple[Times, Times, Messages]:
        """Return the same as `Classes.step`."""
        packing, work = (self._seconds(name, number, ranks) for name in ("packing", "work"))
        any_sent = any(nbytes for key, nbytes in self._sent.items() if key[0] == number)
        return packing, work, _AllPairs(self, number, ranks) if any_sent else ()

    def _seconds(self, name: str, number: int, ranks: int) -> Times:
        all_ranks, near = np.arange(ranks), self.near
        seconds = np.empty(ranks)
        for first, last in [*((n, n) for n in (*range(near), *range(ranks - near, ranks))), (near, ranks - near - 1)]:
            a, b, c = self._planes[name, number, *self._end(first, ranks)]
            seconds[first : last + 1] = a * all_ranks[first : last + 1] + b * ranks + c
        return seconds

    def sent(self, number: int, distance: int, ranks: int, into: Times) -> None:
        """Fill `into` with the bytes that each rank sends to the rank at `distance` in step `number`."""
        near = self.near
        # First fill the ranks in the middle: those whose receivers do not wrap around, then those whose receivers do.
        # Then fill the ranks that are near an end or whose receivers are.
        for first, end in ((near, ranks - distance - near), (ranks - distance + near, ranks - near)):
            if first < end:
                into[first:end] = self._sent[number, *self._pair(first, (first + distance) % ranks, ranks)]
        for first in (0, ranks - near, ranks - distance - near, ranks - distance):
            for rank in range(max(0, first), min(ranks, first + near)):
                into[rank] = self._sent[number, *self._pair(rank, (rank + distance) % ranks, ranks)]

    def _end(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return the distances of a rank to both ends, cut off at `near`."""
        return min(rank, self.near), min(ranks - 1 - rank, self.near)

    def _pair(self, rank: int, peer: int, ranks: int) -> tuple[int, ...]:
        """Return the distances of two ranks to the ends and to each other, cut off at `near`."""
        return *self._end(rank, ranks), *self._end(peer, ranks), max(-self.near, min(self.near, peer - rank))


class _AllPairs:
    """The messages of a step in which all ranks send to all others, by distance; computed on each iteration."""

    def __init__(self, learned: AtOnce, number: int, ranks: int) -> None:
        self._learned, self._number, self._ranks = learned, number, ranks

    def __iter__(self) -> Iterator[tuple[Way, Times]]:
        nbytes = np.empty(self._ranks)
        for distance in range(1, self._ranks):
            self._learned.sent(self._number, distance, self._ranks, nbytes)
            if nbytes.any():
                yield (distance, 0), nbytes


def _at_once_of(
    problem_of: Callable[[int], Problem],
    schedule: str,
    cluster: Cluster,
    counts: tuple[int, ...],
    reach: int,
    prologue: Prologue | None,
) -> dict[bool, AtOnce]:
    """Return both learned passes (backward: True).

    `counts`: the numbers of ranks to learn from. The other arguments are those of `classes_of`.
    """
    learned = {}
    routes = routes_on(problem_of, schedule, cluster, counts, 1, prologue)
    for backward in (False, True):
        plans = {
            count: tuple(plan_of(problem_of(count), route, rank, backward) for rank in range(count))
            for count, route in routes.items()
        }
        learned[backward] = AtOnce(NEAR + reach, lambda ranks, backward=backward: steps_of(schedule, ranks, backward))  # type: ignore[misc]
        learned[backward].learn(plans, replace(cluster, message_sms=0.0))
    return learned

"""Predict a schedule's plans on any number of ranks from plans of two small numbers of ranks.

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
"""How far from a line cells may differ; a window reaches as many shards farther."""
MOST_GROUPED = 16
"""Ranks of a group: as many times more plans are made."""
FARTHEST = 8
"""The farthest reach, in shards, of a window: plans are made of six times as many ranks."""
CLOSE = 1e-9
"""Relative difference of two times that are the same but for rounding."""


Times = np.ndarray
"""Seconds, or bytes, by rank."""
Way = tuple[int, int]
"""How many groups and places behind a sender its receiver lies."""
Messages = Iterable[tuple[Way, Times | float]]
"""Of a step: bytes from each rank to the one `way` behind it, one number if all are alike. A tuple, or made anew each
time where there are too many to keep."""


class Target(NamedTuple):
    """To which rank a message goes: so many groups on, `offset` and `turns` times the turn, and places inside of it."""

    turns: int
    offset: int
    place: int = 0

    def way(self, turn: int, groups: int) -> Way:
        """The way in a turn."""
        return (self.turns * turn + self.offset) % groups, self.place


TARGETS = tuple(Target(turns, offset) for turns, most in ((0, 1), (1, 2), (-1, 2)) for offset in range(-most, most + 1))
"""A neighbor, or a group as far away as the turn, but for one or two."""


class Cell(NamedTuple):
    """What a rank does in a step. `sends`: bytes by way."""

    packing_s: float = 0.0
    work_s: float = 0.0
    sends: tuple[tuple[Way, int], ...] = ()


class Row(NamedTuple):
    """What the ranks of a group do in a step, by place; alike groups share one.

    `sends`: by target, bytes by place, or one number where they are the same.
    """

    packing_s: np.ndarray
    work_s: np.ndarray
    sends: dict[Target, np.ndarray | float]


class Stretch(NamedTuple):
    """Groups from `first` to before `end` that do the same in a step."""

    first: int
    end: int
    row: Row


Where = tuple[int, ...]


@dataclass
class _Known:
    """A learned cell. `sends`: for each message the targets that describe all that were seen, and its bytes."""

    packing_s: float
    work_s: float
    sends: list[tuple[tuple[Target, ...], int]]

    def agrees(self, cell: Cell, turn: int, groups: int) -> bool:
        """Whether a cell is the same but for rounding; targets that do not describe it are struck out."""
        times = (self.packing_s, cell.packing_s), (self.work_s, cell.work_s)
        if len(cell.sends) != len(self.sends) or not all(isclose(a, b, rel_tol=CLOSE) for a, b in times):
            return False
        sent = dict(cell.sends)
        self.sends = [
            (tuple(one for one in targets if sent.get(one.way(turn, groups)) == nbytes), nbytes)
            for targets, nbytes in self.sends
        ]
        return {some[0].way(turn, groups) for some, _ in self.sends if some} == set(sent)


class Classes:
    """One pass of a schedule on any number of ranks, whose shards are all as long as those that it was learned from.

    Ranks are told apart by their group, as far as it lies near a line, and by their place in it: one of `group`.
    """

    def __init__(self, near: Sequence[int], steps_of: Callable[[int], Steps], group: int = 1) -> None:
        """Knows nothing yet. `near`: by line; with more than four, ranks and steps half a ring away make lines too."""
        self._near, self._halves, self.steps_of, self.group = near, len(near) > 4, steps_of, group
        self._ends_near = max(near)
        self._cells: dict[Where, _Known] = {}
        self._rows: dict[tuple[tuple[float, float, tuple[tuple[Target, int], ...]], ...], Row] = {}
        self._borders: dict[Where, list[tuple[int, int, Row]]] = {}
        self._held: dict[int, list[int]] = {}

    def learn(self, plan: Plan, cluster: Cluster, like: Classes | None = None) -> None:
        """Take over the cells of a rank. Raises `UnsupportedError` where a class has two that differ.

        Ranks come in order, and with the last it is seen that none holds more than on other numbers of ranks. `like`:
        the classes of shards of another length, which send to the same ranks.
        """
        rank, ranks = plan.rank, plan.problem.world_size
        steps, groups = self.steps_of(ranks), ranks // self.group
        found = {step.number: self._cell(plan, step, cluster, ranks) for step in plan.steps}
        for number in range(steps.in_all):
            cell, turn = found.pop(number, Cell()), steps.place(number)[1]
            where = self._where(rank, number, ranks)
            known = self._cells.get(where)
            if known is None:
                other = None if like is None else like._cells.get(where)
                told = None if other is None else [targets for targets, _ in other.sends]
                sends = self._named(cell, turn, groups, told)
                if sends is None:
                    raise unlike(plan, f"rank {rank} of {ranks} sends to strangers in step {number}")
                self._cells[where] = _Known(cell.packing_s, cell.work_s, sends)
            elif not known.agrees(cell, turn, groups):
                raise unlike(plan, f"step {number} of rank {rank} of {ranks} is unlike that of its class")
        if found:
            raise unlike(plan, f"rank {rank} of {ranks} has steps {sorted(found)} beyond {steps.in_all}")
        held = self._held.setdefault(ranks, [])
        held.append(plan.arena_bytes + plan.kept_bytes)
        if len(held) == ranks and (min(held), max(held)) != (min(self.held_bytes), max(self.held_bytes)):
            least, most = min(self.held_bytes), max(self.held_bytes)
            raise unlike(plan, f"of {ranks} ranks each holds {min(held)} to {max(held)} bytes, not {least} to {most}")

    @property
    def held_bytes(self) -> list[int]:
        """Bytes that ranks hold, on the first number of ranks."""
        return next(iter(self._held.values()))

    def held_spread(self, ranks: int) -> np.ndarray:
        """What ranks hold, as `spread`: the same on any number of `ranks`."""
        return spread(self.held_bytes)

    def step(self, number: int, ranks: int) -> tuple[Times, Times, Messages]:
        """Return seconds of packing and of work by rank, and the messages, of a step of the pass.

        Raises `UnsupportedError` for a class that was not seen.
        """
        stretches, groups = self._stretches(number, ranks), ranks // self.group
        turn = self.steps_of(ranks).place(number)[1]

        def by_rank(values: Sequence[Times | float]) -> Times:
            into = np.empty((groups, self.group))
            for value, (first, end, _) in zip(values, stretches, strict=True):
                into[first:end] = value
            return into.reshape(-1)

        packing, work = (by_rank([getattr(one.row, name) for one in stretches]) for name in ("packing_s", "work_s"))
        messages: dict[Way, Times | float] = {}
        for target in dict.fromkeys(target for one in stretches for target in one.row.sends):
            values = [one.row.sends.get(target, 0.0) for one in stretches]
            # In most steps of most schedules all ranks send as much, and one number says it.
            alike = all(isinstance(value, float) and value == values[0] for value in values)
            nbytes, way = values[0] if alike else by_rank(values), target.way(turn, groups)
            messages[way] = messages[way] + nbytes if way in messages else nbytes
        return packing, work, tuple(messages.items())

    def _stretches(self, number: int, ranks: int) -> list[Stretch]:
        ends_near, steps, groups = self._ends_near, self.steps_of(ranks), ranks // self.group
        phase, turn, inner = steps.place(number)
        lines = self._lines(turn, groups)
        ends = self._ends(turn, steps, groups)
        # Steps whose lines lie in one order, as far apart as it counts, have the same cells between the same lines.
        order = sorted(range(len(lines)), key=lines.__getitem__)
        apart = [min(lines[b] - lines[a], 2 * ends_near + 2) for a, b in pairwise(order)]
        key = (phase, inner, *(max(-ends_near, min(ends_near, end)) for end in ends), *order, *apart)
        borders = self._borders.get(key)
        if borders is None:
            borders = self._borders[key] = self._found(number, lines, ranks)
        firsts = [lines[line] + offset for line, offset, _ in borders]
        return list(map(Stretch, firsts, [*firsts[1:], groups], (row for _, _, row in borders)))

    def _found(self, number: int, lines: tuple[int, ...], ranks: int) -> list[tuple[int, int, Row]]:
        """Where the stretches of a step begin, as (line, offset), and what their groups do."""
        groups = ranks // self.group
        edges = {
            line + offset: (at, offset)
            for at, (line, near) in enumerate(zip(lines, self._near, strict=True))
            for offset in range(-near, near + 1)
        }
        found: list[tuple[int, int, Row]] = []
        for first in sorted(edge for edge in edges if 0 <= edge < groups):
            row = self._row(first, number, ranks)
            if not found or found[-1][2] is not row:
                found.append((*edges[first], row))
        return found

    def _row(self, at: int, number: int, ranks: int) -> Row:
        """What a group does in a step."""
        members = range(at * self.group, (at + 1) * self.group)
        cells = [self._cells.get(self._where(rank, number, ranks)) for rank in members]
        if None in cells:
            rank = members[cells.index(None)]
            raise UnsupportedError(f"step {number} of rank {rank} of {ranks} is of a class that was not learned")
        told = tuple(
            (cell.packing_s, cell.work_s, tuple((targets[0], nbytes) for targets, nbytes in cell.sends))
            for cell in cells if cell is not None
        )  # fmt: skip
        if told not in self._rows:
            sends: dict[Target, np.ndarray] = {}
            for place, (_, _, sent) in enumerate(told):
                for target, nbytes in sent:
                    sends.setdefault(target, np.zeros(self.group))[place] = nbytes
            packing, work = (np.array([one[n] for one in told]) for n in (0, 1))
            by_target = {to: float(of[0]) if (of == of[0]).all() else of for to, of in sends.items()}
            self._rows[told] = Row(packing, work, by_target)
        return self._rows[told]

    def _lines(self, turn: int, groups: int) -> tuple[int, ...]:
        """The groups at which a line meets a turn."""
        half = groups // 2
        lines = 0, groups - 1, turn, groups - turn
        return (*lines, half, turn - half, turn + half, half - turn, groups + half - turn) if self._halves else lines

    def _ends(self, turn: int, steps: Steps, groups: int) -> tuple[int, ...]:
        """How far a turn lies behind those at which something begins or ends."""
        ends = turn, turn - steps.turns + steps.extra
        return (*ends, turn - groups, turn - groups // 2) if self._halves else ends

    def _where(self, rank: int, number: int, ranks: int) -> Where:
        """Where rank and step lie to the lines, as far as it counts."""
        ends, steps, groups = self._ends_near, self.steps_of(ranks), ranks // self.group
        at, place = divmod(rank, self.group)
        phase, turn, inner = steps.place(number)
        lines = zip(self._near, self._lines(turn, groups), strict=True)
        apart = (max(-near, min(near, at - line)) for near, line in lines)
        return phase, inner, place, *apart, *(max(-ends, min(ends, end)) for end in self._ends(turn, steps, groups))

    def _named(
        self, cell: Cell, turn: int, groups: int, told: list[tuple[Target, ...]] | None
    ) -> list[tuple[tuple[Target, ...], int]] | None:
        """The messages of a cell by all targets that describe them, or by those that are `told`; None for others."""
        if told is None:
            told = [self._targets(way, turn, groups) for way, _ in cell.sends]
        sent = dict(cell.sends)
        ways = [targets[0].way(turn, groups) if targets else None for targets in told]
        if None in ways or set(ways) != set(sent):
            return None
        return [(targets, sent[way]) for targets, way in zip(told, ways, strict=True) if way is not None]

    def _targets(self, way: tuple[int, int], turn: int, groups: int) -> tuple[Target, ...]:
        found = (target._replace(place=way[1]) for target in TARGETS)
        return tuple(target for target in found if target.way(turn, groups) == way)

    def _cell(self, plan: Plan, step: PlanStep, cluster: Cluster, ranks: int) -> Cell:
        sends: dict[tuple[int, int], int] = {}
        at, place = divmod(plan.rank, self.group)
        for send in step.sends:
            there, other = divmod(send.peer, self.group)
            way = (there - at) % (ranks // self.group), (other - place) % self.group
            sends[way] = sends.get(way, 0) + send.elements * plan.element_bytes(send.buffer)
        return Cell(packing_s(plan, step, cluster), step_s(plan, step, cluster), tuple(sorted(sends.items())))


def unlike(plan: Plan, why: str) -> UnsupportedError:
    """The refusal of plans that have no classes."""
    layout = plan.problem.q_layout
    return UnsupportedError(
        f"schedule={plan.name!r} with layout={layout.name!r} has no classes of ranks that behave alike: {why}; "
        "simulate as many ranks as can be planned one by one, or another schedule, layout or window"
    )


def spread(held: Sequence[int]) -> np.ndarray:
    """Bytes that the ranks hold, as many values for each number of ranks: from the least to the most."""
    return np.percentile(held, np.linspace(0, 100, 101))


def check_reach(reach: int) -> None:
    """Raise `UnsupportedError` for a window that reaches too many shards."""
    if reach > FARTHEST:
        raise UnsupportedError(
            f"the window reaches {reach} shards and classes of ranks are told apart up to {FARTHEST}; choose a shorter "
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

    `problem_of(n)`: the call on n ranks, with shards of the same equal lengths for each n. `reach`: how many shards a
    window reaches. `group`: how many ranks belong together, see `group_of`. `prologue`: how backward passes begin, see
    `prologue_on`; None: as on the ranks that are learned from. `like`: the classes of shards of another length. These
    showed that more ranks have the same classes, so one number of ranks is enough. Raises `UnsupportedError` for
    schedules that have no such classes, and for a window that reaches too far.
    """
    name = schedule.partition(":")[0]
    if name not in SERVED:
        raise UnsupportedError(
            f"schedule={schedule!r} cannot be simulated by classes of ranks; choose one of {', '.join(SERVED)}, or as "
            "many ranks as can be planned one by one"
        )
    check_reach(reach)
    if group > MOST_GROUPED:
        raise UnsupportedError(
            f"schedule={schedule!r}: classes are learned from the plans of many groups, and those of {group} ranks are "
            f"too large to be planned; name groups of up to {MOST_GROUPED}, as {name}:8"
        )
    counts = learned_from(schedule, quarter, reach, group)
    route = ROUTES[name]
    if route.at_once:
        return _at_once_of(problem_of, schedule, cluster, counts, reach, prologue)
    lines = 9 if route.halves and not reach else 4
    near = [NEAR + reach] * lines if group == 1 else [one - (-reach // group) for one in route.group_lines]
    if route.by_head:
        check_extent(problem_of(counts[-1]), by_head=True, groups=counts[-1] // group)
    routes = routes_on(problem_of, schedule, cluster, counts, group, prologue)
    # Multiprocessors that messages hold depend on links, and so on nodes: `recurrence` counts them.
    bare = replace(cluster, message_sms=0.0)
    found = {
        backward: Classes(near, lambda count, backward=backward: steps_of(schedule, count, backward, group), group)  # type: ignore[misc]
        for backward in (False, True)
    }
    for count in counts[:1] if like is not None else counts:
        problem = problem_of(count)
        for first in range(0, count, group):
            for plan in plans_of_group(problem, routes[count], range(first, first + group)):
                found[plan.backward].learn(plan, bare, None if like is None else like[plan.backward])
    return found


def plans_of_group(problem: Problem, route: Route, ranks: range, passes: int = 2) -> Iterator[Plan]:
    """The plans of ranks that belong together, each looked at once: of a rank the forward, then the backward."""
    # Held, so that all of these plans share what the group asks for; let go after them, for it is large.
    groups = route.shared(problem)
    for rank, backward in product(ranks, range(passes)):
        yield plan_once(problem, route, rank, bool(backward))
    del groups


Learned = dict[bool, "Classes"] | dict[bool, "AtOnce"]
"""By pass, backward: True."""
Routes = dict[int, Route]
"""By number of ranks."""


def routes_on(
    problem_of: Callable[[int], Problem],
    schedule: str,
    cluster: Cluster,
    counts: Sequence[int],
    group: int,
    prologue: Prologue | None,
) -> Routes:
    """The route on each of some numbers of ranks, with groups and an prologue as of `classes_of`."""
    name = schedule if group == 1 else f"{schedule.partition(':')[0]}:{group}"
    routes = {count: choose_route(problem_of(count), name, cluster) for count in counts}
    return {
        count: route if prologue is None else replace(route, prologue=prologue) for count, route in routes.items()
    }  # fmt: skip


def prologue_on(problem_of: Callable[[int], Problem], routes: Routes, cluster: Cluster, ranks: int) -> Prologue:
    """How a backward pass on `ranks` begins, from the routes on two smaller numbers, whose links and times differ."""
    fewer = [(count, prologue_facts(problem_of(count), route, cluster)) for count, route in routes.items()]
    return prologue_beyond(fewer, problem_of(ranks), cluster)


def learned_from(schedule: str, quarter: int, reach: int, group: int) -> tuple[int, ...]:
    """Return the numbers of ranks that classes are learned from: two, or three for schedules of one step."""
    route, step = ROUTES[schedule.partition(":")[0]], 4
    if group > 1:
        # Lines cross on a group or between two.
        least, step = route.least_groups - 6 * (-reach // group), 2
    elif route.at_once:
        # The least has each class of pairs. Whether buffers of one step fit between those of another depends on the
        # ranks modulo 4.
        least = 3 * (NEAR + reach) + 3
    else:
        # Lines cross at a quarter of the ranks, on a rank or between two.
        least = (12 if route.halves and not reach else 6) * (NEAR + reach) + 2
    least += (quarter - least) % step
    return tuple((least + more * step) * group for more in range(3 if route.at_once else 2))


# --- steps of a pass, by turn of the schedule ------------------------------------------------------------------------


class Steps(NamedTuple):
    """How the steps of a pass lie to the turns of its schedule: `turns` of them, of `inner` steps each, `extra` for
    what is before and after the ring.

    `transposed`: a backward pass that undoes the forward's steps from the last on: an prologue step, then a main and a
    merge step for each.
    """

    turns: int
    transposed: bool
    inner: int = 1
    extra: int = 0

    @property
    def in_all(self) -> int:
        """Steps of the pass."""
        there = self.turns * self.inner
        return 1 + 2 * there if self.transposed else there

    def place(self, number: int) -> tuple[int, int, int]:
        """The phase of a step, the turn that it belongs to, and its place in the turn."""
        if not self.transposed:
            return 0, *divmod(number, self.inner)
        there = self.turns * self.inner
        return (1 + (number - 1) % 2, *divmod(there - 1 - (number - 1) // 2, self.inner)) if number else (
            0, self.turns, 0)  # fmt: skip


@lru_cache(maxsize=64)
def steps_of(schedule: str, ranks: int, backward: bool, group: int = 1) -> Steps:
    """The steps of a pass of a schedule, with groups as of `group_of`."""
    route = route_named(schedule if group == 1 else f"{schedule.partition(':')[0]}:{group}", ranks)
    inner = route.inner_steps(group)
    return Steps(route.steps(ranks) // inner, backward and route.undoes_steps, inner, route.extra_steps)


def group_of(problem: Problem, schedule: str, cluster: Cluster) -> int:
    """How many ranks belong together: those of a node where the schedule knows nodes, else one.

    Raises `InputError` as the route does.
    """
    ranks = problem.world_size
    nodes = tuple(map(cluster.node_of, range(ranks)))
    return route_named(schedule, ranks).on_nodes(nodes).group_size(problem)


# --- schedules that exchange everything in one step, learned from plans of three small numbers of ranks --------------
# The work of a rank in a step grows with the number of ranks, so its seconds and buffers lie on a plane over
# (rank, ranks). What it sends to one other rank does not grow. Both depend on the distance of the ranks to the
# first and last rank, and to each other:
#        sender                           f, l: first and last `near` ranks, each a class of its own
#         |  f f f f f f l                =: sender and receiver less than `near` apart, by distance
#         |  f = . . . . l                .: all others, before and behind the sender
#         |  f . = . . . l
#         |  l l l l l l l
#         +---------------- receiver
# Plans of three numbers of ranks must agree with what was learned, or the schedule is refused. That plans of more ranks
# agree too is assumed; the tests compare numbers of ranks that were not learned from.


class AtOnce:
    """One pass of such a schedule, learned from plans of some numbers of ranks; see `Classes`."""

    group = 1

    def __init__(self, near: int, steps_of: Callable[[int], Steps]) -> None:
        """Knows nothing yet."""
        self.near, self.steps_of, self._steps = near, steps_of, steps_of(2).in_all
        self._planes: dict[tuple[str, int, int, int], np.ndarray] = {}
        self._sent: dict[tuple[int, ...], int] = {}
        self._held = np.zeros((2, 101))

    def learn(self, plans_of: dict[int, tuple[Plan, ...]], cluster: Cluster) -> None:
        """Take over what all ranks do. Raises `UnsupportedError` where it does not lie on planes."""
        told: dict[tuple[str, int, int, int], list[tuple[int, int, float]]] = {}
        for ranks, plans in plans_of.items():
            for rank, plan in enumerate(plans):
                where = self._end(rank, ranks)
                values = {(name, n): 0.0 for name in ("packing", "work") for n in range(self._steps)}
                sent: dict[tuple[int, int], int] = {}
                for step in plan.steps:
                    values["packing", step.number] = packing_s(plan, step, cluster)
                    values["work", step.number] = step_s(plan, step, cluster)
                    for send in step.sends:
                        pair = step.number, send.peer
                        sent[pair] = sent.get(pair, 0) + send.elements * plan.element_bytes(send.buffer)
                for name, number in values:
                    told.setdefault((name, number, *where), []).append((rank, ranks, values[name, number]))
                for number in range(self._steps):
                    for peer in range(ranks):
                        pair_key = (number, *self._pair(rank, peer, ranks))
                        if self._sent.setdefault(pair_key, sent.get((number, peer), 0)) != sent.get((number, peer), 0):
                            raise unlike(plan, f"in step {number} of {ranks} ranks, rank {rank} sends rank {peer} more "
                                               "or less than others send that lie alike")  # fmt: skip
        for key, points in told.items():
            at = np.array([(rank, ranks, 1.0) for rank, ranks, _ in points])
            values_of = np.array([value for *_, value in points])
            plane = np.linalg.lstsq(at, values_of, rcond=None)[0]
            if np.abs(at @ plane - values_of).max() > CLOSE * np.abs(values_of).max():
                raise unlike(plans_of[max(plans_of)][0], f"{key[0]} of step {key[1]} does not grow evenly with ranks")
            self._planes[key] = plane
        counts = np.array(list(plans_of), float)
        self._held = np.polynomial.polynomial.polyfit(
            counts, [spread([plan.arena_bytes + plan.kept_bytes for plan in plans]) for plans in plans_of.values()], 1
        )

    def held_spread(self, ranks: int) -> np.ndarray:
        """What ranks hold, as `spread`: on lines over the number of ranks."""
        return self._held[0] + ranks * self._held[1]

    def step(self, number: int, ranks: int) -> tuple[Times, Times, Messages]:
        """See `Classes.step`."""
        packing, work = (self._seconds(name, number, ranks) for name in ("packing", "work"))
        some = any(nbytes for key, nbytes in self._sent.items() if key[0] == number)
        return packing, work, _AllPairs(self, number, ranks) if some else ()

    def _seconds(self, name: str, number: int, ranks: int) -> Times:
        every, near = np.arange(ranks), self.near
        found = np.empty(ranks)
        for first, last in [*((n, n) for n in (*range(near), *range(ranks - near, ranks))), (near, ranks - near - 1)]:
            a, b, c = self._planes[name, number, *self._end(first, ranks)]
            found[first : last + 1] = a * every[first : last + 1] + b * ranks + c
        return found

    def sent(self, number: int, distance: int, ranks: int, into: Times) -> None:
        """Bytes from each rank to the one so far behind it."""
        near = self.near
        # Those in the middle, before and behind the last rank; then all that lie near to an end.
        for first, end in ((near, ranks - distance - near), (ranks - distance + near, ranks - near)):
            if first < end:
                into[first:end] = self._sent[number, *self._pair(first, (first + distance) % ranks, ranks)]
        for first in (0, ranks - near, ranks - distance - near, ranks - distance):
            for rank in range(max(0, first), min(ranks, first + near)):
                into[rank] = self._sent[number, *self._pair(rank, (rank + distance) % ranks, ranks)]

    def _end(self, rank: int, ranks: int) -> tuple[int, int]:
        """Where a rank lies to the ends."""
        return min(rank, self.near), min(ranks - 1 - rank, self.near)

    def _pair(self, rank: int, peer: int, ranks: int) -> tuple[int, ...]:
        """Where two ranks lie to the ends and to each other."""
        return *self._end(rank, ranks), *self._end(peer, ranks), max(-self.near, min(self.near, peer - rank))


class _AllPairs:
    """The messages of a step in which all ranks send to each other, by distance."""

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
    """Return both passes; arguments are as of `classes_of`, `counts` the numbers of ranks to learn from."""
    found = {}
    routes = routes_on(problem_of, schedule, cluster, counts, 1, prologue)
    for backward in (False, True):
        plans = {
            count: tuple(plan_of(problem_of(count), route, rank, backward) for rank in range(count))
            for count, route in routes.items()
        }
        found[backward] = AtOnce(NEAR + reach, lambda ranks, backward=backward: steps_of(schedule, ranks, backward))  # type: ignore[misc]
        found[backward].learn(plans, replace(cluster, message_sms=0.0))
    return found

"""Predict how long a pass takes on thousands of ranks: the rules of `simulate`, step by step, for all ranks at once.

A rank enters a step, packs, releases its messages and works. A message starts when both ends have released it, and
takes the latency and the bytes of the busier end of its link. A rank's step ends with its last work or
message:
       go[r]      =  enter[r] + packing[r]
       landed[m]  =  max(go[src], go[dst]) + latency + max(sent by src, received by dst) / bandwidth
       enter'[r]  =  max(go[r] + work[r], landed of all messages of r)
The times equal those of `simulate` except for rounding, if every rank has a processor of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ringattn.core.problem import Problem
from ringattn.errors import UnsupportedError
from ringattn.planner.choose import plan_of
from ringattn.planner.classes import CLOSE, NEAR, Classes, Stretch, check_reach, routes_on, spread, steps_of, unlike
from ringattn.planner.cluster import Cluster, LinkClass
from ringattn.planner.plan import Plan
from ringattn.planner.simulate import Disturbance
from ringattn.planner.work import packing_s, step_s
from ringattn.schedule.opening import Opening

Times = np.ndarray
"""Seconds, or bytes, by rank."""


class PassTimes(NamedTuple):
    """One pass, in seconds by rank; as `simulate.Timeline`. `sent_bytes`: by rank.

    `traced`: for some ranks an array (steps, 4): when each step was entered, its messages let go, its work done, the
    last message of it landed (0 for none).
    """

    total_s: float
    busy_s: Times
    waiting_s: Times
    exposed_s: Times
    sent_bytes: Times
    traced: dict[int, np.ndarray]


def play(
    classes: Classes,
    cluster: Cluster,
    ranks: int,
    overlap: bool = True,
    disturbance: Disturbance | None = None,
    trace: Sequence[int] = (),
) -> PassTimes:
    """A pass on so many ranks; arguments as of `simulate`, `trace`: ranks whose steps are told too.

    Raises `UnsupportedError` for a cluster whose ranks share processors, and for one that is joined rank by rank.
    """
    check_served(cluster)
    disturbed = disturbance or Disturbance()
    disturbed.check_ranks(ranks)
    steps, wires = classes.steps_of(ranks), _Wires(cluster, ranks, classes.group, disturbed)
    is_even = not (disturbed.jitter or disturbed.slow_ranks)
    enter, go, worked, last = (np.full(ranks, cluster.pass_s) for _ in range(4))
    work = np.empty(ranks)
    busy, sent = _Sum(ranks, classes.group), _Sum(ranks, classes.group)
    busy.whole += cluster.pass_s
    watched = list(trace)
    marks = np.zeros((steps.in_all, 4, len(watched)))
    for number in range(steps.in_all):
        stretches = classes.stretches(number, ranks)
        factors = None if is_even else disturbed.of_work(ranks, number)
        ways, held = wires.ways(stretches, steps.place(number)[1])
        marks[number, 0] = enter[watched]
        before = enter
        for name, after in (("packing_s", go), ("work_s", worked)):
            values = [getattr(one.row, name) for one in stretches]
            some = any(one.row.packs if name == "packing_s" else one.row.works for one in stretches)
            more = held if name == "work_s" else None
            if factors is None and some:
                busy.add(stretches, values)
            if some or more is not None:
                _spread(values, stretches, work.reshape(-1, classes.group))
                if more is not None:
                    work += more
                if factors is not None:
                    work *= factors
                    busy.whole += work
                elif more is not None:
                    busy.whole += more
                np.add(before, work, out=after)
            else:
                after[:] = before
            before = after
        marks[number, 1], marks[number, 2] = go[watched], worked[watched]
        sent.add(stretches, [one.row.sent for one in stretches])
        last.fill(0.0)
        wires.land(ways, go if overlap else worked, last)
        np.maximum(worked, last, out=enter)
        marks[number, 3] = last[watched]
    total = float(enter.max(initial=0.0))
    at_work = np.minimum(busy.total, enter)
    traced = {rank: marks[:, :, at] for at, rank in enumerate(watched)}
    return PassTimes(total, at_work, total - at_work, enter - at_work, sent.total, traced)


def check_served(cluster: Cluster) -> None:
    """Raise `UnsupportedError` for machines that classes of ranks do not describe."""
    if cluster.cores is not None or cluster.links is not None:
        why = "ranks share processors" if cluster.cores is not None else "links are told rank by rank"
        raise UnsupportedError(f"{cluster.name}: its {why}, which classes of ranks do not describe; name another "
                               "cluster, or as many ranks as can be planned one by one")  # fmt: skip


def _spread(values: Sequence[Times | float], stretches: Sequence[Stretch], into: Times) -> None:
    """Values by place of the groups of each stretch, `into` an array of groups by places."""
    for value, (first, end, _) in zip(values, stretches, strict=True):
        into[first:end] = value


class _Sum:
    """A sum by rank of values that are the same over stretches: kept as the differences between neighbors."""

    def __init__(self, ranks: int, group: int) -> None:
        self.whole = np.zeros(ranks)
        self._shape = ranks // group, group
        self._rises: dict[int, Times] = defaultdict(lambda: np.zeros(group))

    def add(self, stretches: Sequence[Stretch], values: Sequence[Times]) -> None:
        """Add values by place to the groups of each stretch."""
        last: Times | float = 0.0
        for value, (first, _, _) in zip(values, stretches, strict=True):
            if value is not last:
                self._rises[first] += value - last
            last = value

    @property
    def total(self) -> Times:
        """The sum."""
        rises = np.zeros(self._shape)
        for first, rise in self._rises.items():
            rises[first] = rise
        return self.whole + np.cumsum(rises, axis=0).reshape(-1)


class _Link(NamedTuple):
    """Between each rank and the one so far behind it: whether that is on another node, and the constants of `_of`.

    One number for all where they are alike.
    """

    far: np.ndarray | bool
    latency_s: Times | float
    among: Times | float
    to_one: Times | float


class _Way(NamedTuple):
    """What goes in a step from each rank to the one `way` behind it, if anything: bytes, and seconds under way.

    One number for all where they are alike.
    """

    way: tuple[int, int]
    nbytes: Times | float
    seconds: Times | float


class _Wires:
    """The links between all ranks and those so many groups and places farther."""

    def __init__(self, cluster: Cluster, ranks: int, group: int, disturbance: Disturbance) -> None:
        self._shape = ranks // group, group
        self._share = cluster.message_sms / cluster.sms if cluster.message_sms and cluster.sms else 0.0
        # Inside a node and between nodes: latency, and seconds of a byte among all and to one rank.
        self._kinds = [constants_of(cluster, kind) for kind in (LinkClass.UNKNOWN, LinkClass.NETWORK)]
        self._node = np.arange(ranks) // (cluster.ranks_per_node or ranks)
        self._slow = disturbance.slow_links
        self._kept: dict[tuple[int, int], _Link] = {}
        self._landed, self._there = np.empty(ranks), np.empty(ranks)

    def ways(self, stretches: list[Stretch], turn: int) -> tuple[list[_Way], Times | float | None]:
        """Where messages of a step go, how long they are under way, and what they take from the work meanwhile."""
        found: dict[tuple[int, int], Times | float] = {}
        for target in dict.fromkeys(target for one in stretches for target in one.row.sends):
            values = [one.row.sends.get(target, 0.0) for one in stretches]
            nbytes: Times | float = values[0]
            # In most steps of most schedules all ranks send as much, and one number says it.
            if not all(isinstance(one, float) and one == values[0] for one in values):
                nbytes = np.empty(len(self._node))
                _spread(values, stretches, nbytes.reshape(self._shape))
            way = target.way(turn, self._shape[0])
            found[way] = found[way] + nbytes if way in found else nbytes
        links = {way: self._of(way) for way in found}
        kinds = {link.far for link in links.values() if isinstance(link.far, bool)}
        if len(found) > 1 and len(kinds) < len(found):
            return self._several(found, links)
        # Each rank sends to one and receives from one over links of a kind, so either end is the busier.
        ways: list[_Way] = []
        held: Times | float = 0.0
        for way, nbytes in found.items():
            _, latency_s, among, to_one = links[way]
            seconds = nbytes * np.maximum(among, to_one)
            seconds += latency_s
            ways.append(_Way(way, nbytes, seconds))
            if self._share:
                sending = seconds if np.all(nbytes) else np.where(np.greater(nbytes, 0), seconds, 0.0)
                held = np.maximum(held, np.maximum(sending, self._shift(sending, way, self._there)))
        return ways, held * self._share if found and self._share else None

    def _several(
        self, found: dict[tuple[int, int], Times | float], links: dict[tuple[int, int], _Link]
    ) -> tuple[list[_Way], Times | float | None]:
        """Messages to several ranks share the links of their class."""
        # By direction, and whether between nodes: all bytes of a rank, and the most to one other.
        sums: dict[tuple[int, bool], Times | float] = {}
        most: dict[tuple[int, bool], Times | float] = {}
        for way, nbytes in found.items():
            for far, part in _by_kind(links[way].far, nbytes):
                for key, there in (((0, far), part), ((1, far), self._shift(part, way))):
                    sums[key] = sums[key] + there if key in sums else there
                    most[key] = np.maximum(most[key], there) if key in most else there
        held: Times | float = 0.0
        for key, loads in sums.items() if self._share else ():
            start_s, among_s, to_one_s = self._kinds[key[1]]
            travel = start_s + np.maximum(loads * among_s, most[key] * to_one_s)
            held = np.maximum(held, np.where(np.greater(loads, 0), travel, 0.0))
        ways = []
        for way, nbytes in found.items():
            link = links[way]
            # The busier of the sender and the receiver, which lies so far behind it.
            busier = {
                far: np.maximum(sums[0, far], self._shift(sums[1, far], way, back=True))
                for far, _ in _by_kind(link.far, nbytes)
            }
            both = busier[link.far] if isinstance(link.far, bool) else np.where(link.far, busier[True], busier[False])
            ways.append(_Way(way, nbytes, link.latency_s + np.maximum(both * link.among, nbytes * link.to_one)))
        return ways, held * self._share if self._share else None

    def land(self, ways: list[_Way], go: Times, last: Times) -> None:
        """Raise `last` to when all messages of each rank have landed, which it lets go at `go`."""
        landed, there = self._landed, self._there
        for way, nbytes, seconds in ways:
            self._shift(go, way, there, back=True)
            np.maximum(there, go, out=landed)
            landed += seconds * self._slower(way) if self._slow else seconds
            if not np.all(nbytes):
                landed *= np.greater(nbytes, 0)
            np.maximum(last, landed, out=last)
            np.maximum(last, self._shift(landed, way, there), out=last)

    def _of(self, way: tuple[int, int]) -> _Link:
        if way not in self._kept:
            far = self._node != self._shift(self._node, way, back=True)
            if far.all() or not far.any():
                link = _Link(bool(far[0]), *self._kinds[bool(far[0])])
            else:
                link = _Link(far, *(np.where(far, b, a) for a, b in zip(*self._kinds, strict=True)))
            if len(self._kept) > 8:  # of those that go as far as the turn, none comes twice
                return link
            self._kept[way] = link
        return self._kept[way]

    def _slower(self, way: tuple[int, int]) -> Times:
        """The factor on the messages to the rank so far behind each."""
        factors = np.ones(len(self._node))
        there = np.asarray(self._shift(np.arange(len(factors)), way, back=True))
        for rank, peer, factor in self._slow:
            for src, dst in ((rank, peer), (peer, rank)):
                if there[src] == dst:
                    factors[src] = factor
        return factors

    def _shift(
        self, values: Times | float, way: tuple[int, int], into: Times | None = None, back: bool = False
    ) -> Times | float:
        """What the ranks have that lie so far before each (`back`: behind it), in `into`; one number is that of all."""
        if not np.ndim(values):
            return values
        assert isinstance(values, np.ndarray)
        into = np.empty_like(values) if into is None else into
        groups, group = self._shape
        by, places = (-way[0] % groups * group, -way[1] % group) if back else (way[0] * group, way[1])
        if places:
            if by:
                values = _rolled(values, by, np.empty_like(values))
            # To the next place in the same group; the last is followed by the first.
            old, new = values.reshape(groups, group), into.reshape(groups, group)
            new[:, places:] = old[:, : group - places]
            new[:, :places] = old[:, group - places :]
            return into
        return _rolled(values, by, into)


def _by_kind(far: np.ndarray | bool, nbytes: Times | float) -> list[tuple[bool, Times | float]]:
    """Bytes by whether they go between nodes."""
    if isinstance(far, bool):
        return [(far, nbytes)]
    return [(False, np.where(far, 0.0, nbytes)), (True, np.where(far, nbytes, 0.0))]


def constants_of(cluster: Cluster, kind: LinkClass) -> tuple[float, float, float]:
    """Of `Cluster.travel_s`: latency, and seconds of a byte of all that an end sends, and of what goes to one rank."""
    many, latency_s = 1e18, cluster.travel_s(kind, 0.0, 0.0)
    among, to_one = cluster.travel_s(kind, many, 0.0) - latency_s, cluster.travel_s(kind, 0.0, many) - latency_s
    return latency_s, among / many, to_one / many


def _rolled(values: np.ndarray, by: int, into: np.ndarray) -> np.ndarray:
    """As `np.roll`, without making an array."""
    into[by:] = values[: len(values) - by]
    into[:by] = values[len(values) - by :]
    return into


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


AT_ONCE = ("all_gather",)
"""Schedules that are served here."""


class AtOnce:
    """One pass of such a schedule."""

    def __init__(self, near: int, steps: int) -> None:
        """Knows nothing yet."""
        self.near, self.steps = near, steps
        self._planes: dict[tuple[str, int, int, int], np.ndarray] = {}
        self._sent: dict[tuple[int, ...], int] = {}
        self._held = np.zeros((2, 101))

    def learn(self, plans_of: dict[int, tuple[Plan, ...]], cluster: Cluster) -> None:
        """Take over what all ranks do. Raises `UnsupportedError` where it does not lie on planes."""
        told: dict[tuple[str, int, int, int], list[tuple[int, int, float]]] = {}
        for ranks, plans in plans_of.items():
            for rank, plan in enumerate(plans):
                where = self._end(rank, ranks)
                values = {(name, n): 0.0 for name in ("packing", "work") for n in range(self.steps)}
                sent: dict[tuple[int, int], int] = {}
                for step in plan.steps:
                    values["packing", step.number] = packing_s(plan, step, cluster)
                    values["work", step.number] = step_s(plan, step, cluster)
                    for send in step.sends:
                        pair = step.number, send.peer
                        sent[pair] = sent.get(pair, 0) + send.elements * plan.element_bytes(send.buffer)
                for name, number in values:
                    told.setdefault((name, number, *where), []).append((rank, ranks, values[name, number]))
                for number in range(self.steps):
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

    def of_ranks(self, name: str, number: int, ranks: int) -> Times:
        """Seconds of packing or of work in a step, by rank."""
        every, near = np.arange(ranks), self.near
        found = np.empty(ranks)
        for first, last in [*((n, n) for n in (*range(near), *range(ranks - near, ranks))), (near, ranks - near - 1)]:
            a, b, c = self._planes[name, number, *self._end(first, ranks)]
            found[first : last + 1] = a * every[first : last + 1] + b * ranks + c
        return found

    def sends(self, number: int) -> bool:
        """Whether anything travels in a step."""
        return any(nbytes for key, nbytes in self._sent.items() if key[0] == number)

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


def at_once_of(
    problem_of: Callable[[int], Problem],
    schedule: str,
    cluster: Cluster,
    quarter: int,
    reach: int = 0,
    opening: Opening | None = None,
) -> dict[bool, AtOnce]:
    """Both passes (backward: True); arguments as of `classes_of`."""
    check_reach(reach)
    near = NEAR + reach
    found = {}
    routes = routes_on(problem_of, schedule, cluster, counts_of(reach, quarter), 1, opening)
    for backward in (False, True):
        plans = {
            count: tuple(plan_of(problem_of(count), route, rank, backward) for rank in range(count))
            for count, route in routes.items()
        }
        count = max(plans)
        found[backward] = AtOnce(near, steps_of(schedule, count, backward).in_all)
        found[backward].learn(plans, replace(cluster, message_sms=0.0))
    return found


def counts_of(reach: int, quarter: int) -> tuple[int, int, int]:
    """The numbers of ranks that are learned from: the least has each class of pairs.

    They are `quarter` modulo 4: whether buffers of one step find room between those of another goes by that.
    """
    least = 3 * (NEAR + reach) + 3
    least += (quarter - least) % 4
    return least, least + 4, least + 8


def play_at_once(
    learned: AtOnce,
    cluster: Cluster,
    ranks: int,
    overlap: bool = True,
    disturbance: Disturbance | None = None,
    trace: Sequence[int] = (),
) -> PassTimes:
    """A pass on so many ranks, by the rules of `recurrence`; arguments, result and refusals as of its `play`."""
    check_served(cluster)
    disturbed = disturbance or Disturbance()
    disturbed.check_ranks(ranks)
    enter = np.full(ranks, cluster.pass_s)
    busy, sent, watched = enter.copy(), np.zeros(ranks), list(trace)
    marks = np.zeros((learned.steps, 4, len(watched)))
    for number in range(learned.steps):
        factors = disturbed.of_work(ranks, number)
        exchange = _Exchange(learned, number, cluster, ranks, disturbed) if learned.sends(number) else None
        go = enter + learned.of_ranks("packing", number, ranks) * factors
        work = learned.of_ranks("work", number, ranks)
        if exchange is not None:
            work += exchange.held()
            sent += exchange.sums[0].sum(axis=0)
        worked = go + work * factors
        last = exchange.landed(go if overlap else worked) if exchange is not None else np.zeros(ranks)
        busy += worked - enter
        marks[number] = [one[watched] for one in (enter, go, worked, last)]
        enter = np.maximum(worked, last)
    total = float(enter.max())
    at_work = np.minimum(busy, enter)
    traced = {rank: marks[:, :, at] for at, rank in enumerate(watched)}
    return PassTimes(total, at_work, total - at_work, enter - at_work, sent, traced)


class _Exchange:
    """The messages of a step, distance by distance: there are too many to keep."""

    def __init__(self, learned: AtOnce, number: int, cluster: Cluster, ranks: int, disturbance: Disturbance) -> None:
        """Adds up what each rank sends and receives. `sums`: (sent or received, inside or between nodes, rank)."""
        self._learned, self._number, self._ranks, self._slow = learned, number, ranks, disturbance.slow_links
        self._kinds = [constants_of(cluster, kind) for kind in (LinkClass.UNKNOWN, LinkClass.NETWORK)]
        self._share = cluster.message_sms / cluster.sms if cluster.message_sms and cluster.sms else 0.0
        self._length = cluster.ranks_per_node or ranks
        self._node = np.arange(ranks) // self._length
        self._nbytes = np.empty(ranks)
        self.sums, self._most = np.zeros((2, 2, 2, ranks))
        for distance in range(1, ranks):
            for kind, nbytes in self._by_kind(distance):
                for direction, there in enumerate((nbytes, np.roll(nbytes, distance))):
                    self.sums[direction, kind] += there
                    np.maximum(self._most[direction, kind], there, out=self._most[direction, kind])

    def _by_kind(self, distance: int) -> list[tuple[int, Times]]:
        """Bytes to the ranks so far behind, inside a node and between nodes."""
        self._learned.sent(self._number, distance, self._ranks, self._nbytes)
        if not self._nbytes.any():
            return []
        if self._length <= distance <= self._ranks - self._length:
            return [(1, self._nbytes)]
        far = self._node != np.roll(self._node, -distance)
        return [(0, np.where(far, 0.0, self._nbytes)), (1, np.where(far, self._nbytes, 0.0))]

    def held(self) -> Times:
        """Seconds of work that messages take from each rank's multiprocessors."""
        held = np.zeros(self._ranks)
        for direction in (0, 1):
            for kind, (start_s, among_s, to_one_s) in enumerate(self._kinds):
                loads = self.sums[direction, kind]
                travel = start_s + np.maximum(loads * among_s, self._most[direction, kind] * to_one_s)
                np.maximum(held, np.where(loads > 0, travel, 0.0), out=held)
        return held * self._share

    def landed(self, go: Times) -> Times:
        """When the last message of each rank has landed; 0 for ranks without."""
        last = np.zeros(self._ranks)
        slow: dict[int, list[tuple[int, float]]] = {}
        for rank, peer, factor in self._slow:
            for src, dst in ((rank, peer), (peer, rank)):
                slow.setdefault((dst - src) % self._ranks, []).append((src, factor))
        for distance in range(1, self._ranks):
            for kind, nbytes in self._by_kind(distance):
                start_s, among_s, to_one_s = self._kinds[kind]
                seconds = np.maximum(self.sums[0, kind], np.roll(self.sums[1, kind], -distance))
                seconds *= among_s
                np.maximum(seconds, nbytes * to_one_s, out=seconds)
                seconds += start_s
                for src, factor in slow.get(distance, ()):
                    seconds[src] *= factor
                seconds += np.maximum(go, np.roll(go, -distance))
                if not nbytes.all():
                    seconds *= nbytes > 0
                np.maximum(last, seconds, out=last)
                np.maximum(last, np.roll(seconds, distance), out=last)
        return last

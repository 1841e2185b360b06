"""Schedules that exchange everything in one step, on any number of ranks: learned from three small ones.

What a rank does in a step grows with the number of ranks, so its seconds and buffers lie on a plane over (rank, ranks);
what it sends to one other rank does not. Both are told apart by where ranks lie to the ends, and to each other:
       sender                           f, l: first and last `near` ranks, each a class of its own
        |  f f f f f f l                =: sender and receiver less than `near` apart, by distance
        |  f = . . . . l                .: all others, before and behind the sender
        |  f . = . . . l
        |  l l l l l l l
        +---------------- receiver
Guarantees: plans of three numbers of ranks, made as those that run, agree with what is learned, or it is refused.
Not covered: that plans of more ranks agree too. It is assumed; the tests compare numbers that were not learned from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ringattn.core.problem import Problem
from ringattn.planner.choose import plan_of
from ringattn.planner.classes import CLOSE, NEAR, check_reach, routes_on, spread, unlike
from ringattn.planner.cluster import Cluster
from ringattn.planner.disturbance import Disturbance
from ringattn.planner.links import LinkClass
from ringattn.planner.plan import Plan
from ringattn.planner.recurrence import PassTimes, Times, check_served, constants_of
from ringattn.planner.turns import steps_of
from ringattn.planner.work import packing_s, step_s
from ringattn.schedule.opening import Opening

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

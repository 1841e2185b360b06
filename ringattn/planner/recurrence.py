"""How long a pass takes on thousands of ranks: the rules of `simulate`, step by step, for all ranks at once.

A rank enters a step, packs, lets its messages go and works. A message begins when both its ends have let it go, and
takes latency and the bytes of its link's busier end. A rank's step ends with the last of its work and messages:
       go[r]      =  enter[r] + packing[r]
       landed[m]  =  max(go[src], go[dst]) + latency + max(sent by src, received by dst) / bandwidth
       enter'[r]  =  max(go[r] + work[r], landed of all messages of r)
Guarantees: the times of `simulate` but for rounding, where every rank has a processor for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringattn.errors import UnsupportedError
from ringattn.planner.classes import Classes, Stretch
from ringattn.planner.cluster import Cluster
from ringattn.planner.disturbance import Disturbance
from ringattn.planner.links import LinkClass

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
    *,
    overlap: bool = True,
    disturbance: Disturbance | None = None,
    trace: Sequence[int] = (),
) -> PassTimes:
    """A pass on so many ranks; arguments as of `simulate`, `trace`: ranks whose steps are told too.

    Raises `UnsupportedError` for a cluster whose ranks share processors, and for one that is joined rank by rank.
    """
    if cluster.cores is not None or cluster.links is not None:
        why = "ranks share processors" if cluster.cores is not None else "links are told rank by rank"
        raise UnsupportedError(f"{cluster.name}: its {why}, which classes of ranks do not describe; name another "
                               "cluster, or as many ranks as can be planned one by one")  # fmt: skip
    disturbed = disturbance or Disturbance()
    disturbed.check_ranks(ranks)
    steps, wires = classes.steps_of(ranks), _Wires(cluster, ranks, disturbed)
    is_even = not (disturbed.jitter or disturbed.slow_ranks)
    enter, go, worked, last = (np.full(ranks, cluster.pass_s) for _ in range(4))
    work = np.empty(ranks)
    busy, sent = _Sum(ranks), _Sum(ranks)
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
            values = [getattr(one.cell, name) for one in stretches]
            more = held if name == "work_s" else None
            if factors is None:
                busy.add(stretches, values)
            if any(values) or more is not None:
                _spread(values, stretches, work)
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
        sent.add(stretches, [sum(nbytes for _, nbytes in one.cell.sends) for one in stretches])
        last.fill(0.0)
        wires.land(ways, go if overlap else worked, last)
        np.maximum(worked, last, out=enter)
        marks[number, 3] = last[watched]
    total = float(enter.max(initial=0.0))
    at_work = np.minimum(busy.total, enter)
    traced = {rank: marks[:, :, at] for at, rank in enumerate(watched)}
    return PassTimes(total, at_work, total - at_work, enter - at_work, sent.total, traced)


def _spread(values: Sequence[float], stretches: Sequence[Stretch], into: Times) -> None:
    for value, (first, end, _) in zip(values, stretches, strict=True):
        into[first:end] = value


class _Sum:
    """A sum by rank of values that are the same over stretches: kept as the differences between neighbors."""

    def __init__(self, ranks: int) -> None:
        self.whole = np.zeros(ranks)
        self._rises: dict[int, float] = defaultdict(float)

    def add(self, stretches: Sequence[Stretch], values: Sequence[float]) -> None:
        """Add a value to each rank of each stretch."""
        last = 0.0
        for value, (first, _, _) in zip(values, stretches, strict=True):
            if value != last:
                self._rises[first] += value - last
            last = value

    @property
    def total(self) -> Times:
        """The sum."""
        rises = np.zeros(len(self.whole))
        rises[list(self._rises)] = list(self._rises.values())
        return self.whole + np.cumsum(rises)


class _Way(NamedTuple):
    """What goes in a step from each rank to the one `distance` behind it, if anything: bytes, and seconds under way."""

    distance: int
    nbytes: Times
    seconds: Times


class _Wires:
    """The links between all ranks and those so many ranks farther."""

    def __init__(self, cluster: Cluster, ranks: int, disturbance: Disturbance) -> None:
        self._ranks = ranks
        self._share = cluster.message_sms / cluster.sms if cluster.message_sms and cluster.sms else 0.0
        # Inside a node and between nodes: latency, and seconds of a byte among all and to one rank.
        self._kinds = [_constants(cluster, kind) for kind in (LinkClass.UNKNOWN, LinkClass.NETWORK)]
        self._node = np.arange(ranks) // (cluster.ranks_per_node or ranks)
        self._slow = disturbance.slow_links
        self._kept: dict[int, tuple[np.ndarray, Times, Times, Times]] = {}
        self._landed, self._there = np.empty(ranks), np.empty(ranks)

    def ways(self, stretches: list[Stretch], turn: int) -> tuple[list[_Way], Times | None]:
        """Where messages of a step go, how long they are under way, and what they take from the work meanwhile."""
        found: dict[int, Times] = {}
        for target in sorted({target for _, _, cell in stretches for target, _ in cell.sends}):
            nbytes = np.empty(self._ranks)
            _spread([dict(one.cell.sends).get(target, 0) for one in stretches], stretches, nbytes)
            distance = target.distance(turn, self._ranks)
            found[distance] = found[distance] + nbytes if distance in found else nbytes
        held: Times | None = None
        if len(found) == 1:
            # The busier end is either: each sends to one rank and receives from one.
            ((distance, nbytes),) = found.items()
            _, latency_s, among, to_one = self._of(distance)
            seconds = np.maximum(among, to_one)
            seconds *= nbytes
            seconds += latency_s
            if self._share:
                sending = seconds if nbytes.all() else np.where(nbytes > 0, seconds, 0.0)
                held = np.empty(self._ranks)
                _shift(sending, distance, held)
                np.maximum(held, sending, out=held)
                held *= self._share
            return [_Way(distance, nbytes, seconds)], held
        return self._several(found) if found else ([], held)

    def _several(self, found: dict[int, Times]) -> tuple[list[_Way], Times | None]:
        """Messages to several ranks share the links of their class."""
        sums, most = np.zeros((2, 2, 2, self._ranks))  # by direction, and inside a node or between nodes
        for distance, nbytes in found.items():
            far = self._of(distance)[0]
            for kind, part in enumerate((np.where(far, 0.0, nbytes), np.where(far, nbytes, 0.0))):
                for way, there in enumerate((part, np.roll(part, distance))):
                    sums[way, kind] += there
                    np.maximum(most[way, kind], there, out=most[way, kind])
        held = np.zeros(self._ranks)
        if self._share:
            for way in (0, 1):
                for kind, (start_s, among_s, to_one_s) in enumerate(self._kinds):
                    travel = start_s + np.maximum(sums[way, kind] * among_s, most[way, kind] * to_one_s)
                    np.maximum(held, np.where(sums[way, kind] > 0, travel, 0.0), out=held)
        ways = []
        for distance, nbytes in found.items():
            far, latency_s, among, to_one = self._of(distance)
            inside, outside = (np.maximum(sums[0, kind], np.roll(sums[1, kind], -distance)) for kind in (0, 1))
            seconds = latency_s + np.maximum(np.where(far, outside, inside) * among, nbytes * to_one)
            ways.append(_Way(distance, nbytes, seconds))
        return ways, held * self._share if self._share else None

    def land(self, ways: list[_Way], go: Times, last: Times) -> None:
        """Raise `last` to when all messages of each rank have landed, which it lets go at `go`."""
        landed, there = self._landed, self._there
        for distance, nbytes, seconds in ways:
            _shift(go, -distance, there)
            np.maximum(there, go, out=landed)
            landed += seconds * self._slower(distance) if self._slow else seconds
            if not nbytes.all():
                landed *= nbytes > 0
            np.maximum(last, landed, out=last)
            _shift(landed, distance, there)
            np.maximum(last, there, out=last)

    def _of(self, distance: int) -> tuple[np.ndarray, Times, Times, Times]:
        """Whether the rank so far behind each is on another node; the constants of the link between the two."""
        if distance not in self._kept:
            far = self._node != np.roll(self._node, -distance)
            latency_s, among, to_one = (np.where(far, b, a) for a, b in zip(*self._kinds, strict=True))
            if len(self._kept) > 8:  # of those that go as far as the turn, none comes twice
                return far, latency_s, among, to_one
            self._kept[distance] = far, latency_s, among, to_one
        return self._kept[distance]

    def _slower(self, distance: int) -> Times:
        """The factor on the messages to the rank so far behind each."""
        factors = np.ones(self._ranks)
        for rank, peer, factor in self._slow:
            for src, dst in ((rank, peer), (peer, rank)):
                if (dst - src) % self._ranks == distance:
                    factors[src] = factor
        return factors


def _constants(cluster: Cluster, kind: LinkClass) -> tuple[float, float, float]:
    """Of `Cluster.travel_s`: latency, and seconds of a byte of all that an end sends, and of what goes to one rank."""
    many, latency_s = 1e18, cluster.travel_s(kind, 0.0, 0.0)
    among, to_one = cluster.travel_s(kind, many, 0.0) - latency_s, cluster.travel_s(kind, 0.0, many) - latency_s
    return latency_s, among / many, to_one / many


def _shift(values: Times, by: int, into: Times) -> None:
    """As `np.roll`, without making an array."""
    by %= len(values)
    into[by:] = values[: len(values) - by]
    into[:by] = values[len(values) - by :]

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

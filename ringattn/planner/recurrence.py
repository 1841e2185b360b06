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
from ringattn.planner.classes import Classes, Stretch, Target
from ringattn.planner.cluster import Cluster
from ringattn.planner.disturbance import Disturbance
from ringattn.planner.links import LinkClass

Times = np.ndarray
"""Seconds, or bytes, by rank."""


class PassTimes(NamedTuple):
    """One pass, in seconds by rank; as `simulate.Timeline`. `sent_bytes`: by rank.

    `traced`: for some ranks an array (steps, 4): when each step was entered, its messages let go, its work done, all of
    it done.
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
    enter, go, worked = (np.full(ranks, cluster.pass_s) for _ in range(3))
    work = np.empty(ranks)
    busy, sent = _Sum(ranks), _Sum(ranks)
    busy.whole += cluster.pass_s
    watched = list(trace)
    marks = np.zeros((steps.count, 4, len(watched)))
    for number in range(steps.count):
        stretches = classes.stretches(number, ranks)
        factors = None if is_even else disturbed.of_work(ranks, number)
        marks[number, 0] = enter[watched]
        before = enter
        for name, after in (("packing_s", go), ("work_s", worked)):
            values = [getattr(one.cell, name) for one in stretches]
            if factors is None:
                busy.add(stretches, values)
            if any(values):
                _spread(values, stretches, work)
                if factors is not None:
                    work *= factors
                    busy.whole += work
                np.add(before, work, out=after)
            else:
                after[:] = before
            before = after
        marks[number, 1], marks[number, 2] = go[watched], worked[watched]
        sent.add(stretches, [sum(nbytes for _, nbytes in one.cell.sends) for one in stretches])
        wires.land(stretches, steps.place(number)[1], go if overlap else worked.copy(), worked)
        enter, worked = worked, enter
        marks[number, 3] = enter[watched]
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


class _Wires:
    """The links between all ranks and those so many ranks farther."""

    def __init__(self, cluster: Cluster, ranks: int, disturbance: Disturbance) -> None:
        self._ranks = ranks
        self._inside, self._outside = cluster.link(LinkClass.UNKNOWN), cluster.link(LinkClass.NETWORK)
        self._node = np.arange(ranks) // (cluster.ranks_per_node or ranks)
        self._slow = disturbance.slow_links
        self._kept: dict[int, tuple[np.ndarray, Times, Times]] = {}
        self._landed, self._there = np.empty(ranks), np.empty(ranks)

    def land(self, stretches: list[Stretch], turn: int, go: Times, ended: Times) -> None:
        """Raise `ended` to when all messages of each rank have landed, which it lets go at `go`."""
        targets = {target for _, _, cell in stretches for target, _ in cell.sends}
        ways = [(target.distance(turn, self._ranks), self._bytes(target, stretches)) for target in sorted(targets)]
        loads = [nbytes for _, nbytes in ways] if len(ways) == 1 else self._busier(ways)
        landed, there = self._landed, self._there
        for (distance, nbytes), load in zip(ways, loads, strict=True):
            _, latency_s, seconds_per_byte = self._of(distance)
            np.multiply(load, seconds_per_byte, out=landed)
            landed += latency_s
            if self._slow:
                landed *= self._slower(distance)
            _shift(go, -distance, there)
            np.maximum(there, go, out=there)
            landed += there
            if not nbytes.all():
                landed *= nbytes > 0
            np.maximum(ended, landed, out=ended)
            _shift(landed, distance, there)
            np.maximum(ended, there, out=ended)

    def _bytes(self, target: Target, stretches: list[Stretch]) -> Times:
        nbytes = np.empty(self._ranks)
        _spread([dict(one.cell.sends).get(target, 0) for one in stretches], stretches, nbytes)
        return nbytes

    def _busier(self, ways: list[tuple[int, Times]]) -> list[Times]:
        """By way: the bytes that its sender sends or its receiver receives over links of its class."""
        leaving, arriving = np.zeros((2, 2, self._ranks))  # inside a node, and between nodes
        for distance, nbytes in ways:
            far = self._of(distance)[0]
            for kind, part in enumerate((np.where(far, 0.0, nbytes), np.where(far, nbytes, 0.0))):
                leaving[kind] += part
                arriving[kind] += np.roll(part, distance)
        found = []
        for distance, _ in ways:
            inside, outside = (np.maximum(leaving[kind], np.roll(arriving[kind], -distance)) for kind in (0, 1))
            found.append(np.where(self._of(distance)[0], outside, inside))
        return found

    def _of(self, distance: int) -> tuple[np.ndarray, Times, Times]:
        """Whether the rank so far behind each is on another node; latency and s/byte of the link between the two."""
        if distance not in self._kept:
            far = self._node != np.roll(self._node, -distance)
            latency_s, rate = (np.where(far, b, a) for a, b in zip(self._inside, self._outside, strict=True))
            if len(self._kept) > 8:  # of those that go as far as the turn, none comes twice
                return far, latency_s, 1 / rate
            self._kept[distance] = far, latency_s, 1 / rate
        return self._kept[distance]

    def _slower(self, distance: int) -> Times:
        """The factor on the messages to the rank so far behind each."""
        factors = np.ones(self._ranks)
        for rank, peer, factor in self._slow:
            for src, dst in ((rank, peer), (peer, rank)):
                if (dst - src) % self._ranks == distance:
                    factors[src] = factor
        return factors


def _shift(values: Times, by: int, into: Times) -> None:
    """As `np.roll`, without making an array."""
    by %= len(values)
    into[by:] = values[: len(values) - by]
    into[:by] = values[len(values) - by :]

"""Predict how long a pass takes on thousands of ranks: the rules of `simulate`, step by step, for all ranks at once.

A rank enters a step, packs, releases its messages and works. A message starts when both ends have released it, and
takes the latency and the bytes of the busier end of its link. A rank's step ends with its last work or
message:
       go[r]      =  enter[r] + packing[r]
       landed[m]  =  max(go[src], go[dst]) + latency + max(sent by src, received by dst) / bandwidth
       enter'[r]  =  max(go[r] + work[r], landed of all messages of r)
What ranks do comes from `classes`. The times equal those of `simulate` except for rounding, if every rank has a
processor of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ringattn.errors import UnsupportedError
from ringattn.planner.classes import AtOnce, Classes, Messages, Times, Way
from ringattn.planner.cluster import Cluster, LinkClass
from ringattn.planner.simulate import Disturbance

SENT, RECEIVED = False, True


class PassTimes(NamedTuple):
    """One pass, in seconds by rank; as `simulate.Timeline`. `sent_bytes`: by rank.

    `traced`: for some ranks an array (steps, 4): when each step was entered, its messages released, its work done, and
    its last message landed (0 without messages).
    """

    total_s: float
    busy_s: Times
    waiting_s: Times
    exposed_s: Times
    sent_bytes: Times
    traced: dict[int, np.ndarray]


def play(
    learned: Classes | AtOnce,
    cluster: Cluster,
    ranks: int,
    overlap: bool = True,
    disturbance: Disturbance | None = None,
    trace: Sequence[int] = (),
) -> PassTimes:
    """Return the times of a pass on so many ranks. Arguments are as of `simulate`; `trace` lists the ranks to trace.

    Raises `UnsupportedError` for a cluster whose ranks share processors, and for one with links listed rank by rank.
    """
    _check_served(cluster)
    disturbed = disturbance or Disturbance()
    disturbed.check_ranks(ranks)
    steps, wires = learned.steps_of(ranks).in_all, _Wires(cluster, ranks, learned.group, disturbed)
    is_even = not (disturbed.jitter or disturbed.slow_ranks)
    enter = np.full(ranks, cluster.pass_s)
    busy, sent, last, watched = enter.copy(), np.zeros(ranks), np.zeros(ranks), list(trace)
    marks = np.zeros((steps, 4, len(watched)))
    for number in range(steps):
        packing, work, messages = learned.step(number, ranks)
        exchange = wires.exchange(messages)
        work += exchange.held_s
        if not is_even:
            factors = disturbed.of_work(ranks, number)
            packing *= factors
            work *= factors
        go = enter + packing
        worked = go + work
        busy += packing
        busy += work
        sent += exchange.sent_bytes
        exchange.land(go if overlap else worked, last)
        marks[number] = [moments[watched] for moments in (enter, go, worked, last)]
        enter = np.maximum(worked, last)
    total = float(enter.max(initial=0.0))
    at_work = np.minimum(busy, enter)
    traced = {rank: marks[:, :, at] for at, rank in enumerate(watched)}
    return PassTimes(total, at_work, total - at_work, enter - at_work, sent, traced)


def _check_served(cluster: Cluster) -> None:
    if cluster.cores is not None or cluster.links is not None:
        why = "ranks share processors" if cluster.cores is not None else "links are told rank by rank"
        raise UnsupportedError(f"{cluster.name}: its {why}, which classes of ranks do not describe; name another "
                               "cluster, or as many ranks as can be planned one by one")  # fmt: skip


class _Link(NamedTuple):
    """From each rank to the one a certain way behind it: whether they are on two nodes, latency, and seconds of a byte
    among all that an end sends and of what goes to one rank. One number if all ranks are alike."""

    far: np.ndarray | bool
    latency_s: Times | float
    among_s: Times | float
    to_one_s: Times | float


class _Wires:
    """The links between all ranks and those so many groups and places behind them."""

    def __init__(self, cluster: Cluster, ranks: int, group: int, disturbance: Disturbance) -> None:
        self.ranks, self._shape = ranks, (ranks // group, group)
        self.share = cluster.message_sms / cluster.sms if cluster.message_sms and cluster.sms else 0.0
        self.kinds = [_constants_of(cluster, kind) for kind in (LinkClass.UNKNOWN, LinkClass.NETWORK)]
        self._node_ranks = cluster.ranks_per_node or ranks
        self._node = np.arange(ranks) // self._node_ranks
        self._slow = disturbance.slow_links
        self._links: dict[Way, _Link] = {}
        self._exchanges: dict[Messages, _Exchange] = {}
        self.landed, self.there = np.empty((2, ranks))

    def exchange(self, messages: Messages) -> _Exchange:
        """Return the exchange of a step. In most steps of a ring the ranks send what they sent in the step before."""
        if not isinstance(messages, tuple) or any(isinstance(nbytes, np.ndarray) for _, nbytes in messages):
            return _Exchange(self, messages)
        if messages not in self._exchanges:
            if len(self._exchanges) > 8:
                self._exchanges.clear()
            self._exchanges[messages] = _Exchange(self, messages)
        return self._exchanges[messages]

    def link(self, way: Way) -> _Link:
        """Return the link between each rank and the one that lies `way` behind it."""
        if way not in self._links:
            groups, places = way
            if not places and self._node_ranks <= groups * self._shape[1] <= self.ranks - self._node_ranks:
                far: np.ndarray | bool = True
            else:
                apart = self._node != self.shift(self._node, way, back=True)
                far = bool(apart[0]) if apart.all() or not apart.any() else apart
            near, other = self.kinds
            constants = (near, other)[far] if isinstance(far, bool) else [
                np.where(far, b, a) for a, b in zip(near, other, strict=True)
            ]  # fmt: skip
            if len(self._links) > 8:  # a way to the group of a turn is in no later step
                return _Link(far, *constants)
            self._links[way] = _Link(far, *constants)
        return self._links[way]

    def slower(self, way: Way) -> Times:
        """Return the factor on the message from each rank to the one `way` behind it."""
        factors = np.ones(self.ranks)
        there = np.asarray(self.shift(np.arange(self.ranks), way, back=True))
        for rank, peer, factor in self._slow:
            for src, dst in ((rank, peer), (peer, rank)):
                if there[src] == dst:
                    factors[src] = factor
        return factors

    @property
    def slow(self) -> bool:
        """Whether any link is disturbed."""
        return bool(self._slow)

    def shift(self, values: Times | float, way: Way, into: Times | None = None, back: bool = False) -> Times | float:
        """Return the values of the rank that lies `way` before each rank (`back`: behind it), in `into`.

        A number is the value of all ranks.
        """
        if not np.ndim(values):
            return values
        assert isinstance(values, np.ndarray)
        into = np.empty_like(values) if into is None else into
        groups, group = self._shape
        by, places = (-way[0] % groups * group, -way[1] % group) if back else (way[0] * group, way[1])
        if not places:
            return _rolled(values, by, into)
        if by:
            values = _rolled(values, by, np.empty_like(values))
        # To the next place in the same group; the last is followed by the first.
        old, new = values.reshape(groups, group), into.reshape(groups, group)
        new[:, places:] = old[:, : group - places]
        new[:, :places] = old[:, group - places :]
        return into


class _Exchange:
    """The messages of a step: what they take from the work beside them, and when they have landed.

    All that a rank sends in a step over links of one kind shares them, and so does all that it receives.
    """

    def __init__(self, wires: _Wires, messages: Messages) -> None:
        self._wires, self._messages = wires, messages
        # By direction, and whether between nodes: all bytes of a rank, and the most to or from one other.
        self._sums: dict[tuple[bool, bool], Times | float] = {}
        most: dict[tuple[bool, bool], Times | float] = {}
        self.held_s: Times | float = 0.0
        """Seconds of work that messages take from each rank's multiprocessors."""
        self._times: list[tuple[Way, Times | float, Times | float]] | None = None
        if isinstance(messages, tuple) and len(messages) == 1:
            # Most steps of rings: each rank sends to one and receives from one, so no message shares a link.
            ((way, self.sent_bytes),) = messages
            link = wires.link(way)
            seconds = link.latency_s + self.sent_bytes * np.maximum(link.among_s, link.to_one_s)
            self._times = [(way, self.sent_bytes, seconds)]
            if wires.share:
                sending = np.where(np.greater(self.sent_bytes, 0), seconds, 0.0)
                self.held_s = np.maximum(sending, wires.shift(sending, way)) * wires.share
            return
        for way, nbytes in messages:
            for far, part in _by_kind(wires.link(way).far, nbytes):
                for key, there in (((SENT, far), part), ((RECEIVED, far), wires.shift(part, way))):
                    self._sums[key] = self._sums.get(key, 0.0) + there
                    most[key] = np.maximum(most.get(key, 0.0), there)
        self.sent_bytes = sum(loads for (direction, _), loads in self._sums.items() if direction is SENT)
        for key, loads in self._sums.items() if wires.share else ():
            latency_s, among_s, to_one_s = wires.kinds[key[1]]
            travel = latency_s + np.maximum(loads * among_s, most[key] * to_one_s)
            self.held_s = np.maximum(self.held_s, np.where(np.greater(loads, 0), travel, 0.0) * wires.share)
        if isinstance(messages, tuple):
            self._times = list(self._travel())

    def _travel(self) -> Iterator[tuple[Way, Times | float, Times | float]]:
        """Yield way, bytes and seconds of the messages."""
        for way, nbytes in self._messages:
            link = self._wires.link(way)
            # The busier of the sender and the receiver, which lies so far behind it.
            busier = {
                far: np.maximum(self._sums[SENT, far], self._wires.shift(self._sums[RECEIVED, far], way, back=True))
                for far, _ in _by_kind(link.far, nbytes)
            }
            both = busier[link.far] if isinstance(link.far, bool) else np.where(link.far, busier[True], busier[False])
            yield way, nbytes, link.latency_s + np.maximum(both * link.among_s, nbytes * link.to_one_s)

    def land(self, go: Times, last: Times) -> None:
        """Set `last` to when all messages of each rank have landed if it releases them at `go`; 0 without messages."""
        last.fill(0.0)
        wires = self._wires
        landed, there = wires.landed, wires.there
        for way, nbytes, seconds in self._travel() if self._times is None else self._times:
            wires.shift(go, way, there, back=True)
            np.maximum(there, go, out=landed)
            landed += seconds * wires.slower(way) if wires.slow else seconds
            if not np.all(nbytes):
                landed *= np.greater(nbytes, 0)
            np.maximum(last, landed, out=last)
            np.maximum(last, wires.shift(landed, way, there), out=last)


def _by_kind(far: np.ndarray | bool, nbytes: Times | float) -> list[tuple[bool, Times | float]]:
    """Split bytes by whether they go between nodes."""
    if isinstance(far, bool):
        return [(far, nbytes)]
    return [(False, np.where(far, 0.0, nbytes)), (True, np.where(far, nbytes, 0.0))]


def _constants_of(cluster: Cluster, kind: LinkClass) -> tuple[float, float, float]:
    """Return the terms of `Cluster.travel_s`: latency, and seconds of a byte of `rank_bytes` and of `peer_bytes`."""
    many, latency_s = 1e18, cluster.travel_s(kind, 0.0, 0.0)
    among, to_one = cluster.travel_s(kind, many, 0.0) - latency_s, cluster.travel_s(kind, 0.0, many) - latency_s
    return latency_s, among / many, to_one / many


def _rolled(values: np.ndarray, by: int, into: np.ndarray) -> np.ndarray:
    """As `np.roll`, into an array that is there."""
    into[by:] = values[: len(values) - by]
    into[:by] = values[len(values) - by :]
    return into

"""Predict how long a pass takes on thousands of ranks: the rules of `simulate`, step by step, for all ranks at once.

A rank enters a step, packs, releases its messages and works. A message starts when both ends have released it. It takes
the latency plus the time for the bytes of the busier end of its link. A rank's step ends with its last work or message:
       go[r]      =  enter[r] + packing[r]
       landed[m]  =  max(go[src], go[dst]) + latency + max(sent by src, received by dst) / bandwidth
       enter'[r]  =  max(go[r] + work[r], landed of all messages of r)
`classes` provides the activity of the ranks. The times equal those of `simulate` except for rounding, if no ranks share
a processor.
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
    """The times of one pass in seconds by rank, with the meaning of `simulate.Timeline`, and the bytes sent by rank.

    `traced`: for each traced rank an array (steps, 4) of times: step entered, messages released, work done, and last
    message landed (0 without messages).
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
    """Return the times of a pass on `ranks` ranks. Arguments are as for `simulate`; `trace` lists the ranks to trace.

    Raises `UnsupportedError` for a cluster whose ranks share processors, and for one with links listed rank by rank.
    """
    _check_cluster(cluster)
    disturbed = disturbance or Disturbance()
    disturbed.check_ranks(ranks)
    steps, wires = learned.steps_of(ranks).in_all, _Wires(cluster, ranks, learned.group, disturbed)
    is_even = not (disturbed.jitter or disturbed.slow_ranks)
    enter = np.full(ranks, cluster.pass_s)
    busy, sent, last, traced_ranks = enter.copy(), np.zeros(ranks), np.zeros(ranks), list(trace)
    marks = np.zeros((steps, 4, len(traced_ranks)))
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
        marks[number] = [moments[traced_ranks] for moments in (enter, go, worked, last)]
        enter = np.maximum(worked, last)
    total = float(enter.max(initial=0.0))
    at_work = np.minimum(busy, enter)
    traced = {rank: marks[:, :, index] for index, rank in enumerate(traced_ranks)}
    return PassTimes(total, at_work, total - at_work, enter - at_work, sent, traced)


def _check_cluster(cluster: Cluster) -> None:
    """Raise `UnsupportedError` for a cluster that classes of ranks cannot describe."""
    if cluster.cores is not None or cluster.links is not None:
        why = "ranks share processors" if cluster.cores is not None else "links are listed rank by rank"
        raise UnsupportedError(f"{cluster.name}: its {why}, which classes of ranks do not describe; name another "
                               "cluster, or few enough ranks to plan them one by one")  # fmt: skip


class _Link(NamedTuple):
    """The link from each rank to the rank at a given distance; each field is one number if all ranks are alike.

    `far`: whether the two ranks are on different nodes. `among_s`: seconds per byte of all bytes that the sender sends,
    or the receiver receives, over such links. `to_one_s`: seconds per byte from this sender to this receiver.
    """

    far: np.ndarray | bool
    latency_s: Times | float
    among_s: Times | float
    to_one_s: Times | float


class _Wires:
    """The links between all ranks and the ranks at given distances from them."""

    def __init__(self, cluster: Cluster, ranks: int, group: int, disturbance: Disturbance) -> None:
        self.ranks, self._shape = ranks, (ranks // group, group)
        self.share = cluster.message_sms / cluster.sms if cluster.message_sms and cluster.sms else 0.0
        self.kinds = [_constants_of(cluster, kind) for kind in (LinkClass.UNKNOWN, LinkClass.NETWORK)]
        self._node_ranks = cluster.ranks_per_node or ranks
        self._node = np.arange(ranks) // self._node_ranks
        self._slow = disturbance.slow_links
        self._links: dict[Way, _Link] = {}
        self._exchanges: dict[Messages, _Exchange] = {}
        self.landed, self.shifted = np.empty((2, ranks))

    def exchange(self, messages: Messages) -> _Exchange:
        """Return the exchange of a step, cached: most steps of a ring have the same messages as the step before."""
        if not isinstance(messages, tuple) or any(isinstance(nbytes, np.ndarray) for _, nbytes in messages):
            return _Exchange(self, messages)
        if messages not in self._exchanges:
            if len(self._exchanges) > 8:
                self._exchanges.clear()
            self._exchanges[messages] = _Exchange(self, messages)
        return self._exchanges[messages]

    def link(self, way: Way) -> _Link:
        """Return the link from each rank to the rank at distance `way`."""
        if way not in self._links:
            groups, places = way
            if not places and self._node_ranks <= groups * self._shape[1] <= self.ranks - self._node_ranks:
                far: np.ndarray | bool = True
            else:
                apart = self._node != self.shift(self._node, way, back=True)
                far = bool(apart[0]) if apart.all() or not apart.any() else apart
            inside, between = self.kinds
            constants = (inside, between)[far] if isinstance(far, bool) else [
                np.where(far, b, a) for a, b in zip(inside, between, strict=True)
            ]  # fmt: skip
            if len(self._links) > 8:  # a distance that depends on the turn does not occur again
                return _Link(far, *constants)
            self._links[way] = _Link(far, *constants)
        return self._links[way]

    def slower(self, way: Way) -> Times:
        """Return the factor on the message from each rank to the rank at distance `way`."""
        factors = np.ones(self.ranks)
        receivers = np.asarray(self.shift(np.arange(self.ranks), way, back=True))
        for rank, peer, factor in self._slow:
            for src, dst in ((rank, peer), (peer, rank)):
                if receivers[src] == dst:
                    factors[src] = factor
        return factors

    @property
    def slow(self) -> bool:
        """Whether any link is disturbed."""
        return bool(self._slow)

    def shift(self, values: Times | float, way: Way, into: Times | None = None, back: bool = False) -> Times | float:
        """Return for each rank the value of its sender at distance `way` (`back`: of its receiver), in `into`.

        A number stands for the same value on all ranks.
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
        # Move values to the next places in the same group; the first place follows the last.
        old, new = values.reshape(groups, group), into.reshape(groups, group)
        new[:, places:] = old[:, : group - places]
        new[:, :places] = old[:, group - places :]
        return into


class _Exchange:
    """The messages of a step: the time that they take from concurrent work, and the time when they have landed.

    Everything that a rank sends in a step over links of one kind shares their bandwidth, and so does everything that it
    receives.
    """

    def __init__(self, wires: _Wires, messages: Messages) -> None:
        self._wires, self._messages = wires, messages
        # By direction and whether between nodes: all bytes of a rank, and the most bytes to or from a single peer.
        self._sums: dict[tuple[bool, bool], Times | float] = {}
        most: dict[tuple[bool, bool], Times | float] = {}
        self.held_s: Times | float = 0.0
        """Seconds of work that each rank loses because messages occupy SMs."""
        self._times: list[tuple[Way, Times | float, Times | float]] | None = None
        if isinstance(messages, tuple) and len(messages) == 1:
            # Most steps of rings: each rank sends to one rank and receives from one, so no message shares a link.
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
                for key, load in (((SENT, far), part), ((RECEIVED, far), wires.shift(part, way))):
                    self._sums[key] = self._sums.get(key, 0.0) + load
                    most[key] = np.maximum(most.get(key, 0.0), load)
        self.sent_bytes = sum(loads for (direction, _), loads in self._sums.items() if direction is SENT)
        for key, loads in self._sums.items() if wires.share else ():
            latency_s, among_s, to_one_s = wires.kinds[key[1]]
            travel = latency_s + np.maximum(loads * among_s, most[key] * to_one_s)
            self.held_s = np.maximum(self.held_s, np.where(np.greater(loads, 0), travel, 0.0) * wires.share)
        if isinstance(messages, tuple):
            self._times = list(self._travel())

    def _travel(self) -> Iterator[tuple[Way, Times | float, Times | float]]:
        """Yield distance, bytes and seconds of the messages."""
        for way, nbytes in self._messages:
            link = self._wires.link(way)
            # The larger load of the sender and of the receiver at this distance.
            busier = {
                far: np.maximum(self._sums[SENT, far], self._wires.shift(self._sums[RECEIVED, far], way, back=True))
                for far, _ in _by_kind(link.far, nbytes)
            }
            both = busier[link.far] if isinstance(link.far, bool) else np.where(link.far, busier[True], busier[False])
            yield way, nbytes, link.latency_s + np.maximum(both * link.among_s, nbytes * link.to_one_s)

    def land(self, go: Times, last: Times) -> None:
        """Set `last` to the time when all messages of each rank have landed; 0 for a rank without messages.

        `go`: the time when each rank releases its messages.
        """
        last.fill(0.0)
        wires = self._wires
        landed, shifted = wires.landed, wires.shifted
        for way, nbytes, seconds in self._travel() if self._times is None else self._times:
            wires.shift(go, way, shifted, back=True)
            np.maximum(shifted, go, out=landed)
            landed += seconds * wires.slower(way) if wires.slow else seconds
            if not np.all(nbytes):
                landed *= np.greater(nbytes, 0)
            np.maximum(last, landed, out=last)
            np.maximum(last, wires.shift(landed, way, shifted), out=last)


def _by_kind(far: np.ndarray | bool, nbytes: Times | float) -> list[tuple[bool, Times | float]]:
    """Return pairs (between nodes, bytes): which of the bytes are sent inside nodes, and which between them.

    `far`: whether the bytes are sent between nodes; an array has an element for each rank.
    """
    if isinstance(far, bool):
        return [(far, nbytes)]
    return [(False, np.where(far, 0.0, nbytes)), (True, np.where(far, nbytes, 0.0))]


def _constants_of(cluster: Cluster, kind: LinkClass) -> tuple[float, float, float]:
    """Return the terms of `Cluster.travel_s`: latency, and seconds per byte of `rank_bytes` and of `peer_bytes`."""
    many, latency_s = 1e18, cluster.travel_s(kind, 0.0, 0.0)
    among, to_one = cluster.travel_s(kind, many, 0.0) - latency_s, cluster.travel_s(kind, 0.0, many) - latency_s
    return latency_s, among / many, to_one / many


def _rolled(values: np.ndarray, by: int, into: np.ndarray) -> np.ndarray:
    """Roll values by `by` places like `np.roll`, into an existing array."""
    into[by:] = values[: len(values) - by]
    into[:by] = values[len(values) - by :]
    return into

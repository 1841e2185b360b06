"""Predict how long the plans of all ranks take on a cluster, by simulating events; with disturbances.

In each step a rank packs, releases its messages and works. It enters its next step when its work is done and all its
messages have left and arrived. A message starts when both ends have released their messages. All that a rank sends in a
step shares its link, and so does all that it receives.
If a machine has fewer processors than working ranks, all ranks get equal shares of it, and messages that processors
carry take part (egalitarian processor sharing). Over a link slower than those inside a machine, a message takes a share
that is smaller in the same proportion, and keeps the pace of that link.
The same plans and constants always give the same times.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from ringattn.core.span import COMM, COMPUTE, Span
from ringattn.errors import InputError
from ringattn.planner.cluster import Cluster, LinkClass, packing_s, step_s
from ringattn.planner.plan import Plan


class Timeline(NamedTuple):
    """Predicted times in microseconds: of the slowest rank, and by rank.

    `busy_us`: at work, slowed where processors are shared. `waiting_us`: the rest of the whole time. `exposed_us`: of
    it, waiting for messages while its own work was done. `spans`: what a rank did and what its messages did; names are
    as in "step 2 attend", numbers are those of the schedule's steps.
    """

    total_us: float
    busy_us: tuple[float, ...]
    waiting_us: tuple[float, ...]
    exposed_us: tuple[float, ...]
    spans: tuple[tuple[Span, ...], ...]


def simulate(
    plans: tuple[Plan, ...], cluster: Cluster, overlap: bool = True, disturbance: Disturbance | None = None
) -> Timeline:
    """Play the plans of all ranks of one pass against each other. Raises `InputError` for plans that never end.

    `overlap`: False where a step's messages begin only when its work has ended, as exchanges do that find no
    multiprocessor free before. `disturbance`: what slows some ranks and links.
    """
    play = _Play(plans, cluster, overlap, disturbance or Disturbance())
    play.run()
    total = max(play.finished, default=0.0) * 1e6
    spans = tuple(tuple(found) for found in play.spans)
    worked = (sum(s.end_us - s.start_us for s in found if s.lane == COMPUTE) for found in spans)
    # Differences of rounded times may add up to a little more than the whole.
    busy = tuple(min(end * 1e6, work) for end, work in zip(play.finished, worked, strict=True))
    exposed = tuple(end * 1e6 - work for end, work in zip(play.finished, busy, strict=True))
    return Timeline(total, busy, tuple(total - work for work in busy), exposed, spans)


class _Machine:
    """The jobs of one machine on its processors. Work of a job is in seconds at full speed."""

    def __init__(self, cores: int | None) -> None:
        self._cores = cores
        self.demand = 0.0
        """Processors that the jobs would keep busy."""
        self._seen_s = 0.0
        self._done_s = 0.0  # Work that a job which never ended would have got by `_seen_s`.
        self._ends: list[tuple[float, int, Callable[[float], None]]] = []

    def start(self, now_s: float, work_s: float, order: int, done: Callable[[float], None]) -> None:
        """A job of so much work; `done(time)` is called at its end."""
        self.advance(now_s)
        heapq.heappush(self._ends, (self._done_s + work_s, order, done))

    def demand_more(self, now_s: float, by: float) -> None:
        """From now on the jobs want more processors, or less."""
        self.advance(now_s)
        self.demand += by

    def next_s(self) -> float:
        """When the next job ends."""
        if not self._ends:
            return float("inf")
        return self._seen_s + max(0.0, self._ends[0][0] - self._done_s) / self._rate

    def end_one(self, now_s: float) -> None:
        """End the job that ends now."""
        self._seen_s = now_s
        self._done_s, _, done = heapq.heappop(self._ends)
        done(now_s)

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        self._done_s += (now_s - self._seen_s) * self._rate
        self._seen_s = now_s

    @property
    def _rate(self) -> float:
        """Of each job, 1 at full speed."""
        crowded = self._cores is not None and self.demand > self._cores
        return self._cores / self.demand if crowded else 1.0  # type: ignore[operator]  # then cores is a number


class _Message(NamedTuple):
    """One message; steps count from 0 in the plans of its ends."""

    src: int
    src_step: int
    dst: int
    dst_step: int
    nbytes: int


class _Play:
    """The state of all ranks."""

    def __init__(self, plans: tuple[Plan, ...], cluster: Cluster, overlap: bool, disturbance: Disturbance) -> None:
        self._plans, self._cluster, self._overlap, self._disturbance = plans, cluster, overlap, disturbance
        cluster.check_ranks(len(plans))
        disturbance.check_ranks(len(plans))
        numbers = {step.number for plan in plans for step in plan.steps}
        self._factors = {number: disturbance.of_work(len(plans), number).tolist() for number in numbers}
        nodes = 1 + max(map(cluster.node_of, range(len(plans)))) if cluster.cores is not None else 1
        self._machines = [_Machine(cluster.cores) for _ in range(nodes)]
        self._slow_links = _Machine(None)
        self._orders = count()
        self._messages: list[list[list[_Message]]] = [[[] for _ in plan.steps] for plan in plans]  # by rank and step
        # Bytes by rank, step, whether sent, and the class of link, which what is sent in a step shares.
        self._loads: dict[tuple[int, int, bool, LinkClass], int] = {}
        self._between: dict[tuple[int, int, int], int] = {}  # Bytes by sender, its step and receiver.
        for message in _messages(plans):
            pair = message.src, message.src_step, message.dst
            self._between[pair] = self._between.get(pair, 0) + message.nbytes
            kind = cluster.link_class(message.src, message.dst)
            for key in ((message.src, message.src_step, True, kind), (message.dst, message.dst_step, False, kind)):
                self._loads[key] = self._loads.get(key, 0) + message.nbytes
                self._messages[key[0]][key[1]].append(message)
        self._at = [-1] * len(plans)
        self._posted_s: list[list[float | None]] = [[None] * len(plan.steps) for plan in plans]
        self._working = [False] * len(plans)
        self._left = [0] * len(plans)  # messages that the rank's step still waits for
        self._travelling: list[Counter[LinkClass]] = [Counter() for _ in plans]
        self.finished = [0.0] * len(plans)
        self.spans: list[list[Span]] = [[] for _ in plans]

    def run(self) -> None:
        """Until all ranks have ended."""
        for rank in range(len(self._plans)):
            self._work(rank, 0.0, self._cluster.pass_s if self._plans[rank].steps else 0.0, "begin", self._enter)
        machines = [*self._machines, self._slow_links]
        while (machine := min(machines, key=_Machine.next_s)).next_s() < float("inf"):
            machine.end_one(machine.next_s())
        for rank, plan in enumerate(self._plans):
            if self._at[rank] < len(plan.steps):
                number = plan.steps[self._at[rank]].number
                raise InputError(f"rank {rank} never ends step {number}: the plans' messages do not match")

    def _work(self, rank: int, now_s: float, work_s: float, name: str, then: Callable[[int, float], None]) -> None:
        """Keep a rank busy; `then(rank, time)` at the end."""
        machine = self._machine(rank)

        def done(end_s: float) -> None:
            machine.demand_more(end_s, -1)
            if end_s > now_s:
                self.spans[rank].append(Span(name, COMPUTE, now_s * 1e6, end_s * 1e6))
            then(rank, end_s)

        machine.demand_more(now_s, 1)
        machine.start(now_s, work_s, next(self._orders), done)

    def _enter(self, rank: int, now_s: float) -> None:
        """A rank's next step begins, if there is one."""
        self._at[rank] += 1
        steps = self._plans[rank].steps
        if self._at[rank] == len(steps):
            self.finished[rank] = now_s
            return
        step = steps[self._at[rank]]
        packing = packing_s(self._plans[rank], step, self._cluster) * self._factors[step.number][rank]
        self._work(rank, now_s, packing, f"step {step.number} pack", self._depart)

    def _depart(self, rank: int, now_s: float) -> None:
        """A rank lets its step's messages go and turns to its work."""
        at = self._at[rank]
        step = self._plans[rank].steps[at]
        self._working[rank], self._left[rank] = True, len(self._messages[rank][at])
        if self._overlap:
            self._post(rank, now_s)
        work = step_s(self._plans[rank], step, self._cluster) * self._factors[step.number][rank]
        self._work(rank, now_s, work, f"step {step.number} attend", self._worked)

    def _post(self, rank: int, now_s: float) -> None:
        """This end of a rank's messages is ready."""
        at = self._at[rank]
        self._posted_s[rank][at] = now_s
        for message in self._messages[rank][at]:
            if self._posted_s[message.src][message.src_step] is not None and (
                self._posted_s[message.dst][message.dst_step] is not None
            ):
                self._travel(message, now_s)

    def _travel(self, message: _Message, now_s: float) -> None:
        """A message of which both ends are ready."""
        src, src_step, dst, dst_step, _ = message
        kind = self._cluster.link_class(src, dst)
        load = max(self._loads[src, src_step, True, kind], self._loads[dst, dst_step, False, kind])
        travel_s = self._cluster.travel_s(kind, load, self._between[src, src_step, dst])

        def done(end_s: float) -> None:
            for rank in (src, dst):
                self._carry(rank, end_s, kind, -1)
            for rank in (src, dst):
                self._arrived(rank, end_s)

        for rank in (src, dst):
            self._carry(rank, now_s, kind, 1)
        # A link that wants a part of a processor gets it; one that could take more waits for its share.
        carrier = self._slow_links if self._share(kind) < 1 else self._machine(src)
        carrier.start(now_s, travel_s * self._disturbance.of_link(src, dst), next(self._orders), done)

    def _share(self, kind: LinkClass) -> float:
        """Of what a rank's messages inside a node take of processors: in proportion to bytes/s, and no more."""
        return min(1.0, self._cluster.link(kind)[1] / self._cluster.bandwidth)

    def _carry(self, rank: int, now_s: float, kind: LinkClass, by: int) -> None:
        """A rank's processors carry one message more or less; one transport carries them all."""
        if not self._cluster.wire_cores:
            return
        travelling = self._travelling[rank]
        before = max(map(self._share, +travelling), default=0.0)
        travelling[kind] += by
        more = max(map(self._share, +travelling), default=0.0) - before
        if more:
            self._machine(rank).demand_more(now_s, more * self._cluster.wire_cores)

    def _worked(self, rank: int, now_s: float) -> None:
        self._working[rank] = False
        if not self._overlap:
            self._post(rank, now_s)
        self._leave(rank, now_s)

    def _arrived(self, rank: int, now_s: float) -> None:
        self._left[rank] -= 1
        if not self._left[rank]:
            at = self._at[rank]
            posted_s, number = self._posted_s[rank][at], self._plans[rank].steps[at].number
            assert posted_s is not None
            nbytes = sum(message.nbytes for message in self._messages[rank][at] if message.src == rank)
            self.spans[rank].append(Span(f"step {number} exchange", COMM, posted_s * 1e6, now_s * 1e6, nbytes))
            self._leave(rank, now_s)

    def _leave(self, rank: int, now_s: float) -> None:
        """A rank's step ends, unless something of it is left."""
        if not self._working[rank] and not self._left[rank]:
            self._enter(rank, now_s)

    def _machine(self, rank: int) -> _Machine:
        return self._machines[self._cluster.node_of(rank) if len(self._machines) > 1 else 0]


def _messages(plans: tuple[Plan, ...]) -> list[_Message]:
    """The k-th message that is sent to a rank meets the k-th that it receives from there."""
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    for rank, plan in enumerate(plans):
        for now, step in enumerate(plan.steps):
            for send in step.sends:
                nbytes = send.elements * plan.element_bytes(send.buffer)
                sent.setdefault((rank, send.peer), []).append((now, nbytes))
            for recv in step.recvs:
                received.setdefault((recv.peer, rank), []).append(now)
    if {pair: len(one) for pair, one in sent.items()} != {pair: len(one) for pair, one in received.items()}:
        raise InputError("the plans send and receive different numbers of messages")
    return [
        _Message(src, src_step, dst, dst_step, nbytes)
        for (src, dst), one in sent.items()
        for (src_step, nbytes), dst_step in zip(one, received[src, dst], strict=True)
    ]


# --- disturbances: stragglers, slow links, jitter --------------------------------------------------------------------
# The same disturbance gives the same factors, in whatever order they are asked for.


@dataclass(frozen=True)
class Disturbance:
    """Factors on the times of a pass. `slow_ranks`: (rank, factor on its work and packing).

    `slow_links`: (rank, peer, factor on the messages between the two, either way). `jitter`: work of a rank in a step
    takes up to this share longer, drawn evenly from `seed`. Raises `InputError` for factors below 1, which would speed
    up, for ranks and links named twice, for a negative share and for a negative seed.
    """

    slow_ranks: tuple[tuple[int, float], ...] = ()
    slow_links: tuple[tuple[int, int, float], ...] = ()
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Nothing is faster than undisturbed."""
        factors = [("slow_rank", factor) for _, factor in self.slow_ranks]
        for name, factor in (*factors, *(("slow_link", factor) for _, _, factor in self.slow_links)):
            if not factor >= 1:
                raise InputError(f"{name}: the factor {factor:g} must be at least 1, for times as long")
        if not self.jitter >= 0 or self.seed < 0:
            raise InputError(f"jitter={self.jitter:g} seed={self.seed}: neither may be negative")
        pairs = [frozenset(one[:2]) for one in self.slow_links]
        if len(set(pairs)) < len(pairs) or any(len(pair) < 2 for pair in pairs):
            raise InputError("slow_link: name each pair of different ranks once")
        ranks = [rank for rank, _ in self.slow_ranks]
        if len(set(ranks)) < len(ranks):
            raise InputError("slow_rank: name each rank once")

    def check_ranks(self, ranks: int) -> None:
        """Raise `InputError` where a rank is named that is not there."""
        named = [rank for rank, _ in self.slow_ranks] + [rank for one in self.slow_links for rank in one[:2]]
        if wrong := [rank for rank in named if not 0 <= rank < ranks]:
            raise InputError(f"slow_rank, slow_link: there is no rank {wrong[0]}, with ranks 0 to {ranks - 1}")

    def of_work(self, ranks: int, step: int) -> np.ndarray:
        """The factor on each rank's work in a step of the schedule, of shape (ranks,)."""
        factors = np.ones(ranks)
        if self.jitter:
            factors += self.jitter * np.random.default_rng((self.seed, step)).random(ranks)
        for rank, factor in self.slow_ranks:
            factors[rank] *= factor
        return factors

    def of_link(self, src: int, dst: int) -> float:
        """The factor on a message."""
        return next((factor for a, b, factor in self.slow_links if {a, b} == {src, dst}), 1.0)


# --- durations as text -----------------------------------------------------------------------------------------------


UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def duration(seconds: float) -> str:
    """Four digits in the unit that suits: `163.2 us`, `15.32 ms`, `3,088 s`; never a power of ten."""
    unit, scale = next(((unit, scale) for unit, scale in UNITS if seconds >= 0.99995 * scale), UNITS[-1])
    number = seconds / scale
    if number >= 999.95:
        return f"{number:,.0f} {unit}"
    return f"{number:.4g} {unit}" if number >= 0.01 or not number else f"<0.01 {unit}"


# --- links that messages cross ---------------------------------------------------------------------------------------


class Crossed(NamedTuple):
    """The messages of all ranks over links of one class.

    `pairs`: (sender, receiver), each once. `slowest`: the pair whose messages of one step take longest alone on their
    link, `slowest_us` microseconds, of which `latency_us` are latency.
    """

    kind: LinkClass
    pairs: tuple[tuple[int, int], ...]
    nbytes: int
    slowest: tuple[int, int]
    slowest_us: float
    latency_us: float


def crossed(plans: tuple[Plan, ...], cluster: Cluster) -> tuple[Crossed, ...]:
    """By class of link, the slowest first."""
    loads: dict[LinkClass, dict[tuple[int, int, int], int]] = {}  # bytes by sender, receiver and step
    for rank, plan in enumerate(plans):
        for step in plan.steps:
            for send in step.sends:
                by_hop = loads.setdefault(cluster.link_class(rank, send.peer), {})
                key = rank, send.peer, step.number
                by_hop[key] = by_hop.get(key, 0) + send.elements * plan.element_bytes(send.buffer)
    found = []
    for kind, by_hop in loads.items():
        latency_s, _ = cluster.link(kind)
        src, dst, step_number = max(by_hop, key=lambda hop: (by_hop[hop], -hop[0]))
        most = by_hop[src, dst, step_number]
        seconds = cluster.travel_s(kind, most, most)
        pairs = tuple(sorted({(src, dst) for src, dst, _ in by_hop}))
        found.append(Crossed(kind, pairs, sum(by_hop.values()), (src, dst), seconds * 1e6, latency_s * 1e6))
    return tuple(sorted(found, key=lambda one: -one.slowest_us))

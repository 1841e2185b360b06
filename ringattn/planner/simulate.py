"""Predict the time of the plans of all ranks on a cluster by simulating events, optionally with disturbances.

In each step a rank packs, releases its messages and works. It enters its next step when its work is done and all its
messages have been sent and received. A message starts when both ends have released their messages. Everything that a
rank sends in a step shares its link, and so does everything that it receives.
If a machine has fewer processors than working ranks, all ranks get equal shares of it. Messages that processors carry
get a share too (egalitarian processor sharing). A message over a link slower than those inside a machine takes a
proportionally smaller share, and runs at the speed of that link.
The same plans and constants always give the same times.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from ringattn.core.span import COMM, COMPUTE, Span
from ringattn.errors import InputError
from ringattn.planner.cluster import Cluster, LinkClass, packing_s, step_s
from ringattn.planner.plan import Plan


class Timeline(NamedTuple):
    """The predicted times of a pass in microseconds: the total, which is that of the slowest rank, and times by rank.

    `busy_us`: time at work, longer if processors are shared. `waiting_us`: the rest of the total time. `exposed_us`:
    the part of the waiting time in which the rank's work was done and it waited for messages. `spans`: the work and the
    messages of each rank. A span is named like "step 2 attend", with the step's number in the schedule.
    """

    total_us: float
    busy_us: tuple[float, ...]
    waiting_us: tuple[float, ...]
    exposed_us: tuple[float, ...]
    spans: tuple[tuple[Span, ...], ...]


class RankStep(NamedTuple):
    """A step of one rank: seconds of packing and of work, and its messages.

    `number`: the step's number for all ranks, with which jitter is drawn. `name`: the first words of its spans.
    `sends`: receiver and bytes of each message. `receives`: the sender of each message. `work`: the name of the work.
    """

    number: int
    name: str
    packing_s: float
    work_s: float
    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[int, ...] = ()
    work: str = "attend"


def simulate(
    plans: tuple[Plan, ...], cluster: Cluster, overlap: bool = True, disturbance: Disturbance | None = None
) -> Timeline:
    """Simulate the plans of all ranks of one pass together. See `simulate_steps`."""
    return simulate_steps([_steps_of(plan, cluster) for plan in plans], cluster, overlap, disturbance)


def _steps_of(plan: Plan, cluster: Cluster) -> list[RankStep]:
    """Return the steps of a plan."""
    return [
        RankStep(
            step.number,
            f"step {step.number}",
            packing_s(plan, step, cluster),
            step_s(plan, step, cluster),
            tuple((send.peer, send.elements * plan.element_bytes(send.buffer)) for send in step.sends),
            tuple(recv.peer for recv in step.recvs),
        )
        for step in plan.steps
    ]


def simulate_steps(
    ranks: Sequence[Sequence[RankStep]],
    cluster: Cluster,
    overlap: bool = True,
    disturbance: Disturbance | None = None,
) -> Timeline:
    """Simulate the steps of all ranks of one pass together. Raises `InputError` if they never end.

    `overlap`: if False, a step's messages begin only when its work has ended, like exchanges for which no SM is free
    earlier. `disturbance`: factors that slow some ranks and links.
    """
    play = _Play(ranks, cluster, overlap, disturbance or Disturbance())
    play.run()
    total = max(play.finished, default=0.0) * 1e6
    spans = tuple(tuple(of_rank) for of_rank in play.spans)
    worked = (sum(s.end_us - s.start_us for s in of_rank if s.lane == COMPUTE) for of_rank in spans)
    # Differences of rounded times may add up to slightly more than the total.
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
        self._done_s = 0.0  # Work that a job running from the beginning would have received by `_seen_s`.
        self._ends: list[tuple[float, int, Callable[[float], None]]] = []

    def start(self, now_s: float, work_s: float, order: int, done: Callable[[float], None]) -> None:
        """Start a job of `work_s` at `now_s`; call `done(time)` at its end.

        `order` is unique: of two jobs that end together, the one with the smaller `order` ends first.
        """
        self.advance(now_s)
        heapq.heappush(self._ends, (self._done_s + work_s, order, done))

    def demand_more(self, now_s: float, by: float) -> None:
        """Change the processors that the jobs demand by `by` from now on."""
        self.advance(now_s)
        self.demand += by

    def next_s(self) -> float:
        """Return the time when the next job ends."""
        if not self._ends:
            return float("inf")
        return self._seen_s + max(0.0, self._ends[0][0] - self._done_s) / self._rate

    def end_job(self, now_s: float) -> None:
        """End the next job. `now_s` is the time of its end."""
        self._seen_s = now_s
        self._done_s, _, done = heapq.heappop(self._ends)
        done(now_s)

    def advance(self, now_s: float) -> None:
        """Advance the machine's time to `now_s`."""
        if now_s == self._seen_s:
            return
        self._done_s += (now_s - self._seen_s) * self._rate
        self._seen_s = now_s

    @property
    def _rate(self) -> float:
        """The speed of each job; 1 is full speed."""
        crowded = self._cores is not None and self.demand > self._cores
        return self._cores / self.demand if crowded else 1.0  # type: ignore[operator]  # if crowded, cores is a number


class _Message(NamedTuple):
    """A message between two ranks. `src_step` and `dst_step` are indices into the steps of the two ranks."""

    src: int
    src_step: int
    dst: int
    dst_step: int
    nbytes: int


class _Play:
    """The simulation: the state of all ranks."""

    def __init__(
        self, ranks: Sequence[Sequence[RankStep]], cluster: Cluster, overlap: bool, disturbance: Disturbance
    ) -> None:
        self._steps, self._cluster, self._overlap, self._disturbance = ranks, cluster, overlap, disturbance
        cluster.check_ranks(len(ranks))
        disturbance.check_ranks(len(ranks))
        numbers = {step.number for steps in ranks for step in steps}
        self._factors = {number: disturbance.of_work(len(ranks), number).tolist() for number in numbers}
        nodes = 1 + max(map(cluster.node_of, range(len(ranks)))) if cluster.cores is not None else 1
        self._machines = [_Machine(cluster.cores) for _ in range(nodes)]
        self._slow_links = _Machine(None)
        self._orders = count()
        self._messages: list[list[list[_Message]]] = [[[] for _ in steps] for steps in ranks]  # by rank and step
        # Bytes by rank, step, whether sent, and the class of link: messages with the same key share a link.
        self._loads: dict[tuple[int, int, bool, LinkClass], int] = {}
        self._between: dict[tuple[int, int, int], int] = {}  # bytes by sender, its step and receiver
        for message in _messages(ranks):
            pair = message.src, message.src_step, message.dst
            self._between[pair] = self._between.get(pair, 0) + message.nbytes
            kind = cluster.link_class(message.src, message.dst)
            for key in ((message.src, message.src_step, True, kind), (message.dst, message.dst_step, False, kind)):
                self._loads[key] = self._loads.get(key, 0) + message.nbytes
                self._messages[key[0]][key[1]].append(message)
        self._current = [-1] * len(ranks)  # index of each rank's step
        self._posted_s: list[list[float | None]] = [[None] * len(steps) for steps in ranks]
        self._working = [False] * len(ranks)
        self._left = [0] * len(ranks)  # messages that the rank's step still waits for
        self._travelling: list[Counter[LinkClass]] = [Counter() for _ in ranks]
        self.finished = [0.0] * len(ranks)
        self.spans: list[list[Span]] = [[] for _ in ranks]

    def run(self) -> None:
        """Simulate until all ranks have ended."""
        for rank, steps in enumerate(self._steps):
            self._work(rank, 0.0, self._cluster.pass_s if steps else 0.0, "begin", self._enter)
        machines = [*self._machines, self._slow_links]
        while True:
            next_s = [machine.next_s() for machine in machines]
            now_s = min(next_s)
            if now_s == float("inf"):
                break
            machines[next_s.index(now_s)].end_job(now_s)
        for rank, steps in enumerate(self._steps):
            if self._current[rank] < len(steps):
                number = steps[self._current[rank]].number
                raise InputError(f"rank {rank} never ends step {number}: the plans' messages do not match")

    def _work(self, rank: int, now_s: float, work_s: float, name: str, then: Callable[[int, float], None]) -> None:
        """Keep a rank busy for `work_s`; call `then(rank, time)` at the end."""
        machine = self._machine(rank)

        def done(end_s: float) -> None:
            machine.demand_more(end_s, -1)
            if end_s > now_s:
                self.spans[rank].append(Span(name, COMPUTE, now_s * 1e6, end_s * 1e6))
            then(rank, end_s)

        machine.demand_more(now_s, 1)
        machine.start(now_s, work_s, next(self._orders), done)

    def _enter(self, rank: int, now_s: float) -> None:
        """Begin a rank's next step, or finish the rank after its last step."""
        self._current[rank] += 1
        steps = self._steps[rank]
        if self._current[rank] == len(steps):
            self.finished[rank] = now_s
            return
        step = steps[self._current[rank]]
        packing = step.packing_s * self._factors[step.number][rank]
        self._work(rank, now_s, packing, f"{step.name} pack", self._depart)

    def _depart(self, rank: int, now_s: float) -> None:
        """Release the messages of a rank's step and start its work."""
        index = self._current[rank]
        step = self._steps[rank][index]
        self._working[rank], self._left[rank] = True, len(self._messages[rank][index])
        if self._overlap:
            self._post(rank, now_s)
        work = step.work_s * self._factors[step.number][rank]
        self._work(rank, now_s, work, f"{step.name} {step.work}", self._worked)

    def _post(self, rank: int, now_s: float) -> None:
        """Release this rank's end of its step's messages, and start those that both ends have released."""
        index = self._current[rank]
        self._posted_s[rank][index] = now_s
        for message in self._messages[rank][index]:
            if self._posted_s[message.src][message.src_step] is not None and (
                self._posted_s[message.dst][message.dst_step] is not None
            ):
                self._travel(message, now_s)

    def _travel(self, message: _Message, now_s: float) -> None:
        """Start a message that both ends have released."""
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
        # A link that needs only part of a processor always gets it; a faster link waits for its share.
        carrier = self._slow_links if self._share(kind) < 1 else self._machine(src)
        carrier.start(now_s, travel_s * self._disturbance.of_link(src, dst), next(self._orders), done)

    def _share(self, kind: LinkClass) -> float:
        """Return the processors that messages over a link take, relative to messages inside a node: at most 1.

        The share is proportional to the bytes/s of the link.
        """
        return min(1.0, self._cluster.link(kind)[1] / self._cluster.bandwidth)

    def _carry(self, rank: int, now_s: float, kind: LinkClass, by: int) -> None:
        """Count `by` more messages over links of `kind` that a rank's processors carry.

        One transport carries all of a rank's messages, so only the largest share of a processor counts.
        """
        if not self._cluster.wire_cores:
            return
        travelling = self._travelling[rank]
        before = max(map(self._share, +travelling), default=0.0)
        travelling[kind] += by
        more = max(map(self._share, +travelling), default=0.0) - before
        if more:
            self._machine(rank).demand_more(now_s, more * self._cluster.wire_cores)

    def _worked(self, rank: int, now_s: float) -> None:
        """End the work of a rank's step."""
        self._working[rank] = False
        if not self._overlap:
            self._post(rank, now_s)
        self._leave(rank, now_s)

    def _arrived(self, rank: int, now_s: float) -> None:
        """End one of the messages of a rank's step."""
        self._left[rank] -= 1
        if not self._left[rank]:
            index = self._current[rank]
            posted_s, name = self._posted_s[rank][index], self._steps[rank][index].name
            assert posted_s is not None
            nbytes = sum(message.nbytes for message in self._messages[rank][index] if message.src == rank)
            self.spans[rank].append(Span(f"{name} exchange", COMM, posted_s * 1e6, now_s * 1e6, nbytes))
            self._leave(rank, now_s)

    def _leave(self, rank: int, now_s: float) -> None:
        """Leave a rank's step if its work and all its messages have ended."""
        if not self._working[rank] and not self._left[rank]:
            self._enter(rank, now_s)

    def _machine(self, rank: int) -> _Machine:
        return self._machines[self._cluster.node_of(rank) if len(self._machines) > 1 else 0]


def _messages(ranks: Sequence[Sequence[RankStep]]) -> list[_Message]:
    """Return all messages. The k-th send from one rank to another matches the k-th receive."""
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    for rank, steps in enumerate(ranks):
        for now, step in enumerate(steps):
            for receiver, nbytes in step.sends:
                sent.setdefault((rank, receiver), []).append((now, nbytes))
            for sender in step.receives:
                received.setdefault((sender, rank), []).append(now)
    if {pair: len(sends) for pair, sends in sent.items()} != {pair: len(recvs) for pair, recvs in received.items()}:
        raise InputError("the plans send and receive different numbers of messages")
    return [
        _Message(src, src_step, dst, dst_step, nbytes)
        for (src, dst), sends in sent.items()
        for (src_step, nbytes), dst_step in zip(sends, received[src, dst], strict=True)
    ]


# --- disturbances: stragglers, slow links, jitter --------------------------------------------------------------------
# The same disturbance always gives the same factors, in whatever order they are read.


@dataclass(frozen=True)
class Disturbance:
    """Factors on the times of a pass. `slow_ranks`: (rank, factor on its work and packing).

    `slow_links`: (rank, peer, factor on the messages between the two in both directions). `jitter`: the work of a rank
    in a step takes longer by up to this share, drawn uniformly with `seed`. Raises `InputError` for a factor below 1,
    for a rank or link named twice, for a negative share and for a negative seed.
    """

    slow_ranks: tuple[tuple[int, float], ...] = ()
    slow_links: tuple[tuple[int, int, float], ...] = ()
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the factors: a disturbance must not make anything faster."""
        factors = [("slow_rank", factor) for _, factor in self.slow_ranks]
        for name, factor in (*factors, *(("slow_link", factor) for _, _, factor in self.slow_links)):
            if not factor >= 1:
                raise InputError(f"{name}: the factor {factor:g} must be at least 1: it multiplies times")
        if not self.jitter >= 0 or self.seed < 0:
            raise InputError(f"jitter={self.jitter:g} seed={self.seed}: neither may be negative")
        pairs = [frozenset((rank, peer)) for rank, peer, _ in self.slow_links]
        if len(set(pairs)) < len(pairs) or any(len(pair) < 2 for pair in pairs):
            raise InputError("slow_link: name each pair of different ranks once")
        ranks = [rank for rank, _ in self.slow_ranks]
        if len(set(ranks)) < len(ranks):
            raise InputError("slow_rank: name each rank once")

    def check_ranks(self, ranks: int) -> None:
        """Raise `InputError` if the disturbance names a rank that does not exist."""
        named = [rank for rank, _ in self.slow_ranks] + [rank for link in self.slow_links for rank in link[:2]]
        if wrong := [rank for rank in named if not 0 <= rank < ranks]:
            raise InputError(f"slow_rank, slow_link: there is no rank {wrong[0]}, with ranks 0 to {ranks - 1}")

    def of_work(self, ranks: int, step: int) -> np.ndarray:
        """Return the factor on each rank's work in a step of the schedule, of shape (ranks,)."""
        factors = np.ones(ranks)
        if self.jitter:
            factors += self.jitter * np.random.default_rng((self.seed, step)).random(ranks)
        for rank, factor in self.slow_ranks:
            factors[rank] *= factor
        return factors

    def of_link(self, src: int, dst: int) -> float:
        """Return the factor on the time of a message between two ranks."""
        return next((factor for a, b, factor in self.slow_links if {a, b} == {src, dst}), 1.0)


# --- durations as text -----------------------------------------------------------------------------------------------


UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def duration(seconds: float) -> str:
    """Format seconds with four digits in a suitable unit: `163.2 us`, `15.32 ms`, `3,088 s`; without powers of ten."""
    unit, scale = next(((unit, scale) for unit, scale in UNITS if seconds >= 0.99995 * scale), UNITS[-1])
    number = seconds / scale
    if number >= 999.95:
        return f"{number:,.0f} {unit}"
    return f"{number:.4g} {unit}" if number >= 0.01 or not number else f"<0.01 {unit}"


# --- links that messages cross ---------------------------------------------------------------------------------------


class Crossed(NamedTuple):
    """The messages of all ranks over links of one class.

    `pairs`: (sender, receiver), each once. `slowest`: the pair whose messages of one step take longest if they have
    their link to themselves: `slowest_us` microseconds, of which `latency_us` are latency.
    """

    kind: LinkClass
    pairs: tuple[tuple[int, int], ...]
    nbytes: int
    slowest: tuple[int, int]
    slowest_us: float
    latency_us: float


def crossed(plans: tuple[Plan, ...], cluster: Cluster) -> tuple[Crossed, ...]:
    """Return the messages by class of link, the slowest class first."""
    loads: dict[LinkClass, dict[tuple[int, int, int], int]] = {}  # bytes by sender, receiver and step
    for rank, plan in enumerate(plans):
        for step in plan.steps:
            for send in step.sends:
                by_hop = loads.setdefault(cluster.link_class(rank, send.peer), {})
                key = rank, send.peer, step.number
                by_hop[key] = by_hop.get(key, 0) + send.elements * plan.element_bytes(send.buffer)
    by_class = []
    for kind, by_hop in loads.items():
        latency_s, _ = cluster.link(kind)
        src, dst, step_number = max(by_hop, key=lambda hop: (by_hop[hop], -hop[0]))
        most = by_hop[src, dst, step_number]
        seconds = cluster.travel_s(kind, most, most)
        pairs = tuple(sorted({(src, dst) for src, dst, _ in by_hop}))
        by_class.append(Crossed(kind, pairs, sum(by_hop.values()), (src, dst), seconds * 1e6, latency_s * 1e6))
    return tuple(sorted(by_class, key=lambda entry: -entry.slowest_us))

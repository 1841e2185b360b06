"""One attention call on so many ranks of a cluster, simulated: every rank's plan where they are few, classes beyond."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ringattn.core.geometry import Band, StridedRange, count_pairs
from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.core.span import COMM, COMPUTE, Span
from ringattn.errors import InputError, UnsupportedError
from ringattn.planner.candidates import check_extent
from ringattn.planner.choose import choose_route, without_collector
from ringattn.planner.classes import (
    MOST_GROUPED,
    SERVED,
    Learned,
    check_reach,
    classes_of,
    group_of,
    learned_from,
    plans_of_group,
    prologue_on,
    routes_on,
)
from ringattn.planner.cluster import Cluster
from ringattn.planner.recurrence import PassTimes, play
from ringattn.planner.simulate import Disturbance, Timeline, simulate
from ringattn.planner.work import attention_s
from ringattn.schedule.prologue import Prologue
from ringattn.schedule.routes import route_named

PLANNED = 16
"""Up to so many ranks, each has its own plan; classes are learned from more."""
MOST_PLANNED = 64
"""As many of a schedule that classes do not serve: plans have an entry for each pair of ranks."""
PASSES = "forward", "backward"


@dataclass(frozen=True)
class Call:
    """What is attended, and how; `left` and `right` bound a window, None for all."""

    schedule: str = "ring"
    layout: str = "auto"
    causal: bool = True
    left: int | None = None
    right: int | None = None
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    def problem(self, tokens: int, ranks: int) -> Problem:
        """The call on so many tokens and ranks. Raises `InputError` for options that contradict each other."""
        layout = make_layout(self.layout, tokens, ranks, purpose=self._purpose)
        window = (self.left, self.right) if self.windowed else None
        mask = Banded(self.causal, window).mask(tokens, tokens, None, None, self.heads, self.kv_heads)
        dims = self.head_dim, self.head_dim
        return Problem(layout, layout, mask, self.batch, self.heads, self.kv_heads, *dims, self.dtype)

    @property
    def windowed(self) -> bool:
        """Whether distances are bounded."""
        return self.left is not None or self.right is not None

    def shard_tokens(self, tokens: int, ranks: int) -> int:
        """Tokens of each of shards of one length, at least as many as there are."""
        chunks = 2 if make_layout(self.layout, tokens, ranks, purpose=self._purpose).name == "zigzag" else 1
        return -(-tokens // (ranks * chunks)) * chunks

    @property
    def _purpose(self) -> str:
        return "window" if self.windowed else "causal" if self.causal else "full"


class Machines(NamedTuple):
    """Where: the cluster, what slows some of its ranks and links, and whether messages travel beside work."""

    cluster: Cluster
    disturbance: Disturbance
    overlap: bool = True


class Simulated(NamedTuple):
    """A call on `ranks` ranks. `tokens`: as many as were simulated, which `asked` rounds up to shards of one length.

    `classes`: whether ranks were simulated by classes, else each by its plan. `held_bytes`: least, median and greatest
    staging buffers of a rank beside its own tensors. `ideal_s`: of the allowed pairs alone, shared evenly by the
    processors, at the kernel's rate; `spans`: by pass what some ranks did. `took_s`: of the simulation itself.
    """

    ranks: int
    tokens: int
    asked: int
    classes: bool
    passes: tuple[PassTimes, ...]
    held_bytes: tuple[int, int, int]
    ideal_s: float
    spans: tuple[dict[int, tuple[Span, ...]], ...]
    took_s: float

    @property
    def total_s(self) -> float:
        """Of all passes, one after another."""
        return sum(one.total_s for one in self.passes)

    @property
    def efficiency(self) -> float:
        """Ideal over simulated time."""
        return self.ideal_s / self.total_s


@without_collector()
def simulate_call(
    call: Call,
    machines: Machines,
    tokens: int,
    ranks: int,
    backward: bool,
    trace: Sequence[int],
    say: Callable[[str], None],
) -> Simulated:
    """The call on so many ranks; `trace`: ranks whose steps are told, `say` is told what takes a while.

    Raises `UnsupportedError` for what can be simulated neither by plans nor by classes.
    """
    began = time.perf_counter()
    machines.disturbance.check_ranks(ranks)
    names = PASSES[: 1 + backward]
    if _each_planned(call, machines.cluster, ranks):
        used, classes = tokens, False
        say(f"{ranks} ranks: planning each of them")
        passes, spans, held = _by_plans(call, machines, tokens, ranks, len(names), trace)
    else:
        shard, classes = call.shard_tokens(tokens, ranks), True
        used = shard * ranks
        say(f"{ranks:,} ranks: learning classes of ranks")
        group = group_of(call.problem(shard * ranks, ranks), call.schedule, machines.cluster)
        learned = _learned(call, machines.cluster, shard, *_begins(call, machines.cluster, shard, ranks, group), group)
        passes = []
        for backwards, name in enumerate(names):
            say(f"{ranks:,} ranks: {name}")
            options = machines.overlap, machines.disturbance, trace
            passes.append(play(learned[bool(backwards)], machines.cluster, ranks, *options))
        spans = [{rank: spans_of(marks) for rank, marks in one.traced.items()} for one in passes]
        held = np.max([learned[bool(n)].held_spread(ranks) for n in range(len(names))], axis=0)
    problem = call.problem(used, ranks)
    pairs = _pairs(problem) * call.heads / _processors(machines.cluster, ranks)
    ideal = sum(attention_s(problem, pairs, machines.cluster, bool(n)) for n in range(len(names)))
    least, middle, most = (int(one) for one in np.percentile(held, (0, 50, 100)))
    took = time.perf_counter() - began
    return Simulated(ranks, used, tokens, classes, tuple(passes), (least, middle, most), ideal, tuple(spans), took)


def _each_planned(call: Call, cluster: Cluster, ranks: int) -> bool:
    """Whether every rank's plan is made: of few ranks, and where classes do not serve."""
    if ranks <= PLANNED or call.schedule.partition(":")[0] not in SERVED or cluster.cores is not None:
        return True
    group = group_of(call.problem(ranks * 2, ranks), call.schedule, cluster)
    return 1 < group <= MOST_GROUPED and ranks <= learned_from(call.schedule, ranks // group, 0, group)[1]


def _by_plans(
    call: Call, machines: Machines, tokens: int, ranks: int, passes: int, trace: Sequence[int]
) -> tuple[list[PassTimes], list[dict[int, tuple[Span, ...]]], np.ndarray]:
    if ranks > MOST_PLANNED and (call.schedule.partition(":")[0] not in SERVED or machines.cluster.cores):
        whose = f"cluster={machines.cluster.name!r}, whose ranks share processors,"
        what = f"schedule={call.schedule!r}" if machines.cluster.cores is None else whose
        why = ""
        if route_named(call.schedule).by_head:
            why = (f" It moves each head to one rank, so of {call.heads} heads no more than {call.heads} ranks have "
                   "work: many ranks take schedule='ulysses_ring'.")  # fmt: skip
        raise UnsupportedError(
            f"ranks={ranks}: {what} is simulated with a plan for each rank, up to {MOST_PLANNED}.{why} Simulate fewer, "
            f"or by classes of ranks: schedules {', '.join(SERVED)} on clusters with a processor for each rank"
        )
    problem = call.problem(tokens, ranks)
    chosen = route_named(call.schedule)
    groups = ranks // group_of(problem, call.schedule, machines.cluster) if chosen.parameter else 1
    check_extent(problem, by_head=chosen.by_head, groups=groups)
    route = choose_route(problem, call.schedule, machines.cluster)
    found, spans, held = [], [], np.zeros(ranks)
    size = ranks // groups
    every = [plan for first in range(0, ranks, size)
             for plan in plans_of_group(problem, route, range(first, first + size), passes)]  # fmt: skip
    for backward in range(passes):
        plans = tuple(plan for plan in every if plan.backward == bool(backward))
        timeline = simulate(plans, machines.cluster, machines.overlap, machines.disturbance)
        found.append(_times(timeline, [plan.bytes_sent for plan in plans]))
        spans.append({rank: timeline.spans[rank] for rank in trace})
        held = np.maximum(held, [plan.arena_bytes + plan.kept_bytes for plan in plans])
    return found, spans, held


def _times(timeline: Timeline, sent: Sequence[int]) -> PassTimes:
    busy, waiting, exposed = (
        np.array(one) / 1e6 for one in (timeline.busy_us, timeline.waiting_us, timeline.exposed_us)
    )
    return PassTimes(timeline.total_us / 1e6, busy, waiting, exposed, np.array(sent, float), {})


@lru_cache(maxsize=4)
def _learned(call: Call, cluster: Cluster, shard: int, quarter: int, prologue: Prologue, group: int) -> Learned:
    """The classes of ranks with shards of so many tokens."""
    reach = _reach(call, shard)

    def problem_of(count: int) -> Problem:
        return call.problem(shard * count, count)

    # A window reaches other ranks from shards of another length.
    alike = [] if call.windowed else _other_lengths(call, cluster, quarter, prologue, group)
    found = classes_of(problem_of, call.schedule, cluster, quarter, reach, group, prologue, alike[0] if alike else None)
    alike[:] = alike or [found]
    return found


@lru_cache(maxsize=16)
def _other_lengths(*_: object) -> list[Learned]:
    """Where the classes of the first length of shards are kept, for calls that differ in the length alone."""
    return []


def _begins(call: Call, cluster: Cluster, shard: int, ranks: int, group: int) -> tuple[int, Prologue]:
    """What numbers of groups are learned from, modulo 4, and how backward passes begin."""

    def problem_of(count: int) -> Problem:
        return call.problem(shard * count, count)

    quarter, reach = ranks // group % 4, _reach(call, shard)
    counts = learned_from(call.schedule, quarter, reach, group)
    routes = routes_on(problem_of, call.schedule, cluster, counts, group, None)
    return quarter, prologue_on(problem_of, routes, cluster, ranks)


def _reach(call: Call, shard: int) -> int:
    """How many shards a window reaches. Raises `UnsupportedError` for those that classes do not describe."""
    if call.windowed:
        layout = call.problem(shard * 4, 4).q_layout
        sides = [0 if call.causal and side is None else side for side in (call.left, call.right)]
        if None in sides or layout.name == "striped":
            raise UnsupportedError(
                f"layout={layout.name!r} with a window of ({call.left}, {call.right}): classes of ranks are told apart "
                "by windows bounded on both sides, over contiguous or zigzag shards"
            )
        run = min(one.count for one in layout.shards[0])
        reach = -(-max(side for side in sides if side is not None) // run)
        check_reach(reach)
        return reach
    return 0


def _processors(cluster: Cluster, ranks: int) -> int:
    """Ranks that work at full speed at once: all, or on each machine as many as it has processors."""
    if cluster.cores is None:
        return ranks
    return sum(min(cluster.cores, sharing) for sharing in Counter(map(cluster.node_of, range(ranks))).values())


def _pairs(problem: Problem) -> int:
    """Pairs that the mask allows."""
    everything = StridedRange(0, problem.q_layout.length)
    return sum(count_pairs(everything, everything, Band(*branch.band)) for branch in problem.mask.branches)


def spans_of(marks: np.ndarray) -> tuple[Span, ...]:
    """What a rank did, from the moments of its steps (see `PassTimes.traced`)."""
    found = []
    for number, (entered, went, worked, landed) in enumerate((marks * 1e6).tolist()):
        if went > entered:
            found.append(Span(f"step {number} pack", COMPUTE, entered, went))
        if worked > went:
            found.append(Span(f"step {number} attend", COMPUTE, went, worked))
        if landed > went:
            found.append(Span(f"step {number} exchange", COMM, went, landed))
    return tuple(found)


def shared_out(tokens: int, ranks: Sequence[int], weak: bool) -> list[int]:
    """Tokens for each number of ranks: all of them, or (weak) as many for each rank as the most ranks have.

    Raises `InputError` where a rank would have none.
    """
    if weak and tokens < max(ranks):
        raise InputError(f"tokens={tokens}: leaves nothing for some of {max(ranks)} ranks")
    return [max(1, tokens * one // max(ranks)) if weak else tokens for one in ranks]

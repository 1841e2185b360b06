"""Simulate one attention call, or one layer with a state, on the ranks of a cluster.

Small numbers of ranks are simulated with the plan of each rank. Attention on larger numbers is simulated by classes of
ranks that behave alike.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ringattn.core.layout import LAYOUTS, Layout, make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.core.span import COMM, COMPUTE, Span
from ringattn.errors import InputError, UnsupportedError
from ringattn.launch.calls import MOST_HEADS, TORCH_DTYPES, CallConfig, schedule_option, tokens_option
from ringattn.launch.options import DTYPES, MOST, json_option, option
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
from ringattn.planner.cluster import CLUSTERS, Cluster, attention_s
from ringattn.planner.recurrence import PassTimes, play
from ringattn.planner.simulate import Disturbance, Timeline, simulate, simulate_steps
from ringattn.planner.states import StateLayer, alone_s, layer_pass
from ringattn.schedule.routes import route_named

SCALINGS = "strong", "weak", "both"
PASSES = "forward", "backward"
PLANNED = 16
"""Up to this number of ranks, each is simulated by its plan; more are simulated by classes."""
MOST_PLANNED = 64
"""The limit for schedules without classes, because plans have an entry for each pair of ranks."""
MOST_RANKS_OF_STATES = 1024
"""The limit for layers with a state, whose plans take 10 ms for each of this number of ranks."""
ATTENTION, DELTA_RULE, KIMI, SELECTIVE = "attention", "gated_delta_rule", "kimi_delta_attention", "selective_state"
LAYERS = ATTENTION, DELTA_RULE, KIMI, SELECTIVE
OF_ATTENTION = "causal", "window", "schedule"
"""Keys that have no effect on a layer with a state."""
TAPS = 4
"""Taps of the convolution if not set, as in Qwen3-Next, Kimi-Linear and Nemotron-H."""


@dataclass
class SimulateConfig(CallConfig):
    """The call or layer to simulate, the cluster, the numbers of ranks, and the disturbances."""

    DEFAULT_TOKENS: ClassVar[int] = 131072

    layer: str = option(ATTENTION, "what to simulate: attention, or a layer with a state", choices=LAYERS)
    tokens: int | None = tokens_option(131072, most=MOST)
    heads: int = option(32, "query heads; of a layer with a state: heads of values", least=1, most=MOST_HEADS)
    kv_heads: int = option(
        8, "key and value heads; of a layer with a state: heads of queries and keys; must divide heads",
        least=1, most=MOST_HEADS,
    )  # fmt: skip
    head_dim: int = option(128, "elements of a head of queries, keys and values", least=1, most=MOST)
    key_dim: int | None = option(
        None, "layer with a state: elements of a head of queries and keys; head_dim if not set", least=1, most=MOST
    )
    kernel_size: int | None = option(
        None, f"layer with a state: taps of its convolution, 1: no convolution; {TAPS} if not set", least=1, most=MOST
    )
    dtype: str = option("bf16", "dtype of queries, keys and values", choices=DTYPES)
    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS[:3]))
    schedule: str = schedule_option("ring")
    ranks: str = option("8", "ranks of the ring; several as 1,8,64")
    scaling: str = option("strong", (
        "strong: all numbers of ranks have the same tokens; weak: the same tokens per rank, and tokens= is for the "
        "largest ring"
    ), choices=SCALINGS)  # fmt: skip
    cluster: str = option("h100", "machines: a file of `ringattn calibrate`, or one of " + ", ".join(CLUSTERS),
                          names=tuple(CLUSTERS))  # fmt: skip
    overlap: bool = option(True, "messages overlap the computation of their step; otherwise they follow it")
    sm_margin: int = option(0, "multiprocessors of a GPU that are reserved for exchanges; NCCL uses 8", least=0)
    slow_rank: str = option("", "ranks that compute longer, as 3:1.5 or 3:1.5,9:2")
    slow_link: str = option("", "pairs of ranks whose messages take longer, in both directions, as 7-8:4")
    jitter: float = option(0.0, "computing takes up to this share longer, drawn for each rank and step", least=0.0)
    seed: int = option(0, "seed of the jitter", least=0, most=2**32 - 1)
    json: str = json_option()
    picture: str = option(
        "", "file for a picture (PNG): curves, or a timeline if there is one number of ranks", writes="picture"
    )

    def check(self) -> None:
        """Raise `InputError`, with the key first, if two options contradict each other."""
        super().check()
        for key in ("key_dim", "kernel_size") if self.layer == ATTENTION else ():
            if (value := getattr(self, key)) is not None:
                raise InputError(f"{key}={value}: has no effect on attention; set layer={DELTA_RULE}, for example")

    def check_words(self, words: Sequence[str]) -> None:
        """Raise `InputError` if a word sets a key of attention, and the layer has a state."""
        for word in words if self.layer != ATTENTION else ():
            if word.partition("=")[0] in OF_ATTENTION:
                raise InputError(f"{word}: has no effect on layer={self.layer}, which is causal; leave it out")

    @property
    def state_layer(self) -> StateLayer:
        """Return the layer with a state."""
        d_k = self.key_dim or self.head_dim
        gates = {DELTA_RULE: 2, KIMI: d_k + 1, SELECTIVE: 1}[self.layer]
        sizes = self.heads, d_k, self.head_dim, self.kv_heads, gates
        taps = TAPS if self.kernel_size is None else self.kernel_size
        return StateLayer(*sizes, self.layer != SELECTIVE, taps, self.batch, TORCH_DTYPES[self.dtype])


class Simulated(NamedTuple):
    """The simulation of a call on `ranks` ranks.

    `tokens` is the simulated number: `requested_tokens`, rounded up to shards of one length. `classes` says whether the
    ranks were simulated by classes; otherwise each was simulated with its plan. `held_bytes` has the smallest, median
    and largest staging buffers of a rank, which it holds in addition to its tensors. `ideal_s` is the time that the
    kernel would take for the allowed pairs alone, shared equally by the processors. `spans` has the actions of the
    traced ranks for each pass. `took_s` is the time that the simulation itself took.
    """

    ranks: int
    tokens: int
    requested_tokens: int
    classes: bool
    passes: Sequence[PassTimes]
    held_bytes: Sequence[int]
    ideal_s: float
    spans: Sequence[Mapping[int, Sequence[Span]]]
    took_s: float

    @property
    def total_s(self) -> float:
        """Return the time of all passes, one after another."""
        return sum(times.total_s for times in self.passes)

    @property
    def efficiency(self) -> float:
        """Return the ratio of ideal and simulated time."""
        return self.ideal_s / self.total_s


@dataclass
class Simulator:
    """A simulator of one call on a cluster, for several numbers of tokens and ranks. It learns classes only once."""

    config: SimulateConfig
    cluster: Cluster
    disturbance: Disturbance = field(default_factory=Disturbance)
    _learned: dict[Any, Learned] = field(default_factory=dict)
    _first: dict[Any, Learned] = field(default_factory=dict)
    """The classes of the first length of shards. Those of other lengths differ from them only in the length."""

    @without_collector()
    def run(self, tokens: int, ranks: int, traced: Sequence[int] = ()) -> Simulated:
        """Simulate the call on `ranks` ranks, and keep the steps of the `traced` ranks.

        Raises `UnsupportedError` if neither plans nor classes can simulate it.
        """
        began = time.perf_counter()
        self.disturbance.check_ranks(ranks)
        has_state = self.config.layer != ATTENTION
        classes = not has_state and not self._each_planned(ranks)
        simulated_tokens = self.shard_tokens(tokens, ranks) * ranks if classes else tokens
        method = self._by_scans if has_state else self._by_classes if classes else self._by_plans
        passes, spans, buffer_bytes = method(simulated_tokens, ranks, traced)
        ideal_s = sum(self._ideal_s(simulated_tokens, ranks, bool(number)) for number in range(len(passes)))
        held_bytes = [int(nbytes) for nbytes in np.percentile(buffer_bytes, (0, 50, 100))]
        took_s = time.perf_counter() - began
        return Simulated(ranks, simulated_tokens, tokens, classes, passes, held_bytes, ideal_s, spans, took_s)

    def _ideal_s(self, tokens: int, ranks: int, backward: bool) -> float:
        """Return the time of the computation of one process, shared equally by the processors."""
        share = 1 / _processors(self.cluster, ranks)
        if self.config.layer != ATTENTION:
            return alone_s(self.config.state_layer, tokens * share, self.cluster, backward)
        problem = self.problem(tokens, ranks)
        return attention_s(problem, _pairs(problem) * self.config.heads * share, self.cluster, backward)

    def problem(self, tokens: int, ranks: int) -> Problem:
        """Return the call with `tokens` on `ranks` ranks. Raises `InputError` if options contradict each other."""
        config, layout = self.config, self.layout(tokens, ranks)
        mask = Banded(config.causal, config.bounds).mask(tokens, tokens, None, None, config.heads, config.kv_heads)
        sizes = config.batch, config.heads, config.kv_heads, config.head_dim, config.head_dim
        return Problem(layout, layout, mask, *sizes, TORCH_DTYPES[config.dtype])

    def layout(self, tokens: int, ranks: int) -> Layout:
        """Return the layout of `tokens` tokens on `ranks` ranks."""
        return make_layout(self.config.layout, tokens, ranks, purpose=self.config.purpose)

    def shard_tokens(self, tokens: int, ranks: int) -> int:
        """Return the tokens of a shard if the sequence is rounded up to shards of the same length."""
        chunks = 2 if self.layout(tokens, ranks).name == "zigzag" else 1
        return -(-tokens // (ranks * chunks)) * chunks

    @property
    def _has_classes(self) -> bool:
        """Return whether classes of ranks describe this schedule on this cluster."""
        return self.config.schedule.partition(":")[0] in SERVED and self.cluster.cores is None

    def _each_planned(self, ranks: int) -> bool:
        """Return whether to simulate each rank by its plan: if ranks are few or there are no classes."""
        if ranks <= PLANNED or not self._has_classes:
            return True
        group = group_of(self.problem(ranks * 2, ranks), self.config.schedule, self.cluster)
        return 1 < group <= MOST_GROUPED and ranks <= learned_from(self.config.schedule, ranks // group, 0, group)[1]

    def _by_plans(self, tokens: int, ranks: int, traced: Sequence[int]) -> tuple[list[PassTimes], list[Any], Any]:
        """Simulate every rank by its plan. Return passes, spans of traced ranks, and buffer bytes of each rank."""
        config, cluster = self.config, self.cluster
        route = route_named(config.schedule)
        if ranks > MOST_PLANNED and not self._has_classes:
            shares = f"cluster={cluster.name!r}, whose ranks share processors,"
            what = f"schedule={config.schedule!r}" if cluster.cores is None else shares
            why = ""
            if route.by_head:
                why = (f" It moves each head to one rank, so of {config.heads} heads at most {config.heads} ranks "
                       "have work; use schedule='ulysses_ring' for more ranks.")  # fmt: skip
            raise UnsupportedError(
                f"ranks={ranks}: {what} is simulated with a plan for each rank, up to {MOST_PLANNED}.{why} Simulate "
                f"fewer ranks, or one of the schedules {', '.join(SERVED)} on a cluster with a processor for each rank"
            )
        _show_progress(f"{ranks} ranks: planning each of them")
        problem = self.problem(tokens, ranks)
        size = group_of(problem, config.schedule, cluster) if route.parameter else ranks
        check_extent(problem, by_head=route.by_head, groups=ranks // size)
        route = choose_route(problem, config.schedule, cluster)
        groups = [range(first, first + size) for first in range(0, ranks, size)]
        every = [plan for group in groups for plan in plans_of_group(problem, route, group, 1 + config.backward)]
        passes, spans, buffer_bytes = [], [], np.zeros(ranks)
        for backward in (False, True)[: 1 + config.backward]:
            plans = tuple(plan for plan in every if plan.backward == backward)
            timeline = simulate(plans, cluster, config.overlap, self.disturbance)
            passes.append(_times(timeline, [plan.bytes_sent for plan in plans]))
            spans.append({rank: timeline.spans[rank] for rank in traced})
            buffer_bytes = np.maximum(buffer_bytes, [plan.arena_bytes + plan.kept_bytes for plan in plans])
        return passes, spans, buffer_bytes

    def _by_scans(self, tokens: int, ranks: int, traced: Sequence[int]) -> tuple[list[PassTimes], list[Any], Any]:
        """Simulate a layer with a state. Return passes, spans of traced ranks, and buffer bytes of each rank."""
        config, cluster = self.config, self.cluster
        if ranks > MOST_RANKS_OF_STATES:
            raise UnsupportedError(
                f"ranks={ranks}: layer={config.layer} is simulated with a plan for each rank, up to "
                f"{MOST_RANKS_OF_STATES:,}; simulate fewer ranks"
            )
        _show_progress(f"{ranks} ranks: planning each of them")
        nodes = tuple(cluster.node_of(rank) for rank in range(ranks))
        sequence, layer = (self.layout(tokens, ranks), (0, tokens), nodes), config.state_layer
        passes, spans, buffer_bytes = [], [], np.zeros(ranks)
        for backward in (False, True)[: 1 + config.backward]:
            every = [layer_pass(*sequence, cluster, layer, rank, backward) for rank in range(ranks)]
            timeline = simulate_steps([each.steps for each in every], cluster, config.overlap, self.disturbance)
            sent = [sum(nbytes for step in each.steps for _, nbytes in step.sends) for each in every]
            passes.append(_times(timeline, sent))
            spans.append({rank: timeline.spans[rank] for rank in traced})
            buffer_bytes = np.maximum(buffer_bytes, [each.buffer_bytes for each in every])
        return passes, spans, buffer_bytes

    def _by_classes(self, tokens: int, ranks: int, traced: Sequence[int]) -> tuple[list[PassTimes], list[Any], Any]:
        """Simulate the ranks by classes of ranks that behave alike. The result is the same as that of `_by_plans`."""
        _show_progress(f"{ranks:,} ranks: learning classes of ranks")
        learned = self._classes(tokens // ranks, ranks, group_of(self.problem(tokens, ranks), self.config.schedule,
                                                                 self.cluster))  # fmt: skip
        passes = []
        for backward, name in enumerate(PASSES[: 1 + self.config.backward]):
            _show_progress(f"{ranks:,} ranks: {name}")
            options = self.config.overlap, self.disturbance, traced
            passes.append(play(learned[bool(backward)], self.cluster, ranks, *options))
        spans = [{rank: spans_of(marks) for rank, marks in times.traced.items()} for times in passes]
        return passes, spans, np.max([learned[bool(n)].held_spread(ranks) for n in range(len(passes))], axis=0)

    def _classes(self, shard: int, ranks: int, group: int) -> Learned:
        """Return the classes of ranks with shards of `shard` tokens, learned now or in an earlier simulation."""

        def problem_of(count: int) -> Problem:
            return self.problem(shard * count, count)

        schedule, cluster, quarter, reach = self.config.schedule, self.cluster, ranks // group % 4, self._reach(shard)
        learned_on = learned_from(schedule, quarter, reach, group)
        routes = routes_on(problem_of, schedule, cluster, learned_on, group, None)
        prologue = prologue_on(problem_of, routes, cluster, ranks)
        key = quarter, prologue, group
        if (shard, key) not in self._learned:
            # With a window, shards of another length make other ranks communicate, so classes cannot be reused.
            first = None if self.config.bounds else self._first.get(key)
            learned = classes_of(problem_of, schedule, cluster, quarter, reach, group, prologue, first)
            self._learned[shard, key] = learned
            self._first.setdefault(key, learned)
        return self._learned[shard, key]

    def _reach(self, shard: int) -> int:
        """Return how many shards of `shard` tokens away a key in a query's window can be; 0 without a window.

        Raises `UnsupportedError` if classes cannot describe the window.
        """
        if self.config.bounds is None:
            return 0
        layout = self.problem(shard * 4, 4).q_layout
        sides = [0 if self.config.causal and side is None else side for side in self.config.bounds]
        if None in sides or layout.name == "striped":
            raise UnsupportedError(
                f"layout={layout.name!r} with a window of {self.config.bounds}: classes of ranks need a window that is "
                "bounded on both sides, and contiguous or zigzag shards"
            )
        run = min(part.count for part in layout.shards[0])
        reach = -(-max(side for side in sides if side is not None) // run)
        check_reach(reach)
        return reach


def _times(timeline: Timeline, sent_bytes: Sequence[int]) -> PassTimes:
    """Return the times of a pass in seconds, and the bytes that each rank sends."""
    busy_s, waiting_s, exposed_s = np.array([timeline.busy_us, timeline.waiting_us, timeline.exposed_us]) / 1e6
    return PassTimes(timeline.total_us / 1e6, busy_s, waiting_s, exposed_s, np.array(sent_bytes, float), {})


def _processors(cluster: Cluster, ranks: int) -> int:
    """Return how many ranks can work at full speed at the same time: all, or one per processor of each machine."""
    if cluster.cores is None:
        return ranks
    return sum(min(cluster.cores, sharing) for sharing in Counter(map(cluster.node_of, range(ranks))).values())


def _pairs(problem: Problem) -> int:
    """Return the number of pairs that the mask allows."""
    return sum(branch.rectangles.pairs() for branch in problem.mask.branches)


def spans_of(marks: np.ndarray) -> tuple[Span, ...]:
    """Return the actions of a rank from the times of its steps (see `PassTimes.traced`)."""
    spans = []
    for number, (entered, went, worked, landed) in enumerate((marks * 1e6).tolist()):
        lanes = (("pack", COMPUTE, entered, went), ("attend", COMPUTE, went, worked), ("exchange", COMM, went, landed))
        spans += [Span(f"step {number} {name}", lane, start, end) for name, lane, start, end in lanes if end > start]
    return tuple(spans)


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<60}\r", end="", file=sys.stderr, flush=True)

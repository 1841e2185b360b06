"""`Ring.explain`: the messages, bytes, pairs, memory, balance and predicted time of a call, without running it.

Everything is read from the plans that would run. `Ring.explain_states` does the same for layers with a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from statistics import median
from typing import Any

import torch

from ringattn.attention import check_distances, make_problem, softmax_of
from ringattn.core.dilation import Dilated
from ringattn.core.fragments import fragments_of
from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.core.tiling import branch_tiles, pieces_of
from ringattn.integers import whole_number
from ringattn.options import AttentionOptions
from ringattn.planner.candidates import Candidate, check_extent, followed, how_chosen, is_named, table_of
from ringattn.planner.choose import choose_route, compared, plans_of_passes, without_collector
from ringattn.planner.cluster import Cluster, Exchange, LinkClass, cluster_of, exchanges, placement
from ringattn.planner.layouts import InLayout, better_layout, by_layout, in_layouts, misplaced, pairs_planned
from ringattn.planner.memory import MemoryPlan, memory_plan
from ringattn.planner.plan import Plan, record_bytes
from ringattn.planner.simulate import Crossed, crossed, duration, simulate
from ringattn.planner.states import StatePass, StateSizes, state_pass
from ringattn.runtime.executor import Executor
from ringattn.runtime.runtime import Runtime
from ringattn.runtime.states import nodes_of
from ringattn.schedule.ops import Kind, Schedule
from ringattn.schedule.routes import route_named
from ringattn.schedule.text import aligned, grid, idle_steps
from ringattn.sequence import Sequence, check_sequences
from ringattn.transport.nodes import NodesTransport

SHOWN_IN_FULL, SHOWN_OF_MANY = 16, 4
"""Up to this many ranks the text shows each of them; beyond that, the first few."""
MOST_COUNTED = 1 << 23
"""Most tokens times ranks for which text and JSON have the memory of the call. The workspace of an engine is known once
the tiles are prepared. For windows over striped shards, this takes 52 seconds at 8 times this number."""
NOT_COUNTED = f"memory: not computed for more than {MOST_COUNTED:,} tokens times ranks; `Ring.memory_plan` computes it"


@dataclass(frozen=True)
class Explanation:
    """The facts of a call, without running it. Tuples are by rank. Bytes and time include backward if it was requested.

    Attributes:
        pairs: (query, key) pairs times heads that a rank computes in forward, for local and received queries.
        schedule: The name of the schedule with its number, if it has one, as a call would name it.
        engine: The name of the engine.
        engine_why: A sentence that begins with the name of the engine and gives the reason for the choice.
        sm_margin: Multiprocessors of a GPU that attention leaves to exchanges.
        predicted_us: The predicted time, or None if the machines are unknown.
        margin_us: The part of `predicted_us` that the margin costs.
        crossed: For each pass, the links that its messages cross, the slowest first.
        ways: Which messages use which of two transports; empty if there is only one transport.
        candidates: For "auto" on known machines, all schedules (the chosen one first), each with its prediction or with
            the reason why it was left out.
        exchanges: The transports and margins for which `candidates` has predictions, the ring's own first.
        layouts: Predicted seconds in each layout, the caller's layout first.
        automatic: How "auto" chose; empty if the caller named a schedule.
        cluster_from: The source of the description of the machines, or why there is none.
        misplaced: Why other schedules suit the placement of the documents better, or None.
    """

    problem: Problem
    forward: Schedule
    backward: Schedule | None
    plans: tuple[tuple[Plan, ...], ...]
    bytes_sent: tuple[int, ...]
    messages: tuple[int, ...]
    pairs: tuple[int, ...]
    workspace_bytes: Callable[[Plan], int] = field(repr=False, compare=False)
    predicted_us: float | None
    cluster: Cluster
    schedule: str
    engine: str
    engine_why: str
    better_layout: str | None
    sm_margin: int = 0
    margin_us: float = 0.0
    crossed: tuple[tuple[Crossed, ...], ...] = ()
    ways: str = ""
    candidates: tuple[Candidate, ...] = ()
    layouts: tuple[InLayout, ...] = ()
    automatic: str = ""
    exchanges: tuple[Exchange, ...] = ()
    cluster_from: str = ""
    misplaced: str | None = None

    @cached_property
    def memory(self) -> MemoryPlan:
        """All memory that the call allocates, on every rank; see `MemoryPlan`. Computed at its first use."""
        return memory_plan(self.plans, [[self.workspace_bytes(plan) for plan in of_pass] for of_pass in self.plans])

    @property
    def shows_memory(self) -> bool:
        """Whether text and JSON have the memory of the call, which is slow to compute for more tokens times ranks."""
        return self.problem.q_layout.length * self.problem.world_size <= MOST_COUNTED

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the call has allocated on a rank at any time."""
        return max(self.memory.peak_bytes)

    @property
    def balance(self) -> float:
        """The largest number of pairs of a rank over the mean: 1.0 is perfect; world_size if one rank has all pairs."""
        total = sum(self.pairs)
        return max(self.pairs) * len(self.pairs) / total if total else 1.0

    def __str__(self) -> str:
        return self.text()

    def text(self, all_ranks: bool = False) -> str:
        """Return the explanation as text.

        Args:
            all_ranks: Show every rank. Otherwise, if there are more than 16 ranks, show the first few and a summary.

        Returns:
            Lines of text.

        Raises:
            Nothing.
        """
        p, predicted_us = self.problem, self.predicted_us
        shown = p.world_size if all_ranks or p.world_size <= SHOWN_IN_FULL else SHOWN_OF_MANY
        lines = [
            f"{self.schedule} schedule, {p.q_layout.name} layout, {p.q_layout.length} tokens on "
            f"{p.world_size} ranks, {p.q_heads} query and {p.kv_heads} K/V heads of {p.head_dim}, {p.dtype}"
            + (f", K/V sent as {p.kv_wire_dtype}" if p.kv_wire_dtype else "")
            + _output_wire(self),
            f"engine {self.engine_why}",
            "",
            *_steps("forward: blocks that a rank attends to | blocks that it sends in this step", self.forward, shown),
        ]
        if self.backward is not None:
            head = "backward: blocks whose gradients a rank computes, +gradients that it adds | blocks that it sends"
            lines += ["", *_steps(head, self.backward, shown)]
        lines += ["", *_table(self, shown)]
        most = (
            f"{_si(self.peak_bytes)}B of memory"
            if self.shows_memory
            else f"{_si(max(_buffer_bytes(self)))}B of buffers"
        )
        lines.append(
            f"balance {self.balance:.3f} (largest over mean pairs of a rank), at most {most} on a rank"
            + ("" if predicted_us is None else f", predicted {duration(predicted_us / 1e6)} on {self.cluster.name}")
        )
        lines += self.memory.lines() if self.shows_memory else [NOT_COUNTED]
        lines += _links(self)
        if self.automatic:
            lines.append(f"auto chose {self.schedule}: {self.automatic}")
        if p.world_size > 1 and self.cluster_from:
            lines.append(f"machines {self.cluster_from}")
        if predicted_us is not None and self.candidates:
            over = tuple(map(str, self.exchanges)) if len(self.exchanges) > 1 else ()
            lines += ["", *table_of(self.candidates, over), *([by_layout(self.layouts)] if self.layouts else []), ""]
        if self.ways:
            lines.append(f"messages use {self.ways}")
        if predicted_us is not None:
            lines.append(f"the prediction is based on {self.cluster.source or 'constants whose source is not stated'}")
        if predicted_us is not None and self.sm_margin and self.cluster.sms:
            lines.append(
                f"{self.sm_margin} of {self.cluster.sms} multiprocessors are reserved for exchanges. This costs "
                f"{self.sm_margin / self.cluster.sms:.1%} of the arithmetic rate, {duration(self.margin_us / 1e6)} "
                "of the prediction"
            )
        if comparison := _comparison(self):
            lines.append(comparison)
        if self.misplaced:
            lines.append(self.misplaced)
        if self.better_layout:
            lines.append(f"layout={self.better_layout!r} would balance this mask better")
        if shown < p.world_size:
            lines.append(f"{shown} of {p.world_size} ranks are shown; explanation.text(all_ranks=True) shows all")
        return "\n".join(lines)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the explanation as plain data, for JSON.

        Returns:
            The schedule, the sizes of the call, and per rank bytes, messages, pairs, buffers and, if `shows_memory`,
            peak memory.

        Raises:
            Nothing.
        """
        p = self.problem
        return {
            "schedule": self.schedule, "layout": p.q_layout.name, "engine": self.engine, "sm_margin": self.sm_margin,
            "tokens": p.q_layout.length, "ranks": p.world_size, "q_heads": p.q_heads, "kv_heads": p.kv_heads,
            "head_dim": p.head_dim, "dtype": p.dtype, "balance": self.balance,
            "predicted_us": self.predicted_us,
            "cluster": None if self.predicted_us is None else self.cluster.name,
            "automatic": self.automatic, "better_layout": self.better_layout,
            "steps": {"forward": len(self.forward.steps), "backward": self.backward and len(self.backward.steps)},
            "by_rank": {
                "tokens": list(p.q_layout.counts), "pairs": list(self.pairs), "messages": list(self.messages),
                "bytes_sent": list(self.bytes_sent), "buffer_bytes": list(_buffer_bytes(self)),
            } | ({
                "peak_bytes": list(self.memory.peak_bytes), "saved_bytes": list(self.memory.saved_bytes),
            } if self.shows_memory else {}),
        }  # fmt: skip


@without_collector()
def explain_call(
    ring: Runtime,
    seq: Sequence,
    kv_seq: Sequence | None,
    sizes: tuple[int, int, int, int, int],
    dtype: str,
    device: torch.device,
    options: AttentionOptions,
    dilated: Dilated | None = None,
    *,
    backward: bool = True,
    cluster: Cluster | str | None = None,
    sm_margin: int | None = None,
) -> Explanation:
    """Explain the call with tensors of these `sizes`: batch, query heads, K/V heads, head_dim, value_dim.

    `dilated`: the branches of dilated attention, which replace causal, window and mask of the options. The other
    arguments: see `Ring.explain`.
    """
    names = "batch", "q_heads", "kv_heads", "head_dim", "value_dim"
    batch, q_heads, kv_heads, head_dim, value_dim = (
        whole_number(size, f"explain: {name} must be a whole number, not below 0", 0)
        for name, size in zip(names, sizes, strict=True)
    )
    if sm_margin is not None:
        sm_margin = whole_number(sm_margin, "explain: sm_margin must be a number of multiprocessors", 0)
    check_sequences(ring, seq, kv_seq)
    cluster = ring.cluster if cluster is None else cluster_of(cluster).joined(ring.links)
    is_ring_cluster = cluster is ring.cluster or not is_named(cluster)
    cluster_from = ring.cluster_from if is_ring_cluster else f"named: {cluster.name}"
    schedule = options.schedule
    check_distances(seq, options)
    problem = make_problem(
        ring, seq, kv_seq, batch, q_heads, kv_heads, head_dim, value_dim, dtype, dilated or options.pairs
    )
    softmax = softmax_of(options, head_dim, q_heads, kv_heads)
    chosen = ring.choice(device, getattr(torch, dtype), head_dim, value_dim, softmax)
    skips_rows = any(branch.dilation > 1 for branch in problem.mask.branches)
    check_extent(problem, by_head=skips_rows if schedule == "auto" else route_named(schedule).by_head)
    machines = ring.cluster if is_ring_cluster else cluster
    # The engine is chosen for this device, but the times of named GPUs are those of the kernels measured on such GPUs.
    named_gpus = is_named(cluster) and cluster.sms is not None and device.type == "cpu"
    elsewhere = f"; kernel times are those on {cluster.name}" if named_gpus else ""
    over = exchanges(_exchange(ring, machines, sm_margin), machines, problem.world_size)
    chooser, *others = (exchange.on(machines) for exchange in over) if is_named(machines) else (machines,)
    route = choose_route(problem, schedule, chooser)
    weighed: tuple[Candidate, ...] = ()
    if schedule == "auto" and not skips_rows and ring.world_size > 1 and followed(problem, chooser):
        weighed = compared(problem, chooser, *others)
    automatic = "" if schedule != "auto" else how_chosen(weighed, problem, chooser)
    passes = (False, True) if backward else (False,)
    ranks = range(problem.world_size)
    schedules, plans = plans_of_passes(problem, route, passes)
    computed = pairs_planned(plans[0])
    left = chosen.engine.sm_margin if cluster.sms and ring.transport.sm_margin else 0
    margin = left if sm_margin is None else sm_margin
    predicted_us, margin_us = None, 0.0
    if is_named(cluster):
        whole = _exchange(ring, cluster, 0).on(cluster)
        predicted_us = sum(simulate(of_pass, whole.leaving(margin)).total_us for of_pass in plans)
        if margin:
            margin_us = predicted_us - sum(simulate(of_pass, whole).total_us for of_pass in plans)
    return Explanation(
        problem=problem,
        forward=schedules[0],
        backward=schedules[1] if backward else None,
        plans=plans,
        bytes_sent=tuple(sum(p[rank].bytes_sent for p in plans) for rank in ranks),
        messages=tuple(sum(p[rank].messages for p in plans) for rank in ranks),
        pairs=computed,
        workspace_bytes=lambda plan: Executor(plan, chosen.engine, softmax).workspace_bytes(),
        predicted_us=predicted_us,
        cluster=cluster,
        schedule=route.text(problem),
        engine=chosen.engine.name,
        engine_why=chosen.why + elsewhere,
        better_layout=better_layout(problem, seq.documents, route, computed) if kv_seq is None else None,
        sm_margin=margin,
        margin_us=margin_us,
        crossed=tuple(crossed(of_pass, cluster) for of_pass in plans),
        ways=ring.transport.ways if isinstance(ring.transport, NodesTransport) else "",
        candidates=weighed,
        layouts=in_layouts(problem, route, chooser) if weighed and kv_seq is None else (),
        automatic=automatic,
        exchanges=over if weighed else (),
        cluster_from=cluster_from,
        misplaced=misplaced(problem, route),
    )


@dataclass(frozen=True)
class StatesExplanation:
    """The messages of a layer with a state, without running it.

    Attributes:
        sizes: The bytes of a transition, of a state and of a row of history.
        fragments: The number of fragments of each rank.
        longest: The number of fragments of the longest document.
        passes: The forward pass, and the backward pass if it was requested: bytes sent and received and messages by
            rank, exchanges, seconds.
        predicted_us: The predicted time of all messages, or None if the machines are unknown.
    """

    layout: str
    tokens: int
    sizes: StateSizes
    fragments: tuple[int, ...]
    longest: int
    passes: tuple[StatePass, ...]
    predicted_us: float | None
    cluster: Cluster

    @property
    def bytes_sent(self) -> tuple[int, ...]:
        """The bytes that each rank sends in all passes."""
        return tuple(sum(int(each.sent_bytes[rank]) for each in self.passes) for rank in range(len(self.fragments)))

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """The bytes that each rank receives in all passes."""
        return tuple(sum(int(each.received_bytes[rank]) for each in self.passes) for rank in range(len(self.fragments)))

    @property
    def messages(self) -> tuple[int, ...]:
        """The messages that each rank sends in all passes."""
        return tuple(sum(int(each.messages[rank]) for each in self.passes) for rank in range(len(self.fragments)))

    def __str__(self) -> str:
        return self.text()

    def text(self, all_ranks: bool = False) -> str:
        """Return the explanation as text.

        Args:
            all_ranks: Show every rank. Otherwise, if there are more than 16 ranks, show the first few and a summary.

        Returns:
            Lines of text.

        Raises:
            Nothing.
        """
        ranks, sizes = len(self.fragments), self.sizes
        shown = ranks if all_ranks or ranks <= SHOWN_IN_FULL else SHOWN_OF_MANY
        columns = {
            "fragments": (self.fragments, _plain), "messages": (self.messages, _plain),
            "sends": (self.bytes_sent, _bytes), "receives": (self.bytes_received, _bytes),
        }  # fmt: skip
        names = ("forward", "backward")
        exchanges = ", ".join(f"{each.exchanges} in {name}" for name, each in zip(names, self.passes, strict=False))
        predicted = "" if self.predicted_us is None else (
            f", predicted {duration(self.predicted_us / 1e6)} on {self.cluster.name} if nothing else runs"
        )  # fmt: skip
        lines = [
            f"{self.layout} layout, {self.tokens} tokens on {ranks} ranks; the longest document has {self.longest} "
            "fragments",
            f"state {_si(sizes.state_bytes)}B, transition {_si(sizes.transition_bytes)}B, {sizes.halo_rows} rows of "
            f"history of {_si(sizes.row_bytes)}B",
            "",
            *_by_rank(columns, shown),
            f"exchanges one after the other: {exchanges}{predicted}",
        ]
        if shown < ranks:
            lines.append(f"{shown} of {ranks} ranks are shown; explanation.text(all_ranks=True) shows all")
        return "\n".join(lines)


def explain_scan(
    ring: Runtime, seq: Sequence, sizes: StateSizes, *, backward: bool, cluster: Cluster | str | None
) -> StatesExplanation:
    """See `Ring.explain_states`."""
    check_sequences(ring, seq, None)
    sizes = StateSizes(**{
        name: whole_number(value, f"explain_states: {name} must be a number of bytes or rows", 0)
        for name, value in sizes._asdict().items()
    })  # fmt: skip
    cluster = ring.cluster if cluster is None else cluster_of(cluster).joined(ring.links)
    fragments = fragments_of(seq.layout, seq.bounds)
    counts = tuple(len(fragments.of(rank)) for rank in range(ring.world_size))
    passes = tuple(
        state_pass(seq.layout, seq.bounds, nodes_of(ring), cluster, sizes, reverse)
        for reverse in ((False, True) if backward else (False,))
    )
    predicted_us = sum(each.seconds for each in passes) * 1e6 if is_named(cluster) else None
    longest = int((fragments.last - fragments.first).max(initial=-1)) + 1
    return StatesExplanation(seq.layout.name, seq.length, sizes, counts, longest, passes, predicted_us, cluster)


def _exchange(ring: Runtime, machines: Cluster, sm_margin: int | None) -> Exchange:
    """Return the transport and margin of this ring; NCCL if `machines` have GPUs and this ring has none."""
    ring_exchange = ring.exchange
    elsewhere = machines.sms is not None and ring.transport.stream is None
    margin = ring_exchange.sm_margin if sm_margin is None else sm_margin
    return Exchange("nccl" if elsewhere else ring_exchange.transport, margin)


def _comparison(e: Explanation) -> str | None:
    """Compare the bytes of a dilated forward pass with a full ring and with an all-gather of the sparse rows.

    The latter is LongNet's algorithm: if any rank needs a remote row, all rows of the branch are sent to all ranks.
    """
    p = e.problem
    if all(branch.dilation == 1 for branch in p.mask.branches) or p.world_size == 1:
        return None
    sent = sum(plan.bytes_sent for plan in e.plans[0])
    record = record_bytes(p, p.kv_dtype) * (p.world_size - 1)
    sparse = 0
    for branch in p.mask.branches:
        reads = {(rank, owner) for rank in range(p.world_size) for owner, *_ in branch_tiles(p, branch, rank, False)}
        if any(rank != owner for rank, owner in reads):
            parts = (
                part for part in p.parts if part.q_heads.intersect(branch.heads or StridedRange(0, p.q_heads)).count
            )
            heads = sum(part.kv_heads.count for part in parts)
            sparse += int(pieces_of(p.kv_layout, branch, keys=True).size.sum()) * heads * record
    full = p.kv_layout.length * p.kv_heads * record
    others = (f"{name} {_si(nbytes)}B" + (f" ({nbytes / sent:.3g} times)" if sent else "")
              for name, nbytes in (("a full ring", full), ("an all-gather of the sparse rows", sparse)))  # fmt: skip
    return f"forward sends {_si(sent)}B in total; " + ", ".join(others)


def _output_wire(e: Explanation) -> str:
    """Return the text that names the wire dtype of outputs; empty unless ranks return outputs to other ranks in it."""
    returns = any(copy.block.kind is Kind.OUT for step in e.forward.steps for copy in step.copies)
    return f", outputs return as {e.problem.out_wire_dtype}" if returns and e.problem.out_wire_dtype else ""


def _steps(head: str, schedule: Schedule, shown: int) -> list[str]:
    """Return the lines of a table of a pass: a row for each step, a column for each of the first `shown` ranks.

    The first line is `head`, with the steps in which nothing happens.
    """
    idle = idle_steps(schedule)
    lines = grid(schedule, range(shown)).splitlines()
    first, last = 2 + SHOWN_IN_FULL // 2, SHOWN_OF_MANY  # below the two lines of the head
    if shown < schedule.problem.world_size and len(lines) > first + last:
        lines = [*lines[:first], f"...   {len(lines) - first - last} further steps", *lines[-last:]]
    return [head + (f" ({idle})" if idle else ""), *lines]


def _links(e: Explanation) -> list[str]:
    """Return lines about the links that the messages of each pass cross, the slowest message, and the nodes' ranks."""
    has_links = e.cluster.links is not None
    if not has_links and e.cluster.ranks_per_node is None:
        return []
    names = {
        kind: kind.value if has_links or kind is LinkClass.NETWORK else "links within a node" for kind in LinkClass
    }
    lines = []
    for name, links in zip(("forward", "backward"), e.crossed, strict=False):
        if links:
            slowest, (src, dst) = links[0], links[0].slowest
            counts = ", ".join(f"{len(each.pairs)} over {names[each.kind]} ({_si(each.nbytes)}B)" for each in links)
            lines.append(
                f"pairs of ranks that exchange messages in {name}: {counts}; the slowest message, rank {src} to {dst} "
                f"over {names[slowest.kind]}, takes {duration(slowest.slowest_us / 1e6)}, "
                f"{duration(slowest.latency_us / 1e6)} of it latency"
            )
    if has_links and any(each.kind is LinkClass.UNKNOWN for links in e.crossed for each in links):
        lines.append("this machine does not report the kind of some links; they count as links within a node")
    if e.cluster.links is not None and e.cluster.links.crossings:
        lines.append(placement(e.cluster.links))
    return lines


def _buffer_bytes(e: Explanation) -> Many[int]:
    """Return the bytes of the buffers of each rank in the pass that needs more of them."""
    return [max(plans[rank].arena_bytes for plans in e.plans) for rank in range(e.problem.world_size)]


def _table(e: Explanation, shown: int) -> list[str]:
    """Return a table of tokens, pairs, messages, bytes sent, buffers and peak memory of the first `shown` ranks."""
    columns = {
        "tokens": (e.problem.q_layout.counts, _plain), "pairs": (e.pairs, _si), "messages": (e.messages, _plain),
        "sends": (e.bytes_sent, _bytes), "buffers": (_buffer_bytes(e), _bytes),
    }  # fmt: skip
    if e.shows_memory:
        columns["memory"] = e.memory.peak_bytes, _bytes
    return _by_rank(columns, shown)


def _by_rank(columns: Mapping[str, tuple[Many[float], Callable[[float], str]]], shown: int) -> list[str]:
    """Return the lines of a table with a line for each of the first `shown` ranks, then a summary if there are more.

    `columns`: by title, the values of all ranks and how to write one.
    """

    def row(name: str, chosen: Callable[[Many[float]], float]) -> list[str]:
        return [name, *(text(chosen(values)) for values, text in columns.values())]

    ranks = len(next(iter(columns.values()))[0])
    rows = [["rank", *columns], *(row(str(rank), itemgetter(rank)) for rank in range(shown))]
    if shown < ranks:
        rows += [row("least", min), row("median", median), row("most", max)]
    return aligned(rows)


def _plain(number: float) -> str:
    return f"{number:.15g}"


def _bytes(number: float) -> str:
    return f"{_si(number)}B"


def _si(number: float) -> str:
    """Return 1234567 as 1.23M, and numbers below a thousand unchanged."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g}{letter}"
    return f"{number:g}"

"""Before anything runs: who sends what to whom, when; bytes, pairs, memory, balance, predicted time.

Everything is read from the plans that would run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringattn.attention import check_sequences, make_problem, softmax_of
from ringattn.core.dilation import Dilated
from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.core.tiling import branch_tiles, pieces_of
from ringattn.options import AttentionOptions
from ringattn.planner.candidates import Candidate, check_extent, followed, how_chosen, known, table_of
from ringattn.planner.choose import choose_route, compared, plan_of, without_collector
from ringattn.planner.cluster import Cluster, Exchange, LinkClass, cluster_named, exchanges, placement
from ringattn.planner.layouts import InLayout, better_layout, by_layout, in_layouts, misplaced, pairs_planned
from ringattn.planner.plan import Plan, record_bytes
from ringattn.planner.simulate import Crossed, crossed, duration, simulate
from ringattn.runtime.runtime import Runtime
from ringattn.schedule.ops import Kind, Schedule
from ringattn.schedule.routes import route_named, schedule_of
from ringattn.schedule.text import aligned, grid, idle_steps
from ringattn.sequence import Sequence
from ringattn.transport.nodes import NodesTransport


@dataclass(frozen=True)
class Explanation:
    """What a call would do. Tuples are by rank; bytes and predicted time hold forward and, if asked for, backward.

    `pairs`: of queries and keys, times heads, that a rank computes forward, its own queries' or those that it receives.
    `engine`: the name of the engine; `engine_why`: one sentence that begins with it. `sm_margin`: multiprocessors of a
    GPU that attention leaves to exchanges; `margin_us`: how much of `predicted_us` is owed to that. `crossed`: of each
    pass, the links that its messages cross, the slowest first. `ways`: where messages go over two transports, which go
    over which; else empty. `candidates`: for "auto" on machines that are known, all schedules with their predictions,
    the chosen one first, or why each was left out; `exchanges`: what their times hold for, that of the choice first;
    `layouts`: predicted seconds in the plain layouts, the caller's first.
    `automatic`: how "auto" chose; empty where the caller did. `cluster_from`: who says which machines these are, or why
    nobody does. `misplaced`: why documents lie better for other schedules, or None. `predicts`: whether the text has
    times; without, nobody named the machines of `cluster`.
    """

    problem: Problem
    forward: Schedule
    backward: Schedule | None
    plans: tuple[tuple[Plan, ...], ...]
    bytes_sent: tuple[int, ...]
    messages: tuple[int, ...]
    pairs: tuple[int, ...]
    peak_bytes: int
    predicted_us: float
    cluster: Cluster
    engine: str
    engine_why: str
    better_layout: str | None
    sm_margin: int = 0
    margin_us: float = 0.0
    crossed: tuple[tuple[Crossed, ...], ...] = ()
    ways: str = ""
    predicts: bool = True
    candidates: tuple[Candidate, ...] = ()
    layouts: tuple[InLayout, ...] = ()
    automatic: str = ""
    exchanges: tuple[Exchange, ...] = ()
    cluster_from: str = ""
    misplaced: str | None = None

    @property
    def balance(self) -> float:
        """Greatest over mean (q, k) pairs of a rank: 1.0 is perfect, world_size is one rank doing everything."""
        total = sum(self.pairs)
        return max(self.pairs) * len(self.pairs) / total if total else 1.0

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"{self.forward.name} schedule, {p.q_layout.name} layout, {p.q_layout.length} tokens on "
            f"{p.world_size} ranks, {p.q_heads} query and {p.kv_heads} K/V heads of {p.head_dim}, {p.dtype}"
            + (f", K/V travel as {p.kv_wire_dtype}" if p.kv_wire_dtype else "")
            + _output_wire(self),
            f"engine {self.engine_why}",
            "",
            *_steps("forward: what each rank attends | what it sends meanwhile", self.forward),
        ]
        if self.backward is not None:
            head = "backward: gradients of what, +merged sums | what it sends meanwhile"
            lines += ["", *_steps(head, self.backward)]
        lines += ["", *_table(self)]
        lines.append(
            f"balance {self.balance:.3f} (greatest over mean pairs), at most {_si(self.peak_bytes)}B staged on a rank"
            + (f", predicted {duration(self.predicted_us / 1e6)} on {self.cluster.name}" if self.predicts else "")
        )
        lines += _links(self)
        if self.automatic:
            lines.append(f"auto took {self.forward.name}: {self.automatic}")
        if self.predicts and p.world_size > 1 and self.cluster_from:
            lines.append(f"machines {self.cluster_from}")
        if self.predicts and self.candidates:
            over = tuple(map(str, self.exchanges)) if len(self.exchanges) > 1 else ()
            lines += ["", *table_of(self.candidates, over), *([by_layout(self.layouts)] if self.layouts else []), ""]
        if self.ways:
            lines.append(f"messages go over {self.ways}")
        if self.predicts:
            lines.append(f"that prediction rests on {self.cluster.source or 'constants of no stated source'}")
        if self.predicts and self.sm_margin and self.cluster.sms:
            lines.append(
                f"{self.sm_margin} of {self.cluster.sms} multiprocessors are left to exchanges, "
                f"{self.sm_margin / self.cluster.sms:.1%} of the arithmetic: "
                f"{duration(self.margin_us / 1e6)} of that prediction"
            )
        if kept := max(plan.kept_bytes for plan in self.plans[0]):
            lines.append(f"what comes forward is kept for the backward, at most {_si(kept)}B on a rank")
        if others := _beside(self):
            lines.append(others)
        if self.misplaced:
            lines.append(self.misplaced)
        if self.better_layout:
            lines.append(f"layout={self.better_layout!r} would balance this mask better")
        return "\n".join(lines)


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

    `dilated`: the branches of dilated attention, in place of the pairs of the options. The rest: see `Ring.explain`.
    """
    _, q_heads, kv_heads, head_dim, value_dim = sizes
    check_sequences(ring, seq, kv_seq)
    if isinstance(cluster, str):
        cluster = cluster_named(cluster)
    cluster = ring.cluster if cluster is None else cluster.joined(ring.links)
    own = cluster is ring.cluster or not known(cluster)
    cluster_from = ring.cluster_from if own else f"named: {cluster.name}"
    schedule = options.schedule
    problem = make_problem(ring, seq, kv_seq, *sizes, dtype, dilated or options.pairs)
    softmax = softmax_of(options, head_dim, q_heads, kv_heads)
    chosen = ring.choice(device, getattr(torch, dtype), head_dim, value_dim, softmax)
    skips_rows = any(branch.dilation > 1 for branch in problem.mask.branches)
    check_extent(problem, by_head=skips_rows if schedule == "auto" else route_named(schedule).by_head)
    machines = ring.cluster if own else cluster
    # The engine is this device's; the times are of the kernels that the constants of named GPUs were taken from.
    named_gpus = known(cluster) and cluster.sms is not None and device.type == "cpu"
    elsewhere = f"; times are of the kernels on {cluster.name}" if named_gpus else ""
    over = exchanges(_exchange(ring, machines, sm_margin), machines, problem.world_size)
    chooser, *others = (one.on(machines) for one in over) if known(machines) else (machines,)
    route = choose_route(problem, schedule, chooser)
    weighed: tuple[Candidate, ...] = ()
    if schedule == "auto" and not skips_rows and ring.world_size > 1 and followed(problem, chooser):
        weighed = compared(problem, chooser, *others)
    automatic = "" if schedule != "auto" else how_chosen(weighed, problem, chooser)
    passes = (False, True) if backward else (False,)
    ranks = range(problem.world_size)
    plans = tuple(tuple(plan_of(problem, route, rank, back) for rank in ranks) for back in passes)
    computed = pairs_planned(plans[0])
    left = chosen.engine.sm_margin if cluster.sms and ring.transport.sm_margin else 0
    margin = left if sm_margin is None else sm_margin
    whole = _exchange(ring, cluster, 0).on(cluster)
    predicted_us = sum(simulate(one, whole.leaving(margin)).total_us for one in plans)
    whole_us = sum(simulate(one, whole).total_us for one in plans) if margin else predicted_us
    return Explanation(
        problem=problem,
        forward=schedule_of(problem, route, backward=False),
        backward=schedule_of(problem, route, backward=True) if backward else None,
        plans=plans,
        bytes_sent=tuple(sum(p[rank].bytes_sent for p in plans) for rank in ranks),
        messages=tuple(sum(p[rank].messages for p in plans) for rank in ranks),
        pairs=computed,
        peak_bytes=max(plan.arena_bytes for one in plans for plan in one),
        predicted_us=predicted_us,
        cluster=cluster,
        engine=chosen.engine.name,
        engine_why=chosen.why + elsewhere,
        better_layout=better_layout(problem, seq.documents, route, computed) if kv_seq is None else None,
        sm_margin=margin,
        margin_us=predicted_us - whole_us,
        crossed=tuple(crossed(one, cluster) for one in plans),
        ways=ring.transport.ways if isinstance(ring.transport, NodesTransport) else "",
        candidates=weighed,
        layouts=in_layouts(problem, route, chooser) if weighed and kv_seq is None else (),
        automatic=automatic,
        exchanges=over if weighed else (),
        cluster_from=cluster_from,
        misplaced=misplaced(problem, route),
    )


def _exchange(ring: Runtime, machines: Cluster, sm_margin: int | None) -> Exchange:
    """What carries this ring's messages; for GPUs elsewhere than under this ring NCCL."""
    own = ring.exchange
    elsewhere = machines.sms is not None and ring.transport.stream is None
    margin = own.sm_margin if sm_margin is None else sm_margin
    return Exchange("nccl" if elsewhere else own.transport, margin)


def _beside(e: Explanation) -> str | None:
    """What the forward of dilated branches sends, beside a full ring and beside an all-gather of the sparse rows.

    The latter is LongNet's own algorithm: every row that a branch keeps goes to all ranks if any rank needs another's.
    """
    p = e.problem
    if all(branch.dilation == 1 for branch in p.mask.branches) or p.world_size == 1:
        return None
    ours = sum(plan.bytes_sent for plan in e.plans[0])
    record = record_bytes(p, p.kv_dtype) * (p.world_size - 1)
    sparse = 0
    for branch in p.mask.branches:
        met = {(rank, owner) for rank in range(p.world_size) for owner, *_ in branch_tiles(p, branch, rank, False)}
        if any(rank != owner for rank, owner in met):
            served = (
                part for part in p.parts if part.q_heads.intersect(branch.heads or StridedRange(0, p.q_heads)).count
            )
            heads = sum(part.kv_heads.count for part in served)
            sparse += int(pieces_of(p.kv_layout, branch, keys=True).size.sum()) * heads * record
    full = p.kv_layout.length * p.kv_heads * record
    told = (f"{name} {_si(nbytes)}B" + (f" ({nbytes / ours:.3g} times)" if ours else "")
            for name, nbytes in (("a full ring", full), ("an all-gather of the sparse rows", sparse)))  # fmt: skip
    return f"forward sends {_si(ours)}B in all; " + ", ".join(told)


def _output_wire(e: Explanation) -> str:
    """The dtype to which outputs are rounded, where ranks compute them for other ranks and send them back."""
    returns = any(copy.block.kind is Kind.OUT for step in e.forward.steps for copy in step.copies)
    return f", outputs return as {e.problem.out_wire_dtype}" if returns and e.problem.out_wire_dtype else ""


def _steps(head: str, schedule: Schedule) -> list[str]:
    """A pass as a table, with a word on the numbers that it leaves out."""
    idle = idle_steps(schedule)
    return [head + (f" ({idle})" if idle else ""), grid(schedule)]


def _links(e: Explanation) -> list[str]:
    """Which links the hops of each pass cross and what the slowest costs; then how the ranks lie on nodes."""
    known = e.cluster.links is not None
    if not known and e.cluster.ranks_per_node is None:
        return []
    names = {kind: kind.value if known or kind is LinkClass.NETWORK else "links inside a node" for kind in LinkClass}
    lines = []
    for name, links in zip(("forward", "backward"), e.crossed, strict=False):
        if links:
            slowest, (src, dst) = links[0], links[0].slowest
            told = ", ".join(f"{len(one.pairs)} over {names[one.kind]} ({_si(one.nbytes)}B)" for one in links)
            lines.append(
                f"{name} sends from rank to rank: {told}; the slowest hop, rank {src} to {dst} over "
                f"{names[slowest.kind]}, takes {duration(slowest.slowest_us / 1e6)}, "
                f"{duration(slowest.latency_us / 1e6)} of them latency"
            )
    if known and any(one.kind is LinkClass.UNKNOWN for links in e.crossed for one in links):
        lines.append("unknown links could not be found out on this machine; they count as any inside a node")
    if e.cluster.links is not None and e.cluster.links.crossings:
        lines.append(placement(e.cluster.links))
    return lines


def _table(e: Explanation) -> list[str]:
    """One line a rank: tokens, pairs, messages, bytes sent and staged."""
    rows = [["rank", "tokens", "pairs", "messages", "sends", "staged"]]
    for rank, tokens in enumerate(e.problem.q_layout.counts):
        staged = max(plans[rank].arena_bytes for plans in e.plans)
        sends = _si(e.bytes_sent[rank]) + "B"
        rows.append([str(rank), str(tokens), _si(e.pairs[rank]), str(e.messages[rank]), sends, _si(staged) + "B"])
    return aligned(rows)


def _si(number: float) -> str:
    """1234567 as 1.23M; whole numbers below a thousand as they are."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g}{letter}"
    return f"{number:g}"

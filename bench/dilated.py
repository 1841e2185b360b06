"""Dilated attention: the bytes and predicted time of each schedule, and its speed compared with full attention.

Run `python -m ringattn.bench.dilated [key=value ...]`. Planned: LongNet's geometric branches on 2^20 tokens and 8
ranks, in bfloat16. Measured: the same kind of branches and a full ring in processes of this machine, in turns within
one run; memory at equal tokens per rank; and one long sequence, forward and backward.
Guarantees: nothing is timed before dilated attention matches a dense float64 reference on the same ranks. FLOPs count
the pairs that are computed, so the ratio of times divided by the ratio of FLOPs is the overhead of dilation beyond
arithmetic.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from ringattn.bench.clock import Lap, lap, samples, wall
from ringattn.bench.gate import BOUND, GateError, random_inputs
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Table, finish, mib, progress, spread
from ringattn.core.dilation import Branches, Dilated, geometric
from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.core.tiling import tiles_of
from ringattn.observe.memory import reset_peak, status_bytes
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import REFERENCE
from ringattn.planner.plan import Plan
from ringattn.planner.simulate import simulate
from ringattn.ring import Ring
from ringattn.schedule.content import size
from ringattn.schedule.ops import Kind
from ringattn.testing import dense_dilated_attention

PROGRAM = "ringattn.bench.dilated:on_rank"
MEMORY_PROGRAM = "ringattn.bench.dilated:measure_memory"
BAR = 1.3
"""The bar: the ratio of times may be at most this multiple of the ratio of FLOPs."""

SCHEDULES = "ring", "all_gather", "direct", "sub_rings", "all_to_all"
NARROW = "all_to_all, outputs in bfloat16"
GATE_TOKENS_PER_RANK = 97


@dataclass(frozen=True)
class DilatedOptions:
    """The options of the benchmark.

    The comparison has `length_tokens` tokens and runs once for each number of processes in `ranks`. The memory runs
    have `tokens_per_rank`, for each number of processes in `memory_ranks`. The long run has `long_tokens`; 0 skips it.
    """

    length_tokens: int = 65_536
    ranks: tuple[int, ...] = (2, 4)
    heads: int = 4
    head_dim: int = 64
    base_length: int = 2048
    repeats: int = 2
    tokens_per_rank: int = 16_384
    memory_ranks: tuple[int, ...] = (1, 2, 4, 8)
    long_tokens: int = 1_048_576
    results: str = RESULTS


def planned() -> tuple[Table, list[dict[str, Any]]]:
    """Plan the example call with each schedule. Return a table and its figures.

    They are the mean rows per head and the mean bytes sent of a rank, the size of staging buffers, and predicted times.
    """
    tokens, ranks, heads, dim = 1 << 20, 8, 12, 64
    layout, branches = make_layout("contiguous", tokens, ranks), geometric(length=tokens)
    calls: dict[str, tuple[Dilated | Banded, str]] = {name: (Dilated(*branches), name) for name in SCHEDULES}
    calls[NARROW] = Dilated(*branches), "all_to_all"
    calls["full attention, ring"] = Banded(), "ring"
    table = Table(
        f"Planned: {tokens} tokens on {ranks} ranks, {heads} heads of {dim}, bfloat16, forward",
        [
            "schedule",
            "rows a head",
            "MB sent",
            "messages",
            "MB of slots",
            "MB kept",
            "MB sent backward",
            "predicted, ms",
            "not hidden, ms",
        ],
        notes=[
            f"Branches {branches.pairs()}. Mean over the ranks; slots of the rank that needs most.",
            "A row is K and V; a row of queries or of outputs counts half. MB kept: received and not sent again for "
            "backward, which returns dK and dV in float32.",
            f"Predicted for {REFERENCE.name}: the forward pass.",
        ],
    )
    rows = []
    for name, (pairs, schedule) in calls.items():
        mask = pairs.mask(tokens, tokens, None, None, heads, heads)
        problem = Problem(layout, layout, mask, 1, heads, heads, dim, dim, "bfloat16")
        if name == NARROW:
            problem = replace(problem, out_wire_dtype="bfloat16")
        route = choose_route(problem, schedule)
        plans, back = ([plan_of(problem, route, rank, backward) for rank in range(ranks)] for backward in (False, True))
        time = simulate(tuple(plans), REFERENCE)
        row: dict[str, Any] = {
            "schedule": name, "rows_a_head": mean(map(_rows_received, plans)) / heads,
            "bytes_sent": mean(plan.bytes_sent for plan in plans), "messages": plans[0].messages,
            "slot_bytes": max(plan.arena_bytes for plan in plans), "kept_bytes": mean(p.kept_bytes for p in plans),
            "bytes_sent_backward": mean(plan.bytes_sent for plan in back),
            "predicted_us": time.total_us, "exposed_us": time.total_us - max(time.busy_us),
        }  # fmt: skip
        rows.append(row)
        megabytes = ("slot_bytes", "kept_bytes", "bytes_sent_backward")
        table.rows.append([
            name, f"{row['rows_a_head']:g}", f"{row['bytes_sent'] / 1e6:.2f}", str(row["messages"]),
            *(f"{row[key] / 1e6:.2f}" for key in megabytes), f"{time.total_us / 1e3:.2f}",
            f"{row['exposed_us'] / 1e3:.3f}",
        ])  # fmt: skip
    return table, rows


def _rows_received(plan: Plan) -> float:
    """Return the number of received rows times heads. A row is K and V; a row of queries or outputs counts half."""
    received = [plan.buffers[recv.buffer] for step in plan.steps for recv in step.recvs]
    return sum(size(recv.content) * (1 if recv.kind is Kind.KV else 0.5) for recv in received)


def on_rank(ring: Ring, **spec: Any) -> dict[str, Any]:
    """Run this rank: the gate, then dilated and full attention in turns, forward and backward.

    Return the laps, the pairs and the memory.
    """
    options, tokens = DilatedOptions(**{k: v for k, v in spec.items() if k != "tokens"}), spec["tokens"]
    say: Callable[[str], None] = (lambda line: print(line, flush=True)) if ring.rank == 0 else (lambda line: None)
    branches = geometric(options.base_length, length=options.length_tokens)
    _gate(ring, options)
    say("gate: green")
    record: dict[str, Any] = {"laps": {}, "pairs": {}}
    baselines = ["dilated", "full"] if tokens == options.length_tokens else ["dilated"]
    if tokens != options.length_tokens:
        branches = geometric(options.base_length, length=tokens)
    for turn in range(options.repeats):
        for name in baselines if turn % 2 == 0 else reversed(baselines):
            call = _Call(ring, options, tokens, branches if name == "dilated" else None)
            record["pairs"][name] = call.pairs()
            for part in ("forward", "backward"):
                say(f"{tokens} tokens, round {turn + 1} of {options.repeats}: {name}, {part}")
                laps: list[Lap] = record["laps"].setdefault(name, {}).setdefault(part, [])
                laps.append(lap(ring.barrier, getattr(call, part)))
            record.setdefault("slot_bytes", {})[name] = ring.memory_info()["pool_high_water_bytes"]
    record["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return record


def measure_memory(ring: Ring, **spec: Any) -> dict[str, int]:
    """Measure one rank's memory for dilated attention over `tokens_per_rank` tokens per rank, forward and backward."""
    options = DilatedOptions(**spec)
    _gate(ring, options)
    tokens = options.tokens_per_rank * ring.world_size
    gc.collect()
    reset_peak()
    before = status_bytes("VmRSS")
    call = _Call(ring, options, tokens, geometric(options.base_length, length=tokens))
    call.forward()
    call.backward()
    return {
        "peak_growth_bytes": status_bytes("VmHWM") - before,
        "slot_bytes": ring.memory_info()["pool_high_water_bytes"],
    }


class _Call:
    """This rank's part of one attention call on random inputs."""

    def __init__(self, ring: Ring, options: DilatedOptions, tokens: int, branches: Branches | None) -> None:
        self.ring, self.options, self.branches = ring, options, branches
        self.seq = ring.sequence(tokens, layout="contiguous")
        shape = 1, self.seq.counts[ring.rank], options.heads, options.head_dim
        generator = torch.Generator().manual_seed(ring.rank)
        self.q, self.k, self.v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
        self.dout = torch.randn(shape, generator=generator)

    def forward(self) -> None:
        """Run dilated attention over the branches, or full attention over a ring."""
        if self.branches is None:
            self.out: Tensor = self.ring.attention(self.q, self.k, self.v, self.seq, schedule="ring")
        else:
            self.out = self.ring.dilated_attention(self.q, self.k, self.v, self.seq, **self.branches._asdict())

    def backward(self) -> None:
        """Run the backward pass of the last `forward`."""
        torch.autograd.grad(self.out, (self.q, self.k, self.v), self.dout)

    def pairs(self) -> int:
        """Return the number of (query, key) pairs times heads that this rank computes."""
        tokens, heads = self.seq.length, self.options.heads
        pairs = Banded() if self.branches is None else Dilated(*self.branches)
        mask = pairs.mask(tokens, tokens, None, None, heads, heads)
        dim = self.options.head_dim
        problem = Problem(self.seq.layout, self.seq.layout, mask, 1, heads, heads, dim, dim, "float32")
        return sum(table.area() for table in tiles_of(problem, self.ring.rank).values())


def _gate(ring: Ring, options: DilatedOptions) -> None:
    """Raise `GateError` unless dilated attention at a small size is exact on these ranks, forward and backward."""
    tokens = GATE_TOKENS_PER_RANK * ring.world_size
    branches: dict[str, Any] = {"segment_lengths": [64, tokens // 2 + 1, tokens], "dilation_rates": [1, 3, 4]}
    inputs = random_inputs(tokens, options.heads, options.heads, options.head_dim, torch.float32)
    seq = ring.sequence(tokens, layout="contiguous")
    local = [seq.shard(x).clone().requires_grad_() for x in inputs[:3]]
    out = ring.dilated_attention(local[0], local[1], local[2], seq, **branches)
    results = [out.detach(), *torch.autograd.grad(out, local, seq.shard(inputs.dout))]
    whole = [x.double().requires_grad_() for x in inputs[:3]]
    dense, _ = dense_dilated_attention(*whole, **branches)
    reference = [dense.detach(), *torch.autograd.grad(dense, whole, inputs.dout.double())]
    error = max(float((x - seq.shard(y)).abs().max()) for x, y in zip(results, reference, strict=True))
    if not error <= BOUND[torch.float32]:
        raise GateError(f"rank {ring.rank}: dilated attention is off by {error:.1e}: nothing is timed")


def compare_times(options: DilatedOptions, by_ranks: dict[int, list[Any]]) -> Table:
    """Return a table that compares ratios of measured times with ratios of FLOPs."""
    table = Table(
        f"Measured: {options.length_tokens} tokens, {options.heads} heads of {options.head_dim}, float32, one thread a "
        f"process, {options.repeats} rounds",
        ["ranks", "pass", "dilated, s", "full ring, s", "times", "FLOPs", "times over FLOPs", "MiB of slots", "full"],
        notes=[f"times, FLOPs: full over dilated. The bar: dilated takes at most {BAR} times its share of FLOPs."],
    )
    for ranks, by_rank in by_ranks.items():
        pairs = {name: max(rank["pairs"][name] for rank in by_rank) for name in ("dilated", "full")}
        for part in ("forward", "backward"):
            by = {name: samples([rank["laps"][name][part] for rank in by_rank]) for name in pairs}
            times, flops = wall(by["full"]) / wall(by["dilated"]), pairs["full"] / pairs["dilated"]
            table.rows.append([
                str(ranks), part, spread([s.wall_s for s in by["dilated"]]), spread([s.wall_s for s in by["full"]]),
                f"{times:.2f}", f"{flops:.2f}", f"{flops / times:.2f}",
                *(mib(by_rank[0]["slot_bytes"][name]) for name in ("dilated", "full")),
            ])  # fmt: skip
    return table


def memory(options: DilatedOptions, weights: dict[int, list[dict[str, int]]]) -> Table:
    """Return a table with the peak memory of the rank that needs most."""
    table = Table(
        f"Memory: {options.tokens_per_rank} tokens a rank, {options.heads} heads of {options.head_dim}, float32, "
        "forward and backward",
        ["ranks", "tokens", "branches", "MiB of slots", "MiB of growth, largest rank"],
        notes=["Growth of the peak resident size from before the inputs exist."],
    )
    for ranks, by_rank in weights.items():
        tokens = ranks * options.tokens_per_rank
        table.rows.append([
            str(ranks), str(tokens), str(len(geometric(options.base_length, length=tokens).segment_lengths)),
            *(mib(max(rank[key] for rank in by_rank)) for key in ("slot_bytes", "peak_growth_bytes")),
        ])  # fmt: skip
    return table


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Plan, measure, print the tables, save the record and return it."""
    options = parse(DilatedOptions(), arguments)
    table, plans = planned()
    tables: list[Table] = [table]
    by_ranks: dict[int, list[Any]] = {}
    weights: dict[int, list[dict[str, int]]] = {}
    long: list[Any] | None = None
    with progress("dilated") as say:
        for ranks in options.ranks:
            by_ranks[ranks] = run_in_processes(ranks, PROGRAM, asdict(options) | {"tokens": options.length_tokens}, say)
        tables.append(compare_times(options, by_ranks))
        for ranks in options.memory_ranks:
            weights[ranks] = run_in_processes(ranks, MEMORY_PROGRAM, asdict(options), say)
        tables.append(memory(options, weights))
        if options.long_tokens:
            long = run_in_processes(2, PROGRAM, asdict(options) | {"tokens": options.long_tokens, "repeats": 1}, say)
            seconds = [max(rank["laps"]["dilated"][part][0][0] for rank in long) for part in ("forward", "backward")]
            gib = sum(rank["peak_bytes"] for rank in long) / 2**30
            tables.append(Table(
                f"{options.long_tokens} tokens on two processes", ["forward, s", "backward, s", "GiB of both"],
                [[*(f"{pass_s:.1f}" for pass_s in seconds), f"{gib:.2f}"]],
            ))  # fmt: skip
    data = {"planned": plans, "by_ranks": by_ranks, "memory": weights, "long": long}
    finish("dilated", options, tables, data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])

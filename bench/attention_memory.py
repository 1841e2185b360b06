"""The attention pass of one rank: bytes predicted from its plans beside bytes measured, for drawn configurations.

`python -m ringattn.bench.attention_memory`. Measured are the storages of the rank's thread, with the scratch of the
kernels (`ringattn.bench.storages`), forward and backward; the pool's high water beside the placement's figure; and how
much the resident size of the process grew, which holds Python's and the allocator's own pages too.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ringattn.attention import call_of
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import RESULTS, Say, Table, finish, progress
from ringattn.bench.storage_meter import StorageMeter
from ringattn.core.dilation import Dilated
from ringattn.core.problem import ITEM_BYTES, Problem
from ringattn.engine.aten import kernel_bytes
from ringattn.observe.memory import reset_peak, status_bytes
from ringattn.options import AttentionOptions
from ringattn.planner.plan import ALIGNMENT_BYTES, OwnSums, Plan
from ringattn.ring import Ring

PROGRAM = "ringattn.bench.attention_memory:on_rank"
BRANCHES = {"segment_lengths": (256, 1024), "dilation_rates": (1, 4)}
MASKS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (200, 0)}, "dilated": BRANCHES,
}  # fmt: skip


@dataclass(frozen=True)
class AttentionMemoryOptions:
    """`configurations` are drawn from `seed`."""

    configurations: int = 20
    seed: int = 6
    results: str = RESULTS


@dataclass(frozen=True)
class Drawn:
    """One configuration. `window`: 200 tokens to the left; `dilated`: segments of 256 and 1024, rates 1 and 4."""

    ranks: int
    length_tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    mask: str
    layout: str
    schedule: str
    engine: str

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return (
            f"{self.length_tokens} tokens, batch {self.batch}, {self.heads}:{self.kv_heads} of {dims}, {self.dtype}, "
            f"{self.mask}, {self.layout}, {self.schedule}, {self.engine}"
        )


def drawn(count: int, seed: int) -> list[Drawn]:
    """`count` configurations, the same for the same seed."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        kv_heads, head_dim = draw.choice((1, 2, 4)), draw.choice((32, 64))
        found.append(Drawn(
            ranks=draw.choice((1, 2, 3, 4)), length_tokens=draw.randrange(600, 2000), batch=draw.choice((1, 1, 2)),
            heads=kv_heads * draw.choice((1, 2)), kv_heads=kv_heads, head_dim=head_dim,
            value_dim=draw.choice((head_dim, head_dim, 48)), dtype=draw.choice(("float32", "bfloat16", "float64")),
            mask=draw.choice(list(MASKS)), layout=draw.choice(("contiguous", "zigzag", "striped")),
            schedule=draw.choice(("auto", "ring", "all_gather", "direct")),
            engine=draw.choice(("aten", "aten", "plain")),
        ))  # fmt: skip
    return [replace(one, layout="contiguous") if one.mask == "dilated" else one for one in found]


def on_rank(ring: Ring, **facts: Any) -> dict[str, int]:
    """Bytes of one configuration on this rank, predicted and measured, forward and backward."""
    one, options = Drawn(**facts), MASKS[facts["mask"]]
    ring.engine = one.engine
    seq = ring.sequence(one.length_tokens, layout=one.layout)
    tokens, dtype = seq.counts[ring.rank], getattr(torch, one.dtype)
    dilated = one.mask == "dilated"
    branches = Dilated(**options) if dilated else None
    settings = AttentionOptions(schedule=one.schedule, **({} if dilated else options))
    sizes = one.batch, one.heads, one.kv_heads, one.head_dim, one.value_dim
    call = call_of(ring, seq, None, sizes, dtype, torch.device("cpu"), settings, branches)
    there, back = (ring.executor_of(call, backward) for backward in (False, True))
    shapes = ((one.heads, one.head_dim), (one.kv_heads, one.head_dim), (one.kv_heads, one.value_dim))
    q, k, v = (torch.randn(one.batch, tokens, *shape, dtype=dtype).requires_grad_() for shape in shapes)
    dout = torch.randn(one.batch, tokens, one.heads, one.value_dim, dtype=dtype)
    attend = ring.dilated_attention if dilated else ring.attention
    gc.collect()
    reset_peak()
    resident = status_bytes("VmRSS")
    with StorageMeter(attention_scratch_bytes) as meter:
        out = attend(q, k, v, seq, schedule=one.schedule, **options)
        forward_bytes, forward_high = meter.peak_bytes, ring.pool.high_water_bytes
        meter.restart()
        torch.autograd.grad(out, (q, k, v), dout)
    return {
        "forward_predicted_bytes": forward_memory(there.plan, there.workspace_bytes()).peak_bytes,
        "forward_bytes": forward_bytes,
        "backward_predicted_bytes": backward_memory(there.plan, back.plan, back.workspace_bytes()).peak_bytes,
        "backward_bytes": meter.peak_bytes,
        "forward_slots_bytes": there.plan.arena_bytes,
        "forward_high_water_bytes": forward_high,
        "slots_bytes": max(there.plan.arena_bytes, back.plan.arena_bytes),
        "high_water_bytes": ring.pool.high_water_bytes,
        "resident_growth_bytes": status_bytes("VmHWM") - resident,
    }


# --- prediction from plans ---

Parts = dict[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True)
class AttentionMemory:
    """What one rank holds at the moment of a pass when it holds most. Bytes."""

    parts: Parts

    @property
    def peak_bytes(self) -> int:
        """All together."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """One line for each part, the largest first, in MiB."""
        lines = sorted(self.parts.items(), key=lambda part: -part[1])
        return "\n".join(f"{nbytes / 2**20:10.3f} MiB  {name}" for name, nbytes in lines if nbytes)


def slots_bytes(plan: Plan) -> int:
    """Bytes of the pool for this plan alone: its arena, and what aligning its start takes."""
    return plan.arena_bytes + ALIGNMENT_BYTES if plan.arena_bytes else 0


def forward_memory(plan: Plan, workspace_bytes: int, slots: int | None = None) -> AttentionMemory:
    """Of `ringattn.attention.AttentionFunction.forward`. `workspace_bytes`: of the plan's greediest piece of work.

    `slots`: bytes of a pool that is larger already.
    """
    own = _Own(plan.problem, plan.rank)
    standing = {"out accumulator": own.out, "lse": own.lse, "slots": max(slots_bytes(plan), slots or 0)}
    handed = {"kept for backward": plan.kept_bytes, "out": own.rounded(own.out)}
    return _greatest(standing | {"workspace": workspace_bytes}, standing | handed)


def backward_memory(forward: Plan, backward: Plan, workspace_bytes: int, slots: int | None = None) -> AttentionMemory:
    """Of `ringattn.attention.AttentionFunction.backward`, with what its forward left: out, lse, kept K/V, slots."""
    own = _Own(backward.problem, backward.rank)
    pool = max(slots_bytes(forward), slots or 0)
    left = {"out": own.rounded(own.out) or own.out, "lse": own.lse, "kept for backward": forward.kept_bytes}
    # delta: the product of dout and out, and where they are half also both in the accumulator dtype, or the sums.
    product = 3 * own.out if own.rounded(own.out) else own.out + own.lse
    # Without accumulators of dK and dV there are their results from the start.
    none = backward.own_sums is OwnSums.NONE
    sums = {"dk accumulator": own.dk, "dv accumulator": own.dv}
    if none:
        sums = {"dk": own.rounded(own.dk) or own.dk, "dv": own.rounded(own.dv) or own.dv}
    sums |= {"delta": own.lse, "dq accumulator": own.dq, "slots": max(slots_bytes(backward), pool)}
    standing = left | sums
    moments = [left | {"slots": pool, "delta": product}, standing | {"workspace": workspace_bytes}]
    # Converted one after the other, each while its accumulator is still there.
    for name in ("dq", "dk", "dv") if own.item != own.half else ():
        if f"{name} accumulator" in standing:
            standing = standing | {name: own.rounded(standing[f"{name} accumulator"])}
            moments.append(standing)
            standing = standing | {f"{name} accumulator": 0}
    return _greatest(*moments)


class _Own:
    """Bytes of the rank's own tensors in the accumulator dtype."""

    def __init__(self, problem: Problem, rank: int) -> None:
        self.item, self.half = (ITEM_BYTES[dtype] for dtype in (problem.accumulator_dtype, problem.dtype))
        rows = problem.q_layout.counts[rank] * problem.batch * problem.q_heads * self.item
        keys = problem.kv_layout.counts[rank] * problem.batch * problem.kv_heads * self.item
        self.out, self.lse, self.dq = rows * problem.value_dim, rows, rows * problem.head_dim
        self.dk, self.dv = keys * problem.head_dim, keys * problem.value_dim

    def rounded(self, nbytes: int) -> int:
        """Bytes of a copy in the inputs' dtype; 0 where that is the accumulators' and there is no copy."""
        return 0 if self.item == self.half else nbytes * self.half // self.item


def _greatest(*moments: Parts) -> AttentionMemory:
    return max((AttentionMemory(parts) for parts in moments), key=lambda one: one.peak_bytes)


# --- comparison ---


def greatest_deviation(found: Sequence[dict[str, int]]) -> float:
    """Of predictions from what was measured, as a share, over ranks and both passes."""
    return max(
        abs(rank[f"{name}_predicted_bytes"] / rank[f"{name}_bytes"] - 1)
        for rank in found
        for name in ("forward", "backward")
    )


def table(records: Sequence[dict[str, Any]]) -> Table:
    """One row for each configuration: of the rank with the highest peak backward."""
    made = Table(
        "Attention pass of one rank, MiB: predicted / measured, greatest deviation of all ranks",
        ("ranks", "configuration", "forward", "backward", "off by", "staging planned / used", "resident growth"),
        notes=["- of the rank that holds most; q, k, v and dout, which are the caller's, are not counted."],
    )
    for record in records:
        most = max(record["ranks"], key=lambda rank: rank["backward_bytes"])
        pairs = [
            " / ".join(f"{most[key] / 2**20:.3f}" for key in keys)
            for keys in (("forward_predicted_bytes", "forward_bytes"), ("backward_predicted_bytes", "backward_bytes"),
                         ("slots_bytes", "high_water_bytes"))
        ]  # fmt: skip
        off = f"{100 * greatest_deviation(record['ranks']):.2f} %"
        resident = f"{most['resident_growth_bytes'] / 2**20:.1f}"
        made.rows.append((str(record["drawn"]["ranks"]), record["name"], pairs[0], pairs[1], off, pairs[2], resident))
    return made


def weigh(options: AttentionMemoryOptions, say: Say) -> list[dict[str, Any]]:
    """One record for each configuration, by fresh processes."""
    records = []
    for one in drawn(options.configurations, options.seed):
        say(f"{one.ranks} ranks: {one}")
        records.append({"drawn": asdict(one), "name": str(one),
                        "ranks": run_in_processes(one.ranks, PROGRAM, asdict(one), say)})  # fmt: skip
    return records


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run, print, keep; returns what is kept."""
    options = parse(AttentionMemoryOptions(), words)
    with progress("attention_memory") as say:
        data = {"configurations": weigh(options, say)}
    finish("attention_memory", options, [table(data["configurations"])], data, options.results)
    return data


# --- scratch of kernels -----------------------------------------------------------------------------------------------


def attention_scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """What torch's CPU flash kernels allocate inside a call (see `ringattn.engine.aten`); 0 for other operators."""
    aten = torch.ops.aten
    if func == aten._scaled_dot_product_flash_attention_for_cpu.default:
        q, k = args[:2]
        return kernel_bytes(q.shape[2], k.shape[2], q.shape[3], q.element_size(), backward=False)
    if func == aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        dout, q, k = args[:3]
        copied = 0 if dout.transpose(1, 2).is_contiguous() else dout.numel() * dout.element_size()
        return copied + kernel_bytes(q.shape[2], k.shape[2], q.shape[3], q.element_size(), backward=True)
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])

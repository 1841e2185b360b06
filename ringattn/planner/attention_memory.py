"""How many bytes one rank holds at the most while it attends, forward and backward, from its plans alone.

Guarantees: of tensors what the pass itself makes, each named; the slots' figure is the plan's own, and the
workspace is what `Executor.workspace_bytes` says. The caller's q, k, v and dout are not counted.
Not covered: torch, engines that carry in another dtype than the accumulators', a loss that uses lse, eight-bit wires
(whose quantizing allocates on a CPU).
"""

from __future__ import annotations

from dataclasses import dataclass

from ringattn.core.problem import ITEM_BYTES, Problem
from ringattn.planner.plan import ALIGNMENT_BYTES, OwnSums, Plan

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

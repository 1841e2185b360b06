"""The memory that one rank needs for a call: bytes by part at the peak of each pass, from the plans of the call.

Guarantees: every tensor that a call allocates is counted, and none twice. Not covered: gradients of sinks, and memory
that a transport allocates when the ring opens. A message of a transport may also round the arena up to its own pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ringattn.core.problem import ITEM_BYTES, Problem
from ringattn.planner.plan import ALIGNMENT_BYTES, OwnSums, Plan

Parts = Mapping[str, int]
"""Bytes by purpose."""


@dataclass(frozen=True)
class PassMemory:
    """The memory of one rank at the peak of a pass.

    Attributes:
        parts: The bytes that the call has allocated by then, by purpose. In backward, they include what the forward
            pass saved.
        inputs_bytes: The bytes of the caller's tensors that the pass reads: q, k and v; in backward also the gradient
            of out. They are not in `parts`.
    """

    parts: Parts
    inputs_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one call on every rank, without running it. Tuples are by rank; `print` shows a table.

    Attributes:
        forward: The peak of the forward pass.
        backward: The peak of the backward pass; empty if it was not requested.
        saved_bytes: The bytes that the call has allocated and keeps from forward to backward: out, lse and cached
            remote K/V. Autograd also keeps the caller's q, k and v.
        arena_bytes: The bytes of the ring's arena, which all calls share: that of the pass that needs more.
    """

    forward: tuple[PassMemory, ...]
    backward: tuple[PassMemory, ...]
    saved_bytes: tuple[int, ...]
    arena_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes that the call has allocated at any time, by rank."""
        if not self.backward:
            return tuple(memory.peak_bytes for memory in self.forward)
        pairs = zip(self.forward, self.backward, strict=True)
        return tuple(max(forward.peak_bytes, backward.peak_bytes) for forward, backward in pairs)

    def lines(self) -> list[str]:
        """Return a line for each pass: the rank that needs the most, and its parts, the largest first."""
        lines = []
        for name, by_rank in (("forward", self.forward), ("backward", self.backward)):
            if by_rank:
                rank = max(range(len(by_rank)), key=lambda index: by_rank[index].peak_bytes)
                memory = by_rank[rank]
                parts = sorted(memory.parts.items(), key=lambda part: -part[1])
                listed = ", ".join(f"{part} {_mib(nbytes)}" for part, nbytes in parts if nbytes)
                lines.append(
                    f"memory of {name}: rank {rank} needs the most, {_mib(memory.peak_bytes)} MiB: {listed}; "
                    f"its inputs are {_mib(memory.inputs_bytes)} MiB more"
                )
        return lines

    def __str__(self) -> str:
        """Return a table with a row for each rank, in MiB, and the lines of `lines`."""
        titles = "".join(f"{title:>12}" for title in ("forward", "saved", "backward", "arena"))
        rows = [f"{'rank':>6}{titles}   MiB, without the caller's tensors"]
        for rank, memory in enumerate(self.forward):
            backward = _mib(self.backward[rank].peak_bytes) if self.backward else "-"
            cells = _mib(memory.peak_bytes), _mib(self.saved_bytes[rank]), backward, _mib(self.arena_bytes[rank])
            rows.append(f"{rank:>6}" + "".join(f"{cell:>12}" for cell in cells))
        return "\n".join([*rows, *self.lines()])


def memory_plan(plans: Sequence[Sequence[Plan]], workspace_bytes: Sequence[Sequence[int]]) -> MemoryPlan:
    """Return the memory of a call from the plans of its passes: forward, and backward if gradients are needed.

    `plans`: for each pass, the plan of each rank. `workspace_bytes`: for each of them, the largest workspace of its
    operations.
    """
    forward, *backward = plans
    has_backward = bool(backward)
    return MemoryPlan(
        tuple(map(partial(forward_memory, keep=has_backward), forward, workspace_bytes[0])),
        tuple(map(backward_memory, forward, backward[0], workspace_bytes[1])) if backward else (),
        tuple(sum(_saved(plan).values()) if has_backward else 0 for plan in forward),
        tuple(max(map(arena_bytes, by_pass)) for by_pass in zip(*plans, strict=True)),
    )


def arena_bytes(plan: Plan) -> int:
    """Return the bytes that the pool needs for this plan: its arena, and the padding that aligns its start."""
    return plan.arena_bytes + ALIGNMENT_BYTES if plan.arena_bytes else 0


def forward_memory(plan: Plan, workspace_bytes: int, keep: bool = True) -> PassMemory:
    """Return the peak of `ringattn.attention.forward_pass`. `keep`: remote inputs are cached for backward.

    `workspace_bytes` is the largest workspace of any operation of the plan.
    """
    local = _LocalBytes(plan.problem, plan.rank)
    standing = {"out accumulator": local.out, "lse": local.lse, "arena": arena_bytes(plan)}
    results = {"cached remote K/V": plan.kept_bytes if keep else 0, "out": local.rounded(local.out)}
    return _largest(local.inputs, standing | {"workspace": workspace_bytes}, standing | results)


def backward_memory(forward: Plan, backward: Plan, workspace_bytes: int) -> PassMemory:
    """Return the peak of `ringattn.attention.backward_pass`, with what its forward pass saved.

    `workspace_bytes` is as in `forward_memory`.
    """
    local = _LocalBytes(backward.problem, backward.rank)
    saved, arena = _saved(forward), arena_bytes(forward)
    sums = _sums(backward) | {"arena": max(arena_bytes(backward), arena)}
    # delta is the product of dout and out; half precision is first converted to the accumulator dtype.
    product = 3 * local.out if local.rounded(local.out) else local.out + local.lse
    standing = saved | sums
    moments = [saved | {"arena": arena, "delta": product}, standing | {"workspace": workspace_bytes}]
    # The gradients are converted one after the other, each while its accumulator still exists.
    for name in ("dq", "dk", "dv") if local.item != local.half else ():
        if f"{name} accumulator" in standing:
            standing = standing | {name: local.rounded(standing[f"{name} accumulator"])}
            moments.append(standing)
            standing = standing | {f"{name} accumulator": 0}
    return _largest(local.inputs + local.grad, *moments)


def standing_bytes(plan: Plan, has_sums: bool) -> int:
    """Return the bytes that a running pass has allocated in addition to its arena and workspace.

    `has_sums`: its accumulators exist.
    """
    local = _LocalBytes(plan.problem, plan.rank)
    accumulators = sum(_sums(plan).values()) if plan.backward else local.out + local.lse
    return (sum(_saved(plan).values()) if plan.backward else 0) + (accumulators if has_sums else 0)


def _sums(backward: Plan) -> dict[str, int]:
    """Return the bytes of the accumulators of a backward pass, which exist from its first step on."""
    local = _LocalBytes(backward.problem, backward.rank)
    sums = {"dk accumulator": local.dk, "dv accumulator": local.dv}
    # Without accumulators of dK and dV, the results themselves exist from the start.
    if backward.own_sums is OwnSums.NONE:
        sums = {"dk": local.rounded(local.dk) or local.dk, "dv": local.rounded(local.dv) or local.dv}
    return sums | {"delta": local.lse, "dq accumulator": local.dq}


def _saved(plan: Plan) -> dict[str, int]:
    """Return the bytes that a forward pass has allocated and that its backward pass reads, from either plan."""
    local = _LocalBytes(plan.problem, plan.rank)
    return {"out": local.rounded(local.out) or local.out, "lse": local.lse, "cached remote K/V": plan.kept_bytes}


class _LocalBytes:
    """Bytes of the local tensors of one rank: of the caller's in their dtype, and of others in the accumulator's."""

    def __init__(self, problem: Problem, rank: int) -> None:
        self.item, self.half = (ITEM_BYTES[dtype] for dtype in (problem.accumulator_dtype, problem.dtype))
        rows = problem.q_layout.counts[rank] * problem.batch * problem.q_heads
        keys = problem.kv_layout.counts[rank] * problem.batch * problem.kv_heads
        self.out, self.lse, self.dq = (rows * dim * self.item for dim in (problem.value_dim, 1, problem.head_dim))
        self.dk, self.dv = (keys * dim * self.item for dim in (problem.head_dim, problem.value_dim))
        self.grad = rows * problem.value_dim * self.half
        self.inputs = (rows * problem.head_dim + keys * (problem.head_dim + problem.value_dim)) * self.half

    def rounded(self, nbytes: int) -> int:
        """Return the bytes of a tensor's copy in the inputs' dtype.

        `nbytes` is the size of the tensor in the accumulator dtype. If the two dtypes are equal, there is no copy, and
        the result is 0.
        """
        return 0 if self.item == self.half else nbytes * self.half // self.item


def _largest(inputs_bytes: int, *moments: Parts) -> PassMemory:
    return max((PassMemory(parts, inputs_bytes) for parts in moments), key=lambda memory: memory.peak_bytes)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.3f}"

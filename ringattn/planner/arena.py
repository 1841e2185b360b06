"""Offsets of buffers in the arena, and what a plan holds in each of its steps.

Double buffering is not a mechanism here but a result: a buffer lives from the step that fills it to the last step that
reads or sends it, both included. Buffers that live in a common step get disjoint bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringattn.core.problem import Problem
from ringattn.planner.plan import (
    ALIGNMENT_BYTES,
    Buffer,
    Plan,
    buffer_bytes,
    record_bytes,
)


def lay_out(problem: Problem, buffers: list[Buffer]) -> tuple[tuple[Buffer, ...], int]:
    """Offsets by first fit in order of birth, and the arena's bytes. What lies inside a buffer prolongs its life."""
    # Parts may be used outside the steps that name the whole: it lives as long as any of them.
    placed = list(buffers)
    for buffer in buffers:
        if buffer.inside is not None:
            whole = placed[buffer.inside.buffer]
            first, last = min(whole.first, buffer.first), max(whole.last, buffer.last)
            placed[buffer.inside.buffer] = whole._replace(first=first, last=last)
    # Only whole buffers are placed.
    roots = [index for index, buffer in enumerate(buffers) if buffer.inside is None]
    live: list[tuple[int, int, int]] = []  # (offset, end, last step)
    peak = 0
    # First fit by birth. Bytes run to the right, steps down:
    #    step 0   [ A ][ B ]
    #    step 1   [ C ][ B ]     A ended in step 0: C takes its place
    for index in sorted(roots, key=lambda i: placed[i].first):
        buffer = placed[index]
        # Rounded up, so that every offset is aligned.
        nbytes = _aligned_bytes(problem, buffer)
        # Both ends are included: a buffer whose last step is this one's first still holds its bytes.
        live = sorted(entry for entry in live if entry[2] >= buffer.first)
        offset = 0
        for start, end, _ in live:
            # The gap before this entry is large enough.
            if offset + nbytes <= start:
                break
            offset = max(offset, end)
        live.append((offset, offset + nbytes, buffer.last))
        placed[index] = buffer._replace(offset_bytes=offset)
        peak = max(peak, offset + nbytes)
    for index, buffer in enumerate(buffers):
        if buffer.inside is not None:
            before = buffer.inside.row * record_bytes(problem, buffer.dtype, buffer.kind)
            placed[index] = buffer._replace(offset_bytes=placed[buffer.inside.buffer].offset_bytes + before)
    return tuple(placed), peak


# --- live buffers, for reports and for errors ------------------------------------------------------------------------
# Counts each buffer that lives in a step once, rounded up to the alignment, as `lay_out` does.


def slot_bytes(plan: Plan, buffer: Buffer) -> int:
    """Return the bytes of the arena that a buffer takes."""
    return _aligned_bytes(plan.problem, buffer)


def _aligned_bytes(problem: Problem, buffer: Buffer) -> int:
    return -(-buffer_bytes(problem, buffer) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def live(plan: Plan, step: int) -> list[Buffer]:
    """The buffers that live in a plan step and lie in no other, in order of their place."""
    found = [one for one in plan.buffers if one.inside is None and one.first <= step <= one.last]
    return sorted(found, key=lambda one: one.offset_bytes)


def live_bytes(plan: Plan) -> int:
    """The most that lives in one step."""
    return max((sum(slot_bytes(plan, one) for one in live(plan, step)) for step in range(len(plan.steps))), default=0)


def fragmentation(plan: Plan) -> float:
    """The share of the arena that is a gap even in the fullest step; 0 for a placement that cannot be smaller."""
    return 1 - live_bytes(plan) / plan.arena_bytes if plan.arena_bytes else 0.0


def placements(plans: Sequence[Plan]) -> dict[str, int]:
    """Counts and bytes of a ring's cached plans, forward and backward apart.

    `slots` and `pool_gap_bytes`: of the largest arena, its buffers and what is a gap even in its fullest step.
    `kept_bytes`: the most that one forward pass keeps of others' tensors for its backward.
    """
    largest = max(plans, key=lambda plan: plan.arena_bytes, default=None)
    return {
        "plans": len(plans),
        "slots": 0 if largest is None else sum(one.inside is None for one in largest.buffers),
        "pool_gap_bytes": 0 if largest is None else largest.arena_bytes - live_bytes(largest),
        "kept_bytes": max((plan.kept_bytes for plan in plans), default=0),
    }


def account(plan: Plan, step: int | None, workspace_bytes: int) -> str:
    """Lines that say what the pass needs and, in a `step` of the plan, which buffers live; None: before its first."""
    direction = "backward" if plan.backward else "forward"
    head = (
        f"{plan.name} {direction}: staging buffers {mib(plan.arena_bytes)}, kept for backward {mib(plan.kept_bytes)}, "
        f"the engine's workspace {mib(workspace_bytes)}"
    )
    if step is None:
        return f"{head}; its first step had not begun"
    lines = [
        f"  {mib(slot_bytes(plan, one)):>12}  {one.label} ({one.kind.name}, {one.dtype})" for one in live(plan, step)
    ]
    return "\n".join([f"{head}; live in step {plan.steps[step].number}:", *(lines or ["  no buffer"])])


def remedies(plan: Plan) -> list[str]:
    """What to change, the cheapest first; only what applies to this plan."""
    found = []
    problem = plan.problem
    if plan.name != "ring" and problem.world_size > 1:
        found.append(f"schedule='ring' holds two blocks at a time, where {plan.name} may hold all that comes")
    if plan.kept_bytes:
        found.append("schedule='ring' keeps nothing between forward and backward")
    if problem.world_size > 1 and problem.kv_wire_dtype is None and problem.dtype in ("float16", "bfloat16"):
        found.append("kv_wire_dtype='int8' halves the staging buffers of keys and values that travel")
    if problem.batch > 1:
        found.append(f"a smaller batch: all figures are proportional to it, now {problem.batch}")
    found.append(f"more ranks: now {problem.world_size}, {problem.q_layout.counts[plan.rank]} tokens on this one")
    return found


def mib(nbytes: int) -> str:
    """Bytes as MiB."""
    return f"{nbytes / 2**20:.3f} MiB"

"""What to change if memory runs out in a call: each change is planned, with the bytes that this rank then needs.

Guarantees: a line says "fits" only if the planned peak of the changed call, with its backward pass if it has a graph,
is within the memory that was free or held by the failed pass. The operation that failed may hold more, which is not
counted. Not covered: other ranks, and tensors outside of the call that grow with it, such as activations.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ringattn.core.layout import make_layout
from ringattn.errors import InputError, PlanError, UnsupportedError
from ringattn.planner.choose import choose_route, plan_once
from ringattn.planner.cluster import Cluster
from ringattn.planner.memory import memory_plan
from ringattn.planner.plan import mib
from ringattn.runtime.call import AttentionCall
from ringattn.runtime.executor import Executor

OF_LENGTH = {"contiguous", "zigzag", "striped"}
"""Layouts that the length and the number of ranks determine."""


def call_bytes(call: AttentionCall, rank: int) -> int:
    """Return the planned peak of a call on one rank, with its backward pass if it has a graph."""
    passes = (False, True) if call.graph else (False,)
    plans = [plan_once(call.problem, call.route, rank, backward) for backward in passes]
    workspaces = [Executor(plan, call.engine, call.softmax).workspace_bytes() for plan in plans]
    return memory_plan([[plan] for plan in plans], [[nbytes] for nbytes in workspaces]).peak_bytes[0]


def advice(call: AttentionCall, rank: int, budget_bytes: int, machines: Cluster) -> list[str]:
    """Return lines of changes, each in addition to the previous ones, until the call fits into `budget_bytes`.

    The last lines are alternatives: fewer tokens without other changes, rounding on the wire, and more ranks.
    """
    problem = call.problem
    more_ranks = f"more ranks: now {problem.world_size}, {problem.q_layout.counts[rank]} tokens on this one"
    if problem.latent_dims is not None:
        return [f"a smaller batch: now {problem.batch}", more_ranks]

    def fits(candidate: AttentionCall) -> bool:
        return call_bytes(candidate, rank) <= budget_bytes

    def line(name: str, candidate: AttentionCall) -> str:
        nbytes = call_bytes(candidate, rank)
        return f"{name}: takes {mib(nbytes)}, which {'fits' if nbytes <= budget_bytes else 'does not fit'}"

    needed = call_bytes(call, rank)
    lines = [
        f"the call takes {mib(needed)} on this rank by plan, and {mib(budget_bytes)} were free or held by this pass"
    ]
    if needed <= budget_bytes:
        return [*lines, "so gaps of the allocator or another process hold the rest; on a GPU, set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", more_ranks]  # fmt: skip
    changed = call
    for change in (_keeping_nothing, _on_ring, _with_smaller_batch):
        if not fits(changed) and (change_made := change(changed, machines, fits)) is not None:
            name, candidate = change_made
            if call_bytes(candidate, rank) < call_bytes(changed, rank):
                changed = candidate
                lines.append(line(name, changed))
    bases = [(call, "without other changes")]
    if changed is not call and not fits(changed):
        bases = [(changed, "in addition"), *bases]
    for base, how in bases:
        if (shorter := _longest(base, machines, fits)) is not None:
            lines.append(
                line(f"{shorter.problem.q_layout.length} instead of {problem.q_layout.length} tokens, {how}", shorter)
            )
    if problem.world_size > 1 and problem.kv_wire_dtype is None and problem.dtype in ("float16", "bfloat16"):
        rounded = replace(call, problem=replace(problem, kv_wire_dtype="int8"))
        lines.append(line("Ring(kv_wire_dtype='int8') alone, which rounds sent keys and values", rounded))
    return [*lines, more_ranks]


Fits = Callable[[AttentionCall], bool]
"""Return whether a call fits into the memory."""


def _keeping_nothing(call: AttentionCall, machines: Cluster, _: Fits) -> tuple[str, AttentionCall] | None:
    """Return the call of a ring without `keep_received`; None if it already is."""
    if not call.problem.keep_received:
        return None
    problem = replace(call.problem, keep_received=False)
    route = choose_route(problem, call.route.text(problem), machines)
    return "Ring(keep_received=False)", replace(call, problem=problem, route=route)


def _on_ring(call: AttentionCall, machines: Cluster, _: Fits) -> tuple[str, AttentionCall] | None:
    """Return the call with schedule "ring", which holds two blocks at a time; None if it already has it."""
    if call.route.name == "ring" or call.problem.world_size == 1:
        return None
    with suppress(InputError, UnsupportedError, PlanError):  # the ring cannot run this mask
        return "schedule='ring'", replace(call, route=choose_route(call.problem, "ring", machines))
    return None


def _with_smaller_batch(call: AttentionCall, _: Cluster, fits: Fits) -> tuple[str, AttentionCall] | None:
    """Return the call with the largest batch that fits, or with a batch of 1; None if it already has that."""
    whole = call.problem.batch
    if whole == 1:
        return None

    def of_batch(batch: int) -> AttentionCall:
        return replace(call, problem=replace(call.problem, batch=batch))

    batch = max(1, _largest(whole, lambda batch: fits(of_batch(batch))))
    return f"batch={batch} instead of {whole}", of_batch(batch)


def _longest(call: AttentionCall, machines: Cluster, fits: Fits) -> AttentionCall | None:
    """Return the same call over the longest sequence that fits, a multiple of twice the number of ranks.

    None if no length fits, or if the length does not determine the call: with documents, a mask or keys of a sequence.
    """
    problem = call.problem
    length, unit = problem.q_layout.length, 2 * problem.world_size
    if call.facts is None or problem.q_layout.name not in OF_LENGTH:
        return None
    facts: Any = call.facts
    _, _, _, options, dilated = facts
    schedule = call.route.text(problem)

    def of_length(tokens: int) -> AttentionCall:
        layout = make_layout(problem.q_layout.name, tokens, problem.world_size)
        mask = (dilated or options.pairs).mask(tokens, tokens, None, None, problem.q_heads, problem.kv_heads)
        shorter = replace(problem, q_layout=layout, kv_layout=layout, mask=mask)
        return replace(call, problem=shorter, route=choose_route(shorter, schedule, machines))

    if of_length(length).problem != problem:
        return None
    with suppress(InputError, UnsupportedError, PlanError):  # the schedule cannot run a shorter sequence
        units = _largest(-(-length // unit), lambda units: fits(of_length(units * unit)))
        return of_length(units * unit) if units else None
    return None


def _largest(limit: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number below `limit` for which `holds` is true; 0 if it holds for no number."""
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

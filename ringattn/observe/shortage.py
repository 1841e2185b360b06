"""Errors of a rank that found no memory, with the plan's account of what it held.

Guarantees: whatever torch or Python calls such an error, it becomes one `OutOfMemoryError`, with the first as its
cause.
"""

from __future__ import annotations

import torch

from ringattn.errors import OutOfMemoryError, TransportError
from ringattn.planner.account import account, mib, remedies
from ringattn.planner.plan import Plan

CPU_ALLOCATOR = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""How torch's CPU allocator says it, in a plain RuntimeError (c10/core/impl/alloc_cpu.cpp)."""
NCCL_ALLOCATOR = ("ncclMemAlloc", "out of memory")
"""The function of an `NcclError`, and CUDA's words in it, which NCCL passes on (NCCL 2.28, allocator.cc)."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there was no memory, and is not yet one of ours."""
    if isinstance(error, OutOfMemoryError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # The transport may quote the shortage of another rank, so the words alone do not tell.
    if isinstance(error, TransportError):
        function, words = NCCL_ALLOCATOR
        return getattr(error, "function", None) == function and words in str(error)
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_ALLOCATOR)


def told(error: BaseException, plan: Plan, step: int | None, workspace_bytes: int, pool_bytes: int) -> OutOfMemoryError:
    """The same error with what was live and what to change. `pool_bytes`: what the ring's pool holds now."""
    advice = "\n".join(f"  - {one}" for one in remedies(plan))
    first = (str(error) or repr(error)).splitlines()[0]
    return OutOfMemoryError(
        f"rank {plan.rank}: out of memory in an attention pass: {first}\n"
        f"{account(plan, step, workspace_bytes)}\nthe pool holds {mib(pool_bytes)}\nto change:\n{advice}"
    )

"""If a rank runs out of memory, every rank raises, and the error lists live buffers and remedies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringattn
from ringattn.engine.plain import PlainEngine
from ringattn.errors import OutOfMemoryError, RingError
from ringattn.observe.memory import is_shortage
from ringattn.planner.choose import plan_of
from ringattn.planner.plan import account, buffer_bytes, fragmentation, live, live_bytes, remedies, slot_bytes
from ringattn.ring import Ring
from ringattn.testing import run_ranks
from tests.face import RANKS, TOKENS, X
from tests.schedules import ALL_GATHER, RING
from tests.strategies import Case, covering, simple

IN_STEP, AT_BEGIN, GRAD = 1, 0, 2
FAILURES = {
    "python": MemoryError("no room"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: 12"),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
}


class ShortEngine(PlainEngine):
    """An engine that raises `error` on rank 1, in the call that `failing_call` (such as `AT_BEGIN`) selects."""

    def __init__(self, rank: int, failing_call: int, error: BaseException) -> None:
        super().__init__()
        self.fails = failing_call if rank == 1 else -1
        self.error, self.calls = error, 0

    def begin(self, *args: Any) -> Any:
        if self.fails == AT_BEGIN:
            raise self.error
        return super().begin(*args)

    def attend(self, *args: Any) -> None:
        self.calls += 1
        if self.fails == IN_STEP and self.calls == 2:
            raise self.error
        super().attend(*args)

    def attend_grad(self, *args: Any) -> None:
        if self.fails == GRAD:
            raise self.error
        super().attend_grad(*args)


def errors_of_ranks(failing_call: int, error: BaseException) -> list[tuple[BaseException, bool]]:
    """Run forward and backward with `ShortEngine`. Return each rank's error and whether its ring is closed then."""

    def body(ring: Ring) -> tuple[BaseException, bool]:
        ring.engine = ShortEngine(ring.rank, failing_call, error)
        seq = ring.sequence(TOKENS, layout="contiguous")
        q = seq.shard(X).requires_grad_()
        with pytest.raises(RingError) as caught:
            ring.attention(q, q, q, seq, schedule="ring").sum().backward()
        with pytest.raises(ringattn.ClosedError):
            ring.barrier()
        return caught.value, True

    return run_ranks(RANKS, body)


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize(("failing_call", "text"), [
    (AT_BEGIN, "ring forward: staging buffers"), (IN_STEP, "live in step 1:"), (GRAD, "ring backward: staging buffers"),
])  # fmt: skip
def test_every_rank_raises_and_names_the_rank(failing_call: int, text: str, name: str) -> None:
    errors = [error for error, _ in errors_of_ranks(failing_call, FAILURES[name])]
    short = errors[1]
    assert isinstance(short, OutOfMemoryError) and isinstance(short, MemoryError)
    assert short.__cause__ is FAILURES[name]
    message = str(short)
    for part in ("rank 1", text, str(FAILURES[name]), "the pool holds", "more ranks: now 3"):
        assert part in message
    assert ("the pool holds 0.000 MiB" in message) == (failing_call == AT_BEGIN)
    assert all("rank 1" in str(error) for error in (errors[0], errors[2]))


def test_the_account_names_the_live_buffers() -> None:
    message = str(errors_of_ranks(IN_STEP, MemoryError("x"))[1][0])
    plan = plan_of(simple("contiguous", TOKENS, RANKS, heads=2).problem, RING, 1, False)
    labels = [buffer.label for buffer in live(plan, 1)]
    assert labels and all(label in message for label in labels)


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("memory is short"), OutOfMemoryError("told already")])
def test_other_errors_are_not_changed(error: Exception) -> None:
    assert not is_shortage(error)
    assert _error_of(error) is error


def _error_of(error: Exception) -> BaseException:
    with Ring(engine=ShortEngine(1, AT_BEGIN, error)) as ring:
        seq, q = ring.sequence(4), torch.randn(1, 4, 1, 8)
        with pytest.raises(type(error)) as caught:
            ring.attention(q, q, q, seq)
    return caught.value


def test_a_pool_that_cannot_grow_is_reported() -> None:
    def refuse(ring: Ring) -> Callable[[int], Tensor]:
        def allocate(nbytes: int) -> Tensor:
            raise MemoryError(f"no {nbytes} bytes")

        return allocate

    def body(ring: Ring) -> BaseException | None:
        seq = ring.sequence(TOKENS)
        if ring.rank == 0:
            ring.pool._allocate = refuse(ring)
        q = seq.shard(X)
        with pytest.raises(RingError) as caught:
            ring.attention(q, q, q, seq)
        return caught.value

    first, *others = run_ranks(RANKS, body)
    assert isinstance(first, OutOfMemoryError) and "had not begun" in str(first)
    assert "the pool holds 0.000 MiB" in str(first)
    assert len(others) == RANKS - 1


# --- the account -----------------------------------------------------------------------------------------------------


@covering
def test_live_bytes_are_a_bound_of_every_placement(case: Case) -> None:
    for rank in range(case.ranks):
        for route in (RING, ALL_GATHER):
            for backward in (False, True):
                plan = plan_of(case.problem, route, rank, backward)
                assert live_bytes(plan) <= plan.arena_bytes
                assert 0 <= fragmentation(plan) < 1
                for step in range(len(plan.steps)):
                    live_buffers = live(plan, step)
                    ends = [buffer.offset_bytes + slot_bytes(plan, buffer) for buffer in live_buffers]
                    starts = [*(buffer.offset_bytes for buffer in live_buffers), plan.arena_bytes][1:]
                    assert all(end <= start for end, start in zip(ends, starts, strict=True))
                    assert all(
                        0 <= slot_bytes(plan, buffer) - buffer_bytes(plan.problem, buffer) < 256
                        for buffer in live_buffers
                    )


def test_the_account_numbers_steps_as_the_schedule_does() -> None:
    """The error numbers steps as the schedule does, although a plan omits steps in which its rank does nothing."""
    plan = plan_of(simple("contiguous", 64, 4).problem, RING, 1, True)
    numbers = [step.number for step in plan.steps]
    assert numbers != list(range(len(numbers)))
    headings = [account(plan, place, 0).splitlines()[0].rpartition("; ")[2] for place in range(len(numbers))]
    assert headings == [f"live in step {number}:" for number in numbers]


def test_only_applicable_remedies_are_listed() -> None:
    problem = simple("contiguous", 64, 4).problem
    advice = remedies(plan_of(problem, ALL_GATHER, 0, False))
    assert "schedule='ring'" in advice[0] and any("kv_wire_dtype='int8'" in line for line in advice)
    assert advice[-1] == "more ranks: now 4, 16 tokens on this one"
    alone = plan_of(simple("contiguous", 64, 1).problem, RING, 0, False)
    assert remedies(alone) == ["more ranks: now 1, 64 tokens on this one"]
    assert "no buffer" in account(alone, 0, 0) and fragmentation(alone) == 0.0

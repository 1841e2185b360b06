"""If a rank runs out of memory, every rank raises, and the error lists live buffers and remedies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ringattn
from ringattn.attention import call_of
from ringattn.bench.attention_memory import attention_scratch_bytes
from ringattn.bench.storage_meter import StorageMeter
from ringattn.engine.plain import PlainEngine
from ringattn.errors import OutOfMemoryError, RingError
from ringattn.observe.memory import is_shortage, out_of_memory_error
from ringattn.options import AttentionOptions
from ringattn.planner.choose import plan_of
from ringattn.planner.plan import account, buffer_bytes, fragmentation, live, live_bytes, slot_bytes
from ringattn.ring import Ring
from ringattn.runtime.shortage import advice
from ringattn.sequence import Sequence
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


# --- advice ----------------------------------------------------------------------------------------------------------


class Limited(StorageMeter):
    """A meter that raises `MemoryError` if the tensors of this thread take more than `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(attention_scratch_bytes)
        self.limit_bytes = limit_bytes

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__torch_dispatch__(*args, **kwargs)
        peak_bytes = self.peak_bytes
        self.restart()
        if peak_bytes > self.limit_bytes:
            del result  # an allocator that refuses allocates nothing
            raise MemoryError(f"{peak_bytes} bytes are more than {self.limit_bytes}")
        return result


class Trial(NamedTuple):
    """A call: its size and its schedule, and whether the ring keeps what it receives."""

    tokens: int = 600
    batch: int = 3
    schedule: str = "all_gather"
    keep_received: bool = False


def message_of(trial: Trial, limit_share: float | int, patch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Run forward and backward of a call, with a limited rank 1. Return its error, or "", and the limit.

    `limit_share`: the limit in bytes, or as a share of the planned peak.
    """

    def body(ring: Ring) -> tuple[str, int]:
        ring.engine = "aten"
        seq = ring.sequence(trial.tokens, layout="contiguous")
        dout, q, k, v = (torch.randn(trial.batch, seq.counts[ring.rank], 4, 32).requires_grad_() for _ in range(4))
        options: dict[str, Any] = {"schedule": trial.schedule}
        planned = ring.memory_plan(seq, q=q, k=k, v=v, **options).peak_bytes[ring.rank]
        limit_bytes = limit_share if isinstance(limit_share, int) else int(limit_share * planned)
        meter = Limited(limit_bytes if ring.rank == 1 else 1 << 40)
        if ring.rank == 1:
            patch.setattr("ringattn.runtime.runtime.free_bytes", lambda device: limit_bytes - meter.live_bytes)
        try:
            with meter:
                out = ring.attention(q, k, v, seq, **options)
                torch.autograd.grad(out, (q, k, v), dout.detach())
        except OutOfMemoryError as error:
            return str(error), limit_bytes
        except RingError:
            return "", limit_bytes
        return "", limit_bytes

    return run_ranks(4, body, keep_received=trial.keep_received)[1]


def advised(message: str, pattern: str) -> int:
    """Return the number in the line of the message that matches `pattern` and says that the call then fits."""
    fitting = [line for line in message.splitlines() if line.endswith("which fits")]
    lines = [match for line in fitting if (match := re.search(pattern, line))]
    assert len(lines) == 1, message
    return int(lines[0][1])


@pytest.mark.parametrize("share", [
    pytest.param(0.35, id="in forward", marks=pytest.mark.slow), pytest.param(0.97, id="in backward"),
])  # fmt: skip
def test_a_call_that_follows_the_advice_fits(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names a schedule, a batch and a length. With each of them the call runs under the same limit."""
    trial = Trial()
    message, limit_bytes = message_of(trial, share, monkeypatch)
    assert ("all_gather forward" if share < 0.5 else "all_gather backward") in message
    tokens = advised(message, r"- (\d+) instead of 600 tokens, without other changes")
    assert message_of(trial._replace(tokens=tokens), limit_bytes, monkeypatch)[0] == ""
    if share > 0.5:
        assert re.search(r"schedule='ring': takes [\d.]+ MiB, which fits", message)
        followed = trial._replace(schedule="ring")
    else:
        # One step of tokens more does not fit.
        assert message_of(trial._replace(tokens=tokens + 8), limit_bytes, monkeypatch)[0]
        followed = trial._replace(schedule="ring", batch=advised(message, r"batch=(\d+) instead of 3"))
    assert message_of(followed, limit_bytes, monkeypatch)[0] == ""


def test_keeping_nothing_is_advised_first(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(keep_received=True)
    message, limit_bytes = message_of(trial, 0.97, monkeypatch)
    assert re.search(r"- Ring\(keep_received=False\): takes [\d.]+ MiB, which fits\n  - 5\d\d instead of 600", message)
    assert message_of(trial._replace(keep_received=False), limit_bytes, monkeypatch)[0] == ""


def advice_of(ring: Ring, seq: Sequence, batch: int, schedule: str, budget_bytes: int) -> str:
    """Return the advice for a causal call in bfloat16 that has `budget_bytes`, without the line about more ranks."""
    options = AttentionOptions(causal=True, schedule=schedule)
    call = call_of(ring, seq, None, (batch, 4, 4, 32, 32), torch.bfloat16, torch.device("cpu"), options)
    *lines, ranks = advice(replace(call, graph=True), ring.rank, budget_bytes, ring.machines)
    assert ranks.startswith(f"more ranks: now {ring.world_size}, ")
    return "\n".join(lines)


def test_only_applicable_changes_are_listed() -> None:
    def body(ring: Ring) -> tuple[str, ...]:
        packed = ring.sequence(96, layout="zigzag", cu_seqlens=[0, 40, 96])
        return tuple(advice_of(ring, *rest) for rest in (
            (ring.sequence(96), 1, "all_gather", 1 << 40), (ring.sequence(96), 1, "ring", 1),
            (packed, 2, "ring", 10**5), (ring.sequence(96), 1, "all_gather", 10**5),
        ))  # fmt: skip

    fits, nothing, packed, gather = run_ranks(2, body)[0]
    assert fits.endswith("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True") and "instead of" not in fits
    assert "instead of" not in nothing and "schedule=" not in nothing and "kv_wire_dtype='int8'" in nothing
    assert "batch=1 instead of 2" in packed and "tokens, " not in packed
    assert "instead of 96 tokens, without other changes" in gather
    with Ring() as ring:
        alone = advice_of(ring, ring.sequence(96), 1, "all_gather", 10**5)
    assert "schedule=" not in alone and "kv_wire_dtype" not in alone and "instead of 96 tokens" in alone


def test_the_error_is_raised_if_planning_changes_also_runs_out_of_memory() -> None:
    def advise() -> list[str]:
        raise MemoryError("again")

    plan = plan_of(simple("contiguous", 64, 4).problem, RING, 1, True)
    error = out_of_memory_error(MemoryError("first"), plan, None, 0, 0, advise)
    assert "first" in str(error) and "no memory was left to plan changes" in str(error)
    with pytest.raises(ZeroDivisionError):
        out_of_memory_error(MemoryError("first"), plan, None, 0, 0, lambda: [str(1 // 0)])

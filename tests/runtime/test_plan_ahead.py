"""Sequences that are planned in a thread: the same plans and results as without, made before the call that needs them.

Failures in the thread are raised by `result()`, or on all ranks by the call that is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib import import_module
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import masks
from ringattn.core.bounded_cache import BoundedCache
from ringattn.errors import ClosedError, InputError
from ringattn.planner import choose
from ringattn.planner.choose import choose_route
from ringattn.planner.plan import Plan
from ringattn.ring import Ring
from ringattn.runtime.executor import Executor
from ringattn.sequence import Sequence
from ringattn.testing import run_ranks
from ringattn.transport import untraced
from tests.strategies import simple

TOKENS, RANKS, STEPS = 60, 3, 3


def tree(seed: int) -> masks.Tree:
    """Draw a tree of `TOKENS` tokens."""
    draw = Random(seed)
    cuts = sorted(draw.sample(range(1, TOKENS), 4))
    lengths = [stop - start for start, stop in zip([0, *cuts], [*cuts, TOKENS], strict=True)]
    return masks.tree([-1, 0, 0, draw.choice((0, 2)), 0], lengths)


def step(ring: Ring, seq: Sequence, seed: int, **options: Any) -> list[Tensor]:
    """Return the outputs and gradients of a layer over the whole tree, and of another layer with a window."""
    values = torch.Generator().manual_seed(seed)
    x = torch.randn(1, TOKENS, 2, 8, generator=values, dtype=torch.float64)
    x = seq.shard(x).requires_grad_()
    out = ring.attention(x, x, x, seq, **options) + ring.attention(x, x, x, seq, window=(7, 0), **options)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


def executors(ring: Ring) -> list[Executor]:
    """Return the executors that the ring has cached."""
    return ring._executors.values()


def plans(ring: Ring) -> set[Plan]:
    """Return the plans that the ring has cached."""
    return {executor.plan for executor in executors(ring)}


def train(ring: Ring, ahead: bool) -> tuple[list[list[Tensor]], set[Plan], list[int]]:
    """Return the results of all steps, all plans, and the number of executors that each step made itself."""
    results, made = [], []

    def sequence(seed: int) -> Callable[[], Sequence[Ring]]:
        return lambda: ring.sequence(mask=tree(seed), layout="mask")

    future = ring.plan_ahead(sequence(0)) if ahead else None
    for seed in range(STEPS):
        seq = sequence(seed)() if future is None else future.result()
        before = len(executors(ring))
        # Plan the next but one only after this step, so that no thread makes executors while they are counted.
        results.append(step(ring, seq, seed, schedule="direct"))
        made.append(len(executors(ring)) - before)
        future = ring.plan_ahead(sequence(seed + 1)) if ahead else None
    if future is not None:
        future.result()
    else:
        step(ring, sequence(STEPS)(), STEPS, schedule="direct")
    return results, plans(ring), made


def test_plans_and_results_are_those_without_and_no_step_after_the_first_plans() -> None:
    alone, planned = (
        run_ranks(RANKS, lambda ring, ahead=ahead: train(ring, ahead), engine="plain") for ahead in (False, True)
    )
    for (results, plans_alone, made_alone), (same, plans_ahead, made) in zip(alone, planned, strict=True):
        for expected, got in zip(results, same, strict=True):
            assert all(map(torch.equal, expected, got))
        assert plans_ahead == plans_alone and len(plans_ahead) == 4 * (STEPS + 1)
        assert made_alone == [4] * STEPS and made == [4] + [0] * (STEPS - 1)


def test_a_sequence_is_planned_while_its_predecessor_is_in_use() -> None:
    def body(ring: Ring) -> tuple[int, list[Tensor]]:
        seqs = [ring.sequence(mask=tree(seed)) for seed in range(3)]
        ring.plan_ahead(lambda: seqs[0]).result()  # from here on, passes are remembered
        step(ring, seqs[0], 0)
        future = ring.plan_ahead(lambda: seqs[1])
        step(ring, seqs[0], 0)  # at the same time as the thread
        future.result()
        ring.plan_ahead(lambda: seqs[2]).result()  # no pass over a new sequence has run: the passes are the same
        before = len(executors(ring))
        results = [*step(ring, seqs[1], 1), *step(ring, seqs[2], 2)]
        return len(executors(ring)) - before, results

    def expected(ring: Ring) -> list[Tensor]:
        return [x for seed in (1, 2) for x in step(ring, ring.sequence(mask=tree(seed)), seed)]

    alone = run_ranks(RANKS, expected, engine="plain")
    for (made, results), want in zip(run_ranks(RANKS, body, engine="plain"), alone, strict=True):
        assert made == 0 and all(map(torch.equal, results, want))


def test_all_micro_batches_are_planned() -> None:
    def body(ring: Ring) -> list[int]:
        ring.plan_ahead(lambda: ring.sequence(TOKENS)).result()  # from here on, passes are remembered
        train_on(ring, [ring.sequence(TOKENS)])
        batch = ring.plan_ahead(lambda: ring.batch([30, 20, 40, 10], micro_batches=3)).result()
        before = len(executors(ring))
        train_on(ring, [micro.seq for micro in batch])
        train_on(ring, [ring.batch([30, 29, 41], micro_batches=1)[0].seq])
        return [len(batch), before, len(executors(ring)) - before]

    def train_on(ring: Ring, sequences: list[Sequence[Ring]]) -> None:
        for seq in sequences:
            x = torch.ones(1, seq.counts[ring.rank], 2, 8, requires_grad=True)
            ring.attention(x, x, x, seq, causal=True).sum().backward()

    # A forward and a backward pass of each sequence; those of the last one were not planned ahead.
    assert run_ranks(RANKS, body, engine="plain") == [[3, 8, 2]] * RANKS


def test_failures_in_the_thread_are_raised_by_result(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ring(engine="plain") as ring:

        def fails() -> Sequence[Ring]:
            raise ZeroDivisionError("no such batch")

        with pytest.raises(ZeroDivisionError, match="no such batch"):
            ring.plan_ahead(fails).result()
        with pytest.raises(InputError, match="a sequence or a batch of this ring, got 3"):
            ring.plan_ahead(lambda: 3).result()  # type: ignore[arg-type, return-value]
        with Ring(engine="plain") as other, pytest.raises(InputError, match="a batch of this ring"):
            ring.plan_ahead(lambda: other.sequence(TOKENS)).result()
        seq = ring.sequence(TOKENS)
        step(ring, seq, 0, causal=True)
        with monkeypatch.context() as patch:
            patch.setattr(Ring, "_new_executor", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                ring.plan_ahead(lambda: ring.sequence(TOKENS + 1)).result()
        assert ring.is_open  # and its next call is exact
        assert torch.equal(step(ring, seq, 0, causal=True)[0], step(ring, ring.sequence(TOKENS), 0, causal=True)[0])
    with pytest.raises(ClosedError):
        ring.plan_ahead(lambda: seq)


def test_what_plans_nothing_is_refused_and_no_plan_outlives_its_ring() -> None:
    released = threading.Event()
    with Ring(engine="plain") as ring:
        with pytest.raises(InputError, match="plan_ahead takes a function that returns a sequence, got Sequence"):
            ring.plan_ahead(ring.sequence(TOKENS))  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"a sequence or a batch of this ring, got \(\)"):
            ring.plan_ahead(lambda: ()).result()
        before = ring.plan_ahead(lambda: ring.sequence(TOKENS))
        assert before.result() == ring.sequence(TOKENS)
        seq = ring.sequence(TOKENS)

        def slow() -> Sequence[Ring]:
            assert released.wait(60)
            return seq

        during = ring.plan_ahead(slow)
    released.set()
    for future in (before, during):
        with pytest.raises(ClosedError, match="it was closed"):
            future.result()


def test_a_call_that_is_refused_for_the_next_sequence_is_refused_on_all_ranks_when_it_is_made() -> None:
    def body(ring: Ring) -> list[str]:
        ring.plan_ahead(lambda: ring.sequence(TOKENS)).result()
        step(ring, ring.sequence(TOKENS), 0, mask=tree(0))
        # A tree of other tokens: the recorded call does not fit this sequence.
        x = torch.zeros(1, TOKENS + 6, 2, 8, dtype=torch.float64)
        seq = ring.plan_ahead(lambda: ring.sequence(TOKENS + 6)).result()
        with pytest.raises(InputError) as caught:
            ring.attention(*[seq.shard(x)] * 3, seq, mask=tree(0))
        return [str(caught.value)]

    for rank, (message,) in enumerate(run_ranks(RANKS, body, engine="plain")):
        assert message.startswith(f"rank {rank}: ") and "66" in message


def in_thread(function: Callable[[], Any]) -> bool:
    """Return whether the function ends within seconds in another thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def test_a_look_up_does_not_wait_for_another_plan() -> None:
    problem = simple("zigzag", 16, 2, causal=True).problem
    choose_route(problem, "auto")
    with choose._alone:
        assert in_thread(lambda: choose_route(problem, "auto"))


def test_a_look_up_does_not_wait_until_another_entry_is_weighed() -> None:
    looked_up = []

    def weigh(key: int, value: int) -> int:
        looked_up.append(in_thread(lambda: cache.get(0, int)))
        return value

    cache: BoundedCache[int, int] = BoundedCache(weigh)
    for key in range(3):
        cache.get(key, lambda: 10)
    assert looked_up == [True, True] and cache.nbytes == 20


def test_a_sequence_is_made_while_another_thread_imports_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is being imported has few attributes. Once it has all, methods are disabled."""
    partial, complete = ModuleType("torch._dynamo"), import_module("torch._dynamo")
    monkeypatch.setattr(untraced, "_methods", [])

    class Answer:
        @untraced.untraced
        def number(self) -> int:
            return 42

    (method,) = untraced._methods
    monkeypatch.setitem(sys.modules, "torch._dynamo", partial)
    assert Answer().number() == 42 and method.disabled is None
    monkeypatch.setitem(sys.modules, "torch._dynamo", complete)
    assert Answer().number() == 42 and method.disabled is not None

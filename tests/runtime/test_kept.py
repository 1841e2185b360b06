"""If forward caches remote inputs for backward, the results are the same, and nothing cached is sent again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ringattn.core.problem import Problem
from ringattn.planner import choose
from ringattn.planner.choose import choose_route, plan_of
from ringattn.ring import Ring
from ringattn.schedule.ops import INPUTS, Kind
from ringattn.schedule.passes import Prologue
from ringattn.schedule.routes import Route, schedule_of
from ringattn.testing import run_ranks
from tests.core.dilated_reference import dilated_reference
from tests.planner.placement_verifier import verify_placement
from tests.schedule.schedule_verifier import verify
from tests.schedules import ALL_GATHER, NODE_GATHER, RING, ULYSSES
from tests.strategies import Case, covering, geometric, simple
from tests.test_dilated import MIXED, random_inputs
from tests.trial import Trial, greatest_error, reference, run

KEEPING = [
    pytest.param(replace(route, keeps=True), id=route.name, marks=pytest.mark.slow if route is NODE_GATHER else ())
    for route in (ALL_GATHER, ULYSSES, NODE_GATHER)
]
each_route = pytest.mark.parametrize("route", KEEPING)


@pytest.fixture
def always_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cache remote inputs of any size."""
    monkeypatch.setattr(choose, "KEEP_AT_MOST", 100.0)
    choose._chosen.cache_clear()
    yield
    choose._chosen.cache_clear()


@pytest.fixture
def force_prologue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Prologue], None]]:
    """Return a function that forces a prologue of backward on every schedule that transposes its forward pass."""

    def forced(prologue: Prologue) -> None:
        def chosen(problem: Problem, route: Route, cluster: object) -> Prologue:
            return prologue if route.transposed and not route.keeps and problem.world_size > 1 else "fetched"

        choose._chosen.cache_clear()
        monkeypatch.setattr(choose, "cheapest_prologue", chosen)

    yield forced
    choose._chosen.cache_clear()


@each_route
@covering
def test_backward_plans_start_with_the_buffers_that_forward_caches(route: Route, case: Case) -> None:
    whole = schedule_of(case.problem, route, True)
    verify(whole)
    again = [copy for step in whole.steps for copy in step.copies if copy.block.kind in INPUTS]
    assert all(copy.block.kind is Kind.GRAD_OUT for copy in again)
    for rank in range(case.ranks):
        forward, backward_plan = (plan_of(case.problem, route, rank, backward) for backward in (False, True))
        verify_placement(forward)
        verify_placement(backward_plan)
        cached, expected_buffers = ([plan.buffers[buffer] for buffer in plan.kept] for plan in (forward, backward_plan))
        assert [(buffer_.kind, buffer_.content, buffer_.dtype) for buffer_ in cached] == [
            (buffer_.kind, buffer_.content, buffer_.dtype) for buffer_ in expected_buffers
        ]
        received = {recv.buffer for step in forward.steps for recv in step.recvs}
        assert set(forward.kept) == {buffer_ for buffer_ in received if forward.buffers[buffer_].kind in INPUTS}


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("schedule", ["all_gather", "all_to_all"])
@pytest.mark.usefixtures("always_cache")
def test_cached_and_fetched_inputs_give_the_same_bits(
    schedule: str, wire: str | None, force_prologue: Callable[[Prologue], None]
) -> None:
    force_prologue("fetched")  # because split local work is summed in another order
    trial = Trial(causal=True, heads=(4, 2), lse=True)
    kept = run(trial, 4, "zigzag", schedule, torch.float32, poison=True, kv_wire_dtype=wire)
    choose._chosen.cache_clear()
    choose.KEEP_AT_MOST = 0.0
    fetched = run(trial, 4, "zigzag", schedule, torch.float32, poison=True, kv_wire_dtype=wire)
    assert all(torch.equal(kept[name], fetched[name]) for name in fetched)
    if wire is None:
        assert greatest_error(kept, reference(trial, torch.float32)) <= 1e-5


@pytest.mark.parametrize("schedule", ["all_gather", "all_to_all"])
@pytest.mark.usefixtures("always_cache")
def test_dilated_and_twice_through_one_graph(schedule: str) -> None:
    q, k, v, dout = random_inputs()

    def body(ring: Ring) -> list[Any]:
        seq = ring.sequence(q.shape[1], layout="contiguous")
        local = [seq.shard(x).clone().requires_grad_() for x in (q, k, v)]
        out = ring.dilated_attention(*local, seq, schedule=schedule, **MIXED)
        rounds = []
        for last in (False, True):
            ring.reset_counters()
            grads = torch.autograd.grad(out, local, seq.shard(dout), retain_graph=not last)
            rounds.append([seq.gather(x) for x in (out.detach(), *grads)])
        with torch.no_grad():
            ring.dilated_attention(*local, seq, schedule=schedule, **MIXED)
        return rounds

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _ = dilated_reference(*leaves, **MIXED)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for results in run_ranks(3, body, engine="plain", poison=True)[0]:
        for ours, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0, atol=1e-10)


def test_inputs_are_cached_if_they_are_small() -> None:
    problem = geometric()
    route = choose_route(problem, "auto")
    assert route == replace(ALL_GATHER, keeps=True)
    for rank in (0, 5):
        forward, backward_plan = (plan_of(problem, route, rank, backward) for backward in (False, True))
        assert forward.bytes_sent == forward.kept_bytes == 3072 * 12 * 2 * 64 * 2
        assert backward_plan.bytes_sent == 2 * forward.bytes_sent  # only dK and dV in float32
    assert choose_route(problem, "ring") == replace(RING, prologue="split")  # the ring overwrites received blocks
    assert not choose_route(simple("contiguous", 64, 2).problem, "all_gather").keeps  # a whole shard


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize(
    "schedule",
    [
        "ring",
        "direct",
        "all_gather",
        "bidirectional",
        "double_ring",
        pytest.param("node_gather", marks=pytest.mark.slow),
    ],
)
def test_every_prologue_of_backward_is_exact(
    schedule: str, wire: str | None, force_prologue: Callable[[Prologue], None]
) -> None:
    trial = Trial(causal=True, heads=(4, 2), lse=True)
    by_prologue = {}
    for prologue in ("fetched", "split", "kept"):
        force_prologue(prologue)
        by_prologue[prologue] = run(trial, 4, "zigzag", schedule, torch.float32, kv_wire_dtype=wire)
    assert all(torch.equal(by_prologue["kept"][name], by_prologue["fetched"][name]) for name in by_prologue["kept"])
    if wire is None:
        assert all(greatest_error(results, reference(trial, torch.float32)) <= 1e-5 for results in by_prologue.values())


@pytest.mark.parametrize("schedule", ["ring", "sub_rings", "double_ring"])
def test_calls_in_any_order_get_the_inputs_that_they_cached(
    schedule: str, force_prologue: Callable[[Prologue], None]
) -> None:
    """Each backward pass reads the inputs that its own forward pass has cached, in whatever order calls are made.

    Here two forward passes precede the backward passes, with a pass without gradients between them. Then a graph is
    used a second time, and a call is recomputed.
    """
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(2, 3, 1, 24, 4, 8, dtype=torch.float64, generator=generator)

    def body(ring: Ring) -> list[torch.Tensor]:
        seq = ring.sequence(24, layout="zigzag")

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return ring.attention(*qkv, seq, causal=True, schedule=schedule)

        first_leaves, second_leaves = ([seq.shard(x).clone().requires_grad_() for x in call] for call in inputs)
        first = attend(*first_leaves)
        with torch.no_grad():
            attend(*second_leaves)
        second = attend(*second_leaves)
        gradients = [*torch.autograd.grad((first**2).sum(), first_leaves, retain_graph=True)]
        gradients += torch.autograd.grad((second**2).sum(), second_leaves)
        gradients += torch.autograd.grad((first**2).sum(), first_leaves)
        again = checkpoint(attend, *second_leaves, use_reentrant=False)
        gradients += torch.autograd.grad((again**2).sum(), second_leaves)
        return [seq.gather(x) for x in gradients]

    def reference_gradients(call: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in call]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad((out**2).sum(), leaves)

    right = [*reference_gradients(inputs[0]), *reference_gradients(inputs[1])] * 2
    for prologue in ("split", "kept"):
        force_prologue(prologue)
        for ours, exact in zip(run_ranks(4, body, engine="plain", poison=True)[0], right, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0, atol=1e-10)

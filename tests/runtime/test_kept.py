"""If forward caches remote inputs for backward, the results are the same, and nothing cached is sent again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ringattn.core.problem import Problem
from ringattn.errors import InputError
from ringattn.planner import choose
from ringattn.planner.choose import choose_route, plan_of
from ringattn.ring import Ring
from ringattn.runtime.executor import Executor
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
def test_cached_and_fetched_inputs_give_the_same_bits(
    schedule: str, wire: str | None, force_prologue: Callable[[Prologue], None]
) -> None:
    force_prologue("fetched")  # because split local work is summed in another order
    trial = Trial(causal=True, heads=(4, 2), lse=True)
    kept, fetched = (
        run(trial, 4, "zigzag", schedule, torch.float32, kv_wire_dtype=wire, keep_received=keep)
        for keep in (True, False)
    )
    assert all(torch.equal(kept[name], fetched[name]) for name in fetched)
    if wire is None:
        assert greatest_error(kept, reference(trial, torch.float32)) <= 1e-5


@pytest.mark.parametrize("schedule", ["all_gather", "all_to_all"])
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
    for results in run_ranks(3, body, engine="plain", poison=True, keep_received=True)[0]:
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
    whole = simple("contiguous", 64, 2).problem
    assert not choose_route(whole, "all_gather").keeps  # a whole shard
    to_be_kept = replace(whole, keep_received=True)
    assert [choose_route(to_be_kept, name).keeps for name in ("all_gather", "ulysses", "ring")] == [True, True, False]


@pytest.mark.parametrize("how", ["plain", "checkpoint", "reentrant checkpoint"])
def test_a_checkpoint_keeps_received_rows_of_one_layer_at_a_time(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, run_pass, kept_by_rank = 3, Executor.run, dict[int, list[weakref.ref[torch.Tensor]]]()
    most: dict[int, int] = {}

    def alive(rank: int) -> int:
        return sum(kept() is not None for kept in kept_by_rank.get(rank, ()))

    def recorded(self: Executor, *arguments: Any) -> torch.Tensor | None:
        kept = run_pass(self, *arguments)
        if kept is not None:
            rank = self.plan.rank
            kept_by_rank.setdefault(rank, []).append(weakref.ref(kept))
            most[rank] = max(most.get(rank, 0), alive(rank))
        return kept

    def body(ring: Ring) -> tuple[int, int]:
        seq = ring.sequence(32)

        def layer(x: torch.Tensor) -> torch.Tensor:
            return ring.attention(x, x, x, seq, causal=True, schedule="all_gather")

        x = torch.ones(1, seq.layout.counts[ring.rank], 2, 8, requires_grad=True)
        for _ in range(layers):
            x = layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=how != "checkpoint")
        after_forward = alive(ring.rank)
        x.sum().backward()
        return after_forward, most.get(ring.rank, 0)

    monkeypatch.setattr(Executor, "run", recorded)
    expected = (layers, layers) if how == "plain" else (0, 1)
    assert run_ranks(2, body, keep_received=True) == [expected] * 2
    most.clear()
    assert run_ranks(2, body) == [(0, 0)] * 2


def test_what_is_not_kept_is_received_again() -> None:
    def body(ring: Ring) -> list[int]:
        seq, sent = ring.sequence(64), []
        q, k, v = (torch.ones(1, 32, 2, 8, requires_grad=True) for _ in range(3))
        out = ring.attention(q, k, v, seq, schedule="all_gather")
        for _ in range(2):
            sent.append(ring.counters()["bytes_sent"])
            out.sum().backward(retain_graph=True)
        return [*sent, ring.counters()["bytes_sent"]]

    shard = 2 * 32 * 2 * 8 * 4  # K and V; their gradients have the same size
    assert run_ranks(2, body, keep_received=True) == [[shard, 2 * shard, 3 * shard]] * 2
    assert run_ranks(2, body) == [[shard, 3 * shard, 5 * shard]] * 2


def test_keep_received_is_a_boolean() -> None:
    with pytest.raises(InputError, match="keep_received must be True or False, got 1"):
        Ring(keep_received=1)  # type: ignore[arg-type]


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

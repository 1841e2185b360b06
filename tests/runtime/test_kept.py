"""What came in a forward pass and is kept for its backward: the same results, and nothing of it is sent again."""

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
from tests.schedules import ALL_GATHER, RING, ULYSSES
from tests.strategies import Case, covering, geometric, simple
from tests.test_dilated import MIXED, random_inputs
from tests.trial import Trial, greatest_error, reference, run

KEEPING = [replace(route, keeps=True) for route in (ALL_GATHER, ULYSSES)]
each_route = pytest.mark.parametrize("route", KEEPING, ids=[route.name for route in KEEPING])


@pytest.fixture
def keeps_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However much comes, it is kept."""
    monkeypatch.setattr(choose, "KEEP_AT_MOST", 100.0)
    choose._chosen.cache_clear()
    yield
    choose._chosen.cache_clear()


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Prologue], None]]:
    """Have the backward of every transposed schedule begin so."""

    def forced(prologue: Prologue) -> None:
        def chosen(problem: Problem, route: Route, cluster: object) -> Prologue:
            return prologue if route.transposed and not route.keeps and problem.world_size > 1 else "fetched"

        choose._chosen.cache_clear()
        monkeypatch.setattr(choose, "cheapest_prologue", chosen)

    yield forced
    choose._chosen.cache_clear()


@each_route
@covering
def test_plans_hand_on_what_their_backward_begins_with(route: Route, case: Case) -> None:
    whole = schedule_of(case.problem, route, True)
    verify(whole)
    again = [copy for step in whole.steps for copy in step.copies if copy.block.kind in INPUTS]
    assert all(copy.block.kind is Kind.GRAD_OUT for copy in again)
    for rank in range(case.ranks):
        there, back = (plan_of(case.problem, route, rank, backward) for backward in (False, True))
        verify_placement(there)
        verify_placement(back)
        handed, begun = ([plan.buffers[buffer] for buffer in plan.kept] for plan in (there, back))
        assert [(one.kind, one.content, one.dtype) for one in handed] == [
            (one.kind, one.content, one.dtype) for one in begun
        ]
        received = {recv.buffer for step in there.steps for recv in step.recvs}
        assert set(there.kept) == {one for one in received if there.buffers[one].kind in INPUTS}


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("schedule", ["all_gather", "all_to_all"])
@pytest.mark.usefixtures("keeps_all")
def test_the_same_bits(schedule: str, wire: str | None, begin: Callable[[Prologue], None]) -> None:
    begin("fetched")  # own work that is split is summed in another order
    trial = Trial(causal=True, heads=(4, 2), lse=True)
    kept = run(trial, 4, "zigzag", schedule, torch.float32, poison=True, kv_wire_dtype=wire)
    choose._chosen.cache_clear()
    choose.KEEP_AT_MOST = 0.0
    fetched = run(trial, 4, "zigzag", schedule, torch.float32, poison=True, kv_wire_dtype=wire)
    assert all(torch.equal(kept[name], fetched[name]) for name in fetched)
    if wire is None:
        assert greatest_error(kept, reference(trial, torch.float32)) <= 1e-5


@pytest.mark.parametrize("schedule", ["all_gather", "all_to_all"])
@pytest.mark.usefixtures("keeps_all")
def test_dilated_and_twice_through_one_graph(schedule: str) -> None:
    q, k, v, dout = random_inputs()

    def body(ring: Ring) -> list[Any]:
        seq = ring.sequence(q.shape[1], layout="contiguous")
        mine = [seq.shard(x).clone().requires_grad_() for x in (q, k, v)]
        out = ring.dilated_attention(*mine, seq, schedule=schedule, **MIXED)
        found = []
        for last in (False, True):
            ring.reset_counters()
            grads = torch.autograd.grad(out, mine, seq.shard(dout), retain_graph=not last)
            found.append([seq.gather(x) for x in (out.detach(), *grads)])
        with torch.no_grad():
            ring.dilated_attention(*mine, seq, schedule=schedule, **MIXED)
        return found

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _ = dilated_reference(*leaves, **MIXED)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for found in run_ranks(3, body, engine="plain", poison=True)[0]:
        for ours, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-10)


def test_it_is_kept_where_it_is_little() -> None:
    problem = geometric()
    route = choose_route(problem, "auto")
    assert route == replace(ALL_GATHER, keeps=True)
    for rank in (0, 5):
        there, back = (plan_of(problem, route, rank, backward) for backward in (False, True))
        assert there.bytes_sent == there.kept_bytes == 3072 * 12 * 2 * 64 * 2
        assert back.bytes_sent == 2 * there.bytes_sent  # dK and dV in float32, and nothing else
    assert choose_route(problem, "ring") == replace(RING, prologue="split")  # which overwrites what came
    assert not choose_route(simple("contiguous", 64, 2).problem, "all_gather").keeps  # a whole shard


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("schedule", ["ring", "direct", "all_gather", "bidirectional", "double_ring"])
def test_however_a_backward_begins(schedule: str, wire: str | None, begin: Callable[[Prologue], None]) -> None:
    trial = Trial(causal=True, heads=(4, 2), lse=True)
    found = {}
    for prologue in ("fetched", "split", "kept"):
        begin(prologue)
        found[prologue] = run(trial, 4, "zigzag", schedule, torch.float32, kv_wire_dtype=wire)
    assert all(torch.equal(found["kept"][name], found["fetched"][name]) for name in found["kept"])
    if wire is None:
        assert all(greatest_error(one, reference(trial, torch.float32)) <= 1e-5 for one in found.values())


@pytest.mark.parametrize("schedule", ["ring", "sub_rings", "double_ring"])
def test_calls_of_any_order_get_what_they_kept(schedule: str, begin: Callable[[Prologue], None]) -> None:
    """Two forwards before a backward, one without gradients between, a graph used twice, and recomputation."""
    generator = torch.Generator().manual_seed(3)
    given = torch.randn(2, 3, 1, 24, 4, 8, dtype=torch.float64, generator=generator)

    def body(ring: Ring) -> list[torch.Tensor]:
        seq = ring.sequence(24, layout="zigzag")

        def attend(*mine: torch.Tensor) -> torch.Tensor:
            return ring.attention(*mine, seq, causal=True, schedule=schedule)

        one, two = ([seq.shard(x).clone().requires_grad_() for x in call] for call in given)
        first = attend(*one)
        with torch.no_grad():
            attend(*two)
        second = attend(*two)
        found = [*torch.autograd.grad((first**2).sum(), one, retain_graph=True)]
        found += torch.autograd.grad((second**2).sum(), two)
        found += torch.autograd.grad((first**2).sum(), one)
        again = checkpoint(attend, *two, use_reentrant=False)
        found += torch.autograd.grad((again**2).sum(), two)
        return [seq.gather(x) for x in found]

    def wanted(call: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in call]
        q, k, v = (x.transpose(1, 2) for x in leaves)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad((out**2).sum(), leaves)

    right = [*wanted(given[0]), *wanted(given[1])] * 2
    for prologue in ("split", "kept"):
        begin(prologue)
        for ours, exact in zip(run_ranks(4, body, engine="plain", poison=True)[0], right, strict=True):
            torch.testing.assert_close(ours, exact, rtol=0, atol=1e-10)

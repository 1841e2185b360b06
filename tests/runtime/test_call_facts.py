"""All facts that messages depend on are compared between ranks before anything is sent, and differences are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from ringattn import DisagreementError, Ring
from ringattn.attention import call_of
from ringattn.options import AttentionOptions
from ringattn.planner.cluster import Cluster, Links
from ringattn.runtime.call import AttentionCall
from ringattn.runtime.consistency import facts_of
from ringattn.schedule.routes import ROUTES
from ringattn.testing import dense_attention, run_ranks

RANKS, TOKENS = 4, 64
X = torch.randn(1, TOKENS, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
SCHEDULES = {
    "grids": ("double_ring:2", "double_ring:4", "schedule.grid"),
    "groups": ("ulysses_ring:1", "ulysses_ring:2", "schedule.grid"),
    "a grid and the default": ("double_ring:1", "double_ring", "schedule.grid"),
    "names": ("ring", "direct", "schedule.name"),
}


def machines(ranks_of_a_node: int, latency_s: float) -> Cluster:
    """Return a cluster of slow machines with `ranks_of_a_node` ranks on each node."""
    links = Links(tuple(rank // ranks_of_a_node for rank in range(RANKS)))
    return Cluster("drawn", 1e6, links=links, sync_s=1e-5, bandwidth=1e3, latency_s=latency_s, node_bandwidth=1e6)


def attend(ring: Ring, schedule: str = "auto", **options: Any) -> torch.Tensor:
    seq = ring.sequence(TOKENS)
    x = seq.shard(X).requires_grad_()
    out: torch.Tensor = ring.attention(x, x, x, seq, causal=True, schedule=schedule, **options)
    out.sum().backward()
    return out.detach()


def error_of_refusal(ring: Ring, call: Callable[[], object]) -> str:
    """Make a call that is refused. Check that the ring can still make another call, and return the error's message."""
    with pytest.raises(DisagreementError) as caught:
        call()
    seq = ring.sequence(TOKENS)
    dense, _ = dense_attention(X, X, X, causal=True)
    torch.testing.assert_close(attend(ring, "ring"), seq.shard(dense), rtol=1e-10, atol=1e-10)
    return str(caught.value)


def _call_with_different_schedules(schedules: tuple[str, str]) -> Callable[[Ring], str]:
    return lambda ring: error_of_refusal(ring, lambda: attend(ring, schedules[ring.rank == 2]))


@pytest.mark.parametrize(("usual", "odd", "fact"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_that_differ_between_ranks(usual: str, odd: str, fact: str) -> None:
    (error,) = set(run_ranks(RANKS, _call_with_different_schedules((usual, odd)), timeout_s=20.0))
    lines = error.splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [f"rank {rank}" for rank in range(RANKS)]
    assert all(fact in line and "heads" not in line for line in lines)
    assert len({line.partition(fact)[2] for line in lines}) == 2 and lines[0][8:] == lines[1][8:] == lines[3][8:]


@pytest.mark.parametrize(
    ("odd", "schedule", "fact"),
    [
        (machines(4, 1e-6), "double_ring", "schedule.grid"),
        (machines(1, 10.0), "ring", "schedule.prologue 'kept'"),
        (machines(1, 10.0), "auto", "schedule.name 'all_gather'"),
    ],
    ids=["nodes", "prologue", "choice"],
)
def test_machines_that_differ_between_ranks(odd: Cluster, schedule: str, fact: str) -> None:
    """A call is refused if ranks have different clusters and these lead to different plans.

    The cluster decides the ranks of inner rings, the prologue of a backward pass, and what "auto" chooses.
    """

    def body(ring: Ring) -> str:
        usual = machines(2 if schedule == "double_ring" else 1, 1e-6)

        def call() -> None:
            ring.machines = odd if ring.rank == 2 else usual
            try:
                attend(ring, schedule)
            finally:
                ring.machines = usual

        return error_of_refusal(ring, call)

    (error,) = set(run_ranks(RANKS, body, timeout_s=20.0))
    assert fact in error.splitlines()[3]  # the line of rank 2


def test_facts_cover_every_field_that_plans_depend_on() -> None:
    """Any change of a field of the route or the problem, even of a new one, changes the text that ranks compare."""

    def calls(ring: Ring) -> AttentionCall:
        options = AttentionOptions(causal=True, schedule="double_ring:2")
        return call_of(ring, ring.sequence(TOKENS), None, (1, 4, 2, 8, 8), torch.float64, torch.device("cpu"), options)

    call, *_ = run_ranks(RANKS, calls)
    change_of_type = {
        bool: lambda x: not x,
        int: lambda x: x + 2,
        str: lambda x: x + "?",
        type(None): lambda x: 3,
        tuple: lambda x: (*x, 7),
    }
    for part in ("route", "softmax"):
        value = getattr(call, part)
        names = value._fields if hasattr(value, "_fields") else [field.name for field in fields(value)]
        for name in names:
            old = getattr(value, name)
            new = change_of_type.get(type(old), lambda x: x * 2)(old)
            changed = value._replace(**{name: new}) if hasattr(value, "_fields") else replace(value, **{name: new})
            assert replace(call, **{part: changed}).summary() != call.summary(), f"{part}.{name}"
    assert replace(call, dropout_seed=5).summary() != call.summary()
    assert replace(call, number=5, graph=True).summary() == call.summary()


def test_facts_are_the_same_in_every_process() -> None:
    facts = [fact for route in ROUTES.values() for fact in facts_of(route)]
    assert not any(" at 0x" in fact for fact in facts) and "name 'pass_q'" in facts


def test_long_values_are_shortened_but_stay_distinct() -> None:
    first, second = tuple(range(1000)), (*range(499), 0, *range(500, 1000))
    (first_fact,), (second_fact,) = facts_of(first, "cuts"), facts_of(second, "cuts")
    assert first_fact != second_fact and len(first_fact) < 120

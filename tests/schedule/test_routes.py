"""Schedules by name: what is known, what is refused, and what a new one needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring
from ringattn.errors import InputError
from ringattn.schedule.routes import NUMBERED, ROUTES, route_named
from ringattn.testing import dense_attention, run_ranks
from tests.contributing import example

TOLERANCE = 1e-12


@pytest.mark.parametrize(
    "text", ["0", "02", "+2", "-2", "2.0", "2 ", " 2", "\u0662", "\u00b2", "2_0", "0x2", "", "two", "2:2"]
)
@pytest.mark.parametrize("name", NUMBERED)
def test_other_numbers_than_plain_ones_are_refused(name: str, text: str) -> None:
    with pytest.raises(InputError, match=r"is not known; choose auto or one of .*, or double_ring:M, ulysses_ring:M"):
        route_named(f"{name}:{text}", 4)


@pytest.mark.parametrize("name", [name for name in ROUTES if name not in NUMBERED])
def test_a_number_is_refused_where_a_schedule_takes_none(name: str) -> None:
    with pytest.raises(InputError, match=rf"schedule='{name}:2' is not known"):
        route_named(f"{name}:2", 4)


@pytest.mark.parametrize("name", NUMBERED)
def test_a_number_that_does_not_divide_the_ranks_is_refused(name: str) -> None:
    assert route_named(f"{name}:2", 4) != route_named(name, 4) == ROUTES[name] == route_named(f"{name}:2")
    with pytest.raises(InputError, match=rf"schedule='{name}:3': 3 ranks that belong together do not divide 4 ranks"):
        route_named(f"{name}:3", 4)


@pytest.mark.parametrize("name", [None, 3, "", "auto", "Ring", "ring ", "star"])
def test_unknown_names_are_refused(name: Any) -> None:
    with pytest.raises(InputError, match="is not known; choose auto or one of ring, all_gather, direct, sub_rings"):
        route_named(name)


@pytest.fixture
def far_first() -> Iterator[str]:
    """The schedule of CONTRIBUTING.md, for one test."""
    before = dict(ROUTES)
    names = example("FarFirst")
    assert list(ROUTES) == [*before, "far_first"]
    yield names["FarFirst"]().name
    ROUTES.clear()
    ROUTES.update(before)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_the_example_of_a_new_schedule_is_exact(far_first: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 1, 29, 4, 8, dtype=torch.float64, generator=generator)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = dense_attention(*leaves, causal=True)[0]
    wanted = [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]

    def body(ring: Ring) -> tuple[list[Tensor], str]:
        seq = ring.sequence(29, layout=layout)
        local = [seq.shard(x).clone().requires_grad_() for x in (q, k, v)]
        out = ring.attention(*local, seq, causal=True, schedule=far_first)
        grads = torch.autograd.grad(out.sin().sum(), local)
        return [seq.gather(x.detach()) for x in (out, *grads)], str(ring.explain(seq, q=q, schedule=far_first))

    for found, told in run_ranks(4, body, poison=True):
        assert "far_first" in told
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() < TOLERANCE

"""Transposition twice: what the gradients' way back is transposed to is the forward pass, up to the names of blocks."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import settings

from ringattn.schedule.ops import Kind, Merge, Schedule, Step
from ringattn.schedule.routes import ROUTES, Route, schedule_of
from tests.strategies import Case, Spots, covering, spots

DUAL = {
    Kind.KV: Kind.DKV, Kind.Q: Kind.DQ, Kind.OUT: Kind.GRAD_OUT,
    Kind.DKV: Kind.KV, Kind.DQ: Kind.Q, Kind.GRAD_OUT: Kind.OUT,
}  # fmt: skip
"""Of what travels one way, what travels back."""


class Edge(NamedTuple):
    """Rows of a block that go from rank to rank; whose partial sum they are is a name."""

    kind: Kind
    owner: int
    ring: int | None
    src: int
    dst: int
    rows: Spots


Met = Counter[tuple[int, int, int, object]]
"""(rank, owner of the queries, owner of the keys, tile of a single head)."""


def edges_of(step: Step, backward: bool) -> frozenset[Edge]:
    """What travels in a step; in a backward keys and queries come anew and are no part of its linear map."""
    return frozenset(
        Edge(copy.block.kind, copy.block.owner, copy.block.ring, copy.src, copy.dst, spots(copy.content))
        for copy in step.copies
        if not (backward and copy.block.kind in (Kind.KV, Kind.Q))
    )


def met_in(step: Step) -> Met:
    """What is computed on others' rows in a step."""
    return Counter(
        (item.rank, item.q.owner, item.kv.owner, tile)
        for item in step.work
        if not isinstance(item, Merge) and not item.rank == item.q.owner == item.kv.owner
        for _, table in item.tiles
        for tile in table.with_single_heads()
    )


def linear(schedule: Schedule, backward: bool) -> list[tuple[frozenset[Edge], Met]]:
    """The steps of a pass in which rows of its linear map travel or are worked on."""
    steps = [(edges_of(step, backward), met_in(step)) for step in schedule.steps]
    return [step for step in steps if any(step)]


def transposed(steps: list[tuple[frozenset[Edge], Met]]) -> list[tuple[frozenset[Edge], Met]]:
    """Every edge the other way, in reverse."""
    return [
        (frozenset(one._replace(kind=DUAL[one.kind], src=one.dst, dst=one.src) for one in edges), met)
        for edges, met in reversed(steps)
    ]


@pytest.mark.parametrize("name", ROUTES)
@settings(max_examples=4)
@covering
def test_transposed_twice_is_the_forward(name: str, case: Case) -> None:
    route: Route = ROUTES[name]
    there, back = (linear(schedule_of(case.problem, route, backward), backward) for backward in (False, True))
    if route.moves_queries:
        # Made anew rather than transposed: its steps hide other copies behind the same work.
        assert together(transposed(back)) == together(there) == together(transposed(transposed(there)))
        assert together(transposed(there)) == together(back)
    else:
        assert transposed(back) == there
        assert transposed(there) == back


def together(steps: list[tuple[frozenset[Edge], Met]]) -> tuple[Counter[Edge], Met]:
    """All edges and work."""
    edges = Counter(edge for some, _ in steps for edge in some)
    return edges, sum((met for _, met in steps), Counter())

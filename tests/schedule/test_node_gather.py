"""A node gather sends the right rows in the right steps, equals all-gather without gates, and is exact."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import masks
from ringattn.bench.placement import TREES, draw_tree
from ringattn.core.layout import make_layout
from ringattn.core.mask import make_mask
from ringattn.core.problem import Problem
from ringattn.planner.choose import _received, plan_of
from ringattn.planner.cluster import CLUSTERS, Links, numbered
from ringattn.planner.plan import record_bytes
from ringattn.planner.simulate import simulate
from ringattn.schedule.content import size
from ringattn.schedule.node_gather import MUST_SAVE
from ringattn.schedule.ops import Kind, Schedule, Step
from ringattn.schedule.route import Grid, equal_groups
from ringattn.schedule.routes import schedule_of
from ringattn.testing import run_ranks
from tests.planner.placement_verifier import verify_placement
from tests.poison import unset_is_nan
from tests.schedules import ALL_GATHER, NODE_GATHER
from tests.strategies import Case, Spots, cases, simple, spots
from tests.trial import Trial, greatest_error, joined, on_rank, reference

Messages = dict[tuple[int, int, int], Spots]
"""The rows that are sent, by (owner, sender, receiver)."""


def messages(schedule: Schedule, step: int, kind: Kind = Kind.KV) -> Messages:
    """Return the rows of all copies of one kind in a step."""
    copies = schedule.steps[step].copies if step < len(schedule.steps) else ()
    return {
        (copy.block.owner, copy.src, copy.dst): spots(copy.content) for copy in copies if copy.block.kind is kind
    }  # fmt: skip


def expected(case: Case, grid: Grid) -> tuple[Messages, Messages]:
    """Return by brute force the messages of owners in the first step, and those of gates in the second."""
    by_owner, by_gate = {}, {}
    for owner, node in product(range(case.ranks), grid):
        reads = {reader: case.reads(owner, reader) for reader in node if reader != owner}
        union = frozenset[tuple[int, int]]().union(*reads.values())
        least = MUST_SAVE * case.problem.kv_layout.counts[owner] * case.problem.kv_heads
        saved = sum(map(len, reads.values())) - len(union)
        if owner in node or not saved or saved < least:
            by_owner |= {(owner, owner, reader): rows for reader, rows in reads.items() if rows}
            continue
        place = next(ranks.index(owner) for ranks in grid if owner in ranks)
        gate = next(rank for rank in (*node[place:], *node[:place]) if reads[rank])
        by_owner[owner, owner, gate] = union
        by_gate |= {(owner, gate, reader): rows for reader, rows in reads.items() if rows and reader != gate}
    return by_owner, by_gate


@st.composite
def grids(draw: st.DrawFn, ranks: int) -> Grid:
    """Draw several groups of equally many ranks, at least two, which need not be neighbours."""
    places = draw(st.sampled_from([places for places in range(2, ranks) if ranks % places == 0]))
    order = draw(st.one_of(st.just(list(range(ranks))), st.permutations(range(ranks))))
    return tuple(tuple(sorted(order[first : first + places])) for first in range(0, ranks, places))


@settings(max_examples=8)
@given(cases().filter(lambda case: case.ranks in (4, 8) and case.problem.q_layout.length > 12), st.data())
def test_a_node_receives_a_row_once_if_that_saves_enough(case: Case, data: st.DataObject) -> None:
    grid = data.draw(grids(case.ranks))
    by_owner, by_gate = expected(case, grid)
    route = replace(NODE_GATHER, grid=grid)
    forward, back = (schedule_of(case.problem, route, backward) for backward in (False, True))
    assert (messages(forward, 0), messages(forward, 1)) == (by_owner, by_gate)
    # K/V are sent again in the prologue and in the main step of the empty forward step. Gradients return in the main
    # steps of the forward messages.
    assert (messages(back, 0), messages(back, 1)) == (by_owner, by_gate)
    returned = [
        {(owner, dst, src): rows for (owner, src, dst), rows in sent.items()} for sent in (by_owner, by_gate)
    ]  # fmt: skip
    last = len(forward.steps) - 1
    for step, sent in enumerate(returned):
        assert messages(back, 1 + 2 * (last - step), Kind.DKV) == sent
    counts = [sum(len(step.copies) for step in schedule.steps) for schedule in (forward, back)]
    assert counts == [len(by_owner) + len(by_gate), 2 * (len(by_owner) + len(by_gate))]
    assert route.has_gates(case.problem) == bool(by_gate)
    record = record_bytes(case.problem, case.problem.kv_dtype)
    received = [rows * record for rows in _received(case.problem, route)]
    assert received == [
        sum(recv.elements * plan.element_bytes(recv.buffer) for step in plan.steps for recv in step.recvs)
        for plan in (plan_of(case.problem, route, rank, False) for rank in range(case.ranks))
    ]


@pytest.mark.parametrize(("rows", "gates"), [(7, 0), (8, 1)])
def test_a_gate_must_save_an_eighth_of_a_shard(rows: int, gates: int) -> None:
    # Rank 4 reads all 64 rows of rank 3, and rank 5 reads the last `rows` of them.
    problem = simple("contiguous", 512, 8, causal=True, window=(64 + rows, 0)).problem
    forward = schedule_of(problem, replace(NODE_GATHER, grid=((0, 1, 2, 3), (4, 5, 6, 7))), False)
    assert [(key, len(sent)) for key, sent in messages(forward, 1).items()] == [((3, 4, 5), rows)] * gates


def test_the_gates_of_a_node_are_different_ranks() -> None:
    problem = simple("contiguous", 64, 8).problem
    forward = schedule_of(problem, replace(NODE_GATHER, grid=((0, 1, 2, 3), (4, 5, 6, 7))), False)
    crossing = [(src, dst) for _, src, dst in messages(forward, 0) if src // 4 != dst // 4]
    assert sorted(crossing) == [(rank, (rank + 4) % 8) for rank in range(8)]
    readers = defaultdict(set)
    for owner, gate, reader in messages(forward, 1):
        assert gate % 4 == owner % 4 and gate // 4 == reader // 4
        readers[gate].add(reader)
    assert all(ranks == set(equal_groups(8, 4)[gate // 4]) - {gate} for gate, ranks in readers.items())


WAYS = [
    {"keeps": keeps, "prologue": prologue}
    for keeps, prologue in ((False, "fetched"), (False, "split"), (False, "kept"), (True, "fetched"))
]


@settings(max_examples=12)
@given(cases(), st.sampled_from(WAYS), st.data())
def test_without_gates_all_steps_are_those_of_all_gather(case: Case, way: dict[str, Any], data: st.DataObject) -> None:
    grids = [equal_groups(case.ranks, places) for places in (1, 2, case.ranks) if case.ranks % places == 0]
    route = replace(NODE_GATHER, grid=data.draw(st.sampled_from(grids)))
    if route.has_gates(case.problem):
        assert len(route.grid[0]) == 2
        return
    for backward in (False, True):
        gather, star = (schedule_of(case.problem, replace(tried, **way), backward) for tried in (route, ALL_GATHER))
        assert [step for step in gather.steps if step != Step()] == [step for step in star.steps if step != Step()]
        assert gather.kept == star.kept


def test_a_pass_without_gates_takes_as_long_as_all_gather() -> None:
    problem = simple("contiguous", 128, 8, causal=True, window=(9, 0)).problem
    route = replace(NODE_GATHER, grid=((0, 1, 2, 3), (4, 5, 6, 7)))
    assert not route.has_gates(problem)
    for backward in (False, True):
        gather, star = (
            simulate(tuple(plan_of(problem, tried, rank, backward) for rank in range(8)), CLUSTERS["h100"]).total_us
            for tried in (route, ALL_GATHER)
        )
        assert gather == star


def test_kept_blocks_that_are_read_in_different_steps_have_buffers_of_their_own() -> None:
    documents = (0, 18, 115, 136)
    layout = make_layout("documents", 136, 4, documents, at_once=True)
    mask = make_mask(136, 136, causal=True, documents=documents, kv_documents=documents)
    problem = Problem(layout, layout, mask, 1, 4, 1, 8, 8, "float64")
    route = replace(NODE_GATHER, grid=((0, 1), (2, 3)), keeps=True)
    for rank, backward in product(range(4), (False, True)):
        plan = plan_of(problem, route, rank, backward)
        verify_placement(plan)
        for buffer in map(plan.buffers.__getitem__, plan.kept):
            outer = buffer if buffer.inside is None else plan.buffers[buffer.inside.buffer]
            first = 0 if buffer.inside is None else buffer.inside.row
            assert first + size(buffer.content) <= size(outer.content)


# --- exactness --------------------------------------------------------------------------------------------------------


SHAPES = [(2, 2), (2, 3), (2, 4), (3, 2), (4, 2)]
"""The number of nodes, and the ranks of a node."""


def drawn(r: Random) -> tuple[Trial, str, tuple[int, ...]]:
    """Draw a call of uneven length, a layout and the node of each rank."""
    nodes, places = r.choice(SHAPES)
    of_ranks = [node for node in range(nodes) for _ in range(places)]
    if r.random() < 0.6:
        r.shuffle(of_ranks)
    tokens, heads = r.randint(40, 150), r.choice([(2, 2), (4, 2), (4, 1)])
    layout = r.choice(["placed", "placed", "contiguous", "zigzag"])
    dropout = r.choice([0.0, 0.0, 0.3])
    if r.random() < 0.3:
        tree = draw_tree(r, r.randint(1, 10), tokens, r.choice(list(TREES)))
        trial = Trial(tokens=tokens, within=tree, heads=heads, lse=True, dropout=dropout)
        return trial, "mask" if layout == "placed" else layout, numbered(map(str, of_ranks))
    cuts = sorted(r.randint(0, tokens) for _ in range(r.choice([0, 1, 2, 4])))
    causal = layout == "placed" or r.random() < 0.6
    window = (r.randint(0, tokens), 0 if causal else r.randint(0, 9)) if r.random() < 0.3 else None
    within = masks.chunked(r.choice([8, 50])) if causal and not window and r.random() < 0.2 else None
    trial = Trial(
        tokens=tokens, causal=causal, window=window, documents=(0, *cuts, tokens), heads=heads, within=within,
        sinks=r.random() < 0.3, lse=r.random() < 0.5, dropout=dropout,
    )  # fmt: skip
    return trial, "documents" if layout == "placed" else layout, numbered(map(str, of_ranks))


def error_of(seed: int, keep_received: bool = False) -> float:
    """Return the largest error of a drawn call, on threads, compared with the dense oracle."""
    trial, layout, nodes = drawn(Random(seed))
    placed_for = "node_gather" if layout in ("documents", "mask") else None
    with unset_is_nan():
        parts = run_ranks(
            len(nodes), lambda ring: on_rank(ring, trial, layout, "node_gather", torch.float64, placed_for),
            engine="plain", cluster=CLUSTERS["cpu"].joined(Links(nodes)), timeout_s=30.0, poison=True,
            keep_received=keep_received,
        )  # fmt: skip
    return greatest_error(joined(parts), reference(trial, torch.float64))


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
def test_drawn_calls_are_exact(seed: int) -> None:
    assert error_of(seed) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_drawn_calls_that_keep_all_rows_are_exact(seed: int) -> None:
    assert error_of(seed, keep_received=True) <= 1e-10

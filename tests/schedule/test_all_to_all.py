"""The head all-to-all: which rows travel to whom, that every pair meets once, and what its bytes are."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ringattn.engine.plain import PlainEngine
from ringattn.planner.choose import plan_of
from ringattn.ring import Ring
from ringattn.schedule.all_to_all import rows_served
from ringattn.schedule.ops import Attend, AttendGrad, Kind, Merge
from ringattn.schedule.passes import is_on_received
from ringattn.schedule.routes import schedule_of
from ringattn.schedule.text import grid
from ringattn.testing import run_ranks
from tests.schedule.test_sub_rings import geometric
from tests.schedules import ULYSSES
from tests.strategies import Case, covering, simple, spots


def served(case: Case, backward: bool) -> list[Attend | AttendGrad]:
    """All work on queries that came."""
    steps = schedule_of(case.problem, ULYSSES, backward).steps
    return [item for step in steps for item in step.work if not isinstance(item, Merge) and is_on_received(item)]


@covering
def test_every_pair_of_two_ranks_meets_once_on_the_owner_of_its_head(case: Case) -> None:
    problem = case.problem
    met = np.zeros_like(case.reference)
    owners: dict[tuple[int, int], set[int]] = defaultdict(set)
    for item in served(case, False):
        q, k = problem.q_layout.positions(item.q.owner), problem.kv_layout.positions(item.kv.owner)
        assert item.q.owner != item.kv.owner and item.rank == item.out.origin
        for heads, table in item.tiles:
            assert heads.count == 1
            for tile in table:
                assert tile.heads.count == 1 and tile.heads.start // problem.group == heads.start
                owners[item.q.ring or 0, tile.heads.start].add(item.rank)
                at = np.ix_(tile.heads.members(), q[list(tile.q.rows.members())], k[list(tile.k.rows.members())])
                distance = at[1] - at[2]
                met[at] += (distance >= tile.band.lo) & (distance <= tile.band.hi)
    assert all(len(ranks) == 1 for ranks in owners.values())
    wanted = case.reference.copy()
    for rank in range(case.ranks):  # what meets at home
        wanted[:, problem.q_layout.positions(rank)[:, None], problem.kv_layout.positions(rank)] = 0
    assert (met == wanted).all()


@covering
def test_what_is_served_travels_and_what_is_made_comes_home(case: Case) -> None:
    for backward, inputs, results in (
        (False, {Kind.Q, Kind.KV}, {Kind.OUT}),
        (True, {Kind.Q, Kind.KV, Kind.GRAD_OUT}, {Kind.DQ, Kind.DKV}),
    ):
        steps = schedule_of(case.problem, ULYSSES, backward).steps
        arrives, leaves = rows_served(served(case, backward))
        there = {(copy.dst, copy.block): copy for copy in steps[0].copies}
        back = {(copy.src, copy.block): copy for copy in steps[2].copies}
        assert {block.kind for _, block in arrives} <= inputs and {block.kind for _, block in leaves} <= results
        for wanted, sent in ((arrives, there), (leaves, back)):
            abroad = {spot: spots(rows) for spot, rows in wanted.items() if spot[0] != spot[1].owner}
            assert {spot: spots(copy.content) for spot, copy in sent.items()} == abroad
        assert all(copy.src == block.owner for (_, block), copy in there.items())
        assert all(copy.dst == block.owner for (_, block), copy in back.items())
        assert Counter(item.part for item in steps[3].work) == Counter(block for _, block in leaves)


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_the_worked_example(wire: str | None) -> None:
    """Four rows for every m-th head in (m - 1) of m cases: 2048 + 1536 + 896 of each head, in the mean of the ranks."""
    problem = replace(geometric(), out_wire_dtype=wire)
    sent = [plan_of(problem, ULYSSES, rank, False).bytes_sent for rank in range(8)]
    out = 64 * (2 if wire else 4) + 4  # with its lse
    tensors = 12 * (2048 + 1536 + 896)
    assert sum(sent) == 8 * (tensors * 3 // 4 * 64 * 2 + tensors // 4 * out)

    def one(longest: int) -> int:
        """Bytes of a rank that owns so many heads of the longest branch: of others Q, K and V, of its own outputs."""
        branches = ((1024, 2, 6), (512, 4, 3), (256, 8, longest))  # rows, members, own heads
        return sum(rows * (3 * (12 - own) * 128 + own * (members - 1) * out) for rows, members, own in branches)

    assert Counter(sent) == {one(1): 4, one(2): 4}  # twelve heads on eight ranks


@pytest.mark.parametrize(("heads", "ranks"), [(1, 4), (3, 4), (4, 4), (10, 4), (12, 8)])
def test_heads_are_dealt_evenly(heads: int, ranks: int) -> None:
    case = simple("contiguous", 4 * ranks, ranks, heads=heads)
    dealt = Counter(head for head in range(heads) for rank in range(ranks)
                    if any(head == one.start for item in served(case, False) if item.rank == rank
                           for one, _ in item.tiles))  # fmt: skip
    assert dealt == Counter(range(heads))
    owned = Counter(item.rank for item in served(case, False) for _ in item.tiles)
    shares = [owned[rank] // (ranks * (ranks - 1)) for rank in range(ranks)]
    assert max(shares) - min(shares) <= 1 and sum(shares) == heads


class Asked(PlainEngine):
    """The plain engine, which notes what it is asked to prepare."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[tuple[int, bool]] = []

    def prepare(self, *args: Any, more: bool = False, **others: Any) -> Any:
        """(query heads, whether others add to the output) is kept."""
        self.heads.append((args[3], more))
        return super().prepare(*args, more=more, **others)


def test_engines_hear_what_others_add_to() -> None:
    """Outputs and dQ that others add to stay wide, and so do those that are returned to their owners."""
    asked: dict[str, Any] = {}

    def body(ring: Ring) -> None:
        seq = ring.sequence(12)
        x = torch.randn(1, seq.counts[ring.rank], 2, 4, requires_grad=True)
        for schedule in ("ring", "all_to_all"):
            ring.engine = engine = Asked()
            ring.attention(x, x, x, seq, schedule=schedule).sum().backward()
            if ring.rank == 0:
                asked[schedule] = engine.heads

    run_ranks(2, body)
    assert asked == {
        "ring": [(2, False), (2, False)],
        "all_to_all": [(2, True), (1, True), (2, True), (1, True)],  # own and served, forward and backward
    }


def test_what_is_served_is_a_word_in_the_grid() -> None:
    lines = grid(schedule_of(simple("contiguous", 8, 2, heads=2).problem, ULYSSES, False)).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["0", "KV0", "|", "KV0/0>1", "Q0/0>1", "KV1", "|", "KV1/0>0", "Q1/0>0"],
        ["1", "Q0,1xKV0,1/0", "Q0,1xKV0,1/0"],
        ["2", "-", "|", "OUT1@0/0>1", "-", "|", "OUT0@1/0>0"],
        ["3", "+OUT0@0/0", "+OUT0@1/0", "+OUT1@0/0", "+OUT1@1/0"],
    ]


def test_a_full_mask_is_ulysses() -> None:
    """Everybody sends all rows of the heads that others own, and gets all its outputs back."""
    case = simple("contiguous", 32, 4, heads=4)
    for rank in range(4):
        there = plan_of(case.problem, ULYSSES, rank, False)
        rows = 3 * 8 * 3  # K/V, which count twice, and Q, or else OUT: 8 rows to each of 3 others
        assert there.bytes_sent == rows * 64 * 2 + 3 * 8 * (64 * 4 + 4)
        assert there.messages == 3 * 3

"""The head all-to-all: which rows travel to whom, that every pair meets once, and what its bytes are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.engine.plain import PlainEngine
from ringattn.planner.choose import plan_of
from ringattn.ring import Ring
from ringattn.schedule.ops import Attend, AttendGrad, Merge
from ringattn.schedule.passes import is_on_received
from ringattn.schedule.routes import schedule_of
from ringattn.schedule.text import grid
from ringattn.testing import run_ranks
from tests.schedule.test_sub_rings import geometric
from tests.schedules import ULYSSES
from tests.strategies import Case, simple


def served(case: Case, backward: bool) -> list[Attend | AttendGrad]:
    """All work on queries that came."""
    steps = schedule_of(case.problem, ULYSSES, backward).steps
    return [item for step in steps for item in step.work if not isinstance(item, Merge) and is_on_received(item)]


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

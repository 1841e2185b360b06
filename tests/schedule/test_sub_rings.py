"""Sub-rings: what travels in each, and that every gradient comes home once."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from ringattn.core.dilation import Dilated
from ringattn.core.layout import make_layout
from ringattn.core.problem import Problem
from ringattn.planner.choose import plan_of
from ringattn.schedule.ops import Block
from ringattn.schedule.passes import rows_read
from ringattn.schedule.routes import ROUTES, schedule_of
from tests.schedules import SUB_RINGS
from tests.strategies import Case, covering, simple, spots


@covering
def test_a_relay_carries_what_later_members_read(case: Case) -> None:
    schedule = schedule_of(case.problem, SUB_RINGS, False)
    reads: dict[tuple[Block, int], frozenset] = {
        (item.kv, item.rank): spots(rows_read(item.tiles)) for step in schedule.steps for item in step.work
    }
    chains: dict[Block, list] = defaultdict(list)
    for step in schedule.steps:
        for copy in step.copies:
            chains[copy.block].append(copy)
    for block, copies in chains.items():
        wanted: frozenset = frozenset()
        for copy in reversed(copies):
            wanted |= reads.get((block, copy.dst), frozenset())
            assert spots(copy.content) == wanted != frozenset()
        assert copies[0].src == block.owner
        assert all(one.dst == other.src for one, other in pairwise(copies))
    assert {block for block, rank in reads if rank != block.owner} == set(chains)


def geometric(ranks: int = 8) -> Problem:
    """The worked example of 2^20 tokens: w = 2048 * 2^i and r = 2^i for i = 0 .. 9, 12 heads of 64 in bfloat16."""
    tokens, powers = 1 << 20, [1 << i for i in range(10)]
    layout = make_layout("contiguous", tokens, ranks)
    pairs = Dilated(tuple(2048 * power for power in powers), tuple(powers))
    return Problem(layout, layout, pairs.mask(tokens, tokens, None, None, 12, 12), 1, 12, 12, 64, 64, "bfloat16")


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        # m_i - 1 other members of the branch's ring send n / r_i rows each: 1024 + 3 * 512 + 7 * 256.
        ("sub_rings", 4352),
        # Nested rows once: the ranks that a branch reaches beyond the one before it send (m_i - m_(i-1)) n / r_i.
        ("direct", 3072),
        ("all_gather", 3072),
        # Relayed past ranks that have no use for them.
        ("ring", 5376),
    ],
)
def test_the_worked_example(schedule: str, rows: int) -> None:
    """Every rank sends so many rows of K and V for each head, and in backward twice as much again (float32)."""
    problem = geometric()
    for rank in (0, 3, 7):
        there, back = (plan_of(problem, ROUTES[schedule], rank, backward) for backward in (False, True))
        assert there.bytes_sent == rows * 12 * 2 * 64 * 2
        # K and V anew, which go straight to each reader where that is less, and dK and dV in float32.
        assert back.bytes_sent <= 3 * there.bytes_sent


def test_documents_have_rings_of_their_own() -> None:
    """Two documents on the halves of four ranks: nothing crosses from one to the other."""
    case = simple("contiguous", 64, 4, (0, 32, 64))
    schedule = schedule_of(case.problem, SUB_RINGS, False)
    edges = {(copy.src, copy.dst) for step in schedule.steps for copy in step.copies}
    assert edges == {(0, 1), (1, 0), (2, 3), (3, 2)}

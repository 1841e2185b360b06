"""A simulation by classes of ranks agrees with a simulation of the same ranks from their plans.

`ringattn/planner/classes.py` learns the steps of ranks from two small numbers of ranks, and predicts them for others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import pytest

from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.errors import InputError, UnsupportedError
from ringattn.planner.choose import choose_route, facts_beyond, plan_of, prologue_facts
from ringattn.planner.classes import Learned, classes_of, group_of, prologue_on, routes_on
from ringattn.planner.cluster import CLUSTERS, Cluster, Links
from ringattn.planner.plan import Plan
from ringattn.planner.recurrence import play
from ringattn.planner.simulate import Disturbance, simulate

SHARD = 64
RANKS = 29
NODES = replace(CLUSTERS["h100"], flops=2e11, ranks_per_node=4, pass_s=1e-5, tile_s=1e-7, call_s=1e-6)
"""A cluster with slow arithmetic, so that the work and the messages of short shards take similar times."""
PAIRS = replace(NODES, ranks_per_node=2)
FREE = Cluster("links that cost nothing", 2e11, 1e30, 0.0)
DISTURBED = Disturbance(((3, 1.5), (20, 3.0)), ((7, 8, 40.0),), 0.2, 1)
Mask = tuple[str, bool, tuple[int, int] | None]
PLAIN: tuple[Mask, ...] = (("contiguous", False, None), ("contiguous", True, None), ("zigzag", True, None),
                           ("striped", True, None))  # fmt: skip
WINDOWS: tuple[Mask, ...] = (("contiguous", True, (70, 0)), ("contiguous", False, (10, 64)), ("zigzag", True, (30, 0)))


def problem_of(ranks: int, mask: Mask, shard: int = SHARD, heads: int = 4) -> Problem:
    """Return a call with shards of `shard` rows and two query heads per K/V head."""
    layout, causal, window = mask
    rows = make_layout(layout, shard * ranks, ranks)
    lowered = Banded(causal, window).mask(shard * ranks, shard * ranks, None, None, heads, heads // 2)
    return Problem(rows, rows, lowered, 1, heads, heads // 2, 64, 64, "bfloat16")


@lru_cache
def classes(schedule: str, mask: Mask, quarter: int, cluster: Cluster = NODES, group: int = 1) -> Learned:
    """Return the classes of a schedule's ranks, which are learned once per test process."""
    reach = 0 if mask[2] is None else -(-max(mask[2]) // (SHARD // (1 + (mask[0] == "zigzag"))))
    return classes_of(lambda ranks: problem_of(ranks, mask), schedule, cluster, quarter, reach, group)


@lru_cache
def plans(schedule: str, mask: Mask, ranks: int, backward: bool, cluster: Cluster = NODES) -> tuple[Plan, ...]:
    """Return the plans of all ranks."""
    problem = problem_of(ranks, mask)
    route = choose_route(problem, schedule, cluster)
    return tuple(plan_of(problem, route, rank, backward) for rank in range(ranks))


@lru_cache
def full_ring_with_free_links() -> Any:
    """Return the classes of the forward pass of a ring without a mask, for links that cost nothing."""
    return classes_of(lambda ranks: problem_of(ranks, PLAIN[0]), "ring", FREE, 0)[False]


def check(
    schedule: str, mask: Mask, ranks: int, disturbance: Disturbance, overlap: bool = True, cluster: Cluster = NODES
) -> None:
    """Assert that both simulations give the same times, bytes and spans of both passes, except for rounding."""
    group = group_of(problem_of(ranks, mask), schedule, cluster)
    for backward in (False, True):
        planned = plans(schedule, mask, ranks, backward, cluster)
        simulated = simulate(planned, cluster, overlap, disturbance)
        learned = classes(schedule, mask, ranks // group % 4, cluster, group)[backward]
        times = play(learned, cluster, ranks, overlap, disturbance, (0, 7, ranks - 1))
        assert times.total_s * 1e6 == pytest.approx(simulated.total_us, rel=1e-9)
        for measured, expected in ((times.busy_s, simulated.busy_us), (times.waiting_s, simulated.waiting_us),
                                (times.exposed_s, simulated.exposed_us)):  # fmt: skip
            np.testing.assert_allclose(measured * 1e6, expected, rtol=1e-9, atol=1e-9 * simulated.total_us)
        assert times.sent_bytes.tolist() == [plan.bytes_sent for plan in planned]
        held_bytes = [plan.arena_bytes + plan.kept_bytes for plan in planned]
        assert learned.held_spread(ranks)[[0, -1]].tolist() == pytest.approx(
            [min(held_bytes), max(held_bytes)], rel=1e-12
        )
        for rank, marks in times.traced.items():
            ends = [span.end_us for span in simulated.spans[rank] if span.lane == "comm"]
            assert np.sort(marks[marks[:, 3] > 0, 3]) * 1e6 == pytest.approx(sorted(ends), rel=1e-9)


def test_a_ring_by_classes_is_the_ring_by_plans() -> None:
    check("ring", ("zigzag", True, None), RANKS, DISTURBED)
    check("ring", ("zigzag", True, None), RANKS, Disturbance(), overlap=False)


def test_a_double_ring_by_classes_of_nodes() -> None:
    # Two inner rings are on each machine, so the messages of both in a step share a link. In backward, owners send to
    # all inner rings.
    check("double_ring:2", ("contiguous", True, None), 26, DISTURBED)


@pytest.mark.slow
@pytest.mark.parametrize("mask", PLAIN[1:3])
def test_ulysses_in_nodes_and_a_ring_of_them_by_classes(mask: Mask) -> None:
    check("ulysses_ring", mask, 38, DISTURBED, cluster=PAIRS)


def test_shards_of_another_length_are_learned_from_fewer_ranks() -> None:
    """Classes for a shard length can be learned from fewer ranks if those of another length are given as an example.

    Work and bytes may differ between the lengths. If senders or receivers differ, the classes are refused.
    """
    schedule, mask, ranks, longer = "double_ring:2", PLAIN[1], 26, 96
    example: Any = classes(schedule, mask, 1, NODES, 2)
    learned: Any = classes_of(lambda n: problem_of(n, mask, longer), schedule, NODES, 1, 0, 2, like=example)
    assert sum(len(of_pass._cells) for of_pass in learned.values()) == sum(
        len(of_pass._cells) for of_pass in example.values()
    )
    problem = problem_of(ranks, mask, longer)
    planned = tuple(plan_of(problem, choose_route(problem, schedule, NODES), rank, True) for rank in range(ranks))
    simulated, times = simulate(planned, NODES, True, DISTURBED), play(learned[True], NODES, ranks, True, DISTURBED)
    assert times.total_s * 1e6 == pytest.approx(simulated.total_us, rel=1e-9)
    assert times.sent_bytes.tolist() == [plan.bytes_sent for plan in planned]
    with pytest.raises(UnsupportedError, match="rank 0 of 18 sends to unexpected ranks in step 2"):
        classes_of(lambda n: problem_of(n, PLAIN[0], longer), schedule, NODES, 1, 0, 2, like=example)


def test_an_exchange_of_all_in_one_step() -> None:
    check("all_gather", ("zigzag", True, None), RANKS, DISTURBED)
    check("all_gather", ("contiguous", True, None), RANKS, Disturbance(), overlap=False)


def test_the_prologue_is_extrapolated_from_fewer_ranks() -> None:
    """The prologue of backward for 44 ranks can be extrapolated from that for 24 and 28 ranks.

    In the first case, 28 ranks are on one node and 44 on two, where local work is split to hide the slower link.
    """
    two = replace(NODES, ranks_per_node=32, call_s=2e-5, flops=5e10, backward_flops=5e10)
    for schedule, mask, cluster, fewer, more in (
        ("ring", PLAIN[2], two, "fetched", "split"),
        ("ring", PLAIN[1], NODES, "fetched", "fetched"),
        ("all_gather", WINDOWS[1], NODES, "kept", "kept"),
    ):
        routes = routes_on(lambda ranks, mask=mask: problem_of(ranks, mask), schedule, cluster, (24, 28), 1, None)  # type: ignore[misc]
        assert {route.prologue for route in routes.values()} == {fewer}
        assert prologue_on(lambda ranks, mask=mask: problem_of(ranks, mask), routes, cluster, 44) == more  # type: ignore[misc]
        route = choose_route(problem_of(44, mask), schedule, cluster)
        assert route.prologue == more
        facts = [
            (ranks, prologue_facts(problem_of(ranks, mask), small_route, cluster))
            for ranks, small_route in routes.items()
        ]
        extrapolated, exact = facts_beyond(facts, 44), prologue_facts(problem_of(44, mask), route, cluster)
        assert extrapolated is not None and exact is not None
        assert [*extrapolated[:3], *extrapolated[4:]] == pytest.approx([*exact[:3], *exact[4:]])
        assert set(extrapolated.owners) == set(exact.owners)


def test_a_window_by_classes() -> None:
    check("direct", ("contiguous", True, (70, 0)), 37, DISTURBED)


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "ranks"), [*((mask, 35) for mask in PLAIN), *((mask, 30) for mask in WINDOWS)])
def test_rings_of_other_lengths(mask: Mask, ranks: int) -> None:
    check("ring", mask, ranks, DISTURBED)
    check("ring", mask, ranks, Disturbance())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "mask"),
    [
        ("direct", PLAIN[3]),
        ("direct", WINDOWS[2]),
        ("bidirectional", PLAIN[2]),
        ("balanced", PLAIN[1]),
        ("pass_q", PLAIN[1]),
    ],
)
def test_other_schedules_by_classes(schedule: str, mask: Mask) -> None:
    check(schedule, mask, 45, DISTURBED)


DRAWN = 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(DRAWN))
def test_drawn_schedules_by_classes(seed: int) -> None:
    """Both simulations agree for random schedules, layouts, masks, ranks, nodes, and slow ranks and links."""
    draw = Random(seed)
    schedule = draw.choice(["ring", "sub_rings", "all_gather", "double_ring", "double_ring"])
    group = draw.choice([2, 3]) if schedule == "double_ring" else 1
    nodes = draw.choice([group, 2 * group, 5, 64])
    ranks = draw.randrange(11, 17) * group if group > 1 else draw.randrange(24, 40)
    name = f"{schedule}:{group}" if group > 1 else schedule
    cluster = replace(NODES, ranks_per_node=nodes, flops=draw.choice([1e10, 2e11, 4e12]))
    slow = Disturbance(((draw.randrange(ranks), 1.7),), ((0, draw.randrange(1, ranks), 30.0),), 0.3, seed)
    mask = draw.choice([*PLAIN, WINDOWS[0], WINDOWS[2]] if group == 1 else PLAIN)
    check(name, mask, ranks, draw.choice([Disturbance(), slow]), draw.random() < 0.8, cluster)


def test_a_straggler_holds_up_every_rank_that_waits_for_it() -> None:
    """A rank that computes half as fast makes a ring take about twice the time, and all other ranks wait for it."""
    learned = full_ring_with_free_links()
    even = play(learned, FREE, 1024)
    slow = play(learned, FREE, 1024, disturbance=Disturbance(((512, 2.0),)))
    assert 1.9 < slow.total_s / even.total_s < 2.1
    assert slow.waiting_s[512] < 0.01 * slow.total_s < 0.4 * slow.total_s < np.delete(slow.waiting_s, 512).min()


def test_a_ring_of_thousands_by_hand() -> None:
    """Without a mask and with links that cost nothing, each step of a large ring takes the work of one block."""
    times = play(full_ring_with_free_links(), FREE, 4096)
    assert times.total_s == pytest.approx(4096 * SHARD * SHARD * 4 * 4 * 64 / 2e11)
    assert times.exposed_s.max() == pytest.approx(0.0, abs=1e-12)


def test_cells_that_differ_are_refused() -> None:
    """A schedule is refused if the classes that are learned from different numbers of ranks disagree.

    With striped shards, the number of rows inside a window depends on the number of ranks.
    """
    with pytest.raises(UnsupportedError, match="'ring' with layout='striped' has no classes of ranks"):
        classes_of(lambda ranks: problem_of(ranks, ("striped", True, (70, 0))), "ring", NODES, 0, 2)


def test_unsupported_schedules_and_clusters_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="schedule='ulysses' cannot be simulated by classes of ranks"):
        classes_of(lambda ranks: problem_of(ranks, PLAIN[1]), "ulysses", NODES, 0)
    with pytest.raises(UnsupportedError, match="groups of 72 ranks are too large to plan"):
        classes_of(lambda ranks: problem_of(ranks, PLAIN[1]), "double_ring", NODES, 0, group=72)
    with pytest.raises(InputError, match="for each of 14 groups, one for each head, but at most 262144"):
        classes_of(lambda ranks: problem_of(ranks, PLAIN[2], heads=32), "ulysses_ring", NODES, 0, group=16)
    with pytest.raises(UnsupportedError, match="the window reaches 9 shards"):
        classes_of(lambda ranks: problem_of(ranks, PLAIN[1]), "ring", NODES, 0, 9)
    learned = full_ring_with_free_links()
    with pytest.raises(UnsupportedError, match="its ranks share processors"):
        play(learned, CLUSTERS["cpu"], 64)
    joined = replace(FREE, links=Links((0, 0, 1, 1)))
    with pytest.raises(UnsupportedError, match="its links are listed rank by rank"):
        play(learned, joined, 64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Disturbance(slow_ranks=((1, 0.5),)), "slow_rank: the factor 0.5 must be at least 1"),
        (lambda: Disturbance(slow_links=((1, 1, 2.0),)), "slow_link: name each pair of different ranks once"),
        (lambda: Disturbance(slow_links=((1, 2, 2.0), (2, 1, 3.0))), "slow_link: name each pair"),
        (lambda: Disturbance(slow_ranks=((1, 2.0), (1, 3.0))), "slow_rank: name each rank once"),
        (lambda: Disturbance(jitter=-0.1), "neither may be negative"),
        (lambda: Disturbance(slow_ranks=((9, 2.0),)).check_ranks(8), "there is no rank 9, with ranks 0 to 7"),
    ],
)
def test_impossible_disturbances_are_refused(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]

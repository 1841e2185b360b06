"""The simulator's times equal times computed by hand, and obey bounds that hold for all plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringattn.core.geometry import Band, StridedRange
from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.core.span import COMM, COMPUTE
from ringattn.errors import InputError
from ringattn.planner.choose import plan_of
from ringattn.planner.cluster import (
    BACKWARD_OVER_FORWARD,
    REFERENCE,
    Cluster,
    LinkClass,
    Links,
    attention_s,
    computed_pairs,
    step_s,
)
from ringattn.planner.plan import Add, AttendOp, AttendReceivedOp, Plan
from ringattn.planner.simulate import Timeline, duration, simulate
from ringattn.schedule.routes import ROUTES
from tests.strategies import Case, covering

ROWS, DIM = 16, 64
PAIR_FLOPS = 4 * DIM
BLOCK_PAIRS = ROWS * ROWS
SHARD_BYTES = ROWS * 2 * DIM * 4


def problem_of(ranks: int, causal: bool = False, tokens: int = 0, layout: str = "contiguous") -> Problem:
    """Return a call with one float32 head of 64 dimensions and 16 rows per rank, or `tokens` rows in all."""
    tokens = tokens or ROWS * ranks
    rows = make_layout(layout, tokens, ranks)
    mask = Banded(causal).mask(tokens, tokens, None, None, 1, 1)
    return Problem(rows, rows, mask, 1, 1, 1, DIM, DIM, "float32")


def plans_of(problem: Problem, route: str = "ring", backward: bool = False) -> tuple[Plan, ...]:
    """Return the plans of all ranks."""
    return tuple(plan_of(problem, ROUTES[route], rank, backward) for rank in range(problem.world_size))


def block_us(cluster: Cluster) -> float:
    """Return the microseconds of computing all pairs of one shard's queries and one shard's keys."""
    return BLOCK_PAIRS * PAIR_FLOPS / cluster.flops * 1e6


def shard_us(cluster: Cluster) -> float:
    """Return the microseconds of sending one shard's K and V."""
    return (cluster.latency_s + SHARD_BYTES / cluster.bandwidth) * 1e6


# --- by hand ---------------------------------------------------------------------------------------------------------

SLOW_LINK = Cluster("a link as slow as work", 65.536e6, 8.192e6, 200e-6)
"""A cluster on which a full block takes 1000 us, and a message 200 + 1000 us (latency and transfer)."""


def test_a_margin_slows_every_step_and_no_message() -> None:
    """If a quarter of the multiprocessors is reserved, a block takes 4/3 of its time, and a message its usual time.

    So each of the two steps with work takes at least 4000 / 3 us.
    """
    gpu = replace(SLOW_LINK, sms=100)
    fast = replace(gpu, bandwidth=gpu.bandwidth * 1e6, latency_s=0.0)
    for cluster, exchange_us in ((gpu, 1200.0), (fast, shard_us(fast))):
        time = simulate(plans_of(problem_of(2)), cluster.leaving(25))
        assert time.total_us == pytest.approx(max(exchange_us, 4000 / 3) + 4000 / 3)


def test_messages_that_wait_for_work_follow_it() -> None:
    """Without overlap, every step has 1000 us of work, then 1200 us of messages. The last step has no messages."""
    for ranks in (2, 4):
        time = simulate(plans_of(problem_of(ranks)), SLOW_LINK, overlap=False)
        assert time.total_us == pytest.approx((ranks - 1) * 2200 + 1000)
        assert simulate(plans_of(problem_of(ranks)), SLOW_LINK).total_us == pytest.approx((ranks - 1) * 1200 + 1000)


def test_two_ranks_by_hand() -> None:
    # In step 0, both ranks compute their local block in 1000 us, while messages take 1200 us. Step 1 takes 1000 us.
    time = simulate(plans_of(problem_of(2)), SLOW_LINK)
    assert (block_us(SLOW_LINK), shard_us(SLOW_LINK)) == pytest.approx((1000, 1200))
    assert time.total_us == pytest.approx(2200)
    assert time.busy_us == pytest.approx((2000, 2000)) and time.waiting_us == pytest.approx((200, 200))
    assert time.exposed_us == pytest.approx((200, 200))
    for spans in time.spans:
        assert [(span.name, span.lane) for span in spans] == [
            ("step 0 attend", COMPUTE), ("step 0 exchange", COMM), ("step 1 attend", COMPUTE)
        ]  # fmt: skip
        assert [edge for span in spans for edge in span[2:]] == pytest.approx(
            [0, 1000, 0, 0, 1200, SHARD_BYTES, 1200, 2200, 0]
        )


def test_three_ranks_by_hand() -> None:
    # Causal and contiguous, by all-gather: rank 0 sends to both other ranks, and rank 1 sends to rank 2.
    # A local block has 136 of 256 pairs and takes 531.25 us. Rank 0 sends two shards over its link, and rank 2 receives
    # two: 200 + 2000 us. Then rank 0 is done, rank 1 computes one block of 1000 us, and rank 2 computes two.
    time = simulate(plans_of(problem_of(3, causal=True), "all_gather"), SLOW_LINK)
    assert time.total_us == pytest.approx(2200 + 2000)
    assert time.busy_us == pytest.approx((531.25, 1531.25, 2531.25))
    assert time.exposed_us == pytest.approx((1668.75, 1668.75, 1668.75))
    assert time.waiting_us == pytest.approx((3668.75, 2668.75, 1668.75))


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (0, 1)])
def test_both_ends_of_a_link_are_shared_by_hand(src: int, dst: int) -> None:
    # As above, without one of the three messages. Either rank 0 still sends two, or rank 2 still receives two.
    plans = list(plans_of(problem_of(3, causal=True), "all_gather"))
    for rank in (src, dst):
        first, *rest = plans[rank].steps
        sends = tuple(send for send in first.sends if (rank, send.peer) != (src, dst))
        recvs = tuple(recv for recv in first.recvs if (recv.peer, rank) != (src, dst))
        plans[rank] = replace(plans[rank], steps=(first._replace(sends=sends, recvs=recvs), *rest))
    exchanges = [
        span.end_us for spans in simulate(tuple(plans), SLOW_LINK).spans for span in spans if span.lane == COMM
    ]
    assert exchanges == pytest.approx([2200] * 3)


def test_ranks_share_processors_by_hand() -> None:
    # Causal and contiguous, two ranks on one processor, messages cost nothing. The local blocks take 531.25 us each, so
    # at half speed both end at 1062.5 us. Then rank 1 works alone for 1000 us.
    single = replace(SLOW_LINK, bandwidth=1e30, latency_s=0.0, cores=1)
    time = simulate(plans_of(problem_of(2, causal=True)), single)
    assert time.total_us == pytest.approx(2062.5)
    assert time.busy_us == pytest.approx((1062.5, 2062.5)) and time.exposed_us == pytest.approx((0, 0), abs=1e-6)
    # Two processors on one machine are enough, and so is one processor on each of two machines.
    for enough in (replace(single, cores=2), replace(single, ranks_per_node=1)):
        assert simulate(plans_of(problem_of(2, causal=True)), enough).total_us == pytest.approx(1531.25)


def test_carrying_messages_takes_processors_by_hand() -> None:
    # Two ranks share two processors, and the messages of each rank need half a processor more. So everything runs at
    # 2/3 speed. The 1000 us of work in step 0 end at 1500 us. The messages have 200 us left, which run at full speed
    # because nothing else runs. Step 1 takes 1000 us.
    time = simulate(plans_of(problem_of(2)), replace(SLOW_LINK, cores=2, wire_cores=0.5))
    assert time.total_us == pytest.approx(1500 + 200 + 1000)


def test_a_slow_link_takes_processors_by_its_rate_and_is_not_slowed_by_them() -> None:
    # One rank is on each of two nodes with one processor. Inside a node, messages would be four times as fast and
    # occupy a whole processor, so a message between nodes occupies a quarter. The message takes 1200 us, while work
    # runs at 1 / 1.25 speed and completes 960 of 1000 us. The other 40 us run alone. Step 1 takes 1000 us.
    slow = replace(SLOW_LINK, bandwidth=4 * SLOW_LINK.bandwidth, node_bandwidth=SLOW_LINK.bandwidth, cores=1,
                   wire_cores=1.0, ranks_per_node=1)  # fmt: skip
    assert simulate(plans_of(problem_of(2)), slow).total_us == pytest.approx(1200 + 40 + 1000)
    # A link that is faster than messages inside a node occupies as much of a processor as they do. Its messages wait
    # for processors like them.
    fast = replace(slow, node_bandwidth=16 * SLOW_LINK.bandwidth)
    same = replace(fast, bandwidth=16 * SLOW_LINK.bandwidth)
    assert simulate(plans_of(problem_of(2)), fast).total_us == simulate(plans_of(problem_of(2)), same).total_us


def test_links_between_machines_by_hand() -> None:
    # There are two machines of two ranks. The ring crosses between ranks 1 and 2, and between ranks 3 and 0.
    # Work costs nothing. Each of the 3 hops waits for the slowest link of the ring.
    free = Cluster("free work", 1e30, 1e30, 1e-6, ranks_per_node=2, node_bandwidth=8.192e6, node_latency_s=100e-6)
    assert simulate(plans_of(problem_of(4)), free).total_us == pytest.approx(3 * 1100)
    assert simulate(plans_of(problem_of(4)), replace(free, ranks_per_node=4)).total_us == pytest.approx(3)


def test_links_of_unlike_classes_by_hand() -> None:
    # One node has three ranks, the other has one. Ranks 1 and 2 are connected over PCIe. Work costs nothing. Every hop
    # waits for the network.
    links = Links((0, 0, 0, 1), LinkClass.NVLINK, ((1, 2, LinkClass.PCIE),))
    free = Cluster(
        "free work", 1e30, 1e30, 1e-6, node_bandwidth=8.192e6, node_latency_s=100e-6, pcie_bandwidth=16.384e6
    )
    plans = plans_of(problem_of(4))
    assert simulate(plans, free.joined(links)).total_us == pytest.approx(3 * 1100)
    # On one node, the pair over PCIe is the slowest: half the transfer time of the network, and the latency of a node.
    one_node = replace(free, links=replace(links, nodes=(0, 0, 0, 0)))
    assert simulate(plans, one_node).total_us == pytest.approx(3 * 501)
    # Each rank sends to the three others in one step, and messages of one link class share a link. Rank 1 is alone on
    # its node, so it sends three shards over the network.
    far = free.joined(Links((0, 1, 0, 0), LinkClass.NVLINK, ((0, 2, LinkClass.PCIE),)))
    assert simulate(plans_of(problem_of(4), "all_gather"), far).total_us == pytest.approx(100 + 3 * 1000)
    for ranks in (3, 5):
        with pytest.raises(InputError, match="join 4 ranks"):
            simulate(plans_of(problem_of(ranks)), far)


def test_ranks_share_processors_of_their_own_node_by_hand() -> None:
    # Each node has one processor. Ranks 0 and 2 share a node in `work`, and no ranks share a node in `alone`.
    work = Cluster("work alone", 65.536e6, 1e30, 0.0, cores=1, links=Links((0, 1, 0)))
    alone = replace(work, links=Links((0, 1, 2)))
    assert simulate(plans_of(problem_of(3)), alone).total_us == pytest.approx(3000)
    assert simulate(plans_of(problem_of(3)), work).total_us == pytest.approx(6000)


def test_packing_and_pass_precede_messages_by_hand() -> None:
    # The pass itself costs 100 us. Packing reads and writes the local K and V before they are sent. Work costs nothing.
    cluster = Cluster("copies", 1e30, 8.192e6, 0.0, copy_bytes_s=2 * 8.192e6, pass_s=100e-6)
    time = simulate(plans_of(problem_of(2)), cluster)
    first, packed, *_ = time.spans[0]
    assert first[:4] == ("begin", COMPUTE, 0, pytest.approx(100))
    assert packed[:4] == ("step 0 pack", COMPUTE, pytest.approx(100), pytest.approx(1100))
    exchange = next(span for span in time.spans[0] if span.lane == COMM)
    assert exchange.start_us == pytest.approx(1100) and exchange.end_us == pytest.approx(2100)


def test_calls_and_tiles_and_sums_by_hand() -> None:
    # One kernel call with one tile makes three passes over 16 rows of out, with 4 bytes per number.
    plan, cluster = plans_of(problem_of(1))[0], Cluster("calls", 1e30, 1, 0, call_s=1e-3, tile_s=1e-4, copy_bytes_s=1e6)
    assert step_s(plan, plan.steps[0], cluster) == pytest.approx(1e-3 + 1e-4 + 3 * ROWS * DIM * 4 / 1e6)


def test_a_pair_of_a_received_query_costs_more_dimensions_backward_by_hand() -> None:
    # `received_dims` adds DIM dimensions to each pair of a received query in backward, which doubles its time.
    more = replace(SLOW_LINK, received_dims=float(DIM))
    for backward in (False, True):
        plan = plans_of(problem_of(2), "pass_q", backward)[0]
        for step in plan.steps:
            received = [isinstance(item, AttendReceivedOp) for item in step.work if not isinstance(item, Add)]
            plain = step_s(plan, step, SLOW_LINK)
            assert step_s(plan, step, more) == pytest.approx(plain * (2 if backward and any(received) else 1))


def test_a_step_with_messages_costs_its_launches_by_hand() -> None:
    # Launching the messages takes 300 us after the 1000 us of work, in the two steps that send or receive.
    clusters = replace(SLOW_LINK, sync_s=300e-6), SLOW_LINK
    time, plain = (simulate(plans_of(problem_of(3)), cluster) for cluster in clusters)
    assert (plain.total_us, time.total_us) == pytest.approx((2 * 1200 + 1000, 2 * 1300 + 1000))
    assert simulate(plans_of(problem_of(1)), replace(SLOW_LINK, sync_s=1.0)).total_us == pytest.approx(1000)


def test_messages_hold_multiprocessors_while_they_travel_by_hand() -> None:
    # Messages occupy a quarter of the multiprocessors for 1200 us, so 300 us of work are done later. With a margin of
    # the same size, they use the reserved multiprocessors and delay no work.
    reserved = replace(SLOW_LINK, sms=100, message_sms=25)
    assert simulate(plans_of(problem_of(2)), reserved).total_us == pytest.approx(1300 + 1000)
    margin = reserved.leaving(25)
    assert simulate(plans_of(problem_of(2)), margin).total_us == pytest.approx(2 * 4000 / 3)
    # Each rank sends to two peers and receives from two peers in one step, so the messages take 200 + 2 * 1000 us.
    three = simulate(plans_of(problem_of(3), "all_gather"), replace(reserved, flops=1e30))
    assert three.total_us == pytest.approx(2200) and step_s_of_first(reserved) == pytest.approx(1000e-6 + 2200e-6 / 4)


def step_s_of_first(cluster: Cluster) -> float:
    """Return the seconds of rank 0's first step if each of three ranks sends to the two others at once."""
    plan = plans_of(problem_of(3), "all_gather")[0]
    return step_s(plan, plan.steps[0], cluster)


def test_one_pair_of_ranks_has_less_than_a_link_by_hand() -> None:
    # A message to one peer gets half of the link's bandwidth. So one message to a neighbour takes 200 + 2000 us, and
    # two messages to two peers at once take as long.
    pairs = replace(SLOW_LINK, peer_bandwidth=SLOW_LINK.bandwidth / 2)
    assert simulate(plans_of(problem_of(2)), pairs).total_us == pytest.approx(2200 + 1000)
    for cluster, expected in ((pairs, 2200), (SLOW_LINK, 2200)):
        assert simulate(plans_of(problem_of(3), "all_gather"), cluster).total_us == pytest.approx(expected + 2000)
    assert simulate(plans_of(problem_of(3)), pairs).total_us == pytest.approx(2 * 2200 + 1000)


def test_a_kernel_that_carries_its_state_passes_it_less_often_by_hand() -> None:
    plan, cluster = plans_of(problem_of(1))[0], Cluster("calls", 1e30, 1, 0, copy_bytes_s=1e6)
    for passes in (0, 2, 3):
        expected = passes * ROWS * DIM * 4 / 1e6
        assert step_s(plan, plan.steps[0], replace(cluster, state_passes=passes)) == pytest.approx(expected)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_a_causal_square_costs_whole_blocks() -> None:
    square, two = StridedRange(0, 512), StridedRange(0, 1024)
    causal = Band(0, 2000)
    assert computed_pairs(square, square, causal, 0) == 512 * 513 / 2
    assert computed_pairs(square, square, causal, 512) == 512 * 512
    assert computed_pairs(square, square, causal, 4096) == 512 * 512
    # With two blocks of keys, queries of the first half compute one block and the others compute two. The estimate is
    # off by half a pair per query.
    assert computed_pairs(two, two, causal, 512) == pytest.approx((512 + 1024) * 512, rel=1e-3)


def test_a_window_has_two_edges_and_full_tiles_none() -> None:
    q, k = StridedRange(1000, 100), StridedRange(0, 2000)
    assert computed_pairs(q, k, Band(0, 99), 64) == 100 * 100 + 2 * 100 * 32
    assert computed_pairs(q, k, Band(0, 9), 64) == 100 * 10 + 2 * 100 * 5  # an edge costs at most half of the band
    assert computed_pairs(StridedRange(0, 100), StridedRange(0, 50), Band(-1000, 1000), 64) == 5000


def test_softmax_counts_as_dimensions_and_backward_has_its_own_rate() -> None:
    problem = problem_of(1)
    plain = Cluster("plain", 1e9, 1, 0)
    assert attention_s(problem, 10, plain) == pytest.approx(10 * PAIR_FLOPS / 1e9)
    assert attention_s(problem, 10, replace(plain, softmax_dims=16)) == pytest.approx(10 * 4 * (DIM + 16) / 1e9)
    assert attention_s(problem, 10, plain, True) == pytest.approx(10 * PAIR_FLOPS * BACKWARD_OVER_FORWARD / 1e9)
    assert attention_s(problem, 10, replace(plain, backward_flops=5e8), True) == pytest.approx(
        10 * PAIR_FLOPS * BACKWARD_OVER_FORWARD / 5e8
    )


# --- bounds for all plans --------------------------------------------------------------------------------------------

COSTLY = Cluster("all costs", 1e8, 1e7, 1e-4, call_s=1e-5, copy_bytes_s=1e8, tile_s=1e-6, block_keys=4, pass_s=1e-4)


def all_times(case: Case, cluster: Cluster) -> list[tuple[tuple[Plan, ...], Timeline]]:
    """Return (plans of all ranks, timeline) for both passes and three routes."""
    plans = [plans_of(case.problem, route, back) for route in ("ring", "direct", "ulysses") for back in (False, True)]
    return [(plan, simulate(plan, cluster)) for plan in plans]


@pytest.mark.slow
@covering
def test_no_rank_is_busier_than_the_whole(case: Case) -> None:
    for cluster in (COSTLY, replace(COSTLY, cores=2, wire_cores=0.5), replace(COSTLY, cores=1, ranks_per_node=2)):
        for plans, time in all_times(case, cluster):
            slack = 1e-6 * (1 + time.total_us)
            for rank, plan in enumerate(plans):
                work_us = sum(step_s(plan, step, cluster) for step in plan.steps) * 1e6
                assert time.busy_us[rank] >= work_us - slack  # shared processors only make it longer
                assert time.total_us >= time.busy_us[rank] + time.exposed_us[rank] - slack
                assert time.waiting_us[rank] == pytest.approx(time.total_us - time.busy_us[rank])
                sent = sum(span.nbytes for span in time.spans[rank])
                assert sent == plan.bytes_sent
                assert all(0 <= span.start_us <= span.end_us <= time.total_us + slack for span in time.spans[rank])


def test_plans_that_do_not_match_are_refused() -> None:
    plans = plans_of(problem_of(2))
    silent = replace(plans[1], steps=tuple(step._replace(sends=()) for step in plans[1].steps))
    with pytest.raises(InputError, match="different numbers of messages"):
        simulate((plans[0], silent), REFERENCE)
    # Each rank waits in its first step for a message that the other rank sends only in a later step.
    first, *rest = plans[1].steps
    late = (first._replace(sends=()), *rest[:-1], rest[-1]._replace(sends=first.sends))
    early = plans[0].steps
    stuck = replace(plans[0], steps=(early[0]._replace(sends=()), early[1]._replace(sends=early[0].sends)))
    with pytest.raises(InputError, match="never ends step 0"):
        simulate((stuck, replace(plans[1], steps=late)), REFERENCE)
    # The error shows the number of the step in the schedule, not its index in the plan.
    later = (replace(plan, steps=tuple(step._replace(number=step.number + 3) for step in plan.steps))
             for plan in (stuck, replace(plans[1], steps=late)))  # fmt: skip
    with pytest.raises(InputError, match="never ends step 3"):
        simulate(tuple(later), REFERENCE)


def test_work_of_every_kind_is_counted() -> None:
    # With ulysses, ranks compute received heads and merge outputs. At half the copy rate, both must take twice as long.
    for backward in (False, True):
        plans = plans_of(problem_of(2, tokens=48), "ulysses", backward)
        kinds = {type(item) for plan in plans for step in plan.steps for item in step.work}
        assert kinds & {AttendOp, AttendReceivedOp, Add}
        slow, fast = (simulate(plans, Cluster("c", 1e30, 1e30, 0, copy_bytes_s=rate)).total_us for rate in (1e6, 2e6))
        assert slow == pytest.approx(2 * fast)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (4e-9, "<0.01 us"),
        (2.5e-8, "0.025 us"),
        (163.24e-6, "163.2 us"),
        (0.99996e-3, "1 ms"),
        (15.325e-3, "15.32 ms"),
        (0.99999, "1 s"),
        (999.94, "999.9 s"),
        (999.96, "1,000 s"),
        (49_148_257.2, "49,148,257 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text

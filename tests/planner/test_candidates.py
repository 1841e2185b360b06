"""The schedule that "auto" chooses on known machines follows from plans, has a reason, and is the same on all ranks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import ringattn
from ringattn.core.dilation import Dilated
from ringattn.core.layout import make_layout
from ringattn.core.mask import Banded
from ringattn.core.problem import Problem
from ringattn.core.tiling import tiles_of
from ringattn.errors import InputError
from ringattn.planner import candidates, choose
from ringattn.planner.candidates import (
    MUST_GAIN,
    PLAYED_RANKS,
    RECOGNISED_MUST_GAIN,
    Candidate,
    by_closed_form,
    counts,
    forward_seconds,
    how_chosen,
    least_s,
    ring_is_near,
    table_of,
)
from ringattn.planner.choose import choose_route, compared, plan_of
from ringattn.planner.cluster import CLUSTERS, REFERENCE, Cluster, Exchange, LinkClass, Links, exchanges
from ringattn.planner.simulate import simulate
from ringattn.schedule.content import size
from ringattn.schedule.ops import Kind
from ringattn.schedule.routes import ROUTES, schedule_of
from ringattn.testing import run_ranks
from tests.schedules import SUB_RINGS, ULYSSES
from tests.strategies import geometric


def problem_of(
    ranks: int, shard: int = 256, heads: int = 4, kv_heads: int = 4, layout: str = "zigzag", causal: bool = True
) -> Problem:
    """Return a call with heads of 64 dimensions in bfloat16."""
    tokens = ranks * shard
    rows = make_layout(layout, tokens, ranks)
    mask = Banded(causal).mask(tokens, tokens, None, None, heads, kv_heads)
    return Problem(rows, rows, mask, 1, heads, kv_heads, 64, 64, "bfloat16")


def machines(nodes: tuple[int, ...], **constants: float) -> Cluster:
    """Return a cluster with fast arithmetic, and the given nodes and constants."""
    facts = {"bandwidth": 1e9, "latency_s": 1e-6, "node_bandwidth": 1e8, **constants}
    return Cluster("machines", 1e13, links=Links(nodes, LinkClass.NVLINK), **facts)  # type: ignore[arg-type]


ONE = machines((0,) * 4)
TWO = machines((0, 0, 1, 1))


def by_name(table: tuple[Candidate, ...]) -> dict[str, Candidate]:
    return {candidate.schedule: candidate for candidate in table}


@pytest.mark.parametrize("cluster", [ONE, TWO], ids=["one node", "two nodes"])
def test_every_schedule_is_predicted_from_its_plans_or_left_out_with_a_reason(cluster: Cluster) -> None:
    problem = problem_of(4)
    table = compared(problem, cluster)
    assert sorted(candidate.schedule for candidate in table) == sorted(ROUTES)
    assert [candidate.schedule for candidate in table if not candidate.why] == [table[0].schedule]
    played = [candidate for candidate in table if candidate.seconds is not None]
    assert len(played) >= 6 and all(candidate.why for candidate in table if candidate.seconds is None)
    for candidate in played:
        plans = [tuple(plan_of(problem, candidate.route, rank, back) for rank in range(4)) for back in (False, True)]
        assert candidate.seconds == pytest.approx(sum(simulate(each, cluster).total_us for each in plans) / 1e6), (
            candidate
        )
        assert candidate.peak_bytes == max(plan.arena_bytes for each in plans for plan in each)
    # No schedule that "auto" may choose is clearly faster than the chosen one.
    fits = [candidate.seconds for candidate in played if candidate.seconds and "stages" not in candidate.why]
    assert table[0].seconds is not None and table[0].seconds * (1 - MUST_GAIN) <= min(fits)
    assert choose_route(problem, "auto", cluster).name == table[0].schedule


def test_nodes_and_links_decide() -> None:
    """On a slow network between nodes, another schedule is chosen than on fast links within a node."""
    assert choose_route(problem_of(4, 4096), "auto", machines((0,) * 4, bandwidth=1e12)).name == "ring"  # all is hidden
    network = machines((0, 0, 1, 1), node_bandwidth=1e9, bandwidth=1e12, node_peer_bandwidth=1e8)
    table = by_name(compared(problem_of(4, 1024), network))
    ring, double = table["ring"].seconds, table["double_ring"].seconds
    assert ring is not None and double is not None and double < ring
    # Between nodes, a pair of ranks gets a tenth of a GPU's bandwidth. A ring uses one pair of ranks per node boundary,
    # an all-to-all several.
    assert choose_route(problem_of(4, 1024), "auto", network).name != "ring"
    # With a causal mask and contiguous shards, a ring is idle for half of its work time, but partitioning by heads is
    # balanced.
    contiguous = problem_of(4, 4096, layout="contiguous")
    assert choose_route(contiguous, "auto", machines((0,) * 4, bandwidth=1e12)).name in ("ulysses", "balanced")


def test_a_choice_needs_a_gain_and_room() -> None:
    problem = problem_of(4, 1024, kv_heads=1)
    wide = machines((0,) * 4, bandwidth=1e12)
    table = by_name(compared(problem, wide))
    assert choose_route(problem, "auto", wide).name == table["ring"].schedule  # no schedule saves three percent
    crowd = by_name(compared(problem_of(16, 64), machines((0,) * 16, latency_s=1e-3)))
    # All-gather is the fastest here, but is not chosen, because each rank would hold 15 remote shards at a time.
    least = min(candidate.seconds for candidate in crowd.values() if candidate.seconds is not None)
    assert crowd["all_gather"].seconds == least and "stages" in crowd["all_gather"].why
    assert crowd["ulysses"].seconds is None and "more than 8 ranks" in crowd["ulysses"].why


def test_a_schedule_that_cannot_save_a_tenth_is_not_planned_on_eight_ranks() -> None:
    # Work takes nearly all of the time, so no schedule that moves queries can save anything.
    table = by_name(compared(problem_of(8, 2048, kv_heads=1), replace(machines((0,) * 8, bandwidth=1e12), flops=1e11)))
    for name in ("ulysses", "pass_q", "balanced"):
        assert table[name].seconds is None and "at least" in table[name].why, name
    matched = re.search(r"at least ([\d.]+) ms", table["ulysses"].why)
    assert matched
    least = float(matched[1]) / 1e3
    assert table["ring"].seconds is not None and 0.9 * table["ring"].seconds <= least <= table["ring"].seconds


def test_nodes_of_unequal_size_have_no_double_ring_and_the_reason_is_given() -> None:
    table = by_name(compared(problem_of(4), machines((0, 0, 0, 1))))
    assert table["double_ring"].seconds is None and "node" in table["double_ring"].why
    assert choose_route(problem_of(4), "auto", machines((0, 0, 0, 1))).name != "double_ring"


def test_a_closed_form_decides_for_more_ranks_than_are_simulated() -> None:
    h100 = CLUSTERS["h100"]
    problem = problem_of(32, 8192, 64, 8)
    assert problem.world_size > PLAYED_RANKS
    seconds = by_closed_form(problem, h100)
    for name, taken in seconds.items():
        # The closed form counts neither packing nor the memory traffic of the softmax state.
        route = choose_route(problem, name, h100)
        plans = tuple(plan_of(problem, route, rank, False) for rank in range(32))
        assert taken * 1e6 == pytest.approx(simulate(plans, replace(h100, copy_bytes_s=None)).total_us, rel=0.15), name
    assert choose_route(problem, "auto", h100).name == "double_ring"
    assert choose_route(problem, "auto", replace(h100, ranks_per_node=32)).name == "ring"


def test_without_constants_the_choice_is_by_mask_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "compared", lambda *_: pytest.fail("these machines are unknown"))
    for cluster in (REFERENCE, REFERENCE.joined(Links((0, 1, 2, 3)))):
        assert choose_route(problem_of(4), "auto", cluster).name == "ring"
        assert "no constants of these machines" in how_chosen((), problem_of(4), cluster)


def test_all_ranks_choose_equally_and_attend_exactly() -> None:
    """All ranks choose the same schedule, each by itself and for the ring's cluster, and attention is exact."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 24, 4, 8, dtype=torch.float64) for _ in range(3))

    def of_rank(ring: ringattn.Ring) -> tuple[str, torch.Tensor]:
        choose.compared.cache_clear()
        seq = ring.sequence(24, layout="contiguous")
        out = ring.attention(*(seq.shard(x) for x in (q, k, v)), seq, causal=True)
        text = str(ring.explain(seq, q_heads=4, head_dim=8, causal=True, dtype="float64", cluster=ring.cluster))
        return text, seq.gather(out)

    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    names = set()
    for cluster in (ONE, machines((0, 0, 1, 1), latency_s=1e-3), machines((0, 1, 2, 3), bandwidth=1e3)):
        results = run_ranks(4, of_rank, cluster=cluster)
        assert len({text for text, _ in results}) == 1
        for text, out in results:
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
            assert "predicted for machines, forward and backward" in text and "ms by layout: contiguous" in text
        names.add(results[0][0].split()[0])
    assert len(names) > 1, names


def test_rings_with_different_machines_are_refused() -> None:
    x = torch.zeros(1, 8, 4, 8)

    def of_rank(ring: ringattn.Ring) -> str:
        ring.machines = REFERENCE if ring.rank else machines((0,) * 4, latency_s=1.0)
        seq = ring.sequence(32, layout="contiguous")
        with pytest.raises(InputError, match="schedule"):
            ring.attention(x, x, x, seq)
        return choose_route(problem_of(4, 8, 4, 4, "contiguous", False), "auto", ring.machines).name

    assert len(set(run_ranks(4, of_rank))) == 2
    with pytest.raises(InputError, match="join 4 ranks, but there are 2"):
        run_ranks(2, lambda ring: None, cluster=ONE)
    with pytest.raises(InputError, match="did you mean h100"):
        ringattn.Ring(cluster="h10")


def test_the_table_is_aligned_and_names_the_chosen_schedule() -> None:
    table = compared(problem_of(4), ONE)
    lines = table_of(table)
    assert len(lines) == len(table) + 1 and lines[1].endswith("taken") and lines[1].startswith(table[0].schedule)
    assert len({line.index(f"{entry.seconds * 1e3:.3f}") + len(f"{entry.seconds * 1e3:.3f}")
                for line, entry in zip(lines[1:], table, strict=False) if entry.seconds is not None}) == 1  # fmt: skip


def test_the_table_has_a_column_for_each_transport_and_margin() -> None:
    """The table of schedules has a column for each transport and margin that the constants distinguish.

    The same plans give the times of all columns. The first column decides which schedule is chosen.
    """
    h100 = replace(CLUSTERS["h100"], links=Links((0,) * 4, LinkClass.NVLINK))
    over = exchanges(Exchange("nccl", 4), h100, 4)
    assert over == (Exchange("nccl", 4), Exchange("nccl", 8), Exchange("nccl"), Exchange("peer"))
    problem = problem_of(4, 512, layout="contiguous")
    current, *others = (candidate.on(h100) for candidate in over)
    assert current == h100.leaving(4) and others == [h100.leaving(8), h100, h100.by_copy_engines()]
    table = compared(problem, current, *others)
    assert table[0].schedule == compared(problem, current)[0].schedule == choose_route(problem, "auto", current).name
    for candidate in (each for each in table if each.seconds is not None):
        plans = [tuple(plan_of(problem, candidate.route, rank, back) for rank in range(4)) for back in (False, True)]
        times = [sum(simulate(each, machine).total_us for each in plans) / 1e6 for machine in (current, *others)]
        assert [candidate.seconds, *candidate.elsewhere] == pytest.approx(times), candidate.schedule
    lines = table_of(table, tuple(map(str, over)))
    assert max(map(len, lines)) <= 100
    titles = ["nccl, 4 SMs", "nccl, 8 SMs", "nccl, 0 SMs", "peer", "staged MiB"]
    assert [title.strip() for title in lines[1].split("  ") if title.strip()] == ["schedule", *titles]
    (double,) = (line for line in lines if line.startswith("double_ring"))
    assert double == "double_ring    one node: its hops cross the same links as the ring's"
    # Copy engines carry no messages between nodes. The constants of CPUs were measured with one transport only.
    across = replace(h100, links=Links((0, 0, 1, 1), LinkClass.NVLINK))
    assert exchanges(Exchange("nccl", 8), across, 4) == (Exchange("nccl", 8), Exchange("nccl"))
    assert exchanges(Exchange("gloo"), ONE, 4) == (Exchange("gloo"),) and Exchange("gloo").on(ONE) is ONE


def test_a_recognised_cluster_must_gain_more_and_keeps_no_blocks() -> None:
    named = machines((0,) * 4, latency_s=1e-4)
    recognised = replace(named, recognised=True)
    for shard, least, most in ((64, 0.2, 1.0), (1 << 14, MUST_GAIN, RECOGNISED_MUST_GAIN), (1 << 16, -1.0, MUST_GAIN)):
        problem = problem_of(4, shard)
        table = compared(problem, recognised)
        ring = by_name(table)["ring"]
        gain = 1 - min(
            candidate.seconds for candidate in table if candidate.seconds and "stages" not in candidate.why
        ) / (ring.seconds or 0)
        assert least < gain < most
        taken = choose_route(problem, "auto", recognised).name
        assert taken == table[0].schedule and (taken != "ring") == (gain > RECOGNISED_MUST_GAIN), gain
        assert (choose_route(problem, "auto", named).name != "ring") == (gain > MUST_GAIN), gain
        # If work takes nearly all of the ring's time, `ring_is_near` is true, and no other schedule is planned.
        assert ring_is_near(problem, recognised, ring.route, plan_of) == (shard == 1 << 16)
    slow = machines((0,) * 4, bandwidth=1e6)
    long = problem_of(4, 4096, heads=64, kv_heads=1)
    assert choose_route(long, "ring", slow).prologue == "kept"
    assert choose_route(long, "ring", replace(slow, recognised=True)).prologue != "kept"


def test_no_schedule_is_faster_than_its_work_spread_evenly_over_the_ranks() -> None:
    problem = packed("per_document", 2, 1)
    cluster = machines((0, 0, 1, 1), call_s=1e-6, tile_s=1e-7, copy_bytes_s=1e12, state_passes=1.0, bandwidth=1e12)
    table = [candidate for candidate in compared(problem, cluster) if candidate.seconds is not None]
    assert {candidate.schedule for candidate in table} > {"ring", "double_ring", "ulysses_ring", "pass_q", "balanced"}
    assert 0 < least_s(problem, cluster) <= min(candidate.seconds or 0.0 for candidate in table)


def packed(layout: str, q_heads: int = 4, kv_heads: int = 4) -> Problem:
    cuts = (0, 100, 612, 1024)
    rows = make_layout(layout, 1024, 4, cuts)
    mask = Banded(True).mask(1024, 1024, cuts, cuts, q_heads, kv_heads)
    return Problem(rows, rows, mask, 1, q_heads, kv_heads, 64, 64, "bfloat16")


def test_documents_are_predicted_if_the_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named, problem = machines((0, 0, 1, 1), latency_s=1e-3), packed("per_document", 2, 1)
    recognised = replace(named, recognised=True)
    assert choose_route(problem, "auto", named).name == compared(problem, named)[0].schedule != "ring"
    tiles = sum(len(table) for rank in range(4) for table in tiles_of(problem, rank).values()) * problem.q_heads
    monkeypatch.setattr(candidates, "PLACED_TILES", tiles)
    compared.cache_clear()
    assert by_name(compared(problem, recognised))["ulysses"].seconds is not None
    monkeypatch.setattr(candidates, "PLACED_TILES", tiles - 1)
    compared.cache_clear()
    table = by_name(compared(problem, recognised))
    for name in ("ulysses", "ulysses_ring", "pass_q", "balanced"):
        assert table[name].seconds is None and f"{tiles} tiles" in table[name].why, name
    assert table["ring"].seconds and table["all_gather"].seconds
    # With a named cluster, every schedule that could save a tenth is planned.
    assert by_name(compared(problem, named))["ulysses"].seconds is not None
    choose._chosen.cache_clear()
    monkeypatch.setattr(choose, "compared", lambda *_: pytest.fail("each new pack of documents would wait"))
    assert choose_route(problem, "auto", recognised).name == "double_ring"  # by mask, bytes and hops
    assert "would delay each pack of documents" in how_chosen((), problem, recognised)
    compared.cache_clear()
    choose._chosen.cache_clear()


# --- the closed forms of routes against their plans: rows, pairs, and times of the simulator --------------------------


def dilated(tokens: int, ranks: int, lengths: tuple[int, ...], rates: tuple[int, ...], heads: int = 16) -> Problem:
    """Return a call with dilated branches and heads of 64 dimensions in bfloat16."""
    layout = make_layout("contiguous", tokens, ranks)
    mask = Dilated(lengths, rates).mask(tokens, tokens, None, None, heads, heads)
    return Problem(layout, layout, mask, 1, heads, heads, 64, 64, "bfloat16")


SLOW = Cluster("slow links", 600e12, 20e9, 15e-6)
PROBLEMS = {
    "worked example": geometric(),
    "half of the work far away": dilated(1 << 14, 4, (512, 1 << 14), (1, 4)),
    "short": dilated(1 << 13, 8, (256, 1 << 13), (1, 2), 8),
    "ragged": dilated(5000, 4, (300, 1700, 5000), (1, 3, 5)),
}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))


@each_problem
def test_rows_and_pairs(problem: Problem) -> None:
    totals, ranks = counts(problem), problem.world_size
    pairs = [(rank == owner, table.area()) for rank in range(ranks)
             for (owner, _), table in tiles_of(problem, rank).items()]  # fmt: skip
    assert totals.local_pairs * ranks == sum(area for is_local, area in pairs if is_local)
    assert totals.remote_pairs * ranks == sum(area for is_local, area in pairs if not is_local)
    sent = {
        (route, kind): sum(size(copy.content) for step in schedule_of(problem, route, False).steps
                           for copy in step.copies if copy.block.kind is kind)
        for route in (SUB_RINGS, ULYSSES) for kind in (Kind.Q, Kind.KV, Kind.OUT)
    }  # fmt: skip
    assert totals.ring_rows * ranks == sent[SUB_RINGS, Kind.KV]
    # If the number of heads is not divisible by the ranks of a sub-ring, shares are uneven, but their sum is the same.
    for kind in (Kind.Q, Kind.KV, Kind.OUT):
        assert totals.partitioned_rows * ranks == pytest.approx(sent[ULYSSES, kind], rel=0.01)


def two_nodes(ranks: int, *, block: bool, inside: LinkClass = LinkClass.NVLINK) -> Cluster:
    """Return the reference cluster with its ranks on two nodes: in two halves if `block`, else alternating."""
    return REFERENCE.joined(Links(tuple(rank * 2 // ranks if block else rank % 2 for rank in range(ranks)), inside))


@each_problem
@pytest.mark.parametrize("nodes", ["blocks", "in turn"])
def test_rows_from_other_nodes(problem: Problem, nodes: str) -> None:
    ranks = problem.world_size
    cluster = two_nodes(ranks, block=nodes == "blocks")
    copies = [(cluster.node_of(copy.src) != cluster.node_of(copy.dst), size(copy.content))
              for step in schedule_of(problem, ULYSSES, False).steps for copy in step.copies
              if copy.block.kind is Kind.KV]  # fmt: skip
    across = sum(rows for leaves, rows in copies if leaves)
    share = across / sum(rows for _, rows in copies)
    assert counts(problem, cluster.node_of).partitioned_across == pytest.approx(share, abs=0.01)
    assert counts(problem).partitioned_across == 0 and not counts(problem).leaves


MACHINES = (REFERENCE, SLOW, "blocks", "in turn", "blocks over PCIe")


@pytest.mark.parametrize("machines", MACHINES, ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "worked example" else ()) for name in PROBLEMS]
)
def test_times_are_near_those_of_the_simulator(name: str, machines: Cluster | str) -> None:
    problem = PROBLEMS[name]
    cluster = machines if isinstance(machines, Cluster) else two_nodes(
        problem.world_size, block=machines != "in turn",
        inside=LinkClass.PCIE if "PCIe" in machines else LinkClass.NVLINK,
    )  # fmt: skip
    fetched = []
    for rank in range(problem.world_size):
        plan = plan_of(problem, ROUTES["all_gather"], rank, False)
        rows = [(cluster.node_of(recv.peer) == cluster.node_of(rank), size(plan.buffers[recv.buffer].content))
                for step in plan.steps for recv in step.recvs]  # fmt: skip
        fetched.append([sum(count for near, count in rows if near is inside) for inside in (True, False)])
    most = max(near for near, _ in fetched), max(far for _, far in fetched)
    for route, seconds in forward_seconds(problem, most, cluster).items():
        plans = tuple(plan_of(problem, ROUTES[route], rank, False) for rank in range(problem.world_size))
        assert seconds * 1e6 == pytest.approx(simulate(plans, cluster).total_us, rel=0.25), route


def test_the_fastest_is_taken() -> None:
    assert choose_route(geometric(), "auto").name == "all_gather"  # work hides the messages, one to each reader
    far = PROBLEMS["half of the work far away"]
    assert choose_route(far, "auto").name == "all_gather"  # on four ranks, two phases save too little,
    assert choose_route(far, "auto", SLOW).name == "ulysses"  # unless links are slow
    assert choose_route(dilated(1 << 15, 8, (512, 1 << 15), (1, 4)), "auto").name == "ulysses"
    # All-gather is not chosen: a rank cannot hold all remote rows at a time, and need not receive more than half of
    # them.
    assert choose_route(dilated(1 << 16, 8, (4096, 1 << 16), (1, 2)), "auto").name == "ulysses"
    # For pairs of ranks, partitioning heads saves nothing and takes two phases.
    assert choose_route(dilated(1 << 14, 4, (512, 1 << 13), (1, 2), 2), "auto", SLOW).name == "all_gather"


def test_the_network_decides_where_ranks_are_on_two_nodes() -> None:
    far = PROBLEMS["half of the work far away"]
    assert [choose_route(far, "auto", two_nodes(4, block=block)).name for block in (True, False)] == ["ulysses"] * 2
    # Sub-rings are chosen, unless the ranks of each segment are on two nodes.
    halves = dilated(1 << 15, 8, (1 << 14,), (2,))
    routes = [choose_route(halves, "auto", cluster)
              for cluster in (REFERENCE, two_nodes(8, block=True), two_nodes(8, block=False))]  # fmt: skip
    assert [route.name for route in routes] == ["sub_rings", "sub_rings", "ulysses"]
    with pytest.raises(InputError, match="join 4 ranks, but there are 8"):
        choose_route(halves, "auto", two_nodes(4, block=True))


@pytest.mark.parametrize(
    ("nodes", "cuts", "name"),
    [
        ((0, 0, 1, 1), (0, 512), "node_gather"),
        ((0, 1, 0, 1), (0, 512), "node_gather"),
        ((0, 0, 0, 0), (0, 512), "all_gather"),
        ((0, 0, 0, 1), (0, 512), "all_gather"),
        ((0, 0, 1, 1), (0, 128, 256, 384, 512), "all_gather"),
    ],
)
def test_tokens_placed_at_once_use_gates_on_several_equal_nodes(
    nodes: tuple[int, ...], cuts: tuple[int, ...], name: str
) -> None:
    rows = make_layout("documents", 512, 4, cuts, at_once=True)
    mask = Banded(True).mask(512, 512, cuts, cuts, 4, 1)
    problem = Problem(rows, rows, mask, 1, 4, 1, 64, 64, "bfloat16")
    route = choose_route(problem, "auto", REFERENCE.joined(Links(nodes)))
    assert route.name == name
    if name == "node_gather":
        ranks = range(4)
        assert route.grid == tuple(tuple(rank for rank in ranks if nodes[rank] == node) for node in (0, 1))


@pytest.mark.parametrize(("rows", "name"), [(26, "direct"), (30, "all_gather"), (31, "node_gather")])
def test_a_schedule_at_once_must_stage_all_rows_that_it_receives(
    rows: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = (0, 3, 7, 39, 64)
    layout = make_layout("documents", 64, 8, cuts, at_once=True)
    problem = Problem(layout, layout, Banded(True).mask(64, 64, cuts, cuts, 4, 1), 1, 4, 1, 64, 64, "bfloat16")
    # A rank reads at most 27 rows of others. A gate also receives 4 rows that it only sends on.
    row_bytes = 2 * 64 * (2 + 4)  # K and V in bfloat16, and their gradients in float32
    monkeypatch.setattr(choose, "STAGE_AT_MOST", rows * row_bytes / candidates.own_bytes(problem))
    choose._chosen.cache_clear()
    chosen = choose_route(problem, "auto", REFERENCE.joined(Links((0, 0, 0, 0, 1, 1, 1, 1))))
    choose._chosen.cache_clear()
    assert chosen.name == name

"""The closed forms of routes against their plans: rows, pairs, and times as the simulator plays them."""

from __future__ import annotations

import pytest

from ringattn.core.dilation import Dilated
from ringattn.core.layout import make_layout
from ringattn.core.problem import Problem
from ringattn.core.tiling import tiles_of
from ringattn.errors import InputError
from ringattn.planner.candidates import counts, forward_seconds
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import REFERENCE, Cluster, LinkClass, Links
from ringattn.planner.simulate import simulate
from ringattn.schedule.content import size
from ringattn.schedule.ops import Kind
from ringattn.schedule.routes import ROUTES, schedule_of
from tests.schedule.test_sub_rings import geometric
from tests.schedules import SUB_RINGS, ULYSSES


def dilated(tokens: int, ranks: int, lengths: tuple[int, ...], rates: tuple[int, ...], heads: int = 16) -> Problem:
    """Branches of heads of 64 in bfloat16."""
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
    found, ranks = counts(problem), problem.world_size
    pairs = [(rank == owner, table.area()) for rank in range(ranks)
             for (owner, _), table in tiles_of(problem, rank).items()]  # fmt: skip
    assert found.own_pairs * ranks == sum(area for own, area in pairs if own)
    assert found.other_pairs * ranks == sum(area for own, area in pairs if not own)
    sent = {
        (route, kind): sum(size(copy.content) for step in schedule_of(problem, route, False).steps
                           for copy in step.copies if copy.block.kind is kind)
        for route in (SUB_RINGS, ULYSSES) for kind in (Kind.Q, Kind.KV, Kind.OUT)
    }  # fmt: skip
    assert found.ring_rows * ranks == sent[SUB_RINGS, Kind.KV]
    # Heads that their ring's members do not divide are dealt unevenly, which costs the same in sum.
    for kind in (Kind.Q, Kind.KV, Kind.OUT):
        assert found.dealt_rows * ranks == pytest.approx(sent[ULYSSES, kind], rel=0.01)


def two_nodes(ranks: int, *, block: bool, inside: LinkClass = LinkClass.NVLINK) -> Cluster:
    """The reference, its ranks on two nodes, one after another or in turn."""
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
    assert counts(problem, cluster.node_of).dealt_across == pytest.approx(share, abs=0.01)
    assert counts(problem).dealt_across == 0 and not counts(problem).leaves


@each_problem
@pytest.mark.parametrize("machines", [REFERENCE, SLOW, "blocks", "in turn", "blocks over PCIe"], ids=str)
def test_times_are_near_those_of_the_simulator(problem: Problem, machines: Cluster | str) -> None:
    cluster = machines if isinstance(machines, Cluster) else two_nodes(
        problem.world_size, block=machines != "in turn",
        inside=LinkClass.PCIE if "PCIe" in machines else LinkClass.NVLINK,
    )  # fmt: skip
    fetched = []
    for rank in range(problem.world_size):
        plan = plan_of(problem, ROUTES["all_gather"], rank, False)
        rows = [(cluster.node_of(one.peer) == cluster.node_of(rank), size(plan.buffers[one.buffer].content))
                for step in plan.steps for one in step.recvs]  # fmt: skip
        fetched.append([sum(count for near, count in rows if near is inside) for inside in (True, False)])
    most = max(near for near, _ in fetched), max(far for _, far in fetched)
    for name, seconds in forward_seconds(problem, most, cluster).items():
        plans = tuple(plan_of(problem, ROUTES[name], rank, False) for rank in range(problem.world_size))
        assert seconds * 1e6 == pytest.approx(simulate(plans, cluster).total_us, rel=0.25), name


def test_the_fastest_is_taken() -> None:
    assert choose_route(geometric(), "auto").name == "all_gather"  # hidden, and one message to each reader
    far = PROBLEMS["half of the work far away"]
    assert choose_route(far, "auto").name == "all_gather"  # four ranks save too little for two phases,
    assert choose_route(far, "auto", SLOW).name == "ulysses"  # unless bytes are dear
    assert choose_route(dilated(1 << 15, 8, (512, 1 << 15), (1, 4)), "auto").name == "ulysses"
    # Too much to hold at once, and more than half of it need not travel.
    assert choose_route(dilated(1 << 16, 8, (4096, 1 << 16), (1, 2)), "auto").name == "ulysses"
    # Pairs of ranks: dealing heads out saves nothing and takes two phases.
    assert choose_route(dilated(1 << 14, 4, (512, 1 << 13), (1, 2), 2), "auto", SLOW).name == "all_gather"


def test_the_network_decides_where_ranks_are_on_two_nodes() -> None:
    far = PROBLEMS["half of the work far away"]
    assert [choose_route(far, "auto", two_nodes(4, block=block)).name for block in (True, False)] == ["ulysses"] * 2
    # Rings of the ranks of a node, unless the ranks of each segment are on two.
    halves = dilated(1 << 15, 8, (1 << 14,), (2,))
    routes = [choose_route(halves, "auto", cluster)
              for cluster in (REFERENCE, two_nodes(8, block=True), two_nodes(8, block=False))]  # fmt: skip
    assert [route.name for route in routes] == ["sub_rings", "sub_rings", "ulysses"]
    with pytest.raises(InputError, match="join 4 ranks, and there are 8"):
        choose_route(halves, "auto", two_nodes(4, block=True))

"""The two placements of documents: which one a sequence gets, and the effect on "auto" and `explain`.

One placement suits schedules in steps, the other suits `all_gather`, which fetches all rows at once.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import ringattn
from ringattn import masks
from ringattn.core.areas import areas_of
from ringattn.core.geometry import StridedRange
from ringattn.core.layout import causal_documents, make_layout
from ringattn.core.mask import make_mask
from ringattn.core.placement import placed_at_once
from ringattn.core.problem import Problem
from ringattn.errors import InputError
from ringattn.launch.config import load
from ringattn.launch.pictures.show import ExplainConfig, explanation_of
from ringattn.planner.candidates import how_chosen
from ringattn.planner.choose import choose_route
from ringattn.planner.cluster import CLUSTERS, REFERENCE, Cluster, Links
from ringattn.planner.layouts import RECEIVED_AT_MOST, RECEIVED_UNKNOWN, suits_at_once
from ringattn.schedule.double_ring import DoubleRing
from ringattn.schedule.routes import ROUTES
from ringattn.testing import run_ranks

H100 = CLUSTERS["h100"]
SHORT = (0, 90, 170, 240, 300, 350, 390, 420, 440, 450)
MIDDLE = (0, 200, 250, 300, 350, 400, 450)
LONG = (0, 440, 445, 450)


def problem_of(cuts: tuple[int, ...], ranks: int, at_once: bool, heads: int = 1, kv_heads: int = 1) -> Problem:
    laid = make_layout("documents", cuts[-1], ranks, cuts, at_once=at_once)
    mask = make_mask(cuts[-1], cuts[-1], causal=True, documents=cuts, kv_documents=cuts)
    return Problem(laid, laid, mask, 1, heads, kv_heads, 64, 64, "bfloat16")


def suits(cuts: tuple[int, ...], schedule: str, machines: Cluster) -> bool:
    return suits_at_once(causal_documents(cuts), cuts[-1], 4, schedule, machines)


def received(cuts: tuple[int, ...], ranks: int) -> float:
    """Return the largest number of rows that a rank receives if all are fetched at once, in shards."""
    mask = causal_documents(cuts)
    load = areas_of(mask, cuts[-1]).load(placed_at_once(mask, cuts[-1], ranks))
    return max(load.received) * ranks / cuts[-1]


def test_a_named_schedule_decides_and_auto_counts_rows() -> None:
    assert 0 < received(SHORT, 4) <= RECEIVED_UNKNOWN < received(MIDDLE, 4) <= RECEIVED_AT_MOST < received(LONG, 4)
    for cuts in (SHORT, MIDDLE, LONG):
        assert {name for name in ROUTES if suits(cuts, name, H100)} == {"all_gather", "node_gather"}
    assert [suits(cuts, "auto", H100) for cuts in (SHORT, MIDDLE, LONG)] == [True, True, False]
    assert [suits(cuts, "auto", REFERENCE) for cuts in (SHORT, MIDDLE, LONG)] == [True, False, False]
    with pytest.raises(InputError, match="'rings' is not known"):
        suits(SHORT, "rings", H100)


def test_tokens_placed_by_node_that_do_not_fit_at_once_take_a_ring_of_nodes() -> None:
    links = replace(REFERENCE, links=Links((0, 0, 1, 1)))
    at_once = problem_of(LONG, 4, True)
    layout = replace(at_once.q_layout, ranks_per_node=2)
    by_node = replace(at_once, q_layout=layout, kv_layout=layout)
    assert choose_route(at_once, "auto", links).name in ("ring", "direct")
    route = choose_route(by_node, "auto", links)
    assert isinstance(route, DoubleRing) and route.grid == ((0, 1), (2, 3))


def test_on_several_nodes_auto_places_at_once_and_by_node() -> None:
    """Nodes count if each has equally many neighbouring ranks; other layouts, and rings of one node, ignore them."""
    nodes = {4: 0, 2: 2, 1: 0, 3: 0}  # ranks per node of the machines: what the placement of 4 ranks uses
    for size, used in nodes.items():
        machines = replace(H100, ranks_per_node=size)
        assert machines.ranks_of_equal_nodes(4) == used
        assert suits(LONG, "auto", machines) == bool(used)
        layout, *_ = run_ranks(
            4, lambda ring: ring.sequence(cu_seqlens=LONG, layout="documents").layout, cluster=machines
        )
        assert layout.at_once == bool(used) and layout.ranks_per_node == used
    mask = causal_documents(LONG)
    by_node = make_layout("documents", 450, 4, LONG, at_once=True, ranks_per_node=2)
    assert by_node.shards == tuple(
        tuple(StridedRange(start, stop - start) for start, stop in shard) for shard in placed_at_once(mask, 450, 4, 2)
    )
    for name, at_once in (("documents", False), ("zigzag", True)):
        assert make_layout(name, 450, 4, LONG, at_once=at_once, ranks_per_node=2).ranks_per_node == 0
    swapped = replace(H100, ranks_per_node=None, links=Links((0, 1, 0, 1)))
    assert swapped.ranks_of_equal_nodes(4) == 0


def test_placements_are_two_layouts_and_other_layouts_have_one() -> None:
    steps, at_once = (make_layout("documents", 450, 4, LONG, at_once=both) for both in (False, True))
    assert steps != at_once and steps.shards != at_once.shards and steps.counts == at_once.counts
    assert make_layout("per_document", 450, 4, LONG, at_once=True) == make_layout("per_document", 450, 4, LONG)


def test_on_unknown_machines_auto_fetches_all_rows_at_once_if_a_rank_can_hold_them() -> None:
    """Without constants of the machines, auto chooses all-gather for documents that are placed for it.

    But a rank must be able to hold all the rows that it needs. It can for these calls, except for LONG with one query
    head. There, with equal head counts, K and V are half of q, k, v and out, and three times as large with their
    float32 gradients.
    """
    for cuts, heads in ((SHORT, 1), (LONG, 8)):
        at_once = problem_of(cuts, 4, True, heads)
        assert choose_route(at_once, "auto").name == "all_gather"
        assert "placed for" in how_chosen((), at_once, REFERENCE)
        assert choose_route(problem_of(cuts, 4, False, heads), "auto").name in ("ring", "direct")
    assert received(LONG, 4) > 2 and choose_route(problem_of(LONG, 4, True), "auto").name in ("ring", "direct")


def test_a_ring_places_documents_for_the_schedule_that_is_named_and_explains_calls_with_another() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 450, 2, 8, dtype=torch.float64)
    expected = torch.cat([
        torch.nn.functional.scaled_dot_product_attention(*[x[:, a:b].transpose(1, 2)] * 3, is_causal=True)
        for a, b in pairwise(LONG)
    ], 2).transpose(1, 2)  # fmt: skip

    def of_rank(ring: ringattn.Ring) -> list[str]:
        texts = []
        for placed, called in (("all_gather", "ring"), ("all_gather", "auto"), ("ring", "ring"), ("auto", "auto")):
            seq = ring.sequence(cu_seqlens=LONG, layout="documents", schedule=placed)
            assert seq.layout.at_once == (placed != "ring")  # on two ranks, few rows are received
            out = ring.attention(*[seq.shard(x)] * 3, seq, causal=True, schedule=called)
            torch.testing.assert_close(seq.gather(out), expected)
            texts.append(str(ring.explain(seq, q_heads=2, head_dim=8, causal=True, schedule=called)))
        with pytest.raises(InputError, match="layout='zigzag' does not depend on it"):
            ring.sequence(450, layout="zigzag", schedule="all_gather")
        return texts

    for texts in run_ranks(2, of_rank, cluster=None):
        marks = ["tokens are placed for schedules that receive" in text for text in texts]
        assert marks == [True, False, False, False]
    machines = replace(H100, ranks_per_node=None)
    layouts = run_ranks(4, lambda ring: ring.sequence(cu_seqlens=SHORT, layout="documents").layout, cluster=machines)
    assert all(layout == layouts[0] and layout.at_once for layout in layouts)


def test_a_sequence_is_placed_for_its_mask_and_all_ranks_must_have_the_same() -> None:
    tree = masks.tree([-1, 0, 0, 0], [160, 100, 120, 70])

    def of_rank(ring: ringattn.Ring) -> tuple[ringattn.Sequence, str]:
        seq = ring.sequence(mask=tree, layout="mask", schedule="all_gather")
        changed = ring.sequence(
            mask=masks.tree([-1, 0, 0, 0], [160, 100, 119, 71]), layout="mask", schedule="all_gather"
        )
        text = str(ring.explain(seq, q_heads=2, head_dim=8, schedule="ring"))
        x = torch.zeros(1, 450, 2, 8)
        unequal = changed if ring.rank else seq
        assert unequal.counts == seq.counts
        with pytest.raises(ringattn.DisagreementError):
            unequal.gather(unequal.shard(x))
        return seq, text

    for seq, text in run_ranks(2, of_rank, cluster=None):
        assert seq.length == 450 and seq.mask == tree and seq.layout.name == "mask" and seq.layout.at_once
        assert "tokens are placed for schedules that receive" in text


def test_a_placement_for_a_mask_is_refused_by_name() -> None:
    slices = masks.slices([(0, 20)], [(0, 20)])
    with ringattn.Ring() as ring:
        with pytest.raises(InputError, match="layout='mask' needs mask="):
            ring.sequence(20, layout="mask")
        with pytest.raises(InputError, match="global_tokens needs a window"):
            ring.sequence(20, layout="mask", mask=masks.global_tokens(3))
        with pytest.raises(InputError, match="for_='window': layout='mask' places tokens for causal or full"):
            ring.sequence(20, layout="mask", mask=slices, for_="window")
        with pytest.raises(InputError, match="q_ranges end at 20, and the sequence has 19 tokens"):
            ring.sequence(19, layout="mask", mask=slices)
        with pytest.raises(InputError, match="sequence needs a length"):
            ring.sequence(layout="mask", mask=slices)
        with pytest.raises(InputError, match="mask=3 is not a mask"):
            ring.sequence(20, mask=3)  # type: ignore[arg-type]
        assert ring.sequence(20, mask=slices).mask == slices


@pytest.mark.parametrize("causal", [True, False])
def test_the_command_explain_places_for_the_mask_and_the_schedule_of_its_call(causal: bool) -> None:
    arguments = ["ranks=3", "tokens=90", "layout=mask", "mask=chunked:37", "schedule=all_gather"]
    planned = explanation_of(load([*arguments, f"causal={str(causal).lower()}"], ExplainConfig)).problem
    mask = make_mask(90, 90, causal=causal, mask=masks.chunked(37))
    assert planned.mask == mask and planned.q_layout == make_layout("mask", 90, 3, at_once=True, mask=mask)

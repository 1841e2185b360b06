"""End to end on threads against dense float64 attention: every mask, layout, schedule, world size, dtype and engine.

`make test` covers every pair of these values. `tests/fuzz` draws all other options, alone and together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

from ringattn import Ring, masks
from ringattn.bench.placement import TREES, draw_tree
from ringattn.core.layout import OF_DOCUMENTS
from ringattn.core.mask import AttentionMask
from ringattn.engine.base import KV, BackwardInputs, Output
from ringattn.engine.plain import PlainEngine
from ringattn.schedule.routes import ROUTES
from ringattn.testing import run_ranks
from tests.covering import thinned
from tests.poison import unset_is_nan
from tests.schedules import NEWER, share_in_turn
from tests.trial import Trial, greatest_error, inputs, joined, on_rank, reference, relative_error, run

DOCUMENTS = (0, 5, 5, 18, 19, 37)
TREE = masks.tree([-1, 0, 1, 1, 0, 0, 5, -1], [9, 4, 5, 0, 1, 3, 8, 7])
MASKS = {
    "full": Trial(),
    "causal": Trial(causal=True),
    "left": Trial(window=(6, 0)),
    "causal-left": Trial(causal=True, window=(9, None)),
    "two-sided": Trial(window=(3, 5)),
    "right": Trial(window=(-1, 4)),
    "documents": Trial(documents=DOCUMENTS),
    "causal-documents": Trial(causal=True, documents=DOCUMENTS),
    "causal-chunks": Trial(causal=True, within=masks.chunked(8), documents=DOCUMENTS),
    "prefix": Trial(causal=True, within=masks.prefix((5, 3, 9, 0, 2)), documents=DOCUMENTS),
    "global": Trial(window=(2, 1), within=masks.global_tokens(3), documents=DOCUMENTS),
    "blocks": Trial(
        causal=True,
        window=(4, 0),
        documents=DOCUMENTS,
        within=masks.bidirectional_blocks([(1, 4), (6, 15), (15, 18), (30, 37)]),
    ),
    "windowed-documents": Trial(window=(2, 4), documents=DOCUMENTS),
    "slices": Trial(
        within=masks.slices(
            [(0, 11), (4, 20), (11, 11), (20, 37), (21, 30)],
            [(0, 7), (9, 30), (1, 5), (0, 9), (30, 33)],
            ["causal", "bi_causal", "full", "inverse_causal", "full"],
        )
    ),
    "tree": Trial(within=TREE),
    "tree-window": Trial(causal=True, window=(6, 0), within=TREE),
    "by-head": Trial(
        causal=True, within=masks.by_head([(1, masks.chunked(8)), (1, masks.tree([-1, 0, 0], [20, 8, 9])), (2, None)])
    ),
}
SEVERAL = ("causal-chunks", "prefix", "global", "blocks", "slices", "tree", "tree-window", "by-head")
"""Masks of several rectangles. Engines receive ordinary tiles for them, so only slow float32 tests use them."""
LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "documents", "mask")
GRID = [
    (mask, layout)
    for mask, layout in product(MASKS, LAYOUTS)
    if (layout not in OF_DOCUMENTS or MASKS[mask].documents is not None)
    # Global tokens need a window, which is not known when a sequence is made.
    and (layout != "mask" or (MASKS[mask].within is not None and mask != "global"))
]
RANKS = (1, 2, 3, 4, 8)
ENGINES = ("plain", "aten")
EXACT = 1e-10
SINGLE = 1e-5
HALVES = 1.25


@pytest.mark.parametrize(
    ("mask", "layout", "ranks"),
    thinned(((*cell, ranks) for cell in GRID for ranks in RANKS), quick=lambda cell: cell[2] != 8),
)
def test_float64(mask: str, layout: str, ranks: int) -> None:
    """Results are exact in float64. Over the grid, each mask, layout and number of ranks runs with every schedule.

    A single cell runs a share of the schedules; the fuzzer draws all combinations.
    """
    number = list(MASKS).index(mask) + LAYOUTS.index(layout) + RANKS.index(ranks)
    trial = MASKS[mask]._replace(
        heads=(4, 2), sinks=layout == "zigzag", lse=layout == "striped",
        alibi=number % 3 == 0 and mask not in ("tree", "tree-window", "by-head"),
    )  # fmt: skip
    check_schedules(trial, layout, ranks, "plain", torch.float64, EXACT, share_in_turn(number, 5 if ranks == 8 else 3))


@pytest.mark.parametrize(
    ("mask", "layout", "ranks", "engine"),
    thinned(
        ((*cell, ranks, ENGINES[(number + ranks) % 2]) for number, cell in enumerate(GRID) for ranks in RANKS),
        quick=lambda cell: cell[0] not in SEVERAL,
    ),
)
def test_float32(mask: str, layout: str, ranks: int, engine: str) -> None:
    trial = MASKS[mask]._replace(heads=(4, 1), lse=layout == "contiguous")
    # One engine and one schedule per cell, in turn. The contract of engines covers the tiles of both engines, and
    # test_float64 covers what the other schedules send.
    turn = share_in_turn(list(MASKS).index(mask) + LAYOUTS.index(layout) + ranks, len(ROUTES))
    check_schedules(trial, layout, ranks, engine, torch.float32, SINGLE, turn)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_drawn_trees_and_slices_are_exact_where_they_are_placed(ranks: int) -> None:
    draw = Random(ranks)
    for shape in (*TREES, "slices", "slices"):
        tokens = draw.choice([37, 64, 101])
        if shape == "slices":
            edges = sorted(draw.sample(range(tokens + 1), 4))
            queries = [(0, edges[1]), (edges[1], edges[2]), (edges[2], tokens)]
            keys = [(edges[0], edges[2]), (0, edges[3]), (edges[0], tokens)]
            kinds = [draw.choice(["full", "causal", "inverse_causal", "bi_causal"]) for _ in queries]
            mask: AttentionMask = masks.slices(queries, keys, kinds)
        else:
            mask = draw_tree(draw, draw.randint(1, 12), tokens, shape)
        trial = Trial(tokens=tokens, within=mask, heads=(4, 2), lse=True)
        check_schedules(trial, "mask", ranks, "plain", torch.float64, EXACT, ["ring", "all_gather", "direct"])


def check_schedules(
    trial: Trial, layout: str, ranks: int, engine: str, dtype: torch.dtype, bound: float, schedules: Sequence[str]
) -> None:
    """Run all schedules on one ring, one after another in the same memory, and check the results of each."""
    with unset_is_nan():
        results = run_ranks(
            ranks, lambda ring: [on_rank(ring, trial, layout, schedule, dtype) for schedule in schedules],
            engine=engine, timeout_s=30.0, poison=True,
        )  # fmt: skip
    for schedule, parts in zip(schedules, zip(*results, strict=True), strict=True):
        assert greatest_error(joined(list(parts)), reference(trial, dtype)) <= bound, schedule


@pytest.mark.parametrize(
    ("mask", "layout", "ranks", "engine", "dtype"),
    thinned(
        product(
            ("full", "causal", "two-sided", "causal-documents"), ("contiguous", "zigzag"), (2, 4), ENGINES,
            (torch.bfloat16, torch.float16),
        )
    ),
)  # fmt: skip
def test_half_precision_is_as_exact_as_on_one_rank(
    mask: str, layout: str, ranks: int, engine: str, dtype: torch.dtype
) -> None:
    trial = MASKS[mask]._replace(heads=(4, 2), dims=(16, 16))
    expected = reference(trial, dtype)
    alone = run(trial, 1, layout, "ring", dtype, engine=engine)
    for schedule in ("ring", "direct", "all_to_all"):
        results = run(trial, ranks, layout, schedule, dtype, engine=engine)
        for name in ("out", "dq", "dk", "dv"):
            allowed = HALVES * relative_error(alone[name], expected[name])
            assert relative_error(results[name], expected[name]) <= allowed, (schedule, name)


STRIDED = Trial(batch=2, causal=True, heads=(4, 2), dims=(8, 4), strided=True)
BLIND_ROWS = Trial(
    documents=(0, 7, 20, 37), kv_tokens=15, kv_documents=(0, 9, 9, 15), causal=True, lse=True, heads=(4, 2)
)
BLIND_ROWS_WITH_SINKS = Trial(documents=(0, 7, 37), kv_tokens=15, kv_documents=(0, 0, 15), sinks=True, lse=True)


@pytest.mark.parametrize("engine", ["plain", "aten"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_rows_without_a_key_are_exactly_zero(ranks: int, engine: str) -> None:
    trial = BLIND_ROWS
    results = run(trial, ranks, "zigzag", "ring", torch.float32, engine=engine)
    blind = slice(7, 20)  # the second document of the queries has no keys
    assert (results["out"][:, blind] == 0).all() and (results["dq"][:, blind] == 0).all()
    assert (results["lse"][:, :, blind] == float("-inf")).all()
    assert results["lse"].isinf().sum() == trial.heads[0] * 13
    with_sinks = BLIND_ROWS_WITH_SINKS
    lse = run(with_sinks, ranks, "zigzag", "ring", torch.float32, engine=engine)["lse"]
    sinks = inputs(with_sinks, torch.float32).sinks
    assert sinks is not None and torch.equal(lse[:, :, :7], sinks[None, :, None].expand(1, -1, 7))


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_undefined_gradient_of_a_blind_lse_is_ignored(ranks: int) -> None:
    # The gradient of an lse of -inf is often inf or NaN. A sink of -inf has no effect: rows without keys keep this lse.
    trial = BLIND_ROWS._replace(sinks=True)
    trial_inputs = inputs(trial, torch.float64)

    def body(ring: Ring) -> list[torch.Tensor]:
        seq = ring.sequence(cu_seqlens=trial.documents, layout="zigzag")
        kv_seq = ring.sequence(cu_seqlens=trial.kv_documents, layout="striped")
        tensors = [
            seq.shard(trial_inputs.q),
            kv_seq.shard(trial_inputs.k),
            kv_seq.shard(trial_inputs.v),
            torch.full((4,), float("-inf")),
        ]
        leaves = [x.clone().double().requires_grad_() for x in tensors]
        *qkv, sinks = leaves
        out, lse = ring.attention(*qkv, seq, kv_seq=kv_seq, causal=True, sinks=sinks, return_lse=True)
        dlse = torch.where(lse.isinf(), float("nan"), 1.0)
        assert dlse.isnan().any() == ((seq.positions() >= 7) & (seq.positions() < 20)).any()
        return list(torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), dlse)))

    for grads in run_ranks(ranks, body, engine="plain", poison=True):
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[3] == 0).all()


def test_engines_get_rows_with_a_contiguous_last_dimension() -> None:
    class Strict(PlainEngine):
        """An engine that fails on inputs that the contract of engines excludes."""

        seen = 0

        def attend_grad(
            self,
            q: torch.Tensor,
            kv: KV,
            backward_inputs: BackwardInputs,
            dq: Output,
            dkv: Any,
            work: Any,
            result: Any = None,
        ) -> None:
            assert dq.carried is not None
            assert all(
                x.stride(-1) == 1
                for x in (q, *kv[:2], backward_inputs.dout, backward_inputs.out, dq.carried, *(dkv or result)[:2])
            )
            Strict.seen += 1
            super().attend_grad(q, kv, backward_inputs, dq, dkv, work, result)

    def body(ring: Ring) -> Any:
        ring.engine_for = lambda *_: Strict()  # type: ignore[method-assign]
        return on_rank(ring, STRIDED, "zigzag", "ring", torch.float64)

    assert greatest_error(joined(run_ranks(2, body)), reference(STRIDED, torch.float64)) <= EXACT
    assert Strict.seen >= 4


@pytest.mark.parametrize(
    ("schedule", "dtype", "engine"),
    thinned(product(ROUTES, (torch.float32, torch.bfloat16), ENGINES), quick=lambda cell: cell[0] not in NEWER),
)
def test_same_plan_same_bits(schedule: str, dtype: torch.dtype, engine: str) -> None:
    trial = Trial(causal=True, heads=(4, 2), sinks=True, lse=True)

    def twice(ring):
        return [on_rank(ring, trial, "zigzag", schedule, dtype) for _ in range(2)]

    runs = [joined(list(parts)) for parts in zip(*run_ranks(4, twice, engine=engine, poison=True), strict=True)]
    runs.append(run(trial, 4, "zigzag", schedule, dtype, engine=engine, poison=False))
    for again in runs[1:]:
        assert all(torch.equal(runs[0][name], again[name]) for name in runs[0])


@pytest.mark.parametrize("schedule", [name for name in ROUTES if name != "pass_q"])  # pass_q sends no dK and dV
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_narrow_wire_adds_only_its_rounding(layout: str, schedule: str) -> None:
    trial = Trial(causal=True, heads=(4, 2), dims=(16, 16))
    expected, ranks = reference(trial, torch.float32), 4
    results = run(trial, ranks, layout, schedule, torch.float32, dkv_wire_dtype=torch.bfloat16)
    assert greatest_error({n: results[n] for n in ("out", "lse", "dq")}, expected) <= SINGLE
    for name in ("dk", "dv"):
        # On P ranks, a partial sum is rounded at most P - 1 times, each by up to half a unit in the last of 8 bits.
        assert 2**-12 < relative_error(results[name], expected[name]) <= (ranks - 1) * 2**-9


@pytest.mark.parametrize(
    ("ranks", "schedule", "engine"), thinned(product((1, 3), ("ring", "all_gather", "all_to_all"), ENGINES))
)
def test_a_nan_query_changes_only_its_own_row(ranks: int, schedule: str, engine: str) -> None:
    trial_inputs, token, head = inputs(Trial(causal=True, heads=(4, 2)), torch.float32), 11, 2
    spoilt = trial_inputs.q.clone()
    spoilt[0, token, head, 5] = float("nan")

    def body(ring: Ring, q: torch.Tensor) -> list[torch.Tensor]:
        seq = ring.sequence(q.shape[1])
        local = [seq.shard(x).clone().requires_grad_() for x in (q, trial_inputs.k, trial_inputs.v)]
        out, lse = ring.attention(*local, seq, causal=True, schedule=schedule, return_lse=True)
        grads = torch.autograd.grad(out, local, seq.shard(trial_inputs.dout))
        return [seq.gather(x) for x in (out.detach(), lse.detach().transpose(1, 2), *grads)]

    results, clean = (
        run_ranks(ranks, lambda ring, q=q: body(ring, q), engine=engine)[0] for q in (spoilt, trial_inputs.q)
    )
    for ours, before in zip(results[:3], clean[:3], strict=True):  # out, lse, dq
        assert ours[0, token, head].isnan().all()
        ours[0, token, head] = before[0, token, head]
        assert torch.equal(ours, before)
    for ours, before in zip(results[3:], clean[3:], strict=True):  # dk, dv
        assert ours[0, : token + 1, head // 2].isnan().all()
        assert torch.equal(ours[0, :, 1 - head // 2], before[0, :, 1 - head // 2])

"""Attention with eight-bit K and V in messages is exact except for their rounding, whose effect and gain are as stated.

The ranks are threads. Not covered: how values are rounded in a buffer (see test_quantized_records.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import InputError, Ring
from ringattn.core.problem import EIGHT_BIT
from ringattn.planner.choose import plan_of
from ringattn.schedule.routes import ROUTES
from ringattn.testing import run_ranks
from tests.covering import thinned
from tests.face import attend, errors
from tests.fuzz.reference import Rounded, attention, plain_counts, shards
from tests.kernels.eight_bits import rounded
from tests.schedules import RING, share_in_turn
from tests.strategies import simple
from tests.trial import Results, Trial, greatest_error, inputs, joined, on_rank, reference, relative_error, run

SINGLE = 1e-5  # as in test_exact.py
HALVES = 1.25
CASE = simple("zigzag", 32, 4, causal=True).problem
each_code = pytest.mark.parametrize("code", EIGHT_BIT)

# --- exact except for rounding ---------------------------------------------------------------------------------------

TRIALS = {
    "causal": Trial(causal=True, heads=(4, 2), dims=(17, 20)),
    "window": Trial(window=(6, 4), heads=(4, 2), dims=(17, 20)),
    "documents": Trial(causal=True, documents=(0, 5, 5, 18, 19, 37), heads=(4, 2), dims=(17, 20)),
    "everything": Trial(
        tokens=41, causal=True, window=(11, 0), documents=(0, 13, 13, 41), batch=2, heads=(6, 3), dims=(17, 4),
        scale=0.5, softcap=2.0, sinks=True, strided=True,
    ),
    "cross": Trial(tokens=11, kv_tokens=50, kv_layout="zigzag", heads=(4, 2), batch=2),
    "fewer tokens than ranks": Trial(tokens=3, causal=True),
}  # fmt: skip


def rounded_reference(trial: Trial, dtype: torch.dtype, code: str, layout: str, ranks: int) -> Results:
    """Return the fuzzer's reference results if queries read local K and V unrounded, and remote K and V rounded."""
    trial_inputs = inputs(trial, dtype)
    leaves = {"dq": trial_inputs.q, "dk": trial_inputs.k, "dv": trial_inputs.v} | (
        {} if trial_inputs.sinks is None else {"dsinks": trial_inputs.sinks}
    )
    leaves = {name: x.double().requires_grad_() for name, x in leaves.items()}
    q, k, v, sinks = (leaves.get(name) for name in ("dq", "dk", "dv", "dsinks"))
    remote = [leaf + (rounded(x, code).double() - x.double()) for leaf, x in ((k, trial_inputs.k), (v, trial_inputs.v))]
    q_owner, k_owner = (
        owners(name, x.shape[1], ranks, trial.documents)
        for name, x in ((layout, trial_inputs.q), (trial.kv_layout if trial.cross else layout, trial_inputs.k))
    )
    documents = trial.documents
    counts = plain_counts(
        trial_inputs.q.shape[1], documents, trial_inputs.k.shape[1], documents, trial.causal, trial.window
    )
    out, lse = attention(
        q, k, v, counts, trial.scale, trial.softcap, sinks, rounded=Rounded(*remote, q_owner[:, None] == k_owner)
    )
    grads = torch.autograd.grad((out * trial_inputs.dout.double()).sum(), list(leaves.values()))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def owners(layout: str, length: int, ranks: int, documents: Sequence[int] | None) -> Tensor:
    """Return a tensor with the rank that owns each position."""
    owner = torch.empty(length, dtype=torch.int64)
    for rank, rows in enumerate(shards(layout, length, ranks, documents)):
        owner[rows] = rank
    return owner


def schedules(trial: Trial, ranks: int, layout: str, code: str, names: Sequence[str] = ()) -> list[Results]:
    """Run a trial in float32 with several schedules, one after another on one ring, and return their results.

    `names`: the schedules, by default some that depend on the trial.
    """
    names = names or share_in_turn(ranks + len(layout) + len(trial.documents or ()) + trial.tokens, 2)
    results = run_ranks(
        ranks, lambda ring: [on_rank(ring, trial, layout, name, torch.float32) for name in names],
        engine="plain", timeout_s=30.0, poison=True, kv_wire_dtype=code,
    )  # fmt: skip
    return [joined(list(parts)) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize(
    ("name", "layout", "ranks", "code"),
    thinned(
        (*cell, EIGHT_BIT[number % 2])
        for number, cell in enumerate(product(TRIALS, ("contiguous", "zigzag", "striped"), (2, 3, 4)))
    ),
)
def test_exact_except_for_rounding(name: str, layout: str, ranks: int, code: str) -> None:
    expected = rounded_reference(TRIALS[name], torch.float32, code, layout, ranks)
    for results in schedules(TRIALS[name], ranks, layout, code):
        assert greatest_error(results, expected) <= SINGLE


@each_code
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errors_do_not_exceed_those_of_one_rank(dtype: torch.dtype, code: str) -> None:
    trial = Trial(causal=True, heads=(4, 2), dims=(16, 16))
    exact, alone = reference(trial, dtype), run(trial, 1, "zigzag", "ring", dtype, kv_wire_dtype=code)
    expected = rounded_reference(trial, dtype, code, "zigzag", 4)
    results = run(trial, 4, "zigzag", "ring", dtype, kv_wire_dtype=code)
    for name in ("out", "dq", "dk", "dv"):
        assert relative_error(results[name], expected[name]) <= HALVES * relative_error(alone[name], exact[name]), name


@each_code
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_never_lost(code: str, bad: float) -> None:
    def body(ring: Ring) -> Tensor:
        seq, q, k = ring.sequence(6, layout="contiguous"), torch.zeros(2, 6, 2, 5), torch.randn(2, 6, 2, 5)
        k[0, 1, 1, 3] = bad
        return ring.attention(*(seq.shard(x) for x in (q, k, k)), seq)

    remote = run_ranks(2, body, kv_wire_dtype=code)[1]  # queries of the second rank read keys of the first
    assert remote[0, :, 1].isnan().all() and remote[0, :, 0].isfinite().all() and remote[1].isfinite().all()


# --- the effect on results -------------------------------------------------------------------------------------------

MEASURED = {
    "int8": {"out": 0.0049, "dq": 0.0069, "dk": 0.0057, "dv": 0.0034},
    "float8_e4m3fn": {"out": 0.021, "dq": 0.031, "dk": 0.024, "dv": 0.0155},
}


@pytest.mark.parametrize("code", EIGHT_BIT)
def test_values_of_dimension_zero_are_sent_without_numbers(code: str) -> None:
    x = torch.randn(1, 24, 2, 8, generator=torch.Generator().manual_seed(2))

    def on_each_rank(ring: Ring) -> tuple[Tensor, Tensor, Tensor]:
        seq = ring.sequence(24)
        q = seq.shard(x).requires_grad_()
        out, lse = ring.attention(q, q, q[..., :0], seq, causal=True, return_lse=True)
        return out, lse, torch.autograd.grad(lse.sum(), q)[0]

    for (out, lse, grad), (_, plain_lse, plain_grad) in zip(
        run_ranks(3, on_each_rank, kv_wire_dtype=code), run_ranks(3, on_each_rank), strict=True
    ):
        assert out.shape[-1] == 0
        torch.testing.assert_close(lse, plain_lse, rtol=0, atol=0.1)
        torch.testing.assert_close(grad, plain_grad, rtol=0, atol=0.1)


@each_code
def test_errors_equal_the_documented_ones(code: str) -> None:
    trial = Trial(tokens=256, heads=(4, 2), dims=(64, 64), causal=True)
    results, exact = schedules(trial, 4, "zigzag", code, ["ring"])[0], reference(trial, torch.float32)
    for name, stated in MEASURED[code].items():
        assert relative_error(results[name], exact[name]) == pytest.approx(stated, rel=0.02)


# --- bytes -----------------------------------------------------------------------------------------------------------


def counters_after_forward(code: Any, schedule: str, dims: tuple[int, int], **options: Any) -> list[dict[str, int]]:
    """Run a forward pass in bf16 with 24 tokens, 4 ranks, batch 2 and three K/V heads. Return each rank's counters.

    `dims`: the head dimensions of keys and of values.
    """

    def body(ring: Ring) -> dict[str, int]:
        seq = ring.sequence(24)
        q, v = (torch.randn(2, 6, 3, dim).bfloat16() for dim in dims)
        ring.attention(q, q, v, seq, schedule=schedule, **options)
        return ring.counters()

    return run_ranks(4, body, kv_wire_dtype=code)


@pytest.mark.parametrize("dtype", ["int8", torch.float8_e4m3fn])
@pytest.mark.parametrize("schedule", [name for name, route in ROUTES.items() if not route.moves_queries])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 1)}])
def test_the_bytes_sent_are_those_of_the_records(options: dict[str, Any], schedule: str, dtype: Any) -> None:
    for dims, record_bytes in (((17, 20), 17 + 20 + 3 + 8), ((64, 64), 64 + 64 + 8)):
        wide, narrow = (counters_after_forward(code, schedule, dims, **options) for code in (None, dtype))
        for before, after in zip(wide, narrow, strict=True):
            records, rest = divmod(before["bytes_sent"], 2 * sum(dims))
            assert rest == 0 and after["bytes_sent"] == records * record_bytes
            assert after["messages"] == before["messages"]
    assert narrow[1]["bytes_sent"] / wide[1]["bytes_sent"] == pytest.approx(0.53, abs=0.01)
    if not options:
        assert all(counters["bytes_sent"] == 3 * 6 * 3 * 2 * record_bytes for counters in narrow)


def test_quantization_is_off_by_default() -> None:
    trial = Trial(causal=True, heads=(4, 2))
    default, off = (
        run(trial, 4, "zigzag", "ring", torch.float32, **options) for options in ({}, {"kv_wire_dtype": None})
    )
    assert greatest_error(default, reference(trial, torch.float32)) <= SINGLE
    assert all(torch.equal(default[name], off[name]) for name in default)
    plans = [plan_of(CASE, RING, 1, backward) for backward in (False, True)]
    assert {buffer.dtype for plan in plans for buffer in plan.buffers} == {"bfloat16", "float32"}
    assert not any(step.restores for plan in plans for step in plan.steps)


@each_code
def test_explain_reports_quantization(code: str) -> None:
    def body(ring: Ring) -> tuple[Any, int]:
        seq, q = ring.sequence(24), torch.randn(2, 6, 3, 64).bfloat16()
        explanation = ring.explain(seq, q=q, k=q, v=q, backward=False)
        ring.attention(q, q, q, seq)
        return explanation, ring.counters()["bytes_sent"]

    for rank, (explanation, sent) in enumerate(run_ranks(4, body, kv_wire_dtype=code)):
        assert explanation.bytes_sent[rank] == sent and f"K/V sent as {code}" in str(explanation).splitlines()[0]
    assert "travel as" not in str(run_ranks(4, body)[0][0])


# --- refusals --------------------------------------------------------------------------------------------------------


def test_float64_is_refused_on_all_ranks() -> None:
    def body(ring: Ring) -> None:
        attend(ring, lambda _, a: a.update({name: a[name].double() for name in "qkv"}))

    for error in errors(body, kv_wire_dtype="int8"):
        assert isinstance(error, InputError) and "float64 K and V cannot be sent as int8" in str(error)


@pytest.mark.parametrize("dtype", ["int4", torch.bfloat16, torch.float8_e5m2])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(InputError, match=r"kv_wire_dtype=.* is not supported; use one of int8, float8_e4m3fn"):
        Ring(kv_wire_dtype=dtype)
    with pytest.raises(InputError, match=r"kv_wire_dtype .* is not supported; use one of int8, float8_e4m3fn"):
        replace(CASE, kv_wire_dtype=str(dtype).removeprefix("torch."))

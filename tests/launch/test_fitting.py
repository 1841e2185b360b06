"""What fits and what to turn on: properties of the searches, advice, operations, and the hardware's settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.launch.capacity.fitting import (
    advice,
    attention_flops,
    compute_flops,
    fits,
    longest_tokens,
    matrix_flops,
    smallest_ring,
    step_seconds,
    with_steps,
)
from ringattn.launch.capacity.hardware import GIB, Hardware, hardware
from ringattn.launch.capacity.hardware import PRESETS as MACHINES
from ringattn.launch.capacity.model_shapes import PRESETS, ModelShape, model_shape
from ringattn.launch.capacity.training_bytes import PRECISIONS, AttentionSetup, TrainingSetup, training_bytes

SMALL = ModelShape(2, 96, 6, 2, 200, 256, True)

runs = st.builds(
    TrainingSetup,
    model=st.sampled_from([*PRESETS.values(), SMALL]),
    tokens=st.integers(64, 10**7),
    ranks=st.integers(1, 40),
    batch=st.integers(1, 4),
    precision=st.sampled_from(list(PRECISIONS)),
    recompute=st.sampled_from(["none", "selective", "full", "offloaded"]),
    zero_stage=st.sampled_from([1, 2, 3]),
    chunked_loss_tokens=st.sampled_from([0, 1024]),
    saved_activations=st.sampled_from(["keep", "int8"]),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(runs)
def test_more_work_never_takes_less_and_more_ranks_never_more(run: TrainingSetup) -> None:
    total = training_bytes(run).peak.total
    assert training_bytes(replace(run, tokens=2 * run.tokens)).peak.total >= total
    assert training_bytes(replace(run, batch=run.batch + 1)).peak.total > total
    if 4 <= run.ranks and 2 * run.ranks <= run.tokens:  # slots are those of a full ring from then on
        assert training_bytes(replace(run, ranks=2 * run.ranks)).peak.total <= total
    parts = training_bytes(run).peak
    assert sum(parts) == total and min(parts) >= 0


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(runs, st.sampled_from([24, 80, 141]))
def test_the_longest_fits_and_one_more_does_not(run: TrainingSetup, gib: int) -> None:
    longest = longest_tokens(run, gib * GIB)
    assert longest % run.ranks == 0
    assert not longest or fits(replace(run, tokens=longest), gib * GIB)
    assert not fits(replace(run, tokens=longest + run.ranks), gib * GIB)


@pytest.mark.parametrize(
    ("name", "zero", "tokens"),
    [pytest.param("1.3B", 0, 10**7, marks=pytest.mark.slow), ("7B", 3, 10**6), ("125M", 0, 1000)],
)
def test_the_smallest_ring_is_the_smallest(name: str, zero: int, tokens: int) -> None:
    run = TrainingSetup(model_shape(name), tokens, zero_stage=zero, recompute="full", chunked_loss_tokens=1024)
    ring = smallest_ring(run, 80 * GIB)
    assert ring is not None and fits(replace(run, ranks=ring), 80 * GIB)
    assert ring == 1 or not fits(replace(run, ranks=ring - 1), 80 * GIB)
    assert smallest_ring(replace(run, model=model_shape("405B"), zero_stage=0), 80 * GIB) is None


# --- advice, time, hardware ------------------------------------------------------------------------------------------


def test_advice_ends_where_it_fits_and_keeps_the_arithmetic_first() -> None:
    run, machine = TrainingSetup(model_shape("llama3-8b"), 10**6, 8), hardware("h100")
    steps = advice(run, machine)
    totals = [training_bytes(run).peak.total, *(step.total_bytes for step in steps)]
    for before, after, step in zip(totals, totals[1:], steps, strict=False):
        assert before > machine.memory_bytes and before - after == pytest.approx(step.saves_bytes)
    eased = with_steps(run, steps)
    assert totals[-1] == pytest.approx(training_bytes(eased).peak.total) and totals[-1] < machine.memory_bytes
    assert steps[-1].time_factor == pytest.approx(step_seconds(eased, machine) / step_seconds(run, machine))
    assert advice(replace(run, tokens=8, model=model_shape("125M")), machine) == []
    alone = advice(TrainingSetup(model_shape("70B"), 10**6, 1), machine)
    assert alone and alone[-1].total_bytes > machine.memory_bytes
    keys = [step.switch.key for step in alone]
    assert "zero_stage" not in keys[: keys.index("offload")]  # nobody to share with, until the host takes gradients
    set_already = replace(
        run, tokens=3 * 10**6, recompute="full", chunked_loss_tokens=512, zero_stage=3, offload="parameters",
        tiled_mlp_tokens=512,
    )  # fmt: skip
    assert [step.switch.value for step in advice(set_already, machine)] == ["offloaded"]


def test_operations_of_a_step() -> None:
    run = TrainingSetup(model_shape("7B"), 4096, chunked_loss_tokens=0)
    products = 2 * (run.model.parameters - 32000 * 4096 - 65 * 4096) * 4096  # no products with the embedding and norms
    pairs = 4096 * 4097 / 2
    assert matrix_flops(run) == products
    assert attention_flops(run) == 4 * 4096 * pairs * 32
    assert compute_flops(run) == 3 * products + 3.5 * attention_flops(run)
    layers = products - 2 * 32000 * 4096 * 4096
    again = {one: compute_flops(replace(run, recompute=one)) - compute_flops(run) for one in ("selective", "full")}
    assert again == {"selective": layers, "full": layers + attention_flops(run)}


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_pairs_are_those_of_the_mask(kind: str) -> None:
    attention = AttentionSetup(kind, window_tokens=7 if kind == "window" else 0)
    q, k = torch.arange(50)[:, None], torch.arange(50)[None]
    allowed = {"full": q == q + 0 * k, "causal": q >= k, "window": (q >= k) & (q - k <= 7)}[kind]
    assert attention.pairs(50) == allowed.sum().item()


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda one: one.name)
def test_recommended_settings_fit_something(machine: Hardware) -> None:
    model = "125M" if machine.memory_bytes < 16 * GIB else "1.3B"
    run = replace(TrainingSetup(model_shape(model), 8 * 8192, 8, framework_bytes=GIB), **dict(machine.start))
    assert fits(run, machine.memory_bytes)
    assert machine.bf16 or run.precision == "fp32"
    assert machine.source and machine.why

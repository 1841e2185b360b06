"""Every key of `plan` and `simulate` changes the figures. Giving a key that cannot have an effect is an error."""

from __future__ import annotations

import json
from functools import cache

import pytest

from ringattn.cli import main
from ringattn.launch.capacity.plan import PlanConfig, machine_of, plan
from ringattn.launch.config import load
from ringattn.launch.options import leaves, load_plain
from ringattn.launch.pictures.simulate import simulated
from ringattn.launch.pictures.simulation import LAYERS, OF_ATTENTION, SimulateConfig

OUTPUTS = {"json", "picture"}
DEPENDENT = {"zero_degree", "pipeline_chunks", "shared_experts", "scaling", "seed", "key_dim", "kernel_size"}
"""Keys that have an effect only with the other options of their case."""

PLAN = ["preset=llama3-8b", "tokens=32768", "ranks=8"]
PLAN_CASES = {
    "preset": "preset=7B", "hardware": "hardware=a100-80", "tokens": "tokens=65536", "ranks": "ranks=4",
    "batch": "batch=2", "mask": "mask=full", "window_tokens": "mask=window window_tokens=512",
    "segment_lengths": "mask=dilated segment_lengths=[2048] dilation_rates=[4]",
    "dilation_rates": "mask=dilated segment_lengths=[2048] dilation_rates=[2]", "framework_gib": "framework_gib=2",
    "reserve": "reserve=0.05",
    "layers": "layers=12", "width": "width=2048 head_dim=128", "heads": "heads=16 head_dim=128",
    "kv_heads": "kv_heads=16", "head_dim": "head_dim=64", "ffn": "ffn=1000", "experts": "experts=4 experts_per_token=1",
    "experts_per_token": "experts=4 experts_per_token=2",
    "shared_experts": "experts=4 experts_per_token=1 shared_experts=1", "vocabulary": "vocabulary=1000",
    "tied": "tied=true", "block": "block=gelu", "memory_gib": "memory_gib=40", "link_gb_s": "link_gb_s=1",
    "tflops": "tflops=100", "schedule": "schedule=all_gather", "precision": "precision=fp32",
    "optimizer": "optimizer=sgd", "recompute": "recompute=full", "saved_activations": "saved_activations=int8",
    "zero_stage": "zero_stage=1", "zero_degree": "zero_stage=1 zero_degree=2", "tensor_ranks": "tensor_ranks=2",
    "pipeline_ranks": "pipeline_ranks=2", "pipeline_chunks": "pipeline_ranks=2 pipeline_chunks=2",
    "micro_batches": "micro_batches=2", "offload": "offload=optimizer",
    "chunked_loss_tokens": "chunked_loss_tokens=512", "tiled_mlp_tokens": "tiled_mlp_tokens=512",
    "head_groups": "head_groups=2", "data": "data=whole",
    **{key: f"preset=7B precision=bf16_cast {options}" for key, options in (
        ("stack", "stack=trl"), ("kernel", "stack=trl kernel=fa2"), ("head_norms", "stack=trl head_norms=true"),
    )},
    "gradients_kept": "gradients_kept=false", "transients": "transients=false",
}  # fmt: skip

SIMULATE = ["ranks=8", "tokens=65536"]
SIMULATE_CASES = {
    "tokens": "tokens=32768", "batch": "batch=2", "heads": "heads=16", "kv_heads": "kv_heads=4",
    "head_dim": "head_dim=64", "dtype": "dtype=fp32", "causal": "causal=false", "window": "window=[511,0]",
    "layout": "layout=contiguous", "schedule": "schedule=all_gather", "backward": "backward=false", "ranks": "ranks=4",
    "scaling": "ranks=4,8 scaling=weak", "cluster": "cluster=gb200", "overlap": "overlap=false",
    "sm_margin": "sm_margin=16", "slow_rank": "slow_rank=3:1.5", "slow_link": "slow_link=3-4:99",
    "jitter": "jitter=0.1", "seed": "jitter=0.1 seed=1", "layer": "layer=gated_delta_rule",
    "key_dim": "layer=gated_delta_rule key_dim=64", "kernel_size": "layer=gated_delta_rule kernel_size=3",
}  # fmt: skip
OF_STATES = [key for key in SIMULATE_CASES if key not in (*OF_ATTENTION, "layer", "key_dim", "kernel_size")]


@cache
def plan_figures(options: tuple[str, ...]) -> str:
    """Return the figures that `plan` computes, without the names and settings that it copies from the options."""
    config = load(options, PlanConfig)
    figures = plan(config, machine_of(config))
    del figures["run"], figures["model"]["name"]
    figures["hardware"] = {"longest_tokens": figures["hardware"]["longest_tokens"]}
    return json.dumps(figures, sort_keys=True)


@cache
def simulate_figures(options: tuple[str, ...]) -> str:
    """Return the figures that `simulate` computes, without the settings that it copies from the options."""
    figures = simulated(load_plain(options, SimulateConfig))
    points = [point for curve in figures["curves"].values() for point in curve]
    return json.dumps([{name: value for name, value in point.items() if name != "took_s"} for point in points])


def without(key: str, options: list[str]) -> list[str]:
    """Return the options to compare with: none, or for a key in `DEPENDENT` those of the case without `key`."""
    return [option for option in options if not option.startswith(f"{key}=")] if key in DEPENDENT else []


def merge(base: list[str], options: list[str]) -> tuple[str, ...]:
    """Return the options in `base` and `options`. Those in `options` replace base options with the same key."""
    keys = {option.partition("=")[0] for option in options}
    return (*(option for option in base if option.partition("=")[0] not in keys), *options)


@pytest.mark.slow
@pytest.mark.parametrize("key", PLAN_CASES)
def test_a_key_of_plan_changes_the_figures(key: str) -> None:
    options = PLAN_CASES[key].split()
    assert plan_figures(merge(PLAN, options)) != plan_figures(merge(PLAN, without(key, options)))


@pytest.mark.parametrize("key", SIMULATE_CASES)
def test_a_key_of_simulate_changes_the_figures(key: str) -> None:
    options = SIMULATE_CASES[key].split()
    assert simulate_figures(merge(SIMULATE, options)) != simulate_figures(merge(SIMULATE, without(key, options)))


@pytest.mark.parametrize("key", OF_STATES)
def test_a_key_of_simulate_changes_the_figures_of_a_layer_with_a_state(key: str) -> None:
    base, options = [*SIMULATE, "layer=selective_state"], SIMULATE_CASES[key].split()
    assert simulate_figures(merge(base, options)) != simulate_figures(merge(base, without(key, options)))


def test_the_layers_with_a_state_differ() -> None:
    figures = {simulate_figures((*SIMULATE, f"layer={layer}")) for layer in LAYERS}
    assert len(figures) == len(LAYERS) == 4


def test_every_key_has_a_case() -> None:
    # `recommended` replaces other keys before the figures are computed.
    assert {key for key, *_ in leaves(PlanConfig())} - OUTPUTS - {"recommended"} == set(PLAN_CASES)
    assert {key for key, *_ in leaves(SimulateConfig())} - OUTPUTS == set(SIMULATE_CASES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate ranks=8 seed=3", "seed=3: has no effect without jitter"),
        ("simulate ranks=8 scaling=weak", "scaling=weak: has no effect on one number of ranks"),
        ("simulate key_dim=64", "key_dim=64: has no effect on attention; set layer=gated_delta_rule, for example"),
        ("simulate kernel_size=1", "kernel_size=1: has no effect on attention"),
        ("simulate layer=selective_state schedule=ring", "schedule=ring: has no effect on layer=selective_state"),
        ("simulate layer=selective_state causal=true", "causal=true: has no effect on layer=selective_state"),
        ("simulate layer=selective_state window=[511,0]", "window=[511,0]: has no effect on layer=selective_state"),
        ("plan micro_batches=2 gradients_kept=false", "must be true with micro_batches=2"),
        ("plan window_tokens=512", "window_tokens=512: has no effect with mask=causal"),
        ("plan head_norms=true", "head_norms=True: has no effect with stack=ringattn"),
        ("plan kernel=fa2", "kernel=fa2: stack=ringattn uses its own kernels"),
        ("explain sm_margin=4", "sm_margin=4: has no effect without a prediction"),
    ],
)
def test_a_key_without_effect_is_an_error(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringattn.launch.pictures.show.cluster_over", lambda transport: (None, "none"))
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err

"""`ringattn plan`: what it prints and writes is what the formulas say; wrong words are refused; its picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from ringattn.cli import main
from ringattn.launch.capacity.fitting import fits
from ringattn.launch.capacity.hardware import GIB, hardware
from ringattn.launch.capacity.model_shapes import ModelShape, model_shape
from ringattn.launch.capacity.plan import PlanConfig, machine_of, plan, run_of, shape_of
from ringattn.launch.capacity.training_bytes import AttentionSetup, TrainingSetup, training_bytes
from ringattn.launch.config import load

PLANS = Path(__file__).with_name("plans.json")
"""Plans by the words that ask for them; `python -m tests.launch.test_plan_command` writes the file again."""


def plan_of(words: str) -> dict[str, Any]:
    """What the command writes for these words."""
    config = load(words.split(), PlanConfig)
    found: dict[str, Any] = json.loads(json.dumps(plan(config, machine_of(config))))
    return found


@pytest.mark.parametrize("words", json.loads(PLANS.read_text()))
def test_plans_are_those_recorded(words: str) -> None:
    recorded = json.loads(PLANS.read_text())[words]
    found = plan_of(words)
    assert {key for key in recorded if found[key] != recorded[key]} == set() and found.keys() == recorded.keys()


def planned(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON."""
    path = tmp_path / "plan.json"
    code = main(["plan", *words, f"json={path}"])
    return code, json.loads(path.read_text())


def test_a_billion_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(tmp_path, "tokens=1000000000", "recompute=full", "chunked_loss_tokens=1024")
    run = TrainingSetup(model_shape("1.3B"), 10**9, found["smallest_ring"], recompute="full", chunked_loss_tokens=1024,
              framework_bytes=GIB)  # fmt: skip
    assert code == 0 and found["fits"]
    assert found["total_bytes"] == training_bytes(run).peak.total <= 80 * GIB
    assert not fits(replace(run, ranks=run.ranks - 1), 80 * GIB)
    printed = capsys.readouterr().out
    tokens, a_token = -(-(10**9) // run.ranks), found["bytes_per_token"]
    assert f"a ring of {run.ranks:,}: {tokens:,} tokens a rank" in printed
    assert f"why: each token of a rank takes {a_token:,.0f} bytes, its {tokens:,} tokens" in printed
    assert found["longest_tokens"] >= 10**9


@pytest.mark.parametrize(
    ("words", "published"),
    [(("preset=125M",), 265), (("preset=350M",), 95), (("preset=1.3B",), 38),
     (("preset=125M", "recompute=full"), 1760), (("preset=350M", "recompute=full"), 910),
     (("preset=1.3B", "recompute=full"), 370)],
)  # fmt: skip
def test_corrected_capacities_of_80_gib(tmp_path: Path, words: tuple[str, ...], published: int) -> None:
    # Published in whole thousands, or ten thousands; what it leaves out (normalizers, ids) is below the last digit.
    last_digit = 10 if published > 300 else 1
    _, found = planned(tmp_path, *words, "ranks=1", "hardware=a100-80", "transients=false", "framework_gib=0")
    assert abs(found["longest_tokens"] / 1000 - published) <= last_digit


def test_what_does_not_fit_is_said_and_eased(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(tmp_path, "preset=llama3-8b", "ranks=8", "tokens=1000000")
    printed = capsys.readouterr().out
    assert code == 1 and not found["fits"] and "does not fit in 80.00" in printed
    assert found["longest_tokens"] == 0 and found["smallest_ring"] is None
    settings = [f"{step['key']}={step['value']}" for step in found["steps"]]
    assert all(setting in printed for setting in settings) and "then it fits" in printed
    assert "changes the arithmetic: optimizer=adamw8bit" in printed
    # One piece of advice: no other settings beside these, and the two lengths and rings are as given and with them.
    assert "recommended" not in printed and printed.count("smallest ring") == 2
    assert found["after_steps"]["smallest_ring"] <= 8 and found["after_steps"]["longest_tokens"] >= 10**6
    chunks = [step["value"] for step in found["steps"] if step["key"] == "chunked_loss_tokens"]
    assert chunks == [dict(hardware("h100").start)["chunked_loss_tokens"]]
    assert "a step with all of these: about" in printed
    assert sum(found["bytes_by_component"].values()) == found["total_bytes"]
    saved = sum(step["saves_bytes"] for step in found["steps"])
    assert found["after_steps"]["total_bytes"] == pytest.approx(found["total_bytes"] - saved)
    again, eased = planned(tmp_path, "preset=llama3-8b", "ranks=8", "tokens=1000000", *_last(settings))
    assert again == 0 and eased["total_bytes"] == pytest.approx(found["after_steps"]["total_bytes"])


def _last(settings: list[str]) -> list[str]:
    """The last value of each key."""
    return [f"{key}={value}" for key, value in dict(one.split("=") for one in settings).items()]


def test_every_option_reaches_the_run() -> None:
    words = ("tokens=4096 ranks=4 batch=2 mask=window window_tokens=100 schedule=direct precision=fp32 "
             "optimizer=lion recompute=selective saved_activations=int8 zero_stage=3 zero_degree=16 offload=parameters "
             "chunked_loss_tokens=64 data=whole gradients_kept=false transients=false framework_gib=2 layers=3 "
             "width=64 heads=8 kv_heads=2 ffn=160 vocabulary=300 tied=true block=swiglu head_dim=16 experts=4 "
             "experts_per_token=2 shared_experts=1 tiled_mlp_tokens=32 tensor_ranks=2 pipeline_ranks=3 "
             "pipeline_chunks=1 micro_batches=5")  # fmt: skip
    shape = ModelShape(3, 64, 8, 2, 160, 300, True, "swiglu", 16, 4, 2, 1)
    assert run_of(load(words.split(), PlanConfig)) == TrainingSetup(
        shape, 4096, 4, 2, AttentionSetup("window", 99), 2 * GIB, schedule="direct", precision="fp32", optimizer="lion",
        recompute="selective", saved_activations="int8", zero_stage=3, zero_degree=16, offload="parameters",
        chunked_loss_tokens=64, data="whole", gradients_kept=False, transients=False, tiled_mlp_tokens=32,
        tensor_ranks=2, pipeline_ranks=3, pipeline_chunks=1, micro_batches=5,
    )  # fmt: skip
    machine = machine_of(load(["memory_gib=10", "link_gb_s=7", "tflops=3"], PlanConfig))
    assert (machine.memory_bytes, machine.link_bytes_s, machine.flops) == (10 * GIB, 7e9, 3e12)


def test_dilated_branches_travel_in_slots(tmp_path: Path) -> None:
    _, found = planned(tmp_path, "preset=125M", "ranks=2", "tokens=4096", "mask=dilated",
                       "segment_lengths=[1024,4096]", "dilation_rates=[1,4]", "hardware=h200")  # fmt: skip
    assert found["run"]["attention"]["segment_lengths"] == [1024, 4096]
    assert found["route"] == "all_gather" and found["bytes_by_component"]["slots"] > 0


def test_recommended_settings_start_and_given_ones_win(tmp_path: Path) -> None:
    start = dict(hardware("a100-80").start)
    words = "hardware=a100-80", "recommended=true", "ranks=8"
    _, found = planned(tmp_path, *words)
    assert {key: found["run"][key] for key in start} == start
    _, other = planned(tmp_path, *words, "recompute=full")
    assert {key: other["run"][key] for key in start} == {**start, "recompute": "full"}
    assert found["hardware"]["longest_tokens"] == found["longest_tokens"]


def test_a_head_follows_the_width_that_was_given() -> None:
    assert shape_of(load(["preset=qwen3-4b"], PlanConfig)).head_dim == 128
    assert shape_of(load(["preset=qwen3-4b", "width=2048"], PlanConfig)).head_dim == 64
    assert shape_of(load(["preset=qwen3-4b", "width=2048", "head_dim=128"], PlanConfig)).head_dim == 128


@pytest.mark.slow
def test_405b_over_four_kinds_of_ranks_takes_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("preset=405B tokens=131072 ranks=16 tensor_ranks=8 pipeline_ranks=16 pipeline_chunks=7 micro_batches=16 "
             "zero_stage=2 zero_degree=128 recompute=full").split()  # fmt: skip
    code, found = planned(tmp_path, *words)
    step, printed = found["step"], capsys.readouterr().out
    assert code == 0 and f"a step: about {step['seconds']:,.2f} s (products" in printed
    assert "tokens/s on 2,048 accelerators" in printed and f"MFU {step['mfu']:.1%} of 989 TFLOP/s" in printed
    assert "not measured: products 720, attention 648 forward, 561 backward TFLOP/s; products: 720" in printed
    assert "FlashAttention-3" in printed


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    assert main(["plan", "preset=7B", "ranks=2", f"picture={path}"]) == 1
    pixels = matplotlib.image.imread(path)[..., :3]
    red, optimizer = (0.7529, 0.2235, 0.1686), (0.1725, 0.6275, 0.1725)  # the memory's line; the third color of tab10
    for color in (red, optimizer):
        assert (abs(pixels - color).max(-1) < 0.01).sum() > 50


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in PlanConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("preset=1.4B",), "preset=1.4B: did you mean 1.3B"),
        (("hardware=a100",), "hardware=a100: did you mean a100-40"),
        (("hardware=gtx1080",), "precision=bf16_master: gtx1080 has no bf16 arithmetic; use precision=fp32"),
        (("recompute=fully",), "recompute=fully: choose one of none, selective, full, offloaded"),
        (("tokns=5",), "tokns: no such key; did you mean tokens?"),
        (("mask=window",), "window_tokens=0: a window has at least 2"),
        (("window_tokens=5",), "window_tokens=5: has no effect on mask=causal; set mask=window"),
        (("dilation_rates=[1]",), "dilation_rates=[1]: has no effect on mask=causal; set mask=dilated"),
        (("zero_stage=4",), "zero_stage=4: must be at most 3"),
        (("memory_gib=0",), "memory_gib=0.0: must be more than 0"),
        (("width=100",), "heads=16: does not divide width=100"),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_one_rank_where_no_ring_fits() -> None:
    found = plan(load(["preset=405B"], PlanConfig), hardware("rtx4090"))
    assert found["run"]["ranks"] == 1 and found["smallest_ring"] is None and not found["fits"]


def test_the_ring_of_the_recommended_settings_where_none_fits_as_it_is(tmp_path: Path) -> None:
    code, found = planned(tmp_path, "preset=7B", "tokens=1000000")
    ring, limit = found["hardware"]["smallest_ring"], 80 * GIB
    assert code == 1 and found["smallest_ring"] is None and found["run"]["ranks"] == ring
    recommended = TrainingSetup(model_shape("7B"), 10**6, ring, framework_bytes=GIB, **found["hardware"]["recommended"])
    assert fits(recommended, limit) and not fits(replace(recommended, ranks=ring - 1), limit)
    assert found["after_steps"]["total_bytes"] <= limit


if __name__ == "__main__":
    PLANS.write_text(json.dumps({words: plan_of(words) for words in json.loads(PLANS.read_text())}, indent=1) + "\n")

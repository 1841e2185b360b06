"""DeepSpeed over rings: its own engine, transformers' Trainer and accelerate's loop, equal to plain processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")


from ringattn import UnsupportedError
from ringattn.adapters.deepspeed import check_config
from ringattn.adapters.transformers.trainer_checks import refuse_deepspeed
from tests.adapters.environments import environment, search_path
from tests.adapters.processes import call_in_program
from tests.adapters.test_script import check_equal, run
from tests.doc_code import code_of, run_under_torchrun

DEEPSPEED = (
    "deepspeed==0.19.8", "hjson==3.1.0", "ninja==1.13.2", "py-cpuinfo==9.0.0", "msgpack==1.2.4", "einops==0.8.2",
)  # fmt: skip
TOLERANCE = 1e-9
OF_LOGGED_LOSSES = 1e-6  # Trainer adds the losses of steps up in float32


def with_deepspeed() -> dict[str, str]:
    """Return the environment variables of a program that can import DeepSpeed and runs it on CPUs."""
    path = search_path(environment(*DEEPSPEED))
    return {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0"}


def check(kind: str, rings: int, *zero: str) -> None:
    errors = call_in_program("tests.adapters.deepspeed_ranks:errors", kind, rings, zero, **with_deepspeed())
    assert errors.keys() == set(zero)
    for stage, (weights, values) in errors.items():
        assert weights <= TOLERANCE, (stage, weights)
        assert values <= OF_LOGGED_LOSSES, (stage, values)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [("0", "1", "2", "1, offloaded", "2, offloaded"), ("3", "3, offloaded")], ids=str)
def test_the_engine_over_one_ring_equals_one_process(zero: tuple[str, ...]) -> None:
    check("engine", 1, *zero)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [("0", "2"), ("3",)], ids=str)
def test_the_engine_over_two_rings_equals_one_process(zero: tuple[str, ...]) -> None:
    check("engine", 2, *zero)


@pytest.mark.slow
@pytest.mark.parametrize(("rings", "zero"), [(1, ("0", "1", "2", "3")), (2, ("2", "3"))], ids=str)
def test_an_engine_of_whole_batches_equals_as_many_processes_as_rings(rings: int, zero: tuple[str, ...]) -> None:
    check("whole", rings, *zero)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "zero"),
    [("reentrant None", ("3",)), ("reentrant False", ("2", "3")), ("reentrant True", ("3",)), ("two calls", ("3",))],
    ids=str,
)
def test_options_for_less_memory(kind: str, zero: tuple[str, ...]) -> None:
    check(f"engine, less memory, {kind}", 1, *zero)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "zero"),
    [
        ("padded", ("0", "1", "2, offloaded", "3")), ("packed", ("2",)), ("z-loss", ("2", "3")), ("loaded", ("3",)),
        ("checkpointed", ("3",)), ("labels of each process", ("1",)),
    ],
    ids=str,
)  # fmt: skip
def test_a_trainer_over_one_ring_equals_one_process(case: str, zero: tuple[str, ...]) -> None:
    check(f"trainer, {case}", 1, *zero)


@pytest.mark.slow
def test_a_trainer_over_two_rings_equals_one_process() -> None:
    check("trainer, padded", 2, "2", "3")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rings", "zero"), [("loop", 1, "2"), ("loop", 2, "3"), ("dummies", 2, "1")])
def test_a_loop_of_accelerate_equals_as_many_processes_as_rings(kind: str, rings: int, zero: str) -> None:
    check(kind, rings, zero)


@pytest.mark.slow
def test_a_script_equals_one_process(tmp_path: Path) -> None:
    over_a_ring = run("deepspeed", tmp_path / "ring", 2, ranks=2, **with_deepspeed())
    check_equal(over_a_ring, run("trainer", tmp_path / "plain", 1, ranks=None))


@pytest.mark.slow
def test_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    # DeepSpeed would compile this operator, which training does not use. The first lines of the page are no code.
    first = 'import deepspeed; deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False'
    page.write_text(first + code_of("embedding-deepspeed.md"), encoding="utf-8")
    printed = run_under_torchrun([str(page)], tmp_path, 2, 240.0, tmp_path, **with_deepspeed())
    assert printed.count("equal to one process") == 2, printed


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op=sum .*: only the mean of gradients"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size=2 .*: the ring shards the sequence already"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel=.* outside the ring"),
        ({"prescale_gradients": True}, "prescale_gradients=True .*: it was not compared with one process"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights=True .*rounds"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zenflow=.* delays"),
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam rounds gradients to one bit"),
    ],
)
def test_settings_that_cannot_be_exact_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_config(config)


@pytest.mark.slow
def test_engines_that_cannot_be_exact_are_refused() -> None:
    call_in_program("tests.adapters.deepspeed_ranks:refused", **with_deepspeed())


def test_settings_that_are_off_are_accepted() -> None:
    off = {"gradient_allreduce_op": "mean", "sequence_parallel_size": 1, "prescale_gradients": False}
    check_config({**off, "data_efficiency": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}})
    check_config({"zero_optimization": {"stage": 3, "zero_quantized_weights": False, "zero_hpz_partition_size": 1}})
    check_config({"optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}, "steps_per_print": 10})


@pytest.mark.slow
def test_partitioned_weights_that_would_not_be_gathered_are_refused() -> None:
    call_in_program("tests.adapters.deepspeed_ranks:refused_partitions", **with_deepspeed())


def host(**options: Any) -> Any:
    """Return what `refuse_deepspeed` reads of a Trainer without ZeRO, with several batches in a step."""
    args = {"gradient_accumulation_steps": 2, "average_tokens_across_devices": True, **options}
    plugin = SimpleNamespace(deepspeed_config={}, zero_stage=0)
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    return SimpleNamespace(args=SimpleNamespace(**args), accelerator=accelerator)


def test_trainers_that_cannot_be_exact_are_refused() -> None:
    refuse_deepspeed(host())
    with pytest.raises(UnsupportedError, match="average_tokens_across_devices=False with gradient_accumulation"):
        refuse_deepspeed(host(average_tokens_across_devices=False))
    refuse_deepspeed(host(average_tokens_across_devices=False, gradient_accumulation_steps=1))

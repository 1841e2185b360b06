"""TRL's trainers and PEFT's adapters over a ring: equal to one process, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

from tests.adapters.environments import environment, search_path
from tests.adapters.processes import call_in_program
from tests.adapters.versions import WITH_TRL
from tests.doc_code import code_of, run_under_torchrun

TOLERANCE = 1e-9
REFUSED = {
    "ADALORA": "PEFT's ADALORA adds its regularization to every rank's loss",
    "ADALORA, later": "PEFT's ADALORA adds its regularization to every rank's loss",
    "PROMPT_TUNING": "PEFT's PROMPT_TUNING puts additional tokens before the text",
    "PROMPT_TUNING, later": "position_ids are missing",
    "PREFIX_TUNING": "PEFT's PREFIX_TUNING puts additional tokens before the text",
    "PREFIX_TUNING, later": "13 queries and 16 keys",
    "alora": "alora_invocation_tokens: activated LoRA searches whole texts for these tokens",
    "alora, later": "alora_invocation_tokens: activated LoRA searches whole texts for these tokens",
}
OF_LOGGED_LOSSES = 1e-6  # Trainer adds the losses of steps up in float32


def with_trl() -> dict[str, str]:
    """Return the environment variables of a program that can import TRL and PEFT."""
    return {"PYTHONPATH": search_path(environment(*WITH_TRL)), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.mark.slow
@pytest.mark.timeout(600)  # about 60 s on an idle machine
def test_sft_and_adapters_over_two_processes(tmp_path: Path) -> None:
    """Weights after three steps, every logged metric and the gradients of every adapter equal one process."""
    answers = call_in_program("tests.adapters.sft:compute_errors", str(tmp_path), timeout_s=560.0, **with_trl())
    trainings, adapters, with_lora = answers["sft"], answers["adapters"], answers["modes"]
    assert len(trainings) >= 14
    for case, errors in trainings.items():
        assert errors["weights"] <= TOLERANCE, case
        logged, truly = errors["logged"]
        metrics = 5 if case.startswith("routed") else 4
        assert len(logged) == len(truly) == 4 and {len(values) for values in truly} == {metrics}, case
        for actual, true in zip(logged, truly, strict=True):
            assert actual[0] == pytest.approx(true[0], rel=OF_LOGGED_LOSSES), case
            assert actual[1:] == pytest.approx(true[1:], rel=TOLERANCE), case
    assert len(adapters["off by"]) == 18 and max(adapters["off by"].values()) <= TOLERANCE, adapters
    assert adapters["saved"] <= TOLERANCE < 1e-3 < adapters["changed"]
    for kind, says in REFUSED.items():
        assert says in adapters["refused"][kind], adapters["refused"]
    assert len(with_lora) == 7 and max(with_lora.values()) <= TOLERANCE, with_lora


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", ["DPO", "KTO", "Reward", "GRPO", "RLOO"])
def test_losses_of_whole_texts_over_two_processes(trainer: str, tmp_path: Path) -> None:
    """Weights after three steps and every logged number equal one process, also those of an evaluation."""
    answers = call_in_program(
        "tests.adapters.preferences:train_errors", str(tmp_path), trainer, timeout_s=560.0, **with_trl()
    )
    assert len(answers) >= 2
    for case, errors in answers.items():
        assert errors["weights"] <= TOLERANCE, case
        logged, truly = errors["logged"]
        assert len(logged) == len(truly) == 4 and "eval_loss" in truly[-1], case
        for actual, true in zip(logged, truly, strict=True):
            # Some numbers are zero up to rounding: losses of RLOO, and rewards of a model that is its own reference.
            for name in "loss", "grad_norm":
                assert actual.pop(name, 0) == pytest.approx(true.pop(name, 0), rel=OF_LOGGED_LOSSES, abs=1e-14), case
            absent = {name for name, value in true.items() if value is None}  # TRL logs no number for some
            assert {name for name, value in actual.items() if value is None} == absent, case
            for name in absent:
                del actual[name], true[name]
            assert actual == pytest.approx(true, rel=TOLERANCE, abs=1e-14), case


@pytest.mark.slow
def test_an_evaluation_over_two_rings_equals_one_process(tmp_path: Path) -> None:
    entry = "tests.adapters.preferences:evaluation_over_two_rings"
    answers = call_in_program(entry, str(tmp_path), "DPO", "KTO", "Reward", **with_trl())
    for trainer, (actual, true) in answers.items():
        assert len(true) >= 8 and actual == pytest.approx(true, rel=TOLERANCE), trainer


@pytest.mark.slow
def test_options_of_trainers_of_preferences_are_refused(tmp_path: Path) -> None:
    messages = call_in_program("tests.adapters.preferences:refused_options", str(tmp_path), **with_trl())
    assert messages == {
        "metrics": "compute_metrics of RewardTrainer gets outputs that are not those of the texts that Trainer counts; "
        "leave it out, and use TRL's own metrics",
        "compiled": "torch_compile of RewardTrainer: the compiler would trace the exchange between the ranks, which is "
        "below the head; leave it out",
        "chunked": "KTOTrainer, which computes metrics from them, needs logits, but this model was prepared with "
        "chunked_loss and returns none with labels; leave one of the two out",
        "rollout": "rollout_func of GRPOTrainer was not compared with one process; leave it out",
    }


@pytest.mark.slow
def test_the_page_of_trainers_runs_on_two_ranks(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(code_of("embedding-trainers.md"), encoding="utf-8")
    printed = run_under_torchrun([str(page)], tmp_path, 2, 560.0, tmp_path, **with_trl())
    for text in ("SFTTrainer: [", "DPOTrainer: [", "\nTrainer: ", "\ngenerated: 6", "configuration: "):
        assert printed.count(text) == 2, printed


@pytest.mark.slow
def test_every_other_trainer_of_trl_is_refused() -> None:
    messages = call_in_program("tests.adapters.sft:refused_trainers", **with_trl())
    assert {"DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer"} <= set(messages)
    for name, message in messages.items():
        assert message.startswith(f"TRL's {name} "), (name, message)

"""A step that is not finite, or that has nothing to learn, ends a run by name, and costs no checkpoint that is good."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringattn import Ring
from ringattn.errors import InputError, NonFiniteError
from ringattn.launch.train import loop, train
from ringattn.launch.train.config import ModelConfig, TrainConfig, load_train
from ringattn.testing import run_ranks
from tests.launch.fuzz_train.faults import spoiled

TINY = TrainConfig(tokens=41, batch=2, steps=6, dtype="fp64", warmup_steps=4, model=ModelConfig(1, 16, 2, 1, 24))

OVERSHOOTS = replace(TINY, dtype="fp32", optimizer="sgd", warmup_steps=0, learning_rate=1e38, weight_decay=1e6)
"""Its first step is finite and leaves weights that are not."""


def run(config: TrainConfig, ranks: int = 1) -> list[dict[str, Any]]:
    return run_ranks(ranks, lambda ring: loop.train(ring, config))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


Plant = Callable[..., None]


@pytest.fixture
def plant() -> Iterator[Plant]:
    """Spoils one step (from 0) of the model that is trained, on one rank: its loss, or a gradient alone."""
    with ExitStack() as stack:
        yield lambda step, rank=0, value=math.nan, what="loss": stack.enter_context(spoiled(step, rank, value, what))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_the_first_step_that_is_not_finite_ends_the_run_on_all_ranks(plant: Plant, value: float, what: str) -> None:
    plant(2, rank=1, value=value, what=what)

    def of_rank(ring: Ring) -> str:
        with pytest.raises(NonFiniteError) as raised:
            loop.train(ring, TINY)
        return str(raised.value)

    first, second = run_ranks(2, of_rank)
    assert first == second and first.startswith("step 3 of 6: its ")
    spoilt = "loss is" if what == "loss" else "gradient norm is"
    assert re.findall("(loss is|gradient norm is)", first) == [spoilt] and "nonfinite=skip" in first


def test_the_last_finite_checkpoints_stay(tmp_path: Path, plant: Plant) -> None:
    plant(4)
    with pytest.raises(NonFiniteError):
        run(replace(TINY, out=str(tmp_path), checkpoint_every_steps=1))
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    # The step itself is finite; what it makes of the weights is not.
    config = replace(OVERSHOOTS, out=str(tmp_path), checkpoint_every_steps=1)
    run(replace(config, steps=2, learning_rate=1e-9))
    with pytest.raises(NonFiniteError, match=r"^step 3 of 6: .* are not finite, so they are not saved"):
        run(config)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_skipped_step_is_counted_and_changes_no_weight(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = loop.drawn
    monkeypatch.setattr(loop, "drawn", lambda ring, replica, text, at, config: drawn(ring, replica, text, 0, config))
    undisturbed = run(TINY, ranks=2)[0]["losses"]  # of the same sequences at each step
    plant(2, rank=1)
    for result in run(replace(TINY, nonfinite="skip"), ranks=2):
        losses = result["losses"]
        assert (result["skipped_steps"], losses[2], result["grad_norms"][2]) == ([2], None, None)
        assert losses[:2] == undisturbed[:2] and losses[3] == undisturbed[2] and None not in losses[4:]


def test_a_resumed_run_remembers_what_it_skipped(tmp_path: Path, plant: Plant) -> None:
    plant(1)
    config = replace(TINY, nonfinite="skip", out=str(tmp_path), checkpoint_every_steps=2)
    whole = run(replace(config, checkpoint_every_steps=None))[0]
    run(replace(config, steps=4))
    resumed = run(config)[0]
    assert (resumed["first_step"], resumed["skipped_steps"]) == (4, [1])
    assert (resumed["losses"], resumed["grad_norms"]) == (whole["losses"], whole["grad_norms"])


def test_a_checkpoint_before_the_first_step_that_counts_changes_nothing(tmp_path: Path, plant: Plant) -> None:
    """torch makes the state of an optimizer that has none by a step of its own, which would count."""
    plant(0)
    config = replace(TINY, nonfinite="skip")
    expected = run(config)[0]
    saves = replace(config, out=str(tmp_path), checkpoint_every_steps=1)
    assert run(saves)[0]["losses"] == expected["losses"]
    stopped = replace(saves, out=str(tmp_path / "stopped"))
    with pytest.raises(NonFiniteError, match=r"^all 1 steps were skipped"):
        run(replace(stopped, steps=1))
    assert run(stopped)[0]["losses"] == expected["losses"]


def test_skipping_cannot_help_spoiled_weights() -> None:
    config = replace(OVERSHOOTS, nonfinite="skip")
    with pytest.raises(NonFiniteError, match=r"^step 2 of 6: .* weights are not finite, which skipping cannot mend"):
        run(config)


def test_the_result_is_strict_json(tmp_path: Path, plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    plant(1)
    words = ["model=tiny", "tokens=32", "transport=gloo", "steps=3", f"out={tmp_path}"]
    words += ["model.layers=1"]
    assert train.main(words) == 1
    assert "step 2 of 3: its loss is nan" in capsys.readouterr().err and not (tmp_path / "result.json").exists()
    assert train.main([*words, "nonfinite=skip"]) == 0

    def refused(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=refused)
    assert result["skipped_steps"] == [1] and result["losses"][1] is None
    assert "1 skipped" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("key", ["learning_rate", "weight_decay", "clip_norm", "timeout_s", "model.rope_base"])
def test_numbers_that_are_not_finite_are_refused_by_key(key: str, value: str) -> None:
    with pytest.raises(InputError, match=f"^{key}={value}: must be a finite number"):
        load_train([f"{key}={value}"])


# --- nothing to learn ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["a", "aaa"])  # a separator is a token of the document before it
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_text_without_a_second_token_in_any_document_is_refused(tmp_path: Path, content: str, ranks: int) -> None:
    (tmp_path / "text").write_text(content)
    config = replace(TINY, text=str(tmp_path / "text"), pack_documents=True, separator="a")
    with pytest.raises(InputError, match=r"^text=.*: no document has a second token, so there is nothing to learn"):
        run(config, ranks)


def test_a_step_without_a_label_is_refused_by_its_number(tmp_path: Path) -> None:
    # Of sequences of 8 tokens one in 50 has the document with a second token.
    (tmp_path / "text").write_text("a" * 400 + "bc")
    config = replace(TINY, tokens=8, text=str(tmp_path / "text"), pack_documents=True, separator="a", batch=1)
    with pytest.raises(InputError, match=r"^step \d of 6: no label is counted"):
        run(config, 2)


def test_a_prompt_of_all_tokens_is_refused_at_its_first_step() -> None:
    with pytest.raises(InputError, match=r"^step 1 of 6: no label is counted.*prompt_tokens=41"):
        run(replace(TINY, prompt_tokens=41), 2)

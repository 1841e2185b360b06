"""A run that stops and goes on is the run that never stopped; what is not the same run is refused by key.

One process, bit by bit; other numbers of processes are in `test_train_mesh.py`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringattn import Ring
from ringattn.errors import InputError
from ringattn.launch import ranks
from ringattn.launch.options import leaves
from ringattn.launch.train import checkpoints, loop, train
from ringattn.launch.train.checkpoints import MAY_CHANGE, Checkpoints, latest
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.launch.train.data import load
from ringattn.testing import run_ranks

TINY = TrainConfig(tokens=41, batch=2, steps=6, dtype="fp64", warmup_steps=4, model=ModelConfig(1, 16, 2, 1, 24))


def run(config: TrainConfig) -> dict[str, Any]:
    """The result of one process."""
    return run_ranks(1, lambda ring: loop.train(ring, config))[0]


def names(folder: Path) -> list[str]:
    """What lies in the folder of checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def copied(config: TrainConfig, **change: Any) -> TrainConfig:
    """The configuration with changes, those of the model with a prefix `model_`."""
    model = {key.removeprefix("model_"): value for key, value in change.items() if key.startswith("model_")}
    others = {key: value for key, value in change.items() if not key.startswith("model_")}
    return replace(config, **others, model=replace(config.model, **model))


@pytest.fixture
def saved(tmp_path: Path) -> TrainConfig:
    """A run of three steps that has left its checkpoint; more steps would go on from it."""
    config = replace(TINY, steps=3, checkpoint_every_steps=3, out=str(tmp_path / "run"))
    run(config)
    return config


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, optimizer: str, dtype: str) -> None:
    config = replace(TINY, optimizer=optimizer, dtype=dtype, out=str(tmp_path), checkpoint_every_steps=2)
    whole = run(replace(config, checkpoint_every_steps=None))
    run(replace(config, steps=3))  # ends, and saves, between two checkpoints
    resumed = run(config)
    assert (resumed["first_step"], len(resumed["step_s"])) == (3, 3)
    assert (resumed["losses"], resumed["grad_norms"]) == (whole["losses"], whole["grad_norms"])


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    run(replace(TINY, out=str(tmp_path), checkpoint_every_steps=2, steps=5))
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    run(replace(TINY, out=str(tmp_path), checkpoint_every_steps=1, steps=7))
    assert names(tmp_path) == ["step-00000006", "step-00000007"]


def test_no_checkpoints_without_being_asked(tmp_path: Path) -> None:
    run(replace(TINY, out=str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()


def test_a_run_that_has_ended_ends_again(saved: TrainConfig) -> None:
    again = run(saved)
    assert (again["first_step"], again["step_s"], again["tokens_per_s"]) == (3, [], 0.0)
    assert again["losses"] == run(replace(TINY, steps=3))["losses"]


STOPS: dict[str, tuple[Any, str, Any]] = {
    "weights": (checkpoints.dcp, "save", lambda arguments, named: named["checkpoint_id"]),
    "facts": (checkpoints.json, "dump", lambda arguments, named: Path(arguments[1].name).parent),
    "name": (Path, "rename", lambda arguments, named: arguments[0]),
}
"""Where a machine may stop while it saves: what is called, and how the call tells which folder it is for."""


class MachineStopped(BaseException):
    """Nothing is tidied up after it."""


@pytest.mark.parametrize("at", STOPS)
def test_a_half_written_checkpoint_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    config = replace(TINY, out=str(tmp_path), checkpoint_every_steps=2)
    whole = run(replace(config, checkpoint_every_steps=None))

    owner, name, goes_to = STOPS[at]
    kept = getattr(owner, name)

    def stops(*arguments: Any, **named: Any) -> Any:
        if goes_to(arguments, named).name.startswith("step-00000004"):
            raise MachineStopped
        return kept(*arguments, **named)

    with monkeypatch.context() as stopped:
        stopped.setattr(owner, name, stops)
        with pytest.raises(MachineStopped):
            run(config)
    assert names(tmp_path) == ["step-00000002", "step-00000004.partial"]
    resumed = run(config)
    assert resumed["first_step"] == 2 and resumed["losses"] == whole["losses"]
    assert names(tmp_path) == ["step-00000004", "step-00000006"]


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for name in ("step-00000009", "step-00000010", "step-99999999.partial", "step-00000011", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if name != "step-00000011":  # no longer, or not yet, whole
            (tmp_path / "checkpoints" / name / "run.json").touch()
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step-00000010"


def test_a_run_that_saves_nothing_goes_on_too(saved: TrainConfig) -> None:
    again = run(replace(saved, steps=5, checkpoint_every_steps=None))
    assert again["first_step"] == 3 and len(again["losses"]) == 5
    assert names(Path(saved.out)) == ["step-00000003"]


def test_what_is_no_checkpoint_makes_way(tmp_path: Path) -> None:
    config = replace(TINY, out=str(tmp_path), checkpoint_every_steps=2)
    # As a save or a deletion that was stopped leaves them.
    for name in ("step-00000002.deleted", "step-00000004.partial", "step-00000077.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "remains").touch()
    (tmp_path / "checkpoints" / "step-by-step-1").mkdir()
    assert run(config)["first_step"] == 0
    assert names(tmp_path) == ["step-00000004", "step-00000006", "step-by-step-1"]
    assert run(config)["first_step"] == 6


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_dim": 32}, "model.dim=32: the checkpoint .*/step-00000003 has 16; choose another folder"),
        ({"model_layers": 2}, "model.layers=2: .* has 1"),
        ({"model_tied": False}, "model.tied=False: .* has True"),
        ({"dtype": "fp32"}, "dtype=fp32: .* has fp64"),
        ({"optimizer": "sgd"}, "optimizer=sgd: .* has adamw"),
        ({"weight_decay": 0.5}, "weight_decay=0.5: .* has 0.01"),
        ({"attention": "dilated", "segment_lengths": [8], "dilation_rates": [1]}, "attention=dilated: .* has full"),
        ({"batch": 4}, "batch=4: .* has 2"),
        ({"tokens": 42}, "tokens=42: .* has 41"),
        ({"seed": 1}, "seed=1: .* has 0"),
        ({"prompt_tokens": 1}, "prompt_tokens=1: .* has 0"),
        ({"pack_documents": True}, "pack_documents=True: .* has False"),
        ({"text": __file__}, f"text={__file__}: .* was trained on another text"),
        ({"steps": 2}, "steps=2: .*/step-00000003 has 3 steps behind it already"),
        ({"resume": "never"}, "resume=never: .*/step-00000003 is in the folder already"),
        ({"resume": "elsewhere"}, "resume=elsewhere: .*/step-00000003 is in the folder already"),
        (
            {"resume": "never", "checkpoint_every_steps": None},
            "resume=never: .*/step-00000003 is in the folder already",
        ),
        ({"model_dim": 32, "checkpoint_every_steps": None}, "model.dim=32: the checkpoint .*/step-00000003 has 16"),
        ({"out": "elsewhere", "resume": "/nowhere"}, "resume=/nowhere: no complete checkpoint is there"),
    ],
    ids=str,
)
def test_another_run_is_refused_by_key(
    saved: TrainConfig, change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"^{message}"):
        run(copied(replace(saved, steps=6), **change))


def test_what_may_change_changes_nothing_that_was_learned(saved: TrainConfig) -> None:
    again = run(replace(saved, steps=4, micro_batch=1, recompute="full", learning_rate=1e-4, clip_norm=5.0))
    assert again["first_step"] == 3 and again["losses"][:3] == run(replace(TINY, steps=3))["losses"]


def test_every_key_is_of_the_run_or_may_change() -> None:
    known = {key for key, _, _ in leaves(TrainConfig())}
    assert known > MAY_CHANGE
    # Whoever adds a key decides: these are the model and the data.
    assert {key for key in known - MAY_CHANGE if not key.startswith("model.")} == {
        "attention", "segment_lengths", "dilation_rates", "batch", "dtype", "tokens", "optimizer",
        "prompt_tokens", "seed", "text", "weight_decay", "pack_documents", "separator", "curriculum_start_tokens",
        "curriculum_steps",
    }  # fmt: skip


def test_the_text_is_known_by_what_it_says(tmp_path: Path) -> None:
    text, config = tmp_path / "text", replace(TINY, checkpoint_every_steps=3, out=str(tmp_path / "run"))
    text.write_bytes(bytes(range(256)) * 4)
    run(replace(config, steps=3, text=str(text)))
    moved = text.rename(tmp_path / "moved")
    assert run(replace(config, text=str(moved)))["first_step"] == 3
    moved.write_bytes(bytes(range(255)) * 4)
    with pytest.raises(InputError, match=r"^text=.*moved: .* was trained on another text"):
        run(replace(config, text=str(moved)))


@pytest.mark.parametrize("lacking", [[1], [0, 1]], ids=str)
def test_a_checkpoint_that_a_machine_does_not_see_is_told_on_all(
    tmp_path: Path, saved: TrainConfig, monkeypatch: pytest.MonkeyPatch, lacking: list[int]
) -> None:
    monkeypatch.setattr(checkpoints, "join_process_group", lambda *_: None)  # these ranks are threads
    begins_from = latest(Path(saved.out))

    def of_rank(ring: Ring) -> str:
        seen = f"{begins_from}-of-another-machine" if ring.rank in lacking else str(begins_from)
        config = replace(saved, out=str(tmp_path / "own"), resume=seen)
        with pytest.raises(InputError) as raised:
            Checkpoints(ring, config, load(config)).resume(*loop.make_model(ring, config))
        return str(raised.value).removeprefix(f"resume={seen}: ")

    told = f"no complete checkpoint is there on ranks {lacking}; name a folder step-N that all machines see"
    assert run_ranks(2, of_rank, timeout_s=20.0) == [told] * 2


def test_the_documents_of_a_text_are_of_it(saved: TrainConfig) -> None:
    def of_rank(ring: Ring) -> None:
        text = load(saved)
        Checkpoints(ring, saved, text).resume(*loop.make_model(ring, saved))
        text = replace(text, cuts=(0, *text.cuts[2:]))
        with pytest.raises(InputError, match=r"^text=: .* was trained on another text"):
            Checkpoints(ring, saved, text).resume(*loop.make_model(ring, saved))

    run_ranks(1, of_rank)


def test_a_folder_that_one_machine_alone_sees_is_told(saved: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "join_process_group", lambda *_: None)  # these ranks are threads
    latest_here = latest

    def of_rank(ring: Ring) -> str:
        config = replace(saved, checkpoint_every_steps=None)
        if ring.rank == 1:
            config = replace(config, out=f"{saved.out}-of-another-machine")
        found = checkpoints.checkpoints_of(ring, config, load(config))
        assert found is not None and (latest_here(Path(config.out)) is None) == (ring.rank == 1)
        with pytest.raises(InputError) as raised:
            found.resume(*loop.make_model(ring, config))
        return str(raised.value)

    assert all(told.endswith("all machines must share this folder") for told in run_ranks(2, of_rank))


@pytest.mark.parametrize(("every", "key"), [(None, "resume=auto"), (3, "checkpoint_every_steps")])
def test_threads_neither_keep_nor_pass_over_checkpoints(saved: TrainConfig, every: int | None, key: str) -> None:
    config = replace(saved, checkpoint_every_steps=every)
    with pytest.raises(InputError, match=rf"^{key}: the ranks are threads"):
        run_ranks(2, lambda ring: loop.train(ring, config))


# --- restarts of torchrun --------------------------------------------------------------------------------------------


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a process that torchrun has started, here by the parent of this one."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    return monkeypatch


@pytest.mark.parametrize("resume", ["never", "of another run"])
def test_a_restart_of_torchrun_goes_on_with_its_own(
    tmp_path: Path, saved: TrainConfig, job: pytest.MonkeyPatch, resume: str
) -> None:
    begins_from = str(latest(Path(saved.out))) if resume != "never" else resume
    config = replace(saved, out=str(tmp_path / "own"), resume=begins_from)
    assert run(replace(config, steps=4, checkpoint_every_steps=4))["first_step"] == (0 if resume == "never" else 3)
    with pytest.raises(InputError, match=r"^resume=.*/own/checkpoints/step-00000004 is in the folder already"):
        run(config)  # no restart
    job.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run(replace(config, steps=5))["first_step"] == 4


@pytest.mark.parametrize("earlier", ["by hand", "by another torchrun"])
def test_a_restart_of_torchrun_goes_on_with_no_others(tmp_path: Path, job: pytest.MonkeyPatch, earlier: str) -> None:
    config = replace(TINY, out=str(tmp_path), checkpoint_every_steps=3, resume="never")
    with job.context() as before:
        before.setattr(checkpoints, "torchrun_job", lambda: None if earlier == "by hand" else "none of this boot 7 9")
        run(replace(config, steps=3))
    # torchrun starts ranks again whatever they ended of, so also those that were refused.
    job.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(InputError, match=r"^resume=never: .*/step-00000003 is in the folder already"):
        run(config)


def test_a_torchrun_is_known_by_its_process(job: pytest.MonkeyPatch) -> None:
    mine = ranks.torchrun_job()
    assert mine is not None and mine == ranks.torchrun_job()
    job.setattr(ranks.os, "getppid", lambda: os.getpid())
    assert ranks.torchrun_job() not in (None, mine)
    job.delenv("TORCHELASTIC_RUN_ID")
    assert ranks.torchrun_job() is None


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=tiny", "tokens=32", "transport=gloo", "checkpoint_every_steps=2", f"out={tmp_path}"]
    assert train.main([*words, "steps=2"]) == 0
    assert "in 2 steps\n" in capsys.readouterr().out
    assert train.main([*words, "steps=5"]) == 0
    printed = capsys.readouterr().out
    assert "in 5 steps, 2 of them before\n" in printed and "step 3/5" in printed and "step 2/5" not in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["first_step"], len(result["losses"]), len(result["step_s"])) == (2, 5, 3)
    assert train.main([*words, "steps=5", "model.layers=2"]) == 2
    assert "ringattn train: model.layers=2: the checkpoint" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc"), Path("/proc/nope")):
        for more in ([], ["checkpoint_every_steps=1"]):
            words = ["model=tiny", "tokens=32", "transport=gloo", "steps=1", *more, f"out={folder}"]
            assert train.main(words) == 2
            shown = capsys.readouterr()
            assert shown.err.startswith(f"ringattn train: out={folder}: ") and not shown.out, shown

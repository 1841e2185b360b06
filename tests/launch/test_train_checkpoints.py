"""Checkpoints: a resumed run equals an uninterrupted one; damaged and malicious checkpoints are refused.

The runs have one process and are compared bit by bit. `test_train_mesh.py` resumes on other numbers of processes.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from ringattn import Ring
from ringattn.errors import InputError, RingError
from ringattn.launch import ranks
from ringattn.launch.folders import locked
from ringattn.launch.options import leaves
from ringattn.launch.train import checkpoints, loop, mesh, train
from ringattn.launch.train.checkpoints import (
    INSTANCES,
    MAY_CHANGE,
    RUN,
    Checkpoints,
    MetadataUnpickler,
    described,
    latest,
    read_run,
    write_run,
)
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.data import load
from ringattn.testing import run_ranks
from tests.launch import fuzz_train
from tests.launch.training import SMALL, names, run


@pytest.fixture
def saved(tmp_path: Path) -> TrainConfig:
    """Train three steps and save a checkpoint at the end. Return the configuration."""
    config = replace(SMALL, steps=3, checkpoint_every_steps=3, out=str(tmp_path / "run"))
    run(config)
    return config


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, optimizer: str, dtype: str) -> None:
    config = replace(SMALL, optimizer=optimizer, dtype=dtype, out=str(tmp_path), checkpoint_every_steps=2)
    whole = run(replace(config, checkpoint_every_steps=None))
    run(replace(config, steps=3))  # saves at its end, between two regular checkpoints
    resumed = run(config)
    assert (resumed["first_step"], len(resumed["step_s"])) == (3, 3)
    assert (resumed["losses"], resumed["grad_norms"]) == (whole["losses"], whole["grad_norms"])


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run(replace(SMALL, out=str(tmp_path), checkpoint_every_steps=2, steps=5))
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    run(replace(SMALL, out=str(tmp_path), checkpoint_every_steps=1, steps=7))
    assert names(tmp_path) == ["step-00000006", "step-00000007"]


def test_no_checkpoint_is_saved_by_default(tmp_path: Path) -> None:
    run(replace(SMALL, out=str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()


def test_a_finished_run_can_be_started_again_and_trains_no_step(saved: TrainConfig) -> None:
    again = run(saved)
    assert (again["first_step"], again["step_s"], again["tokens_per_s"]) == (3, [], 0.0)
    assert again["losses"] == run(replace(SMALL, steps=3))["losses"]


@pytest.mark.parametrize("target", ["save", "write_run", "rename"])
def test_a_partly_written_checkpoint_is_ignored(tmp_path: Path, target: str) -> None:
    config = replace(SMALL, out=str(tmp_path), checkpoint_every_steps=2)
    with fuzz_train.interrupt(target, 2, fuzz_train.stop), pytest.raises(fuzz_train.StoppedError):
        run(config)
    assert names(tmp_path) == ["step-00000002", "step-00000004.partial"]
    resumed = run(config)
    assert resumed["first_step"] == 2 and resumed["losses"] == run(SMALL)["losses"]
    assert names(tmp_path) == ["step-00000004", "step-00000006"]


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for name in ("step-00000009", "step-00000010", "step-99999999.partial", "step-00000011", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if name != "step-00000011":  # a checkpoint without run.json is incomplete
            (tmp_path / "checkpoints" / name / "run.json").touch()
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step-00000010"


def test_a_run_without_checkpoints_of_its_own_resumes_too(saved: TrainConfig) -> None:
    again = run(replace(saved, steps=5, checkpoint_every_steps=None))
    assert again["first_step"] == 3 and len(again["losses"]) == 5
    assert names(saved.out) == ["step-00000003"]


def test_remains_of_interrupted_saves_and_deletions_are_removed(tmp_path: Path) -> None:
    config = replace(SMALL, out=str(tmp_path), checkpoint_every_steps=2)
    for name in ("step-00000002.deleted", "step-00000004.partial", "step-00000077.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "remains").touch()
    (tmp_path / "checkpoints" / "step-by-step-1").mkdir()
    assert run(config)["first_step"] == 0
    assert names(tmp_path) == ["step-00000004", "step-00000006", "step-by-step-1"]
    assert run(config)["first_step"] == 6


# --- checkpoints of another run --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": replace(SMALL.model, dim=32)},
            "model.dim=32: the checkpoint .*/step-00000003 has 16; choose another folder",
        ),
        ({"dtype": "fp32"}, "dtype=fp32: .* has fp64"),
        ({"attention": "dilated", "segment_lengths": [8], "dilation_rates": [1]}, "attention=dilated: .* has full"),
        ({"text": __file__}, f"text={__file__}: .* was trained on another text"),
        ({"steps": 2}, "steps=2: .*/step-00000003 was saved after 3 steps already"),
        ({"resume": "never"}, "resume=never: .*/step-00000003 is in the folder already"),
        ({"resume": "never", "checkpoint_every_steps": None}, "resume=never: .*/step-00000003 is in the folder al"),
        (
            {"model": replace(SMALL.model, dim=32), "checkpoint_every_steps": None},
            "model.dim=32: the checkpoint .*/step-00000003 has 16",
        ),
        ({"out": "elsewhere", "resume": "/nowhere"}, "resume=/nowhere: it holds no complete checkpoint"),
    ],
    ids=str,
)
def test_the_checkpoint_of_another_run_is_refused_with_the_key_that_differs(
    saved: TrainConfig, change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"^{message}"):
        run(replace(saved, **{"steps": 6, **change}))


def test_options_that_may_change_keep_the_curve_so_far(saved: TrainConfig) -> None:
    again = run(replace(saved, steps=4, micro_batch=1, recompute="full", learning_rate=1e-4, clip_norm=5.0))
    assert again["first_step"] == 3 and again["losses"][:3] == run(replace(SMALL, steps=3))["losses"]


def test_keys_of_the_model_and_the_data_may_not_change() -> None:
    keys = {key for key, _, _ in leaves(TrainConfig())}
    assert keys > MAY_CHANGE
    # A new key belongs either here or to MAY_CHANGE.
    assert {key for key in keys - MAY_CHANGE if not key.startswith("model.")} == {
        "attention", "segment_lengths", "dilation_rates", "batch", "dtype", "tokens", "optimizer",
        "prompt_tokens", "seed", "text", "weight_decay", "pack_documents", "separator", "curriculum_start_tokens",
        "curriculum_steps",
    }  # fmt: skip


def test_the_text_is_identified_by_its_content(tmp_path: Path) -> None:
    text, config = tmp_path / "text", replace(SMALL, checkpoint_every_steps=3, out=str(tmp_path / "run"))
    text.write_bytes(bytes(range(256)) * 4)
    run(replace(config, steps=3, text=str(text)))
    moved = text.rename(tmp_path / "moved")
    assert run(replace(config, text=str(moved)))["first_step"] == 3
    moved.write_bytes(bytes(range(255)) * 4)
    with pytest.raises(InputError, match=r"^text=.*moved: .* was trained on another text"):
        run(replace(config, text=str(moved)))


@pytest.mark.parametrize("missing", [[1], [0, 1]], ids=str)
def test_all_ranks_refuse_a_checkpoint_that_some_machines_do_not_see(
    tmp_path: Path, saved: TrainConfig, monkeypatch: pytest.MonkeyPatch, missing: list[int]
) -> None:
    monkeypatch.setattr(checkpoints, "join_process_group", lambda *_: None)  # these ranks are threads
    checkpoint = latest(Path(saved.out))

    def of_rank(ring: Ring) -> str:
        path = f"{checkpoint}-of-another-machine" if ring.rank in missing else str(checkpoint)
        config = replace(saved, out=str(tmp_path / "own"), resume=path)
        with pytest.raises(InputError) as raised:
            Checkpoints(ring, config, load(config)).resume(*loop.make_model(ring, config))
        return str(raised.value).removeprefix(f"resume={path}: ")

    message = f"it holds no complete checkpoint on ranks {missing}; name a folder step-N that all machines see"
    assert run_ranks(2, of_rank, timeout_s=20.0) == [message] * 2


def test_the_same_tokens_cut_into_other_documents_are_another_text(saved: TrainConfig) -> None:
    def of_rank(ring: Ring) -> None:
        text = load(saved)
        Checkpoints(ring, saved, text).resume(*loop.make_model(ring, saved))
        text = replace(text, cuts=(0, *text.cuts[2:]))
        with pytest.raises(InputError, match=r"^text=: .* was trained on another text"):
            Checkpoints(ring, saved, text).resume(*loop.make_model(ring, saved))

    run_ranks(1, of_rank)


def test_a_checkpoint_of_another_device_does_not_decide_how_the_optimizer_computes(saved: TrainConfig) -> None:
    def of_rank(ring: Ring) -> None:
        model, optimizer = loop.make_model(ring, saved)
        assert optimizer.param_groups[0]["foreach"] is False  # as in the checkpoint
        optimizer.param_groups[0]["foreach"] = True
        assert Checkpoints(ring, saved, load(saved)).resume(model, optimizer).losses
        assert optimizer.param_groups[0]["foreach"] is True

    run_ranks(1, of_rank)


def test_all_ranks_refuse_a_folder_that_one_machine_does_not_see(
    saved: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "join_process_group", lambda *_: None)  # these ranks are threads

    def of_rank(ring: Ring) -> str:
        config = replace(saved, checkpoint_every_steps=None)
        if ring.rank == 1:
            config = replace(config, out=f"{saved.out}-of-another-machine")
        store = checkpoints.checkpoints_of(ring, config, load(config))
        assert store is not None and (latest(Path(config.out)) is None) == (ring.rank == 1)
        with pytest.raises(InputError) as raised:
            store.resume(*loop.make_model(ring, config))
        return str(raised.value)

    assert all(message.endswith("all machines must share this folder") for message in run_ranks(2, of_rank))


@pytest.mark.parametrize(("every", "key"), [(None, "resume=auto"), (3, "checkpoint_every_steps")])
def test_threads_refuse_to_save_or_to_ignore_checkpoints(saved: TrainConfig, every: int | None, key: str) -> None:
    config = replace(saved, checkpoint_every_steps=every)
    with pytest.raises(InputError, match=rf"^{key}: needs ranks that are processes"):
        run_ranks(2, lambda ring: loop.train(ring, config))


# --- restarts by torchrun --------------------------------------------------------------------------------------------


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the environment as if torchrun were the parent of this process. Return the monkeypatch for more changes."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    return monkeypatch


@pytest.mark.parametrize("resume", ["never", "of another run"])
def test_a_restart_by_torchrun_resumes_from_its_own_checkpoint(
    tmp_path: Path, saved: TrainConfig, job: pytest.MonkeyPatch, resume: str
) -> None:
    path = str(latest(Path(saved.out))) if resume != "never" else resume
    config = replace(saved, out=str(tmp_path / "own"), resume=path)
    assert run(replace(config, steps=4, checkpoint_every_steps=4))["first_step"] == (0 if resume == "never" else 3)
    with pytest.raises(InputError, match=r"^resume=.*/own/checkpoints/step-00000004 is in the folder already"):
        run(config)  # this run is not a restart
    job.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run(replace(config, steps=5))["first_step"] == 4


@pytest.mark.parametrize("earlier", ["by hand", "by another torchrun"])
def test_a_restart_by_torchrun_refuses_the_checkpoints_of_another_job(
    tmp_path: Path, job: pytest.MonkeyPatch, earlier: str
) -> None:
    config = replace(SMALL, out=str(tmp_path), checkpoint_every_steps=3, resume="never")
    with job.context() as before:
        before.setattr(checkpoints, "torchrun_job", lambda: None if earlier == "by hand" else "none of this boot 7 9")
        run(replace(config, steps=3))
    # torchrun restarts ranks after any failure, also after a refusal.
    job.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(InputError, match=r"^resume=never: .*/step-00000003 is in the folder already"):
        run(config)


def test_a_torchrun_job_is_identified_by_its_process(job: pytest.MonkeyPatch) -> None:
    first = ranks.torchrun_job()
    assert first is not None and first == ranks.torchrun_job()
    job.setattr(ranks.os, "getppid", lambda: os.getpid())
    assert ranks.torchrun_job() not in (None, first)
    job.delenv("TORCHELASTIC_RUN_ID")
    assert ranks.torchrun_job() is None


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model=tiny", "tokens=32", "transport=gloo", "checkpoint_every_steps=2", f"out={tmp_path}"]
    assert train.main([*arguments, "steps=2"]) == 0
    assert "in 2 steps\n" in capsys.readouterr().out
    assert train.main([*arguments, "steps=5"]) == 0
    printed = capsys.readouterr().out
    assert "in 5 steps, 2 of them in earlier runs\n" in printed and "step 3/5" in printed and "step 2/5" not in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["first_step"], len(result["losses"]), len(result["step_s"])) == (2, 5, 3)
    assert train.main([*arguments, "steps=5", "model.layers=2"]) == 2
    assert "ringattn train: model.layers=2: the checkpoint" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc"), Path("/proc/nope")):
        for more in ([], ["checkpoint_every_steps=1"]):
            assert train.main(["model=tiny", "tokens=32", "transport=gloo", "steps=1", *more, f"out={folder}"]) == 2
            captured = capsys.readouterr()
            assert captured.err.startswith(f"ringattn train: out={folder}: ") and not captured.out, captured


# --- damaged checkpoints ---------------------------------------------------------------------------------------------


DESCRIBED = checkpoints.described


@pytest.fixture
def saved_twice(tmp_path: Path) -> TrainConfig:
    """Run the first 4 of 6 steps, with checkpoints of steps 2 and 4. Return the configuration of all 6 steps."""
    config = replace(SMALL, checkpoint_every_steps=2, out=str(tmp_path / "run"))
    run(replace(config, steps=4))
    return config


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flip_bit, "is damaged"),
    "truncated": (truncate, "is (truncated|damaged)"),
    "empty": (lambda path: os.truncate(path, 0), "is (truncated|damaged)"),
    "missing": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("part", ["__0_0.distcp", ".metadata", "run.json"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_loaded(
    saved_twice: TrainConfig, capsys: pytest.CaptureFixture[str], part: str, fault: str
) -> None:
    whole = run(SMALL)
    damage, message = FAULTS[fault]
    damaged = Path(saved_twice.out) / "checkpoints" / "step-00000004"
    damage(damaged / part)
    resumed = run(saved_twice)
    assert resumed["first_step"] == 2
    assert (resumed["losses"], resumed["grad_norms"]) == (whole["losses"], whole["grad_norms"])
    (line,) = resumed["damaged_checkpoints"]
    assert re.fullmatch(rf".*{damaged / part} {message}.*; resuming from .*/step-00000002", line)
    assert f"ringattn train: {line}\n" in capsys.readouterr().err
    assert names(saved_twice.out) == ["step-00000004", "step-00000006"]
    assert run(saved_twice)["damaged_checkpoints"] == []


def test_resuming_from_a_damaged_path_is_refused_and_a_good_one_proposed(saved_twice: TrainConfig) -> None:
    folder = Path(saved_twice.out) / "checkpoints"
    flip_bit(folder / "step-00000004" / "__0_0.distcp")
    config = replace(saved_twice, out=f"{saved_twice.out}-2", resume=str(folder / "step-00000004"))
    with pytest.raises(
        InputError, match=r"__0_0\.distcp is damaged.*the next older undamaged checkpoint is .*/step-00000002$"
    ):
        run(config)
    assert run(replace(config, resume=str(folder / "step-00000002")))["first_step"] == 2


def test_a_run_does_not_start_from_scratch_if_all_checkpoints_are_damaged(saved_twice: TrainConfig) -> None:
    folder = Path(saved_twice.out) / "checkpoints"
    truncate(folder / "step-00000002" / "__0_0.distcp")
    (folder / "step-00000004" / "run.json").unlink()
    with pytest.raises(
        InputError, match=r"^resume=auto: .*4/run.json is missing; .*2/__0_0.distcp is truncated .*no older"
    ):
        run(saved_twice)
    assert names(saved_twice.out) == ["step-00000002", "step-00000004"]


def test_a_save_keeps_two_good_checkpoints_besides_a_damaged_one(
    saved_twice: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that was damaged during the run does not count as one of the two that a save keeps."""
    save = checkpoints.Checkpoints.save

    def damage_and_save(self: Any, model: Any, optimizer: Any, curve: Any) -> None:
        flip_bit(self.folder / "step-00000004" / "__0_0.distcp")
        save(self, model, optimizer, curve)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Checkpoints, "save", damage_and_save)
        run(saved_twice)
    assert names(saved_twice.out) == ["step-00000002", "step-00000004", "step-00000006"]
    run(replace(saved_twice, steps=8))
    assert names(saved_twice.out) == ["step-00000006", "step-00000008"]


def test_a_changed_loss_in_a_checkpoint_is_detected(saved_twice: TrainConfig) -> None:
    path = Path(saved_twice.out) / "checkpoints" / "step-00000004" / "run.json"
    content = json.loads(path.read_text())
    content["losses"][0] += 1.0
    path.write_text(json.dumps(content))
    assert "run.json is damaged (its digest differs)" in run(saved_twice)["damaged_checkpoints"][0]


def test_an_error_of_torch_while_loading_is_reported_with_the_checkpoint(
    saved_twice: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointException("load", {0: (ValueError("planted"), None)})  # type: ignore[dict-item]

    monkeypatch.setattr(checkpoints.dcp, "load", fail)
    with pytest.raises(RingError, match=r"step-00000004 could not be loaded: ValueError: planted"):
        run(saved_twice)


# --- a full disk -----------------------------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_while_saving(path: Path) -> tuple[int, str]:
    return full() if path.parent.suffix == ".partial" else DESCRIBED(path)  # type: ignore[no-any-return]


def full_in_torch(*_: Any, **__: Any) -> Any:
    raise CheckpointException("write", {0: (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("owner", "name", "failure"),
    [
        (checkpoints.dcp, "save", full_in_torch),
        (checkpoints, "write_run", full),
        (checkpoints, "described", full_while_saving),
    ],
)
def test_a_full_disk_is_reported_and_leaves_the_old_checkpoints(
    saved_twice: TrainConfig, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, failure: Any
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failure)
        with pytest.raises(
            RingError, match=r"/step-00000006 could not be written: No space left on device; it needs about"
        ) as raised:
            run(saved_twice)
    assert "iB, and the disk at /" in str(raised.value) and "resume=auto resumes from the last one" in str(raised.value)
    assert names(saved_twice.out) == ["step-00000002", "step-00000004"]
    assert run(saved_twice)["first_step"] == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_error_of_a_failed_first_save_names_no_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    folder = tmp_path / "checkpoints"

    def fail(ring: Ring) -> str:
        store = object.__new__(Checkpoints)
        store.everyone, store.folder = ring, folder
        with pytest.raises(RingError) as raised:
            store._on_all_ranks(folder / "step-00000002.partial", 1, full if ring.rank == 0 else None)
        return str(raised.value)

    messages = run_ranks(ranks, fail)
    assert all("no checkpoint exists yet" in message and "resume=auto" not in message for message in messages)
    (folder / "step-00000001").mkdir(parents=True)
    assert all("resume=auto resumes from the last one" in message for message in run_ranks(ranks, fail))


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_during_a_save_is_not_reported_as_a_full_disk(
    saved_twice: TrainConfig, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, error: type[BaseException]
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        signal.raise_signal(number)

    handlers = {signal.SIGTERM: lambda *_: sys.exit(7), signal.SIGINT: signal.default_int_handler}
    before = signal.signal(number, handlers[number])  # a shell may have started the tests with SIGINT ignored
    monkeypatch.setattr(FileSystemWriter, "write_data", interrupt)
    try:
        with pytest.raises(error):
            loop.train_rank({"runs": [asdict(saved_twice)]})
    finally:
        signal.signal(number, before)
    assert names(saved_twice.out) == ["step-00000002", "step-00000004"]
    monkeypatch.undo()
    assert run(saved_twice)["first_step"] == 4


# --- two runs in one folder ------------------------------------------------------------------------------------------


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs fail at once, instead of waiting, if another run holds the lock of a folder."""
    monkeypatch.setattr(mesh, "DYING_S", 0.0)


@pytest.mark.usefixtures("no_wait")
def test_a_second_run_in_a_folder_is_refused(saved_twice: TrainConfig) -> None:
    before = names(saved_twice.out)
    with mesh.locked_folder(saved_twice.out):
        with pytest.raises(InputError, match=rf"^out=.*/run: another run is writing there, process {os.getpid()} on "):
            run(saved_twice)
        assert names(saved_twice.out) == before
        run(replace(saved_twice, checkpoint_every_steps=None))  # this run writes no checkpoint
    assert run(saved_twice)["first_step"] == 4


@pytest.mark.usefixtures("no_wait")
def test_a_second_command_in_a_folder_is_refused_before_its_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mesh.locked_folder(str(tmp_path)):
        assert train.main(["ranks=2", "tokens=64", f"out={tmp_path}"]) == 2
    assert "another run is writing there" in capsys.readouterr().err


def test_a_run_waits_for_the_lock_of_a_dying_process(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys, time; lock = open(sys.argv[1], 'a'); "
        "fcntl.flock(lock, 2); print(flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / ".lock")], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(InputError), locked(tmp_path, "out", "run", "", wait_s=0.0):
        pass
    holder.send_signal(signal.SIGKILL)  # the kernel releases the lock
    with locked(tmp_path, "out", "run", "", wait_s=5.0) as lock:
        assert lock.lost() is None
    holder.wait()


def test_a_folder_that_was_replaced_during_the_run_is_not_written_to(
    saved_twice: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoints.Checkpoints.save

    def replace_and_save(self: Any, model: Any, optimizer: Any, curve: Any) -> None:
        Path(saved_twice.out).rename(f"{saved_twice.out}-moved")
        Path(saved_twice.out).mkdir()
        save(self, model, optimizer, curve)

    monkeypatch.setattr(checkpoints.Checkpoints, "save", replace_and_save)
    with pytest.raises(RingError, match=r"^out=.*/run: the folder was removed or replaced"):
        run(saved_twice)
    assert not list(Path(saved_twice.out).iterdir())


# --- malicious checkpoints with correct digests ----------------------------------------------------------------------


class CallsOnLoad:
    """An object whose unpickling calls `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the path of a file that the code in a malicious checkpoint would create."""
    return tmp_path / "code has run"


def make_checkpoint(folder: Path) -> Path:
    """Train a run and return its checkpoint."""
    run(replace(SMALL, steps=3, checkpoint_every_steps=3, out=str(folder / "foreign")))
    path = latest(folder / "foreign")
    assert path is not None
    return path


def update_digests(path: Path) -> TrainConfig:
    """Write the correct digests of a changed checkpoint. Return the configuration of a run that resumes from it."""
    content = read_run(path)
    del content["files"]
    (path / RUN).unlink()
    write_run(path, content, {file.name: described(file) for file in path.iterdir()})
    return replace(SMALL, steps=5, checkpoint_every_steps=3, out=str(path.parents[2] / "own"), resume=str(path))


def check_refused(path: Path, reason: str) -> None:
    config = update_digests(path)
    with pytest.raises(InputError) as raised:
        run(config)
    message = str(raised.value)
    assert message.startswith(f"resume={path}: {path}: {reason}"), message
    assert message.endswith("load only checkpoints that you trust") and "\n" not in message


def test_a_good_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert run(update_digests(make_checkpoint(tmp_path)))["first_step"] == 3


@pytest.mark.parametrize(
    "function", ["os.system", "builtins.exec", "builtins.getattr", "torch.load", "pathlib.Path.touch"]
)
def test_metadata_that_calls_a_function_is_refused(tmp_path: Path, marker: Path, function: str) -> None:
    path = make_checkpoint(tmp_path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    malicious, name = {
        "os.system": (CallsOnLoad(os.system, f"touch '{marker}'"), "posix.system"),
        "builtins.exec": (CallsOnLoad(exec, f"open({str(marker)!r}, 'w')"), "builtins.exec"),
        "builtins.getattr": (CallsOnLoad(getattr, str, "upper"), "builtins.getattr"),
        "torch.load": (CallsOnLoad(torch.load, str(marker)), "torch.serialization.load"),
        "pathlib.Path.touch": (CallsOnLoad(Path.touch, marker), "pathlib.Path.touch"),
    }[function]
    metadata.planner_data = [malicious]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    check_refused(path, f".metadata names {name}; it might run code")
    assert not marker.exists()


def test_metadata_of_another_type_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    (path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    check_refused(path, ".metadata holds a dict; ")


@pytest.mark.parametrize(
    "target", ["torch.distributed.checkpoint.metadata Metadata", "torch.serialization _get_layout"]
)
def test_metadata_that_sets_attributes_of_a_class_or_function_is_refused(tmp_path: Path, target: str) -> None:
    path = make_checkpoint(tmp_path)
    # Pickle's BUILD with the state (None, {"planted": 1}), which sets the attribute `planted` of the target to 1.
    code = f"c{target.replace(' ', chr(10))}\n".encode() + b"N}X\x07\x00\x00\x00plantedK\x01s\x86b."
    (path / ".metadata").write_bytes(code)
    check_refused(path, ".metadata sets attributes of <")
    assert not hasattr(Metadata, "planted") and not hasattr(torch.serialization._get_layout, "planted")


def test_an_entry_that_calls_a_function_is_refused(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoints._state

    def malicious_state(*arguments: Any) -> dict[str, Any]:
        state = original(*arguments)
        state["optimizer"]["param_groups"][0]["weight_decay"] = CallsOnLoad(os.system, f"touch '{marker}'")
        return state

    monkeypatch.setattr(checkpoints, "_state", malicious_state)
    monkeypatch.setattr(checkpoints, "all_finite", lambda *_: True)
    path = make_checkpoint(tmp_path)
    monkeypatch.undo()
    check_refused(path, "its entry optimizer.param_groups.0.weight_decay holds posix.system; it might run code")
    assert not marker.exists()


def test_every_class_in_the_metadata_of_torch_is_accepted(tmp_path: Path) -> None:
    """The unpickler accepts the metadata of tensors of several dtypes and of the values in an optimizer's state."""
    state = {
        **{
            str(dtype): torch.zeros(2, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
        },
        "numbers": {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "names": ["a", "b"]},
    }
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    with (tmp_path / "checkpoint" / ".metadata").open("rb") as file:
        metadata = MetadataUnpickler(file).load()
    assert isinstance(metadata, Metadata)
    with (tmp_path / "checkpoint" / ".metadata").open("rb") as file:
        expected = pickle.load(file)
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.storage_data == expected.storage_data
    assert {type(entry) for entry in metadata.state_dict_metadata.values()} <= set(INSTANCES)


# --- random runs, each with one fault --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "undisturbed" else ()) for kind in fuzz_train.KINDS]
)
def test_a_random_run_with_a_fault_is_exact_or_reports_it(kind: str) -> None:
    assert fuzz_train.judge(fuzz_train.draw(7, (kind,))) in ("exact", "reported")

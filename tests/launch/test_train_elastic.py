"""A rank that is killed costs the steps since the last checkpoint, and nothing else.

Real processes, one of which dies of SIGKILL in the middle of a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringattn.launch.ranks import RanksError
from ringattn.launch.train import loop, train
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
CONFIG = TrainConfig(tokens=41, batch=2, steps=8, dtype="fp64", model=ModelConfig(1, 16, 2, 1, 24))
WORDS = [
    "tokens=41", "batch=2", "steps=8", "dtype=fp64", "transport=gloo", "model.layers=1", "model.dim=16",
    "model.heads=2", "model.kv_heads=1", "model.hidden_dim=24", "checkpoint_every_steps=2", "timeout_s=100",
]  # fmt: skip


def check_result(folder: Path) -> None:
    """The run died at step 5, went on from step 4, and came to what a run comes to that never died."""
    assert (folder / "died").exists()
    result = json.loads((folder / "result.json").read_text())
    never_killed = run_ranks(1, lambda ring: loop.train(ring, CONFIG))[0]
    assert result["first_step"] == 4
    assert result["losses"] == pytest.approx(never_killed["losses"], rel=1e-10)
    assert result["grad_norms"] == pytest.approx(never_killed["grad_norms"], rel=1e-10)


@pytest.mark.slow
def test_the_launcher_starts_killed_ranks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "ENTRY", "tests.launch.train_entries:train_and_die_once")
    mesh = ["replicas=2", "ranks=1", "sharding=zero2"]
    assert train.main([*WORDS, *mesh, "restarts=1", f"out={tmp_path}"]) == 0
    check_result(tmp_path)
    told = capsys.readouterr().err
    assert "ringattn train: rank 1 was killed (SIGKILL)" in told
    assert f"starting again from {tmp_path}/checkpoints/step-00000004" in told


@pytest.mark.slow
def test_torchrun_starts_killed_ranks_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [*command, "-m", "tests.launch.train_entries", *WORDS, f"out={tmp_path}"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_result(tmp_path)


# --- when not to start again -----------------------------------------------------------------------------------------


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The runs that the launcher asks for, all of which fail; `refused` if so says their text."""
    asked: list[dict[str, Any]] = []

    def fails(entry: str, spec: dict[str, Any], *more: Any) -> list[dict[str, Any]]:
        asked.append(spec["runs"][0])
        raise RanksError("planted", "killed", refused=spec["runs"][0]["seed"] == 7)

    monkeypatch.setattr(train, "run_ranks_in_processes", fails)
    return asked


def test_restarts_are_counted(tmp_path: Path, tries: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "ranks=2", "restarts=2", f"out={tmp_path}", "resume=never"]
    assert train.main(words) == 1
    assert [one["resume"] for one in tries] == ["never"] * 3
    assert capsys.readouterr().err.count("starting again from the first step") == 2


def test_a_restart_goes_on_from_its_own_checkpoint(tmp_path: Path, tries: list[dict[str, Any]]) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000002" / "run.json").touch()
    assert train.main([*WORDS, "ranks=2", "restarts=1", f"out={tmp_path}", "resume=somewhere"]) == 1
    assert [one["resume"] for one in tries] == ["somewhere", "auto"]


def test_what_was_refused_is_not_tried_again(tmp_path: Path, tries: list[dict[str, Any]]) -> None:
    assert train.main([*WORDS, "ranks=2", "restarts=2", "seed=7", f"out={tmp_path}"]) == 2
    assert len(tries) == 1


def test_one_process_is_started_so_that_it_can_be_started_again(tmp_path: Path, tries: list[dict[str, Any]]) -> None:
    assert train.main([*WORDS, "restarts=1", f"out={tmp_path}"]) == 1
    assert len(tries) == 2

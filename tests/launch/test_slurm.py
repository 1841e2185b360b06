"""Sweeps by submitit: real jobs of its local executor, and the script that sbatch would get."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from ringattn.launch.calls import load_run
from ringattn.launch.measure import sweep

pytest.importorskip("submitit")

STAND_IN = """#!/bin/bash
cp "$1" "$(dirname "$0")/submitted.sh"
echo "planted: no such partition" >&2
exit 1
"""
ASKED = [
    "launcher=slurm", "slurm.partition=gpu", "slurm.account=us", "slurm.gpus_per_node=8", "slurm.cpus_per_task=16",
    "slurm.mem_gb=64", "slurm.array_parallelism=2", "slurm.setup=['module load cuda','ulimit -l unlimited']",
    "ranks=8", "limit_s=600",
]  # fmt: skip


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that keeps the script it is given and fails, as sbatch does for a wrong partition."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "srun"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "submitted.sh"


def test_the_printed_script_is_what_sbatch_gets(
    tmp_path: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"out={tmp_path / 'out'}"
    assert sweep.main([*ASKED, out, "tokens=64,96,128", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    script = printed[printed.index("#!/bin/bash") :].strip()
    for line in ("--array=0-2%2", "--partition=gpu", "--account=us", "--gpus-per-node=8", "--cpus-per-task=16",
                 "--mem=64GB", "--nodes=1", "--ntasks-per-node=1", "--time=15"):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert "module load cuda\nulimit -l unlimited\n" in script
    assert sweep.main([*ASKED, out, "tokens=64,96,128"]) == 1

    def without_job(text: str) -> list[str]:
        """All lines but the one that names the job's own files."""
        own = "srun", "#SBATCH --output", "#SBATCH --error"
        return [line for line in text.strip().splitlines() if not line.startswith(own)]

    assert without_job(sbatch.read_text()) == without_job(script)


def test_a_submission_that_fails_says_what_to_do(
    tmp_path: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main([*ASKED, f"out={tmp_path / 'out'}", "tokens=64,96,128"]) == 1
    told = capsys.readouterr().err
    assert "planted: no such partition" in told and "give the same command again" in told
    assert not (tmp_path / "out" / "points.jsonl").exists()


def test_nodes_of_a_sweep_are_asked_for_together() -> None:
    configs = [load_run(["ranks=8", f"nnodes={nodes}", "limit_s=60"]) for nodes in (1, 2, 1)]
    slurm, here = (sweep.SweepConfig(launcher=name) for name in ("slurm", "submitit_local"))
    batches = sweep._batches(slurm, configs)
    assert [[config.nnodes for config in batch] for batch in batches] == [[1, 1], [2]]
    asked = sweep.parameters(slurm, batches[1])
    assert asked["nodes"] == 2 and asked["tasks_per_node"] == 1
    assert [len(batch) for batch in sweep._batches(here, configs)] == [1, 1, 1]


def test_without_submitit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep, "find_spec", lambda name: None)
    assert sweep.main(["launcher=slurm", f"out={tmp_path}", "tokens=64"]) == 2
    assert "launcher=slurm: needs submitit; pip install 'ringattn[slurm]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two nodes are two tasks of one job, as by Slurm; here they share the machine.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    small = "tokens=64", "shape=small", "repeats=1", "warmup=1"
    assert sweep.main([f"out={tmp_path}", "launcher=submitit_local", "nnodes=2", *small]) == 0
    found = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    assert [(one["status"], one["world_size"], len(one["bytes_sent"])) for one in found] == [("ok", 2, 2)]
    assert all(found[0]["bytes_sent"])
    assert list((tmp_path / ".submitit").glob("*/*_submitted.pkl"))

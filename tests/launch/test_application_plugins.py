"""`ringattn run` with launchers and sweepers of Hydra's; those of joblib and Optuna are in a folder of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.adapters.environments import environment

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("shape=small", "repeats=1", "warmup=1", "threads_per_rank=1", "backward=false")
JOBLIB = ("hydra-joblib-launcher==1.2.0", "joblib==1.6.0")
# What the sweeper asks for, and what that imports; alembic and SQLAlchemy as old as this Optuna.
OPTUNA = ("hydra-optuna-sweeper==1.3.0", "optuna==2.10.1", "alembic==1.12.1", "cmaes==0.13.1", "colorlog==6.12.0",
          "joblib==1.6.0", "mako==1.4.3", "scipy==1.17.1", "sqlalchemy==1.4.54")  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def ringattn(folder: Path, *words: str, beside: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m ringattn run` in `folder`, with the packages in `beside`."""
    path = os.pathsep.join(str(one) for one in (ROOT, beside) if one is not None)
    return subprocess.run(
        [sys.executable, "-m", "ringattn", "run", *words], cwd=folder, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=560,
    )  # fmt: skip


def test_jobs_of_submitit(tmp_path: Path) -> None:
    done = ringattn(tmp_path, "-m", "hydra/launcher=submitit_local", "hydra.sweep.dir=sweep", "tokens=64", *SMALL)
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "sweep" / ".submitit").glob("*/*_log.out")
    assert re.search(r"^tokens/s +[\d,]+$", log.read_text(), re.MULTILINE)
    assert OmegaConf.load(tmp_path / "sweep" / "0" / ".hydra" / "config.yaml").tokens == 64


def test_jobs_of_joblib(tmp_path: Path) -> None:
    words = "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "hydra.sweep.dir=sweep"
    done = ringattn(tmp_path, *words, "schedule=direct", "tokens=64", *SMALL, beside=environment(*JOBLIB))
    assert done.returncode == 0, done.stderr
    assert "Joblib.Parallel" in done.stdout and "\nforward " in done.stdout
    assert OmegaConf.load(tmp_path / "sweep" / "0" / ".hydra" / "config.yaml").schedule == "direct"


def test_optuna_minimises_the_time(tmp_path: Path) -> None:
    """What it calls best is the least of the times that were measured, over schedules and lengths."""
    done = ringattn(
        tmp_path, "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.direction=minimize", "hydra.sweeper.sampler.seed=1", "hydra.sweep.dir=sweep", "ranks=1",
        "schedule=choice(ring,direct)", "tokens=choice(64,512,2048)", *SMALL, beside=environment(*OPTUNA),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    best = OmegaConf.load(tmp_path / "sweep" / "optimization_results.yaml")
    times = [float(one) for one in re.findall(r"^forward +([\d.]+) ms", done.stdout, re.MULTILINE)]
    jobs = [OmegaConf.load(one) for one in sorted((tmp_path / "sweep").glob("*/.hydra/overrides.yaml"))]
    assert len(times) == len(jobs) == 3
    assert best.best_value == pytest.approx(min(times), abs=1e-3)  # as it is printed
    chosen = jobs[times.index(min(times))]
    assert {f"schedule={best.best_params.schedule}", f"tokens={best.best_params.tokens}"} <= set(chosen)

"""`ringattn run` as a Hydra application: flags, overrides, written files, errors, and Hydra's plugins."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ringattn import cli
from ringattn.errors import RingError
from ringattn.launch.calls import RunConfig
from ringattn.launch.measure import run
from ringattn.launch.measure.points import read_points
from ringattn.launch.processes import RanksError
from tests.adapters.environments import environment
from tests.launch.commands import ROOT, ringattn


class FakeRanks:
    """A replacement for the ranks. It returns one millisecond per token as a pass's time, two with schedule=ring."""

    def __init__(self) -> None:
        self.configs: list[RunConfig] = []
        self.error: RingError | None = None

    def __call__(self, config: RunConfig, place: object, quiet: bool) -> dict[str, Any]:
        self.configs.append(config)
        if self.error is not None:
            raise self.error
        assert config.tokens is not None
        milliseconds = config.tokens * (2 if config.schedule == "ring" else 1)
        spread = dict.fromkeys(("median", "p10", "p90"), milliseconds)
        return {"forward_ms": {**spread, "samples": 1}, "backward_ms": None, "peak_bytes": [0], "tokens_per_s": 1.0}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRanks]:
    """Replace the ranks, work in an empty directory, and undo Hydra's logging after the test."""
    fake, root = FakeRanks(), logging.getLogger()
    monkeypatch.setattr(run, "run_here", fake)
    monkeypatch.setattr(run, "table", lambda config, facts: f"{config.tokens} {facts['forward_ms']['median']}")
    monkeypatch.chdir(tmp_path)
    handlers, level = list(root.handlers), root.level
    yield fake
    root.handlers[:] = handlers
    root.setLevel(level)


def files(folder: Path) -> set[str]:
    """Return the paths of all files below `folder`."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_plain_options_write_no_files(ranks: FakeRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, argv = logging.getLogger().level, list(sys.argv)
    assert run.main(["tokens=64", "schedule=ring"]) == 0
    assert capsys.readouterr().out == "64 128\n"
    assert not files(tmp_path) and logging.getLogger().level == before and sys.argv == argv


def test_cfg_job_shows_the_configuration(ranks: FakeRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--cfg", "job", "window=[5,0]", "ranks=3", "shape=llama8b", "tokens=128k"]) == 0
    printed = capsys.readouterr()
    shown = OmegaConf.create(printed.out)
    assert not printed.err and shown.tokens == 128_000
    assert (shown.window, shown.ranks, shown.heads, "hydra" in shown) == ([5, 0], 3, 32, False)
    assert not ranks.configs and not files(tmp_path)


def test_a_multirun_has_one_job_per_point(ranks: FakeRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["-m", "tokens=64,96", "schedule=ring,direct", "hydra.sweep.dir=sweep"]) == 0
    points = [(config.tokens, config.schedule) for config in ranks.configs]
    assert points == [(64, "ring"), (64, "direct"), (96, "ring"), (96, "direct")]
    assert OmegaConf.load("sweep/3/.hydra/overrides.yaml") == ["tokens=96", "schedule=direct"]
    assert "sweep/multirun.yaml" in files(tmp_path) and {file.split("/")[0] for file in files(tmp_path)} == {"sweep"}
    printed = capsys.readouterr().out
    assert "#3 : tokens=96 schedule=direct" in printed and "96 192" in printed


def test_a_failed_job_has_a_record_and_a_row_in_the_table(
    ranks: FakeRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.error = RanksError("too slow", "timeout")
    assert run.main(["-m", "tokens=64,96", "hydra.sweep.dir=sweep"]) == 1
    records = read_points(tmp_path / "sweep")
    assert [(record["tokens"], record["status"]) for record in records.values()] == [(64, "timeout"), (96, "timeout")]
    printed = capsys.readouterr()
    assert re.findall(r"^(tokens=\d+) +timeout", printed.out, re.MULTILINE) == ["tokens=64", "tokens=96"]
    assert "ringattn run: too slow" in printed.err


@pytest.mark.slow
def test_the_run_directory_can_be_chosen(ranks: FakeRanks, tmp_path: Path) -> None:
    assert run.main(["hydra.run.dir=here", "tokens=64"]) == 0
    assert OmegaConf.load("here/.hydra/config.yaml").tokens == 64
    assert run.main(["hydra.run.dir=there", "hydra.job.chdir=true", "tokens=96"]) == 0
    assert Path.cwd() == tmp_path and (tmp_path / "there" / ".hydra" / "config.yaml").exists()


def test_configs_and_groups_of_the_user(ranks: FakeRanks, tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    (conf / "shape").mkdir(parents=True)
    (conf / "shape" / "near.yaml").write_text("# @package _global_\nheads: 6\nwindow: [7, 0]\n")
    (conf / "nightly.yaml").write_text("defaults:\n  - run\n  - override shape: near\n  - _self_\ntokens: 96\n")
    (conf / "bare.yaml").write_text("tokens: 80\nheads: 4\nkv_heads: 4\n")
    assert run.main(["--config-dir", "conf", "shape=near", "tokens=64"]) == 0
    assert run.main(["--config-dir=conf", "--config-name=nightly", "++repeats=3"]) == 0
    assert run.main(["-cd", "conf", "-cn", "bare"]) == 0
    assert run.main(["hydra.searchpath=[file://conf]", "shape=near", "tokens=48"]) == 0
    points = [(config.tokens, config.heads, config.window, config.repeats) for config in ranks.configs]
    assert points == [(64, 6, [7, 0], 10), (96, 6, [7, 0], 3), (80, 4, None, 10), (48, 6, [7, 0], 10)]
    assert ranks.configs[2].kv_heads == 4 and ranks.configs[2].head_dim == 64


def test_the_override_signs_of_hydra(ranks: FakeRanks) -> None:
    assert run.main(["++tokens=64", "+seed=5"]) == 2  # Hydra rejects + for an existing key
    assert run.main(["++tokens=64", "+tokens_per_rank=null", "++ranks=2", "~shape"]) == 0
    assert (ranks.configs[0].tokens, ranks.configs[0].ranks, ranks.configs[0].heads) == (64, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-m toknes=64,96", "toknes: no such key; did you mean tokens?"),
        pytest.param("++toknes=64", "toknes: no such key; did you mean tokens?", marks=pytest.mark.slow),
        ("+toknes=64", "toknes: no such key; did you mean tokens?"),
        ("--cfg job schedule=rign", "schedule=rign: choose one of auto, ring"),
        ("-m schedule=ring,rign", "schedule=rign: choose one of auto, ring"),
        pytest.param(
            "++tokens=x",
            "tokens=x: is not a length; write 131072, 128k, 128Ki, 1M",
            marks=pytest.mark.slow,
        ),
        pytest.param("++repeats=0", "repeats=0: must be at least 1", marks=pytest.mark.slow),
        pytest.param("++ranks=9 tokens=8", "ranks=9: 9 ranks are more than tokens=8", marks=pytest.mark.slow),
        pytest.param("++nnodes=2", "nnodes=2: node_rank and rdzv_endpoint are missing", marks=pytest.mark.slow),
        pytest.param("--cfg job tokens=64,96", "add --multirun", marks=pytest.mark.slow),
        ("--config-dirr=x", "--config-dirr=x: no such flag"),
        ("--tokens 128k", "--tokens 128k: write tokens=128k"),
        ("--nproc-per-node=2 tokens=64", "--nproc-per-node=2: write ranks=2"),
        ("--multirun=true tokens=64", "--multirun=true: --multirun takes no value; remove =true"),
        pytest.param("--config-dir=nowhere tokens=64", "nowhere' not found", marks=pytest.mark.slow),
        pytest.param("--config-name=nowhere tokens=64", "Cannot find primary config 'nowhere'", marks=pytest.mark.slow),
        pytest.param("-m --cfg job", "--cfg: cannot be combined with -m; give one of them", marks=pytest.mark.slow),
        pytest.param(
            "--dry-run ++tokens=64",
            "--dry-run: cannot be combined with Hydra's flags; --cfg job shows",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "-m hydra/launcher=joblib tokens=64,96", "pip install hydra-joblib-launcher", marks=pytest.mark.slow
        ),
        ("-m hydra/sweeper=optuna tokens=64,96", "pip install hydra-optuna-sweeper"),
    ],
)
def test_mistakes(arguments: str, message: str, ranks: FakeRanks, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(arguments.split()) == 2
    errors = capsys.readouterr().err
    assert message in errors and "ringattn run: " in errors and "Traceback" not in errors and not ranks.configs


@pytest.mark.slow
def test_a_failing_point_does_not_stop_a_multirun(
    ranks: FakeRanks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.error = RingError("rank 1 is lost")
    assert run.main(["-m", "tokens=64,96"]) == 1
    assert "ringattn run: rank 1 is lost" in capsys.readouterr().err
    assert len(ranks.configs) == 2  # the second job runs too
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="Could not find 'shape/rign'"):
        run.main(["-m", "shape=small,rign"])
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


@pytest.mark.slow
def test_a_multirun_under_torchrun_is_an_error(
    ranks: FakeRanks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert run.main(["-m", "tokens=64,96"]) == 2
    assert "every rank would run all points" in capsys.readouterr().err
    assert run.main(["++tokens=64"]) == 0 and ranks.configs[0].ranks == 4
    assert run.main(["++tokens=64", "ranks=2"]) == 2
    assert "ranks=2: torchrun started 4" in capsys.readouterr().err


def test_the_task_returns_the_time_that_sweepers_minimise(ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = {"median": 1.5}
    facts = {"forward_ms": spread, "backward_ms": {"median": 2.0}, "peak_bytes": [0], "tokens_per_s": 1.0}
    monkeypatch.setattr(run, "run_here", lambda config, place, quiet: facts)
    monkeypatch.setattr(run, "table", lambda config, facts: "")
    returned = []
    measured = run.measured
    monkeypatch.setattr(run, "measured", lambda composed: returned.append(measured(composed)))
    assert run.main(["++tokens=64"]) == 0 and returned == [3.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [run, _self_]\ntokns: 3\n", "tokns: no such key; did you mean tokens?"),
        ("mask: {kind: full}\n", "mask: "),
        ("defaults: [run\ntokens: : 3\n", "nightly.yaml, line 2: is not valid YAML: expected ',' or ']', but got ':'"),
    ],
)
def test_a_wrong_config_of_the_user_is_an_error_without_a_traceback(
    text: str, message: str, ranks: FakeRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "nightly.yaml").write_text(text)
    assert run.main(["--config-dir", "conf", "--config-name", "nightly"]) == 2
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors and "full_key" not in errors and not ranks.configs


def test_only_hydras_public_names_are_used() -> None:
    for file in (ROOT / "launch").rglob("*.py"):
        private = re.findall(r"^.*(?:from|import) (?:hydra|omegaconf)[\w.]*\._.*$", file.read_text(), re.MULTILINE)
        assert not private, f"{file.name}: {private}"


# --- Hydra's launchers and sweepers, with processes ------------------------------------------------------------------


SMALL = ("shape=small", "repeats=1", "warmup=1", "threads_per_rank=1", "backward=false")
# The sweeper requires this version of Optuna, which requires old versions of alembic and SQLAlchemy. The other packages
# are imported by these.
OPTUNA = ("hydra-optuna-sweeper==1.3.0", "optuna==2.10.1", "alembic==1.12.1", "cmaes==0.13.1", "colorlog==6.12.0",
          "joblib==1.6.0", "mako==1.4.3", "scipy==1.17.1", "sqlalchemy==1.4.54")  # fmt: skip
JOBLIB = ("hydra-joblib-launcher==1.2.0", "joblib==1.6.0")


def run_in(folder: Path, *arguments: str, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Start `ringattn run` in `folder`, with the folder `packages` on the path."""
    path = os.pathsep.join(str(entry) for entry in (ROOT, packages) if entry is not None)
    return ringattn("run", *arguments, cwd=folder, env={"PYTHONPATH": path})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "tokens"), [("basic", (64, 96)), ("submitit_local", (64,)), ("joblib", (64,))])
def test_a_multirun_leaves_a_record_per_job_and_prints_one_table(
    launcher: str, tokens: tuple[int, ...], tmp_path: Path
) -> None:
    arguments = [
        "-m",
        f"hydra/launcher={launcher}",
        "hydra.sweep.dir=sweep",
        f"tokens={','.join(map(str, tokens))}",
        "schedule=direct,ring",
        "ranks=2",
    ]
    points = list(product(tokens, ("direct", "ring")))
    packages = environment(*JOBLIB) if launcher == "joblib" else None
    done = run_in(tmp_path, *arguments, *SMALL, packages=packages)
    assert done.returncode == 0, done.stderr
    jobs = [read_points(tmp_path / "sweep" / str(number)) for number in range(len(points))]
    records = read_points(tmp_path / "sweep")
    assert [len(job) for job in jobs] == [1] * len(points) and len(records) == len(points)
    assert all(records[key] == record for job in jobs for key, record in job.items())
    assert sorted((record["tokens"], record["resolved"]["schedule"]) for record in records.values()) == points
    rows = re.findall(r"^((?:tokens=\d+ )?schedule=\w+) +ok ", done.stdout, re.MULTILINE)
    varied = "tokens={} schedule={}" if len(tokens) > 1 else "schedule={1}"  # a row names the options that vary
    assert rows == [varied.format(*point) for point in points]
    assert "records of all jobs: " in done.stdout
    report = ringattn("report", "sweep", cwd=tmp_path)
    assert report.returncode == 0 and f"{len(points)} points: {len(points)} with results" in report.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_optuna_minimises_the_time(tmp_path: Path) -> None:
    """Optuna's best value is the shortest of the measured times, and its best parameters are those of that job."""
    done = run_in(
        tmp_path, "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.direction=minimize", "hydra.sweeper.sampler.seed=1", "hydra.sweep.dir=sweep", "ranks=1",
        "schedule=choice(ring,direct)", "tokens=choice(64,512,2048)", *SMALL, packages=environment(*OPTUNA),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    best = OmegaConf.load(tmp_path / "sweep" / "optimization_results.yaml")
    times = [float(time) for time in re.findall(r"^forward +([\d.]+) ms", done.stdout, re.MULTILINE)]
    jobs = [OmegaConf.load(file) for file in sorted((tmp_path / "sweep").glob("*/.hydra/overrides.yaml"))]
    assert len(times) == len(jobs) == 3
    assert best.best_value == pytest.approx(min(times), abs=1e-3)  # printed times are rounded
    chosen = jobs[times.index(min(times))]
    assert {f"schedule={best.best_params.schedule}", f"tokens={best.best_params.tokens}"} <= set(chosen)

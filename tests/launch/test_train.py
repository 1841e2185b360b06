"""Training on several ranks is training on one: losses, gradients, and what would be wrong instead.

Threads in float64, where only a wrong rule can show; then real processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring
from ringattn.errors import InputError, RingError
from ringattn.launch.memory import PeakMemory
from ringattn.launch.pictures.charts import Bars, CurveDistance, draw_losses, draw_memory
from ringattn.launch.ranks import agreed_ranks, threads_for
from ringattn.launch.train import loop, train
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.launch.train.mesh import locked_folder
from ringattn.launch.train.model import Transformer
from ringattn.testing import run_ranks

TINY = TrainConfig(tokens=61, batch=2, steps=4, dtype="fp64", warmup_steps=2, model=ModelConfig(2, 32, 4, 2, 48))
ROOT = Path(__file__).resolve().parents[2]


def losses(config: TrainConfig, world_size: int) -> list[float]:
    """The losses of a run on threads; all ranks must report the same."""
    results = run_ranks(world_size, lambda ring: loop.train(ring, config))
    assert all(result["losses"] == results[0]["losses"] for result in results)
    assert all(result["grad_norms"] == results[0]["grad_norms"] for result in results)
    return list(results[0]["losses"])


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return losses(TINY, 1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "auto"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_losses_do_not_depend_on_the_ranks(alone: list[float], world_size: int, layout: str) -> None:
    # 61 is a prime number: the ranks' counts differ.
    assert losses(replace(TINY, layout=layout), world_size) == pytest.approx(alone, rel=1e-10)


def test_the_model_learns(alone: list[float]) -> None:
    assert alone[0] == pytest.approx(5.55, abs=0.2)  # log 256: nothing is known yet
    assert losses(replace(TINY, steps=30, learning_rate=1e-2), 2)[-1] < alone[0] - 1


@pytest.mark.parametrize("change", [{"tied": False}, {"kv_heads": 4}, {"kv_heads": 1}])
def test_losses_agree_for_other_models(change: dict[str, Any]) -> None:
    config = replace(TINY, model=replace(TINY.model, **change))
    assert losses(config, 3) == pytest.approx(losses(config, 1), rel=1e-10)


def test_labels_that_fall_on_few_ranks_count_right() -> None:
    # 40 of 61 tokens are read only; of four contiguous shards the first two have no label at all.
    config = replace(TINY, prompt_tokens=40, layout="contiguous")
    assert losses(config, 4) == pytest.approx(losses(config, 1), rel=1e-10)


def test_ranks_without_tokens_take_part() -> None:
    config = replace(TINY, tokens=3, layout="contiguous")
    assert losses(config, 5) == pytest.approx(losses(config, 1), rel=1e-10)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_has_had_its_time_is_ended(world_size: int) -> None:
    def of_rank(ring: Ring) -> None:  # one rank's clock is enough
        loop.train(ring, replace(TINY, steps=10**6, limit_s=2.0 if ring.rank == world_size - 1 else 3600.0))

    with pytest.raises(RingError, match=r"^limit_s=2: .* after \d+ of 1000000 steps; raise limit_s"):
        run_ranks(world_size, of_rank)


def test_a_command_that_has_had_its_time_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=tiny", "tokens=32", "transport=gloo", "steps=3", "limit_s=0.001", f"out={tmp_path}"]
    assert train.main(words) == 1
    assert capsys.readouterr().err.startswith("ringattn train: limit_s=0.001: ")
    assert not (tmp_path / "result.json").exists()


def test_ranks_start_from_rank_0s_weights() -> None:
    def of_rank(ring: Ring) -> Tensor:
        model, _ = loop.make_model(ring, replace(TINY, seed=ring.rank))
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    first, second = run_ranks(2, of_rank)
    assert torch.equal(first, second)


def test_weights_are_the_same_in_every_dtype() -> None:
    wide, narrow = (Transformer(TINY.model, 256, dtype, seed=3) for dtype in (torch.float64, torch.float32))
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert a.dtype == torch.float64 and torch.equal(a.float(), b)


def test_bf16_keeps_its_weights_in_fp32() -> None:
    model = Transformer(TINY.model, 256, torch.bfloat16, seed=3)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert losses(replace(TINY, dtype="bf16"), 2) == pytest.approx(losses(TINY, 1), rel=1e-2)


def test_memory_counts_what_is_allocated_after_the_start() -> None:
    before = torch.ones(30 << 20, dtype=torch.uint8)
    memory = PeakMemory(torch.device("cpu"))
    torch.ones(50 << 20, dtype=torch.uint8)
    assert memory.growth_bytes() == pytest.approx(50 << 20, rel=0.1)
    del before


# --- processes -------------------------------------------------------------------------------------------------------


def ringattn(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`ringattn train` as a person would run it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "ringattn", "train", *words], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_two_processes_train_like_threads(tmp_path: Path, alone: list[float]) -> None:
    sizes = ["tokens=61", "batch=2", "steps=4", "dtype=fp64", "warmup_steps=2"]
    shape = ["model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "model.hidden_dim=48"]
    done = ringattn("ranks=2", *sizes, *shape, "layout=striped", "out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stdout and "wrote run/result.json" in done.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["losses"] == pytest.approx(alone, rel=1e-10)
    assert result["tokens_of_rank"] == [31, 30]
    assert len(result["memory_growth_bytes"]) == 2 and min(result["memory_growth_bytes"]) > 0
    assert result["config"]["model"]["dim"] == 32 and result["counters"]["bytes_sent"] > 0


def all_end(pids: list[int]) -> bool:
    """Whether all processes end within moments: one that was killed still shows as running while it is torn down."""
    for _ in range(50):
        if not any(runs(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def runs(pid: int) -> bool:
    """Whether a process runs; one that ended and was not yet waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_the_ranks_of_a_torchrun_that_is_killed_end(tmp_path: Path) -> None:
    words = ["tokens=64", "model=tiny", "transport=gloo", "steps=1000000", "checkpoint_every_steps=1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    agent = subprocess.Popen(
        [*torchrun, "-m", "ringattn", "train", *words, f"out={tmp_path}"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(1200):
        if list(tmp_path.glob("checkpoints/step-*/run.json")):
            break
        time.sleep(0.1)
    children = Path(f"/proc/{agent.pid}/task").glob("*/children")
    ranks = [int(pid) for file in children for pid in file.read_text().split()]
    assert len(ranks) == 2
    agent.kill()
    agent.wait()
    assert all_end(ranks)
    with locked_folder(str(tmp_path)):  # nobody writes there any more
        pass


@pytest.mark.parametrize("kernel", [True, False])
def test_a_process_ends_with_its_parent(kernel: bool) -> None:
    """The kernel's signal, and the look at the parent where there is no such kernel; also if it had ended before."""
    child = (
        "import sys, time\nfrom ringattn.launch import processes\n"
        f"processes._asked_the_kernel = processes._asked_the_kernel if {kernel} else lambda number: False\n"
        "processes.PARENT_LOOK_S = 0.05\nprocesses.end_with_parent(int(sys.argv[1]))\n"
        "print('lives', flush=True)\ntime.sleep(60)"
    )
    starts = (
        "import os, subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())],"
        " stdout=subprocess.PIPE)\nchild.stdout.readline()\nprint(child.pid, flush=True)\nsys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen(
        [sys.executable, "-c", starts, child], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    assert runs(pid)
    starter.kill()
    starter.communicate()
    assert all_end([pid])
    of_another = subprocess.run([sys.executable, "-c", child, "1"], env=environment, capture_output=True)
    assert (of_another.returncode, of_another.stdout) == (-signal.SIGKILL, b"")


def test_torchruns_ranks_are_not_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (agreed_ranks(None), agreed_ranks(3)) == (1, 3)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (agreed_ranks(None), agreed_ranks(4)) == (4, 4)
    with pytest.raises(InputError, match=r"^ranks=2: torchrun started 4"):
        agreed_ranks(2)
    assert train.main(["ranks=2"]) == 2


def test_threads_share_the_cores() -> None:
    assert threads_for(10_000) == 1
    assert threads_for(1) == len(os.sched_getaffinity(0))


# --- pictures --------------------------------------------------------------------------------------------------------


def test_pictures_are_drawn(tmp_path: Path) -> None:
    curves = {"1 process": [3.0, 2.0, 1.5], "4 processes": [3.0, 2.0, 1.5]}
    agreements = [CurveDistance("fp32", [0.0, 1e-7, 2e-7], 1e-4), CurveDistance("fp64", [0.0, 0.0], 1e-9)]
    draw_losses(tmp_path / "loss.png", curves, agreements)
    bars = [Bars("1 process", 1 << 20, [9 << 20]), Bars("2 processes", 1 << 20, [5 << 20, 5 << 20])]
    draw_memory(tmp_path / "memory.png", bars, "how it was measured")
    for name in ("loss.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and (tmp_path / name).stat().st_size > 10_000

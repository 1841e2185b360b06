"""`timeout_s` is the deadline of every wait on every command that starts ranks, and the key that its errors advise."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import ringattn
from ringattn.launch.calls import RunConfig, load_run
from ringattn.launch.config import load
from ringattn.launch.doctor.doctor import DoctorConfig
from ringattn.launch.measure import calibration, check, point
from ringattn.launch.measure.calibrate import CalibrateConfig
from ringattn.launch.measure.check import CheckConfig
from ringattn.launch.options import leaves
from ringattn.launch.pictures import timeline
from ringattn.launch.pictures.timeline import TimelineConfig
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.mesh import opened_mesh

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = (RunConfig, TrainConfig, CheckConfig, TimelineConfig, CalibrateConfig, DoctorConfig)


@pytest.mark.parametrize("schema", CONFIGS)
def test_every_command_has_the_key_of_ring(schema: Any) -> None:
    keys = {key: field for key, _, field in leaves(schema()) if key.rpartition(".")[2] == "timeout_s"}
    assert list(keys) == ["timeout_s"] and "timeout_s" in inspect.signature(ringattn.Ring).parameters
    assert keys["timeout_s"].metadata["about"] == "deadline of every wait for another rank, in seconds"


class Opened(Exception):
    """Raised instead of a ring that is opened with these options."""


WORKERS: Mapping[str, Callable[[], Any]] = {
    "run": lambda: point.on_rank({"config": asdict(load_run(["timeout_s=7"])), "quiet": True}),
    "check": lambda: check.worker({"transport": "shm", "engine": "plain", "timeout_s": 7.0}),
    "timeline": lambda: timeline.worker({"timeout_s": 7.0}),
    "calibrate": lambda: calibration.worker({"timeout_s": 7.0, "transport": "auto"}),
    "train": lambda: opened_mesh(load(["timeout_s=7"], TrainConfig, "train")).__enter__(),
}


@pytest.mark.parametrize("open_ring", WORKERS.values(), ids=WORKERS)
def test_the_ring_gets_it(open_ring: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any, **options: Any) -> None:
        raise Opened(options["timeout_s"])

    for module in (ringattn, point, sys.modules[opened_mesh.__module__]):
        monkeypatch.setattr(module, "Ring", opened)
    with pytest.raises(Opened, match=r"^7"):
        open_ring()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "run ranks=2 tokens=64 shape=small repeats=1000000 transport=shm",
        "train ranks=2 tokens=64 model=tiny steps=1000000 transport=gloo",
    ],
)
def test_a_stopped_rank_of_a_command_is_named_as_silent(tmp_path: Path, words: str) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "ringattn", *words.split(), "timeout_s=4", "threads_per_rank=1"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert command.stdout is not None
    began = b"pass " if words.startswith("run") else b"step "
    for line in command.stdout:  # until the ranks exchange
        if began in line:
            break
    os.kill(process_of_rank(1, command.pid), signal.SIGSTOP)
    stopped_s = time.monotonic()
    command.stdout.close()
    assert command.stderr is not None
    errors = command.stderr.read().decode()
    assert command.wait() == 1 and time.monotonic() - stopped_s < 40.0
    assert "rank 0 failed first: DeadlineError: " in errors and "rank 1 is silent" in errors, errors
    assert not any(word in errors for word in ("killed", "memory ran out", "SIGKILL"))


def process_of_rank(rank: int, launcher: int) -> int:
    """The process of a rank that the launcher has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    variables = {child: Path(f"/proc/{child}/environ").read_bytes().split(b"\0") for child in children}
    return next(int(child) for child in children if f"RANK={rank}".encode() in variables[child])

"""How tests start a command as a person would, and look after its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ringattn.launch.measure.environment import hardware
from ringattn.planner.cluster import CLUSTERS

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
INSIDE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets."""


def python(
    *words: str, cwd: Path = ROOT, env: dict[str, str] | None = None, timeout_s: float = 280.0
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words and return what it printed."""
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment(env), capture_output=True, text=True,
                          timeout=timeout_s)  # fmt: skip


def started(*words: str, cwd: Path = ROOT, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start Python with these words; its output and errors are pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, *words], cwd=cwd, env=environment(env), text=True, bufsize=1, **pipes)


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment without torchrun's variables, with the checkout on the path."""
    clean = {name: value for name, value in os.environ.items() if name not in INSIDE}
    return {**clean, "PYTHONPATH": str(ROOT), **(more or {})}


def ringattn(*words: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does and return what it printed."""
    return python("-m", "ringattn", *words, cwd=cwd, env=env)


def wait_for_line(process: subprocess.Popen[str], begins: str) -> None:
    """Read a process's output up to a line that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begins):
            return
    raise AssertionError(f"no line begins with {begins!r}")


def below(command: int) -> list[int]:
    """The process and all that it started, directly or not."""
    processes = [command]
    for process in processes:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                processes += map(int, children.read_text(encoding="ascii").split())
            except OSError:
                continue  # ended meanwhile
    return processes


def process_of_rank(rank: int, command: int) -> int:
    """The process of a rank that the command has started."""
    variables = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in below(command)[1:]}
    return next(pid for pid, names in variables.items() if f"RANK={rank}".encode() in names)


def runs(pid: int) -> bool:
    """Whether a process runs; one that ended and was not yet waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def soon(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it holds within that time."""
    ends = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def all_end(pids: list[int]) -> bool:
    """Whether all processes end within moments: one that was killed still shows as running while it is torn down."""
    return soon(lambda: not any(map(runs, pids)), 5.0)


def write_calibration(folder: Path, transport: str) -> None:
    """Write a calibration of this machine for `transport` into the folder."""
    constants = asdict(replace(CLUSTERS["cpu"], name="this machine", calibrated=True))
    content = {"constants": constants, "hardware": hardware(), "transport": transport}
    (folder / "calibrated.json").write_text(json.dumps(content))

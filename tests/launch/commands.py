"""Helpers that start commands as a user does, and observe their processes."""

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
"""Variables that torchrun sets."""


def python(
    *arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None, timeout_s: float = 280.0
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments until it ends. Return its exit code and output."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment(env), capture_output=True, text=True,
                          timeout=timeout_s)  # fmt: skip


def started(
    *arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start Python with these arguments, with pipes for its standard output and error. Return the running process."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, *arguments], cwd=cwd, env=environment(env), text=True, bufsize=1, **pipes)


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without torchrun's variables, with the checkout on the path."""
    clean = {name: value for name, value in os.environ.items() if name not in INSIDE}
    return {**clean, "PYTHONPATH": str(ROOT), **(more or {})}


def ringattn(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a ringattn command as a user does, until it ends. Return its exit code and output."""
    return python("-m", "ringattn", *arguments, cwd=cwd, env=env)


def wait_for_line(process: subprocess.Popen[str], prefix: str) -> None:
    """Read the output of a process until a line has this prefix. Raises AssertionError if none has."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(prefix):
            return
    raise AssertionError(f"no line begins with {prefix!r}")


def below(command: int) -> list[int]:
    """Return the process ids of a command and of all its descendants."""
    processes = [command]
    for process in processes:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                processes += map(int, children.read_text(encoding="ascii").split())
            except OSError:
                continue  # the process has ended
    return processes


def process_of_rank(rank: int, command: int) -> int:
    """Return the process id of a rank that the command has started."""
    variables = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in below(command)[1:]}
    return next(pid for pid, settings in variables.items() if f"RANK={rank}".encode() in settings)


def runs(pid: int) -> bool:
    """Return whether a process is running. A zombie is not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def soon(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait until the condition is true, and return True. Return False if it is still false after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def all_end(pids: list[int]) -> bool:
    """Return whether all processes end within 5 s. A killed process may count as running for a moment."""
    return soon(lambda: not any(map(runs, pids)), 5.0)


def write_calibration(folder: Path, transport: str) -> None:
    """Write a calibration of this machine for `transport` into the folder."""
    constants = asdict(replace(CLUSTERS["cpu"], name="this machine", calibrated=True))
    content = {"constants": constants, "hardware": hardware(), "transport": transport}
    (folder / "calibrated.json").write_text(json.dumps(content))

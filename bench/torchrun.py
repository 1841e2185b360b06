"""Runs a program on several processes under torchrun, and leaves none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ringattn.errors import RingError

JOB_S = 120.0
END_S = 10.0
POLL_S = 0.05


class Ended(NamedTuple):
    """torchrun's exit code, and the end of what its processes printed."""

    code: int
    printed: str


def run_torchrun(
    program: list[str],
    job: Path,
    meanwhile: Callable[[], None],
    ranks: int,
    more: Sequence[str] = (),
    job_s: float = JOB_S,
) -> Ended:
    """Run `program` on `ranks` processes under torchrun with the options `more`; call `meanwhile()` every 50 ms.

    The program's command line must name the file `job`, by which its processes are found. Raises `RingError` if a
    process outlives torchrun or `job_s`, and what `meanwhile` raises; all processes are ended first.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={ranks}", *more]
    # torch asks the name service for the other end of every store connection. A lost query takes 5 s by default, which
    # is longer than most deadlines here.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1"}
    with (job.parent / "log").open("w+b") as log:
        agent = subprocess.Popen(
            [*command, *program], stdout=log, stderr=log, env=environment, start_new_session=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        try:
            until = time.monotonic() + job_s
            while agent.poll() is None and time.monotonic() < until:
                meanwhile()
                time.sleep(POLL_S)
            late = agent.poll() is None
        finally:
            left = _end(agent, job)
        log.seek(0)
        printed = log.read()[-20000:].decode(errors="replace")
    if late or left:
        raise RingError(f"{'torchrun did not end' if late else f'processes {left} outlived torchrun'}:\n{printed}")
    return Ended(agent.returncode, printed)


def processes_of(job: Path) -> list[int]:
    """Return the ids of the running processes whose command line names `job`."""
    matches = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(job) in line.read_bytes().split(b"\0"):
                matches.append(int(line.parent.name))
    return matches


def _end(agent: subprocess.Popen[bytes], job: Path) -> list[int]:
    """Kill torchrun and its ranks, which lead sessions of their own; return the ranks that had outlived it."""
    if agent.poll() is None:
        agent.kill()
        agent.wait()
    outlived: set[int] = set()
    until = time.monotonic() + END_S
    while (left := processes_of(job)) and time.monotonic() < until:
        outlived.update(left)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return sorted(outlived)

"""Ranks as new processes with one thread each, so that a measurement includes no memory of an earlier one.

The parent starts torchrun, which runs this module. Each rank calls one function `f(ring, **spec)` and writes its result
as JSON. The output of rank 0 is shown as progress.
Guarantees: no child outlives the call; the failure of a rank raises an error with the rank's output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringattn.errors import RingError
from ringattn.ring import Ring

SPEC = "spec.json"
TIMEOUT_S = 600.0
LAST_CHARACTERS = 3000


def run_in_processes(
    world_size: int, target: str, spec: dict[str, Any], say: Callable[[str], None], transport: str = "auto"
) -> list[Any]:
    """Run `target` ("module:function") as `function(ring, **spec)` in fresh processes; return the results by rank.

    `spec` and the results are JSON. Raises `RingError` if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, SPEC).write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size),
                   "-m", __name__, target, folder, transport]  # fmt: skip
        root = Path(__file__).parents[2]  # the folder of this package, so that the ranks import the same one
        with Path(folder, "errors").open("w+", encoding="utf-8") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=root)
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    say(line.rstrip())
                code = process.wait()
            finally:
                process.terminate()
                process.wait()
            if code:
                errors.seek(0)
                raise RingError(f"{target} on {world_size} processes failed:\n{errors.read()[-LAST_CHARACTERS:]}")
        return [json.loads(result_file(folder, rank).read_text(encoding="utf-8")) for rank in range(world_size)]


def result_file(folder: str, rank: int) -> Path:
    """Return the file with the result of a rank."""
    return Path(folder, f"rank{rank}.json")


def main(target: str, folder: str, transport: str) -> None:
    """Run one rank: open the ring, call the function, write the result."""
    torch.set_num_threads(1)
    module, _, name = target.partition(":")
    spec = json.loads(Path(folder, SPEC).read_text(encoding="utf-8"))
    function = getattr(import_module(module), name)
    with Ring(transport=transport, timeout_s=TIMEOUT_S) as ring:
        result = function(ring, **spec)
    result_file(folder, ring.rank).write_text(json.dumps(result), encoding="utf-8")


# --- a program under torchrun -----------------------------------------------------------------------------------------


JOB_S = 120.0
END_S = 10.0
POLL_S = 0.05


class Ended(NamedTuple):
    """torchrun's exit code, and the end of the output of its processes."""

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
    """Run `program` in `ranks` processes under torchrun with the options `more`; call `meanwhile()` every 50 ms.

    The program's command line must name the file `job`, which identifies its processes. Raises `RingError` if torchrun
    runs longer than `job_s` or a process outlives it, and passes on the errors of `meanwhile`. All processes are killed
    first.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={ranks}", *more]
    # torch looks up the peer's host name for every store connection. By default, a lost query takes 5 s, which is
    # longer than most deadlines of the benchmarks.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    with (job.parent / "log").open("w+b") as log:
        agent = subprocess.Popen(
            [*command, *program], stdout=log, stderr=log, env=environment, start_new_session=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        try:
            end_s = time.monotonic() + job_s
            while agent.poll() is None and time.monotonic() < end_s:
                meanwhile()
                time.sleep(POLL_S)
            late = agent.poll() is None
        finally:
            surviving = _end(agent, job)
        log.seek(0)
        printed = log.read()[-20000:].decode(errors="replace")
    if late or surviving:
        raise RingError(f"{'torchrun did not end' if late else f'processes {surviving} outlived torchrun'}:\n{printed}")
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
    """Kill torchrun and its ranks, which have separate sessions. Return the process ids that outlived torchrun."""
    if agent.poll() is None:
        agent.kill()
        agent.wait()
    outlived: set[int] = set()
    end_s = time.monotonic() + END_S
    while (surviving := processes_of(job)) and time.monotonic() < end_s:
        outlived.update(surviving)
        for pid in surviving:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return sorted(outlived)


if __name__ == "__main__":
    main(*sys.argv[1:])

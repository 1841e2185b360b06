"""Starts the ranks of one job as processes of this machine, and ends them whatever happens.

Processes are started by torchrun, isolated from this one, each with its own share of the cores. Guarantees: results by
rank, or one error that names the rank that failed first; no process is left behind after an error, a timeout, Ctrl-C,
SIGTERM or SIGKILL of this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ringattn.errors import InputError
from ringattn.launch import parent
from ringattn.launch.failures import RanksError, root_cause

GRACE_S = 10.0
"""How long torchrun may take to end its processes before they are killed."""
SOON_S = 0.5
"""The same after Ctrl-C and SIGTERM, where somebody waits: long enough for flight records."""


@dataclass(frozen=True)
class Nodes:
    """The machines of one job, and which of them this is.

    `endpoint`: host:port of node 0, where they meet within `timeout_s`; empty for one machine alone.
    """

    count: int = 1
    rank: int = 0
    endpoint: str = ""
    timeout_s: float = 600.0


ALONE = Nodes()


class Place(NamedTuple):
    """Where this process stands among the processes that torchrun started."""

    rank: int
    world_size: int


def place_in_torchrun() -> Place | None:
    """This process's place if it was started by torchrun (`RANK` and `WORLD_SIZE` are set), else None."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return None


def restarts_of_torchrun() -> int:
    """How often torchrun has started these ranks again; 0 without it."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def torchrun_job() -> str | None:
    """The torchrun that started this process, by a name that its restarts share and no other has; None without one.

    torchrun's own run id is "none" for many jobs, and a process id is taken again.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent = os.getppid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        started = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return None
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {boot} {agent} {started}"


def agreed_ranks(asked: int | None, key: str = "ranks") -> int:
    """How many ranks there will be: torchrun's world size, else `asked`, else 1.

    Raises `InputError`, with the key first, if torchrun started another number of ranks than was asked for.
    """
    place = place_in_torchrun()
    if place is None:
        return asked or 1
    if asked is not None and asked != place.world_size:
        raise InputError(f"{key}={asked}: torchrun started {place.world_size}; leave {key} out, or start it without")
    return place.world_size


def threads_for(ranks: int) -> int:
    """Intra-op threads of one rank: an equal share of the cores this process may use, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def agent_command(ranks: int, nodes: Nodes = ALONE) -> list[str]:
    """The words that start torchrun for `ranks` processes of this machine; what they run comes after these."""
    return [sys.executable, "-m", "torch.distributed.run", *_agent_words(ranks, nodes)]


def _agent_words(ranks: int, nodes: Nodes) -> list[str]:
    if nodes.endpoint:
        meeting = [
            *(f"--nnodes={nodes.count}", f"--node-rank={nodes.rank}", "--rdzv-backend=static"),
            *(f"--rdzv-endpoint={nodes.endpoint}", f"--rdzv-conf=timeout={max(1, round(nodes.timeout_s))}"),
        ]
    else:
        meeting = ["--standalone"]
    return [*meeting, f"--nproc-per-node={ranks}"]


def run_ranks_in_processes(
    entry: str,
    spec: Mapping[str, Any],
    ranks: int,
    timeout_s: float,
    threads_per_rank: int | None = None,
    nodes: Nodes = ALONE,
) -> list[dict[str, Any]]:
    """Call `entry` ("module:function") with `spec` in each of `ranks` new processes; return their answers by rank.

    With `nodes`, other machines do the same at the same time, and the answers are those of this machine's ranks.
    `spec` and the answers are JSON. The processes have torchrun's environment, so `ringattn.Ring()` there joins them;
    rank 0 prints to this process's standard output. `threads_per_rank`: see `threads_for` for None.
    Raises `RanksError` if a rank fails or `timeout_s` pass; nothing of the job runs on after that.
    """
    with tempfile.TemporaryDirectory(prefix="ringattn-") as name:
        folder = Path(name)
        job = folder / "job.json"
        job.write_text(json.dumps({"entry": entry, "spec": spec}), encoding="utf-8")
        with (folder / "torchrun.txt").open("wb") as log, _terminated_like_interrupted():
            # torchrun through a script that ends it when this process ends.
            agent = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    parent.__file__,
                    str(os.getpid()),
                    *_agent_words(ranks, nodes),
                    f"--log-dir={folder}",  # torchrun's own folder, which goes with this one however it ends
                    "-m",
                    "ringattn.launch.worker",
                    str(job),
                ],
                env=_environment(threads_per_rank or threads_for(ranks)),
                stderr=log,
                start_new_session=True,
            )
            try:
                code = agent.wait(timeout_s)
            except subprocess.TimeoutExpired:
                message = f"{ranks} ranks did not end within {timeout_s:g} s, so they were ended; raise timeout_s"
                raise RanksError(message, "timeout") from None
            except (KeyboardInterrupt, SystemExit):
                _end(agent, job, SOON_S)
                raise
            finally:
                _end(agent, job)
        if code:
            raise root_cause(folder, (folder / "torchrun.txt").read_text(encoding="utf-8", errors="replace"), code)
        first = nodes.rank * ranks
        sys.stderr.write((folder / f"errors-{first}.txt").read_text(encoding="utf-8", errors="replace"))
        answers = (folder / f"answer-{rank}.json" for rank in range(first, first + ranks))
        return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers]


def _environment(threads: int) -> dict[str, str]:
    """This process's environment for the ranks: they find the same packages, and share the cores."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that what Ctrl-C cleans up is cleaned up then too."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(agent: subprocess.Popen[bytes], job: Path, grace_s: float = GRACE_S) -> None:
    """End torchrun and its ranks, which lead sessions of their own. It ends them itself when it is asked to; what is
    left after `grace_s`, or when torchrun was killed, is found by the job file that its command line names."""
    if agent.poll() is None:
        agent.terminate()
        for pid in _processes_of(job):  # torchrun passes the signal on after up to a second
            with suppress(ProcessLookupError):
                if pid != agent.pid:
                    os.kill(pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            agent.wait(grace_s)
    deadline = time.monotonic() + GRACE_S
    while (left := _processes_of(job)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    agent.wait()


def _processes_of(job: Path) -> list[int]:
    """Ids of the running processes whose command line names the job file; one that is ending has none."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(job) in line.read_bytes().split(b"\0"):
                found.append(int(line.parent.name))
    return found

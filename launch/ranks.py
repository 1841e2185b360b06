"""Starts the ranks of one job as processes of this machine, and ends them whatever happens.

Each process has its own share of the cores. Guarantees: results by rank, or one error that names the rank that failed
first; no process is left behind after an error, a limit, Ctrl-C, SIGTERM or SIGKILL of this process; the ranks of one
machine alone listen on loopback only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ringattn.errors import InputError
from ringattn.launch.nodes import ALONE, Meeting, Nodes, meeting
from ringattn.launch.processes import LAUNCHER, Exit, RankProcesses, RanksError, root_cause

JOB = "job.json"


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


def torchrun_command(ranks: int, nodes: Nodes = ALONE) -> list[str]:
    """The command that starts torchrun for `ranks` processes of this machine; append the program that they run."""
    if nodes.endpoint:
        meeting_place = [
            *(f"--nnodes={nodes.count}", f"--node-rank={nodes.rank}", "--rdzv-backend=static"),
            *(f"--rdzv-endpoint={nodes.endpoint}", f"--rdzv-conf=timeout={max(1, round(nodes.timeout_s))}"),
        ]
    else:
        meeting_place = ["--standalone"]
    return [sys.executable, "-m", "torch.distributed.run", *meeting_place, f"--nproc-per-node={ranks}"]


def run_ranks_in_processes(
    entry: str,
    spec: Mapping[str, Any],
    ranks: int,
    limit_s: float | None = None,
    threads_per_rank: int | None = None,
    nodes: Nodes = ALONE,
    limit_key: str = "limit_s",
) -> list[dict[str, Any]]:
    """Call `entry` ("module:function") with `spec` in each of `ranks` new processes; return their answers by rank.

    With `nodes`, other machines do the same at the same time, and the answers are those of this machine's ranks.
    `spec` and the answers are JSON. The processes have torchrun's environment, so `ringattn.Ring()` there joins them;
    rank 0 prints to this process's standard output. `threads_per_rank`: see `threads_for` for None.
    Raises `RanksError` if a rank fails, or after `limit_s`, which the option `limit_key` sets; nothing of the job runs
    on after that.
    """
    first = nodes.rank * ranks
    with _job_folder(entry, spec) as folder, _terminated_like_interrupted():
        job = folder / JOB
        with meeting(nodes, ranks) as met, RankProcesses(folder) as processes:
            environment = _environment(met, ranks, nodes, threads_per_rank or threads_for(ranks))
            for local_rank in range(ranks):
                places = {"RANK": str(first + local_rank), "LOCAL_RANK": str(local_rank)}
                command = [sys.executable, "-m", "ringattn.launch.worker", str(job)]
                processes.start(first + local_rank, command, {**environment, **places})
            met.open_store()
            if not processes.finish(limit_s):
                message = f"{ranks} ranks did not end within {limit_s:g} s, so they were ended; raise {limit_key}"
                raise RanksError(message, "timeout")
            answers = {rank: folder / f"answer-{rank}.json" for rank in range(first, first + ranks)}
            silent = [Exit(rank, 0, time.time()) for rank, answer in answers.items() if not answer.exists()]
            if processes.exits or silent:
                raise root_cause(folder, processes.exits or silent)
        sys.stderr.write((folder / f"errors-{first}.txt").read_text(encoding="utf-8", errors="replace"))
        return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers.values()]


@contextmanager
def _job_folder(entry: str, spec: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a new folder that holds the job's description; it is removed at the end. Raises `RanksError`."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="ringattn-")
        (Path(folder.name) / JOB).write_text(json.dumps({"entry": entry, "spec": spec}), encoding="utf-8")
    except OSError as error:  # tempfile raises FileNotFoundError if all temporary folders are full
        raise RanksError(
            f"the ranks cannot be started, because their temporary files cannot be written ({error.strerror}); free "
            "some space there, or set TMPDIR to a folder on another disk"
        ) from error
    with folder:
        yield Path(folder.name)


def _environment(met: Meeting, ranks: int, nodes: Nodes, threads: int) -> dict[str, str]:
    """This process's environment for the ranks, which find the same packages, share the cores, and are all clients of
    the launcher's store. Ranks of one machine alone use loopback, unless the user has chosen an interface."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    alone = {} if nodes.endpoint else {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {
        **alone,
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MASTER_ADDR": met.host,
        "MASTER_PORT": str(met.port),
        "WORLD_SIZE": str(nodes.count * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(nodes.rank),
        "TORCHELASTIC_RUN_ID": met.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER: str(os.getpid()),
    }


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that it cleans up what Ctrl-C cleans up."""

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

"""Start the ranks of one job as processes of this machine, and end them whatever happens.

Each process has its own share of the cores. Guarantees: the caller gets the results by rank, or one error that names
the rank that failed first. No process is left behind after an error, a time limit, Ctrl-C, SIGTERM or SIGKILL of this
process. If the job has a single machine, its ranks listen only on loopback.
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
    """The rank of this process among the processes that torchrun started, and their number."""

    rank: int
    world_size: int


def place_in_torchrun() -> Place | None:
    """Return rank and world size if torchrun started this process (`RANK` and `WORLD_SIZE` are set), else None."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return None


def restarts_of_torchrun() -> int:
    """Return how often torchrun has restarted these ranks; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def torchrun_job() -> str | None:
    """Return a name of the torchrun that started this process; None without torchrun.

    The name is the same after each restart by this torchrun, and no other torchrun has it. It contains the boot id and
    the start time of torchrun's process, because torchrun's own run id is "none" for many jobs and process ids are
    reused.
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
    """Return the number of ranks: torchrun's world size if torchrun started this process, else `asked`, else 1.

    Raises `InputError`, with the key first, if torchrun started a number of ranks other than `asked`.
    """
    place = place_in_torchrun()
    if place is None:
        return asked or 1
    if asked is not None and asked != place.world_size:
        raise InputError(
            f"{key}={asked}: torchrun started {place.world_size} ranks; leave {key} out, or start the command "
            "without torchrun"
        )
    return place.world_size


def threads_for(ranks: int) -> int:
    """Return the intra-op threads of one rank: an equal share of the cores that this process may use, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def torchrun_command(ranks: int, nodes: Nodes = ALONE) -> list[str]:
    """Return the command that starts torchrun for `ranks` processes of this machine. Append the program to run."""
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

    With several `nodes`, each machine makes the same call at the same time and gets the answers of its own ranks.
    `spec` and the answers are JSON. The processes have torchrun's environment variables, so `ringattn.Ring()` in them
    joins all ranks. Rank 0 prints to this process's standard output. If `threads_per_rank` is None, `threads_for`
    chooses it. Raises `RanksError` if a rank fails, or if the ranks have not ended after `limit_s`; the message names
    `limit_key` as the option to raise. In both cases all processes of this machine's ranks are ended first.
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
                message = f"{ranks} ranks did not end within {limit_s:g} sand were terminated; raise {limit_key}"
                raise RanksError(message, "timeout")
            answers = {rank: folder / f"answer-{rank}.json" for rank in range(first, first + ranks)}
            silent = [Exit(rank, 0, time.time()) for rank, answer in answers.items() if not answer.exists()]
            if processes.exits or silent:
                raise root_cause(folder, processes.exits or silent)
        sys.stderr.write((folder / f"errors-{first}.txt").read_text(encoding="utf-8", errors="replace"))
        return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers.values()]


@contextmanager
def _job_folder(entry: str, spec: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a new folder with the job's description, and remove it at the end of the block.

    Raises `RanksError` if the folder cannot be written.
    """
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
    """Return the environment variables of the ranks: those of this process, with torchrun's variables added.

    The ranks find the same packages, share the cores, and connect to the launcher's store as clients. If the job has a
    single machine, they use loopback, unless the user has chosen an interface.
    """
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
    """Let SIGTERM raise SystemExit within the block, so that the same cleanup runs as after Ctrl-C."""

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

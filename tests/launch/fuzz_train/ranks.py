"""Runs of several processes that start in milliseconds: forked from one that has torch loaded, as torchrun's would be.

A run is a command process that holds the ranks' store, starts the ranks and ends them when one fails. A fault is a
signal that a rank sends, to itself or to the command, at a drawn call.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer loads, in seconds
import torch.distributed as dist
import torch.distributed.fsdp

from ringattn.launch import worker
from ringattn.launch.processes import LAUNCHER
from ringattn.launch.train import loop
from ringattn.launch.train.config import TrainConfig
from tests.contract.processes import forked
from tests.launch.fuzz_train.faults import at

LIMIT_S = 60.0
"""How long a run may take."""
assert torch.distributed.fsdp  # loaded before the fork


def started(folder: Path, config: TrainConfig, fault: dict[str, Any] | None) -> BaseProcess:
    """A command that trains `config`, its files in `folder`; `fault` is who gets which signal, where and when."""
    return forked(run_command, str(folder), asdict(config), fault, daemon=False)


def run_command(folder: str, config: dict[str, Any], fault: dict[str, Any] | None) -> None:
    """What a command does: start the ranks, wait, end them all when one fails."""
    world_size = config["ranks"] * config["replicas"]
    spec = {"runs": [config], "keeps_result": True, "fault": fault}
    job = Path(folder) / "job.json"
    job.write_text(
        json.dumps({"entry": "tests.launch.fuzz_train.ranks:train_with_fault", "spec": spec}), encoding="utf-8"
    )
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT_S), wait_for_workers=False)
    places = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ.update({**places, "TORCHELASTIC_USE_AGENT_STORE": "True", LAUNCHER: str(os.getpid())})
    pids = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _live(rank, job)
        pids[pid] = rank
        (Path(folder) / f"pid-{rank}").write_text(str(pid), encoding="utf-8")
    failed = False
    while pids:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            time.sleep(fault["pause_s"] if fault else 0.0)
            os.kill(pid, signal.SIGCONT)
            continue
        rank = pids.pop(pid)
        if status and not failed:
            failed = True
            first = [rank, os.waitstatus_to_exitcode(status), time.time()]
            (Path(folder) / "exit.json").write_text(json.dumps(first), encoding="utf-8")
            time.sleep(1.0)  # the others find it out themselves, and say so
            for other in pids:
                os.kill(other, signal.SIGTERM)
    os._exit(int(failed))


def _live(rank: int, job: Path) -> None:
    """A rank's life."""
    code = 1
    try:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        for descriptor, name in ((1, "output"), (2, "errors")):
            with (job.parent / f"{name}-{rank}.txt").open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        code = worker.main(job)
    finally:
        sys.stdout.flush()
        os._exit(code)


def train_with_fault(spec: dict[str, Any]) -> dict[str, Any]:
    """Entry of a rank: train, and send the signal when it is time."""
    torch.set_num_threads(1)
    fault = spec.pop("fault")
    with ExitStack() as stack:
        if fault and int(os.environ["RANK"]) == fault["rank"]:
            pid = os.getppid() if fault["to"] == "command" else os.getpid()

            def act() -> None:
                (Path(spec["runs"][0]["out"]) / "happened").touch()
                os.kill(pid, fault["signal"])

            stack.enter_context(at(fault["place"], fault["count"], act))
        return loop.train_rank(spec)

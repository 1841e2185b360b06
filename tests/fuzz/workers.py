"""Worker processes that run one job after another and may die. A job without a result gets the reason instead."""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.contract.processes import forked

Job = tuple[Any, ...]
"""The arguments of a call."""


def answers(
    work: Callable[..., Any], jobs: Iterator[Job], workers: int, hang_s: float
) -> Iterator[tuple[Job, Any, str]]:
    """Yield each job with the result of `work(*job)`, or with None and the reason why there is no result.

    `work` is a top-level function of a module. A process that dies, or takes longer than `hang_s`, is replaced.
    """
    busy: dict[Connection, _Worker] = {}

    def give_next(worker: _Worker) -> None:
        job = next(jobs, None)
        if job is None:
            worker.pipe.close()
            return
        worker.give(job)
        busy[worker.pipe] = worker

    try:
        for worker in [_Worker(work) for _ in range(workers)]:
            give_next(worker)
        while busy:
            ready = wait(list(busy), timeout=0.5)
            for pipe, worker in list(busy.items()):
                if pipe not in ready and time.monotonic() - worker.since < hang_s:
                    continue
                del busy[pipe]
                answer, reason, alive = worker.answer(f"no end after {hang_s:.0f} s" if pipe not in ready else "")
                yield worker.job, answer, reason
                give_next(worker if alive else _Worker(work))
    finally:
        for worker in busy.values():
            worker.process.kill()


class _Worker:
    """A process that runs one job at a time."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.pipe, child_end = Pipe()
        self.process = forked(_run_jobs, work, child_end, daemon=False)  # daemons may not start processes
        child_end.close()
        self.pipe.recv()  # the process has started

    def give(self, job: Job) -> None:
        """Send a job to the process."""
        self.job, self.since = job, time.monotonic()
        self.pipe.send(job)

    def answer(self, reason: str) -> tuple[Any, str, bool]:
        """Return the job's result, the reason if there is none, and whether the process still lives.

        If the caller gives a `reason`, do not wait for a result: kill the process and return that reason.
        """
        try:
            if not reason:
                return (*self.pipe.recv(), True)
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            reason = f"the process ended with {self.process.exitcode}"
        self.process.kill()
        self.process.join()
        return None, reason, False


def _run_jobs(work: Callable[..., Any], pipe: Connection) -> None:
    """Send (result, "") or (None, traceback) for each job until the pipe closes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-3)  # ranks that are threads wait for each other often
    pipe.send("started")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((work(*job), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))

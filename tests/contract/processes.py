"""A few processes that run one function after another, each under a hard deadline, and where they meet.

They are forked in milliseconds from a process that has loaded what they need, and share its hash seed: that ranks with
seeds of their own agree is seen where torchrun starts them.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ringattn.transport.control_store import ring_store
from ringattn.transport.deadline import Deadline
from ringattn.transport.meeting import job_of, job_store

# --- a free port ------------------------------------------------------------------------------------------------------


GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST = 10_000


def free_port() -> int:
    """One that nobody holds, and that the system gives to none who asks for any port or connects somewhere.

    Such a one may be another's before the processes that are to meet there have loaded torch, and one who connects to
    it meets himself when the system gives it to his own end. Raises `OSError` where none is found.
    """
    first, last = map(int, GIVEN_AWAY.read_text(encoding="utf-8").split())
    others = [port for port in range(LEAST, 1 << 16) if not first <= port <= last]
    for port in SystemRandom().sample(others, 50):  # not the seeds of tests, which are alike in all processes
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {LEAST} on is free beside {first} to {last}")


# --- where processes meet for a ring ----------------------------------------------------------------------------------


WITHIN_S = 60.0


def rendezvous_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The store of one more ring over all processes that MASTER_ADDR and MASTER_PORT bring together."""
    job = job_of({**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)})
    deadline = Deadline(timeout_s)
    assert job is not None
    return ring_store(f"ringattn/{job.restart_count}", job_store(job, deadline), rank, deadline)


def store_of(rank: int, world_size: int, members: int | None = None) -> dist.Store:
    """The processes' store, once the first `members` of them are there; None: all."""
    store = rendezvous_store(rank, world_size, WITHIN_S)
    store.set(f"ready/{rank}", "1")
    store.wait([f"ready/{other}" for other in range(members or world_size)], timedelta(seconds=WITHIN_S))
    return store


# --- forks ------------------------------------------------------------------------------------------------------------


LOADED = ("pytest", "torch._dynamo", "ringattn.launch.train.loop")
"""What every process has: torch, its compiler, which the deterministic mode loads too, and ringattn."""


def forked(target: Callable[..., None], *arguments: Any, daemon: bool = True) -> BaseProcess:
    """A started process that calls `target(*arguments)`, with this process's environment of now."""
    # A fork of a process that has seen a GPU cannot use it; there, each is started anew.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    multiprocessing.set_forkserver_preload(list(LOADED))
    process = context.Process(target=_with_environment, args=(dict(os.environ), target, arguments), daemon=daemon)
    process.start()
    return process  # type: ignore[no-any-return]


def _with_environment(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


def core_s() -> float:
    """Seconds of a core of the process that they are forked from, and of those that have ended."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    if pid is None:
        return 0.0
    # After the name, which may hold anything: the state, then numbers; the 12th to 15th are its and its children's.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


# --- processes --------------------------------------------------------------------------------------------------------


class Processes:
    """`world_size` processes with MASTER_ADDR and MASTER_PORT set. A context manager that leaves none behind."""

    def __init__(self, world_size: int) -> None:
        port = str(free_port())
        self.ranks = list(range(world_size))
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            mine, theirs = Pipe()
            self._processes.append(forked(_live, rank, world_size, port, theirs))
            theirs.close()
            self._pipes.append(mine)

    def run(
        self, function: Callable[..., Any], *arguments: Any, exits: int | None = None, hard_s: float = 60.0
    ) -> dict[int, Any]:
        """`function(rank, world_size, *arguments)` of every process in `ranks`, by rank.

        `function` is of a module's top level. Raises `AssertionError` with every rank's traceback when one fails, dies
        unasked or does not answer within `hard_s`. Rank `exits` must die, and is in `ranks` no more.
        """
        for rank in self.ranks:
            self._pipes[rank].send((function, arguments))
        until = time.monotonic() + hard_s
        results, failures = {}, []
        for rank in list(self.ranks):
            try:
                arrived = self._pipes[rank].poll(max(until - time.monotonic(), 0.0))
                failure, results[rank] = self._pipes[rank].recv() if arrived else (f"no answer within {hard_s} s", None)
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(2.0)
                self.ranks.remove(rank)
                failure = None if rank == exits else f"died with exit code {self._processes[rank].exitcode}"
            if failure is not None:
                failures.append(f"--- rank {rank}:\n{failure}")
        assert not failures, "\n".join(failures)
        assert exits not in self.ranks, f"rank {exits} lives"
        return results

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()  # nothing is at stake, and leaving in good order takes torch a second or two
            process.join()


def _live(rank: int, world_size: int, port: str, pipe: Connection) -> None:
    """One process: answers (failure or None, result) to each (function, arguments) until the pipe closes."""
    # For every connection to a store torch asks the name service who the other end is, and a question that is lost
    # costs five seconds by default.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RES_OPTIONS="timeout:1")
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[str | None, Any] = (None, function(rank, world_size, *arguments))
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)

"""A few processes that run the functions of a test, one after another and each under a hard deadline.

The processes are forked in milliseconds from a server process that has loaded the modules they need, so they share its
hash seed. Tests in which torchrun starts the ranks cover ranks with different hash seeds.
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


EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST = 10_000


def free_port() -> int:
    """Return a free port outside the range of ephemeral ports, which the system assigns itself.

    An ephemeral port could be taken by another process while the processes of the test load torch. And a client that
    connects to an ephemeral port may be assigned the same port for its own end, and so connect to itself. Raises
    `OSError` if no port is free.
    """
    first, last = map(int, EPHEMERAL_PORTS.read_text(encoding="utf-8").split())
    candidates = [port for port in range(LEAST, 1 << 16) if not first <= port <= last]
    for port in SystemRandom().sample(candidates, 50):  # the seeds of tests are equal in all processes, so not `random`
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {LEAST} on is free, except those from {first} to {last}")


# --- the rendezvous of processes for a ring ---------------------------------------------------------------------------


WITHIN_S = 60.0


def rendezvous_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Return the store of a new ring over all processes that have the same MASTER_ADDR and MASTER_PORT."""
    job = job_of({**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)})
    deadline = Deadline(timeout_s)
    assert job is not None
    return ring_store(f"ringattn/{job.restart_count}", job_store(job, deadline), rank, deadline)


def store_of(rank: int, world_size: int, members: int | None = None) -> dist.Store:
    """Return the store of a new ring, once its first `members` processes (None: all) have connected."""
    store = rendezvous_store(rank, world_size, WITHIN_S)
    store.set(f"ready/{rank}", "1")
    store.wait([f"ready/{peer}" for peer in range(members or world_size)], timedelta(seconds=WITHIN_S))
    return store


# --- forks ------------------------------------------------------------------------------------------------------------


LOADED = ("pytest", "torch._dynamo", "ringattn.launch.train.loop")
"""Modules that the server process loads for all: torch, its compiler (which deterministic mode needs) and ringattn."""


def forked(target: Callable[..., None], *arguments: Any, daemon: bool = True) -> BaseProcess:
    """Start a process that calls `target(*arguments)` with the current environment of this process."""
    # A forked child of a process that has used a GPU cannot use the GPU. So if there is a GPU, each process is spawned.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    multiprocessing.set_forkserver_preload(list(LOADED))
    process = context.Process(target=_with_environment, args=(dict(os.environ), target, arguments), daemon=daemon)
    process.start()
    return process  # type: ignore[no-any-return]


def _with_environment(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


def server_pid() -> int | None:
    """Return the process id of the server process, or None before it has started."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined, no-any-return]


# --- processes --------------------------------------------------------------------------------------------------------


class Processes:
    """A context manager that starts `world_size` processes, with MASTER_ADDR and MASTER_PORT set, and ends them."""

    def __init__(self, world_size: int) -> None:
        port = str(free_port())
        self.ranks = list(range(world_size))
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            parent_end, child_end = Pipe()
            self._processes.append(forked(_serve, rank, world_size, port, child_end))
            child_end.close()
            self._pipes.append(parent_end)

    def run(
        self, function: Callable[..., Any], *arguments: Any, exits: int | None = None, hard_s: float = 60.0
    ) -> dict[int, Any]:
        """Run `function(rank, world_size, *arguments)` in the process of each rank in `ranks`. Return results by rank.

        `function` must be at the top level of a module. Raises `AssertionError` with every rank's traceback if a rank
        fails, dies unexpectedly or does not answer within `hard_s`. Rank `exits` must die, and is removed from `ranks`.
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
            process.kill()  # nothing needs saving, and a graceful exit of torch takes a second or two
            process.join()


def _serve(rank: int, world_size: int, port: str, pipe: Connection) -> None:
    """Run one process: receive pairs (function, arguments) until the pipe closes, and send back the outcome of each.

    An outcome is a pair: the traceback or None, and the result.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
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

"""A few processes that run one function after another, each under a hard deadline.

One set serves many tests.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from tests.contract.forking import forked
from tests.contract.ports import free_port


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

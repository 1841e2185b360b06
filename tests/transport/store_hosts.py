"""A TCPStore in a separate process, which a test can stop, continue and kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed import TCPStore

from tests.contract.processes import forked


def _host(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with suppress(EOFError):
        pipe.recv()


def is_stopped(pid: int) -> bool:
    """Return whether every thread of a process is stopped."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(file.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T" for file in threads)


class StoreHost:
    """A process that hosts a `TCPStore` and does nothing else."""

    def __init__(self) -> None:
        self._pipe, child_end = Pipe()
        self._process = forked(_host, child_end)
        child_end.close()
        self.port: int = self._pipe.recv()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def client(self) -> TCPStore:
        """Return a new connection to the store. Its timeout is far longer than any test."""
        return TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=120))

    def stop(self) -> None:
        """Stop the process, and wait until all its threads are stopped. Its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)
        while not is_stopped(self.pid):
            time.sleep(0.001)

    def resume(self) -> None:
        """Continue the process, which then also answers the requests that it received while it was stopped."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill the process, which resets all its connections."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


@contextmanager
def store_host() -> Iterator[StoreHost]:
    """Run a store host."""
    host = StoreHost()
    try:
        yield host
    finally:
        host.end()

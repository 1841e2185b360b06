"""A store whose host is a process of its own, which a test can stop, continue and end."""

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
    os.environ["RES_OPTIONS"] = "timeout:1"  # see `processes._serve`
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with suppress(EOFError):
        pipe.recv()


def stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(file.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T" for file in threads)


class StoreHost:
    """A process that hosts a `TCPStore` and does nothing else."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._process = forked(_host, theirs)
        theirs.close()
        self.port: int = self._pipe.recv()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def client(self) -> TCPStore:
        """A connection whose own timeout is far longer than any test."""
        return TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=120))

    def stop(self) -> None:
        """It answers no more and its connections stay up. Returns when all its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        while not stands_still(self.pid):
            time.sleep(0.001)

    def resume(self) -> None:
        """It answers again, also what was asked meanwhile."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """All its connections are reset."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


@contextmanager
def store_host() -> Iterator[StoreHost]:
    """A host for one test."""
    host = StoreHost()
    try:
        yield host
    finally:
        host.end()

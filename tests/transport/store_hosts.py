"""A store whose host is a process of its own, which a test can stop, continue and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore

HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class StoreHost:
    """A process that hosts a `TCPStore` and does nothing else."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def client(self) -> TCPStore:
        """A connection whose own timeout is far longer than any test."""
        return TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=120))

    def stop(self) -> None:
        """It answers no more and its connections stay up. Returns when all its threads stand still."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """It answers again, also what was asked meanwhile."""
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        """All its connections are reset."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def store_host() -> Iterator[StoreHost]:
    """A host for one test."""
    host = StoreHost()
    try:
        yield host
    finally:
        host.end()

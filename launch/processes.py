"""The processes of the ranks that one launcher started: how they end, and that none is left.

Each rank leads a session and a process group of its own, so Ctrl-C reaches the launcher alone. A process that ended is
not reaped before its whole group was killed: until then neither id can belong to another process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ringattn.launch.failures import Exit

LOOK_S = 0.05
"""Seconds between two looks at the processes."""
REPORT_S = 3.0
"""How long the other ranks have to report after the first failure: their rings notice a lost rank within 2 s."""
GRACE_S = 10.0
"""How long a rank may take to end after SIGTERM."""
SOON_S = 0.5
"""The same after Ctrl-C and SIGTERM of the launcher, where the user waits: long enough for flight records."""


class RankProcesses:
    """A context manager; at its end no process of any rank's group runs."""

    def __init__(self, folder: Path) -> None:
        """`folder` receives `output-RANK.txt`, empty for rank 0, and `errors-RANK.txt`."""
        self._folder = folder
        self._all: list[subprocess.Popen[bytes]] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._looked_s = time.time()
        self.exits: list[Exit] = []
        """The ranks that ended with an error."""

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start one rank. Rank 0 prints to this process's standard output."""
        output = self._folder / f"output-{rank}.txt"
        with output.open("xb") as printed, (self._folder / f"errors-{rank}.txt").open("xb") as errors:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed if rank else None,
                stderr=errors,
                start_new_session=True,
            )
        self._all.append(process)
        self._running[rank] = process

    def finish(self, limit_s: float | None) -> bool:
        """Wait until all have ended. After the first failure the others have `REPORT_S`. False if `limit_s` passed."""
        ends = None if limit_s is None else time.monotonic() + limit_s
        while self._look():
            if self.exits:
                self._wait(REPORT_S)
                return True
            if ends is not None and time.monotonic() > ends:
                return False
            time.sleep(LOOK_S)
        return True

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._look():
                for process in self._running.values():
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGTERM)
                        os.kill(process.pid, signal.SIGCONT)  # a stopped process handles no signal
                self._wait(SOON_S if kind in (KeyboardInterrupt, SystemExit) else GRACE_S)
        finally:
            for process in self._all:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while self._look() and time.monotonic() < ends:
            time.sleep(LOOK_S)

    def _look(self) -> bool:
        """Note which ranks have ended, without reaping them. Returns whether any still runs."""
        lived_s, self._looked_s = self._looked_s, time.time()
        for rank, process in list(self._running.items()):
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                del self._running[rank]
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                if code:
                    self.exits.append(Exit(rank, code, lived_s))
        return bool(self._running)

"""The processes of the ranks that one launcher started: how they run, how they end, and why a job failed.

Each rank leads a session and a process group, so only the launcher receives Ctrl-C. A process that has ended is reaped
only after its whole group was killed: until then its process id and group id cannot be reused.
Guarantees: no process of a rank is left. The error names the rank that failed first, not a rank that only lost a peer.
Failures after the launcher's first signal do not count. `end_with_parent` ends a rank when its launcher has ended, even
by SIGKILL: immediately on Linux, else within `PARENT_LOOK_S`.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ringattn.errors import RingError

LOOK_S = 0.05
"""Seconds between two looks at the processes."""
REPORT_S = 3.0
"""How long the other ranks have to report after the first failure: their rings notice a lost rank within 2 s."""
GRACE_S = 10.0
"""How long a rank may take to end after SIGTERM."""
SOON_S = 0.5
"""How long a rank may take to end after SIGTERM if the launcher has received Ctrl-C or SIGTERM itself. It is short
because the user waits, but long enough for ranks to write flight records.
"""


class RankProcesses:
    """The processes of the ranks on this machine, as a context manager. Its exit ends all processes of their groups."""

    def __init__(self, folder: Path) -> None:
        """Start nothing yet. `folder` will hold `output-RANK.txt` (empty for rank 0) and `errors-RANK.txt`."""
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
        """Wait until all ranks have ended; return False if `limit_s` passed before.

        After the first failure, the other ranks have `REPORT_S` to end.
        """
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
        """Record which ranks have ended, without reaping them. Return whether any rank still runs."""
        lived_s, self._looked_s = self._looked_s, time.time()
        for rank, process in list(self._running.items()):
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                del self._running[rank]
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                if code:
                    self.exits.append(Exit(rank, code, lived_s))
        return bool(self._running)


# --- why a job failed ------------------------------------------------------------------------------------------------


TAIL_LINES = 20
REPORT_BYTES = 2**16
"""With less free space, a rank may be unable to report its error."""
FOLLOWERS = ("PeerLostError", "DeadlineError", "TransportError", "ClosedError")
"""Errors of ranks that only lost a peer."""
REMEDIES: dict[int, str] = {
    signal.SIGKILL: (
        "If no user or scheduler killed it, the kernel did, because memory ran out (`dmesg` shows it): use fewer "
        "tokens, or more ranks on more machines"
    ),
    signal.SIGBUS: (
        "The usual cause is a mapped file or shared memory that was truncated: look for a full disk or a full /dev/shm"
    ),
    signal.SIGTERM: "This command did not send the signal; look for a job scheduler or a user that did",
}
"""What to do after a signal that the launcher did not send."""


class Exit(NamedTuple):
    """The end of a rank's process. `code` is as in `subprocess`: -N for signal N. `lived_s` is the time, in seconds of
    `time.time`, at which the process was last seen alive."""

    rank: int
    code: int
    lived_s: float


class RanksError(RingError):
    """The error if the processes of a job failed or did not end in time. The message names the rank.

    The message includes a traceback only if the rank's error does not explain itself; see `ringattn.launch.worker`.

    `kind`: the class name of the first error; or "timeout", "killed", "exit" or "nodes" if no rank reported an error.
    `refused`: whether a rank refused its input, so that the same command would fail again.
    """

    def __init__(self, message: str, kind: str = "exit", refused: bool = False) -> None:
        super().__init__(message)
        self.kind, self.refused = kind, refused


def root_cause(folder: Path, exits: Sequence[Exit]) -> RanksError:
    """Return the error of the failure that happened first.

    The failures are the reports `folder`/failure-RANK.json and `exits`, the ranks that ended with an error. The cause
    is the earliest error that is not a consequence of another rank's failure, or the earliest death by a signal. An
    earlier `DeadlineError` takes precedence over a death, because it already names the rank that did not respond.
    """
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("failure-*.json")]
    reports.sort(key=lambda report: report["time_s"])
    causes = [report for report in reports if report["kind"] not in FOLLOWERS]
    reporting = {report["rank"] for report in reports}
    deaths = sorted(
        (ended for ended in exits if ended.code < 0 and ended.rank not in reporting), key=lambda ended: ended.lived_s
    )
    if deaths:
        earlier = [report for report in reports if report["time_s"] < deaths[0].lived_s]
        causes = [report for report in earlier if report in causes or report["kind"] == "DeadlineError"]
        if not causes:
            return _death(folder, deaths[0])
    if reports:
        return _reported((causes or reports)[0])
    first = min(exits, key=lambda ended: ended.lived_s)
    why = ""
    if shutil.disk_usage(folder).free < REPORT_BYTES:
        why = f", perhaps because the disk of {folder.parent} is full: free some space there, or set TMPDIR"
    message = f"rank {first.rank} ended with exit code {first.code} and reported no error{why}"
    return RanksError(message + _tail(folder, first.rank), "exit")


def _death(folder: Path, death: Exit) -> RanksError:
    number = -death.code
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    remedy = f". {REMEDIES[number]}" if number in REMEDIES else ""
    return RanksError(f"rank {death.rank} was killed ({name}){remedy}{_tail(folder, death.rank)}", "killed")


def _reported(report: dict[str, Any]) -> RanksError:
    message = f"rank {report['rank']} failed first: {report['kind']}: {report['message']}"
    tail = "" if report["refused"] else "".join(f"\n{line}" for line in report["traceback"].splitlines()[-TAIL_LINES:])
    return RanksError(message + tail, report["kind"], report["refused"])


def _tail(folder: Path, rank: int) -> str:
    """Return the last lines that a rank wrote to standard error. After a crash they are the only message."""
    lines = (folder / f"errors-{rank}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return "".join(f"\n{line}" for line in lines[-TAIL_LINES:])


# --- a process that ends with its parent -----------------------------------------------------------------------------


LAUNCHER = "RINGATTN_LAUNCHER"
"""Variable with the process id of the launcher, which starts the ranks."""
PARENT_LOOK_S = 1.0
PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Arrange that this process receives the signal `number` when `parent`, which started it, ends or has ended."""
    if not _asked_the_kernel(number):
        threading.Thread(target=_watch, args=(parent, number), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the request was made
        os.kill(os.getpid(), number)


def _asked_the_kernel(number: int) -> bool:
    """Ask the kernel to send the signal, and return whether it will. Only Linux can."""
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _watch(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_S)
    os.kill(os.getpid(), number)

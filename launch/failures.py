"""Why a job failed, as one message: from the reports of its ranks and from how their processes ended.

Guarantees: the rank that failed first is named, not a rank that only lost a peer. Only what happened before the
launcher sent its first signal counts, so its own SIGTERM and SIGKILL are never taken for the cause.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringattn.errors import RingError

TAIL_LINES = 20
FOLLOWERS = ("PeerLostError", "DeadlineError", "TransportError", "ClosedError")
"""Errors of ranks that only lost a peer."""
REMEDIES: dict[int, str] = {
    signal.SIGKILL: "If nobody did that, it was the kernel, because memory ran out (`dmesg` says so): use fewer "
    "tokens, or more ranks on more machines",
    signal.SIGBUS: "Mostly a file or shared memory ended before its mapping: look for a full disk or a full /dev/shm",
    signal.SIGTERM: "This command did not send it; look for a job scheduler or a user who did",
}
"""What to do after a signal that the launcher did not send."""


class Exit(NamedTuple):
    """How the process of a rank ended. `code`: as `subprocess` has it, -N for signal N. `lived_s`: when it was last
    seen alive, in seconds of `time.time`."""

    rank: int
    code: int
    lived_s: float


class RanksError(RingError):
    """The processes of a job failed or did not end in time. The message names the rank and shows its traceback.

    `kind`: the name of the first rank's error; "timeout", "killed", "exit" or "nodes" where no rank could report.
    `refused`: whether a rank refused its input, so that the same will fail again.
    """

    def __init__(self, message: str, kind: str = "exit", refused: bool = False) -> None:
        super().__init__(message)
        self.kind, self.refused = kind, refused


def root_cause(folder: Path, exits: Sequence[Exit]) -> RanksError:
    """The first failure: of the reports `folder`/failure-RANK.json and of `exits`, the ranks that ended with an error.

    The earliest error that is no consequence of another rank's, or the earliest death by a signal. A `DeadlineError`
    from before that death wins over it: the ring has then named the silent rank already.
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
    return RanksError(
        f"rank {first.rank} ended without a Python error (exit code {first.code})" + _tail(folder, first.rank), "exit"
    )


def _death(folder: Path, death: Exit) -> RanksError:
    number = -death.code
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    remedy = f". {REMEDIES[number]}" if number in REMEDIES else ""
    return RanksError(f"rank {death.rank} was killed ({name}){remedy}{_tail(folder, death.rank)}", "killed")


def _reported(report: dict[str, Any]) -> RanksError:
    message = f"rank {report['rank']} failed first: {report['kind']}: {report['message']}"
    if report["refused"]:
        return RanksError(message, report["kind"], refused=True)
    tail = "\n".join(report["traceback"].splitlines()[-TAIL_LINES:])
    return RanksError(f"{message}\n{tail}", report["kind"])


def _tail(folder: Path, rank: int) -> str:
    """The last lines that a rank wrote to standard error, where a crash leaves its only words."""
    lines = (folder / f"errors-{rank}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return "".join(f"\n{line}" for line in lines[-TAIL_LINES:])

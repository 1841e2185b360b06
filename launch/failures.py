"""Why the processes of a job failed, as one message: from the files that its ranks left and from torchrun's own log.

Guarantees: the rank that failed first is named, not one that only lost a peer; what torchrun says of ports, hosts and
signals is said again with what to do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ringattn.errors import RingError

TRACEBACK_LINES = 20
FOLLOWERS = ("PeerLostError", "DeadlineError", "TransportError", "ClosedError")
"""Errors of ranks that only lost a peer."""

KILLED = re.compile(r"rank\s*: (\d+) .*\n\s*exitcode\s*: -9 ")
LOGGED = (
    (r"EADDRINUSE|[Aa]ddress already in use",
     "the port of rdzv_endpoint is in use on node 0: choose another, the same on all nodes, or end what holds it"),
    (r"waiting for clients\. (\d+)/(\d+) clients joined",
     "node 0 waited in vain, {0} of {1} nodes came: start `ringattn run` on each with the same rdzv_endpoint and "
     "nnodes and its own node_rank, or wait longer with transport.timeout_s"),
    (r"(?:network addresses of|connect to) \(?\[?([^\],)]+)\]?, (\d+)\)?",
     "node 0 does not answer at {0}:{1}: check the host and port of rdzv_endpoint, that node_rank=0 is started there, "
     "and that no firewall is between"),
)  # fmt: skip
"""What torchrun writes when nodes do not meet, and what that means."""


class RanksError(RingError):
    """The processes of a job failed or did not end in time. The message names the rank and shows its traceback.

    `kind`: the name of the first rank's error; "timeout", "killed" or "torchrun" where no rank could say. `refused`:
    whether a rank refused what it was asked for, so that the same will fail again.
    """

    def __init__(self, message: str, kind: str = "torchrun", refused: bool = False) -> None:
        super().__init__(message)
        self.kind, self.refused = kind, refused


def root_cause(folder: Path, log: str, code: int) -> RanksError:
    """The first failure among `folder`/failure-*.json, else what `log`, torchrun's, tells."""
    failures = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("failure-*.json")]
    causes = [failure for failure in failures if failure["kind"] not in FOLLOWERS]
    if not causes and (killed := KILLED.search(log)):
        return RanksError(
            f"rank {killed[1]} was killed (SIGKILL). If nobody did that, it was the kernel, because memory ran out "
            "(`dmesg` tells): use fewer tokens, or more ranks on more machines",
            "killed",
        )
    if not failures:
        return _logged(log, code)
    first = min(causes or failures, key=lambda failure: failure["time_s"])
    message = f"rank {first['rank']} failed first: {first['kind']}: {first['message']}"
    if first["refused"]:
        return RanksError(message, first["kind"], refused=True)
    tail = "\n".join(first["traceback"].splitlines()[-TRACEBACK_LINES:])
    return RanksError(f"{message}\n{tail}", first["kind"])


def _logged(log: str, code: int) -> RanksError:
    for pattern, told in LOGGED:
        if found := re.search(pattern, log):
            return RanksError(told.format(*found.groups()))
    tail = "\n".join(log.splitlines()[-TRACEBACK_LINES:])
    return RanksError(f"the ranks failed without a Python error (exit code {code}):\n{tail}")

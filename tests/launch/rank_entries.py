"""Entries for `run_ranks_in_processes` that cause the faults of `test_ranks.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ringattn import Ring

RANK = int(os.environ.get("RANK", "0"))


def fail_on_rank_1(spec: dict[str, Any]) -> dict[str, Any]:
    """Raise on rank 1, while rank 0 sleeps."""
    if RANK == 1:
        raise ValueError(f"planted {spec['word']}")
    time.sleep(60)
    return {}


def wait_for_end(spec: dict[str, Any]) -> dict[str, Any]:
    """Start a child process, write the process ids of this rank and of the child into a file, and sleep."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    (Path(spec["folder"]) / str(RANK)).write_text(f"{os.getpid()} {child.pid} ", encoding="utf-8")
    time.sleep(300)
    return {}


def meet(spec: dict[str, Any]) -> dict[str, Any]:
    """Open a ring. If `spec` names a `rank`, that rank sends itself `signal` while the others wait at a barrier."""
    with Ring(transport=spec["transport"], timeout_s=spec["timeout_s"]) as ring:
        ring.barrier()
        if ring.rank == spec.get("rank"):
            os.kill(os.getpid(), spec["signal"])
        ring.barrier()
        return {"rank": ring.rank, "run_id": os.environ["TORCHELASTIC_RUN_ID"]}


def leave_early(spec: dict[str, Any]) -> dict[str, Any]:
    """Exit on rank 1 without a result or an error."""
    if RANK == 1:
        print("these were its words", file=sys.stderr, flush=True)
        os._exit(spec["code"])
    return {}


def ignore_sigterm(spec: dict[str, Any]) -> dict[str, Any]:
    """Ignore SIGTERM on rank 0, and raise on rank 1."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return wait_for_end(spec) if RANK == 0 else fail_on_rank_1({"word": "word"})

"""What the ranks of `test_ranks.py` do: entries for `run_ranks_in_processes` that plant a fault."""

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
    """Rank 0 outlives rank 1."""
    if RANK == 1:
        raise ValueError(f"planted {spec['word']}")
    time.sleep(60)
    return {}


def wait_for_end(spec: dict[str, Any]) -> dict[str, Any]:
    """Each rank writes its process id and that of a child into files, and never ends."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    (Path(spec["folder"]) / str(RANK)).write_text(f"{os.getpid()} {child.pid} ", encoding="utf-8")
    time.sleep(300)
    return {}


def meet(spec: dict[str, Any]) -> dict[str, Any]:
    """A ring; in it, rank `rank` sends itself `signal`, if given, and the others wait for it at a barrier."""
    with Ring(transport=spec["transport"], timeout_s=spec["timeout_s"]) as ring:
        ring.barrier()
        if ring.rank == spec.get("rank"):
            os.kill(os.getpid(), spec["signal"])
        ring.barrier()
        return {"rank": ring.rank, "run_id": os.environ["TORCHELASTIC_RUN_ID"]}


def leave_early(spec: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 ends without a word."""
    if RANK == 1:
        print("these were its words", file=sys.stderr, flush=True)
        os._exit(spec["code"])
    return {}


def ignore_sigterm(spec: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 cannot be ended by SIGTERM; rank 1 fails."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return wait_for_end(spec) if RANK == 0 else fail_on_rank_1({"word": "word"})

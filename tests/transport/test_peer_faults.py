"""Faults of the peer transport in real processes: killed and stopped ranks, failures beside computing.

The quick ones stand in `test_peer_memory.py`, whose processes they share.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.processes import Processes
from tests.transport.attribution import names_as_culprit
from tests.transport.peers import ranks

DEADLINE_S = 1.0
GRACE_S = 2.0
POINTS = ["before start", "after start", "in a copy", "computing"]


def named_at_fault(message: str) -> set[str]:
    """Every rank that is said to be at fault; who only tells of it `failed first`."""
    return set(re.findall(r"rank (\d) (?:is gone|is silent|is behind|is stuck|is still|closed|has left)", message))


def strike(kind: str, point: str) -> dict[int, Any]:
    """What the other ranks of three answer, one of which is struck in a run."""
    culprit = 1
    with Processes(3) as three:
        pid = three._processes[culprit].pid
        assert pid is not None
        if kind == "kill":
            return three.run(ranks.struck, kind, point, culprit, DEADLINE_S, exits=culprit)
        threading.Thread(target=kill_the_stopped, args=(pid,), daemon=True).start()
        return three.run(ranks.struck, kind, point, culprit, DEADLINE_S, exits=culprit)


def kill_the_stopped(pid: int) -> None:
    """End a process some time after it has stopped: the others have raised by then, and it never answers."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.05)
    time.sleep(DEADLINE_S + GRACE_S + 2.0)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "point"), [*(("kill", point) for point in POINTS), ("stop", "after start"), ("stop", "in a copy")]
)
def test_a_lost_rank_is_named_and_no_other(kind: str, point: str) -> None:
    found = strike(kind, point)
    for rank in (0, 2):
        answer = found[rank]
        assert names_as_culprit(1, answer["message"]), answer
        assert named_at_fault(answer["message"]) == {"1"}, answer
        assert answer["after_s"] <= DEADLINE_S + GRACE_S, answer
        # Only the memory that the rank itself views is left, and nothing of another rank.
        assert answer["left"]["registered"] == 0 and answer["left"]["mappings"] <= 1, answer


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as started:
        yield started


@pytest.mark.slow
def test_a_caller_does_not_wait_for_what_the_device_computes(two: Processes) -> None:
    for found in two.run(ranks.busy).values():
        assert found["told_s"] < 1.5 < found["ended_s"]
        assert found["registered"] == 0

"""Processes started by the real torchrun: a restarted job opens its ring, and no files or processes remain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringattn.bench.processes import processes_of, run_torchrun
from ringattn.errors import RingError
from tests.transport.fault_entries import POISON

pytestmark = pytest.mark.alone


@pytest.mark.slow
def test_a_restarted_job_opens_cleanly(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.touch()
    ended = run_torchrun(
        ["-m", "tests.transport.fault_entries", str(job)], job, lambda: None, ranks=2, more=["--max-restarts=1"]
    )
    assert ended.code == 0, ended.printed
    assert len(list(tmp_path.glob("poisoned-*"))) == 2
    for rank in range(2):
        assert json.loads((tmp_path / f"answer-{rank}.json").read_text()) == {
            "life": 1, "former": list(POISON.values()), "own": True, "cause": None, "closed": [False, False]
        }  # fmt: skip


LEAVES_A_CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", *sys.argv[1:]], start_new_session=True)
"""


def test_a_process_left_behind_is_ended_and_is_an_error(tmp_path: Path) -> None:
    program, job = tmp_path / "program.py", tmp_path / "job.json"
    program.write_text(LEAVES_A_CHILD)
    with pytest.raises(RingError, match=r"processes \[\d+\] outlived torchrun"):
        run_torchrun([str(program), str(job)], job, lambda: None, ranks=1)
    assert processes_of(job) == []

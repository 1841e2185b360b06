"""Flight records of a process that receives SIGTERM, which torchrun sends to the ranks that outlive another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BEGIN = """
import ctypes, os, signal, sys, time
from pathlib import Path
from ringattn.observe.flight import FlightRecord, MessageRecord
from ringattn.observe.flight import leave_records
folder = Path(sys.argv[1])
def opened():
    record = FlightRecord(0, 2, "gloo")
    record.begin(0, (MessageRecord("recv", 1, 64, 0, "KV1"),))
    leave_records(record, folder)
    return record
record = opened()
def ready():
    print("ready", flush=True)
"""
IN_C = """
ready()
mutex = ctypes.create_string_buffer(64)
for _ in range(2):  # the second time for good, and no signal ends it
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
IN_PYTHON = "ready()\ntime.sleep(60)\n"


def told_to_end(folder: Path, program: str, before: str = "") -> tuple[int, str]:
    """Exit code and output of a process that gets SIGTERM once it is ready. `before`: what it does before its ring."""
    begin = BEGIN.replace("record = opened()", before + "record = opened()")
    words = [sys.executable, "-c", begin + program, str(folder)]
    with subprocess.Popen(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                          stdout=subprocess.PIPE) as running:  # fmt: skip
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        running.terminate()
        try:
            printed, _ = running.communicate(timeout=20)
        finally:
            running.kill()
        return running.returncode, printed


def left(folder: Path) -> dict[str, Any]:
    """The record that the process left."""
    found: dict[str, Any] = json.loads((folder / "flight-0.json").read_text())
    return found


@pytest.mark.parametrize("program", [IN_C, IN_PYTHON], ids=["in C", "in Python"])
def test_the_record_is_left_and_the_process_ends_by_the_signal(program: str, tmp_path: Path) -> None:
    code, _ = told_to_end(tmp_path, program)
    assert code == -signal.SIGTERM
    assert left(tmp_path)["cause"].startswith("received SIGTERM")
    (flight,) = left(tmp_path)["flights"]
    assert flight["state"] == "posted" and flight["parts"][0]["label"] == "KV1"


def test_a_handler_that_was_there_runs_after_the_record_is_left(tmp_path: Path) -> None:
    own = """
def mine(number, frame):
    print("mine", (folder / "flight-0.json").exists(), flush=True)
    os._exit(7)
signal.signal(signal.SIGTERM, mine)
"""
    assert told_to_end(tmp_path, IN_PYTHON, own) == (7, "mine True\n")


def test_what_was_written_or_closed_is_left_alone(tmp_path: Path) -> None:
    code, _ = told_to_end(tmp_path, "record.dump(folder, 'a deadline')\n" + IN_PYTHON)
    assert code == -signal.SIGTERM and left(tmp_path)["cause"] == "a deadline"
    told_to_end(tmp_path / "closed", "record.over = True\n" + IN_PYTHON)
    assert not (tmp_path / "closed").exists()


def test_of_two_rings_the_one_that_waits_is_left(tmp_path: Path) -> None:
    other = "other = opened()\nother.last().state = 'done'\nother.transport = 'idle'\n"
    told_to_end(tmp_path, other + IN_PYTHON)
    assert left(tmp_path)["transport"] == "gloo"


def test_the_end_of_a_fork_is_not_that_of_its_parent(tmp_path: Path) -> None:
    fork = """
child = os.fork()
if child == 0:
    time.sleep(60)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
time.sleep(0.2)
print(-os.WTERMSIG(status), (folder / "flight-0.json").exists(), flush=True)
"""
    words = [sys.executable, "-c", BEGIN + fork, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "-15 False\n"), done.stderr

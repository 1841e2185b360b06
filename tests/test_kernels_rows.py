"""Runs the tests of the data-movement and projection kernels in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FEWEST = 60  # tests; fewer have not been collected


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_in_the_interpreter(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "tests/interpreter_rows"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    assert done.returncode == 0, "\n".join(failed or [done.stdout[-3000:], done.stderr[-1000:]])
    passed = next(int(line.split()[0]) for line in reversed(lines) if " passed" in line)
    assert passed >= FEWEST

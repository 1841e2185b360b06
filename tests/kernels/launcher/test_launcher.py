"""Kept handles pass the driver what they should through Triton's own launcher, over a stub of libcuda.

The stub records each launch: grid, cluster, block, shared memory, stream, function and the bytes of every parameter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.kernels.launcher.recording import build_stub

ROOT = Path(__file__).resolve().parents[3]
SCRATCH = {
    "sm_90/half/64/gluon/forward": 384, "sm_90/half/64/gluon/grad_kv": 512, "sm_90/half/64/descriptors/grad_q": 256,
    "sm_90/half/128/pointers/forward/dropout": 0,
}  # fmt: skip
"""The bytes of tensor descriptors for each program, by case."""


@pytest.mark.slow
def test_triton_passes_the_driver_what_the_call_says(tmp_path: Path) -> None:
    """Each case is launched three times with new tensors, then from four threads at once, as autograd does."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    build_stub(tmp_path)
    places = {"LD_LIBRARY_PATH": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path)}
    environment = {**os.environ, **places, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.launcher.recording", str(tmp_path / "found"), *SCRATCH]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert child.returncode == 0, child.stdout + child.stderr
    findings = json.loads((tmp_path / "found").read_text())
    assert {name: case["wrong"] for name, case in findings.items()} == {name: [] for name in (*SCRATCH, "cluster")}
    assert {name: findings[name]["scratch"] for name in SCRATCH} == SCRATCH
    assert all(findings[name]["parameters"] > 30 for name in SCRATCH)

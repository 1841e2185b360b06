"""Runs suites of kernels in Triton's interpreter, in child processes, so that the tests' own stays un-interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1140.0  # beside the other half of the tests these take their time


def outcomes_of(cases: Sequence[str], folder: Path) -> dict[str, str]:
    """Each case of the suites at `cases`, files or folders: why it failed and what it said, or nothing.

    Two processes share the cases, each taking from the other's when its own are done.
    """
    report = folder / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-o", "junit_logging=system-out", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, "-n", "2", "--dist", "worksteal", *cases]
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(folder / "cache")}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert report.exists(), f"ended with {child.returncode}\n{child.stdout}{child.stderr}"
    return _reported(report)


def _reported(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [part for part in case if part.tag in ("failure", "error", "skipped")]
        said = "".join(part.text or "" for part in case if part.tag == "system-out")
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found[name] = "; ".join(f"{part.get('message', part.tag)} {said}".strip() for part in bad)
    return found

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


def outcomes_of(cases: str, folder: Path, shares: Sequence[str]) -> dict[str, str]:
    """Each case of the suite at `cases`: why it failed and what it said, or nothing.

    `shares`: pytest's `-k` expressions, one for each child; they run side by side and must cover the suite.
    """
    children = []
    for number, share in enumerate(shares):
        report, log = folder / f"{number}.xml", folder / f"{number}.log"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_logging=system-out", f"--junitxml={report}"]
        environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(folder / f"cache-{number}")}
        with log.open("w") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, "-k", share, cases],
                cwd=ROOT, env=environment, stdout=output, stderr=output,
            )  # fmt: skip
        children.append((child, report, log))
    found: dict[str, str] = {}
    try:
        for child, report, log in children:
            child.wait(timeout=LIMIT_S)
            assert report.exists(), f"ended with {child.returncode}\n{log.read_text()}"
            found |= _reported(report)
    finally:
        for child, _, _ in children:
            child.kill()
    return found


def _reported(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [part for part in case if part.tag in ("failure", "error", "skipped")]
        said = "".join(part.text or "" for part in case if part.tag == "system-out")
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found[name] = "; ".join(f"{part.get('message', part.tag)} {said}".strip() for part in bad)
    return found

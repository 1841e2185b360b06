"""Run the suites of the Triton kernels in Triton's interpreter: engine contract, launches, mutations and row kernels.

Triton decides when a kernel is imported whether it is interpreted, so each suite runs in child processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.contract.engine_scenarios import SCENARIOS

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1140.0
INTERPRETER = "tests/kernels/interpreter"
SUITES: dict[str, tuple[list[str], dict[str, int]]] = {
    "engine": ([f"{INTERPRETER}/engine_cases.py"], {"::test_scenario[": 4 * len(SCENARIOS)}),
    "attention": (
        [f"{INTERPRETER}/{name}_cases.py" for name in ("kernel", "backward", "mutation")],
        {
            "::test_one_launch_is_right[": 12,
            "::test_carried_steps_are_right[": 12,
            "::test_gradients_are_right[": 12,
            "::test_a_wrong_kernel_is_detected[": 14,
        },
    ),
    "rows": (["tests/kernels/interpreter_rows"], {"::test_": 60}),
}
"""For each suite, its files, and the minimum number of cases whose names contain a text. If there are fewer, some cases
were not collected."""


def outcomes_of(files: list[str], folder: Path) -> dict[str, str]:
    """Run the cases of `files` in two processes that share them.

    Return for each case why it failed and what it printed, or "" if it passed.
    """
    report = folder / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-o", "junit_logging=system-out", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, "-n", "2", "--dist", "worksteal", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(folder / "cache")}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert report.exists(), f"ended with {child.returncode}\n{child.stdout}{child.stderr}"
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [part for part in case if part.tag in ("failure", "error", "skipped")]
        printed = "".join(part.text or "" for part in case if part.tag == "system-out")
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcomes[name] = "; ".join(f"{part.get('message', part.tag)} {printed}".strip() for part in faults)
    return outcomes


@pytest.mark.unchanged("kernels in the interpreter")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_passes_in_the_interpreter(suite: str, tmp_path: Path) -> None:
    files, counts = SUITES[suite]
    outcomes = outcomes_of(files, tmp_path)
    failed = {name: why for name, why in outcomes.items() if why}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert all(sum(text in name for name in outcomes) >= count for text, count in counts.items())

"""The budget of `make test`, and the table of durations that is computed from the reports of runs."""

from __future__ import annotations

from pathlib import Path

import tests.contract.processes  # noqa: F401  (it counts from its import on)
from tests.durations import BUDGET_CORE_S, RUNS, UNKNOWN_S, of_report, quick_core_s, read, renewed

ROOT = Path(__file__).resolve().parent.parent
CASE = '<testcase classname="{}" name="one"><properties><property name="{}" value="{}"/></properties></testcase>'
CASES = ("tests.test_a", "core_s", 1.26), ("tests.test_a.TestThat", "core_s", 2), ("tests.gpu.test_b", "seed", 7)
REPORT = f"<testsuites><testsuite>{''.join(CASE.format(*case) for case in CASES)}</testsuite></testsuites>"


def test_make_test_stays_within_its_budget() -> None:
    all_files = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}
    files = {file for file in all_files if "interpreter" not in file}  # other tests run the interpreter's files
    table = read()
    new = files - {file for run in table.values() for file in run}
    longest = sorted(table["quick"].items(), key=lambda entry: -entry[1])[:8]
    total = quick_core_s(table, files)
    assert total <= BUDGET_CORE_S, (
        f"make test takes {total:.0f} s of a core, more than {BUDGET_CORE_S:.0f}: mark tests as slow that a shorter "
        f"test covers, then `make test durations`. Longest: {longest}; not in the table: {new}"
    )


def test_core_seconds_are_summed_by_file(tmp_path: Path) -> None:
    (tmp_path / "tests-quick.xml").write_text(REPORT)
    assert of_report(tmp_path / "tests-quick.xml") == {"tests/test_a.py": 3.3, "tests/gpu/test_b.py": 0.0}
    before = {"quick": {"tests/test_old.py": 9.0}, "slow": {"tests/test_a.py": 5.0}}
    after = renewed(before, tmp_path)
    assert tuple(after) == RUNS
    assert after["quick"] == of_report(tmp_path / "tests-quick.xml") and after["slow"] == before["slow"]


def test_new_files_count_until_they_are_measured() -> None:
    table = {"quick": {"a": 3.0}, "quick-alone": {"b": 4.0}, "slow": {"a": 70.0, "c": 80.0}, "slow-alone": {}}
    assert quick_core_s(table, ["a", "b", "c"]) == 3 + 2 * 4
    assert quick_core_s(table, ["a", "new"]) == 3 + 2 * 4 + UNKNOWN_S

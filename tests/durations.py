"""The cost of the tests in core seconds by file, for `make test` and for the other tests.

The unit is core seconds, not wall-clock seconds, so that a machine under load gives nearly the same table.
`python -m tests.durations` (`make durations`) reads the JUnit files that `make test` and `make test-rest` left in
build/, and writes the table for those that exist. `tests/test_durations.py` compares it with the budget.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

from tests.unchanged import GROUPS

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".json")
Durations = dict[str, dict[str, float]]
"""For each run, the core seconds of each file. Tests of "quick" and "slow" share the cores; those of "quick-alone" and
"slow-alone" do not.
"""
BUDGET_CORE_S = 760.0
"""For all of `make test` except ruff and mypy, which take 60: under eight minutes on two cores."""
UNKNOWN_S = 10.0
RUNS = ("quick", "quick-alone", "slow", "slow-alone")


def of_report(report: Path) -> dict[str, float]:
    """Return the core seconds of each test file in a JUnit file."""
    seconds_by_file = Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.get("classname", "").split(".")
        while parts and not parts[-1].startswith("test_"):
            parts.pop()  # a class of tests
        core_seconds = [
            float(property_.get("value", "0"))
            for property_ in case.iter("property")
            if property_.get("name") == "core_s"
        ]
        seconds_by_file["/".join(parts) + ".py"] += sum(core_seconds)
    return {file: round(seconds, 1) for file, seconds in sorted(seconds_by_file.items())}


def read() -> Durations:
    """Read the table from its file."""
    table: Durations = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def renewed(table: Mapping[str, dict[str, float]], build: Path) -> Durations:
    """Return the table with the figures of all runs whose JUnit file is in `build` replaced by those of the file."""
    reports = {run: build / f"tests-{run}.xml" for run in RUNS}
    return {run: of_report(file) if file.exists() else table.get(run, {}) for run, file in reports.items()}


def quick_core_s(table: Durations, files: Iterable[str]) -> float:
    """Return the core seconds of `make test` on two cores, without lint. A file without figures counts UNKNOWN_S.

    A test that runs alone counts twice, because the other core is idle.
    """
    # The files of `unchanged.GROUPS` count nothing: they do not run unless they have changed.
    known_files = {file for run in table.values() for file in run} | {
        file for start in GROUPS.values() for file in start
    }
    unknown = sum(file not in known_files for file in files)
    return sum(table["quick"].values()) + 2 * sum(table["quick-alone"].values()) + unknown * UNKNOWN_S


def main() -> None:
    """Update the table from the JUnit files, and print its totals."""
    table = renewed(read() if TABLE.exists() else {}, ROOT / "build")
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for run, files in table.items():
        print(f"{run}: {sum(files.values()):.0f} s of a core in {len(files)} files")


if __name__ == "__main__":
    main()

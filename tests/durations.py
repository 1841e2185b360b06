"""What the tests take: seconds of a core, by file, of `make test` and of the rest.

Seconds of a core and not of the clock, so that a machine that others use too gives nearly the same table.
`python -m tests.durations` (`make durations`) reads the JUnit files that `make test` and `make test-rest` left in
build/, and writes the table of those that are there. `tests/test_durations.py` holds it against the budget.
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
"""By run, then by file: "quick" and "slow" share the cores, those of "quick-alone" and "slow-alone" do not."""
BUDGET_CORE_S = 760.0
"""For all of `make test` but ruff and mypy, which take 60: under eight minutes on two cores."""
UNKNOWN_S = 10.0
RUNS = ("quick", "quick-alone", "slow", "slow-alone")


def of_report(report: Path) -> dict[str, float]:
    """Core seconds of each test file in a JUnit file."""
    found = Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.get("classname", "").split(".")
        while parts and not parts[-1].startswith("test_"):
            parts.pop()  # a class of tests
        taken = [float(one.get("value", "0")) for one in case.iter("property") if one.get("name") == "core_s"]
        found["/".join(parts) + ".py"] += sum(taken)
    return {file: round(seconds, 1) for file, seconds in sorted(found.items())}


def read() -> Durations:
    """The table."""
    table: Durations = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def renewed(table: Mapping[str, dict[str, float]], build: Path) -> Durations:
    """The table with the runs whose JUnit file is there."""
    reports = {run: build / f"tests-{run}.xml" for run in RUNS}
    return {run: of_report(file) if file.exists() else table.get(run, {}) for run, file in reports.items()}


def quick_core_s(table: Durations, files: Iterable[str]) -> float:
    """Core seconds of `make test` on two cores, without lint; a file that the table does not know counts UNKNOWN_S.

    While a test runs alone the other core waits.
    """
    # Of what has not changed since it was proven nothing runs.
    known = {file for run in table.values() for file in run} | {file for start in GROUPS.values() for file in start}
    unknown = sum(file not in known for file in files)
    return sum(table["quick"].values()) + 2 * sum(table["quick-alone"].values()) + unknown * UNKNOWN_S


def main() -> None:
    """Renew the table, and say what it comes to."""
    table = renewed(read() if TABLE.exists() else {}, ROOT / "build")
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for run, files in table.items():
        print(f"{run}: {sum(files.values()):.0f} s of a core in {len(files)} files")


if __name__ == "__main__":
    main()

"""Groups of tests that need not run again as long as nothing that they depend on has changed.

These tests compile or interpret the GPU kernels, take minutes, and depend on few files. The digest of a group covers
its test files, every module that these import or name in a string, directly or not, the data files next to them, and
the versions of the packages that compile and interpret. Comments and docstrings do not count. If the digest equals the
recorded one, the tests of the group are marked slow: `make test` skips them and says so.
`python -m tests.unchanged` (`make prove`) runs the groups whose digest has changed, and records those that pass.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_suffix(".json")
WRITTEN_BY_RUNS = "unchanged.json", "durations.json"
"""Data that no test of a group reads."""
PACKAGES = ("triton", "torch", "numpy")
GROUPS = {
    "compile gate": ("tests/kernels/test_compile_gate.py",),
    "compile gate of rows": ("tests/kernels/test_compile_gate_rows.py",),
    "Gluon kernels": (
        "tests/kernels/test_attention_gluon.py",
        "tests/kernels/test_attention_gluon_backward.py",
    ),
    "compiled kernels in the PTX interpreter": ("tests/kernels/test_ptx.py",),
    "kernels in the interpreter": (
        "tests/kernels/test_interpreted.py",
        "tests/kernels/interpreter/engine_cases.py",
        "tests/kernels/interpreter/mutation_cases.py",  # imports the other two suites
        "tests/kernels/interpreter_rows",
    ),
}
"""The test files of each group. The tests that belong to it are marked `unchanged(group)`."""
DATA = ("*.json", "conftest.py", "golden*/*.json")
"""Files next to a module that it reads without importing them."""

MODULE = re.compile(r"(ringattn|tests)(\.\w+)+")


class Read(NamedTuple):
    """The syntax tree of a module as text, without comments and docstrings, and the modules that it imports or names.

    A module whose name is a string, such as "tests.kernels.ptx.mutants", runs as a program.
    """

    meaning: str
    names: tuple[str, ...]


@cache  # groups share most of their files
def read(text: str) -> Read:
    """Parse the text of a module."""
    tree = ast.parse(text)
    names = list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names += (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            names.append(node.value)
    return Read(ast.dump(tree), tuple(names))


def imported(file: Path) -> Iterator[Path]:
    """Yield the files of this repository that a module imports or names, at its top or in its functions.

    `ringattn/__init__.py` is left out, because it only re-exports names.
    """
    for name in read(file.read_text(encoding="utf-8")).names:
        top, *inner = name.split(".")
        for depth in range(1, len(inner) + 1) if top in ("ringattn", "tests") else ():
            stem = ROOT.joinpath(top, *inner[:depth])
            yield from (path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists())


def sources(starts: Iterable[str]) -> list[Path]:
    """Return every file of this repository on which the tests in `starts` (files or folders) depend."""
    waiting = [ROOT / start for start in starts]
    found = set[Path]()
    while waiting:
        file = waiting.pop()
        if file.is_dir():
            waiting += file.glob("*.py")
        elif file not in found:
            found.add(file)
            waiting += imported(file)
    folders = {file.parent for file in found}
    return sorted(found | {data for folder in folders for pattern in DATA for data in folder.glob(pattern)})


def meaning(file: Path) -> str:
    """Return the syntax tree of a module as text, see `Read`, or the whole text of any other file."""
    text = file.read_text(encoding="utf-8")
    return read(text).meaning if file.suffix == ".py" else text


@cache
def digest(group: str) -> str:
    """Return the digest of everything on which the outcome of a group's tests depends."""
    whole = hashlib.sha256()
    for file in sources(GROUPS[group]):
        if file.name in WRITTEN_BY_RUNS:
            continue
        whole.update(f"{file.relative_to(ROOT)}\0{meaning(file)}\0".encode())
    for package in PACKAGES:
        try:
            whole.update(f"{package} {version(package)}\n".encode())
        except PackageNotFoundError:
            whole.update(f"no {package}\n".encode())
    return whole.hexdigest()


def recorded() -> dict[str, str]:
    """Return for each group the digest with which it last passed."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def is_unchanged(group: str) -> bool:
    """Return whether a group has passed with the current files and packages."""
    return recorded().get(group) == digest(group)


class Tally:
    """A pytest plugin that counts the passed tests of a run, and all failures and skips."""

    def __init__(self) -> None:
        self.passed, self.others = 0, 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test as passed by its call. A skip, or a failure in setup or teardown, counts among the others."""
        self.passed += report.when == "call" and report.passed
        self.others += not report.passed


def prove(group: str) -> bool:
    """Run a group. Record its digest, and return True, if all of its tests passed."""
    before, tally = digest(group), Tally()
    file = next(start for start in GROUPS[group] if Path(start).name.startswith("test_"))
    pytest.main(["-q", "-m", "unchanged", str(ROOT / file)], plugins=[tally])
    digest.cache_clear()
    if not tally.passed or tally.others or digest(group) != before:
        return False
    RECORD.write_text(json.dumps(recorded() | {group: before}, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    return True


def main() -> int:
    """Run the groups that have changed, and print the state of all. Return 1 if a group does not pass."""
    changed = [group for group in GROUPS if not is_unchanged(group)]
    outcomes = {group: prove(group) for group in changed}
    for group in GROUPS:
        print(f"{group}: {'unchanged' if group not in outcomes else 'passed' if outcomes[group] else 'NOT PROVEN'}")
    return int(not all(outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())

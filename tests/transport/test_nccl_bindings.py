"""Both bindings to NCCL obey one contract. They make real C calls to a stub of the library, without a GPU.

Each run of `tests/transport/nccl/binding_runs.py` is a separate process. All runs start together, and each check of a
run is one test.
Not covered: the real library, see `test_nccl_library.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.transport.nccl.binding_runs import RUNS
from tests.transport.nccl.library_scenarios import SCENARIOS
from tests.transport.nccl.stub import COMPILER, build

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = ("MEM_ALLOC", "REGISTER", "FINALIZE", "LAST_ERROR")
"""The capabilities `binding_runs.OPTIONAL`, as names of functions that `stub.build` leaves out. `NAME` is not among
them, because it depends on the version of the library."""

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the stub of libnccl"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch has already loaded its libnccl"),
]
CAPABILITIES = "capabilities_are_those_of_the_library"
Report = Callable[[str], dict[str, str | None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nccl")


@pytest.fixture(scope="module")
def report(folder: Path) -> Iterator[Report]:
    """Start all runs in parallel. Return a function that takes the name of a run and returns its results."""
    started: dict[str, subprocess.Popen[str]] = {}

    def start(name: str, module: str, *arguments: str) -> None:
        started[name] = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def library(name: str, *without: str) -> str:
        (folder / name).mkdir()
        return str(build(folder / name, *without))

    for name in RUNS:
        if name != "cupy" or find_spec("cupy"):
            path = library(name, *(WITHOUT if name == "ctypes_poor" else ()))
            start(name, "tests.transport.nccl.binding_runs", name, path, str(folder / name / "exit.log"))
    start("library", "tests.transport.nccl.library_scenarios", library("first"), library("second"))
    finished: dict[str, dict[str, str | None]] = {}

    def results(name: str) -> dict[str, str | None]:
        if name not in finished:
            printed, errors = started[name].communicate(timeout=120)
            assert started[name].returncode == 0, errors
            finished[name] = json.loads(printed.splitlines()[-1])
        return finished[name]

    yield results
    for process in started.values():  # if not all tests were selected, some processes are still running
        process.kill()
        process.communicate()


def needs_cupy(name: str) -> None:
    if name == "cupy" and not find_spec("cupy"):
        pytest.skip("cupy is not installed")


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name, checks in RUNS.items() for check in (CAPABILITIES, *(each.__name__ for each in checks))],
)
def test_contract(report: Report, name: str, check: str) -> None:
    needs_cupy(name)
    fault = report(name)[check]
    assert fault is None, fault


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_called_at_exit(report: Report, folder: Path, name: str) -> None:
    needs_cupy(name)
    report(name)
    assert (folder / name / "exit.log").read_text() == ""


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_library(report: Report, scenario: str) -> None:
    fault = report("library")[scenario]
    assert fault is None, fault

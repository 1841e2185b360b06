"""The bodies of the GPU checks, run on CPU over the simulated library: what is proven is that they run, and bite."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn.bench.many import PARTS, ManyOptions
from ringattn.bench.options import parse
from ringattn.transport.base import Opening
from ringattn.transport.nccl.binding import CommConfig
from ringattn.transport.nccl.communicator import Communicator
from ringattn.transport.nccl.transport import NcclTransport
from tests.gpu import kept
from tests.gpu import test_lifetimes as lifetimes
from tests.gpu import test_processes as processes
from tests.gpu.processes import in_order
from tests.gpu.test_loopback import bytes_of_every_size, nothing
from tests.transport.nccl_rings import on_rings, open_on, results
from tests.transport.simulated.device import SimDevice, span
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import SimWorld

ROOT = Path(__file__).resolve().parents[2]
NCCL_TESTS = ("lifetimes", "peer_driver", "loopback", "processes", "peer")
COLLECTIONS = ("gpu-check", "gpu-check-nccl", "gpu-check-many")
"""Targets that only run others."""
POOR = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('hydra', 'omegaconf', 'matplotlib'):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_checks_need_little() -> None:
    # A GPU machine may have no network: torch, triton, cupy, numpy, pytest and rich are there, and no more.
    words = ["-q", "--collect-only", "-m", "gpu", "tests/gpu/test_engines.py", "tests/gpu"]
    poor = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", POOR, *words], env=poor, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(collected) >= 50 and any("test_nccl_is_called_as_the_plan_says" in line for line in collected)


@pytest.mark.slow
def test_the_benchmarks_need_little() -> None:
    """They are run where there is no hydra: each gets as far as its options."""
    pytest.importorskip("triton")
    program = (
        POOR.partition("import pytest")[0]
        + """
from importlib import import_module
for name in sys.argv[1:]:
    try:
        import_module(f"ringattn.bench.{name}").main(["nothing=1"])
    except ValueError as error:
        print(name, str(error).partition(":")[0])
"""
    )
    names = ["kernels", "tune", "qkv", "many"]
    done = subprocess.run(
        [sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [word for name in names for word in (name, "nothing")], done.stderr


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with the Makefile and a Python that notes what it is asked for; it fails for `qkv` and a loopback."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    stub = tmp_path / "python"
    stub.write_text(
        f"""#!{sys.executable}
import json, os, sys
with open("asked", "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ.get("GPU_CHECK_COPY")]) + "\\n")
print("said", sys.argv[-1])
sys.exit("ringattn.bench.qkv" in sys.argv or "tests/gpu/test_loopback.py" in sys.argv)
"""
    )
    stub.chmod(0o755)
    return tmp_path


def made(machine: Path, target: str, *words: str) -> tuple[int, list[list[str]]]:
    """The exit status, and what Python was asked for, the question for a device apart."""
    command = ["make", "--no-print-directory", target, f"PYTHON={machine / 'python'}", f"OUT={machine / 'out'}", *words]
    done = subprocess.run(command, cwd=machine, capture_output=True, text=True, timeout=60)
    asked = [json.loads(line) for line in (machine / "asked").read_text().splitlines()]
    assert all(copy == str(machine / "out") for given, copy in asked if given[0] != "-c")
    return done.returncode, [given for given, _ in asked if given[0] != "-c"]


def test_every_part_of_the_gpu_check_is_run_in_order(machine: Path) -> None:
    """What decides most is first; a part that fails does not stop the next, and is told in the end."""
    status, asked = made(machine, "gpu-check")
    tests = [given for given in asked if given[1] == "pytest"]
    kernels, nccl = tests[:14], tests[14:]
    assert status != 0 and asked.index(kernels[0]) == 1
    assert sorted(word for given in kernels for word in given if word.startswith("--part")) == sorted(
        f"--part={part}/14" for part in range(1, 15)
    )
    assert all("not compute_sanitizer" in given for given in kernels)
    assert [given[-1] for given in nccl] == [f"tests/gpu/test_{name}.py" for name in NCCL_TESTS]
    benchmarks = [given[1:] for given in asked if given[1] != "pytest"]
    assert [given[0].rpartition(".")[2] for given in benchmarks] == ["kernels", "kernels", "kernels", "tune", "qkv"]
    pytest.importorskip("triton")
    modules = [vars(import_module(given[0])) for given in benchmarks]
    options: list[Any] = [next(one for name, one in names.items() if name.endswith("Options"))() for names in modules]
    chosen = [parse(one, given[1:]) for one, given in zip(options, benchmarks, strict=True)]
    assert chosen[0].only == ("cudnn", "descriptors", "gluon") and chosen[0].tokens == (8192,)
    assert chosen[2].total == 8192 and len({one.file for one in chosen[:3]}) == 3
    assert chosen[3].limit == 25 and chosen[3].kernels == ("forward", "grad_kv") and not chosen[3].write
    assert all(one.budget_s <= 420 for one in chosen)
    said = {file.name for file in (machine / "out").iterdir()}
    assert said == {"gpu-kernels.log", *(f"gpu-{name}.log" for name in NCCL_TESTS)}
    assert (machine / "out" / "gpu-kernels.log").read_text().count("said") == 14


def test_every_part_on_several_gpus_is_run_in_order(machine: Path) -> None:
    """Each in a command of its own, all within the options of the benchmark, and the page of all of them last."""
    status, asked = made(machine, "gpu-check-many")
    assert status == 0 and [given[1] for given in asked] == ["ringattn.bench.many"] * 4 + [
        "pytest",
        "ringattn.bench.many",
    ]
    chosen = [parse(ManyOptions(), given[2:]) for given in asked if given[1] != "pytest"]
    assert [one.part for one in chosen] == [*PARTS, "report"] and all(one.budget_s + 20 <= 460 for one in chosen)
    assert asked[4][-1] == "tests/gpu/test_processes.py"


def test_every_file_that_a_part_names_is_there() -> None:
    named = set(re.findall(r"([a-z_]+):\d+", (ROOT / "Makefile").read_text()))
    assert named >= set(NCCL_TESTS) and all((ROOT / "tests" / "gpu" / f"test_{name}.py").exists() for name in named)


@pytest.mark.parametrize(("git", "told"), [(True, False), (False, True)])
def test_the_commit_is_told_or_asked_for(git: bool, told: bool, machine: Path) -> None:
    """Results without it cannot be said to be of any code."""
    (machine / "git").write_text("#!/bin/sh\n" + ("echo c0ffee\n" if git else "exit 1\n"))
    (machine / "git").chmod(0o755)
    (machine / "python").write_text('#!/bin/sh\necho "commit <$GPU_CHECK_COMMIT>"\n')
    poor = {**os.environ, "PATH": f"{machine}:{os.environ['PATH']}"}
    poor.pop("GPU_CHECK_COMMIT", None)
    command = ["make", "gpu-check-qkv", f"PYTHON={machine / 'python'}"]
    said = subprocess.run(command, cwd=machine, env=poor, capture_output=True, text=True, timeout=60).stdout
    assert ("set GPU_CHECK_COMMIT=<commit>" in said) == told and f"commit <{'c0ffee' if git else ''}>" in said


def test_what_a_test_keeps_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "results")
    monkeypatch.setenv("GPU_CHECK_COPY", str(tmp_path / "out"))
    for name, found in (("one", [1.5]), ("two", 2)):
        kept.keep("errors", name, found)
        text = (tmp_path / "out" / "errors.json").read_text()
        assert text == (tmp_path / "results" / "errors.json").read_text() and json.loads(text)[name] == found
    assert json.loads(text) == {"measured on": {"device": "none: a rehearsal"}, "one": [1.5], "two": 2}


def test_every_part_ends_by_itself(machine: Path) -> None:
    """Within eight minutes, and where nothing else ends it: a hung driver call hears no signal but the last."""
    lines = re.findall(r"^(gpu-[a-z- ]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    parts = {part for line in lines for part in line.split()} - {*COLLECTIONS, "gpu-here"}
    assert len(parts) == 16
    for part in parts:
        shown = subprocess.run(["make", "-n", part], cwd=machine, capture_output=True, text=True, timeout=60).stdout
        limits = [int(s) for s in re.findall(r"timeout -k 10 (\d+) env|:(\d+)", shown) for s in s if s]
        assert limits and sum(limits) + 10 * len(limits) <= 480, part
        assert shown.count("python3 -m") == shown.count("timeout -k 10"), part


def test_bytes_of_every_size() -> None:
    world = SimWorld(1, any_memory=True)
    library, gpu = SimLibrary(world, 0), SimDevice(world, 0)
    lane = Communicator(Opening(HashStore(), 0, 1, 20.0), library, gpu, CommConfig())
    lane.open(library.unique_id(), nothing)
    bytes_of_every_size(lane, gpu, (1, 4096, 70_000))
    assert world.violations == []


@pytest.mark.slow
def test_processes_are_exact(tmp_path: Path) -> None:
    processes.every_schedule_is_exact(tmp_path, 2, "fp64", "gloo", pairs=True)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["sizes", "beside"])
def test_bodies_of_processes_run(entry: str, tmp_path: Path) -> None:
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 16, "rows": 64}
    answers = processes.run(tmp_path, entry, 2, "gloo", shape=shape)
    assert all(all(answer["whole"]) if entry == "sizes" else answer["both_us"] > 0 for answer in answers)


@pytest.mark.slow
def test_a_killed_process_on_two_nodes_is_named(tmp_path: Path) -> None:
    assert len(processes.a_lost_rank_is_named(tmp_path, "kill", 3, "shm", nodes=[0, 0, 1])) == 2


@pytest.mark.slow
def test_a_killed_process_is_named(tmp_path: Path) -> None:
    assert len(processes.a_lost_rank_is_named(tmp_path, "kill", 3, "gloo")) == 2


def test_the_library_is_called_as_the_plan_says() -> None:
    world = SimWorld(3)
    for rank, planned in enumerate(results(on_rings(world, in_order, ring={"engine": "plain"}))):
        called = [[call.kind.title(), call.peer, call.nbytes] for call in world.calls(rank)]
        assert called[4:] == 2 * planned and len(planned) > 20


# --- the bodies of the GPU checks of memory, run on CPU over the simulated library -----------------------------------


class SimMachine:
    """A simulated GPU of 16 units; see `lifetimes.Machine`."""

    unit = 1024

    def __init__(self) -> None:
        self.world = SimWorld(1, memory_bytes=16 * self.unit, limit_s=20.0)

    def open(self, timeout_s: float) -> NcclTransport:
        return open_on(self.world, 0, HashStore(), timeout_s)

    def read_late(self, ring: NcclTransport, slots: Any, late_s: float) -> Callable[[], bool]:
        gpu: Any = ring.gpu
        with gpu.on(gpu.user_stream()):
            ring.begin_pass()
            reader = gpu.kernel(reads=[span(slots)], label="late", held=True)
            ring.end_pass()
        threading.Timer(late_s, lambda: self.world.finish(reader)).start()
        return lambda: reader.complete and self.world.violations == []

    def free_bytes(self) -> int:
        gc.collect()
        self.world.memory.cached[0] = 0
        return 16 * self.unit - self.world.memory.nccl_bytes(0)

    def cache(self, leaving: int) -> None:
        self.world.memory.cached[0] = self.free_bytes() - leaving


@pytest.mark.parametrize(
    "body",
    [
        lifetimes.close_waits_for_compute,
        lifetimes.a_stuck_gpu_keeps_its_memory,
        lifetimes.growth_waits_for_the_pass,
        lifetimes.a_full_gpu,
    ],
    ids=lambda body: body.__name__,
)
def test_memory_of_a_ring_of_one(body: Callable[[SimMachine], None]) -> None:
    machine = SimMachine()
    body(machine)
    assert machine.world.violations == []


@pytest.mark.parametrize(
    "fails", [pytest.param(False, id="closed"), pytest.param(True, id="aborted", marks=pytest.mark.slow)]
)
def test_openings_leave_nothing(fails: bool) -> None:
    machine = SimMachine()
    assert set(lifetimes.openings_leave_nothing(machine, fails, openings=lifetimes.SETTLED + 1)) == {16 * machine.unit}
    assert machine.world.violations == [] and machine.world.registry.of(0) == []

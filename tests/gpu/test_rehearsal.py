"""A rehearsal of the GPU checks on the CPU, over gloo or simulated libraries, and checks of their make targets."""

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
"""The make targets that only run other targets."""
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
def test_the_checks_need_few_packages() -> None:
    # A GPU machine may have no network, and only the packages torch, triton, cupy, numpy, pytest and rich.
    options = ["-q", "--collect-only", "-m", "gpu", "tests/gpu/test_engines.py", "tests/gpu"]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", POOR, *options], env=bare, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(collected) >= 50 and any("test_nccl_is_called_as_the_plan_says" in line for line in collected)


@pytest.mark.slow
def test_the_benchmarks_need_few_packages() -> None:
    """Each benchmark starts and reads its options without hydra."""
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
    """Make a folder with the Makefile and a Python that records its arguments and fails for `qkv` and the loopback."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    stub = tmp_path / "python"
    stub.write_text(
        f"""#!{sys.executable}
import json, os, sys
with open("commands", "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ.get("GPU_CHECK_COPY")]) + "\\n")
print("ran", sys.argv[-1])
sys.exit("ringattn.bench.qkv" in sys.argv or "tests/gpu/test_loopback.py" in sys.argv)
"""
    )
    stub.chmod(0o755)
    return tmp_path


def run_make(machine: Path, target: str, *variables: str) -> tuple[int, list[list[str]]]:
    """Run make. Return the exit status and the arguments of each Python command, except the query for a device."""
    command = [
        "make",
        "--no-print-directory",
        target,
        f"PYTHON={machine / 'python'}",
        f"OUT={machine / 'out'}",
        *variables,
    ]
    done = subprocess.run(command, cwd=machine, capture_output=True, text=True, timeout=60)
    records = [json.loads(line) for line in (machine / "commands").read_text().splitlines()]
    assert all(copy == str(machine / "out") for arguments, copy in records if arguments[0] != "-c")
    return done.returncode, [arguments for arguments, _ in records if arguments[0] != "-c"]


def test_every_part_of_the_gpu_check_is_run_in_order(machine: Path) -> None:
    """`make gpu-check` runs every part, the most important first. A part that fails is reported and stops no other."""
    status, commands = run_make(machine, "gpu-check")
    tests = [command for command in commands if command[1] == "pytest"]
    kernels, nccl = tests[:14], tests[14:]
    assert status != 0 and commands.index(kernels[0]) == 1
    assert sorted(word for command in kernels for word in command if word.startswith("--part")) == sorted(
        f"--part={part}/14" for part in range(1, 15)
    )
    assert all("not compute_sanitizer" in command for command in kernels)
    assert [command[-1] for command in nccl] == [f"tests/gpu/test_{name}.py" for name in NCCL_TESTS]
    benchmarks = [command[1:] for command in commands if command[1] != "pytest"]
    assert [command[0].rpartition(".")[2] for command in benchmarks] == ["kernels", "kernels", "kernels", "tune", "qkv"]
    pytest.importorskip("triton")
    modules = [vars(import_module(command[0])) for command in benchmarks]
    options: list[Any] = [
        next(config for name, config in names.items() if name.endswith("Options"))() for names in modules
    ]
    chosen = [parse(config, command[1:]) for config, command in zip(options, benchmarks, strict=True)]
    assert chosen[0].only == ("cudnn", "descriptors", "gluon") and chosen[0].tokens == (8192,)
    assert chosen[2].total == 8192 and len({config.file for config in chosen[:3]}) == 3
    assert chosen[3].limit == 25 and chosen[3].kernels == ("forward", "grad_kv") and not chosen[3].write
    assert all(config.budget_s <= 420 for config in chosen)
    logs = {file.name for file in (machine / "out").iterdir()}
    assert logs == {"gpu-kernels.log", *(f"gpu-{name}.log" for name in NCCL_TESTS)}
    assert (machine / "out" / "gpu-kernels.log").read_text().count("ran") == 14


def test_every_part_on_several_gpus_is_run_in_order(machine: Path) -> None:
    """`make gpu-check-many` runs each part as a separate command with valid options, and the common report last."""
    status, commands = run_make(machine, "gpu-check-many")
    assert status == 0 and [command[1] for command in commands] == ["ringattn.bench.many"] * 4 + [
        "pytest",
        "ringattn.bench.many",
    ]
    chosen = [parse(ManyOptions(), command[2:]) for command in commands if command[1] != "pytest"]
    assert [config.part for config in chosen] == [*PARTS, "report"] and all(
        config.budget_s + 20 <= 460 for config in chosen
    )
    assert commands[4][-1] == "tests/gpu/test_processes.py"


def test_every_file_that_a_part_names_exists() -> None:
    named = set(re.findall(r"([a-z_]+):\d+", (ROOT / "Makefile").read_text()))
    assert named >= set(NCCL_TESTS) and all((ROOT / "tests" / "gpu" / f"test_{name}.py").exists() for name in named)


@pytest.mark.parametrize(("git", "requested"), [(True, False), (False, True)])
def test_the_commit_is_passed_on_or_requested(git: bool, requested: bool, machine: Path) -> None:
    """The commit that git reports is passed on, or the user is asked for it, because results belong to a commit."""
    (machine / "git").write_text("#!/bin/sh\n" + ("echo c0ffee\n" if git else "exit 1\n"))
    (machine / "git").chmod(0o755)
    (machine / "python").write_text('#!/bin/sh\necho "commit <$GPU_CHECK_COMMIT>"\n')
    environment = {**os.environ, "PATH": f"{machine}:{os.environ['PATH']}"}
    environment.pop("GPU_CHECK_COMMIT", None)
    command = ["make", "gpu-check-qkv", f"PYTHON={machine / 'python'}"]
    printed = subprocess.run(command, cwd=machine, env=environment, capture_output=True, text=True, timeout=60).stdout
    assert (
        "set GPU_CHECK_COMMIT=<commit>" in printed
    ) == requested and f"commit <{'c0ffee' if git else ''}>" in printed


def test_recorded_figures_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "results")
    monkeypatch.setenv("GPU_CHECK_COPY", str(tmp_path / "out"))
    for name, figures in (("one", [1.5]), ("two", 2)):
        kept.keep("errors", name, figures)
        text = (tmp_path / "out" / "errors.json").read_text()
        assert text == (tmp_path / "results" / "errors.json").read_text() and json.loads(text)[name] == figures
    assert json.loads(text) == {"measured on": {"device": "none: a rehearsal"}, "one": [1.5], "two": 2}


def test_every_part_has_a_time_limit(machine: Path) -> None:
    """Every part ends within eight minutes. SIGKILL enforces this, because a hung driver call ignores other signals."""
    lines = re.findall(r"^(gpu-[a-z- ]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    parts = {part for line in lines for part in line.split()} - {*COLLECTIONS, "gpu-here"}
    assert len(parts) == 17
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
def test_functions_of_processes_run(entry: str, tmp_path: Path) -> None:
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


# --- the functions of the GPU checks of memory, run on the CPU over the simulated library ----------------------------


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

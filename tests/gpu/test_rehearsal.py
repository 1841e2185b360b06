"""A rehearsal of the GPU checks on the CPU, over gloo or simulated libraries, and checks of their make targets."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
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
from tests.gpu import first_launches, kept
from tests.gpu import test_lifetimes as lifetimes
from tests.gpu import test_processes as processes
from tests.gpu.processes import in_order
from tests.gpu.test_loopback import bytes_of_every_size, nothing
from tests.transport.nccl_rings import on_rings, open_on, results
from tests.transport.simulated.device import SimDevice, span
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import SimWorld

ROOT = Path(__file__).resolve().parents[2]
COLLECTIONS = ("gpu-first", "gpu-check-many")
"""The make targets that only run other targets."""
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('hydra', 'omegaconf', 'matplotlib'):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""
"""Hides packages that a GPU machine may lack. The plugins of pytest are disabled by its own switch."""


@pytest.mark.slow
def test_the_benchmarks_need_few_packages() -> None:
    """Each benchmark starts and reads its options without hydra."""
    pytest.importorskip("triton")
    program = (
        ABSENT
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
    """Make a folder with the Makefile, and a Python and an ncu that record their arguments.

    They fail if one of their arguments is a word of $FAILING.
    """
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("python", "ncu"):
        stub = tmp_path / name
        stub.write_text(
            f"""#!{sys.executable}
import json, os, sys
with open("commands", "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ.get("GPU_CHECK_COPY")]) + "\\n")
print("ran", sys.argv[-1])
sys.exit(any(word in sys.argv for word in os.environ.get("FAILING", "").split()))
"""
        )
        stub.chmod(0o755)
    return tmp_path


def run_make(machine: Path, target: str, failing: str = "", timeout_s: float = 60) -> tuple[int, str, list[list[str]]]:
    """Run make. Return the exit status, the output, and the arguments of each command, except queries for a device."""
    command = ["make", "--no-print-directory", target, f"PYTHON={machine / 'python'}", f"OUT={machine / 'out'}"]
    environment = {**os.environ, "FAILING": failing, "PATH": f"{machine}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=machine, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    records = [json.loads(line) for line in (machine / "commands").read_text().splitlines()]
    folder = "build/gpu-first" if target == "gpu-first" else str(machine / "out")
    assert all(copy in (folder, None) for arguments, copy in records if arguments[0] != "-c")
    return done.returncode, done.stdout + done.stderr, [arguments for arguments, _ in records if arguments[0] != "-c"]


FIRST = ("launches", "environment", "first", "kernels", "nccl-alone", "speed", "ncu", "nccl-processes", "speed-short")
"""The parts of `make gpu-first`, in order."""


@pytest.mark.parametrize("failing", ["", "-m"], ids=["all pass", "all fail"])
def test_every_part_of_gpu_first_is_run_in_order(failing: str, machine: Path) -> None:
    """A part that fails is reported and stops no other. The folder OUT has one file, with the logs of all parts."""
    status, printed, commands = run_make(machine, "gpu-first", failing)
    assert (status != 0) == bool(failing)
    assert tuple(re.findall(r"^\[\d+ s\] ([a-z-]+)$", printed, re.MULTILINE)) == (*FIRST, "end")
    assert commands[0] == ["-m", "tests.gpu.first_launches"]
    assert sorted(commands[1:3]) == [["-m", "pytest", "-VV"], ["-m", "ringattn", "doctor"]]
    tests = [command for command in commands if command[1] == "tests.gpu.restarts"]
    files = [[Path(word).stem.removeprefix("test_") for word in command if word.endswith(".py")] for command in tests]
    assert sorted(files[:14]) == [
        *12 * [["engines", "kernels", "rows", "adapters"]],
        *2 * [["first_launches", "gluon"]],
    ]
    assert files[14:] == [["lifetimes"], ["peer_driver"], ["loopback"], *6 * [["processes", "peer"]]]
    for first, last, shares in ((0, 14, [12, 2]), (17, 20, [3]), (20, 22, [2])):
        chosen = [word for command in tests[first:last] for word in command if word.startswith("--part=")]
        assert sorted(chosen) == sorted(f"--part={part}/{count}" for count in shares for part in range(1, count + 1))
    assert len({command[2] for command in tests}) == len(tests)  # the records of started tests
    profiled = [command for command in commands if "--clock-control" in command]
    assert [command[-2:] for command in profiled] == [
        [f"gluon/{kernel}/128", "tokens=8192"] for kernel in ("forward", "grad_kv")
    ]
    benchmarks = [command[2:] for command in commands if command[1] == "ringattn.bench.kernels"]
    with tarfile.open(machine / "out" / "gpu-first.tar.gz") as packed:
        logs = [name for name in packed.getnames() if name.endswith(".log")]
    assert len(logs) == len(commands) - len(benchmarks) and len(list((machine / "out").iterdir())) == 1
    pytest.importorskip("triton")
    from ringattn.bench.kernels import KernelJobsOptions

    chosen = [parse(KernelJobsOptions(), command) for command in benchmarks]
    assert [config.file for config in chosen] == ["kernels_first", "kernels", "kernels_short"]
    assert chosen[0].tokens == (8192,) and chosen[1].only == chosen[2].only == ("cudnn", "gluon", "fa3", "descriptors")


@pytest.mark.parametrize("part", ["tune", "qkv", "speed-all", "sanitizer"])
def test_other_parts_have_valid_options(part: str, machine: Path) -> None:
    pytest.importorskip("triton")
    status, _, ((_, module, *options),) = run_make(machine, f"gpu-check-{part}")
    assert status == 0
    if part != "sanitizer":
        names = vars(import_module(module))
        config = parse(next(value for name, value in names.items() if name.endswith("Options"))(), options)
        assert config.budget_s <= 420 and not getattr(config, "write", False)


@pytest.mark.slow
def test_the_commands_of_gpu_first_need_few_packages(machine: Path) -> None:
    """One command of each kind of tests runs as it is, without plugins. No test runs, because there is no GPU."""
    for name in ("tests", "ringattn", "kernels", "launch", "bench", "pyproject.toml"):
        (machine / name).symlink_to(ROOT / name)
    (machine / "absent").mkdir()
    (machine / "absent" / "sitecustomize.py").write_text(ABSENT)
    kinds = ("kernels-1", "gluon-1", "loopback", "captures")
    with (machine / "python").open("a") as stub:
        stub.write(
            f"""
if any(word in {[f"build/gpu-{kind}.started" for kind in kinds]} for word in sys.argv):
    os.environ |= {{"PYTHONPATH": "absent:.", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}}
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""
        )
    text = (machine / "python").read_text()
    (machine / "python").write_text(text.replace("sys.exit(any(", "failed = (any("))
    run_make(machine, "gpu-first", timeout_s=250)
    for kind in kinds:
        log = (machine / "build" / "gpu-first" / f"gpu-{kind}.log").read_text()
        assert re.search(r"^=+ [1-9]\d* skipped", log, re.MULTILINE) and "\nERROR" not in log, log


HANGING = """
import time
def test_a(): pass
def test_b(): time.sleep(60)
def test_c(): assert False, "the reason"
def test_d(): pass
"""


@pytest.mark.slow
def test_a_hung_test_loses_only_its_own_result(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ["-v", "-c", os.devnull, "--rootdir", str(tmp_path), "--limit=2", str(tmp_path / "test_hanging.py")]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "tests.gpu.restarts", str(tmp_path / "record"), *options]
    done = subprocess.run(command, env=bare, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Timeout (0:00:02)!" in done.stderr and "in test_b" in done.stderr
    assert "HUNG or died with status 1: test_hanging.py::test_b" in done.stdout
    outcomes = re.findall(r"::(test_\w) (PASSED|FAILED)", done.stdout)
    assert outcomes == [("test_a", "PASSED"), ("test_c", "FAILED"), ("test_d", "PASSED")]


@pytest.mark.slow
def test_first_launches_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The launches that begin `make gpu-first` are right in simulations, for two heads. A failed one is reported."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("gluon/forward/64", "gluon/grad_q/64", "gluon/grad_kv/64", "descriptors/grad_fused/128"):
        command = [sys.executable, "-m", "tests.gpu.first_launches", name, "heads=2"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0 and done.stdout.startswith(f"{name}: passed"), done.stdout + done.stderr
    assert first_launches.run_all(["nothing/forward/64"], 60) == 1
    assert "FAILED: nothing/forward/64: " in capfd.readouterr().out
    assert first_launches.run_all(["gluon/forward/64"], 0.5) == 1
    assert "HUNG: gluon/forward/64 did not end within 0 s" in capfd.readouterr().out


def test_every_part_on_several_gpus_is_run_in_order(machine: Path) -> None:
    """`make gpu-check-many` runs each part as a separate command with valid options, and the common report last."""
    status, _, commands = run_make(machine, "gpu-check-many")
    assert status == 0 and [command[1] for command in commands] == ["ringattn.bench.many"] * 4 + [
        "tests.gpu.restarts",
        "ringattn.bench.many",
    ]
    chosen = [parse(ManyOptions(), command[2:]) for command in commands if command[1] != "tests.gpu.restarts"]
    assert [config.part for config in chosen] == [*PARTS, "report"] and all(
        config.budget_s + 20 <= 460 for config in chosen
    )
    assert commands[4][-1] == "tests/gpu/test_processes.py"


def test_every_file_that_a_part_names_exists() -> None:
    text = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"tests/gpu/test_[a-z_]+\.py", text)) - {"tests/gpu/test_"}
    loops = re.findall(r"for name in ([a-z_ ]+); do", text)
    named |= {f"tests/gpu/test_{name}.py" for names in loops for name in names.split()}
    unnamed = {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")} - named
    assert all((ROOT / name).exists() for name in named) and unnamed == {"tests/gpu/test_rehearsal.py"}


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
    assert parts >= {f"gpu-check-{part}" for part in FIRST} and len(parts) == 21
    for part in parts:
        shown = subprocess.run(["make", "-n", part], cwd=machine, capture_output=True, text=True, timeout=60).stdout
        limits = [int(limit) for limit in re.findall(r"timeout -k 10 (\d+) ", shown)]
        # Limits of commands that run after one another add up. A part with several shares of tests waits for each.
        repeats = 3 if part == "gpu-check-nccl-alone" else 2 if part == "gpu-check-ncu" else 1
        assert limits and repeats * (sum(limits) + 10 * len(limits)) <= 490, part
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

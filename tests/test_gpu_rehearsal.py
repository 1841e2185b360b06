"""The bodies of the GPU checks, run on CPU over the simulated library: what is proven is that they run, and bite."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from ringattn.transport.nccl.binding import CommConfig
from ringattn.transport.nccl.communicator import Communicator
from tests.gpu import test_processes as processes
from tests.gpu.loopback import LoopbackWorld
from tests.gpu.processes import in_order
from tests.gpu.test_loopback import bytes_of_every_size, every_schedule_is_exact, nothing
from tests.nccl_rings import on_rings, results
from tests.simulated.device import SimDevice
from tests.simulated.library import SimLibrary
from tests.simulated.world import SimWorld

ROOT = Path(__file__).resolve().parent.parent
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


def test_the_checks_need_little() -> None:
    # A GPU machine may have no network: torch, triton, cupy, numpy, pytest and rich are there, and no more.
    words = ["-q", "--collect-only", "-m", "gpu", "tests/test_gpu.py", "tests/gpu"]
    poor = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", POOR, *words], env=poor, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(collected) >= 50 and any("test_nccl_is_called_as_the_plan_says" in line for line in collected)


def test_bytes_of_every_size() -> None:
    world = SimWorld(1, any_memory=True)
    library, gpu = SimLibrary(world, 0), SimDevice(world, 0)
    lane = Communicator(library, gpu, 0, 1, CommConfig(), 20.0)
    lane.open(library.unique_id(), nothing)
    bytes_of_every_size(lane, gpu, (1, 4096, 70_000))
    assert world.violations == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_is_exact(ranks: int) -> None:
    world = SimWorld(1, any_memory=True)
    loop = LoopbackWorld(ranks, SimLibrary(world, 0), SimDevice(world, 0))
    sizes = every_schedule_is_exact(loop, "fp64", nullcontext)
    loop.end()
    assert world.violations == [] and max(sizes) >= 2 * ranks


def test_processes_are_exact(tmp_path: Path) -> None:
    processes.every_schedule_is_exact(tmp_path, 2, "fp64", "gloo")


def test_a_killed_process_is_named(tmp_path: Path) -> None:
    assert len(processes.a_lost_rank_is_named(tmp_path, "kill", 3, "gloo")) == 2


def test_the_library_is_called_as_the_plan_says() -> None:
    world = SimWorld(3)
    for rank, planned in enumerate(results(on_rings(world, in_order, ring={"engine": "plain"}))):
        called = [[call.op.title(), call.peer, call.nbytes] for call in world.calls(rank)]
        assert called[4:] == 2 * planned and len(planned) > 20

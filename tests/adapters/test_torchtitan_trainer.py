"""torchtitan's Trainer as it comes, over two and four processes that torchrun starts, against one: ten steps."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.hosts import ROOT, record
from tests.adapters.processes import run_program

pytest.importorskip("torchtitan", reason="needs torchtitan")
pytest.importorskip("spmd_types", reason="needs spmd_types, which torchtitan imports")

STEPS = 10
AT_TWO = ("plain", "packed", "full checkpointing", "partial_dtensor")
OF_THE_TABLE = {"plain": ("plain", "Trainer", "FSDP2"), "packed": ("packed", "checkpointing")}
"""Which modes of the table of hosts a case is of; checkpointing is torchtitan's default, SelectiveAC."""


def trained(folder: Path, ranks: int, *cases: str) -> dict[str, Any]:
    """By case, the loss and the norm of the gradients of each step; see torchtitan_train.py."""
    file = folder / f"{ranks}.json"
    script = [str(ROOT / "tests" / "adapters" / "torchtitan_train.py"), str(file), *cases]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run_program(*torchrun, *script, folder=folder)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process with torchtitan's own attention, and one that attends densely within each document."""
    return trained(tmp_path_factory.mktemp("alone"), 1, "torchtitan", "dense, packed")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, AT_TWO), (4, ("plain", "packed"))])
def test_ten_steps_over_a_ring_equal_one_process(
    alone: dict[str, Any], tmp_path: Path, ranks: int, cases: tuple[str, ...]
) -> None:
    found = trained(tmp_path, ranks, *cases)
    worst = {}
    for case, steps in found.items():
        expected = alone["torchtitan" if case == "plain" else "dense, packed"]
        assert len(steps) == len(expected) == STEPS
        pairs = [pair for step in zip(steps, expected, strict=True) for pair in zip(*step, strict=True)]
        worst[case] = max(abs(mine - theirs) / theirs for mine, theirs in pairs)
    assert max(worst.values()) < 1e-5, worst  # of float32
    for case, modes in OF_THE_TABLE.items():
        for mode in modes:
            words = "loss and norm of the gradients of ten steps of torchtitan's Trainer, float32, spmd_types"
            record("torchtitan", version("torchtitan"), mode, "exact", ranks=ranks, worst=worst[case], words=words)

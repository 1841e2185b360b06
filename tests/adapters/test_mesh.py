"""A ring on the `cp` dimension of a DeviceMesh beside FSDP2, DDP, tensor parallelism and activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn.launch.ranks import run_ranks_in_processes
from tests.adapters.hosts import record

CASES = ("with_fsdp", "with_ddp", "with_tensor_parallel", "with_context_parallel")


pytestmark = pytest.mark.slow  # four processes that import torch, FSDP and a model: 38 s


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """Of four processes, every case one after the other."""
    return run_ranks_in_processes("tests.adapters.mesh_entries:everything", {}, 4, 200.0, 1)


@pytest.mark.parametrize("again", ["", " again"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(answers: list[dict[str, Any]], case: str, again: str) -> None:
    """In float64, of every parameter, without recomputation and with it; the greatest gradient is 0.16."""
    for answer in answers:
        assert answer["greatest"] > 0.1
        assert answer["errors"][case + again] < 1e-10, answer["errors"]
    mode = "checkpointing" if again else {"with_fsdp": "FSDP2", "with_context_parallel": "plain"}.get(case)
    if mode is not None:
        worst = max(answer["errors"][case + again] / answer["greatest"] for answer in answers)
        words = "gradients under FSDP2, DDP, tensor parallelism and context_parallel, float64"
        record("PyTorch", torch.__version__.split("+")[0], mode, "exact", ranks=4, worst=worst, words=words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("replicated", ("UnsupportedError", "Replicate()", "takes Shard(1)")),
        ("tokens", ("UnsupportedError", "Shard(dim=2)", "takes Shard(1)")),
        ("mixed", ("InputError", "k is a Tensor and q is a DTensor")),
        ("uneven", ("InputError", "k has 3 heads over 2 ranks")),
        ("meshes", ("InputError", "k lies on", "all three need the same mesh")),
        ("mesh", ("InputError", "('dp', 'ring')", "needs one called cp")),
    ],
)
def test_other_meshes_and_placements_are_refused_by_name(
    answers: list[dict[str, Any]], given: str, words: tuple[str, ...]
) -> None:
    for answer in answers:
        assert all(word in answer["said"][given] for word in words), answer["said"]


def test_a_ring_that_context_parallel_opened_ends_with_the_process_group(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["open"] == [True, False]

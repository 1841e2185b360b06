"""transport="peer" between processes that may share a GPU: exact, never hanging, and refused in a graph capture.

The tests use the functions of `test_processes.py`, which `tests/gpu/test_rehearsal.py` runs over gloo. Other tests run
the protocol over a simulated driver (`tests/transport/test_peer*.py`) and over shared memory (`test_shm.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringattn.launch.measure.check import cases
from tests.gpu.kept import keep
from tests.gpu.processes import SIZES
from tests.gpu.test_processes import a_lost_rank_is_named, every_schedule_is_exact, run

pytestmark = pytest.mark.gpu


def test_messages_of_every_size(tmp_path: Path) -> None:
    answers = run(tmp_path, "sizes", 2, "peer")
    assert answers == [{"whole": [True] * len(SIZES)}] * 2
    keep("peer_processes", "messages of every size", list(SIZES))


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_schedule_is_exact(ranks: int, tmp_path: Path) -> None:
    every_schedule_is_exact(tmp_path, ranks, "fp64", "peer")
    keep("peer_processes", f"exact, fp64, {ranks} processes", len(list(cases())))


NODES = [0, 0, 1, 1]
"""The node that each of four processes reports. Copy engines connect the two pairs on a node, and NCCL the nodes."""


def test_every_schedule_is_exact_on_two_nodes(tmp_path: Path) -> None:
    every_schedule_is_exact(tmp_path, 4, "fp64", "peer", nodes=NODES)
    keep("peer_processes", "exact, fp64, 4 processes on two nodes", len(list(cases())))


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_lost_rank_is_named_on_two_nodes(kind: str, tmp_path: Path) -> None:
    seconds = a_lost_rank_is_named(tmp_path, kind, 4, "peer", nodes=NODES)
    keep("peer_processes", f"seconds to the named error, {kind}, two nodes", seconds)


def test_abort_frees_the_device(tmp_path: Path) -> None:
    """An abort frees a device whose stream waits for a word that no rank writes, by stores of the host."""
    answers = run(tmp_path, "abort", 2, "peer")
    assert answers[0]["device_free_s"] < 5.0
    assert "rank 0 failed first: ValueError: rank 0 gives up" in answers[1]["heard"]
    keep("peer_processes", "abort with a waiting exchange, s", answers[0])


@pytest.mark.parametrize("kind", ["kill", "stop", "stall"])
def test_a_lost_rank_is_named(kind: str, tmp_path: Path) -> None:
    keep("peer_processes", f"seconds to the named error, {kind}", a_lost_rank_is_named(tmp_path, kind, 3, "peer"))


def test_a_capture_is_refused(tmp_path: Path) -> None:
    """A graph capture is refused, and the ring still works afterwards.

    A graph would repeat the message numbers of one exchange at every replay.
    """
    for answer in run(tmp_path, "refused_capture", 2, "peer"):
        assert "transport='peer' cannot be captured into a CUDA graph" in answer["refused"] and answer["error"] < 1e-10
    keep("peer_processes", "a capture is refused", True)


def test_a_hop_during_computation(tmp_path: Path) -> None:
    """Record the microseconds of a hop, of an attention step, and of both at once, on GPUs that may be shared."""
    figures = run(tmp_path, "beside", 2, "peer")[0]
    keep("peer_processes", f"a hop beside a step, {torch.cuda.device_count()} GPUs", figures)

"""Rings of processes: exact for 1, 2 and 4 of them, and never hanging when one fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ringattn.launch.measure import check
from tests import process_entries
from tests.contract.processes import Processes
from tests.gpu.test_processes import every_schedule_is_exact

ROOT = Path(__file__).resolve().parent.parent


MASKS = ("full", "causal", "window", "documents", "dilated")


def start(entry: str, ranks: int, exits: int | None = None) -> list[dict | None]:
    """Run `process_entries.entry` in `ranks` processes; their answers by rank, None for the one that `exits`.

    This process hosts the store, as torchrun's agent does, so that no rank takes it away when it goes.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Processes(ranks) as started:
        answers = started.run(process_entries.lives, entry, store.port, exits=exits)
    return [answers.get(rank) for rank in range(ranks)]


# Over 2 and 3 processes it is in tests/transport/test_shm.py, over gloo in tests/gpu/test_rehearsal.py.


# Every mask in every layout with every schedule is tried over threads, in tests/test_exact.py.


@pytest.mark.slow
def test_check_is_exact_on_four_processes() -> None:
    words = "check dtype=fp32 transport=shm tokens=61 combinations=pairs verbose=true".split()
    done = subprocess.run(
        [sys.executable, "-m", "ringattn", *words], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("4 ranks over shm, 61 tokens, fp32")
    rows, tried = [line for line in done.stdout.splitlines() if line.startswith(MASKS)], len(list(check.paired_cases()))
    assert len(rows) == tried and f"{tried} cases, all exact" in done.stdout


@pytest.mark.slow
def test_check_is_exact_on_two_nodes(tmp_path: Path) -> None:
    # Shared memory for the first two processes, gloo to the third, opened as a user does.
    every_schedule_is_exact(tmp_path, 3, "fp64", "shm", pairs=True, nodes=[0, 0, 1])


# Rank 2 needs what rank 1 would have handed on; rank 0 does not, and may notice only in its next call.


def test_a_rank_that_exits_is_named_by_the_others() -> None:
    answers = start("exits_mid_pass", 3, exits=1)
    assert answers[1] is None
    for answer in (answers[0], answers[2]):
        assert answer is not None
        assert answer["first"]["kind"] == "PeerLostError", answer
        assert answer["first"]["seconds"] < 7
        assert answer["after"]["kind"] == "ClosedError"
        assert "rank 1 is gone" in answer["first"]["message"], answer
    assert answers[2] is not None and answers[2]["passes_completed"] == 0


@pytest.mark.slow
def test_a_rank_that_raises_is_the_cause_everywhere() -> None:
    answers = start("raises_mid_pass", 3)
    kinds = [answer and answer["first"]["kind"] for answer in answers]
    assert kinds == ["PeerLostError", "ValueError", "PeerLostError"]
    for answer in answers:
        assert answer is not None
        assert "the engine of rank 1 broke" in answer["first"]["message"]
        assert answer["after"]["kind"] == "ClosedError" and "the engine of rank 1 broke" in answer["after"]["message"]


@pytest.mark.slow
def test_a_rank_that_stalls_is_a_missed_deadline() -> None:
    answer = start("stalls_mid_pass", 3)[2]
    assert answer is not None
    first = answer["first"]
    assert first["kind"] == "DeadlineError" and 5 < first["seconds"] < 9, first
    for word in ("rank 1 is alive in 'forward step", "bytes", "forward step 1", "KV0"):
        assert word in first["message"], first


@pytest.mark.slow
def test_validation_in_inference_mode_leaves_no_trace_in_training() -> None:
    for answer in start("validates", 2):
        assert answer is not None and answer["alike"] and all(total > 1 for total in answer["sums"])


def test_ranks_that_disagree_all_refuse_and_go_on() -> None:
    for answer in start("disagrees", 3):
        assert answer is not None
        assert answer["first"]["kind"] == "DisagreementError"
        assert "rank 1" in answer["first"]["message"] and "41 tokens" in answer["first"]["message"]
        assert answer["after"]["kind"] == "nothing"

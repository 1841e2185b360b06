"""Real NCCL between processes that may share a GPU: exact results, calls in order, graph captures, and no hangs.

`tests/gpu/test_rehearsal.py` runs the same functions over gloo on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.bench.processes import run_torchrun
from ringattn.launch.measure.check import CheckConfig, cases, paired_cases
from ringattn.schedule.routes import NUMBERED
from tests.gpu.kept import keep
from tests.gpu.processes import OPENING_S, SIZES
from tests.transport.attribution import names_as_culprit

pytestmark = pytest.mark.gpu

DEADLINE_S = 10.0
GRACE_S = 2.0
SHARED_GRACE_S = 6.0
"""The time after the deadline that an error may take if ranks share a GPU. Each rank then also waits for the time
slices of the others, during the abort as well."""
JOB_S = 180.0
"""The time limit of a job. Four processes that share a GPU start one after another; pytest's limit is longer."""


def run(folder: Path, entry: str, ranks: int, transport: str = "nccl", **spec: Any) -> list[Any]:
    """Run the function `entry` of `tests.gpu.processes` on each rank. Return the answers, None for a lost rank."""
    job = folder / "job.json"
    job.write_text(json.dumps({"entry": entry, "transport": transport, "flights": str(folder / "flights"), **spec}))

    def wake() -> None:
        """Kill a stopped rank as soon as all others have answered."""
        note, answered = folder / "note.json", len(list(folder.glob("answer-*.json")))
        if spec.get("kind") == "stop" and note.exists() and answered == ranks - 1:
            with suppress(ProcessLookupError):
                os.kill(json.loads(note.read_text())["pid"], signal.SIGKILL)

    ended = run_torchrun(["-m", "tests.gpu.processes", str(job)], job, wake, ranks, job_s=JOB_S)
    files = [folder / f"answer-{rank}.json" for rank in range(ranks)]
    answers = [json.loads(file.read_text()) if file.exists() else None for file in files]
    failed = [answer["traceback"] for answer in answers if answer is not None and "traceback" in answer]
    missing = [rank for rank, answer in enumerate(answers) if answer is None and rank != spec.get("culprit")]
    print(ended.printed)
    assert not failed and not missing, "\n".join([*failed, f"no answer from ranks {missing}, see the output"])
    return answers


# --- functions that are rehearsed on the CPU -------------------------------------------------------------------------


def every_schedule_is_exact(
    folder: Path, ranks: int, dtype: str, transport: str = "nccl", pairs: bool = False, **more: Any
) -> None:
    spec = CheckConfig(transport=transport, dtype=dtype, engine="plain", tokens=61, timeout_s=OPENING_S)
    spec.combinations = "pairs" if pairs else "all"
    answers = run(folder, "exact", ranks, transport, check=vars(spec), **more)
    # A double ring needs the same number of ranks on each node.
    unlike = len(set(Counter(more.get("nodes", ())).values())) > 1
    tried = [case for case in (paired_cases() if pairs else cases()) if not (unlike and case.schedule in NUMBERED)]
    assert [(answer["cases"], answer["failed"]) for answer in answers] == [(len(tried), 0)] * ranks


def a_lost_rank_is_named(folder: Path, kind: str, ranks: int, transport: str = "nccl", **more: Any) -> dict[str, Any]:
    """Check that each surviving rank names the lost rank in time. Return the seconds from the fault to each error."""
    culprit, note = 1, folder / "note.json"
    answers = run(
        folder, "fault", ranks, transport, kind=kind, culprit=culprit, note=str(note), timeout_s=DEADLINE_S, **more
    )  # fmt: skip
    happened_s = json.loads(note.read_text())["at_s"]
    seconds = {}
    for rank in set(range(ranks)) - {culprit}:
        answer = answers[rank]
        assert answer is not None, f"rank {rank} gave no answer"
        assert names_as_culprit(culprit, answer["message"]) and answer["kind"] != "ClosedError", answer
        seconds[f"rank {rank}, {answer['kind']}"] = round(answer["at_s"] - happened_s, 2)
    shared = transport in ("nccl", "peer") and torch.cuda.device_count() < ranks
    assert max(seconds.values()) <= DEADLINE_S + (SHARED_GRACE_S if shared else GRACE_S), seconds
    return seconds


# --- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_is_exact(ranks: int, tmp_path: Path) -> None:
    every_schedule_is_exact(tmp_path, ranks, "fp64")
    keep("nccl_processes", f"exact, fp64, {ranks} processes", len(list(cases())))


def test_messages_of_every_size(tmp_path: Path) -> None:
    answers = run(tmp_path, "sizes", 2)
    assert answers == [{"whole": [True] * len(SIZES)}] * 2
    keep("nccl_processes", "messages of every size", list(SIZES))


def test_nccl_is_called_as_the_plan_says(tmp_path: Path) -> None:
    for rank, answer in enumerate(run(tmp_path, "order", 3, log=str(tmp_path / "nccl"))):
        warm_up = answer["called"][:4]
        assert sorted(call[0] for call in warm_up) == ["Recv", "Recv", "Send", "Send"], answer
        assert answer["called"][4:] == 2 * answer["planned"], f"rank {rank}"
        keep("nccl_processes", f"call order equals the plan, rank {rank}", len(answer["planned"]))


@pytest.mark.parametrize("kind", ["kill", "stop", "stall"])
def test_a_lost_rank_is_named(kind: str, tmp_path: Path) -> None:
    keep("nccl_processes", f"seconds to the named error, {kind}", a_lost_rank_is_named(tmp_path, kind, 3))


def test_abort_frees_the_device(tmp_path: Path) -> None:
    answers = run(tmp_path, "abort", 2)
    assert answers[0]["device_free_s"] < 10.0
    assert "rank 0 failed first: ValueError: rank 0 gives up" in answers[1]["heard"]
    keep("nccl_processes", "abort with a waiting exchange, s", answers[0])


def test_all_gpus_of_this_machine(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("this machine has one GPU; with several, one rank runs on each")
    every_schedule_is_exact(tmp_path, count, "bf16")
    keep("nccl_processes", f"exact, bf16, one rank on each of {count} GPUs", len(list(cases())))


# This test is the last, because a capture with NCCL's proxy for sockets is the most likely to hang.
@pytest.mark.parametrize("blocking", [False, True], ids=["nonblocking", "blocking"])
def test_a_pass_is_captured_and_replayed(blocking: bool, tmp_path: Path) -> None:
    answers = run(tmp_path, "graph", 2, blocking=blocking)
    assert all(max(answer["errors"]) < 1e-10 for answer in answers), answers
    name = "blocking" if blocking else "non-blocking"
    keep("nccl_processes", f"captured pass replayed, {name}, ms", [answer["replay_ms"] for answer in answers])

"""Faults of processes that torchrun really started: who is named, how soon, and that nothing is left behind."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ringattn.bench import faults
from ringattn.bench.fault_ranks import FATAL, KINDS, Fault
from ringattn.bench.faults import FaultsOptions, Outcome, judged, named, run_job, run_torchrun, script, tabulate
from ringattn.errors import RingError
from tests.transport.fault_entries import POISON

pytestmark = pytest.mark.alone

DEADLINE_S = 4.0


def assert_named(outcomes: list[Outcome], kinds: dict[str, set[str]]) -> None:
    """Each fault was named by both survivors, with an error of the kinds that belong to it."""
    for outcome in outcomes:
        assert outcome.complaints == []
        assert sorted(outcome.seconds) == [rank for rank in range(3) if rank != outcome.fault.rank]
        assert set(outcome.errors.values()) <= kinds[outcome.fault.kind], outcome


@pytest.mark.slow
def test_refusals_and_disagreements_are_named_and_survived() -> None:
    outcomes = run_job([Fault("refuse", 1), Fault("shape", 2), Fault("plan", 0)], DEADLINE_S)
    assert len(outcomes) == 3
    disagreement = {"DisagreementError"}
    assert_named(outcomes, {"refuse": {"InputError"}, "shape": disagreement, "plan": disagreement})


@pytest.mark.slow
def test_a_killed_rank_is_named() -> None:
    outcomes = run_job([Fault("kill", 2, hop=0)], DEADLINE_S)
    assert_named(outcomes, {"kill": {"PeerLostError"}})
    assert max(outcomes[0].seconds.values()) < DEADLINE_S  # a lost connection needs no deadline


@pytest.mark.slow
def test_a_stopped_rank_is_named() -> None:
    start = time.monotonic()
    assert_named(run_job([Fault("stop", 1, hop=2)], DEADLINE_S), {"stop": {"DeadlineError", "PeerLostError"}})
    # Torchrun waits that long before it kills a rank that SIGTERM does not reach.
    assert time.monotonic() - start < 30.0 + DEADLINE_S


@pytest.mark.slow
def test_a_restarted_job_opens_cleanly(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.touch()
    ended = run_torchrun(
        ["-m", "tests.transport.fault_entries", str(job)], job, lambda: None, ranks=2, more=["--max-restarts=1"]
    )
    assert ended.code == 0, ended.printed
    assert len(list(tmp_path.glob("poisoned-*"))) == 2
    for rank in range(2):
        assert json.loads((tmp_path / f"answer-{rank}.json").read_text()) == {
            "life": 1, "former": list(POISON.values()), "own": True, "cause": None, "closed": [False, False]
        }  # fmt: skip


LEAVES_A_CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", *sys.argv[1:]], start_new_session=True)
"""


def test_a_process_left_behind_is_ended_and_is_an_error(tmp_path: Path) -> None:
    program, job = tmp_path / "program.py", tmp_path / "job.json"
    program.write_text(LEAVES_A_CHILD)
    with pytest.raises(RingError, match=r"processes \[\d+\] outlived torchrun"):
        run_torchrun([str(program), str(job)], job, lambda: None, ranks=1)
    assert faults.processes_of(job) == []


# --- the judge -------------------------------------------------------------------------------------------------------


def answer(message: str, at_s: float = 11.0, **more: object) -> dict[str, object]:
    return {"kind": "PeerLostError", "message": message, "at_s": at_s, **more}


def test_the_judge_is_strict() -> None:
    good, fault = "recv from rank 2: rank 1 is gone (reset)", Fault("kill", 1)

    def complaints(*answers: dict[str, object]) -> list[str]:
        return judged(fault, 10.0, dict(zip((0, 2), answers, strict=False)), 4.0).complaints

    assert complaints(answer(good), answer("x; rank 1 is silent (stopped, stuck or gone)")) == []
    assert "rank 2 gave no answer" in complaints(answer(good))
    assert complaints(answer(good), answer(good, at_s=16.5)) == ["rank 2 took 6.50 s"]
    assert "rank 2 blames [2]" in complaints(answer(good), answer("rank 2 is gone"))[0]
    assert "rank 2 blames [0, 1]" in complaints(answer(good), answer("rank 1 is gone; rank 0 is silent"))[0]
    assert "rank 2 blames []" in complaints(answer(good), answer("rank 1 failed first"))[0]
    fault = Fault("refuse", 1)
    refused = "rank 1 refused the call, so all ranks do"
    assert complaints(answer(refused), answer(refused, works_on=False)) == ["rank 2: the ring is not exact afterwards"]


@pytest.mark.parametrize(
    ("asked", "blamed"), [("AAB", {2}), ("BAA", {0}), ("AAA", set()), ("ABC", {0, 1, 2})]
)  # fmt: skip
def test_the_odd_one_out_is_to_blame(asked: str, blamed: set[int]) -> None:
    listed = "\n".join(f"  rank {rank}: call 2: {words}" for rank, words in enumerate(asked))
    assert named("plan", f"the ranks do not ask for the same:\n{listed}") == blamed


def test_the_script_varies_ranks_and_hops() -> None:
    faults_ = script(20)
    assert [fault.kind for fault in faults_] == list(KINDS) * 4
    for kind in KINDS:
        assert {fault.rank for fault in faults_ if fault.kind == kind} == {0, 1, 2}
    assert {fault.hop for fault in faults_ if fault.kind in FATAL} == {0, 1, 2, 3}
    jobs = faults.jobs_of(faults_)
    assert sorted(map(len, jobs)) == [1] * 8 + [12]
    assert sorted((f for job in jobs for f in job), key=str) == sorted(faults_, key=str)


def test_a_missed_bar_is_said() -> None:
    good, bad = Outcome(Fault("kill", 1)), Outcome(Fault("stop", 2), complaints=["rank 0 took 9.00 s"])
    assert "2 of 2" in tabulate(FaultsOptions(), [good, good]).markdown()
    page = tabulate(FaultsOptions(), [good, bad]).markdown()
    assert "1 of 2" in page and "The bar is all of them: MISSED" in page and "rank 0 took 9.00 s" in page

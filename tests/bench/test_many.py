"""The benchmark of several GPUs, rehearsed over gloo: that every part runs, gates, and is kept and reported."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn.bench import many, many_ranks
from ringattn.bench.many import PARTS, ManyOptions, cases_of, measure
from ringattn.bench.processes import Ended
from ringattn.errors import InputError
from ringattn.ring import Ring
from ringattn.transport.nccl.options import NcclOptions
from tests.transport.nccl_rings import on_rings, results
from tests.transport.simulated.world import SimWorld

SMALL = (
    "ranks=2", "transports=gloo", "engines=plain", "bytes=4096,65536", "rows=64", "tokens=128", "heads=2",
    "kv_heads=1", "head_dim=16", "dtype=float32", "count=2", "cycles=2",
)  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_every_case_can_be_asked_for(part: str) -> None:
    """What is measured first is what a ring takes by itself, of every transport; no case is asked for twice."""
    cases = list(cases_of(ManyOptions(part=part)))
    assert [case["transport"] for case in cases if not case["nccl"]][:2] in (["nccl", "peer"], ["nccl", "nccl"])
    first_varied = next((at for at, case in enumerate(cases) if case["nccl"]), len(cases))
    assert not any(not case["nccl"] for case in cases[first_varied:])
    assert len({json.dumps(case) for case in cases}) == len(cases)
    chosen = [NcclOptions(**case["nccl"]) for case in cases if case["nccl"]]
    if part in ("hops", "overlap"):
        assert {one.sm_margin for one in chosen} >= {0, 4, 8, 16} and {one.cga_cluster_size for one in chosen} >= {1, 4}
    if part == "hops":
        assert any(not one.register for one in chosen) and any(one.blocking for one in chosen)
    if part == "ring":
        assert {case["kind"] for case in cases} == {"ring", "fsdp"}
    if part == "life":
        assert {case["kind"] for case in cases} == {"life", "abort"} and cases[0]["cycles"] == 20


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for words, says in (
        (["part=hop"], "part=hop: choose one of hops, overlap, ring, life, report"),
        (["ranks=1"], "ranks=1: .* takes two GPUs"),
        (["part=report", f"results={tmp_path}"], "no part has been measured there"),
    ):
        with pytest.raises(InputError, match=says):
            many.main(words)


def ranks_that(monkeypatch: pytest.MonkeyPatch, answers: list[dict[int, dict[str, Any]]]) -> list[int]:
    """In the place of torchrun: of each start, the answers of both ranks by case; how many cases each was given."""
    given: list[int] = []

    def run(program: list[str], job: Path, meanwhile: Any, ranks: int, job_s: float) -> Ended:
        given.append(len(json.loads(job.read_text())))
        for case, answer in answers[len(given) - 1].items():
            for rank in range(ranks):
                (job.parent / f"answer-{case}-{rank}.json").write_text(json.dumps(answer))
            meanwhile()
        return Ended(3, "the last words")

    monkeypatch.setattr(many, "run_torchrun", run)
    return given


def test_a_case_that_fails_costs_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad, refused = {"x": 1}, {"failed": "ArithmeticError"}, {"failed": "no fa3", "goes on": True}
    given = ranks_that(monkeypatch, [{0: good, 1: bad}, {0: refused, 1: good}, {0: good}])
    found: list[Any] = []
    measure([{"n": n} for n in range(6)], 2, ManyOptions(), lambda case, answer: found.append((case["n"], answer)))
    died = {"failed": "its processes ended with exit code 3: the last words"}
    assert found == [(0, good), (1, bad), (2, refused), (3, good), (4, died), (5, good)]
    assert given == [6, 4, 1]


def test_what_the_budget_leaves_no_time_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Ended:
        raise AssertionError("started")

    monkeypatch.setattr(many, "run_torchrun", run)
    found: list[Any] = []
    measure([{"n": 0}, {"n": 1}], 2, ManyOptions(budget_s=-1.0), lambda case, answer: found.append(answer["failed"]))
    assert found == ["not tried: the -1 s of budget_s are spent"] * 2


@pytest.mark.slow
def test_every_part_runs_and_is_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in PARTS:
        many.main([*SMALL, f"part={part}", f"results={tmp_path}"])
        kept = json.loads((tmp_path / f"many_{part}.json").read_text())
        assert kept["complete"] and not [case for case in kept["cases"] if "failed" in case["found"]], kept
    many.main(["part=report", f"results={tmp_path}"])
    assert "not measured: faults" in (tmp_path / "many.md").read_text()
    kept = {"measured on": {"device": "2 x GPU"}, "seconds to the named error, stop": {"rank 0": 11.2}, "other": [1]}
    (tmp_path / "nccl_processes.json").write_text(json.dumps(kept))
    capsys.readouterr()
    many.main(["part=report", f"results={tmp_path}"])
    page = (tmp_path / "many.md").read_text()
    assert re.search(r"nccl +\| 2 x GPU +\| seconds to the named error, stop +\| rank 0: 11\.2", page)
    titles = ("A hop, GB/s", "A hop beside", "A causal pass", "A training step", "Openings", "An abort", "Faults")
    assert all(f"### {title}" in page for title in titles) and "not measured" not in page
    assert page in capsys.readouterr().out


@pytest.mark.slow
def test_dead_hanging_and_wrong_ranks_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs its own figures, and what comes after is measured by new processes."""
    monkeypatch.setattr(many, "PROGRAM", "tests.bench.many_faulty")
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("RINGATTN_TEST_HANGS", str(hangs))
    # Nobody waits: the limit, in which a busy machine starts its processes, is over as soon as one hangs.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0 * hangs.exists())
    monkeypatch.setattr(many, "time", clock)
    found: dict[int, dict[str, Any]] = {}
    cases = [{"kind": "hop", "transport": "gloo", "nccl": {}, "bytes": [n], "count": 1} for n in (4, 1, 2, 3, 64)]
    measure(cases, 2, ManyOptions(limit_s=150.0), lambda case, answer: found.update({case["bytes"][0]: answer}))
    assert found[4] == {"failed": "UnsupportedError: no such transport", "goes on": True}
    assert "exit code 1" in found[1]["failed"] and found[2]["failed"].startswith("no answer within 150 s")
    assert found[3] == {"failed": "ArithmeticError: a wrong byte"} and found[64]["64"]["us"] > 0


def test_every_choice_of_nccl_hops_over_the_simulated_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of a hop and of an overlap, on a ring opened with what each case asks for."""
    cases = [case for case in cases_of(ManyOptions(transports=("nccl",))) if case["kind"] == "hop"]
    assert len(cases) == 11
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 8, "rows": 16, "dtype": "float32", "count": 2}
    local = threading.local()
    monkeypatch.setattr(many_ranks, "opened", lambda case: nullcontext(local.ring))

    def body(ring: Ring) -> tuple[Any, Any]:
        local.ring = ring
        hops = many_ranks.hop({"kind": "hop", "bytes": [256, 4096], "count": 2})
        return hops, many_ranks.overlap({"kind": "overlap", **shape})

    for case in cases:
        world = SimWorld(2, any_memory=True)
        answers = results(on_rings(world, body, ring={"engine": "plain"}, options=NcclOptions(**case["nccl"])))
        assert world.violations == []
        for hops, both in answers:
            assert set(hops) == {"256", "4096"} and all(of["us"] > 0 for of in hops.values()) and both["both_us"] > 0

"""`ringattn sweep`: which points, what is kept of them, what is refused, what goes on after a kill.

Points are measured by a stand-in, but for the last test, which starts processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringattn.errors import RingError
from ringattn.launch.calls import RunConfig, load_run, plain, words_of
from ringattn.launch.measure import sweep
from ringattn.launch.measure.points import (
    ARRIVALS,
    MEASURED,
    STATUSES,
    Folder,
    hash_of,
    leave,
    make_record,
    opened,
    read_points,
)
from ringattn.launch.processes import RanksError

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "hash", "status", "message", "config", "started", "wall_s", "environment", "commit", "world_size", "tokens",
    "command", *MEASURED,
}  # fmt: skip


def facts(config: RunConfig) -> dict[str, Any]:
    """What `point.measure` would say."""
    spread = {"median": 1.5, "p10": 1.0, "p90": 2.0, "samples": config.repeats}
    ranks = [0] * config.world_size
    return {
        **dict.fromkeys(MEASURED), "forward_ms": spread, "backward_ms": spread, "tokens_per_s": 1e3,
        "peak_bytes": ranks, "environment": {"torch": "2", "ranks": config.world_size},
    }  # fmt: skip


class StandIn:
    """Takes the place of the ranks; `answer` may raise."""

    def __init__(self) -> None:
        self.ran: list[RunConfig] = []
        self.answer: Callable[[RunConfig], dict[str, Any]] = facts

    def __call__(self, config: RunConfig, place: object, quiet: bool) -> dict[str, Any]:
        self.ran.append(config)
        return self.answer(config)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(sweep, "run_here", stand_in)
    return stand_in


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]


def swept(folder: Path, *words: str) -> int:
    return sweep.main([f"out='{folder}'", *words])


TWO_BY_TWO = "ranks=1,2", "schedule=ring,all_gather", "tokens=64"


# --- points ----------------------------------------------------------------------------------------------------------


def test_every_combination_is_a_line(ranks: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a=folder, (two)"  # Hydra's grammar gives all of these a meaning
    assert swept(folder, *TWO_BY_TWO) == 0
    found = lines(folder)
    combinations = [(1, "all_gather"), (2, "ring"), (2, "all_gather")]  # one rank has no schedule to speak of
    assert [(one["world_size"], one["config"]["schedule"]) for one in found] == combinations
    environments = json.loads((folder / "environments.json").read_text())
    for one, config in zip(found, ranks.ran, strict=True):
        assert set(one) == KEYS and one["status"] == "ok" and one["tokens"] == 64
        assert one["hash"] == hash_of(config) == hash_of(load_run(one["command"].split()[2:]))
        assert environments[one["environment"]] == {"torch": "2", "ranks": config.world_size}
    assert len(environments) == 2
    printed = capsys.readouterr().out
    assert "3/3  ok      ranks=2 schedule=all_gather  forward 1.500 ms  about 0 s left" in printed
    assert "3 of 3 points are ok" in printed
    assert "the same work, run once: ranks=1, with schedule=ring; schedule=all_gather" in printed
    assert not list(tmp_path.glob("multirun")) and not (ROOT / "multirun").exists()


@pytest.mark.slow
def test_masks_layouts_and_dtypes_are_axes_too(ranks: StandIn, tmp_path: Path) -> None:
    words = ["ranks=2", "window=[9,0],[99,0]", "dtype=fp32,bf16", "layout=zigzag,striped"]
    assert swept(tmp_path / "a", *words) == 0
    assert len({hash_of(config) for config in ranks.ran}) == 8
    assert swept(tmp_path / "b", "causal=true,false", "mask=null,chunked:5", "repeats=1") == 0
    assert [(config.causal, config.mask) for config in ranks.ran[8:]] == [
        (True, None), (True, "chunked:5"), (False, None), (False, "chunked:5")
    ]  # fmt: skip


def test_points_that_come_out_equal_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, points = sweep.described(["ranks=1,2", "schedule=ring,direct", "tokens=512"])
    assert [point.label for point in points] == ["ranks=1", "ranks=2 schedule=ring", "ranks=2 schedule=direct"]
    assert sweep.equal_points(points) == ["the same work, run once: ranks=1, with schedule=ring; schedule=direct"]
    again = load_run(words_of(points[0].config))  # what repeats a point has no word without effect
    assert plain(points[0].config) == plain(again)


def test_one_rank_alone_has_nothing_between_ranks() -> None:
    words = [
        "ranks=1,2",
        "schedule=ring,direct",
        "transport=gloo,shm",
        "layout=zigzag,striped",
        "dtype=fp32,fp64",
        "tokens=64",
    ]
    _, points = sweep.described(words)
    alone = [point for point in points if point.config.world_size == 1]
    assert [point.label for point in alone] == ["ranks=1 dtype=fp32", "ranks=1 dtype=fp64"]
    assert len(points) == 2 + 16 and all(len(point.equal) == 8 for point in alone)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["preset=strong"], [(1, 8192), (2, 8192), (4, 8192)]),
        (["preset=weak"], [(1, 4096), (2, 8192), (4, 16384)]),
        (["preset=weak", "ranks=2,3", "tokens_per_rank=10"], [(2, 20), (3, 30)]),
        (["preset=weak", "ranks=2,3", "tokens=60"], [(2, 60), (3, 60)]),
    ],
)
def test_presets(words: list[str], sizes: list[tuple[int, int]]) -> None:
    _, points = sweep.described(words)
    assert [(point.config.world_size, point.config.tokens) for point in points] == sizes


def test_a_rank_has_as_many_threads_in_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    _, points = sweep.described(["ranks=1,2,4"])
    assert [point.config.threads_per_rank for point in points] == [4, 4, 4]
    _, points = sweep.described(["ranks=1,4", "threads_per_rank=2"])
    assert [point.config.threads_per_rank for point in points] == [2, 2]
    _, points = sweep.described(["ranks=1,4", "launcher=slurm"])  # the nodes may have other processors
    assert [point.config.threads_per_rank for point in points] == [None, None]


def test_the_hash_is_of_what_may_change_the_result() -> None:
    base = load_run(["tokens=64"])
    for word in ("limit_s=9", "rdzv_endpoint=a:1"):
        assert hash_of(load_run(["tokens=64", word])) == hash_of(base)
    for word in ("seed=1", "causal=false", "timeout_s=9", "nnodes=2", "repeats=3"):
        assert hash_of(load_run(["tokens=64", word])) != hash_of(base)
    assert len(hash_of(base)) == 12 and hash_of(load_run(["tokens_per_rank=64"])) != hash_of(base)


# --- failures are results --------------------------------------------------------------------------------------------


def test_a_point_that_fails_leaves_the_others(
    ranks: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {1: RanksError("no memory", "OutOfMemoryError"), 2: RanksError("too slow", "timeout"), 3: RingError("odd")}

    def answer(config: RunConfig) -> dict[str, Any]:
        if config.world_size in ends:
            raise ends[config.world_size]
        return facts(config)

    ranks.answer = answer
    assert swept(tmp_path, "ranks=1,2,3,4", "tokens=64") == 1
    found = lines(tmp_path)
    assert [(one["status"], one["message"]) for one in found] == [
        ("oom", "no memory"), ("timeout", "too slow"), ("error", "odd"), ("ok", "")
    ]  # fmt: skip
    assert {one["status"] for one in found} == set(STATUSES)
    assert all(set(one) == KEYS for one in found) and found[0]["forward_ms"] is None
    assert "1 of 4 points are ok" in capsys.readouterr().out

    ranks.answer = facts
    assert swept(tmp_path, "ranks=1,2,3,4", "tokens=64") == 0
    assert [config.world_size for config in ranks.ran[4:]] == [1, 2, 3]  # the failed ones alone
    assert {one["status"] for one in read_points(tmp_path).values()} == {"ok"}


def test_a_job_that_dies_is_a_point_that_failed(ranks: StandIn, tmp_path: Path) -> None:
    def answer(config: RunConfig) -> dict[str, Any]:
        if config.world_size == 1:
            raise ZeroDivisionError("planted")
        return facts(config)

    ranks.answer = answer
    assert swept(tmp_path, "ranks=1,2", "tokens=64") == 1
    assert [one["status"] for one in lines(tmp_path)] == ["error", "ok"]
    assert "ZeroDivisionError('planted')" == lines(tmp_path)[0]["message"]


# --- resume ----------------------------------------------------------------------------------------------------------


def test_a_stopped_sweep_goes_on_where_it_stopped(ranks: StandIn, tmp_path: Path) -> None:
    def answer(config: RunConfig) -> dict[str, Any]:
        if len(ranks.ran) == 2:
            raise KeyboardInterrupt
        return facts(config)

    ranks.answer = answer
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, *TWO_BY_TWO)
    assert len(lines(tmp_path)) == 1
    ranks.answer = facts
    other_order = "tokens=64", "schedule=all_gather,ring", "ranks=2,1"
    assert swept(tmp_path, *other_order) == 0
    assert len(ranks.ran) == 4 and len(read_points(tmp_path)) == len(lines(tmp_path)) == 3
    assert swept(tmp_path, *TWO_BY_TWO) == 0
    assert len(ranks.ran) == 4


def test_what_jobs_left_meanwhile_is_taken_in(ranks: StandIn, tmp_path: Path) -> None:
    assert swept(tmp_path, "ranks=1", "tokens=64") == 0
    left = lines(tmp_path)[0]
    (tmp_path / "points.jsonl").unlink()
    leave(tmp_path, {**left, "environment": {"torch": "2"}})
    assert swept(tmp_path, "ranks=1", "tokens=64") == 0
    assert len(ranks.ran) == 1 and lines(tmp_path)[0]["hash"] == left["hash"]


@pytest.mark.parametrize("last", [0, 1])
def test_records_are_taken_in_as_their_points_ended(tmp_path: Path, last: int) -> None:
    for number, name in enumerate("ab"):
        leave(tmp_path, {"hash": name, "environment": None})
        ended_s = 10**9 + (number == last)
        os.utime(tmp_path / ARRIVALS / f"{name}.json", (ended_s, ended_s))
    assert [one["hash"] for one in Folder(tmp_path).collect()][-1] == "ab"[last] == list(read_points(tmp_path))[-1]
    assert not list(Folder(tmp_path).collect())


def test_a_kill_before_a_taken_record_is_taken_away(ranks: StandIn, tmp_path: Path) -> None:
    assert swept(tmp_path, "ranks=1", "tokens=64") == 0
    kept = lines(tmp_path)
    leave(tmp_path, {**kept[0], "environment": facts(ranks.ran[0])["environment"]})
    assert swept(tmp_path, "ranks=1", "tokens=64") == 0
    assert lines(tmp_path) == kept and not list((tmp_path / ARRIVALS).iterdir())


def test_a_torn_line_is_passed_over(ranks: StandIn, tmp_path: Path) -> None:
    assert swept(tmp_path, *TWO_BY_TWO) == 0
    whole = (tmp_path / "points.jsonl").read_bytes()
    (tmp_path / "points.jsonl").write_bytes(whole[:-40])
    assert len(read_points(tmp_path)) == 2
    assert swept(tmp_path, *TWO_BY_TWO) == 0
    assert len(ranks.ran) == 4 and len(read_points(tmp_path)) == 3


@pytest.mark.parametrize(
    "more", [["tokens=128"], *(pytest.param([word], marks=pytest.mark.slow) for word in ("repeats=3", "ranks=1,2,4"))]
)
def test_another_sweep_is_not_mixed_in(
    ranks: StandIn, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(tmp_path, *TWO_BY_TWO) == 0
    assert swept(tmp_path, *TWO_BY_TWO, *more) == 2
    told = capsys.readouterr().err
    assert "holds the points of another sweep (" in told and "ranks=1,2 schedule=ring,all_gather" in told
    assert "give this sweep a folder of its own with out=" in told
    assert len(ranks.ran) == 3 and len(lines(tmp_path)) == 3


@pytest.mark.slow
def test_another_version_of_the_code_is_not_mixed_in(
    ranks: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(tmp_path, *TWO_BY_TWO) == 0
    monkeypatch.setattr(sweep, "code_version", lambda: "0123456789ab-dirty")
    assert swept(tmp_path, *TWO_BY_TWO) == 2
    assert "and this is 0123456789ab-dirty" in capsys.readouterr().err
    (tmp_path / "sweep.json").unlink()
    assert swept(tmp_path, *TWO_BY_TWO) == 2
    assert "no sweep.json says whose they are" in capsys.readouterr().err


def test_two_processes_in_one_folder(ranks: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path):
        assert swept(tmp_path, *TWO_BY_TWO) == 2
    assert "another sweep is writing there" in capsys.readouterr().err and not ranks.ran
    assert swept(tmp_path, *TWO_BY_TWO) == 0  # the lock went with its holder


def test_lines_are_appended_whole(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    record = make_record(load_run([]), "error", "x" * 100_000, {}, datetime.now(UTC), 1.0)
    (tmp_path / "points.jsonl").write_text('{"hash": "torn')
    Folder(tmp_path).append(record)
    Folder(tmp_path).append({**record, "hash": "b"})
    assert list(read_points(tmp_path)) == [record["hash"], "b"]
    assert (tmp_path / "points.jsonl").read_text().count("\n") == 3


# --- refusals, plans, progress ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lancher=slurm", "lancher: no such key; did you mean launcher?"),
        ("shedule=ring,direct", "shedule: no such key; did you mean schedule?"),
        ("ranks=1,2 launcher=local,slurm", "launcher: one value at a time"),
        ("preset=string", "preset=string: choose one of strong, weak"),
        ("ranks=1,9 tokens=8", "ranks=9: 9 ranks are more than tokens=8 (in the point ranks=9)"),
        ("nnodes=1,2", "nnodes=2: launcher=local knows this machine alone; use launcher=slurm"),
        ("schedule=ring,rign", "choose one of auto, ring"),
        (
            "mask=causal,full",
            "'causal' is not a mask; choose one of chunked, prefix, global_tokens (in the point mask=causal",
        ),
    ],
)
def test_refusals(ranks: StandIn, tmp_path: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert swept(tmp_path / "out", *words.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not ranks.ran


def test_a_plan_runs_nothing(ranks: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert swept(tmp_path / "out", *TWO_BY_TWO, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert printed.count("-m torch.distributed.run --standalone") == 3 and "--nproc-per-node=2" in printed
    assert not (tmp_path / "out").exists() and not ranks.ran


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_sweep_resumed_gives_the_same_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringattn", "sweep", f"out={tmp_path}", "ranks=1,2", "tokens=96", "shape=small",
               "repeats=1", "warmup=1"]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("1/2"):
            killed.send_signal(signal.SIGKILL)
            break
    killed.wait()
    first = lines(tmp_path)
    assert [one["world_size"] for one in first] == [1]
    resumed = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=280)
    assert resumed.returncode == 0, resumed.stderr
    assert "2 points, 1 of them there already" in resumed.stdout
    assert lines(tmp_path)[:1] == first and [one["world_size"] for one in lines(tmp_path)] == [1, 2]
    again = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=280)

    def table(printed: str) -> str:
        return printed[printed.index("point    ") :]

    assert table(again.stdout) == table(resumed.stdout)

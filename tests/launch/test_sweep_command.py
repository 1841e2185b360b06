"""`ringattn sweep`: its points and their records, refusals, resuming after a kill, and jobs of submitit."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringattn.errors import RingError
from ringattn.launch.calls import AUTOMATIC, RunConfig, load_run, plain, words_of
from ringattn.launch.measure import points, sweep
from ringattn.launch.measure.points import (
    ARRIVALS,
    MEASURED,
    RECORD_KEYS,
    STATUSES,
    Folder,
    hash_of,
    leave,
    make_record,
    opened,
    read_points,
)
from ringattn.launch.processes import RanksError
from tests.launch.commands import ROOT, ringattn, started, wait_for_line

KEYS = {
    "hash", "resolved_hash", "status", "message", "config", "started", "wall_s", "environment", "commit", "world_size",
    "tokens", "command", *MEASURED,
}  # fmt: skip


def facts(config: RunConfig) -> dict[str, Any]:
    """Return a result like that of `point.measure`."""
    spread = {"median": 1.5, "p10": 1.0, "p90": 2.0, "samples": config.repeats}
    ranks = [0] * config.world_size
    return {
        **dict.fromkeys(MEASURED), "forward_ms": spread, "backward_ms": spread, "tokens_per_s": 1e3,
        "peak_bytes": ranks, "environment": {"torch": "2", "ranks": config.world_size},
    }  # fmt: skip


class StandIn:
    """A replacement for `run_here` that records each configuration and returns its `answer`, which may raise."""

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


def run_sweep(folder: Path, *arguments: str) -> int:
    return sweep.main([f"out='{folder}'", *arguments])


TWO_BY_TWO = "ranks=1,2", "schedule=ring,all_gather", "tokens=64"


# --- points ----------------------------------------------------------------------------------------------------------


def test_every_combination_has_a_record(ranks: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a=folder, (two)"  # characters with a meaning in Hydra's grammar
    assert run_sweep(folder, *TWO_BY_TWO) == 0
    records = lines(folder)
    combinations = [(1, "all_gather"), (2, "ring"), (2, "all_gather")]  # on one rank, all schedules are equal
    assert [(record["world_size"], record["config"]["schedule"]) for record in records] == combinations
    environments = json.loads((folder / "environments.json").read_text())
    for record, config in zip(records, ranks.ran, strict=True):
        assert list(record) == list(RECORD_KEYS)
        assert set(record) == KEYS and record["status"] == "ok" and record["tokens"] == 64
        assert record["hash"] == hash_of(config) == hash_of(load_run(record["command"].split()[2:]))
        assert environments[record["environment"]] == {"torch": "2", "ranks": config.world_size}
    assert len(environments) == 2
    printed = capsys.readouterr().out
    assert "3/3  ok      ranks=2 schedule=all_gather  forward 1.500 ms  about 0 s left" in printed
    assert "3 of 3 points are ok" in printed
    assert "run once, because they do the same work: ranks=1, with schedule=ring; schedule=all_gather" in printed
    assert not list(tmp_path.glob("multirun")) and not (ROOT / "multirun").exists()


def test_the_command_of_a_record_repeats_the_choices_of_auto(ranks: StandIn, tmp_path: Path) -> None:
    resolved = {
        "schedule": "double_ring:2", "layout": "zigzag", "engine": "aten", "transport": "shm+gloo", "sm_margin": 0
    }  # fmt: skip
    ranks.answer = lambda config: {**facts(config), "resolved": resolved}
    assert run_sweep(tmp_path, "ranks=1,4", "tokens=64") == 0
    one_rank, four_ranks = lines(tmp_path)
    choices = {"schedule=double_ring:2", "layout=zigzag", "engine=aten", "transport=shm"}
    assert choices <= set(four_ranks["command"].split()) and four_ranks["resolved"] == resolved
    automatic = {option for option in one_rank["command"].split() if option.partition("=")[0] in AUTOMATIC}
    assert automatic == {"engine=aten"}
    for record in (one_rank, four_ranks):
        repeated = load_run(record["command"].split()[2:])
        assert record["resolved_hash"] == hash_of(repeated) != record["hash"]


def test_json_is_not_an_option_of_a_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_sweep(tmp_path, "json=a.json", "tokens=64") == 2
    assert "json: a sweep writes the records of its points into out" in capsys.readouterr().err


@pytest.mark.slow
def test_masks_layouts_and_dtypes_can_vary(ranks: StandIn, tmp_path: Path) -> None:
    arguments = ["ranks=2", "window=[9,0],[99,0]", "dtype=fp32,bf16", "layout=zigzag,striped"]
    assert run_sweep(tmp_path / "a", *arguments) == 0
    assert len({hash_of(config) for config in ranks.ran}) == 8
    assert run_sweep(tmp_path / "b", "causal=true,false", "mask=null,chunked:5", "repeats=1") == 0
    assert [(config.causal, config.mask) for config in ranks.ran[8:]] == [
        (True, None), (True, "chunked:5"), (False, None), (False, "chunked:5")
    ]  # fmt: skip


def test_points_with_the_same_work_are_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, points = sweep.described(["ranks=1,2", "schedule=ring,direct", "tokens=512"])
    assert [point.label for point in points] == ["ranks=1", "ranks=2 schedule=ring", "ranks=2 schedule=direct"]
    assert sweep.equal_points(points) == [
        "run once, because they do the same work: ranks=1, with schedule=ring; schedule=direct"
    ]
    again = load_run(words_of(points[0].config))  # raises for options without effect
    assert plain(points[0].config) == plain(again)


@pytest.mark.slow
def test_one_rank_has_no_schedule_transport_or_layout() -> None:
    options = "schedule=ring,direct transport=gloo,shm layout=zigzag,striped dtype=fp32,fp64"
    _, points = sweep.described(["ranks=1,2", *options.split(), "tokens=64"])
    one_rank = [point for point in points if point.config.world_size == 1]
    assert [point.label for point in one_rank] == ["ranks=1 dtype=fp32", "ranks=1 dtype=fp64"]
    assert len(points) == 2 + 16 and all(len(point.equal) == 8 for point in one_rank)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["preset=strong"], [(1, 8192), (2, 8192), (4, 8192)]),
        (["preset=weak"], [(1, 4096), (2, 8192), (4, 16384)]),
        (["preset=weak", "ranks=2,3", "tokens_per_rank=10"], [(2, 20), (3, 30)]),
        (["preset=weak", "ranks=2,3", "tokens=60"], [(2, 60), (3, 60)]),
    ],
)
def test_presets_give_ranks_and_tokens(arguments: list[str], sizes: list[tuple[int, int]]) -> None:
    _, points = sweep.described(arguments)
    assert [(point.config.world_size, point.config.tokens) for point in points] == sizes


def test_ranks_have_the_same_number_of_threads_in_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    _, points = sweep.described(["ranks=1,2,4"])
    assert [point.config.threads_per_rank for point in points] == [4, 4, 4]
    _, points = sweep.described(["ranks=1,4", "threads_per_rank=2"])
    assert [point.config.threads_per_rank for point in points] == [2, 2]
    _, points = sweep.described(["ranks=1,4", "launcher=slurm"])  # the nodes may have other processors
    assert [point.config.threads_per_rank for point in points] == [None, None]


def test_the_hash_depends_on_options_that_may_change_the_result() -> None:
    base = load_run(["tokens=64"])
    assert hash_of(load_run(["tokens=64", "limit_s=9"])) == hash_of(base)
    two_nodes = ["tokens=64", "nnodes=2"]
    assert hash_of(load_run([*two_nodes, "rdzv_endpoint=a:1"])) == hash_of(load_run(two_nodes))
    for option in ("seed=1", "causal=false", "timeout_s=9", "nnodes=2", "repeats=3"):
        assert hash_of(load_run(["tokens=64", option])) != hash_of(base)
    assert len(hash_of(base)) == 12 and hash_of(load_run(["tokens_per_rank=64"])) != hash_of(base)


# --- failed points ---------------------------------------------------------------------------------------------------


def test_a_sweep_records_failed_points_and_repeats_only_those(
    ranks: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {1: RanksError("no memory", "OutOfMemoryError"), 2: RanksError("too slow", "timeout"), 3: RingError("odd")}

    def answer(config: RunConfig) -> dict[str, Any]:
        if config.world_size in errors:
            raise errors[config.world_size]
        return facts(config)

    ranks.answer = answer
    assert run_sweep(tmp_path, "ranks=1,2,3,4", "tokens=64") == 1
    records = lines(tmp_path)
    assert [(record["status"], record["message"]) for record in records] == [
        ("oom", "no memory"), ("timeout", "too slow"), ("error", "odd"), ("ok", "")
    ]  # fmt: skip
    assert {record["status"] for record in records} == set(STATUSES)
    assert all(set(record) == KEYS for record in records) and records[0]["forward_ms"] is None
    assert "1 of 4 points are ok" in capsys.readouterr().out

    ranks.answer = facts
    assert run_sweep(tmp_path, "ranks=1,2,3,4", "tokens=64") == 0
    assert [config.world_size for config in ranks.ran[4:]] == [1, 2, 3]
    assert {record["status"] for record in read_points(tmp_path).values()} == {"ok"}


def test_an_unexpected_exception_is_a_failed_point(ranks: StandIn, tmp_path: Path) -> None:
    def answer(config: RunConfig) -> dict[str, Any]:
        if config.world_size == 1:
            raise ZeroDivisionError("planted")
        return facts(config)

    ranks.answer = answer
    assert run_sweep(tmp_path, "ranks=1,2", "tokens=64") == 1
    assert [record["status"] for record in lines(tmp_path)] == ["error", "ok"]
    assert "ZeroDivisionError('planted')" == lines(tmp_path)[0]["message"]


# --- resume ----------------------------------------------------------------------------------------------------------


def test_a_stopped_sweep_runs_only_the_missing_points(ranks: StandIn, tmp_path: Path) -> None:
    def answer(config: RunConfig) -> dict[str, Any]:
        if len(ranks.ran) == 2:
            raise KeyboardInterrupt
        return facts(config)

    ranks.answer = answer
    with pytest.raises(KeyboardInterrupt):
        run_sweep(tmp_path, *TWO_BY_TWO)
    assert len(lines(tmp_path)) == 1
    ranks.answer = facts
    other_order = "tokens=64", "schedule=all_gather,ring", "ranks=2,1"
    assert run_sweep(tmp_path, *other_order) == 0
    assert len(ranks.ran) == 4 and len(read_points(tmp_path)) == len(lines(tmp_path)) == 3
    assert run_sweep(tmp_path, *TWO_BY_TWO) == 0
    assert len(ranks.ran) == 4


def test_records_that_jobs_left_are_collected(ranks: StandIn, tmp_path: Path) -> None:
    assert run_sweep(tmp_path, "ranks=1", "tokens=64") == 0
    record = lines(tmp_path)[0]
    (tmp_path / "points.jsonl").unlink()
    leave(tmp_path, {**record, "environment": {"torch": "2"}})
    assert run_sweep(tmp_path, "ranks=1", "tokens=64") == 0
    assert len(ranks.ran) == 1 and lines(tmp_path)[0]["hash"] == record["hash"]


@pytest.mark.parametrize("last", [0, 1])
def test_records_are_collected_in_the_order_in_which_jobs_ended(tmp_path: Path, last: int) -> None:
    for number, name in enumerate("ab"):
        leave(tmp_path, {"hash": name, "environment": None})
        ended_s = 10**9 + (number == last)
        os.utime(tmp_path / ARRIVALS / f"{name}.json", (ended_s, ended_s))
    collected = [record["hash"] for record in Folder(tmp_path).collect()]
    assert collected[-1] == "ab"[last] == list(read_points(tmp_path))[-1]
    assert not list(Folder(tmp_path).collect())


def test_a_record_collected_before_a_kill_is_not_appended_again(ranks: StandIn, tmp_path: Path) -> None:
    assert run_sweep(tmp_path, "ranks=1", "tokens=64") == 0
    records = lines(tmp_path)
    leave(tmp_path, {**records[0], "environment": facts(ranks.ran[0])["environment"]})
    assert run_sweep(tmp_path, "ranks=1", "tokens=64") == 0
    assert lines(tmp_path) == records and not list((tmp_path / ARRIVALS).iterdir())


def test_a_torn_line_is_ignored(ranks: StandIn, tmp_path: Path) -> None:
    assert run_sweep(tmp_path, *TWO_BY_TWO) == 0
    whole = (tmp_path / "points.jsonl").read_bytes()
    (tmp_path / "points.jsonl").write_bytes(whole[:-40])
    assert len(read_points(tmp_path)) == 2
    assert run_sweep(tmp_path, *TWO_BY_TWO) == 0
    assert len(ranks.ran) == 4 and len(read_points(tmp_path)) == 3


@pytest.mark.parametrize(
    "change", ["tokens=128", *(pytest.param(change, marks=pytest.mark.slow) for change in ("repeats=3", "ranks=1,2,4"))]
)
def test_the_folder_of_another_sweep_is_refused(
    ranks: StandIn, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep(tmp_path, *TWO_BY_TWO) == 0
    assert run_sweep(tmp_path, *TWO_BY_TWO, change) == 2
    error = capsys.readouterr().err
    assert "holds the points of another sweep (" in error and "ranks=1,2 schedule=ring,all_gather" in error
    assert "give this sweep a separate folder with out=" in error
    assert len(ranks.ran) == 3 and len(lines(tmp_path)) == 3


@pytest.mark.slow
def test_the_folder_of_another_version_of_the_code_is_refused(
    ranks: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep(tmp_path, *TWO_BY_TWO) == 0
    monkeypatch.setattr(sweep, "code_version", lambda: "0123456789ab-dirty")
    assert run_sweep(tmp_path, *TWO_BY_TWO) == 2
    assert "but this is 0123456789ab-dirty" in capsys.readouterr().err
    (tmp_path / "sweep.json").unlink()
    assert run_sweep(tmp_path, *TWO_BY_TWO) == 2
    assert "no sweep.json that describes their sweep" in capsys.readouterr().err


def test_a_second_process_in_the_folder_is_refused(
    ranks: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path):
        assert run_sweep(tmp_path, *TWO_BY_TWO) == 2
    assert "another sweep is writing there" in capsys.readouterr().err and not ranks.ran
    assert run_sweep(tmp_path, *TWO_BY_TWO) == 0


def write_half(file: int, data: bytes) -> int:
    """Write the first half of the data without an error, as `os.write` does on a disk that fills up."""
    return write(file, data[: len(data) // 2])


write = os.write


def fail_to_sync(file: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_missing_permission_is_not_reported_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: str) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(points, "write_file", refuse)
    with pytest.raises(RingError, match=r"\(Permission denied\)\. .*; make the folder and its files writable and give"):
        leave(tmp_path, {"hash": "abc"})


@pytest.mark.parametrize(("name", "failing"), [("write", write_half), ("fsync", fail_to_sync)])
def test_a_full_disk_ends_a_sweep_with_one_message(
    ranks: StandIn, tmp_path: Path, name: str, failing: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(config: RunConfig) -> dict[str, Any]:
        if len(ranks.ran) == 2:
            monkeypatch.setattr(points.os, name, failing)
        return facts(config)

    ranks.answer = answer
    assert run_sweep(tmp_path, *TWO_BY_TWO) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == (
        f"ringattn sweep: {tmp_path}/points.jsonl: the record of this point could not be written (No space left on "
        "device). The records before it are complete; free some space on the disk and give the same command again"
    )
    assert "Traceback" not in captured.err and "ranks=2 schedule=ring        missing" in captured.out
    assert [record["status"] for record in lines(tmp_path)] == ["ok"]
    monkeypatch.setattr(points.os, name, {"write": write, "fsync": os.fsync}[name])
    monkeypatch.undo()
    monkeypatch.setattr(sweep, "run_here", ranks)
    ranks.answer = facts
    assert run_sweep(tmp_path, *TWO_BY_TWO) == 0
    assert len(lines(tmp_path)) == 3 and len(ranks.ran) == 3  # no point was measured twice


def test_a_record_that_a_job_cannot_leave_ends_a_sweep_with_one_message(
    ranks: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: str) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(points, "write_file", full)
    assert run_sweep(tmp_path, "ranks=1", "tokens=64") == 1
    assert ".json: the record of this point could not be written (No space left" in capsys.readouterr().err


def test_a_record_is_not_appended_to_a_torn_line(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    record = make_record(load_run([]), "error", "x" * 100_000, {}, datetime.now(UTC), 1.0)
    (tmp_path / "points.jsonl").write_text('{"hash": "torn')
    Folder(tmp_path).append(record)
    Folder(tmp_path).append({**record, "hash": "b"})
    assert list(read_points(tmp_path)) == [record["hash"], "b"]
    assert (tmp_path / "points.jsonl").read_text().count("\n") == 3


# --- refusals and dry runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lancher=slurm", "lancher: no such key; did you mean launcher?"),
        ("shedule=ring,direct", "shedule: no such key; did you mean schedule?"),
        ("ranks=1,2 launcher=local,slurm", "launcher: one value at a time"),
        ("preset=string", "preset=string: choose one of strong, weak"),
        ("ranks=1,9 tokens=8", "ranks=9: 9 ranks are more than tokens=8 (in the point ranks=9)"),
        ("nnodes=2 launcher=slurm rdzv_endpoint=a:1", "rdzv_endpoint: the launcher of a sweep sets it on each node"),
        ("nnodes=2 launcher=slurm node_rank=0", "node_rank: the launcher of a sweep sets it on each node"),
        ("nnodes=1,2", "nnodes=2: launcher=local uses this machine only; use launcher=slurm"),
        ("schedule=ring,rign", "choose one of auto, ring"),
        (
            "mask=causal,full",
            "'causal' is not a mask; choose one of chunked, prefix, global_tokens, bidirectional_blocks, slices, tree, "
            "by_head (in the point",
        ),
    ],
)
def test_wrong_options_are_refused(
    ranks: StandIn, tmp_path: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep(tmp_path / "out", *arguments.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not ranks.ran


def test_a_dry_run_prints_commands_and_runs_nothing(
    ranks: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sweep(tmp_path / "out", *TWO_BY_TWO, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert printed.count("-m torch.distributed.run --standalone") == 3 and "--nproc-per-node=2" in printed
    assert not (tmp_path / "out").exists() and not ranks.ran


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_sweep_can_be_resumed(tmp_path: Path) -> None:
    arguments = "sweep", f"out={tmp_path}", "ranks=1,2", "tokens=96", "shape=small", "repeats=1", "warmup=1"
    killed = started("-m", "ringattn", *arguments)
    wait_for_line(killed, "1/2")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    first = lines(tmp_path)
    assert [record["world_size"] for record in first] == [1]
    resumed = ringattn(*arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert "2 points, 1 of them already measured" in resumed.stdout
    assert lines(tmp_path)[:1] == first and [record["world_size"] for record in lines(tmp_path)] == [1, 2]
    again = ringattn(*arguments)

    def table(printed: str) -> str:
        return printed[printed.index("point    ") :]

    assert table(again.stdout) == table(resumed.stdout)


# --- submitit: real jobs of its local executor, and the script for sbatch --------------------------------------------


pytest.importorskip("submitit")

SBATCH = """#!/bin/bash
cp "$1" "$(dirname "$0")/submitted.sh"
echo "planted: no such partition" >&2
exit 1
"""
"""A replacement for sbatch that saves the script and fails, like sbatch for a partition that does not exist."""
SLURM = [
    "launcher=slurm", "slurm.partition=gpu", "slurm.account=us", "slurm.gpus_per_node=8", "slurm.cpus_per_task=16",
    "slurm.mem_gb=64", "slurm.array_parallelism=2", "slurm.setup=['module load cuda','ulimit -l unlimited']",
    "ranks=8", "limit_s=600",
]  # fmt: skip


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put replacements for sbatch and srun on the path. Return the file in which they save the script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "srun"):
        (folder / name).write_text(SBATCH)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "submitted.sh"


def test_a_dry_run_prints_the_script_that_sbatch_receives(
    tmp_path: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"out={tmp_path / 'out'}"
    assert sweep.main([*SLURM, out, "tokens=64,96,128", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    script = printed[printed.index("#!/bin/bash") :].strip()
    for line in ("--array=0-2%2", "--partition=gpu", "--account=us", "--gpus-per-node=8", "--cpus-per-task=16",
                 "--mem=64GB", "--nodes=1", "--ntasks-per-node=1", "--time=15"):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert "module load cuda\nulimit -l unlimited\n" in script
    assert sweep.main([*SLURM, out, "tokens=64,96,128"]) == 1
    error = capsys.readouterr().err
    assert "planted: no such partition" in error and "give the same command again" in error
    assert not (tmp_path / "out" / "points.jsonl").exists()

    def common_lines(text: str) -> list[str]:
        """Return all lines except those with the paths of the job's files."""
        paths = "srun", "#SBATCH --output", "#SBATCH --error"
        return [line for line in text.strip().splitlines() if not line.startswith(paths)]

    assert common_lines(sbatch.read_text()) == common_lines(script)


def test_points_with_the_same_number_of_nodes_share_a_slurm_job_array() -> None:
    configs = [load_run(["ranks=8", f"nnodes={nodes}", "limit_s=60"]) for nodes in (1, 2, 1)]
    slurm, local = (sweep.SweepConfig(launcher=name) for name in ("slurm", "submitit_local"))
    batches = sweep._batches(slurm, configs)
    assert [[config.nnodes for config in batch] for batch in batches] == [[1, 1], [2]]
    parameters = sweep.parameters(slurm, batches[1])
    assert parameters["nodes"] == 2 and parameters["tasks_per_node"] == 1
    assert [len(batch) for batch in sweep._batches(local, configs)] == [1, 1, 1]


def test_slurm_without_submitit_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "find_spec", lambda name: None)
    assert sweep.main(["launcher=slurm", f"out={tmp_path}", "tokens=64"]) == 2
    assert "launcher=slurm: needs submitit; pip install 'ringattn[slurm]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As with Slurm, the two nodes are two tasks of one job; here they share the machine.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    small = "tokens=64", "shape=small", "repeats=1", "warmup=1"
    assert sweep.main([f"out={tmp_path}", "launcher=submitit_local", "nnodes=2", *small]) == 0
    (record,) = lines(tmp_path)
    assert (record["status"], record["world_size"], len(record["bytes_sent"])) == ("ok", 2, 2)
    assert all(record["bytes_sent"])
    assert list((tmp_path / ".submitit").glob("*/*_submitted.pkl"))

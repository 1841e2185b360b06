"""Training on several ranks gives the losses of one process. Errors name the cause: a difference, a NaN, a dead rank.

Most tests run the ranks as threads in float64, so that rounding cannot hide an error; some start real processes.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor

from ringattn import Ring
from ringattn.bench.storage_meter import StorageMeter
from ringattn.errors import DisagreementError, InputError, NonFiniteError, RingError
from ringattn.explain import Explanation
from ringattn.launch.memory import PeakMemory
from ringattn.launch.options import leaves
from ringattn.launch.pictures.charts import Bars, CurveDistance, draw_losses, draw_memory, memory_figure
from ringattn.launch.ranks import RanksError, agreed_ranks, threads_for
from ringattn.launch.train import checkpoints, demo, loop, mesh, train
from ringattn.launch.train.config import TrainConfig, head_dim, load_train
from ringattn.launch.train.data import Documents, Draws, drawn, load
from ringattn.launch.train.loop import TrainingProgress
from ringattn.launch.train.mesh import PROCESS_KEYS, locked_folder
from ringattn.launch.train.model import Transformer, local_bytes
from ringattn.testing import run_ranks
from ringattn.transport.local import LocalWorld
from tests.launch.commands import TORCHRUN, all_end, below, environment, python, ringattn, runs, soon, started
from tests.launch.fuzz_train import spoiled
from tests.launch.training import SMALL, TINY, names, run, same


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run(TINY)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "auto"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_losses_do_not_depend_on_the_number_of_ranks(alone: dict[str, Any], world_size: int, layout: str) -> None:
    same(run(replace(TINY, layout=layout), world_size), alone)


def test_the_model_learns(alone: dict[str, Any]) -> None:
    first = alone["losses"][0]
    assert first == pytest.approx(5.55, abs=0.2)  # log 256: nothing is learned yet
    assert run(replace(TINY, steps=30, learning_rate=1e-2), 2)["losses"][-1] < first - 1


@pytest.mark.parametrize(
    ("ranks", "change"),
    [
        (3, {"model": replace(TINY.model, tied=False)}),
        (3, {"model": replace(TINY.model, kv_heads=4)}),
        (3, {"model": replace(TINY.model, kv_heads=1)}),
        # The first 40 of 61 tokens have no label, so the first two of four contiguous shards have none at all.
        (4, {"prompt_tokens": 40, "layout": "contiguous"}),
        (5, {"tokens": 3, "layout": "contiguous"}),  # ranks without tokens
        (2, {"optimizer": "sgd"}),
        (2, {"optimizer": "adafactor"}),
    ],
)  # fmt: skip
def test_ranks_train_other_configurations_like_one_process(ranks: int, change: dict[str, Any]) -> None:
    config = replace(TINY, **change)
    same(run(config, ranks), run(config))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_ends_when_one_rank_reaches_the_time_limit(world_size: int) -> None:
    def of_rank(ring: Ring) -> None:
        loop.train(ring, replace(TINY, steps=10**6, limit_s=2.0 if ring.rank == world_size - 1 else 3600.0))

    with pytest.raises(RingError, match=r"^limit_s=2: .* after \d+ of 1000000 steps; raise limit_s"):
        run_ranks(world_size, of_rank)


def test_a_command_that_reaches_its_time_limit_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model=tiny", "tokens=32", "transport=gloo", "steps=3", "limit_s=0.001", f"out={tmp_path}"]
    assert train.main(arguments) == 1
    assert capsys.readouterr().err.startswith("ringattn train: limit_s=0.001: ")
    assert not (tmp_path / "result.json").exists()


def test_all_ranks_start_with_the_weights_of_rank_0() -> None:
    def of_rank(ring: Ring) -> Tensor:
        model, _ = loop.make_model(ring, replace(TINY, seed=ring.rank))
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    first, second = run_ranks(2, of_rank)
    assert torch.equal(first, second)


def test_a_run_starts_without_a_second_copy_of_the_whole_model() -> None:
    """Weights are broadcast block by block, so that the start of a run needs less memory than its steps."""

    def peak_and_weights(ring: Ring) -> tuple[int, int]:
        with StorageMeter() as storages:
            model, _ = loop.make_model(ring, replace(TINY, model=replace(TINY.model, layers=8)))
        return storages.peak_bytes, sum(map(local_bytes, model.parameters()))

    for peak, weights in run_ranks(2, peak_and_weights):
        assert weights < peak < 1.5 * weights


def test_weights_are_the_same_in_every_dtype() -> None:
    wide, narrow = (Transformer(TINY.model, 256, dtype, seed=3) for dtype in (torch.float64, torch.float32))
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert a.dtype == torch.float64 and torch.equal(a.float(), b)


def test_bf16_keeps_its_weights_in_fp32() -> None:
    model = Transformer(TINY.model, 256, torch.bfloat16, seed=3)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert run(replace(TINY, dtype="bf16"), 2)["losses"] == pytest.approx(run(TINY)["losses"], rel=1e-2)


def test_memory_growth_counts_allocations_after_the_start() -> None:
    before = torch.ones(30 << 20, dtype=torch.uint8)
    memory = PeakMemory(torch.device("cpu"))
    torch.ones(50 << 20, dtype=torch.uint8)
    assert memory.growth_bytes() == pytest.approx(50 << 20, rel=0.1)
    del before


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_end_when_their_torchrun_is_killed(tmp_path: Path) -> None:
    arguments = ["tokens=64", "model=tiny", "transport=gloo", "steps=1000000", "checkpoint_every_steps=1"]
    agent = started(*TORCHRUN, "--nproc-per-node=2", "-m", "ringattn", "train", *arguments, f"out={tmp_path}")
    assert soon(lambda: bool(list(tmp_path.glob("checkpoints/step-*/run.json"))), 120.0)
    _, *ranks = below(agent.pid)
    assert len(ranks) >= 2
    agent.kill()
    agent.communicate()
    assert all_end(ranks)
    with locked_folder(str(tmp_path)):  # raises if another process still holds the lock
        pass


@pytest.mark.parametrize("kernel", [True, False])
def test_a_process_ends_with_its_parent(kernel: bool) -> None:
    """A process ends with its parent, both by the kernel's signal and, without this signal, by polling its parent.

    A process whose parent has already gone ends at once.
    """
    child = (
        "import sys, time\nfrom ringattn.launch import processes\n"
        f"processes._asked_the_kernel = processes._asked_the_kernel if {kernel} else lambda number: False\n"
        "processes.PARENT_LOOK_S = 0.05\nprocesses.end_with_parent(int(sys.argv[1]))\n"
        "print('lives', flush=True)\ntime.sleep(60)"
    )
    starts = (
        "import os, subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())],"
        " stdout=subprocess.PIPE)\nchild.stdout.readline()\nprint(child.pid, flush=True)\nsys.stdin.read()"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", starts, child], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    assert runs(pid)
    starter.kill()
    starter.communicate()
    assert all_end([pid])
    orphan = python("-c", child, "1")  # process 1 is not its parent
    assert (orphan.returncode, orphan.stdout) == (-signal.SIGKILL, "")


def test_the_ranks_option_must_agree_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (agreed_ranks(None), agreed_ranks(3)) == (1, 3)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (agreed_ranks(None), agreed_ranks(4)) == (4, 4)
    with pytest.raises(InputError, match=r"^ranks=2: torchrun started 4"):
        agreed_ranks(2)
    assert train.main(["ranks=2"]) == 2


def test_threads_share_the_cores() -> None:
    assert threads_for(10_000) == 1
    assert threads_for(1) == len(os.sched_getaffinity(0))


# --- pictures --------------------------------------------------------------------------------------------------------


def test_pictures_are_drawn(tmp_path: Path) -> None:
    curves = {"1 process": [3.0, 2.0, 1.5], "4 processes": [3.0, 2.0, 1.5]}
    agreements = [CurveDistance("fp32", [0.0, 1e-7, 2e-7], 1e-4), CurveDistance("fp64", [0.0, 0.0], 1e-9)]
    draw_losses(tmp_path / "loss.png", curves, agreements)
    bars = [Bars("1 process", 1 << 20, [9 << 20]), Bars("2 processes", 1 << 20, [5 << 20, 5 << 20])]
    draw_memory(tmp_path / "memory.png", bars, "how it was measured")
    for name in ("loss.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize("ranks", [4, 16, 39, 100])
def test_labels_of_memory_bars_do_not_overlap(ranks: int) -> None:
    """Each of up to 40 bars has a label, more bars have none. The title names the largest bar of each run."""
    shared = [(1000 + rank) << 20 for rank in range(ranks)]
    figure = memory_figure([Bars("1 process", 1 << 20, [9000 << 20]), Bars(f"{ranks} processes", 1 << 20, shared)], "")
    (axes,) = figure.axes
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == (0 if ranks == 100 else 1 + ranks)
    assert not any(left.overlaps(right) for left, right in combinations(boxes, 2))
    assert not any(box.overlaps(axes.get_legend().get_window_extent()) for box in boxes)
    most = f"at most 9000 MiB with 1 process and {999 + ranks} MiB with {ranks} processes"
    assert axes.get_title(loc="left").endswith(most)
    plt.close(figure)


# --- ranks with different configurations -----------------------------------------------------------------------------


def refusals(rank_0: TrainConfig, rank_1: TrainConfig) -> list[InputError]:
    """Start two ranks, of one ring or of two replicas, with these configurations. Return the error of each."""
    worlds = [LocalWorld(1, 20.0) for _ in range(2)]

    def of_rank(everyone: Ring) -> InputError:
        config = rank_1 if everyone.rank == 1 else rank_0
        ring = everyone if rank_0.replicas == 1 else Ring(transport=worlds[everyone.rank].transport(0))
        with pytest.raises(InputError) as raised:
            loop.train(ring, config, everyone=everyone)
        return raised.value

    return run_ranks(2, of_rank, timeout_s=20.0)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"learning_rate": 0.5},
            "learning_rate: rank 1 has 0.5 but rank 0 has 0.001; start all ranks with the same arguments",
        ),
        ({"seed": 1}, "seed: rank 1 has 1 but rank 0 has 0"),
        ({"steps": 3}, "steps: rank 1 has 3 but rank 0 has 6"),
        ({"clip_norm": 2.0}, "clip_norm: rank 1 has 2.0 but rank 0 has 1.0"),
        ({"model": replace(SMALL.model, tied=False)}, "model.tied: rank 1 has False but rank 0 has True"),
        ({"text": __file__}, "text=.*: the tokens or documents of rank 1 differ from those of rank 0"),
    ],
    ids=str,
)
def test_all_ranks_refuse_if_a_setting_differs_between_ranks(
    replicas: int, change: dict[str, Any], message: str
) -> None:
    config = replace(SMALL, replicas=replicas)
    for error in refusals(config, replace(config, **change)):
        assert isinstance(error, DisagreementError) and re.match(message, str(error))


def test_the_same_tokens_cut_into_other_documents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_first_cut(config: TrainConfig) -> Documents:
        text = load(config)
        return replace(text, cuts=(0, *text.cuts[2:])) if config.timeout_s == 1.0 else text

    monkeypatch.setattr(mesh, "load", without_the_first_cut)
    config = replace(SMALL, pack_documents=True)
    for error in refusals(config, replace(config, timeout_s=1.0, limit_s=2.0)):
        assert str(error).startswith("text=: the tokens or documents of rank 1 differ from those of rank 0")


def test_all_ranks_refuse_a_folder_that_rank_0_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    config = replace(SMALL, out=str(tmp_path / "taken"), checkpoint_every_steps=1)
    first, second = refusals(config, config)
    assert str(first).startswith(f"out={config.out}: cannot be written (File exists)")
    assert str(second).startswith(f"rank 0 refused the call, so all ranks refuse it: out={config.out}: ")


@pytest.mark.parametrize("change", [{"text": "nowhere.txt"}, {"tokens": 10**9}, {"replicas": 2}], ids=str)
def test_all_ranks_refuse_settings_that_one_rank_cannot_load(change: dict[str, Any]) -> None:
    first, second = refusals(SMALL, replace(SMALL, **change))
    key, value = next(iter(change.items()))
    assert str(second).startswith(f"{key}={value}: ")
    assert str(first).startswith(f"rank 1 refused the call, so all ranks refuse it: {key}={value}: ")


def test_each_rank_may_have_its_own_path_timeout_and_threads(tmp_path: Path) -> None:
    files = [tmp_path / "here", tmp_path / "there"]
    for file in files:
        file.write_bytes(bytes(range(256)))

    def of_rank(ring: Ring) -> list[float]:
        config = replace(
            SMALL, steps=2, text=str(files[ring.rank]), timeout_s=60.0 + ring.rank, threads_per_rank=1 + ring.rank
        )
        return list(loop.train(ring, config)["losses"])

    first, second = run_ranks(2, of_rank)
    assert first == second


def test_keys_that_may_differ_between_ranks_exist() -> None:
    assert {key for key, _, _ in leaves(SMALL)} > PROCESS_KEYS


# --- steps that are not finite ---------------------------------------------------------------------------------------


OVERSHOOTING = replace(SMALL, dtype="fp32", optimizer="sgd", warmup_steps=0, learning_rate=1e38, weight_decay=1e6)
"""A run whose first step has a finite loss and gradient norm, but makes the weights non-finite."""


Spoil = Callable[..., None]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spoil]:
    """Yield a function that makes the loss of one step (from 0) of one rank non-finite, or only its gradient.

    The fixture requests `monkeypatch`, so that its patches of the trainer are undone before those of a test.
    """
    with ExitStack() as stack:
        yield lambda step, rank=0, value=math.nan, what="loss": stack.enter_context(spoiled(step, rank, value, what))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_all_ranks_end_at_the_first_step_that_is_not_finite(spoil: Spoil, value: float, what: str) -> None:
    spoil(2, rank=1, value=value, what=what)

    def of_rank(ring: Ring) -> str:
        with pytest.raises(NonFiniteError) as raised:
            loop.train(ring, SMALL)
        return str(raised.value)

    first, second = run_ranks(2, of_rank)
    assert first == second and first.startswith("step 3 of 6: its ")
    named = "loss is" if what == "loss" else "gradient norm is"
    assert re.findall("(loss is|gradient norm is)", first) == [named] and "nonfinite=skip" in first


@pytest.mark.slow
def test_the_last_line_of_a_failed_command_names_the_step_that_is_not_finite(tmp_path: Path) -> None:
    arguments = ["ranks=2", "tokens=64", "steps=3", "model=tiny", "learning_rate=1e30", "transport=shm"]
    done = ringattn("train", *arguments, f"out={tmp_path}", "checkpoint_every_steps=1")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.match(r"ringattn train: rank \d failed first: NonFiniteError: step \d of 3: ", last)
    assert "learning_rate" in last
    assert all(checkpoints.read_run(path) for path in checkpoints.named(tmp_path / "checkpoints"))


def test_finite_checkpoints_are_kept_after_a_step_that_is_not_finite(tmp_path: Path, spoil: Spoil) -> None:
    spoil(4)
    with pytest.raises(NonFiniteError):
        run(replace(SMALL, out=str(tmp_path), checkpoint_every_steps=1))
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    config = replace(OVERSHOOTING, out=str(tmp_path), checkpoint_every_steps=1)
    run(replace(config, steps=2, learning_rate=1e-9))
    with pytest.raises(NonFiniteError, match=r"^step 3 of 6: .* are not finite, so they are not saved"):
        run(config)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_skipped_step_is_reported_and_changes_no_weight(spoil: Spoil, monkeypatch: pytest.MonkeyPatch) -> None:
    of_step = Draws.of_step
    # Every step trains on the sequences of step 0. The step after a skipped step then has the loss that the skipped
    # step would have had.
    monkeypatch.setattr(Draws, "of_step", lambda draws, step: of_step(draws, 0))
    undisturbed = run(SMALL, ranks=2)["losses"]
    spoil(2, rank=1)
    result = run(replace(SMALL, nonfinite="skip"), ranks=2)
    losses = result["losses"]
    assert (result["skipped_steps"], losses[2], result["grad_norms"][2]) == ([2], None, None)
    assert losses[:2] == undisturbed[:2] and losses[3] == undisturbed[2] and None not in losses[4:]


def test_a_resumed_run_reports_steps_skipped_before(tmp_path: Path, spoil: Spoil) -> None:
    spoil(1)
    config = replace(SMALL, nonfinite="skip", out=str(tmp_path), checkpoint_every_steps=2)
    whole = run(replace(config, checkpoint_every_steps=None))
    run(replace(config, steps=4))
    resumed = run(config)
    assert (resumed["first_step"], resumed["skipped_steps"]) == (4, [1])
    assert (resumed["losses"], resumed["grad_norms"]) == (whole["losses"], whole["grad_norms"])


def test_a_checkpoint_before_the_first_update_changes_nothing(tmp_path: Path, spoil: Spoil) -> None:
    """A checkpoint before the first update does not change training.

    To save an optimizer without state, torch first takes a step, which must not count as a step of training.
    """
    spoil(0)
    config = replace(SMALL, nonfinite="skip")
    expected = run(config)
    saves = replace(config, out=str(tmp_path), checkpoint_every_steps=1)
    assert run(saves)["losses"] == expected["losses"]
    stopped = replace(saves, out=str(tmp_path / "stopped"))
    with pytest.raises(NonFiniteError, match=r"^all 1 steps were skipped"):
        run(replace(stopped, steps=1))
    assert run(stopped)["losses"] == expected["losses"]


def test_weights_that_are_not_finite_end_a_run_that_skips() -> None:
    config = replace(OVERSHOOTING, nonfinite="skip")
    with pytest.raises(NonFiniteError, match=r"^step 2 of 6: .* weights are not finite, which skipping cannot repair"):
        run(config)


def test_the_result_is_strict_json(tmp_path: Path, spoil: Spoil, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(1)
    arguments = ["model=tiny", "model.layers=1", "tokens=32", "transport=gloo", "steps=3", f"out={tmp_path}"]
    assert train.main(arguments) == 1
    assert "step 2 of 3: its loss is nan" in capsys.readouterr().err and not (tmp_path / "result.json").exists()
    assert train.main([*arguments, "nonfinite=skip"]) == 0

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert result["skipped_steps"] == [1] and result["losses"][1] is None
    assert "1 skipped" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("key", ["learning_rate", "weight_decay", "clip_norm", "timeout_s", "model.rope_base"])
def test_numbers_that_are_not_finite_are_refused_by_key(key: str, value: str) -> None:
    with pytest.raises(InputError, match=f"^{key}={value}: must be a finite number"):
        load_train([f"{key}={value}"])


# --- nothing to learn ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["a", "aaa"])  # a separator belongs to the document that it ends
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_text_whose_documents_all_have_one_token_is_refused(tmp_path: Path, content: str, ranks: int) -> None:
    (tmp_path / "text").write_text(content)
    config = replace(SMALL, text=str(tmp_path / "text"), pack_documents=True, separator="a")
    with pytest.raises(InputError, match=r"^text=.*: no document has a second token, so there are no labels"):
        run(config, ranks)


def test_a_step_without_a_label_is_refused_by_its_number(tmp_path: Path) -> None:
    # One in 50 sequences of 8 tokens contains the only document of two or more tokens.
    (tmp_path / "text").write_text("a" * 400 + "bc")
    config = replace(SMALL, tokens=8, text=str(tmp_path / "text"), pack_documents=True, separator="a", batch=1)
    with pytest.raises(InputError, match=r"^step \d of 6: has no label"):
        run(config, 2)


def test_a_prompt_of_all_tokens_is_refused_at_the_first_step() -> None:
    with pytest.raises(InputError, match=r"^step 1 of 6: has no label.*prompt_tokens=41"):
        run(replace(SMALL, prompt_tokens=41), 2)


# --- a killed rank: the run resumes from the last checkpoint ---------------------------------------------------------


ARGUMENTS = [
    "tokens=41", "batch=2", "steps=8", "dtype=fp64", "transport=gloo", "model.layers=1", "model.dim=16",
    "model.heads=2", "model.kv_heads=1", "model.hidden_dim=24", "checkpoint_every_steps=2", "timeout_s=100",
]  # fmt: skip


def check_result(folder: Path) -> None:
    """Check that the run died at step 5, resumed from step 4 and has the curve of an undisturbed run."""
    assert (folder / "died").exists()
    result = json.loads((folder / "result.json").read_text())
    never_killed = run(replace(SMALL, steps=8, warmup_steps=TrainConfig().warmup_steps))
    assert result["first_step"] == 4
    same(result, never_killed)


@pytest.mark.slow
def test_the_launcher_restarts_killed_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "ENTRY", "tests.launch.train_entries:train_and_die_once")
    mesh = ["replicas=2", "ranks=1", "sharding=zero2"]
    assert train.main([*ARGUMENTS, *mesh, "restarts=1", f"out={tmp_path}"]) == 0
    check_result(tmp_path)
    errors = capsys.readouterr().err
    assert "ringattn train: rank 1 was killed (SIGKILL)" in errors
    assert f"starting again from {tmp_path}/checkpoints/step-00000004" in errors


@pytest.mark.slow
def test_torchrun_restarts_killed_ranks(tmp_path: Path) -> None:
    restarting = (*TORCHRUN, "--nproc-per-node=2", "--max-restarts=1")
    done = python(*restarting, "-m", "tests.launch.train_entries", *ARGUMENTS, f"out={tmp_path}")
    assert done.returncode == 0, done.stderr
    check_result(tmp_path)


# --- the number of restarts ------------------------------------------------------------------------------------------


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the launcher by one that fails. Return the list of runs that it was asked to start.

    Each run fails as if it had been killed; runs with seed 7 fail as if they had been refused.
    """
    runs: list[dict[str, Any]] = []

    def fail(entry: str, spec: dict[str, Any], *more: Any) -> list[dict[str, Any]]:
        runs.append(spec["runs"][0])
        raise RanksError("planted", "killed", refused=spec["runs"][0]["seed"] == 7)

    monkeypatch.setattr(train, "run_ranks_in_processes", fail)
    return runs


def test_a_run_is_restarted_as_often_as_restarts_allows(
    tmp_path: Path, attempts: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*ARGUMENTS, "ranks=2", "restarts=2", f"out={tmp_path}", "resume=never"]) == 1
    assert [attempt["resume"] for attempt in attempts] == ["never"] * 3
    assert capsys.readouterr().err.count("starting again from the first step") == 2


def test_a_restart_resumes_from_its_own_checkpoint(tmp_path: Path, attempts: list[dict[str, Any]]) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000002" / "run.json").touch()
    assert train.main([*ARGUMENTS, "ranks=2", "restarts=1", f"out={tmp_path}", "resume=somewhere"]) == 1
    assert [attempt["resume"] for attempt in attempts] == ["somewhere", "auto"]


def test_a_refused_run_is_not_restarted(tmp_path: Path, attempts: list[dict[str, Any]]) -> None:
    assert train.main([*ARGUMENTS, "ranks=2", "restarts=2", "seed=7", f"out={tmp_path}"]) == 2
    assert len(attempts) == 1


def test_a_run_on_one_rank_is_restarted_too(tmp_path: Path, attempts: list[dict[str, Any]]) -> None:
    assert train.main([*ARGUMENTS, "restarts=1", f"out={tmp_path}"]) == 1
    assert len(attempts) == 2


# --- the output of `make demo`, with stand-ins for its runs and for `ringattn check` ---------------------------------


CHECK_LINES = 8
"""Lines that `ringattn check` prints: a heading of two, one per schedule for five schedules, and a summary."""


@pytest.mark.parametrize(("option", "reason"), [
    ("nonfinite=skip", "the demo compares the losses of all steps"),  # a skipped step has no loss
    ("checkpoint_every_steps=2", "the demo compares whole runs, and one would resume from another's checkpoints"),
    ("resume=auto", "the demo compares whole runs"),
])  # fmt: skip
def test_the_demo_compares_every_loss(
    option: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_train", lambda *_: pytest.fail("the demo trains"))
    assert demo.main([option]) == 2
    assert f"{option}: {reason}" in capsys.readouterr().err


def test_the_demo_does_not_resume_from_checkpoints_in_its_folder(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "run.json").touch()
    with pytest.raises(InputError, match=r"resume=never: .*step-00000001 is in the folder already"):
        run(load_train(["model=tiny", "tokens=8", "steps=1", "ranks=1", f"out={tmp_path}"], "demo"))


def test_the_demo_prints_about_twenty_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(config: TrainConfig, ranks: int, console: object) -> list[dict[str, Any]]:
        results = []
        for dtype in ("fp32", "fp64"):
            with TrainingProgress(f"{ranks} x {dtype}", 40, lines=1) as progress:
                for step in range(40):
                    progress.done(step, 5.0 - step / 10, 1e3)
            results.append({
                "config": {"dtype": dtype}, "losses": [5.0 - step / 10 + 1e-7 * (ranks > 1) for step in range(40)],
                "ranks": ranks, "memory_growth_bytes": [2**20] * ranks, "tokens_of_rank": [2048 // ranks] * ranks,
                "tokens_per_s": 1e3, "memory_method": "a scale",
            })  # fmt: skip
            results[-1]["losses"] = [loss if dtype == "fp32" else 5.0 for loss in results[-1]["losses"]]
        return results

    monkeypatch.setattr(demo, "_train", trained)
    monkeypatch.setattr(demo, "_check", lambda console, verbose: True)
    monkeypatch.setattr(demo, "explain", lambda config, ranks: None)
    monkeypatch.setattr(demo, "_write", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "120")
    assert demo.main([f"out={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) + CHECK_LINES <= 24
    output = "\n".join(lines)
    assert "    40            1.1000001        1.1000000    +1.0e-07" in output
    assert "        4             512         1.0 MiB      1,000" in output
    assert "fp32: over 40 steps" in output and "fp64: over 40 steps" in output and "DIFFERENT" not in output


@pytest.mark.parametrize("words", [
    ["attention=dilated", "segment_lengths=[16,64]", "dilation_rates=[1,4]"], ["pack_documents=true", "separator=' '"],
    ["pack_documents=true", "layout=documents", "max_tokens_per_rank=64"],
], ids=["dilated", "packed", "divided"])  # fmt: skip
def test_the_demo_draws_the_schedule_of_its_own_attention(words: list[str]) -> None:
    config = load_train(["ranks=2", "steps=2", "tokens=96", "model=tiny", "schedule=ring", *words], "demo")
    shape = {"q_heads": config.model.heads, "kv_heads": config.model.kv_heads, "head_dim": head_dim(config.model)}
    text = load(config)

    def planned(ring: Ring) -> Explanation:
        seq = drawn(ring, 0, text, config.steps - 1, config)[0].seq
        return ring.explain(**loop.attention_of(seq, config).keywords, **shape, dtype=torch.float32)

    trained, shown = run_ranks(2, planned)[0], demo.explain(config, 2)
    assert (shown.pairs, shown.bytes_sent) == (trained.pairs, trained.bytes_sent)
    assert shown.problem.q_layout == trained.problem.q_layout


def test_progress_lines_of_a_long_run_are_spaced_by_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    with TrainingProgress("a run", 1_000_000) as progress:
        for step in range(2000):
            now += 1.0
            progress.done(step, 1.0, 1.0)
    steps = [int(step) for step in re.findall(r"step (\d+)/", capsys.readouterr().out)]
    assert steps[:4] == [1, 6, 11, 16] and steps[-1] - steps[-2] == 40  # every 5 s; later every 2 % of the time so far


def test_the_lines_option_bounds_the_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for lines, printed in ((0, 0), (1, 1), (10, 11)):
        with TrainingProgress("a run", 40 if lines else 0, lines) as progress:
            for step in range(40):
                progress.done(step, 1.0, 1.0)
        assert len(capsys.readouterr().out.splitlines()) == printed

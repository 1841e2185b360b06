"""A checkpoint that is not what was written is named and passed over; a full disk and a second run cost no good one."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from ringattn.errors import InputError, RingError
from ringattn.launch.folders import locked
from ringattn.launch.train import checkpoints, loop, mesh, train
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.testing import run_ranks

TINY = TrainConfig(tokens=41, batch=2, steps=6, dtype="fp64", warmup_steps=4, model=ModelConfig(1, 16, 2, 1, 24))
ROOT = Path(__file__).resolve().parents[2]
DESCRIBED = checkpoints.described


def run(config: TrainConfig) -> dict[str, Any]:
    return run_ranks(1, lambda ring: loop.train(ring, config))[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> TrainConfig:
    """A run that has left checkpoints after its steps 2 and 4, and would go on to 6."""
    config = replace(TINY, checkpoint_every_steps=2, out=str(tmp_path / "run"))
    run(replace(config, steps=4))
    return config


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (flipped, "is damaged"),
    "truncated": (truncated, "is (truncated|damaged)"),
    "empty": (lambda path: os.truncate(path, 0), "is (truncated|damaged)"),
    "missing": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("part", ["__0_0.distcp", ".metadata", "run.json"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    saved: TrainConfig, capsys: pytest.CaptureFixture[str], part: str, fault: str
) -> None:
    whole = run(TINY)
    spoil, told = FAULTS[fault]
    broken = Path(saved.out) / "checkpoints" / "step-00000004"
    spoil(broken / part)
    resumed = run(saved)
    assert resumed["first_step"] == 2
    assert (resumed["losses"], resumed["grad_norms"]) == (whole["losses"], whole["grad_norms"])
    (line,) = resumed["damaged_checkpoints"]
    assert re.fullmatch(rf".*{broken / part} {told}.*; going on from .*/step-00000002", line)
    assert f"ringattn train: {line}\n" in capsys.readouterr().err
    assert names(Path(saved.out)) == ["step-00000004", "step-00000006"]
    assert run(saved)["damaged_checkpoints"] == []


def test_a_damaged_checkpoint_that_is_named_is_refused_with_the_next_good_one(saved: TrainConfig) -> None:
    folder = Path(saved.out) / "checkpoints"
    flipped(folder / "step-00000004" / "__0_0.distcp")
    config = replace(saved, out=f"{saved.out}-2", resume=str(folder / "step-00000004"))
    with pytest.raises(InputError, match=r"__0_0\.distcp is damaged.*the next older good one is .*/step-00000002$"):
        run(config)
    assert run(replace(config, resume=str(folder / "step-00000002")))["first_step"] == 2


def test_a_run_does_not_begin_anew_where_all_are_damaged(saved: TrainConfig) -> None:
    folder = Path(saved.out) / "checkpoints"
    truncated(folder / "step-00000002" / "__0_0.distcp")
    (folder / "step-00000004" / "run.json").unlink()
    with pytest.raises(
        InputError, match=r"^resume=auto: .*4/run.json is missing; .*2/__0_0.distcp is truncated .*no older"
    ):
        run(saved)
    assert names(Path(saved.out)) == ["step-00000002", "step-00000004"]


def test_a_damaged_checkpoint_evicts_no_good_one(saved: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged while the run goes on: of two that are kept one would be worth nothing."""
    save = checkpoints.Checkpoints.save

    def damages(self: Any, model: Any, optimizer: Any, curve: Any) -> None:
        flipped(self.folder / "step-00000004" / "__0_0.distcp")
        save(self, model, optimizer, curve)

    with monkeypatch.context() as broken:
        broken.setattr(checkpoints.Checkpoints, "save", damages)
        run(saved)
    assert names(Path(saved.out)) == ["step-00000002", "step-00000004", "step-00000006"]
    run(replace(saved, steps=8))
    assert names(Path(saved.out)) == ["step-00000006", "step-00000008"]


def test_the_curve_in_a_checkpoint_has_a_digest(saved: TrainConfig) -> None:
    path = Path(saved.out) / "checkpoints" / "step-00000004" / "run.json"
    content = json.loads(path.read_text())
    content["losses"][0] += 1.0
    path.write_text(json.dumps(content))
    assert "run.json is damaged (its digest differs)" in run(saved)["damaged_checkpoints"][0]


def test_a_checkpoint_that_does_not_load_is_an_error_of_the_run(
    saved: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise CheckpointException("load", {0: (ValueError("planted"), None)})  # type: ignore[dict-item]

    monkeypatch.setattr(checkpoints.dcp, "load", fails)
    with pytest.raises(RingError, match=r"step-00000004 could not be loaded: ValueError: planted"):
        run(saved)


# --- a full disk -----------------------------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_while_saving(path: Path) -> tuple[int, str]:
    return full() if path.parent.suffix == ".partial" else DESCRIBED(path)  # type: ignore[no-any-return]


def full_in_torch(*_: Any, **__: Any) -> Any:
    raise CheckpointException("write", {0: (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("where", "name", "how"),
    [
        (checkpoints.dcp, "save", full_in_torch),
        (checkpoints, "write_run", full),
        (checkpoints, "described", full_while_saving),
    ],
)
def test_a_full_disk_is_told_and_leaves_the_old_checkpoints(
    saved: TrainConfig, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, how: Any
) -> None:
    with monkeypatch.context() as filled:
        filled.setattr(where, name, how)
        with pytest.raises(
            RingError, match=r"/step-00000006 could not be written: No space left on device; it needs about"
        ) as raised:
            run(saved)
    assert "MiB, and the disk at /" in str(raised.value) and "resume=auto goes on from them" in str(raised.value)
    assert names(Path(saved.out)) == ["step-00000002", "step-00000004"]
    assert run(saved)["first_step"] == 4


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_in_a_save_is_not_a_full_disk(
    saved: TrainConfig, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, error: type[BaseException]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        signal.raise_signal(number)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    monkeypatch.setattr(FileSystemWriter, "write_data", interrupted)
    try:
        with pytest.raises(error):
            loop.train_rank({"runs": [asdict(saved)]})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert names(Path(saved.out)) == ["step-00000002", "step-00000004"]
    monkeypatch.undo()
    assert run(saved)["first_step"] == 4


# --- two runs in one folder ------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "DYING_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_second_run_in_a_folder_is_refused(saved: TrainConfig) -> None:
    before = names(Path(saved.out))
    with mesh.locked_folder(saved.out):
        with pytest.raises(InputError, match=rf"^out=.*/run: another run is writing there, process {os.getpid()} on "):
            run(saved)
        assert names(Path(saved.out)) == before
        run(replace(saved, checkpoint_every_steps=None))  # writes nothing there
    assert run(saved)["first_step"] == 4


@pytest.mark.usefixtures("impatient")
def test_the_command_is_refused_before_its_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mesh.locked_folder(str(tmp_path)):
        assert train.main(["ranks=2", "tokens=64", f"out={tmp_path}"]) == 2
    assert "another run is writing there" in capsys.readouterr().err


def test_a_run_waits_a_moment_for_one_that_dies(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys, time; lock = open(sys.argv[1], 'a'); "
        "fcntl.flock(lock, 2); print(flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(InputError), locked(tmp_path, "out", "run", "", wait_s=0.0):
        pass
    holder.send_signal(signal.SIGKILL)  # a lock ends with its process, however that ends
    with locked(tmp_path, "out", "run", "", wait_s=5.0) as lock:
        assert lock.lost() is None
    holder.wait()


def test_a_folder_that_was_replaced_meanwhile_is_not_written_to(
    saved: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoints.Checkpoints.save

    def moved(self: Any, model: Any, optimizer: Any, curve: Any) -> None:
        Path(saved.out).rename(f"{saved.out}-moved")
        Path(saved.out).mkdir()
        save(self, model, optimizer, curve)

    monkeypatch.setattr(checkpoints.Checkpoints, "save", moved)
    with pytest.raises(RingError, match=r"^out=.*/run: the folder was removed or replaced"):
        run(saved)
    assert not list(Path(saved.out).iterdir())

"""A link that is planted under the name of a file which a command writes leads nowhere: its target stays as it was."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn.cli import main
from ringattn.errors import InputError, RingError
from ringattn.launch.folders import locked, write_json
from ringattn.launch.measure.points import ARRIVALS, Folder, leave
from ringattn.launch.pictures.timeline import write_tracks
from ringattn.launch.train.checkpoints import write_run
from ringattn.observe import files
from ringattn.observe.files import is_stream, write_file
from ringattn.observe.flight import FlightRecord
from tests.launch.sweep_records import folder as sweep_folder
from tests.launch.sweep_records import strong

ROOT = Path(__file__).resolve().parents[2]
KEPT = "what the user keeps elsewhere"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file outside the folder that commands write to."""
    path = tmp_path / "target"
    path.write_text(KEPT)
    return path


def planted(target: Path, *names: str) -> Path:
    """A folder with links of these names that lead to the target."""
    folder = target.parent / "shared"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    return folder


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "result": ("result.json", lambda folder: write_json(folder / "result.json", {})),
    "flight record": ("flight-0.json", lambda folder: FlightRecord(0, 1, "shm").dump(folder, "a test")),
    "recording": (
        "recording-3.json",
        lambda folder: write_tracks(folder, [SimpleNamespace(rank=3, as_dict=dict)]),  # type: ignore[list-item]
    ),
    "record of a job": (f"{ARRIVALS}/abc.json", lambda folder: leave(folder, {"hash": "abc"})),
    "plan": ("plan.json", lambda folder: main(["plan", f"json={folder / 'plan.json'}"])),
    "picture of a plan": ("plan.png", lambda folder: main(["plan", f"picture={folder / 'plan.png'}"])),
    "picture of a schedule": (
        "s.svg", lambda folder: main(["explain", "ranks=2", "tokens=64", f"picture={folder / 's.svg'}"])
    ),
    "simulation": (
        "s.json", lambda folder: main(["simulate", "ranks=2", "tokens=64", "cluster=h100", f"json={folder / 's.json'}"])
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "write"), WRITERS.values(), ids=WRITERS)
def test_links_are_replaced_and_their_targets_stay(target: Path, name: str, write: Callable[[Path], Any]) -> None:
    folder = planted(target, name, f"{name}.partial", str(Path(name).with_suffix(".partial")))
    assert write(folder) != 2
    assert target.read_text() == KEPT
    assert not (folder / name).is_symlink() and (folder / name).stat().st_size
    assert not (folder / f"{name}.partial").is_symlink()


def test_reports_replace_links(target: Path, tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path, strong())
    for name in ("report.md", "report.html", "report.md.partial"):
        (folder / name).symlink_to(target)
    assert main(["report", str(folder)]) == 0
    assert target.read_text() == KEPT and not (folder / "report.html").is_symlink()


def test_files_that_are_kept_open_are_refused_behind_a_link(target: Path) -> None:
    folder = planted(target, ".lock", "points.jsonl", "run.json")
    with pytest.raises(InputError, match=r"out=.*: \.lock there is a symbolic link; remove it, or go away"):
        with locked(folder, "out", "sweep", "go away"):
            pass
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        Folder(folder).append({"hash": "abc", "environment": None})
    with pytest.raises(FileExistsError):
        write_run(folder, {}, {})
    assert target.read_text() == KEPT


def test_a_file_is_created_exclusively(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is planted after the last look is not followed either."""
    folder = planted(target, "result.json.partial")
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    with pytest.raises(RingError, match=r"result\.json could not be written: File exists"):
        write_json(folder / "result.json", {})
    assert target.read_text() == KEPT


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "file", "old")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()

    def full(self: Path, other: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        write_file(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and path.read_text() == "old"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_links_to_open_files_are_written_through(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /dev/stdout, which root could replace; a folder of this test stands for /dev."""
    assert all(is_stream(Path(path)) for path in ("/dev/stdout", "/dev/null", "/dev/fd/63"))
    assert not is_stream(Path("/dev/shm/file")) and not is_stream(Path("stdout"))
    folder = planted(target, "stdout")
    monkeypatch.setattr(files, "STREAMS", (str(folder),))
    assert main(["plan", f"json={folder / 'stdout'}"]) == 0
    assert (folder / "stdout").is_symlink() and "model" in json.loads(target.read_text())


def test_what_is_no_regular_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["plan", f"json={tmp_path / 'pipe'}"]) == 2
    assert "is no regular file; name one, or /dev/stdout" in capsys.readouterr().err


SAFE = {
    "launch/ranks.py": "in a private folder with a random name",
    "launch/processes.py": "there, too, and exclusively",
    "launch/train/checkpoints.py": "exclusively",
    "launch/outputs.py": "a picture into memory",
    "launch/report/charts.py": "a picture into memory",
    "ringattn/observe/files.py": "the one place",
    "ringattn/observe/memory.py": "/proc",
}


def test_all_files_are_written_in_one_place() -> None:
    """Nothing else in the commands opens a file to write."""
    writers = set()
    for file in (*(ROOT / "launch").rglob("*.py"), *(ROOT / "ringattn" / "observe").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                modes = [value.value for value in node.args if isinstance(value, ast.Constant)]
                opens = name in ("open", "fdopen") and any(set(str(mode)) & set("wxa+") for mode in modes)
                if opens or name in ("write_text", "write_bytes", "savefig", "touch", "_dump_snapshot"):
                    writers.add(str(file.relative_to(ROOT)))
    assert writers - {"launch/folders.py"} == set(SAFE)

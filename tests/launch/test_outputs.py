"""Outputs of commands: numbers out of bounds, paths and disks that cannot be written, terminals, symbolic links."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn.cli import STARTS, main
from ringattn.errors import InputError, RingError
from ringattn.launch.calls import RunConfig
from ringattn.launch.config import load
from ringattn.launch.folders import locked, not_written, write_json
from ringattn.launch.measure.points import Folder, read_points
from ringattn.launch.options import MOST_SEED
from ringattn.launch.pictures import charts
from ringattn.launch.train import demo
from ringattn.launch.train.checkpoints import write_run
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.data import load_documents, windows
from ringattn.observe import files
from ringattn.observe.files import is_stream, write_file
from tests.launch.commands import ROOT, python
from tests.launch.sweep_records import folder, quiet, record, strong

DIGITS = "9" * 400


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that refuses its arguments. Return its error, a single line after the line of its start."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    command = arguments[0]
    start = [f"ringattn {command}: {STARTS[command]}"] if command in STARTS else []
    *before, line = captured.err.splitlines()
    assert captured.out == "" and before == start
    return line


@pytest.mark.parametrize(
    ("command", "message"),
    [
        *((f"plan {key}={DIGITS}", f"{key}={DIGITS}: must be at most")
          for key in ("batch", "tokens", "ranks", "layers", "vocabulary", "chunked_loss_tokens")),
        ("plan memory_gib=inf", "memory_gib=inf: must be a finite number"),
        ("plan framework_gib=1e300", "framework_gib=1e+300: must be at most"),
        ("plan memory_gib=1e300", "memory_gib=1e+300: must be at most"),
        ("plan tflops=inf", "tflops=inf: must be a finite number"),
        (f"plan mask=dilated segment_lengths=[{DIGITS}] dilation_rates=[1]", "segment_lengths must be at most"),
        (f"explain tokens={DIGITS}", f"length={DIGITS}: a sequence has at most"),
        (f"explain segment_lengths=[64] dilation_rates=[{DIGITS}]", "dilation_rates must be at most"),
        ("explain heads=1000000000000 segment_lengths=[64] dilation_rates=[2]", "heads=1000000000000: must be at most"),
        (f"run seed={DIGITS}", f"seed={DIGITS}: must be at most {MOST_SEED}"),
        (f"check seed={MOST_SEED + 1}", f"seed={MOST_SEED + 1}: must be at most {MOST_SEED}"),
        (f"train seed={MOST_SEED + 1}", f"seed={MOST_SEED + 1}: must be at most {MOST_SEED}"),
    ],
)  # fmt: skip
def test_numbers_beyond_bounds_are_refused(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(command.split(), capsys)


def test_the_largest_seed_can_draw_batches() -> None:
    assert load([f"seed={MOST_SEED}"], TrainConfig).seed == load([f"seed={MOST_SEED}"], RunConfig).seed == MOST_SEED
    text = load_documents().tokens
    drawn = [windows(text, step, 1, 64, MOST_SEED).tolist() for step in (0, 0, 2**31)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_window_longer_than_any_sequence_masks_nothing() -> None:
    from ringattn.core.mask import make_mask

    assert make_mask(9, 9, causal=True, window=(int(DIGITS), 0)) == make_mask(9, 9, causal=True)


@pytest.mark.parametrize(
    ("command", "key", "name"),
    [("plan", "json", "a.json"), ("plan", "picture", "a.png"), ("explain", "picture", "a.png"),
     ("explain", "rows_picture", "a.png"), ("timeline", "trace", "a.json"), ("timeline", "picture", "a.png"),
     ("calibrate", "out", "a.json")],
)  # fmt: skip
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    command: str, key: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    (tmp_path / "is.png").mkdir()
    missing = tmp_path / "no" / name
    assert f"{key}={missing}: its folder does not exist" in refusal([command, f"{key}={missing}"], capsys)
    assert f"{key}={tmp_path}/is.png: is a folder" in refusal([command, f"{key}={tmp_path}/is.png"], capsys)
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda *_: False)  # root may write everywhere
        assert "cannot be written" in refusal([command, f"{key}={tmp_path / name}"], capsys)
    if "picture" in key:
        bad = tmp_path / "a.foo"
        assert "the name of a picture must end in one of .png, .svg, .pdf" in refusal([command, f"{key}={bad}"], capsys)


def test_a_disk_that_fills_up_during_the_work_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "rename", full)
    assert main(["plan", "ranks=8", "recommended=true", f"json={tmp_path / 'a.json'}"]) == 2
    line = f"ringattn plan: json={tmp_path / 'a.json'}: cannot be written (No space left on device)"
    assert line in capsys.readouterr().err
    for name, points in (("a", strong()), ("b", strong())):
        monkeypatch.undo()
        folder(tmp_path / name, points)
    monkeypatch.setattr(Path, "rename", full)
    assert main(["report", str(tmp_path / "a")]) == 2
    assert "report.md: cannot be written (No space left on device)" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), f"json={tmp_path / 'c.json'}"]) == 2
    assert "c.json: cannot be written (No space left on device)" in capsys.readouterr().err


def test_a_folder_can_be_locked_on_a_full_disk(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from ringattn.launch.folders import locked\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "with locked(Path(sys.argv[1]), 'out', 'run', 'wait') as lock: print(lock.lost())"
    )
    done = python("-c", code, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


def test_an_unknown_error_is_attributed_to_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("unexpected pos 704 vs 598")  # the error of torch's writer
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    full = f"{tmp_path}/a could not be written: No space left on device; it needs about 2.0 MiB, and the disk at "
    assert str(not_written(tmp_path / "a", error, 2 * 2**20)).startswith(full)
    assert "RuntimeError: unexpected pos 704 vs 598; it needs about 0.5 KiB" in str(not_written(tmp_path, error, 500))


def test_the_demo_writes_its_summary_before_pictures_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    result = {"ranks": 2, "losses": [1.0], "replicated_bytes": 1, "memory_growth_bytes": [1], "memory_method": ""}
    monkeypatch.setattr(charts, "draw_losses", full)
    with pytest.raises(InputError, match=r"^out=.*: cannot be written \(No space left on device\)"):
        demo._write(tmp_path, [[result], [{**result, "ranks": 1}]], [], "a schedule", True)  # type: ignore[arg-type]
    assert json.loads((tmp_path / "summary.json").read_text())["equal"] is True


def test_lines_that_are_not_records_are_skipped_and_wrong_environments_refused(tmp_path: Path, capsys: Any) -> None:
    points = folder(tmp_path, [record(1, 4096), record(2, 4096)]) / "points.jsonl"
    points.write_bytes(b"\xff\xfe\x00 torn\n3\n[]\n{}\n" + b'{"hash": 3}\n' + points.read_bytes())
    assert [record["world_size"] for record in read_points(tmp_path).values()] == [1, 2]
    assert main(["report", str(tmp_path)]) == 0
    assert "5 lines" in capsys.readouterr().out
    for content in ("3", "[]", '{"e1": 3}', '"\udcff"'):
        (tmp_path / "environments.json").write_text(content, encoding="utf-8", errors="surrogateescape")
        assert "environments.json" in refusal(["report", str(tmp_path)], capsys)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_shows_escapes(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [folder(tmp_path / name, strong(), quiet) for name in ("a", "b")]
    lines = [json.loads(line) for line in (folders[1] / "points.jsonl").read_text().splitlines()]
    lines[0] |= {"forward_ms": {**lines[0]["forward_ms"], "median": 1e6}, "message": "größer ★"}
    (folders[1] / "points.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = {"report": "★", "compare": "→", "plan": "★", "ä": "ä"}
    for arguments in (["report", str(folders[1])], ["compare", *map(str, folders)], ["plan", "preset=★"], ["ä"]):
        written = io.BytesIO()
        streams = [io.TextIOWrapper(written, encoding=encoding, write_through=True) for _ in range(2)]
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", streams[0])
            patched.setattr(sys, "stderr", streams[1])
            main(arguments)
        letter = expected[arguments[0]]
        assert letter.encode(encoding, "backslashreplace") in written.getvalue()


# --- symbolic links are not followed ---------------------------------------------------------------------------------


ORIGINAL = "a file of the user"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a file outside the folder that commands write to."""
    path = tmp_path / "target"
    path.write_text(ORIGINAL)
    return path


def folder_with_links(target: Path, *names: str) -> Path:
    """Make a folder in which each of these names is a symbolic link to the target."""
    shared = target.parent / "shared"
    for name in names:
        (shared / name).parent.mkdir(parents=True, exist_ok=True)
        (shared / name).symlink_to(target)
    return shared


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "result": ("result.json", lambda shared: write_json(shared / "result.json", {})),
    "picture of a plan": ("plan.png", lambda shared: main(["plan", f"picture={shared / 'plan.png'}"])),
}  # fmt: skip


@pytest.mark.parametrize(("name", "write"), WRITERS.values(), ids=WRITERS)
def test_a_link_is_replaced_and_its_target_is_unchanged(target: Path, name: str, write: Callable[[Path], Any]) -> None:
    shared = folder_with_links(target, name, f"{name}.partial", str(Path(name).with_suffix(".partial")))
    assert write(shared) != 2
    assert target.read_text() == ORIGINAL
    assert not (shared / name).is_symlink() and (shared / name).stat().st_size
    assert not (shared / f"{name}.partial").is_symlink()


def test_reports_replace_links(target: Path, tmp_path: Path) -> None:
    shared = folder(tmp_path, strong())
    for name in ("report.md", "report.html", "report.md.partial"):
        (shared / name).symlink_to(target)
    assert main(["report", str(shared)]) == 0
    assert target.read_text() == ORIGINAL and not (shared / "report.html").is_symlink()


def test_locks_and_records_are_not_opened_through_a_link(target: Path) -> None:
    shared = folder_with_links(target, ".lock", "points.jsonl", "run.json")
    with pytest.raises(InputError, match=r"out=.*: \.lock there is a symbolic link; remove it, or go away"):
        with locked(shared, "out", "sweep", "go away"):
            pass
    with pytest.raises(RingError, match=r"points\.jsonl is a symbolic link, and records are not written through links"):
        Folder(shared).append({"hash": "abc", "environment": None})
    with pytest.raises(FileExistsError):
        write_run(shared, {}, {})
    assert target.read_text() == ORIGINAL


def test_a_link_that_appears_before_the_file_is_created_is_not_followed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = folder_with_links(target, "result.json.partial")
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    with pytest.raises(RingError, match=r"result\.json could not be written: File exists"):
        write_json(shared / "result.json", {})
    assert target.read_text() == ORIGINAL


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "file", "old")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        write_file(path, "new")
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and path.read_text() == "old"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_links_to_open_files_are_followed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands write through links to open files such as /dev/stdout, and do not replace them.

    In this test, a temporary folder takes the place of /dev.
    """
    assert all(is_stream(Path(path)) for path in ("/dev/stdout", "/dev/null", "/dev/fd/63"))
    assert not is_stream(Path("/dev/shm/file")) and not is_stream(Path("stdout"))
    shared = folder_with_links(target, "stdout")
    monkeypatch.setattr(files, "STREAMS", (str(shared),))
    assert main(["plan", f"json={shared / 'stdout'}"]) == 0
    assert (shared / "stdout").is_symlink() and "model" in json.loads(target.read_text())


def test_a_path_that_is_not_a_regular_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["plan", f"json={tmp_path / 'pipe'}"]) == 2
    assert "is not a regular file; name a regular file or /dev/stdout" in capsys.readouterr().err


SAFE = {
    "launch/ranks.py": "in a private folder with a random name",
    "launch/processes.py": "in the same folder, and created exclusively",
    "launch/train/checkpoints.py": "created exclusively",
    "launch/report/page.py": "a picture in memory",
    "ringattn/observe/files.py": "the function that all commands use",
    "ringattn/observe/memory.py": "a file of /proc",
}
"""Modules that may open files for writing, and why that is safe."""


def test_only_known_modules_open_files_for_writing() -> None:
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

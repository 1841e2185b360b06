"""Odd words, places and terminals: no command ends in a traceback or finds out after the work."""

from __future__ import annotations

import errno
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ringattn.cli import STARTS, main
from ringattn.launch.calls import RunConfig
from ringattn.launch.config import load
from ringattn.launch.measure.points import read_points
from ringattn.launch.options import MOST_SEED
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.data import load_documents, windows
from tests.launch.sweep_records import folder, quiet, record, strong

DIGITS = "9" * 400


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that refuses its words, after that of what it began."""
    assert main(words) == 2
    told = capsys.readouterr()
    begun = [f"ringattn {words[0]}: {STARTS[words[0]]}"] if words[0] in STARTS else []
    *before, line = told.err.splitlines()
    assert told.out == "" and before == begun
    return line


@pytest.mark.parametrize(
    ("words", "said"),
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
def test_numbers_beyond_bounds_are_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(words.split(), capsys)


def test_the_greatest_seed_draws_batches() -> None:
    assert load([f"seed={MOST_SEED}"], TrainConfig).seed == load([f"seed={MOST_SEED}"], RunConfig).seed == MOST_SEED
    text = load_documents().tokens
    drawn = [windows(text, step, 1, 64, MOST_SEED).tolist() for step in (0, 0, 2**31)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_window_longer_than_any_sequence_hides_nothing() -> None:
    from ringattn.core.mask import make_mask

    assert make_mask(9, 9, causal=True, window=(int(DIGITS), 0)) == make_mask(9, 9, causal=True)


@pytest.mark.parametrize(
    ("command", "key", "name"),
    [("plan", "json", "a.json"), ("plan", "picture", "a.png"), ("explain", "picture", "a.png"),
     ("explain", "rows_picture", "a.png"), ("timeline", "trace", "a.json"), ("timeline", "picture", "a.png"),
     ("calibrate", "out", "a.json")],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    command: str, key: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    (tmp_path / "is.png").mkdir()
    missing = tmp_path / "no" / name
    assert f"{key}={missing}: its folder does not exist" in refused([command, f"{key}={missing}"], capsys)
    assert f"{key}={tmp_path}/is.png: is a folder" in refused([command, f"{key}={tmp_path}/is.png"], capsys)
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda *_: False)  # whoever runs the tests may write everywhere
        assert "cannot be written" in refused([command, f"{key}={tmp_path / name}"], capsys)
    if "picture" in key:
        bad = tmp_path / "a.foo"
        assert "a picture's name ends in one of .png, .svg, .pdf" in refused([command, f"{key}={bad}"], capsys)


def test_a_disk_that_fills_meanwhile_is_one_line(
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


def test_bytes_that_are_no_text_and_lines_that_are_no_records(tmp_path: Path, capsys: Any) -> None:
    points = folder(tmp_path, [record(1, 4096), record(2, 4096)]) / "points.jsonl"
    points.write_bytes(b"\xff\xfe\x00 torn\n3\n[]\n{}\n" + b'{"hash": 3}\n' + points.read_bytes())
    assert [one["world_size"] for one in read_points(tmp_path).values()] == [1, 2]
    assert main(["report", str(tmp_path)]) == 0
    assert "5 lines" in capsys.readouterr().out
    for odd in ("3", "[]", '{"e1": 3}', '"\udcff"'):
        (tmp_path / "environments.json").write_text(odd, encoding="utf-8", errors="surrogateescape")
        assert "environments.json" in refused(["report", str(tmp_path)], capsys)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [folder(tmp_path / name, strong(), quiet) for name in ("a", "b")]
    lines = [json.loads(line) for line in (sides[1] / "points.jsonl").read_text().splitlines()]
    lines[0] |= {"forward_ms": {**lines[0]["forward_ms"], "median": 1e6}, "message": "größer ★"}
    (sides[1] / "points.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = {"report": "★", "compare": "→", "plan": "★", "ä": "ä"}
    for words in (["report", str(sides[1])], ["compare", *map(str, sides)], ["plan", "preset=★"], ["ä"]):
        written = io.BytesIO()
        streams = [io.TextIOWrapper(written, encoding=encoding, write_through=True) for _ in range(2)]
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", streams[0])
            patched.setattr(sys, "stderr", streams[1])
            main(words)
        letter = expected[words[0]]
        assert letter.encode(encoding, "backslashreplace") in written.getvalue()

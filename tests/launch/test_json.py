"""The option `json` of the commands: with `json=-`, standard output is one JSON document and text goes to stderr.

`test_ranks.py` and `tests/test_processes.py` test the same for commands that start processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringattn.cli import main
from ringattn.launch.measure import check
from tests.launch.sweep_records import folder, strong

COMMANDS: dict[str, tuple[str, set[str]]] = {
    "explain": ("ranks=2 tokens=64", {"schedule", "layout", "engine", "by_rank", "balance", "steps"}),
    "plan": ("preset=1.3B ranks=8", {"model", "hardware", "fits", "bytes_by_component"}),
    "simulate": ("ranks=8 tokens=64k", {"config", "cluster", "curves"}),
    "check": ("transport=local ranks=2 combinations=pairs", {"cases", "failed", "results"}),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_standard_output_is_one_document(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, keys = COMMANDS[command]
    few = list(check.paired_cases())[:3]
    monkeypatch.setattr(check, "paired_cases", lambda: few)
    assert main([command, *options.split(), "json=-"]) in (0, 1)  # `plan`: 1 if the run does not fit
    captured = capsys.readouterr()
    assert keys <= set(json.loads(captured.out)) and captured.err.strip()


def test_a_file_contains_the_same_document_as_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["explain", "ranks=3", "tokens=100"]
    assert main([*arguments, f"json={tmp_path / 'figures.json'}"]) == 0
    text = capsys.readouterr().out
    assert f"written: {tmp_path / 'figures.json'}" in text and text.startswith("ring schedule")
    assert main([*arguments, "json=-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert figures["by_rank"]["tokens"] == [33, 33, 34] and figures["ranks"] == 3


def test_compare_prints_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder(tmp_path, strong()))
    assert main(["compare", path, path, "json=-"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["worse"] == 0


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"json={tmp_path / 'none' / 'a.json'}"]) == 2
    assert "its folder does not exist" in capsys.readouterr().err


def test_planning_many_ranks_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "ranks=17", "tokens=34", "json=-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ranks"] == 17 and "planning 17 ranks" in printed.err

"""`make demo` tells its story in about twenty lines, whatever it trains. Runs and check are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringattn.launch.train import demo
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.loop import TrainingProgress

CHECK_LINES = 8
"""What `ringattn check` prints: two of heading, one for each of five schedules, one for all."""


def test_the_story_has_about_twenty_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(config: TrainConfig, ranks: int, console: object) -> list[dict[str, Any]]:
        found = []
        for dtype in ("fp32", "fp64"):
            with TrainingProgress(f"{ranks} x {dtype}", 40, lines=1) as progress:
                for step in range(40):
                    progress.done(step, 5.0 - step / 10, 1e3)
            found.append({
                "config": {"dtype": dtype}, "losses": [5.0 - step / 10 + 1e-7 * (ranks > 1) for step in range(40)],
                "ranks": ranks, "memory_growth_bytes": [2**20] * ranks, "tokens_of_rank": [2048 // ranks] * ranks,
                "tokens_per_s": 1e3, "memory_method": "a scale",
            })  # fmt: skip
            found[-1]["losses"] = [loss if dtype == "fp32" else 5.0 for loss in found[-1]["losses"]]
        return found

    monkeypatch.setattr(demo, "_train", trained)
    monkeypatch.setattr(demo, "_check", lambda console, verbose: True)
    monkeypatch.setattr(demo, "explain", lambda config, ranks: None)
    monkeypatch.setattr(demo, "_write", lambda *given: None)
    monkeypatch.setenv("COLUMNS", "120")
    assert demo.main([f"out={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) + CHECK_LINES <= 24
    told = "\n".join(lines)
    assert "    40            1.1000001        1.1000000    +1.0e-07" in told
    assert "        4             512         1.0 MiB      1,000" in told
    assert "fp32: over 40 steps" in told and "fp64: over 40 steps" in told and "DIFFERENT" not in told


def test_a_run_prints_as_many_lines_as_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, printed in ((0, 0), (1, 1), (10, 11)):
        with TrainingProgress("a run", 40 if asked else 0, asked) as progress:
            for step in range(40):
                progress.done(step, 1.0, 1.0)
        assert len(capsys.readouterr().out.splitlines()) == printed

"""What is kept of plan beside published figures is what plan says now; and what was measured is near it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringattn.bench import training_published
from ringattn.bench.report import Table
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.model import ModelConfig
from ringattn.layers import offload

KEPT = Path(__file__).resolve().parents[2] / "bench/results/cpu/training_published.json"


def kept(title: str) -> list[dict[str, str]]:
    tables: dict[str, Any] = json.loads(KEPT.read_text())["tables"]
    return next(rows for name, rows in tables.items() if name.startswith(title))


def rows(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_steps_are_those_that_plan_says() -> None:
    assert rows(training_published.times_table()) == kept("Published steps")


@pytest.mark.slow
def test_lengths_are_those_that_plan_says() -> None:
    assert rows(training_published.longest_table()) == kept("Longest sequence")


def test_measured_peaks_are_within_a_tenth() -> None:
    found = kept("Peak of a training step, measured")
    assert len(found) == len(training_published.SWITCHES)
    for row in found:
        assert 0.9 < float(row["plan / measured"]) < 1.1, row


def test_the_host_stands_beside_only_while_it_is_measured() -> None:
    before = offload.to_host
    model = ModelConfig(2, 32, 4, 2, 48)
    config = TrainConfig(tokens=64, steps=1, dtype="fp32", recompute="offloaded", model=model)
    assert training_published.measured_bytes(config) > 0 and offload.to_host is before

"""What is kept of plan beside published figures is what plan says now; and what was measured is near it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringattn.bench import training_published
from ringattn.bench.report import Table
from ringattn.launch.capacity.fitting import estimate
from ringattn.launch.capacity.hardware import hardware
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.layers import offload

KEPT = Path(__file__).resolve().parents[2] / "bench/results/cpu/training_published.json"


def kept(title: str) -> list[dict[str, str]]:
    tables: dict[str, Any] = json.loads(KEPT.read_text())["tables"]
    return next(rows for name, rows in tables.items() if name.startswith(title))


def rows(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_steps_are_those_that_plan_says() -> None:
    assert rows(training_published.times_table()) == kept("Published steps")


def test_one_rate_is_taken_from_the_row_without_a_ring() -> None:
    """All else of the machine stays, no other row goes into it, and the column beside it is not of other sources."""
    rows_of_source = [point for point in training_published.points() if point.source == training_published.TITAN]
    first, machine = rows_of_source[0], hardware("h100")
    assert first.run.ranks == 1
    slower = training_published.at_own_rate(machine, first)
    assert estimate(first.run, slower).tokens_s == pytest.approx(first.tokens_s, rel=1e-12)
    ours, theirs = machine.reached, slower.reached
    share = theirs.attention_forward / ours.attention_forward
    assert theirs == replace(ours, attention_forward=share * ours.attention_forward,
                             attention_backward=share * ours.attention_backward)  # fmt: skip
    shown = [row["at the source's own attention rate"] for row in kept("Published steps")]
    for point, cell in zip(rows_of_source, shown, strict=False):
        ranks = point.run.ranks * point.run.tensor_ranks * point.run.pipeline_ranks
        rate = estimate(point.run, slower).tokens_s / ranks
        assert cell == f"{rate:,.0f}, {rate / point.tokens_s:.2f}"
    assert len(rows_of_source) == 8 and not any(shown[8:])


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

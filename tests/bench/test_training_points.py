"""Published training steps of other stacks: the recorded table is that of the planner, and its sources are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringattn.bench.report import RESULTS
from ringattn.bench.training_points import MEMORY, SOURCES, TIME, all_figures

RECORDED = Path(__file__).parents[2] / RESULTS / "training_points.json"


def test_the_recorded_figures_are_those_of_the_planner() -> None:
    recorded = json.loads(RECORDED.read_text())["figures"]
    planned = [figure.data() for figure in all_figures()]
    assert [{**row, "planned": 0} for row in planned] == [{**row, "planned": 0} for row in recorded]
    assert [row["planned"] for row in planned] == pytest.approx([row["planned"] for row in recorded], rel=1e-9)


def test_enough_published_figures_are_met() -> None:
    """At least 25 figures of five sources are planned, and at least 20 of those with stated settings are met."""
    figures = all_figures()
    assert {figure.point.source for figure in figures} == set(SOURCES) and len(SOURCES) >= 5 and len(figures) >= 25
    counted = [figure for figure in figures if figure.point.counted]
    bounds = {"s": TIME}
    met = [abs(figure.planned / figure.published - 1) <= bounds.get(figure.unit, MEMORY) for figure in counted]
    assert sum(met) >= 20 and met == [figure.met for figure in counted]
    assert [sum(figure.met for figure in counted if (figure.unit == "s") == time) for time in (False, True)] == [26, 25]
    for figure in figures:
        assert figure.met or figure.point.missing or figure.point.missing_gib, figure.point.name


def test_the_rates_of_products_are_those_of_their_rows() -> None:
    """The rows that rates come from are planned as published, to the digits of the rates, and are not counted."""
    rows = [figure for figure in all_figures() if figure.point.name.endswith(("June 2025", "August 2024"))]
    assert len(rows) == 3 and not any(figure.point.counted for figure in rows)
    assert [figure.ratio for figure in rows] == pytest.approx([1, 1, 1], abs=2e-3)

"""The plain engine against the contract, and its own promise: bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringattn.engine import plain
from ringattn.engine.plain import PlainEngine
from tests.contract.engine_contract import EngineContract
from tests.contract.engine_scenarios import SCENARIOS
from tests.contract.engine_trial import Trial


class TestPlain(EngineContract):
    """The whole suite."""

    places = True

    def engine(self) -> PlainEngine:
        return PlainEngine()


@pytest.mark.parametrize("name", ["causal", "window", "dilated", "blind", "softcap", "alibi"])
def test_chunks_of_rows_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows at a time: chunk borders fall inside every band."""
    scenario = SCENARIOS[name]
    keys = scenario.steps[0].tiles[0].k.rows.count
    monkeypatch.setattr(plain, "SCORES_BYTES", 7 * 8 * keys * scenario.batch * scenario.heads)
    trial = Trial(scenario, torch.float64, True)
    trial.check(trial.run(PlainEngine()), 1e-10)


def recorded_scores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every score matrix that the engine makes from now on."""
    sizes: list[int] = []
    scores = plain._scores

    def recording(*operands: Any) -> Any:
        made = scores(*operands)
        sizes.append(made[0].nbytes)
        return made

    monkeypatch.setattr(plain, "_scores", recording)
    return sizes


def test_score_matrices_of_all_heads_and_batches_stay_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 20_000
    monkeypatch.setattr(plain, "SCORES_BYTES", limit)
    sizes = recorded_scores(monkeypatch)
    Trial(SCENARIOS["mqa"], torch.float32, False).run(PlainEngine())
    assert limit // 2 < max(sizes) <= limit


def test_tiles_without_a_pair_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tile of this scenario lies in its queries' future."""
    sizes = recorded_scores(monkeypatch)
    Trial(SCENARIOS["blind"], torch.float32, False).run(PlainEngine())
    assert len(sizes) == 2

"""The engine contract for NaN and infinity: a NaN is never hidden, and a score of -inf has no weight."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ringattn.core.geometry import CAUSAL, FULL, Band, Tile
from ringattn.engine.base import KV, Engine, Softmax
from tests.contract.engine_scenarios import SCENARIOS, StridedRange, strip
from tests.contract.engine_trial import NAN, SCALE, TOLERANCE, Trial


class NotFinite:
    """Tests of NaN inputs and infinite scores.

    `infinite_scores`: whether a row whose scores in a step are all -inf must behave like a row without a key. If not,
    it may be NaN.
    """

    infinite_scores = True
    device = "cpu"

    def engine(self) -> Engine:
        raise NotImplementedError

    @pytest.mark.parametrize("name", ["full", "one-pair", "zigzag", "window"])
    def test_a_query_of_nan_stays_visible_and_stays_in_its_row(self, name: str) -> None:
        """A NaN in q shows in out, lse and dq of its row, and in dK and dV of the keys that the row attends to.

        Other rows of out, lse and dq keep their bits.
        """
        trial = Trial(SCENARIOS[name], torch.float32, False, 0, self.device)
        clean = trial.run(self.engine())
        row, _, head, _ = trial.q_touched.nonzero()[-1].tolist()
        trial.q[row, 0, head, 2] = NAN
        results = trial.run(self.engine())
        assert not results["lse"][0, head, row].isfinite()
        for result in ("out", "dq"):
            assert results[result][row, 0, head].isnan().all(), result
            results[result][row, 0, head] = clean[result][row, 0, head]
        results["lse"][0, head, row] = clean["lse"][0, head, row]
        for result in ("out", "lse", "dq"):
            assert torch.equal(results[result].nan_to_num(7.0), clean[result].nan_to_num(7.0)), result
        for i, step in enumerate(trial.scenario.steps):
            for tile in (candidate for candidate in step.tiles if head in candidate.heads.members()):
                seen = trial._allowed(tile, step.k_rows)[head, row]
                kv_head = head // trial.scenario.group - step.held.start
                for result in (f"dk{i}", f"dv{i}"):
                    assert results[result][seen, 0, kv_head].isnan().all(), result

    @pytest.mark.parametrize("operand", ["k", "v"])
    @pytest.mark.parametrize("name", ["one-pair", "zigzag", "window"])
    def test_a_key_or_a_value_of_nan_reaches_every_query_that_sees_it(self, name: str, operand: str) -> None:
        trial = Trial(SCENARIOS[name], torch.float32, False, 0, self.device)
        clean, step = trial.run(self.engine()), trial.scenario.steps[0]
        tile = step.tiles[0]
        key, head = tile.k.rows.last, tile.heads.start
        kv_head = head // trial.scenario.group
        getattr(trial.kvs[0], operand)[key, 0, kv_head - step.held.start, 2] = NAN
        results = trial.run(self.engine())
        seen = trial._allowed(tile, step.k_rows)[head, :, key]
        out, lse = results["out"][:, 0, head], results["lse"][0, head]
        assert seen.any()
        if operand == "k":
            assert out[seen].isnan().all() and not lse[seen].isfinite().any()
            unseen = trial.q_touched[:, 0, head, 0] & ~seen
            assert torch.equal(lse[unseen], clean["lse"][0, head][unseen])
            assert torch.equal(out[unseen], clean["out"][unseen, 0, head])
        else:
            assert out[seen, 2].isnan().all()
            assert torch.equal(lse.nan_to_num(7.0), clean["lse"][0, head].nan_to_num(7.0))

    @pytest.mark.parametrize("query", [NAN, 0.0], ids=str)
    def test_a_value_of_nan_hides_nothing_of_its_row(self, query: float) -> None:
        """A NaN in V hides neither a NaN score nor the other numbers of its row, even if the row's lse is 0."""
        trial = Trial(SCENARIOS["one-pair"], torch.float32, False, 0, self.device)
        step = trial.scenario.steps[0]
        tile = step.tiles[0]
        row, key, head = tile.q.rows.start, tile.k.rows.start, tile.heads.start
        v = trial.kvs[0].v[key, 0, head // trial.scenario.group - step.held.start]
        trial.q[row, 0, head], v[2] = query, NAN
        results = trial.run(self.engine())
        out, lse = results["out"][row, 0, head], results["lse"][0, head, row]
        if query == 0:
            assert lse == 0 and torch.equal(out.nan_to_num(7.0), v.to(out.dtype).nan_to_num(7.0))
        else:
            assert out.isnan().all() and not lse.isfinite()

    @pytest.mark.parametrize("band", [FULL, CAUSAL], ids=["full", "causal"])
    @pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,)], ids=str)
    def test_scores_of_minus_infinity_have_no_weight(self, order: tuple[int, ...], band: Band) -> None:
        """Keys whose scores are -inf, here those of step 0, have no weight.

        A row with only such keys is a row without a key. A NaN in these scores is not hidden.
        """
        rows = 21
        q, *kvs = (torch.randn(rows, 1, 2, 16, device=self.device) for _ in range(5))
        q[..., 0] = 1.0
        kvs[0][..., 0] = -math.inf
        tile = Tile(strip(0, rows), strip(0, rows), band, StridedRange(0, 2))

        def run(steps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            engine = self.engine()
            works = engine.prepare([[tile]] * len(steps), Softmax(SCALE), rows, 2)
            state = engine.begin(works, q, 16, None)
            for step, work in zip(steps, works, strict=True):
                engine.attend(q, KV(kvs[2 * step], kvs[2 * step + 1]), state, work)
            return state.out.finalized(q.dtype), state.lse

        expected = run((1,)) if 1 in order else (torch.zeros_like(q), torch.full((1, 2, rows), -math.inf).to(q.device))
        out, lse = run(order)
        if not self.infinite_scores and out.isnan().any():
            assert out.isnan().all()
            return
        torch.testing.assert_close((out, lse), expected, rtol=0, atol=TOLERANCE[torch.float32])
        kvs[0][0, :, :, 3] = NAN
        out, lse = run(order)
        assert out.isnan().all() and not lse.isfinite().any()

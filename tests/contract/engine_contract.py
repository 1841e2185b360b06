"""The contract of every engine, as tests. A test subclasses `EngineContract` and returns its engine from `engine`.

Out, lse, dq, dk and dv are compared with the dense float64 reference in scenarios of several attend calls. Nothing
outside the tiles may be read (it contains NaN) or written (it is compared bit for bit). The same call gives the same
bits twice.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringattn.core.geometry import CAUSAL, Tile
from ringattn.engine.base import KV, BackwardInputs, Output, Softmax, SoftmaxState, Visit
from ringattn.errors import UnsupportedError
from tests.contract.engine_not_finite import NotFinite
from tests.contract.engine_scenarios import DENSE, SCENARIOS, Scenario, StridedRange, random_scenario, simple, strip
from tests.contract.engine_trial import SCALE, TOLERANCE, Trial


class EngineContract(NotFinite):
    """The tests of one engine.

    `softcap`: whether the engine supports softcap; `places`: whether it supports ALiBi and dropout, for which it needs
    the positions of rows. An engine must refuse an option that it does not support, with an error that names it.
    """

    softcap, places = True, False

    def tried(self, scenario: Scenario, dtype: torch.dtype, with_dlse: bool, seed: int = 0) -> None:
        trial = Trial(scenario, dtype, with_dlse, seed, self.device)
        trial.check(trial.run(self.engine()), TOLERANCE[dtype])
        trial.check_margins()

    @pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("name", SCENARIOS)
    def test_scenario(self, name: str, dtype: torch.dtype, with_dlse: bool) -> None:
        if SCENARIOS[name].softcap is not None and not self.softcap:
            with pytest.raises(UnsupportedError, match="softcap"):
                self.engine().prepare([()], Softmax(SCALE, 1, SCENARIOS[name].softcap), 1, 1)
            return
        if SCENARIOS[name].dropout_p and not self.places:
            with pytest.raises(UnsupportedError, match="dropout_p"):
                self.engine().prepare([()], Softmax(SCALE, dropout_p=0.5), 1, 1)
            return
        if SCENARIOS[name].alibi and not self.places:
            with pytest.raises(UnsupportedError, match="alibi_slopes"):
                self.engine().prepare([()], Softmax(SCALE, 1, None, (0.5,)), 1, 1)
            return
        self.tried(SCENARIOS[name], dtype, with_dlse)

    @pytest.mark.parametrize(
        ("name", "overwrite", "last"),
        [
            ("zigzag", True, False), ("blind", True, False), ("dilated", True, False), ("blind", True, True),
            ("part-of-the-heads", True, True), ("window", False, True),
        ],
    )  # fmt: skip
    def test_the_first_and_the_last_on_keys(self, name: str, overwrite: bool, last: bool) -> None:
        """The first step on keys overwrites their rows of dK/dV, which are NaN. The last step writes the results."""
        visit = Visit(overwrite, last)
        trial = Trial(SCENARIOS[name], torch.float32, True, 0, self.device)
        trial.check(trial.run(self.engine(), visit), TOLERANCE[torch.float32])
        trial.check_margins()

    @pytest.mark.parametrize("name", ["mqa", "whole-call", "last-head", "last-heads"])
    def test_final_sums_of_half_inputs_are_rounded_once(self, name: str) -> None:
        scenario = SCENARIOS[name]._replace(softcap=None)
        wide, final = (
            Trial(scenario, torch.bfloat16, False, 0, self.device).run(self.engine(), Visit(True, last))
            for last in (False, True)
        )
        for part in (part for part in wide if part[:2] in ("dk", "dv")):
            assert torch.equal(final[part], wide[part].bfloat16().float())

    @pytest.mark.parametrize("scale", [0.0, -SCALE, 1e-42])
    @pytest.mark.parametrize("name", ["causal", "window", "zigzag"])
    def test_a_scale_that_is_not_positive(self, name: str, scale: float) -> None:
        """Results are right for a scale that is 0, negative or tiny.

        An engine that masks before it scales would multiply -inf by it.
        """
        trial = Trial(SCENARIOS[name], torch.float32, True, 0, self.device, scale)
        trial.check(trial.run(self.engine()), TOLERANCE[torch.float32])
        trial.check_margins()

    @pytest.mark.parametrize("seed", range(40))
    def test_random_tiles(self, seed: int) -> None:
        self.tried(random_scenario(seed, self.places), torch.float64, with_dlse=seed % 2 == 1, seed=seed)

    @pytest.mark.parametrize("name", ["zigzag", "window", "part-of-the-heads", "whole-pass"])
    def test_same_bits_twice(self, name: str) -> None:
        first, second = (
            Trial(SCENARIOS[name], torch.float32, True, 0, self.device).run(self.engine()) for _ in range(2)
        )
        assert all(torch.equal(first[part].nan_to_num(7.0), second[part].nan_to_num(7.0)) for part in first)

    @pytest.mark.parametrize("name", ["zigzag", "part-of-the-heads", "whole-zigzag-pass", "full"])
    def test_a_sink_takes_weight_and_gives_no_value(self, name: str) -> None:
        """A sink adds exp(sink) to the denominator of the softmax and nothing to the numerator.

        So a row that attends to no key has its sink as lse.
        """
        trial = Trial(SCENARIOS[name], torch.float32, False, 0, self.device)
        heads, seen = trial.scenario.heads, trial.q_touched.permute(1, 2, 0, 3)
        trial.sinks = torch.linspace(-1.0, 2.0, heads, device=trial.device)
        reference, sinks = trial.reference(), trial.sinks.double()[None, :, None]
        lse = torch.logaddexp(reference["lse"], sinks)
        out = reference["out"].permute(1, 2, 0, 3) * torch.exp(reference["lse"] - lse)[..., None]
        results = trial.run(self.engine())
        assert ((results["lse"] - lse).abs()[seen[..., 0].expand(lse.shape)] <= 1e-5).all()
        assert ((results["out"].permute(1, 2, 0, 3) - out).abs()[seen.expand(out.shape)] <= 1e-5).all()

    def test_a_row_that_no_step_meets_has_its_sink_as_lse(self) -> None:
        engine, sinks = self.engine(), torch.tensor([0.5, -1.0], device=self.device)
        q = torch.randn(6, 2, 2, 16, device=self.device)
        works = engine.prepare([()], Softmax(SCALE), 6, 2)
        state = engine.begin(works, q, 16, sinks)
        engine.attend(q, KV(q, q), state, works[0])
        assert not state.out.finalized(q.dtype).any()
        assert torch.equal(state.lse, sinks[None, :, None].expand(2, 2, 6))

    def test_no_tiles_change_nothing(self) -> None:
        trial = Trial(SCENARIOS["zigzag"], torch.float32, True, 0, self.device)
        shapes = trial.dout.shape, trial.dlse.shape  # type: ignore[union-attr]
        out, lse = (torch.randn(shape, device=self.device) for shape in shapes)
        before, engine = (out.clone(), lse.clone()), self.engine()
        works = engine.prepare([()], trial.softmax, trial.scenario.q_rows, trial.scenario.heads)
        engine.attend(trial.q, trial.kvs[0], SoftmaxState(Output(out), lse), works[0])
        assert torch.equal(out, before[0]) and torch.equal(lse, before[1])

    def test_rows_of_one_head_each_seen_by_all(self) -> None:
        """K/V of two heads may be stored one after the other in a buffer whose head stride is zero.

        The results are those of separate buffers.
        """
        engine, softmax = self.engine(), Softmax(SCALE, 2)
        q, dout = (torch.randn(24, 2, 4, 16, device=self.device) for _ in range(2))
        k, v = (torch.randn(24, 2, 1, 16, device=self.device) for _ in range(2))
        rows, heads = (StridedRange(0, 10), StridedRange(10, 14)), (StridedRange(0, 2), StridedRange(2, 2))
        tiles = [Tile(strip(14, 24), strip(0, run.count)._replace(rows=run), CAUSAL, tile_heads)
                 for run, tile_heads in zip(rows, heads, strict=True)]  # fmt: skip
        apart = [tile._replace(k=strip(0, tile.k.rows.count)) for tile in tiles]
        kvs = [KV(k[run.start : run.stop], v[run.start : run.stop], head) for head, run in enumerate(rows)]

        def run(steps: list[list[Tile]], kv_buffers: list[KV], dkvs: list[KV]) -> list[Tensor]:
            works = engine.prepare(steps, softmax, 24, 4)
            state = engine.begin(works, q, 16, None)
            for kv, work in zip(kv_buffers, works, strict=True):
                engine.attend(q, kv, state, work)
            out, dq = state.out.finalized(q.dtype), engine.begin_grad(works, q, 16)
            inputs = BackwardInputs(dout, out, state.lse, None, engine.delta(dout, out, None))
            for kv, dkv, work in zip(kv_buffers, dkvs, works, strict=True):
                engine.attend_grad(q, kv, inputs, dq, dkv, work)
            return [out, state.lse, dq.finalized(q.dtype)]

        sums, bundle = ([torch.zeros_like(x) for x in (k, v)] for _ in range(2))
        parts = [KV(*(x[run.start : run.stop] for x in sums), head) for head, run in enumerate(rows)]
        every = [KV(*(x.expand(-1, -1, 2, -1) for x in pair)) for pair in ((k, v), bundle)]
        expected, results = run([[tile] for tile in apart], kvs, parts), run([tiles], every[:1], every[1:])
        for ours, theirs in zip((*results, *bundle), (*expected, *sums), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
            assert ours.abs().sum() > 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_others_add_to_stays_wide(self, dtype: torch.dtype) -> None:
        """With `more` (other ranks add to the results), out and dQ have the accumulator dtype.

        When out is rounded, it equals that of a pass without `more`.
        """
        trial = Trial(SCENARIOS["whole-zigzag-pass"], dtype, False, 0, self.device)
        s, engine, outputs = trial.scenario, self.engine(), []
        for more in (False, True):
            works = engine.prepare([step.tiles for step in s.steps], trial.softmax, s.q_rows, s.heads, more=more)
            state, dq = engine.begin(works, trial.q, s.d_v, None), engine.begin_grad(works, trial.q, s.d_k)
            for kv, work in zip(trial.kvs, works, strict=True):
                engine.attend(trial.q, kv, state, work)
            if more:
                for output in (state.out, dq):
                    assert output.result is None and output.carried is not None
                    assert output.carried.dtype == trial.accumulator
            outputs.append(state.out.finalized(dtype))
        assert torch.equal(*outputs)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("cut", [False, True], ids=["one-tile", "two-steps"])
    def test_half_is_as_good_as_torchs_kernel(self, dtype: torch.dtype, cut: bool) -> None:
        """In half precision the error is at most 1.25 times that of torch's kernel in the same dtype.

        See "Exactness" in docs/architecture.md.
        """
        q, k, band = DENSE[0]
        halves = [(q, k.pick(StridedRange(start, 48)), band) for start in (0, 48)] if cut else [DENSE[0]]
        # `pick` keeps the row numbers, so both steps use one buffer layout. Each step reads only its half of the rows.
        trial = Trial(
            simple(tuple(halves), StridedRange(0, 4), 2, group=2, batch=2, d_k=64, d_v=64), dtype, False, 0, self.device
        )
        results, reference = trial.run(self.engine()), trial.reference()
        inputs = [trial.q.nan_to_num(0.0)[:96], *self._joined(trial)]
        ours = {"out": results["out"][:96], "dq": results["dq"][:96]}
        theirs = dict(zip(("out", "dq", "dk", "dv"), _torchs_own(inputs, trial.dout[:96]), strict=True))
        n = 96 // len(halves)
        for name in ("dk", "dv"):
            for side in (ours, reference):
                parts = results if side is ours else reference
                side[name] = torch.cat([parts[f"{name}{i}"][48 * i : 48 * i + n] for i in range(len(halves))])
        for name, value in ours.items():
            expected = reference[name][:96]
            error, bound = ((x.to(dtype).double() - expected).square().mean().sqrt() for x in (value, theirs[name]))
            assert error <= 1.25 * bound, f"{name}: {error:.2e}, torch {bound:.2e}"

    @staticmethod
    def _joined(trial: Trial) -> list[Tensor]:
        """Return [K, V], joined from the steps, each of which has its own part of the rows."""
        n = 96 // len(trial.kvs)
        return [torch.cat([(kv.k, kv.v)[i][48 * j : 48 * j + n] for j, kv in enumerate(trial.kvs)]) for i in range(2)]


def _torchs_own(inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Return [out, dq, dk, dv] of causal attention by torch, for [q, k, v] of shape (rows, batch, heads, dim)."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    qh, kh, vh = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = scaled_dot_product_attention(qh, kh, vh, is_causal=True, scale=SCALE, enable_gqa=True).permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

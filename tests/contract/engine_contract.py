"""What every engine promises, as tests: subclass `EngineContract` and return the engine from `engine`.

Forward, lse, dq, dk and dv against the dense float64 truth for scenarios of several attend calls; nothing outside the
tiles read (it is filled with NaN) or written (compared bit for bit); the same call twice gives the same bits.
Does not know: how any engine cuts its tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ringattn.engine.base import KV, Carry, Engine, Output, Seed, Softmax
from ringattn.errors import UnsupportedError
from ringattn.geometry import CAUSAL, Tile
from ringattn.partial import accumulator_dtype
from tests.contract.engine_scenarios import DENSE, SCENARIOS, Run, Scenario, random_scenario, simple, strip
from tests.oracle import attention

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
SCALE = 0.3
NAN = float("nan")


def laid_out(values: Tensor, memory: str) -> tuple[Tensor, Tensor]:
    """`values` (rows, batch, heads, dim) as a strided view into memory that holds NaN elsewhere, and that memory."""
    rows, batch, heads, dim = values.shape
    if memory == "records":
        held = values.new_full((rows + 2, batch, heads, dim + 3), NAN)
        view = held[1:-1, :, :, :dim]
    elif memory == "tokens":
        held = values.new_full((batch, rows + 2, heads, dim), NAN)
        view = held.transpose(0, 1)[1:-1]
    else:
        held = values.new_full((batch, heads, rows + 2, dim), NAN)
        view = held.permute(2, 0, 1, 3)[1:-1]
    view.copy_(values)
    return view, held


def touched(tiles: Sequence[Tile], side: str, group: int, first_head: int, like: Tensor) -> Tensor:
    """(rows, 1, heads, 1) booleans: the rows and heads of a buffer that the tiles of a step may read or write."""
    mask = torch.zeros(like.shape[0], 1, like.shape[2], 1, dtype=torch.bool)
    for tile in tiles:
        for row in (tile.q if side == "q" else tile.k).rows.members():
            for head in tile.heads.members():
                mask[row, 0, head if side == "q" else head // group - first_head] = True
    return mask.to(like.device)


class Trial:
    """A scenario with its random tensors: what an engine makes of them and what is true."""

    def __init__(
        self, scenario: Scenario, dtype: torch.dtype, with_dlse: bool, seed: int = 0, device: str = "cpu",
        scale: float = SCALE,
    ) -> None:
        s, self.device = scenario, torch.device(device)
        self.scenario = scenario
        self.dtype, self.accumulator = dtype, accumulator_dtype(dtype)
        self.generator = torch.Generator().manual_seed(seed)
        self.softmax = Softmax(scale, s.group, s.softcap)
        self.sinks: Tensor | None = None
        self.storage: list[Tensor] = []
        every_tile = [tile for step in s.steps for tile in step.tiles]
        self.q = self._input((s.q_rows, s.batch, s.heads, s.d_k), every_tile, "q", 0)
        self.kvs = [
            KV(
                self._input((step.k_rows, s.batch, step.held.count, s.d_k), step.tiles, "k", step.held.start),
                self._input((step.k_rows, s.batch, step.held.count, s.d_v), step.tiles, "k", step.held.start),
                step.held.start,
            )
            for step in s.steps
        ]
        self.q_touched = touched(every_tile, "q", s.group, 0, self.q)
        self.dout = self._input((s.q_rows, s.batch, s.heads, s.d_v), every_tile, "q", 0)
        self.dlse = self._random((s.batch, s.heads, s.q_rows)).to(self.accumulator) if with_dlse else None

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def _input(self, shape: tuple[int, ...], tiles: Sequence[Tile], side: str, first_head: int) -> Tensor:
        values = self._random(shape)
        values[~touched(tiles, side, self.scenario.group, first_head, values).expand(shape)] = NAN
        return laid_out(values, self.scenario.memory)[0]

    def _output(self, values: Tensor) -> Tensor:
        view, held = laid_out(values, self.scenario.memory)
        self.storage.append(held)
        return view

    def _relaid(self, output: Output, touched: Tensor) -> Output:
        """What an engine begins with, in memory of ours: NaN wherever it promises not to read."""
        carried, result = output
        if result is not None:  # every row is written by some step before another reads it
            touched = torch.zeros_like(touched)
        return Output(*(
            None if x is None else self._output(x.masked_fill(~touched, NAN)) for x in (carried, result)
        ))  # fmt: skip

    def run(self, engine: Engine) -> dict[str, Tensor]:
        """out, lse, dq, and dk and dv of each step, as the engine computes them from prepared buffers."""
        s = self.scenario
        works = engine.prepare([step.tiles for step in s.steps], self.softmax, s.q_rows, s.heads)
        begun = engine.begin(works, self.q, s.d_v, self.sinks)
        carry = begun._replace(out=self._relaid(begun.out, self.q_touched))
        carry.lse.masked_fill_(~self.q_touched[:, :, :, 0].permute(1, 2, 0), NAN)
        for kv, work in zip(self.kvs, works, strict=True):
            engine.attend(self.q, kv, carry, work)
        final, dq = (
            carry.out.settled(self.dtype),
            self._relaid(engine.begin_grad(works, self.q, s.d_v), torch.ones_like(self.q_touched)),
        )
        results = {"out": final, "lse": carry.lse}
        seed = Seed(self.dout, final, carry.lse, self.dlse, engine.delta(self.dout, final, self.dlse))
        for i, (kv, work) in enumerate(zip(self.kvs, works, strict=True)):
            dkv = KV(*(self._output(torch.ones(x.shape, dtype=self.accumulator)) for x in kv[:2]), kv.first_head)
            engine.attend_grad(self.q, kv, seed, dq, dkv, work)
            results |= {f"dk{i}": dkv.k - 1, f"dv{i}": dkv.v - 1}
        return results | {"dq": dq.settled(self.dtype)}

    def truth(self) -> dict[str, Tensor]:
        """The same by the oracle. Each tile has its own copy of the keys, so tiles may hold a pair twice."""
        s = self.scenario
        q = self.q.double().nan_to_num(0.0).requires_grad_()
        leaves = [[x.double().nan_to_num(0.0).requires_grad_() for x in (kv.k, kv.v)] for kv in self.kvs]
        columns: list[tuple[list[Tensor], Tensor]] = []
        for step, leaf in zip(s.steps, leaves, strict=True):
            missing = s.kv_heads - step.held.start - step.held.count
            whole = [torch.nn.functional.pad(x, (0, 0, step.held.start, missing)) for x in leaf]
            columns += [(whole, self._allowed(tile, step.k_rows)) for tile in step.tiles]
        k, v = (torch.cat([whole[i] for whole, _ in columns]).transpose(0, 1) for i in range(2))
        allowed = torch.cat([mask for _, mask in columns], -1)
        out, lse = attention(q.transpose(0, 1), k, v, allowed, self.softmax.scale, s.softcap)
        seen = allowed.any(-1)
        wanted = (out * self.dout.transpose(0, 1).double().nan_to_num(0.0)).sum()
        if self.dlse is not None:
            wanted = wanted + (lse[:, seen] * self.dlse.double()[:, seen]).sum()
        wanted.backward()
        truth = {"out": out.detach().transpose(0, 1), "lse": lse.detach(), "dq": q.grad}
        for i, leaf in enumerate(leaves):
            truth |= {f"dk{i}": leaf[0].grad, f"dv{i}": leaf[1].grad}
        return {name: x for name, x in truth.items() if x is not None}

    def _allowed(self, tile: Tile, k_rows: int) -> Tensor:
        mask = torch.zeros(self.scenario.heads, self.scenario.q_rows, k_rows, dtype=torch.bool)
        q_positions, q_rows, k_positions, key_rows = (torch.tensor(run.members()) for run in (*tile.q, *tile.k))
        distance = q_positions[:, None] - k_positions[None, :]
        inside = (distance >= tile.band.lo) & (distance <= tile.band.hi)
        for head in tile.heads.members():
            mask[head, q_rows[:, None], key_rows[None, :]] = inside
        return mask.to(self.device)

    def check(self, results: dict[str, Tensor], tolerance: float) -> None:
        """Compare with the truth where tiles are, and with what was there before elsewhere."""
        truth, rows_touched = self.truth(), self.q_touched.expand(self.dout.shape)
        assert results["out"][~rows_touched].isnan().all()
        per_row = self.q_touched[:, :, :, 0].permute(1, 2, 0).expand(results["lse"].shape)
        assert results["lse"][~per_row].isnan().all()
        blind = truth["lse"].isneginf()
        assert torch.equal(results["lse"].isneginf() & per_row, blind & per_row)
        assert not results["out"].permute(1, 2, 0, 3)[blind & per_row].any()
        results = results | {
            "out": results["out"].masked_fill(~rows_touched, 0.0),
            "lse": results["lse"].masked_fill(blind, 0.0),
        }
        truth["lse"] = truth["lse"].masked_fill(blind, 0.0)
        for name, expected in truth.items():
            error = (results[name].double() - expected).abs().max().item()
            assert error <= tolerance, f"{name}: {error:.2e}"

        assert not results["dq"][~self.q_touched.expand(self.q.shape)].any()
        for i, (step, kv) in enumerate(zip(self.scenario.steps, self.kvs, strict=True)):
            held = touched(step.tiles, "k", self.scenario.group, kv.first_head, kv.k)
            for name in (f"dk{i}", f"dv{i}"):
                assert not results[name][~held.expand(results[name].shape)].any(), f"{name} outside the tiles"

    def check_margins(self) -> None:
        """Blank every output view; what is left of its memory must be as it was made."""
        for held in self.storage:
            values = held[1:-1, :, :, :-3] if self.scenario.memory == "records" else (
                held[:, 1:-1] if self.scenario.memory == "tokens" else held[:, :, 1:-1])  # fmt: skip
            values.fill_(NAN)
            assert held.isnan().all()


class EngineContract:
    """The suite. An engine that sets `softcap` to false must refuse it by name."""

    softcap = True
    device = "cpu"

    def engine(self) -> Engine:
        raise NotImplementedError

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
        self.tried(SCENARIOS[name], dtype, with_dlse)

    @pytest.mark.parametrize("scale", [0.0, -SCALE, 1e-42])
    @pytest.mark.parametrize("name", ["causal", "window", "zigzag"])
    def test_a_scale_that_is_not_positive(self, name: str, scale: float) -> None:
        """No masked score may turn with the sign of the scale, or become 0 times infinity."""
        trial = Trial(SCENARIOS[name], torch.float32, True, 0, self.device, scale)
        trial.check(trial.run(self.engine()), TOLERANCE[torch.float32])
        trial.check_margins()

    @pytest.mark.parametrize("seed", range(40))
    def test_random_tiles(self, seed: int) -> None:
        self.tried(random_scenario(seed), torch.float64, with_dlse=seed % 2 == 1, seed=seed)

    @pytest.mark.parametrize("name", ["zigzag", "window", "part-of-the-heads", "whole-pass"])
    def test_same_bits_twice(self, name: str) -> None:
        first, second = (
            Trial(SCENARIOS[name], torch.float32, True, 0, self.device).run(self.engine()) for _ in range(2)
        )
        assert all(torch.equal(first[part].nan_to_num(7.0), second[part].nan_to_num(7.0)) for part in first)

    @pytest.mark.parametrize("name", ["zigzag", "part-of-the-heads", "whole-zigzag-pass", "full"])
    def test_a_sink_takes_weight_and_gives_no_value(self, name: str) -> None:
        """And is the lse of a row that sees no key."""
        trial = Trial(SCENARIOS[name], torch.float32, False, 0, self.device)
        heads, seen = trial.scenario.heads, trial.q_touched.permute(1, 2, 0, 3)
        trial.sinks = torch.linspace(-1.0, 2.0, heads, device=trial.device)
        truth, sinks = trial.truth(), trial.sinks.double()[None, :, None]
        lse = torch.logaddexp(truth["lse"], sinks)
        out = truth["out"].permute(1, 2, 0, 3) * torch.exp(truth["lse"] - lse)[..., None]
        found = trial.run(self.engine())
        assert ((found["lse"] - lse).abs()[seen[..., 0].expand(lse.shape)] <= 1e-5).all()
        assert ((found["out"].permute(1, 2, 0, 3) - out).abs()[seen.expand(out.shape)] <= 1e-5).all()

    def test_a_row_that_no_step_meets_has_its_sink_as_lse(self) -> None:
        engine, sinks = self.engine(), torch.tensor([0.5, -1.0], device=self.device)
        q = torch.randn(6, 2, 2, 16, device=self.device)
        works = engine.prepare([()], Softmax(SCALE), 6, 2)
        carry = engine.begin(works, q, 16, sinks)
        engine.attend(q, KV(q, q), carry, works[0])
        assert not carry.out.settled(q.dtype).any()
        assert torch.equal(carry.lse, sinks[None, :, None].expand(2, 2, 6))

    def test_no_tiles_change_nothing(self) -> None:
        trial = Trial(SCENARIOS["zigzag"], torch.float32, True, 0, self.device)
        shapes = trial.dout.shape, trial.dlse.shape  # type: ignore[union-attr]
        out, lse = (torch.randn(shape, device=self.device) for shape in shapes)
        before, engine = (out.clone(), lse.clone()), self.engine()
        works = engine.prepare([()], trial.softmax, trial.scenario.q_rows, trial.scenario.heads)
        engine.attend(trial.q, trial.kvs[0], Carry(Output(out), lse), works[0])
        assert torch.equal(out, before[0]) and torch.equal(lse, before[1])

    def test_rows_of_one_head_each_seen_by_all(self) -> None:
        """Keys of two heads behind each other, with a stride of zero from head to head, as apart."""
        engine, softmax = self.engine(), Softmax(SCALE, 2)
        q, dout = (torch.randn(24, 2, 4, 16, device=self.device) for _ in range(2))
        k, v = (torch.randn(24, 2, 1, 16, device=self.device) for _ in range(2))
        rows, heads = (Run(0, 10), Run(10, 14)), (Run(0, 2), Run(2, 2))
        tiles = [Tile(strip(14, 24), strip(0, run.count)._replace(rows=run), CAUSAL, some)
                 for run, some in zip(rows, heads, strict=True)]  # fmt: skip
        apart = [tile._replace(k=strip(0, tile.k.rows.count)) for tile in tiles]
        kvs = [KV(k[run.start : run.stop], v[run.start : run.stop], head) for head, run in enumerate(rows)]

        def run(steps: list[list[Tile]], held: list[KV], dkvs: list[KV]) -> list[Tensor]:
            works = engine.prepare(steps, softmax, 24, 4)
            carry = engine.begin(works, q, 16, None)
            for kv, work in zip(held, works, strict=True):
                engine.attend(q, kv, carry, work)
            out, dq = carry.out.settled(q.dtype), engine.begin_grad(works, q, 16)
            seed = Seed(dout, out, carry.lse, None, engine.delta(dout, out, None))
            for kv, dkv, work in zip(held, dkvs, works, strict=True):
                engine.attend_grad(q, kv, seed, dq, dkv, work)
            return [out, carry.lse, dq.settled(q.dtype)]

        sums, bundle = ([torch.zeros_like(x) for x in (k, v)] for _ in range(2))
        parts = [KV(*(x[run.start : run.stop] for x in sums), head) for head, run in enumerate(rows)]
        every = [KV(*(x.expand(-1, -1, 2, -1) for x in pair)) for pair in ((k, v), bundle)]
        wanted, found = run([[one] for one in apart], kvs, parts), run([tiles], every[:1], every[1:])
        for ours, theirs in zip((*found, *bundle), (*wanted, *sums), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
            assert ours.abs().sum() > 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_others_add_to_stays_wide(self, dtype: torch.dtype) -> None:
        """With `more` outputs and dQ come in the accumulator dtype; rounded, they are what they are without."""
        trial = Trial(SCENARIOS["whole-zigzag-pass"], dtype, False, 0, self.device)
        s, engine, found = trial.scenario, self.engine(), []
        for more in (False, True):
            works = engine.prepare([step.tiles for step in s.steps], trial.softmax, s.q_rows, s.heads, more=more)
            carry, dq = engine.begin(works, trial.q, s.d_v, None), engine.begin_grad(works, trial.q, s.d_k)
            for kv, work in zip(trial.kvs, works, strict=True):
                engine.attend(trial.q, kv, carry, work)
            if more:
                for output in (carry.out, dq):
                    assert output.result is None and output.carried is not None
                    assert output.carried.dtype == trial.accumulator
            found.append(carry.out.settled(dtype))
        assert torch.equal(*found)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("cut", [False, True], ids=["one-tile", "two-steps"])
    def test_half_is_as_good_as_torchs_kernel(self, dtype: torch.dtype, cut: bool) -> None:
        """DESIGN §5: at most 1.25 times the error of the single-device kernel of the same dtype."""
        q, k, band = DENSE[0]
        halves = [(q, k.pick(Run(start, 48)), band) for start in (0, 48)] if cut else [DENSE[0]]
        # `pick` keeps buffer rows, so both steps read one buffer layout; the second half of the first is never read.
        trial = Trial(
            simple(tuple(halves), Run(0, 4), 2, group=2, batch=2, d_k=64, d_v=64), dtype, False, 0, self.device
        )
        results, truth = trial.run(self.engine()), trial.truth()
        inputs = [trial.q.nan_to_num(0.0)[:96], *self._joined(trial)]
        ours = {"out": results["out"][:96], "dq": results["dq"][:96]}
        theirs = dict(zip(("out", "dq", "dk", "dv"), _torchs_own(inputs, trial.dout[:96]), strict=True))
        n = 96 // len(halves)
        for name in ("dk", "dv"):
            for side in (ours, truth):
                parts = results if side is ours else truth
                side[name] = torch.cat([parts[f"{name}{i}"][48 * i : 48 * i + n] for i in range(len(halves))])
        for name, value in ours.items():
            expected = truth[name][:96]
            error, bound = ((x.to(dtype).double() - expected).square().mean().sqrt() for x in (value, theirs[name]))
            assert error <= 1.25 * bound, f"{name}: {error:.2e}, torch {bound:.2e}"

    @staticmethod
    def _joined(trial: Trial) -> list[Tensor]:
        """K and V of all steps, of which each holds its own half of the rows."""
        n = 96 // len(trial.kvs)
        return [torch.cat([(kv.k, kv.v)[i][48 * j : 48 * j + n] for j, kv in enumerate(trial.kvs)]) for i in range(2)]


def _torchs_own(inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    """out, dq, dk, dv of row-first causal attention by `scaled_dot_product_attention`."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    qh, kh, vh = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = scaled_dot_product_attention(qh, kh, vh, is_causal=True, scale=SCALE, enable_gqa=True).permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

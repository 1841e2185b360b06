"""Run a scenario of the engine contract with random tensors, and compare the engine's results with the reference.

Not covered: how an engine cuts its tiles, and how an engine is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.core.geometry import Tile
from ringattn.engine.base import KV, BackwardInputs, Engine, Output, Softmax, Visit, accumulator_dtype
from tests import philox
from tests.contract.engine_scenarios import Scenario
from tests.oracle import attention
from tests.poison import unset_is_nan

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
SCALE, SEED = 0.3, (0xFEDCBA98 << 32) + 0x76543210
NAN = float("nan")
NEITHER, ONLY = Visit(), Visit(overwrite=True, last=True)


def laid_out(values: Tensor, memory: str) -> tuple[Tensor, Tensor]:
    """Return `values` (rows, batch, heads, dim) as a strided view into memory filled with NaN, and that memory."""
    rows, batch, heads, dim = values.shape
    if memory == "records":
        storage = values.new_full((rows + 2, batch, heads, dim + 3), NAN)
        view = storage[1:-1, :, :, :dim]
    elif memory == "tokens":
        storage = values.new_full((batch, rows + 2, heads, dim), NAN)
        view = storage.transpose(0, 1)[1:-1]
    elif memory == "batches" and dim == 1:  # with more columns the layout would not be contiguous
        storage = values.new_full((rows + 2, heads, dim, batch), NAN)
        view = storage.movedim(3, 1)[1:-1]
    else:
        storage = values.new_full((batch, heads, rows + 2, dim), NAN)
        view = storage.permute(2, 0, 1, 3)[1:-1]
    view.copy_(values)
    return view, storage


def touched(tiles: Sequence[Tile], side: str, group: int, first_head: int, like: Tensor) -> Tensor:
    """Return a mask (rows, 1, heads, 1) of the rows and heads of a buffer that the tiles of a step may read or write.

    `side`: "q" or "k"; `like`: a tensor of the buffer's shape; `first_head`: the K/V head that is head 0 of the buffer.
    """
    mask = torch.zeros(like.shape[0], 1, like.shape[2], 1, dtype=torch.bool)
    for tile in tiles:
        for row in (tile.q if side == "q" else tile.k).rows.members():
            for head in tile.heads.members():
                mask[row, 0, head if side == "q" else head // group - first_head] = True
    return mask.to(like.device)


class Trial:
    """A scenario with its random tensors. `run` computes an engine's results, and `reference` those of the oracle."""

    def __init__(
        self,
        scenario: Scenario,
        dtype: torch.dtype,
        with_dlse: bool,
        seed: int = 0,
        device: str = "cpu",
        scale: float = SCALE,
    ) -> None:
        s, self.device = scenario, torch.device(device)
        self.scenario = scenario
        self.dtype, self.accumulator = dtype, accumulator_dtype(dtype)
        self.generator = torch.Generator().manual_seed(seed)
        slopes = tuple(0.02 * (head - 1) for head in range(s.first_head + s.heads)) if s.alibi else None
        self.softmax = Softmax(scale, s.group, s.softcap, slopes, s.starts, s.dropout_p)
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
        view, storage = laid_out(values, self.scenario.memory)
        self.storage.append(storage)
        return view

    def _relaid(self, output: Output, touched: Tensor) -> Output:
        """Return a copy, in the test's memory, of an output with which an engine begins a pass.

        It is NaN where the engine must not read it.
        """
        carried, result = output
        if result is not None:  # a step writes each row before a later step reads it
            touched = torch.zeros_like(touched)
        return Output(*(
            None if x is None else self._output(x.masked_fill(~touched, NAN)) for x in (carried, result)
        ))  # fmt: skip

    def run(self, engine: Engine, visit: Visit = NEITHER) -> dict[str, Tensor]:
        """Run forward and backward. Return out, lse, dq, and dk and dv of each step, as the engine computes them.

        `visit`: whether every step is the first on its dK and dV (and overwrites them), or the last. The buffers of dK
        and dV contain NaN before a first step, and ones before other steps.
        """
        s = self.scenario
        works = engine.prepare(
            [step.tiles for step in s.steps], self.softmax, s.q_rows, s.heads, visits=[visit] * len(s.steps)
        )
        with unset_is_nan():
            begun = engine.begin(works, self.q, s.d_v, self.sinks)
        state = begun._replace(out=self._relaid(begun.out, self.q_touched), dropout_seed=SEED)
        state.lse.masked_fill_(~self.q_touched[:, :, :, 0].permute(1, 2, 0), NAN)
        for kv, work in zip(self.kvs, works, strict=True):
            engine.attend(self.q, kv, state, work)
        final = state.out.finalized(self.dtype)
        with unset_is_nan():
            dq = self._relaid(engine.begin_grad(works, self.q, s.d_v), torch.ones_like(self.q_touched))
        results = {"out": final, "lse": state.lse}
        delta = engine.delta(self.dout, final, self.dlse)
        inputs = BackwardInputs(self.dout, final, state.lse, self.dlse, delta, SEED)
        for i, (kv, work) in enumerate(zip(self.kvs, works, strict=True)):
            dkv = self._filled(kv, self.accumulator, NAN if visit.overwrite else 1.0)
            result = self._filled(kv, self.dtype, NAN) if visit.last else None
            engine.attend_grad(self.q, kv, inputs, dq, None if visit == ONLY else dkv, work, result)
            key_rows = touched(s.steps[i].tiles, "k", s.group, kv.first_head, kv.k)
            for name, x in zip(("dk", "dv"), (result or dkv)[:2], strict=True):
                if visit != NEITHER:  # only the key rows of the tiles may be written
                    assert x[~key_rows.expand(x.shape)].isnan().all()
                    x = x.masked_fill(~key_rows, 0.0 if visit.overwrite else 1.0)
                results[f"{name}{i}"] = x.to(self.accumulator) - (0 if visit.overwrite else 1)
        return results | {"dq": dq.finalized(self.dtype)}

    def _filled(self, kv: KV, dtype: torch.dtype, value: float) -> KV:
        """Return buffers in the test's memory, shaped like K and V and filled with `value`."""
        k, v = (self._output(torch.full_like(x, value, dtype=dtype)) for x in kv[:2])
        return KV(k, v, kv.first_head)

    def reference(self) -> dict[str, Tensor]:
        """Return the results that `run` should return, computed by the oracle in float64.

        Each tile has its own copy of the keys, so a pair of query and key that is in two tiles counts twice.
        """
        s = self.scenario
        q = self.q.double().nan_to_num(0.0).requires_grad_()
        leaves = [[x.double().nan_to_num(0.0).requires_grad_() for x in (kv.k, kv.v)] for kv in self.kvs]
        columns: list[tuple[list[Tensor], Tensor]] = []
        for step, leaf in zip(s.steps, leaves, strict=True):
            missing = s.kv_heads - step.held.start - step.held.count
            whole = [torch.nn.functional.pad(x, (0, 0, step.held.start, missing)) for x in leaf]
            columns += [(whole, self._allowed(tile, step.k_rows)) for tile in step.tiles]
        k, v = (torch.cat([whole[i] for whole, _ in columns]).transpose(0, 1) for i in range(2))
        allowed, bias = torch.cat([mask for _, mask in columns], -1), None
        if s.alibi:
            bias = torch.cat([self._bias(tile, step.k_rows) for step in s.steps for tile in step.tiles], -1)
            bias = bias.to(self.device)
        kept = None
        if s.dropout_p is not None:
            kept = torch.cat([self._kept(tile, step.k_rows) for step in s.steps for tile in step.tiles], -1)
            kept = kept.to(self.device)
        out, lse = attention(q.transpose(0, 1), k, v, allowed, self.softmax.scale, s.softcap, None, bias, kept)
        seen = allowed.any(-1)
        loss = (out * self.dout.transpose(0, 1).double().nan_to_num(0.0)).sum()
        if self.dlse is not None:
            loss = loss + (lse[:, seen] * self.dlse.double()[:, seen]).sum()
        loss.backward()
        reference = {"out": out.detach().transpose(0, 1), "lse": lse.detach(), "dq": q.grad}
        for i, leaf in enumerate(leaves):
            reference |= {f"dk{i}": leaf[0].grad, f"dv{i}": leaf[1].grad}
        return {name: x for name, x in reference.items() if x is not None}

    def _allowed(self, tile: Tile, k_rows: int) -> Tensor:
        mask = torch.zeros(self.scenario.heads, self.scenario.q_rows, k_rows, dtype=torch.bool)
        q_positions, q_rows, k_positions, key_rows = (torch.tensor(run.members()) for run in (*tile.q, *tile.k))
        distance = q_positions[:, None] - k_positions[None, :]
        inside = (distance >= tile.band.lo) & (distance <= tile.band.hi)
        for head in tile.heads.members():
            mask[head, q_rows[:, None], key_rows[None, :]] = inside
        return mask.to(self.device)

    def _bias(self, tile: Tile, k_rows: int) -> Tensor:
        assert self.softmax.alibi_slopes is not None
        began = [start - kv_start for start, kv_start in self.scenario.starts if start <= tile.q.positions.start]
        distance = torch.zeros(self.scenario.q_rows, k_rows, dtype=torch.float64)
        q_positions, q_rows, k_positions, key_rows = (torch.tensor(run.members()) for run in (*tile.q, *tile.k))
        distance[q_rows[:, None], key_rows[None, :]] = (
            (q_positions[:, None] - k_positions - (began[-1] if began else 0)).abs().double()
        )
        slopes = torch.tensor(self.softmax.alibi_slopes[self.scenario.first_head :], dtype=torch.float64)
        return -slopes[:, None, None] * distance

    def _kept(self, tile: Tile, k_rows: int) -> Tensor:
        s, p = self.scenario, self.scenario.dropout_p
        assert p is not None
        kept = torch.ones(s.batch, s.heads, s.q_rows, k_rows, dtype=torch.float64)
        q_positions, q_rows, k_positions, key_rows = (torch.tensor(run.members()) for run in (*tile.q, *tile.k))
        heads = [s.first_head + head for head in range(s.heads)]
        drawn = philox.kept_at(range(s.batch), heads, q_positions.tolist(), k_positions.tolist(), SEED, p)
        kept[..., q_rows[:, None], key_rows[None, :]] = drawn
        return kept.to(self.device)

    def check(self, results: dict[str, Tensor], tolerance: float) -> None:
        """Assert that `results` match the reference in the rows of the tiles, and are unchanged in other rows."""
        reference, rows_touched = self.reference(), self.q_touched.expand(self.dout.shape)
        assert results["out"][~rows_touched].isnan().all()
        per_row = self.q_touched[:, :, :, 0].permute(1, 2, 0).expand(results["lse"].shape)
        assert results["lse"][~per_row].isnan().all()
        blind = reference["lse"].isneginf()
        assert torch.equal(results["lse"].isneginf() & per_row, blind & per_row)
        assert not results["out"].permute(1, 2, 0, 3)[blind & per_row].any()
        results = results | {
            "out": results["out"].masked_fill(~rows_touched, 0.0),
            "lse": results["lse"].masked_fill(blind, 0.0),
        }
        reference["lse"] = reference["lse"].masked_fill(blind, 0.0)
        for name, expected in reference.items():
            error = (results[name].double() - expected).abs().max().item()
            assert error <= tolerance, f"{name}: {error:.2e}"

        assert not results["dq"][~self.q_touched.expand(self.q.shape)].any()
        for i, (step, kv) in enumerate(zip(self.scenario.steps, self.kvs, strict=True)):
            key_rows = touched(step.tiles, "k", self.scenario.group, kv.first_head, kv.k)
            for name in (f"dk{i}", f"dv{i}"):
                assert not results[name][~key_rows.expand(results[name].shape)].any(), f"{name} outside the tiles"

    def check_margins(self) -> None:
        """Assert that the memory around every output is still NaN. This overwrites the outputs themselves with NaN."""
        for storage in self.storage:
            values = storage[1:-1, :, :, :-3] if self.scenario.memory == "records" else (
                storage[:, 1:-1] if self.scenario.memory == "tokens" else storage[:, :, 1:-1])  # fmt: skip
            values.fill_(NAN)
            assert storage.isnan().all()

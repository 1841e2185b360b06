"""The Gluon forward kernel without a GPU: a simulated Hopper GPU runs its source, and unsupported calls are refused.

`tests/gpu/test_gluon.py` compares its numbers on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringattn.core.geometry import CAUSAL, FULL, Band, StridedRange, Tile
from ringattn.engine.blocks import Blocks, query_blocks, set_flags
from tests.contract.engine_scenarios import SCENARIOS, Scenario, Step, random_scenario, simple, strip

pytest.importorskip("triton", reason="the kernels are Triton's")
from ringattn.kernels import attention_gluon, attention_tiles
from ringattn.kernels.attention_gluon import CONFIG, forward_gluon, gluon_missing
from ringattn.kernels.launch import FIRST, LAST, Config, Table
from tests.fuzz import reference
from tests.kernels.gluon_gate.simulator import MODULES, Fault, simulate, source_of

pytestmark = pytest.mark.unchanged("Gluon kernels")
DIM = 16
KEY_DIMS = DIM, 24
"""Head dimensions of keys. 24 columns are three pieces of 8, as 192 are three pieces of 64."""
SCALE = 0.3
SCALES = SCALE, 1.5
"""A scale below and a scale above 1. A kernel that forgets to scale the peak (the largest logit of a row) subtracts too
much, or so little that a weight does not fit into float16."""
PLAIN = {name: scenario for name, scenario in SCENARIOS.items() if scenario.softcap is None and not scenario.alibi}


class Pass:
    """The forward launches for the steps of a scenario in float16, and their reference.

    K/V rows that no tile reads are NaN. `key_dim`: the head dimension of queries and keys; that of values is `DIM`.
    """

    def __init__(
        self, scenario: Scenario, seed: int, sinks: bool = False, scale: float = SCALE, key_dim: int = DIM
    ) -> None:
        make, self.scenario, self.scale = torch.Generator().manual_seed(seed), scenario, scale
        shape = scenario.batch, scenario.heads, DIM
        self.key_dim = key_dim
        self.q = torch.randn(scenario.q_rows, *shape[:2], key_dim, generator=make).half()
        self.kv = [self._kv(step, make) for step in scenario.steps]
        self.sinks = torch.randn(scenario.heads, generator=make) if sinks else None
        self.out = torch.zeros(scenario.q_rows, *shape)
        self.lse = torch.full((*shape[:2], scenario.q_rows), float("-inf"))
        self.result: Tensor | None = None

    def _kv(self, step: Step, make: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = step.k_rows, self.scenario.batch, step.held.count
        k, v = (torch.randn(*shape, dim, generator=make).half() for dim in (self.key_dim, DIM))
        read = {row for tile in step.tiles for row in tile.k.rows.members()}
        unread = [row for row in range(step.k_rows) if row not in read]
        k[unread] = v[unread] = float("nan")
        return k, v

    def flagged_blocks(self) -> list[Blocks] | None:
        """Return tables whose blocks have the flags FIRST and LAST, or None if the scenario allows no flags.

        With flags, the state is set to NaN, because no launch may read it before a FIRST block has written it.
        """
        tables = [query_blocks(step.tiles, 16, 8) for step in self.scenario.steps]
        if not set_flags(tables, self.scenario.q_rows, self.scenario.heads):
            return None
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self.result = torch.full_like(self.out, float("nan"), dtype=torch.float16)
        return tables

    def run(
        self, rng: Random, tables: Sequence[Blocks] | None = None, meta: dict[str, Any] | None = None, **how: Any
    ) -> None:
        """Run all launches, with random numbers of programs and buffers and a random order of work.

        `tables`: the table of each step, by default without flags. `meta`: constants of the kernel to replace. `how`:
        keywords of `simulate`.
        """
        for index, (step, (k, v)) in enumerate(zip(self.scenario.steps, self.kv, strict=True)):
            # In ROTATING each block of queries has one key block, so a fast producer with three buffers is two items
            # ahead.
            alone = self.scenario == ROTATING
            config = Config(16, 8, 4, 3 if alone else rng.choice((1, 2, 2, 3)), "gluon")
            blocks, entries, slots, *_ = tables[index] if tables else query_blocks(step.tiles, 16, 8)
            # The size of L2 decides whether the programs process one K/V head at a time or all of them.
            gpu = attention_tiles.Gpu(rng.choice((1, 1 << 30)), 1)
            with patch.object(attention_tiles, "gpu_of", return_value=gpu):
                call = forward_gluon(
                    self.q, k, v, self.out, self.lse, Table(torch.tensor(blocks), torch.tensor(entries), slots), config,
                    scale=self.scale, group=self.scenario.group, first_kv_head=step.held.start, result=self.result,
                    sinks=self.sinks, programs=1 if alone else rng.choice((1, 2, 3, None)),
                )  # fmt: skip
            simulate(call._replace(meta=call.meta | (meta or {})), rng.randrange(1 << 20), **how)

    def reference(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse) over all pairs of the tiles, in float64. A pair that is in two tiles counts twice."""
        heads, rows = self.scenario.heads, self.scenario.q_rows
        counts, keys, values = [], [], []
        for step, (k, v) in zip(self.scenario.steps, self.kv, strict=True):
            kv_heads = torch.arange(heads) // self.scenario.group - step.held.start
            inside = kv_heads.clamp(0, step.held.count - 1)
            counts.append(np.stack([_counts(step.tiles, head, rows, step.k_rows) for head in range(heads)]))
            keys.append(k.nan_to_num(0).double()[:, :, inside])
            values.append(v.nan_to_num(0).double()[:, :, inside])
        q, k, v = (x.transpose(0, 1) for x in (self.q.double(), torch.cat(keys), torch.cat(values)))
        pairs = reference.Counts(torch.tensor(np.concatenate(counts, -1))[None])
        out, lse = reference.attention(q, k, v, pairs, self.scale, None, self.sinks)
        return out.transpose(0, 1), lse

    def check(self) -> None:
        """Compare with the reference. Probabilities may have a float16 error of 2 ** -11, the rest float32 errors."""
        out, lse = self.reference()
        largest = max(float(v.nan_to_num(0).abs().max()) for _, v in self.kv)
        out_of_kernel = self.out if self.result is None else self.result
        torch.testing.assert_close(self.lse.double(), lse, rtol=2**-23, atol=4e-6)
        torch.testing.assert_close(out_of_kernel.double(), out, rtol=2**-11, atol=largest * 2**-11)


def _counts(tiles: Sequence[Tile], head: int, rows: int, k_rows: int) -> np.ndarray:
    """Return for each query row and key row of a head the number of tiles that contain the pair."""
    counts = np.zeros((rows, k_rows))
    for tile in tiles:
        if head in tile.heads.members():
            q, k = (np.array(side.positions.members()) for side in (tile.q, tile.k))
            distance = q[:, None] - k[None, :]
            allowed = (distance >= tile.band.lo) & (distance <= tile.band.hi)
            counts[np.ix_(tile.q.rows.members(), tile.k.rows.members())] += allowed
    return counts


@pytest.mark.parametrize("name", PLAIN)
def test_the_steps_of_the_contract(name: str) -> None:
    """The kernel gives the reference's results for the engine contract's scenarios.

    They have masks, strides, incomplete blocks, grouped heads, several entries per block, and several steps.
    """
    attention = Pass(PLAIN[name], 1)
    attention.run(Random(name))
    attention.check()


def test_the_unchanged_kernel_passes_the_mutation_scenarios() -> None:
    for seed, scenario in enumerate(SEEING):
        attention = Pass(scenario, seed, scale=SCALES[seed % 2], key_dim=KEY_DIMS[seed % 2])
        attention.run(Random(seed), attention.flagged_blocks())
        attention.check()


@given(st.integers(0, 10_000))
def test_random_steps(seed: int) -> None:
    attention = Pass(random_scenario(seed), seed)
    attention.run(Random(seed))
    attention.check()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", [name for name in PLAIN if name.startswith("whole")])
def test_a_pass_begins_without_a_state_and_ends_in_the_result(name: str, sinks: bool) -> None:
    attention = Pass(PLAIN[name], 2, sinks)
    attention.run(Random(2), tables := attention.flagged_blocks())
    assert tables
    attention.check()


def test_a_pass_of_one_step_needs_no_state() -> None:
    attention = Pass(simple(((strip(0, 40), strip(0, 40), CAUSAL),), StridedRange(0, 2), 2)._replace(q_rows=40), 3)
    tables = attention.flagged_blocks()
    assert tables and (tables[0].blocks[:, 7] == FIRST | LAST).all()
    attention.out = None  # type: ignore[assignment]
    attention.run(Random(3), tables)
    attention.check()


def test_rows_without_a_key_and_blocks_without_an_entry() -> None:
    """Rows without a key and blocks without an entry keep their state.

    With the flags FIRST and LAST, their result is that of a row that attends to no key: out 0, lse -inf.
    """
    for flags in (0, FIRST | LAST):
        attention = Pass(simple(((strip(0, 32), strip(20, 40), CAUSAL),), StridedRange(0, 2), 2)._replace(q_rows=32), 4)
        blocks, entries, slots, *_ = query_blocks(attention.scenario.steps[0].tiles, 16, 8)
        empty = np.array([[0, 1, 16, 0, 2, 0, 0, 0]], np.int32)
        assert blocks[:, 0].tolist() == [16]  # its rows 16 to 19 attend to no key
        attention.out.fill_(0.0 if flags == 0 else float("nan"))
        attention.lse.fill_(float("-inf") if flags == 0 else float("nan"))
        attention.result = torch.full_like(attention.out, float("nan"), dtype=torch.float16) if flags else None
        table = Blocks(np.concatenate((empty, blocks, empty * 0)), entries, slots)
        table.blocks[:, 7] = flags
        attention.run(Random(4), [table])
        attention.check()


def test_the_size_of_the_grid_and_the_turns_change_no_bit() -> None:
    passes = [Pass(PLAIN["zigzag"], 5) for _ in range(6)]
    for seed, attention in enumerate(passes):
        attention.run(Random(seed))
        assert torch.equal(attention.out, passes[0].out) and torch.equal(attention.lse, passes[0].lse)


@pytest.mark.parametrize("name", ["full", "causal", "zigzag"])
def test_logits_that_are_all_minus_infinity(name: str) -> None:
    """Rows whose logits are all -inf, because the keys are, get the result of rows without a key.

    They occur in blocks with and without a mask.
    """
    attention = Pass(PLAIN[name], 7)
    attention.q[..., 0] = 1.0
    for k, _ in attention.kv:
        k[..., 0] = float("-inf")
    attention.run(Random(7), attention.flagged_blocks())
    assert not (attention.out if attention.result is None else attention.result).any()
    assert attention.lse.isneginf().all()


@pytest.mark.parametrize("scale", [0.0, -SCALE, 1e-42])
@pytest.mark.parametrize("name", ["causal", "blind"])
def test_a_scale_that_is_not_positive(name: str, scale: float) -> None:
    """Results are right for a scale that is negative, 0 or too small to be a normal float32.

    The kernel then computes the largest logit from the scaled logits, not from the unscaled ones.
    """
    attention = Pass(PLAIN[name], 6, scale=scale)
    attention.run(Random(6), attention.flagged_blocks())
    attention.check()


@pytest.mark.parametrize("scale", [0.0, -SCALE])
def test_the_raw_peak_needs_a_positive_scale(scale: float) -> None:
    attention = Pass(SEEING[-3], 0, scale=scale)
    attention.run(Random(0), attention.flagged_blocks(), {"RAW_PEAK": True})
    with pytest.raises(AssertionError, match="not close"):
        attention.check()


@pytest.mark.parametrize(
    ("scale", "raw"), [(1.0, True), (2e-38, True), (1e-42, False), (0.0, False), (-1.0, False), (float("nan"), False)]
)
def test_the_raw_peak_needs_a_normal_positive_scale(scale: float, raw: bool) -> None:
    """The kernel scales the largest unscaled logit (RAW_PEAK) only if the scale is a normal positive float32.

    Smaller numbers than 2 ** -126 count as 0.
    """
    q, table = rows_like(), Table(torch.zeros(0, 8), torch.zeros(0, 16), 0)
    call = forward_gluon(q, q, q, None, torch.zeros(1, 2, 8), table, CONFIG, scale=scale, result=q)
    assert call.meta["RAW_PEAK"] is raw


WRONG = {
    "q is loaded while it is read": ("q_full, q_empty, q_buffers)", "q_full, q_full, q_buffers)"),
    "q is never free": ("bring(q_rows, 0, q_slot, q_parity,", "bring(q_rows, 0, q_slot, q_parity ^ 1,"),
    "q is never given back": ("mbarrier.arrive(q_empty.index(q_slot))", "pass"),
    "q is read before it is there": ("mbarrier.wait(barriers[0].index(q_slot), q_parity)", "pass"),
    "consumers read one buffer of q": ("slot_of(items, Q_SLOTS)\n            # Two", "0, items & 1\n            # Two"),
    "k and v are loaded while they are read": ("mbarrier.wait(empty.index(slot), parity ^ 1)", "pass"),
    "k and v are never free": ("wait(empty.index(slot), parity ^ 1)", "wait(empty.index(slot), parity)"),
    "q's descriptor is made too early": ("landed(items, q_full, Q_SLOTS)", "pass"),
    "k's descriptor is made too early": ("landed(turn, k_full, SLOTS)", "pass"),
    "v's descriptor is made too early": ("landed(turn, v_full, SLOTS)", "pass"),
    "descriptors wait for the last load alone": ("for ahead in gl.static_range(SLOTS):", "for ahead in range(1):"),
    "k is read before it is there": ("mbarrier.wait(k_full.index(slot), parity)", "pass"),
    "v is read before it is there": ("    mbarrier.wait(v_full.index(old_slot), old_parity)\n", ""),
    "phases never turn": ("turn // SLOTS & 1", "turn * 0"),
    "v of the same key block": ("old_parity = slot_of(turn - 1, SLOTS)", "old_parity = slot_of(turn, SLOTS)"),
    "one consumer frees for both": ("SLOTS, CONSUMERS)", "SLOTS, 1)"),
    "the logits are not waited for": ("warpgroup_mma_wait(1, deps=(s,))", "warpgroup_mma_wait(2, deps=(s,))"),
    "the values are not waited for": ("warpgroup_mma_wait(0, deps=(acc,))", "warpgroup_mma_wait(1, deps=(acc,))"),
    "the roles differ in their order": ("visited(nth, start, full, full_end) * BLOCK_N", "(start + nth) * BLOCK_N"),
    "the first block is met twice": ("gl.where(index == first, 1, 0)", "0"),
    "limits are rounded down": ("(far + band[1] - 1) // band[1]", "far // band[1]"),
    "limits are rounded up": ("gl.where(near < 0, -1, near // band[1])", "near // band[1]"),
    "the entry has no end": ("gl.minimum(last, rows[2] - 1)", "last"),
    "a blind row has no finite peak": ("gl.where(nothing, LOWEST, peak)", "peak"),
    "a blind row has a weight": ("gl.where(nothing, 0.0, ones)", "ones"),
    "idle items have rows": ("gl.where(idle, 0, run_of(block)[2])", "run_of(block)[2]"),
    "the peak is not scaled": ("gl.max(s, 1) * factor if RAW_PEAK", "gl.max(s, 1) if RAW_PEAK"),
    "a state begins where there was none": ("stored = begins == 0", "stored = begins >= 0"),
    "rows past the end are brought ahead": ("gl.minimum(start + lanes // PIECES, live - 1)", "start + lanes // PIECES"),
    "an item is put over another": ("mbarrier.wait(empty.index(slot), parity ^ 1)\n    items", "items"),
    "an item is read before it is there": ("mbarrier.wait(full.index(slot), parity)\n    item", "item"),
    "no item is given back": ("    mbarrier.arrive(empty.index(slot))\n    return item", "    return item"),
    "the counter is not cleared": ("gl.store(counter, 0, mask=nth == total - 1)", "pass"),
    "the counter is cleared too early": ("mask=nth == total - 1", "mask=nth == 0"),
    "programs begin with each other's items": ("gl.num_programs(0) + nth", "nth"),
    "all pieces are loaded from the first columns": ("[first_row, piece * rows[0].shape[1]]", "[first_row, 0]"),
    "the bytes of one piece are awaited": ("block_type.nbytes * len(buffers)", "block_type.nbytes"),
    "the last piece alone is summed": ("use_acc=piece > 0", "use_acc=False"),
    "items are met twice": ("gl.num_programs(0) + nth", "gl.num_programs(0) + nth // 2 * 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_the_simulation_detects_a_wrong_kernel(name: str) -> None:
    """For each wrong kernel, one of a few scenarios raises a fault or differs from the reference."""
    old, new = WRONG[name]
    assert any(old in source_of(module) for module in MODULES)
    for seed, scenario in enumerate(SEEING * 3):
        attention = Pass(scenario, seed, scale=SCALES[seed % 2], key_dim=KEY_DIMS[seed % 2])
        try:
            attention.run(Random(seed), attention.flagged_blocks(), edit=(old, new))
            attention.check()
        except (Fault, AssertionError, IndexError):
            return
    pytest.fail("the wrong kernel was not detected")


DOCUMENTS = tuple(Tile(strip(0, 16), strip(40 * i, 40, row=40 * i), FULL, StridedRange(0, 1)) for i in range(3))
UNEQUAL = tuple(Tile(strip(0, 20), strip(40 * i, 40, row=40 * i), FULL, StridedRange(i, 1 + i)) for i in range(2))
ROTATING = Scenario((Step((Tile(strip(0, 96), strip(0, 8), FULL, StridedRange(0, 3)),), 8, StridedRange(0, 3)),), 96, 3)
SEEING = (
    Scenario((Step(DOCUMENTS, 120, StridedRange(0, 1)),), 16, 1),
    Scenario((Step(UNEQUAL, 80, StridedRange(0, 3)),), 20, 3),
    simple(((strip(0, 20), strip(1, 20, 3), CAUSAL),), StridedRange(0, 1), 1),
    ROTATING,
    ROTATING,
    simple(((strip(0, 70), strip(0, 70), Band(0, 44)),), StridedRange(0, 1), 1),
    *(PLAIN[name] for name in ("dilated", "blind", "both-sides", "zigzag")),
)


def rows_like(dtype: torch.dtype = torch.bfloat16, dim: int = 128) -> Tensor:
    return torch.zeros(8, 1, 2, dim, dtype=dtype)


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1", "3.6.0"])
def test_a_triton_without_a_tested_gluon_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gluon_missing.cache_clear()
    message = f"the Gluon kernel needs Triton 3.6 to 3.9, not {version}"
    if version == "3.6.0":
        message = "has no triton.experimental.no_gluon.language"
        monkeypatch.setattr(attention_gluon, "GLUON", "triton.experimental.no_gluon.language")
    with monkeypatch.context() as patch:
        patch.setattr(attention_gluon.triton, "__version__", version)
        assert message in str(gluon_missing(90))
    gluon_missing.cache_clear()


def test_a_launch_without_state_and_result_is_refused() -> None:
    q, table = rows_like(), Table(torch.zeros(0, 8), torch.zeros(0, 16), 0)
    with pytest.raises(ValueError, match="pass one"):
        forward_gluon(q, q, q, None, torch.zeros(1, 2, 8), table, Config(128, 128, 4, 2), scale=1.0)

"""The Gluon kernels of the backward without a GPU: run by a simulated Hopper, their machine code, what they refuse.

No GPU has run these kernels yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringattn.core.geometry import CAUSAL, StridedRange
from ringattn.engine.blocks import Blocks, key_blocks, query_blocks, set_flags
from tests.contract.engine_scenarios import Scenario, random_scenario, simple, strip

pytest.importorskip("triton", reason="the kernels are Triton's")
from ringattn.kernels.attention_gluon import grad_kv_gluon, grad_q_gluon
from ringattn.kernels.launch import FIRST, LAST, Config, Table
from tests.kernels.gluon_gate.simulator import MODULES, Fault, simulate, source_of
from tests.kernels.test_attention_gluon import PLAIN, SCALE, SEEING, Pass, _counts, rows_like

NAN = float("nan")
pytestmark = pytest.mark.unchanged("Gluon backward")
SOURCES = MODULES[1:]
HALF, SINGLE, LEAST = 2.0**-11, 2.0**-18, 2.0**-25
"""Relative errors of a float16 and of a weight computed in float32, and the absolute one of the smallest float16."""


class Grads:
    """dK and dV of a step: what is carried, what is delivered, and what each was before."""

    def __init__(self, like: Tensor, flags: int, make: torch.Generator) -> None:
        self.first, self.last = bool(flags & FIRST), bool(flags & LAST)
        self.carried = torch.randn(like.shape, generator=make)
        # A FIRST block must not read it.
        if self.first:
            self.carried.fill_(NAN)
        self.result = torch.full(like.shape, NAN, dtype=torch.float16)
        self.before = self.carried.clone()

    def check(self, added: Tensor, allowed: Tensor, met: Tensor) -> None:
        """`added`, within `allowed`, in the rows and heads `met`, and no other write."""
        total = added if self.first else added + self.before.double()
        rest = ~met if not self.last else torch.ones_like(met)
        assert torch.equal(self.carried[rest].nan_to_num(7.0), self.before[rest].nan_to_num(7.0))
        assert self.result[~met if self.last else torch.ones_like(met)].isnan().all()
        found = self.result if self.last else self.carried
        allowed = allowed + total.abs() * HALF * self.last
        # Sums in float32 of values near 1.
        assert ((found.double() - total).abs() <= allowed + 2.0**-20)[met].all()


class GradPass:
    """The attend_grad calls of a scenario in float16, and their reference.

    Rows that no tile holds are NaN: of K and V, and of q, dout, lse and delta. `flags`: of all key blocks of each step.
    `silent`: a row whose lse says that it saw no key, whatever the tiles say.
    """

    def __init__(self, scenario: Scenario, seed: int, flags: Sequence[int] = (), silent: int | None = None) -> None:
        self.scenario, forward = scenario, Pass(scenario, seed)
        make = torch.Generator().manual_seed(seed + 1)
        self.q, self.kv = forward.q.clone(), forward.kv
        self.dout = torch.randn(self.q.shape, generator=make).half()
        self._find(torch.randn(*self.q.shape[1:3], len(self.q), generator=make))
        if silent is not None:
            self.lse[..., silent] = float("-inf")
            for x in (*self.p, *self.ds, *self.parts):
                x[:, :, silent] = 0.0
        met = {row for step in scenario.steps for tile in step.tiles for row in tile.q.rows.members()}
        other = [row for row in range(len(self.q)) if row not in met]
        self.q[other], self.dout[other] = NAN, NAN
        self.lse[..., other], self.delta[..., other] = NAN, NAN
        self.flags = [*flags, *[0] * len(scenario.steps)][: len(scenario.steps)]
        self.dkv = [tuple(Grads(x, flag, make) for x in kv) for kv, flag in zip(self.kv, self.flags, strict=True)]
        self.dq: Tensor = torch.randn(self.q.shape, generator=make)
        self.dq_before, self.dq_result = self.dq.double(), torch.full_like(self.q, NAN)

    def _find(self, dlse: Tensor) -> None:
        """lse and delta over all keys in float32, and for each step P, dS and what dS is the difference of."""
        s = self.scenario
        self.clean = q, dout = self.q.double(), self.dout.double()
        self.wide, logits = [], []
        for step, (k, v) in zip(s.steps, self.kv, strict=True):
            inside = (torch.arange(s.heads) // s.group - step.held.start).clamp(0, step.held.count - 1)
            counts = np.stack([_counts(step.tiles, head, len(q), step.k_rows) for head in range(s.heads)])
            k, v = (x.nan_to_num(0).double()[:, :, inside] for x in (k, v))
            self.wide.append((k, v, inside))
            logits.append(torch.einsum("nbhd,mbhd->bhnm", q, k) * SCALE + torch.tensor(counts).log())
        lse = torch.cat(logits, -1).logsumexp(-1)
        self.lse = lse.float()
        self.p = [(one - lse.nan_to_num(neginf=0.0)[..., None]).exp() for one in logits]
        dp = [torch.einsum("nbhd,mbhd->bhnm", dout, v) for _, v, _ in self.wide]
        delta = sum((p * one).sum(-1) for p, one in zip(self.p, dp, strict=True)) - dlse
        self.delta = delta.float()
        self.ds = [p * (one - delta[..., None]) for p, one in zip(self.p, dp, strict=True)]
        self.parts = [p * (one.abs() + delta[..., None].abs()) for p, one in zip(self.p, dp, strict=True)]

    def tables(self) -> list[tuple[Blocks, Blocks]]:
        """Of each step: by queries, in blocks of 16 x 8, and by keys, in blocks of 8 queries x 16."""
        s = self.scenario
        made = [(query_blocks(step.tiles, 16, 8), key_blocks(step.tiles, s.group, 16, 8)) for step in s.steps]
        for (_, by_key), flags in zip(made, self.flags, strict=True):
            by_key.blocks[:, 7] = flags
        return made

    def run(self, rng: Random, tables: Sequence[tuple[Blocks, Blocks]] | None = None, **how: Any) -> None:
        """All launches, with any number of programs and of buffers."""
        self.made = tables or self.tables()
        for step, kv, (dk, dv), made in zip(self.scenario.steps, self.kv, self.dkv, self.made, strict=True):
            by_query, by_key = (Table(torch.tensor(x.blocks), torch.tensor(x.entries), x.slots) for x in made)
            facts: dict[str, Any] = {"scale": SCALE, "group": self.scenario.group, "first_kv_head": step.held.start}
            rows = self.q, *kv, self.dout, self.lse, self.delta
            carried = (None, None) if dk.first and dk.last and rng.random() < 0.5 else (dk.carried, dv.carried)
            # What no block is LAST for is not touched.
            results = (dk.result, dv.result) if dk.last or rng.random() < 0.5 else None
            needed = bool((made[0].blocks[:, 7] & LAST).any()) or rng.random() < 0.5
            calls = (
                grad_q_gluon(
                    *rows, self.dq, by_query, Config(16, 8, 4, rng.choice((1, 2, 2, 3)), "gluon"),
                    result=self.dq_result if needed else None, programs=rng.choice((1, 2, 3, None)), **facts,
                ),
                grad_kv_gluon(
                    *rows, *carried, by_key, Config(8, 16, 4, rng.choice((1, 2, 2, 3)), "gluon"),
                    results=results, programs=rng.choice((1, 2, 3, None)), **facts,
                ),
            )  # fmt: skip
            for call in calls:
                simulate(call, rng.randrange(1 << 20), **how)

    def check(self, by_result: bool = False) -> None:
        """What rounding P and dS to float16 and summing in float32 may make of each value, and no more."""
        q, dout = self.clean
        dq, most = torch.zeros_like(self.dq_before), torch.full_like(self.dq_before, 2.0**-20)
        steps = zip(self.scenario.steps, self.wide, self.p, self.ds, self.parts, self.dkv, self.made, strict=True)
        for step, (k, _, inside), p, ds, parts, (dk, dv), (_, by_key) in steps:
            of_ds, of_p = ds.abs() * HALF + parts * SINGLE + LEAST, p * (HALF + SINGLE) + LEAST
            dq += torch.einsum("bhnm,mbhd->nbhd", ds, k) * SCALE
            most += torch.einsum("bhnm,mbhd->nbhd", of_ds, k.abs()) * SCALE
            met = _held(by_key, step.held.start, dk.before)
            dk.check(*(_to_heads(x, y, inside, dk.before) * SCALE for x, y in ((ds, q), (of_ds, q.abs()))), met)
            dv.check(*(_to_heads(x, y, inside, dv.before) for x, y in ((p, dout), (of_p, dout.abs()))), met)
        if by_result:
            assert ((self.dq_result.double() - dq).abs() <= most + dq.abs() * HALF).all()
        else:
            assert ((self.dq.double() - self.dq_before - dq).abs() <= most).all()
            assert self.dq_result.isnan().all()


def _to_heads(left: Tensor, right: Tensor, inside: Tensor, like: Tensor) -> Tensor:
    """left^T . right of all query heads, summed over those of each K/V head."""
    of_heads = torch.einsum("bhnm,nbhd->mbhd", left, right)
    return torch.zeros(like.shape, dtype=torch.float64).index_add_(2, inside, of_heads)


def _held(by_key: Blocks, first_head: int, like: Tensor) -> Tensor:
    """The rows and heads of the blocks, in a buffer that holds K/V heads from the first one on."""
    found = torch.zeros(like.shape, dtype=torch.bool)
    for first, stride, rows, head, heads, *_ in by_key.blocks.tolist():
        found[first : first + rows * stride : stride, :, head - first_head : head - first_head + heads] = True
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_the_steps_of_the_contract(name: str) -> None:
    """Masks, strides, ragged rows, groups of heads, several entries a block, several steps that add up."""
    one = GradPass(PLAIN[name], 1)
    one.run(Random(name))
    one.check()


@given(st.integers(0, 10_000))
def test_random_steps(seed: int) -> None:
    """Each step's key blocks with flags of their own."""
    rng = Random(seed)
    one = GradPass(random_scenario(seed), seed, [rng.randrange(4) for _ in range(3)])
    one.run(rng)
    one.check()


def test_what_must_be_seen_is_right_as_it_is() -> None:
    for seed, scenario in enumerate(SEEING):
        one = GradPass(scenario, seed, [seed % 4])
        one.run(Random(seed))
        one.check()


@pytest.mark.parametrize("name", [name for name in PLAIN if name.startswith("whole")])
def test_a_pass_begins_without_a_state_and_ends_in_the_result(name: str) -> None:
    """dQ by the flags of its query blocks; dK and dV of each step are delivered by it."""
    one = GradPass(PLAIN[name], 2, [FIRST | LAST] * 3)
    tables = one.tables()
    assert set_flags([by_query for by_query, _ in tables], len(one.q), one.scenario.heads)
    one.dq.fill_(NAN)
    one.run(Random(2), tables)
    one.check(by_result=True)


@pytest.mark.parametrize("flags", range(4))
def test_blocks_without_an_entry(flags: int) -> None:
    """They add nothing: what is carried stays, begins at 0, is delivered, or 0 is."""
    one = GradPass(simple(((strip(0, 32), strip(20, 40), CAUSAL),), StridedRange(0, 2), 2), 4, [flags])
    by_query, by_key = one.tables()[0]
    assert by_key.blocks[:, 0].tolist() == [0]  # keys at positions 20 to 31; none sees the others
    empty = np.array([[16, 1, 16, 0, 2, 0, 0, flags], [32, 1, 8, 0, 2, 0, 0, flags]], np.int32)
    table = Blocks(np.concatenate((empty, by_key.blocks)), by_key.entries, by_key.slots)
    one.run(Random(4), [(by_query, table)])
    one.check()


def test_a_row_whose_lse_says_that_it_saw_no_key_adds_nothing() -> None:
    one = GradPass(PLAIN["full"], 6, silent=7)
    one.run(Random(6))
    one.check()


@pytest.mark.parametrize("name", ["full", "causal"])
def test_rows_whose_logits_are_all_minus_infinity_add_nothing(name: str) -> None:
    """To dK and dV; dQ is a sum of 0 times keys of -inf, which is NaN in dense attention as well."""
    one = GradPass(PLAIN[name], 8)
    one.q[..., 0] = 1.0
    one.lse.fill_(float("-inf"))
    for k, _ in one.kv:
        k[..., 0] = float("-inf")
    one.run(Random(8))
    assert all(torch.equal(x.carried, x.before) for dkv in one.dkv for x in dkv)


def test_the_size_of_the_grid_and_the_turns_change_no_bit() -> None:
    made = [GradPass(PLAIN["zigzag"], 5) for _ in range(4)]
    for seed, one in enumerate(made):
        one.run(Random(seed))
        for (dk, dv), (same_dk, same_dv) in zip(one.dkv, made[0].dkv, strict=True):
            assert torch.equal(dk.carried, same_dk.carried) and torch.equal(dv.carried, same_dv.carried)
        assert torch.equal(one.dq, made[0].dq)


WRONG = {
    "k and v of a block are loaded while they are read": ("mbarrier.wait(kv_empty, items & 1 ^ 1)", "pass"),
    "k and v of a block are never free": ("wait(kv_empty, items & 1 ^ 1)", "wait(kv_empty, items & 1)"),
    "q of a block is loaded while it is read": ("mbarrier.wait(q_empty, items & 1 ^ 1)", "pass"),
    "a block is never given back": ("mbarrier.arrive(barriers[1])", "pass"),
    "a block is read before it is there": ("mbarrier.wait(barriers[0], items & 1)", "pass"),
    "descriptors of a block are made over others": ("mbarrier.wait(kv_full, items & 1 ^ 1)", "pass"),
    "descriptors of queries are made over others": ("mbarrier.wait(q_full, items & 1 ^ 1)", "pass"),
    "descriptors of entries are made over others": ("mbarrier.wait(full.index(slot), parity ^ 1)", "pass"),
    "rows are loaded while they are read": ("mbarrier.wait(empty.index(slot), parity ^ 1)", "pass"),
    "rows are never free": ("wait(empty.index(slot), parity ^ 1)", "wait(empty.index(slot), parity)"),
    "q is read before it is there": ("    mbarrier.wait(q_full.index(slot), parity)\n", ""),
    "dout is read before it is there": ("    mbarrier.wait(dout_full.index(slot), parity)\n", ""),
    "k is read before it is there": ("    mbarrier.wait(k_full.index(slot), parity)\n", ""),
    "v is read before it is there": ("    mbarrier.wait(v_full.index(slot), parity)\n", ""),
    "lse may come after q": ("empty = barriers_for(SLOTS, 2)", "empty = barriers_for(SLOTS, 1)"),
    "lse is not announced": ("    mbarrier.arrive(q_full.index(slot))\n", ""),
    "delta is announced with lse": (
        "    mbarrier.arrive(q_full.index(slot))\n    mbarrier.arrive(dout_full.index(slot))\n",
        "    mbarrier.arrive(q_full.index(slot))\n    mbarrier.arrive(q_full.index(slot))\n",
    ),
    "scores are not waited for": ("warpgroup_mma_wait(1, deps=(s,))", "warpgroup_mma_wait(2, deps=(s,))"),
    "dP is not waited for": ("warpgroup_mma_wait(1, deps=(dp,))", "warpgroup_mma_wait(2, deps=(dp,))"),
    "dP of dQ is not waited for": ("warpgroup_mma_wait(0, deps=(dp,))", "warpgroup_mma_wait(1, deps=(dp,))"),
    "dV is not waited for": ("warpgroup_mma_wait(1, deps=(dv,))", "warpgroup_mma_wait(2, deps=(dv,))"),
    "dK is not waited for": ("warpgroup_mma_wait(0, deps=(dk,))", "warpgroup_mma_wait(1, deps=(dk,))"),
    "dQ is not waited for": ("warpgroup_mma_wait(0, deps=(dq,))", "warpgroup_mma_wait(1, deps=(dq,))"),
    "q and dout are freed under their products": (
        "    dk = hopper.warpgroup_mma_wait(0, deps=(dk,))\n    mbarrier.arrive(empty.index(slot))\n",
        "    mbarrier.arrive(empty.index(slot))\n    dk = hopper.warpgroup_mma_wait(0, deps=(dk,))\n",
    ),
    "k and v are freed under their products": (
        "    dq = hopper.warpgroup_mma_wait(0, deps=(dq,))\n    mbarrier.arrive(empty.index(slot))\n",
        "    mbarrier.arrive(empty.index(slot))\n    dq = hopper.warpgroup_mma_wait(0, deps=(dq,))\n",
    ),
    "lse is written while it is read": (
        "    bring(q_rows, first_row, slot, parity, q_full, empty, q_buffers)\n",
        "    peak_buffers.index(slot).store(peaks)\n    bring(q_rows, first_row, slot, parity, q_full, empty,"
        " q_buffers)\n",
    ),
    "the roles differ in their order": ("visited(nth, start, full, full_end) * BLOCK_", "(start + nth) * BLOCK_"),
    "a row that saw no key weighs": ('gl.where(peaks == float("-inf"), float("inf"), peaks)', "peaks"),
    "the blocks on the left are not met": ("for edge in range(start,", "for edge in range(full,"),
    "the blocks on the right are those on the left": ("edge + (full_end - full)", "edge"),
    "columns are counted in eights": ("eight = cols - of_eight", "eight = cols"),
    "one query head of the group": ("for offset in range(reading)", "for offset in range(1)"),
    "the first query head of the group": ("kv_head * group + before", "kv_head * group"),
    "heads from 0 on": ("buffer_head = kv_head - first_kv_head", "buffer_head = kv_head"),
    "a FIRST block reads": ("mask=inside & (begins == 0)", "mask=inside"),
    "a LAST block writes the sum": ("mask=inside & (ends == 0)", "mask=inside"),
    "a block that is not LAST delivers": ("mask=inside & ends", "mask=inside"),
    "dK is not scaled": ("dk * scale, dk_carried", "dk, dk_carried"),
    "dQ is not scaled": ("dq * scale, dq_carried", "dq, dq_carried"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_the_simulation_sees(name: str) -> None:
    """What is wrong is found in a few of the contract's steps: as a fault, or by the reference."""
    old, new = WRONG[name]
    assert any(old in source_of(module) for module in SOURCES)
    for seed, scenario in enumerate(TELLING * 3):
        one = GradPass(scenario, seed, [seed % 4, (seed + 1) % 4], silent=3)
        try:
            one.run(Random(seed), edit=(old, new))
            one.check()
        except (Fault, AssertionError, IndexError):
            return
    pytest.fail("nothing was found")


TELLING = (*SEEING, PLAIN["part-of-the-heads"])


def test_without_sums_and_results_there_is_nowhere_to_write() -> None:
    q, row, table = rows_like(), torch.zeros(1, 2, 8), Table(torch.zeros(0, 8), torch.zeros(0, 16), 0)
    with pytest.raises(ValueError, match="pass one"):
        grad_q_gluon(q, q, q, q, row, row, None, table, Config(128, 128, 4, 2), scale=1.0)
    with pytest.raises(ValueError, match="pass one"):
        grad_kv_gluon(q, q, q, q, row, row, None, None, table, Config(64, 128, 4, 2), scale=1.0)

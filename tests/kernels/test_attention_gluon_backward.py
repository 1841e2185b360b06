"""The Gluon backward kernels without a GPU: a simulated Hopper GPU runs their source; unsupported calls are refused.

The kernels of head dimensions 64 and 128 without options have run on an H200.
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
from tests.kernels.test_attention_gluon import DIM, KEY_DIMS, PLAIN, SCALE, SEEING, Pass, _counts, rows_like

NAN = float("nan")
pytestmark = pytest.mark.unchanged("Gluon kernels")
SOURCES = MODULES[1:]
HALF, SINGLE, LEAST = 2.0**-11, 2.0**-18, 2.0**-25
"""Rounding errors: `HALF`, the relative error of float16; `SINGLE`, that of a weight computed in float32; `LEAST`, the
absolute error of the smallest float16 numbers."""


class Grads:
    """dK or dV of a step: the carried sum, the sum before the launch (`before`), and the result."""

    def __init__(self, like: Tensor, flags: int, make: torch.Generator) -> None:
        self.first, self.last = bool(flags & FIRST), bool(flags & LAST)
        self.carried = torch.randn(like.shape, generator=make)
        # A FIRST block must not read the sum, so the sum is NaN.
        if self.first:
            self.carried.fill_(NAN)
        self.result = torch.full(like.shape, NAN, dtype=torch.float16)
        self.before = self.carried.clone()

    def check(self, added: Tensor, allowed: Tensor, met: Tensor) -> None:
        """Check that the launch added `added` where the mask `met` is true, and that it wrote nothing else.

        If FIRST, `added` replaces the sum; if LAST, the total is in the result instead of the sum. `allowed`: the
        largest allowed error of each element.
        """
        total = added if self.first else added + self.before.double()
        rest = ~met if not self.last else torch.ones_like(met)
        assert torch.equal(self.carried[rest].nan_to_num(7.0), self.before[rest].nan_to_num(7.0))
        assert self.result[~met if self.last else torch.ones_like(met)].isnan().all()
        total_out = self.result if self.last else self.carried
        allowed = allowed + total.abs() * HALF * self.last
        # The sums are float32, of values near 1.
        assert ((total_out.double() - total).abs() <= allowed + 2.0**-20)[met].all()


class GradPass:
    """The backward launches for the steps of a scenario in float16, and their reference.

    Rows of K, V, q, dout, lse and delta that no tile reads are NaN. `flags`: for each step, the flags of all its key
    blocks. `silent`: a query row whose lse is set to -inf, as if the row attended to no key. `key_dim`: as for `Pass`.
    """

    def __init__(
        self, scenario: Scenario, seed: int, flags: Sequence[int] = (), silent: int | None = None, key_dim: int = DIM
    ) -> None:
        self.scenario, forward = scenario, Pass(scenario, seed, key_dim=key_dim)
        make = torch.Generator().manual_seed(seed + 1)
        self.q, self.kv = forward.q.clone(), forward.kv
        self.dout = torch.randn(*self.q.shape[:3], DIM, generator=make).half()
        self._set_reference(torch.randn(*self.q.shape[1:3], len(self.q), generator=make))
        if silent is not None:
            self.lse[..., silent] = float("-inf")
            for x in (*self.p, *self.ds, *self.parts):
                x[:, :, silent] = 0.0
        read = {row for step in scenario.steps for tile in step.tiles for row in tile.q.rows.members()}
        unread = [row for row in range(len(self.q)) if row not in read]
        self.q[unread], self.dout[unread] = NAN, NAN
        self.lse[..., unread], self.delta[..., unread] = NAN, NAN
        self.flags = [*flags, *[0] * len(scenario.steps)][: len(scenario.steps)]
        self.dkv = [tuple(Grads(x, flag, make) for x in kv) for kv, flag in zip(self.kv, self.flags, strict=True)]
        self.dq: Tensor = torch.randn(self.q.shape, generator=make)
        self.dq_before, self.dq_result = self.dq.double(), torch.full_like(self.q, NAN)

    def _set_reference(self, dlse: Tensor) -> None:
        """Compute the reference in float64: lse and delta over all keys, and P and dS of each step.

        lse and delta are stored in float32, as the kernels read them. `parts` has the sum of the absolute terms of each
        element of dS, for the error bound.
        """
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
        self.p = [(x - lse.nan_to_num(neginf=0.0)[..., None]).exp() for x in logits]
        dp = [torch.einsum("nbhd,mbhd->bhnm", dout, v) for _, v, _ in self.wide]
        delta = sum((p * x).sum(-1) for p, x in zip(self.p, dp, strict=True)) - dlse
        self.delta = delta.float()
        self.ds = [p * (x - delta[..., None]) for p, x in zip(self.p, dp, strict=True)]
        self.parts = [p * (x.abs() + delta[..., None].abs()) for p, x in zip(self.p, dp, strict=True)]

    def tables(self) -> list[tuple[Blocks, Blocks]]:
        """Return two tables for each step: query blocks (16 queries x 8 keys) and key blocks (16 keys x 8 queries)."""
        s = self.scenario
        tables = [(query_blocks(step.tiles, 16, 8), key_blocks(step.tiles, s.group, 16, 8)) for step in s.steps]
        for (_, by_key), flags in zip(tables, self.flags, strict=True):
            by_key.blocks[:, 7] = flags
        return tables

    def run(self, rng: Random, tables: Sequence[tuple[Blocks, Blocks]] | None = None, **how: Any) -> None:
        """Run all launches, with random numbers of programs and buffers. `how`: keywords of `simulate`."""
        self.step_tables = tables or self.tables()
        for step, kv, (dk, dv), pair in zip(self.scenario.steps, self.kv, self.dkv, self.step_tables, strict=True):
            by_query, by_key = (Table(torch.tensor(x.blocks), torch.tensor(x.entries), x.slots) for x in pair)
            options: dict[str, Any] = {"scale": SCALE, "group": self.scenario.group, "first_kv_head": step.held.start}
            rows = self.q, *kv, self.dout, self.lse, self.delta
            carried = (None, None) if dk.first and dk.last and rng.random() < 0.5 else (dk.carried, dv.carried)
            # Without a LAST block the results are not written, so the call may omit them.
            results = (dk.result, dv.result) if dk.last or rng.random() < 0.5 else None
            needed = bool((pair[0].blocks[:, 7] & LAST).any()) or rng.random() < 0.5
            calls = (
                grad_q_gluon(
                    *rows, self.dq, by_query, Config(16, 8, 4, rng.choice((1, 2, 2, 3)), "gluon"),
                    result=self.dq_result if needed else None, programs=rng.choice((1, 2, 3, None)), **options,
                ),
                grad_kv_gluon(
                    *rows, *carried, by_key, Config(8, 16, 4, rng.choice((1, 2, 2, 3)), "gluon"),
                    results=results, programs=rng.choice((1, 2, 3, None)), **options,
                ),
            )  # fmt: skip
            for call in calls:
                simulate(call, rng.randrange(1 << 20), **how)

    def check(self, by_result: bool = False) -> None:
        """Check that the errors are at most those of rounding P and dS to float16 and of summing in float32.

        If `by_result`, dQ is expected in its result, else in its carried sum.
        """
        q, dout = self.clean
        dq, most = torch.zeros_like(self.dq_before), torch.full_like(self.dq_before, 2.0**-20)
        steps = zip(
            self.scenario.steps, self.wide, self.p, self.ds, self.parts, self.dkv, self.step_tables, strict=True
        )
        for step, (k, _, inside), p, ds, parts, (dk, dv), (_, by_key) in steps:
            of_ds, of_p = ds.abs() * HALF + parts * SINGLE + LEAST, p * (HALF + SINGLE) + LEAST
            dq += torch.einsum("bhnm,mbhd->nbhd", ds, k) * SCALE
            most += torch.einsum("bhnm,mbhd->nbhd", of_ds, k.abs()) * SCALE
            dk_met, dv_met = (_rows_of_blocks(by_key, step.held.start, x.before) for x in (dk, dv))
            dk.check(*(_to_heads(x, y, inside, dk.before) * SCALE for x, y in ((ds, q), (of_ds, q.abs()))), dk_met)
            dv.check(*(_to_heads(x, y, inside, dv.before) for x, y in ((p, dout), (of_p, dout.abs()))), dv_met)
        if by_result:
            assert ((self.dq_result.double() - dq).abs() <= most + dq.abs() * HALF).all()
        else:
            assert ((self.dq.double() - self.dq_before - dq).abs() <= most).all()
            assert self.dq_result.isnan().all()


def _to_heads(left: Tensor, right: Tensor, inside: Tensor, like: Tensor) -> Tensor:
    """Return left^T · right for each query head, summed over the query heads of each K/V head.

    `inside`: the K/V head of each query head. `like`: a tensor of the shape of the result.
    """
    of_heads = torch.einsum("bhnm,nbhd->mbhd", left, right)
    return torch.zeros(like.shape, dtype=torch.float64).index_add_(2, inside, of_heads)


def _rows_of_blocks(by_key: Blocks, first_head: int, like: Tensor) -> Tensor:
    """Return a mask, in the shape of `like`, of the rows and heads in key blocks. Head 0 of `like` is `first_head`."""
    inside = torch.zeros(like.shape, dtype=torch.bool)
    for first, stride, rows, head, heads, *_ in by_key.blocks.tolist():
        inside[first : first + rows * stride : stride, :, head - first_head : head - first_head + heads] = True
    return inside


@pytest.mark.parametrize("name", PLAIN)
def test_the_steps_of_the_contract(name: str) -> None:
    """The kernels give the reference's gradients for the engine contract's scenarios.

    They have masks, strides, incomplete blocks, grouped heads, several entries per block, and several steps.
    """
    backward = GradPass(PLAIN[name], 1)
    backward.run(Random(name))
    backward.check()


@given(st.integers(0, 10_000))
def test_random_steps(seed: int) -> None:
    """dQ, dK and dV are right for random scenarios whose key blocks have random flags in each step."""
    rng = Random(seed)
    backward = GradPass(random_scenario(seed), seed, [rng.randrange(4) for _ in range(3)])
    backward.run(rng)
    backward.check()


def test_the_unchanged_kernels_pass_the_mutation_scenarios() -> None:
    for seed, scenario in enumerate(SEEING):
        backward = GradPass(scenario, seed, [seed % 4], key_dim=KEY_DIMS[seed % 2])
        backward.run(Random(seed))
        backward.check()


@pytest.mark.parametrize("name", [name for name in PLAIN if name.startswith("whole")])
def test_a_pass_begins_without_a_state_and_ends_in_the_result(name: str) -> None:
    """With FIRST and LAST flags, no launch reads an initial sum, and the results of dQ, dK and dV are written."""
    backward = GradPass(PLAIN[name], 2, [FIRST | LAST] * 3)
    tables = backward.tables()
    assert set_flags([by_query for by_query, _ in tables], len(backward.q), backward.scenario.heads)
    backward.dq.fill_(NAN)
    backward.run(Random(2), tables)
    backward.check(by_result=True)


@pytest.mark.parametrize("flags", range(4))
def test_blocks_without_an_entry(flags: int) -> None:
    """Key blocks without an entry add nothing.

    Without a flag their carried sum stays; FIRST sets it to 0; LAST writes it to the result; with both the result is 0.
    """
    backward = GradPass(simple(((strip(0, 32), strip(20, 40), CAUSAL),), StridedRange(0, 2), 2), 4, [flags])
    by_query, by_key = backward.tables()[0]
    assert by_key.blocks[:, 0].tolist() == [0]  # the keys at positions 20 to 31; no query attends to the other keys
    empty = np.array([[16, 1, 16, 0, 2, 0, 0, flags], [32, 1, 8, 0, 2, 0, 0, flags]], np.int32)
    table = Blocks(np.concatenate((empty, by_key.blocks)), by_key.entries, by_key.slots)
    backward.run(Random(4), [(by_query, table)])
    backward.check()


def test_a_row_with_an_lse_of_minus_infinity_adds_nothing() -> None:
    backward = GradPass(PLAIN["full"], 6, silent=7)
    backward.run(Random(6))
    backward.check()


@pytest.mark.parametrize("name", ["full", "causal"])
def test_rows_whose_logits_are_all_minus_infinity_add_nothing(name: str) -> None:
    """Rows whose logits are all -inf add nothing to dK and dV.

    dQ is not compared, because it sums products of 0 and -inf, in dense attention as well.
    """
    backward = GradPass(PLAIN[name], 8)
    backward.q[..., 0] = 1.0
    backward.lse.fill_(float("-inf"))
    for k, _ in backward.kv:
        k[..., 0] = float("-inf")
    backward.run(Random(8))
    assert all(torch.equal(x.carried, x.before) for dkv in backward.dkv for x in dkv)


def test_the_size_of_the_grid_and_the_turns_change_no_bit() -> None:
    passes = [GradPass(PLAIN["zigzag"], 5) for _ in range(4)]
    for seed, backward in enumerate(passes):
        backward.run(Random(seed))
        for (dk, dv), (same_dk, same_dv) in zip(backward.dkv, passes[0].dkv, strict=True):
            assert torch.equal(dk.carried, same_dk.carried) and torch.equal(dv.carried, same_dv.carried)
        assert torch.equal(backward.dq, passes[0].dq)


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
    "dP is not waited for": ("else 1, deps=(dp,))", "else 2, deps=(dp,))"),
    "dP of dQ is not waited for": ("warpgroup_mma_wait(0, deps=(dp,))", "warpgroup_mma_wait(1, deps=(dp,))"),
    "dV is not waited for": ("completed(dv, len(dk))", "completed(dv, len(dk) + 1)"),
    "dK is not waited for": ("completed(dk, 0)", "completed(dk, 1)"),
    "dQ is not waited for": ("completed(dq, 0)", "completed(dq, 1)"),
    "q and dout are freed under their products": (
        "        dk = completed(dk, 0)\n        grads = dk, dv\n    mbarrier.arrive(empty.index(slot))\n",
        "        mbarrier.arrive(empty.index(slot))\n        dk = completed(dk, 0)\n        grads = dk, dv\n",
    ),
    "k and v are freed under their products": (
        "    dq = completed(dq, 0)\n    mbarrier.arrive(empty.index(slot))\n",
        "    mbarrier.arrive(empty.index(slot))\n    dq = completed(dq, 0)\n",
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
    "items are not passed on": ("        hand_over(item, rounds, handed, 1)\n", ""),
    "a consumer ends after its first item": ("item = received(rounds, handed, 4)", "item = total"),
    "items are not taken from the counter": ("item = taken(counter, total)", "item += gl.num_programs(0)"),
    "dK is not scaled": ("sums[0], scale, dk_carried", "sums[0], None, dk_carried"),
    "gradients of all pieces go to the first columns": ("rows + piece * COLS", "rows"),
    "one piece of the keys is announced": ("k_rows.block_type.nbytes * len(k_buffer)", "k_rows.block_type.nbytes"),
    "one piece of the queries is announced": ("q_rows.block_type.nbytes * len(q_buffer)", "q_rows.block_type.nbytes"),
    "dQ is not scaled": ("dq, scale, dq_carried", "dq, None, dq_carried"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_the_simulation_detects_a_wrong_kernel(name: str) -> None:
    """For each wrong kernel, one of a few scenarios raises a fault or differs from the reference."""
    old, new = WRONG[name]
    assert any(old in source_of(module) for module in SOURCES)
    for seed, scenario in enumerate(TELLING * 3):
        backward = GradPass(scenario, seed, [seed % 4, (seed + 1) % 4], silent=3, key_dim=KEY_DIMS[seed % 2])
        try:
            backward.run(Random(seed), edit=(old, new))
            backward.check()
        except (Fault, AssertionError, IndexError):
            return
    pytest.fail("the wrong kernel was not detected")


TELLING = (*SEEING, PLAIN["part-of-the-heads"])


def test_a_launch_without_sums_and_results_is_refused() -> None:
    q, row, table = rows_like(), torch.zeros(1, 2, 8), Table(torch.zeros(0, 8), torch.zeros(0, 16), 0)
    with pytest.raises(ValueError, match="pass one"):
        grad_q_gluon(q, q, q, q, row, row, None, table, Config(128, 128, 4, 2), scale=1.0)
    with pytest.raises(ValueError, match="pass one"):
        grad_kv_gluon(q, q, q, q, row, row, None, None, table, Config(64, 128, 4, 2), scale=1.0)

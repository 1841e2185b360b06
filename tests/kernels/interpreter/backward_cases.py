"""Backward kernels, run launch by launch in Triton's interpreter, agree with dense attention in float64.

pytest collects the file only by its name, as for kernel_cases.py. A block with the flag FIRST is the first update of
its rows in a pass, and one with LAST is the last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ringattn.kernels import attention_tiles
from ringattn.kernels.attention_backward import grad_kv, grad_q
from ringattn.kernels.attention_tiles import section_for
from ringattn.kernels.launch import FIRST, LAST
from tests.kernels.interpreter.kernel_cases import (
    ALL,
    DTYPES,
    MANY,
    ONE,
    TOLERANCE,
    WINDOW,
    config_of,
    run_forward,
    seed,
    state_of,
)
from tests.kernels.interpreter.kernel_inputs import (
    FAR,
    GROUP,
    HEADS,
    K_ROWS,
    NAN,
    Q_ROWS,
    SCALE,
    SILENT,
    Inputs,
    Keys,
    Pairs,
    by_key,
    by_query,
    close,
    silenced,
)

__all__ = ["seed"]

Seeds = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Grads(NamedTuple):
    """Gradients in separate memory with guarded margins."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    result: Tensor


def grads_of(inputs: Inputs, fill: float = 0.0) -> Grads:
    memory, (d_k, d_v) = inputs.memory, (inputs.q.shape[3], inputs.v.shape[3])
    kv_heads = HEADS // GROUP
    return Grads(
        memory.rows(Q_ROWS, HEADS, d_k, fill=fill), memory.rows(K_ROWS, kv_heads, d_k, fill=fill),
        memory.rows(K_ROWS, kv_heads, d_v, fill=fill), memory.rows(Q_ROWS, HEADS, d_k, inputs.dtype),
    )  # fmt: skip


def backward_operands(inputs: Inputs, reference: dict[str, Tensor]) -> Seeds:
    """Return (q, k, v, dout, lse, delta), the operands of the backward launches."""
    lse, delta = (inputs.memory.per_row(Q_ROWS, HEADS) for _ in range(2))
    lse.copy_(reference["lse"]), delta.copy_(reference["delta"])
    return inputs.q, inputs.k, inputs.v, inputs.dout, lse, delta


@pytest.mark.parametrize("form", ["pointers", "descriptors"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [MANY, WINDOW], ids=["many", "window"])
def test_gradients_are_right(pairs: Pairs, dtype: torch.dtype, form: str) -> None:
    """One launch adds dQ, and another dK and dV, to sums that start at 1, with a softcap and odd head dimensions."""
    inputs = Inputs(pairs, dtype, 24, 40)
    reference, grads, config = inputs.reference(softcap=0.7), grads_of(inputs, fill=1.0), config_of(form)
    operands = backward_operands(inputs, reference)
    grad_q(*operands, grads.dq, by_query(pairs, config), config, scale=SCALE, group=GROUP, softcap=0.7).run()
    grad_kv(*operands, grads.dk, grads.dv, by_key(pairs, config), config, scale=SCALE, group=GROUP, softcap=0.7).run()
    for name in ("dq", "dk", "dv"):
        # Sums near 1 are rounded to steps of 2^-23.
        close(getattr(grads, name).double() - 1.0, reference[name], max(TOLERANCE[dtype], 3e-6))
    inputs.memory.check()


def test_neither_the_grid_nor_the_order_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are added to tensors of ones, so a work item that is processed twice or left out changes them.

    The tables have work items for more heads than there are, so some items are idle.
    """
    inputs, config, results = Inputs(ONE, torch.float32, batches=2), config_of("pointers", 32, 32), []
    queries, keys, operands = by_query(ONE, config), by_key(ONE, config), backward_operands(inputs, inputs.reference())
    # Each case: the number of programs, the bytes of L2, and the heads per section of the ten heads and of the six K/V
    # heads.
    for programs, l2, sections in ((None, 1 << 30, (10, 6)), (1, 1, (2, 1)), (5, 46_080, (6, 3))):
        monkeypatch.setattr(attention_tiles, "gpu_of", lambda device, l2=l2: attention_tiles.Gpu(l2, 1))
        by_head = section_for(queries, inputs.k, inputs.v, sharing=GROUP)
        assert (by_head, section_for(keys, inputs.q, inputs.dout, reads=GROUP)) == sections
        state, grads = state_of(inputs), grads_of(inputs, fill=1.0)
        state.out.fill_(1.0), state.lse.fill_(0.5)
        run_forward(inputs, state, "pointers", 0, result=None, programs=programs, table=queries, config=config)
        grad_q(*operands, grads.dq, queries, config, scale=SCALE, group=GROUP, programs=programs).run()
        grad_kv(*operands, grads.dk, grads.dv, keys, config, scale=SCALE, group=GROUP, programs=programs).run()
        results.append((state.out, state.lse, *grads[:3]))
    assert all(torch.equal(x, y) for run in results[1:] for x, y in zip(results[0], run, strict=True))
    assert not any(torch.equal(x, torch.ones_like(x)) for x in results[0])
    inputs.memory.check()


@pytest.mark.parametrize("form", ["pointers", "descriptors"])
def test_dq_follows_the_flags_of_its_blocks(form: str) -> None:
    """Launches with FIRST (on NaN) and then LAST give the same bits as two launches without flags that start at 0.

    Each of the two launches has half of the ranges of keys. A single launch with both flags is right as well.
    """
    inputs, config = Inputs(MANY, torch.float16), config_of(form)
    plain, flagged, once = grads_of(inputs), grads_of(inputs, fill=NAN), grads_of(inputs, fill=NAN)
    operands = backward_operands(inputs, inputs.reference())
    halves = [MANY._replace(keys=keys) for keys in (MANY.keys[:2], MANY.keys[2:])]
    for pairs, flags in zip(halves, (FIRST, LAST), strict=True):
        grad_q(*operands, plain.dq, by_query(pairs, config), config, scale=SCALE, group=GROUP).run()
        table = by_query(pairs, config, flags)
        grad_q(*operands, flagged.dq, table, config, scale=SCALE, group=GROUP, result=flagged.result).run()
        if flags == FIRST:
            assert torch.equal(flagged.dq, plain.dq) and flagged.result.isnan().all()
            before = plain.dq.clone()
    assert torch.equal(flagged.dq, before) and torch.equal(flagged.result, plain.dq.half())
    table = by_query(MANY, config, FIRST | LAST)
    grad_q(*operands, None, table, config, scale=SCALE, group=GROUP, result=once.result).run()
    close(once.result, inputs.reference()["dq"], TOLERANCE[torch.float16])
    inputs.memory.check()


class KeyGrads(NamedTuple):
    """dK and dV, as float32 sums and as results in the input dtype, in separate memory with guarded margins."""

    sums: tuple[Tensor, Tensor]
    results: tuple[Tensor, Tensor]


def key_grads_of(inputs: Inputs, fill: float = NAN) -> KeyGrads:
    dims = inputs.q.shape[3], inputs.v.shape[3]
    dk, dv = (inputs.memory.rows(K_ROWS, HEADS // GROUP, dim, fill=fill) for dim in dims)
    dk_result, dv_result = (inputs.memory.rows(K_ROWS, HEADS // GROUP, dim, inputs.dtype) for dim in dims)
    return KeyGrads((dk, dv), (dk_result, dv_result))


@pytest.mark.parametrize(("form", "fused"), [("pointers", True), ("descriptors", False)])
def test_dk_and_dv_follow_the_flags_of_their_blocks(form: str, fused: bool) -> None:
    """A launch with the flag FIRST overwrites the sums, which may be NaN before.

    A launch with LAST writes the results and not the sums. One with both flags needs no sums, and gives the same bits.
    """
    runs, config = MANY._replace(keys=MANY.keys[1:3]), config_of(form)
    inputs = Inputs(runs, torch.float16)
    reference, named = (
        inputs.reference(),
        [keys.first + keys.stride * j for keys in runs.keys for j in range(keys.rows)],
    )
    operands, dq = backward_operands(inputs, reference), inputs.memory.rows(Q_ROWS, HEADS, 16, fill=0.0)
    twice, once = key_grads_of(inputs), key_grads_of(inputs)

    def launch(sums: tuple[Tensor, Tensor] | tuple[None, None], results: tuple[Tensor, Tensor], flags: int) -> None:
        table = by_key(runs, config, flags)
        if fused:
            grad_kv(*operands, *sums, table, config, scale=SCALE, group=GROUP, results=results, dq=dq).run()
        else:
            grad_kv(*operands, *sums, table, config, scale=SCALE, group=GROUP, results=results).run()

    launch(twice.sums, twice.results, FIRST)
    assert all(x.isnan().all() for x in twice.results)
    for sums, name in zip(twice.sums, ("dk", "dv"), strict=True):
        close(sums[named], reference[name][named], TOLERANCE[torch.float16])
    before = [x.clone() for x in twice.sums]
    launch(twice.sums, twice.results, LAST)
    launch((None, None), once.results, FIRST | LAST)
    for total, result, sums, single in zip(before, twice.results, twice.sums, once.results, strict=True):
        # The second launch adds the same gradient again, so the result is exactly twice the first sum.
        assert torch.equal(result[named], (2 * total[named]).half()) and torch.equal(sums[named], total[named])
        assert torch.equal(single[named], total[named].half())
    unnamed = [row for row in range(K_ROWS) if row not in named]
    assert all(x[unnamed].isnan().all() for x in (*twice.sums, *twice.results, *once.results))
    inputs.memory.check()


def test_key_blocks_without_an_entry_follow_their_flags() -> None:
    """A key block without an entry sets its sums to 0 if it is FIRST, and converts them to the result if it is LAST.

    With both flags the result is 0.
    """
    inputs, config = Inputs(ONE, torch.bfloat16), config_of("pointers")
    operands, grads = backward_operands(inputs, inputs.reference()), key_grads_of(inputs)
    for x in grads.sums:
        x[5 + 16 :].normal_()
    before = [x.clone() for x in grads.sums]
    table = by_key(ONE, config)
    table.blocks[:, 6] = table.blocks[:, 5]
    table.blocks[:, 7] = torch.tensor([FIRST, LAST, FIRST | LAST])  # keys 5 to 20, 21 to 36, 37 to 52
    grad_kv(*operands, *grads.sums, table, config, scale=SCALE, group=GROUP, results=grads.results).run()
    for sums, sums_before, result in zip(grads.sums, before, grads.results, strict=True):
        assert not sums[5:21].any() and torch.equal(sums[21:], sums_before[21:]) and result[:21].isnan().all()
        assert torch.equal(result[21:37], sums_before[21:37].bfloat16()) and not result[37:53].any()
    inputs.memory.check()


@pytest.mark.parametrize("rows", [(40, 1, 1), (0, 3, 13), (1, 2, 19)], ids=str)
def test_lse_and_delta_are_read_from_the_rows_of_the_run(rows: tuple[int, int, int]) -> None:
    """dK and dV are right for ranges of queries with any start and stride, so their lse and delta are the right ones.

    lse and delta are strided views with NaN between their elements.
    """
    first, apart, count = rows if rows[0] < Q_ROWS else (Q_ROWS - 1, 1, 1)
    inputs, config = Inputs(Pairs((Keys(0, 1, 48, 0),), position=0, most=FAR), torch.float32), config_of("pointers")
    chosen = [first + apart * i for i in range(count)]
    grads, reference = key_grads_of(inputs, fill=0.0), inputs.reference()
    lse, delta = (torch.full((1, HEADS, Q_ROWS, apart_by), NAN)[..., 1] for apart_by in (2, 3))
    for x, name in ((lse, "lse"), (delta, "delta")):
        x[..., chosen] = reference[name][..., chosen].float()
    inputs.dout[[row for row in range(Q_ROWS) if row not in chosen]] = 0.0
    expected = inputs.reference()
    table = by_key(inputs.pairs, config)
    # Replace the entries by a strided range of query rows. A query attends to a key if its position is not below the
    # key's.
    for block, entry in zip(table.blocks.tolist(), table.entries, strict=True):
        near = first - block[0]
        sees = (near + apart * np.arange(count))[None, :] >= np.arange(block[2])[:, None]
        blocks = [sees[:, start : start + config.block_m] for start in range(0, count, config.block_m)]
        full = [i for i, block_sees in enumerate(blocks) if block_sees.all() and block_sees.shape[1] == config.block_m]
        visits = (0, full[0], full[-1] + 1, len(blocks)) if full else (0, 0, 0, len(blocks))
        entry[:11] = torch.tensor([first, apart, count, 1, apart, -FAR, near, *visits])
    grad_kv(
        inputs.q, inputs.k, inputs.v, inputs.dout, lse, delta, *grads.sums, table, config, scale=SCALE, group=GROUP
    ).run()
    # In the reference, rows outside the range have a dout of 0, so their delta is 0 and they add nothing.
    for sums, name in zip(grads.sums, ("dk", "dv"), strict=True):
        close(sums[:48], expected[name][:48], 3e-6)
    inputs.memory.check()


@pytest.mark.parametrize("form", ["pointers", "descriptors"])
@pytest.mark.parametrize("pairs", [MANY, WINDOW], ids=["many", "window"])
def test_the_fused_launch_equals_two_launches(pairs: Pairs, form: str) -> None:
    """dK and dV have equal bits; dQ differs by the rounding of float32 sums in another order."""
    inputs, config = Inputs(pairs, torch.bfloat16), config_of(form)
    split, fused = grads_of(inputs), grads_of(inputs)
    operands = backward_operands(inputs, inputs.reference())
    table = by_key(pairs, config)
    grad_q(*operands, split.dq, by_query(pairs, config), config, scale=SCALE, group=GROUP).run()
    grad_kv(*operands, split.dk, split.dv, table, config, scale=SCALE, group=GROUP).run()
    grad_kv(*operands, fused.dk, fused.dv, table, config, scale=SCALE, group=GROUP, dq=fused.dq).run()
    assert torch.equal(split.dk, fused.dk) and torch.equal(split.dv, fused.dv)
    close(fused.dq, split.dq.double(), 5e-7)
    inputs.memory.check()


def test_a_fused_launch_adds_nothing_for_keys_beyond_a_run() -> None:
    """Memory after the last key of a range does not change dQ.

    All logits are far below zero, so a row of zeros after the end would have an infinite weight.
    """
    inputs, config = Inputs(ONE._replace(keys=(Keys(5, 1, 3, 0),)), torch.float32), config_of("pointers")
    inputs.q.copy_(inputs.q.abs() * 40), inputs.k[5:8].copy_(-inputs.k[5:8].abs() * 40)
    reference, grads = inputs.reference(), grads_of(inputs)
    operands = backward_operands(inputs, reference)
    assert (reference["lse"] < -200).all()
    grad_kv(*operands, *grads[1:3], by_key(inputs.pairs, config), config, scale=SCALE, group=GROUP, dq=grads[0]).run()
    assert grads.dq.isfinite().all()


@pytest.mark.parametrize("pairs", [ALL, ONE], ids=["whole", "edges"])
@pytest.mark.parametrize(("form", "dtype"), [("pointers", torch.float32), ("descriptors", torch.bfloat16)])
def test_rows_whose_logits_are_all_minus_infinity_add_nothing(pairs: Pairs, form: str, dtype: torch.dtype) -> None:
    """Rows with an lse of -inf add nothing, also if their blocks have no mask, and cause no NaN."""
    inputs, config = Inputs(pairs, dtype), config_of(form)
    reference, split, fused = silenced(inputs), grads_of(inputs), grads_of(inputs)
    operands, table = backward_operands(inputs, reference), by_key(pairs, config)
    grad_q(*operands, split.dq, by_query(pairs, config), config, scale=SCALE, group=GROUP).run()
    grad_kv(*operands, split.dk, split.dv, table, config, scale=SCALE, group=GROUP).run()
    grad_kv(*operands, fused.dk, fused.dv, table, config, scale=SCALE, group=GROUP, dq=fused.dq).run()
    # All keys have the same sign, so dq is a difference of close numbers. Rounding P and dS to bfloat16 changes each
    # product by at most half a unit of its last place, and a sum by as much of the sum of absolute values.
    rounding = torch.finfo(dtype).eps / 2 if dtype == torch.bfloat16 else 0.0
    for grads in (split, fused):
        assert not grads.dq[SILENT].any()
        for name in ("dq", "dk", "dv"):
            tolerance = TOLERANCE[torch.float32] + rounding
            close(getattr(grads, name), reference[name], tolerance, reference[f"abs_{name}"])
    inputs.memory.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_descriptors_equal_pointers_bitwise(dtype: torch.dtype) -> None:
    """Forward and backward with descriptors give the same bits as with pointers."""
    inputs, results = Inputs(MANY, dtype, 24, 40), []
    operands = backward_operands(inputs, inputs.reference())
    for form in ("pointers", "descriptors"):
        state, grads, config = state_of(inputs), grads_of(inputs), config_of(form, 32, 16)
        run_forward(inputs, state, form, FIRST | LAST, config=config)
        grad_q(*operands, grads.dq, by_query(MANY, config), config, scale=SCALE, group=GROUP).run()
        grad_kv(*operands, grads.dk, grads.dv, by_key(MANY, config), config, scale=SCALE, group=GROUP).run()
        results.append((state.result, state.lse, *grads[:3]))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))

"""The backward kernels in the interpreter, each launch by itself, against dense attention in float64.

Collected by name, as kernel_cases.py.
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
    attended,
    config_of,
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
    """Gradients with memory of their own."""

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


def seeds(inputs: Inputs, reference: dict[str, Tensor]) -> Seeds:
    """q, k, v, dout, lse, delta as the backward launches take them."""
    lse, delta = (inputs.memory.per_row(Q_ROWS, HEADS) for _ in range(2))
    lse.copy_(reference["lse"]), delta.copy_(reference["delta"])
    return inputs.q, inputs.k, inputs.v, inputs.dout, lse, delta


@pytest.mark.parametrize("form", ["pointers", "descriptors"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [MANY, WINDOW], ids=["many", "window"])
def test_gradients_are_right(pairs: Pairs, dtype: torch.dtype, form: str) -> None:
    """In two launches, adding to what is there, with softcap and odd head dimensions."""
    inputs = Inputs(pairs, dtype, 24, 40)
    reference, grads, config = inputs.reference(softcap=0.7), grads_of(inputs, fill=1.0), config_of(form)
    at = seeds(inputs, reference)
    grad_q(*at, grads.dq, by_query(pairs, config), config, scale=SCALE, group=GROUP, softcap=0.7).run()
    grad_kv(*at, grads.dk, grads.dv, by_key(pairs, config), config, scale=SCALE, group=GROUP, softcap=0.7).run()
    for name in ("dq", "dk", "dv"):
        # Adding to ones rounds to steps of 2^-23 of them.
        close(getattr(grads, name).double() - 1.0, reference[name], max(TOLERANCE[dtype], 3e-6))
    inputs.memory.check()


def test_neither_the_grid_nor_the_order_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of results that add to what is there: an item met twice or left out would show. Ten heads are idle or not."""
    inputs, config, found = Inputs(ONE, torch.float32, batches=2), config_of("pointers", 32, 32), []
    queries, keys, at = by_query(ONE, config), by_key(ONE, config), seeds(inputs, inputs.reference())
    # Programs; bytes of L2, and the sections that they lead to, of ten heads and of six K/V heads.
    for programs, l2, sections in ((None, 1 << 30, (10, 6)), (1, 1, (2, 1)), (5, 46_080, (6, 3))):
        monkeypatch.setattr(attention_tiles, "gpu_of", lambda device, l2=l2: attention_tiles.Gpu(l2, 1))
        by_head = section_for(queries, inputs.k, inputs.v, sharing=GROUP)
        assert (by_head, section_for(keys, inputs.q, inputs.dout, reads=GROUP)) == sections
        state, grads = state_of(inputs), grads_of(inputs, fill=1.0)
        state.out.fill_(1.0), state.lse.fill_(0.5)
        attended(inputs, state, "pointers", 0, result=None, programs=programs, table=queries, config=config)
        grad_q(*at, grads.dq, queries, config, scale=SCALE, group=GROUP, programs=programs).run()
        grad_kv(*at, grads.dk, grads.dv, keys, config, scale=SCALE, group=GROUP, programs=programs).run()
        found.append((state.out, state.lse, *grads[:3]))
    assert all(torch.equal(one, other) for run in found[1:] for one, other in zip(found[0], run, strict=True))
    assert not any(torch.equal(x, torch.ones_like(x)) for x in found[0])
    inputs.memory.check()


@pytest.mark.parametrize("form", ["pointers", "descriptors"])
def test_dq_begins_and_ends_as_its_blocks_say(form: str) -> None:
    """Two launches, each with half of the runs, bitwise: state on NaN first, result last."""
    inputs, config = Inputs(MANY, torch.float16), config_of(form)
    plain, flagged, once = grads_of(inputs), grads_of(inputs, fill=NAN), grads_of(inputs, fill=NAN)
    at = seeds(inputs, inputs.reference())
    halves = [MANY._replace(keys=keys) for keys in (MANY.keys[:2], MANY.keys[2:])]
    for pairs, flags in zip(halves, (FIRST, LAST), strict=True):
        grad_q(*at, plain.dq, by_query(pairs, config), config, scale=SCALE, group=GROUP).run()
        table = by_query(pairs, config, flags)
        grad_q(*at, flagged.dq, table, config, scale=SCALE, group=GROUP, result=flagged.result).run()
        if flags == FIRST:
            assert torch.equal(flagged.dq, plain.dq) and flagged.result.isnan().all()
            before = plain.dq.clone()
    assert torch.equal(flagged.dq, before) and torch.equal(flagged.result, plain.dq.half())
    table = by_query(MANY, config, FIRST | LAST)
    grad_q(*at, None, table, config, scale=SCALE, group=GROUP, result=once.result).run()
    close(once.result, inputs.reference()["dq"], TOLERANCE[torch.float16])
    inputs.memory.check()


class KeyGrads(NamedTuple):
    """dK and dV: the float32 sums and the results, with memory of their own."""

    sums: tuple[Tensor, Tensor]
    results: tuple[Tensor, Tensor]


def key_grads_of(inputs: Inputs, fill: float = NAN) -> KeyGrads:
    dims = inputs.q.shape[3], inputs.v.shape[3]
    dk, dv = (inputs.memory.rows(K_ROWS, HEADS // GROUP, dim, fill=fill) for dim in dims)
    dk_result, dv_result = (inputs.memory.rows(K_ROWS, HEADS // GROUP, dim, inputs.dtype) for dim in dims)
    return KeyGrads((dk, dv), (dk_result, dv_result))


@pytest.mark.parametrize(("form", "fused"), [("pointers", True), ("descriptors", False)])
def test_dk_and_dv_begin_and_end_as_their_blocks_say(form: str, fused: bool) -> None:
    """Two launches, bitwise: sums on NaN first, results last and the sums left alone; and one launch that is both."""
    runs, config = MANY._replace(keys=MANY.keys[1:3]), config_of(form)
    inputs = Inputs(runs, torch.float16)
    reference, named = (
        inputs.reference(),
        [keys.first + keys.stride * j for keys in runs.keys for j in range(keys.rows)],
    )
    at, dq = seeds(inputs, reference), inputs.memory.rows(Q_ROWS, HEADS, 16, fill=0.0)
    twice, once = key_grads_of(inputs), key_grads_of(inputs)

    def launch(sums: tuple[Tensor, Tensor] | tuple[None, None], results: tuple[Tensor, Tensor], flags: int) -> None:
        table = by_key(runs, config, flags)
        if fused:
            grad_kv(*at, *sums, table, config, scale=SCALE, group=GROUP, results=results, dq=dq).run()
        else:
            grad_kv(*at, *sums, table, config, scale=SCALE, group=GROUP, results=results).run()

    launch(twice.sums, twice.results, FIRST)
    assert all(x.isnan().all() for x in twice.results)
    for held, name in zip(twice.sums, ("dk", "dv"), strict=True):
        close(held[named], reference[name][named], TOLERANCE[torch.float16])
    before = [x.clone() for x in twice.sums]
    launch(twice.sums, twice.results, LAST)
    launch((None, None), once.results, FIRST | LAST)
    for total, result, held, alone in zip(before, twice.results, twice.sums, once.results, strict=True):
        # The same again: twice what the first launch gave, exactly.
        assert torch.equal(result[named], (2 * total[named]).half()) and torch.equal(held[named], total[named])
        assert torch.equal(alone[named], total[named].half())
    unnamed = [row for row in range(K_ROWS) if row not in named]
    assert all(x[unnamed].isnan().all() for x in (*twice.sums, *twice.results, *once.results))
    inputs.memory.check()


def test_key_blocks_without_an_entry_end_what_is_there() -> None:
    """FIRST sets zeros, LAST converts, both give zeros; each block by its own flags."""
    inputs, config = Inputs(ONE, torch.bfloat16), config_of("pointers")
    at, grads = seeds(inputs, inputs.reference()), key_grads_of(inputs)
    for x in grads.sums:
        x[5 + 16 :].normal_()
    before = [x.clone() for x in grads.sums]
    table = by_key(ONE, config)
    table.blocks[:, 6] = table.blocks[:, 5]
    table.blocks[:, 7] = torch.tensor([FIRST, LAST, FIRST | LAST])  # keys 5 to 20, 21 to 36, 37 to 52
    grad_kv(*at, *grads.sums, table, config, scale=SCALE, group=GROUP, results=grads.results).run()
    for held, was, result in zip(grads.sums, before, grads.results, strict=True):
        assert not held[5:21].any() and torch.equal(held[21:], was[21:]) and result[:21].isnan().all()
        assert torch.equal(result[21:37], was[21:37].bfloat16()) and not result[37:53].any()
    inputs.memory.check()


@pytest.mark.parametrize("rows", [(40, 1, 1), (0, 3, 13), (1, 2, 19)], ids=str)
def test_numbers_of_rows_are_read_where_the_run_is(rows: tuple[int, int, int]) -> None:
    """dK and dV of queries that begin anywhere and lie apart, lse and delta among NaN and with strides of their own."""
    first, apart, count = rows if rows[0] < Q_ROWS else (Q_ROWS - 1, 1, 1)
    inputs, config = Inputs(Pairs((Keys(0, 1, 48, 0),), position=0, most=FAR), torch.float32), config_of("pointers")
    chosen = [first + apart * i for i in range(count)]
    grads, reference = key_grads_of(inputs, fill=0.0), inputs.reference()
    lse, delta = (torch.full((1, HEADS, Q_ROWS, apart_by), NAN)[..., 1] for apart_by in (2, 3))
    for x, name in ((lse, "lse"), (delta, "delta")):
        x[..., chosen] = reference[name][..., chosen].float()
    inputs.dout[[row for row in range(Q_ROWS) if row not in chosen]] = 0.0
    wanted = inputs.reference()
    table = by_key(inputs.pairs, config)
    # The same positions, seen as a run of rows `apart`: key j of a block sees query i where position >= its own.
    for block, entry in zip(table.blocks.tolist(), table.entries, strict=True):
        near = first - block[0]
        sees = (near + apart * np.arange(count))[None, :] >= np.arange(block[2])[:, None]
        blocks = [sees[:, at : at + config.block_m] for at in range(0, count, config.block_m)]
        full = [i for i, one in enumerate(blocks) if one.all() and one.shape[1] == config.block_m]
        visits = (0, full[0], full[-1] + 1, len(blocks)) if full else (0, 0, 0, len(blocks))
        entry[:11] = torch.tensor([first, apart, count, 1, apart, -FAR, near, *visits])
    grad_kv(
        inputs.q, inputs.k, inputs.v, inputs.dout, lse, delta, *grads.sums, table, config, scale=SCALE, group=GROUP
    ).run()
    # delta = sum(dout * out) of the other rows is 0, as their dout: they add nothing to the reference.
    for held, name in zip(grads.sums, ("dk", "dv"), strict=True):
        close(held[:48], wanted[name][:48], 3e-6)
    inputs.memory.check()


@pytest.mark.parametrize("form", ["pointers", "descriptors"])
@pytest.mark.parametrize("pairs", [MANY, WINDOW], ids=["many", "window"])
def test_one_fused_launch_is_two(pairs: Pairs, form: str) -> None:
    """dK and dV bit for bit, dQ within the rounding of float32 sums in another order."""
    inputs, config = Inputs(pairs, torch.bfloat16), config_of(form)
    split, fused = grads_of(inputs), grads_of(inputs)
    at = seeds(inputs, inputs.reference())
    table = by_key(pairs, config)
    grad_q(*at, split.dq, by_query(pairs, config), config, scale=SCALE, group=GROUP).run()
    grad_kv(*at, split.dk, split.dv, table, config, scale=SCALE, group=GROUP).run()
    grad_kv(*at, fused.dk, fused.dv, table, config, scale=SCALE, group=GROUP, dq=fused.dq).run()
    assert torch.equal(split.dk, fused.dk) and torch.equal(split.dv, fused.dv)
    close(fused.dq, split.dq.double(), 5e-7)
    inputs.memory.check()


def test_a_fused_launch_adds_nothing_for_keys_beyond_a_run() -> None:
    """All logits far below zero: the weight of a key that is not there is infinite, and must not reach dQ."""
    inputs, config = Inputs(ONE._replace(keys=(Keys(5, 1, 3, 0),)), torch.float32), config_of("pointers")
    inputs.q.copy_(inputs.q.abs() * 40), inputs.k[5:8].copy_(-inputs.k[5:8].abs() * 40)
    reference, grads = inputs.reference(), grads_of(inputs)
    at = seeds(inputs, reference)
    assert (reference["lse"] < -200).all()
    grad_kv(*at, *grads[1:3], by_key(inputs.pairs, config), config, scale=SCALE, group=GROUP, dq=grads[0]).run()
    assert grads.dq.isfinite().all()


@pytest.mark.parametrize("pairs", [ALL, ONE], ids=["whole", "edges"])
@pytest.mark.parametrize(("form", "dtype"), [("pointers", torch.float32), ("descriptors", torch.bfloat16)])
def test_rows_whose_logits_are_all_minus_infinity_add_nothing(pairs: Pairs, form: str, dtype: torch.dtype) -> None:
    """Their lse is -inf though blocks without a mask hold them. Neither launch may make NaN of it."""
    inputs, config = Inputs(pairs, dtype), config_of(form)
    reference, split, fused = silenced(inputs), grads_of(inputs), grads_of(inputs)
    at, table = seeds(inputs, reference), by_key(pairs, config)
    grad_q(*at, split.dq, by_query(pairs, config), config, scale=SCALE, group=GROUP).run()
    grad_kv(*at, split.dk, split.dv, table, config, scale=SCALE, group=GROUP).run()
    grad_kv(*at, fused.dk, fused.dv, table, config, scale=SCALE, group=GROUP, dq=fused.dq).run()
    for grads in (split, fused):
        assert not grads.dq[SILENT].any()
        for name in ("dq", "dk", "dv"):
            # Keys of one sign: dq is a difference of near numbers, in which dense float32 is off by 8.3e-7.
            close(getattr(grads, name), reference[name], max(TOLERANCE[dtype], 3 * 8.3e-7))
    inputs.memory.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_descriptors_equal_pointers_bitwise(dtype: torch.dtype) -> None:
    """Rows of every run, forward and backward."""
    inputs, found = Inputs(MANY, dtype, 24, 40), []
    at = seeds(inputs, inputs.reference())
    for form in ("pointers", "descriptors"):
        state, grads, config = state_of(inputs), grads_of(inputs), config_of(form, 32, 16)
        attended(inputs, state, form, FIRST | LAST, config=config)
        grad_q(*at, grads.dq, by_query(MANY, config), config, scale=SCALE, group=GROUP).run()
        grad_kv(*at, grads.dk, grads.dv, by_key(MANY, config), config, scale=SCALE, group=GROUP).run()
        found.append((state.result, state.lse, *grads[:3]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

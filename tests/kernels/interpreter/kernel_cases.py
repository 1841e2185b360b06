"""The attention kernels in the interpreter, each launch by itself, against dense attention in float64.

Collected by name, in a process of its own with TRITON_INTERPRET=1 (see test_attention_kernels.py). Inputs differ from
run to run; RINGATTN_SEED repeats one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ringattn.kernels import attention_tiles
from ringattn.kernels.attention_backward import grad_fused, grad_kv, grad_q
from ringattn.kernels.attention_forward import forward
from ringattn.kernels.attention_tiles import describable, grid_of, section_for
from ringattn.kernels.experimental.attention_specialized import one_entry_each, specialized
from ringattn.kernels.launch_call import FIRST, LAST, Config
from tests.kernels.interpreter.bf16_shim import bf16
from tests.kernels.interpreter.kernel_inputs import (
    GROUP,
    HEADS,
    K_ROWS,
    NAN,
    Q_ROWS,
    SCALE,
    Inputs,
    Keys,
    Pairs,
    by_key,
    by_query,
    close,
)

FORMS = ("pointers", "descriptors", "specialized")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Relative Frobenius errors: three times those of the same computation in the stated dtype."""
LSE_TOLERANCE = 2e-7
# Runs of every kind: short, ragged, strided, out of order, wholly seen, partly seen, not seen at all.
MANY = Pairs((Keys(1, 1, 20, 10), Keys(22, 3, 14, 24), Keys(64, 1, 5, 90), Keys(70, 1, 9, 0)), position=24)
WINDOW = Pairs((Keys(3, 2, 33, 0, 2), Keys(71, 1, 6, 4)), position=8, apart=2, most=20)
ONE = Pairs((Keys(5, 1, 48, 0),), position=12)
BLIND = Pairs((Keys(2, 2, 20, 100),), position=90)


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    """Seeds every generator, and says how in the report of a failure."""
    chosen = int(os.environ.get("RINGATTN_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"RINGATTN_SEED={chosen}")
    torch.manual_seed(chosen)
    with bf16():
        yield chosen


# --- launches --------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """What a forward pass leaves: the state, and the result with its lse."""

    out: Tensor
    lse: Tensor
    weights: Tensor | None
    result: Tensor


def state_of(inputs: Inputs, raw: bool) -> State:
    """A state of NaN in every place."""
    d_v, memory = inputs.v.shape[3], inputs.memory
    weights = memory.per_row(Q_ROWS, HEADS) if raw else None
    lse = memory.per_row(Q_ROWS, HEADS)
    return State(memory.rows(Q_ROWS, HEADS, d_v), lse, weights, memory.rows(Q_ROWS, HEADS, d_v, inputs.dtype))


def config_of(form: str, block_m: int = 32, block_n: int = 16) -> Config:
    return Config(block_m, block_n, 4, 1, form)


def attended(inputs: Inputs, state: State, form: str, flags: int, **options: Any) -> None:
    """One forward launch with the same flags for every block; `keys` picks some of the runs."""
    config = options.pop("config", config_of(form))
    pairs = inputs.pairs._replace(keys=options.pop("keys", inputs.pairs.keys))
    table = options.pop("table", None) or by_query(pairs, config, flags)
    given = {"out": state.out, "result": state.result} | options
    out = given.pop("out")
    call = forward(
        inputs.q, inputs.k, inputs.v, out, state.lse, table, config, scale=SCALE, group=GROUP, weights=state.weights,
        **given,
    )  # fmt: skip
    (specialized(call) if form == "specialized" else call).run()


@pytest.mark.parametrize("form", ["pointers", "descriptors"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [MANY, WINDOW], ids=["many", "window"])
def test_one_launch_is_right(pairs: Pairs, dtype: torch.dtype, form: str) -> None:
    """The whole pass in one launch that neither reads nor writes a state, with sinks, and with odd head dimensions."""
    inputs = Inputs(pairs, dtype, 24, 40, batches=2)
    state, reference = state_of(inputs, raw=False), inputs.reference(sinks=True)
    attended(inputs, state, form, FIRST | LAST, out=None, sinks=inputs.sinks)
    close(state.result, reference["out"], TOLERANCE[dtype])
    close(state.lse, reference["lse"], LSE_TOLERANCE)
    assert state.out.isnan().all()
    inputs.memory.check()


@pytest.mark.parametrize("raw", [False, True], ids=["", "raw"])
@pytest.mark.parametrize("form", FORMS)
def test_without_a_result_the_state_is_written(form: str, raw: bool) -> None:
    inputs = Inputs(BLIND, torch.float32)
    state, reference = state_of(inputs, raw), inputs.reference(softcap=0.7)
    attended(inputs, state, form, FIRST, result=None, softcap=0.7)
    out, lse = state.out, state.lse
    if state.weights is not None:
        blind = state.weights == 0
        whole = state.weights.masked_fill(blind, 1.0)
        out = out / whole.permute(2, 0, 1)[..., None]
        lse = torch.where(blind, -inf, lse * float(np.log(2)) + whole.log())
    close(out, reference["out"], 1e-6)
    close(lse, reference["lse"], 5e-7)
    assert reference["lse"].isneginf().any() and reference["lse"].isfinite().any()
    assert state.result.isnan().all()
    inputs.memory.check()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_carried_steps_equal_one_launch_bitwise(dtype: torch.dtype, form: str, sinks: bool) -> None:
    """Raw: a launch for each run of keys, of which the first begins and the last ends the pass.

    The specialized form, which takes one entry a block, has the bits of the descriptors.
    """
    inputs = Inputs(MANY, dtype)
    options = {"sinks": inputs.sinks if sinks else None}
    whole, carried = state_of(inputs, raw=True), state_of(inputs, raw=True)
    attended(inputs, whole, "descriptors" if form == "specialized" else form, FIRST | LAST, **options)
    last = len(MANY.keys) - 1
    for at, keys in enumerate(MANY.keys):
        attended(inputs, carried, form, FIRST * (at == 0) | LAST * (at == last), keys=(keys,), **options)
    assert torch.equal(whole.result, carried.result) and torch.equal(whole.lse, carried.lse)
    reference = inputs.reference(sinks=sinks)
    close(whole.result, reference["out"], TOLERANCE[dtype])
    close(whole.lse, reference["lse"], LSE_TOLERANCE)
    assert whole.weights is not None and whole.weights.isnan().all() and whole.out.isnan().all()
    inputs.memory.check()


@pytest.mark.parametrize("raw", [False, True], ids=["", "raw"])
@pytest.mark.parametrize("form", ["pointers", "descriptors"])
def test_what_flags_leave_out_changes_nothing_else(form: str, raw: bool) -> None:
    """FIRST on NaN is no flag on (0, -inf); LAST is no flag, normalized and rounded; and each block has its own."""
    inputs = Inputs(ONE, torch.bfloat16)
    plain, flagged = state_of(inputs, raw), state_of(inputs, raw)
    plain.out.zero_(), plain.lse.fill_(-inf)
    if plain.weights is not None:
        plain.weights.zero_()
    attended(inputs, plain, form, 0)
    assert plain.result.isnan().all()
    table = by_query(ONE, config_of(form))
    table.blocks[:, 7] = torch.tensor([FIRST | LAST, FIRST])  # The first 32 rows are done at once.
    attended(inputs, flagged, form, 0, table=table)
    done, rest = slice(32), slice(32, None)
    assert torch.equal(flagged.out[rest], plain.out[rest]) and flagged.out[done].isnan().all()
    assert torch.equal(flagged.lse[..., rest], plain.lse[..., rest])
    assert flagged.result[rest].isnan().all()
    if plain.weights is None or flagged.weights is None:
        assert torch.equal(flagged.result[done], plain.out[done].bfloat16())
        assert torch.equal(flagged.lse[..., done], plain.lse[..., done])
    else:
        assert torch.equal(flagged.weights[..., rest], plain.weights[..., rest])
        assert flagged.weights[..., done].isnan().all()
        whole = plain.weights.permute(2, 0, 1)[done, ..., None]
        assert torch.equal(flagged.result[done], (plain.out[done] / whole).bfloat16())
    inputs.memory.check()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_rows_that_see_nothing(sinks: bool) -> None:
    """out 0 and lse -inf or the sink, after launches with and without an entry for them."""
    inputs = Inputs(BLIND, torch.float16)
    state, config = state_of(inputs, raw=False), config_of("pointers")
    attended(inputs, state, "pointers", FIRST, sinks=inputs.sinks if sinks else None)
    nothing = by_query(inputs.pairs, config, LAST)
    nothing.blocks[:, 6] = nothing.blocks[:, 5]
    attended(inputs, state, "pointers", 0, table=nothing, sinks=inputs.sinks if sinks else None)
    assert not state.result[:10].any() and state.result[10:].any(dim=(1, 2, 3)).all()
    empty = inputs.sinks[None, :, None].expand(1, -1, 10) if sinks else torch.full((1, HEADS, 10), -inf)
    close(
        state.lse[..., :10] if sinks else state.lse[..., :10].exp() + 1,
        empty.double() if sinks else empty.exp() + 1.0,
        LSE_TOLERANCE,
    )
    inputs.memory.check()


def test_a_grid_is_no_larger_than_its_work() -> None:
    table = by_query(ONE, config_of("pointers"))
    items = len(table.blocks) * table.slots
    assert grid_of(table, 2, 100) == grid_of(table, 2, None) == (2 * items,)
    assert grid_of(table, 2, 4) == (4,)


def test_which_tables_a_specialized_launch_takes() -> None:
    config = config_of("specialized")
    blocks = by_query(ONE, config).blocks
    assert one_entry_each(blocks) and not one_entry_each(by_query(MANY, config).blocks)
    blocks[1, 5] = blocks[1, 6]
    assert not one_entry_each(blocks)


def test_neither_state_nor_result_is_refused() -> None:
    inputs = Inputs(ONE, torch.float32)
    with pytest.raises(ValueError, match=r"needs the state or.*the result; pass one"):
        attended(inputs, state_of(inputs, raw=False), "pointers", FIRST | LAST, out=None, result=None)


# --- backward --------------------------------------------------------------------------------------------------------


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
        state, grads = state_of(inputs, raw=False), grads_of(inputs, fill=1.0)
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
    grad_fused(*at, fused.dq, fused.dk, fused.dv, table, config, scale=SCALE, group=GROUP).run()
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
    grad_fused(*at, *grads[:3], by_key(inputs.pairs, config), config, scale=SCALE, group=GROUP).run()
    assert grads.dq.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_descriptors_equal_pointers_bitwise(dtype: torch.dtype) -> None:
    """Rows of every run, forward and backward."""
    inputs, found = Inputs(MANY, dtype, 24, 40), []
    at = seeds(inputs, inputs.reference())
    for form in ("pointers", "descriptors"):
        state, grads, config = state_of(inputs, raw=False), grads_of(inputs), config_of(form, 32, 16)
        attended(inputs, state, form, FIRST | LAST, config=config)
        grad_q(*at, grads.dq, by_query(MANY, config), config, scale=SCALE, group=GROUP).run()
        grad_kv(*at, grads.dk, grads.dv, by_key(MANY, config), config, scale=SCALE, group=GROUP).run()
        found.append((state.result, state.lse, *grads[:3]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_descriptors_can_read() -> None:
    half = torch.zeros(8, 2, 4, 24, dtype=torch.bfloat16)
    assert describable(half, half[1:, :, 1:3], half[::3], half.half())
    assert not describable(half, half.float())
    assert not describable(half[:, :, :1].expand(-1, -1, 2, -1))  # rows that several heads see
    assert not describable(half[:1].expand(8, -1, -1, -1))  # one row at the place of all
    assert not describable(half[..., 4:])  # begins 8 bytes into 16
    assert not describable(torch.zeros(8, 2, 4, 20, dtype=torch.bfloat16))  # heads are 40 bytes apart

"""The forward kernels in the interpreter, each launch by itself, against dense attention in float64.

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

from ringattn.kernels.attention_forward import forward, one_entry_each
from ringattn.kernels.attention_tiles import describable, grid_of
from ringattn.kernels.launch import FIRST, LAST, Config
from tests.kernels.interpreter.bf16_shim import bf16
from tests.kernels.interpreter.kernel_inputs import (
    GROUP,
    HEADS,
    Q_ROWS,
    SCALE,
    Inputs,
    Keys,
    Pairs,
    by_query,
    close,
    seen,
    silenced,
)
from tests.kernels.interpreter.patching import patched_once

FORMS = ("pointers", "descriptors", "specialized")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Relative Frobenius errors: three times those of the same computation in the stated dtype."""
LSE_TOLERANCE = 2e-7
# Runs of every kind: short, ragged, strided, out of order, wholly seen, partly seen, not seen at all.
MANY = Pairs((Keys(1, 1, 20, 10), Keys(22, 3, 14, 24), Keys(64, 1, 5, 90), Keys(70, 1, 9, 0)), position=24)
WINDOW = Pairs((Keys(3, 2, 33, 0, 2), Keys(71, 1, 6, 4)), position=8, apart=2, most=20)
ONE = Pairs((Keys(5, 1, 48, 0),), position=12)
ALL = Pairs((Keys(5, 1, 48, 0),), position=60)
BLIND = Pairs((Keys(2, 2, 20, 100),), position=90)


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    """Seeds every generator, and says how in the report of a failure."""
    chosen = int(os.environ.get("RINGATTN_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"RINGATTN_SEED={chosen}")
    torch.manual_seed(chosen)
    with bf16(), patched_once():
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
    forward(
        inputs.q, inputs.k, inputs.v, out, state.lse, table, config, scale=SCALE, group=GROUP, weights=state.weights,
        **given,
    ).run()  # fmt: skip


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


@pytest.mark.parametrize("pairs", [ALL, ONE], ids=["whole", "edges"])
@pytest.mark.parametrize(("form", "dtype"), [("pointers", torch.float32), ("descriptors", torch.bfloat16)])
def test_rows_whose_logits_are_all_minus_infinity_see_nothing(pairs: Pairs, form: str, dtype: torch.dtype) -> None:
    """By the caller's values, and in blocks that have no mask: a state begins so, and goes on from one."""
    inputs = Inputs(pairs, dtype)
    reference, begun, carried = silenced(inputs), state_of(inputs, raw=False), state_of(inputs, raw=False)
    attended(inputs, begun, form, FIRST | LAST)
    carried.out.zero_(), carried.lse.fill_(-inf)
    attended(inputs, carried, form, LAST)
    for state in (begun, carried):
        close(state.result, reference["out"], TOLERANCE[dtype])
        close(state.lse, reference["lse"], LSE_TOLERANCE)
    assert reference["lse"].isneginf().sum() == 10 * HEADS
    inputs.memory.check()


@pytest.mark.parametrize("softcap", [None, 0.7], ids=["", "softcap"])
@pytest.mark.parametrize("scale", [SCALE, 0.0, -SCALE])
def test_the_peak_is_the_greatest_logit(scale: float, softcap: float | None) -> None:
    """Whatever the order of the products; the raw state shows it."""
    inputs, config = Inputs(WINDOW, torch.float32), config_of("pointers")
    state, table = state_of(inputs, raw=True), by_query(WINDOW, config, FIRST)
    forward(
        inputs.q, inputs.k, inputs.v, state.out, state.lse, table, config, scale=scale, softcap=softcap, group=GROUP,
        weights=state.weights,
    ).run()  # fmt: skip
    picked = [keys.first + keys.stride * j for keys in WINDOW.keys for j in range(keys.rows)]
    keys = inputs.k[picked].double().repeat_interleave(GROUP, 2)
    s = torch.einsum("ibhd,jbhd->bhij", inputs.q.double(), keys) * scale
    s = s if softcap is None else softcap * (s / softcap).tanh()
    mask = torch.from_numpy(np.concatenate([seen(WINDOW, run) for run in WINDOW.keys], axis=1))
    wanted = (s * np.log2(np.e)).masked_fill(~mask, -inf).amax(3)
    assert torch.equal(state.lse.isinf(), wanted.isinf())
    torch.testing.assert_close(state.lse.double(), wanted, rtol=1e-6, atol=2e-6)
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


def test_what_descriptors_can_read() -> None:
    half = torch.zeros(8, 2, 4, 24, dtype=torch.bfloat16)
    assert describable(half, half[1:, :, 1:3], half[::3], half.half())
    assert not describable(half, half.float())
    assert not describable(half[:, :, :1].expand(-1, -1, 2, -1))  # rows that several heads see
    assert not describable(half[..., 4:])  # begins 8 bytes into 16
    assert not describable(torch.zeros(8, 2, 4, 20, dtype=torch.bfloat16))  # heads are 40 bytes apart

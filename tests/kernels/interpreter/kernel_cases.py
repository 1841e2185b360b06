"""Forward kernels, run launch by launch in Triton's interpreter, agree with dense attention in float64.

test_interpreted.py passes this file by name to a separate pytest process with TRITON_INTERPRET=1. Inputs differ from
run to run; set RINGATTN_SEED to repeat a run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ringattn.kernels.attention_forward import forward
from ringattn.kernels.attention_tiles import describable, grid_of
from ringattn.kernels.launch import FIRST, LAST, Config
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
    silenced,
)
from tests.kernels.interpreter.shims import corrected

FORMS = ("pointers", "descriptors")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Bounds of the relative Frobenius error: three times the error that the same computation in that dtype has."""
LSE_TOLERANCE = 2e-7
# Ranges of keys of every kind: short, strided, out of order, not a multiple of the block, and visible to all, some or
# no queries.
MANY = Pairs((Keys(1, 1, 20, 10), Keys(22, 3, 14, 24), Keys(64, 1, 5, 90), Keys(70, 1, 9, 0)), position=24)
WINDOW = Pairs((Keys(3, 2, 33, 0, 2), Keys(71, 1, 6, 4)), position=8, apart=2, most=20)
ONE = Pairs((Keys(5, 1, 48, 0),), position=12)
ALL = Pairs((Keys(5, 1, 48, 0),), position=60)
BLIND = Pairs((Keys(2, 2, 20, 100),), position=90)


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    """Seed torch's generator, and correct the interpreter. Print the seed, so that the report of a failure has it."""
    chosen = int(os.environ.get("RINGATTN_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"RINGATTN_SEED={chosen}")
    torch.manual_seed(chosen)
    with corrected():
        yield chosen


# --- launches --------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """The output of a forward pass: the carried state (out, lse), and the result in the input dtype."""

    out: Tensor
    lse: Tensor
    result: Tensor


def state_of(inputs: Inputs) -> State:
    """Return a `State` for these inputs, filled with NaN."""
    d_v, memory = inputs.v.shape[3], inputs.memory
    out, lse = memory.rows(Q_ROWS, HEADS, d_v), memory.per_row(Q_ROWS, HEADS)
    return State(out, lse, memory.rows(Q_ROWS, HEADS, d_v, inputs.dtype))


def config_of(form: str, block_m: int = 32, block_n: int = 16) -> Config:
    return Config(block_m, block_n, 4, 1, form)


def run_forward(inputs: Inputs, state: State, form: str, flags: int, **options: Any) -> None:
    """Run a forward launch with the same flags for every block.

    `options`: `config`, `table`, `keys` (some ranges of keys instead of all), and keywords of `forward`.
    """
    config = options.pop("config", config_of(form))
    pairs = inputs.pairs._replace(keys=options.pop("keys", inputs.pairs.keys))
    table = options.pop("table", None) or by_query(pairs, config, flags)
    keywords = {"out": state.out, "result": state.result} | options
    out = keywords.pop("out")
    forward(inputs.q, inputs.k, inputs.v, out, state.lse, table, config, scale=SCALE, group=GROUP, **keywords).run()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [MANY, WINDOW], ids=["many", "window"])
def test_one_launch_is_right(pairs: Pairs, dtype: torch.dtype, form: str) -> None:
    """One launch computes the whole pass with sinks and odd head dimensions, without reading or writing a state."""
    inputs = Inputs(pairs, dtype, 24, 40, batches=2)
    state, reference = state_of(inputs), inputs.reference(sinks=True)
    run_forward(inputs, state, form, FIRST | LAST, out=None, sinks=inputs.sinks)
    close(state.result, reference["out"], TOLERANCE[dtype])
    close(state.lse, reference["lse"], LSE_TOLERANCE)
    assert state.out.isnan().all()
    inputs.memory.check()


@pytest.mark.parametrize("form", FORMS)
def test_without_a_result_the_state_is_written(form: str) -> None:
    inputs = Inputs(BLIND, torch.float32)
    state, reference = state_of(inputs), inputs.reference(softcap=0.7)
    run_forward(inputs, state, form, FIRST, result=None, softcap=0.7)
    close(state.out, reference["out"], 1e-6)
    close(state.lse, reference["lse"], 5e-7)
    assert reference["lse"].isneginf().any() and reference["lse"].isfinite().any()
    assert state.result.isnan().all()
    inputs.memory.check()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_carried_steps_are_right(dtype: torch.dtype, form: str, sinks: bool) -> None:
    """A pass with a launch for each range of keys is right. The first launch begins it, and the last launch ends it."""
    inputs = Inputs(MANY, dtype)
    options, carried, last = {"sinks": inputs.sinks if sinks else None}, state_of(inputs), len(MANY.keys) - 1
    for index, keys in enumerate(MANY.keys):
        run_forward(inputs, carried, form, FIRST * (index == 0) | LAST * (index == last), keys=(keys,), **options)
    reference = inputs.reference(sinks=sinks)
    close(carried.result, reference["out"], TOLERANCE[dtype])
    close(carried.lse, reference["lse"], 2 * LSE_TOLERANCE)
    inputs.memory.check()


@pytest.mark.parametrize("form", FORMS)
def test_what_flags_leave_out_changes_nothing_else(form: str) -> None:
    """A block with the flag FIRST on a state of NaN gives the bits of a block without flags on the state (0, -inf).

    A block with LAST gives the bits of a block without flags whose output is then rounded.
    """
    inputs = Inputs(ONE, torch.bfloat16)
    plain, flagged = state_of(inputs), state_of(inputs)
    plain.out.zero_(), plain.lse.fill_(-inf)
    run_forward(inputs, plain, form, 0)
    assert plain.result.isnan().all()
    table = by_query(ONE, config_of(form))
    table.blocks[:, 7] = torch.tensor([FIRST | LAST, FIRST])  # the block of the first 32 rows has both flags
    run_forward(inputs, flagged, form, 0, table=table)
    done, rest = slice(32), slice(32, None)
    assert torch.equal(flagged.out[rest], plain.out[rest]) and flagged.out[done].isnan().all()
    assert torch.equal(flagged.lse[..., rest], plain.lse[..., rest])
    assert flagged.result[rest].isnan().all()
    assert torch.equal(flagged.result[done], plain.out[done].bfloat16())
    assert torch.equal(flagged.lse[..., done], plain.lse[..., done])
    inputs.memory.check()


@pytest.mark.parametrize("pairs", [ALL, ONE], ids=["whole", "edges"])
@pytest.mark.parametrize(("form", "dtype"), [("pointers", torch.float32), ("descriptors", torch.bfloat16)])
def test_rows_whose_logits_are_all_minus_infinity_see_nothing(pairs: Pairs, form: str, dtype: torch.dtype) -> None:
    """Rows whose logits overflow to -inf attend to no key, with a new and with a carried state.

    This holds in blocks without a mask too.
    """
    inputs = Inputs(pairs, dtype)
    reference, begun, carried = silenced(inputs), state_of(inputs), state_of(inputs)
    run_forward(inputs, begun, form, FIRST | LAST)
    carried.out.zero_(), carried.lse.fill_(-inf)
    run_forward(inputs, carried, form, LAST)
    for state in (begun, carried):
        close(state.result, reference["out"], TOLERANCE[dtype])
        close(state.lse, reference["lse"], LSE_TOLERANCE)
    assert reference["lse"].isneginf().sum() == 10 * HEADS
    inputs.memory.check()


def test_large_logits_keep_their_weights() -> None:
    """Weights are right for large logits, because the kernel subtracts the largest scaled logit of each row."""
    inputs = Inputs(ONE, torch.float32)
    inputs.q.mul_(40)
    state, reference = state_of(inputs), inputs.reference()
    run_forward(inputs, state, "pointers", FIRST | LAST)
    close(state.result, reference["out"], 3e-4)
    inputs.memory.check()


def test_a_grid_is_no_larger_than_its_work() -> None:
    table = by_query(ONE, config_of("pointers"))
    items = len(table.blocks) * table.slots
    assert grid_of(table, 2, 100) == grid_of(table, 2, None) == (2 * items,)
    assert grid_of(table, 2, 4) == (4,)


def test_neither_state_nor_result_is_refused() -> None:
    inputs = Inputs(ONE, torch.float32)
    with pytest.raises(ValueError, match=r"needs the state or.*the result; pass one"):
        run_forward(inputs, state_of(inputs), "pointers", FIRST | LAST, out=None, result=None)


def test_what_descriptors_can_read() -> None:
    half = torch.zeros(8, 2, 4, 24, dtype=torch.bfloat16)
    assert describable(half, half[1:, :, 1:3], half[::3], half.half())
    assert not describable(half, half.float())
    assert not describable(half[:, :, :1].expand(-1, -1, 2, -1))  # several heads share the rows
    assert not describable(half[..., 4:])  # the base address is not a multiple of 16 bytes
    assert not describable(torch.zeros(8, 2, 4, 20, dtype=torch.bfloat16))  # heads are 40 bytes apart

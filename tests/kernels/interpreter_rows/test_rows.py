"""The row kernels: moving rows agrees with indexing in torch; merging states and summing rows agree with float64."""

from __future__ import annotations

import pytest
import torch

from ringattn.engine.base import merge_
from ringattn.kernels.rows import delta_call, merge_call, move_rows_call
from tests.kernels.interpreter_rows.canary import Canaries, error, random, shuffled

SHAPES = [(1, 1, 1, 16), (37, 2, 3, 48), (64, 1, 2, 128), (33, 2, 1, 80)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_and_values_side_by_side(canaries: Canaries, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, batch, heads, dim = shape
    k, v = canaries.hold(random(*shape, dtype=dtype)), canaries.hold(random(*shape, dtype=dtype, seed=1))
    records = canaries.out((rows, batch, heads, 2 * dim), dtype, dense=True)
    move_rows_call(k, records[..., :dim]).run()
    move_rows_call(v, records[..., dim:]).run()
    assert torch.equal(records, torch.cat((k, v), -1))


def test_rows_at_a_stride_are_a_slice(canaries: Canaries) -> None:
    k = canaries.hold(random(40, 2, 2, 32))
    record = canaries.out((13, 2, 2, 32), torch.float32, dense=True)
    move_rows_call(k[1::3], record).run()
    assert torch.equal(record, k[1::3])
    back = canaries.hold(torch.zeros(40, 2, 2, 32), in_place=True)
    move_rows_call(record, back[1::3], add=True).run()
    assert torch.equal(back[1::3], k[1::3])
    assert back.sum() == k[1::3].sum()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_scatter_by_list(canaries: Canaries, dtype: torch.dtype) -> None:
    rows = canaries.hold(shuffled(50)[:35], dense=True)
    source = canaries.hold(random(50, 2, 3, 48, dtype=dtype))
    record = canaries.out((35, 2, 3, 48), dtype, dense=True)
    move_rows_call(source, record, gather=rows).run()
    assert torch.equal(record, source[rows])
    spread = canaries.hold(torch.zeros(50, 2, 3, 48, dtype=dtype), in_place=True)
    move_rows_call(record, spread, scatter=rows).run()
    expected = torch.zeros(50, 2, 3, 48, dtype=dtype).index_copy_(0, rows, source[rows])
    assert torch.equal(spread, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_added_and_rounded_once(canaries: Canaries, dtype: torch.dtype) -> None:
    rows = torch.tensor([4, 0, 9])
    part = canaries.hold(random(3, 1, 2, 64, dtype=dtype))
    total = canaries.hold(random(10, 1, 2, 64, seed=2), in_place=True)
    narrow = canaries.hold(total.to(dtype), in_place=True)
    expected, wanted_narrow = total.clone(), narrow.clone()
    expected[rows] += part.float()
    wanted_narrow[rows] = (narrow[rows].float() + part.float()).to(dtype)
    move_rows_call(part, total, scatter=rows, add=True).run()
    move_rows_call(part, narrow, scatter=rows, add=True).run()
    assert torch.equal(total, expected) and torch.equal(narrow, wanted_narrow)


def test_no_rows_at_all(canaries: Canaries) -> None:
    into = canaries.hold(random(5, 1, 1, 16), in_place=True)
    before = into.clone()
    none = torch.zeros(0, dtype=torch.int64)
    move_rows_call(into, into, gather=none, scatter=none).run()
    assert torch.equal(into, before)


def test_offsets_beyond_32_bits() -> None:
    # The rows are 2^30 elements apart, so the third begins at 2^31. The memory between them is never touched.
    apart = 1 << 30
    far = torch.empty(2 * apart + 16, dtype=torch.int8).as_strided((3, 1, 1, 16), (apart, 16, 16, 1))
    rows = torch.arange(48, dtype=torch.int8).view(3, 1, 1, 16)
    move_rows_call(rows, far).run()
    back = torch.zeros_like(rows)
    move_rows_call(far, back).run()
    assert torch.equal(back, rows)


# --- the merge of two partials, against `ringattn/partial.py` in float64 ---------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (37, 2, 3, 48), (64, 1, 2, 128), (5, 1, 2, 256)])
@pytest.mark.parametrize("loud", [1.0, 100.0])
def test_like_the_plain_merge(canaries: Canaries, shape: tuple[int, ...], loud: float) -> None:
    rows, batch, heads, _ = shape
    out, part_out = canaries.hold(random(*shape), in_place=True), canaries.hold(random(*shape, seed=1))
    lse = canaries.hold(random(batch, heads, rows, seed=2) * loud, in_place=True)
    part_lse = canaries.hold(random(batch, heads, rows, seed=3) * loud)
    reference, reference_lse = out.double(), lse.double()
    merge_(reference, reference_lse, part_out.double(), part_lse.double())
    merge_call(out, lse, part_out, part_lse).run()
    assert error(out, reference) < 1e-6
    assert error(lse, reference_lse) < 2e-7


def test_rows_that_one_side_or_neither_has_seen(canaries: Canaries) -> None:
    nothing = float("-inf")
    out, part_out = canaries.hold(torch.ones(4, 1, 1, 16)), canaries.hold(torch.full((4, 1, 1, 16), 3.0))
    out[[1, 3]] = 0.0
    part_out[[2, 3]] = 0.0
    lse = canaries.hold(torch.tensor([[[0.5, nothing, 0.5, nothing]]]))
    part_lse = canaries.hold(torch.tensor([[[0.5, 0.25, nothing, nothing]]]))
    merge_call(out, lse, part_out, part_lse).run()
    assert torch.equal(out[:, 0, 0, 0], torch.tensor([2.0, 3.0, 1.0, 0.0]))
    assert torch.equal(lse[0, 0, 1:], torch.tensor([0.25, 0.5, nothing]))


# --- the row sums of a backward pass, against float64 ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (37, 2, 3, 48), (64, 1, 2, 128)])
def test_like_the_plain_sum(canaries: Canaries, shape: tuple[int, ...], with_dlse: bool, dtype: torch.dtype) -> None:
    rows, batch, heads, _ = shape
    dout, out = (canaries.hold(random(*shape, dtype=dtype, seed=seed)) for seed in (0, 1))
    dlse = canaries.hold(random(batch, heads, rows, seed=2)) if with_dlse else None
    delta = canaries.out((batch, heads, rows), torch.float32)
    delta_call(dout, out, dlse, delta).run()
    reference = (dout.double() * out.double()).sum(-1).permute(1, 2, 0)
    assert error(delta, reference if dlse is None else reference - dlse.double()) < 1e-6

"""Packing, unpacking, packing and scattering rows, against indexing in torch."""

from __future__ import annotations

import pytest
import torch

from ringattn.kernels.rows import move_rows_call
from tests.kernels.interpreter_rows.canary import Canaries, random, shuffled

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
    wanted, wanted_narrow = total.clone(), narrow.clone()
    wanted[rows] += part.float()
    wanted_narrow[rows] = (narrow[rows].float() + part.float()).to(dtype)
    move_rows_call(part, total, scatter=rows, add=True).run()
    move_rows_call(part, narrow, scatter=rows, add=True).run()
    assert torch.equal(total, wanted) and torch.equal(narrow, wanted_narrow)


def test_no_rows_at_all(canaries: Canaries) -> None:
    into = canaries.hold(random(5, 1, 1, 16), in_place=True)
    before = into.clone()
    none = torch.zeros(0, dtype=torch.int64)
    move_rows_call(into, into, gather=none, scatter=none).run()
    assert torch.equal(into, before)


def test_offsets_beyond_32_bits() -> None:
    # Rows 2^30 elements apart: the third begins at 2^31. The memory between them is never touched.
    apart = 1 << 30
    far = torch.empty(2 * apart + 16, dtype=torch.int8).as_strided((3, 1, 1, 16), (apart, 16, 16, 1))
    rows = torch.arange(48, dtype=torch.int8).view(3, 1, 1, 16)
    move_rows_call(rows, far).run()
    back = torch.zeros_like(rows)
    move_rows_call(far, back).run()
    assert torch.equal(back, rows)

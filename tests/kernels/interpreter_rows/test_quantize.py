"""The error of K and V in eight bits is within the documented bound, element by element, computed in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringattn.kernels.rows import LARGEST, quantize_call, restore_call
from ringattn.runtime import records
from tests.kernels.interpreter_rows.canary import Canaries, random

CODES = [torch.int8, torch.float8_e4m3fn]
ROUNDING = 1 + 2.0**-13  # the float32 rounding that the module adds to its bounds


def quantized(canaries: Canaries, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = canaries.out(x.shape, dtype)
    scales = canaries.out(x.shape[:3], torch.float32)
    quantize_call(canaries.hold(x), values, scales).run()
    return values, scales


def restored(canaries: Canaries, values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    x = canaries.out(values.shape, dtype)
    restore_call(values, scales, x).run()
    return x


def bound(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error bound that the quantization module documents, for each element of float64 x."""
    amax = x.abs().amax(-1, keepdim=True)
    if dtype == torch.int8:
        return (amax / 254).expand_as(x) * ROUNDING
    return (x.abs() * 2.0**-4 + amax / 448 * 2.0**-10) * ROUNDING


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (37, 2, 3, 48), (33, 1, 2, 128)])
def test_error_is_within_the_bound(
    canaries: Canaries, shape: tuple[int, ...], dtype: torch.dtype, code: torch.dtype
) -> None:
    x = random(*shape, dtype=dtype)
    x[0] *= 1e-3
    x[-1, ..., :3] *= 100  # with these outliers, the other elements of a head have small codes
    values, scales = quantized(canaries, x, code)
    wide = x.double()
    torch.testing.assert_close(scales.double(), wide.abs().amax(-1) / LARGEST[code], rtol=2.0**-22, atol=0)
    wrong = (restored(canaries, values, scales).double() - wide).abs()
    assert (wrong <= bound(wide, code)).all()
    # The bound is tight: the largest error is near it. In fp8 the largest error is 16/17 of the bound, midway between
    # the two codes just above a power of two.
    assert wrong.numel() < 1000 or (wrong / bound(wide, code)).max() > 0.9


@pytest.mark.parametrize("code", CODES)
def test_every_halfway_point(canaries: Canaries, code: torch.dtype) -> None:
    largest = LARGEST[code]
    ties = torch.arange(-127, 127) + 0.5 if code == torch.int8 else _fp8_midpoints()
    x = torch.cat((ties, torch.tensor([largest] * (256 - len(ties))))).view(1, 1, 1, 256)
    values, scales = quantized(canaries, x, code)
    assert scales.item() == 1.0
    assert ((restored(canaries, values, scales) - x).abs() <= bound(x.double(), code)).all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-37, 3e38])
def test_zeros_tiny_and_huge_heads(canaries: Canaries, code: torch.dtype, size: float) -> None:
    x = torch.full((2, 1, 1, 16), size)
    x[..., 8:] *= -0.5
    back = restored(canaries, *quantized(canaries, x, code)).double()
    floor = 2.0**-127  # half a step of the smallest scale
    assert ((back - x.double()).abs() <= bound(x.double(), code) + floor).all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_back_as_nan(canaries: Canaries, code: torch.dtype, bad: float) -> None:
    x = random(3, 1, 2, 16)
    x[1, 0, 1, 5] = bad
    back = restored(canaries, *quantized(canaries, x, code))
    assert back[1, 0, 1].isnan().all()
    assert back.isnan().sum() == 16


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_same_bits_as_plain_torch(canaries: Canaries, code: torch.dtype, dtype: torch.dtype) -> None:
    x = random(37, 2, 3, 20, dtype=dtype) * torch.logspace(-40, 4, 37).to(dtype).view(-1, 1, 1, 1)
    x[3], x[4, ..., 1::2] = 0.0, torch.finfo(dtype).max * 0.99
    values, scales = quantized(canaries, x, code)
    plain_values, plain_scales = canaries.out(x.shape, code), canaries.out(x.shape[:3], torch.float32)
    records.quantize(x, plain_values, plain_scales)
    assert torch.equal(scales.view(torch.int32), plain_scales.view(torch.int32))
    assert torch.equal(values.view(torch.uint8), plain_values.view(torch.uint8))
    back = canaries.out(x.shape, dtype)
    records.restore(values, scales, back)
    assert back.isfinite().all()
    assert torch.equal(back, restored(canaries, values, scales, dtype))


@pytest.mark.parametrize("code", CODES)
def test_restores_into_a_narrow_dtype(canaries: Canaries, code: torch.dtype) -> None:
    values, scales = quantized(canaries, random(5, 1, 2, 32), code)
    wide = restored(canaries, values, scales)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(restored(canaries, values, scales, dtype), wide.to(dtype))


def _fp8_midpoints() -> Tensor:
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    return torch.cat((middle, -middle))

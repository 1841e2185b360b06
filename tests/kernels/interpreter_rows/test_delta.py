"""The row sums of a backward pass, against float64."""

from __future__ import annotations

import pytest
import torch

from ringattn.kernels.rows import delta_call
from tests.kernels.interpreter_rows.canary import Canaries, error, random


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

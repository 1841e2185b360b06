"""The merge of two partials, against `ringattn/partial.py` in float64."""

from __future__ import annotations

import pytest
import torch

from ringattn.engine.base import merge_
from ringattn.kernels.rows import merge_call
from tests.kernels.interpreter_rows.canary import Canaries, error, random


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

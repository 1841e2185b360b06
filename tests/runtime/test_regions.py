"""Checkpointed regions are found on the call stack, as one object in forward and in recomputation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn.runtime.regions import Regions, enclosing_regions
from tests.adapters.test_recomputation import CheckpointFunction


def test_nested_regions_are_found_innermost_first_and_again_in_backward() -> None:
    seen: list[Regions] = []

    def inner(x: Tensor) -> Tensor:
        seen.append(enclosing_regions())
        return x.sin()

    def outer(x: Tensor) -> Any:
        return checkpoint(inner, x, use_reentrant=False)

    assert enclosing_regions() == Regions()
    CheckpointFunction.apply(outer, torch.ones(3, requires_grad=True)).sum().backward()
    forward, recomputed_outer, recomputed_inner = seen
    frame, function = forward.entered
    assert not forward.is_recomputation
    assert recomputed_outer.recomputed is function and recomputed_outer.entered != (frame,)
    (new_frame,) = recomputed_outer.entered
    assert recomputed_inner.recomputed is new_frame and recomputed_inner.entered == ()
    assert len({regions.backward for regions in seen}) == 3


def test_reentrant_checkpoints_of_torch_are_found() -> None:
    seen: list[Regions] = []

    def region(x: Tensor) -> Tensor:
        seen.append(enclosing_regions())
        return x.sin()

    checkpoint(region, torch.ones(3, requires_grad=True), use_reentrant=True).sum().backward()
    forward, recomputation = seen
    assert len(forward.entered) == 1 and recomputation.recomputed is forward.entered[0]


def test_code_that_calls_backward_is_not_part_of_a_recomputation() -> None:
    """A gradient inside a region's forward run: the hook runs in backward, in no region."""
    seen: list[Regions] = []

    def region(x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        y.register_hook(lambda grad: seen.append(enclosing_regions()))
        torch.autograd.grad(y.sin().sum(), y)
        return x.sin()

    checkpoint(region, torch.ones(3, requires_grad=True), use_reentrant=False)
    (regions,) = seen
    assert regions.entered == () and regions.recomputed is None and regions.is_recomputation

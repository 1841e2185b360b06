"""Attention over the real NCCL transport on simulated GPUs is exact, forward and backward, in registered memory.

With `lazy`, the simulated device moves bytes as late as possible, so that a missing wait would read old bytes.
"""

from __future__ import annotations

import pytest
import torch

from ringattn.transport.nccl.binding import Capability
from ringattn.transport.nccl.options import NcclOptions
from tests.schedules import share_in_turn
from tests.transport.nccl_rings import EVERYTHING, on_rings, results
from tests.transport.simulated.world import SimWorld
from tests.trial import Trial, greatest_error, joined, on_rank, reference

EXACT = 1e-10
TRIALS = {
    "causal": (Trial(causal=True, heads=(4, 2), lse=True), "zigzag"),
    "window": (Trial(window=(6, 2), sinks=True), "contiguous"),
    "documents": (Trial(causal=True, documents=(0, 5, 5, 18, 19, 37)), "per_document"),
    "short": (Trial(tokens=3, causal=True), "striped"),
}
RING = {"engine": "plain", "timeout_s": 30.0, "poison": True}


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", TRIALS)
def test_exact(name: str, ranks: int, lazy: bool) -> None:
    trial, layout = TRIALS[name]
    world, schedules = SimWorld(ranks, lazy=lazy), share_in_turn(list(TRIALS).index(name) + ranks, 3)
    by_rank = results(on_rings(
        world, lambda ring: [on_rank(ring, trial, layout, schedule, torch.float64) for schedule in schedules], ring=RING
    ))  # fmt: skip
    assert world.violations == []
    for schedule, parts in zip(schedules, zip(*by_rank, strict=True), strict=True):
        assert greatest_error(joined(list(parts)), reference(trial, torch.float64)) <= EXACT, schedule


@pytest.mark.parametrize(
    ("options", "capabilities"),
    [
        (NcclOptions(register=False), EVERYTHING),
        (NcclOptions(blocking=True, sm_margin=4, channels_per_net_peer=2), EVERYTHING),
        (NcclOptions(), EVERYTHING - {Capability.MEMORY}),
        (NcclOptions(), frozenset()),
    ],
    ids=["plain memory", "blocking", "no ncclMemAlloc", "nothing but send and receive"],
)
def test_exact_with_fewer_capabilities(options: NcclOptions, capabilities: frozenset[Capability]) -> None:
    trial, layout = TRIALS["causal"]
    world = SimWorld(3)
    by_rank = results(on_rings(
        world, lambda ring: on_rank(ring, trial, layout, "ring", torch.float64), ring=RING, options=options,
        capabilities=capabilities,
    ))  # fmt: skip
    assert world.violations == []
    assert greatest_error(joined(by_rank), reference(trial, torch.float64)) <= EXACT

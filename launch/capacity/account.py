"""The memory of one rank of a run: its largest moment by component, for our trainer and for other stacks."""

from __future__ import annotations

from typing import NamedTuple

from ringattn.launch.capacity.stack_bytes import stack_moments
from ringattn.launch.capacity.stacks import STACKS
from ringattn.launch.capacity.training_bytes import (
    Breakdown,
    StagingBytes,
    TrainingSetup,
    host_bytes,
    moments,
    staging_bytes,
)


class Account(NamedTuple):
    """The memory of one rank of a run.

    `moment` names the moment of the peak, `peak` is the breakdown at that moment, and `totals` has the sum of each
    moment. `host_bytes` is host memory, and `slots` describes the buffers of one attention call. Other stacks have
    theirs among the transient tensors.
    """

    moment: str
    peak: Breakdown
    totals: dict[str, float]
    host_bytes: float
    slots: StagingBytes


def training_bytes(run: TrainingSetup) -> Account:
    """Return the memory of a rank, with the moment of the run at which it needs the most."""
    stack = STACKS.get(run.stack)
    breakdowns = moments(run) if stack is None else stack_moments(run, stack)
    slots = staging_bytes(run) if stack is None else StagingBytes(0, 0, 0, run.stack)
    moment = max(breakdowns, key=lambda name: breakdowns[name].total)
    totals = {name: breakdown.total for name, breakdown in breakdowns.items()}
    return Account(moment, breakdowns[moment], totals, host_bytes(run), slots)

"""What fits: the longest sequence for a ring, the smallest ring for a length, and what to turn on first.

Searches on the formulas of `planner.capacity`; nothing is run.
Guarantees: the longest length fits, and one token a rank more does not; steps are taken cheapest first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ringattn.core.geometry import MOST_TOKENS
from ringattn.launch.capacity.activations import RECOMPUTE, SAVED
from ringattn.launch.capacity.hardware import Hardware
from ringattn.launch.capacity.step_time import step_seconds
from ringattn.launch.capacity.training_bytes import OFFLOADS, TrainingSetup, training_bytes

MOST_RANKS = 2**24
"""Searches end here: more ranks than any machine has."""

LEAST_SAVING = 1 / 1000
"""Share of the whole that a step must save to be worth a line."""


class Switch(NamedTuple):
    """A setting that saves memory."""

    key: str
    value: Any
    about: str


SWITCHES = (
    Switch("data", "shard", "each rank reads its own tokens only"),
    Switch("chunked_loss_tokens", 1024, "logits of 1024 tokens at a time"),
    Switch("zero_stage", 1, "optimizer state shared by the ranks"),
    Switch("zero_stage", 2, "and gradients"),
    Switch("zero_stage", 3, "and weights"),
    Switch("tiled_mlp_tokens", 4096, "feed-forwards of 4096 tokens at a time"),
    Switch("recompute", "selective", "all but attention computed again"),
    Switch("recompute", "full", "layers computed again from their inputs"),
    Switch("recompute", "offloaded", "and the inputs wait in host memory"),
    Switch("offload", "optimizer", "optimizer state and its work on the host"),
    Switch("offload", "parameters", "and weights, fetched layer by layer"),
)
"""These leave the arithmetic as it is, up to rounding."""

ROUNDING = (
    Switch("optimizer", "adamw8bit", "optimizer state in eight bits"),
    Switch("saved_activations", "int8", "saved activations in eight bits"),
)
"""These change the arithmetic, so they are offered, never taken."""

ORDER: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "recompute": RECOMPUTE,
    "offload": OFFLOADS,
    "saved_activations": SAVED,
}
"""Settings of which a later one is never exchanged for an earlier one."""


class Advice(NamedTuple):
    """One step: what to set, the bytes of a rank that it saves after those before it, and the step's time factor."""

    switch: Switch
    saves_bytes: float
    time_factor: float
    total_bytes: float


def fits(run: TrainingSetup, memory_bytes: float) -> bool:
    """Whether a rank's peak is within its memory."""
    return training_bytes(run).peak.total <= memory_bytes


def longest_tokens(run: TrainingSetup, memory_bytes: float) -> int:
    """The longest sequence that fits on `run.ranks` ranks, a multiple of them; 0 if not one token a rank fits."""

    def at(per_rank: int) -> bool:
        return fits(replace(run, tokens=per_rank * run.ranks), memory_bytes)

    if not at(1):
        return 0
    low, high = 1, 2
    while high * run.ranks <= MOST_TOKENS and at(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) else (low, middle)
    return low * run.ranks


def bytes_per_token(run: TrainingSetup) -> float:
    """How much a rank's peak grows with each of its tokens: from this length to twice as much on the same ring."""
    twice = replace(run, tokens=2 * run.tokens)
    grown = training_bytes(twice).peak.total - training_bytes(run).peak.total
    return grown / (twice.rank_tokens - run.rank_tokens)


def smallest_ring(run: TrainingSetup, memory_bytes: float) -> int | None:
    """The fewest ranks among which `run.tokens` fits, the state shared as `run` says; None if no number does."""

    def at(ranks: int) -> bool:
        return fits(replace(run, ranks=ranks), memory_bytes)

    low, high = 0, 1
    while not at(high):
        low, high = high, 2 * high
        if low >= min(run.tokens, MOST_RANKS):
            return None
        high = min(high, run.tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle) else (middle, high)
    return high


def advice(run: TrainingSetup, machine: Hardware) -> list[Advice]:
    """What to turn on, one after another, until the run fits or nothing is left: fewest seconds a byte first.

    A time factor is against the run as given.
    """
    steps: list[Advice] = []
    before, base = training_bytes(run).peak.total, step_seconds(run, machine)
    while before > machine.memory_bytes:
        found = []
        for switch in SWITCHES:
            if _goes_further(run, switch):
                tried = replace(run, **{switch.key: switch.value})
                saved, seconds = before - training_bytes(tried).peak.total, step_seconds(tried, machine)
                if saved > LEAST_SAVING * before:
                    cost = max(0.0, seconds - step_seconds(run, machine)) / saved
                    found.append(((cost, -saved), switch, tried, saved, seconds))
        if not found:
            break
        _, switch, run, saved, seconds = min(found, key=lambda one: one[0])
        before -= saved
        steps.append(Advice(switch, saved, seconds / base, before))
    return steps


def rounding_saves(run: TrainingSetup) -> dict[str, float]:
    """Bytes that each switch of `ROUNDING` would save alone, as "key=value"; what it costs was not measured."""
    before = training_bytes(run).peak.total
    return {
        f"{switch.key}={switch.value}":
            before - training_bytes(replace(run, **{switch.key: switch.value})).peak.total
        for switch in ROUNDING if _goes_further(run, switch)
    }  # fmt: skip


def with_steps(run: TrainingSetup, steps: list[Advice]) -> TrainingSetup:
    """The run with all steps taken."""
    return replace(run, **{one.switch.key: one.switch.value for one in steps})


def _goes_further(run: TrainingSetup, switch: Switch) -> bool:
    """Whether a switch may be tried: no step back, and no other optimizer than the one that was asked for."""
    now = getattr(run, switch.key)
    if switch.value == "parameters" and run.zero_stage < 3:
        return False
    if switch.key in ORDER:
        order = ORDER[switch.key]
        return order.index(switch.value) > order.index(now)
    return switch.key != "optimizer" or now == "adamw"

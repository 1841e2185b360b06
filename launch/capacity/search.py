"""What fits: the longest sequence, the smallest ring, and the settings to turn on, the cheapest first.

Guarantees: the longest length fits, and one more token per rank does not. `memory_bytes` is what a rank may use.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

from ringattn.core.geometry import MOST_TOKENS
from ringattn.errors import InputError
from ringattn.launch.capacity.account import training_bytes
from ringattn.launch.capacity.hardware import Hardware
from ringattn.launch.capacity.layer_bytes import RECOMPUTE, SAVED
from ringattn.launch.capacity.step_time import step_seconds
from ringattn.launch.capacity.training_bytes import OFFLOADS, TrainingSetup

MOST_RANKS = 2**24
"""The largest ring that searches try."""

LEAST_SAVING = 1 / 1000
"""The share of the total that a setting must save to be suggested."""


class Switch(NamedTuple):
    """A setting that saves memory."""

    key: str
    value: Any
    about: str


SWITCHES = (
    Switch("data", "shard", "each rank reads only its shard of the tokens"),
    Switch("chunked_loss_tokens", 1024, "logits of 1024 tokens at a time"),
    Switch("zero_stage", 1, "shard the optimizer state over the ranks"),
    Switch("zero_stage", 2, "shard the gradients too"),
    Switch("zero_stage", 3, "shard the weights too"),
    Switch("tiled_mlp_tokens", 4096, "feed-forwards of 4096 tokens at a time"),
    Switch("head_groups", 2, "attend with half of the K/V heads at a time"),
    Switch("head_groups", 4, "attend with a quarter of the K/V heads at a time"),
    Switch("head_groups", 8, "attend with an eighth of the K/V heads at a time"),
    Switch("recompute", "selective", "recompute everything except attention"),
    Switch("recompute", "full", "recompute layers from their inputs"),
    Switch("recompute", "offloaded", "keep these inputs in host memory"),
    Switch("offload", "optimizer", "run the optimizer on the host"),
    Switch("offload", "parameters", "keep weights on the host, fetched layer by layer"),
)
"""Settings that advice may turn on. They change results only by rounding."""

ROUNDING = (
    Switch("optimizer", "adamw8bit", "optimizer state in eight bits"),
    Switch("saved_activations", "int8", "saved activations in eight bits"),
)
"""Settings that store data in eight bits and so change results by more. They are listed, but never turned on."""

ORDER: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "recompute": RECOMPUTE,
    "offload": OFFLOADS,
    "saved_activations": SAVED,
}
"""Settings in order: a search never replaces a value by an earlier one."""


class Advice(NamedTuple):
    """A suggested setting and its effect after all settings suggested before it.

    `saves_bytes` is the saving per rank, and `total_bytes` the memory that the rank then needs. `time_factor` is the
    time of a step with this and all earlier settings, divided by the time without any of them.
    """

    switch: Switch
    saves_bytes: float
    time_factor: float
    total_bytes: float


def fits(run: TrainingSetup, memory_bytes: float) -> bool:
    """Return whether the peak of a rank is within its memory."""
    return training_bytes(run).peak.total <= memory_bytes


def longest_tokens(run: TrainingSetup, memory_bytes: float) -> int:
    """Return the tokens of the longest sequence that fits, a multiple of `run.ranks`; 0 if no length fits."""

    def length_fits(per_rank: int) -> bool:
        return fits(replace(run, tokens=per_rank * run.ranks), memory_bytes)

    if not length_fits(1):
        return 0
    low, high = 1, 2
    while high * run.ranks <= MOST_TOKENS and length_fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length_fits(middle) else (low, middle)
    return low * run.ranks


def bytes_per_token(run: TrainingSetup) -> float:
    """Return the bytes by which a rank's peak grows per additional token of the rank, if the length is doubled."""
    twice = replace(run, tokens=2 * run.tokens)
    grown = training_bytes(twice).peak.total - training_bytes(run).peak.total
    return grown / (twice.rank_tokens - run.rank_tokens)


def smallest_ring(run: TrainingSetup, memory_bytes: float) -> int | None:
    """Return the fewest ranks on which `run.tokens` tokens fit with the settings of `run`; None if no number fits."""

    def ring_fits(ranks: int) -> bool:
        return fits(replace(run, ranks=ranks), memory_bytes)

    low, high = 0, 1
    while not ring_fits(high):
        low, high = high, 2 * high
        if low >= min(run.tokens, MOST_RANKS):
            return None
        high = min(high, run.tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ring_fits(middle) else (middle, high)
    return high


def advice(run: TrainingSetup, machine: Hardware) -> list[Advice]:
    """Return settings to turn on, one after another, until the run fits.

    The next setting is always that with the fewest additional seconds per saved byte. Time factors compare with the run
    without any of the settings.
    """
    steps: list[Advice] = []
    before, base = training_bytes(run).peak.total, step_seconds(run, machine)
    while before > machine.memory_bytes:
        choices = []
        for switch in SWITCHES:
            if _goes_further(run, switch):
                tried = replace(run, **{switch.key: switch.value})
                saved, seconds = before - training_bytes(tried).peak.total, step_seconds(tried, machine)
                if saved > LEAST_SAVING * before:
                    cost = max(0.0, seconds - step_seconds(run, machine)) / saved
                    choices.append(((cost, -saved), switch, tried, saved, seconds))
        if not choices:
            break
        _, switch, run, saved, seconds = min(choices, key=itemgetter(0))
        before -= saved
        steps.append(Advice(switch, saved, seconds / base, before))
    return steps


def rounding_saves(run: TrainingSetup) -> dict[str, float]:
    """Return the bytes that each setting of `ROUNDING` saves if it alone is turned on, by its text "key=value".

    The effect of these settings on the loss of this run was not measured.
    """
    before = training_bytes(run).peak.total
    return {
        f"{switch.key}={switch.value}":
            before - training_bytes(replace(run, **{switch.key: switch.value})).peak.total
        for switch in ROUNDING if _goes_further(run, switch)
    }  # fmt: skip


def with_steps(run: TrainingSetup, steps: list[Advice]) -> TrainingSetup:
    """Return the run with all suggested settings."""
    return replace(run, **{step.switch.key: step.switch.value for step in steps})


def _goes_further(run: TrainingSetup, switch: Switch) -> bool:
    """Return whether to try a setting: the run accepts it, and it saves more than the current value.

    A setting in `ORDER` must come after the current value, more groups of heads after fewer, and an optimizer in eight
    bits replaces only AdamW.
    """
    current = getattr(run, switch.key)
    try:
        replace(run, **{switch.key: switch.value})
    except InputError:
        return False
    if switch.key == "head_groups":
        return switch.value > current
    if switch.key in ORDER:
        order = ORDER[switch.key]
        return order.index(switch.value) > order.index(current)
    return switch.key != "optimizer" or current == "adamw"

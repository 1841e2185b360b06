"""How long a training step takes, and what fits: the longest sequence, the smallest ring, and what to turn on first.

`step_seconds` is a lower bound for arithmetic, at the accelerator's published peak, and counts every transfer that a
switch adds in full, as if nothing overlapped; so a factor between two runs overstates what transfers cost. `estimate`
takes the rates that kernels reach, and hides transfers behind arithmetic where possible.

Nothing is run. Guarantees: closed forms with their source; no constant is fitted to a published step; the longest
length fits, and one token a rank more does not; steps are taken cheapest first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ringattn.core.geometry import MOST_TOKENS
from ringattn.launch.capacity.hardware import Hardware
from ringattn.launch.capacity.model_shapes import bubble
from ringattn.launch.capacity.training_bytes import (
    OFFLOADS,
    RECOMPUTE,
    SAVED,
    TrainingSetup,
    host_bytes,
    training_bytes,
)
from ringattn.planner.cluster import BACKWARD_OVER_FORWARD, FORWARD_FLOPS_PER_DIM

# --- time of a step ---------------------------------------------------------------------------------------------------


TENSOR_COLLECTIVES = 8
"""Gathers and scatters of a layer's tokens under tensor and sequence parallelism, forward and backward together: two of
each for attention and as many for the feed-forward (arXiv:2205.05198, section 4.2.2)."""


def matrix_flops(run: TrainingSetup) -> float:
    """Operations of one rank's matrix products, forward: 2 a parameter and token (arXiv:2001.08361, section 2.1).

    The products of all layers and of the output, of which a tied model has one, too; of experts those that a token
    passes. The mean of all stages of a pipeline, of one micro batch.
    """
    shape = run.model
    products = shape.layers * shape.active_parameters + shape.vocabulary * shape.width
    return 2.0 * products * run.rank_tokens / _cut(run)


def attention_flops(run: TrainingSetup) -> float:
    """Operations of one rank's attention, forward: 4 times head_dim a pair and head (FlashAttention-2, section 4.1)."""
    shape = run.model
    pairs = run.attention.pairs(run.tokens) * run.batch / run.ranks
    return FORWARD_FLOPS_PER_DIM * shape.query_width * pairs * shape.layers / _cut(run)


def _cut(run: TrainingSetup) -> int:
    return run.tensor_ranks * run.pipeline_ranks


class Flops(NamedTuple):
    """Operations of one rank's micro batch: products, attention forward and backward, what is done again included."""

    products: float
    attention_forward: float
    attention_backward: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def flops_of(run: TrainingSetup) -> Flops:
    """Backward: twice the products, 2.5 times the attention. Then what is done again.

    full, offloaded: one more forward of the layers (Korthikanti et al. 2022, section 5). selective: without the
    attention. A tiled feed-forward is done again where nothing else does it, each chunk's logits always.
    """
    shape = run.model
    products, attention = matrix_flops(run), attention_flops(run)
    output = 2.0 * shape.vocabulary * shape.width * run.rank_tokens / _cut(run)
    kept = sum(one.parameters for one in shape.attention_matrices)
    feeds = 2.0 * shape.layers * (shape.active_parameters - kept) * run.rank_tokens / _cut(run)
    again = (feeds if run.is_tiled else 0.0) if run.recompute == "none" else products - output
    if run.chunked_loss_tokens:
        again += output
    forward = attention if run.recompute in ("none", "selective") else 2 * attention
    return Flops(3 * products + again, forward, BACKWARD_OVER_FORWARD * attention)


def compute_flops(run: TrainingSetup) -> float:
    """Operations of one rank's step."""
    return flops_of(run).total * run.micro_batches


def model_flops(run: TrainingSetup, half: bool = True) -> float:
    """Operations of one rank's step that the model itself asks for: three times its forward, nothing done again.

    `half`: attention of the pairs that the mask allows; else of all, as the formula 12 layers width length of PaLM has
    it (arXiv:2204.02311, appendix B).
    """
    attention = attention_flops(run)
    if not half:
        attention *= run.tokens**2 / run.attention.pairs(run.tokens)
    return 3 * (matrix_flops(run) + attention) * run.micro_batches


def state_bytes_moved(run: TrainingSetup) -> float:
    """Bytes that sharing the state moves between ranks, one way and rank (arXiv:1910.02054, section 7).

    Stages 0 to 2 all-reduce the gradients, or scatter them and gather the weights: twice the parameters; stage 3
    gathers the weights twice and scatters the gradients.
    """
    if run.degree == 1:
        return 0.0
    numbers, share = run.numbers, (run.degree - 1) / run.degree
    weights, gradients = (run.share.parameters * item * share for item in (numbers.weight, numbers.gradient))
    return 2 * weights + gradients if run.zero_stage == 3 else weights + gradients


def step_seconds(run: TrainingSetup, machine: Hardware) -> float:
    """Least seconds of a step: arithmetic at peak, then the state between ranks, then host memory there and back."""
    arithmetic = compute_flops(run) / machine.flops
    return arithmetic + state_bytes_moved(run) / machine.link_bytes_s + 2 * host_bytes(run) / machine.host_bytes_s


class StepTime(NamedTuple):
    """Seconds of a step by what they go to; `ring`, `state` and `host` only where arithmetic does not hide them.

    `mfu`: the model's own operations, attention of allowed pairs, against the peak. `mfu_full`: attention of all pairs.
    """

    products: float
    attention: float
    tensor: float
    ring: float
    state: float
    host: float
    bubble: float
    tokens_s: float
    mfu: float
    mfu_full: float

    @property
    def seconds(self) -> float:
        """The step."""
        return sum(self[:7])


def ring_bytes(run: TrainingSetup) -> float:
    """Bytes of one micro batch that a rank sends for attention: K and V once round, and back with their sums.

    The most that a schedule sends; it may send less. Again where attention runs again.
    """
    rows = run.rank_tokens * 2 * run.model.kv_width / run.tensor_ranks
    forward, sums = rows * run.numbers.activation, rows * run.numbers.wide
    passes = 1 if run.recompute in ("none", "selective") else 2
    layers = run.model.layers / run.pipeline_ranks
    return (run.ranks - 1) * layers * ((passes + 1) * forward + sums)


def tensor_bytes(run: TrainingSetup) -> float:
    """Bytes of one micro batch that a rank sends for tensor parallelism; a layer done again does so again."""
    share = (run.tensor_ranks - 1) / run.tensor_ranks
    passes = TENSOR_COLLECTIVES * (1 if run.recompute == "none" else 1.5)
    layers = run.model.layers / run.pipeline_ranks
    return passes * layers * run.rank_tokens * run.model.width * run.numbers.activation * share


def estimate(run: TrainingSetup, machine: Hardware) -> StepTime:
    """A step at the rates that kernels and links reach.

    Keys and values travel behind the attention, the state behind the micro batches' arithmetic, what waits in host
    memory behind both; tensor parallelism's collectives are not hidden. Ranks of tensor parallelism are neighbors, then
    those of the ring: what reaches beyond a machine goes over the network.
    """
    rates, work = machine.reached, flops_of(run)

    def link(ranks: int) -> float:
        return rates.link_bytes_s if ranks <= rates.machine else rates.network_bytes_s

    products = work.products / rates.products
    attention = work.attention_forward / rates.attention_forward + work.attention_backward / rates.attention_backward
    tensor = tensor_bytes(run) / link(run.tensor_ranks)
    ring = max(0.0, ring_bytes(run) / link(run.tensor_ranks * run.ranks) - attention)
    one = products + attention + tensor + ring
    many = run.micro_batches
    idle = many * one * bubble(run.pipeline_ranks, run.pipeline_chunks, many)
    hidden = many * (products + attention)
    state = max(0.0, state_bytes_moved(run) / link(run.tensor_ranks * run.degree) - hidden)
    host = max(0.0, 2 * host_bytes(run) / machine.host_bytes_s - hidden)
    seconds = many * one + state + host + idle
    peak = seconds * machine.flops
    return StepTime(
        many * products, many * attention, many * tensor, many * ring, state, host, idle,
        run.tokens * run.batch * many / seconds, model_flops(run) / peak, model_flops(run, half=False) / peak,
    )  # fmt: skip


# --- what fits --------------------------------------------------------------------------------------------------------


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

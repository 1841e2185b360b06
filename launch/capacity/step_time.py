"""How long a training step takes: at the least, for what a switch adds to it, and as an estimate from published rates.

`step_seconds` has arithmetic at the accelerator's published peak, and every transfer that a switch adds in full, as if
nothing overlapped; so a factor between two runs overstates what transfers cost. `estimate` has arithmetic at the rates
that kernels reach, and lets transfers hide behind it where they can.
Guarantees: closed forms with their source; no constant is fitted to a published step.
"""

from __future__ import annotations

from typing import NamedTuple

from ringattn.launch.capacity.hardware import Hardware
from ringattn.launch.capacity.shares import bubble
from ringattn.launch.capacity.training_bytes import TrainingSetup, host_bytes
from ringattn.planner.work import BACKWARD_OVER_FORWARD, FORWARD_FLOPS_PER_DIM

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

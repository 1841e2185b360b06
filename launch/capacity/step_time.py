"""How long a training step takes at the least, and what a switch that saves memory adds to it.

Arithmetic at the accelerator's published peak, and every transfer that a switch adds in full, as if nothing overlapped.
Arithmetic is then at its shortest, so a factor between two runs overstates what transfers cost.
Guarantees: closed forms with their source.
"""

from __future__ import annotations

from ringattn.launch.capacity.hardware import Hardware
from ringattn.launch.capacity.training_bytes import TrainingSetup, host_bytes
from ringattn.planner.work import BACKWARD_OVER_FORWARD, FORWARD_FLOPS_PER_DIM


def matrix_flops(run: TrainingSetup) -> float:
    """Operations of one rank's matrix products, forward: 2 a parameter and token (arXiv:2001.08361, section 2.1).

    The products of all layers and of the output, of which a tied model has one, too.
    """
    shape = run.model
    layers = shape.layers * sum(one.parameters for one in shape.layer_matrices)
    return 2.0 * (layers + shape.vocabulary * shape.width) * run.rank_tokens


def attention_flops(run: TrainingSetup) -> float:
    """Operations of one rank's attention, forward: 4 times head_dim a pair and head (FlashAttention-2, section 4.1)."""
    shape = run.model
    pairs = run.attention.pairs(run.tokens) * run.batch / run.ranks
    return FORWARD_FLOPS_PER_DIM * shape.width * pairs * shape.layers


def compute_flops(run: TrainingSetup) -> float:
    """Operations of one rank's step. Backward: twice the products, 2.5 times the attention. Then what is done again.

    full: one more forward of the layers (Korthikanti et al. 2022, section 5). selective: without the attention.
    """
    shape = run.model
    products, attention = matrix_flops(run), attention_flops(run)
    output = 2.0 * shape.vocabulary * shape.width * run.rank_tokens
    again = {"none": 0.0, "selective": products - output}.get(run.recompute, products - output + attention)
    chunked = output if run.chunked_loss_tokens else 0.0  # each chunk's logits are made again in backward
    return 3 * products + (1 + BACKWARD_OVER_FORWARD) * attention + again + chunked


def state_bytes_moved(run: TrainingSetup) -> float:
    """Bytes that sharing the state moves between ranks, one way and rank (arXiv:1910.02054, section 7).

    Stages 0 to 2 all-reduce the gradients, or scatter them and gather the weights: twice the parameters; stage 3
    gathers the weights twice and scatters the gradients.
    """
    if run.degree == 1:
        return 0.0
    numbers, share = run.numbers, (run.degree - 1) / run.degree
    weights, gradients = (run.model.parameters * item * share for item in (numbers.weight, numbers.gradient))
    return 2 * weights + gradients if run.zero_stage == 3 else weights + gradients


def step_seconds(run: TrainingSetup, machine: Hardware) -> float:
    """Least seconds of a step: arithmetic at peak, then the state between ranks, then host memory there and back."""
    arithmetic = compute_flops(run) / machine.flops
    return arithmetic + state_bytes_moved(run) / machine.link_bytes_s + 2 * host_bytes(run) / machine.host_bytes_s

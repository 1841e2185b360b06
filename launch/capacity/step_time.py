"""The FLOPs, transferred bytes and seconds of a training step, from published rates.

`step_seconds` adds the arithmetic at the accelerator's published peak and, as if nothing overlapped, every transfer
that a setting causes. The ratio of two runs therefore overstates the cost of transfers. `estimate` uses the rates that
kernels reach, and hides transfers behind arithmetic where possible.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ringattn.errors import InputError
from ringattn.launch.capacity.hardware import Hardware, Reached
from ringattn.launch.capacity.model_shapes import ModelShape, bubble
from ringattn.launch.capacity.pipeline import stage_layers
from ringattn.launch.capacity.stacks import KERNELS, STACKS
from ringattn.launch.capacity.training_bytes import TrainingSetup, host_bytes
from ringattn.planner.cluster import BACKWARD_OVER_FORWARD, FORWARD_FLOPS_PER_DIM

TENSOR_COLLECTIVES = 8
"""Gathers and scatters of a layer's tokens under tensor and sequence parallelism, forward and backward together: two of
each for attention and two of each for the feed-forward (arXiv:2205.05198, section 4.2.2)."""


class StageWork(NamedTuple):
    """The layers and output products of a pipeline rank."""

    layers: float
    outputs: float

    def products(self, shape: ModelShape) -> float:
        """Return the parameters of its matrices that a token is multiplied with."""
        return self.layers * shape.active_parameters + self.outputs * shape.vocabulary * shape.width


def average_stage(run: TrainingSetup) -> StageWork:
    """Return the work of a pipeline rank on average."""
    return StageWork(run.model.layers / run.pipeline_ranks, 1 / run.pipeline_ranks)


def slowest_stage(run: TrainingSetup) -> StageWork:
    """Return the work of the pipeline rank that the others wait for: the average if the stack's stages are unknown."""
    ranks = run.pipeline_ranks
    if ranks == 1 or run.stack not in STACKS or not STACKS[run.stack].short_ends.value:
        return average_stage(run)
    layers = stage_layers(run.model.layers, ranks * run.pipeline_chunks)
    works = [StageWork(sum(layers[rank::ranks]), rank == ranks - 1) for rank in range(ranks)]
    return max(works, key=lambda work: work.products(run.model))


def matrix_flops(run: TrainingSetup, stage: StageWork | None = None) -> float:
    """Return the FLOPs of a rank's matrix products in forward: 2 per parameter and token (arXiv:2001.08361, 2.1).

    They include all layers and the output product, which a tied model computes too. Of the experts, only those that
    process a token count. The figure is that of one micro batch, averaged over the ranks of a pipeline by default.
    """
    return 2.0 * (stage or average_stage(run)).products(run.model) * run.rank_tokens / run.tensor_ranks


def attention_flops(run: TrainingSetup, stage: StageWork | None = None) -> float:
    """Return the FLOPs of a rank's attention in forward: 4 head_dim per pair and head (FlashAttention-2, 4.1)."""
    pairs = run.attention.pairs(run.tokens) * run.batch / run.ranks
    layers = (stage or average_stage(run)).layers
    return FORWARD_FLOPS_PER_DIM * run.model.query_width * pairs * layers / run.tensor_ranks


class Flops(NamedTuple):
    """FLOPs of one micro batch on one rank, including recomputation: matrix products, and attention by pass."""

    products: float
    attention_forward: float
    attention_backward: float

    @property
    def total(self) -> float:
        """Return the sum."""
        return sum(self)


def selected_share(run: TrainingSetup) -> float:
    """Return the share of a layer's products that backward repeats if every second output is kept (see `Stack`).

    The products are those of Q, K, V, output, gate, up and down. K, output and up are repeated.
    """
    shape = run.model
    repeated = shape.width * (shape.kv_width + shape.query_width + shape.ffn * shape.feeds)
    return repeated / shape.active_parameters


def flops_of(run: TrainingSetup) -> Flops:
    """Return the FLOPs of one micro batch, on the slowest rank of a pipeline.

    Backward takes twice the FLOPs of forward for matrix products, and 2.5 times for attention. With recompute full or
    offloaded, backward runs the forward of the layers again (Korthikanti et al. 2022, section 5); with selective, it
    does so without attention. A tiled feed-forward and the logits of a loss in chunks are always recomputed. Groups of
    heads are projected again in addition to a layer that is recomputed as a whole. A stack may skip the last product of
    a recomputed layer, or run the tiles of its feed-forward a third time.
    """
    shape, stage = run.model, slowest_stage(run)
    products, attention = matrix_flops(run, stage), attention_flops(run, stage)
    tokens = run.rank_tokens / run.tensor_ranks
    output = 2.0 * stage.outputs * shape.vocabulary * shape.width * tokens
    kept = sum(matrix.parameters for matrix in shape.attention_matrices)
    feeds = 2.0 * stage.layers * (shape.active_parameters - kept) * tokens
    again = (feeds if run.is_tiled else 0.0) if run.recompute == "none" else products - output
    stack = STACKS.get(run.stack)
    if stack is not None and run.recompute == "selective":
        again *= selected_share(run)
    elif stack is not None and run.recompute != "none":
        if not stack.repeats_last.value and not shape.experts:
            again -= 2.0 * stage.layers * shape.ffn * shape.width * tokens
        if run.is_tiled and not stack.tiles_kept.value:
            again += feeds
    if run.chunked_loss_tokens:
        again += output
    if run.head_groups > 1 and run.recompute != "selective":
        projections, _ = shape.attention_matrices
        again += 2.0 * stage.layers * projections.parameters * tokens
    forward = attention if run.recompute in ("none", "selective") else 2 * attention
    return Flops(3 * products + again, forward, BACKWARD_OVER_FORWARD * attention)


def compute_flops(run: TrainingSetup) -> float:
    """Return the FLOPs of one rank's step."""
    return flops_of(run).total * run.micro_batches


def model_flops(run: TrainingSetup, half: bool = True) -> float:
    """Return the FLOPs of one rank's step without recomputation: three times those of the model's forward pass.

    If `half`, attention counts the pairs that the mask allows. Otherwise it counts all pairs, as in PaLM's formula
    12 layers width length (arXiv:2204.02311, appendix B).
    """
    attention = attention_flops(run)
    if not half:
        attention *= run.tokens**2 / run.attention.pairs(run.tokens)
    return 3 * (matrix_flops(run) + attention) * run.micro_batches


def state_bytes_moved(run: TrainingSetup) -> float:
    """Return the bytes that a rank sends for data parallelism and ZeRO (arXiv:1910.02054, section 7).

    Stages 0 to 2 all-reduce the gradients, or scatter the gradients and gather the weights, which moves each parameter
    twice. Stage 3 gathers the weights twice and scatters the gradients. FSDP2 casts weights before it gathers them
    (torch 2.13, distributed/fsdp/_fully_shard, MixedPrecisionPolicy), as the stacks with bf16_cast do.
    """
    if run.degree == 1:
        return 0.0
    numbers, share = run.numbers, (run.degree - 1) / run.degree
    weight = numbers.activation if numbers.cast and run.stack in STACKS else numbers.weight
    weights, gradients = (run.share.parameters * item * share for item in (weight, numbers.gradient))
    return 2 * weights + gradients if run.zero_stage == 3 else weights + gradients


def step_seconds(run: TrainingSetup, machine: Hardware) -> float:
    """Return the seconds of a step without overlap.

    They are those of the arithmetic at peak, the transfers of ZeRO, and the transfers from and to host memory.
    """
    arithmetic = compute_flops(run) / machine.flops
    return arithmetic + state_bytes_moved(run) / machine.link_bytes_s + 2 * host_bytes(run) / machine.host_bytes_s


class StepTime(NamedTuple):
    """Seconds of a step by cause. `ring`, `state` and `host` count only the transfers that arithmetic does not hide.

    `host` also has the optimizer's run on the host.

    `mfu` is the share of the peak that the model's FLOPs reach, without recomputation and with the pairs that the mask
    allows. `mfu_full` is the same with all pairs.
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
        """Return the seconds of the step."""
        return sum(self[:7])


class RingBytes(NamedTuple):
    """Bytes that a rank sends for attention per micro batch: to all ranks, and to its neighbor in the ring."""

    gathered: float
    rotated: float

    @property
    def total(self) -> float:
        """Return the sum."""
        return self.gathered + self.rotated


def ring_bytes(run: TrainingSetup) -> RingBytes:
    """Return the bytes that a rank sends for attention: K and V in forward; K, V and dK/dV in backward.

    This is an upper bound for all schedules. If attention is recomputed, its forward counts twice. Only a stack that
    rotates dK and dV has rotated bytes.
    """
    stack = STACKS.get(run.stack)
    keys = run.model.query_width if stack is not None and stack.repeats_kv.value else run.model.kv_width
    rows = run.rank_tokens * 2 * keys / run.tensor_ranks
    layers, hops = slowest_stage(run).layers, run.ranks - 1
    forward, sums = layers * rows * run.numbers.activation, layers * rows * run.numbers.wide
    passes = 1 if run.recompute in ("none", "selective") else 2
    if hops and stack is not None and stack.rotates.value:
        gathers = passes + 1 if stack.gathers_again.value else 2
        return RingBytes(hops * gathers * forward, run.ranks * sums)
    return RingBytes(hops * ((passes + 1) * forward + sums), 0.0)


def tensor_bytes(run: TrainingSetup) -> float:
    """Return the bytes that a rank sends for tensor parallelism per micro batch, including recomputed layers.

    Half of the collectives are gathers, which a stack may run in fewer bytes than scatters. A layer that is recomputed
    without its last product also lacks the scatter after it.
    """
    share = (run.tensor_ranks - 1) / run.tensor_ranks
    gathers = scatters = TENSOR_COLLECTIVES / 2 * (1 if run.recompute == "none" else 1.5)
    layers, item, stack = slowest_stage(run).layers, run.numbers.activation, STACKS.get(run.stack)
    gathered = item if stack is None else stack.gather_bytes.value
    if stack is not None and run.recompute in ("full", "offloaded") and not stack.repeats_last.value:
        scatters -= 1
    return (gathers * gathered + scatters * item) * layers * run.rank_tokens * run.model.width * share


def rates_of(run: TrainingSetup, machine: Hardware) -> Reached:
    """Return the rates that kernels and links reach: those of the stack's kernels, else those of the hardware.

    Raises `InputError` if `kernel` is given and no rate on the hardware is known.
    """
    rates, stack = machine.reached, STACKS.get(run.stack)
    if stack is None:
        return rates
    name, source = machine.name, rates.source
    kernel = stack.kernel.value if run.kernel == "auto" else run.kernel
    if attention := KERNELS[kernel].value.get(name):
        source = f"attention, {kernel}: {KERNELS[kernel].source}; {source}"
        rates = replace(rates, attention_forward=attention.forward, attention_backward=attention.backward)
    elif run.kernel != "auto":
        raise InputError(f"kernel={kernel}: no rate is known for hardware={name}; use kernel=auto")
    if products := stack.products_of(name, run.model.width):
        source, rates = f"{stack.products.source}; {source}", replace(rates, products=products)
    return replace(rates, source=source)


def merge_bytes(run: TrainingSetup) -> float:
    """Return the bytes per micro batch that merging the blocks of a ring moves through memory, outside of kernels."""
    stack = STACKS.get(run.stack)
    if stack is None or stack.merge.value is None or run.ranks == 1:
        return 0.0
    passes = 1 if run.recompute in ("none", "selective") else 2
    merge, elements = stack.merge.value, run.rank_tokens * run.model.query_width / run.tensor_ranks
    return run.ranks * slowest_stage(run).layers * elements * (passes * merge.forward + merge.backward)


def update_seconds(run: TrainingSetup, machine: int) -> float:
    """Return the seconds in which the host of a machine of `machine` ranks runs the optimizer."""
    if run.offload == "none" or run.stack not in STACKS:
        return 0.0
    weights = run.share.parameters / run.degree * min(machine, run.degree * run.tensor_ranks)
    return STACKS[run.stack].host_update.value * weights


def estimate(run: TrainingSetup, machine: Hardware) -> StepTime:
    """Estimate a step at the rates that kernels and links reach.

    Attention hides the transfers of K and V. The arithmetic of the micro batches hides the transfers of the state and
    of host memory. Products hide collectives of tensor parallelism only where a stack says so. Neighboring ranks form a
    tensor parallel group, and these groups form rings. A ring or group that does not fit into one machine uses the
    network. In a stack that exposes its exchange, attention hides nothing; the traffic of its merging launches counts
    as part of the ring. All ranks of a pipeline wait for the slowest.
    """
    rates, work = rates_of(run, machine), flops_of(run)
    exposed = run.stack in STACKS and STACKS[run.stack].exposed.value

    def link(ranks: int) -> float:
        return rates.link_bytes_s if ranks <= rates.machine else rates.network_bytes_s

    products = work.products / rates.products
    attention = work.attention_forward / rates.attention_forward + work.attention_backward / rates.attention_backward
    in_the_open = STACKS[run.stack].tensor_exposed.value if run.stack in STACKS else 1.0
    tensor = in_the_open * tensor_bytes(run) / link(run.tensor_ranks)
    sent, of_ring = ring_bytes(run), link(run.tensor_ranks * run.ranks)
    to_neighbor = min(of_ring, rates.peer_bytes_s or of_ring)
    ring = sent.gathered / of_ring + sent.rotated / to_neighbor
    ring = max(0.0, ring - (0.0 if exposed else attention))
    ring += merge_bytes(run) / rates.copy_bytes_s if rates.copy_bytes_s else 0.0
    micro_batch = products + attention + tensor + ring
    count = run.micro_batches
    idle = count * micro_batch * bubble(run.pipeline_ranks, run.pipeline_chunks, count)
    hidden = count * (products + attention)
    state = max(0.0, state_bytes_moved(run) / link(run.tensor_ranks * run.degree) - hidden)
    host = max(0.0, 2 * host_bytes(run) / machine.host_bytes_s - hidden) + update_seconds(run, rates.machine)
    seconds = count * micro_batch + state + host + idle
    peak = seconds * machine.flops
    return StepTime(
        count * products, count * attention, count * tensor, count * ring, state, host, idle,
        run.tokens * run.batch * count / seconds, model_flops(run) / peak, model_flops(run, half=False) / peak,
    )  # fmt: skip

"""How many bytes each rank needs to train a model on sequences that the ranks of a ring share, component by component.

A training step has a few moments at which its memory may be at its peak; each is added up, and the greatest counts.
Guarantees: every figure is a formula of sizes, each in a function that gives its source; communication slots are those
of the real placement (`planner.slots`). All sizes are bytes on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ringattn.errors import InputError, one_of
from ringattn.launch.capacity.activations import (
    PRECISIONS,
    RECOMPUTE,
    SAVED,
    Precision,
    backward_bytes,
    head_kept,
    held_bytes,
    logits_bytes,
    stored,
)
from ringattn.launch.capacity.model_shapes import ModelShape
from ringattn.launch.capacity.shares import Share, in_flight, share_of
from ringattn.launch.capacity.slots import AttentionSetup, StagingBytes, staging_bytes

OPTIMIZERS = ("adamw", "adamw8bit", "adam_mini", "lion", "adafactor", "sgd", "sgd_momentum")
OFFLOADS = ("none", "optimizer", "parameters")
DATA = ("shard", "whole")
TOKEN_BYTES = 8
"""A token, a label or a position is an int64."""

QUANTIZED_BLOCK = 256
"""Elements that share one float32 scale in 8-bit optimizer states (bitsandbytes and torchao)."""

GATHERED_LAYERS = 2
"""Layers whose whole weights a rank holds under ZeRO 3: the one that runs, and the next, fetched meanwhile."""


@dataclass(frozen=True)
class TrainingSetup:
    """One training run: a model, its sequence, and every switch that saves memory.

    `ranks`: that share each sequence. `zero_degree`: ranks that share the state, the ring's if None.
    `chunked_loss_tokens`: tokens whose logits exist at once; 0: all. `tiled_mlp_tokens`: tokens of a rank that pass a
    feed-forward at once; 0: all. `data`: what of the tokens every rank holds. `tensor_ranks` cut each matrix and, as
    sequence parallelism does (arXiv:2205.05198, section 4.2.2), what a layer keeps; `pipeline_ranks` have stages of
    layers, in `pipeline_chunks` each. `micro_batches`: of `batch` sequences each, one after another in a step.
    `gradients_kept`: gradients live through the whole step, as with accumulation; else from backward to update.
    `transients`: count also what lives for a moment; published hand calculations do not. `framework_bytes`: what the
    driver, NCCL and the allocator take. Raises `InputError`, key first, for what is unknown or contradicts itself.
    """

    model: ModelShape
    tokens: int
    ranks: int = 1
    batch: int = 1
    attention: AttentionSetup = field(default_factory=AttentionSetup)
    schedule: str = "auto"
    precision: str = "bf16_master"
    optimizer: str = "adamw"
    recompute: str = "none"
    saved_activations: str = "keep"
    zero_stage: int = 0
    zero_degree: int | None = None
    offload: str = "none"
    chunked_loss_tokens: int = 0
    data: str = "shard"
    gradients_kept: bool = True
    transients: bool = True
    framework_bytes: int = 0
    tiled_mlp_tokens: int = 0
    tensor_ranks: int = 1
    pipeline_ranks: int = 1
    pipeline_chunks: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        """Check names and limits."""
        known = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "recompute": RECOMPUTE, "saved_activations": SAVED,
                 "offload": OFFLOADS, "data": DATA}  # fmt: skip
        for key, names in known.items():
            one_of(getattr(self, key), tuple(names), key)
        for key in ("tokens", "ranks", "batch", "tensor_ranks", "pipeline_ranks", "pipeline_chunks", "micro_batches"):
            if getattr(self, key) < 1:
                raise InputError(f"{key}={getattr(self, key)}: must be at least 1")
        if self.ranks > self.tokens:
            raise InputError(f"ranks={self.ranks}: more ranks than tokens (tokens={self.tokens})")
        for key in ("heads", "kv_heads"):
            if getattr(self.model, key) % self.tensor_ranks:
                raise InputError(f"tensor_ranks={self.tensor_ranks}: does not divide {key}={getattr(self.model, key)}")
        if self.pipeline_ranks * self.pipeline_chunks > self.model.layers:
            raise InputError(
                f"pipeline_ranks={self.pipeline_ranks}: times pipeline_chunks={self.pipeline_chunks} is more than "
                f"layers={self.model.layers}"
            )
        if self.pipeline_ranks == 1 and self.pipeline_chunks > 1:
            raise InputError(f"pipeline_chunks={self.pipeline_chunks}: there is one stage; set pipeline_ranks")
        if self.zero_stage not in range(4):
            raise InputError(f"zero_stage={self.zero_stage}: must be 0, 1, 2 or 3")
        if self.offload == "parameters" and self.zero_stage < 3:
            raise InputError("offload=parameters: weights are fetched layer by layer under zero_stage=3 only")

    @property
    def numbers(self) -> Precision:
        """Bytes of a number in each role."""
        return PRECISIONS[self.precision]

    @property
    def rank_tokens(self) -> int:
        """Tokens of the rank with most of them, in all sequences of the batch."""
        return self.batch * -(-self.tokens // self.ranks)

    @property
    def kept_tokens(self) -> float:
        """Tokens of which a rank keeps what a layer keeps: tensor parallelism deals them out once more."""
        return self.rank_tokens / self.tensor_ranks

    @property
    def degree(self) -> int:
        """Ranks that share the state."""
        return self.zero_degree or self.ranks

    @property
    def share(self) -> Share:
        """What a rank has of the model before ZeRO."""
        return share_of(self.model, self.tensor_ranks, self.pipeline_ranks)

    @property
    def is_tiled(self) -> bool:
        """Whether feed-forwards pass in tiles."""
        return self.tiled_mlp_tokens > 0

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several micro batches add up."""
        return self.gradients_kept or self.micro_batches > 1


@dataclass(frozen=True)
class Breakdown:
    """Bytes of one rank by component. `live_layer`: remade or for a moment in one layer; `attention`: its sums."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    live_layer: float = 0
    attention: float = 0
    slots: float = 0
    logits: float = 0
    data: float = 0
    framework: float = 0

    @property
    def total(self) -> float:
        """All components."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """By name, in the order of the table."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


class Account(NamedTuple):
    """What a run needs: the greatest moment, its breakdown, all moments' totals, host bytes, one attention's slots."""

    moment: str
    peak: Breakdown
    totals: dict[str, float]
    host_bytes: float
    slots: StagingBytes


def parameter_bytes(run: TrainingSetup) -> float:
    """Weights on the device: whole, or under ZeRO 3 (arXiv:1910.02054, section 5.3) a share and what is gathered."""
    share, item, waits = run.share, run.numbers.weight, run.offload == "parameters"
    if run.zero_stage < 3 or (run.degree == 1 and not waits):
        return share.parameters * item
    own = 0 if waits else share.parameters * item / run.degree
    # The tables are used first and last, so that nothing is gained by dropping them in between.
    return own + (min(GATHERED_LAYERS, share.layers) * share.layer + share.head) * item


def gradient_bytes(run: TrainingSetup) -> float:
    """Gradients when all are there: whole, or from ZeRO 2 on (section 5.2) a share and a layer's, not yet scattered.

    Where the optimizer works on the host, they go there as they are made.
    """
    share, item, waits = run.share, run.numbers.gradient, run.offload != "none"
    if run.zero_stage < 2 or (run.degree == 1 and not waits):
        return share.parameters * item
    own = 0 if waits else share.parameters * item / run.degree
    return own + (share.layer + share.head) * item


def optimizer_bytes(run: TrainingSetup) -> float:
    """Optimizer state with the master copy, before offloading: whole, or from ZeRO 1 on (section 5.1) a share.

    Numbers for each weight: AdamW 2; Adam-mini 1 (one second moment a block, arXiv:2406.16793); Lion 1
    (arXiv:2302.06675); SGD 0, with momentum 1; Adafactor without momentum a row and a column sum for each matrix
    (arXiv:1804.04235); 8-bit AdamW 2 bytes and two float32 scales for each block of 256 (arXiv:2110.02861).
    """
    shape, numbers = run.model, run.numbers
    count = run.share.parameters
    if run.optimizer == "adamw8bit":
        state = count * (2 + 2 * 4 / QUANTIZED_BLOCK)
    elif run.optimizer == "adafactor":
        matrices = sum(one.copies * (one.rows + one.columns) for one in shape.matrices)
        vectors = shape.parameters - sum(one.parameters for one in shape.matrices)
        state = (matrices + vectors) * numbers.state * (count / shape.parameters)
    else:
        kept = {"adamw": 2, "adam_mini": 1, "lion": 1, "sgd_momentum": 1, "sgd": 0}[run.optimizer]
        state = count * kept * numbers.state
    whole = state + count * numbers.master
    return whole / run.degree if run.zero_stage else whole


def data_bytes(run: TrainingSetup) -> int:
    """Tokens, labels and positions of a rank; `whole`: also each sequence twice, read and learned."""
    own = 3 * run.rank_tokens * TOKEN_BYTES
    return own + (2 * run.batch * run.tokens * TOKEN_BYTES if run.data == "whole" else 0)


def cast_bytes(run: TrainingSetup) -> float:
    """Weights cast on use, which autograd keeps: of all layers (of one where recomputed) and the output's."""
    if not run.numbers.cast:
        return 0
    shape, layers = run.model, run.share.layers if run.recompute == "none" else 1
    attention = sum(one.parameters for one in shape.attention_matrices)
    feeds = sum(one.parameters for one in shape.layer_matrices) - attention
    output = shape.vocabulary * shape.width
    cast = layers * attention + (1 if run.is_tiled else layers) * feeds + output
    return cast * run.numbers.activation / run.tensor_ranks


def activation_bytes(run: TrainingSetup, micro_batches: float = 1) -> float:
    """What a stage's layers keep of so many micro batches from forward to backward (see `planner.activations`)."""
    kept = stored(run.model, run.numbers, run.recompute, run.is_tiled)
    layer = held_bytes(kept.device, run.saved_activations)
    # Of inputs that wait in host memory two are here: one in use, one on its way.
    return run.kept_tokens * (micro_batches * run.share.layers * layer + 2 * kept.host.total) + cast_bytes(run)


def head_bytes(run: TrainingSetup) -> float:
    """What the last norm and the output product keep."""
    return run.kept_tokens * held_bytes(head_kept(run.model, run.numbers), run.saved_activations)


def tile_bytes(run: TrainingSetup) -> float:
    """Of the one tile of a feed-forward that backward has made again, with the gradients of its weights and their sums.

    Sums are kept as wide as an accumulator, beside one tile's gradients in the dtype of the weights.
    """
    if not run.is_tiled:
        return 0
    shape, numbers = run.model, run.numbers
    feeds = sum(one.parameters for one in shape.feed_matrices(shape.feeds)) / run.tensor_ranks
    tokens = min(run.tiled_mlp_tokens, run.rank_tokens) / run.tensor_ranks
    return tokens * backward_bytes(shape, numbers, tiled=True).tile + feeds * (numbers.wide + numbers.gradient)


def live_bytes(run: TrainingSetup) -> tuple[float, float]:
    """The greatest moment of a layer's backward: (layer, attention sums), what was made again included."""
    made_again = stored(run.model, run.numbers, run.recompute, run.is_tiled).live.total * run.kept_tokens
    if not run.transients:
        return made_again, 0
    moment = backward_bytes(run.model, run.numbers, run.is_tiled)
    feed = run.kept_tokens * moment.feed_forward + tile_bytes(run)
    attention = run.kept_tokens * moment.attention
    if run.tensor_ranks > 1:  # a product's input is gathered from the ranks that share it, and its gradient made whole
        made_again += 2 * run.rank_tokens * run.model.width * run.numbers.activation
    return (made_again, attention) if attention > feed else (made_again + feed, 0.0)


def slots_of(run: TrainingSetup) -> StagingBytes:
    """The slots of one layer's attention."""
    shape, cut = run.model, run.tensor_ranks
    return staging_bytes(
        run.attention, run.tokens, run.ranks, run.batch, shape.heads // cut, shape.kv_heads // cut, shape.head_dim,
        run.numbers.dtype, run.schedule,
    )  # fmt: skip


def host_bytes(run: TrainingSetup) -> float:
    """What waits in host memory, for each rank: offloaded state, its gradients, weights, layer inputs."""
    share, numbers = run.share, run.numbers
    waiting = stored(run.model, numbers, run.recompute, run.is_tiled).host.total
    flying = in_flight(run.pipeline_ranks, run.pipeline_chunks, run.micro_batches).first
    inputs = run.kept_tokens * flying * share.layers * waiting
    if run.offload == "none":
        return inputs
    gradients = share.parameters / (run.degree if run.zero_stage >= 2 else 1) * numbers.gradient
    weights = share.parameters * numbers.weight / run.degree if run.offload == "parameters" else 0
    return inputs + optimizer_bytes(run) + gradients + weights


def moments(run: TrainingSetup) -> dict[str, Breakdown]:
    """The breakdown at each moment of a step that may be its peak.

    loss: all activations, and the logits' tensors. last layer: the first backward of a layer. first layer: the last
    one, when all gradients are there. reduction: without ZeRO, `Ring.all_reduce` packs the gradients and receives as
    much again. update: the optimizer works on one matrix after another, with two temporary ones.
    """
    shape, numbers, share = run.model, run.numbers, run.share
    gradients, slots = gradient_bytes(run), slots_of(run)
    early = gradients if run.accumulates else 0.0
    head = gradients if run.accumulates else float(min(gradients, share.head * numbers.gradient))
    live, sums = live_bytes(run)
    flying = in_flight(run.pipeline_ranks, run.pipeline_chunks, run.micro_batches)
    first, last, alone = (activation_bytes(run, some) for some in (flying.first, flying.last, 1))
    common = {
        "parameters": parameter_bytes(run),
        "optimizer": optimizer_bytes(run) if run.offload == "none" else 0.0,
        "data": float(data_bytes(run)),
        "framework": float(run.framework_bytes),
        "slots": slots.arena,
    }
    between = {**common, "slots": slots.arena + share.layers * slots.kept}
    if not run.transients:
        kept = first + head_bytes(run)
        return {"stored": Breakdown(**between, gradients=gradients, activations=kept, live_layer=live)}
    logits, passing = loss_bytes(run)
    found = {
        "loss": Breakdown(
            **between, gradients=early, activations=last + head_bytes(run), live_layer=passing, logits=logits
        ),
        "last layer": Breakdown(**between, gradients=head, activations=first, live_layer=live, attention=sums),
        "first layer": Breakdown(
            **common, gradients=gradients, activations=alone / share.layers if flying.first == 1 else first,
            live_layer=live, attention=sums,
        ),
        "update": Breakdown(
            **common, gradients=gradients, live_layer=2.0 * _largest(shape) * numbers.state / run.tensor_ranks
        ),
    }  # fmt: skip
    if run.zero_stage == 0 and run.ranks > 1:
        found["reduction"] = Breakdown(**common, gradients=3 * gradients)
    return found


def loss_bytes(run: TrainingSetup) -> tuple[float, float]:
    """At the loss: the logits' tensors; and in chunks the gradient of all hidden states and that of the output matrix.

    The latter is summed as wide as an accumulator, beside one chunk's.
    """
    shape, numbers, chunk = run.model, run.numbers, run.chunked_loss_tokens
    at_once = min(chunk or run.rank_tokens, run.rank_tokens)
    logits = at_once * logits_bytes(shape, numbers) / run.tensor_ranks
    if not chunk:
        return logits, 0.0
    output = shape.vocabulary * shape.width / run.tensor_ranks * (numbers.wide + numbers.gradient)
    return logits, run.kept_tokens * numbers.activation * shape.width + output


def _largest(shape: ModelShape) -> int:
    """Elements of the largest matrix."""
    return max(one.rows * one.columns for one in shape.matrices)


def training_bytes(run: TrainingSetup) -> Account:
    """What a rank needs: the greatest of the run's moments."""
    found = moments(run)
    moment = max(found, key=lambda name: found[name].total)
    totals = {name: one.total for name, one in found.items()}
    return Account(moment, found[moment], totals, host_bytes(run), slots_of(run))

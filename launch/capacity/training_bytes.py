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
    `chunked_loss_tokens`: tokens whose logits exist at once; 0: all. `data`: what of the tokens every rank holds.
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

    def __post_init__(self) -> None:
        """Check names and limits."""
        known = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "recompute": RECOMPUTE, "saved_activations": SAVED,
                 "offload": OFFLOADS, "data": DATA}  # fmt: skip
        for key, names in known.items():
            one_of(getattr(self, key), tuple(names), key)
        for key in ("tokens", "ranks", "batch"):
            if getattr(self, key) < 1:
                raise InputError(f"{key}={getattr(self, key)}: must be at least 1")
        if self.ranks > self.tokens:
            raise InputError(f"ranks={self.ranks}: more ranks than tokens (tokens={self.tokens})")
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
    def degree(self) -> int:
        """Ranks that share the state."""
        return self.zero_degree or self.ranks


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
    shape, item = run.model, run.numbers.weight
    if run.zero_stage < 3 or run.degree == 1:
        return shape.parameters * item
    share = 0 if run.offload == "parameters" else shape.parameters * item / run.degree
    # The tables are used first and last, so that nothing is gained by dropping them in between.
    return share + (GATHERED_LAYERS * shape.layer_parameters + shape.head_parameters) * item


def gradient_bytes(run: TrainingSetup) -> float:
    """All gradients: whole, or from ZeRO 2 on (section 5.2) a share, and unsummed one layer's and the tables'."""
    shape, item = run.model, run.numbers.gradient
    if run.zero_stage < 2 or run.degree == 1:
        return shape.parameters * item
    share = 0 if run.offload != "none" else shape.parameters * item / run.degree
    return share + (shape.layer_parameters + shape.head_parameters) * item


def optimizer_bytes(run: TrainingSetup) -> float:
    """Optimizer state with the master copy, before offloading: whole, or from ZeRO 1 on (section 5.1) a share.

    Numbers for each weight: AdamW 2; Adam-mini 1 (one second moment a block, arXiv:2406.16793); Lion 1
    (arXiv:2302.06675); SGD 0, with momentum 1; Adafactor without momentum a row and a column sum for each matrix
    (arXiv:1804.04235); 8-bit AdamW 2 bytes and two float32 scales for each block of 256 (arXiv:2110.02861).
    """
    shape, numbers = run.model, run.numbers
    count = shape.parameters
    if run.optimizer == "adamw8bit":
        state = count * (2 + 2 * 4 / QUANTIZED_BLOCK)
    elif run.optimizer == "adafactor":
        matrices = sum(one.copies * (one.rows + one.columns) for one in shape.matrices)
        vectors = count - sum(one.parameters for one in shape.matrices)
        state = (matrices + vectors) * numbers.state
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
    shape = run.model
    layer = sum(one.parameters for one in shape.layer_matrices)
    layers = shape.layers if run.recompute == "none" else 1
    return (layers * layer + shape.vocabulary * shape.width) * run.numbers.activation


def activation_bytes(run: TrainingSetup) -> float:
    """What all layers and the head keep from forward to backward (see `planner.activations`)."""
    shape, numbers = run.model, run.numbers
    layer = held_bytes(stored(shape, numbers, run.recompute).device, run.saved_activations)
    # Of inputs that wait in host memory two are here: one in use, one on its way.
    waiting = 2 * stored(shape, numbers, run.recompute).host.total
    return run.rank_tokens * (shape.layers * layer + waiting) + head_bytes(run) + cast_bytes(run)


def head_bytes(run: TrainingSetup) -> int:
    """What the last norm and the output product keep."""
    return run.rank_tokens * held_bytes(head_kept(run.model, run.numbers), run.saved_activations)


def live_bytes(run: TrainingSetup) -> tuple[float, float]:
    """The greatest moment of a layer's backward: (layer, attention sums), what was made again included."""
    made_again = stored(run.model, run.numbers, run.recompute).live.total
    if not run.transients:
        return run.rank_tokens * made_again, 0
    at_attention, moment = 0.0, backward_bytes(run.model, run.numbers)
    if moment.attention > moment.feed_forward:
        at_attention = moment.attention
    return run.rank_tokens * (made_again + (0 if at_attention else moment.feed_forward)), run.rank_tokens * at_attention


def slots_of(run: TrainingSetup) -> StagingBytes:
    """The slots of one layer's attention."""
    shape = run.model
    return staging_bytes(
        run.attention, run.tokens, run.ranks, run.batch, shape.heads, shape.kv_heads, shape.head_dim,
        run.numbers.dtype, run.schedule,
    )  # fmt: skip


def host_bytes(run: TrainingSetup) -> float:
    """What waits in host memory, for each rank: offloaded state, its gradients, weights, layer inputs."""
    shape, numbers = run.model, run.numbers
    inputs = run.rank_tokens * shape.layers * stored(shape, numbers, run.recompute).host.total
    if run.offload == "none":
        return inputs
    share = shape.parameters / (run.degree if run.zero_stage >= 2 else 1) * numbers.gradient
    weights = shape.parameters * numbers.weight / run.degree if run.offload == "parameters" else 0
    return inputs + optimizer_bytes(run) + share + weights


def moments(run: TrainingSetup) -> dict[str, Breakdown]:
    """The breakdown at each moment of a step that may be its peak.

    loss: all activations, and the logits' tensors. last layer: the first backward of a layer. first layer: the last
    one, when all gradients are there. reduction: without ZeRO, `Ring.all_reduce` packs the gradients and receives as
    much again. update: the optimizer works on one matrix after another, with two temporary ones.
    """
    shape, numbers = run.model, run.numbers
    gradients, slots = gradient_bytes(run), slots_of(run)
    early = gradients if run.gradients_kept else 0.0
    head = gradients if run.gradients_kept else float(min(gradients, shape.head_parameters * numbers.gradient))
    live, sums = live_bytes(run)
    all_kept = activation_bytes(run)
    one_layer = (all_kept - head_bytes(run)) / shape.layers
    at_once = min(run.chunked_loss_tokens or run.rank_tokens, run.rank_tokens)
    common = {
        "parameters": parameter_bytes(run),
        "optimizer": optimizer_bytes(run) if run.offload == "none" else 0.0,
        "data": float(data_bytes(run)),
        "framework": float(run.framework_bytes),
        "slots": slots.arena,
    }
    between = {**common, "slots": slots.arena + shape.layers * slots.kept}
    if not run.transients:
        return {"stored": Breakdown(**between, gradients=gradients, activations=all_kept, live_layer=live)}
    logits = float(at_once * logits_bytes(shape, numbers))
    passing = float(run.rank_tokens * numbers.activation * shape.width) if run.chunked_loss_tokens else 0.0
    found = {
        "loss": Breakdown(**between, gradients=early, activations=all_kept, live_layer=passing, logits=logits),
        "last layer": Breakdown(
            **between, gradients=head, activations=all_kept - head_bytes(run),
            live_layer=live, attention=sums,
        ),
        "first layer": Breakdown(
            **common, gradients=gradients, activations=one_layer, live_layer=live, attention=sums
        ),
        "update": Breakdown(**common, gradients=gradients, live_layer=2.0 * _largest(shape) * numbers.state),
    }  # fmt: skip
    if run.zero_stage == 0 and run.ranks > 1:
        found["reduction"] = Breakdown(**common, gradients=3 * gradients)
    return found


def _largest(shape: ModelShape) -> int:
    """Elements of the largest matrix."""
    return max(one.rows * one.columns for one in shape.matrices)


def training_bytes(run: TrainingSetup) -> Account:
    """What a rank needs: the greatest of the run's moments."""
    found = moments(run)
    moment = max(found, key=lambda name: found[name].total)
    totals = {name: one.total for name, one in found.items()}
    return Account(moment, found[moment], totals, host_bytes(run), slots_of(run))

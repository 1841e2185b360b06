"""Training memory per rank, component by component, for sequences that are sharded over the ranks of a ring.

Activations: those that each layer keeps are counted in `layer_bytes`.

Buffers of the attention call: they are those of the plan that would run, on the rank that needs the most. They grow
with the rows of a shard. A long call is therefore planned with a few rows per rank and all lengths divided by the same
factor, and the bytes are multiplied by this factor. The result is exact up to the alignment of buffers if the lengths
are divisible. A ring of more than `MOST_RANKS` ranks needs no larger buffers than one of `MOST_RANKS`.

Total: a training step reaches its peak at one of a few moments. The components of each moment are added, and the
largest sum is the result.

Guarantees: every figure is a formula of sizes, in a function that gives its source. Sizes are bytes on one rank.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ringattn.core.dilation import Dilated
from ringattn.core.layout import make_layout
from ringattn.core.mask import Mask, make_mask
from ringattn.core.problem import ITEM_BYTES, Problem
from ringattn.errors import InputError, one_of
from ringattn.launch.calls import schedule_option
from ringattn.launch.capacity.layer_bytes import (
    PRECISIONS,
    RECOMPUTE,
    SAVED,
    Precision,
    backward_bytes,
    head_kept,
    held_bytes,
    layer_parts,
    logits_bytes,
    packing_bytes,
    stored,
)
from ringattn.launch.capacity.model_shapes import ModelShape, Share, in_flight, share_of
from ringattn.launch.capacity.stacks import KERNELS, NAMES, STACKS, Stack
from ringattn.launch.options import MOST, check_limits, option
from ringattn.launch.train.config import PROJECTION_ROWS
from ringattn.layers import PREFETCH_BYTES
from ringattn.planner.choose import choose_route, plan_of

# --- buffers of the attention call ------------------------------------------------------------------------------------


ROWS_PER_RANK = 1024
MOST_RANKS = 16
"""A longer chain is planned with this number of ranks, because its slots do not grow with its length. If a dilated
segment spans more ranks, its rows are counted as whole shards that travel around a ring, which is the worst case."""

KINDS = ("causal", "full", "window", "dilated")


@dataclass(frozen=True)
class AttentionSetup:
    """The mask: its kind, and its sizes.

    `window_tokens` is the number of keys before the query in a causal window. `segment_lengths` and `dilation_rates`
    are those of the dilated branches.
    """

    kind: str = "causal"
    window_tokens: int = 0
    segment_lengths: tuple[int, ...] = ()
    dilation_rates: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise `InputError` if the kind is unknown or its sizes are missing."""
        one_of(self.kind, KINDS, "mask")
        if self.kind == "window" and self.window_tokens < 1:
            raise InputError(f"window_tokens={self.window_tokens}: mask=window needs at least 1")
        if self.kind == "dilated":
            Dilated(self.segment_lengths, self.dilation_rates)

    def pairs(self, length: int) -> float:
        """Return the (query, key) pairs of one head over `length` tokens.

        For dilated branches, which are causal, it is the sum of length * segment / rate ** 2 / 2 over all branches.
        """
        if self.kind == "full":
            return float(length) ** 2
        if self.kind == "window":
            width = min(self.window_tokens, length - 1)
            return length * (width + 1) - width * (width + 1) / 2
        if self.kind == "causal":
            return length * (length + 1) / 2
        branches = zip(self.segment_lengths, self.dilation_rates, strict=True)
        return sum(length * min(segment, length) / rate**2 / 2 for segment, rate in branches)

    def scaled(self, cut: float, rows: int) -> AttentionSetup:
        """Return the mask with all lengths divided by `cut`. A segment becomes at least a shard of `rows` long."""
        segments = tuple(max(rows, round(length / cut)) for length in self.segment_lengths)
        window = max(1, round(self.window_tokens / cut)) if self.kind == "window" else 0
        return AttentionSetup(self.kind, window, segments, self.dilation_rates)

    def mask(self, length: int, heads: int, kv_heads: int) -> Mask:
        """Return the mask of one sequence of `length` tokens."""
        if self.kind == "dilated":
            branches = Dilated(self.segment_lengths, self.dilation_rates, causal=True)
            return branches.mask(length, length, None, None, heads, kv_heads)
        window = (self.window_tokens, 0) if self.kind == "window" else None
        return make_mask(length, length, causal=self.kind != "full", window=window)

    @property
    def layout(self) -> str:
        """Return the layout that `ring.sequence(layout="auto")` chooses."""
        return "zigzag" if self.kind == "causal" else "contiguous"


class StagingBytes(NamedTuple):
    """Bytes of attention's buffers: of the arena in forward and backward, and those kept by each layer in between.

    `route` is the name of the schedule that was planned.
    """

    forward: float
    backward: float
    kept: float
    route: str

    @property
    def arena(self) -> float:
        """Return the bytes of the arena, which all passes of all layers use one after another."""
        return max(self.forward, self.backward)


def staging_bytes(run: TrainingSetup) -> StagingBytes:
    """Return the bytes of the buffers of one layer's attention, on the rank that needs the most."""
    attention, ranks, shape = run.attention, run.ranks, run.model
    if ranks == 1:
        return StagingBytes(0, 0, 0, "none")
    cut_heads = run.tensor_ranks * run.head_groups
    heads, kv_heads = shape.heads // cut_heads, shape.kv_heads // cut_heads
    per_rank = -(-run.tokens // ranks)
    if ranks > MOST_RANKS and max(attention.segment_lengths, default=0) > MOST_RANKS * per_rank:
        forward, backward = ring_slots_bytes(per_rank, kv_heads * shape.head_dim, run.numbers.dtype, causal=False)
        return StagingBytes(forward * run.batch, backward * run.batch, 0, "ring")
    sizes = heads, kv_heads, shape.head_dim, run.numbers.dtype, run.schedule
    if per_rank <= ROWS_PER_RANK and ranks <= MOST_RANKS:
        planned, factor = _planned(attention, run.tokens, ranks, *sizes), float(run.batch)
    else:
        rows, planned_ranks = min(ROWS_PER_RANK, per_rank), min(ranks, MOST_RANKS)
        cut = per_rank / rows
        planned = _planned(attention.scaled(cut, rows), rows * planned_ranks, planned_ranks, *sizes)
        factor = cut * run.batch
    kept = planned.kept * factor * run.head_groups
    return StagingBytes(planned.forward * factor, planned.backward * factor, kept, planned.route)


@lru_cache(maxsize=1024)
def _planned(
    attention: AttentionSetup,
    length: int,
    ranks: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    schedule: str,
) -> StagingBytes:
    """Plan the call on all ranks, for a batch of one, and return the bytes of the largest buffers."""
    layout = make_layout(attention.layout, length, ranks)
    mask = attention.mask(length, heads, kv_heads)
    problem = Problem(layout, layout, mask, 1, heads, kv_heads, head_dim, head_dim, dtype)
    route = choose_route(problem, schedule)
    plans = [[plan_of(problem, route, rank, back) for rank in range(ranks)] for back in (False, True)]
    forward, backward = (max(plan.arena_bytes for plan in of_pass) for of_pass in plans)
    return StagingBytes(forward, backward, max(plan.kept_bytes for plan in plans[0]), route.name)


def ring_slots_bytes(tokens: int, kv_width: int, dtype: str, causal: bool) -> tuple[int, int]:
    """Return the buffer bytes (forward, backward) of a ring of at least four ranks with `tokens` rows per rank.

    This is a closed form. Let M be the bytes of K and V of a shard. Forward has two staging buffers of M: one is read
    or sent while the other receives. Backward has two buffers of M and three for dK/dV (computed, sent, received) in
    the accumulator's dtype. A causal zigzag sends only the rows that later ranks read, so it also packs half of the
    local shard, which takes M / 2 in both passes.
    """
    item = ITEM_BYTES[dtype]
    shard, sums = 2 * tokens * kv_width * item, 2 * tokens * kv_width * max(4, item)
    packed = shard // 2 if causal else 0
    return 2 * shard + packed, 2 * shard + packed + 3 * sums


# --- the total of one rank --------------------------------------------------------------------------------------------


OPTIMIZERS = ("adamw", "adamw8bit", "adam_mini", "lion", "adafactor", "sgd", "sgd_momentum")
OFFLOADS = ("none", "optimizer", "parameters")
DATA = ("shard", "whole")
TOKEN_BYTES = 8
"""A token, a label or a position is an int64."""

QUANTIZED_BLOCK = 256
"""Elements that share one float32 scale in 8-bit optimizer states (bitsandbytes and torchao)."""

GATHERED_LAYERS = 2
"""Layers whose whole weights a rank has in backward under ZeRO 3: the one that runs, and the next, being gathered."""


@dataclass(kw_only=True)
class TrainingSwitches:
    """The training settings of `ringattn plan`, declared once for the command and the formulas.

    The text of each option is its line in `ringattn plan --help`.
    """

    stack: str = option("ringattn", "implementation that trains; see docs/memory-planning.md", choices=NAMES)
    kernel: str = option("auto", "attention kernel of another stack; auto: its own choice", choices=("auto", *KERNELS))
    schedule: str = schedule_option()
    precision: str = option(
        "bf16_master",
        "dtype of weights and activations; master: with an fp32 copy of the weights",
        choices=tuple(PRECISIONS),
    )
    optimizer: str = option("adamw", "optimizer whose state is counted", choices=OPTIMIZERS)
    recompute: str = option("none", "what backward recomputes", choices=RECOMPUTE)
    saved_activations: str = option("keep", "how saved activations are stored", choices=SAVED)
    zero_stage: int = option(
        0, "ranks shard 1: optimizer state, 2: also gradients, 3: also weights (FSDP)", least=0, most=3
    )
    zero_degree: int | None = option(None, "ranks of the FSDP group; those of the ring if not set", least=1, most=MOST)
    tensor_ranks: int = option(1, "tensor parallel ranks (TP); each belongs to a ring", least=1, most=MOST)
    pipeline_ranks: int = option(1, "pipeline parallel ranks (PP)", least=1, most=MOST)
    pipeline_chunks: int = option(1, "interleaved stages per pipeline rank", least=1, most=MOST)
    micro_batches: int = option(1, "micro batches per step, of `batch` sequences each", least=1, most=MOST)
    offload: str = option("none", "what is kept in host memory", choices=OFFLOADS)
    chunked_loss_tokens: int = option(0, "tokens per chunk of the loss; 0: all at once", least=0, most=MOST)
    tiled_mlp_tokens: int = option(0, "tokens per tile of the feed-forward; 0: all at once", least=0, most=MOST)
    head_groups: int = option(
        1, "groups of K/V heads that attend one after another; must divide kv_heads", least=1, most=MOST
    )
    data: str = option("shard", "each rank reads its shard of the tokens, or the whole batch", choices=DATA)
    gradients_kept: bool = option(True, "whether gradients are kept through the step, as when they accumulate")
    transients: bool = option(True, "count transient tensors too")


@dataclass
class TrainingSetup(TrainingSwitches):
    """One training run: a model, its sequence, and every setting that saves memory.

    `ranks` is the size of the ring; tensor and pipeline parallelism multiply the number of accelerators. Each of the
    `micro_batches` has `batch` sequences. Set `transients=False` to compare with published hand calculations, which do
    not count transient tensors. `framework_bytes` is an allowance for the driver, NCCL and the allocator. Raises
    `InputError`, which begins with the key, if a value is unknown or two values contradict each other.
    """

    model: ModelShape
    tokens: int = option(MISSING, "tokens of one sequence, over all ranks", least=1)
    ranks: int = option(1, "ranks of the ring", least=1)
    batch: int = option(1, "sequences of a micro batch", least=1)
    attention: AttentionSetup = field(default_factory=AttentionSetup)
    framework_bytes: int = 0

    def __post_init__(self) -> None:
        """Raise `InputError` if a value is outside its limits or contradicts another."""
        check_limits(self)
        if self.ranks > self.tokens:
            raise InputError(f"ranks={self.ranks}: more ranks than tokens (tokens={self.tokens})")
        for key in ("heads", "kv_heads"):
            if getattr(self.model, key) % self.tensor_ranks:
                raise InputError(f"tensor_ranks={self.tensor_ranks}: must divide {key}={getattr(self.model, key)}")
        if not self.takes_head_groups(self.head_groups):
            raise InputError(
                f"head_groups={self.head_groups}: must divide the K/V heads of a rank, "
                f"{self.model.kv_heads // self.tensor_ranks}, and needs block=swiglu, saved_activations=keep and a "
                "mask other than dilated"
            )
        if self.pipeline_ranks * self.pipeline_chunks > self.model.layers:
            raise InputError(
                f"pipeline_ranks={self.pipeline_ranks}: pipeline_ranks times pipeline_chunks={self.pipeline_chunks} "
                f"is more than layers={self.model.layers}"
            )
        if self.pipeline_ranks == 1 and self.pipeline_chunks > 1:
            raise InputError(
                f"pipeline_chunks={self.pipeline_chunks}: has no effect with one pipeline rank; set pipeline_ranks"
            )
        if not self.gradients_kept and self.micro_batches > 1:
            raise InputError(
                f"gradients_kept=false: must be true with micro_batches={self.micro_batches}, because their "
                "gradients accumulate"
            )
        if self.offload == "parameters" and self.zero_stage < 3:
            raise InputError("offload=parameters: needs zero_stage=3, which fetches weights layer by layer")
        if self.stack in STACKS:
            self._check_stack(STACKS[self.stack])
        elif self.kernel != "auto":
            raise InputError(f"kernel={self.kernel}: stack=ringattn uses its own kernels; use kernel=auto")

    def _check_stack(self, stack: Stack) -> None:
        """Raise `InputError` if the run has a setting that the stack does not have."""
        settings = {
            f"precision={self.precision}": (
                self.precision in stack.precisions.value,
                " or ".join(stack.precisions.value),
            ),
            f"schedule={self.schedule}": (self.schedule == "auto", "auto"),
            f"saved_activations={self.saved_activations}": (self.saved_activations == "keep", "keep"),
            f"head_groups={self.head_groups}": (self.head_groups == 1, "1"),
            f"recompute={self.recompute}": (self.recompute != "selective" or stack.selective.value is not None, "full"),
            f"mask={self.attention.kind}": (self.attention.kind == "causal", "causal"),
            f"block={self.model.block}": (self.model.block == "swiglu", "swiglu"),
            "gradients_kept=false": (self.gradients_kept, "true"),
            "transients=false": (self.transients, "true"),
        }
        for setting, (suits, remedy) in settings.items():
            if not suits:
                key = setting.partition("=")[0]
                raise InputError(f"{setting}: stack={stack.name} has no such setting; use {key}={remedy}")

    def takes_head_groups(self, groups: int) -> bool:
        """Return whether the attention of this run may be computed in `groups` groups of heads."""
        suits = self.model.block == "swiglu" and self.saved_activations == "keep" and self.attention.kind != "dilated"
        return groups == 1 or (suits and self.model.kv_heads // self.tensor_ranks % groups == 0)

    @property
    def numbers(self) -> Precision:
        """Return the bytes of one number of each kind."""
        return PRECISIONS[self.precision]

    @property
    def rank_tokens(self) -> int:
        """Return the number of tokens of the rank that has the most, in all sequences of a micro batch."""
        return self.batch * -(-self.tokens // self.ranks)

    @property
    def kept_tokens(self) -> float:
        """Return the tokens for which a rank keeps activations: sequence parallelism shards them over tensor ranks."""
        return self.rank_tokens / self.tensor_ranks

    @property
    def degree(self) -> int:
        """Return the number of ranks over which the training state is sharded."""
        return self.zero_degree or self.ranks

    @property
    def is_sharded(self) -> bool:
        """Return whether gradients are sharded, and so weights while they are not used: ZeRO 2 and 3."""
        return self.zero_stage >= 2

    @property
    def packed(self) -> str:
        """Return how a layer's activations are stored. Recomputed ones are not packed."""
        return self.saved_activations if self.recompute == "none" else "keep"

    @property
    def gradients_appear(self) -> bool:
        """Return whether gradients do not exist before the backward pass of a layer."""
        return self.micro_batches == 1 and (self.is_sharded or not self.gradients_kept)

    @property
    def share(self) -> Share:
        """Return the part of the model that a rank has before ZeRO."""
        return share_of(self.model, self.tensor_ranks, self.pipeline_ranks)

    @property
    def is_tiled(self) -> bool:
        """Return whether feed-forwards are computed in tiles."""
        return self.tiled_mlp_tokens > 0


class Breakdown(NamedTuple):
    """Bytes of one rank by component.

    `live_layer` counts the recomputed and transient tensors of the layer whose backward runs, and `attention` the
    transient tensors of its attention.
    """

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
        """Return the sum of all components."""
        return sum(self)


def shard_bytes(run: TrainingSetup, number_bytes: int) -> float:
    """Return the bytes on the device of a rank's shard of all weights, or of all gradients."""
    return run.share.parameters * number_bytes / run.degree


def parameter_bytes(run: TrainingSetup, gathered_layers: float) -> float:
    """Return the bytes of weights on the device while the weights of `gathered_layers` layers are gathered.

    A rank has the whole weights, or from ZeRO 2 on (arXiv:1910.02054, section 5.3) its shard and the gathered weights.
    FSDP2 copies what it gathers, so that the shard is no part of it.
    """
    share, item = run.share, run.numbers.weight
    if not run.is_sharded:
        return share.parameters * item
    shard = 0 if run.offload == "parameters" else shard_bytes(run, item)
    # The embedding and the output matrix are used first and last, so dropping them in between would gain nothing.
    return shard + (gathered_layers * share.layer + share.head) * item


def layers_gathered(run: TrainingSetup, done: int) -> int:
    """Return how many layers' weights are gathered in the backward of a layer, after that of `done` layers.

    ZeRO 2 gathers all layers in forward, and drops the weights of each after its backward.
    """
    left = run.share.layers - done
    return min(GATHERED_LAYERS, left) if run.zero_stage == 3 else left


def gathered_in_forward(run: TrainingSetup, buffers: int) -> int:
    """Return how many layers' weights exist whole in the forward of the last layer.

    They are those of the layer, under ZeRO 2 of all layers, and `buffers` copies of a layer's weights: FSDP2 frees what
    it received for a layer after it has received and copied the next, and for the last layer after the loss.
    """
    return buffers + (run.share.layers if run.zero_stage == 2 else buffers - 1)


def gradient_bytes(run: TrainingSetup, done: int, pending: float = 0.0) -> float:
    """Return the bytes of gradients in the backward of a layer, after that of `done` layers.

    `pending` are the bytes of gradients of this layer that do not exist yet. A rank has the whole gradients of the
    layers that are done, or from ZeRO 2 on (section 5.2) its shard of them, and the input of the last reduction, which
    FSDP2 frees after the next layer. FSDP2 reduces gradients in the last micro batch only. Until then, those of all
    layers are whole. If the optimizer runs on the host, shards are copied to the host as soon as they exist.
    """
    share, item = run.share, run.numbers.gradient
    layer, tables, whole = share.layer * item, share.head * item, share.parameters * item
    if not run.is_sharded:
        if run.gradients_kept:
            return whole
        return tables + (done + 1) * layer - pending
    reduced = layer if done else 0.0
    on_device = 0.0 if run.offload != "none" else 1 / run.degree
    if run.micro_batches > 1:
        return whole + max(0.0, reduced - done * layer * (1 - on_device))
    return tables + layer - pending + reduced + (whole if run.gradients_kept else done * layer) * on_device


def pending_bytes(run: TrainingSetup, in_attention: bool) -> float:
    """Return the bytes of a layer's gradients that do not exist yet at the largest moment of its backward.

    In the backward of attention (`in_attention`), the gradients of the feed-forward exist, and with groups of heads
    that of the output projection too. `projection_bytes` counts the sum over groups, which becomes a gradient. In the
    backward of the feed-forward, the gradient of its second matrix exists, unless `tile_bytes` counts it.
    """
    if not in_attention:
        *_, second = run.model.feed_matrices(run.model.feed_copies)
        exists = 0.0 if run.is_tiled else second.parameters / run.tensor_ranks
        return (run.share.layer - exists) * run.numbers.gradient
    projections, output = run.model.attention_matrices
    matrices = projections.parameters + (0 if run.head_groups > 1 else output.parameters)
    return matrices / run.tensor_ranks * run.numbers.gradient


def optimizer_bytes(run: TrainingSetup) -> float:
    """Return the bytes of optimizer state and master copy of one rank, wherever they are stored.

    A rank has all of them, or from ZeRO 1 on (arXiv:1910.02054, section 5.1) a shard. AdamW keeps 2 numbers per weight;
    Adam-mini 1, and one second moment per block (arXiv:2406.16793); Lion 1 (arXiv:2302.06675); SGD 0, or 1 with
    momentum. Adafactor without momentum keeps a row sum and a column sum of each matrix (arXiv:1804.04235). 8-bit AdamW
    keeps 2 bytes per weight, and two float32 scales per block of 256 (arXiv:2110.02861).
    """
    shape, numbers = run.model, run.numbers
    count = run.share.parameters
    if run.optimizer == "adamw8bit":
        state = count * (2 + 2 * 4 / QUANTIZED_BLOCK)
    elif run.optimizer == "adafactor":
        matrices = sum(matrix.copies * (matrix.rows + matrix.columns) for matrix in shape.matrices)
        vectors = shape.parameters - sum(matrix.parameters for matrix in shape.matrices)
        state = (matrices + vectors) * numbers.state * (count / shape.parameters)
    else:
        kept = {"adamw": 2, "adam_mini": 1, "lion": 1, "sgd_momentum": 1, "sgd": 0}[run.optimizer]
        state = count * kept * numbers.state
    whole = state + count * numbers.master
    return whole / run.degree if run.zero_stage else whole


def data_bytes(run: TrainingSetup) -> int:
    """Return the bytes of a rank's tokens, labels and positions.

    If `data` is whole, a rank also has the inputs and labels of the whole sequences.
    """
    shard = 3 * run.rank_tokens * TOKEN_BYTES
    return shard + (2 * run.batch * run.tokens * TOKEN_BYTES if run.data == "whole" else 0)


def cast_bytes(run: TrainingSetup) -> float:
    """Return the bytes of cast weights that autograd keeps: the output matrix and all layers, or one if recomputed."""
    if not run.numbers.cast:
        return 0
    shape, layers = run.model, run.share.layers if run.recompute == "none" else 1
    attention = sum(matrix.parameters for matrix in shape.attention_matrices)
    feeds = sum(matrix.parameters for matrix in shape.layer_matrices) - attention
    output = shape.vocabulary * shape.width
    cast = layers * attention + (1 if run.is_tiled else layers) * feeds + output
    return cast * run.numbers.activation / run.tensor_ranks


def activation_bytes(run: TrainingSetup, micro_batches: float = 1) -> float:
    """Return the device bytes that all layers of the rank keep from forward to backward, for some micro batches."""
    kept = stored(run.model, run.numbers, run.recompute, run.is_tiled, run.head_groups)
    layer = held_bytes(kept.device, run.saved_activations)
    return run.kept_tokens * micro_batches * run.share.layers * layer + cast_bytes(run)


def head_bytes(run: TrainingSetup) -> float:
    """Return the bytes that the last norm and the output product keep."""
    return run.kept_tokens * held_bytes(
        head_kept(run.model, run.numbers, run.chunked_loss_tokens > 0), run.saved_activations
    )


def tile_bytes(run: TrainingSetup) -> float:
    """Return the bytes of the one tile of a feed-forward that backward recomputes, with its weight gradients.

    The gradients summed over tiles have the accumulator's dtype, and the gradients of one tile that of a gradient.
    """
    if not run.is_tiled:
        return 0
    shape, numbers = run.model, run.numbers
    feeds = sum(matrix.parameters for matrix in shape.feed_matrices(shape.feeds)) / run.tensor_ranks
    tokens = min(run.tiled_mlp_tokens, run.rank_tokens) / run.tensor_ranks
    return tokens * backward_bytes(shape, numbers, tiled=True).tile + feeds * (numbers.wide + numbers.gradient)


def projection_bytes(run: TrainingSetup) -> float:
    """Return the bytes of the tile that backward projects again for a group of heads, and of weight gradients.

    Of the norm, five wide tensors exist at the same time, and if activations are narrower, one of theirs too. The
    gradient of the projection's weight exists three times: summed over tiles, summed over groups, and of one tile.
    """
    shape, numbers = run.model, run.numbers
    projections, _ = shape.attention_matrices
    narrow = numbers.activation if numbers.activation < numbers.wide else 0
    norm = (5 * numbers.wide + narrow) * shape.width
    tile = norm + numbers.activation * projections.rows // (run.head_groups * run.tensor_ranks)
    weights = projections.parameters / run.tensor_ranks * (2 * numbers.wide + numbers.gradient)
    return min(PROJECTION_ROWS, run.rank_tokens) * tile + weights


def live_bytes(run: TrainingSetup) -> tuple[float, float, float]:
    """Return the bytes at the largest moment of a layer's backward, and of its gradients that do not exist yet.

    They are (recomputed and feed-forward, attention, gradients).
    """
    recomputed = (
        stored(run.model, run.numbers, run.recompute, run.is_tiled, run.head_groups).live.total * run.kept_tokens
    )
    if not run.transients:
        return recomputed, 0, 0
    zigzag = run.ranks > 1 and run.attention.layout == "zigzag"
    moment = backward_bytes(run.model, run.numbers, run.is_tiled, run.head_groups, zigzag, run.packed)
    feed = run.kept_tokens * moment.feed_forward + tile_bytes(run)
    attention = run.kept_tokens * moment.attention
    if run.head_groups > 1:
        attention = max(attention, run.kept_tokens * moment.projection + projection_bytes(run))
        if run.recompute in ("full", "offloaded"):  # the outputs of a group are freed after its backward
            kept = layer_parts(run.model, run.numbers, run.is_tiled, run.head_groups).attention
            attention -= run.kept_tokens * kept.total / run.head_groups
    if run.tensor_ranks > 1:  # sequence parallelism gathers the input of a product, and its gradient is whole
        recomputed += 2 * run.rank_tokens * run.model.width * run.numbers.activation
    in_feed, in_attention = (pending_bytes(run, in_attention) for in_attention in (False, True))
    more = in_feed - in_attention if run.gradients_appear else 0.0
    if attention + more > feed:
        return recomputed, attention, in_attention
    return recomputed + feed, 0.0, in_feed


def host_bytes(run: TrainingSetup) -> float:
    """Return the bytes of a rank in host memory: layer inputs, optimizer state, its gradients, and weights."""
    share, numbers = run.share, run.numbers
    input_bytes = stored(run.model, numbers, run.recompute, run.is_tiled, run.head_groups).host.total
    micro_batches = in_flight(run.pipeline_ranks, run.pipeline_chunks, run.micro_batches).first
    inputs = run.kept_tokens * micro_batches * share.layers * input_bytes
    if run.offload == "none":
        return inputs
    gradients = share.parameters / (run.degree if run.zero_stage >= 2 else 1) * numbers.gradient
    weights = share.parameters * numbers.weight / run.degree if run.offload == "parameters" else 0
    return inputs + optimizer_bytes(run) + gradients + weights


def moments(run: TrainingSetup) -> dict[str, Breakdown]:
    """Return the breakdown at each moment of a step that may be its peak.

    loss: all activations and the tensors of the logits exist. last layer: the backward of the last layer runs, which is
    the first of backward. first layer: the backward of the first layer runs, and all gradients exist. update: the
    optimizer updates one matrix after another, with two temporary matrices. Without ZeRO, reduction: `Ring.all_reduce`
    packs the gradients and receives the same number of bytes. From ZeRO 2 on, gather: the weights of the last layer are
    gathered in forward; next to last layer: in its backward, the input of the first reduction exists; second layer: in
    its backward, the weights of the first layer exist too, and most shards of gradients. With packed activations,
    packing: the last layer packs a tensor of its feed-forward.
    """
    shape, numbers, share = run.model, run.numbers, run.share
    slots, layers = staging_bytes(run), share.layers
    live, sums, pending = live_bytes(run)
    flying = in_flight(run.pipeline_ranks, run.pipeline_chunks, run.micro_batches)
    first, final, single = (activation_bytes(run, count) for count in (flying.first, flying.last, 1))
    common = {
        "optimizer": optimizer_bytes(run) if run.offload == "none" else 0.0,
        "data": float(data_bytes(run)),
        "framework": float(run.framework_bytes),
    }
    # If layer inputs are in host memory, the one that is used or copied is also on the device. While it is used in
    # backward, the input of the layer before it is copied back, unless it is large. The limit is then counted instead,
    # so that a longer sequence never needs less memory.
    copied = run.kept_tokens * stored(shape, numbers, run.recompute).host.total
    prefetched = min(copied, PREFETCH_BYTES) if layers > 1 or flying.first > 1 else 0.0
    between = {**common, "slots": slots.arena + layers * slots.kept}
    if not run.transients:
        return {"stored": Breakdown(
            **between, parameters=parameter_bytes(run, layers_gathered(run, 0)),
            gradients=gradient_bytes(run, layers - 1), activations=first + copied + head_bytes(run), live_layer=live,
        )}  # fmt: skip

    def in_backward(done: int) -> Breakdown:
        """Return the breakdown in the backward of a layer, after that of `done` layers."""
        kept = first - (done * single / layers if flying.first == 1 else 0.0)
        return Breakdown(
            **common, live_layer=live, attention=sums, slots=slots.arena + (layers - done) * slots.kept,
            parameters=parameter_bytes(run, layers_gathered(run, done)), gradients=gradient_bytes(run, done, pending),
            activations=kept + copied + (0.0 if done and done == layers - 1 else prefetched),
        )  # fmt: skip

    logits, passing = loss_bytes(run)
    whole = share.parameters * numbers.gradient
    shards = whole / run.degree if run.offload == "none" else 0.0
    early = (shards if run.is_sharded and run.micro_batches == 1 else whole) if run.gradients_kept else 0.0
    breakdowns = {
        "loss": Breakdown(
            **between, parameters=parameter_bytes(run, gathered_in_forward(run, 1)), gradients=early,
            activations=final + copied + head_bytes(run), live_layer=passing, logits=logits,
        ),
        "last layer": in_backward(0),
        "first layer": in_backward(layers - 1),
        "update": Breakdown(
            **common, slots=slots.arena, gradients=shards if run.is_sharded else whole,
            parameters=shard_bytes(run, numbers.weight) if run.is_sharded else parameter_bytes(run, 0),
            live_layer=2.0 * _largest(shape) * numbers.state / run.tensor_ranks / (run.degree if run.zero_stage else 1),
        ),
    }  # fmt: skip
    if run.packed != "keep" and not run.is_tiled:
        breakdowns["packing"] = Breakdown(
            **between, parameters=parameter_bytes(run, gathered_in_forward(run, 1)), gradients=early, activations=final,
            live_layer=run.kept_tokens * packing_bytes(shape, numbers, run.packed),
        )  # fmt: skip
    if run.is_sharded and layers > 1:
        kept = final - single / layers
        breakdowns["gather"] = Breakdown(
            **between, parameters=parameter_bytes(run, gathered_in_forward(run, 2)), gradients=early, activations=kept
        )
    if run.is_sharded and layers > 2:
        breakdowns["next to last layer"] = in_backward(1)
        breakdowns["second layer"] = in_backward(layers - 2)
    if run.zero_stage == 0 and run.ranks > 1:
        breakdowns["reduction"] = Breakdown(
            **common, slots=slots.arena, parameters=parameter_bytes(run, 0), gradients=3 * whole
        )
    return breakdowns


def loss_bytes(run: TrainingSetup) -> tuple[float, float]:
    """Return the bytes of the logits' tensors at the loss, and the additional bytes of a loss in chunks.

    A loss in chunks also holds the gradient of all hidden states, the gradient of the output matrix summed over chunks
    in the accumulator's dtype, and the gradient of the output matrix from one chunk.
    """
    shape, numbers, chunk = run.model, run.numbers, run.chunked_loss_tokens
    at_once = min(chunk or run.rank_tokens, run.rank_tokens)
    logits = at_once * logits_bytes(shape, numbers) / run.tensor_ranks
    if not chunk:
        return logits, 0.0
    output = shape.vocabulary * shape.width / run.tensor_ranks * (numbers.wide + numbers.gradient)
    return logits, run.kept_tokens * numbers.activation * shape.width + output


def _largest(shape: ModelShape) -> int:
    """Return the number of elements of the largest matrix."""
    return max(matrix.rows * matrix.columns for matrix in shape.matrices)

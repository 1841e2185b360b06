"""The bytes that each rank needs to train a model on sequences that the ranks of a ring share, component by component.

Activations: bytes of one token in one layer, by the part of the layer that keeps them for backward. Attention is tiled,
so scores are not kept. The swiglu block is the model of `ringattn train`, tensor by tensor as autograd holds it; the
gelu block is the account of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1): 34 bytes times width in 16-bit
precision, without scores.

Buffers of the attention call: those of the real plan, on the rank that needs most. They grow with the rows of a shard,
so a call of many tokens is planned at a few rows a rank, with all lengths divided alike, and its bytes are scaled back.
This is exact, up to the alignment of buffers, where lengths divide; a chain longer than `MOST_RANKS` needs no more.

All of a rank: a training step has a few moments at which its memory may be at its peak; each is summed, and the largest
counts.

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
from ringattn.launch.capacity.model_shapes import ModelShape, Share, in_flight, share_of
from ringattn.launch.options import MOST, check_limits, option
from ringattn.planner.choose import choose_route, plan_of

# --- activations ------------------------------------------------------------------------------------------------------


LSE_BYTES = 4
"""The softmax normalizer of one query head is kept in float32."""

MASK_BYTES = 1
"""Torch keeps one byte for each element that a dropout decides about."""


class Precision(NamedTuple):
    """Bytes of a number in each role. `wide`: norms, rotary tables, losses, accumulators of attention.

    `master`: a float32 copy of the weights that the optimizer keeps. `cast`: the layers' weights are cast on use, and
    autograd keeps each cast matrix until its backward.
    """

    weight: int
    gradient: int
    activation: int
    wide: int = 4
    master: int = 0
    cast: bool = False

    @property
    def state(self) -> int:
        """Of one number that an optimizer keeps: as the weights that it updates, as `torch.optim` makes them."""
        return max(self.weight, self.master)

    @property
    def dtype(self) -> str:
        """The dtype of queries, keys and values."""
        return {8: "float64", 4: "float32", 2: "bfloat16"}[self.activation]


PRECISIONS: dict[str, Precision] = {
    "fp64": Precision(8, 8, 8, wide=8),
    "fp32": Precision(4, 4, 4),
    "bf16": Precision(2, 2, 2),
    "bf16_master": Precision(2, 2, 2, master=4),
    "bf16_cast": Precision(4, 4, 2, cast=True),
}
"""bf16: everything in bf16, optimizer state too. bf16_master: mixed precision as the ZeRO paper counts it
(arXiv:1910.02054, section 3.1: 2 + 2 + 12 bytes a parameter with Adam). bf16_cast: `ringattn train dtype=bf16`."""


class Kept(NamedTuple):
    """Bytes of one token in one layer: of activations as they are, of the same in eight bits, of all that stays."""

    floats: int
    packed: int
    other: int = 0

    def __add__(self, more: object) -> Kept:
        """Both, part by part."""
        assert isinstance(more, Kept)
        return Kept(*(one + two for one, two in zip(self, more, strict=True)))

    @property
    def total(self) -> int:
        """All bytes, nothing packed."""
        return self.floats + self.other


def rows(precision: Precision, elements: int, copies: int = 1) -> Kept:
    """Activations of so many elements a token; in eight bits an element is a byte and a row has a wide scale."""
    return Kept(copies * precision.activation * elements, copies * (elements + precision.wide))


NOTHING = Kept(0, 0)


def normalized(shape: ModelShape, precision: Precision) -> Kept:
    """What a swiglu model's norm keeps: its input, which two operations save, and the normalized input, both wide, its
    output, and a wide scalar. Operations that save the same tensor share it, but each packs a copy of its own."""
    wide, width = precision.wide, shape.width
    output = rows(precision, width)
    return Kept(2 * wide * width, 3 * (width + wide), wide) + output


class LayerParts(NamedTuple):
    """What a layer keeps: before the ring (norm, projection), the attention itself, and after (feed-forward)."""

    before: Kept
    attention: Kept
    after: Kept

    @property
    def all(self) -> Kept:
        """The layer without recomputation."""
        return self.before + self.attention + self.after


def layer_parts(shape: ModelShape, precision: Precision, tiled: bool = False) -> LayerParts:
    """What one layer keeps of one token, in bytes, if nothing is recomputed.

    swiglu, read off autograd (a test holds it to the byte): a norm keeps its input and the normalized input, both wide,
    and a wide scalar; each matrix product keeps its input; rotary tables are made in every layer; V is a view of the
    whole projection, which it keeps alive beside the rotated Q and K; the feed-forward keeps gate and up, silu(gate),
    and the product. gelu, as Korthikanti et al. count it: inputs of both norms, of all four products and of the gelu;
    Q, K, V; a byte each for two dropouts. What attention keeps is never packed (see `SavedActivations`).
    Experts: as many feed-forwards as a token passes, each with its copy of the input and its output, which the router
    weighs (not measured). `tiled`: norm and feed-forward are computed again, tile by tile, from their input.
    """
    item, width = precision.activation, shape.width
    projected = shape.query_width + 2 * shape.kv_width
    lse = max(LSE_BYTES, precision.wide) * shape.heads
    if shape.block == "swiglu":
        norm, tables = normalized(shape, precision), Kept(0, 0, precision.wide * shape.head_dim)
        attention = Kept(0, 0, item * (shape.query_width + shape.kv_width + projected + shape.query_width) + lse)
        feed = rows(precision, shape.ffn, copies=4 * shape.feeds)
        if shape.experts:
            feed += rows(precision, width, copies=2 * shape.feeds) + Kept(0, 0, precision.wide * shape.experts)
        return LayerParts(norm + tables, attention, rows(precision, width) if tiled else norm + feed)
    norm = rows(precision, width, copies=2)
    masks = Kept(0, 0, MASK_BYTES * width)
    attention = Kept(0, 0, item * (projected + shape.query_width) + lse)
    after = rows(precision, width) if tiled else norm + rows(precision, shape.ffn, copies=2) + masks
    return LayerParts(norm, attention, masks + after)


RECOMPUTE = ("none", "selective", "full", "offloaded")
"""selective: all but the attention itself is computed again, so the ring runs as often as before. full: each layer from
its input (Chen et al. 2016, arXiv:1604.06174). offloaded: full, and the inputs wait in host memory."""


class Stored(NamedTuple):
    """Bytes of one token: kept in each layer from its forward to its backward, on the device and on the host.

    `live`: made again for the one layer whose backward runs.
    """

    device: Kept
    host: Kept
    live: Kept


def stored(shape: ModelShape, precision: Precision, recompute: str, tiled: bool = False) -> Stored:
    """What a recomputation policy (see `RECOMPUTE`) keeps of one token in one layer."""
    parts, nothing = layer_parts(shape, precision, tiled), NOTHING
    own_input = rows(precision, shape.width)
    # What the first norm keeps of its input is that input, unless it was made wider.
    shared = own_input.floats if shape.block == "swiglu" and precision.activation == precision.wide else 0
    again = parts.all._replace(floats=parts.all.floats - shared)
    match recompute:
        case "none":
            return Stored(parts.all, nothing, nothing)
        case "selective":
            return Stored(own_input + parts.attention, nothing, max(parts.before, parts.after, key=lambda k: k.total))
        case "full":
            return Stored(own_input, nothing, again)
        case _:
            return Stored(nothing, own_input, again)


SAVED = ("keep", "int8", "fp8")
"""How saved activations are held: as they are, or in eight bits with a scale for each row."""


def held_bytes(kept: Kept, saved: str) -> int:
    """Bytes of one token of `kept`, held as `saved` says (see `SAVED`)."""
    return kept.total if saved == "keep" else kept.packed + kept.other


def head_kept(shape: ModelShape, precision: Precision) -> Kept:
    """Of one token, what the last norm and the output product keep.

    gelu, in 16 bits: 4 times width (Korthikanti et al., section 4.3, without its 4 bytes a logit, see `logits_bytes`).
    """
    if shape.block == "swiglu":
        return normalized(shape, precision)
    return rows(precision, shape.width, copies=2)


def logits_bytes(shape: ModelShape, precision: Precision) -> int:
    """Bytes of one token at the loss: wide log-probabilities, their gradient, and that of the logits, all at once."""
    return 3 * precision.wide * shape.vocabulary


class Moment(NamedTuple):
    """Bytes of one token that live for a moment in the backward of a layer, beside what the layer keeps.

    `tile`: of a token of the one tile of the feed-forward that is computed again.
    """

    feed_forward: int
    attention: int
    tile: int = 0


def backward_bytes(shape: ModelShape, precision: Precision, tiled: bool = False) -> Moment:
    """The two greatest moments of one layer's backward; the greater counts.

    Feed-forward: gradients of the product's factors less what is free by then, of the residual and of the output;
    tiled: gradients of input and output of all tokens, the rest of a tile. Attention: dout and the residual's gradient;
    dq, dk and dv in the accumulator's dtype; one block's results before they are added; normalizer and delta of each
    head. What the layer kept after the attention is free by then.
    """
    item, wide, width, queries = precision.activation, precision.wide, shape.width, shape.query_width
    inner = (2 * shape.ffn if shape.block == "swiglu" else shape.ffn) * shape.feeds
    sums, block = wide * (queries + 2 * shape.kv_width), wide * (queries + shape.kv_width)
    attention = item * (queries + width) + sums + block + 2 * wide * shape.heads
    attention = max(0, attention - layer_parts(shape, precision, tiled).after.total)
    if tiled:
        return Moment(2 * item * width, attention, layer_parts(shape, precision).after.total + item * inner)
    return Moment(item * (inner + 2 * width), attention)


# --- buffers of the attention call ------------------------------------------------------------------------------------


ROWS_PER_RANK = 1024
MOST_RANKS = 16
"""A longer chain is planned as one of so many ranks: its slots do not grow with its length. Where a dilated segment
lies over more, its rows are taken to travel round a ring, whole shards at worst."""

KINDS = ("causal", "full", "window", "dilated")


@dataclass(frozen=True)
class AttentionSetup:
    """Which pairs meet. `window_tokens`: keys before the query, for a causal window; lengths and rates for dilation."""

    kind: str = "causal"
    window_tokens: int = 0
    segment_lengths: tuple[int, ...] = ()
    dilation_rates: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises `InputError` for an unknown kind, and where its sizes are missing."""
        one_of(self.kind, KINDS, "mask")
        if self.kind == "window" and self.window_tokens < 1:
            raise InputError(f"window_tokens={self.window_tokens}: mask=window needs at least 1")
        if self.kind == "dilated":
            Dilated(self.segment_lengths, self.dilation_rates)

    def pairs(self, length: int) -> float:
        """(query, key) pairs of one head over `length` tokens; dilated: the sum of length * segment / rate ** 2."""
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
        """The same with all lengths divided by `cut`, for shards of `rows`; shorter segments become shards."""
        segments = tuple(max(rows, round(length / cut)) for length in self.segment_lengths)
        window = max(1, round(self.window_tokens / cut)) if self.kind == "window" else 0
        return AttentionSetup(self.kind, window, segments, self.dilation_rates)

    def mask(self, length: int, heads: int, kv_heads: int) -> Mask:
        """Over one sequence of `length` tokens."""
        if self.kind == "dilated":
            branches = Dilated(self.segment_lengths, self.dilation_rates, causal=True)
            return branches.mask(length, length, None, None, heads, kv_heads)
        window = (self.window_tokens, 0) if self.kind == "window" else None
        return make_mask(length, length, causal=self.kind != "full", window=window)

    @property
    def layout(self) -> str:
        """The layout that `ring.sequence(layout="auto")` takes."""
        return "zigzag" if self.kind == "causal" else "contiguous"


class StagingBytes(NamedTuple):
    """Bytes of the arena of a forward and of a backward pass, and kept between them for each layer; and the route."""

    forward: float
    backward: float
    kept: float
    route: str

    @property
    def arena(self) -> float:
        """The arena serves both passes and all layers, one after another."""
        return max(self.forward, self.backward)


def staging_bytes(run: TrainingSetup) -> StagingBytes:
    """The slots of one layer's attention on the rank that needs most, in bytes."""
    attention, ranks, shape = run.attention, run.ranks, run.model
    if ranks == 1:
        return StagingBytes(0, 0, 0, "none")
    heads, kv_heads = shape.heads // run.tensor_ranks, shape.kv_heads // run.tensor_ranks
    per_rank = -(-run.tokens // ranks)
    if ranks > MOST_RANKS and max(attention.segment_lengths, default=0) > MOST_RANKS * per_rank:
        forward, backward = ring_slots_bytes(per_rank, kv_heads * shape.head_dim, run.numbers.dtype, causal=False)
        return StagingBytes(forward * run.batch, backward * run.batch, 0, "ring")
    facts = heads, kv_heads, shape.head_dim, run.numbers.dtype, run.schedule
    if per_rank <= ROWS_PER_RANK and ranks <= MOST_RANKS:
        planned, grown = _planned(attention, run.tokens, ranks, *facts), float(run.batch)
    else:
        rows, some = min(ROWS_PER_RANK, per_rank), min(ranks, MOST_RANKS)
        cut = per_rank / rows
        planned, grown = _planned(attention.scaled(cut, rows), rows * some, some, *facts), cut * run.batch
    return StagingBytes(planned.forward * grown, planned.backward * grown, planned.kept * grown, planned.route)


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
    """The greatest arenas of the real plans of all ranks, for a batch of one."""
    layout = make_layout(attention.layout, length, ranks)
    mask = attention.mask(length, heads, kv_heads)
    problem = Problem(layout, layout, mask, 1, heads, kv_heads, head_dim, head_dim, dtype)
    route = choose_route(problem, schedule)
    plans = [[plan_of(problem, route, rank, back) for rank in range(ranks)] for back in (False, True)]
    forward, backward = (max(plan.arena_bytes for plan in both) for both in plans)
    return StagingBytes(forward, backward, max(plan.kept_bytes for plan in plans[0]), route.name)


def ring_slots_bytes(tokens: int, kv_width: int, dtype: str, causal: bool) -> tuple[int, int]:
    """What a ring of at least four ranks takes, in closed form: bytes (forward, backward) for `tokens` rows of a rank.

    M is K and V of a shard. Forward two slots M: one is read or sent while the next arrives. Backward two M and three
    sums (computed, sent, received) in the accumulator's dtype. A causal zigzag sends only what later ranks read, so a
    half of the own shard is packed beside the slots: M / 2 more in both.
    """
    item = ITEM_BYTES[dtype]
    shard, sums = 2 * tokens * kv_width * item, 2 * tokens * kv_width * max(4, item)
    packed = shard // 2 if causal else 0
    return 2 * shard + packed, 2 * shard + packed + 3 * sums


# --- all of a rank ----------------------------------------------------------------------------------------------------


OPTIMIZERS = ("adamw", "adamw8bit", "adam_mini", "lion", "adafactor", "sgd", "sgd_momentum")
OFFLOADS = ("none", "optimizer", "parameters")
DATA = ("shard", "whole")
TOKEN_BYTES = 8
"""A token, a label or a position is an int64."""

QUANTIZED_BLOCK = 256
"""Elements that share one float32 scale in 8-bit optimizer states (bitsandbytes and torchao)."""

GATHERED_LAYERS = 2
"""Layers whose whole weights a rank holds under ZeRO 3: the one that runs, and the next, fetched meanwhile."""


@dataclass(kw_only=True)
class TrainingSwitches:
    """The keys of `ringattn plan` that say how a model is trained, declared once for the command and the formulas.

    The texts are lines of `ringattn plan --help`.
    """

    schedule: str = schedule_option()
    precision: str = option("bf16_master", "of weights and activations; master: fp32 copy", choices=tuple(PRECISIONS))
    optimizer: str = option("adamw", "whose state is kept", choices=OPTIMIZERS)
    recompute: str = option("none", "what backward computes again", choices=RECOMPUTE)
    saved_activations: str = option("keep", "how saved activations are held", choices=SAVED)
    zero_stage: int = option(
        0, "ranks share 1: optimizer state, 2: and gradients, 3: and weights (FSDP)", least=0, most=3
    )
    zero_degree: int | None = option(
        None, "ranks that share it (the FSDP group); the ring's if not set", least=1, most=MOST
    )
    tensor_ranks: int = option(1, "ranks that cut every matrix (TP); each has a place in a ring", least=1, most=MOST)
    pipeline_ranks: int = option(1, "ranks that have stages of layers (PP)", least=1, most=MOST)
    pipeline_chunks: int = option(1, "stages of each of them, interleaved", least=1, most=MOST)
    micro_batches: int = option(1, "of batch sequences each, one after another in a step", least=1, most=MOST)
    offload: str = option("none", "what waits in host memory", choices=OFFLOADS)
    chunked_loss_tokens: int = option(0, "tokens whose logits exist at once; 0: all", least=0, most=MOST)
    tiled_mlp_tokens: int = option(0, "of a rank's tokens, in a feed-forward at once; 0: all", least=0, most=MOST)
    data: str = option("shard", "of the tokens each rank holds its own, or the whole batch", choices=DATA)
    gradients_kept: bool = option(True, "gradients live through the step, as when they accumulate")
    transients: bool = option(True, "count also what lives for a moment")


@dataclass
class TrainingSetup(TrainingSwitches):
    """One training run: a model, its sequence, and every switch that saves memory.

    `ranks`: that share each sequence; tensor and pipeline parallelism multiply them. `micro_batches`: of `batch`
    sequences each. `transients`: published hand calculations do not count them. `framework_bytes`: what the driver,
    NCCL and the allocator take. Raises `InputError`, key first, for what is unknown or contradicts itself.
    """

    model: ModelShape
    tokens: int = option(MISSING, "of one sequence, over all ranks", least=1)
    ranks: int = option(1, "that share each sequence", least=1)
    batch: int = option(1, "sequences of a micro batch", least=1)
    attention: AttentionSetup = field(default_factory=AttentionSetup)
    framework_bytes: int = 0

    def __post_init__(self) -> None:
        """Check names and limits."""
        check_limits(self)
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
        if not self.gradients_kept and self.micro_batches > 1:
            raise InputError(
                f"gradients_kept=false: gradients of micro_batches={self.micro_batches} accumulate, so they are kept"
            )
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


class Breakdown(NamedTuple):
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
        return sum(self)


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
    gradients, slots = gradient_bytes(run), staging_bytes(run)
    early = gradients if run.gradients_kept else 0.0
    head = gradients if run.gradients_kept else float(min(gradients, share.head * numbers.gradient))
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
    return Account(moment, found[moment], totals, host_bytes(run), staging_bytes(run))

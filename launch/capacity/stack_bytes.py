"""Training memory per rank of an implementation that `stacks` describes, by component and moment of a step.

The layer is a swiglu block: norm, projections, attention, norm, feed-forward. The formulas read the facts of a `Stack`;
all other sizes come from the run.

Guarantees: every figure is a sum of tensors with the facts' bytes. Tests count the tensors of transformers' layers
under torch's context parallelism and compare.
"""

from __future__ import annotations

from typing import NamedTuple

from ringattn.launch.capacity.model_shapes import ModelShape, in_flight
from ringattn.launch.capacity.stacks import Exchange, Stack
from ringattn.launch.capacity.training_bytes import Breakdown, TrainingSetup, data_bytes, optimizer_bytes

ITEM, WIDE = 2, 4
"""Bytes of an activation or a gathered weight, and of a float32 number: every stack computes in 16 bits."""

OUTPUT = Exchange(2, 0)
"""Attention on one rank allocates only its output in forward."""


class LayerBytes(NamedTuple):
    """Bytes per token of one layer.

    `input` is the layer's input. `before`, `attention` and `after` are kept for backward: by norm and projections, by
    attention (with the copies of its output that later products keep in `copies`), and by the feed-forward with its
    norm. `selective` is kept besides the input if every second product is kept. `feed_live`, `forward` and `backward`
    exist only while the feed-forward runs backward, and while attention runs forward and backward.
    """

    input: float
    before: float
    attention: float
    copies: float
    after: float
    selective: float
    feed_live: float
    forward: float
    backward: float

    @property
    def all(self) -> float:
        """Return the bytes that backward needs, without the layer's input."""
        return self.before + self.attention + self.copies + self.after


def layer_bytes(shape: ModelShape, stack: Stack, ranks: int) -> LayerBytes:
    """Return the bytes per token of one layer on a ring of `ranks`.

    Experts: each expert that processes a token keeps a copy of its input and its output, and the router its scores; in
    backward the gradients of both exist. Norms of queries and keys keep a scalar per head.
    """
    width, queries, inner = shape.width, shape.query_width, shape.ffn * shape.feeds
    keys = queries if stack.repeats_kv.value else shape.kv_width
    copies = WIDE * stack.norm_wide.value + ITEM * stack.norm_narrow.value
    norm = copies * width + WIDE + ITEM * width
    heads = 0
    if shape.head_norms:
        heads = copies * (queries + shape.kv_width) + WIDE * (shape.heads + shape.kv_heads)
    routed = ITEM * 2 * shape.feeds * width if shape.experts else 0
    forward = stack.forward.value if ranks > 1 else OUTPUT
    backward = stack.backward.value if ranks > 1 else stack.alone.value

    def passing(exchange: Exchange) -> float:
        per_query = exchange.query + exchange.all_queries * ranks
        return per_query * queries + (exchange.key + exchange.all_keys * ranks) * keys

    return LayerBytes(
        input=ITEM * width,
        before=norm + heads,
        attention=ITEM * (2 * queries + 2 * keys) + WIDE * shape.heads,
        copies=ITEM * stack.output_copies.value * queries if ranks > 1 else 0,
        after=norm + ITEM * stack.feed_kept.value * inner + routed + WIDE * shape.experts,
        selective=ITEM * (width + 2 * queries + shape.kv_width + inner),
        feed_live=ITEM * (width + stack.feed_live.value * inner) + routed,
        forward=passing(forward) - ITEM * queries,
        backward=passing(backward) + ITEM * (width + queries),
    )


def live_bytes(run: TrainingSetup, stack: Stack, layer: LayerBytes) -> tuple[float, float]:
    """Return the bytes per token of the layer whose backward runs: recomputed tensors, and those of attention's call.

    A layer is recomputed up to the last tensor that backward needs. The feed-forward's tensors are freed before
    attention runs backward. A tiled feed-forward has the transient tensors of one tile, which are not counted.
    """
    kept = {"none": layer.all, "selective": layer.selective}.get(run.recompute, 0.0)
    inner = 0.0 if stack.tiles_kept.value else ITEM * stack.feed_kept.value * run.model.ffn * run.model.feeds
    feed = layer.all - kept + (-inner if run.is_tiled else layer.feed_live)
    before = max(0.0, layer.before + layer.attention - (kept - (layer.after if run.recompute == "none" else 0.0)))
    again = layer.forward if run.recompute in ("full", "offloaded") else 0.0
    attention = max(again, layer.backward)
    return (before, attention) if before + attention > feed else (feed, 0.0)


def stack_moments(run: TrainingSetup, stack: Stack) -> dict[str, Breakdown]:
    """Return the breakdown at each moment of a step that may be its peak; see `training_bytes.moments`.

    Optimizers are fused, so the update has no temporary tensors.
    """
    shape, share, numbers, tokens = run.model, run.share, run.numbers, run.kept_tokens
    layer = layer_bytes(shape, stack, run.ranks)
    table = shape.vocabulary * shape.width / run.tensor_ranks
    tables = min(stack.head_gathered.value, 1 if shape.tied or run.pipeline_ranks > 1 else 2) * table
    sharded, on_host = run.zero_stage == 3 and run.degree > 1, run.offload == "parameters"
    whole = stack.pipeline_bytes.value if run.pipeline_ranks > 1 and sharded else 0
    weights = share.parameters * numbers.weight / (run.degree if sharded else 1)
    gathered = 0.0
    if whole:
        gathered = whole * share.parameters
    elif sharded:
        gathered = ITEM * (min(stack.gathered_layers.value, share.layers) * share.layer + tables)
    gradient = stack.gradient_bytes.value or numbers.gradient
    gradients = share.parameters * gradient / (run.degree if run.zero_stage >= 2 else 1)
    if run.offload != "none":
        gradients = 0.0
    if whole:
        gradients += share.parameters * WIDE
    reduced = stack.reduce_bytes.value * share.layer if run.zero_stage >= 2 and run.degree > 1 and not whole else 0.0
    common = {
        "parameters": (0.0 if on_host else weights) + gathered,
        "data": float(data_bytes(run)),
        "optimizer": optimizer_bytes(run) if run.offload == "none" else 0.0,
        "framework": float(run.framework_bytes),
    }
    device = {"none": layer.all, "selective": layer.input + layer.selective, "offloaded": 0.0}
    kept = tokens * share.layers * device.get(run.recompute, layer.input)
    copied = tokens * layer.input if run.recompute in ("offloaded", "none") else 0.0
    flying = in_flight(run.pipeline_ranks, run.pipeline_chunks, run.micro_batches)
    live, attention = (tokens * part for part in live_bytes(run, stack, layer))
    if run.tensor_ranks > 1:  # sequence parallelism gathers the input of a product, and its gradient is whole
        live += 2 * run.rank_tokens * shape.width * ITEM
    rows = min(run.chunked_loss_tokens or run.rank_tokens, run.rank_tokens)
    early = gradients if stack.gradients_stay.value or run.micro_batches > 1 else 0.0
    last = kept / share.layers if flying.first == 1 else kept * flying.first
    passing = {"live_layer": live, "attention": attention}
    return {
        "loss": Breakdown(
            **common, gradients=early, activations=kept * flying.last + copied + tokens * 2 * layer.input,
            logits=rows * stack.logit_bytes.value * shape.vocabulary / run.tensor_ranks,
        ),
        "last layer": Breakdown(
            **common, **passing, gradients=early + reduced, activations=kept * flying.first + copied
        ),
        "first layer": Breakdown(**common, **passing, gradients=gradients + reduced, activations=last + copied),
        "update": Breakdown(**common, gradients=gradients),
    }  # fmt: skip

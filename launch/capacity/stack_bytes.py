"""Training memory per rank of an implementation that `stacks` describes, by component and moment of a step.

The layer is a swiglu block: norm, projections, attention, norm, feed-forward. The formulas read the facts of a `Stack`;
all other sizes come from the run.

Guarantees: every figure is a sum of tensors with the facts' bytes. Tests count the tensors of transformers' layers
under torch's context parallelism and compare.
"""

from __future__ import annotations

from typing import NamedTuple

from ringattn.launch.capacity.model_shapes import ModelShape, in_flight
from ringattn.launch.capacity.pipeline import Passing, backward_states, stage_layers
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
    norm. `selective` is kept besides the input with recompute=selective. `feed_live`, `forward` and `backward`
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
    heads, lse = 0, WIDE * shape.heads
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
        attention=ITEM * (2 * queries + 2 * keys) + lse,
        copies=ITEM * stack.output_copies.value * queries if ranks > 1 else 0,
        after=norm + ITEM * stack.feed_kept.value * inner + routed + WIDE * shape.experts,
        selective=ITEM * ((stack.selective.value or 0) * width + 2 * queries + shape.kv_width + inner) + lse,
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


def kept_bytes(run: TrainingSetup, layer: LayerBytes) -> float:
    """Return the bytes per token that a layer keeps on the device from its forward to its backward."""
    device = {"none": layer.all, "selective": layer.input + layer.selective, "offloaded": 0.0}
    return device.get(run.recompute, layer.input)


def whole_input_bytes(run: TrainingSetup) -> float:
    """Return the bytes of the gathered input of a product, which sequence parallelism splits over tensor ranks."""
    return run.rank_tokens * run.model.width * ITEM if run.tensor_ranks > 1 else 0.0


def passing_bytes(run: TrainingSetup, stack: Stack, layer: LayerBytes) -> dict[str, float]:
    """Return the bytes of the layer whose backward runs, with the gathered input of a product and its gradient."""
    live, attention = (run.kept_tokens * part for part in live_bytes(run, stack, layer))
    return {"live_layer": live + 2 * whole_input_bytes(run), "attention": attention}


def logits(run: TrainingSetup) -> float:
    """Return the number of logits of a rank that exist at the same time."""
    rows = min(run.chunked_loss_tokens or run.rank_tokens, run.rank_tokens)
    return rows * run.model.vocabulary / run.tensor_ranks


def loss_bytes(run: TrainingSetup, stack: Stack) -> int:
    """Return the bytes per logit at the loss."""
    return (stack.split_logit_bytes if run.tensor_ranks > 1 else stack.logit_bytes).value


def stack_moments(run: TrainingSetup, stack: Stack) -> dict[str, Breakdown]:
    """Return the breakdown at each moment of a step that may be its peak; see `training_bytes.moments`.

    Optimizers are fused, so the update has no temporary tensors.
    """
    shape, share, numbers, tokens = run.model, run.share, run.numbers, run.kept_tokens
    layer = layer_bytes(shape, stack, run.ranks)
    table = shape.vocabulary * shape.width / run.tensor_ranks
    tables = min(stack.head_gathered.value, 1 if shape.tied or run.pipeline_ranks > 1 else 2) * table
    sharded, on_host = run.zero_stage == 3 and run.degree > 1, run.offload == "parameters"
    if stack.pipeline_bytes.value and run.pipeline_ranks > 1 and sharded:
        return pipeline_moments(run, stack)
    weights = share.parameters * numbers.weight / (run.degree if sharded else 1)
    gathered = ITEM * (min(stack.gathered_layers.value, share.layers) * share.layer + tables) if sharded else 0.0
    gradient = stack.gradient_bytes.value or numbers.gradient
    gradients = share.parameters * gradient / (run.degree if run.zero_stage >= 2 else 1)
    if run.offload != "none":
        gradients = 0.0
    reduces = run.is_sharded and run.degree > 1
    reduced = stack.reduce_bytes.value * share.layer if reduces else 0.0
    whole = stack.whole_bytes.value * share.parameters if reduces and run.micro_batches > 1 else 0.0
    accumulated = max(gradients, whole)
    common = {
        "parameters": (0.0 if on_host else weights) + gathered,
        "data": float(data_bytes(run)),
        "optimizer": optimizer_bytes(run) if run.offload == "none" else 0.0,
        "framework": float(run.framework_bytes),
    }
    kept = tokens * share.layers * kept_bytes(run, layer)
    copied = tokens * layer.input if run.recompute in ("offloaded", "none") else 0.0
    flying = in_flight(run.pipeline_ranks, run.pipeline_chunks, run.micro_batches)
    whole_input = whole_input_bytes(run)
    early = accumulated if stack.gradients_stay.value or run.micro_batches > 1 else 0.0
    last = kept / share.layers if flying.first == 1 else kept * flying.first
    passing = passing_bytes(run, stack, layer)
    return {
        "loss": Breakdown(
            **common, gradients=early,
            activations=kept * flying.last + copied + tokens * 2 * layer.input + whole_input,
            logits=logits(run) * loss_bytes(run, stack),
        ),
        "last layer": Breakdown(
            **common, **passing, gradients=early + reduced, activations=kept * flying.first + copied
        ),
        "first layer": Breakdown(**common, **passing, gradients=accumulated + reduced, activations=last + copied),
        "update": Breakdown(**common, gradients=gradients),
    }  # fmt: skip


def stage_tensors(run: TrainingSetup, stack: Stack, rank: int, state: Passing) -> tuple[int, int]:
    """Return how many tensors at the ends of a rank's stages, and logits of how many micro batches, a rank has.

    For each micro batch, a stage has a buffer for its input (which counts as the input of a layer while activations are
    kept) and one for the gradient of its output. Gradients that were sent stay, and outputs if the stack keeps them.
    """
    ranks, count, tensors, of_last = run.pipeline_ranks, run.micro_batches, 0, 0
    last = ranks * run.pipeline_chunks - 1
    for chunk, (kept, forwards, backwards) in enumerate(zip(state.kept, state.forwards, state.backwards, strict=True)):
        stage = rank + ranks * chunk
        if stage > 0:
            tensors += count - kept + backwards
        if stage < last:
            tensors += count + (forwards if stack.outputs_stay.value else 0)
        else:
            of_last = forwards
    return tensors, of_last


def pipeline_moments(run: TrainingSetup, stack: Stack) -> dict[str, Breakdown]:
    """Return the largest breakdown of any pipeline rank at each moment of a step (torch's stages with FSDP2).

    A stage keeps weights gathered until its last backward ends: layers in `pipeline_bytes`, or in 16 bits if only the
    ranks of a ring share them; tables in 16 bits. From its first backward to its last, it has whole gradients in
    float32; the 16-bit gradients of a layer exist until they are added. The last stage keeps its logits. The second
    rank has the most layers, and more micro batches in flight than later ones.
    """
    shape, numbers, tokens, ranks = run.model, run.numbers, run.kept_tokens, run.pipeline_ranks
    layer, share, stages = layer_bytes(shape, stack, run.ranks), run.share, run.pipeline_ranks * run.pipeline_chunks
    layers, table = stage_layers(shape.layers, stages), shape.vocabulary * shape.width / run.tensor_ranks
    kept, boundary, passing = tokens * kept_bytes(run, layer), tokens * layer.input, passing_bytes(run, stack, layer)
    copied = boundary if run.recompute in ("offloaded", "none") else 0.0
    optimizer = optimizer_bytes(run) if run.offload == "none" else 0.0
    of_layers = stack.pipeline_bytes.value if run.degree > run.ranks else ITEM
    largest: dict[str, Breakdown] = {}

    def add(moment: str, breakdown: Breakdown) -> None:
        if moment not in largest or breakdown.total > largest[moment].total:
            largest[moment] = breakdown

    for rank in sorted({0, 1, ranks - 1}):
        tables = [table * (stage in (0, stages - 1)) for stage in range(rank, stages, ranks)]
        counts = [count * share.layer + extra for count, extra in zip(layers[rank::ranks], tables, strict=True)]
        count = sum(counts)
        weights = 0.0 if run.offload == "parameters" else count * numbers.weight / run.degree
        sharded = count * numbers.gradient / run.degree if run.offload == "none" else 0.0
        fixed = {
            "data": float(data_bytes(run)), "optimizer": optimizer * count / share.parameters,
            "framework": float(run.framework_bytes),
        }  # fmt: skip
        for state in backward_states(rank, ranks, run.pipeline_chunks, run.micro_batches):
            live = [chunk == state.chunk or done < run.micro_batches for chunk, done in enumerate(state.backwards)]
            gathered = sum(
                of_layers * (size - extra) + ITEM * extra
                for size, extra, is_live in zip(counts, tables, live, strict=True)
                if is_live
            )
            common = {"parameters": weights + gathered, **fixed}
            tensors, of_last = stage_tensors(run, stack, rank, state)
            inputs = kept * sum(
                number * batches for number, batches in zip(layers[rank::ranks], state.kept, strict=True)
            )
            activations = inputs + boundary * tensors + copied + ITEM * of_last * logits(run)
            gradients = sharded if stack.gradients_stay.value else 0.0
            gradients += WIDE * sum(
                size for size, done, is_live in zip(counts, state.backwards, live, strict=True) if done and is_live
            )
            if state.is_start and rank + ranks * state.chunk == stages - 1:
                add("loss", Breakdown(
                    **common, gradients=gradients, logits=logits(run) * loss_bytes(run, stack),
                    activations=activations + 2 * boundary + whole_input_bytes(run),
                ))  # fmt: skip
            moment, of_layer = ("last layer", 0.0) if state.is_start else ("first layer", kept)
            add(moment, Breakdown(
                **common, **passing, gradients=gradients + ITEM * share.layer, activations=activations + of_layer
            ))  # fmt: skip
        add("update", Breakdown(**fixed, parameters=weights, gradients=sharded))
    return largest

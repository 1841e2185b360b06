"""Bytes per token that a layer keeps from its forward to its backward, and at the largest moments of its backward.

They are counted by the part of the layer that keeps them. Attention is tiled, so scores are not kept. The swiglu block
is the model of `ringattn train`, counted tensor by tensor as autograd keeps it. The gelu block follows Korthikanti et
al. 2022 (arXiv:2205.05198, section 4.1): 34 bytes times width in 16-bit precision, without scores.

Guarantees: every figure is a formula of sizes, in a function that gives its source.
"""

from __future__ import annotations

from typing import NamedTuple

from ringattn.launch.capacity.model_shapes import ModelShape

LSE_BYTES = 4
"""The log-sum-exp of one query head is kept in float32."""

MASK_BYTES = 1
"""Torch keeps one byte for each element of a dropout mask."""


class Precision(NamedTuple):
    """Bytes of one number of each kind: of a weight, a gradient, an activation and so on.

    `wide` is for norms, rotary tables, losses and the accumulators of attention. `master` is the float32 copy of the
    weights that the optimizer keeps. If `cast` is set, the weights of layers are cast on use, and autograd keeps each
    cast matrix until its backward.
    """

    weight: int
    gradient: int
    activation: int
    wide: int = 4
    master: int = 0
    cast: bool = False

    @property
    def state(self) -> int:
        """Return the bytes of one number of optimizer state, which has the dtype of the weight, as in `torch.optim`."""
        return max(self.weight, self.master)

    @property
    def dtype(self) -> str:
        """Return the dtype of queries, keys and values."""
        return {8: "float64", 4: "float32", 2: "bfloat16"}[self.activation]


PRECISIONS: dict[str, Precision] = {
    "fp64": Precision(8, 8, 8, wide=8),
    "fp32": Precision(4, 4, 4),
    "bf16": Precision(2, 2, 2),
    "bf16_master": Precision(2, 2, 2, master=4),
    "bf16_cast": Precision(4, 4, 2, cast=True),
}
"""bf16: everything in bf16, including the optimizer state. bf16_master: mixed precision as the ZeRO paper counts it
(arXiv:1910.02054, section 3.1: 2 + 2 + 12 bytes a parameter with Adam). bf16_cast: `ringattn train dtype=bf16`."""


class Kept(NamedTuple):
    """Bytes that one layer keeps per token.

    `floats` counts the activations that can be packed in eight bits, `packed` counts them after packing, and `other`
    counts the tensors that are never packed.
    """

    floats: int
    packed: int
    other: int = 0

    def __add__(self, more: object) -> Kept:
        """Add the bytes of each field."""
        assert isinstance(more, Kept)
        return Kept(*(left + right for left, right in zip(self, more, strict=True)))

    @property
    def total(self) -> int:
        """Return all bytes if nothing is packed."""
        return self.floats + self.other


def rows(precision: Precision, elements: int, copies: int = 1) -> Kept:
    """Return the bytes of `copies` rows of `elements` activations. In eight bits, each row also has a wide scale."""
    return Kept(copies * precision.activation * elements, copies * (elements + precision.wide))


NOTHING = Kept(0, 0)


def normalized(shape: ModelShape, precision: Precision) -> Kept:
    """Return the bytes that a norm of a swiglu model keeps per token.

    Two operations save the norm's input. The norm also keeps the normalized input, its output and a scalar. All are
    wide except the output. Operations that save the same tensor share it, but if it is packed, each has a copy.
    """
    wide, width = precision.wide, shape.width
    output = rows(precision, width)
    return Kept(2 * wide * width, 3 * (width + wide), wide) + output


class LayerParts(NamedTuple):
    """Bytes that a layer keeps per token before attention (norm, projection), in it, and after it (feed-forward)."""

    before: Kept
    attention: Kept
    after: Kept

    @property
    def all(self) -> Kept:
        """Return the bytes that the layer keeps without recomputation."""
        return self.before + self.attention + self.after


def layer_parts(shape: ModelShape, precision: Precision, tiled: bool = False, groups: int = 1) -> LayerParts:
    """Return the bytes that one layer keeps per token if nothing is recomputed.

    swiglu, counted as autograd keeps it (a test compares every byte): a norm keeps its input and the normalized input,
    both wide, and a wide scalar. Each matrix product keeps its input. Rotary tables are computed in every layer. V is a
    view of the whole projection and keeps it alive, in addition to the rotated Q and K. The feed-forward keeps gate and
    up, silu(gate), and the product.

    gelu, counted as in Korthikanti et al.: the layer keeps the inputs of both norms, of all four products and of the
    gelu; Q, K and V; and one byte per element for each of two dropouts. The tensors that attention keeps are never
    packed (see `SavedActivations`).

    Experts: the layer keeps one feed-forward for each expert that processes the token, with a copy of the input and
    with the output that the router weights (not measured). If `tiled`, norm and feed-forward are recomputed from their
    input, tile by tile. In several `groups` of heads, norm and projection are recomputed from the layer's input.
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
        if groups > 1:
            attention = Kept(0, 0, item * shape.query_width + lse)
        before = rows(precision, width) if groups > 1 else norm + tables
        return LayerParts(before, attention, rows(precision, width) if tiled else norm + feed)
    norm = rows(precision, width, copies=2)
    masks = Kept(0, 0, MASK_BYTES * width)
    attention = Kept(0, 0, item * (projected + shape.query_width) + lse)
    after = rows(precision, width) if tiled else norm + rows(precision, shape.ffn, copies=2) + masks
    return LayerParts(norm, attention, masks + after)


RECOMPUTE = ("none", "selective", "full", "offloaded")
"""selective: everything except attention is recomputed, so the ring does not run again. full: each layer is recomputed
from its input (Chen et al. 2016, arXiv:1604.06174). offloaded: full, with the inputs in host memory."""


class Stored(NamedTuple):
    """Bytes per token that each layer keeps from its forward to its backward, on the device and on the host.

    `live` counts the activations that are recomputed in backward. Only the layer whose backward runs has them.
    """

    device: Kept
    host: Kept
    live: Kept


def stored(shape: ModelShape, precision: Precision, recompute: str, tiled: bool = False, groups: int = 1) -> Stored:
    """Return the bytes that one layer keeps per token under a recomputation policy (see `RECOMPUTE`)."""
    parts, nothing = layer_parts(shape, precision, tiled, groups), NOTHING
    layer_input = rows(precision, shape.width)
    # The first norm keeps the layer's input itself, unless it converts the input to a wider dtype.
    is_shared = (shape.block == "swiglu" and precision.activation == precision.wide) or groups > 1
    shared = layer_input.floats if is_shared else 0
    again = parts.all._replace(floats=parts.all.floats - shared)
    match recompute:
        case "none":
            return Stored(parts.all, nothing, nothing)
        case "selective" if groups > 1:  # the input of the feed-forward is kept, and Q, K and V are not
            is_kept = tiled or precision.activation == precision.wide
            live = parts.after._replace(floats=parts.after.floats - (layer_input.floats if is_kept else 0))
            return Stored(layer_input + layer_input + parts.attention, nothing, live)
        case "selective":
            live = max(parts.before, parts.after, key=lambda part: part.total)
            return Stored(layer_input + parts.attention, nothing, live)
        case "full":
            return Stored(layer_input, nothing, again)
        case _:
            return Stored(nothing, layer_input, again)


SAVED = ("keep", "int8", "fp8")
"""How saved activations are stored: unchanged, or in eight bits with a scale for each row."""


def held_bytes(kept: Kept, saved: str) -> int:
    """Return the bytes of `kept` if activations are stored as `saved` (see `SAVED`)."""
    return kept.total if saved == "keep" else kept.packed + kept.other


def head_kept(shape: ModelShape, precision: Precision, chunked: bool = False) -> Kept:
    """Return the bytes that the last norm and the output product keep per token.

    If the loss is computed in chunks (`chunked`), so is the last norm, and only its input is kept.

    For gelu in 16 bits they are 4 times width, as in Korthikanti et al., section 4.3. The 4 bytes per logit of that
    section are counted by `logits_bytes`.
    """
    if shape.block == "swiglu":
        return rows(precision, shape.width) if chunked else normalized(shape, precision)
    return rows(precision, shape.width, copies=2)


def logits_bytes(shape: ModelShape, precision: Precision) -> int:
    """Return the bytes per token at the loss: log-probabilities, their gradient and the logits' gradient, all wide."""
    return 3 * precision.wide * shape.vocabulary


class Moment(NamedTuple):
    """Transient bytes per token in the backward of a layer, in addition to the bytes that the layer keeps.

    `feed_forward` and `attention` are the two largest moments, in bytes per token of the rank. With groups of heads,
    `projection` is a third. `tile` is in bytes per token of the one tile of the feed-forward that is recomputed.
    """

    feed_forward: int
    attention: int
    projection: int = 0
    tile: int = 0


def block_bytes(shape: ModelShape, precision: Precision, zigzag: bool) -> int:
    """Return the bytes per token of a shard that the backward of attention on one block allocates.

    They are dq, dk and dv, before they are added. In 16 bits, the kernel is cuDNN's, which also takes dq in the
    accumulator's dtype, and dk and dv of all query heads (cudnn-frontend, CompositeSDPABackwardNode). Blocks of
    `zigzag` layouts have half of the queries or half of the keys of a shard, others all of them.
    """
    item, wide = precision.activation, precision.wide
    of_queries, of_keys = item * shape.query_width, 2 * item * shape.kv_width
    if item < wide:
        of_queries += wide * shape.query_width
        of_keys += 2 * item * shape.query_width if shape.kv_width < shape.query_width else 0
    return max(of_queries + of_keys // 2, of_queries // 2 + of_keys) if zigzag else of_queries + of_keys


def packing_bytes(shape: ModelShape, precision: Precision, saved: str) -> int:
    """Return the transient bytes per token while the feed-forward packs the input of its last product.

    Gate and up, the product, the layer's input and the residual exist, and the wide tensors of `pack_rows`: a copy if
    the product is narrower, the scaled elements and in int8 the rounded ones.
    """
    item, wide, inner = precision.activation, precision.wide, shape.ffn * shape.feeds
    projected = 2 * inner if shape.block == "swiglu" else inner
    wide_rows = (item < wide) + (2 if saved == "int8" else 1)
    return item * (projected + inner + 2 * shape.width) + wide * wide_rows * inner


def backward_bytes(
    shape: ModelShape,
    precision: Precision,
    tiled: bool = False,
    groups: int = 1,
    zigzag: bool = True,
    saved: str = "keep",
) -> Moment:
    """Return the transient bytes at the two largest moments of one layer's backward.

    Feed-forward: the gradients of the product's factors and of the output exist; the latter is that of the residual. If
    the feed-forward is tiled, only the gradients of its input and output exist for all tokens, and the others for one
    tile.
    Attention: dout and the gradient of the residual exist; dq, dk and dv in the accumulator's dtype; one block (see
    `block_bytes`); and the log-sum-exp and delta of each head. The activations that the layer kept after attention have
    been freed, and are subtracted. In several `groups` of heads, only one group has
    these tensors and its projections, and there is also the sum of the gradients of the layer's input. Projection: the
    gradient of the projections of one group becomes that of the layer's input.

    If the layer keeps its activations packed (`saved`), less is freed. The product's factors are unpacked, one of them
    while its wide values exist, and their gradients are computed next to them.
    """
    item, wide, width, queries = precision.activation, precision.wide, shape.width, shape.query_width
    inner = (2 * shape.ffn if shape.block == "swiglu" else shape.ffn) * shape.feeds
    projected = queries + 2 * shape.kv_width
    block = block_bytes(shape, precision, zigzag)
    sums = wide * projected
    attention = item * (queries + width) + sums + block + 2 * wide * shape.heads
    if groups > 1:
        attention = item * 2 * width + (item * (queries + projected) + sums + block + 2 * wide * shape.heads) // groups
    projection = item * 3 * width + item * (queries + projected) // groups if groups > 1 else 0
    freed = held_bytes(layer_parts(shape, precision, tiled, groups).after, saved)
    attention, projection = max(0, attention - freed), max(0, projection - freed)
    if tiled:
        tile = layer_parts(shape, precision).after.total + item * inner
        return Moment(2 * item * width, attention, projection, tile)
    if saved == "keep":
        return Moment(item * (inner + width), attention, projection)
    product = shape.ffn * shape.feeds
    unpacking = item * (inner - product) + (2 * wide + (item if item < wide else 0)) * product
    unpacked = item * product + max(unpacking, 2 * item * inner) - held_bytes(rows(precision, product), saved)
    return Moment(unpacked + item * width, attention, projection)

"""What the forward pass of a decoder-only transformer leaves for its backward, and what lives for a moment beside it.

Bytes of one token in one layer, by the part of the layer that keeps them. Attention is tiled, so scores are not kept.
The swiglu block is the model of `ringattn train`, tensor by tensor as autograd holds it; the gelu block is the account
of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1): 34 bytes times width in 16-bit precision, without scores.
"""

from __future__ import annotations

from typing import NamedTuple

from ringattn.errors import one_of
from ringattn.launch.capacity.model_shapes import ModelShape

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
    Q, K, V; a byte each for two dropouts. What attention keeps is never packed (`launch.saved_activations` says why).
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
    """What a recomputation policy (see `RECOMPUTE`) keeps of one token in one layer. Raises `InputError` if unknown."""
    parts, nothing = layer_parts(shape, precision, tiled), NOTHING
    own_input = rows(precision, shape.width)
    # What the first norm keeps of its input is that input, unless it was made wider.
    shared = own_input.floats if shape.block == "swiglu" and precision.activation == precision.wide else 0
    again = parts.all._replace(floats=parts.all.floats - shared)
    match one_of(recompute, RECOMPUTE, "recompute"):
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
    """Bytes of one token of `kept`, held as `saved` says (see `SAVED`). Raises `InputError` if unknown."""
    return kept.total if one_of(saved, SAVED, "saved_activations") == "keep" else kept.packed + kept.other


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

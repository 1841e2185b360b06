"""Projected heads in a single pass: RMS normalization, rotary positions, and the store to their destination.

The epilogue finishes heads that a matrix product has written to memory. The projection multiplies x by the rows of the
weight and finishes the heads in registers, which saves writing and reading the product once.
A head is kept as two half tiles of the elements that rotate together: its first and second half ("neox"), or its even
and odd elements ("interleaved"). So both styles have the same float32 arithmetic in registers. Only the loads and
stores differ, and both move whole vectors.
Guarantees: functions return launches and do not run them (`LaunchCall`); the gradient is deterministic, without
atomics; sums are float32, and products of float32 inputs are not rounded to tf32.
The bias is part of the matrix product. If it were added to the rounded product, the result would be rounded twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.launch import LaunchCall, padded

# --- the epilogue ----------------------------------------------------------------------------------------------------


BLOCK_TOKENS = 32
COUNTS = ["total", "tokens", "heads", "turned"]  # numbers of rows: their divisibility makes no load wider


class Finish(NamedTuple):
    """The destinations of a projection's heads, with the parameters of the normalization and the rotation.

    The first heads are *turned* (normalized and rotated), the other heads are not.

    `first`: the destination of the turned heads, (batch, tokens, turned, dim), any strides with a contiguous last
    dimension; `second`: the destination of the rest, in the same form. In a backward pass they contain the gradients.
    `norm`: (dim,), the weight of the RMS normalization, with `eps`. `cos`, `sin`: (tokens, dim / 2) float32,
    contiguous, for the rotation, whose style is `interleaved` or not. If `norm`, or `cos` and `sin`, are None, heads
    are not normalized, or not rotated.
    """

    first: Tensor
    second: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 1e-6
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False

    @property
    def heads(self) -> int:
        """The number of heads of the projection."""
        return self.first.shape[2] + (0 if self.second is None else self.second.shape[2])

    @property
    def dim(self) -> int:
        """The number of elements of a head; even."""
        return self.first.shape[3]

    def args(self) -> tuple[Any, ...]:
        """Return the last arguments of every kernel of this file."""
        # Without `second` all heads are turned, and the strides of this stand-in are not read.
        second = self.first if self.second is None else self.second
        return (
            self.norm, self.cos, self.sin, self.first, self.second,
            self.first.shape[0] * self.first.shape[1], self.first.shape[1], self.heads, self.first.shape[2], self.eps,
            *self.first.stride()[:3], *second.stride()[:3],
        )  # fmt: skip

    def meta(self) -> dict[str, int]:
        """Return the compile-time constants. Elements at a distance of APART rotate together: 1, or half a head."""
        return {"DIM": self.dim, "HALF": padded(self.dim // 2), "APART": 1 if self.interleaved else self.dim // 2}


def epilogue_call(raw: Tensor, finish: Finish) -> LaunchCall:
    """Return the launch that finishes the heads in `raw`, a product (batch, tokens, heads * dim), contiguous."""
    return LaunchCall(epilogue, (_programs(finish),), (raw, raw.stride(1), *finish.args()), _meta(finish))


def epilogue_grad_call(raw: Tensor | None, grads: Finish, draw: Tensor, dnorm: Tensor | None) -> LaunchCall:
    """Return the launch that computes the gradient of `raw` from the gradients of the finished heads.

    `raw`: as in `epilogue_call`, needed if there is a norm. `draw`: shaped like `raw`, receives its gradient; it may be
    some columns of a wider tensor. `dnorm`: the result of `norm_parts`; its sum over the first two dimensions is the
    gradient of the norm's weight.
    """
    # `raw` is contiguous if given; without a norm it is not read.
    raw_row = grads.heads * grads.dim
    args = (raw, raw_row, draw, draw.stride(1), dnorm, *grads.args())
    return LaunchCall(epilogue_grad, (_programs(grads),), args, _meta(grads))


def norm_parts(finish: Finish) -> Tensor:
    """Allocate a (blocks of tokens, turned, dim) float32 tensor for `epilogue_grad_call`."""
    # A row of sums for each block of tokens. The caller adds them in a fixed order.
    blocks = _programs(finish) // finish.heads
    return finish.first.new_empty(blocks, finish.first.shape[2], finish.dim, dtype=torch.float32)


def _programs(finish: Finish) -> int:
    # A program for each head and block of tokens.
    return triton.cdiv(finish.first.shape[0] * finish.first.shape[1], BLOCK_TOKENS) * finish.heads


def _meta(finish: Finish) -> dict[str, int]:
    return {**finish.meta(), "BLOCK_TOKENS": BLOCK_TOKENS, "num_warps": 4, "num_stages": 1}


@triton.jit
def place(pointer, batch_stride, token_stride, head_stride, token, tokens, head):
    """Return pointers to a head's first element for each flat index `token` of a (batch, tokens, heads, dim) tensor."""
    # The flat index counts the tokens of all batches: index // tokens is the batch, index % tokens the token.
    row = (token // tokens).to(tl.int64) * batch_stride + (token % tokens).to(tl.int64) * token_stride
    return (pointer + row + head.to(tl.int64) * head_stride)[:, None]


@triton.jit
def load_halves(row, inside, DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr):
    """Load the float32 half tiles of the heads at the pointers `row` (tokens, 1); 0 for tokens not `inside`."""
    if APART == 1:
        column = tl.arange(0, 2 * HALF)[None, :]
        # Interleaved: a = elements 0 2 4 ..., b = elements 1 3 5 ...
        both = tl.load(row + column, mask=inside & (column < DIM), other=0.0).to(tl.float32)
        # Load whole vectors at once, then split them in registers.
        a, b = tl.split(tl.reshape(both, (row.shape[0], HALF, 2)))
    else:
        # APART is half a head here, and HALF is APART rounded up to a power of two.
        half = tl.arange(0, HALF)[None, :]
        real = inside & (half < APART)
        a = tl.load(row + half, mask=real, other=0.0).to(tl.float32)
        b = tl.load(row + half + APART, mask=real, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_halves(row, a, b, inside, DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr):
    """Store half tiles, the inverse of `load_halves`, in the dtype that `row` points to."""
    if APART == 1:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.interleave(a.to(row.dtype.element_ty), b.to(row.dtype.element_ty))
        tl.store(row + column, both, mask=inside & (column < DIM))
    else:
        half = tl.arange(0, HALF)[None, :]
        real = inside & (half < APART)
        tl.store(row + half, a.to(row.dtype.element_ty), mask=real)
        tl.store(row + half + APART, b.to(row.dtype.element_ty), mask=real)


@triton.jit
def load_weight(weight, DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr):
    """Load the half tiles (1, HALF) of a weight that all tokens share."""
    return load_halves(weight + tl.zeros((1, 1), tl.int32), tl.full((1, 1), 1, tl.int1), DIM, HALF, APART)


@triton.jit
def load_angles(cos, sin, token, tokens, inside, DIM: tl.constexpr, HALF: tl.constexpr):
    """Load the cosines and sines of the tokens with the flat indices `token`."""
    half = tl.arange(0, HALF)[None, :]
    # An angle for each pair of elements, the same for all heads and batches.
    angle = (token % tokens)[:, None] * (DIM // 2) + half
    real = inside & (half < DIM // 2)
    return tl.load(cos + angle, mask=real, other=0.0), tl.load(sin + angle, mask=real, other=0.0)


@triton.jit
def finish_heads(
    a, b, token, head, norm, cos, sin, first, second,
    total, tokens, heads, turned, eps,
    first_batch, first_token, first_head, second_batch, second_token, second_head,
    DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Finish the float32 half tiles `a` and `b` of a head and store them."""
    inside = (token < total)[:, None]
    # Heads from `turned` on are neither normalized nor rotated.
    if head < turned:
        if norm is not None:
            # RMS normalization: x / sqrt(mean(x^2) + eps) * norm.
            root = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
            of_a, of_b = load_weight(norm, DIM, HALF, APART)
            a *= root * of_a
            b *= root * of_b
        if cos is not None:
            c, s = load_angles(cos, sin, token, tokens, inside, DIM, HALF)
            # Rotation of each pair (a, b) by its angle.
            a, b = a * c - b * s, b * c + a * s
        to = place(first, first_batch, first_token, first_head, token, tokens, head)
        store_halves(to, a, b, inside, DIM, HALF, APART)
    elif second is not None:
        to = place(second, second_batch, second_token, second_head, token, tokens, head - turned)
        store_halves(to, a, b, inside, DIM, HALF, APART)


@triton.jit(do_not_specialize=COUNTS)
def epilogue(
    raw, raw_row, norm, cos, sin, first, second,
    total, tokens, heads, turned, eps,
    first_batch, first_token, first_head, second_batch, second_token, second_head,
    DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Finish a head of BLOCK_TOKENS tokens. Heads vary fastest, so that a row of `raw` is read at once."""
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = raw + (token.to(tl.int64) * raw_row + head * DIM)[:, None]
    a, b = load_halves(row, (token < total)[:, None], DIM, HALF, APART)
    finish_heads(
        a, b, token, head, norm, cos, sin, first, second,
        total, tokens, heads, turned, eps,
        first_batch, first_token, first_head, second_batch, second_token, second_head,
        DIM, HALF, APART,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def epilogue_grad(
    raw, raw_row, draw, draw_row, dnorm, norm, cos, sin, first, second,
    total, tokens, heads, turned, eps,
    first_batch, first_token, first_head, second_batch, second_token, second_head,
    DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Read gradients from `first` and `second`, and write the gradient of `raw` to `draw`: the transpose of `epilogue`.

    With y = raw / rms and g the un-rotated gradient: dnorm = sum of g * y, and the gradient of `raw` is
    (g * norm - y * mean(g * norm * y)) / rms.
    """
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads
    token = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = (token < total)[:, None]
    # Use int64 from here on: token times row stride exceeds int32 for long sequences.
    to = draw + (token.to(tl.int64) * draw_row + head * DIM)[:, None]
    if head < turned:
        source = place(first, first_batch, first_token, first_head, token, tokens, head)
        a, b = load_halves(source, inside, DIM, HALF, APART)
        # The forward order reversed: rotation first, then the norm.
        if cos is not None:
            c, s = load_angles(cos, sin, token, tokens, inside, DIM, HALF)
            # The transpose rotates the gradient back.
            a, b = a * c + b * s, b * c - a * s
        if norm is not None:
            row = raw + (token.to(tl.int64) * raw_row + head * DIM)[:, None]
            # Compute y = raw / rms again from the product.
            y_a, y_b = load_halves(row, inside, DIM, HALF, APART)
            root = tl.rsqrt((tl.sum(y_a * y_a, 1) + tl.sum(y_b * y_b, 1)) / DIM + eps)[:, None]
            y_a *= root
            y_b *= root
            # Each program writes the sum over its tokens separately: without atomics the bits repeat.
            part = dnorm + (block.to(tl.int64) * turned + head) * DIM + tl.zeros((1, 1), tl.int32)
            whole = tl.full((1, 1), 1, tl.int1)
            store_halves(part, tl.sum(a * y_a, 0)[None, :], tl.sum(b * y_b, 0)[None, :], whole, DIM, HALF, APART)
            of_a, of_b = load_weight(norm, DIM, HALF, APART)
            a *= of_a
            b *= of_b
            # mean(g * norm * y), the component of the gradient along y, which normalization removes.
            along = ((tl.sum(a * y_a, 1) + tl.sum(b * y_b, 1)) / DIM)[:, None]
            a, b = root * (a - y_a * along), root * (b - y_b * along)
        store_halves(to, a, b, inside, DIM, HALF, APART)
    elif second is not None:
        source = place(second, second_batch, second_token, second_head, token, tokens, head - turned)
        a, b = load_halves(source, inside, DIM, HALF, APART)
        store_halves(to, a, b, inside, DIM, HALF, APART)


# --- the projection --------------------------------------------------------------------------------------------------


GROUP = 8  # blocks of tokens that share the weights in the L2 cache


def projection_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, finish: Finish, rows: Tensor | None = None
) -> LaunchCall:
    """Return the launch that projects x (batch, tokens, model) with `weight` (heads * dim, model).

    The last dimensions are contiguous. `bias`: (heads * dim,), added in float32. `rows`: int64, contiguous, the tokens
    of x to project, one for each token of the destinations in `finish`; None for all.
    """
    tokens = finish.first.shape[0] * finish.first.shape[1]
    config = _config(x.dtype, finish)
    args = (x, weight, bias, rows, x.shape[2], x.stride(0), x.stride(1), weight.stride(0), *finish.args())
    grid = (triton.cdiv(tokens, config["BLOCK_TOKENS"]) * finish.heads,)
    return LaunchCall(project_heads, grid, args, {**finish.meta(), **config, "GROUP": GROUP})


def _config(dtype: torch.dtype, finish: Finish) -> dict[str, int]:
    """Return tile sizes that compile without spills on sm_80 and sm_90; they are not yet tuned for speed."""
    if dtype == torch.float32:
        return {"BLOCK_TOKENS": 32, "BLOCK_MODEL": 32, "num_warps": 8 if finish.dim > 128 else 4, "num_stages": 2}
    return {"BLOCK_TOKENS": 64 if finish.dim > 128 else 128, "BLOCK_MODEL": 64, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=COUNTS)
def project_heads(
    x, weight, bias, rows, model, x_batch, x_token, weight_row,
    norm, cos, sin, first, second,
    total, tokens, heads, turned, eps,
    first_batch, first_token, first_head, second_batch, second_token, second_head,
    DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_MODEL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Project and finish a head of BLOCK_TOKENS tokens; see `Finish` for the arguments from `norm` on."""
    # GROUP blocks of tokens and all heads form a band. Within a band, blocks vary fastest, so programs that run at the
    # same time share the weights of a head (L2 cache). The last band may have fewer blocks.
    #    program   0      1      2      3      ...      GROUP 2
    #    block     0      1      0      1
    #    head      0      0      1      1
    blocks = tl.cdiv(total, BLOCK_TOKENS)
    band = tl.program_id(0) // (GROUP * heads)
    height = tl.minimum(blocks - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * heads)
    head = within // height
    flat_token = (band * GROUP + within % height) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = (flat_token < total)[:, None]
    token = (flat_token % tokens).to(tl.int64)
    if rows is not None:
        token = tl.load(rows + token, mask=flat_token < total, other=0)
    from_x = x + ((flat_token // tokens).to(tl.int64) * x_batch + token * x_token)[:, None]

    # Both half tiles of a head are columns of the same product: the matrix unit takes larger steps, and elements that
    # rotate together end in the same thread.
    across = tl.arange(0, 2 * HALF)
    if APART == 1:
        # Columns: interleaved pairs in memory order, 0 1 2 3 ...; otherwise the first half head and then the second,
        # each padded.
        element, real = across, across < DIM
    else:
        element, real = across // HALF * APART + across % HALF, across % HALF < APART
    from_weight = weight + ((head * DIM + element).to(tl.int64) * weight_row)[None, :]
    both = tl.zeros((BLOCK_TOKENS, 2 * HALF), tl.float32)
    for start in range(0, model, BLOCK_MODEL):
        column = start + tl.arange(0, BLOCK_MODEL)
        in_model = column < model
        piece = tl.load(from_x + column[None, :], mask=inside & in_model[None, :], other=0.0)
        # The weight is (heads * dim, model): read transposed, (model, columns of the head).
        of_head = tl.load(from_weight + column[:, None], mask=real[None, :] & in_model[:, None], other=0.0)
        both = tl.dot(piece, of_head, both, input_precision="ieee")
    if APART == 1:
        a, b = tl.split(tl.reshape(both, (BLOCK_TOKENS, HALF, 2)))
    else:
        a, b = tl.split(tl.permute(tl.reshape(both, (BLOCK_TOKENS, 2, HALF)), (0, 2, 1)))
    if bias is not None:
        of_a, of_b = load_weight(bias + head * DIM, DIM, HALF, APART)
        a += of_a
        b += of_b
    finish_heads(
        a, b, flat_token, head, norm, cos, sin, first, second,
        total, tokens, heads, turned, eps,
        first_batch, first_token, first_head, second_batch, second_token, second_head,
        DIM, HALF, APART,
    )  # fmt: skip

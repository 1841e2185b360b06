"""Projected heads in one pass: RMS normalization, rotary positions, and the way to their place.

The epilogue finishes heads that a matrix product left in memory. The projection multiplies x by the rows of the weight
and finishes the heads before they leave the registers; it saves writing and reading the product once.
A head is held as two half tiles, the elements that rotate against each other: its first and second half ("neox"), or
its even and odd elements ("interleaved"). So both styles are the same arithmetic, in registers, in float32; only what
loads and stores them knows which it is, and moves whole vectors either way.
Guarantees: launches are described, not run (`LaunchCall`); the gradient is deterministic, without atomics; float32
accumulation, and products of float32 inputs are not rounded to tf32.
The bias is part of the product that came before: added after the product's rounding it would round twice.
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
COUNTS = ["total", "tokens", "heads", "turned"]  # they count rows: what divides them makes no load within a row wider


class Finish(NamedTuple):
    """What becomes of the heads of one projection; the first ones are `turned` (normalized, rotated), the rest not.

    `first`: the place of the turned heads, (batch, tokens, turned, dim), any strides but the last, which is 1;
    `second`: the place of the rest, alike. In a backward pass they hold the gradients instead. `norm`: (dim,), the
    weight of the RMS normalization, with `eps`. `cos`, `sin`: (tokens, dim / 2) float32, contiguous, of the rotation,
    whose style is `interleaved` or not. None leaves the part out.
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
        """Heads of the projection."""
        return self.first.shape[2] + (0 if self.second is None else self.second.shape[2])

    @property
    def dim(self) -> int:
        """Elements of one head; even."""
        return self.first.shape[3]

    def args(self) -> tuple[Any, ...]:
        """Arguments that every kernel of this file ends with."""
        # A stand-in whose strides are not read: without `second` all heads are turned.
        second = self.first if self.second is None else self.second
        return (
            self.norm, self.cos, self.sin, self.first, self.second,
            self.first.shape[0] * self.first.shape[1], self.first.shape[1], self.heads, self.first.shape[2], self.eps,
            *self.first.stride()[:3], *second.stride()[:3],
        )  # fmt: skip

    def meta(self) -> dict[str, int]:
        """Their compile-time constants. Elements APART from each other rotate together: 1, or half a head."""
        return {"DIM": self.dim, "HALF": padded(self.dim // 2), "APART": 1 if self.interleaved else self.dim // 2}


def epilogue_call(raw: Tensor, finish: Finish) -> LaunchCall:
    """Finish heads that a matrix product left in `raw`: (batch, tokens, heads * dim), contiguous."""
    return LaunchCall(epilogue, (_programs(finish),), (raw, raw.stride(1), *finish.args()), _meta(finish))


def epilogue_grad_call(raw: Tensor | None, grads: Finish, draw: Tensor, dnorm: Tensor | None) -> LaunchCall:
    """The gradient of `raw`, from the gradients of the finished heads.

    `raw`: as in `epilogue_call`, needed where there is a norm. `draw`: like `raw`, gets its gradient; may be some
    columns of a wider tensor. `dnorm`: `norm_parts`, whose sum over the first two dimensions is the gradient of the
    norm's weight.
    """
    # Contiguous where it is there; without a norm it is not read.
    raw_row = grads.heads * grads.dim
    args = (raw, raw_row, draw, draw.stride(1), dnorm, *grads.args())
    return LaunchCall(epilogue_grad, (_programs(grads),), args, _meta(grads))


def norm_parts(finish: Finish) -> Tensor:
    """An uninitialized (blocks of tokens, turned, dim) float32 tensor for `epilogue_grad_call`."""
    # One row of sums for each block of tokens, added up by the caller in a fixed order.
    blocks = _programs(finish) // finish.heads
    return finish.first.new_empty(blocks, finish.first.shape[2], finish.dim, dtype=torch.float32)


def _programs(finish: Finish) -> int:
    # One program for each head and block of tokens.
    return triton.cdiv(finish.first.shape[0] * finish.first.shape[1], BLOCK_TOKENS) * finish.heads


def _meta(finish: Finish) -> dict[str, int]:
    return {**finish.meta(), "BLOCK_TOKENS": BLOCK_TOKENS, "num_warps": 4, "num_stages": 1}


@triton.jit
def place(pointer, batch_stride, token_stride, head_stride, at, tokens, head):
    """Pointers to a head's first element for each token of the flat index `at`, in a (batch, tokens, heads, dim)."""
    # The flat index counts tokens of all batches: batch at // tokens, token at % tokens.
    row = (at // tokens).to(tl.int64) * batch_stride + (at % tokens).to(tl.int64) * token_stride
    return (pointer + row + head.to(tl.int64) * head_stride)[:, None]


@triton.jit
def load_halves(row, inside, DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr):
    """The float32 half tiles of heads that begin at the pointers `row` (tokens, 1); 0 where not `inside`."""
    if APART == 1:
        column = tl.arange(0, 2 * HALF)[None, :]
        # Interleaved: a = elements 0 2 4 ..., b = elements 1 3 5 ...
        both = tl.load(row + column, mask=inside & (column < DIM), other=0.0).to(tl.float32)
        # One load of whole vectors, then a split in registers.
        a, b = tl.split(tl.reshape(both, (row.shape[0], HALF, 2)))
    else:
        # APART is half a head here; HALF is it rounded up to a power of two.
        half = tl.arange(0, HALF)[None, :]
        real = inside & (half < APART)
        a = tl.load(row + half, mask=real, other=0.0).to(tl.float32)
        b = tl.load(row + half + APART, mask=real, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_halves(row, a, b, inside, DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr):
    """The inverse of `load_halves`, in the dtype that `row` points to."""
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
    """The half tiles, (1, HALF), of one weight for all tokens."""
    return load_halves(weight + tl.zeros((1, 1), tl.int32), tl.full((1, 1), 1, tl.int1), DIM, HALF, APART)


@triton.jit
def load_angles(cos, sin, at, tokens, inside, DIM: tl.constexpr, HALF: tl.constexpr):
    """Cosines and sines of the tokens of the flat index `at`."""
    half = tl.arange(0, HALF)[None, :]
    # One angle for each pair of elements, the same for all heads and batches.
    angle = (at % tokens)[:, None] * (DIM // 2) + half
    real = inside & (half < DIM // 2)
    return tl.load(cos + angle, mask=real, other=0.0), tl.load(sin + angle, mask=real, other=0.0)


@triton.jit
def finish_heads(
    a, b, at, head, norm, cos, sin, first, second,
    total, tokens, heads, turned, eps,
    first_batch, first_token, first_head, second_batch, second_token, second_head,
    DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Finish the float32 half tiles `a` and `b` of one head and store them."""
    inside = (at < total)[:, None]
    # Heads from `turned` on are neither normalized nor rotated.
    if head < turned:
        if norm is not None:
            # RMS normalization: x / sqrt(mean(x^2) + eps) * norm.
            root = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
            of_a, of_b = load_weight(norm, DIM, HALF, APART)
            a *= root * of_a
            b *= root * of_b
        if cos is not None:
            c, s = load_angles(cos, sin, at, tokens, inside, DIM, HALF)
            # Rotation of each pair (a, b) by its angle.
            a, b = a * c - b * s, b * c + a * s
        to = place(first, first_batch, first_token, first_head, at, tokens, head)
        store_halves(to, a, b, inside, DIM, HALF, APART)
    elif second is not None:
        to = place(second, second_batch, second_token, second_head, at, tokens, head - turned)
        store_halves(to, a, b, inside, DIM, HALF, APART)


@triton.jit(do_not_specialize=COUNTS)
def epilogue(
    raw, raw_row, norm, cos, sin, first, second,
    total, tokens, heads, turned, eps,
    first_batch, first_token, first_head, second_batch, second_token, second_head,
    DIM: tl.constexpr, HALF: tl.constexpr, APART: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: one head of BLOCK_TOKENS tokens. Heads vary fastest, so that a row of `raw` is read at once."""
    head = tl.program_id(0) % heads
    at = tl.program_id(0) // heads * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = raw + (at.to(tl.int64) * raw_row + head * DIM)[:, None]
    a, b = load_halves(row, (at < total)[:, None], DIM, HALF, APART)
    finish_heads(
        a, b, at, head, norm, cos, sin, first, second,
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
    """The transpose of `epilogue`: gradients come from `first` and `second`, `draw` gets the gradient of `raw`.

    With y = raw / rms and g the un-rotated gradient: dnorm = sum of g * y, and the gradient of `raw` is
    (g * norm - y * mean(g * norm * y)) / rms.
    """
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads
    at = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = (at < total)[:, None]
    # int64 from here: token times row stride exceeds int32 for long sequences.
    to = draw + (at.to(tl.int64) * draw_row + head * DIM)[:, None]
    if head < turned:
        source = place(first, first_batch, first_token, first_head, at, tokens, head)
        a, b = load_halves(source, inside, DIM, HALF, APART)
        # The forward order reversed: rotation first, then the norm.
        if cos is not None:
            c, s = load_angles(cos, sin, at, tokens, inside, DIM, HALF)
            # Its transpose rotates the gradient back.
            a, b = a * c + b * s, b * c - a * s
        if norm is not None:
            row = raw + (at.to(tl.int64) * raw_row + head * DIM)[:, None]
            # y = raw / rms, computed again from the product.
            y_a, y_b = load_halves(row, inside, DIM, HALF, APART)
            root = tl.rsqrt((tl.sum(y_a * y_a, 1) + tl.sum(y_b * y_b, 1)) / DIM + eps)[:, None]
            y_a *= root
            y_b *= root
            # Each program writes its own sum over its tokens: no atomics, so the bits repeat.
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
        source = place(second, second_batch, second_token, second_head, at, tokens, head - turned)
        a, b = load_halves(source, inside, DIM, HALF, APART)
        store_halves(to, a, b, inside, DIM, HALF, APART)


# --- the projection --------------------------------------------------------------------------------------------------


GROUP = 8  # blocks of tokens that share the weights in the L2 cache


def projection_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, finish: Finish, rows: Tensor | None = None
) -> LaunchCall:
    """Project x (batch, tokens, model) with `weight` (heads * dim, model); the last dimensions are contiguous.

    `bias`: (heads * dim,), added in float32. `rows`: (kept,) int64, contiguous, the tokens of x to project, so many as
    the places of `finish` have; None for all.
    """
    kept = finish.first.shape[0] * finish.first.shape[1]
    config = _config(x.dtype, finish)
    args = (x, weight, bias, rows, x.shape[2], x.stride(0), x.stride(1), weight.stride(0), *finish.args())
    grid = (triton.cdiv(kept, config["BLOCK_TOKENS"]) * finish.heads,)
    return LaunchCall(project_heads, grid, args, {**finish.meta(), **config, "GROUP": GROUP})


def _config(dtype: torch.dtype, finish: Finish) -> dict[str, int]:
    """Tile sizes that compile without spills on sm_80 and sm_90; not yet tuned for speed."""
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
    """One program: one head of BLOCK_TOKENS tokens; see `Finish` for the arguments from `norm` on."""
    # GROUP blocks of tokens and all heads form a band; within one, blocks vary fastest, so the programs that run at the
    # same time share the weights of one head (L2 cache). The last band may have fewer blocks.
    #    program   0      1      2      3      ...      GROUP 2
    #    block     0      1      0      1
    #    head      0      0      1      1
    blocks = tl.cdiv(total, BLOCK_TOKENS)
    band = tl.program_id(0) // (GROUP * heads)
    height = tl.minimum(blocks - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * heads)
    head = within // height
    at = (band * GROUP + within % height) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = (at < total)[:, None]
    token = (at % tokens).to(tl.int64)
    if rows is not None:
        token = tl.load(rows + token, mask=at < total, other=0)
    from_x = x + ((at // tokens).to(tl.int64) * x_batch + token * x_token)[:, None]

    # Both half tiles of a head are columns of one product: larger steps of the matrix unit, and what rotates together
    # ends in one thread.
    across = tl.arange(0, 2 * HALF)
    if APART == 1:
        # Columns: interleaved pairs as they lie, 0 1 2 3 ...; else the first half head and then the second, each
        # padded.
        element, real = across, across < DIM
    else:
        element, real = across // HALF * APART + across % HALF, across % HALF < APART
    from_weight = weight + ((head * DIM + element).to(tl.int64) * weight_row)[None, :]
    both = tl.zeros((BLOCK_TOKENS, 2 * HALF), tl.float32)
    for start in range(0, model, BLOCK_MODEL):
        column = start + tl.arange(0, BLOCK_MODEL)
        held = column < model
        piece = tl.load(from_x + column[None, :], mask=inside & held[None, :], other=0.0)
        # The weight is (heads * dim, model): read transposed, (model, columns of the head).
        of_head = tl.load(from_weight + column[:, None], mask=real[None, :] & held[:, None], other=0.0)
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
        a, b, at, head, norm, cos, sin, first, second,
        total, tokens, heads, turned, eps,
        first_batch, first_token, first_head, second_batch, second_token, second_head,
        DIM, HALF, APART,
    )  # fmt: skip

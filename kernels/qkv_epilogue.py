"""Finishes projected heads in one pass: RMS normalization, rotary positions, and the way to their place.

A head is held as two half tiles, the elements that rotate against each other: its first and second half ("neox"), or
its even and odd elements ("interleaved"). So both styles are the same arithmetic, in registers, in float32.
Promises: launches are described, not run (`LaunchCall`); the gradient is deterministic, without atomics.
Does not know: what multiplied the heads and added a bias (a bias after the product's rounding would round twice),
autograd, where the places lead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.launch_call import LaunchCall, padded

BLOCK_TOKENS = 32


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
        second = self.first if self.second is None else self.second
        return (
            self.norm, self.cos, self.sin, self.first, self.second,
            self.first.shape[0] * self.first.shape[1], self.first.shape[1], self.heads, self.first.shape[2], self.eps,
            *self.first.stride()[:3], *second.stride()[:3],
        )  # fmt: skip

    def meta(self) -> dict[str, int]:
        """Their compile-time constants. Element i of the half tiles is element i * STEP and i * STEP + APART."""
        step, apart = (2, 1) if self.interleaved else (1, self.dim // 2)
        return {"DIM": self.dim, "HALF": padded(self.dim // 2), "STEP": step, "APART": apart}


def epilogue_call(raw: Tensor, finish: Finish) -> LaunchCall:
    """Finish heads that a matrix product left in `raw`: (batch, tokens, heads * dim), contiguous."""
    return LaunchCall(epilogue, (_programs(finish),), (raw, raw.stride(1), *finish.args()), _meta(finish))


def epilogue_grad_call(raw: Tensor | None, grads: Finish, draw: Tensor, dnorm: Tensor | None) -> LaunchCall:
    """The gradient of `raw`, from the gradients of the finished heads.

    `raw`: as in `epilogue_call`, needed where there is a norm. `draw`: like `raw`, gets its gradient; may be some
    columns of a wider tensor. `dnorm`: `norm_parts`, whose sum over the first two dimensions is the gradient of the
    norm's weight.
    """
    raw_row = grads.heads * grads.dim
    args = (raw, raw_row, draw, draw.stride(1), dnorm, *grads.args())
    return LaunchCall(epilogue_grad, (_programs(grads),), args, _meta(grads))


def norm_parts(finish: Finish) -> Tensor:
    """An uninitialized (blocks of tokens, turned, dim) float32 tensor for `epilogue_grad_call`."""
    blocks = _programs(finish) // finish.heads
    return finish.first.new_empty(blocks, finish.first.shape[2], finish.dim, dtype=torch.float32)


def _programs(finish: Finish) -> int:
    return triton.cdiv(finish.first.shape[0] * finish.first.shape[1], BLOCK_TOKENS) * finish.heads


def _meta(finish: Finish) -> dict[str, int]:
    return {**finish.meta(), "BLOCK_TOKENS": BLOCK_TOKENS, "num_warps": 4, "num_stages": 1}


@triton.jit
def place(pointer, batch_stride, token_stride, head_stride, at, tokens, head):
    """Pointers to a head's first element for each token of the flat index `at`, in a (batch, tokens, heads, dim)."""
    row = (at // tokens).to(tl.int64) * batch_stride + (at % tokens).to(tl.int64) * token_stride
    return (pointer + row + head.to(tl.int64) * head_stride)[:, None]


@triton.jit
def finish_heads(
    a, b, at, head, norm, cos, sin, first, second,
    total, tokens, heads, turned, eps,
    first_batch, first_token, first_head, second_batch, second_token, second_head,
    DIM: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Finish the float32 half tiles `a` and `b` of one head and store them."""
    half = tl.arange(0, HALF)
    real = half < DIM // 2
    low, high = half * STEP, half * STEP + APART
    inside = (at < total)[:, None] & real[None, :]
    if head < turned:
        if norm is not None:
            root = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
            a *= root * tl.load(norm + low, mask=real, other=0.0).to(tl.float32)[None, :]
            b *= root * tl.load(norm + high, mask=real, other=0.0).to(tl.float32)[None, :]
        if cos is not None:
            angle = (at % tokens)[:, None] * (DIM // 2) + half[None, :]
            c = tl.load(cos + angle, mask=inside, other=0.0)
            s = tl.load(sin + angle, mask=inside, other=0.0)
            a, b = a * c - b * s, b * c + a * s
        to = place(first, first_batch, first_token, first_head, at, tokens, head)
        tl.store(to + low[None, :], a.to(first.dtype.element_ty), mask=inside)
        tl.store(to + high[None, :], b.to(first.dtype.element_ty), mask=inside)
    elif second is not None:
        to = place(second, second_batch, second_token, second_head, at, tokens, head - turned)
        tl.store(to + low[None, :], a.to(second.dtype.element_ty), mask=inside)
        tl.store(to + high[None, :], b.to(second.dtype.element_ty), mask=inside)


@triton.jit
def epilogue(
    raw, raw_row, norm, cos, sin, first, second,
    total, tokens, heads, turned, eps,
    first_batch, first_token, first_head, second_batch, second_token, second_head,
    DIM: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: one head of BLOCK_TOKENS tokens. Heads vary fastest, so that a row of `raw` is read at once."""
    head = tl.program_id(0) % heads
    at = tl.program_id(0) // heads * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    half = tl.arange(0, HALF)
    inside = (at < total)[:, None] & (half < DIM // 2)[None, :]
    row = raw + (at.to(tl.int64) * raw_row + head * DIM)[:, None]
    a = tl.load(row + (half * STEP)[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + (half * STEP + APART)[None, :], mask=inside, other=0.0).to(tl.float32)
    finish_heads(
        a, b, at, head, norm, cos, sin, first, second,
        total, tokens, heads, turned, eps,
        first_batch, first_token, first_head, second_batch, second_token, second_head,
        DIM, HALF, STEP, APART,
    )  # fmt: skip


@triton.jit
def epilogue_grad(
    raw, raw_row, draw, draw_row, dnorm, norm, cos, sin, first, second,
    total, tokens, heads, turned, eps,
    first_batch, first_token, first_head, second_batch, second_token, second_head,
    DIM: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """The transpose of `epilogue`: gradients come from `first` and `second`, `draw` gets the gradient of `raw`.

    With y = raw / rms and g the un-rotated gradient: dnorm = sum of g * y, and the gradient of `raw` is
    (g * norm - y * mean(g * norm * y)) / rms.
    """
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads
    at = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    half = tl.arange(0, HALF)
    real = half < DIM // 2
    low, high = half * STEP, half * STEP + APART
    inside = (at < total)[:, None] & real[None, :]
    to = draw + (at.to(tl.int64) * draw_row + head * DIM)[:, None]
    if head < turned:
        source = place(first, first_batch, first_token, first_head, at, tokens, head)
        a = tl.load(source + low[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + high[None, :], mask=inside, other=0.0).to(tl.float32)
        if cos is not None:
            angle = (at % tokens)[:, None] * (DIM // 2) + half[None, :]
            c = tl.load(cos + angle, mask=inside, other=0.0)
            s = tl.load(sin + angle, mask=inside, other=0.0)
            a, b = a * c + b * s, b * c - a * s
        if norm is not None:
            row = raw + (at.to(tl.int64) * raw_row + head * DIM)[:, None]
            y_a = tl.load(row + low[None, :], mask=inside, other=0.0).to(tl.float32)
            y_b = tl.load(row + high[None, :], mask=inside, other=0.0).to(tl.float32)
            root = tl.rsqrt((tl.sum(y_a * y_a, 1) + tl.sum(y_b * y_b, 1)) / DIM + eps)[:, None]
            y_a *= root
            y_b *= root
            part = dnorm + (block.to(tl.int64) * turned + head) * DIM
            tl.store(part + low, tl.sum(a * y_a, 0), mask=real)
            tl.store(part + high, tl.sum(b * y_b, 0), mask=real)
            a *= tl.load(norm + low, mask=real, other=0.0).to(tl.float32)[None, :]
            b *= tl.load(norm + high, mask=real, other=0.0).to(tl.float32)[None, :]
            along = ((tl.sum(a * y_a, 1) + tl.sum(b * y_b, 1)) / DIM)[:, None]
            a, b = root * (a - y_a * along), root * (b - y_b * along)
        tl.store(to + low[None, :], a.to(draw.dtype.element_ty), mask=inside)
        tl.store(to + high[None, :], b.to(draw.dtype.element_ty), mask=inside)
    elif second is not None:
        source = place(second, second_batch, second_token, second_head, at, tokens, head - turned)
        a = tl.load(source + low[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + high[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(to + low[None, :], a.to(draw.dtype.element_ty), mask=inside)
        tl.store(to + high[None, :], b.to(draw.dtype.element_ty), mask=inside)

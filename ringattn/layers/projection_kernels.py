"""The projection to queries, keys and values by Triton kernels, forward and backward.

Imported where a kernel is wanted, because Triton is optional. The matrix products of the backward pass are torch's.
Guarantees: keys and values are launched before the queries; a norm keeps its product for the backward pass, or makes it
again where the kernel never wrote one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.kernels.qkv_epilogue import Finish, epilogue_call, epilogue_grad_call, norm_parts
from ringattn.kernels.qkv_projection import projection_call


class KernelProjection(torch.autograd.Function):
    """See `ringattn.layers.projection`; `spec` holds the sizes, `backend` is "epilogue" or "fused"."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        spec: Any,
        backend: str,
    ) -> tuple[Tensor, ...]:
        places, kept_rows = _places(x, spec), None if spec.rows is None else spec.rows.contiguous()
        raws = []
        for rows, finish in _groups(places, q_norm, k_norm, spec):
            raw, b = None, None if bias is None else bias[rows]
            if backend == "fused":
                projection_call(_dense(x), _dense(weight[rows]), b, finish, kept_rows).run()
            else:
                raw = F.linear(spec.kept(x), weight[rows], b)
                epilogue_call(raw, finish).run()
            raws.append(raw if finish.norm is not None else None)
        ctx.spec = spec
        ctx.save_for_backward(x, weight, bias, q_norm, k_norm, *raws)
        return places

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, q_norm, k_norm, *raws = ctx.saved_tensors
        spec, kept = ctx.spec, ctx.spec.kept(x)
        draw = x.new_empty(*kept.shape[:2], spec.columns)
        dnorms = []
        groups = _groups(tuple(_dense(grad) for grad in grads), q_norm, k_norm, spec)
        for (rows, finish), raw in zip(groups, raws, strict=True):
            parts, norm = None, finish.norm
            if norm is not None:
                parts = norm_parts(finish)
                if raw is None:
                    raw = F.linear(kept, weight[rows], None if bias is None else bias[rows])
            epilogue_grad_call(raw, finish, draw[..., rows], parts).run()
            dnorms.append(None if parts is None or norm is None else parts.sum((0, 1)).to(norm.dtype))
        dx = draw @ weight
        if spec.rows is not None:
            dx = torch.zeros_like(x).index_add_(1, spec.rows, dx)
        dweight = draw.flatten(0, 1).T @ kept.flatten(0, 1)
        dbias = None if bias is None else draw.sum((0, 1), dtype=torch.float32).to(bias.dtype)
        return (
            dx, dweight, dbias,
            None if q_norm is None else dnorms[-1], None if k_norm is None else dnorms[0],
            None, None,
        )  # fmt: skip


def _places(x: Tensor, spec: Any) -> tuple[Tensor, ...]:
    """Where q, k and v go, those that are wanted."""
    size = x.shape[0], spec.tokens(x)
    q = (x.new_empty(*size, spec.heads, spec.head_dim),) if spec.heads else ()
    if spec.into is not None:
        return (*q, *spec.places())
    return (*q, *(x.new_empty(*size, spec.kv_heads, spec.head_dim) for _ in range(2 if spec.kv_heads else 0)))


def _groups(
    places: tuple[Tensor, ...], q_norm: Tensor | None, k_norm: Tensor | None, spec: Any
) -> list[tuple[slice, Finish]]:
    """What is made by one launch each, in order: rows of the weight, and their finish."""
    cut = spec.heads * spec.head_dim
    groups = []
    if spec.kv_heads:
        groups.append((slice(cut, None), Finish(places[-2], places[-1], k_norm, spec.eps, *(spec.k_turn or ()))))
    if spec.heads:
        groups.append((slice(0, cut), Finish(places[0], None, q_norm, spec.eps, *(spec.q_turn or ()))))
    return groups


def _dense(x: Tensor) -> Tensor:
    """x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()

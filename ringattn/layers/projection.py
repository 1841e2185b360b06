"""Projection of tokens to queries, keys and values: one weight, optional bias, QK normalization and rotary positions.

Keys and values can be projected first, directly into a message buffer, so that an exchange runs while queries are
projected. The Triton kernels are imported at their first use, because Triton is optional. Their backward pass uses
torch's matrix products.

Guarantees: norm and rotation are computed in float32 (float64 for float64 inputs) for every dtype. Rotations follow
*global* positions, so every layout is correct. Every backend is differentiable once.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.engine.base import accumulator_dtype
from ringattn.errors import InputError
from ringattn.gradients import once_differentiable
from ringattn.layers.rotary import Rope, Rotation, rotate

Backend = Literal["auto", "plain", "epilogue", "fused"]
BACKENDS = ("auto", "plain", "epilogue", "fused")


def project_qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    rope: Rope | None = None,
    positions: Tensor | None = None,
    length: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Project x (batch, tokens, model) to q (batch, tokens, heads, head_dim), and to k and v with `kv_heads` heads.

    `weight`: ((heads + 2 * kv_heads) * head_dim, model) as in `F.linear`, with the rows of queries first, then keys,
    then values. `bias`: (rows of weight,), or None. `q_norm`, `k_norm`: (head_dim,) weights of an RMS normalization of
    each head, before the rotation. `positions`: (tokens,) global positions, required with `rope`. `length`: the tokens
    of the whole sequence, required with XPos. Raises `InputError` if sizes do not match, and where `Rope.turns` does.
    """
    if (rope is None) != (positions is None):
        raise InputError("rope and positions belong together: pass both, or neither")
    turns: tuple[Rotation | None, Rotation | None] = (None, None)
    if rope is not None and positions is not None:
        turns = rope.turns(positions, head_dim, stored_dtype(x), length)
    q, k, v = project(
        x, weight, bias, heads, kv_heads, head_dim, norms=(q_norm, k_norm), norm_eps=norm_eps, turns=turns,
        backend=backend,
    )  # fmt: skip
    return q, k, v


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    norms: tuple[Tensor | None, Tensor | None] = (None, None),
    norm_eps: float = 1e-6,
    turns: tuple[Rotation | None, Rotation | None] = (None, None),
    into: tuple[Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, ...]:
    """Return q, k and v; with 0 `heads` only k and v, with 0 `kv_heads` only q. See `project_qkv`.

    `norms`: the norm weights for queries and for keys. `turns`: their rotations. `into`: buffers for K and V, two
    row-first views (rows, batch, kv_heads, head_dim) of x's dtype. The last stride must be 1, others are arbitrary. The
    returned tensors are then views of the buffers, (batch, rows, kv_heads, head_dim). Overwriting the buffers before
    backward does not change gradients.
    """
    spec = _Spec(heads, kv_heads, head_dim, norm_eps, *turns, into)
    norms = norms[0] if heads else None, norms[1] if kv_heads else None
    check_projection(x, weight, bias, norms, spec.columns, head_dim, backend)
    if _is_cast(x):
        dtype = stored_dtype(x)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    _check_buffers(x, spec)
    if backend == "auto":
        backend = backend_for(x, head_dim)
    if backend == "plain":
        return _plain(x, weight, bias, *norms, spec)
    return _KernelProjection.apply(x, weight, bias, *norms, spec, backend)


def stored_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of projections of x: x's dtype, or autocast's if that applies."""
    return torch.get_autocast_dtype(x.device.type) if _is_cast(x) else x.dtype


def _is_cast(x: Tensor) -> bool:
    """Return whether autocast casts x. float64 is not cast, as in torch's layers."""
    return torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def backend_for(x: Tensor, head_dim: int) -> Backend:
    """Return the backend of "auto" for x (batch, tokens, model): "epilogue" if its kernel can run, else "plain"."""
    if x.device.type != "cuda" or x.dtype == torch.float64 or head_dim % 2 or find_spec("triton") is None:
        return "plain"
    return "epilogue"


class _Spec(NamedTuple):
    """The arguments of a projection that have no gradients. 0 `heads` omits queries, 0 `kv_heads` keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    q_turn: Rotation | None
    k_turn: Rotation | None
    into: tuple[Tensor, Tensor] | None

    @property
    def columns(self) -> int:
        """The number of columns of the projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def buffers(self) -> tuple[Tensor, ...]:
        """Return the memory of `into` as (batch, tokens, kv_heads, head_dim) tensors."""
        # These tensors are no views. Views share a version counter with the whole message, so autograd would report
        # later writes to other parts of the message as in-place changes.
        views = [view.transpose(0, 1) for view in self.into or ()]
        return tuple(
            view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
            for view in views
        )


def check_projection(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norms: Sequence[Tensor | None],
    columns: int,
    head_dim: int,
    backend: str = "auto",
) -> None:
    """Raise `InputError` unless x can be projected to `columns`. Under autocast, dtypes may differ."""
    if x.dim() != 3 or weight.shape != (columns, x.shape[2]):
        raise InputError(
            f"x must be (batch, tokens, model), got {tuple(x.shape)}; {columns // head_dim} heads of {head_dim}, "
            f"counting those of keys and of values, need a weight ({columns}, model), got {tuple(weight.shape)}"
        )
    alike = weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
    if not alike and not _is_cast(x):
        raise InputError(f"x is {x.dtype}, the weight is {weight.dtype}; these and the bias must have one dtype")
    if bias is not None and bias.shape != (columns,):
        raise InputError(f"bias must have shape ({columns},), the rows of the weight, got {tuple(bias.shape)}")
    for norm in norms:
        if norm is not None and norm.shape != (head_dim,):
            raise InputError(f"a norm's weight must have shape ({head_dim},), got {tuple(norm.shape)}")
    if backend not in BACKENDS:
        raise InputError(f"backend={backend!r} is not known; choose one of {', '.join(BACKENDS)}")
    if backend in ("epilogue", "fused") and (x.dtype == torch.float64 or head_dim % 2):
        raise InputError(f"backend={backend!r} supports neither float64 nor an odd head_dim; use backend='plain'")


def _check_buffers(x: Tensor, spec: _Spec) -> None:
    """Raise `InputError` unless the rotations and the buffers match the tokens of x."""
    batch, tokens, _ = x.shape
    for turn in (spec.q_turn, spec.k_turn):
        if turn is not None and turn.cos.shape != (tokens, spec.head_dim // 2):
            raise InputError(
                f"{tokens} tokens with heads of {spec.head_dim} need a rotation of shape "
                f"({tokens}, {spec.head_dim // 2}), got {tuple(turn.cos.shape)}"
            )
    shape = (tokens, batch, spec.kv_heads, spec.head_dim)
    for view in spec.into or ():
        if view.shape != shape or view.dtype != x.dtype or view.stride(3) != 1:
            raise InputError(
                f"into must be two {shape} views of {x.dtype} with a contiguous last dimension, "
                f"got {tuple(view.shape)}, {view.dtype}, strides {view.stride()}"
            )


# --- plain torch -----------------------------------------------------------------------------------------------------


def _plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, spec: _Spec
) -> tuple[Tensor, ...]:
    """Compute the projection in plain torch. This is the reference for the Triton kernels."""
    raw = F.linear(x, weight, bias).unflatten(-1, (-1, spec.head_dim))
    q, k, v = raw.split((spec.heads, spec.kv_heads, spec.kv_heads), 2)
    q, k = _turned(q, q_norm, spec.eps, spec.q_turn), _turned(k, k_norm, spec.eps, spec.k_turn)
    if spec.into is not None:
        k, v = (_Put.apply(heads, buffer) for heads, buffer in zip((k, v), spec.buffers(), strict=True))
    return (q, k, v)[0 if spec.heads else 1 : 3 if spec.kv_heads else 1]


def _turned(heads: Tensor, norm: Tensor | None, eps: float, turn: Rotation | None) -> Tensor:
    """Normalize and rotate heads (batch, tokens, heads, head_dim)."""
    wide = heads.to(accumulator_dtype(heads.dtype))
    if norm is not None:
        wide = F.rms_norm(wide, heads.shape[3:], norm.to(wide.dtype), eps)
    if turn is not None:
        wide = rotate(wide, *turn)
    return wide.to(heads.dtype)


class _Put(torch.autograd.Function):
    """A copy of heads into a buffer. The result is the buffer."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, buffer: Tensor) -> Tensor:
        ctx.mark_dirty(buffer)
        return buffer.copy_(heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# --- Triton kernels --------------------------------------------------------------------------------------------------
# Kernels for keys and values are launched before those for queries. For a norm, backward needs the product before
# normalization. The product is saved, or recomputed if a fused kernel never stored it.


class _KernelProjection(torch.autograd.Function):
    """The projection by Triton kernels. `spec` has the sizes; `backend` is "epilogue" or "fused"."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        spec: _Spec,
        backend: str,
    ) -> tuple[Tensor, ...]:
        from ringattn.kernels.qkv import epilogue_call, projection_call

        size = x.shape[:2]
        buffers: tuple[Tensor, ...] = (x.new_empty(*size, spec.heads, spec.head_dim),) if spec.heads else ()
        if spec.into is not None:
            buffers += spec.buffers()
        elif spec.kv_heads:
            buffers += tuple(x.new_empty(*size, spec.kv_heads, spec.head_dim) for _ in range(2))
        raws = []
        for rows, finish in _groups(buffers, q_norm, k_norm, spec):
            raw, row_bias = None, None if bias is None else bias[rows]
            if backend == "fused":
                projection_call(_dense(x), _dense(weight[rows]), row_bias, finish).run()
            else:
                raw = F.linear(x, weight[rows], row_bias)
                epilogue_call(raw, finish).run()
            raws.append(raw if finish.norm is not None else None)
        ctx.spec = spec
        ctx.save_for_backward(x, weight, bias, q_norm, k_norm, *raws)
        return buffers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from ringattn.kernels.qkv import epilogue_grad_call, norm_parts

        x, weight, bias, q_norm, k_norm, *raws = ctx.saved_tensors
        # The kernels write the gradients of all columns into one buffer. So one matrix product gives dx, and another
        # gives dweight.
        draw = x.new_empty(*x.shape[:2], ctx.spec.columns)
        dnorms = []
        groups = _groups(tuple(_dense(grad) for grad in grads), q_norm, k_norm, ctx.spec)
        for (rows, finish), raw in zip(groups, raws, strict=True):
            parts, norm = None, finish.norm
            if norm is not None:
                parts = norm_parts(finish)
                if raw is None:
                    raw = F.linear(x, weight[rows], None if bias is None else bias[rows])
            epilogue_grad_call(raw, finish, draw[..., rows], parts).run()
            dnorms.append(None if parts is None else parts.sum((0, 1)).to(norm.dtype))
        dweight = draw.flatten(0, 1).T @ x.flatten(0, 1)
        dbias = None if bias is None else draw.sum((0, 1), dtype=torch.float32).to(bias.dtype)
        dq_norm, dk_norm = None if q_norm is None else dnorms[-1], None if k_norm is None else dnorms[0]
        return draw @ weight, dweight, dbias, dq_norm, dk_norm, None, None


def _groups(
    buffers: tuple[Tensor, ...], q_norm: Tensor | None, k_norm: Tensor | None, spec: _Spec
) -> list[tuple[slice, Any]]:
    """Return the kernel launches in order.

    Each has its rows of the weight, and a `Finish`: what the kernel does to the product (norm, rotation, storing).
    """
    from ringattn.kernels.qkv import Finish

    cut = spec.heads * spec.head_dim
    groups = []
    if spec.kv_heads:
        groups.append((slice(cut, None), Finish(buffers[-2], buffers[-1], k_norm, spec.eps, *(spec.k_turn or ()))))
    if spec.heads:
        groups.append((slice(0, cut), Finish(buffers[0], None, q_norm, spec.eps, *(spec.q_turn or ()))))
    return groups


def _dense(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()

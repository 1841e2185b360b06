"""Layers with a state on one process, written only from their definitions. Nothing of ringattn is imported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None
) -> Tensor:  # fmt: skip
    """Apply the gated delta rule to one document (batch, tokens, heads, dim), token by token."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    decay = (g if g.dim() == 4 else g[..., None]).exp()
    state, outs = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3]), []
    for token in range(v.shape[1]):
        state = decay[:, token, ..., None] * state
        missing = v[:, token] - torch.einsum("bhk,bhkv->bhv", k[:, token], state)
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, token], k[:, token], missing)
        outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, token], state))
    return torch.stack(outs, 1) if outs else v[:, :0]


def selective_state(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: Sequence[float] = (0.0, float("inf")),
) -> Tensor:  # fmt: skip
    """Apply Mamba-2's selective state-space model to one document (batch, tokens, heads, dim), token by token."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (dt.exp().log1p() if dt_softplus else dt).clamp(*dt_limit)
    B, C = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (B, C))
    state, outs = x.new_zeros(len(x), x.shape[2], B.shape[3], x.shape[3]), []
    for token in range(x.shape[1]):
        added = torch.einsum("bh,bhs,bhd->bhsd", dt[:, token], B[:, token], x[:, token])
        state = (dt[:, token] * A).exp()[..., None, None] * state + added
        outs.append(torch.einsum("bhs,bhsd->bhd", C[:, token], state))
    out = torch.stack(outs, 1) if outs else x[:, :0]
    return out if D is None else out + D.reshape(len(D), -1) * x


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """Convolve each channel of one document (batch, tokens, channels): tap j reads the token `taps - 1 - j` before."""
    taps, out = weight.shape[2], torch.zeros_like(x)
    for tap in range(taps):
        distance = taps - 1 - tap
        shifted = torch.cat([torch.zeros_like(x[:, :distance]), x[:, : max(0, x.shape[1] - distance)]], 1)
        out = out + weight[:, 0, tap] * shifted
    out = out if bias is None else out + bias
    return out * out.sigmoid() if activation == "silu" else out

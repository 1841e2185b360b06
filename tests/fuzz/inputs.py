"""The input tensors of a call: values drawn from the seed, in memory layouts that users' tensors may have.

Guarantees: the reference and the ranks get the same values. Elements of a larger tensor around an input are NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.fuzz.choices import BATCH_LAST
from tests.fuzz.draw import Case

NAMES = "qkv"


class Values(NamedTuple):
    """Whole tensors of a call: q, k, v (batch, tokens, heads, dim), with size 1 for broadcast batches or heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    sinks: Tensor | None


def generator(case: Case, index: int) -> torch.Generator:
    """Return the random generator for the call of this index."""
    return torch.Generator().manual_seed(case["seed"] * 16 + index)


def values(case: Case, index: int) -> Values:
    """Return the values of a call. Those of q, k and v are unit normal, times `size` of the call."""
    call, random, dtype = case["calls"][index], generator(case, index), getattr(torch, case["dtype"])
    (heads, kv_heads), (d_k, d_v), batch = call["heads"], call["dims"], call["batch"]
    q_tokens = call["seq"]["length"]
    k_tokens = (call["kv_seq"] or call["seq"])["length"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    shapes = [[batch, q_tokens, heads, d_k], [batch, k_tokens, kv_heads, d_k], [batch, k_tokens, kv_heads, d_v]]
    for shape, kind in zip(shapes, call["strides"], strict=True):
        if kind == "one_batch":
            shape[0] = min(shape[0], 1)
        if kind == "one_head":
            shape[2] = min(shape[2], 1)
    q, k, v = ((normal(*shape) * call["size"]).to(dtype) for shape in shapes)
    dout, dlse = normal(batch, q_tokens, heads, d_v).to(dtype), normal(batch, heads, q_tokens).float()
    sinks = (normal(heads) * call["sinks"]).to(dtype) if call["sinks"] else None
    for name, at_batch, at_token, at_head in case.get("nan", ()):
        x = (q, k, v)[NAMES.index(name)]
        if x.numel():
            b, t, h = (
                int(fraction * size) for fraction, size in zip((at_batch, at_token, at_head), x.shape, strict=False)
            )
            x[b, t, h, 0] = float("nan")
    return Values(q, k, v, dout, dlse, sinks)


def leaf_of(kind: str, x: Tensor) -> Tensor:
    """Return a tensor with the memory layout `kind` that contains x, for use as a leaf; see `inside`."""
    batch, tokens, heads, dim = x.shape
    if kind == "transposed":
        return x.transpose(1, 2).contiguous()
    if kind == "leaf":  # a leaf that is itself a view, with tokens before batches
        inner = x.new_full((tokens, batch, heads + 1, dim + 3), float("nan")).transpose(0, 1)[:, :, 1:, :dim]
        return inner.copy_(x).detach()
    if kind == BATCH_LAST:
        return x.movedim(0, 3).contiguous().movedim(3, 0)
    sizes = {
        "sliced": (batch, tokens, heads + 1, dim + 3),
        "every_second": (batch, 2 * tokens, heads, dim),
        "heads_apart": (batch, tokens, 2 * heads, dim),
    }
    if kind not in sizes:
        return x.clone()
    larger = x.new_full(sizes[kind], float("nan"))
    inside(kind, larger, dim).copy_(x)
    return larger


def inside(kind: str, leaf: Tensor, dim: int) -> Tensor:
    """Return the view of a leaf, or of its gradient, that contains x, before it is expanded over batches or heads."""
    if kind == "transposed":
        return leaf.transpose(1, 2)
    if kind == "sliced":
        return leaf[:, :, 1:, :dim]
    if kind == "every_second":
        return leaf[:, ::2]
    if kind == "heads_apart":
        return leaf[:, :, ::2]
    return leaf


def as_input(x: Tensor, call: Case, name: str) -> Tensor:
    """Return x expanded to all batches and heads of the call. `name`: "q", "k" or "v"."""
    return x.expand(call["batch"], x.shape[1], call["heads"][name != "q"], x.shape[3])


def loss_of(call: Case, out: Tensor, lse: Tensor | None, dout: Tensor, dlse: Tensor) -> Tensor:
    """Return the loss of a call, from out and lse as the case uses them. The lse of a row without keys is left out."""
    total: Any = torch.zeros((), dtype=torch.float64)
    if call["in_place"]:
        out = out.mul_(2)
    use = call["uses"]["out"]
    if use == "weighted":
        total = total + (out.double() * dout.double()).sum()
    elif use == "sum":
        total = total + out.sum()
    elif use == "transposed":
        total = total + (out.transpose(1, 3) * dout.to(out.dtype).transpose(1, 3).contiguous()).double().sum()
    if call["twice"]:
        total = total + 0.5 * out.double().square().sum()
    if call["uses"]["lse"] and lse is not None:
        total = total + (torch.where(lse.isinf(), 0.0, lse.double()) * dlse.double()).sum()
    return total

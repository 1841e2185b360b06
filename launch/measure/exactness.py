"""Compare one attention call on all ranks with a dense float64 reference: the output and all gradients.

Bounds: for float64 1e-10 and for float32 1e-5, as the largest absolute error, multiplied by the largest reference value
if that exceeds 1. For half types 1.25 times the error of the same engine on one device, as a relative Frobenius norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringattn.launch.calls import MaskedCallConfig
from ringattn.ring import Ring
from ringattn.sequence import Sequence
from ringattn.testing import dense_attention, dense_dilated_attention
from ringattn.transport.local import LocalWorld

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FULL_PRECISION_BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}
"""The largest absolute error of results up to 1. For larger results it is multiplied by the largest value."""
OVER_ONE_DEVICE = 1.25


def drawn(
    batch: int, tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, seed: int
) -> tuple[Tensor, ...]:
    """Draw q, k, v and the gradient of the output: unit normal, the same on every rank.

    `heads` is (query heads, K/V heads), and `dims` is (head dimension of queries and keys, head dimension of values).
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])
    sizes = [(batch, tokens, *shape) for shape in shapes]
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)


def attended(
    ring: Ring, call: MaskedCallConfig, inputs: tuple[Tensor, ...], seq: Sequence, schedule: str
) -> list[Tensor]:
    """Run the call on this ring. Return out, dQ, dK and dV of the whole sequence on every rank."""
    q, k, v, dout = (seq.shard(x) for x in inputs)
    q, k, v = leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    attend = ring.dilated_attention if call.dilated else ring.attention
    out: Tensor = attend(q, k, v, seq, schedule=schedule, **call.options(seq.length, ring.device))
    grads = torch.autograd.grad(out, leaves, dout)
    return [seq.gather(x) for x in (out.detach(), *grads)]


def reference_and_bounds(
    call: MaskedCallConfig, inputs: tuple[Tensor, ...], engine: Any
) -> tuple[list[Tensor], list[float]]:
    """Return the dense float64 results and the bound of the error of each.

    For half types, the bounds are derived from a run of `engine` on one device.
    """
    length = inputs[0].shape[1]
    leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in inputs[:3]]
    dense = dense_dilated_attention if call.dilated else dense_attention
    out, _ = dense(*leaves, cu_seqlens=call.cu_seqlens_at(length), **call.options(length, inputs[0].device))
    reference = [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].double())]
    dtype = inputs[0].dtype
    if dtype in FULL_PRECISION_BOUND:
        largest = [float(x.abs().max()) if x.numel() else 0.0 for x in reference]
        return reference, [FULL_PRECISION_BOUND[dtype] * max(1.0, value) for value in largest]
    with Ring(transport=LocalWorld(1).transport(0), engine=engine) as alone:
        one_device = attended(alone, call, inputs, call.sequence_on(alone, length, "contiguous"), "ring")
    return reference, [OVER_ONE_DEVICE * error_of(x, y) for x, y in zip(one_device, reference, strict=True)]


def error_of(got: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference; for half types the relative Frobenius norm of the difference."""
    if got.dtype in FULL_PRECISION_BOUND:
        return absolute_error(got, reference)
    return float((got.double() - reference).norm() / reference.norm())


def absolute_error(got: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference."""
    difference = got.double() - reference
    return float(difference.abs().max()) if difference.numel() else 0.0

"""One GPU, one rank: the fused CUDA kernels and the executor against a dense float64 truth. `make gpu-check` runs it.

Measured errors are kept in bench/results/gpu/exactness.json, beside the error of torch's own attention in one call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ringattn
from ringattn.testing import dense_attention

KEPT = Path(__file__).resolve().parent.parent / "bench" / "results" / "gpu" / "exactness.json"
TOKENS = 517
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 40)},
    "causal window": {"causal": True, "window": (100, 0)},
    "documents": {"causal": True, "cu_seqlens": [0, 1, 200, 200, TOKENS]},
}

pytestmark = pytest.mark.gpu


def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and dout on the GPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, TOKENS, 8, 64), (2, TOKENS, 2, 64), (2, TOKENS, 2, 64), (2, TOKENS, 8, 64))
    return tuple(torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes)


def errors(got: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Relative Frobenius errors."""
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, truth, strict=True)]


def ours(engine: str, dtype: torch.dtype, mask: dict[str, Any]) -> list[Tensor]:
    """out, dQ, dK, dV by a ring of one rank."""
    *leaves, dout = inputs(dtype)
    q, k, v = (x.requires_grad_() for x in leaves)
    options = {name: value for name, value in mask.items() if name != "cu_seqlens"}
    with ringattn.Ring(engine=engine) as ring:
        assert ring.device.type == "cuda"
        seq = ring.sequence(TOKENS, cu_seqlens=mask.get("cu_seqlens"), layout="contiguous")
        out = ring.attention(q, k, v, seq, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def truth_of(dtype: torch.dtype, mask: dict[str, Any]) -> list[Tensor]:
    *leaves, dout = inputs(dtype)
    q, k, v = (x.double().requires_grad_() for x in leaves)
    out, _ = dense_attention(q, k, v, **mask)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def one_call(dtype: torch.dtype, causal: bool) -> list[Tensor]:
    """out, dQ, dK, dV by torch's own attention."""
    *leaves, dout = inputs(dtype)
    q, k, v = (x.requires_grad_() for x in leaves)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=True).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def keep(case: str, found: list[float], alone: list[float] | None) -> None:
    """Add a measured case to the kept file."""
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept["device"] = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    kept[case] = {"out dQ dK dV": found, "one call of torch": alone}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("engine", "dtype"),
    [(engine, dtype) for engine in ("plain", "aten") for dtype in (torch.float64, torch.float32)]
    + [("triton", torch.float32)],
)
def test_full_precision_is_exact_on_cuda(engine: str, dtype: torch.dtype, mask: str) -> None:
    found = errors(ours(engine, dtype, MASKS[mask]), truth_of(dtype, MASKS[mask]))
    keep(f"{engine} {dtype} {mask}", found, None)
    assert max(found) < (1e-10 if dtype == torch.float64 else 1e-5), found


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("engine", ["plain", "aten", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_as_good_as_one_call(engine: str, dtype: torch.dtype, mask: str) -> None:
    truth = truth_of(dtype, MASKS[mask])
    found = errors(ours(engine, dtype, MASKS[mask]), truth)
    alone = errors(one_call(dtype, mask == "causal"), truth)
    keep(f"{engine} {dtype} {mask}", found, alone)
    assert all(a <= 1.25 * b for a, b in zip(found, alone, strict=True)), (found, alone)


@pytest.mark.parametrize("mask", ["window", "causal window", "documents"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_many_tiles_in_half_precision(dtype: torch.dtype, mask: str) -> None:
    """`aten` returns rounded partials here: its figure is kept, and the others must not be worse than it."""
    truth = truth_of(dtype, MASKS[mask])
    found = {engine: errors(ours(engine, dtype, MASKS[mask]), truth) for engine in ("plain", "triton", "aten")}
    for engine, of_engine in found.items():
        keep(f"{engine} {dtype} {mask}", of_engine, None)
    for engine in ("plain", "triton"):
        assert all(a <= 1.25 * b for a, b in zip(found[engine], found["aten"], strict=True)), found

"""On one GPU with one rank, every engine agrees with dense float64 attention. `make gpu-first` runs the tests.

The measured errors are recorded in bench/results/gpu/exactness.json, with the error of a single call of torch's
attention. Engines are named as in `Ring`, or by the form of the Triton engine's kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ringattn
from ringattn.testing import dense_attention, dense_dilated_attention
from ringattn.transport.local import LocalWorld
from tests.gpu import kept

keep = partial(kept.keep, "exactness")
TOKENS = 517
DEVICE = "cuda"
HALF_ENGINES = ["plain", "aten", "triton", "pointers", "gluon", "fused"]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 40)},
    "causal window": {"causal": True, "window": (100, 0)},
    "documents": {"causal": True, "cu_seqlens": [0, 1, 200, 200, TOKENS]},
    "dilated": {"segment_lengths": [64, 300, 600], "dilation_rates": [1, 3, 4]},
    "causal dilated": {"causal": True, "segment_lengths": [64, 256, 600], "dilation_rates": [1, 2, 16]},
}

pytestmark = pytest.mark.gpu


def engine_named(name: str) -> Any:
    """Return the engine to pass to `Ring`: `name` itself, or a Triton engine if `name` is a form of its kernels."""
    if name not in ("pointers", "gluon", "fused"):
        return name
    if torch.cuda.get_device_capability() < (9, 0) and name == "gluon":
        pytest.skip(f"{name}: needs sm_90")
    from ringattn.engine.triton import TritonEngine

    return TritonEngine(deterministic=False) if name == "fused" else TritonEngine(form=name)


def inputs(dtype: torch.dtype, dim: int = 64) -> tuple[Tensor, ...]:
    """Return random q, k, v and dout on the GPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, TOKENS, heads, dim) for heads in (8, 2, 2, 8)]
    return tuple(torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes)


def errors(got: list[Tensor], reference: list[Tensor]) -> list[float]:
    """Return the relative error of each tensor in the Frobenius norm."""
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, reference, strict=True)]


def ours(engine: str, dtype: torch.dtype, mask: dict[str, Any], dim: int = 64) -> list[Tensor]:
    """Return [out, dQ, dK, dV], computed by a ring of one rank."""
    *leaves, dout = inputs(dtype, dim)
    q, k, v = (x.requires_grad_() for x in leaves)
    options = {name: value for name, value in mask.items() if name != "cu_seqlens"}
    with ringattn.Ring(engine=engine_named(engine)) as ring:
        assert ring.device.type == DEVICE
        seq = ring.sequence(TOKENS, cu_seqlens=mask.get("cu_seqlens"), layout="contiguous")
        attend = ring.dilated_attention if "dilation_rates" in mask else ring.attention
        out: Tensor = attend(q, k, v, seq, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def reference_of(dtype: torch.dtype, mask: dict[str, Any], dim: int = 64) -> list[Tensor]:
    *leaves, dout = inputs(dtype, dim)
    q, k, v = (x.double().requires_grad_() for x in leaves)
    dense = dense_dilated_attention if "dilation_rates" in mask else dense_attention
    out, _ = dense(q, k, v, **mask)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def one_call(dtype: torch.dtype, causal: bool, dim: int = 64) -> list[Tensor]:
    """Return [out, dQ, dK, dV], computed by a single call of torch's attention."""
    *leaves, dout = inputs(dtype, dim)
    q, k, v = (x.requires_grad_() for x in leaves)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=True).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("engine", "dtype"),
    [(engine, dtype) for engine in ("plain", "aten") for dtype in (torch.float64, torch.float32)]
    + [("triton", torch.float32)],
)
def test_full_precision_is_exact_on_cuda(engine: str, dtype: torch.dtype, mask: str) -> None:
    actual = errors(ours(engine, dtype, MASKS[mask]), reference_of(dtype, MASKS[mask]))
    keep(f"{engine} {dtype} {mask}", {"out dQ dK dV": actual})
    assert max(actual) < (1e-10 if dtype == torch.float64 else 1e-5), actual


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("engine", HALF_ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_as_good_as_one_call(engine: str, dtype: torch.dtype, dim: int, mask: str) -> None:
    reference = reference_of(dtype, MASKS[mask], dim)
    actual = errors(ours(engine, dtype, MASKS[mask], dim), reference)
    alone = errors(one_call(dtype, mask == "causal", dim), reference)
    keep(f"{engine} {dtype} {mask} head_dim {dim}", {"out dQ dK dV": actual, "one call of torch": alone})
    assert all(a <= 1.25 * b for a, b in zip(actual, alone, strict=True)), (actual, alone)


def in_every_layout(x: Tensor) -> list[Tensor]:
    """Return tensors equal to `x` (batch, tokens, heads, dim) with different strides."""
    wider = torch.cat([x, x], -2)[:, :, : x.shape[2]]
    heads_outermost = x.transpose(1, 2).contiguous().transpose(1, 2)
    tokens_outermost = x.transpose(0, 1).contiguous().transpose(0, 1)
    return [x, tokens_outermost, heads_outermost, wider, x]


@pytest.mark.parametrize("engine", ["aten", "triton", "pointers", "fused"])
def test_results_do_not_depend_on_the_layout_of_earlier_calls(engine: str) -> None:
    """Results are right for inputs and gradients in every memory layout, whichever layouts earlier calls had.

    This could fail because torch reuses cuDNN's graph of an earlier call with equal q, k and v, even if dout has
    another layout.
    """
    *leaves, dout = inputs(torch.bfloat16)
    reference, bound = reference_of(torch.bfloat16, MASKS["causal"]), torch.finfo(torch.bfloat16).eps
    layouts = list(zip(*map(in_every_layout, leaves), strict=True))
    with ringattn.Ring(engine=engine_named(engine)) as ring:
        seq = ring.sequence(TOKENS, layout="contiguous")
        for q, k, v in layouts:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = ring.attention(q, k, v, seq, causal=True)
            assert max(errors([out.detach()], reference[:1])) < bound
            for layout in (*in_every_layout(dout), torch.stack([dout, dout], -1)[..., 0]):
                gradients = torch.autograd.grad(out, (q, k, v), layout, retain_graph=True)
                assert max(errors(list(gradients), reference[1:])) < bound


def test_zero_padded_segments_are_exact_on_cuda() -> None:
    def computed(ring: ringattn.Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seq = ring.sequence(TOKENS, layout="contiguous")
        rows: Tensor = ring.dilated_attention(
            q, k, v, seq, segment_lengths=[64, 300], dilation_rates=[2, 3], tail="zero_pad"
        )
        return rows.cpu()

    q, k, v, _ = inputs(torch.float64)
    with ringattn.Ring(engine="plain") as ring:
        assert ring.device.type == DEVICE
        out = computed(ring, q, k, v)
    with ringattn.Ring(transport=LocalWorld(1).transport(0), engine="plain") as ring:
        (error,) = errors([out], [computed(ring, q.cpu(), k.cpu(), v.cpu())])
    keep("plain torch.float64 zero_pad", {"out": error})
    assert error < 1e-12


@pytest.mark.parametrize("mask", ["window", "causal window", "documents", "dilated", "causal dilated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_many_tiles_in_half_precision(dtype: torch.dtype, mask: str) -> None:
    """For masks with many tiles, `plain` and `triton` are at most 1.25 times as inexact as `aten`.

    `aten` rounds the result of each tile.
    """
    reference = reference_of(dtype, MASKS[mask])
    actual = {engine: errors(ours(engine, dtype, MASKS[mask]), reference) for engine in ("plain", "triton", "aten")}
    for engine, of_engine in actual.items():
        keep(f"{engine} {dtype} {mask}", {"out dQ dK dV": of_engine})
    for engine in ("plain", "triton"):
        assert all(a <= 1.25 * b for a, b in zip(actual[engine], actual["aten"], strict=True)), actual

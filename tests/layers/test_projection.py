"""The projection and rotary positions agree with their definition in float64; refusals; the choice of the backend."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.errors import InputError
from ringattn.layers import projection
from ringattn.layers.projection import backend_for, project, project_qkv
from ringattn.layers.rotary import Rope, rotation

BATCH, TOKENS, MODEL, HEADS, KV_HEADS, DIM = 2, 11, 24, 4, 2, 8
POSITIONS = torch.randperm(1000, generator=torch.Generator().manual_seed(3))[:TOKENS]
PLACED: dict[str, Any] = {"positions": POSITIONS, "length": 1000}


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def weights(bias: bool = True, norm: bool = True) -> dict[str, Any]:
    columns = (HEADS + 2 * KV_HEADS) * DIM
    return {
        "x": leaf(BATCH, TOKENS, MODEL), "weight": leaf(columns, MODEL), "bias": leaf(columns) if bias else None,
        "q_norm": leaf(DIM, seed=1) if norm else None, "k_norm": leaf(DIM, seed=2) if norm else None,
    }  # fmt: skip


def by_definition(
    x: Tensor, weight: Tensor, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None, rope: Rope | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v by definition, computed head by head. A rotation is a product of complex numbers."""
    outputs = []
    for head in range(HEADS + 2 * KV_HEADS):
        rows = slice(head * DIM, (head + 1) * DIM)
        y = x @ weight[rows].T + (0 if bias is None else bias[rows])
        norm = q_norm if head < HEADS else k_norm
        if head < HEADS + KV_HEADS:
            if norm is not None:
                y = norm * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            if rope is not None:
                pairs = [(i, i + DIM // 2) if rope.style == "neox" else (2 * i, 2 * i + 1) for i in range(DIM // 2)]
                elements: dict[int, Tensor] = {}
                for i, (low, high) in enumerate(pairs):
                    angle, radius = POSITIONS.double() * rope.base ** (-2 * i / DIM), torch.ones(TOKENS).double()
                    if rope.xpos_scale is not None:
                        power = (POSITIONS.double() - 999 / 2) / rope.xpos_scale * (1 if head < HEADS else -1)
                        radius = ((2 * i / DIM + 0.4) / 1.4) ** power
                    turned = torch.complex(y[..., low], y[..., high]) * torch.polar(radius, angle)
                    elements[low], elements[high] = turned.real, turned.imag
                y = torch.stack([elements[i] for i in range(DIM)], -1)
        outputs.append(y)
    heads = torch.stack(outputs, 2)
    return heads[:, :, :HEADS], heads[:, :, HEADS : HEADS + KV_HEADS], heads[:, :, HEADS + KV_HEADS :]


@pytest.mark.parametrize("rope", [None, Rope(), Rope("interleaved", 500.0, 200.0), Rope("neox", 500.0, 200.0)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_like_its_definition(bias: bool, norm: bool, rope: Rope | None) -> None:
    parameters = weights(bias, norm)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    actual = project_qkv(**parameters, **sizes, rope=rope, **({} if rope is None else PLACED))
    reference = by_definition(**parameters, rope=rope)
    leaves = [x for x in parameters.values() if x is not None]
    seeds = [leaf(*x.shape, seed=7).detach() for x in reference]
    actual += torch.autograd.grad(actual, leaves, seeds)
    reference += torch.autograd.grad(reference, leaves, seeds)
    for x, y in zip(actual, reference, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_a_message_is_written_and_later_used_again() -> None:
    x, weight = leaf(BATCH, TOKENS, MODEL), leaf(2 * KV_HEADS * DIM, MODEL)
    record = torch.full((TOKENS, BATCH, KV_HEADS, 2 * DIM), float("nan"), dtype=torch.float64)
    into = record[..., :DIM], record[..., DIM:]
    k, v = project(x, weight, None, 0, KV_HEADS, DIM, into=into)
    assert k.data_ptr() == into[0].data_ptr() and v.data_ptr() == into[1].data_ptr()
    fresh = project(x, weight, None, 0, KV_HEADS, DIM)
    assert torch.equal(record.transpose(0, 1), torch.cat(fresh, -1))
    record.zero_()  # the next layer's message
    actual = torch.autograd.grad((k, v), (x, weight), [torch.ones_like(k)] * 2)
    reference = torch.autograd.grad(fresh, (x, weight), [torch.ones_like(k)] * 2)
    assert all(torch.equal(x, y) for x, y in zip(actual, reference, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_and_rotation_round_once(dtype: torch.dtype) -> None:
    x, norm = leaf(1, TOKENS, 16).detach().to(dtype), leaf(16).detach().to(dtype)
    unit, far = torch.eye(16, dtype=dtype), POSITIONS + 1_000_000
    turn, wide_turn = (rotation(far, 16, 1e4, wide) for wide in (torch.float32, torch.float64))
    (q,) = project(x, unit, None, 1, 0, 16, norms=(norm, None), turns=(turn, None))
    wide = x.double(), unit.double(), None
    (exact,) = project(*wide, 1, 0, 16, norms=(norm.double(), None), turns=(wide_turn, None))
    assert q.dtype == dtype
    half_step = exact.abs() * torch.finfo(dtype).eps / 2
    assert ((q.double() - exact).abs() <= half_step + 1e-6).all()  # 1e-6: float32 rounding in between


def auto(device: str, dtype: torch.dtype = torch.bfloat16, head_dim: int = DIM) -> str:
    return backend_for(SimpleNamespace(device=torch.device(device), dtype=dtype), head_dim)  # type: ignore[arg-type]


def test_which_backend_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "find_spec", lambda name: object())
    assert auto("cpu") == "plain" and auto("cuda") == "epilogue"
    assert auto("cuda", torch.float64) == "plain" and auto("cuda", head_dim=15) == "plain"
    monkeypatch.setattr(projection, "find_spec", lambda name: None)
    assert auto("cuda") == "plain"


X, W = torch.zeros(1, 3, 8), torch.zeros(32, 8)
GOOD: dict[str, Any] = {"x": X, "weight": W, "bias": None, "heads": 2, "kv_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, r"a weight \(40, model\), got \(32, 8\)"),
        ({"x": X[0]}, r"x must be \(batch, tokens, model\)"),
        ({"x": X[..., :5]}, "got \\(1, 3, 5\\)"),
        ({"x": X.half()}, "must have one dtype"),
        ({"bias": torch.zeros(32).half()}, "must have one dtype"),
        ({"bias": torch.zeros(1)}, r"shape \(32,\), .* got \(1,\)"),
        ({"q_norm": torch.zeros(1)}, r"shape \(8,\), got \(1,\)"),
        ({"k_norm": torch.zeros(2, 8)}, r"shape \(8,\)"),
        ({"rope": Rope()}, "rope and positions belong together"),
        ({"positions": torch.arange(3)}, "rope and positions belong together"),
        ({"rope": Rope("gptj"), "positions": torch.arange(3)}, "use neox or interleaved"),
        ({"rope": Rope(), "positions": torch.arange(1)}, "3 tokens .* need a rotation"),
        ({"rope": Rope(), "positions": torch.arange(3), "head_dim": 1, "heads": 30}, "even head_dim"),
        ({"backend": "cublas"}, "choose one of auto, plain, epilogue, fused"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    project_qkv(**GOOD)
    with pytest.raises(InputError, match=message):
        project_qkv(**{**GOOD, **change})


@pytest.mark.parametrize(
    "view",
    [torch.zeros(3, 1, 2, 9), torch.zeros(3, 1, 2, 8).half(), torch.zeros(3, 1, 8, 2).mT, torch.zeros(1, 3, 2, 8)],
)
def test_places_that_do_not_fit(view: Tensor) -> None:
    fits = torch.zeros(3, 1, 2, 8)
    project(X, W, None, 0, 2, 8, into=(fits, fits.clone()))
    for into in ((fits, view), (view, fits)):
        with pytest.raises(InputError, match=r"into must be two \(3, 1, 2, 8\) views of torch.float32"):
            project(X, W, None, 0, 2, 8, into=into)


@pytest.mark.parametrize(
    ("dtype", "bits", "scale"), [(torch.float64, 60, 62), (torch.bfloat16, 60, 62), (torch.float16, 10, 370)]
)
def test_xpos_refuses_factors_that_overflow(dtype: torch.dtype, bits: int, scale: int) -> None:
    length, positions = 4095, torch.tensor([0, 4094])
    bound = 2047 * math.log2(3.5) / bits  # scale at which the first pair's factor is 2**bits at both ends
    assert math.ceil(bound) == scale
    with pytest.raises(InputError, match=rf"4095 tokens exceed 2\*\*-{bits} .*use an xpos_scale of at least {scale}"):
        Rope(xpos_scale=bound * 0.999).turns(positions, DIM, dtype, length)
    for turn in Rope("neox", xpos_scale=bound * 1.001).turns(positions, DIM, dtype, length):
        factors = torch.hypot(turn.cos, turn.sin)
        assert turn.cos.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert factors.log2().abs().max().item() == pytest.approx(bits / 1.001, rel=1e-5)
    Rope(xpos_scale=scale).turns(positions, DIM, dtype, length)


def test_xpos_needs_the_length() -> None:
    with pytest.raises(InputError, match="pass its length in tokens"):
        Rope(xpos_scale=64.0).turns(POSITIONS, DIM, torch.float64)


@pytest.mark.parametrize("scale", [0, -512.0, math.inf, math.nan, "512"])
def test_an_xpos_scale_that_is_none(scale: Any) -> None:
    with pytest.raises(InputError, match="xpos_scale must be a positive number of tokens or None"):
        Rope(xpos_scale=scale).check(DIM)

"""The projection kernels agree with plain torch in float64 in values and gradients, and write nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.core.geometry import StridedRange
from ringattn.errors import InputError, UnsupportedError
from ringattn.kernels.qkv import Finish, epilogue_call, epilogue_grad_call, norm_parts, projection_call
from ringattn.layers.projection import project, project_qkv
from ringattn.layers.rotary import Rope, rotate, rotation
from tests.kernels.interpreter_rows.canary import Canaries, error, random

FP32 = 1e-6  # three times the floor that was measured in this interpreter
BATCH, TOKENS, MODEL, HEADS, KV_HEADS = 2, 37, 72, 4, 2
FULL = {"bias": True, "norm": True, "rope": Rope("neox")}
CASES: dict[str, dict[str, Any]] = {
    "all-neox": FULL,
    "all-interleaved": {**FULL, "rope": Rope("interleaved", 500_000.0)},
    "bare": {"bias": False, "norm": False, "rope": None},
    "bias": {"bias": True, "norm": False, "rope": None},
    "norm": {"bias": False, "norm": True, "rope": None},
    "rope": {"bias": False, "norm": False, "rope": Rope("neox")},
    "xpos": {**FULL, "rope": Rope("interleaved", xpos_scale=20_000.0)},
}


def positions() -> Tensor:
    """Return the global positions of the tokens."""
    return torch.arange(TOKENS) * 1000 + 7


def results(dtype: torch.dtype, backend: str, dim: int, bias: bool, norm: bool, rope: Rope | None) -> list[Tensor]:
    """Return q, k, v and the gradients of x and of every weight. The inputs have the same values in every dtype."""
    columns = (HEADS + 2 * KV_HEADS) * dim

    def leaf(*shape: int) -> Tensor:
        return random(*shape, dtype=torch.bfloat16).to(dtype).requires_grad_()

    x, weight = leaf(BATCH, TOKENS, MODEL), leaf(columns, MODEL)
    b = leaf(columns) if bias else None
    q_norm, k_norm = (leaf(dim), leaf(dim)) if norm else (None, None)
    heads_out = project_qkv(
        x, weight, b, HEADS, KV_HEADS, dim,
        q_norm=q_norm, k_norm=k_norm, rope=rope, positions=positions() if rope else None, length=TOKENS * 1000,
        backend=backend,
    )  # fmt: skip
    seeds = [random(*heads.shape, dtype=torch.bfloat16, seed=5).to(dtype) for heads in heads_out]
    leaves = [leaf_or_none for leaf_or_none in (x, weight, b, q_norm, k_norm) if leaf_or_none is not None]
    return [*heads_out, *torch.autograd.grad(heads_out, leaves, seeds)]


@pytest.mark.parametrize("backend", ["epilogue", "fused"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_in_float32(case: str, backend: str) -> None:
    references = results(torch.float64, "plain", 32, **CASES[case])
    for actual, reference in zip(results(torch.float32, backend, 32, **CASES[case]), references, strict=True):
        assert actual.shape == reference.shape and error(actual, reference) < FP32


@pytest.mark.parametrize("backend", ["epilogue", "fused"])
@pytest.mark.parametrize(
    ("case", "dim"), [("all-neox", 16), ("all-neox", 80), ("all-interleaved", 48), ("all-interleaved", 128)]
)
def test_head_dimensions(case: str, dim: int, backend: str) -> None:
    references = results(torch.float64, "plain", dim, **CASES[case])
    for actual, reference in zip(results(torch.float32, backend, dim, **CASES[case]), references, strict=True):
        assert error(actual, reference) < FP32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["epilogue", "fused"])
@pytest.mark.parametrize("case", ["all-neox", "bias"])
def test_half_precision_errs_no_more_than_plain_torch(case: str, backend: str, dtype: torch.dtype) -> None:
    references = results(torch.float64, "plain", 48, **CASES[case])
    plain = results(dtype, "plain", 48, **CASES[case])
    for actual, in_torch, reference in zip(results(dtype, backend, 48, **CASES[case]), plain, references, strict=True):
        assert error(actual, reference) <= 1.25 * error(in_torch, reference)


@pytest.mark.parametrize("backend", ["plain", "epilogue", "fused"])
def test_keys_and_values_go_into_a_message(canaries: Canaries, backend: str) -> None:
    dim = 32
    x, weight = random(BATCH, TOKENS, MODEL).requires_grad_(), random(2 * KV_HEADS * dim, MODEL).requires_grad_()
    turn = rotation(positions(), dim, 1e4, torch.float32)
    record = canaries.out((TOKENS, BATCH, KV_HEADS, 2 * dim), torch.float32, dense=True)
    into = record[..., :dim], record[..., dim:]
    k, v = project(x, weight, None, 0, KV_HEADS, dim, turns=(None, turn), into=into, backend=backend)
    assert k.data_ptr() == into[0].data_ptr() and v.data_ptr() == into[1].data_ptr()

    wide_x, wide_w = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    wide_turn = rotation(positions(), dim, 1e4, torch.float64)
    raw = (wide_x @ wide_w.T).unflatten(-1, (-1, dim))
    reference = rotate(raw[:, :, :KV_HEADS], *wide_turn), raw[:, :, KV_HEADS:]
    seeds = random(*k.shape, seed=1), random(*v.shape, seed=2)
    actual = [k, v, *torch.autograd.grad((k, v), (x, weight), seeds)]
    grads = torch.autograd.grad(reference, (wide_x, wide_w), [seed.double() for seed in seeds])
    assert all(error(tensor, expected) < FP32 for tensor, expected in zip(actual, [*reference, *grads], strict=True))
    assert torch.equal(record.transpose(0, 1), torch.cat((k, v), -1))


@pytest.mark.parametrize("run", [StridedRange(1, 12, 3), StridedRange(5, 4, 8)], ids=str)
def test_dilated_rows_by_list_and_by_slice(run: StridedRange) -> None:
    """A list of rows gives the same result as a strided view of x, also if the list is a column of a larger table."""
    dim, x, weight = 32, random(BATCH, TOKENS, MODEL), random(2 * KV_HEADS * 32, MODEL)
    rows = torch.arange(run.start, run.stop, run.stride)

    def projected(of: Tensor, rows: Tensor | None) -> tuple[Tensor, ...]:
        places = [torch.empty(BATCH, run.count, KV_HEADS, dim) for _ in range(2)]
        projection_call(of, weight, None, Finish(*places, None), rows).run()
        return tuple(places)

    by_slice = projected(x[:, run.start : run.stop : run.stride], None)
    in_a_table = torch.stack((rows, torch.full_like(rows, 1 << 40)), 1)[:, 0].contiguous()
    for by_list in (projected(x, rows), projected(x, in_a_table)):
        assert all(map(torch.equal, by_list, by_slice))


@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize("dim", [48, 64])
def test_nothing_is_read_or_written_outside_the_tensors(canaries: Canaries, dim: int, style: str) -> None:
    tokens, heads = 41, 2
    hold = canaries.hold
    cos, sin, _ = rotation(torch.arange(tokens), dim, 1e4, torch.float32)
    x = hold(random(BATCH, tokens, MODEL))
    weight = hold(random(2 * heads * dim, MODEL))
    bias, norm = hold(random(2 * heads * dim), dense=True), hold(random(dim), dense=True)
    turn = {"cos": hold(cos, dense=True), "sin": hold(sin, dense=True), "interleaved": style == "interleaved"}

    def places() -> tuple[Tensor, Tensor]:
        return tuple(canaries.out((BATCH, tokens, heads, dim), torch.float32) for _ in range(2))

    finish = Finish(*places(), norm, **turn)
    raw = hold(x @ weight.T + bias, dense=True)
    epilogue_call(raw, finish).run()
    fused = finish._replace(**dict(zip(("first", "second"), places(), strict=True)))
    projection_call(x, weight, bias, fused).run()
    for separate, projected in zip(finish[:2], fused[:2], strict=True):
        assert error(separate, projected) < FP32

    seeds = [hold(random(BATCH, tokens, heads, dim, seed=seed)) for seed in (1, 2)]
    grads = finish._replace(first=seeds[0], second=seeds[1])
    draw = canaries.out((BATCH, tokens, 2 * heads * dim), torch.float32, dense=True)
    parts = canaries.out(norm_parts(grads).shape, torch.float32, dense=True)
    epilogue_grad_call(raw, grads, draw, parts).run()
    wide, wide_norm = raw.double().requires_grad_(), norm.double().requires_grad_()
    turned, rest = wide.unflatten(-1, (-1, dim)).split(heads, 2)
    turned = rotate(F.rms_norm(turned, (dim,), wide_norm, 1e-6), cos.double(), sin.double(), style == "interleaved")
    reference = torch.autograd.grad((turned, rest), (wide, wide_norm), [seed.double() for seed in seeds])
    assert error(draw, reference[0]) < FP32 and error(parts.sum((0, 1)), reference[1]) < FP32


@pytest.mark.parametrize("backend", ["epilogue", "fused"])
def test_no_tokens_at_all(backend: str) -> None:
    x, weight = torch.zeros(1, 0, 16, requires_grad=True), random(64, 16).requires_grad_()
    (q,) = project(x, weight, None, 2, 0, 32, norms=(torch.ones(32), None), backend=backend)
    assert q.shape == (1, 0, 2, 32)
    (dweight,) = torch.autograd.grad(q.sum(), weight)
    assert not dweight.any()


@pytest.mark.parametrize("backend", ["epilogue", "fused"])
def test_unsupported_calls_are_refused(backend: Any) -> None:
    wide = random(1, 3, 16, dtype=torch.float64), random(32, 16, dtype=torch.float64)
    with pytest.raises(InputError, match="backend='plain'"):
        project(*wide, None, 2, 0, 16, backend=backend)
    with pytest.raises(InputError, match="odd head_dim"):
        project(random(1, 3, 16), random(30, 16), None, 2, 0, 15, backend=backend)
    x = random(1, 3, 16).requires_grad_()
    (q,) = project(x, random(32, 16), None, 2, 0, 16, backend=backend)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        torch.autograd.grad(q.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("backend", ["plain", "epilogue", "fused"])
def test_queries_alone_give_no_gradient_to_the_norm_of_keys(backend: Any) -> None:
    x, weight, q_norm, k_norm = random(1, 3, 16), random(64, 16), *(random(16).requires_grad_() for _ in range(2))
    for heads, kv_heads, used, unused in ((4, 0, q_norm, k_norm), (0, 2, k_norm, q_norm)):
        parts = project(x, weight, None, heads, kv_heads, 16, norms=(q_norm, k_norm), backend=backend)
        gradient, none = torch.autograd.grad(sum(part.sum() for part in parts), (used, unused), allow_unused=True)
        assert gradient.any() and none is None


@pytest.mark.parametrize("backend", ["plain", "epilogue", "fused"])
def test_autocast_gives_its_own_dtype(backend: Any) -> None:
    x, weight, bias = random(1, 3, 16), random(32, 16), random(32)
    with torch.autocast(x.device.type, torch.bfloat16):
        (q,) = project(x, weight, bias, 2, 0, 16, norms=(torch.ones(16), None), backend=backend)
    narrow = [tensor.bfloat16() for tensor in (x, weight, bias)]
    assert torch.equal(q, *project(*narrow, 2, 0, 16, norms=(torch.ones(16), None), backend=backend))

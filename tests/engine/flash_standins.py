"""Stand-ins for FlashAttention 3 and 4 on the CPU. They have the real signatures and assert the real requirements.

Signatures and requirements are from Dao-AILab/flash-attention at commit 0251105: hopper/flash_api.cpp (TORCH_LIBRARY
and the checks of mha_fwd and mha_bwd) and flash_attn/cute/interface.py. The second schema of bwd is from commit de1584b
of the same repository, which xformers 0.0.34 includes. Causal masks are aligned to the bottom right corner, as in
FlashAttention.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringattn.engine.base import accumulator_dtype

FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_FA3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> "
)
FA3_BACKWARDS = {
    "0251105": _FA3_BACKWARD + "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    "de1584b": _FA3_BACKWARD + "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
}
# The parameters of FlashAttention 4's Python functions, in order and with their defaults.
FA4_FORWARD = (
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
    "window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
    "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, "
    "block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, "
    "q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, "
    "seqlen_k_per_split=None, disable_scheduler_metadata=False"
)
FA4_BACKWARD = (
    "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
    "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
    "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, "
    "AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, "
    "learnable_sink=None"
)


class Calls(list[tuple[str, dict[str, Any]]]):
    """The recorded calls. Each is a pair of the direction ("forward" or "backward") and the arguments by name."""

    def named(self, direction: str) -> list[dict[str, Any]]:
        return [arguments for called_direction, arguments in self if called_direction == direction]


@contextmanager
def fa3_library(backward: str = FA3_BACKWARDS["0251105"]) -> Iterator[Calls]:
    """Register `torch.ops.flash_attn_3` for CPU tensors, as FlashAttention 3 does on import. Yield the recorded calls.

    `backward`: the schema of the op `bwd`.
    """
    calls, library = Calls(), torch.library.Library("flash_attn_3", "DEF")
    returns_gradients = backward.endswith(FA3_BACKWARDS["de1584b"][len(_FA3_BACKWARD) :])

    def fwd(*positional: Any, **named: Any) -> tuple[Tensor, ...]:
        defaults = _defaults(torch.ops.flash_attn_3.fwd.default._schema)
        a = defaults | dict(zip(defaults, positional, strict=False)) | named
        calls.append(("forward", a))
        _only(a, defaults, "q", "k", "v", "softmax_scale", "is_causal", "num_splits", "sm_margin")
        out, lse = _forward(a["q"], a["k"], a["v"], a["is_causal"], a["softmax_scale"])
        return out, lse, torch.empty(0), torch.empty(0)

    def bwd(*positional: Any, **named: Any) -> tuple[Tensor, ...]:
        defaults = _defaults(torch.ops.flash_attn_3.bwd.default._schema)
        a = defaults | dict(zip(defaults, positional, strict=False)) | named
        calls.append(("backward", a))
        operands, grads = ("dout", "q", "k", "v", "out", "softmax_lse"), ("dq", "dk", "dv")
        _only(a, defaults, *operands, *grads, "softmax_scale", "is_causal", "deterministic", "sm_margin")
        # FlashAttention 3 raises "Deterministic backward not supported for hdim 256."
        assert not a["deterministic"] or a["q"].shape[-1] <= 192
        values = _backward(*(a[name] for name in operands), a["is_causal"], a["softmax_scale"])
        for name, value in zip(grads, values, strict=True):
            assert a[name].dtype == a["q"].dtype and a[name].stride(-1) == 1 and a[name].shape == value.shape
            a[name].copy_(value)
        workspace = [torch.empty(0) for _ in range(5)]
        return (*(a[name] for name in grads), *workspace) if returns_gradients else tuple(workspace)

    library.define(FA3_FORWARD)
    library.define(backward)
    library.impl("fwd", fwd, "CPU")
    library.impl("bwd", bwd, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


@contextmanager
def fa4_module() -> Iterator[Calls]:
    """Install FlashAttention 4's module `flash_attn.cute.interface` for CPU tensors. Yield the recorded calls."""
    calls, module = Calls(), ModuleType("flash_attn.cute.interface")

    def fwd(a: dict[str, Any], defaults: dict[str, Any]) -> tuple[Tensor | None, ...]:
        calls.append(("forward", a))
        _only(a, defaults, "q", "k", "v", "softmax_scale", "causal", "return_lse")
        assert a["return_lse"], "without it, and without a leaf that requires a gradient, lse is None"
        return *_forward(a["q"], a["k"], a["v"], a["causal"], a["softmax_scale"]), None, None

    def bwd(a: dict[str, Any], defaults: dict[str, Any]) -> tuple[Tensor | None, ...]:
        calls.append(("backward", a))
        operands = "dout", "q", "k", "v", "out", "lse"
        _only(a, defaults, *operands, "softmax_scale", "causal", "deterministic")
        return _backward(*(a[name] for name in operands), a["causal"], a["softmax_scale"])

    module._flash_attn_fwd = _with_signature(FA4_FORWARD, fwd)  # type: ignore[attr-defined]
    module._flash_attn_bwd = _with_signature(FA4_BACKWARD, bwd)  # type: ignore[attr-defined]
    assert module.__name__ not in sys.modules
    sys.modules[module.__name__] = module
    try:
        yield calls
    finally:
        del sys.modules[module.__name__]


def _defaults(schema: Any) -> dict[str, Any]:
    """Return the default of each argument of an op, in order, or None for an argument without a default."""
    return {argument.name: argument.default_value for argument in schema.arguments}


def _with_signature(arguments: str, body: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Return a function with exactly the parameters in `arguments`, which is Python code.

    It calls `body` with two dicts: all arguments by name, and the defaults.
    """
    signature = inspect.signature(eval(f"lambda {arguments}: None"))
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}

    def call(*positional: Any, **named: Any) -> tuple[Tensor | None, ...]:
        bound = signature.bind(*positional, **named)
        return body(defaults | bound.arguments, defaults)

    return call


def _only(arguments: dict[str, Any], defaults: dict[str, Any], *used: str) -> None:
    """Assert that all arguments except `used` have their default values, because the stand-in ignores them."""
    changed = {name for name, value in arguments.items() if name not in used and value != defaults[name]}
    assert not changed, changed


def _readable(x: Tensor) -> Tensor:
    """Assert that `x` meets the requirements of TMA, and return it.

    Its last stride must be 1, its address and other strides multiples of 16 bytes, its head dimension one of 8.
    """
    assert x.dim() == 4 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256
    assert x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
    return x


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Return the scaled and masked scores (batch, kv heads, group, q rows, k rows) in float64."""
    grouped = q.double().unflatten(2, (k.shape[2], -1))
    s = torch.einsum("bnhgd,bmhd->bhgnm", grouped, k.double()) * scale
    rows, keys = s.shape[-2:]
    return s.masked_fill(~torch.ones(rows, keys).tril(keys - rows).bool(), float("-inf")) if causal else s


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return out (batch, rows, heads, dim) in q's dtype, and lse (batch, heads, rows) in natural logarithm."""
    q, k, v = (_readable(x) for x in (q, k, v))
    assert q.dtype == k.dtype == v.dtype and q.shape[0] == k.shape[0] == v.shape[0]
    assert k.shape[1:3] == v.shape[1:3] and q.shape[2] % k.shape[2] == 0 and q.shape[3] == k.shape[3]
    s = _scores(q, k, causal, scale)
    lse = s.logsumexp(-1)
    out = torch.einsum("bhgnm,bmhd->bnhgd", (s - lse.unsqueeze(-1)).exp(), v.double()).flatten(2, 3)
    return out.to(q.dtype), lse.flatten(1, 2).to(accumulator_dtype(q.dtype))


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = (_readable(x) for x in (dout, q, k, v, out))
    assert dout.dtype == q.dtype == k.dtype == v.dtype == out.dtype and lse.dtype == accumulator_dtype(q.dtype)
    batch, rows, heads, _ = q.shape
    assert dout.shape == out.shape == (batch, rows, heads, v.shape[3]) and k.shape[:3] == v.shape[:3]
    assert lse.shape == (batch, heads, rows) and lse.is_contiguous()
    group = (k.shape[2], -1)
    p = (_scores(q, k, causal, scale) - lse.double().unflatten(1, group).unsqueeze(-1)).exp()
    grouped = dout.double().unflatten(2, group)
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2).unflatten(1, group).unsqueeze(-1)
    ds = p * (torch.einsum("bnhgd,bmhd->bhgnm", grouped, v.double()) - delta) * scale
    dq = torch.einsum("bhgnm,bmhd->bnhgd", ds, k.double()).flatten(2, 3)
    dk = torch.einsum("bhgnm,bnhgd->bmhd", ds, q.double().unflatten(2, group))
    dv = torch.einsum("bhgnm,bnhgd->bmhd", p, grouped)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

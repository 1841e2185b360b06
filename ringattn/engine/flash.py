"""The engines on FlashAttention 3 and 4, for GPUs and environments that have them.

Guarantees: the same as the aten engine for fused CUDA kernels. These ops replace torch's for half inputs; everything
else runs as in the aten engine. Operands are views. An operand is copied only if the tensor memory accelerator cannot
describe it (CUDA driver API, cuTensorMapEncodeTiled: addresses and strides are multiples of 16 bytes). Backward repeats
bit for bit under `torch.use_deterministic_algorithms`.
Written from Dao-AILab/flash-attention at 0251105 (hopper/flash_api.cpp, flash_attn/cute/interface.py) and at de1584b,
which xformers 0.0.34 includes as a library, and from torch 2.13 (torch/nn/attention/_fa3.py and _fa4.py). The
tests without a GPU check names, layouts, strides and dtypes against the signatures recorded from there.
Not covered: ranks, schedules, softcap (refused).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.engine.aten import FLASH, HALF_DTYPES, AtenEngine, BlockOp
from ringattn.errors import UnsupportedError

# Each of these modules registers torch.ops.flash_attn_3.
FA3_LIBRARIES = ("flash_attn_3._C", "xformers.flash_attn_3._C")
# hopper/flash_api.cpp: "Deterministic backward not supported for hdim 256". Larger dimensions are rounded up to 256.
FA3_DETERMINISTIC_DIM = 192


def _fa3_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, sm_margin: int = 0
) -> tuple[Tensor, Tensor]:
    q, k, v = (_rows_first(x) for x in (q, k, v))
    # One split: several would need a second kernel that merges them, and their number would depend on the SM count.
    out, lse = torch.ops.flash_attn_3.fwd(
        q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1, sm_margin=sm_margin
    )[:2]
    return out.transpose(1, 2), lse


def _fa3_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and q.shape[-1] > FA3_DETERMINISTIC_DIM:
        return FLASH.backward(dout, q, k, v, out, lse, causal, scale)
    dout, q, k, v, out = (_rows_first(x) for x in (dout, q, k, v, out))
    # Pass the gradients in: the return values have changed between versions.
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    torch.ops.flash_attn_3.bwd(
        dout, q, k, v, out, lse.contiguous(), dq=dq, dk=dk, dv=dv,
        softmax_scale=scale, is_causal=causal, deterministic=deterministic, sm_margin=sm_margin,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _fa4_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(q):  # The kernel is compiled for and launched on the current device.
        out, lse = _fa4()._flash_attn_fwd(
            *(_rows_first(x) for x in (q, k, v)), softmax_scale=scale, causal=causal, return_lse=True
        )[:2]
    return out.transpose(1, 2), lse


def _fa4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(q):
        dq, dk, dv = _fa4()._flash_attn_bwd(
            *(_rows_first(x) for x in (q, k, v, out, dout)), lse.contiguous(), softmax_scale=scale, causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )[:3]  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _rows_first(x: Tensor) -> Tensor:
    """Return (batch, heads, rows, dim) as (batch, rows, heads, dim): a view, or a copy if 16-byte access would fail."""
    x = x.transpose(1, 2)
    if x.stride(-1) != 1 or x.data_ptr() % 16 or any(step * x.element_size() % 16 for step in x.stride()[:-1]):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _fa4() -> Any:
    return import_module("flash_attn.cute.interface")


FA3 = BlockOp("fa3", _fa3_forward, _fa3_backward, True, True, 8, 256)
FA4 = BlockOp("fa4", _fa4_forward, _fa4_backward, True, True, 8, 256)
# Forward and backward of the ops with an argument `sm_margin`; the recorded signature of FlashAttention 4 has none.
# The backward kernel of FlashAttention 3 accepts and ignores it: its grid has one block per tile of keys.
WITH_SM_MARGIN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {"fa3": (_fa3_forward, _fa3_backward)}


class FlashEngine(AtenEngine):
    """The engine that uses `op` for the half inputs that the op supports, and the aten engine for other inputs."""

    def __init__(self, device: torch.device, op: BlockOp, sm_margin: int = 0) -> None:
        """Create the engine. `sm_margin`: the multiprocessors to leave free for exchanges, if the op can do so."""
        super().__init__(device)
        if sm_margin and op.name in WITH_SM_MARGIN:
            self.sm_margin = sm_margin
            forward, backward = (partial(function, sm_margin=sm_margin) for function in WITH_SM_MARGIN[op.name])
            op = op._replace(forward=forward, backward=backward)
        self.name, self.op, self._ops = op.name, op, (op, *self._ops)

    def _choose_op(self, device: torch.device, dtype: torch.dtype, dim: int) -> BlockOp | None:
        fits = dtype in HALF_DTYPES and dim <= self.op.max_dim
        return self.op if fits else super()._choose_op(device, dtype, dim)


class _Need(NamedTuple):
    """The requirements of an op. `max_dims`: the largest head dimension for each supported major compute capability."""

    op: BlockOp
    modules: Sequence[str]
    package: str
    max_dims: dict[int, int]


NEEDS = {
    "fa3": _Need(FA3, FA3_LIBRARIES, "flash-attn-3 (Dao-AILab/flash-attention, hopper/) or xformers 0.0.34", {9: 256}),
    "fa4": _Need(FA4, ("flash_attn.cute.interface",), "flash-attn-4", {9: 256, 10: 128}),
}


def flash_engine(name: str, device: torch.device, dtype: torch.dtype, dim: int, sm_margin: int = 0) -> FlashEngine:
    """Return the engine "fa3" or "fa4" for inputs of this dtype and largest head dimension.

    Raises UnsupportedError if the kernels do not support the device, dtype or dimension, or if they are not installed;
    the message then names the package.
    """
    need, advice = NEEDS[name], "use engine='auto'"
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    if major not in need.max_dims:
        needed = " or ".join(f"sm_{major}0" for major in need.max_dims)
        actual = f"sm_{major}x" if major else f"{device}"
        raise UnsupportedError(f"engine='{name}' needs a GPU with {needed}, not {actual}; {advice}")
    if dtype not in HALF_DTYPES:
        raise UnsupportedError(f"engine='{name}' takes float16 and bfloat16, not {dtype}; {advice}")
    if dim > need.max_dims[major]:
        raise UnsupportedError(f"engine='{name}' takes head dimensions to {need.max_dims[major]}, not {dim}; {advice}")
    _import_first(name, need)
    return FlashEngine(device, need.op._replace(max_dim=need.max_dims[major]), sm_margin)


def _import_first(name: str, need: _Need) -> None:
    """Import the first of the op's modules that is installed. Raises UnsupportedError if none is."""
    failures = []
    for module in need.modules:
        try:
            import_module(module)
            return
        except ImportError as error:  # not installed, or a library that does not load
            failures.append(str(error))
    raise UnsupportedError(
        f"engine='{name}' needs the package {need.package} ({'; '.join(failures)}); use engine='auto'"
    )

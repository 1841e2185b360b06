"""Modes of torch under which a script computes in float64, or rounds its sums in another way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COARSE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that `in_double` replaces."""
TO_FLOAT = (Tensor.float, Tensor.half, Tensor.bfloat16)

SUMS = frozenset(
    "mm addmm bmm baddbmm mv addmv dot sum mean cumsum logsumexp var var_mean std linalg_vector_norm nll_loss_forward "
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm native_group_norm "
    "native_layer_norm_backward native_group_norm_backward native_batch_norm native_batch_norm_backward "
    "_fused_rms_norm _fused_rms_norm_backward convolution convolution_backward embedding_dense_backward".split()
)
"""Operators whose results depend on the order of a sum. Those of attention are recognised by their names."""
ATTENTION = "_scaled_dot_product"


@contextmanager
def in_double() -> Iterator[None]:
    """Compute in float64, within the block, what a script computes in float32, bf16 or fp16.

    The default dtype is float64, dtypes that the script passes to torch are replaced by float64, and parameters and
    buffers become float64 when a module receives them. Autocast does not change float64 tensors.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    hooks = (
        register_module_parameter_registration_hook(_double_values),
        register_module_buffer_registration_hook(_double_values),
    )
    try:
        with InDouble():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        torch.set_default_dtype(default)


class InDouble(TorchFunctionMode):
    """Replaces coarser dtypes by float64 in the arguments of every call; see `in_double`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_FLOAT:
            return args[0].double()
        args = tuple(_double_dtype(arg) for arg in args)
        kwargs = {name: _double_dtype(arg) for name, arg in (kwargs or {}).items()}
        if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            with _double_names():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def _double_names() -> Iterator[None]:
    """Let the names of dtypes mean float64 within the block, for regions that backward recomputes.

    No mode of torch is active there.
    """
    before: list[tuple[Any, str, Any]] = [
        (torch, name, getattr(torch, name)) for name in ("float32", "float", "bfloat16", "float16", "half")
    ]
    before += [(Tensor, method.__name__, method) for method in TO_FLOAT]
    try:
        for owner, name, _ in before:
            setattr(owner, name, Tensor.double if owner is Tensor else torch.float64)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _double_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in COARSE else value


def _double_values(module: nn.Module, name: str, x: Any) -> None:
    if isinstance(x, Tensor) and x.dtype in COARSE:
        x.data = x.data.double()


class RoundsOtherwise(TorchDispatchMode):
    """Rounds sums in another way: each number of a result is multiplied by 1 + eps or 1 - eps, at random.

    `eps` is the unit of rounding of the result's dtype. The difference of two runs of the same script, one under this
    mode, shows how far rounding alone moves its gradients.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)  # leaves the script's random numbers as they are
        self.paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled, because the code that will run is the one to compare."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self.paused or not (name in SUMS or name.startswith(ATTENTION)) or "out" in (kwargs or {}):
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                x = leaf._local_tensor if hasattr(leaf, "_local_tensor") else leaf
                signs = torch.randint(2, x.shape, generator=self._generator).to(x.device, x.dtype)
                x.mul_(1 + torch.finfo(x.dtype).eps * (2 * signs - 1))
        return out

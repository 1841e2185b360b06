"""What the compile gate compiles: each entry of the block-size tables through the library's own launch wrappers.

Promises: a case is a name, `sm_90/half/128/forward`, and `call_of` gives its launch with small tensors on the CPU.
Does not know: what a compiled kernel must look like.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.kernels.attention_backward import grad_kv, grad_q
from ringattn.kernels.attention_forward import forward
from ringattn.kernels.configs import ARCHITECTURES, DIMS, configs_for
from ringattn.kernels.launch_call import LaunchCall, Table
from tests.compile_gate import purpose

DTYPES = {"half": torch.bfloat16, "single": torch.float32}
KERNELS = ("forward", "grad_q", "grad_kv")
PURPOSES = {
    f"sm_80/purpose/0/{call.__name__}": call
    for call in (purpose.good, purpose.too_much_shared, purpose.spilling, purpose.crashing)
}


def arch_of(name: str) -> int:
    """10 * major + minor of the compute capability."""
    return int(name.split("/")[0].removeprefix("sm_"))


ENTRIES = tuple(
    f"sm_{arch}/{precision}/{dim}/{kernel}"
    for arch in ARCHITECTURES
    for precision in DTYPES
    for dim in DIMS
    for kernel in KERNELS
)
TESTED = tuple(name for name in ENTRIES if arch_of(name) in ((80, 90, 100) if "/half/" in name else (90,)))
"""One architecture of each kind; float32 alike on all. The others are compiled when the golden table is renewed."""


def call_of(name: str) -> LaunchCall:
    """The launch to compile, with the sizes and alignments of ordinary calls."""
    if name in PURPOSES:
        return PURPOSES[name]()
    _, precision, width, kernel = name.split("/")
    dim, dtype = int(width), DTYPES[precision]
    config = getattr(configs_for(arch_of(name), dtype, dim), kernel)
    q, k, v, dout = (_rows(dim, dtype) for _ in range(4))
    lse, delta = (torch.zeros(1, 16, 64) for _ in range(2))
    table = Table(torch.zeros(16, 8, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int32), 16)
    if kernel == "forward":
        return forward(q, k, v, _rows(dim), lse, table, config, scale=0.1)
    if kernel == "grad_q":
        return grad_q(q, k, v, dout, lse, delta, _rows(dim), table, config, scale=0.1)
    return grad_kv(q, k, v, dout, lse, delta, _rows(dim), _rows(dim), table, config, scale=0.1)


def _rows(dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(64, 1, 16, dim, dtype=dtype)

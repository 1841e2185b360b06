"""Which block sizes the attention kernels get: data, by GPU architecture, precision and head dimension.

Promises: every entry compiles within the architecture's shared memory, and without spills but for some of float32,
which the compile gate (tests/test_compile_gate.py) proves; the same entry for the same question, nothing is timed or
tuned at run time. Not yet tuned for speed on any GPU.
Does not know: the kernels, any device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ringattn.kernels.launch_call import Config


class Configs(NamedTuple):
    """One for each kernel."""

    forward: Config
    grad_q: Config
    grad_kv: Config


DIMS = (64, 128, 256)
"""A head dimension is served by the first of these that holds it."""

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
"""10 * major + minor of the compute capability."""

# Float32 products run without matrix units, each thread holding whole rows: small blocks, many warps.
_TINY = Config(16, 16, 8, 1)
_SINGLE = {
    64: Configs(Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    128: Configs(_TINY, _TINY, _TINY),
    256: Configs(_TINY, _TINY, _TINY),
}
# Of the warp-wide matrix units (HMMA), in 99 KiB of shared memory.
_WARP = {
    64: Configs(Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(64, 32, 8, 2)),
    128: Configs(Config(128, 32, 8, 3), Config(64, 64, 8, 2), Config(64, 32, 8, 2)),
    256: Configs(Config(64, 32, 8, 1), Config(64, 32, 8, 1), Config(32, 32, 8, 1)),
}
_HALF = {
    80: _WARP,
    86: _WARP,
    89: _WARP,
    90: {
        64: Configs(Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 32, 8, 2)),
        128: Configs(Config(128, 64, 8, 3), Config(64, 64, 8, 2), Config(64, 32, 8, 2)),
        256: Configs(Config(64, 32, 8, 2), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    },
    100: {
        64: Configs(Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 32, 8, 2)),
        128: Configs(Config(128, 64, 8, 2), Config(64, 32, 8, 2), Config(64, 32, 8, 2)),
        256: Configs(Config(64, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    },
    120: _WARP,
}


def configs_for(arch: int, dtype: torch.dtype, dim: int) -> Configs:
    """The entry for `arch` (90 for sm_90), inputs of `dtype` and the greater of the two head dimensions.

    Raises LookupError, naming what there is, for anything else.
    """
    if arch not in ARCHITECTURES:
        supported = ", ".join(f"sm_{one}" for one in ARCHITECTURES)
        raise LookupError(f"no block sizes for sm_{arch}; there are some for {supported}")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise LookupError(f"no block sizes for {dtype}; there are some for float32, float16 and bfloat16")
    width = next((one for one in DIMS if dim <= one), None)
    if width is None:
        raise LookupError(f"no block sizes for head dimension {dim}; there are some for dimensions to {DIMS[-1]}")
    return (_SINGLE if dtype == torch.float32 else _HALF[arch])[width]

"""Which engine computes a call.

Does not know: ranks, schedules.
"""

from __future__ import annotations

from functools import cache

import torch

from ringattn.engine.aten import AtenEngine
from ringattn.engine.base import Engine
from ringattn.engine.plain import PlainEngine
from ringattn.errors import UnsupportedError

ENGINES = ("auto", "aten", "plain", "triton")


@cache
def engine_named(name: str, softcap: float | None, device: torch.device) -> Engine:
    """The engine called `name` for `device`; for auto the fused kernels, unless the call needs what they lack.

    Raises `UnsupportedError` for softcap on the fused kernels, and for triton where it cannot run.
    """
    if name == "triton":
        return _triton(device)
    if name == "auto":
        name = "aten" if softcap is None else "plain"
    if name == "aten" and softcap is not None:
        raise UnsupportedError("engine='aten' has no softcap; use engine='auto' or engine='plain'")
    return AtenEngine(device) if name == "aten" else PlainEngine()


def _triton(device: torch.device) -> Engine:
    """The engine on our own kernels, imported only now: triton comes with CUDA builds of torch alone."""
    try:
        from ringattn.engine.triton import TritonEngine, missing
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"engine='triton' needs the package triton, which is not installed ({error}); use engine='auto'"
        ) from error
    if why := missing(device):
        raise UnsupportedError(why)
    return TritonEngine()

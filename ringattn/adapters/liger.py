"""Liger's kernels in a model over a ring: they work on one token at a time, but for the loss of labels.

Its fused loss takes labels that are shifted already, and divides by the labels of all ranks where it is told them, so
that a rank's loss is its part. Kernels of norms, rotary positions and MLPs need nothing.
Checked with liger-kernel 0.8.
"""

from __future__ import annotations

from typing import Any

from ringattn.adapters.hosts import require_checked
from ringattn.adapters.transformers_outputs import know_outputs
from ringattn.errors import UnsupportedError


def know_liger(model: Any) -> None:
    """Accept the loss of a model whose forward is Liger's.

    Raises `UnsupportedError` for a Liger that was not checked, and for a forward that is not that of a language model.
    """
    forward = model.forward
    if not (getattr(forward, "__module__", "") or "").startswith("liger_kernel."):
        return
    require_checked("liger-kernel", "0.8")
    if forward.__name__ != "lce_forward":
        raise UnsupportedError(
            f"Liger's {forward.__name__} of {type(model).__name__} was not compared with one process; leave "
            "fused_linear_cross_entropy out, by liger_kernel_config or the arguments of Liger's function"
        )
    know_outputs(model, "loss")

"""What torch's attention kernels on the CPU allocate inside a call, which no storage shows."""

from __future__ import annotations

from typing import Any

import torch

from ringattn.engine.aten import kernel_bytes


def attention_scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """What torch's CPU flash kernels allocate inside a call (see `ringattn.engine.aten`); 0 for other operators."""
    aten = torch.ops.aten
    if func == aten._scaled_dot_product_flash_attention_for_cpu.default:
        q, k = args[:2]
        return kernel_bytes(q.shape[2], k.shape[2], q.shape[3], q.element_size(), backward=False)
    if func == aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        dout, q, k = args[:3]
        copied = 0 if dout.transpose(1, 2).is_contiguous() else dout.numel() * dout.element_size()
        return copied + kernel_bytes(q.shape[2], k.shape[2], q.shape[3], q.element_size(), backward=True)
    return 0

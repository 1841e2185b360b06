"""Time work on the GPU with the device's events, and measure the host time of a call.

Guarantees: the device is warmed up, the median of the repetitions is returned, and the L2 cache is flushed between them
(`triton.testing.do_bench`). On a CPU, which serves only for rehearsals, the wall-clock time of one call is returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import triton


def device_us(work: Callable[[], Any], ms: int) -> float:
    """Return the median microseconds of `work` on the device. It is repeated for about `ms` milliseconds."""
    if torch.cuda.is_available():
        return float(triton.testing.do_bench(work, warmup=ms // 2, rep=ms, return_mode="median")) * 1e3
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def host_us(call: Callable[[], Any], calls: int = 200, rounds: int = 15) -> float:
    """Return the median microseconds of host time per call. The host waits for the device only between rounds."""
    times = []
    if not torch.cuda.is_available():
        calls = rounds = 1
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return median(times)


def device_facts() -> dict[str, str]:
    """Describe the device and the software that were measured."""
    if not torch.cuda.is_available():
        return {"device": "none: a rehearsal"}
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "triton": triton.__version__,
    }

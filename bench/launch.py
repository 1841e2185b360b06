"""The host's cost of one engine call, in microseconds, without a GPU: what is Python before the driver is called.

`python -m ringattn.bench.launch [rounds=N]` compares, for one bf16 forward step with head dimension 128:
`kernel[grid]`, the kept handle, the handle with its arguments at hand, and describing the call (strides and constants).
Promises: a driver that compiles for a named GPU and launches nothing, so the cost of the driver's own launch (about
3 us) is not in the figures; processor time of this thread, so that a busy machine
does not change them; the median of the rounds.
Does not know: attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import thread_time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ringattn.bench.options import parse
from ringattn.kernels.attention_forward import forward
from ringattn.kernels.configs import configs_for
from ringattn.kernels.launch import Kept
from ringattn.kernels.launch_call import LaunchCall, Table

CALLS = 200


@dataclass(frozen=True)
class Options:
    """`rounds`: how often 200 calls are timed."""

    rounds: int = 25


class StubDriver:
    """Stands in for Triton's CUDA driver: kernels are compiled for sm_`arch`, loading and launching do nothing."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)
        self.device, self.stream = 0, 0
        self.launched: list[tuple[Any, ...]] | None = None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 30},
            load_binary=lambda name, binary, shared, device: (1, name, 0, 0, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        """The GPU that is compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """`device`, which may be set."""
        return self.device

    def get_current_stream(self, device: int) -> int:
        """`stream`, which may be set."""
        return self.stream

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What a compiled kernel calls to launch itself; each has one of its own."""
        return partial(self.launch)

    def launch(self, *args: Any) -> None:
        """Launch nothing; if `launched` is a list, note the arguments."""
        if self.launched is not None:
            self.launched.append(args)


def step() -> LaunchCall:
    """One forward step over 16 query blocks."""
    q, k, v = (torch.zeros(64, 1, 8, 128, dtype=torch.bfloat16) for _ in range(3))
    out, lse = torch.zeros(64, 1, 8, 128), torch.zeros(1, 8, 64)
    table = Table(torch.zeros(16, 8, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int32), 8)
    return describe(q, k, v, out, lse, table)


def describe(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, table: Table) -> LaunchCall:
    """The call as the engine makes it."""
    return forward(q, k, v, out, lse, table, configs_for(90, torch.bfloat16, 128).forward, scale=0.1)


def per_call_us(work: Callable[[], Any], rounds: int) -> float:
    """Median microseconds of one `work`."""
    times = []
    for _ in range(rounds):
        start = thread_time()
        for _ in range(CALLS):
            work()
        times.append((thread_time() - start) / CALLS)
    return median(times) * 1e6


def costs_us(rounds: int) -> dict[str, float]:
    """Microseconds a call by what is measured. Puts a `StubDriver` in the place of the process's driver."""
    driver.set_active(StubDriver(90))
    call, kept = step(), Kept()
    handle = kept.compile(call)
    by_hand = partial(
        handle.run, *call.grid, 1, 1, 0, handle.function, handle.packed, None, None, None, *call.args, *handle.constants
    )
    q, k, v, out, lse, _, blocks, entries = call.args[:8]
    operands = (q, k, v, out, lse, Table(blocks, entries, 8))
    return {
        "kernel[grid](...)": per_call_us(call.run, rounds),
        "kept handle": per_call_us(lambda: kept.launch(call), rounds),
        "handle, arguments at hand": per_call_us(by_hand, rounds),
        "describing the call": per_call_us(lambda: describe(*operands), rounds),
        "describing and kept handle": per_call_us(lambda: kept.launch(describe(*operands)), rounds),
    }


def main(words: list[str]) -> None:
    """Print one line a measurement."""
    for name, cost_us in costs_us(parse(Options(), words).rounds).items():
        print(f"{name:28} {cost_us:7.2f} us", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

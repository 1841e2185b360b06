"""The host's cost of one engine call in microseconds, without a GPU: the Python work before the driver is called.

`python -m ringattn.bench.launch [rounds=N]` compares, for one bf16 step with head dimension 128 on sm_90:
`kernel[grid]` with and without describing the call (strides and constants), the compiled kernel with its arguments
ready, a repeat of the described call, and the engine's `attend` (one launch) and `attend_grad` (two).
Guarantees: the driver compiles for the named GPU and launches nothing, so the figures exclude the driver's own launch
(about 3 us). They are processor time of this thread: the minimum, median and maximum of the rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import thread_time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ringattn.bench import report
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, finish, progress, spread
from ringattn.core.geometry import CAUSAL, StridedRange, Tile, TokenRange
from ringattn.engine.base import KV, BackwardInputs, Output, Softmax, SoftmaxState
from ringattn.engine.triton import TritonEngine
from ringattn.kernels.attention_forward import forward
from ringattn.kernels.configs import configs_for
from ringattn.kernels.launch import Kept, LaunchCall, Table

CALLS = 200


@dataclass(frozen=True)
class LaunchOptions:
    """The options of the benchmark. In each of `rounds` rounds, 200 calls are timed."""

    rounds: int = 25
    results: str = RESULTS


class StubDriver:
    """A replacement of Triton's CUDA driver. It compiles kernels for sm_`arch`, and loads and launches nothing."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)
        self.device, self.stream, self.registers = 0, 0, 0
        self.launched: list[tuple[Any, ...]] | None = None
        self.properties = {"max_shared_mem": 1 << 30, "max_num_regs": 1 << 16, "multiprocessor_count": 108}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: self.properties,
            load_binary=lambda name, binary, shared, device: (1, name, self.registers, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> GPUTarget:
        """Return the GPU to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Return `device`, which may be set."""
        return self.device

    def get_current_stream(self, device: int) -> int:
        """Return `stream`, which may be set."""
        return self.stream

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return the function that launches a compiled kernel. Each kernel gets a new function object."""
        return partial(self.launch)

    def launch(self, *args: Any) -> None:
        """Launch nothing; record the arguments if `launched` is a list."""
        if self.launched is not None:
            self.launched.append(args)


def operands() -> tuple[Tensor, KV, SoftmaxState, BackwardInputs, Output, KV]:
    """Return the operands of one step over 64 rows and 8 heads, forward and backward."""
    q, k, v, dout = (torch.zeros(64, 1, 8, 128, dtype=torch.bfloat16) for _ in range(4))
    out, dq, dk, dv = (torch.zeros(64, 1, 8, 128) for _ in range(4))
    lse, delta = (torch.zeros(1, 8, 64) for _ in range(2))
    inputs = BackwardInputs(dout, dout, lse, None, delta)
    return q, KV(k, v), SoftmaxState(Output(out), lse), inputs, Output(dq), KV(dk, dv)


def describe_call(q: Tensor, kv: KV, state: SoftmaxState) -> LaunchCall:
    """Return the description of the forward call: its kernel, arguments and constants."""
    table = Table(torch.zeros(16, 8, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int32), 8)
    config = configs_for(90, torch.bfloat16, 128).forward
    return forward(q, kv.k, kv.v, state.out.carried, state.lse, table, config, scale=0.1)


def per_call_us(work: Callable[[], Any], rounds: int) -> list[float]:
    """Return the microseconds of one call of `work`, one figure per round."""
    times = []
    for _ in range(rounds):
        start = thread_time()
        for _ in range(CALLS):
            work()
        times.append((thread_time() - start) / CALLS * 1e6)
    return times


def calls_to_time() -> dict[str, Callable[[], Any]]:
    """Return the calls to time, by name. Replaces the process's driver by a `StubDriver`."""
    driver.set_active(StubDriver(90))
    q, kv, state, inputs, dq, dkv = operands()
    call, kept = describe_call(q, kv, state), Kept()
    changing = (q, kv.k, kv.v, state.out.carried, state.lse)
    handle, repeat = kept.compile(call), kept.repeat(call, changing)
    by_hand = partial(
        handle.run, *call.grid, 1, 1, 0, handle.function, handle.packed, None, None, None, *call.args, *handle.constants
    )
    engine = TritonEngine(configs_for(90, torch.bfloat16, 128))
    tile = Tile(
        TokenRange(StridedRange(0, 64), StridedRange(0, 64)),
        TokenRange(StridedRange(0, 64), StridedRange(0, 64)),
        CAUSAL,
        StridedRange(0, 8),
    )
    work = engine.prepare([(tile,)], Softmax(0.1), 64, 8)[0]
    return {
        "kernel[grid](...)": call.run,
        "describing and kernel[grid](...)": lambda: describe_call(q, kv, state).run(),
        "handle, arguments at hand": by_hand,
        "repeat": lambda: repeat(changing),
        "engine, forward": lambda: engine.attend(q, kv, state, work),
        "engine, backward": lambda: engine.attend_grad(q, kv, inputs, dq, dkv, work),
    }


def main(arguments: list[str]) -> None:
    """Time each kind of call, print the table and save it."""
    options = parse(LaunchOptions(), arguments)
    table = report.Table(
        f"Host cost of one call, µs (minimum / median / maximum of {options.rounds} rounds)", ["call", "µs"]
    )
    times_us = {}
    with progress("launch") as say:
        for name, work in calls_to_time().items():
            say(name)
            work()  # compiles
            times_us[name] = per_call_us(work, options.rounds)
            table.rows.append([name, spread(times_us[name], 2)])
    table.notes.append("The engine's bar is 10 µs; its backward is two launches. A GPU's driver adds its own launch.")
    finish("launch", options, [table], {"us": times_us}, options.results)


if __name__ == "__main__":
    main(sys.argv[1:])

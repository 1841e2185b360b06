"""The first launch of each kernel on a GPU, compared with float64: `python -m tests.gpu.first_launches`.

Each kernel is launched in a separate process with a limit, so that a hung kernel hides no other.
`python -m tests.gpu.first_launches NAME [tokens=N]` launches one kernel. NAME is FORM/KERNEL/DIM, for example
gluon/forward/128. FORM is one of `ringattn.kernels.launch.FORMS`. KERNEL is forward, grad_q, grad_kv or grad_fused.
With DIM 192, that of keys, values have 128.
With more than 256 tokens the results are not compared: the launch is for a profiler.
On the CPU, the Gluon kernels except grad_fused run in the simulation of the tests, and the others in Triton's
interpreter.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.core.geometry import CAUSAL, StridedRange, Tile, TokenRange
from ringattn.engine.base import KV, BackwardInputs, Softmax
from ringattn.engine.blocks import Blocks, key_blocks, query_blocks
from ringattn.engine.plain import PlainEngine
from ringattn.kernels.attention_backward import grad_kv, grad_q
from ringattn.kernels.attention_forward import forward
from ringattn.kernels.attention_gluon import WIDE_KEYS, forward_gluon, gluon_configs, grad_kv_gluon, grad_q_gluon
from ringattn.kernels.configs import configs_for
from ringattn.kernels.launch import FIRST, LAST, Kept, LaunchCall, Table

NAMES = (
    *(f"gluon/{kernel}/{dim}" for dim in (128, 64) for kernel in ("forward", "grad_q", "grad_kv", "grad_fused")),
    *(f"gluon/{kernel}/{dim}" for dim in (192, 256) for kernel in ("forward", "grad_q", "grad_kv")),
    *(f"{form}/{kernel}/128" for form in ("descriptors", "pointers") for kernel in ("forward", "grad_q", "grad_kv")),
    "descriptors/grad_fused/128",
)
TOKENS, HEADS = 256, 16
LIMIT_S = 30.0
"""The limit of each process."""


def reference_of(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, tile: Tile) -> dict[str, Tensor]:
    """Return out, lse, delta, dq, dk and dv of one causal tile in float64."""
    engine = PlainEngine()
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    works = engine.prepare([(tile,)], Softmax(q.shape[3] ** -0.5), q.shape[0], q.shape[2])
    state = engine.begin(works, q, v.shape[3], None)
    engine.attend(q, KV(k, v), state, works[0])
    out = state.out.finalized(q.dtype)
    delta = engine.delta(dout, out, None)
    dq, dkv = engine.begin_grad(works, q, v.shape[3]), KV(torch.zeros_like(k), torch.zeros_like(v))
    inputs = BackwardInputs(dout, out, state.lse, None, delta)
    engine.attend_grad(q, KV(k, v), inputs, dq, dkv, works[0])
    return {"out": out, "lse": state.lse, "delta": delta, "dq": dq.finalized(q.dtype), "dk": dkv.k, "dv": dkv.v}


def table_of(blocks: Blocks, device: str) -> Table:
    """Return the table of the only launch of a pass."""
    blocks.blocks[:, 7] = FIRST | LAST
    return Table(*(torch.from_numpy(x).to(device) for x in (blocks.blocks, blocks.entries)), blocks.slots)


def call_of(
    name: str, rows: Sequence[Tensor], per_row: Sequence[Tensor], tile: Tile
) -> tuple[LaunchCall, dict[str, Tensor]]:
    """Return the launch of a kernel, and the results that it writes, by name."""
    form, kernel, width = name.split("/")
    gluon, dim, (q, k, v, dout), device = form == "gluon", int(width), rows, str(rows[0].device)
    table = gluon_configs(dim) if gluon else configs_for(90, q.dtype, dim, form)
    options: dict[str, Any] = {"scale": dim**-0.5}
    if kernel == "forward":
        config, result, lse = table.forward, torch.empty_like(dout), torch.empty_like(per_row[0])
        blocks = table_of(query_blocks([tile], config.block_m, config.block_n), device)
        launch_forward: Any = forward_gluon if gluon else forward
        return launch_forward(q, k, v, None, lse, blocks, config, result=result, **options), {"out": result, "lse": lse}
    if kernel == "grad_q":
        config, result = table.grad_q, torch.empty_like(q)
        blocks = table_of(query_blocks([tile], config.block_m, config.block_n), device)
        launch_q: Any = grad_q_gluon if gluon else grad_q
        return launch_q(*rows, *per_row, None, blocks, config, result=result, **options), {"dq": result}
    config, results = getattr(table, kernel), (torch.empty_like(k), torch.empty_like(v))
    blocks = table_of(key_blocks([tile], 1, config.block_n, config.block_m), device)
    written = {"dk": results[0], "dv": results[1]}
    if kernel == "grad_fused":
        written["dq"] = options["dq"] = torch.zeros_like(q, dtype=torch.float32)
    launch_kv: Any = grad_kv_gluon if gluon else grad_kv
    return launch_kv(*rows, *per_row, None, None, blocks, config, results=results, **options), written


def launch(call: LaunchCall, device: str) -> None:
    """Launch by a kept handle, as the engine does. On the CPU, run the source of the kernel."""
    if device == "cuda":
        Kept().repeat(call, ())(())
        torch.cuda.synchronize()
    elif "gluon" in call.kernel.fn.__module__:
        from tests.kernels.gluon_gate.simulator import simulate

        simulate(call, 0)
    else:
        call.run()


def errors_of(name: str, device: str, tokens: int = TOKENS, heads: int = HEADS) -> dict[str, float]:
    """Launch a kernel once. Return the relative error of each result; none if there are more than `TOKENS` tokens."""
    half = torch.bfloat16 if device == "cuda" else torch.float16  # the simulations have no bfloat16
    make, dim = torch.Generator().manual_seed(0), int(name.split("/")[2])
    value_dim = WIDE_KEYS[1] if dim == WIDE_KEYS[0] else dim
    dims = dim, dim, value_dim, value_dim
    rows = [torch.randn(tokens, 1, heads, size, generator=make).to(device, half) for size in dims]
    positions = TokenRange(StridedRange(0, tokens), StridedRange(0, tokens))
    tile = Tile(positions, positions, CAUSAL, StridedRange(0, heads))
    if tokens > TOKENS:
        per_row = [torch.zeros(1, heads, tokens, device=device) for _ in range(2)]
        launch(call_of(name, rows, per_row, tile)[0], device)
        return {}
    reference = reference_of(*rows, tile)
    per_row = [reference[part].float().contiguous() for part in ("lse", "delta")]
    call, results = call_of(name, rows, per_row, tile)
    launch(call, device)
    return {part: float((x.double() - reference[part]).norm() / reference[part].norm()) for part, x in results.items()}


def right(errors: dict[str, float]) -> bool:
    """Return whether no error exceeds the rounding unit of bfloat16."""
    return all(error < torch.finfo(torch.bfloat16).eps for error in errors.values())


def run_all(names: Sequence[str] = NAMES, limit_s: float = LIMIT_S) -> int:
    """Launch each kernel in a process. Print what each prints, and return 1 if one fails or exceeds the limit."""
    command = [sys.executable, "-m", "tests.gpu.first_launches"]
    processes = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in names
    }
    end_s, failed = time.monotonic() + limit_s, False
    for name, process in processes.items():
        try:
            output = process.communicate(timeout=max(0.0, end_s - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = f"{process.communicate()[0]}HUNG: {name} did not end within {limit_s:.0f} s\n"
        failed |= process.returncode != 0
        print(output if process.returncode == 0 else f"FAILED: {name}: {output}", end="", flush=True)
    return int(failed)


def main(name: str, *options: str) -> int:
    """Launch one kernel and print the errors. Return 1 if one is too large."""
    start_s = time.monotonic()
    arguments = {key: int(value) for key, value in (option.split("=") for option in options)}
    errors = errors_of(name, "cuda" if torch.cuda.is_available() else "cpu", **arguments)
    printed = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
    outcome = f"{'passed' if right(errors) else 'FAILED'} in {time.monotonic() - start_s:.1f} s"
    print(f"{name}: {outcome}; relative errors: {printed}")
    return int(not right(errors))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if sys.argv[1:] else run_all())

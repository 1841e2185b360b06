"""A kernel's inner loop, compiled, counted and run by the model of `cycles.py`, and what others published.

Importing this needs no Triton: only `estimated` compiles.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringattn.bench.cycles import QUARTERS, Gpu, Paced, matrix_flops, paced
from ringattn.bench.sass import Loop, counted, instructions, product_loops

PUBLISHED = Path(__file__).with_name("estimate_published.json")
CUDNN = {"forward": (702, 673), "backward": (612, 579)}
"""TFLOP/s, full and causal, bf16, head dimension 128, 16,384 tokens: cuDNN 9.19 on H200, cudnn-frontend's benchmark."""
TOKENS = 16_384
RATES = {80: 2048, 90: 4096, 100: 8192}
"""FLOPs a cycle of a multiprocessor, dense bf16: NVIDIA's whitepapers of A100, H100 and B200."""
BACKWARD = 10
"""FLOPs of a pair of rows and an element that a backward pass counts as, however many it does."""


class Kernel(NamedTuple):
    """A compiled kernel: its tile, and a pass through its loop without and with the mask, on a multiprocessor."""

    form: str
    kernel: str
    dim: int
    tile: tuple[int, int]
    products: int
    counts: tuple[dict[str, int], dict[str, int]]
    registers: int
    spills: tuple[int, int]
    blocks: int
    passes: tuple[Paced, Paced]
    flops: float

    def per(self, which: int) -> float:
        """Cycles for 128 x 128 pairs."""
        return self.passes[which].cycles * 128 * 128 / (self.tile[0] * self.tile[1] * self.blocks)


def fitted(published: Sequence[dict[str, Any]], rate: int = RATES[90], multiprocessors: int = 132) -> Gpu:
    """An H100 whose clock makes the model right for the two kernels that it is fitted to."""
    points = sorted(
        (one["load"], one["tflops"] * 1e3 * one["cycles"] / one["flops"] / multiprocessors)
        for one in published
        if one["use"] == "fit"
    )
    return Gpu("H100", multiprocessors, rate, (points[0], points[1]))


def read_published() -> list[dict[str, Any]]:
    """Kernels of others with their published speed, and what the model says of their code."""
    found: list[dict[str, Any]] = json.loads(PUBLISHED.read_text(encoding="utf-8"))["kernels"]
    return found


def ways(loops: Sequence[Loop]) -> tuple[Any, Any]:
    """The passes without and with a mask: of one loop its two ways, of several the shortest and the longest."""
    return min((loop.least for loop in loops), key=len), max((loop.most for loop in loops), key=len)


def warps_of(tile_flops: float, way: Sequence[Any]) -> int:
    """Warps of each quarter that share a tile: what its products take, over what one warp of each quarter does."""
    return max(1, round(tile_flops / (QUARTERS * sum(matrix_flops(one) for one in way))))


def estimated(launch: Any, arch: int) -> Kernel:
    """Compile a launch and let the model run its loop."""
    from ringattn.bench.estimate_launches import PRODUCTS
    from ringattn.bench.kernel_code import code_of

    call = launch.call()
    code, tile = code_of(call, arch), (call.meta["BLOCK_M"], call.meta["BLOCK_N"])
    both = ways(product_loops(code.listing))
    flops = 2.0 * PRODUCTS[launch.kernel] * tile[0] * tile[1] * launch.dim
    blocks, inside = code.resident(arch), sum(one.spills for loop in product_loops(code.listing) for one in loop.body)
    warps = warps_of(flops, both[0]) if arch < 100 else call.meta["num_warps"] // QUARTERS
    passes = [paced(way, RATES[arch], warps, blocks, flops if arch >= 100 else 0.0) for way in both]
    return Kernel(
        launch.form, launch.kernel, launch.dim, tile, PRODUCTS[launch.kernel], (counted(both[0]), counted(both[1])),
        code.registers, (inside, sum(one.spills for one in instructions(code.listing)) - inside), blocks,
        (passes[0], passes[1]), flops,
    )  # fmt: skip


def tflops(gpu: Gpu, kernels: Sequence[Kernel], causal: bool) -> float:
    """Of launches one after another on `TOKENS` tokens; a pass counts 4 FLOPs a pair and element, 10 backward."""
    cycles = busy = 0.0
    for one in kernels:
        m, n = one.tile
        tiles, edges = (TOKENS / m) * (TOKENS / n), (TOKENS / m) * max(1.0, m / n) if causal else 0.0
        whole = (tiles - edges) / 2 if causal else tiles
        for count, of_pass in zip((whole, edges), one.passes, strict=True):
            cycles += count * of_pass.cycles / one.blocks
            busy += count * of_pass.busy.get("matrix", 0.0) / one.blocks
    counts = 4 if kernels[0].kernel == "forward" else BACKWARD
    flops = counts * TOKENS**2 * kernels[0].dim / (2 if causal else 1)
    return gpu.tflops(flops, cycles, busy / cycles)

"""How fast the attention kernels would be, estimated from their machine code without a GPU.

`python -m ringattn.bench.estimate [dims=128,64] [archs=90] [results=FOLDER]` compiles our kernels and a plain one,
counts the instructions of their inner loops, lets a model of a multiprocessor run them (`cycles.py`), and compares with
what was published. The model is fitted to two published kernels and checked on others (`estimate_published.json`); its
errors stand in the output and are the estimates' too. For sm_80 and sm_100 there is no fit: bounds by pipe alone.
Guarantees: estimates are of the inner loop on long sequences; not of launches, of a block's begin and end, of memory,
nor of work that is uneven between multiprocessors. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class EstimateOptions:
    """`archs`: 90 has a fitted model; others are only counted and bounded."""

    dims: tuple[int, ...] = (128, 64)
    archs: tuple[int, ...] = (90,)
    results: str = "bench/results/cpu"


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


def main(words: Sequence[str]) -> dict[str, Any]:
    """Compile, print, keep; returns what is kept."""
    print("estimate: compiling the attention kernels, up to 10 s each", flush=True)
    import triton

    from ringattn.bench import report
    from ringattn.bench.estimate_launches import launches
    from ringattn.bench.estimate_tables import tables
    from ringattn.bench.options import parse

    options = parse(EstimateOptions(), words)
    found: dict[int, list[Kernel]] = {}
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        for arch in options.archs:
            for launch in launches(arch, options.dims):
                one = estimated(launch, arch)
                found.setdefault(arch, []).append(one)
                print(
                    f"sm_{arch} d={one.dim} {one.form} {one.kernel}: {one.counts[0]['all']} instructions a pass, "
                    f"{one.per(0):.0f} cycles for 128 x 128 pairs", flush=True,
                )  # fmt: skip
    published = read_published()
    data = {
        "triton": triton.__version__,
        "kernels": {str(arch): [one._asdict() for one in kernels] for arch, kernels in found.items()},
        "published": published,
    }
    report.finish("estimate", options, tables(fitted(published), found, published), data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])

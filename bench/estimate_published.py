"""What the model says of kernels whose speed others published, beside that speed.

`python -m ringattn.bench.estimate_published FOLDER` writes `estimate_published.json` anew, after a change of the model.
FOLDER holds FlashAttention-3's machine code for sm_90a: `cuobjdump -xelf sm_90a` of flash_attn_3/_C.so, which is in the
wheel xformers 0.0.34. Only counts and cycles are kept.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringattn.bench.cycles import paced
from ringattn.bench.estimate_kernels import PUBLISHED, RATES, warps_of, ways
from ringattn.bench.sass import Loop, counted, product_loops

FA3 = "FlashAttention-3, binary of xformers 0.0.34"
_FORWARD = r"FwdSm90ILi2E.*{tile}.*bfloat16_tEfNS_4arch4Sm90ELb{causal}ELb0ELb0ELb0ELb0ELb0ELb0"
_BACKWARD = r"BwdSm90ILi2ELi2ELi2E.*{tile}.*bfloat16_tEfNS_4arch4Sm90ELb0ELb0ELb0ELb0ELb0"


class Published(NamedTuple):
    """A kernel by a part of its symbol's name, or the plain one by its configuration; `use`: "fit" or "check"."""

    name: str
    symbol: str
    tile: tuple[int, int, int]
    products: int
    causal: bool
    tflops: float
    use: str
    source: str


KERNELS = (
    Published(
        "Triton tutorial 06, forward, d 128", "plain 128 128 8 2", (128, 128, 128), 2, False, 477, "fit",
        "pytorch/benchmark PR 2391, H100, 16k; counted on plain_attention.py, whose loop has the tutorial's 491 "
        "instructions",
    ),
    Published(
        "FlashAttention-3, forward, d 128", _FORWARD.format(tile="Li128EEENS7_ILi176EEE", causal=0), (128, 176, 128), 2,
        False, 621, "fit", f"the same run; counted on {FA3}",
    ),
    Published(
        "FlashAttention-3, forward, d 128, causal", _FORWARD.format(tile="Li128EEESA_SA_EEELi128E", causal=1),
        (128, 128, 128), 2, True, 616, "check", f"arXiv 2407.08608, section 4.1, H100, 16k; {FA3}",
    ),
    Published(
        "FlashAttention-3, backward, d 128", _BACKWARD.format(tile="Li80EEENS7_ILi128EEESB_"), (80, 128, 128), 5, False,
        561, "check", f"arXiv 2407.08608, section 4.1, H100, 16k; {FA3}",
    ),
    Published(
        "FlashAttention-3, forward, d 64", _FORWARD.format(tile="Li192EEESA_NS7_ILi64EEEEEELi64E", causal=0),
        (192, 192, 64), 2, False, 416, "check", f"pytorch/benchmark PR 2370, H100, 16k, an early version; {FA3}",
    ),
    Published(
        "Triton tutorial 06, forward, d 64", "plain 128 64 4 3", (128, 64, 64), 2, False, 353, "check",
        "the same run; the fastest of the tutorial's configurations by the model",
    ),
)  # fmt: skip


def listings(folder: Path) -> Iterator[tuple[str, str]]:
    """(symbol, listing) of every kernel in a folder of cubins whose name says attention of bf16."""
    from ringattn.bench.kernel_code import TOOLS
    from ringattn.bench.sass import functions

    for file in sorted(folder.glob("*.cubin")):
        if any(re.search(one.symbol.encode(), file.read_bytes()) for one in KERNELS):
            made = subprocess.run([TOOLS / "nvdisasm", "-c", "-hex", file], capture_output=True, text=True, check=True)
            yield from functions(made.stdout).items()


def plain_loops(symbol: str, dim: int) -> tuple[list[Loop], int]:
    """The loops of the plain kernel in a configuration, and how many of its thread blocks a multiprocessor holds."""
    from ringattn.bench.kernel_code import code_of
    from ringattn.bench.plain_attention import plain_call
    from ringattn.kernels.launch_call import Config

    m, n, warps, stages = map(int, symbol.split()[1:])
    code = code_of(plain_call(dim, Config(m, n, warps, stages)), 90)
    return product_loops(code.listing), code.resident(90)


def modelled(one: Published, loops: Sequence[Loop], blocks: int) -> dict[str, Any]:
    """The row of a kernel. Of a causal one the loop of whole tiles counts: at 16,384 tokens few others are."""
    m, n, dim = one.tile
    way, flops = ways(loops)[0], 2.0 * one.products * m * n * dim
    pace = paced(way, RATES[90], warps_of(flops, way), blocks)
    return {
        **one._asdict(), "flops": flops * blocks, "blocks": blocks, "instructions": counted(way),
        "cycles": pace.cycles, "load": pace.load,
    }  # fmt: skip


def main(words: Sequence[str]) -> None:
    """Write the file."""
    found: dict[str, dict[str, Any]] = {}
    for one in KERNELS:
        if one.symbol.startswith("plain"):
            found[one.name] = modelled(one, *plain_loops(one.symbol, one.tile[2]))
    for symbol, listing in listings(Path(words[0])):
        for one in KERNELS:
            if one.name not in found and re.search(one.symbol, symbol):
                found[one.name] = modelled(one, product_loops(listing), 1)
                print(one.name, found[one.name], flush=True)
    rows = ",\n".join(json.dumps(found[one.name]) for one in KERNELS)
    PUBLISHED.write_text(f'{{"kernels": [\n{rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Compiles the Gluon kernel for sm_90 through its launch wrapper, without a GPU, and reads the machine code.

`python -m tests.kernels.gluon_gate.compiling FILE [DIM ...]` writes what it finds for each head dimension, as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringattn.bench.kernel_code import code_of
from ringattn.bench.sass import product_loops
from ringattn.kernels.attention_gluon import CONFIG, forward_gluon
from ringattn.kernels.launch import LaunchCall, Table

OPCODES = ("HGMMA", "HMMA", "UTMALDG", "USETMAXREG", "SYNCS", "LDL", "STL")


def call_of(dim: int, everything: bool) -> LaunchCall:
    """A launch with sizes and alignments of ordinary calls; `everything`: state, result and sinks, else the state."""
    table = Table(torch.zeros(16, 8, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int32), 16)
    beside: dict[str, Any] = {"result": _rows(dim), "sinks": torch.zeros(16)} if everything else {}
    q, k, v = (_rows(dim) for _ in range(3))
    out = torch.zeros(64, 1, 16, dim)
    return forward_gluon(q, k, v, out, torch.zeros(1, 16, 64), table, CONFIG, scale=0.1, **beside)


def found(call: LaunchCall) -> dict[str, Any]:
    """What the compiled launch needs and holds: registers are those of each thread at its start."""
    code = code_of(call, 90)
    opcodes = Counter(re.findall(rf"\b({'|'.join(OPCODES)})\b", code.listing))
    return {
        "registers": code.registers,
        "shared_bytes": code.shared_bytes,
        "threads": code.threads,
        "opcodes": {name: opcodes[name] for name in OPCODES},
        "to_l2": len(re.findall(r"\bCCTL\.E\.PF2\b", code.listing)),
        "product_loops": sorted(len(loop.least) for loop in product_loops(code.listing)),
        "under_products": exponentials_under_products(code.listing),
        "hasty_arrivals": hasty_arrivals(code.ptx),
    }


def exponentials_under_products(code: str) -> list[int]:
    """How many exponentials stand between two waits for products of which the second waits for no new ones.

    These are the waits of a key block, for Q.K and for the P.V that was issued beside it.
    """
    pairs, waiting, exponentials = [], False, 0
    for opcode in re.findall(r"\b(HGMMA|WARPGROUP\.DEPBAR|MUFU\.EX2)\b", code):
        if opcode == "MUFU.EX2":
            exponentials += 1
            continue
        if opcode != "HGMMA" and waiting:
            pairs.append(exponentials)
        waiting, exponentials = opcode != "HGMMA", 0
    return pairs


def hasty_arrivals(code: str) -> int:
    """How often one thread says that its warpgroup has left a buffer before all its threads have met."""
    hasty, met = 0, False
    for step in re.findall(r"wgmma\.wait_group|\bbar\.(?:warp\.)?sync|mbarrier\.arrive\.shared", code):
        hasty += step == "mbarrier.arrive.shared" and not met
        met = step.startswith("bar")
    return hasty


def _rows(dim: int) -> Tensor:
    return torch.zeros(64, 1, 16, dim, dtype=torch.bfloat16)


def main(words: Sequence[str]) -> None:
    """Compile with all there is and with the state alone."""
    made = {
        f"{dim}/{'everything' if everything else 'state'}": found(call_of(int(dim), everything))
        for dim in words[1:]
        for everything in (True, False)
    }
    Path(words[0]).write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

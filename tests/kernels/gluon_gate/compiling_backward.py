"""Compiles the Gluon kernels of the backward for sm_90 through their launches, without a GPU, and reads their loops.

`python -m tests.kernels.gluon_gate.compiling_backward FILE` writes what it finds for each kernel and head dimension.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from ringattn.bench.kernel_code import code_of
from ringattn.bench.sass import Loop, product_loops
from ringattn.kernels.attention_gluon import GRAD_KV, GRAD_Q, grad_kv_gluon, grad_q_gluon
from ringattn.kernels.launch import LaunchCall, Table
from tests.kernels.gluon_gate.compiling import OPCODES

CASES = tuple(f"{kernel}/{dim}" for kernel in ("grad_kv", "grad_q") for dim in (64, 128))
STEPS = {"HGMMA": "H", "WARPGROUP.DEPBAR": "W", "MUFU.EX2": "e", "SYNCS.ARRIVE": "!"}


def call_of(name: str) -> LaunchCall:
    """A launch with sizes and alignments of ordinary calls, that may carry sums and deliver them."""
    kernel, dim = name.split("/")[0], int(name.split("/")[1])
    table = Table(torch.zeros(16, 8, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int32), 16)
    rows = *(_rows(dim) for _ in range(4)), torch.zeros(1, 16, 64), torch.zeros(1, 16, 64)
    if kernel == "grad_q":
        return grad_q_gluon(*rows, _rows(dim).float(), table, GRAD_Q[dim], scale=0.1, result=_rows(dim))
    carried, results = (_rows(dim).float(), _rows(dim).float()), (_rows(dim), _rows(dim))
    return grad_kv_gluon(*rows, *carried, table, GRAD_KV[dim], scale=0.1, results=results)


def found(call: LaunchCall) -> dict[str, Any]:
    """What the compiled launch needs and holds; of each loop over products its steps, instructions and spills."""
    code = code_of(call, 90)
    opcodes = Counter(re.findall(rf"\b({'|'.join(OPCODES)})\b", code.listing))
    inner = product_loops(code.listing)
    return {
        "registers": code.registers,
        "shared_bytes": code.shared_bytes,
        "threads": code.threads,
        "opcodes": {name: opcodes[name] for name in OPCODES},
        "loops": [(_steps(loop), len(loop.least), sum(one.spills for one in loop.body)) for loop in inner],
        "hasty_arrivals": hasty_arrivals(code.ptx),
    }


def _steps(loop: Loop) -> str:
    """The letters of `STEPS`, in the order of the code."""
    named = (step for one in loop.least for name, step in STEPS.items() if one.opcode.startswith(name))
    return "".join(named)


def hasty_arrivals(code: str) -> int:
    """How often one thread says that rows are left, or there, before all threads of its group have come so far.

    They meet after a wait for products all together, and after the producer's writes within its one warp.
    """
    hasty, apart = 0, ""
    for step in re.findall(r"wgmma\.wait_group|\bbar\.sync|bar\.warp\.sync|st\.shared|mbarrier\.arrive\.shared", code):
        hasty += step == "mbarrier.arrive.shared" and apart != ""
        if step in ("wgmma.wait_group", "st.shared"):
            apart = step
        elif step == "bar.sync" or (step == "bar.warp.sync" and apart == "st.shared"):
            apart = ""
    return hasty


def _rows(dim: int) -> Tensor:
    return torch.zeros(64, 1, 16, dim, dtype=torch.bfloat16)


def main(words: Sequence[str]) -> None:
    """Compile all cases, leaving nothing in Triton's cache."""
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        made = {name: found(call_of(name)) for name in CASES}
    Path(words[0]).write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

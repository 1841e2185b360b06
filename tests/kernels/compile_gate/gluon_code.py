"""What the machine code of the Gluon kernels must satisfy, in addition to the rules of the compile gate."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from ringattn.bench.kernel_code import KernelCode
from ringattn.bench.sass import product_loops

OPCODES = ("HGMMA", "HMMA", "UTMALDG", "USETMAXREG", "SYNCS")
STEPS = {"HGMMA": "H", "WARPGROUP.DEPBAR": "W", "MUFU.EX2": "e", "SYNCS.ARRIVE": "!"}
ORDER = {"forward": "H+W!e{64,}W!", "grad_kv": "H+We{32}H+WH+WW!", "grad_q": "H+We{64}WH+W!"}
"""For each kernel, a regular expression for the steps of its loops, in order. `STEPS` has the letter of each step: a
product, a wait for products, an exponential, an arrival at a barrier."""


def read(code: KernelCode) -> dict[str, Any]:
    """Return the facts about a compiled kernel that `gluon_faults` checks, as JSON values."""
    opcodes = Counter(re.findall(rf"\b({'|'.join(OPCODES)})\b", code.listing))
    loops = product_loops(code.listing)
    return {
        "threads": code.threads,
        "opcodes": {name: opcodes[name] for name in OPCODES},
        "loops": ["".join(STEPS.get(_step(instruction.opcode), "") for instruction in loop.least) for loop in loops],
        "prefetches": len(re.findall(r"\bCCTL\.E\.PF2\b", code.listing)),
        "hasty_arrivals": hasty_arrivals(code.ptx),
    }


def gluon_faults(name: str, registers: int, facts: dict[str, Any]) -> list[str]:
    """Return what is wrong with the machine code of a case, for example `sm_90/half/128/gluon/forward`.

    The kernel must move registers between warp groups, load rows by TMA, issue exactly the products of the algorithm,
    and overlap each softmax except the first with a product.
    """
    dim, kernel = int(name.split("/")[2]), name.split("/")[4]
    forward, opcodes = kernel == "forward", facts["opcodes"]
    products = 2 * 3 * (dim // 16 + 128 // 16) if forward else 4 * (2 * dim + 128) // 16
    # The forward kernel has two copies of the K/V loop, whose first iteration also loads Q. A backward kernel loads
    # four operands. One load instruction has 64 columns.
    loads = (3 if forward else 4) * dim // 64
    rules = {
        f"{facts['threads']} threads with {registers} registers": (facts["threads"], registers) == (384, 168),
        f"opcodes {opcodes}": not opcodes["HMMA"] and opcodes["HGMMA"] == products
        and (opcodes["UTMALDG"] >= loads if forward else opcodes["UTMALDG"] == loads)
        and opcodes["USETMAXREG"] >= 6 and opcodes["SYNCS"] >= 24 * forward,
        f"loops {facts['loops']}": len(facts["loops"]) == 4
        and all(re.fullmatch(ORDER[kernel], steps) for steps in facts["loops"]),
        "the old state is not asked into L2": not forward or facts["prefetches"] >= 1,
        f"{facts['hasty_arrivals']} hasty arrivals": not facts["hasty_arrivals"],
    }  # fmt: skip
    return [fault for fault, holds in rules.items() if not holds]


def _step(opcode: str) -> str:
    return next((name for name in STEPS if opcode.startswith(name)), "")


def hasty_arrivals(code: str) -> int:
    """Count the arrivals at an mbarrier that come before all threads of the group have synchronised.

    After a wait for products, all threads of a warp group must synchronise (`bar.sync`) before they arrive. After a
    write to shared memory, it is enough that the threads of the producer's only warp do (`bar.warp.sync`).
    """
    hasty, apart = 0, ""
    for step in re.findall(r"wgmma\.wait_group|\bbar\.sync|bar\.warp\.sync|st\.shared|mbarrier\.arrive\.shared", code):
        hasty += step == "mbarrier.arrive.shared" and apart != ""
        if step in ("wgmma.wait_group", "st.shared"):
            apart = step
        elif step == "bar.sync" or (step == "bar.warp.sync" and apart == "st.shared"):
            apart = ""
    return hasty

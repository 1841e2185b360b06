"""What the machine code of the Gluon kernels must satisfy, in addition to the rules of the compile gate."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from ringattn.bench.kernel_code import KernelCode
from ringattn.bench.sass import product_loops
from ringattn.kernels.attention_gluon import gluon_configs
from tests.kernels.compile_gate.cases import TENSOR_MEMORY, options_of, value_dim_of

OPCODES = ("HGMMA", "HMMA", "UTCHMMA", "UTMALDG", "USETMAXREG", "SYNCS")
STEPS = {"HGMMA": "H", "WARPGROUP.DEPBAR": "W", "MUFU.EX2": "e", "SYNCS.ARRIVE": "!"}
ORDER = {
    "forward": "H+We*!e{N,}W!", "grad_kv": "H+We{N}H+WH+WW!", "grad_q": "H+We{N}WH+W!",
    "grad_kv apart": "H+We{N}H+W!|H+We+We*H+W!", "grad_fused": "H+We{N}H+W!H+WW!W!",
}  # fmt: skip
"""For each kernel, a regular expression for the steps of its loops, in order. `STEPS` has the letter of each step: a
product, a wait for products, an exponential, an arrival at a barrier. N: the weights of a thread."""
STEPS_IN_TENSOR_MEMORY = {"forward": (129, "!"), "grad_q": (64, "!!"), "grad_kv": (64, "!!")}
"""The exponentials and the other steps in a loop of each kernel in tensor memory. Another warp issues the products."""


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
    """Return what is wrong with the machine code of a case, for example `sm_90/half/128/gluon/forward/alibi`.

    The kernel must move registers between warp groups, load rows by TMA, issue exactly the products of the algorithm,
    and overlap each softmax except the first with a product.
    """
    if name in TENSOR_MEMORY:
        return _tensor_memory_faults(name, registers, facts)
    dim, kernel, options = int(name.split("/")[2]), name.split("/")[4], options_of(name)
    value_dim = value_dim_of(dim)
    forward, opcodes, config = kernel == "forward", facts["opcodes"], getattr(gluon_configs(dim, options), kernel)
    by_key, fused = kernel in ("grad_kv", "grad_fused"), kernel == "grad_fused"
    # The rows of a block of the other side. A thread has half as many pairs of it, each with an exponential for its
    # weight and one for the softcap. In forward the latter may come before the release of K.
    other = config.block_m if by_key else config.block_n
    # Above dimension 128 of values a consumer of `grad_kv` computes dK or dV, so both compute S.
    apart = by_key and value_dim > 128
    order = ORDER["grad_kv apart" if apart else kernel].replace(
        "N", str(other // 2 * (1 + ("softcap" in options and not forward)))
    )
    # dQ has a product with dS, dK and dV have products with P and dS. The fused backward multiplies dS by K too, over
    # 128 keys. Keys of 192 are three pieces of 64, and a product with dS is one for each piece.
    with_ds = other * (3 if dim > value_dim else 1)
    backward = 2 * (3 * dim + 2 * other) if apart else 4 * (dim + value_dim + with_ds + other * by_key + 128 * fused)
    products = (2 * 3 * (dim + other) if forward else backward) // 16
    # The forward kernel has two copies of the K/V loop, whose first iteration also loads Q. A backward kernel loads
    # four operands. One load instruction has 64 columns.
    loads = (2 * dim + value_dim if forward else 2 * (dim + value_dim)) // 64
    rules = {
        f"{facts['threads']} threads with {registers} registers": (facts["threads"], registers) == (384, 168),
        f"opcodes {opcodes}": not opcodes["HMMA"] and opcodes["HGMMA"] == products
        and (opcodes["UTMALDG"] >= loads if forward else opcodes["UTMALDG"] == loads)
        and opcodes["USETMAXREG"] >= 6 and opcodes["SYNCS"] >= 24 * forward,
        f"loops {facts['loops']}": len(facts["loops"]) == 4
        and all(re.fullmatch(order, steps) for steps in facts["loops"]),
        "the old state is not asked into L2": not forward or facts["prefetches"] >= 1,
        f"{facts['hasty_arrivals']} hasty arrivals": not facts["hasty_arrivals"],
    }  # fmt: skip
    return [fault for fault, holds in rules.items() if not holds]


def _tensor_memory_faults(name: str, registers: int, facts: dict[str, Any]) -> list[str]:
    """Return the same for the cases in tensor memory: one loop issues products, four loops have exponentials."""
    dim, kernel, opcodes = int(name.split("/")[2]), name.split("/")[4], facts["opcodes"]
    # S and dP, or the S of both halves, are issued at the start of an item and in the loop.
    products = (4 * dim + 128 * (1 if kernel == "grad_q" else 2)) // 16
    loads = (3 if kernel == "forward" else 4) * dim // 64
    steps = sorted((loop.count("e"), loop.replace("e", "")) for loop in facts["loops"])
    rules = {
        f"{facts['threads']} threads with {registers} registers": (facts["threads"], registers) == (384, 168),
        f"opcodes {opcodes}": not opcodes["HMMA"] and not opcodes["HGMMA"] and opcodes["UTCHMMA"] == products
        and (opcodes["UTMALDG"] >= loads if kernel == "forward" else opcodes["UTMALDG"] == loads)
        and opcodes["USETMAXREG"] >= 6,
        f"loops {facts['loops']}": steps == [(0, ""), *[STEPS_IN_TENSOR_MEMORY[kernel]] * 4],
        "the old state is not asked into L2": kernel != "forward" or facts["prefetches"] >= 1,
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
    steps = r"wgmma\.wait_group|\bbar\.sync|bar\.warp\.sync|st\.shared|stmatrix|mbarrier\.arrive\.shared"
    for step in re.findall(steps, code):
        hasty += step == "mbarrier.arrive.shared" and apart != ""
        if step in ("wgmma.wait_group", "st.shared", "stmatrix"):
            apart = step
        elif step == "bar.sync" or (step == "bar.warp.sync" and apart in ("st.shared", "stmatrix")):
            apart = ""
    return hasty

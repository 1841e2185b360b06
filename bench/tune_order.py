"""In which order the candidates of a kernel are tried: by an estimate, so that a short run finds the good ones.

The estimate knows sm_90: matrix products of 64 rows for each group of four warps, operands read from shared memory,
accumulators in registers. It orders and rejects nothing; only times decide.
"""

from __future__ import annotations

from ringattn.kernels.launch import Config

REGISTERS, SHARED_BYTES = 208, 232_448
"""Of a thread, less what addresses, masks and row sums take; of a block."""


def promising(kernel: str, dim: int, form: str) -> list[Config]:
    """All candidates, the most promising first."""
    found = [
        Config(m, n, warps, stages, form)
        for m in (32, 64, 128)
        for n in (32, 64, 128)
        for warps in (4, 8)
        for stages in (1, 2, 3, 4)
        if m * n >= 32 * 64
    ]
    return sorted(found, key=lambda config: cost(kernel, dim, config))


def cost(kernel: str, dim: int, config: Config) -> float:
    """An estimate of the time of one pair, in units of its own: less is better."""
    own, other, warps, stages = *config[:2], *config[2:4]
    if kernel in ("grad_kv", "grad_fused"):
        own, other = other, own
    held, streamed = {"forward": (1, 2), "grad_q": (2, 2), "grad_kv": (2, 2), "grad_fused": (2, 2)}[kernel]
    accumulators = own * dim * (1 if kernel in ("forward", "grad_q") else 2)
    logits = own * other * (1 if kernel == "forward" else 2)
    registers = (accumulators + logits) / (32 * warps)
    if kernel == "grad_fused":
        registers += other * dim / (32 * warps)
    crossing = own * other * (2 if kernel in ("grad_kv", "grad_fused") else 0)
    shared = 2 * (own * dim * held + stages * other * dim * streamed + crossing)
    return (
        (1 / own + 1 / other)  # of an operand's row: how many pairs share its reading
        * max(1.0, 64 * warps / 4 / own) ** 0.5  # groups of warps with less than 64 rows split the columns
        * max(1.0, registers / REGISTERS) ** 2  # spills
        * (1.0 if shared <= SHARED_BYTES else 4.0)  # may not fit
        * {1: 1.3, 2: 1.0, 3: 1.0, 4: 1.05}[stages]  # 1: loads are waited for
        * (1.15 if warps == 4 else 1.0)
    )

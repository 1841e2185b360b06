"""What older reports on ring and dilated attention claim about memory, beside what their own numbers give.

`python -m ringattn.bench.claims` writes `docs/memory.md`. The reports: S0 a memory analysis, S1 a comparison of rings,
S2 and S4 guides to training memory, S3 a scaling run on two cards of 8 GB. Every right value is computed here from the
report's own sizes; what this machine can measure stands in `bench/results/cpu/memory.md`, in the rows named here.
Guarantees: no number in the table is typed in but those that a report states and the sizes that it names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

from ringattn.bench.claims_arithmetic import (
    GIB,
    KIB,
    MIB,
    Model,
    dilated_score_bytes,
    fitted_tokens,
    gathered_mib,
    partitioned_mib,
    seen_by_checkpointing,
    stored_without_checkpointing,
    tiled_mib,
    zero_gb,
)
from ringattn.errors import InputError

PATH = Path(__file__).resolve().parents[1] / "docs" / "memory.md"

GPT_125M, GPT_350M, GPT_1B3 = Model(12, 768), Model(24, 1024), Model(24, 2048)
MODELS = {"125M": GPT_125M, "350M": GPT_350M, "1.3B": GPT_1B3}


class Claim(NamedTuple):
    """`verdict`: right, wrong, contradictory (with another claim), unsupported, or explained."""

    name: str
    says: str
    verdict: str
    right: str


def each(values: Sequence[float], unit: str = "", digits: int = 0) -> str:
    """Numbers with slashes between them."""
    return " / ".join(f"{value:,.{digits}f}" for value in values) + (f" {unit}" if unit else "")


def memory_analysis() -> list[Claim]:
    """S0."""
    tokens = {"125M": 21_331_968, "350M": 11_862_016, "1.3B": 7_143_424}
    one = [count * MODELS[name].dim * 2 / 1e9 for name, count in tokens.items()]
    untied = [model.params(50_000, tied=False) / 1e6 for model in MODELS.values()]
    room = {model: 80 * GIB - model.params(50_000) * 16 for model in MODELS.values()}
    plain = [nbytes / stored_without_checkpointing(model) for model, nbytes in room.items()]
    checkpointed = [nbytes / seen_by_checkpointing(model) for model, nbytes in room.items()]
    params = GPT_1B3.params(50_000, tied=False)
    local, dim = 125_000, 768
    return [
        Claim("S0-1", "483,328 / 180,224 / 65,536 tokens on 80 GB without sharding", "contradictory",
              "its 14 L d bytes a token are low against 34 L d, its scores leave out the heads and would be 0 with a "
              f"fused kernel, and logits ({50_000 * 4 / KIB:.0f} KiB a token in float32) are missing"),
        Claim("S0-2", "21.3M / 11.9M / 7.1M tokens optimized", "wrong",
              f"one fp16 tensor of that many rows has {each(one, 'GB', 1)}; x, q, k, v and out need "
              f"{each([5 * x for x in one], 'GB')} of 80"),
        Claim("S0-3", "48, 69 and 112 times more tokens", "contradictory",
              "the two sides come from two estimators; within the second one it is 5.6, 7.7 and 9.0 times"),
        Claim("S0-7", "models of 125M / 350M / 1.3B", "wrong",
              f"with 50,000 untied embeddings they have {each(untied, 'M')} parameters"),
        Claim("S0-8", "what fits in 80 GiB: tied embeddings, 16 bytes a parameter, fused attention, chunked loss",
              "right, corrected", f"{each([x / 1e3 for x in plain], 'thousand')} tokens a device without checkpointing "
              f"(34 L d + 4 d bytes a token), {each([x / 1e6 for x in checkpointed], 'million', 2)} with "
              "(2 L d + 38 d); a ring of p multiplies them by p, less its slots"),
        Claim("S0-10", "AdamW of 1.3B: 15.8 GB, in eight bits 5.3 GB", "wrong",
              f"12 bytes a parameter are {12 * params / GIB:.1f} GiB; in eight bits the states are "
              f"{2 * params / GIB:.1f} GiB, beside float32 weights {6 * params / GIB:.1f}"),
        Claim("S0-11", "dilated attention needs O(L^2/D) memory", "wrong",
              "O(L sum of w/r^2) scores, and none are stored where they are tiled"),
        Claim("S0-12", "1M tokens: 1 TB, dilated 100 GB; growth is exponential", "wrong",
              f"{1e6**2 * 2 / 1e12:.0f} TB a head and layer in fp16, dilated [2048, 4096, 8192] / [1, 2, 4] "
              f"{dilated_score_bytes(1e6, (2048, 4096, 8192), (1, 2, 4)) / 1e9:.1f} GB; quadratic"),
        Claim("S0-13", "a ring needs 1.2 GB for 125,000 own tokens of 768", "wrong",
              f"q, k, v, out and two slots of K and V: {8 * local * dim * 2 / GIB:.2f} GiB a layer in bf16, "
              f"{8 * local * dim * 4 / GIB:.2f} in float32"),
        Claim("S0-14", "0.002 MB a token", "wrong",
              f"twelve checkpoints alone are {12 * dim * 2 / KIB:.0f} KiB a token"),
        Claim("S0-15", "ring sizes by int(): 100M tokens 3, 1B tokens 34, at 28.67M a device", "wrong",
              f"{-(-100 // 28.67):.0f} and {-(-1000 // 28.67):.0f}: a part of a device is a device"),
        Claim("S0-17", "together 70 to 85 % of memory saved", "unsupported",
              "savings of different things must not be multiplied"),
        Claim("S0-18", "FP8 saves four times", "wrong", "twice against 16 bits, of weights and activations"),
    ]  # fmt: skip


def rings() -> list[Claim]:
    """S1 and S3: 8 heads of 64 in float32 on two cards."""
    fit = [fitted_tokens(gib) / 1e3 for gib in (8, 24, 40, 80)]
    measured = {512: 37.2, 1024: 105.3, 2048: 325.4, 4096: 1173.7}
    return [
        Claim("S1-2", "partitioned queries need O(n / p^2)", "wrong",
              "O(n^2 / p^2) where scores are in memory, O(n / p) where they are tiled"),
        Claim("S1-3", "all-gather: 832.6 MB at 4,096 tokens, 3,201.1 at 8,192", "explained",
              f"three blocks of scores and 16.14 KiB a token: {gathered_mib(4096):.1f} and {gathered_mib(8192):.1f} "
              "MiB; here the rows `gathered scores`"),
        Claim("S1-4", "partitioned queries would need about 800 MB at 8,192", "wrong",
              f"{partitioned_mib(8192):.0f} MiB with scores in memory (rows `own-Q scores`), about "
              f"{tiled_mib(8192):.0f} tiled (rows `ring`)"),
        Claim("S3-1", "74.4 / 105.3 / 162.7 / 293.4 KB a token from 512 to 4,096 tokens", "right",
              each([mib * 1024 / tokens for tokens, mib in measured.items()], "KB a token", 1)),
        Claim("S3-2", "growth is sublinear and confirms O(n / p)", "wrong",
              f"{measured[4096] / measured[512]:.1f} times the memory for 8 times the tokens: the power "
              f"{_power(measured):.2f}; a tiled ring has 1 (rows `ring`)"),
        Claim("S3-4", "tokens grow with memory: 4,096 GB / 8", "wrong",
              f"with its root: the fit 9.1 + 0.0262 n + 6.30e-5 n^2 MiB gives {each(fit, 'thousand', 1)} tokens at 8, "
              "24, 40 and 80 GiB"),
        Claim("S3-5", "more cards help by their root", "right", "for queries of the whole sequence; own queries alone, "
              "tiled: in proportion"),
        Claim("S3-8", "true O(n / p) storage of K and V", "wrong",
              f"every rank was handed all of q, k and v: {3 * 4096 * 512 * 4 / MIB:.1f} MiB at 4,096 tokens"),
    ]  # fmt: skip


def _power(by_tokens: dict[int, float]) -> float:
    """The exponent between the ends of a measured curve."""
    (first, low), *_, (last, high) = by_tokens.items()
    return log(high / low) / log(last / first)


def guides() -> list[Claim]:
    """S2 and S4."""
    billions, ids = 7, 12 * 256
    heads, dim, layers = 8, 512, 14
    scores = 12 * heads * 256**2 * 2
    per_layer = 12 * 256 * dim * 4 * 2
    return [
        Claim("S2-1", "7B in float32: 28 + 28 + 56 = 112 GB", "right", f"{16 * billions} GB at 16 bytes a parameter"),
        Claim("S2-2", "bytes a parameter: AdamW 12, Adam-mini 6, 8-bit 8, Lion 8", "wrong",
              "states only: 8, about 4, about 2, 4; with float32 weights 12, 8, 6, 8"),
        Claim("S2-3", "ZeRO on 8 cards: 56 / 31.5 / 19.25 / 7 GB for 7B", "contradictory",
              f"right for 4 bytes of optimizer a parameter; with 12: "
              f"{each([zero_gb(billions, 12, stage, 8) for stage in range(4)], 'GB', 2)}"),
        Claim("S2-5", "scores of 8,192 tokens: 256 MB a head, 8 GB for 32", "right",
              f"{8192**2 * 4 / MIB:.0f} MiB and {32 * 8192**2 * 4 / GIB:.0f} GiB in float32"),
        Claim("S2-6", "a fused kernel keeps 100 MB a layer", "wrong",
              f"out and lse of 8,192 tokens of 4,096 in bf16: {(8192 * 4096 * 2 + 32 * 8192 * 4) / MIB:.0f} MiB, with "
              f"q, k and v {(4 * 8192 * 4096 * 2 + 32 * 8192 * 4) / MIB:.0f}"),
        Claim("S2-7", "7B trains on one card of 24 GB with 8-bit Adam", "wrong",
              f"weights, gradients and states: {zero_gb(billions, 2, 0, 1):.0f} GB before any activation"),
        Claim("S2-8", "70B on 8 cards of 80 GB, 60 GB each", "wrong",
              f"{70 * 16 / 8:.0f} GB each at 16 bytes a parameter, {70 * 8 / 8:.0f} at 8"),
        Claim("S4-1", "a batch of 12 x 256 takes 1.5 GB", "wrong",
              f"{ids * 16 * 2:,} bytes in their formula: {1.5e9 / (ids * 16 * 2):,.0f} times less"),
        Claim("S4-2", "activations of 443 MB a layer, 6 GB", "wrong",
              f"their product is {per_layer / 1e6:.1f} MB a layer, {layers * per_layer / 1e6:.0f} MB for {layers}"),
        Claim("S4-3", "scores of 12 x 8 heads at 256 tokens: 100 MB, fused 3 MB", "wrong",
              f"{scores / 1e6:.1f} MB; fused {12 * 256 * dim * 2 / 1e6:.1f} MB: "
              f"{1 - 12 * 256 * dim * 2 / scores:.0%} less"),
        Claim("S4-7", "flash-attention from compute capability 7.5, as V100", "wrong",
              "V100 is 7.0; FlashAttention-2 needs 8.0"),
        Claim("S4-10", "a 100M model uses 21 GB at batch 12 x 256", "wrong", "about 3 GB by its own formulas"),
    ]  # fmt: skip


def page() -> str:
    """The Markdown of docs/memory.md."""
    lines = [
        "# Memory: claims and arithmetic", "",
        "Written by `python -m ringattn.bench.claims`. What older reports say about the memory of ring and dilated",
        "attention, and what follows from their own sizes. Measured here: `bench/results/cpu/memory.md`.",
        "",
    ]  # fmt: skip
    parts = {"Capacity (S0)": memory_analysis(), "Rings (S1, S3)": rings(), "Guides (S2, S4)": guides()}
    for title, claims in parts.items():
        lines += [f"## {title}", "", "| | says | verdict | by its own numbers |", "|---|---|---|---|"]
        lines += [f"| {one.name} | {one.says} | {one.verdict} | {one.right} |" for one in claims]
        lines.append("")
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    """Write the page. Raises `InputError` for any option."""
    if words:
        raise InputError(f"claims takes no options, got {words[0]}")
    PATH.write_text(page(), encoding="utf-8")
    print(f"wrote docs/{PATH.name}")


if __name__ == "__main__":
    main(sys.argv[1:])

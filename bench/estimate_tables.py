"""The tables of `estimate.py`: published kernels with the model's error, ours with TFLOP/s, bounds elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringattn.bench.cycles import Gpu
from ringattn.bench.estimate_kernels import BACKWARD, CUDNN, TOKENS, Kernel, tflops
from ringattn.bench.report import Table

CLASSES = ("mma", "mufu", "fp32", "integer", "memory", "barrier", "convert", "other")


def modelled_tflops(gpu: Gpu, one: Mapping[str, Any]) -> float:
    """Of a published kernel, by the fitted clock."""
    return gpu.tflops(one["flops"], one["cycles"], one["load"])


def published_table(gpu: Gpu, published: Sequence[Mapping[str, Any]]) -> Table:
    """What the model makes of kernels that others measured."""
    (low, fast), (high, slow) = gpu.clocks
    table = Table(
        "The model on published kernels (H100, 16,384 tokens)",
        ("kernel", "instructions", "cycles a tile", "matrix unit busy", "published", "model", "error", ""),
        notes=[
            f"Fitted: an effective clock of {fast:.2f} GHz at a load of {low:.2f} and {slow:.2f} GHz at {high:.2f}; it "
            "stands for the power limit and for all that is not modelled.",
            *(f"{one['name']}: {one['source']}." for one in published),
        ],
    )
    for one in published:
        model = modelled_tflops(gpu, one)
        table.rows.append(
            (
                one["name"], str(one["instructions"]["all"]), f"{one['cycles']:.0f}", f"{one['load']:.2f}",
                f"{one['tflops']:.0f}", f"{model:.0f}", f"{100 * (model / one['tflops'] - 1):+.0f} %",
                "fitted" if one["use"] == "fit" else "",
            )
        )  # fmt: skip
    return table


def counts_table(arch: int, kernels: Sequence[Kernel]) -> Table:
    """What a pass through each inner loop is made of."""
    table = Table(
        f"Inner loops of sm_{arch}: instructions of a warp in a pass, without / with the mask",
        ("kernel", "d", "tile", *CLASSES, "all", "registers", "spills in / out", "blocks per SM"),
    )
    for one in kernels:
        both = [f"{one.counts[0][kind]} / {one.counts[1][kind]}" for kind in (*CLASSES, "all")]
        table.rows.append(
            (
                f"{one.form} {one.kernel}", str(one.dim), f"{one.tile[0]}x{one.tile[1]}", *both, str(one.registers),
                f"{one.spills[0]} / {one.spills[1]}", str(one.blocks),
            )
        )  # fmt: skip
    return table


def bounds_table(arch: int, kernels: Sequence[Kernel]) -> Table:
    """Which pipe bounds a pass without the mask, and how far the others are used then."""
    table = Table(
        f"Cycles of sm_{arch} for 128 x 128 pairs that each pipe alone would take",
        ("kernel", "d", "matrix unit", "exponentials", "issue slots", "bound by"),
    )
    names = {"matrix": "matrix unit", "mufu": "exponentials", "issue": "issue slots"}
    for one in kernels:
        scale = 128 * 128 / (one.tile[0] * one.tile[1] * one.blocks)
        busy = {pipe: one.passes[0].busy.get(pipe, 0.0) * scale for pipe in names}
        worst = names[max(busy, key=lambda pipe: busy[pipe])]
        table.rows.append((f"{one.form} {one.kernel}", str(one.dim), *(f"{busy[pipe]:.0f}" for pipe in names), worst))
    table.notes.append(
        "No clock was fitted for this architecture: these are bounds of the loop, not estimates of speed."
    )
    return table


def groups(kernels: Sequence[Kernel]) -> Iterator[tuple[str, list[Kernel]]]:
    """Launches that make a pass together."""
    for one in kernels:
        if one.kernel == "forward":
            yield f"{one.form} forward", [one]
    for dim in dict.fromkeys(one.dim for one in kernels):
        for form in dict.fromkeys(one.form for one in kernels):
            of = {one.kernel: one for one in kernels if (one.form, one.dim) == (form, dim)}
            if "grad_q" in of and "grad_kv" in of:
                yield f"{form} backward, two launches", [of["grad_q"], of["grad_kv"]]
            if "grad_fused" in of:
                yield f"{form} backward, fused", [of["grad_fused"]]


def speed_table(gpu: Gpu, kernels: Sequence[Kernel], error: float) -> Table:
    """Estimated TFLOP/s of each pass, and of cuDNN where that was published."""
    table = Table(
        f"Estimated on {gpu.name}: {TOKENS:,} tokens, bf16, inner loops alone",
        (
            "pass", "d", "cycles for 128 x 128", "matrix unit busy", "TFLOP/s full", "causal", "of cuDNN 9.19, full",
            "causal",
        ),
        notes=[
            f"TFLOP/s count 4 FLOPs a pair of rows and element forward and {BACKWARD} backward. The model was at most "
            f"{100 * error:.0f} % off on the published kernels of d 128 that it was not fitted to; see below for d 64.",
            "cuDNN: 702 and 673 forward, 612 and 579 backward on H200, d 128. Work that is uneven between "
            "multiprocessors is not in these figures.",
        ],
    )  # fmt: skip
    for name, some in groups(kernels):
        speeds = [tflops(gpu, some, causal) for causal in (False, True)]
        cycles = sum(one.per(0) for one in some)
        busy = sum(one.per(0) * one.passes[0].load for one in some) / cycles
        bars = CUDNN["forward" if some[0].kernel == "forward" else "backward"]
        shares = [f"{speed / bar:.2f}" if some[0].dim == 128 else "" for speed, bar in zip(speeds, bars, strict=True)]
        table.rows.append(
            (name, str(some[0].dim), f"{cycles:.0f}", f"{busy:.2f}", *(f"{one:.0f}" for one in speeds), *shares)
        )
    return table


def tables(gpu: Gpu, found: Mapping[int, Sequence[Kernel]], published: Sequence[Mapping[str, Any]]) -> list[Table]:
    """All of them, the estimates first."""
    error = max(
        abs(modelled_tflops(gpu, one) / one["tflops"] - 1)
        for one in published
        if one["use"] == "check" and one["tile"][2] == 128
    )
    made = []
    for arch, kernels in found.items():
        made += [speed_table(gpu, kernels, error)] if arch == 90 else []
        made += [bounds_table(arch, kernels)] if arch != 90 else []
    made.append(published_table(gpu, published))
    return made + [counts_table(arch, kernels) for arch, kernels in found.items()]

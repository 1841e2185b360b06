"""Published training steps of other stacks: their memory and time, as planned and as published.

Run `python -m ringattn.bench.training_points`. No training runs: every figure is that of `ringattn plan stack=...`. A
figure counts if its source states the settings of the run and no rate of the stack comes from it. It is met if memory
is within 5 % and time within 7 %. A figure that is not met has the term that is missing, if it was found.

Memory that a source reports as reserved by torch's allocator is the planned memory of tensors, divided by the median
share of reserved memory that tensors take in the runs of `ALLOCATED_OF_RESERVED`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Table, finish
from ringattn.launch.capacity.account import training_bytes
from ringattn.launch.capacity.hardware import GIB, Hardware, hardware
from ringattn.launch.capacity.model_shapes import model_shape
from ringattn.launch.capacity.plan import ALLOCATED_OF_RESERVED
from ringattn.launch.capacity.search import longest_tokens
from ringattn.launch.capacity.stacks import STACKS
from ringattn.launch.capacity.step_time import estimate
from ringattn.launch.capacity.training_bytes import TrainingSetup

MEMORY, TIME = 0.05, 0.07
"""The largest deviation of a figure that is met."""

GAPS = median(allocated / reserved for allocated, reserved in ALLOCATED_OF_RESERVED)
"""The share of reserved memory that tensors take."""

GB = 1e9 / GIB
"""GiB of one decimal GB."""

SOURCES = {
    "TRL": "huggingface/trl pull requests 6845, 6846: 8 H100-80 a node, bf16, batch 1, GB of 1e9 bytes. Its author "
    "corrected 364 to 380 s, so that times have an error of 5 %. The table of nodes was not corrected. GB are decimal, "
    "as in pull request 4175 (7.5 GB of layer inputs are 7.516e9 bytes); as GiB, the ratios would be 7 % lower",
    "offload": "huggingface/accelerate pull request 4175: TRL's run of Qwen3-0.6B with layer inputs on the host",
    "guide": "TRL's long-context guide (pull request 7003): weights and state in bf16 (22 GB of 4.02e9 weights and "
    "their state); GB are GiB (its arithmetic); its kernel is not stated",
    "cuDNN": "huggingface/transformers pull request 48324: TRL's run without cuDNN, which torch then replaces by "
    "FlashAttention 2",
    "torchtitan": "torchtitan, benchmarks/llama3_h100_202412: H100 of 96 GB and 500 W; reserved memory. For rows of "
    "other dates see widths",
    "Trainy": "torchtitan, benchmarks/llama3-8b_h200_202506: H200; reserved memory",
    "ALST": "Arctic Long Sequence Training (arXiv:2506.13996, tables 1 to 4): 8 H100-80 a node, FlashAttention 2",
    "NeMo": "NeMo 25.04, performance_long_sequence.md: B200, FP8 products, all pairs counted; recomputation not stated",
    "Llama 3": "Llama 3 (arXiv:2407.21783, table 4): H100 of 700 W; recomputation not stated",
}

RING_TIME = "unexplained, see ring: attention's part is 2.8 times from CP2 to CP4, for twice the work"
STAGES = "see Float8 gathers: with weights gathered in 16 bits, the plan is 0.97 (1F1B) and 1.00 (interleaved)"
TENSORS = "outside of the peak: copies in gathers and scatters, 3.0 of the 4.3 GiB that the next row lacks"

NOTES = (
    "widths: rates of Float8 products come from one run of each width that is not counted: 8B on 8 GPUs, 70B "
    "(torchtitan, benchmarks/asyncTP_llama3_h100_2025-06), 405B without pipeline (docs/performance.md, August 2024)",
    "async TP: 39 % of the collectives are hidden, as in the run of 405B without pipeline. torch fuses a product with "
    "one gather or scatter (micro_pipeline_tp.py of 2024), but the gradient of an input is the sum of several products",
    "gathers and scatters: torch's collectives along tokens copy the whole tensor (torch.chunk and torch.cat): at 70B "
    "1.0 GiB in Float8 and 2.0 GiB in 16 bits, which fused products do not do. The copies exist in layers, while the "
    "planned peak is at the loss. Tensors take 0.82 of the reserved memory of this row, and 0.87 of that of the next",
    "pipeline stages: until May 2025 (pytorch pull request 153383), each stage kept the outputs of all micro batches, "
    "until October 2025 (164329) also the gradients that it had sent. The last stage keeps all logits (issue 159251)",
    "Float8 gathers: torchtitan gathers weights in Float8, unless only the ranks of a ring share them as in 405B CP8 "
    "(float8.py). No command of table 5 (1F1B, interleaved) is published; if its runs did not set "
    "enable_fsdp_float8_all_gather, both rows are met. That is a guess, and is not planned",
    "ring: K and V of all query heads are gathered, in forward and for backward. dK and dV go to a neighbor in each "
    "step, at the rate of a pair, which makes the plan of CP2 8 % too slow, and those of CP4 and CP8 less fast. In "
    "compiled layers (torchtitan), an exchange is awaited at once; in eager mode (TRL), the next block hides it. "
    "The ring balances causal work since 2024 (pytorch pull request 132442). Time besides products is 5.26 + 7.31 "
    "(P - 1) s on 1, 4 and 8 ranks, so no cost that grows with P explains 2 ranks, too. torch.compile orders "
    "collectives by the memory of each rank's graph (reorder_for_peak_memory). Compiled alone, the ring has one "
    "order on both of 2 ranks, but two different ones on 4, so that ranks wait. A compiled layer on a CPU has one "
    "order everywhere",
    "host: DeepSpeed's Adam takes 0.55 s per 1e9 weights of a node (issue 6834), after backward. With 0.71 s (pull "
    "request 735 of 2021), ALST's steps would be 1.3 s longer at most",
)
"""Details of missing terms."""


class Point(NamedTuple):
    """A published step: memory in GiB, and the time of a step in seconds; 0: not published.

    `counted` is False if a rate comes from it or its settings are not stated. `missing` is the term that is missing in
    the time, or in the memory of a point without a time, and `missing_gib` that in the memory of a point with both.
    """

    source: str
    name: str
    run: TrainingSetup
    gib: float = 0.0
    seconds: float = 0.0
    missing: str = ""
    missing_gib: str = ""
    counted: bool = True
    machine: Hardware = hardware("h100")


def setup(stack: str, model: str, tokens: int, ranks: int, **changed: Any) -> TrainingSetup:
    """Return a run of a stack, with the settings that its rows share."""
    shared: dict[str, dict[str, Any]] = {
        "trl": {"precision": "bf16_cast", "recompute": "offloaded", "zero_stage": 3, "chunked_loss_tokens": 256},
        "torchtitan": {"precision": "bf16_cast", "recompute": "full", "zero_stage": 3},
        "megatron": {"zero_stage": 1},
        "deepspeed": {"recompute": "full", "zero_stage": 3, "offload": "optimizer", "chunked_loss_tokens": 8192},
    }
    settings = shared[stack.partition("_")[0]]
    return TrainingSetup(model_shape(model), tokens, ranks, stack=stack, **{**settings, **changed})


MILLION = 2**20


def trl_points() -> Iterator[Point]:
    """Yield the points of TRL, accelerate and transformers."""

    def run(model: str, tokens: int = MILLION, ranks: int = 8, **changed: Any) -> TrainingSetup:
        return setup("trl", model, tokens, ranks, **changed)

    host: dict[str, Any] = {"offload": "parameters"}
    yield Point("TRL", "Qwen3-8B, 1M", run("qwen3-8b"), 56.2 * GB, 380)
    yield Point("TRL", "Qwen3-0.6B, 1M", run("qwen3-0.6b", recompute="full"), 27.9 * GB, 137)
    yield Point("TRL", "Qwen3-30B-A3B, 1M", run("qwen3-30b-a3b", **host), 46.0 * GB, 483)
    yield Point("TRL", "Qwen3-32B, 1M", run("qwen3-32b", tiled_mlp_tokens=16384, **host), 60.8 * GB, 1295)
    yield Point("TRL", "Qwen3-0.6B, 4M", run("qwen3-0.6b", 4 * MILLION), 73.7 * GB, 2135)
    yield Point("TRL", "Qwen3-8B, 2M, 16 GPUs", run("qwen3-8b", 2 * MILLION, 16), 0, 696)
    yield Point("TRL", "Qwen3-8B, 4M, 32 GPUs", run("qwen3-8b", 4 * MILLION, 32), 0, 1346)
    yield Point("offload", "Qwen3-0.6B, 1M", run("qwen3-0.6b"), 20.8 * GB, 137 * 1.006)
    # The rate of FlashAttention 2 comes from this row.
    yield Point("cuDNN", "Qwen3-8B, 1M, fa2", run("qwen3-8b", kernel="fa2"), 0, 606, counted=False)
    single: dict[str, Any] = {"precision": "bf16", "zero_stage": 0}
    yield Point("guide", "Qwen3-4B, 96K, 1 GPU", run("qwen3-4b", 98304, 1, recompute="full", **single), 59.9)
    yield Point("guide", "the same, inputs on the host", run("qwen3-4b", 98304, 1, **single), 48.8)
    yield Point("guide", "Qwen3-4B, 1M, 4 GPUs", run("qwen3-4b", MILLION, 4, precision="bf16"), 63.6)
    for ranks, seconds in ((2, 34.6), (4, 17.8), (8, 9.5)):
        slow = run("qwen3-4b", 131072, ranks, precision="bf16", kernel="fa2")
        ratio = estimate(slow, hardware("h100")).seconds / seconds
        yield Point("guide", f"Qwen3-4B, 131K, {ranks} GPUs", replace(slow, kernel="auto"), 0, seconds,
                    f"the kernel: kernel=fa2 gives {ratio:.2f}", counted=False)  # fmt: skip


def torchtitan_points() -> Iterator[Point]:
    """Yield the points of torchtitan's tables. Tokens/s are those of one GPU."""

    def run(model: str, tokens: int, ranks: int = 1, stack: str = "torchtitan", **changed: Any) -> TrainingSetup:
        return setup(stack, model, tokens, ranks, **changed)

    card = hardware("h100-96")

    def point(name: str, run: TrainingSetup, gib: float, seconds: float = 0.0, missing: str = "",
              missing_gib: str = "", counted: bool = True) -> Point:  # fmt: skip
        return Point("torchtitan", name, run, gib, seconds, missing, missing_gib, counted, card)

    def seconds(setting: TrainingSetup, tokens_s: float) -> float:
        gpus = setting.ranks * setting.tensor_ranks * setting.pipeline_ranks
        return setting.tokens * setting.batch * setting.micro_batches / gpus / tokens_s

    for gpus, peaks, eager_s, tokens_s in (
        (8, (82.4, 77.0, 76.8), 5762, 8532), (128, (67.0, 62.0, 61.8), 5605, 8380),
    ):  # fmt: skip
        layers = run("llama3-8b", 8192, batch=2, recompute="selective", zero_degree=gpus)
        eager = replace(layers, stack="torchtitan_eager")
        for gib, mode in zip(peaks, ("eager", "compiled", "compiled, Float8"), strict=True):
            yield point(f"8B, {gpus} GPUs, {mode}", eager if mode == "eager" else layers, gib)
        # The rates of products, eager and in Float8, come from the rows of 8 GPUs.
        yield point(f"8B, {gpus} GPUs, eager", eager, 0, seconds(eager, eager_s), counted=gpus != 8)
        yield point(f"8B, {gpus} GPUs, compiled, Float8", layers, 0, seconds(layers, tokens_s),
                    counted=gpus != 8)  # fmt: skip
    for ranks, gib, tokens_s in ((1, 83.9, 3890), (2, 84.2, 2540), (4, 84.0, 1071), (8, 84.5, 548)):
        ring = run("llama3-8b", 32768 * ranks, ranks, zero_degree=8)
        yield point(f"8B, 8 GPUs, CP{ranks}", ring, gib, seconds(ring, tokens_s), RING_TIME)
    tensor = "torchtitan_async"
    # The rates of wider products come from the next two rows, and the share that async TP hides from the third.
    for name, model, batch, degree, stack, rate in (
        ("70B, 256 GPUs, TP8, June 2025", "llama3-70b", 16, 32, "torchtitan", 809.8),
        ("405B, 128 GPUs, TP8, August 2024", "405B", 2, 16, "torchtitan", 177.0),
        ("405B, 128 GPUs, TP8, async TP, August 2024", "405B", 2, 16, tensor, 185.0),
    ):
        alone = run(model, 8192, stack=stack, batch=batch, zero_degree=degree, tensor_ranks=8)
        yield point(name, alone, 0, seconds(alone, rate), counted=False)
    vanilla = run("llama3-70b", 8192, batch=16, zero_degree=32, tensor_ranks=8)
    yield point("70B, 256 GPUs, TP8", vanilla, 71.9, seconds(vanilla, 829), "", TENSORS)
    hidden = replace(vanilla, stack=tensor)
    yield point("70B, 256 GPUs, TP8, async TP", hidden, 67.6, seconds(hidden, 876))
    stages: dict[str, Any] = {"zero_degree": 8, "tensor_ranks": 8, "pipeline_ranks": 8, "micro_batches": 8}
    for chunks, gib, tokens_s in ((1, 82.5, 100), (2, 72.7, 128)):
        stage = run("405B", 8192, stack=tensor, batch=4, pipeline_chunks=chunks, **stages)
        name = f"405B, 512 GPUs, {'1F1B' if chunks == 1 else 'interleaved'}"
        yield point(name, stage, gib, seconds(stage, tokens_s), "", STAGES)
    for ranks, gib, tokens_s in ((1, 75.3, 76), (2, 75.9, 47), (4, 77.1, 31), (8, 84.9, 16)):
        ring = run("405B", 32768 * ranks, ranks, stack=tensor, **stages)
        yield point(f"405B, 512 GPUs, CP{ranks}", ring, gib, seconds(ring, tokens_s), RING_TIME)
    trainy = run("llama3-8b", 8192, stack="torchtitan_2025", batch=2, recompute="selective", zero_degree=32)
    yield Point("Trainy", "8B, 32 GPUs, Float8", trainy, 47.96)
    yield Point("Trainy", "8B, 64 GPUs, Float8", replace(trainy, zero_degree=64), 46.97)


def other_points() -> Iterator[Point]:
    """Yield the points of ALST, NeMo and Llama 3."""
    host, tiles = {"recompute": "offloaded"}, {"tiled_mlp_tokens": 4096}
    for tokens, ranks, seconds, changed in (
        (160_000, 1, 123, {"zero_degree": 8}),
        (500_000, 1, 1010, {**host, **tiles, "offload": "parameters"}),
        (1_100_000, 8, 564, {}),
        (1_200_000, 8, 703, tiles),
        (2_400_000, 8, 2610, host),
        (3_700_000, 8, 6455, {**host, **tiles}),
        (15_000_000, 32, 26709, {**host, **tiles}),
    ):
        run = setup("deepspeed", "llama3-8b", tokens, ranks, **changed)
        yield Point("ALST", f"8B, {tokens:,} tokens, {ranks} GPUs", run, 0, seconds)
    b200 = hardware("b200")
    assert b200.measured is not None
    fp8 = replace(b200, measured=replace(b200.measured, products=2 * b200.measured.products))
    for thousand, tensor, ring, rate in (
        (8, 1, 1, 1671), (16, 1, 1, 1717), (32, 1, 2, 1624), (64, 1, 4, 1600), (128, 2, 4, 1588), (256, 4, 4, 1590),
        (512, 4, 8, 1619), (1024, 4, 16, 1608),
    ):  # fmt: skip
        run = setup("megatron", "llama3-8b", 1024 * thousand, ring, tensor_ranks=tensor, zero_degree=4 * ring * tensor)
        step = estimate(run, fp8)
        missing = "the rate of FP8 products is assumed (twice bf16), and casts are not in it"
        yield Point("NeMo", f"8B, {thousand}K, TP{tensor} CP{ring}", run, 0,
                    step.seconds * step.mfu_full * fp8.flops / (rate * 1e12), missing, counted=False,
                    machine=fp8)  # fmt: skip
    for tokens, batch, ranks, rate, recompute in (
        (8192, 32, 1, 430, "none"), (8192, 16, 1, 400, "none"), (131072, 16, 16, 380, "full"),
    ):  # fmt: skip
        run = setup(
            "megatron", "405B", tokens, ranks, tensor_ranks=8, pipeline_ranks=16, pipeline_chunks=7,
            micro_batches=batch, zero_degree=128, recompute=recompute,
        )  # fmt: skip
        step = estimate(run, hardware("h100"))
        yield Point("Llama 3", f"405B, {tokens:,} tokens, batch {batch}, recompute {recompute} taken", run, 0,
                    step.seconds * step.mfu * 989e12 / (rate * 1e12),
                    "norms, launches and stragglers of 8 to 16 thousand GPUs", counted=False)  # fmt: skip


class Figure(NamedTuple):
    """One published figure, as planned."""

    point: Point
    unit: str
    published: float
    planned: float
    bound: float

    @property
    def ratio(self) -> float:
        """Return planned over published."""
        return self.planned / self.published

    @property
    def met(self) -> bool:
        """Return whether the figure is within its bound."""
        return abs(self.ratio - 1) <= self.bound

    def data(self) -> dict[str, Any]:
        """Return the figure as plain data."""
        point = self.point
        return {
            "source": point.source, "run": point.name, "stack": point.run.stack, "unit": self.unit,
            "published": self.published, "planned": self.planned, "met": self.met, "counted": point.counted,
        }  # fmt: skip


def figures_of(point: Point) -> Iterator[Figure]:
    """Yield the memory and the time of a point, as far as they are published."""
    if point.gib:
        figure = STACKS[point.run.stack].figure.value
        planned = training_bytes(point.run).peak.total / GIB / (GAPS if figure == "reserved" else 1)
        yield Figure(point, f"GiB {figure}", point.gib, planned, MEMORY)
    if point.seconds:
        yield Figure(point, "s", point.seconds, estimate(point.run, point.machine).seconds, TIME)


def all_figures() -> list[Figure]:
    """Return all figures, in the order of the table."""
    return [figure for point in (*trl_points(), *torchtitan_points(), *other_points()) for figure in figures_of(point)]


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    results: str = RESULTS


def main(arguments: Sequence[str]) -> None:
    """Plan all points, and write the tables."""
    options = parse(Options(), arguments)
    figures = all_figures()
    finish("training_points", options, [_points_table(figures), _sums_table(figures), _longest_table()],
           {"figures": [figure.data() for figure in figures]}, options.results)  # fmt: skip


def _points_table(figures: Sequence[Figure]) -> Table:
    """Return the table of all figures."""
    table = Table(
        "Published steps and their plan",
        ("source", "run", "figure", "published", "planned", "ratio", "met", "missing term"),
        notes=[f"- {name}: {about}." for name, about in SOURCES.items()] + [f"- {note}." for note in NOTES],
    )
    for figure in figures:
        met, point = "yes" if figure.met else "no", figure.point
        missing = point.missing_gib if figure.unit != "s" and point.missing_gib else point.missing
        table.rows.append((
            point.source, point.name, figure.unit, f"{figure.published:,.1f}", f"{figure.planned:,.1f}",
            f"{figure.ratio:.3f}", met if point.counted else f"({met})", "" if figure.met else missing,
        ))  # fmt: skip
    table.notes += [
        "- (yes), (no): not counted, because a rate comes from this row or the source does not state the settings.",
        f"- GiB reserved: the planned tensors over {GAPS:.3f}, the median of the runs that publish both.",
    ]
    return table


def _sums_table(figures: Sequence[Figure]) -> Table:
    """Return the numbers of figures, counted figures and met figures of each source."""
    table = Table(
        "Figures met", ("source", "figures", "counted", "met: memory within 5 %", "met: time within 7 %"),
    )  # fmt: skip
    for source in [*SOURCES, "all"]:
        of_source = [figure for figure in figures if source in ("all", figure.point.source)]
        counted = [figure for figure in of_source if figure.point.counted]
        memory = [figure.met for figure in counted if figure.unit != "s"]
        time = [figure.met for figure in counted if figure.unit == "s"]
        table.rows.append((
            source, str(len(of_source)), str(len(counted)), f"{sum(memory)} of {len(memory)}",
            f"{sum(time)} of {len(time)}",
        ))  # fmt: skip
    return table


def _longest_table() -> Table:
    """Return ALST's longest sequences of Llama-3 8B, next to those of our trainer by plan."""
    table = Table(
        "Longest sequence of Llama-3 8B on H100-80, tokens",
        ("GPUs", "published by ALST", "ringattn by plan", "ratio"),
        notes=["- ringattn: the switches of docs/memory-planning.md with offload=parameters, and no reserve. 1 GiB for "
               "driver, NCCL and allocator."],
    )  # fmt: skip
    for ranks, published in ((1, 500_000), (8, 3_700_000), (32, 15_000_000)):
        run = TrainingSetup(
            model_shape("llama3-8b"), MILLION, ranks, framework_bytes=GIB, recompute="offloaded",
            tiled_mlp_tokens=4096, chunked_loss_tokens=1024, zero_stage=3, offload="parameters", gradients_kept=False,
        )  # fmt: skip
        planned = longest_tokens(run, 80 * GIB)
        table.rows.append((str(ranks), f"{published:,}", f"{planned:,}", f"{planned / published:.2f}"))
    return table


if __name__ == "__main__":
    main(sys.argv[1:])

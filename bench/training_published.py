"""`ringattn plan` beside what others have published: longest sequences, step times; and its bytes, measured here.

`python -m ringattn.bench.training_published`. Published figures are copied with their source; every other number is
`plan`'s, with one set of constants for each accelerator, which none of these figures went into.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Say, Table, finish, mib, progress
from ringattn.launch.capacity.fitting import estimate, flops_of, longest_tokens, ring_bytes
from ringattn.launch.capacity.hardware import GIB, Hardware, hardware
from ringattn.launch.capacity.model_shapes import ModelShape, model_shape
from ringattn.launch.capacity.training_bytes import TrainingSetup, training_bytes
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.launch.train.data import VOCABULARY, BatchPart
from ringattn.launch.train.loop import backward, make_model
from ringattn.layers import offload
from ringattn.observe.memory import StorageMeter
from ringattn.ring import Ring
from ringattn.testing import run_ranks

EVERYTHING: dict[str, Any] = {
    "recompute": "offloaded", "tiled_mlp_tokens": 4096, "chunked_loss_tokens": 1024, "zero_stage": 3,
    "offload": "parameters", "gradients_kept": False, "framework_bytes": GIB,
}  # fmt: skip
"""As `ringattn plan recompute=offloaded tiled_mlp_tokens=4096 chunked_loss_tokens=1024 zero_stage=3 offload=parameters
gradients_kept=false`."""

ALST = {1: 500_000, 8: 3_700_000, 32: 15_000_000}
"""Llama-8B on H100-80, longest sequences by accelerators (arXiv:2506.13996, abstract)."""

ON_THE_WAY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nothing", {}),
    ("+ recompute full, ZeRO 3", {"recompute": "full", "zero_stage": 3}),
    ("+ chunked loss", {"chunked_loss_tokens": 1024}),
    ("+ tiled MLP", {"tiled_mlp_tokens": 4096}),
    ("+ checkpoints on the host", {"recompute": "offloaded"}),
    ("+ optimizer on the host", {"offload": "optimizer"}),
    ("+ weights on the host", {"offload": "parameters"}),
)

SWITCHES: tuple[dict[str, Any], ...] = (
    {}, {"recompute": "selective"}, {"recompute": "full"}, {"recompute": "offloaded"}, {"tiled_mlp_tokens": 256},
    {"chunked_loss_tokens": 256}, {"tiled_mlp_tokens": 256, "recompute": "full"},
    {"tiled_mlp_tokens": 256, "recompute": "full", "chunked_loss_tokens": 256},
    {"tiled_mlp_tokens": 256, "recompute": "offloaded", "chunked_loss_tokens": 256},
)  # fmt: skip

TITAN = "torchtitan, benchmarks/llama3_h100_202412: H100 96 GB at 500 W, Float8 products, full recompute"
LLAMA3 = "Llama 3 (arXiv:2407.21783, table 4), 8 or 16 thousand H100 at 700 W"
NEMO = "NeMo 25.04, long-sequence table, B200, FP8 products"


class Point(NamedTuple):
    """A published step: tokens/s or TFLOP/s of one accelerator (`full`: masked pairs counted), and the run."""

    name: str
    source: str
    machine: str
    run: TrainingSetup
    tokens_s: float = 0.0
    tflops: float = 0.0
    full: bool = False
    gib: str = ""


def points() -> Iterator[Point]:
    """All of them. Where the source leaves something open, the run's name says what was taken."""
    small, large = model_shape("llama3-8b"), model_shape("405B")
    kept: dict[str, Any] = {"zero_stage": 3, "recompute": "full"}
    for ranks, tokens_s, gib in ((1, 3890, "83.9"), (2, 2540, "84.2"), (4, 1071, "84.0"), (8, 548, "84.5")):
        run = TrainingSetup(small, 32768 * ranks, ranks, zero_degree=8, **kept)
        yield Point(f"8B, 8 GPUs, CP{ranks}", TITAN, "h100", run, tokens_s=tokens_s, gib=gib)
    for ranks, tokens_s, gib in ((1, 76, "75.3"), (2, 47, "75.9"), (4, 31, "77.1"), (8, 16, "84.9")):
        run = TrainingSetup(large, 32768 * ranks, ranks, tensor_ranks=8, pipeline_ranks=8, micro_batches=8,
                            zero_degree=8, zero_stage=1, recompute="full")  # fmt: skip
        yield Point(f"405B, 512 GPUs, TP8 PP8 CP{ranks}, batch 8", TITAN, "h100", run, tokens_s=tokens_s, gib=gib)
    stages: dict[str, Any] = {"tensor_ranks": 8, "pipeline_ranks": 16, "pipeline_chunks": 7, "zero_stage": 2}
    for batches, tflops in ((32, 430), (16, 400)):
        run = TrainingSetup(large, 8192, micro_batches=batches, zero_degree=2048 // batches, **stages)
        yield Point(f"405B, TP8 PP16, 8K, batch {batches}", LLAMA3, "h100", run, tflops=tflops)
    for recompute in ("selective", "full"):
        run = TrainingSetup(large, 131072, 16, micro_batches=16, zero_degree=128, recompute=recompute, **stages)
        name = f"405B, TP8 PP16 CP16, 131K, batch 16, recompute {recompute} taken"
        yield Point(name, LLAMA3, "h100", run, tflops=380)
    run = TrainingSetup(small, 2**20, 16, tensor_ranks=4, zero_stage=1, zero_degree=64, recompute="full")
    yield Point("8B, TP4 CP16, 1M, recompute full taken", NEMO, "b200", run, tflops=1608, full=True)


def at_own_rate(machine: Hardware, first: Point) -> Hardware:
    """The machine with the attention rate that makes `plan` say what was published for a run without a ring.

    The rest of that step stays as `plan` has it, so the rate also holds whatever else was slower or is not counted.
    """
    step, rates = estimate(first.run, machine), machine.reached
    published = first.run.tokens * first.run.batch / (first.tokens_s * first.run.ranks)
    share = step.attention / (step.attention + published - step.seconds)
    slower = replace(rates, attention_forward=rates.attention_forward * share,
                     attention_backward=rates.attention_backward * share)  # fmt: skip
    return replace(machine, measured=slower)


def attention_rate(run: TrainingSetup, machine: Hardware) -> float:
    """FLOP/s of a step's attention, both passes."""
    work = flops_of(run)
    return (work.attention_forward + work.attention_backward) / estimate(run, machine).attention


# --- tables ----------------------------------------------------------------------------------------------------------


def longest_table() -> Table:
    """Llama-8B beside Arctic Long Sequence Training."""
    found = Table(
        "Longest sequence of Llama-8B on H100-80, tokens",
        ("accelerators", "switches", "published by ALST", "plan", "plan / published"),
        notes=[
            "- plan: bf16, fp32 master and AdamW, 1 GiB for driver, NCCL and allocator; the model of `ringattn train`.",
            "- ALST attends by heads (all-to-all), plan's ring by rows: its staging buffers are 14 of the 80 GiB at 8.",
        ],
    )
    memory, shape = hardware("h100").memory_bytes, model_shape("llama3-8b")
    for ranks, published in ALST.items():
        tokens = longest_tokens(TrainingSetup(shape, ranks, ranks, **EVERYTHING), memory)
        found.rows.append((str(ranks), "all", f"{published:,}", f"{tokens:,}", f"{tokens / published:.2f}"))
    run = TrainingSetup(shape, 8, 8, gradients_kept=False, framework_bytes=GIB)
    for name, change in ON_THE_WAY:
        run = replace(run, **change)
        found.rows.append(("8", name, "", f"{longest_tokens(run, memory):,}", ""))
    return found


def times_table() -> Table:
    """Steps: seconds, and TFLOP/s of one accelerator; then of [1] at the attention rate of its first row."""
    own = {TITAN: at_own_rate(hardware("h100"), next(points()))}
    found = Table(
        "Published steps",
        (
            "run",
            "published",
            "plan",
            "plan / published",
            "at the source's own attention rate",
            "plan: s a step",
            "MFU",
            "MFU, masked pairs too",
            "GiB by plan",
            "GiB published",
        ),
        notes=[],
    )
    sources = []
    for point in points():
        machine, run = hardware(point.machine), point.run
        step, ranks = estimate(run, machine), run.ranks * run.tensor_ranks * run.pipeline_ranks
        rate = step.tokens_s / ranks
        if point.tokens_s:
            published, plan, unit = point.tokens_s, rate, "tokens/s"
        else:
            mfu = step.mfu_full if point.full else step.mfu
            published, plan, unit = point.tflops, mfu * machine.flops / 1e12, "TFLOP/s"
        if point.source not in sources:
            sources.append(point.source)
        seconds = f"{step.seconds:,.1f}"
        if point.tokens_s:
            total = run.tokens * run.batch * run.micro_batches
            seconds += f" (published {total / (point.tokens_s * ranks):,.1f})"
        beside = ""
        if point.source in own:
            slower = estimate(run, own[point.source])
            beside = f"{slower.tokens_s / ranks:,.0f}, {slower.tokens_s / ranks / published:.2f}"
        gib = training_bytes(replace(run, framework_bytes=GIB)).peak.total / GIB
        found.rows.append((
            f"[{sources.index(point.source) + 1}] {point.name}", f"{published:,.0f} {unit}", f"{plan:,.0f}",
            f"{plan / published:.2f}", beside, seconds, f"{step.mfu:.1%}", f"{step.mfu_full:.1%}", f"{gib:,.1f}",
            point.gib,
        ))  # fmt: skip
    found.notes += [f"- [{number}] {source}." for number, source in enumerate(sources, 1)]
    for name in ("h100", "b200"):
        rates = hardware(name).reached
        forward, backward = rates.attention_forward / 1e12, rates.attention_backward / 1e12
        found.notes.append(
            f"- Constants, {name}: products {rates.products / 1e12:,.0f}, attention {forward:,.0f} forward, "
            f"{backward:,.0f} backward TFLOP/s; {rates.link_bytes_s / 1e9:,.0f} GB/s in a machine of {rates.machine}, "
            f"{rates.network_bytes_s / 1e9:,.0f} beyond, one way. {rates.source}."
        )
    found.notes += [
        "- GiB by plan above 80 in [2] without recomputation: plan keeps every norm's input and output in float32.",
        "- TFLOP/s: the model's own operations, causal pairs, nothing that is done again; [3] counts masked pairs too.",
        *_why_too_fast(own[TITAN]),
        "- Norms, optimizer, launches and stragglers of thousands of GPUs are in no row of plan.",
    ]
    return found


def _why_too_fast(slower: Hardware) -> Iterator[str]:
    """What [1] lacks, by its own rows."""
    machine, rows = hardware("h100"), [point for point in points() if point.source == TITAN]
    first, last = rows[0], rows[3]
    ours, theirs = (attention_rate(first.run, one) / 1e12 for one in (machine, slower))
    yield (
        f"- Too fast on [1] because of attention: plan has FlashAttention-3's {ours:,.0f} TFLOP/s of both passes, and "
        "[1] is torch of 2024 on cards of 500 W. Its first row, without a ring, leaves attention "
        f"{theirs:,.0f} if its products are as fast as plan has them. That one rate, of one row, is in all rows of the "
        "column; whatever else of that row was slower is in it, too."
    )
    slow, published = estimate(last.run, slower), last.run.tokens / (last.tokens_s * last.run.ranks)
    repeated = last.run.model.heads // last.run.model.kv_heads
    gathered = repeated * ring_bytes(last.run) / machine.reached.link_bytes_s
    # Neither of the two has anything but arithmetic, so its time grows by the first row's factor.
    alike = estimate(last.run, machine).tokens_s / estimate(first.run, machine).tokens_s
    alike *= first.tokens_s * first.run.ranks / (last.tokens_s * last.run.ranks)
    yield (
        f"- So {last.name} takes {slow.seconds:,.1f} s of the published {published:,.1f}, {slow.attention:,.1f} of "
        "them attention. K and V repeated for all query heads and gathered with nothing beside them, as torch of then "
        f"did, would take {gathered:,.1f} s more. What remains is not explained; it begins between 2 and 4 ranks. Were "
        "the first row's products slower by the same factor as its attention, this row would be "
        f"{alike:.2f} times too fast."
    )


# --- measured here ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedOptions:
    """A decoder in float32 on one rank, for the bytes that are measured."""

    length_tokens: int = 2048
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    hidden_dim: int = 384
    results: str = RESULTS


@contextmanager
def host_beside() -> Iterator[None]:
    """On a CPU, too, what waits in host memory is in none of torch's storages."""
    before = offload.to_host, offload.from_host
    changed: Any = offload
    changed.to_host = lambda x: x.detach().numpy().copy()
    changed.from_host = lambda waiting: torch.from_numpy(waiting).clone()
    try:
        yield
    finally:
        changed.to_host, changed.from_host = before


def measured_bytes(config: TrainConfig) -> int:
    """The most that torch's storages take in a step, weights and optimizer aside."""
    tokens = torch.randint(VOCABULARY, (config.batch, config.tokens), generator=torch.Generator().manual_seed(1))

    def of_rank(ring: Ring) -> int:
        model, optimizer = make_model(ring, config)
        parts = [BatchPart(ring.sequence(config.tokens), tokens)]
        backward(ring, ring, parts, model, config)  # the ring's pool is made here
        optimizer.zero_grad()
        with StorageMeter() as storages:
            backward(ring, ring, parts, model, config)
        return storages.peak_bytes

    with host_beside():
        return run_ranks(1, of_rank)[0]


def planned_bytes(config: TrainConfig) -> float:
    """The same by plan."""
    model = config.model
    shape = ModelShape(
        model.layers, model.dim, model.heads, model.kv_heads, model.hidden_dim, VOCABULARY, tied=model.tied
    )
    peak = training_bytes(TrainingSetup(
        shape, config.tokens, precision="fp32", recompute=config.recompute, gradients_kept=False,
        chunked_loss_tokens=config.chunked_loss_tokens or 0, tiled_mlp_tokens=config.tiled_mlp_tokens or 0,
    )).peak  # fmt: skip
    return peak.total - peak.parameters - peak.optimizer


def measured_table(options: PublishedOptions, say: Say) -> Table:
    """Every switch off and on."""
    model = ModelConfig(options.layers, options.dim, options.heads, options.kv_heads, options.hidden_dim)
    plain = TrainConfig(tokens=options.length_tokens, steps=1, dtype="fp32", model=model)
    found = Table(
        f"Peak of a training step, measured, MiB; {options.length_tokens} tokens, {options.layers} layers of "
        f"{options.dim}, float32, weights and optimizer aside",
        ("switches", "measured", "plan", "plan / measured"),
    )
    for change in SWITCHES:
        name = " ".join(f"{key}={value}" for key, value in change.items()) or "none"
        say(name)
        config = replace(plain, **change)
        real, plan = measured_bytes(config), planned_bytes(config)
        found.rows.append((name, mib(real), mib(plan), f"{plan / real:.3f}"))
    return found


def main(words: Sequence[str]) -> dict[str, Any]:
    """Compute, measure, print, keep; returns what is kept."""
    options = parse(PublishedOptions(), words)
    with progress("training_published") as say:
        tables = [longest_table(), times_table(), measured_table(options, say)]
    data = {"tables": {one.title: [dict(zip(one.columns, row, strict=True)) for row in one.rows] for one in tables}}
    finish("training_published", options, tables, data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])

"""`ringattn plan`: estimate training memory per rank and the time of a step, and suggest savings.

Nothing is run. The formulas are in `ringattn.launch.capacity.training_bytes`. The sizes of attention's buffers are
those of the plan that would run.

`step_seconds` adds the arithmetic at the accelerator's published peak and, as if nothing overlapped, every transfer
that a setting causes. The ratio of two runs therefore overstates the cost of transfers. `estimate` uses the rates that
kernels reach, and hides transfers behind arithmetic where possible.

Guarantees: closed forms with their source; no constant is fitted to a published step; the longest length fits, and one
more token per rank does not; the cheapest settings are suggested first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import itemgetter
from typing import Any, NamedTuple

from rich.console import Console

from ringattn.core.geometry import MOST_TOKENS
from ringattn.errors import InputError
from ringattn.launch.capacity import hardware as machines
from ringattn.launch.capacity.hardware import GIB, Hardware
from ringattn.launch.capacity.model_shapes import BLOCKS, PRESETS, ModelShape, bubble, model_shape
from ringattn.launch.capacity.training_bytes import (
    KINDS,
    OFFLOADS,
    RECOMPUTE,
    SAVED,
    AttentionSetup,
    TrainingSetup,
    TrainingSwitches,
    host_bytes,
    training_bytes,
)
from ringattn.launch.config import load
from ringattn.launch.folders import json_output, writing
from ringattn.launch.options import MOST, help_text, json_option, option
from ringattn.planner.cluster import BACKWARD_OVER_FORWARD, FORWARD_FLOPS_PER_DIM

PURPOSE = """\
Estimate the training memory of each rank by component, the longest sequence for the ring, the smallest ring for the
length, the time of a step from published rates, and, if the run does not fit, the settings to turn on first.
Examples: ringattn plan preset=1.3B hardware=a100-80 ranks=8 tokens=1000000
          ringattn plan tokens=1000000000 recompute=full picture=plan.png"""


@dataclass
class PlannedCall:
    """The model, the accelerator and the call: the first keys of the help. Sizes are those of the whole sequence."""

    preset: str = option("1.3B", "model: " + ", ".join(PRESETS), names=tuple(PRESETS))
    hardware: str = option("h100", "accelerator: " + ", ".join(machines.PRESETS), names=tuple(machines.PRESETS))
    tokens: int = option(131072, "tokens of one sequence, over all ranks", least=1, most=MOST)
    ranks: int | None = option(None, "ranks of the ring; the smallest ring that fits if not set", least=1, most=MOST)
    batch: int = option(1, "sequences per step, or per micro batch", least=1, most=MOST)
    mask: str = option("causal", "which keys a query attends to", choices=KINDS)
    window_tokens: int = option(0, "window: keys per query, including the query's own", least=0, most=MOST)
    segment_lengths: list[int] | None = option(None, "dilated attention: segment length of each branch, as [2048,8192]")
    dilation_rates: list[int] | None = option(None, "dilated attention: dilation rate of each branch, as [1,4]")


@dataclass
class PlanConfig(TrainingSwitches, PlannedCall):
    """One training run to plan."""

    framework_gib: float = option(1.0, "allowance for driver, NCCL and allocator, not measured", least=0.0, most=MOST)
    recommended: bool = option(False, "use the hardware's recommended settings for keys that are not given")
    layers: int | None = option(None, "override the preset: transformer blocks", least=1, most=MOST)
    width: int | None = option(None, "override: width of the residual stream", least=1, most=MOST)
    heads: int | None = option(
        None, "override: query heads; must divide width, unless head_dim is set", least=1, most=MOST
    )
    kv_heads: int | None = option(None, "override: key and value heads; must divide heads", least=1, most=MOST)
    head_dim: int | None = option(None, "override: elements of one head; 0: width / heads", least=0, most=MOST)
    ffn: int | None = option(None, "override: width inside the feed-forward, or one expert", least=1, most=MOST)
    experts: int | None = option(None, "override: experts per layer; 0: one feed-forward", least=0, most=MOST)
    experts_per_token: int | None = option(None, "override: experts that process a token", least=0, most=MOST)
    shared_experts: int | None = option(None, "override: experts that process every token", least=0, most=MOST)
    vocabulary: int | None = option(None, "override: size of the vocabulary", least=1, most=MOST)
    tied: bool | None = option(None, "override: the output layer shares the embedding's weights")
    block: str | None = option(
        None, "override: swiglu as in Llama and `ringattn train`, or gelu as in GPT", choices=BLOCKS
    )
    memory_gib: float | None = option(None, "override the hardware: memory in GiB", above=0.0, most=MOST)
    link_gb_s: float | None = option(None, "override: GB/s between accelerators, one way", above=0.0, most=MOST)
    tflops: float | None = option(None, "override: peak TFLOP/s", above=0.0, most=MOST)
    json: str = json_option()
    picture: str = option("", "file for a picture of the components (PNG)", writes="picture")


def main(argv: Sequence[str]) -> int:
    """Run the command. Return 0 if the run fits, else 1. Raises `InputError` for bad options."""
    if "--help" in argv or "-h" in argv:
        print(help_text("plan", PURPOSE, PlanConfig))
        return 0
    config = load(argv, PlanConfig)
    machine = machine_of(config)
    if config.recommended:
        keys = {word.partition("=")[0] for word in argv}
        config = replace(config, **{key: value for key, value in machine.start if key not in keys})
    with json_output(config.json) as write:
        with Console(stderr=True).status("searching for the longest sequence and the smallest ring that fit"):
            figures = plan(config, machine)
        print(table(config, machine, figures))
        if config.picture:
            from ringattn.launch.capacity.picture import draw_capacity  # loads matplotlib

            with writing("picture", config.picture):
                draw_capacity(figures, config.picture)
            print(f"picture written: {config.picture}")
        write(figures)
    return 0 if figures["fits"] else 1


def machine_of(config: PlanConfig) -> Hardware:
    """Return the accelerator that `config` names, with the memory, link rate and peak that its options override."""
    machine = machines.hardware(config.hardware)
    if config.memory_gib is not None:
        machine = replace(machine, memory_bytes=int(config.memory_gib * GIB))
    if config.link_gb_s is not None:
        machine = machine.with_link(config.link_gb_s * 1e9)
    return machine if config.tflops is None else machine.with_peak(config.tflops * 1e12)


def shape_of(config: PlanConfig) -> ModelShape:
    """Return the shape of the model that `config` names, with the sizes that its options override."""
    keys = {size.name: "head_dim" if size.name == "head_size" else size.name for size in fields(ModelShape)}
    sizes = {name: getattr(config, key) for name, key in keys.items()}
    if sizes["head_size"] is None and (sizes["width"] or sizes["heads"]):
        sizes["head_size"] = 0  # the preset's head size does not apply to other widths
    return replace(model_shape(config.preset), **{name: size for name, size in sizes.items() if size is not None})


def run_of(config: PlanConfig) -> TrainingSetup:
    """Return the run that the options describe, with one rank if `ranks` is not set."""
    branches = tuple(config.segment_lengths or ()), tuple(config.dilation_rates or ())
    for key, mask in (("window_tokens", "window"), ("segment_lengths", "dilated"), ("dilation_rates", "dilated")):
        if getattr(config, key) and config.mask != mask:
            raise InputError(f"{key}={getattr(config, key)}: has no effect with mask={config.mask}; set mask={mask}")
    if config.mask == "window" and config.window_tokens < 2:
        raise InputError(f"window_tokens={config.window_tokens}: must be at least 2, including the query's own key")
    attention = AttentionSetup(config.mask, max(0, config.window_tokens - 1), *branches)
    switches = {switch.name: getattr(config, switch.name) for switch in fields(TrainingSwitches)}
    framework_bytes = int(config.framework_gib * GIB)
    return TrainingSetup(
        shape_of(config), config.tokens, config.ranks or 1, config.batch, attention, framework_bytes, **switches
    )


def plan(config: PlanConfig, machine: Hardware) -> dict[str, Any]:
    """Return all figures of the command as plain data for JSON; sizes are bytes on one rank.

    Raises `InputError` if the hardware lacks the arithmetic of the precision.
    """
    if not machine.bf16 and config.precision.startswith("bf16"):
        raise InputError(f"precision={config.precision}: {machine.name} has no bf16 arithmetic; use precision=fp32")
    run = run_of(config)
    smallest = smallest_ring(run, machine.memory_bytes)
    recommended = replace(run, **dict(machine.start))
    recommended_ring = smallest_ring(recommended, machine.memory_bytes)
    # If no ring fits these settings, savings are suggested for the smallest ring that fits the recommended settings.
    run = replace(run, ranks=config.ranks or smallest or recommended_ring or 1)
    recommended = replace(recommended, ranks=run.ranks)
    account = training_bytes(run)
    steps = advice(run, machine)
    smaller = with_steps(run, steps)
    after = training_bytes(smaller)
    return {
        "model": {"name": config.preset, "parameters": run.model.parameters, **asdict(run.model)},
        "hardware": {"name": machine.name, "memory_bytes": machine.memory_bytes, "source": machine.source,
                     "recommended": dict(machine.start), "why": machine.why,
                     "longest_tokens": longest_tokens(recommended, machine.memory_bytes),
                     "smallest_ring": recommended_ring},
        "run": {key: value for key, value in asdict(run).items() if key != "model"},
        "fits": account.peak.total <= machine.memory_bytes,
        "moment": account.moment,
        "bytes_by_component": account.peak._asdict(),
        "bytes_by_moment": account.totals,
        "total_bytes": account.peak.total,
        "bytes_per_token": bytes_per_token(run),
        "host_bytes": account.host_bytes,
        "route": account.slots.route,
        "longest_tokens": longest_tokens(run, machine.memory_bytes),
        "smallest_ring": smallest,
        "steps": [_step(step) for step in steps],
        "rounding_saves": rounding_saves(run),
        "step": _step_time(estimate(run, machine)),
        "rates": asdict(machine.reached),
        "after_steps": {"step": _step_time(estimate(smaller, machine)),
                        "bytes_by_component": after.peak._asdict(), "total_bytes": after.peak.total,
                        "longest_tokens": longest_tokens(smaller, machine.memory_bytes),
                        "smallest_ring": smallest_ring(smaller, machine.memory_bytes)},
    }  # fmt: skip


def _step_time(time: StepTime) -> dict[str, float]:
    return {**time._asdict(), "seconds": time.seconds}


def _step(step: Advice) -> dict[str, Any]:
    return {**step.switch._asdict(), "saves_bytes": step.saves_bytes, "time_factor": step.time_factor,
            "total_bytes": step.total_bytes}  # fmt: skip


def table(config: PlanConfig, machine: Hardware, figures: dict[str, Any]) -> str:
    """Return the plan as text."""
    run, total = figures["run"], figures["total_bytes"]
    parameters = figures["model"]["parameters"] / 1e9
    lines = [
        f"{config.preset}, {parameters:.3f}e9 parameters, on {machine.name} ({_gib(machine.memory_bytes)} GiB; "
        f"{machine.source})",
        f"{run['tokens']:,} tokens over a ring of {run['ranks']:,}: "
        f"{-(-run['tokens'] // run['ranks']):,} tokens per rank; {run['precision']}, {run['optimizer']}, "
        f"recompute {run['recompute']}, ZeRO {run['zero_stage']}; schedule {figures['route']}",
        "",
        f"{'component':<14}{'GiB per rank':>12}{'share':>8}   (at the peak: {figures['moment']})",
    ]
    for name, nbytes in figures["bytes_by_component"].items():
        lines.append(f"{name.replace('_', ' '):<14}{_gib(nbytes):>12}{nbytes / total:>8.1%}")
    verdict = "fits" if figures["fits"] else "does not fit"
    lines += [f"{'total':<14}{_gib(total):>12}   {verdict} in {_gib(machine.memory_bytes)}"]
    if figures["host_bytes"]:
        lines.append(f"{'host memory':<14}{_gib(figures['host_bytes']):>12}")
    return "\n".join([*lines, "", *_answers(run, figures, machine), "", *_time(run, figures, machine)])


def _time(run: dict[str, Any], figures: dict[str, Any], machine: Hardware) -> list[str]:
    """Return lines with step time, tokens/s and MFU, and with the rates behind them.

    If the run does not fit, they describe the run with all suggested settings.
    """
    with_savings = not figures["fits"] and figures["steps"]
    step, rates = (figures["after_steps"] if with_savings else figures)["step"], machine.reached
    ranks = run["ranks"] * run["tensor_ranks"] * run["pipeline_ranks"]
    parts = ", ".join(f"{name} {step[name]:,.2f}" for name in StepTime._fields[:7] if step[name] > 0)
    return [
        f"a step{' with all of these settings' if with_savings else ''}: about {step['seconds']:,.2f} s ({parts}), "
        f"{step['tokens_s']:,.0f} tokens/s on {ranks:,} accelerators, {step['tokens_s'] / ranks:,.0f} on each",
        f"  MFU {step['mfu']:.1%} of {machine.flops / 1e12:,.0f} TFLOP/s, {step['mfu_full']:.1%} if masked pairs are "
        "counted too (PaLM's formula); recomputation is not counted",
        f"  published rates, not measured: matrix products {rates.products / 1e12:,.0f}, attention "
        f"{rates.attention_forward / 1e12:,.0f} forward, {rates.attention_backward / 1e12:,.0f} backward TFLOP/s; "
        f"{rates.source}",
    ]


def _answers(run: dict[str, Any], figures: dict[str, Any], machine: Hardware) -> list[str]:
    """Return lines with the longest sequence, the smallest ring, the bytes per token, and the suggested settings."""
    tokens, token_bytes = run["batch"] * -(-run["tokens"] // run["ranks"]), figures["bytes_per_token"]
    lines = [
        _limits(figures, run["ranks"]),
        f"memory of a rank: {tokens:,} tokens of {token_bytes:,.0f} bytes are {_gib(token_bytes * tokens)} GiB; "
        f"{_gib(figures['total_bytes'] - token_bytes * tokens)} GiB do not depend on the number of tokens",
    ]
    if figures["steps"]:
        lines += ["", "settings to turn on first, each in addition to the previous ones; time is an upper bound",
                  f"  {'setting':<30}{'saves GiB':>12}{'time':>8}{'leaves GiB':>12}"]  # fmt: skip
    for step in figures["steps"]:
        setting = f"{step['key']}={step['value']}"
        lines.append(
            f"  {setting:<30}{_gib(step['saves_bytes']):>12}{step['time_factor']:>7.2f}x{_gib(step['total_bytes']):>12}"
            f"  {step['about']}"
        )
    after = figures["after_steps"]
    if figures["steps"]:
        enough = "then it fits" if after["total_bytes"] <= machine.memory_bytes else "still does not fit"
        lines.append(f"  {enough}; {_limits(after, run['ranks'])}")
    for setting, saved in figures["rounding_saves"].items() if not figures["fits"] else ():
        lines.append(f"  not turned on, because it changes the arithmetic: {setting} alone saves {_gib(saved)} GiB")
    return lines


def _limits(figures: dict[str, Any], ring: int) -> str:
    """Return a line with the longest sequence and the smallest ring."""
    smallest = f"{figures['smallest_ring']:,}" if figures["smallest_ring"] else "no ring fits"
    return f"longest sequence on a ring of {ring:,}: {figures['longest_tokens']:,} tokens; smallest ring: {smallest}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f}"


# --- time of a step ---------------------------------------------------------------------------------------------------


TENSOR_COLLECTIVES = 8
"""Gathers and scatters of a layer's tokens under tensor and sequence parallelism, forward and backward together: two of
each for attention and two of each for the feed-forward (arXiv:2205.05198, section 4.2.2)."""


def matrix_flops(run: TrainingSetup) -> float:
    """Return the FLOPs of a rank's matrix products in forward: 2 per parameter and token (arXiv:2001.08361, 2.1).

    They include all layers and the output product, which a tied model computes too. Of the experts, only those that
    process a token count. The figure is that of one micro batch, averaged over the stages of a pipeline.
    """
    shape = run.model
    products = shape.layers * shape.active_parameters + shape.vocabulary * shape.width
    return 2.0 * products * run.rank_tokens / _cut(run)


def attention_flops(run: TrainingSetup) -> float:
    """Return the FLOPs of a rank's attention in forward: 4 head_dim per pair and head (FlashAttention-2, 4.1)."""
    shape = run.model
    pairs = run.attention.pairs(run.tokens) * run.batch / run.ranks
    return FORWARD_FLOPS_PER_DIM * shape.query_width * pairs * shape.layers / _cut(run)


def _cut(run: TrainingSetup) -> int:
    return run.tensor_ranks * run.pipeline_ranks


class Flops(NamedTuple):
    """FLOPs of one micro batch on one rank, including recomputation: matrix products, and attention by pass."""

    products: float
    attention_forward: float
    attention_backward: float

    @property
    def total(self) -> float:
        """Return the sum."""
        return sum(self)


def flops_of(run: TrainingSetup) -> Flops:
    """Return the FLOPs of one micro batch.

    Backward takes twice the FLOPs of forward for matrix products, and 2.5 times for attention. With recompute full or
    offloaded, backward runs the forward of the layers again (Korthikanti et al. 2022, section 5); with selective, it
    does so without attention. A tiled feed-forward and the logits of a loss in chunks are always recomputed.
    """
    shape = run.model
    products, attention = matrix_flops(run), attention_flops(run)
    output = 2.0 * shape.vocabulary * shape.width * run.rank_tokens / _cut(run)
    kept = sum(matrix.parameters for matrix in shape.attention_matrices)
    feeds = 2.0 * shape.layers * (shape.active_parameters - kept) * run.rank_tokens / _cut(run)
    again = (feeds if run.is_tiled else 0.0) if run.recompute == "none" else products - output
    if run.chunked_loss_tokens:
        again += output
    forward = attention if run.recompute in ("none", "selective") else 2 * attention
    return Flops(3 * products + again, forward, BACKWARD_OVER_FORWARD * attention)


def compute_flops(run: TrainingSetup) -> float:
    """Return the FLOPs of one rank's step."""
    return flops_of(run).total * run.micro_batches


def model_flops(run: TrainingSetup, half: bool = True) -> float:
    """Return the FLOPs of one rank's step without recomputation: three times those of the model's forward pass.

    If `half`, attention counts the pairs that the mask allows. Otherwise it counts all pairs, as in PaLM's formula
    12 layers width length (arXiv:2204.02311, appendix B).
    """
    attention = attention_flops(run)
    if not half:
        attention *= run.tokens**2 / run.attention.pairs(run.tokens)
    return 3 * (matrix_flops(run) + attention) * run.micro_batches


def state_bytes_moved(run: TrainingSetup) -> float:
    """Return the bytes that a rank sends for data parallelism and ZeRO (arXiv:1910.02054, section 7).

    Stages 0 to 2 all-reduce the gradients, or scatter the gradients and gather the weights, which moves each parameter
    twice. Stage 3 gathers the weights twice and scatters the gradients.
    """
    if run.degree == 1:
        return 0.0
    numbers, share = run.numbers, (run.degree - 1) / run.degree
    weights, gradients = (run.share.parameters * item * share for item in (numbers.weight, numbers.gradient))
    return 2 * weights + gradients if run.zero_stage == 3 else weights + gradients


def step_seconds(run: TrainingSetup, machine: Hardware) -> float:
    """Return the seconds of a step without overlap.

    They are those of the arithmetic at peak, the transfers of ZeRO, and the transfers from and to host memory.
    """
    arithmetic = compute_flops(run) / machine.flops
    return arithmetic + state_bytes_moved(run) / machine.link_bytes_s + 2 * host_bytes(run) / machine.host_bytes_s


class StepTime(NamedTuple):
    """Seconds of a step by cause. `ring`, `state` and `host` count only the transfers that arithmetic does not hide.

    `mfu` is the share of the peak that the model's FLOPs reach, without recomputation and with the pairs that the mask
    allows. `mfu_full` is the same with all pairs.
    """

    products: float
    attention: float
    tensor: float
    ring: float
    state: float
    host: float
    bubble: float
    tokens_s: float
    mfu: float
    mfu_full: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the step."""
        return sum(self[:7])


def ring_bytes(run: TrainingSetup) -> float:
    """Return the bytes that a rank sends for attention per micro batch: K and V in forward; K, V and dK/dV in backward.

    This is an upper bound for all schedules. If attention is recomputed, its forward counts twice.
    """
    rows = run.rank_tokens * 2 * run.model.kv_width / run.tensor_ranks
    forward, sums = rows * run.numbers.activation, rows * run.numbers.wide
    passes = 1 if run.recompute in ("none", "selective") else 2
    layers = run.model.layers / run.pipeline_ranks
    return (run.ranks - 1) * layers * ((passes + 1) * forward + sums)


def tensor_bytes(run: TrainingSetup) -> float:
    """Return the bytes that a rank sends for tensor parallelism per micro batch, including recomputed layers."""
    share = (run.tensor_ranks - 1) / run.tensor_ranks
    passes = TENSOR_COLLECTIVES * (1 if run.recompute == "none" else 1.5)
    layers = run.model.layers / run.pipeline_ranks
    return passes * layers * run.rank_tokens * run.model.width * run.numbers.activation * share


def estimate(run: TrainingSetup, machine: Hardware) -> StepTime:
    """Estimate a step at the rates that kernels and links reach.

    Attention hides the transfers of K and V. The arithmetic of the micro batches hides the transfers of the state and
    of host memory. Nothing hides the collectives of tensor parallelism. Neighboring ranks form a tensor parallel group,
    and these groups form rings. A ring or group that does not fit into one machine uses the network.
    """
    rates, work = machine.reached, flops_of(run)

    def link(ranks: int) -> float:
        return rates.link_bytes_s if ranks <= rates.machine else rates.network_bytes_s

    products = work.products / rates.products
    attention = work.attention_forward / rates.attention_forward + work.attention_backward / rates.attention_backward
    tensor = tensor_bytes(run) / link(run.tensor_ranks)
    ring = max(0.0, ring_bytes(run) / link(run.tensor_ranks * run.ranks) - attention)
    micro_batch = products + attention + tensor + ring
    count = run.micro_batches
    idle = count * micro_batch * bubble(run.pipeline_ranks, run.pipeline_chunks, count)
    hidden = count * (products + attention)
    state = max(0.0, state_bytes_moved(run) / link(run.tensor_ranks * run.degree) - hidden)
    host = max(0.0, 2 * host_bytes(run) / machine.host_bytes_s - hidden)
    seconds = count * micro_batch + state + host + idle
    peak = seconds * machine.flops
    return StepTime(
        count * products, count * attention, count * tensor, count * ring, state, host, idle,
        run.tokens * run.batch * count / seconds, model_flops(run) / peak, model_flops(run, half=False) / peak,
    )  # fmt: skip


# --- what fits --------------------------------------------------------------------------------------------------------


MOST_RANKS = 2**24
"""The largest ring that searches try."""

LEAST_SAVING = 1 / 1000
"""The share of the total that a setting must save to be suggested."""


class Switch(NamedTuple):
    """A setting that saves memory."""

    key: str
    value: Any
    about: str


SWITCHES = (
    Switch("data", "shard", "each rank reads only its shard of the tokens"),
    Switch("chunked_loss_tokens", 1024, "logits of 1024 tokens at a time"),
    Switch("zero_stage", 1, "shard the optimizer state over the ranks"),
    Switch("zero_stage", 2, "shard the gradients too"),
    Switch("zero_stage", 3, "shard the weights too"),
    Switch("tiled_mlp_tokens", 4096, "feed-forwards of 4096 tokens at a time"),
    Switch("recompute", "selective", "recompute everything except attention"),
    Switch("recompute", "full", "recompute layers from their inputs"),
    Switch("recompute", "offloaded", "keep these inputs in host memory"),
    Switch("offload", "optimizer", "run the optimizer on the host"),
    Switch("offload", "parameters", "keep weights on the host, fetched layer by layer"),
)
"""Settings that advice may turn on. They change results only by rounding."""

ROUNDING = (
    Switch("optimizer", "adamw8bit", "optimizer state in eight bits"),
    Switch("saved_activations", "int8", "saved activations in eight bits"),
)
"""Settings that store data in eight bits and so change results by more. They are listed, but never turned on."""

ORDER: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "recompute": RECOMPUTE,
    "offload": OFFLOADS,
    "saved_activations": SAVED,
}
"""Settings in order: a search never replaces a value by an earlier one."""


class Advice(NamedTuple):
    """A suggested setting and its effect after all settings suggested before it.

    `saves_bytes` is the saving per rank, and `total_bytes` the memory that the rank then needs. `time_factor` is the
    time of a step with this and all earlier settings, divided by the time without any of them.
    """

    switch: Switch
    saves_bytes: float
    time_factor: float
    total_bytes: float


def fits(run: TrainingSetup, memory_bytes: float) -> bool:
    """Return whether the peak of a rank is within its memory."""
    return training_bytes(run).peak.total <= memory_bytes


def longest_tokens(run: TrainingSetup, memory_bytes: float) -> int:
    """Return the tokens of the longest sequence that fits, a multiple of `run.ranks`; 0 if no length fits."""

    def length_fits(per_rank: int) -> bool:
        return fits(replace(run, tokens=per_rank * run.ranks), memory_bytes)

    if not length_fits(1):
        return 0
    low, high = 1, 2
    while high * run.ranks <= MOST_TOKENS and length_fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if length_fits(middle) else (low, middle)
    return low * run.ranks


def bytes_per_token(run: TrainingSetup) -> float:
    """Return the bytes by which a rank's peak grows per additional token of the rank, if the length is doubled."""
    twice = replace(run, tokens=2 * run.tokens)
    grown = training_bytes(twice).peak.total - training_bytes(run).peak.total
    return grown / (twice.rank_tokens - run.rank_tokens)


def smallest_ring(run: TrainingSetup, memory_bytes: float) -> int | None:
    """Return the fewest ranks on which `run.tokens` tokens fit with the settings of `run`; None if no number fits."""

    def ring_fits(ranks: int) -> bool:
        return fits(replace(run, ranks=ranks), memory_bytes)

    low, high = 0, 1
    while not ring_fits(high):
        low, high = high, 2 * high
        if low >= min(run.tokens, MOST_RANKS):
            return None
        high = min(high, run.tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ring_fits(middle) else (middle, high)
    return high


def advice(run: TrainingSetup, machine: Hardware) -> list[Advice]:
    """Return settings to turn on, one after another, until the run fits.

    The next setting is always that with the fewest additional seconds per saved byte. Time factors compare with the run
    without any of the settings.
    """
    steps: list[Advice] = []
    before, base = training_bytes(run).peak.total, step_seconds(run, machine)
    while before > machine.memory_bytes:
        choices = []
        for switch in SWITCHES:
            if _goes_further(run, switch):
                tried = replace(run, **{switch.key: switch.value})
                saved, seconds = before - training_bytes(tried).peak.total, step_seconds(tried, machine)
                if saved > LEAST_SAVING * before:
                    cost = max(0.0, seconds - step_seconds(run, machine)) / saved
                    choices.append(((cost, -saved), switch, tried, saved, seconds))
        if not choices:
            break
        _, switch, run, saved, seconds = min(choices, key=itemgetter(0))
        before -= saved
        steps.append(Advice(switch, saved, seconds / base, before))
    return steps


def rounding_saves(run: TrainingSetup) -> dict[str, float]:
    """Return the bytes that each setting of `ROUNDING` saves if it alone is turned on, by its text "key=value".

    The effect of these settings on the loss of this run was not measured.
    """
    before = training_bytes(run).peak.total
    return {
        f"{switch.key}={switch.value}":
            before - training_bytes(replace(run, **{switch.key: switch.value})).peak.total
        for switch in ROUNDING if _goes_further(run, switch)
    }  # fmt: skip


def with_steps(run: TrainingSetup, steps: list[Advice]) -> TrainingSetup:
    """Return the run with all suggested settings."""
    return replace(run, **{step.switch.key: step.switch.value for step in steps})


def _goes_further(run: TrainingSetup, switch: Switch) -> bool:
    """Return whether to try a setting.

    A setting in `ORDER` must come after the current value, weights on the host need ZeRO 3, and an optimizer in eight
    bits replaces only AdamW.
    """
    current = getattr(run, switch.key)
    if switch.value == "parameters" and run.zero_stage < 3:
        return False
    if switch.key in ORDER:
        order = ORDER[switch.key]
        return order.index(switch.value) > order.index(current)
    return switch.key != "optimizer" or current == "adamw"

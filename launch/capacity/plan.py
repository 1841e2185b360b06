"""`ringattn plan`: estimate training memory per rank and the time of a step, and suggest savings.

Nothing is run. The formulas are in `training_bytes` and `layer_bytes`. The sizes of attention's buffers are
those of the plan that would run.

Guarantees: closed forms with their source; no constant is fitted to a published step. A run "fits" only if a share of
the memory stays free that published runs lose to gaps of the allocator (`RESERVE`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rich.console import Console

from ringattn.errors import InputError
from ringattn.launch.capacity import hardware as machines
from ringattn.launch.capacity.account import training_bytes
from ringattn.launch.capacity.hardware import GIB, Hardware, Reached
from ringattn.launch.capacity.model_shapes import BLOCKS, PRESETS, ModelShape, model_shape
from ringattn.launch.capacity.search import (
    Advice,
    advice,
    bytes_per_token,
    longest_tokens,
    rounding_saves,
    smallest_ring,
    with_steps,
)
from ringattn.launch.capacity.stacks import STACKS
from ringattn.launch.capacity.step_time import StepTime, estimate, rates_of
from ringattn.launch.capacity.training_bytes import (
    KINDS,
    AttentionSetup,
    TrainingSetup,
    TrainingSwitches,
)
from ringattn.launch.config import load
from ringattn.launch.folders import json_output, writing
from ringattn.launch.options import MOST, help_text, json_option, option

PURPOSE = """\
Estimate the training memory of each rank by component, the longest sequence for the ring, the smallest ring for the
length, the time of a step from published rates, and, if the run does not fit, the settings to turn on first.
Examples: ringattn plan preset=1.3B hardware=a100-80 ranks=8 tokens=1000000
          ringattn plan tokens=1000000000 recompute=full picture=plan.png
Exit code: 0 if the run fits with the reserve, 1 if it does not, 2 if an option is wrong."""

ALLOCATED_OF_RESERVED = ((61.66, 67.69), (42.71, 48.75), (62.5, 71.2))
"""Published peaks of tensors, and of what torch's allocator had reserved from the device for them, in GB or GiB.

A 12B model on 8 H100, without and with recomputed norms (NVIDIA-NeMo/RL, pull request 926), and a run with micro
batches of several sizes, the largest first (pull request 3476). GMLake (arXiv:2401.08156) reports gaps of 15 % on
average, and 33 % at most, for the allocator of 2023.
"""

RESERVE = round(max(1 - allocated / reserved for allocated, reserved in ALLOCATED_OF_RESERVED), 3)
"""The share of the device's memory that must stay free for gaps of the allocator: the largest of these runs."""


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
    reserve: float = option(
        RESERVE, "share of the memory that must stay free for gaps of the allocator", least=0.0, most=0.9
    )
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
    head_norms: bool | None = option(None, "override: queries and keys are normalized per head, as in Qwen3")
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
        start = recommended_settings(machine, config.stack)
        config = replace(config, **{key: value for key, value in start.items() if key not in keys})
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


def recommended_settings(machine: Hardware, stack: str) -> dict[str, Any]:
    """Return the settings that are recommended for the accelerator, as far as the stack has them."""
    start = dict(machine.start)
    if stack in STACKS:
        start["precision"] = STACKS[stack].precisions.value[0]
        if start["recompute"] == "selective" and STACKS[stack].selective.value is None:
            start["recompute"] = "full"
    return start


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
    if config.head_norms is not None and config.stack not in STACKS:
        raise InputError(f"head_norms={config.head_norms}: has no effect with stack={config.stack}; set stack")
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
    usable = replace(machine, memory_bytes=int(machine.memory_bytes * (1 - config.reserve)))
    limit = usable.memory_bytes
    smallest = smallest_ring(run, limit)
    recommended = replace(run, **recommended_settings(machine, run.stack))
    recommended_ring = smallest_ring(recommended, limit)
    # If no ring fits these settings, savings are suggested for the smallest ring that fits the recommended settings.
    rings = {"ranks": config.ranks, "smallest": smallest, "recommended": recommended_ring, "none": 1}
    ring_from, ring = next((source, ranks) for source, ranks in rings.items() if ranks)
    run = replace(run, ranks=ring)
    recommended = replace(recommended, ranks=run.ranks)
    account = training_bytes(run)
    steps = advice(run, usable)
    smaller = with_steps(run, steps)
    after = training_bytes(smaller)
    return {
        "model": {"name": config.preset, "parameters": run.model.parameters, **asdict(run.model)},
        "hardware": {"name": machine.name, "memory_bytes": machine.memory_bytes, "source": machine.source,
                     "recommended": recommended_settings(machine, run.stack), "why": machine.why,
                     "longest_tokens": longest_tokens(recommended, limit),
                     "smallest_ring": recommended_ring},
        "run": {key: value for key, value in asdict(run).items() if key != "model"},
        "ring_from": ring_from,
        "fits": account.peak.total <= limit,
        "reserve_bytes": machine.memory_bytes - limit,
        "without_tokens": training_bytes(replace(run, tokens=run.ranks)).peak._asdict(),
        "moment": account.moment,
        "bytes_by_component": account.peak._asdict(),
        "bytes_by_moment": account.totals,
        "total_bytes": account.peak.total,
        "bytes_per_token": bytes_per_token(run),
        "host_bytes": account.host_bytes,
        "route": account.slots.route,
        "longest_tokens": longest_tokens(run, limit),
        "smallest_ring": smallest,
        "steps": [_step(step) for step in steps],
        "rounding_saves": rounding_saves(run),
        "step": _step_time(estimate(run, machine)),
        "rates": asdict(rates_of(run, machine)),
        "after_steps": {"step": _step_time(estimate(smaller, machine)),
                        "bytes_by_component": after.peak._asdict(), "total_bytes": after.peak.total,
                        "fits": after.peak.total <= limit,
                        "longest_tokens": longest_tokens(smaller, limit),
                        "smallest_ring": smallest_ring(smaller, limit)},
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
        *verdict(figures),
        "",
        f"{config.preset}, {parameters:.3f}e9 parameters, on {machine.name} ({_gib(machine.memory_bytes)} GiB; "
        f"{machine.source})",
        f"{run['tokens']:,} tokens over a ring of {run['ranks']:,}: "
        f"{-(-run['tokens'] // run['ranks']):,} tokens per rank; {run['precision']}, {run['optimizer']}, "
        f"recompute {run['recompute']}, ZeRO {run['zero_stage']}; {_runner(figures)}",
        "",
        f"{'component':<14}{'GiB per rank':>12}{'share':>8}   (at the peak: {figures['moment']})",
    ]
    for name, nbytes in figures["bytes_by_component"].items():
        lines.append(f"{name.replace('_', ' '):<14}{_gib(nbytes):>12}{nbytes / total:>8.1%}")
    lines += [f"{'total':<14}{_gib(total):>12}   of {_gib(machine.memory_bytes)}"]
    if figures["host_bytes"]:
        lines.append(f"{'host memory':<14}{_gib(figures['host_bytes']):>12}")
    return "\n".join([*lines, "", *_answers(run, figures, machine), "", *_time(run, figures, machine)])


def _runner(figures: dict[str, Any]) -> str:
    """Return the schedule of our trainer, or the stack."""
    stack = figures["run"]["stack"]
    return f"stack {stack}" if stack in STACKS else f"schedule {figures['route']}"


MOMENTS = {
    "loss": "at the loss", "last layer": "in the backward of the last layer",
    "next to last layer": "in the backward of the next to last layer",
    "second layer": "in the backward of the second layer",
    "packing": "in forward, while the last layer packs its activations",
    "gather": "in forward, while the weights of the last layer are gathered",
    "first layer": "in the backward of the first layer", "update": "in the update of the optimizer",
    "reduction": "in the reduction of the gradients", "stored": "with all stored tensors",
}  # fmt: skip
"""Words for the moments of `training_bytes.moments`."""

OWNERS = 3
"""The components that the verdict names."""


def verdict(figures: dict[str, Any]) -> list[str]:
    """Return three lines: whether the run fits, the moment and owners of the peak, and the longest sequence."""
    total, memory, reserve = figures["total_bytes"], figures["hardware"]["memory_bytes"], figures["reserve_bytes"]
    left = f"{_gib(memory - total)} GiB ({1 - total / memory:.1%}) stay free"
    if total > memory:
        left = f"{_gib(total - memory)} GiB are missing"
    first = (
        f"{'fits' if figures['fits'] else 'does not fit'}: {_gib(total)} of {_gib(memory)} GiB, {left}; "
        f"{_gib(reserve)} GiB ({reserve / memory:.1%}) must stay free for gaps of the allocator"
    )
    peak = f"peak {MOMENTS[figures['moment']]}: {_owners(figures['bytes_by_component'])}"
    last = _longest(figures, figures["run"]["ranks"])
    if figures["ring_from"] in ("recommended", "none"):
        last = f"no ring fits this length; {last}"
    if figures["ring_from"] == "recommended":
        last += ", the smallest that fits with recommended=true"
    if not figures["longest_tokens"]:
        state = figures["without_tokens"]
        last += f": with one token per rank a rank already takes {_gib(sum(state.values()))} GiB, {_owners(state)}"
    if not figures["fits"] and figures["steps"]:
        step, after = figures["steps"][0], figures["after_steps"]
        last += f"; turn on first: {step['key']}={step['value']}"
        if after["longest_tokens"]:
            last += f"; with all settings below {after['longest_tokens']:,} tokens fit"
    return [first, peak, last]


def _owners(components: dict[str, float]) -> str:
    """Return the largest components, as text."""
    largest = sorted(components.items(), key=lambda item: -item[1])[:OWNERS]
    return ", ".join(f"{name.replace('_', ' ')} {_gib(nbytes)} GiB" for name, nbytes in largest if nbytes)


def _time(run: dict[str, Any], figures: dict[str, Any], machine: Hardware) -> list[str]:
    """Return lines with step time, tokens/s and MFU, and with the rates behind them.

    If the run does not fit, they describe the run with all suggested settings.
    """
    with_savings = not figures["fits"] and figures["steps"]
    step, rates = (figures["after_steps"] if with_savings else figures)["step"], Reached(**figures["rates"])
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
        enough = "then it fits" if after["fits"] else "still does not fit"
        lines.append(f"  {enough}; {_limits(after, run['ranks'])}")
    for setting, saved in figures["rounding_saves"].items() if not figures["fits"] else ():
        lines.append(f"  not turned on, because it changes the arithmetic: {setting} alone saves {_gib(saved)} GiB")
    return lines


def _longest(figures: dict[str, Any], ring: int) -> str:
    """Return the longest sequence as text."""
    if not figures["longest_tokens"]:
        return f"no sequence fits on a ring of {ring:,}"
    return f"longest sequence on a ring of {ring:,}: {figures['longest_tokens']:,} tokens"


def _limits(figures: dict[str, Any], ring: int) -> str:
    """Return a line with the longest sequence and the smallest ring."""
    smallest = f"{figures['smallest_ring']:,}" if figures["smallest_ring"] else "no ring fits"
    return f"{_longest(figures, ring)}; smallest ring: {smallest}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f}"

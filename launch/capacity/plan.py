"""`ringattn plan`: the bytes that each rank needs to train a model, what fits, and what to turn on when it does not.

Nothing is run: the formulas are those of `ringattn.launch.capacity.training_bytes`, the buffers of attention those of
the real plan.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ringattn.errors import InputError
from ringattn.launch.capacity import hardware as machines
from ringattn.launch.capacity.fitting import (
    Advice,
    StepTime,
    advice,
    bytes_per_token,
    estimate,
    longest_tokens,
    rounding_saves,
    smallest_ring,
    with_steps,
)
from ringattn.launch.capacity.hardware import GIB, Hardware
from ringattn.launch.capacity.model_shapes import BLOCKS, PRESETS, ModelShape, model_shape
from ringattn.launch.capacity.training_bytes import (
    KINDS,
    AttentionSetup,
    TrainingSetup,
    TrainingSwitches,
    training_bytes,
)
from ringattn.launch.config import load
from ringattn.launch.options import MOST, help_text, option
from ringattn.launch.outputs import save_picture, writing
from ringattn.observe.files import write_file

PURPOSE = """\
Says how many bytes each rank needs to train a model on sequences that the ranks of a ring share, by component; the
longest sequence for the ring, the smallest ring for the length, what to turn on first where it does not fit, and the
time of a step, from rates that others have published.
Examples: ringattn plan preset=1.3B hardware=a100-80 ranks=8 tokens=1000000
          ringattn plan tokens=1000000000 recompute=full picture=plan.png"""


@dataclass
class PlannedCall:
    """The model, the machine and the call; the first keys of the help. Sizes count the whole sequence."""

    preset: str = option("1.3B", "model: " + ", ".join(PRESETS), names=tuple(PRESETS))
    hardware: str = option("h100", "accelerator: " + ", ".join(machines.PRESETS), names=tuple(machines.PRESETS))
    tokens: int = option(131072, "tokens of one sequence, over all ranks", least=1, most=MOST)
    ranks: int | None = option(None, "ranks that share a sequence; not set: the smallest that fits", least=1, most=MOST)
    batch: int = option(1, "sequences of one step", least=1, most=MOST)
    mask: str = option("causal", "which pairs meet", choices=KINDS)
    window_tokens: int = option(0, "window: keys that a query sees, its own included", least=0, most=MOST)
    segment_lengths: list[int] | None = option(None, "dilated: tokens of each branch's segments, as [2048,8192]")
    dilation_rates: list[int] | None = option(None, "dilated: every how-manieth row each branch keeps, as [1,4]")


@dataclass
class PlanConfig(TrainingSwitches, PlannedCall):
    """One training run to plan."""

    framework_gib: float = option(1.0, "allowance for driver, NCCL and allocator, not measured", least=0.0, most=MOST)
    recommended: bool = option(False, "start from the hardware's recommended settings; other keys still count")
    layers: int | None = option(None, "instead of the preset's: transformer blocks", least=1, most=MOST)
    width: int | None = option(None, "instead: of the residual stream", least=1, most=MOST)
    heads: int | None = option(None, "instead: query heads; divides width", least=1, most=MOST)
    kv_heads: int | None = option(None, "instead: key and value heads; divides heads", least=1, most=MOST)
    head_dim: int | None = option(None, "instead: elements of one head; 0: width / heads", least=0, most=MOST)
    ffn: int | None = option(None, "instead: width inside the feed-forward, or one expert", least=1, most=MOST)
    experts: int | None = option(None, "instead: feed-forwards to choose from in a layer; 0: one", least=0, most=MOST)
    experts_per_token: int | None = option(None, "instead: that a token passes", least=0, most=MOST)
    shared_experts: int | None = option(None, "instead: beside those, that all tokens pass", least=0, most=MOST)
    vocabulary: int | None = option(None, "instead: different tokens", least=1, most=MOST)
    tied: bool | None = option(None, "instead: the output layer shares the embedding's weights")
    block: str | None = option(None, "instead: Llama's and ringattn train's, or GPT's", choices=BLOCKS)
    memory_gib: float | None = option(None, "instead of the hardware's: memory of an accelerator", above=0.0, most=MOST)
    link_gb_s: float | None = option(None, "instead: GB/s between accelerators, one way", above=0.0, most=MOST)
    tflops: float | None = option(None, "instead: peak arithmetic", above=0.0, most=MOST)
    json: str = option("", "file to write everything into (JSON)", writes="file")
    picture: str = option("", "file to draw the components into (PNG)", writes="picture")


def main(argv: Sequence[str]) -> int:
    """The command: 0 if the run fits, 1 if not. Raises `InputError` for bad options."""
    if "--help" in argv or "-h" in argv:
        print(help_text("plan", PURPOSE, PlanConfig))
        return 0
    config = load(argv, PlanConfig)
    machine = machine_of(config)
    if config.recommended:
        given = {word.partition("=")[0] for word in argv}
        config = replace(config, **{key: value for key, value in machine.start if key not in given})
    with Console(stderr=True).status("searching what fits"):
        found = plan(config, machine)
    print(table(config, machine, found))
    if config.json:
        with writing("json", config.json):
            write_file(Path(config.json), json.dumps(found, indent=1) + "\n")
        print(f"written into {config.json}")
    if config.picture:
        with writing("picture", config.picture):
            draw_capacity(found, config.picture)
        print(f"drawn into {config.picture}")
    return 0 if found["fits"] else 1


def machine_of(config: PlanConfig) -> Hardware:
    """The preset with the figures that were given instead."""
    machine = machines.hardware(config.hardware)
    if config.memory_gib is not None:
        machine = replace(machine, memory_bytes=int(config.memory_gib * GIB))
    if config.link_gb_s is not None:
        machine = machine.with_link(config.link_gb_s * 1e9)
    return machine if config.tflops is None else machine.with_peak(config.tflops * 1e12)


def shape_of(config: PlanConfig) -> ModelShape:
    """The preset with the sizes that were given instead."""
    keys = {one.name: "head_dim" if one.name == "head_size" else one.name for one in fields(ModelShape)}
    sizes = {name: getattr(config, key) for name, key in keys.items()}
    if sizes["head_size"] is None and (sizes["width"] or sizes["heads"]):
        sizes["head_size"] = 0  # a preset's head is not that of other widths
    return replace(model_shape(config.preset), **{name: one for name, one in sizes.items() if one is not None})


def run_of(config: PlanConfig) -> TrainingSetup:
    """The run that the options describe; one rank where the ring is not set."""
    branches = tuple(config.segment_lengths or ()), tuple(config.dilation_rates or ())
    for key, mask in (("window_tokens", "window"), ("segment_lengths", "dilated"), ("dilation_rates", "dilated")):
        if getattr(config, key) and config.mask != mask:
            raise InputError(f"{key}={getattr(config, key)}: has no effect on mask={config.mask}; set mask={mask}")
    if config.mask == "window" and config.window_tokens < 2:
        raise InputError(f"window_tokens={config.window_tokens}: a window has at least 2, the query's own key included")
    attention = AttentionSetup(config.mask, max(0, config.window_tokens - 1), *branches)
    switches = {switch.name: getattr(config, switch.name) for switch in fields(TrainingSwitches)}
    framework_bytes = int(config.framework_gib * GIB)
    return TrainingSetup(
        shape_of(config), config.tokens, config.ranks or 1, config.batch, attention, framework_bytes, **switches
    )


def plan(config: PlanConfig, machine: Hardware) -> dict[str, Any]:
    """Everything that the command says, ready for JSON; sizes are bytes of one rank.

    Raises `InputError` where the precision asks for arithmetic that the hardware lacks.
    """
    if not machine.bf16 and config.precision.startswith("bf16"):
        raise InputError(f"precision={config.precision}: {machine.name} has no bf16 arithmetic; use precision=fp32")
    run = run_of(config)
    smallest = smallest_ring(run, machine.memory_bytes)
    recommended = replace(run, **dict(machine.start))
    recommended_ring = smallest_ring(recommended, machine.memory_bytes)
    # Where no ring fits as it is, the steps are for the ring that fits the recommended settings.
    run = replace(run, ranks=config.ranks or smallest or recommended_ring or 1)
    recommended = replace(recommended, ranks=run.ranks)
    account = training_bytes(run)
    steps = advice(run, machine)
    eased = with_steps(run, steps)
    after = training_bytes(eased)
    return {
        "model": {"name": config.preset, "parameters": run.model.parameters, **asdict(run.model)},
        "hardware": {"name": machine.name, "memory_bytes": machine.memory_bytes, "source": machine.source,
                     "recommended": dict(machine.start), "why": machine.why,
                     "longest_tokens": longest_tokens(recommended, machine.memory_bytes),
                     "smallest_ring": recommended_ring},
        "run": {key: one for key, one in asdict(run).items() if key != "model"},
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
        "steps": [_step(one) for one in steps],
        "rounding_saves": rounding_saves(run),
        "step": _step_time(estimate(run, machine)),
        "rates": asdict(machine.reached),
        "after_steps": {"step": _step_time(estimate(eased, machine)),
                        "bytes_by_component": after.peak._asdict(), "total_bytes": after.peak.total,
                        "longest_tokens": longest_tokens(eased, machine.memory_bytes),
                        "smallest_ring": smallest_ring(eased, machine.memory_bytes)},
    }  # fmt: skip


def _step_time(one: StepTime) -> dict[str, float]:
    return {**one._asdict(), "seconds": one.seconds}


def _step(one: Advice) -> dict[str, Any]:
    return {**one.switch._asdict(), "saves_bytes": one.saves_bytes, "time_factor": one.time_factor,
            "total_bytes": one.total_bytes}  # fmt: skip


def table(config: PlanConfig, machine: Hardware, found: dict[str, Any]) -> str:
    """The plan as text."""
    run, total = found["run"], found["total_bytes"]
    parameters = found["model"]["parameters"] / 1e9
    lines = [
        f"{config.preset}, {parameters:.3f}e9 parameters, on {machine.name} ({_gib(machine.memory_bytes)} GiB; "
        f"{machine.source})",
        f"{run['tokens']:,} tokens over a ring of {run['ranks']:,}: "
        f"{-(-run['tokens'] // run['ranks']):,} tokens a rank; {run['precision']}, {run['optimizer']}, "
        f"recompute {run['recompute']}, ZeRO {run['zero_stage']}; K/V travel by {found['route']}",
        "",
        f"{'component':<14}{'GiB a rank':>12}{'share':>8}   (at the peak: {found['moment']})",
    ]
    for name, nbytes in found["bytes_by_component"].items():
        lines.append(f"{name.replace('_', ' '):<14}{_gib(nbytes):>12}{nbytes / total:>8.1%}")
    verdict = "fits" if found["fits"] else "does not fit"
    lines += [f"{'total':<14}{_gib(total):>12}   {verdict} in {_gib(machine.memory_bytes)}"]
    if found["host_bytes"]:
        lines.append(f"{'host memory':<14}{_gib(found['host_bytes']):>12}")
    return "\n".join([*lines, "", *_answers(run, found, machine), "", *_time(run, found, machine)])


def _time(run: dict[str, Any], found: dict[str, Any], machine: Hardware) -> list[str]:
    """Step time, tokens/s and MFU of what fits: the run, or the run with all steps."""
    eased = not found["fits"] and found["steps"]
    step, rates = (found["after_steps"] if eased else found)["step"], machine.reached
    ranks = run["ranks"] * run["tensor_ranks"] * run["pipeline_ranks"]
    parts = ", ".join(f"{name} {step[name]:,.2f}" for name in StepTime._fields[:7] if step[name] > 0)
    return [
        f"a step{' with all of these' if eased else ''}: about {step['seconds']:,.2f} s ({parts}), "
        f"{step['tokens_s']:,.0f} tokens/s on {ranks:,} accelerators, {step['tokens_s'] / ranks:,.0f} on each",
        f"  MFU {step['mfu']:.1%} of {machine.flops / 1e12:,.0f} TFLOP/s, {step['mfu_full']:.1%} with masked pairs too "
        "(PaLM's formula); nothing that is done again is counted",
        f"  not measured: products {rates.products / 1e12:,.0f}, attention {rates.attention_forward / 1e12:,.0f} "
        f"forward, {rates.attention_backward / 1e12:,.0f} backward TFLOP/s; {rates.source}",
    ]


def _answers(run: dict[str, Any], found: dict[str, Any], machine: Hardware) -> list[str]:
    """Longest, smallest, and what to turn on first."""
    own, a_token = run["batch"] * -(-run["tokens"] // run["ranks"]), found["bytes_per_token"]
    lines = [
        _limits(found, run["ranks"]),
        f"why: each token of a rank takes {a_token:,.0f} bytes, its {own:,} tokens {_gib(a_token * own)} GiB; "
        f"{_gib(found['total_bytes'] - a_token * own)} GiB do not depend on them",
    ]
    if found["steps"]:
        lines += ["", "what to turn on first, each on top of those above; time is the greatest factor to expect",
                  f"  {'setting':<30}{'saves GiB':>12}{'time':>8}{'leaves GiB':>12}"]  # fmt: skip
    for step in found["steps"]:
        setting = f"{step['key']}={step['value']}"
        lines.append(
            f"  {setting:<30}{_gib(step['saves_bytes']):>12}{step['time_factor']:>7.2f}x{_gib(step['total_bytes']):>12}"
            f"  {step['about']}"
        )
    after = found["after_steps"]
    if found["steps"]:
        enough = "then it fits" if after["total_bytes"] <= machine.memory_bytes else "still does not fit"
        lines.append(f"  {enough}; {_limits(after, run['ranks'])}")
    for setting, saved in found["rounding_saves"].items() if not found["fits"] else ():
        lines.append(f"  not taken, for it changes the arithmetic: {setting}, which alone saves {_gib(saved)} GiB")
    return lines


def _limits(found: dict[str, Any], ring: int) -> str:
    """The longest sequence and the smallest ring."""
    smallest = f"{found['smallest_ring']:,}" if found["smallest_ring"] else "none fits it"
    return f"longest sequence on a ring of {ring:,}: {found['longest_tokens']:,} tokens; smallest ring: {smallest}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:,.2f}"


# --- the picture ------------------------------------------------------------------------------------------------------


INK, LIMIT = "#22303c", "#c0392b"
VISIBLE = 1 / 1000
"""Share of the longest bar below which a component is left out."""


def draw_capacity(found: dict[str, Any], path: str | Path) -> None:
    """Write a PNG of what `plan` returned: a bar as given, one after all steps, and the memory's line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = {"as given": found["bytes_by_component"]}
    if found["steps"]:
        bars["after the steps"] = found["after_steps"]["bytes_by_component"]
    visible = VISIBLE * max(sum(bar.values()) for bar in bars.values())
    names = [name for name in found["bytes_by_component"] if any(bar[name] > visible for bar in bars.values())]
    colors = plt.get_cmap("tab10")
    figure, ax = plt.subplots(figsize=(9, 1.6 + 0.9 * len(bars)))
    left = [0.0] * len(bars)
    for name in names:
        widths = [parts[name] / GIB for parts in bars.values()]
        color = colors(list(found["bytes_by_component"]).index(name))
        label = name.replace("_", " ")
        drawn = ax.barh(list(bars), widths, left=left, color=color, edgecolor="white", label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    ax.bar_label(drawn, [f"{total:,.1f} GiB" for total in left], padding=6, fontsize=9, color=INK, bbox=box, zorder=3)
    limit = found["hardware"]["memory_bytes"] / GIB
    ax.axvline(limit, color=LIMIT, linewidth=1.5)
    ax.annotate(f"{limit:,.0f} GiB", (limit, 1.0), xycoords=("data", "axes fraction"), color=LIMIT, ha="center",
                va="bottom", fontsize=9)  # fmt: skip
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * max(limit, *(sum(parts.values()) / GIB for parts in bars.values())))
    ax.set_xlabel("GiB on one rank", color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    run = found["run"]
    what = f"{found['model']['name']} on {found['hardware']['name']}"
    figure.suptitle(f"{what}: {run['tokens']:,} tokens over a ring of {run['ranks']:,}", color=INK, fontsize=11)
    figure.legend(loc="lower center", ncols=min(len(names), 5), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.05 + 0.08 * (len(names) > 5), 1, 0.98))
    save_picture(figure, path, 120)
    plt.close(figure)

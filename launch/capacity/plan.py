"""`ringattn plan`: the bytes that each rank needs to train a model, what fits, and what to turn on when it does not.

Nothing is run: the formulas are those of `ringattn.launch.capacity.training_bytes`, the buffers of attention those of
the real plan.

`step_seconds` is a lower bound for arithmetic, at the accelerator's published peak, and counts every transfer that a
switch adds in full, as if nothing overlapped; so a factor between two runs overstates what transfers cost. `estimate`
takes the rates that kernels reach, and hides transfers behind arithmetic where possible.

Guarantees: closed forms with their source; no constant is fitted to a published step; the longest length fits, and one
token more on a rank does not; steps are taken cheapest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
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
    json: str = json_option()
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
    with json_output(config.json) as write:
        with Console(stderr=True).status("searching what fits"):
            figures = plan(config, machine)
        print(table(config, machine, figures))
        if config.picture:
            from ringattn.launch.capacity.picture import draw_capacity  # loads matplotlib

            with writing("picture", config.picture):
                draw_capacity(figures, config.picture)
            print(f"drawn into {config.picture}")
        write(figures)
    return 0 if figures["fits"] else 1


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


# --- time of a step ---------------------------------------------------------------------------------------------------


TENSOR_COLLECTIVES = 8
"""Gathers and scatters of a layer's tokens under tensor and sequence parallelism, forward and backward together: two of
each for attention and as many for the feed-forward (arXiv:2205.05198, section 4.2.2)."""


def matrix_flops(run: TrainingSetup) -> float:
    """Operations of one rank's matrix products, forward: 2 a parameter and token (arXiv:2001.08361, section 2.1).

    The products of all layers and of the output, of which a tied model has one, too; of experts those that a token
    passes. The mean of all stages of a pipeline, of one micro batch.
    """
    shape = run.model
    products = shape.layers * shape.active_parameters + shape.vocabulary * shape.width
    return 2.0 * products * run.rank_tokens / _cut(run)


def attention_flops(run: TrainingSetup) -> float:
    """Operations of one rank's attention, forward: 4 times head_dim a pair and head (FlashAttention-2, section 4.1)."""
    shape = run.model
    pairs = run.attention.pairs(run.tokens) * run.batch / run.ranks
    return FORWARD_FLOPS_PER_DIM * shape.query_width * pairs * shape.layers / _cut(run)


def _cut(run: TrainingSetup) -> int:
    return run.tensor_ranks * run.pipeline_ranks


class Flops(NamedTuple):
    """Operations of one rank's micro batch: products, attention forward and backward, what is done again included."""

    products: float
    attention_forward: float
    attention_backward: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def flops_of(run: TrainingSetup) -> Flops:
    """Backward: twice the products, 2.5 times the attention. Then what is done again.

    full, offloaded: one more forward of the layers (Korthikanti et al. 2022, section 5). selective: without the
    attention. A tiled feed-forward is done again where nothing else does it, each chunk's logits always.
    """
    shape = run.model
    products, attention = matrix_flops(run), attention_flops(run)
    output = 2.0 * shape.vocabulary * shape.width * run.rank_tokens / _cut(run)
    kept = sum(one.parameters for one in shape.attention_matrices)
    feeds = 2.0 * shape.layers * (shape.active_parameters - kept) * run.rank_tokens / _cut(run)
    again = (feeds if run.is_tiled else 0.0) if run.recompute == "none" else products - output
    if run.chunked_loss_tokens:
        again += output
    forward = attention if run.recompute in ("none", "selective") else 2 * attention
    return Flops(3 * products + again, forward, BACKWARD_OVER_FORWARD * attention)


def compute_flops(run: TrainingSetup) -> float:
    """Operations of one rank's step."""
    return flops_of(run).total * run.micro_batches


def model_flops(run: TrainingSetup, half: bool = True) -> float:
    """Operations of one rank's step that the model itself asks for: three times its forward, nothing done again.

    `half`: attention of the pairs that the mask allows; else of all, as the formula 12 layers width length of PaLM has
    it (arXiv:2204.02311, appendix B).
    """
    attention = attention_flops(run)
    if not half:
        attention *= run.tokens**2 / run.attention.pairs(run.tokens)
    return 3 * (matrix_flops(run) + attention) * run.micro_batches


def state_bytes_moved(run: TrainingSetup) -> float:
    """Bytes that sharing the state moves between ranks, one way and rank (arXiv:1910.02054, section 7).

    Stages 0 to 2 all-reduce the gradients, or scatter them and gather the weights: twice the parameters; stage 3
    gathers the weights twice and scatters the gradients.
    """
    if run.degree == 1:
        return 0.0
    numbers, share = run.numbers, (run.degree - 1) / run.degree
    weights, gradients = (run.share.parameters * item * share for item in (numbers.weight, numbers.gradient))
    return 2 * weights + gradients if run.zero_stage == 3 else weights + gradients


def step_seconds(run: TrainingSetup, machine: Hardware) -> float:
    """Least seconds of a step: arithmetic at peak, then the state between ranks, then host memory there and back."""
    arithmetic = compute_flops(run) / machine.flops
    return arithmetic + state_bytes_moved(run) / machine.link_bytes_s + 2 * host_bytes(run) / machine.host_bytes_s


class StepTime(NamedTuple):
    """Seconds of a step by what they go to; `ring`, `state` and `host` only where arithmetic does not hide them.

    `mfu`: the model's own operations, attention of allowed pairs, against the peak. `mfu_full`: attention of all pairs.
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
        """The step."""
        return sum(self[:7])


def ring_bytes(run: TrainingSetup) -> float:
    """Bytes of one micro batch that a rank sends for attention: K and V once round, and back with their sums.

    The most that a schedule sends; it may send less. Again where attention runs again.
    """
    rows = run.rank_tokens * 2 * run.model.kv_width / run.tensor_ranks
    forward, sums = rows * run.numbers.activation, rows * run.numbers.wide
    passes = 1 if run.recompute in ("none", "selective") else 2
    layers = run.model.layers / run.pipeline_ranks
    return (run.ranks - 1) * layers * ((passes + 1) * forward + sums)


def tensor_bytes(run: TrainingSetup) -> float:
    """Bytes of one micro batch that a rank sends for tensor parallelism; a layer done again does so again."""
    share = (run.tensor_ranks - 1) / run.tensor_ranks
    passes = TENSOR_COLLECTIVES * (1 if run.recompute == "none" else 1.5)
    layers = run.model.layers / run.pipeline_ranks
    return passes * layers * run.rank_tokens * run.model.width * run.numbers.activation * share


def estimate(run: TrainingSetup, machine: Hardware) -> StepTime:
    """A step at the rates that kernels and links reach.

    Keys and values travel behind the attention, the state behind the micro batches' arithmetic, what waits in host
    memory behind both; tensor parallelism's collectives are not hidden. Ranks of tensor parallelism are neighbors, then
    those of the ring: what reaches beyond a machine goes over the network.
    """
    rates, work = machine.reached, flops_of(run)

    def link(ranks: int) -> float:
        return rates.link_bytes_s if ranks <= rates.machine else rates.network_bytes_s

    products = work.products / rates.products
    attention = work.attention_forward / rates.attention_forward + work.attention_backward / rates.attention_backward
    tensor = tensor_bytes(run) / link(run.tensor_ranks)
    ring = max(0.0, ring_bytes(run) / link(run.tensor_ranks * run.ranks) - attention)
    one = products + attention + tensor + ring
    many = run.micro_batches
    idle = many * one * bubble(run.pipeline_ranks, run.pipeline_chunks, many)
    hidden = many * (products + attention)
    state = max(0.0, state_bytes_moved(run) / link(run.tensor_ranks * run.degree) - hidden)
    host = max(0.0, 2 * host_bytes(run) / machine.host_bytes_s - hidden)
    seconds = many * one + state + host + idle
    peak = seconds * machine.flops
    return StepTime(
        many * products, many * attention, many * tensor, many * ring, state, host, idle,
        run.tokens * run.batch * many / seconds, model_flops(run) / peak, model_flops(run, half=False) / peak,
    )  # fmt: skip


# --- what fits --------------------------------------------------------------------------------------------------------


MOST_RANKS = 2**24
"""Searches end here: more ranks than any machine has."""

LEAST_SAVING = 1 / 1000
"""Share of the whole that a step must save to be worth a line."""


class Switch(NamedTuple):
    """A setting that saves memory."""

    key: str
    value: Any
    about: str


SWITCHES = (
    Switch("data", "shard", "each rank reads its own tokens only"),
    Switch("chunked_loss_tokens", 1024, "logits of 1024 tokens at a time"),
    Switch("zero_stage", 1, "optimizer state shared by the ranks"),
    Switch("zero_stage", 2, "and gradients"),
    Switch("zero_stage", 3, "and weights"),
    Switch("tiled_mlp_tokens", 4096, "feed-forwards of 4096 tokens at a time"),
    Switch("recompute", "selective", "all but attention computed again"),
    Switch("recompute", "full", "layers computed again from their inputs"),
    Switch("recompute", "offloaded", "and the inputs wait in host memory"),
    Switch("offload", "optimizer", "optimizer state and its work on the host"),
    Switch("offload", "parameters", "and weights, fetched layer by layer"),
)
"""These leave the arithmetic as it is, up to rounding."""

ROUNDING = (
    Switch("optimizer", "adamw8bit", "optimizer state in eight bits"),
    Switch("saved_activations", "int8", "saved activations in eight bits"),
)
"""These change the arithmetic, so they are offered, never taken."""

ORDER: dict[str, tuple[Any, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "recompute": RECOMPUTE,
    "offload": OFFLOADS,
    "saved_activations": SAVED,
}
"""Settings of which a later one is never exchanged for an earlier one."""


class Advice(NamedTuple):
    """One step: what to set, the bytes of a rank that it saves after those before it, and the step's time factor."""

    switch: Switch
    saves_bytes: float
    time_factor: float
    total_bytes: float


def fits(run: TrainingSetup, memory_bytes: float) -> bool:
    """Whether a rank's peak is within its memory."""
    return training_bytes(run).peak.total <= memory_bytes


def longest_tokens(run: TrainingSetup, memory_bytes: float) -> int:
    """The longest sequence that fits on `run.ranks` ranks, a multiple of them; 0 if not one token a rank fits."""

    def at(per_rank: int) -> bool:
        return fits(replace(run, tokens=per_rank * run.ranks), memory_bytes)

    if not at(1):
        return 0
    low, high = 1, 2
    while high * run.ranks <= MOST_TOKENS and at(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) else (low, middle)
    return low * run.ranks


def bytes_per_token(run: TrainingSetup) -> float:
    """How much a rank's peak grows with each of its tokens: from this length to twice as much on the same ring."""
    twice = replace(run, tokens=2 * run.tokens)
    grown = training_bytes(twice).peak.total - training_bytes(run).peak.total
    return grown / (twice.rank_tokens - run.rank_tokens)


def smallest_ring(run: TrainingSetup, memory_bytes: float) -> int | None:
    """The fewest ranks among which `run.tokens` fits, the state shared as `run` says; None if no number does."""

    def at(ranks: int) -> bool:
        return fits(replace(run, ranks=ranks), memory_bytes)

    low, high = 0, 1
    while not at(high):
        low, high = high, 2 * high
        if low >= min(run.tokens, MOST_RANKS):
            return None
        high = min(high, run.tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle) else (middle, high)
    return high


def advice(run: TrainingSetup, machine: Hardware) -> list[Advice]:
    """What to turn on, one after another, until the run fits or nothing is left: fewest seconds a byte first.

    A time factor is against the run as given.
    """
    steps: list[Advice] = []
    before, base = training_bytes(run).peak.total, step_seconds(run, machine)
    while before > machine.memory_bytes:
        found = []
        for switch in SWITCHES:
            if _goes_further(run, switch):
                tried = replace(run, **{switch.key: switch.value})
                saved, seconds = before - training_bytes(tried).peak.total, step_seconds(tried, machine)
                if saved > LEAST_SAVING * before:
                    cost = max(0.0, seconds - step_seconds(run, machine)) / saved
                    found.append(((cost, -saved), switch, tried, saved, seconds))
        if not found:
            break
        _, switch, run, saved, seconds = min(found, key=lambda one: one[0])
        before -= saved
        steps.append(Advice(switch, saved, seconds / base, before))
    return steps


def rounding_saves(run: TrainingSetup) -> dict[str, float]:
    """Bytes that each switch of `ROUNDING` would save alone, as "key=value"; what it costs was not measured."""
    before = training_bytes(run).peak.total
    return {
        f"{switch.key}={switch.value}":
            before - training_bytes(replace(run, **{switch.key: switch.value})).peak.total
        for switch in ROUNDING if _goes_further(run, switch)
    }  # fmt: skip


def with_steps(run: TrainingSetup, steps: list[Advice]) -> TrainingSetup:
    """The run with all steps taken."""
    return replace(run, **{one.switch.key: one.switch.value for one in steps})


def _goes_further(run: TrainingSetup, switch: Switch) -> bool:
    """Whether a switch may be tried: no step back, and no other optimizer than the one that was asked for."""
    now = getattr(run, switch.key)
    if switch.value == "parameters" and run.zero_stage < 3:
        return False
    if switch.key in ORDER:
        order = ORDER[switch.key]
        return order.index(switch.value) > order.index(now)
    return switch.key != "optimizer" or now == "adamw"

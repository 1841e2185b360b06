"""The options of a training run, and checks that they do not contradict each other. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ringattn.core.dilation import check, coverage_warnings
from ringattn.core.layout import LAYOUTS, OF_DOCUMENTS
from ringattn.errors import InputError
from ringattn.launch.calls import schedule_option
from ringattn.launch.config import load
from ringattn.launch.options import ENGINES, MOST_SEED, option

ATTENTION = ("full", "dilated")
NONFINITE = ("stop", "skip")
RECOMPUTE = ("none", "selective", "full", "offloaded")
SAVED_ACTIVATIONS = ("keep", "offload", "int8", "fp8")
SHARDING = ("none", "zero2", "zero3")
PROJECTION_ROWS = 1024
"""Tokens of a group of heads that the model normalizes and projects at a time."""
OPTIMIZERS: dict[str, dict[str, str]] = {
    "adamw": {"torch": "torch.optim:AdamW"},
    "sgd": {"torch": "torch.optim:SGD"},
    "adafactor": {"torch": "torch.optim:Adafactor"},
    "lion": {"lion-pytorch": "lion_pytorch:Lion"},
    "adamw8bit": {"torchao": "torchao.optim:AdamW8bit", "bitsandbytes": "bitsandbytes.optim:AdamW8bit"},
}
"""Optimizers by name, and the class of each in the packages that have it, the preferred package first."""


@dataclass
class ModelConfig:
    """The shape of the model. The metadata of a field is its line in `ringattn train --help`."""

    layers: int = option(2, "transformer blocks", least=1)
    dim: int = option(128, "width of the residual stream", least=2)
    heads: int = option(4, "query heads", least=1)
    kv_heads: int = option(2, "key and value heads; must divide heads", least=1)
    hidden_dim: int = option(384, "width inside the feed-forward block", least=1)
    rope_base: float = option(10_000.0, "base of the rotary frequencies", least=1.0)
    tied: bool = option(True, "the output layer shares the embedding's weights")


def head_dim(config: ModelConfig) -> int:
    """Return the number of elements of one head."""
    return config.dim // config.heads


@dataclass
class TrainConfig:
    """One training run. Sizes count the whole sequence, not one rank's share of it."""

    ranks: int | None = option(None, "processes that share each sequence; torchrun's / replicas, else 1", least=1)
    replicas: int = option(1, "groups of ranks that train different sequences; must divide batch", least=1)
    tokens: int = option(2048, "tokens of one sequence, over all ranks", least=2)
    batch: int = option(1, "sequences of one optimizer step, over all replicas", least=1)
    micro_batch: int | None = option(None, "sequences that a replica processes at once; all if not set", least=1)
    steps: int = option(60, "optimizer steps", least=1)
    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS))
    attention: str = option("full", "which of the keys up to its position a query attends to", choices=ATTENTION)
    segment_lengths: list[int] | None = option(None, "segment length of each dilated branch, as [2048,8192]")
    dilation_rates: list[int] | None = option(None, "dilation rate of each dilated branch, as [1,4]")
    schedule: str = schedule_option()
    engine: str = option("auto", "attention kernels", choices=ENGINES)
    transport: str = option("auto", "transport of the messages")
    dtype: str = option("fp32", "dtype of activations; weights stay fp32 with bf16", choices=("fp32", "fp64", "bf16"))
    recompute: str = option(
        "none", "what backward recomputes; selective: all but attention; offloaded: full, with inputs in host memory",
        choices=RECOMPUTE,
    )  # fmt: skip
    tiled_mlp_tokens: int | None = option(
        None, "tokens that the feed-forward processes at once; all if not set", least=1
    )
    head_groups: int = option(1, "groups of K/V heads that attend one after another; must divide kv_heads", least=1)
    saved_activations: str = option("keep", "how activations are stored until backward", choices=SAVED_ACTIVATIONS)
    sharding: str = option("none", "sharding of weights, gradients and optimizer over ranks (FSDP2)", choices=SHARDING)
    chunked_loss_tokens: int | None = option(None, "tokens whose logits exist at once; all if not set", least=1)
    optimizer: str = option("adamw", "optimizer", choices=tuple(OPTIMIZERS))
    learning_rate: float = option(1e-3, "learning rate after the warm-up", least=0.0)
    warmup_steps: int = option(10, "steps over which the learning rate grows from 0", least=0)
    weight_decay: float = option(0.01, "weight decay of the optimizer", least=0.0)
    clip_norm: float = option(1.0, "gradients are scaled down to this norm", above=0.0)
    nonfinite: str = option("stop", "what to do if a loss or gradient norm is inf or NaN", choices=NONFINITE)
    seed: int = option(0, "seed of the weights and of the batches", least=0, most=MOST_SEED)
    text: str = option("", "text to train on; empty: Python's language reference")
    tokenizer: str = option("", "tokenizer.json of Hugging Face's tokenizers; empty: bytes are tokens")
    pack_documents: bool = option(False, "fill sequences with whole documents, which do not attend to each other")
    separator: str = option("\n\n", "text that ends each document")
    max_tokens_per_rank: int | None = option(
        None, "divide a step's packed documents among micro-batches of at most this many tokens on a rank", least=1
    )
    curriculum_start_tokens: int | None = option(
        None, "length of the first sequences; doubles until it equals tokens", least=2
    )
    curriculum_steps: int = option(0, "steps until sequences have their full length", least=0)
    prompt_tokens: int = option(0, "tokens at the start of each sequence that have no label", least=0)
    threads_per_rank: int | None = option(None, "intra-op threads of a process; cores / ranks if not set", least=1)
    timeout_s: float = option(600.0, "deadline of every wait for another rank, in seconds", above=0.0)
    limit_s: float = option(3600.0, "seconds after which the run ends", above=0.0)
    out: str = option("outputs/train", "folder of result.json and of checkpoints")
    checkpoint_every_steps: int | None = option(None, "steps between checkpoints; none if not set", least=1)
    resume: str = option(
        "auto", "auto: from the last checkpoint in the folder out, if any; never; or the path of a checkpoint"
    )
    restarts: int = option(0, "how often failed ranks are started again, from the last checkpoint", least=0)
    model: ModelConfig = field(default_factory=ModelConfig)


def load_train(overrides: Sequence[str], name: str = "train") -> TrainConfig:
    """Return the run that `conf/<name>.yaml` and `overrides` describe. Raises `InputError`, with the key first."""
    config = load(overrides, TrainConfig, name)
    check_sizes(config)
    return config


def from_spec(spec: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration that `dataclasses.asdict` turned into `spec`."""
    return TrainConfig(**{**spec, "model": ModelConfig(**spec["model"])})


# --- contradictions --------------------------------------------------------------------------------------------------


def check_sizes(config: TrainConfig) -> None:
    """Raise `InputError`, with the key first, if two options contradict each other on any machine."""
    model = config.model
    if config.ranks is not None and config.ranks > config.tokens:
        raise InputError(f"ranks={config.ranks}: more ranks than tokens (tokens={config.tokens})")
    if model.heads % model.kv_heads:
        raise InputError(f"model.kv_heads={model.kv_heads}: must divide model.heads={model.heads}")
    if model.dim % (2 * model.heads):
        raise InputError(f"model.dim={model.dim}: must be an even multiple of model.heads={model.heads}")
    if config.batch % config.replicas:
        raise InputError(
            f"batch={config.batch}: must be a multiple of replicas={config.replicas}, because it counts the "
            "sequences of all replicas"
        )
    if model.kv_heads % config.head_groups:
        raise InputError(f"head_groups={config.head_groups}: must divide model.kv_heads={model.kv_heads}")
    if config.head_groups > 1 and config.attention == "dilated":
        raise InputError(
            f"head_groups={config.head_groups}: the branches of attention=dilated start at other keys in each head, "
            "and a group counts its heads from 0; leave one of the two out"
        )
    if config.head_groups > 1 and config.saved_activations != "keep":
        raise InputError(
            f"head_groups={config.head_groups}: attention needs the exact outputs of its groups, which "
            f"saved_activations={config.saved_activations} would store differently; leave one of the two out"
        )
    if config.restarts and config.checkpoint_every_steps is None:
        raise InputError(f"restarts={config.restarts}: needs checkpoints to restart from; set checkpoint_every_steps")
    _check_branches(config)
    _check_data(config)


def check_switches(config: TrainConfig, device_type: str) -> None:
    """Raise `InputError`, with the key first, for memory options that contradict each other or do not suit the device.

    `device_type` is cpu or cuda. An optimizer whose package is not installed is refused too.
    """
    if config.saved_activations == "offload" and device_type == "cpu":
        raise InputError(
            "saved_activations=offload: moves activations from a GPU to host memory, but this run is on a CPU; use "
            "int8 or fp8, or recompute=full"
        )
    if config.recompute == "offloaded":
        from ringattn.layers.tiled import check_device

        check_device(device_type, "recompute=offloaded")
        if config.saved_activations != "keep":
            raise InputError(
                f"saved_activations={config.saved_activations}: cannot be combined with recompute=offloaded, which "
                "saves only the input of each layer, in host memory; leave one of the two out"
            )
    optimizer_source(config.optimizer)
    if config.optimizer == "adamw8bit" and config.dtype == "fp64":
        raise InputError("optimizer=adamw8bit: computes in float32, which would round dtype=fp64; use adamw")
    if config.sharding != "none" and config.optimizer in ("adafactor", "adamw8bit"):
        raise InputError(
            f"optimizer={config.optimizer}: computes statistics of a whole weight, but with "
            f"sharding={config.sharding} a rank has only a part of it; use adamw, lion or sgd"
        )


def optimizer_source(name: str) -> str:
    """Return the class of the optimizer `name` as `module:class`, from the first of its packages that is installed.

    Raises `InputError`, which names the packages to install, if none is installed.
    """
    for source in OPTIMIZERS[name].values():
        if find_spec(source.partition(":")[0].partition(".")[0]) is not None:
            return source
    raise InputError(f"optimizer={name}: its package is not installed; pip install {' or '.join(OPTIMIZERS[name])}")


def doublings(start_tokens: int, tokens: int) -> int:
    """Return how often `start_tokens` must double to become `tokens`. Raises `InputError` if it never does."""
    times = (tokens // start_tokens).bit_length() - 1
    if times < 0 or start_tokens << times != tokens:
        raise InputError(f"curriculum_start_tokens={start_tokens}: must be tokens={tokens}, its half, a quarter, ...")
    return times


def unreached(config: TrainConfig) -> list[str]:
    """Return a sentence about each gap that dilated branches leave in attention; no sentence for full attention."""
    if config.attention == "full":
        return []
    branches = check(config.segment_lengths or (), config.dilation_rates or ())
    return coverage_warnings(branches, config.model.heads, kv_heads=config.model.kv_heads, length=config.tokens)


def _check_data(config: TrainConfig) -> None:
    start = config.curriculum_start_tokens
    if (start is None) != (config.curriculum_steps == 0):
        raise InputError("curriculum_steps: give both curriculum_steps and curriculum_start_tokens, or neither")
    if start is not None:
        doublings(start, config.tokens)
        if config.ranks is not None and config.ranks > start:
            raise InputError(f"ranks={config.ranks}: more ranks than tokens (curriculum_start_tokens={start})")
    shortest, key = (config.tokens, "tokens") if start is None else (start, "curriculum_start_tokens")
    if config.prompt_tokens >= shortest:
        raise InputError(
            f"prompt_tokens={config.prompt_tokens}: leaves no label in a sequence of {key}={shortest}; use fewer "
            "prompt tokens"
        )
    if config.pack_documents and config.micro_batch not in (None, 1):
        raise InputError(
            f"micro_batch={config.micro_batch}: packed sequences are processed one by one, because each has its own "
            "documents; leave it out"
        )
    if config.max_tokens_per_rank is not None:
        _check_division(config)
    if config.layout in OF_DOCUMENTS and not config.pack_documents:
        raise InputError(f"layout={config.layout}: needs documents; set pack_documents=true")


def _check_division(config: TrainConfig) -> None:
    reason = ""
    if not config.pack_documents:
        reason = "divides documents among micro-batches; set pack_documents=true"
    elif config.replicas > 1:
        reason = f"uses one ring of all ranks, so replicas={config.replicas} has no place; leave replicas out"
    elif config.layout not in ("auto", "documents"):
        reason = f"places documents by layout=documents; leave layout={config.layout} out"
    elif config.micro_batch is not None:
        reason = f"decides the micro-batches, so micro_batch={config.micro_batch} has no effect; leave one out"
    elif config.prompt_tokens:
        reason = f"takes sequences apart, in which prompt_tokens={config.prompt_tokens} are counted; leave one out"
    elif config.attention == "dilated":
        reason = "predicts the time of full attention; leave attention=dilated out"
    if reason:
        raise InputError(f"max_tokens_per_rank={config.max_tokens_per_rank}: {reason}")


def _check_branches(config: TrainConfig) -> None:
    branches = {"segment_lengths": config.segment_lengths, "dilation_rates": config.dilation_rates}
    for key, numbers in branches.items():
        if config.attention == "full" and numbers is not None:
            raise InputError(f"{key}={numbers}: attention=full has no branches; set attention=dilated")
        if config.attention == "dilated" and numbers is None:
            raise InputError(f"{key}: is missing; attention=dilated needs one number for each branch")
    if config.attention == "dilated":
        try:
            check(config.segment_lengths or (), config.dilation_rates or ())
        except InputError as error:
            raise InputError(f"segment_lengths={config.segment_lengths}: {error}") from None

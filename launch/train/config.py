"""What a training run can be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringattn.core.layout import LAYOUTS, OF_DOCUMENTS
from ringattn.core.presets import check, coverage_warnings
from ringattn.errors import InputError
from ringattn.launch.config import load
from ringattn.launch.names import ENGINES
from ringattn.launch.options import MOST_SEED, option
from ringattn.launch.schedules import schedule_option
from ringattn.launch.train.curriculum import doublings
from ringattn.launch.train.memory_switches import OPTIMIZERS, RECOMPUTE, SAVED_ACTIVATIONS, SHARDING
from ringattn.launch.train.model_config import ModelConfig

ATTENTION = ("full", "dilated")
NONFINITE = ("stop", "skip")


@dataclass
class TrainConfig:
    """One training run. Sizes count the whole sequence, not one rank's share of it."""

    ranks: int | None = option(None, "processes that share each sequence; torchrun's / replicas, else 1", least=1)
    replicas: int = option(1, "groups of ranks that train different sequences; divides batch", least=1)
    tokens: int = option(2048, "tokens of one sequence, over all ranks", least=2)
    batch: int = option(1, "sequences of one optimizer step, over all replicas", least=1)
    micro_batch: int | None = option(None, "sequences of a replica that pass at once; all if not set", least=1)
    steps: int = option(60, "optimizer steps", least=1)
    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS))
    attention: str = option("full", "which keys a query meets, of those before it", choices=ATTENTION)
    segment_lengths: list[int] | None = option(None, "tokens of a segment of each dilated branch, as [2048,8192]")
    dilation_rates: list[int] | None = option(None, "of each dilated branch, as [1,4]")
    schedule: str = schedule_option()
    engine: str = option("auto", "which kernels attend", choices=ENGINES)
    transport: str = option("auto", "what carries the messages")
    dtype: str = option("fp32", "of activations; weights stay fp32 under bf16", choices=("fp32", "fp64", "bf16"))
    recompute: str = option(
        "none", "of each block in backward; selective: all but attention; offloaded: full, inputs wait in host memory",
        choices=RECOMPUTE,
    )  # fmt: skip
    tiled_mlp_tokens: int | None = option(None, "tokens in the feed-forward at once; all if not set", least=1)
    saved_activations: str = option("keep", "how activations wait for backward", choices=SAVED_ACTIVATIONS)
    sharding: str = option("none", "of weights, gradients, optimizer over all processes (FSDP2)", choices=SHARDING)
    chunked_loss_tokens: int | None = option(None, "tokens whose logits exist at once; all if not set", least=1)
    optimizer: str = option("adamw", "what turns gradients into steps", choices=OPTIMIZERS)
    learning_rate: float = option(1e-3, "of the optimizer, after the warm-up", least=0.0)
    warmup_steps: int = option(10, "steps over which the learning rate grows from 0", least=0)
    weight_decay: float = option(0.01, "of the optimizer", least=0.0)
    clip_norm: float = option(1.0, "gradients are scaled down to this norm", above=0.0)
    nonfinite: str = option("stop", "after a loss or gradient norm that is inf or NaN", choices=NONFINITE)
    seed: int = option(0, "of the weights and of the batches", least=0, most=MOST_SEED)
    text: str = option("", "file to learn; empty: Python's language reference")
    tokenizer: str = option("", "tokenizer.json of Hugging Face's tokenizers; empty: bytes are tokens")
    pack_documents: bool = option(False, "fill sequences with whole documents, which do not see each other")
    separator: str = option("\n\n", "what documents of the text end with")
    curriculum_start_tokens: int | None = option(
        None, "length of the first sequences; doubles up to the whole", least=2
    )
    curriculum_steps: int = option(0, "steps until sequences have their whole length", least=0)
    prompt_tokens: int = option(0, "tokens at the start of each sequence that are read, not learned", least=0)
    threads_per_rank: int | None = option(None, "intra-op threads of a process; cores / ranks if not set", least=1)
    timeout_s: float = option(600.0, "deadline of every wait for another rank, in seconds", above=0.0)
    limit_s: float = option(3600.0, "seconds after which the run is ended", above=0.0)
    out_dir: str = option("outputs/train", "folder of result.json and of checkpoints")
    checkpoint_every_steps: int | None = option(None, "steps between checkpoints; none if not set", least=1)
    resume: str = option("auto", "auto: from the last checkpoint in out_dir, if any; never; or the path of one")
    restarts: int = option(0, "times that failed ranks are started again, from the last checkpoint", least=0)
    model: ModelConfig = field(default_factory=ModelConfig)


def load_train(overrides: Sequence[str], name: str = "train") -> TrainConfig:
    """The run that `conf/<name>.yaml` and `overrides` describe. Raises `InputError`, with the key first."""
    config = load(overrides, TrainConfig, name)
    check_sizes(config)
    return config


def check_sizes(config: TrainConfig) -> None:
    """Raise `InputError`, with the key first, if two sizes contradict each other."""
    model = config.model
    if config.ranks is not None and config.ranks > config.tokens:
        raise InputError(f"ranks={config.ranks}: more ranks than tokens (tokens={config.tokens})")
    if model.heads % model.kv_heads:
        raise InputError(f"model.kv_heads={model.kv_heads}: does not divide model.heads={model.heads}")
    if model.dim % (2 * model.heads):
        raise InputError(f"model.dim={model.dim}: must be an even multiple of model.heads={model.heads}")
    if config.batch % config.replicas:
        raise InputError(
            f"batch={config.batch}: cannot be dealt out to replicas={config.replicas}; it counts the sequences of all "
            "replicas together, so make it a multiple"
        )
    if config.restarts and config.checkpoint_every_steps is None:
        raise InputError(f"restarts={config.restarts}: there is nothing to go on from; set checkpoint_every_steps")
    _check_branches(config)
    _check_data(config)


def _check_data(config: TrainConfig) -> None:
    start = config.curriculum_start_tokens
    if (start is None) != (config.curriculum_steps == 0):
        raise InputError("curriculum_steps: goes with curriculum_start_tokens; give both or neither")
    if start is not None:
        doublings(start, config.tokens)
        if config.ranks is not None and config.ranks > start:
            raise InputError(f"ranks={config.ranks}: more ranks than tokens (curriculum_start_tokens={start})")
    shortest, key = (config.tokens, "tokens") if start is None else (start, "curriculum_start_tokens")
    if config.prompt_tokens >= shortest:
        raise InputError(
            f"prompt_tokens={config.prompt_tokens}: leaves nothing to learn of a sequence of {key}={shortest}; read "
            "fewer tokens"
        )
    if config.pack_documents and config.micro_batch not in (None, 1):
        raise InputError(
            f"micro_batch={config.micro_batch}: sequences of packed documents pass one by one, each has its own "
            "documents; leave it out"
        )
    if config.layout in OF_DOCUMENTS and not config.pack_documents:
        raise InputError(f"layout={config.layout}: there are no documents; set pack_documents=true")


def _check_branches(config: TrainConfig) -> None:
    given = {"segment_lengths": config.segment_lengths, "dilation_rates": config.dilation_rates}
    for key, numbers in given.items():
        if config.attention == "full" and numbers is not None:
            raise InputError(f"{key}={numbers}: attention=full has no branches; set attention=dilated")
        if config.attention == "dilated" and numbers is None:
            raise InputError(f"{key}: attention=dilated needs them, one number for each branch")
    if config.attention == "dilated":
        try:
            check(config.segment_lengths or (), config.dilation_rates or ())
        except InputError as error:
            raise InputError(f"segment_lengths={config.segment_lengths}: {error}") from None


def unreached(config: TrainConfig) -> list[str]:
    """What dilated branches leave out, a sentence each; nothing for full attention."""
    if config.attention == "full":
        return []
    branches = check(config.segment_lengths or (), config.dilation_rates or ())
    return coverage_warnings(branches, config.model.heads, kv_heads=config.model.kv_heads, length=config.tokens)


def from_spec(spec: Mapping[str, Any]) -> TrainConfig:
    """The configuration that `dataclasses.asdict` turned into `spec`."""
    return TrainConfig(**{**spec, "model": ModelConfig(**spec["model"])})

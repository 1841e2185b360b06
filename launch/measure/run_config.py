"""What one measured attention call can be told: `ringattn run`, and every point of `ringattn sweep`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_type_hints

from ringattn.core.layout import LAYOUTS, OF_DOCUMENTS
from ringattn.core.presets import geometric
from ringattn.errors import InputError
from ringattn.launch.config import load
from ringattn.launch.lengths import WORD
from ringattn.launch.names import DTYPES, ENGINES, TRANSPORTS
from ringattn.launch.options import MOST_SEED, group, groups, leaves, option
from ringattn.launch.schedules import schedule_option
from ringattn.launch.spelling import spelled
from ringattn.planner.cluster import CLUSTERS, cluster_named
from ringattn.schedule.routes import ROUTES

DEFAULT_TOKENS = 4096
TRANSPORT_NAMES = tuple(name for name in TRANSPORTS if name != "local")  # which joins threads, and ranks are processes


@dataclass
class ShapeConfig:
    """Heads and their dimension."""

    heads: int = option(8, "query heads", least=1)
    kv_heads: int = option(2, "key and value heads", least=1)
    head_dim: int = option(64, "of queries, keys and values", least=1)


@dataclass
class MaskConfig:
    """Which pairs meet. All but `full` are causal."""

    kind: str = option("causal", "which pairs meet", choices=("full", "causal", "window", "documents", "dilated"))
    window_tokens: int = option(1024, "window: keys that a query sees, its own included", least=1)
    documents: int = option(8, "documents: how many, of equal length", least=1)
    branches: int = option(3, "dilated: how many, each longer and sparser than the one before", least=1)
    segment_tokens: int = option(2048, "dilated: tokens of a segment of the first branch", least=1)
    ratio: int = option(4, "dilated: of lengths, and of dilation rates, of neighboring branches", least=2)


MASK_OPTIONS = {
    "window": ("window_tokens",),
    "documents": ("documents",),
    "dilated": ("branches", "segment_tokens", "ratio"),
}
"""Of `MaskConfig`: what each kind uses; the others have nothing to tell."""


@dataclass
class ScheduleConfig:
    """How keys and values travel."""

    name: str = schedule_option()


@dataclass
class TransportConfig:
    """What carries the messages."""

    name: str = option("auto", "what carries the messages", choices=TRANSPORT_NAMES)


@dataclass
class EngineConfig:
    """Which kernels attend."""

    name: str = option("auto", "which kernels attend", choices=ENGINES)


def _named(schema: Any, names: Sequence[str]) -> Any:
    return group(schema, {name: schema(name) for name in names})


@dataclass
class RunConfig:
    """One attention call, measured. Sizes count the whole sequence, not one rank's share of it."""

    ranks: int | None = option(None, "ranks to start on this node, as many on each; torchrun's, else 1", least=1)
    nnodes: int = option(1, "nodes, each with as many ranks", least=1)
    node_rank: int = option(0, "which of the nodes this is", least=0)
    rdzv_endpoint: str = option("", "host:port of node 0, where the nodes meet")
    tokens: int | None = option(None, f"of the sequence, over all ranks; {DEFAULT_TOKENS} if not set", least=1)
    tokens_per_rank: int | None = option(None, "instead of tokens: that many for each rank", least=1)
    batch: int = option(1, "sequences", least=1)
    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS))
    dtype: str = option("fp32", "of queries, keys and values", choices=DTYPES)
    backward: bool = option(True, "also measure the backward pass")
    warmup: int = option(2, "passes before those that are timed", least=1)
    repeats: int = option(10, "timed passes", least=1)
    seed: int = option(0, "of the inputs", least=0, most=MOST_SEED)
    threads_per_rank: int | None = option(None, "intra-op threads of a rank; cores / ranks if not set", least=1)
    timeout_s: float = option(120.0, "deadline of every wait for another rank, in seconds", above=0.0)
    limit_s: float = option(1800.0, "seconds after which the run is ended", above=0.0)
    cluster: str = option("", "to predict for: a file of ringattn calibrate, or " + ", ".join(CLUSTERS)
                          + "; this machine if not set and calibrated", names=tuple(CLUSTERS))  # fmt: skip
    shape: ShapeConfig = group(ShapeConfig, {})
    mask: MaskConfig = _named(MaskConfig, ("full", "causal", "window", "documents", "dilated"))
    schedule: ScheduleConfig = _named(ScheduleConfig, ("auto", *ROUTES))
    transport: TransportConfig = _named(TransportConfig, TRANSPORT_NAMES)
    engine: EngineConfig = _named(EngineConfig, ENGINES)

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return (self.ranks or 1) * self.nnodes


@dataclass(frozen=True)
class MeasuredCall:
    """The attention call of a run, at its own length or at a smaller one, where the mask is as much smaller."""

    mask: MaskConfig
    layout: str
    schedule: str
    tokens: int

    @property
    def dilated(self) -> bool:
        """Whether it is `Ring.dilated_attention`."""
        return self.mask.kind == "dilated"

    def options(self, length: int) -> dict[str, Any]:
        """Keyword arguments of the call for `length` tokens."""
        if self.dilated:
            base = self._scaled(self.mask.segment_tokens, length)
            return {"causal": True, **geometric(base, self.mask.ratio, branches=self.mask.branches)._asdict()}
        if self.mask.kind == "window":
            return {"causal": True, "window": (self._scaled(self.mask.window_tokens, length) - 1, 0)}
        return {"causal": self.mask.kind != "full"}

    def documents(self, length: int) -> list[int] | None:
        """cu_seqlens, or None for one sequence."""
        if self.mask.kind != "documents":
            return None
        return [number * length // self.mask.documents for number in range(self.mask.documents + 1)]

    def _scaled(self, size_tokens: int, length: int) -> int:
        return max(1, size_tokens * length // self.tokens)


def call_of(config: RunConfig) -> MeasuredCall:
    """The attention call of a resolved configuration."""
    assert config.tokens is not None
    return MeasuredCall(config.mask, config.layout, config.schedule.name, config.tokens)


def load_run(overrides: Sequence[str], strict: bool = True) -> RunConfig:
    """The run that `overrides` describe, with every size resolved. Raises `InputError`, with the key first.

    `strict`: refuse what has no effect in this run; of a sweep it may have one in other points.
    """
    config = resolved(load(overrides, RunConfig, "run"))
    if strict:
        refuse_ignored(spelled(overrides, RunConfig), [config])
    return config


def plain(config: RunConfig) -> RunConfig:
    """The same work in the fewest words: options without effect are as by default.

    One rank sends nothing and owns all tokens, so it has no schedule, layout or transport to speak of.
    """
    mask = MaskConfig(config.mask.kind)
    for key in MASK_OPTIONS.get(config.mask.kind, ()):
        setattr(mask, key, getattr(config.mask, key))
    config = replace(config, mask=mask)
    if config.world_size > 1:
        return config
    usual = RunConfig()
    return replace(config, layout=usual.layout, schedule=usual.schedule,
                   transport=replace(config.transport, name=usual.transport.name))  # fmt: skip


def refuse_ignored(words: Iterable[str], configs: Sequence[RunConfig]) -> None:
    """Raise `InputError` for an option among the words `key=value` that none of the `configs` made of them uses."""
    kinds = list(dict.fromkeys(config.mask.kind for config in configs))
    for word in words:
        match = WORD.fullmatch(word)
        users = [kind for kind, keys in MASK_OPTIONS.items() if match and match[2] in {f"mask.{key}" for key in keys}]
        if users and not set(users) & set(kinds):
            raise InputError(f"{word}: has no effect with mask={','.join(kinds)}; it goes with mask={users[0]}")


def resolved(config: RunConfig) -> RunConfig:
    """The same run with `ranks` and `tokens` as numbers. Raises `InputError` where two sizes contradict each other."""
    if config.tokens is not None and config.tokens_per_rank is not None:
        raise InputError(f"tokens_per_rank={config.tokens_per_rank}: give it or tokens={config.tokens}, not both")
    if config.cluster:
        cluster_named(config.cluster)
    config = replace(config, ranks=config.ranks or 1)
    per_rank = config.tokens_per_rank
    tokens = per_rank * config.world_size if per_rank else config.tokens or DEFAULT_TOKENS
    if config.world_size > tokens:
        raise InputError(f"ranks={config.ranks}: {config.world_size} ranks are more than tokens={tokens}")
    if config.shape.heads % config.shape.kv_heads:
        raise InputError(
            f"shape.kv_heads={config.shape.kv_heads}: does not divide shape.heads={config.shape.heads}; use a divisor"
        )
    if config.layout in OF_DOCUMENTS and config.mask.kind != "documents":
        raise InputError(f"layout={config.layout}: needs documents; use mask=documents, or another layout")
    if config.node_rank >= config.nnodes:
        raise InputError(f"node_rank={config.node_rank}: nodes are numbered from 0, and nnodes={config.nnodes}")
    host, _, port = config.rdzv_endpoint.rpartition(":")
    if config.rdzv_endpoint and not (host and port.isdecimal()):
        raise InputError(f"rdzv_endpoint={config.rdzv_endpoint}: write host:port, as node0:29400")
    return replace(config, tokens=tokens)


def words_of(config: RunConfig) -> list[str]:
    """The `key=value` words that give this configuration again, without what is as by default or has no effect."""
    usual = {key: value for key, value, _ in leaves(RunConfig())}
    words, kind = [], config.mask.kind
    idle = {f"mask.{key}" for other, keys in MASK_OPTIONS.items() if other != kind for key in keys}
    for key, value, _ in leaves(config):
        if key not in idle and value != usual[key] and not (key == "tokens" and config.tokens_per_rank):
            words.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return words


def from_spec(spec: Mapping[str, Any]) -> RunConfig:
    """The configuration that `dataclasses.asdict` turned into `spec`."""
    hints = get_type_hints(RunConfig)
    return RunConfig(**{**spec, **{name: hints[name](**spec[name]) for name in groups(RunConfig)}})


def spec_of(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested dicts, for JSON."""
    return asdict(config)

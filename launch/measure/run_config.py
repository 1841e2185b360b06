"""The options of one measured attention call: `ringattn run`, and every point of `ringattn sweep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from ringattn.errors import InputError
from ringattn.launch.calls import MaskedCallConfig, tokens_option
from ringattn.launch.config import load
from ringattn.launch.options import ENGINES, MOST_SEED, TRANSPORTS, leaves, option
from ringattn.planner.cluster import CLUSTERS, cluster_named

TRANSPORT_NAMES = tuple(name for name in TRANSPORTS if name != "local")  # which joins threads, and ranks are processes


@dataclass
class RunConfig(MaskedCallConfig):
    """One attention call, measured."""

    DEFAULT_TOKENS: ClassVar[int] = 4096
    GROUPS: ClassVar[tuple[str, ...]] = ("shape",)

    tokens: int | None = tokens_option(4096)
    backward: bool = option(True, "also measure the backward pass")
    ranks: int | None = option(None, "ranks to start on this node, as many on each; torchrun's, else 1", least=1)
    tokens_per_rank: int | None = option(None, "instead of tokens: that many for each rank", least=1)
    engine: str = option("auto", "which kernels attend", choices=ENGINES)
    transport: str = option("auto", "what carries the messages", choices=TRANSPORT_NAMES)
    warmup: int = option(2, "passes before those that are timed", least=1)
    repeats: int = option(10, "timed passes", least=1)
    seed: int = option(0, "of the inputs", least=0, most=MOST_SEED)
    nnodes: int = option(1, "nodes, each with as many ranks", least=1)
    node_rank: int = option(0, "which of the nodes this is", least=0)
    rdzv_endpoint: str = option("", "host:port of node 0, where the nodes meet")
    threads_per_rank: int | None = option(None, "intra-op threads of a rank; cores / ranks if not set", least=1)
    timeout_s: float = option(120.0, "deadline of every wait for another rank, in seconds", above=0.0)
    limit_s: float = option(1800.0, "seconds after which the run is ended", above=0.0)
    cluster: str = option("", "to predict for: a file of ringattn calibrate, or " + ", ".join(CLUSTERS)
                          + "; this machine if not set and calibrated", names=tuple(CLUSTERS))  # fmt: skip

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return (self.ranks or 1) * self.nnodes


def load_run(overrides: Sequence[str]) -> RunConfig:
    """Return the run that `overrides` describe, with every size resolved. Raises `InputError`, with the key first."""
    return resolved(load(overrides, RunConfig, "run"))


def plain(config: RunConfig) -> RunConfig:
    """Return the same work in the fewest words: options without effect have their default.

    One rank sends nothing and owns all tokens, so its schedule, layout and transport have no effect.
    """
    if config.world_size > 1:
        return config
    default = RunConfig()
    return replace(config, layout=default.layout, schedule=default.schedule, transport=default.transport)


def resolved(config: RunConfig) -> RunConfig:
    """Return the same run with `ranks` and `tokens` as numbers. Raises `InputError` if two options contradict."""
    if config.tokens is not None and config.tokens_per_rank is not None:
        raise InputError(f"tokens_per_rank={config.tokens_per_rank}: give it or tokens={config.tokens}, not both")
    if config.cluster:
        cluster_named(config.cluster)
    config = replace(config, ranks=config.ranks or 1)
    if config.tokens_per_rank is not None:
        config = replace(config, tokens=config.tokens_per_rank * config.world_size)
    config.check()
    config = replace(config, tokens=config.length)
    if config.world_size > config.length:
        raise InputError(f"ranks={config.ranks}: {config.world_size} ranks are more than tokens={config.tokens}")
    if config.node_rank >= config.nnodes:
        raise InputError(f"node_rank={config.node_rank}: nodes are numbered from 0, and nnodes={config.nnodes}")
    host, _, port = config.rdzv_endpoint.rpartition(":")
    if config.rdzv_endpoint and not (host and port.isdecimal()):
        raise InputError(f"rdzv_endpoint={config.rdzv_endpoint}: write host:port, as node0:29400")
    return config


def words_of(config: RunConfig) -> list[str]:
    """Return the `key=value` words that give this configuration again, without those that equal the default."""
    default = {key: value for key, value, _ in leaves(RunConfig())}
    words = []
    for key, value, _ in leaves(config):
        if value != default[key] and not (key == "tokens" and config.tokens_per_rank):
            words.append(f"{key}={_as_word(value)}")
    return words


def _as_word(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    # A comma is a sweep for Hydra, unless it is within quotes.
    return f"'{value}'" if isinstance(value, str) and "," in value else str(value)


def from_spec(spec: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that `spec_of` turned into `spec`."""
    return RunConfig(**spec)


def spec_of(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as a dict, for JSON."""
    return asdict(config)

"""The keys of one attention call, which all commands share, as plain dataclasses that need neither Hydra nor torch.

A mask is said as in `Ring.attention`: `causal`, `window`, and `mask` with the text that `ringattn.masks` reads.
A command extends `CallConfig`, or `MaskedCallConfig` if it can run or plan every mask, and changes defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any, ClassVar

from ringattn.core.dilation import check as check_branches
from ringattn.core.layout import LAYOUTS, OF_DOCUMENTS
from ringattn.errors import InputError
from ringattn.launch.config import load
from ringattn.launch.options import DTYPES, ENGINES, MOST, MOST_SEED, TRANSPORTS, json_option, leaves, option
from ringattn.options import AttentionOptions
from ringattn.planner.cluster import CLUSTERS, cluster_named
from ringattn.schedule.routes import NUMBERED, ROUTES

TORCH_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The names of torch for the names of the commands."""
MOST_HEADS = 2**16
"""Dilated masks have an entry for each head."""


def schedule_option(default: str = "auto") -> Any:
    """A schedule, by any name that `Ring.attention` takes; without auto if `default` is another."""
    choices = (*(("auto",) if default == "auto" else ()), *ROUTES, *(f"{name}:N" for name in NUMBERED))
    return option(default, "how keys and values travel", choices=choices)


def tokens_option(default: int, least: int = 1, **limits: int) -> Any:
    """The length of the sequence; None by default, so that a contradiction with other sizes can be refused."""
    return option(None, f"of the sequence, over all ranks; {default} if not set", least=least, **limits)


@dataclass
class CallConfig:
    """One attention call. Sizes count the whole sequence, not one rank's share of it."""

    DEFAULT_TOKENS: ClassVar[int] = 8192

    tokens: int | None = tokens_option(8192)
    batch: int = option(1, "sequences", least=1, most=MOST)
    heads: int = option(8, "query heads", least=1, most=MOST_HEADS)
    kv_heads: int = option(2, "key and value heads; divides heads", least=1, most=MOST_HEADS)
    head_dim: int = option(64, "of queries, keys and values", least=1, most=MOST)
    dtype: str = option("fp32", "of queries, keys and values", choices=DTYPES)
    causal: bool = option(True, "keys after the query are hidden")
    window: list[int] | None = option(None, "keys before and after the query that it attends to, as [511,0]; -1: all")
    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS))
    schedule: str = schedule_option()
    backward: bool = option(True, "also the backward pass")

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.DEFAULT_TOKENS if self.tokens is None else self.tokens

    @property
    def bounds(self) -> tuple[int | None, int | None] | None:
        """The window as `Ring.attention` takes it; None if no distance is bounded."""
        left, right = (None if size < 0 else size for size in self.window or (-1, -1))
        return None if left is None and right is None else (left, right)

    def check(self) -> None:
        """Raise `InputError`, with the key first, if two options contradict each other."""
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads={self.kv_heads}: does not divide heads={self.heads}; use a divisor")
        if self.window is not None and (len(self.window) != 2 or min(self.window) < -1):
            sizes = ",".join(map(str, self.window))
            raise InputError(f"window=[{sizes}]: write the keys before and after the query, as [511,0]; -1 for all")


KINDS = {"float": float, "float | None": float | None, "int | None": int | None}
"""The types of options of the softmax as keys; a tensor or numbers are a list of numbers."""
SOFTMAX = [each for each in fields(AttentionOptions) if each.name not in ("causal", "window", "mask", "schedule")]
SoftmaxKeys: Any = make_dataclass(
    "SoftmaxKeys",
    [(each.name, KINDS.get(str(each.type), list[float] | None),
      option(each.default, each.metadata["help"].partition(". ")[0].rstrip("."))) for each in SOFTMAX],
)  # fmt: skip
"""A key for each option of the softmax, as `AttentionOptions` declares it."""


@dataclass
class MaskedCallConfig(SoftmaxKeys, CallConfig):
    """One attention call, also with options of the softmax, documents, masks as values, and dilated segments."""

    mask: str | None = option(None, "prefix:N, chunked:N or global_tokens:N, in tokens; goes with causal and window")
    documents: int = option(1, "documents of equal length", least=1)
    cu_seqlens: list[int] | None = option(None, "instead of documents: their boundaries, as [0,100,300]")
    segment_lengths: list[int] | None = option(None, "dilated: tokens of each branch's segments, as [2048,8192]")
    dilation_rates: list[int] | None = option(None, "dilated: each branch keeps every n-th row, as [1,4]")

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.cu_seqlens[-1] if self.cu_seqlens else CallConfig.length.fget(self)  # type: ignore[attr-defined]

    @property
    def dilated(self) -> bool:
        """Whether it is `Ring.dilated_attention`."""
        return self.segment_lengths is not None

    def check(self) -> None:
        """Raise `InputError`, with the key first, if two options contradict each other or one has no effect."""
        super().check()
        for name, value in self.softmax().items():
            if isinstance(value, list) and len(value) != self.heads:
                raise InputError(f"{name}: {len(value)} numbers for heads={self.heads}; give one for each query head")
            if name != "sinks":
                AttentionOptions(**{name: value})
        if (self.dropout_p == 0) != (self.dropout_seed is None):
            raise InputError(f"dropout_p={self.dropout_p}: goes with dropout_seed, a number; give both or neither")
        if self.mask is not None:
            self._check_mask(self.mask)
        if self.cu_seqlens is not None:
            self._check_documents(self.cu_seqlens)
        if self.layout in OF_DOCUMENTS and self.documents == 1 and self.cu_seqlens is None:
            raise InputError(f"layout={self.layout}: needs documents; use documents=8, or another layout")
        if (self.segment_lengths is None) != (self.dilation_rates is None):
            given, missing = (
                ("segment_lengths", "dilation_rates") if self.dilated else ("dilation_rates", "segment_lengths")
            )
            raise InputError(f"{given}: goes with {missing}; give both or neither")
        if self.segment_lengths is not None and self.dilation_rates is not None:
            check_branches(self.segment_lengths, self.dilation_rates)
        if self.dilated and (self.mask is not None or self.bounds is not None):
            raise InputError("segment_lengths: dilated branches take neither mask nor window; leave these out")

    def _check_mask(self, text: str) -> None:
        from ringattn import masks

        masks.from_text(text)
        if text.startswith("prefix") and not self.causal:
            raise InputError(f"mask={text}: has no effect with causal=false, where all queries attend to all keys")
        if text.startswith("global_tokens") and self.bounds is None:
            raise InputError(f"mask={text}: has no effect without a window; add window=[511,0], for example")

    def _check_documents(self, cu_seqlens: list[int]) -> None:
        text = ",".join(map(str, cu_seqlens))
        if self.documents != 1:
            raise InputError(f"cu_seqlens=[{text}]: give it or documents={self.documents}, not both")
        if not cu_seqlens:
            raise InputError("cu_seqlens=[]: write the boundaries of the documents, as [0,100,300]")
        if self.tokens is not None and self.tokens != cu_seqlens[-1]:
            raise InputError(f"tokens={self.tokens}: cu_seqlens ends at {cu_seqlens[-1]}; leave tokens out")

    def softmax(self) -> dict[str, Any]:
        """Return the options of the softmax that are not their defaults."""
        return {each.name: value for each in SOFTMAX if (value := getattr(self, each.name)) != each.default}

    def options(self, length: int, device: Any = "cpu") -> dict[str, Any]:
        """Return mask and softmax as keyword arguments of the call, for a sequence of `length` tokens, on a device.

        If that is less than the call's length, window, mask and segments are as much smaller.
        """
        from ringattn import masks

        options: dict[str, Any] = {"causal": self.causal, **self.softmax()}
        if "sinks" in options:
            import torch

            options["sinks"] = torch.tensor(options["sinks"], device=device)
        if self.segment_lengths is not None:
            segments = [self._scaled(size, length) for size in self.segment_lengths]
            return {**options, "segment_lengths": segments, "dilation_rates": self.dilation_rates}
        if self.bounds is not None:
            # A window of n keys counts the query's own key.
            options["window"] = tuple(
                None if size is None else self._scaled(size + 1, length) - 1 for size in self.bounds
            )
        if self.mask is not None:
            name, _, numbers = self.mask.partition(":")
            sizes = [n and str(int(n) and self._scaled(int(n), length)) for n in numbers.split(",")]
            options["mask"] = masks.from_text(f"{name}:{','.join(sizes)}")
        return options

    def cu_seqlens_at(self, length: int) -> list[int] | None:
        """Return the document boundaries in a sequence of `length` tokens; None for one document."""
        if self.cu_seqlens is not None:
            whole = length == self.length
            return [bound if whole else bound * length // self.length for bound in self.cu_seqlens]
        if self.documents == 1:
            return None
        return [number * length // self.documents for number in range(self.documents + 1)]

    def _scaled(self, size_tokens: int, length: int) -> int:
        return size_tokens if length == self.length else max(1, size_tokens * length // self.length)


# --- measured calls ---------------------------------------------------------------------------------------------------


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
    node_rank: int | None = option(None, "the number of this node, from 0; needed with several nodes", least=0)
    rdzv_endpoint: str = option("", "host:port of node 0, where the nodes meet")
    threads_per_rank: int | None = option(None, "intra-op threads of a rank; cores / ranks if not set", least=1)
    timeout_s: float = option(120.0, "deadline of every wait for another rank, in seconds", above=0.0)
    limit_s: float = option(1800.0, "seconds after which the run is ended", above=0.0)
    cluster: str = option("", "to predict for: a file of ringattn calibrate, or " + ", ".join(CLUSTERS)
                          + "; this machine if not set and calibrated", names=tuple(CLUSTERS))  # fmt: skip
    json: str = json_option()

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return (self.ranks or 1) * self.nnodes

    @property
    def is_first_node(self) -> bool:
        """Whether this is node 0, which writes and prints the results."""
        return not self.node_rank


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
    if config.node_rank is not None and config.node_rank >= config.nnodes:
        raise InputError(f"node_rank={config.node_rank}: nodes are numbered from 0, and nnodes={config.nnodes}")
    host, _, port = config.rdzv_endpoint.rpartition(":")
    if config.rdzv_endpoint and not (host and port.isdecimal()):
        raise InputError(f"rdzv_endpoint={config.rdzv_endpoint}: write host:port, as node0:29400")
    return config


AUTOMATIC = ("schedule", "layout", "engine", "transport")
"""Keys whose default is auto: a run records which value it took."""


def with_resolved(config: RunConfig, ran: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the values of `ran` in place of auto, so that it repeats the same call.

    One rank alone keeps auto for what is between ranks, because it has no transport that could be named.
    """
    keys = AUTOMATIC if config.world_size > 1 else ("engine",)
    # Two transports, one inside a node and one between nodes, are named by the inner one.
    taken: dict[str, Any] = {
        key: str(ran[key]).partition("+")[0] for key in keys if getattr(config, key) == "auto" and key in ran
    }
    return replace(config, **taken)


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

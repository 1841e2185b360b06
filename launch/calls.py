"""The keys of one attention call, which all commands share, as plain dataclasses that need neither Hydra nor torch.

A mask is given as in `Ring.attention`: `causal`, `window`, and `mask` with a text that `ringattn.masks` reads. A
command extends `CallConfig`, or `MaskedCallConfig` if it can run or plan every mask, and changes defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from ringattn.core.dilation import check as check_branches
from ringattn.core.layout import LAYOUTS, OF_DOCUMENTS, Purpose
from ringattn.errors import InputError
from ringattn.launch.config import load
from ringattn.launch.options import DTYPES, ENGINES, MOST, MOST_SEED, TRANSPORTS, json_option, leaves, option
from ringattn.options import AttentionOptions
from ringattn.planner.cluster import CLUSTERS, cluster_named
from ringattn.schedule.routes import NUMBERED, ROUTES

TORCH_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The names of dtypes in torch, by their names in the commands."""
MOST_HEADS = 2**16
"""Dilated masks have an entry for each head."""


def schedule_option(default: str = "auto") -> Any:
    """Declare the option `schedule`: any name that `Ring.attention` takes, and auto only if it is the default."""
    choices = (*(("auto",) if default == "auto" else ()), *ROUTES, *(f"{name}:N" for name in NUMBERED))
    return option(default, "schedule of the messages", choices=choices)


def tokens_option(default: int, least: int = 1, **limits: int) -> Any:
    """Declare the option `tokens`, which is None if the user does not set it.

    A command can therefore refuse sizes that contradict each other. The help names `default` as the value if not set.
    """
    return option(None, f"length of the sequence, over all ranks; {default} if not set", least=least, **limits)


@dataclass
class CallConfig:
    """One attention call. Sizes are those of the whole sequence, not of one rank's shard."""

    DEFAULT_TOKENS: ClassVar[int] = 8192

    tokens: int | None = tokens_option(8192)
    batch: int = option(1, "sequences", least=1, most=MOST)
    heads: int = option(8, "query heads", least=1, most=MOST_HEADS)
    kv_heads: int = option(2, "key and value heads; must divide heads", least=1, most=MOST_HEADS)
    head_dim: int = option(64, "elements of a head", least=1, most=MOST)
    dtype: str = option("fp32", "dtype of queries, keys and values", choices=DTYPES)
    causal: bool = option(True, "a query attends only to keys up to its position")
    window: list[int] | None = option(None, "keys before and after the query that it attends to, as [511,0]; -1: all")
    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS))
    schedule: str = schedule_option()
    backward: bool = option(True, "also the backward pass")

    @property
    def length(self) -> int:
        """Return the tokens of the whole sequence."""
        return self.DEFAULT_TOKENS if self.tokens is None else self.tokens

    @property
    def bounds(self) -> tuple[int | None, int | None] | None:
        """Return the window as `Ring.attention` takes it, or None if neither side is bounded."""
        left, right = (None if size < 0 else size for size in self.window or (-1, -1))
        return None if left is None and right is None else (left, right)

    @property
    def purpose(self) -> Purpose:
        """Return the kind of mask for which layout=auto chooses, which is `for_` of `Ring.sequence`."""
        return "window" if self.bounds else "causal" if self.causal else "full"

    def check(self) -> None:
        """Raise `InputError`, with the key first, if two options contradict each other."""
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads={self.kv_heads}: must divide heads={self.heads}")
        if self.window is not None and (len(self.window) != 2 or min(self.window) < -1):
            sizes = ",".join(map(str, self.window))
            raise InputError(f"window=[{sizes}]: write the keys before and after the query, as [511,0]; -1 for all")


KINDS = {"float": float, "float | None": float | None, "int | None": int | None}
"""The type of a command's key for each type of a softmax option. Options of other types, which are tensors, are given
as lists of numbers.
"""
SOFTMAX = [field for field in fields(AttentionOptions) if field.name not in ("causal", "window", "mask", "schedule")]
SoftmaxKeys: Any = make_dataclass(
    "SoftmaxKeys",
    [(field.name, KINDS.get(str(field.type), list[float] | None),
      option(field.default, field.metadata["help"].partition(". ")[0].rstrip("."))) for field in SOFTMAX],
)  # fmt: skip
"""A key for each option of the softmax, as `AttentionOptions` declares it."""


UNSCALED = ("slices", "by_head")
"""Masks that have no form for a sequence of another length."""


@dataclass
class MaskedCallConfig(SoftmaxKeys, CallConfig):
    """One attention call with any mask. It adds the options of the softmax, `mask`, documents and dilated branches."""

    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS, "mask"))
    mask: str | None = option(
        None,
        "prefix:N, chunked:N, global_tokens:N or bidirectional_blocks:START,END,..., in tokens; can be combined with "
        "causal and window; or the text of another mask, as 'tree:1024(2*512)'",
    )
    documents: int = option(1, "documents of equal length", least=1)
    cu_seqlens: list[int] | None = option(None, "boundaries of the documents, as [0,100,300]; replaces documents")
    segment_lengths: list[int] | None = option(None, "dilated attention: segment length of each branch, as [2048,8192]")
    dilation_rates: list[int] | None = option(None, "dilated attention: dilation rate of each branch, as [1,4]")

    @property
    def length(self) -> int:
        """Return the tokens of the whole sequence."""
        if self.cu_seqlens:
            return self.cu_seqlens[-1]
        if self.tokens is None and self.mask is not None and self.mask.startswith("tree:"):
            return self._mask_at(None).tokens
        return CallConfig.length.fget(self)  # type: ignore[attr-defined]

    @property
    def dilated(self) -> bool:
        """Return whether the call is `Ring.dilated_attention`."""
        return self.segment_lengths is not None

    @property
    def purpose(self) -> Purpose:
        """See `CallConfig.purpose`."""
        return "dilated" if self.dilated else CallConfig.purpose.fget(self)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Raise `InputError`, with the key first, if two options contradict each other or one has no effect."""
        super().check()
        for name, value in self.softmax().items():
            if isinstance(value, list) and len(value) != self.heads:
                raise InputError(f"{name}: {len(value)} numbers for heads={self.heads}; give one for each query head")
            if name != "sinks":
                AttentionOptions(**{name: value})
        if (self.dropout_p == 0) != (self.dropout_seed is None):
            raise InputError(f"dropout_p={self.dropout_p}: give both dropout_p and dropout_seed, a number, or neither")
        if self.mask is not None:
            self._check_mask(self.mask)
        if self.cu_seqlens is not None:
            self._check_documents(self.cu_seqlens)
        if self.layout in OF_DOCUMENTS and self.documents == 1 and self.cu_seqlens is None:
            raise InputError(f"layout={self.layout}: needs documents; use documents=8, or another layout")
        if self.layout == "mask" and (self.mask is None or self.mask.startswith("global_tokens")):
            raise InputError(
                "layout=mask: places tokens for a mask that needs no window; set mask, as mask=chunked:1024, or use "
                "another layout"
            )
        if (self.segment_lengths is None) != (self.dilation_rates is None):
            key, missing = (
                ("segment_lengths", "dilation_rates") if self.dilated else ("dilation_rates", "segment_lengths")
            )
            raise InputError(f"{key}: needs {missing}; give both or neither")
        if self.segment_lengths is not None and self.dilation_rates is not None:
            check_branches(self.segment_lengths, self.dilation_rates)
        if self.dilated and (self.mask is not None or self.bounds is not None):
            raise InputError(
                "segment_lengths: dilated branches cannot be combined with a mask or a window; leave mask and "
                "window out"
            )

    def _check_mask(self, text: str) -> None:
        mask = self._mask_at(None)
        if text.startswith("tree:") and not mask.tokens:
            raise InputError(f"mask={text}: a tree of 0 tokens; give a node at least 1 token")
        if text.startswith("tree:") and self.tokens not in (None, mask.tokens):
            raise InputError(f"tokens={self.tokens}: mask={text} has {mask.tokens} tokens; leave tokens out")
        if not mask.takes_causal and self.causal:
            raise InputError(f"mask={text}: attends to later keys; set causal=false")
        if text.startswith(("prefix", "bidirectional_blocks")) and not self.causal:
            raise InputError(f"mask={text}: has no effect with causal=false, where all queries attend to all keys")
        if text.startswith("global_tokens") and self.bounds is None:
            raise InputError(f"mask={text}: has no effect without a window; add window=[511,0], for example")

    def _check_documents(self, cu_seqlens: list[int]) -> None:
        text = ",".join(map(str, cu_seqlens))
        if self.documents != 1:
            raise InputError(f"cu_seqlens=[{text}]: give either it or documents={self.documents}")
        if not cu_seqlens:
            raise InputError("cu_seqlens=[]: write the boundaries of the documents, as [0,100,300]")
        if self.tokens is not None and self.tokens != cu_seqlens[-1]:
            raise InputError(f"tokens={self.tokens}: cu_seqlens ends at {cu_seqlens[-1]}; leave tokens out")

    def softmax(self) -> dict[str, Any]:
        """Return the options of the softmax whose values are not the defaults."""
        return {field.name: value for field in SOFTMAX if (value := getattr(self, field.name)) != field.default}

    def options(self, length: int, device: Any = "cpu") -> dict[str, Any]:
        """Return the mask and the softmax options as keyword arguments of the call, for a sequence of `length` tokens.

        If `length` is less than that of the configured call, window, mask and segments are scaled down by the same
        factor. Tensors are made on `device`.
        """
        options: dict[str, Any] = {"causal": self.causal, **self.softmax()}
        if "sinks" in options:
            import torch

            options["sinks"] = torch.tensor(options["sinks"], device=device)
        if self.segment_lengths is not None:
            segments = [self._scaled(size, length) for size in self.segment_lengths]
            return {**options, "segment_lengths": segments, "dilation_rates": self.dilation_rates}
        if self.bounds is not None:
            # A window is scaled with the key at the query's own position, which its sizes do not count.
            options["window"] = tuple(
                None if size is None else self._scaled(size + 1, length) - 1 for size in self.bounds
            )
        if self.mask is not None:
            options["mask"] = self._mask_at(length)
        return options

    def sequence_on(self, ring: Any, length: int, layout: str | None = None) -> Any:
        """Return a sequence of `length` tokens on a ring, in `layout` if given, else in the layout of the call.

        It carries no mask, because the call names its mask.
        """
        cuts, layout = self.cu_seqlens_at(length), layout or self.layout
        if layout != "mask":
            return ring.sequence(length, cu_seqlens=cuts, layout=layout, for_=self.purpose)
        return ring.sequence(
            length, cu_seqlens=cuts, layout=layout, for_="causal" if self.causal else "full", schedule=self.schedule,
            mask=self._mask_at(length),
        ).with_mask(None)  # fmt: skip

    def _mask_at(self, length: int | None) -> Any:
        """Return the mask in a sequence of `length` tokens; None for the length of the call."""
        from ringattn import masks

        assert self.mask is not None
        mask = masks.from_text(self.mask)
        if length is None or length == self.length:
            return mask
        if isinstance(mask, masks.Tree):
            edges = [edge * length // mask.tokens for edge in (*mask.starts, mask.tokens)]
            return masks.tree(mask.parents, [stop - start for start, stop in pairwise(edges)])
        name, _, numbers = self.mask.partition(":")
        if name in UNSCALED:
            raise InputError(f"mask={self.mask}: {name} cannot be scaled from {self.length} to {length} tokens")
        sizes = [n and str(int(n) and self._scaled(int(n), length)) for n in numbers.split(",")]
        return masks.from_text(f"{name}:{','.join(sizes)}")

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


TRANSPORT_NAMES = tuple(name for name in TRANSPORTS if name != "local")  # ranks are processes; "local" joins threads


@dataclass
class RunConfig(MaskedCallConfig):
    """One attention call to measure, with the ranks that run it and the number of repetitions."""

    DEFAULT_TOKENS: ClassVar[int] = 4096
    GROUPS: ClassVar[tuple[str, ...]] = ("shape",)

    tokens: int | None = tokens_option(4096)
    backward: bool = option(True, "also measure the backward pass")
    ranks: int | None = option(None, "ranks to start on each node; those of torchrun if not set, else 1", least=1)
    tokens_per_rank: int | None = option(None, "tokens per rank; replaces tokens", least=1)
    engine: str = option("auto", "attention kernels", choices=ENGINES)
    transport: str = option("auto", "transport of the messages", choices=TRANSPORT_NAMES)
    warmup: int = option(2, "passes before the timed ones", least=1)
    repeats: int = option(10, "timed passes", least=1)
    seed: int = option(0, "seed of the inputs", least=0, most=MOST_SEED)
    nnodes: int = option(1, "nodes, each with the same number of ranks", least=1)
    node_rank: int | None = option(None, "number of this node, from 0; needed with several nodes", least=0)
    rdzv_endpoint: str = option("", "host:port of node 0, where the nodes connect")
    threads_per_rank: int | None = option(None, "intra-op threads of a rank; cores / ranks if not set", least=1)
    timeout_s: float = option(120.0, "deadline of every wait for another rank, in seconds", above=0.0)
    limit_s: float = option(1800.0, "seconds after which the run is stopped", above=0.0)
    cluster: str = option("", "machines to predict for: a file of ringattn calibrate, or " + ", ".join(CLUSTERS)
                          + "; this machine if not set and calibrated", names=tuple(CLUSTERS))  # fmt: skip
    json: str = json_option()

    def check(self) -> None:
        """See `MaskedCallConfig.check`."""
        super().check()
        if self.mask is not None and self.mask.startswith(UNSCALED):
            raise InputError(
                f"mask={self.mask}: the call is checked at a smaller size first, and this mask has no smaller form; "
                "use ringattn explain or ringattn timeline"
            )

    @property
    def world_size(self) -> int:
        """Return the number of ranks on all nodes together."""
        return (self.ranks or 1) * self.nnodes

    @property
    def is_first_node(self) -> bool:
        """Return whether this is node 0, which writes and prints the results."""
        return not self.node_rank


def load_run(overrides: Sequence[str]) -> RunConfig:
    """Return the run that `overrides` describe, with every size resolved. Raises `InputError`, with the key first."""
    return resolved(load(overrides, RunConfig, "run"))


def plain(config: RunConfig) -> RunConfig:
    """Return the configuration with options that have no effect at their defaults.

    A single rank sends nothing and owns all tokens, so its schedule, layout and transport have no effect.
    """
    if config.world_size > 1:
        return config
    default = RunConfig()
    return replace(config, layout=default.layout, schedule=default.schedule, transport=default.transport)


def resolved(config: RunConfig) -> RunConfig:
    """Return the same run with `ranks` and `tokens` as numbers. Raises `InputError` if two options contradict."""
    if config.tokens is not None and config.tokens_per_rank is not None:
        raise InputError(f"tokens_per_rank={config.tokens_per_rank}: give either it or tokens={config.tokens}")
    if config.cluster:
        cluster_named(config.cluster)
    config = replace(config, ranks=config.ranks or 1)
    if config.tokens_per_rank is not None:
        config = replace(config, tokens=config.tokens_per_rank * config.world_size)
    config.check()
    config = replace(config, tokens=config.length)
    if config.world_size > config.length:
        raise InputError(f"ranks={config.ranks}: {config.world_size} ranks are more than tokens={config.tokens}")
    check_nodes(config)
    return config


def check_nodes(config: RunConfig) -> None:
    """Raise `InputError`, with the key first, if the options of several nodes contradict or have no effect."""
    for key, value in (("node_rank", config.node_rank), ("rdzv_endpoint", config.rdzv_endpoint)):
        if config.nnodes == 1 and value not in (None, ""):
            raise InputError(f"{key}={value}: applies only to several nodes; add nnodes=, the number of nodes")
    if config.node_rank is not None and config.node_rank >= config.nnodes:
        raise InputError(
            f"node_rank={config.node_rank}: must be from 0 to {config.nnodes - 1}, because nnodes={config.nnodes}"
        )
    host, _, port = config.rdzv_endpoint.rpartition(":")
    if config.rdzv_endpoint and not (host and port.isdecimal()):
        raise InputError(f"rdzv_endpoint={config.rdzv_endpoint}: write host:port, as node0:29400")


AUTOMATIC = ("schedule", "layout", "engine", "transport")
"""Keys whose default is auto. A run records the values that were chosen."""


def with_resolved(config: RunConfig, ran: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the values of `ran` in place of auto, so that it repeats the same call.

    A single rank keeps auto for options between ranks, because it has no transport.
    """
    keys = AUTOMATIC if config.world_size > 1 else ("engine",)
    # "shm+gloo" names the transports within and between nodes. The option takes only the first of them.
    taken: dict[str, Any] = {
        key: str(ran[key]).partition("+")[0] for key in keys if getattr(config, key) == "auto" and key in ran
    }
    return replace(config, **taken)


def words_of(config: RunConfig) -> list[str]:
    """Return the `key=value` words from which `load_run` makes this configuration, without keys at their defaults."""
    default = {key: value for key, value, _ in leaves(RunConfig())}
    return [
        f"{key}={_as_word(value)}"
        for key, value, _ in leaves(config)
        if value != default[key] and not (key == "tokens" and config.tokens_per_rank)
    ]


def _as_word(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    # Hydra reads a comma as a sweep, except within quotes.
    return f"'{value}'" if isinstance(value, str) and "," in value else str(value)

"""torchtitan: an inner attention over a ring, and the sharding of its inputs.

`RingAttention` replaces torchtitan's inner attentions in a model's config. `RingTrainerMixin` shards batches in its
Trainer and Validator; other loops call `prepare_context_parallel_input`. See docs/embedding-torchtitan.md. The
sequences of a batch are passed as the model's `attention_masks`, so recomputation gets them like any other argument.

Guarantees: packed documents (positions that restart at 0) do not attend to each other. Any length is allowed. Masks of
FlexAttention and of torchtitan's varlen attention raise, because their content is not analysed here.
Not covered: the loss, which torchtitan reduces over the `loss` mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeGuard

import spmd_types
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import (
    BaseAttention,
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from ringattn.adapters.attend import as_autocast, lone_sequence
from ringattn.adapters.context import sequence_of
from ringattn.adapters.groups import close_rings, ring_of
from ringattn.adapters.host_versions import Host
from ringattn.adapters.hosts import local_heads
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import activation
from ringattn.sequence import Sequence

__all__ = ["RingAttention", "RingTrainerMixin", "over_ring", "prepare_context_parallel_input"]

HOST = Host(
    "torchtitan",
    ("0.3",),
    parameters={"torchtitan.models.common.attention:ScaledDotProductAttention.forward": (
        "q_BLNH", "k_BLNH", "v_BLNH", "scale", "enable_gqa"
    )},
    # The mixin replaces the first function. The second wraps attention modules of certain classes, which decides the
    # class of `RingAttention`. The third applies the sharding config that `RingAttention.parallelize` has changed. The
    # others make the masks that `over_ring` replaces: causal within each document.
    sources={
        "torchtitan.distributed.context_parallel:prepare_context_parallel_input": ("fab699aa",),
        "torchtitan.distributed.context_parallel:apply_cp_to_forward": ("0e522e84",),
        "torchtitan.protocols.module:Module.parallelize": ("abf8c45b",),
        "torchtitan.models.common.decoder:Decoder.get_attention_masks": ("a6a321de",),
        "torchtitan.models.common.decoder:Decoder._create_flex_attention_mask_for_document": ("5f158d55",),
    },
)  # fmt: skip
HOST.require()

Rows = tuple[Sequence, ...]
"""The sequence of each row of a batch. Rows may be cut into different documents."""

_LAYOUTS = {"headtail": "zigzag", None: "contiguous"}


class RingAttention(Module):
    """Causal attention over a ring, which replaces torchtitan's inner attentions.

    Args:
        config: A `RingAttention.Config`.

    Raises:
        Nothing.

    Example:
        layer.attention.inner_attention = RingAttention.Config(window_size=(1023, 0))
    """

    _sharding_config: ShardingConfig | None = None  # torchtitan's, set when it builds the module

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """The config of `RingAttention`.

        `window_size`: tokens left and right of the query, as in torchtitan's varlen attention; -1: unbounded.
        """

        window_size: tuple[int, int] = (-1, 0)

    def __new__(cls, config: Config | None = None) -> RingAttention:
        """Return a `ScaledDotProductAttention` under the backend `partial_dtensor`, and a plain module otherwise.

        `partial_dtensor` calls torchtitan's `apply_cp_to_forward`, which accepts certain classes only. The other
        backends do not call it, and refuse those classes.
        """
        wrapped = cls is RingAttention and get_spmd_backend() == "partial_dtensor"
        module: RingAttention = super().__new__(_WrappedRingAttention if wrapped else cls)
        return module

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)  # ScaledDotProductAttention's `__init__` only sets attributes of its forward
        self.window_size = config.window_size
        self._cp_ranks = 1

    def parallelize(self, parallel_dims: Any) -> None:
        """Set up sharding like torchtitan's modules, except that keys and values stay sharded over `cp`.

        torchtitan gathers keys and values over `cp` before its attentions. A ring needs this rank's shard.

        Args:
            parallel_dims: torchtitan's ParallelDims.

        Raises:
            UnsupportedError: The backend is `full_dtensor`, or torchtitan's sharding config does not say how the inputs
                are sharded.
        """
        if parallel_dims.spmd_backend == "full_dtensor":
            raise UnsupportedError(
                "spmd_backend='full_dtensor': a ring takes each rank's shard of tokens, set "
                "--parallelism.spmd_backend to spmd_types (torchtitan's default) or partial_dtensor"
            )
        # Kept for `_check_has_sequence`: later, q alone does not show that it is a shard.
        self._cp_ranks = parallel_dims.cp
        if self._sharding_config is not None:
            self._sharding_config = _keeping_shards(self._sharding_config)
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Rows | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute attention of this rank's shards; differentiable.

        DTensors whose tokens are sharded over `cp`, as torchtitan declares them, are replaced by their local tensors.
        DTensors with sharded heads are accepted too, and the results are then DTensors; see `local_heads` for others.

        Args:
            q_BLNH: Queries.
            k_BLNH: Keys; they may have fewer heads.
            v_BLNH: Values, like keys.
            attention_masks: The sequences from `prepare_context_parallel_input`. None: the active sequence, see
                `sequence_of`.
            scale: Factor of the scores. None: 1 / sqrt(head_dim).
            enable_gqa: Ignored: keys and values may always have fewer heads.
            out_transform: Computes the result from out and lse. None: the result is out.
            kwargs: Refused.

        Shape:
            q_BLNH: (batch, tokens, q_heads, head_dim)
            k_BLNH: (batch, tokens, kv_heads, head_dim)
            v_BLNH: (batch, tokens, kv_heads, value_dim)
            lse: (batch, tokens, q_heads)

        Returns:
            (batch, tokens, q_heads, value_dim), or the result of `out_transform`.

        Raises:
            InputError: The mask has another type or number of rows, an argument is unknown, or the tensors are shards
                over several ranks of `cp` but no sequence is given or active. Also what `sequence_of` raises.
            RingError: What `Ring.attention` raises.
        """
        if kwargs:
            raise InputError(f"RingAttention does not support the arguments {', '.join(kwargs)}")
        (q, k, v), whole = local_heads((_local_tokens(q_BLNH), _local_tokens(k_BLNH), _local_tokens(v_BLNH)), 2)
        q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
        if attention_masks is None:
            _check_has_sequence(q_BLNH, self._cp_ranks)
            rows: Rows = (sequence_of() or lone_sequence(q.shape[1]),) * len(q)
        else:
            rows = _checked(attention_masks, len(q))
        # torchtitan's window has no separate causal flag: a right side of 0 means causal.
        left, right = self.window_size
        options: dict[str, Any] = {"causal": right == 0, "window": (left, right), "scale": scale, "return_lse": True}
        # The checker cannot follow the ring's communication. The sharding config declares the result, as for a kernel.
        with spmd_types.no_typecheck():
            if len(set(rows)) == 1:
                out, lse = rows[0].ring.attention(q, k, v, rows[0], **options)
            else:
                # Rows with different documents have different plans, so each row is a separate call.
                each = [seq.ring.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], seq, **options)
                        for i, seq in enumerate(rows)]  # fmt: skip
                out, lse = (torch.cat(parts) for parts in zip(*each, strict=True))
        # lse as torchtitan expects it, (batch, tokens, heads).
        out, lse = whole(out), whole(lse.transpose(1, 2))
        return out if out_transform is None else out_transform(out, lse)


class _WrappedRingAttention(RingAttention, ScaledDotProductAttention):
    """The class of `RingAttention` objects under `partial_dtensor`."""


def _keeping_shards(config: ShardingConfig) -> ShardingConfig:
    """Return a config that keeps the layouts in which queries, keys and values arrive, for gradients too."""
    # torchtitan redistributes from `in_src_shardings` to `in_dst_shardings`: if they are equal, nothing is gathered.
    # It then expects partial sums as gradients of keys and values, because each rank has all keys. A ring returns whole
    # gradients of this rank's tokens.
    names, arriving = ("q_BLNH", "k_BLNH", "v_BLNH"), config.in_src_shardings or {}
    if missing := [name for name in names if name not in arriving]:
        raise UnsupportedError(
            f"torchtitan's sharding_config of RingAttention has no in_src_shardings of {', '.join(missing)}: a ring "
            "needs the layout of tokens over cp, see torchtitan's set_gqa_inner_attention_local_map"
        )
    gradients = LocalMapConfig(in_grad_placements=tuple(arriving[name] for name in names))
    return replace(config, in_dst_shardings=arriving, local_map=gradients)


def _local_tokens(x: Tensor) -> Tensor:
    """Return this rank's tokens if torchtitan has declared that the mesh `cp` shards them, else `x`."""
    return x.to_local() if _is_declared(x) else x


def _is_declared(x: Tensor) -> TypeGuard[DTensor]:
    """Return whether torchtitan has declared that the mesh `cp` shards the tokens."""
    return isinstance(x, DTensor) and x.device_mesh.mesh_dim_names == ("cp",) and x.placements == (Shard(1),)


def _check_has_sequence(q: Tensor, cp_ranks: int) -> None:
    """Raise `InputError` if q is a shard and no sequence is active.

    `sequence_of` cannot detect this case, because it raises only while a ring is open, and no ring may be open yet.
    """
    # Under `spmd_types` q is a plain tensor, and only `parallelize` has seen the size of `cp`.
    ranks = q.device_mesh.size() if _is_declared(q) else cp_ranks
    # The id is -1 outside of a backward pass.
    is_in_backward = torch._C._current_graph_task_id() != -1  # recomputation uses the sequence of its forward pass
    if ranks > 1 and activation() is None and not is_in_backward:
        raise InputError(
            f"attention_masks is None and q is a shard over the {ranks} ranks of cp, which would attend to itself "
            "only: put ringattn.adapters.torchtitan.RingTrainerMixin before torchtitan's Trainer and its Validator, "
            "or shard batches with ringattn.adapters.torchtitan.prepare_context_parallel_input, not torchtitan's own"
        )


class RingTrainerMixin:
    """A mixin for torchtitan's Trainer and its Validator that shards their batches for `RingAttention`.

    It also works with one rank, where it keeps packed documents apart. Backends: `spmd_types` and `partial_dtensor`.

    Example:
        class RingTrainer(RingTrainerMixin, Trainer):
            @dataclass(kw_only=True, slots=True)
            class Config(Trainer.Config):
                pass
    """

    config: Any
    parallelism: Any  # of a Validator
    parallel_dims: Any
    ntokens_seen: int

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor, model_parts: list[nn.Module] | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return this rank's tokens of a batch; overrides torchtitan's method. A collective call, on the host.

        Args:
            input_dict: The batch: "input", "positions" and the model's other arguments.
            labels: The labels of the batch.
            model_parts: Passed by the Validator; not read. None: this is the Trainer, which counts tokens.

        Shape:
            labels: (batch, tokens)

        Returns:
            This rank's inputs, labels and the model's other arguments.

        Raises:
            UnsupportedError: The trainer compiles the model, or captures CUDA graphs.
            InputError: What `prepare_context_parallel_input` raises.
            RingError: Other errors of `ring_of`.
        """
        is_trainer = model_parts is None
        parallelism = self.config.parallelism if is_trainer else self.parallelism
        if is_trainer:
            _refuse(self.config, input_dict["input"])
        extra = {name: value for name, value in input_dict.items() if name != "input"}
        inputs, balancer = input_dict["input"], parallelism.context_parallel_load_balancer
        if self.parallel_dims.cp_enabled:
            ring = ring_of(self.parallel_dims.get_mesh("cp"))
        else:  # one rank still needs sequences, because positions define the documents
            ring = lone_sequence(inputs.shape[1]).ring
        inputs, labels, extra = prepare_context_parallel_input(inputs, labels, extra, ring, inputs.device, balancer)
        # As in torchtitan, count after sharding: the count is summed over all ranks, those of `cp` included.
        if is_trainer:
            self.ntokens_seen += labels.numel()
        if parallelism.spmd_backend == "spmd_types":
            inputs, labels, extra = annotate_input_spmd_types(self.parallel_dims, inputs, labels, extra)
        return inputs, labels, extra

    def close(self) -> None:
        """Close the rings, then the Trainer, because torchtitan destroys the process groups afterwards.

        Raises:
            RingError: What `Ring.close` raises.
        """
        close_rings()
        super().close()  # type: ignore[misc]  # of the Trainer after this mixin


def over_ring(config: Any) -> Any:
    """Return a Trainer's config with which it trains over rings of `context_parallel_degree` ranks.

    Every inner attention of the model becomes a `RingAttention`, and the Trainer and its Validator get
    `RingTrainerMixin`.

    Args:
        config: A config of torchtitan's Trainer or of a class derived from it. Its model config is changed in place.

    Returns:
        The config of the Trainer with the mixin.

    Raises:
        UnsupportedError: The model makes its own masks, or an inner attention is neither FlexAttention nor
            VarlenAttention, whose masks end at the borders of documents.

    Example:
        def llama3_8b_over_ring():
            return over_ring(llama3_8b())
    """
    model = config.model_spec.model
    if getattr(model._owner, "get_attention_masks", None) is not Decoder.get_attention_masks:
        raise UnsupportedError(
            f"{model._owner.__name__} makes its own attention masks, which over_ring does not know; set "
            "RingAttention.Config(window_size=...) as the inner_attention of its layers, and derive from "
            "RingTrainerMixin, see docs/embedding-torchtitan.md"
        )
    for name, attention, _, _ in model.traverse(BaseAttention.Config):
        inner = attention.inner_attention
        if type(inner) not in (FlexAttention.Config, VarlenAttention.Config):
            raise UnsupportedError(
                f"{name} has the inner attention {type(inner)._owner.__name__}, whose packed documents attend to each "
                "other; use torchtitan's FlexAttention or VarlenAttention, as with attn_backend='flex'"
            )
        attention.inner_attention = RingAttention.Config(window_size=getattr(inner, "window_size", (-1, 0)))
    config = _with_mixin(config)
    config.validator = _with_mixin(config.validator)
    return config


def _with_mixin(config: Any) -> Any:
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    return _ring_class(type(config)._owner).Config(**values)


@cache
def _ring_class(kind: Any) -> Any:
    """Return a class of torchtitan with `RingTrainerMixin`."""
    settings: Any = dataclass(kw_only=True, slots=True)(type("Config", (kind.Config,), {}))
    return type(kind.__name__, (RingTrainerMixin, kind), {"Config": settings, "__module__": kind.__module__})


def _refuse(config: Any, inputs: Tensor) -> None:
    """Raise `UnsupportedError` for options that a ring does not support. All ranks have the same config."""
    if config.compile.enable and "model" in config.compile.components:
        raise UnsupportedError(
            "compile.enable with component 'model': torchtitan compiles each layer as one graph, but attention "
            "over a ring breaks the graph; leave it out, or set --compile.components loss"
        )
    if inputs.is_cuda and not config.training.disable_cuda_graphs:
        raise UnsupportedError(
            "CUDA graphs of the whole step: ranks compare each call on the host first, which the replay of a graph "
            "does not repeat; set --training.disable_cuda_graphs"
        )


def prepare_context_parallel_input(
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: Any,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return this rank's tokens of a batch. A collective call, on the host.

    A document begins wherever a position is 0.

    Args:
        inputs: Tokens of the whole batch.
        labels: Labels of the whole batch, already shifted, as torchtitan provides them.
        extra_kwargs: The model's other arguments. "positions" is required, in the shape of inputs.
        cp_mesh: A DeviceMesh, or a Ring.
        device: Not read.
        load_balancer_type: headtail (zigzag), or None (contiguous).
        ptrr_mask_key: Not read.

    Shape:
        inputs: (batch, tokens)
        labels: (batch, tokens)

    Returns:
        This rank's inputs, labels and `extra_kwargs`, in which "attention_masks" is the sequence of each row.

    Raises:
        InputError: Positions are missing, attention masks are present, or the load balancer is unknown; every rank
            raises.
        DisagreementError: The shapes of the batch differ between ranks.
        RingError: Other errors of `ring_of`.

    Example:
        inputs, labels, extra = prepare_context_parallel_input(inputs, labels, extra, mesh, inputs.device)
    """
    ring = ring_of(cp_mesh)
    with ring.refused_by_all():
        if load_balancer_type not in _LAYOUTS:
            raise InputError(f"load_balancer_type={load_balancer_type!r}: a ring supports 'headtail' and None")
        if extra_kwargs.get("attention_masks") is not None:
            raise InputError("extra_kwargs has attention_masks: use RingAttention.Config as inner_attention")
        if extra_kwargs.get("positions") is None:
            raise InputError("extra_kwargs['positions'] is missing; the rotary positions of shards depend on it")
        # Documents are found in whole rows: in a shard, a document that began on another rank has no position 0.
        positions = extra_kwargs["positions"]
        seq = ring.sequence(inputs.shape[1], layout=_LAYOUTS[load_balancer_type])
        rows = tuple(
            seq.with_documents(sorted({0, *starts, seq.length})) for starts in _starts(positions.expand_as(inputs))
        )
        shards = {"positions": seq.shard(positions), "attention_masks": rows}
        prepared = seq.shard(inputs), seq.shard(labels), {**extra_kwargs, **shards}
    # Next, the ranks gather weights. A rank that raised above would leave the others waiting there, so check now.
    ring.check_consistency(f"batch of {tuple(inputs.shape)} tokens, {seq.layout.name}", always=True)
    return prepared


def _starts(positions: Tensor) -> list[list[int]]:
    """Return the first tokens of the documents of each row."""
    return [(row == 0).nonzero()[:, 0].tolist() for row in positions]


def _checked(masks: Any, batch: int) -> Rows:
    if not (isinstance(masks, tuple) and masks and all(isinstance(row, Sequence) for row in masks)):
        raise InputError(
            f"attention_masks is a {type(masks).__name__}; RingAttention takes the sequences that "
            "ringattn.adapters.torchtitan.prepare_context_parallel_input returns"
        )
    if len(masks) != batch:
        with masks[0].ring.refused_by_all():
            raise InputError(f"attention_masks has {len(masks)} rows, the batch has {batch}")
    return masks

"""torchtitan: an inner attention over a ring, and the sharding of its inputs.

`RingAttention` takes the place of torchtitan's inner attentions in a model's config, `RingTrainerMixin` shards batches
in its Trainer and its Validator, `prepare_context_parallel_input` where there is neither; see
docs/embedding-torchtitan.md. The sequences of a batch travel as the model's `attention_masks`, so recomputation finds
them as it finds any argument.
Guarantees: packed documents (positions that restart at 0) do not see each other; lengths need not divide by anything;
masks of FlexAttention and of torchtitan's varlen attention raise, because what they hide is not known here.
Not covered: the loss, which torchtitan counts over the `loss` mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import spmd_types
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from ringattn.adapters.attend import as_autocast, lone_sequence
from ringattn.adapters.context import sequence_of
from ringattn.adapters.groups import close_rings, ring_of
from ringattn.adapters.hosts import local_heads, require_checked
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import activation
from ringattn.sequence import Sequence

__all__ = ["RingAttention", "RingTrainerMixin", "prepare_context_parallel_input"]

CHECKED = ("0.3",)
require_checked("torchtitan", *CHECKED)

Rows = tuple[Sequence, ...]
"""The sequence of each row of a batch, which may be cut into documents each in its own way."""

_LAYOUTS = {"headtail": "zigzag", None: "contiguous"}


class RingAttention(Module):
    """Causal attention over a ring, in place of torchtitan's inner attentions.

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
        """`window_size`: (left, right) tokens besides the query, as in torchtitan's varlen attention; -1 unbounded."""

        window_size: tuple[int, int] = (-1, 0)

    def __new__(cls, config: Config | None = None) -> RingAttention:
        """Under `partial_dtensor` of a class that torchtitan's `apply_cp_to_forward` knows what to do with.

        The other backends refuse that class, and do without this function.
        """
        wrapped = cls is RingAttention and get_spmd_backend() == "partial_dtensor"
        made: RingAttention = super().__new__(_WrappedRingAttention if wrapped else cls)
        return made

    def __init__(self, config: Config) -> None:
        nn.Module.__init__(self)  # ScaledDotProductAttention's sets only what its own forward reads
        self.window_size = config.window_size
        self._cp_ranks = 1

    def parallelize(self, parallel_dims: Any) -> None:
        """As torchtitan's modules do, but that keys and values stay this rank's: torchtitan would gather them.

        Args:
            parallel_dims: torchtitan's ParallelDims.

        Raises:
            UnsupportedError: The backend is `full_dtensor`; or what torchtitan declares of the inputs does not say how
                keys and values are sharded.
        """
        if parallel_dims.spmd_backend == "full_dtensor":
            raise UnsupportedError(
                "spmd_backend='full_dtensor': a ring takes each rank's own tokens, set --parallelism.spmd_backend to "
                "spmd_types (torchtitan's default) or partial_dtensor"
            )
        self._cp_ranks = parallel_dims.cp
        if self._sharding_config is not None:
            self._sharding_config = _of_own_tokens(self._sharding_config)
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
        """Attention of this rank's shards; differentiable.

        DTensors over `cp` that hold this rank's tokens, as torchtitan declares them, are taken at this rank. Those with
        sharded heads too, and results are DTensors then; see `local_heads` for other ones.

        Args:
            q_BLNH: Queries.
            k_BLNH: Keys; they may have fewer heads.
            v_BLNH: Values, like keys.
            attention_masks: What `prepare_context_parallel_input` made. None: the active sequence, see `sequence_of`.
            scale: Factor of the scores. None: 1 / sqrt(head_dim).
            enable_gqa: Not read; fewer heads of keys and values are taken as they are.
            out_transform: Makes the result of out and lse. None: the result is out.
            kwargs: Refused.

        Shape:
            q_BLNH: (batch, tokens, q_heads, head_dim)
            k_BLNH: (batch, tokens, kv_heads, head_dim)
            v_BLNH: (batch, tokens, kv_heads, value_dim)
            lse: (batch, tokens, q_heads)

        Returns:
            (batch, tokens, q_heads, value_dim), or what `out_transform` makes of it and lse.

        Raises:
            InputError: The mask is another one or has other rows, an argument is not known, DTensors are over several
                ranks of `cp` and nothing names the sequence, or what `sequence_of` raises.
            RingError: What `Ring.attention` raises.
        """
        if kwargs:
            raise InputError(f"RingAttention does not know {', '.join(kwargs)}")
        (q, k, v), whole = local_heads((_own_tokens(q_BLNH), _own_tokens(k_BLNH), _own_tokens(v_BLNH)), 2)
        q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
        if attention_masks is None:
            _check_named(q_BLNH, self._cp_ranks)
            rows: Rows = (sequence_of() or lone_sequence(q.shape[1]),) * len(q)
        else:
            rows = _checked(attention_masks, len(q))
        left, right = self.window_size
        options: dict[str, Any] = {"causal": right == 0, "window": (left, right), "scale": scale, "return_lse": True}
        with spmd_types.no_typecheck():  # what comes out is declared in the sharding config, as that of a kernel is
            if len(set(rows)) == 1:
                out, lse = rows[0].ring.attention(q, k, v, rows[0], **options)
            else:
                each = [seq.ring.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], seq, **options)
                        for i, seq in enumerate(rows)]  # fmt: skip
                out, lse = (torch.cat(parts) for parts in zip(*each, strict=True))
        out, lse = whole(out), whole(lse.transpose(1, 2))
        return out if out_transform is None else out_transform(out, lse)


class _WrappedRingAttention(RingAttention, ScaledDotProductAttention):
    """What `RingAttention` makes under `partial_dtensor`."""


def _of_own_tokens(config: ShardingConfig) -> ShardingConfig:
    """The same layouts of queries, keys and values inside as they arrive with, and of their gradients."""
    names, arriving = ("q_BLNH", "k_BLNH", "v_BLNH"), config.in_src_shardings or {}
    if missing := [name for name in names if name not in arriving]:
        raise UnsupportedError(
            f"torchtitan's sharding_config of RingAttention has no in_src_shardings of {', '.join(missing)}: a ring "
            "takes tokens as they lie on the ranks of cp, see torchtitan's set_gqa_inner_attention_local_map"
        )
    gradients = LocalMapConfig(in_grad_placements=tuple(arriving[name] for name in names))
    return replace(config, in_dst_shardings=arriving, local_map=gradients)


def _own_tokens(x: Tensor) -> Tensor:
    """The tokens of this rank, where torchtitan has declared that the mesh `cp` shards them."""
    return x.to_local() if _is_declared(x) else x


def _is_declared(x: Tensor) -> TypeGuard[DTensor]:
    """Whether torchtitan has declared that the mesh `cp` shards the tokens."""
    return isinstance(x, DTensor) and x.device_mesh.mesh_dim_names == ("cp",) and x.placements == (Shard(1),)


def _check_named(q: Tensor, cp_ranks: int) -> None:
    """Raise `InputError` where these are shards and no sequence is active: no ring is open yet that would say so."""
    ranks = q.device_mesh.size() if _is_declared(q) else cp_ranks
    is_in_backward = torch._C._current_graph_task_id() != -1  # which attends over what its forward pass had
    if ranks > 1 and activation() is None and not is_in_backward:
        raise InputError(
            f"attention_masks is None and q is a shard over the {ranks} ranks of cp, which would attend to itself "
            "alone: put ringattn.adapters.torchtitan.RingTrainerMixin before torchtitan's Trainer and its Validator, "
            "or shard batches with ringattn.adapters.torchtitan.prepare_context_parallel_input, not torchtitan's own"
        )


class RingTrainerMixin:
    """Stands before torchtitan's Trainer, and before its Validator: their batches are sharded for `RingAttention`.

    With one rank too, where packed documents are then as far from each other as over many. The backends are
    `spmd_types` and `partial_dtensor`.

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
        """This rank's tokens of a batch, in place of torchtitan's method. A collective call, on the host.

        Args:
            input_dict: The batch: "input", "positions" and what else the model gets.
            labels: Its labels.
            model_parts: Of the Validator; not read. None: this is the Trainer, which counts tokens.

        Shape:
            labels: (batch, tokens)

        Returns:
            This rank's inputs, labels and the model's other arguments.

        Raises:
            UnsupportedError: The trainer compiles the model, or captures CUDA graphs.
            InputError: What `prepare_context_parallel_input` raises.
            RingError: What else `ring_of` raises.
        """
        is_trainer = model_parts is None
        parallelism = self.config.parallelism if is_trainer else self.parallelism
        if is_trainer:
            _refuse(self.config, input_dict["input"])
        extra = {name: value for name, value in input_dict.items() if name != "input"}
        inputs, balancer = input_dict["input"], parallelism.context_parallel_load_balancer
        if self.parallel_dims.cp_enabled:
            ring = ring_of(self.parallel_dims.get_mesh("cp"))
        else:
            ring = lone_sequence(inputs.shape[1]).ring
        inputs, labels, extra = prepare_context_parallel_input(inputs, labels, extra, ring, inputs.device, balancer)
        if is_trainer:
            self.ntokens_seen += labels.numel()
        if parallelism.spmd_backend == "spmd_types":
            inputs, labels, extra = annotate_input_spmd_types(self.parallel_dims, inputs, labels, extra)
        return inputs, labels, extra

    def close(self) -> None:
        """Close the rings, then what the Trainer closes; torchtitan destroys its process groups afterwards.

        Raises:
            RingError: What `Ring.close` raises.
        """
        close_rings()
        super().close()  # type: ignore[misc]  # of the Trainer that this stands before


def _refuse(config: Any, inputs: Tensor) -> None:
    """Raise `UnsupportedError` for what a config asks of the attention that a ring does not do; all ranks have one."""
    if config.compile.enable and "model" in config.compile.components:
        raise UnsupportedError(
            "compile.enable with component 'model': torchtitan compiles each layer as one graph, in which a ring's "
            "sequences have no place; leave it out, or set --compile.components loss"
        )
    if inputs.is_cuda and not config.training.disable_cuda_graphs:
        raise UnsupportedError(
            "CUDA graphs of the whole step: a ring's ranks agree on the host before each call, which a graph does not "
            "repeat; set --training.disable_cuda_graphs"
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
    """This rank's tokens of a batch. A collective call, on the host.

    Documents begin where positions are 0.

    Args:
        inputs: Tokens of the whole batch.
        labels: Labels of the whole batch; torchtitan's, shifted already.
        extra_kwargs: What else the model gets; "positions" is needed, of the shape of inputs.
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
        InputError: There are no positions, there are attention masks already, or the load balancer is not known; every
            rank raises.
        DisagreementError: Batches have other shapes on other ranks.
        RingError: What else `ring_of` raises.

    Example:
        inputs, labels, extra = prepare_context_parallel_input(inputs, labels, extra, mesh, inputs.device)
    """
    ring = ring_of(cp_mesh)
    with ring.refused_by_all():
        if load_balancer_type not in _LAYOUTS:
            raise InputError(f"load_balancer_type={load_balancer_type!r}: a ring knows 'headtail' and None")
        if extra_kwargs.get("attention_masks") is not None:
            raise InputError("attention_masks were made already: take RingAttention.Config as inner_attention")
        if extra_kwargs.get("positions") is None:
            raise InputError("extra_kwargs['positions'] is missing: rotary positions of shards are not known without")
        positions = extra_kwargs["positions"]
        seq = ring.sequence(inputs.shape[1], layout=_LAYOUTS[load_balancer_type])
        rows = tuple(
            seq.with_documents(sorted({0, *starts, seq.length})) for starts in _starts(positions.expand_as(inputs))
        )
        shards = {"positions": seq.shard(positions), "attention_masks": rows}
        prepared = seq.shard(inputs), seq.shard(labels), {**extra_kwargs, **shards}
    # The next thing that ranks do is to gather weights, which would wait for a rank that was refused.
    ring.check_consistency(f"batch of {tuple(inputs.shape)} tokens, {seq.layout.name}", always=True)
    return prepared


def _starts(positions: Tensor) -> list[list[int]]:
    """Where documents begin, row by row."""
    return [(row == 0).nonzero()[:, 0].tolist() for row in positions]


def _checked(masks: Any, batch: int) -> Rows:
    if not (isinstance(masks, tuple) and masks and all(isinstance(row, Sequence) for row in masks)):
        raise InputError(
            f"attention_masks is a {type(masks).__name__}; RingAttention takes what "
            "ringattn.adapters.torchtitan.prepare_context_parallel_input made"
        )
    if len(masks) != batch:
        with masks[0].ring.refused_by_all():
            raise InputError(f"attention_masks has {len(masks)} rows, the batch has {batch}")
    return masks

"""Megatron Core: the `core_attention` of a layer spec, over a ring of the context parallel group.

`RingCoreAttention` replaces `TEDotProductAttention`. Batches are cut by Megatron's `get_batch_on_this_cp_rank`
(zigzag), or if packed, document by document (zigzag in each); see docs/embedding-megatron.md.

Guarantees: a rank's gradients are its part of the sum, for Megatron to reduce over the data and context parallel group.
No document attends to the padding between packed documents.
Megatron's `get_batch_on_this_cp_rank` raises for packed documents that it would shard as one sequence.
Not covered: tensor parallelism, which only reduces the number of heads here; cross attention; attention masks, which
raise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from megatron.core import utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from ringattn.adapters.attend import UNTRACED, as_autocast, lone_sequence
from ringattn.adapters.groups import ring_of
from ringattn.adapters.host_versions import ABSENT, Host
from ringattn.core.layout import Layout
from ringattn.errors import InputError
from ringattn.ring import Ring
from ringattn.sequence import Sequence, check_documents

__all__ = ["RingCoreAttention"]

HOST = Host(
    "megatron-core",
    ("0.16", "0.17", "0.18", "0.19"),
    # The layer spec passes the arguments of Megatron's own class.
    parameters={
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__": (
            "config", "layer_number", "attn_mask_type", "attention_type", "attention_dropout", "softmax_scale",
            "cp_comm_type", "pg_collection",
        ),
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward": (
            "query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias", "packed_seq_params",
        ),
    },
    # The layout of a ring must be the one in which Megatron shards a batch. Since 0.18, the first function calls one of
    # the next two for packed batches, and one of the last two, which `_refuse_documents` wraps, for others.
    sources={
        "megatron.core.utils:get_batch_on_this_cp_rank": ("5dea4524", "9751a048", "1979b132"),
        "megatron.core.utils:get_sft_batch_on_this_cp_rank": (ABSENT, "1860fc46"),
        "megatron.core.utils:_get_batch_on_this_cp_rank_per_document_balancing": (ABSENT, "5086dda5"),
        "megatron.core.utils:get_pretrain_batch_on_this_cp_rank": (ABSENT, "0d44f5ec"),
        "megatron.core.utils:_get_batch_on_this_cp_rank_per_sequence_balancing": (ABSENT, "31d14119"),
        "megatron.core.transformer.utils:is_layer_window_attention": ("d723bc57",),
    },
)  # fmt: skip
HOST.require()

_CUTS_WHOLE_ROWS = "get_pretrain_batch_on_this_cp_rank", "_get_batch_on_this_cp_rank_per_sequence_balancing"
"""Megatron's functions that shard whole rows in zigzag, in 0.18 and since 0.19."""

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.padding_causal: True,
           AttnMaskType.no_mask: False, AttnMaskType.padding: False}  # fmt: skip
_SCHEDULES = {None: "auto", "p2p": "ring", "all_gather": "all_gather", "a2a": "ulysses",
              "a2a+p2p": "ulysses_ring"}  # fmt: skip

_SCALES_MTP = hasattr(multi_token_prediction, "process_mtp_loss")
"""Whether Megatron scales the losses of several tokens ahead by the tokens of one rank: since 0.17."""


class RingCoreAttention(MegatronModule):
    """Self-attention of a layer over the ring of its context parallel group; see Megatron for the arguments.

    The ring of `pg_collection.cp` is opened at the first forward and stays open, see `groups.ring_of`.

    Args:
        config: The config of the transformer.
        layer_number: The number of the layer, for `window_attn_skip_freq`.
        attn_mask_type: The mask type if forward gets none.
        attention_type: Must be "self".
        attention_dropout: Must be 0. None: the config's value, which must be 0.
        softmax_scale: Factor of the scores. None: 1 / sqrt(head_dim).
        cp_comm_type: None (the schedule auto), p2p (ring), all_gather, a2a (ulysses) or a2a+p2p
            (ulysses_ring).
        pg_collection: The groups `cp` and `tp`. None: Megatron's own.
        k_channels: Not read. Latent attention (MLA) passes it, but the tensors show the dimension.
        v_channels: Not read, like k_channels.

    Raises:
        InputError: There is dropout or cross attention, `cp_comm_type` or `softmax_type` is unknown, or the config has
            `qk_clip` or `log_max_attention_logit`. From then on, Megatron's `get_batch_on_this_cp_rank` raises it for
            several packed documents that it would shard as one sequence.

    Example:
        spec.submodules.self_attention.submodules.core_attention = RingCoreAttention
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        _refuse_documents()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise InputError(f"attention_dropout={dropout}: this class has no dropout; set attention_dropout=0.0")
        if attention_type != "self":
            raise InputError(f"attention_type={attention_type!r}: RingCoreAttention is for self-attention")
        if cp_comm_type not in _SCHEDULES:
            known = ", ".join(map(str, _SCHEDULES))
            raise InputError(f"cp_comm_type={cp_comm_type!r} is not known; choose {known}")
        if options := [name for name in ("qk_clip", "log_max_attention_logit") if getattr(config, name, False)]:
            raise InputError(
                f"{options[0]}: attention over a ring does not report its largest logit; set {options[0]}=False"
            )
        # Without groups for this layer, Megatron's global state has them.
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group, self.tp_group = groups.cp, groups.tp
        self.attn_mask_type, self.softmax_scale = attn_mask_type, softmax_scale
        self.schedule = _SCHEDULES[cp_comm_type]
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_size: tuple[int, int] = config.window_size if windowed else (-1, -1)
        self.softmax_offset = self._sinks(config.num_attention_heads // self.tp_group.size())

    def _sinks(self, heads: int) -> Tensor | None:
        """Return the sinks of the config's `softmax_type`, (heads,): logits in the softmax that have no value."""
        kind = self.config.softmax_type
        if kind == "vanilla":
            return None
        # Like Megatron's own parameters, on the current GPU if there is one.
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        sinks = torch.zeros(heads, dtype=self.config.params_dtype, device=device)
        if kind == "off-by-one":
            return sinks
        if kind != "learnable":
            raise InputError(f"softmax_type={kind!r} is not known; choose vanilla, off-by-one or learnable")
        weight = nn.Parameter(sinks)
        if self.config.perform_initialization:
            self.config.init_method(weight)
        return weight

    # DotProductAttention has the same parameter, `softmax_offset`, so distributed checkpoints of the two match.
    sharded_state_dict = DotProductAttention.sharded_state_dict

    @torch.compiler.disable(reason=UNTRACED)
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute attention of this rank's zigzag shards; differentiable.

        Args:
            query: Queries.
            key: Keys; they may have fewer heads.
            value: Values, like keys.
            attention_mask: Must be None.
            attn_mask_type: causal or no_mask; if packed (thd), also padding_causal or padding. None: the layer's type.
            attention_bias: Must be None.
            packed_seq_params: The documents of the whole group. It may have a `cp_group`, and the number of its ranks
                as `local_cp_size`. Size 1 without a group means this rank only. None: a batch of sequences.

        Shape:
            query: (tokens, batch, heads, dim), or packed (tokens, heads, dim)
            key: (tokens, batch, kv_heads, dim), or packed (tokens, kv_heads, dim)
            value: (tokens, batch, kv_heads, value_dim), or packed (tokens, kv_heads, value_dim)

        Returns:
            (tokens, batch, heads * value_dim), or packed (tokens, heads * value_dim).

        Raises:
            InputError: There is a mask or a bias, the mask type is not supported, the number of ranks of the group is
                not `local_cp_size`, tokens or documents do not form two equal chunks per rank, or there is
                `mtp_num_layers` over several ranks since Megatron 0.17, or with padded documents; every rank raises.
            RingError: Other errors of `ring_of` and `Ring.attention`.
        """
        mask = attn_mask_type or self.attn_mask_type
        # Params of other formats only name the group that has cut the batch. Only `_ring` reads them.
        params = packed_seq_params if packed_seq_params and packed_seq_params.qkv_format == "thd" else None
        packed = params is not None
        ring = self._ring(packed_seq_params)
        with ring.refused_by_all():
            _check_size(ring, packed_seq_params)
            if attention_mask is not None or attention_bias is not None:
                raise InputError(
                    "attention_mask and attention_bias must be None: RingCoreAttention masks by attn_mask_type and by "
                    "packed_seq_params (--no-create-attention-mask-in-dataloader)"
                )
            if _SCALES_MTP and self.config.mtp_num_layers and ring.world_size > 1:
                raise InputError(
                    f"mtp_num_layers={self.config.mtp_num_layers}: since 0.17, Megatron Core scales this loss by the "
                    "tokens of each rank, so it would differ from one process; set mtp_num_layers=None, or install "
                    "megatron-core 0.16"
                )
            if params is not None and self.config.mtp_num_layers and _is_padded(params):
                raise InputError(
                    "mtp_num_layers with padded documents: Megatron shifts tokens and labels at the documents without "
                    "padding (cu_seqlens_q), but the batch has them with padding; use lengths that are multiples of "
                    "2 * cp"
                )
            if mask not in _CAUSAL or (mask.name.startswith("padding") and not packed):
                raise InputError(
                    f"attn_mask_type={mask.name}: a ring supports causal and no_mask, and padding if packed (thd)"
                )
            seq = _sequence(ring, query.shape[0]) if params is None else _packed_sequence(ring, params)
        causal, (left, right) = _CAUSAL[mask], self.window_size
        # Megatron has tokens first, and packed batches have no batch dimension.
        q, k, v = (as_autocast(x[None] if packed else x.transpose(0, 1)) for x in (query, key, value))
        out = seq.ring.attention(
            q, k, v, seq, causal=causal,
            # As in TransformerEngine, a causal window ends at the query, whatever its right side is.
            window=(left, 0 if causal else right), scale=self.softmax_scale, sinks=self._offset(query),
            schedule=self.schedule,
        )  # fmt: skip
        return out[0].flatten(1) if packed else out.transpose(0, 1).flatten(2)

    def _ring(self, params: PackedSeqParams | None) -> Ring:
        """Return the ring of the batch's group, or of the layer's group. A batch for one rank may have no group."""
        group = None if params is None else params.cp_group
        if params is not None and group is None and params.local_cp_size == 1:
            return lone_sequence(0).ring
        return ring_of(self.cp_group if group is None else group)

    def _offset(self, query: Tensor) -> Tensor | None:
        # Off-by-one sinks are neither a parameter nor a buffer, so `module.to` leaves them behind.
        return None if self.softmax_offset is None else self.softmax_offset.to(query.device)


def _refuse_documents() -> None:
    """Replace Megatron's functions that shard whole rows, once, by functions that raise for packed documents."""
    for name in _CUTS_WHOLE_ROWS:
        cut = getattr(utils, name, None)
        if cut is not None and not hasattr(cut, "__wrapped__"):
            setattr(utils, name, _without_documents(cut))


def _without_documents(cut: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(cut)
    def checked(batch: dict[str, Any], cp_group: Any) -> Any:
        cuts = batch.get("cu_seqlens") if batch.get("cu_seqlens_padded") is None else batch["cu_seqlens_padded"]
        # Megatron fills `cu_seqlens` with copies of the length. The row of one document has the expected layout.
        documents = 1 if cuts is None else cuts.unique().numel() - 1
        if documents > 1 and torch.distributed.get_world_size(cp_group) > 1:
            raise InputError(
                f"a packed batch of {documents} documents would be sharded as one sequence, but attention over a ring "
                "(and Megatron's rotary embeddings) expect shards of each document: leave out "
                "use_per_sequence_balancing (--dataloader-inter-document-masking), or with is_hybrid_cp, pass one "
                "document"
            )
        return cut(batch, cp_group=cp_group)

    return checked


def _check_size(ring: Ring, params: PackedSeqParams | None) -> None:
    """Raise `InputError` if the batch was cut for another number of ranks."""
    if params is not None and params.local_cp_size not in (None, ring.world_size):
        raise InputError(
            f"packed_seq_params is for local_cp_size={int(params.local_cp_size)} ranks and its group has "
            f"{ring.world_size}: set the cp_group that cut the batch (local_cp_size=1 needs no group)"
        )


def _is_padded(params: PackedSeqParams) -> bool:
    """Return whether documents of a packed batch are followed by padding."""
    padded = params.cu_seqlens_q_padded
    return padded is not None and not torch.equal(padded, params.cu_seqlens_q)


def _sequence(ring: Ring, tokens: int) -> Sequence:
    if ring.world_size > 1 and tokens % 2:
        raise InputError(f"{tokens} local tokens do not form two equal chunks; pad sequences to a multiple of 2 * cp")
    return ring.sequence(tokens * ring.world_size, layout="zigzag")


def _packed_sequence(ring: Ring, params: PackedSeqParams) -> Sequence:
    """Return the sequence of all documents of the group, each followed by its padding."""
    real = check_documents(params.cu_seqlens_q, None)
    padded = real if params.cu_seqlens_q_padded is None else check_documents(params.cu_seqlens_q_padded, None)
    # Megatron cuts every document into 2 * cp chunks, and gives rank r the chunks r and 2 * cp - 1 - r.
    chunks = 2 * ring.world_size
    if ring.world_size > 1 and any(cut % chunks for cut in padded):
        raise InputError(f"packed documents {padded} must each be padded to a multiple of 2 * cp = {chunks} tokens")
    # A document begins at its padded start and has its real length. `padded` also has the end of the last document.
    ends = [start + stop - begin for start, (begin, stop) in zip(padded, pairwise(real), strict=False)]
    # Padding becomes separate documents, so that no token of a text attends to it. The layout cuts at padded lengths.
    documents = tuple(sorted({*padded, *ends}))
    return Sequence(ring, Layout("per_document", padded[-1], ring.world_size, padded), documents)

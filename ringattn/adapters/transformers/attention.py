"""The attention function that transformers calls, with the checks of its arguments.

Guarantees: attention is the one that the module and its mask describe, over the active sequence or locally, or an error
says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ringattn.adapters.attend import as_autocast, attend
from ringattn.adapters.context import sequence_of
from ringattn.adapters.dropout import drawn_seed, refuse_without_seed, seed_from
from ringattn.adapters.hosts import local_sinks
from ringattn.adapters.transformers.calls import PART, attending_call, current_call
from ringattn.adapters.transformers.checks import check_encoder, check_tokens
from ringattn.adapters.transformers.compressing import (
    attend_compressed,
    compression_of,
    with_compressed_keys,
)
from ringattn.adapters.transformers.encoder_decoder import BIASED, CROSS, attend_with_bias
from ringattn.adapters.transformers.host_masks import MaskSpec
from ringattn.adapters.transformers.inputs import refuse_inputs
from ringattn.adapters.transformers.latents import expanded, has_latents, is_sharded, latent_attention
from ringattn.adapters.transformers.selecting import (
    BlockChoice,
    attend_blocks,
    attend_selected,
    refuse_dropout,
    refuse_other_selection,
    refuse_unprepared,
    refuse_without_latents,
    selected,
    selected_blocks,
)
from ringattn.adapters.transformers.table_masks import Rows, TableMask, table_mask
from ringattn.errors import InputError, UnsupportedError
from ringattn.masks import Slices
from ringattn.runtime.activation import activate, active_sequence, attended
from ringattn.sequence import Sequence


@torch.compiler.disable
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskSpec | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention over the active sequence, or locally: the function for transformers' `AttentionInterface`.

    Args:
        module: The attention module of the model.
        query: This rank's shard of the active sequence.
        key: Like query.
        value: Like query.
        attention_mask: The result of `mask_spec`, or for local attention a mask tensor.
        dropout: Probability of dropping each weight. Over a ring, the seed is derived from the activation's seed.
        scaling: Factor of the scores. None: 1 / sqrt(d_k).
        kwargs: Other arguments from transformers: softcap, s_aux, position_ids and others.

    Shape:
        query: (batch, q_heads, tokens, d_k)
        key: (batch, kv_heads, tokens, d_k)
        value: (batch, kv_heads, tokens, d_v)

    Returns:
        (batch, tokens, q_heads, d_v) in query's dtype, or autocast's where that is on, and None for the weights.

    Raises:
        InputError: A mask, an option or the number of tokens is refused, on every rank; or nothing is active while a
            ring of several ranks is open.
    """
    latent, compression = has_latents(module, value), compression_of(module)
    if is_tower(module, query, attention_mask):
        # Local on purpose: without this, the activation would report that nothing attended over the ring.
        attended()
        with activate(None):
            return _attend_locally(module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    active = active_sequence()
    if active is not None and getattr(module, CROSS, False):
        return _attend_to_encoder(active, module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    if active is not None and isinstance(attention_mask, MaskSpec):
        with active.ring.refused_by_all():
            attention_mask.refuse()  # first: for a decoding step, the check of token counts would give a wrong reason
    seq = sequence_of()
    if latent and (seq is None or is_sharded(module)):
        latent = False
        key, value = expanded(module, key, value)
    indices, blocks = kwargs.get("indices"), kwargs.get("block_indices")
    refuse_other_selection(module, kwargs)
    if seq is None:
        if compression is not None:
            key, attention_mask = with_compressed_keys(compression, key, attention_mask)
            value = key
        if indices is not None:
            attention_mask = selected(attention_mask, indices, key.shape[2])
        if blocks is not None:
            attention_mask = selected_blocks(module, attention_mask, blocks, key.shape[2], query.dtype)
        return _attend_locally(module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    with seq.ring.refused_by_all():
        spec: MaskSpec | TableMask
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and not is_cross_attention(module):
            spec = table_mask(attention_mask, query.shape[0], seq, current_call())
        else:
            spec = check_mask(module, attention_mask)
        if indices is not None and not latent:
            refuse_without_latents(module)
        if blocks is not None and not isinstance(blocks, BlockChoice):
            refuse_unprepared(module)
        if indices is not None or blocks is not None or compression is not None:
            refuse_dropout(dropout)
        refuse_options(module, dropout, kwargs)
        check_tokens(seq, query.shape[2])
        if spec.causal and isinstance(seq.mask, Slices):
            seq.mask.check_causal("pass the pairs as an attention_mask of four dimensions to the model instead")
        if is_cross_attention(module):
            check_encoder(seq, spec.padding)
        seed = drawn_seed(seq.ring) if dropout else None
    call = attending_call()
    # transformers has heads before tokens; a ring has tokens first.
    q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
    sinks = kwargs.get("s_aux")
    options = {"causal": spec.causal, "window": spec.window, "scale": scaling, "softcap": kwargs.get("softcap"),
               "sinks": None if sinks is None else local_sinks(sinks, q.shape[2]).to(q.dtype),
               "dropout_p": dropout}  # fmt: skip
    ids = kwargs.get("position_ids")  # some models pass None to attention
    if ids is None and call is not None:
        ids = call.arguments.get("position_ids")
    if compression is not None:
        ranges = spec.key_ranges(module, ids, may_have_window=True)
        assert ranges is not None and spec.window is not None
        attended()
        with seq.ring.refused_by_all():
            compression.refuse(seq, ranges[1])
        scale = cast(float, scaling)
        return attend_compressed(seq, q, k[:, :, 0], compression, spec.window[0], scale, options["sinks"]), None
    if indices is not None or blocks is not None:
        ranges = spec.key_ranges(module, ids)
        assert ranges is not None
        attended()
        if blocks is not None:
            with seq.ring.refused_by_all():
                blocks.refuse(seq, ranges[1])
            return attend_blocks(seq, q, k, v, blocks, ranges[1:], cast(float, scaling)), None
        sinks, scale = options["sinks"], q.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_selected(module, seq, q, k[:, :, 0], v[:, :, 0], indices, ranges[1:], scale, sinks), None
    # The inputs are checked once for each mask, which all layers of one kind share.
    rows = spec.rows(seq, lambda groups: refuse_inputs(spec, groups, seq, module, ids, kwargs, call))
    if (bias := kwargs.get("position_bias")) is not None:
        options = {"causal": spec.causal, "scale": scaling, "dropout_p": dropout, "bias": bias}
        return _by_rows(rows, q, k, v, seed, options, attend_with_bias).contiguous(), None
    function = latent_attention(module) if latent else attend
    return _by_rows(rows, q, k, v, seed, options, function).contiguous(), None


def _attend_to_encoder(
    seq: Sequence, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, dropout: float,
    scaling: float | None, kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Return attention of the decoder, over `seq`, to an encoder: over the ring, or locally to a replicated encoder."""
    if seq.encoder is None:
        with activate(None):
            return _attend_locally(module, query, key, value, mask, dropout, scaling, kwargs)
    with seq.ring.refused_by_all():
        spec = check_mask(module, mask)
        # The bias of T5's cross attention is zero: it has no table.
        refuse_options(module, dropout, {**kwargs, "position_bias": None})
        check_tokens(seq, query.shape[2])
        check_tokens(seq.encoder, key.shape[2], "the encoder's output")
        seed = drawn_seed(seq.ring) if dropout else None
    attending_call()
    q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))

    def over_the_ring(group_seq: Sequence, *tensors: Tensor, **options: Any) -> Tensor:
        return attend(group_seq, *tensors, kv_seq=group_seq.encoder, **options)

    options = {"scale": scaling, "dropout_p": dropout}
    return _by_rows(spec.rows_of_encoder(seq, seq.encoder), q, k, v, seed, options, over_the_ring).contiguous()


def _by_rows(
    rows: Rows, q: Tensor, k: Tensor, v: Tensor, seed: int | None, options: dict[str, Any],
    function: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """Attend to each group of rows with equal documents in turn, and put the rows back in order.

    `function`: `attend`, or a function with its parameters. `seed`: the dropout seed. Each group gets a seed derived
    from it, because its rows are numbered from 0 again.
    """
    if len(rows) == 1:
        return function(rows[0][0], q, k, v, dropout_seed=seed, **options)
    seeds = [None if seed is None else seed_from(seed, part) for part in range(len(rows))]
    parts = [function(group_seq, *(x[list(members)] for x in (q, k, v)), dropout_seed=group_seed, **options)
             for (group_seq, members), group_seed in zip(rows, seeds, strict=True)]  # fmt: skip
    # `order` maps rows of the result to rows of the batch; its argsort is the inverse.
    order = torch.tensor([row for _, members in rows for row in members], device=q.device)
    return torch.cat(parts)[order.argsort()]


def _attend_locally(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, dropout: float, scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Return local attention, (batch, tokens, heads, dim): by `sdpa`, or written out for softcap and sinks."""
    from transformers import AttentionInterface

    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    plain = softcap is None and sinks is None
    if isinstance(mask, MaskSpec):
        is_causal = mask.causal
        mask = mask.local(may_be_none=plain)
        # Some versions pass is_causal to torch unchanged. torch allows no mask with it, and gives a single query after
        # a cache the first key only. So set it only where it is right.
        kwargs = {**kwargs, "is_causal": is_causal and mask is None and q.shape[2] > 1}
    if plain:
        sdpa = cast(Any, AttentionInterface()["sdpa"])
        return sdpa(module, q, k, v, mask, dropout=dropout, scaling=scaling, **kwargs)[0]
    sinks = None if sinks is None else local_sinks(sinks, q.shape[1])
    # Written out like transformers' eager attention: grouped heads repeated, softcap, mask, sinks as one more column.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if isinstance(mask, Tensor):
        mask = mask[..., : k.shape[2]]
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    # The column of the sinks has taken its weight in the softmax, and has no value to add.
    weights = nn.functional.dropout(scores.softmax(-1), dropout)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).contiguous()


# --- Parts of a model: text and towers --------------------------------------------------------------------------------


def is_tower(module: nn.Module, query: Tensor, mask: object) -> bool:
    """Return whether an attention module belongs to a tower (images, sound), whose whole input every rank has.

    `prepare` marks the modules of a model. An unmarked module is a tower if it looks like one and its number of tokens
    differs from this rank's shard. Raises `InputError` on all ranks if it looks like one and the numbers are equal.
    """
    if (part := getattr(module, PART, None)) is not None:
        return bool(part == "tower")
    if not _looks_like_tower(module, mask):
        return False
    if torch._C._current_graph_task_id() != -1:  # recomputation of a forward pass that was checked
        return True
    seq = active_sequence()
    if seq is None:
        return False  # `sequence_of` decides whether attention may be local
    if seq.ring.world_size > 1 and query.shape[2] == seq.counts[seq.ring.rank]:
        with seq.ring.refused_by_all():
            raise InputError(
                f"rank {seq.ring.rank}: {type(module).__name__} may be a tower with a whole image, or text with this "
                f"rank's {query.shape[2]} tokens: call ringattn.adapters.transformers.prepare(model) once, which "
                "distinguishes them, or call a tower inside `with ring.activate(None):`"
            )
    return True


def _looks_like_tower(module: nn.Module, mask: object) -> bool:
    # The towers of transformers attend in both directions.
    if getattr(module, "is_causal", False) or (isinstance(mask, MaskSpec) and mask.causal):
        return False
    config: Any = getattr(module, "config", None)
    kind = str(getattr(config, "model_type", ""))
    has_input_size = any(hasattr(config, name) for name in ("patch_size", "image_size", "num_mel_bins"))
    return has_input_size or any(word in kind for word in ("vision", "audio", "siglip", "clip_vision"))


# --- Checks -----------------------------------------------------------------------------------------------------------


def check_mask(module: nn.Module, mask: object) -> MaskSpec:
    """Return the mask. Raises UnsupportedError unless `mask_spec` made it."""
    if not isinstance(mask, MaskSpec):
        raise UnsupportedError(
            f"{type(module).__name__} got {'no mask' if mask is None else f'a {type(mask).__name__} as its mask'}, "
            "not one that transformers made for the attention implementation; its meaning over ranks is not known"
        )
    return mask


def refuse_options(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise for dropout without a seed, for attention weights, and for a bias of the scores."""
    if dropout:
        refuse_without_seed(f"attention dropout is {dropout}", _without_dropout(module, dropout))
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise UnsupportedError("output_attentions: ring attention never stores attention weights; leave it out")
    if kwargs.get("position_bias") is not None and not hasattr(module, BIASED):
        raise UnsupportedError("this model adds a position bias to its scores, which ring attention does not support")


def _without_dropout(module: nn.Module, dropout: float) -> str:
    """Return advice that names the entry of the configuration that sets this dropout."""
    config = getattr(module, "config", None)
    entries = {} if config is None else vars(config)
    matches = [name for name, value in entries.items() if "drop" in name and value == dropout]
    names = [name for name in matches if "att" in name] or matches or ["attention_dropout"]
    return f"make the model with {' or '.join(f'config.{name}=0.0' for name in names)}, or call model.eval()"


def is_cross_attention(module: nn.Module) -> bool:
    """Return whether the module's keys come from an encoder, by its attribute or its class name."""
    return bool(getattr(module, "is_cross_attention", "CrossAttention" in type(module).__name__))

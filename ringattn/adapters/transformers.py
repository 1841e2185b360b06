"""Ring attention for models of Hugging Face transformers, by its public hooks: attention `ringattn` and its masks.

    ringattn.adapters.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ringattn")
    ringattn.adapters.transformers.prepare(model)
    with ring.activate(seq):
        loss = model(input_ids=seq.shard(tokens), position_ids=seq.positions()[None], ...).loss

Guarantees: what one process would compute with `attn_implementation="eager"`, or an error that says what to do: masks,
windows, softcap, sinks and documents are taken or refused, positions are compared with the sequence's. Without a
sequence it attends locally, as `sdpa` does, where `context.sequence_of` allows that.
Runs with the versions of transformers that `transformers_versions` names.
"""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ringattn.adapters.alike import refused_by_all
from ringattn.adapters.attend import as_autocast, attend
from ringattn.adapters.context import sequence_of
from ringattn.adapters.dropout import drawn_seed, seed_from
from ringattn.adapters.liger import know_liger
from ringattn.adapters.peft import base_of
from ringattn.adapters.tensor_parallel import local_sinks
from ringattn.adapters.transformers_calls import attending, watch
from ringattn.adapters.transformers_checks import (
    check_encoder,
    check_tokens,
    is_cross_attention,
    known_mask,
    refuse_alibi,
    refuse_inputs,
    refuse_options,
)
from ringattn.adapters.transformers_images import watch_images
from ringattn.adapters.transformers_mask import MaskSpec, Rows, mask_spec
from ringattn.adapters.transformers_memory import save_memory
from ringattn.adapters.transformers_rotary import watch_rotary
from ringattn.adapters.transformers_towers import is_tower, mark_parts, refuse_text_towers
from ringattn.adapters.transformers_versions import require_known
from ringattn.errors import UnsupportedError
from ringattn.runtime.activation import activate, active_sequence, attended

__all__ = ["prepare", "register"]

NAME = "ringattn"
"""What `attn_implementation` has to be."""

prepared_models: WeakSet[nn.Module] = WeakSet()


def register() -> None:
    """Make `attn_implementation="ringattn"` known to transformers: attention and masks. Idempotent.

    Raises:
        UnsupportedError: The installed transformers is none of those that this adapter was checked with.

    Example:
        register()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ringattn")
    """
    require_known()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_spec)


def prepare(
    model: Any, *, tiled_mlp: int | None = None, chunked_loss: int | None = None, offload_checkpoints: bool = False
) -> Any:
    """Lets the text part of a model attend through the ring, and checks the inputs of its every call.

    Towers for images and sound, which have configurations of their own, keep their attention: they are not sharded.
    Under an active sequence of several ranks a call needs the position_ids of this rank's tokens, and beside labels
    shift_labels and num_items_in_batch, and no loss of routers; else the call raises `InputError`.

    Args:
        model: A PreTrainedModel of transformers, or a PeftModel around one. It is changed in place.
        tiled_mlp: Tokens in a feed-forward at once, computed again in backward. None: all, kept.
        chunked_loss: Tokens whose logits exist at once where there are labels; no logits are returned then. None: all.
        offload_checkpoints: Layers are checkpointed, and their inputs wait in host memory.

    Returns:
        The model.

    Raises:
        InputError: One of the numbers is below 1, or another than the model was prepared with.
        UnsupportedError: The model's attention cannot be set, or adds ALiBi by itself, or it has a text encoder with a
            configuration of its own, or adapters of PEFT that do not work on one token at a time;
            its feed-forwards are experts, or its loss is another than transformers' causal one; the installed
            transformers is none of those that this adapter was checked with.

    Example:
        model = prepare(AutoModelForCausalLM.from_pretrained(name))
        with ring.activate(seq):
            logits = model(input_ids=seq.shard(tokens), position_ids=seq.positions()[None]).logits
    """
    register()
    whole, model = model, base_of(model)
    text = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    refuse_alibi(model, text)
    if text is model.config:
        model.set_attn_implementation(NAME)
    else:
        names = [name for name in model.config.sub_configs if getattr(model.config, name) is text]
        model.set_attn_implementation(dict.fromkeys(names, NAME))
    if text._attn_implementation != NAME:
        raise UnsupportedError(
            f"{type(model).__name__} did not let its attention be set to {NAME!r}; only models whose attention goes "
            "through transformers' AttentionInterface can attend through a ring"
        )
    mark_parts(model, text)
    refuse_text_towers(model)
    know_liger(model)
    watch(model)  # a model that was prepared before may have got another forward since
    if model not in prepared_models:
        watch_rotary(model)
        watch_images(model)
        prepared_models.add(model)
    save_memory(model, tiled_mlp, chunked_loss, offload_checkpoints)
    return whole


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
    """An attention function for transformers' `AttentionInterface`, over the active sequence or locally.

    Args:
        module: The attention module of the model.
        query: This rank's shard of the active sequence.
        key: Like query.
        value: Like query.
        attention_mask: What `mask_spec` made, or a mask tensor of local attention.
        dropout: Each weight is dropped with this probability, over a ring by a seed drawn from the activation's.
        scaling: Factor of the scores. None: 1 / sqrt(d_k).
        kwargs: What else transformers passes: softcap, s_aux, position_ids and others. Unknown ones are refused.

    Shape:
        query: (batch, q_heads, tokens, d_k)
        key: (batch, kv_heads, tokens, d_k)
        value: (batch, kv_heads, tokens, d_v)

    Returns:
        (batch, tokens, q_heads, d_v) in query's dtype, under autocast in its, and None for the weights.

    Raises:
        InputError: A mask, an option or a number of tokens is refused, on every rank; or nothing is active while a ring
            of several ranks is open.
    """
    if is_tower(module, query, attention_mask):
        attended()
        with activate(None):
            return _locally(module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    active = active_sequence()
    if active is not None and isinstance(attention_mask, MaskSpec):
        with refused_by_all(active.ring):
            attention_mask.refuse()  # before the number of tokens of a decoding step is called wrong
    seq = sequence_of()
    if seq is None:
        return _locally(module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    with refused_by_all(seq.ring):
        spec = known_mask(module, attention_mask)
        refuse_options(module, dropout, kwargs)
        check_tokens(seq, query.shape[2])
        if is_cross_attention(module):
            check_encoder(seq, spec.padding)
        seed = drawn_seed(seq.ring) if dropout else None
    call = attending()
    q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
    sinks = kwargs.get("s_aux")
    options = {"causal": spec.causal, "window": spec.window, "scale": scaling, "softcap": kwargs.get("softcap"),
               "sinks": None if sinks is None else local_sinks(sinks, q.shape[2]).to(q.dtype),
               "dropout_p": dropout}  # fmt: skip
    ids = kwargs.get("position_ids")  # some models hand on None
    if ids is None and call is not None:
        ids = call.positions
    rows = spec.rows(seq, lambda found: refuse_inputs(spec, found, seq, module, ids, kwargs, call))
    return _by_rows(rows, q, k, v, seed, options).contiguous(), None


def _by_rows(rows: Rows, q: Tensor, k: Tensor, v: Tensor, seed: int | None, options: dict[str, Any]) -> Tensor:
    """Rows with other documents are attended one after the other.

    `seed`: of dropout; each part has its own, for its rows count from 0.
    """
    if len(rows) == 1:
        return attend(rows[0][0], q, k, v, dropout_seed=seed, **options)
    seeds = [None if seed is None else seed_from(seed, part) for part in range(len(rows))]
    parts = [attend(cut, *(x[list(mine)] for x in (q, k, v)), dropout_seed=one, **options)
             for (cut, mine), one in zip(rows, seeds, strict=True)]  # fmt: skip
    order = torch.tensor([row for _, mine in rows for row in mine], device=q.device)
    return torch.cat(parts)[order.argsort()]


def _locally(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, dropout: float, scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attention of this process alone, (batch, tokens, heads, dim): `sdpa`, or by the definition where it cannot."""
    from transformers import AttentionInterface

    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    plain = softcap is None and sinks is None
    if isinstance(mask, MaskSpec):
        is_causal = mask.causal
        mask = mask.local(may_be_none=plain)
        # Some versions hand it to torch as it is, which takes no mask beside it, and shows a lone query the first key.
        kwargs = {**kwargs, "is_causal": is_causal and mask is None and q.shape[2] > 1}
    if plain:
        sdpa = cast(Any, AttentionInterface()["sdpa"])
        return sdpa(module, q, k, v, mask, dropout=dropout, scaling=scaling, **kwargs)[0]
    sinks = None if sinks is None else local_sinks(sinks, q.shape[1])
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
    weights = nn.functional.dropout(scores.softmax(-1), dropout)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).contiguous()

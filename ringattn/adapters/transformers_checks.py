"""What attention of a transformers model refuses, because one process would compute something else.

Guarantees: each message says what to do instead. Raises on this rank: that the others hear of it is the caller's.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ringattn.adapters.dropout import refuse_without_seed
from ringattn.adapters.transformers_mask import MaskSpec, Rows
from ringattn.errors import InputError, UnsupportedError
from ringattn.sequence import Sequence


class Watched(Protocol):
    """What is known of the call of a prepared model, see `transformers_calls.Call`."""

    has_chosen: bool
    is_placed: bool


LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "moe"}
"""Layers, in `config.layer_types`, that mix tokens by softmax attention only, or not at all."""


def known_mask(module: nn.Module, mask: object) -> MaskSpec:
    if not isinstance(mask, MaskSpec):
        raise UnsupportedError(
            f"{type(module).__name__} got {'no mask' if mask is None else 'a mask of its own'}, not one that "
            "transformers made for the attention implementation; its meaning over ranks is not known"
        )
    return mask


def refuse_alibi(model: nn.Module, text: Any) -> None:
    """Raise `UnsupportedError` for a model of this configuration that adds ALiBi to its scores by itself.

    Such models also take `attn_implementation="ringattn"` as they are made, and attend as ever.
    """
    kind = getattr(text, "model_type", "")
    if kind in ("bloom", "mpt") or (kind == "falcon" and getattr(text, "alibi", False)):
        rounded = ", and rounds its biases to bfloat16, so that they are no multiples of distances" * (kind == "falcon")
        raise UnsupportedError(
            f"{type(model).__name__} adds ALiBi to its scores inside of its own attention modules{rounded}; "
            "transformers' AttentionInterface does not reach them, nor has it another hook there. Give the model "
            "attention modules that call ring.attention(q, k, v, seq, causal=True, alibi_slopes=...), see "
            "docs/embedding-transformers.md, or take a model with rotary positions"
        )


def refuse_options(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        refuse_without_seed(f"attention dropout is {dropout}", _without_dropout(module, dropout))
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise UnsupportedError("output_attentions: ring attention never holds attention weights; leave it out")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError("this model adds a bias to its scores, which ring attention cannot")


def _without_dropout(module: nn.Module, dropout: float) -> str:
    """What to set, by the names that configurations have for it."""
    config = getattr(module, "config", None)
    known = {} if config is None else vars(config)
    same = [name for name, value in known.items() if "drop" in name and value == dropout]
    names = [name for name in same if "att" in name] or same or ["attention_dropout"]
    return f"make the model with {' or '.join(f'config.{name}=0.0' for name in names)}, or call model.eval()"


def check_nobody_is_empty(seq: Sequence) -> None:
    """Raise `InputError`, the same on every rank, unless every rank has tokens of `seq`."""
    if min(seq.counts) == 0:
        raise InputError(
            f"rank {seq.counts.index(0)} has no token of {seq!r}, and models cannot be called with none; use longer "
            "texts or fewer ranks, or pack several texts as documents"
        )


def check_tokens(seq: Sequence, tokens: int, name: str = "attention") -> None:
    """Raise `InputError` unless `tokens`, of what has this name, is this rank's number, and every rank has some."""
    check_nobody_is_empty(seq)
    if tokens != seq.counts[seq.ring.rank]:
        raise InputError(
            f"rank {seq.ring.rank}: {name} has {tokens} tokens, this rank has {seq.counts[seq.ring.rank]} of "
            f"{seq!r}: pass seq.shard(...) of the whole batch"
        )


def check_encoder(seq: Sequence, mask: Tensor | None) -> None:
    """Raise `UnsupportedError` for cross attention that would cut this sequence as its keys, or its documents, are cut.

    `mask`: (batch, keys), 0 for padding.
    """
    what = None if mask is None or bool((mask != 0).all()) else "with padding"
    if what is None and seq.documents is not None:
        what = "of a text that is cut into documents"
    if what is not None:
        raise UnsupportedError(
            f"cross attention to an encoder {what}: over a ring every token of the text sees every one of the encoder; "
            "leave padding out, or call the model inside `with ring.activate(None):` on whole texts"
        )


def is_cross_attention(module: nn.Module) -> bool:
    """Whether its keys are an encoder's, by what transformers' modules say of themselves."""
    return bool(getattr(module, "is_cross_attention", "CrossAttention" in type(module).__name__))


def refuse_inputs(
    spec: MaskSpec, rows: Rows, seq: Sequence, module: nn.Module, ids: Tensor | None, kwargs: dict[str, Any],
    call: Watched | None,
) -> None:  # fmt: skip
    """What may be wrong on one rank alone, once for each mask; all ranks raise. `call`: of a prepared model."""
    refusal = None
    try:
        refuse_layers(getattr(module, "config", None))
        if not _takes_positions(type(module).__mro__):
            raise UnsupportedError(
                f"the models of {type(module).__name__} take no position_ids, so they count places from 0 on every rank"
            )
        _check_documents(seq, kwargs)
        if seq.ring.world_size > 1:
            _check_rotary(module, call is not None and call.has_chosen)
        if call is None and (ids is not None or seq.ring.world_size > 1) and may_count_by_itself(type(module).__mro__):
            raise UnsupportedError(
                f"the models of {type(module).__name__} may count places by their padding or mask, which is not known "
                "here: call ringattn.adapters.transformers.prepare(model) once"
            )
        if call is not None and call.is_placed:
            pass
        elif ids is not None:
            _check_positions(ids, spec, rows, seq)
        elif seq.ring.world_size > 1:
            raise InputError(
                f"no position_ids came to {type(module).__name__}: pass position_ids=seq.positions()[None], and if the "
                "model does not hand them to attention, call ringattn.adapters.transformers.prepare(model) once"
            )
    except InputError as error:
        refusal = error
    seq.ring.check_consistency(f"forward of {type(module).__name__} over {seq!r}", refusal)


def refuse_layers(config: Any) -> None:
    """Raise `UnsupportedError` for what mixes tokens beside softmax attention, as far as a configuration tells."""
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    others |= {name for name in ("mamba_d_state", "mamba_d_conv", "ssm_state_size") if hasattr(config, name)}
    if others:
        raise UnsupportedError(
            f"{type(config).__name__} has layers that carry a state from token to token or choose tokens "
            f"({', '.join(sorted(others))}); only softmax attention can be shared by a ring"
        )
    if getattr(config, "attn_temperature_tuning", False):
        raise UnsupportedError(
            f"{type(config).__name__} scales queries by places that it counts from 0 on every rank; set "
            "config.attn_temperature_tuning=False before the model is made"
        )
    if getattr(config, "token_dropout", False):
        raise UnsupportedError(
            f"{type(config).__name__} scales embeddings by the mask tokens that it counts on every rank alone; set "
            "config.token_dropout=False before the model is made"
        )
    if getattr(config, "trigram_input", False):
        raise UnsupportedError(
            f"{type(config).__name__} embeds each token with its two neighbors, which another rank may have; set "
            "config.trigram_input=False before the model is made, or take another model"
        )


def depends_on_length(kind: Any) -> bool:
    """Whether a rotary embedding of this type does.

    `kind`: a rope_type, or several: by kind of layer, or a list.
    """
    if isinstance(kind, str):
        return "dynamic" in kind or kind == "longrope"
    return any(depends_on_length(one) for one in (kind.values() if isinstance(kind, dict) else kind or ()))


def _check_rotary(module: nn.Module, is_chosen: bool) -> None:
    """Raise `UnsupportedError` where an attention module's rotary embedding was chosen by this rank's tokens alone."""
    config: Any = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes: list[dict[str, Any]] = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    kinds = sorted({str(one.get("rope_type", one.get("type", ""))) for one in ropes} - {""})
    if not is_chosen and depends_on_length(kinds):
        raise UnsupportedError(
            f"{type(config).__name__} has rotary embeddings of type {', '.join(kinds)}, whose frequencies depend on "
            "the length, and this rank chose them by its own tokens: call ringattn.adapters.transformers.prepare("
            "model) once, before the model is copied or compiled, or take another rope_type"
        )


def _beside(kinds: tuple[type, ...]) -> list[Any]:
    """The classes and functions in the file of an attention module, of these classes, that has models in it."""
    from transformers import PreTrainedModel

    for kind in kinds:
        beside = list(vars(sys.modules[kind.__module__]).values())
        if any(_is_a(one, PreTrainedModel) and one is not PreTrainedModel for one in beside):
            return beside
    return []


def _is_a(one: Any, kind: type) -> bool:
    return isinstance(one, type) and issubclass(one, kind)


@cache
def _takes_positions(kinds: tuple[type, ...]) -> bool:
    """Whether the models beside an attention module, of these classes, can be told the places of their tokens.

    Attention gets `position_ids` among its keywords also from models that drop them.
    """
    from transformers import PreTrainedModel

    models = [one for one in _beside(kinds) if _is_a(one, PreTrainedModel) and one is not PreTrainedModel]
    return not models or any("position_ids" in inspect.signature(one.forward).parameters for one in models)


@cache
def may_count_by_itself(kinds: tuple[type, ...]) -> bool:
    """Whether code beside an attention module makes places of tokens or masks; asked where a model
    is not known, or cannot be asked.
    """
    beside = _beside(kinds)
    makes = {getattr(one, "__name__", "") for one in beside}
    makes |= {name for one in beside if isinstance(one, type) for name in vars(one)}
    learned = [one for one in beside if _is_a(one, nn.Embedding) and one is not nn.Embedding]
    return "create_position_ids_from_input_ids" in makes or any(
        "attention_mask" in inspect.signature(one.forward).parameters for one in learned
    )


def _check_documents(seq: Sequence, kwargs: dict[str, Any]) -> None:
    """Raise `InputError` unless the cu_seq_lens given to the model, if any, are the documents of the sequence."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (given := kwargs.get(name)) is not None:
            cuts = tuple(sorted(set(given.flatten().tolist())))
            if cuts != tuple(sorted(set(seq.documents or (0, seq.length)))):
                raise InputError(
                    f"rank {seq.ring.rank}: {name} cuts at {cuts[:8]}, the active sequence at {seq.documents}; make "
                    f"the sequence with ring.sequence(cu_seqlens={name}) of the whole batch"
                )


def _check_positions(ids: Tensor, spec: MaskSpec, rows: Rows, seq: Sequence) -> None:
    """Raise `InputError` unless `ids`, (batch or 1, tokens), are positions of this rank's tokens.

    Global ones, or counted from the start of the token's document, or of its row's real tokens. Rotary positions with
    more dimensions (of images) are left unchecked.
    """
    if ids.dim() != 2:
        return
    places, starts = (seq.positions(per_document).to(ids.device) for per_document in (False, True))
    if any(torch.equal(ids, one.expand_as(ids)) for one in (places, starts)):
        return
    if spec.padding is not None:
        wanted = torch.empty_like(spec.padding, dtype=torch.int64)
        for cut, mine in rows:
            wanted[list(mine)] = cut.positions(per_document=True).to(wanted.device)
        if torch.equal(ids.expand_as(wanted)[spec.padding], wanted[spec.padding]):
            return
    raise InputError(
        f"rank {seq.ring.rank}: position_ids are {short(ids[0])}, this rank's tokens of {seq!r} have {short(places)}"
        + ("" if seq.documents is None else f" or, in their documents, {short(starts)}")
        + "; pass position_ids=seq.positions()[None], or seq.positions(per_document=True)[None] for packed documents, "
        "which the sequence must know too: ring.sequence(cu_seqlens=...)"
    )


def short(values: Tensor) -> str:
    """The first few, for a message."""
    return ", ".join(str(value) for value in values[:6].tolist()) + (", ..." if len(values) > 6 else "")

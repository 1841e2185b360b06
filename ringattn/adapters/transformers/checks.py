"""What a model over a ring refuses because one process would compute something else.

The checks raise on this rank only. A caller that may fail on one rank alone uses `Ring.refused_by_all`.
Guarantees: every message says what to do instead. Outputs that one process would compute from the tokens of other ranks
too are refused or left out, under whatever name.
Checked with PEFT 0.21 and liger-kernel 0.8.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ringattn.adapters.hosts import require_checked
from ringattn.errors import InputError, UnsupportedError
from ringattn.sequence import Sequence

# --- Checks -----------------------------------------------------------------------------------------------------------


LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "moe"}
"""Layers, in `config.layer_types`, that mix tokens by softmax attention only, or not at all."""


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
def takes_positions(kinds: tuple[type, ...]) -> bool:
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


def short(values: Tensor) -> str:
    """The first few, for a message."""
    return ", ".join(str(value) for value in values[:6].tolist()) + (", ..." if len(values) > 6 else "")


# --- Outputs ----------------------------------------------------------------------------------------------------------
# Outputs are recognised by their shapes: outputs of tokens begin with the shape of the call's tokens.

OF_THIS_RANK = "has only this rank's tokens for it"

LEAVE_OUT = (
    "leave labels out and make the loss of the logits of every token, added over ranks and divided by the number of "
    "labels of all"
)


_known: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def know_outputs(model: nn.Module, *names: str) -> None:
    """Tell that a model makes these outputs of its tokens, and `loss` as a part of that of all ranks."""
    _known[model] = frozenset(names)


def token_shape(given: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a call's tokens: (rows, tokens), or with choices between."""
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    if isinstance(ids, Tensor):
        return tuple(ids.shape)
    return tuple(embeds.shape[:-1]) if isinstance(embeds, Tensor) else ()


def check_output(model: nn.Module, out: Any, tokens: tuple[int, ...], makes_loss: bool) -> Any:
    """The output without what was made of whole rows beside it.

    `tokens`: see `token_shape`. `makes_loss`: whether its loss is this rank's part of that of the whole batch. Raises
    `InputError` on this rank where all that the model is called for would be of whole rows.
    """
    name = type(model).__name__
    if isinstance(out, tuple):
        raise InputError("return_dict=False: outputs of whole rows cannot be told from those of tokens; leave it out")
    if not hasattr(out, "items"):
        return out
    known = _known.get(model, frozenset())
    if out.get("loss") is not None and not makes_loss and "loss" not in known:
        raise UnsupportedError(
            f"{name} made its loss by itself, of labels, start_positions or whatever asked for it, and {OF_THIS_RANK}: "
            f"{LEAVE_OUT}"
        )
    left_out = {"pooler_output"} - _required(type(out))
    for of, x in out.items():
        if not isinstance(x, Tensor) or not x.is_floating_point() or of in left_out | known | {"loss"}:
            continue
        if x.dim() == 0:
            left_out.add(of)  # such as a loss of routers
        elif _is_of_rows(model, x, tokens):
            raise UnsupportedError(
                f"{name} makes {of} of a whole row, out of one of its tokens or all, and {OF_THIS_RANK}; call the "
                "model beneath it, pool seq.gather(last_hidden_state, dim=1) on every rank, and divide the loss by "
                "the ranks"
            )
    left_out = {of for of in left_out if out.get(of) is not None}
    return type(out)(**{of: x for of, x in out.items() if of not in left_out}) if left_out else out


def _required(kind: type[Any]) -> set[str]:
    """What an output of this class is never without."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {one.name for one in fields if one.default is one.default_factory is dataclasses.MISSING}


def _is_of_rows(model: nn.Module, x: Tensor, tokens: tuple[int, ...]) -> bool:
    if x.dim() > len(tokens) or x.shape[0] != tokens[0]:  # of tokens, with features, or of images
        return False
    return tuple(x.shape) != tokens or tokens[-1] in _features(model)


def _features(model: Any) -> set[int]:
    """How many numbers the heads of a model make; as many as a rank has tokens cannot be told from one a token."""
    heads = [child for child in model.children() if child is not model.base_model]
    linear = [[part for part in head.modules() if isinstance(part, nn.Linear)] for head in heads]
    return {parts[-1].out_features for parts in linear if parts}


# --- Adapters of PEFT -------------------------------------------------------------------------------------------------
# An adapter that only changes linear layers (LoRA and its relatives) needs nothing over a ring: its gradient is a sum
# over tokens, as that of any weight. Adapters that read whole texts, or add to the loss, are refused.

OF_ONE_TOKEN = frozenset({
    "LORA", "IA3", "LOHA", "LOKR", "OFT", "VERA", "LN_TUNING", "TRAINABLE_TOKENS",
})  # fmt: skip
"""Kinds of adapters that change what is made of each token by itself."""

_REASONS = {
    "ADALORA": "adds its regularization to every rank's loss, which counts it as often as there are ranks",
    "XLORA": "weighs its adapters by what a whole text gives",
    "ADAPTION_PROMPT": "attends to a prompt of its own inside of attention",
}


def base_of(model: Any) -> Any:
    """The model of transformers inside of a `PeftModel`; any other model as it is.

    Raises `UnsupportedError` for adapters that no ring computes.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    refuse_adapters(model)
    return model.get_base_model()


def refuse_adapters(model: Any) -> None:
    """Raise `UnsupportedError` for adapters, in `model.peft_config`, that do not work on one token at a time."""
    told = getattr(model, "peft_config", None)
    configs: Iterable[Any] = told.values() if isinstance(told, dict) else ()
    for config in configs:
        kind = getattr(config.peft_type, "value", str(config.peft_type))
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedError(
                f"PEFT's {kind} puts tokens of its own before those of the text, on every rank; take LoRA or another "
                "adapter of linear layers"
            )
        if kind not in OF_ONE_TOKEN:
            reason = _REASONS.get(kind, "was not compared with one process")
            raise UnsupportedError(f"PEFT's {kind} {reason}; take one of {', '.join(sorted(OF_ONE_TOKEN))}")
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedError(
                "alora_invocation_tokens: activated LoRA looks for these tokens in the texts, of which a rank has a "
                "part; leave them out"
            )


# --- Kernels of Liger -------------------------------------------------------------------------------------------------
# They work on one token at a time, except the loss. The fused loss takes labels that are shifted already and divides
# by num_items_in_batch, so a rank's loss is its part of the whole batch's.


def know_liger(model: Any) -> None:
    """Accept the loss of a model whose forward is Liger's.

    Raises `UnsupportedError` for a Liger that was not checked, and for a forward that is not that of a language model.
    """
    forward = model.forward
    if not (getattr(forward, "__module__", "") or "").startswith("liger_kernel."):
        return
    require_checked("liger-kernel", "0.8")
    if forward.__name__ != "lce_forward":
        raise UnsupportedError(
            f"Liger's {forward.__name__} of {type(model).__name__} was not compared with one process; leave "
            "fused_linear_cross_entropy out, by liger_kernel_config or the arguments of Liger's function"
        )
    know_outputs(model, "loss")

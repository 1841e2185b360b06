"""Refusals of models, outputs and adapters whose results over a ring would differ from those of one process.

The checks raise on this rank only. A caller whose check may fail on one rank only uses `Ring.refused_by_all`.

Guarantees: every message says what to do instead. Outputs that depend on tokens of other ranks are refused or left out,
whatever their name.
Checked with PEFT 0.21 and liger-kernel 0.8.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ringattn.adapters.host_versions import Host
from ringattn.adapters.transformers.compressing import compresses_keys
from ringattn.adapters.transformers.selecting import selects_blocks, selects_keys
from ringattn.errors import InputError, UnsupportedError
from ringattn.sequence import Sequence

# --- Checks -----------------------------------------------------------------------------------------------------------


LAYER_TYPES = {
    "full_attention", "sliding_attention", "chunked_attention", "reference_sliding_attention", "moe", "mlp",
}  # fmt: skip
"""Kinds of layers in `config.layer_types` that mix tokens by softmax attention only, or not at all."""


STATE_ENTRIES = ("mamba_d_state", "mamba_d_conv", "ssm_state_size")
"""Entries of configurations that show state-space layers. Some hybrid models have no `layer_types`."""


def refuse_alibi(model: nn.Module, text: Any) -> None:
    """Raise `UnsupportedError` for a model of this configuration that adds ALiBi to its scores itself.

    Such models accept `attn_implementation="ringattn"` when they are created, and ignore it.
    """
    kind = getattr(text, "model_type", "")
    if kind in ("bloom", "mpt") or (kind == "falcon" and getattr(text, "alibi", False)):
        rounded = ", and rounds its biases to bfloat16, so they are not multiples of distances" * (kind == "falcon")
        raise UnsupportedError(
            f"{type(model).__name__} adds ALiBi to its scores inside its attention modules{rounded}; they do not use "
            "transformers' AttentionInterface, and there is no other hook. Give the model "
            "attention modules that call ring.attention(q, k, v, seq, causal=True, alibi_slopes=...), see "
            "docs/embedding-transformers.md, or use a model with rotary positions"
        )


def check_every_rank_has_tokens(seq: Sequence) -> None:
    """Raise the same `InputError` on every rank if a rank has no tokens of `seq`."""
    if min(seq.counts) == 0:
        raise InputError(
            f"rank {seq.counts.index(0)} has no token of {seq!r}, but models cannot be called without tokens; use "
            "longer texts or fewer ranks, or pack several texts as documents"
        )


def check_tokens(seq: Sequence, tokens: int, name: str = "attention") -> None:
    """Raise `InputError` unless every rank has tokens, and the tensor `name` has this rank's number of them."""
    check_every_rank_has_tokens(seq)
    if tokens != seq.counts[seq.ring.rank]:
        raise InputError(
            f"rank {seq.ring.rank}: {name} has {tokens} tokens, this rank has {seq.counts[seq.ring.rank]} of "
            f"{seq!r}: pass seq.shard(...) of the whole batch"
        )


def has_tree(seq: Sequence) -> bool:
    """Return whether the sequence has the mask of a tree, or one tree or more for groups of heads."""
    return seq.mask is not None and seq.mask.by_depth


def text_positions(seq: Sequence) -> tuple[Tensor, ...]:
    """Return the position_ids of this rank's tokens that a model may get.

    They count from the start of the sequence, or from the start of each document. In a tree they count along the path
    from the root.
    """
    return tuple(seq.positions(per_document) for per_document in ((True,) if has_tree(seq) else (False, True)))


def positions_call(seq: Sequence) -> str:
    """Return the expression for the position_ids of a sequence, for a message."""
    return f"seq.positions({'per_document=True' if has_tree(seq) else ''})[None]"


def check_encoder(seq: Sequence, mask: Tensor | None) -> None:
    """Raise `UnsupportedError` for cross attention to an encoder's output with padding or documents.

    `mask`: (batch, keys), 0 for padding.
    """
    what = None if mask is None or bool((mask != 0).all()) else "with padding"
    if what is None and seq.documents is not None:
        what = "from a text that is cut into documents"
    if what is not None:
        raise UnsupportedError(
            f"cross attention to an encoder {what}: over a ring, every token of the text attends to all tokens of the "
            "encoder; leave padding out, or call the model inside `with ring.activate(None):` on whole texts"
        )


def refuse_layers(config: Any, computed: Collection[str] = ()) -> None:
    """Raise `UnsupportedError` for configurations whose layers mix tokens in ways that a ring does not compute.

    `computed`: the kinds of layers with a state that are computed over a ring, see `states.watch_states`.
    """
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    others |= {name for name in STATE_ENTRIES if hasattr(config, name)}
    if selects_keys(config):
        others -= {"indexed_attention"}
    if compresses_keys(config):
        others -= {"compressed_sparse_attention", "heavily_compressed_attention"}
    if selects_blocks(config):
        others -= {"minimax_m3_sparse"}
    if others := others - set(computed):
        raise UnsupportedError(
            f"{type(config).__name__} has layers that carry a state from token to token or choose tokens "
            f"({', '.join(sorted(others))}); over a ring, only softmax attention and the layers of the hybrid models "
            "in docs/hybrid.md are computed, after ringattn.adapters.transformers.prepare(model): use one of these "
            "models, or call this one without a ring, inside `with ring.activate(None):`"
        )
    if getattr(config, "attn_temperature_tuning", False):
        raise UnsupportedError(
            f"{type(config).__name__} scales queries by positions that it counts from 0 on every rank; set "
            "config.attn_temperature_tuning=False before the model is made"
        )
    if getattr(config, "token_dropout", False):
        raise UnsupportedError(
            f"{type(config).__name__} scales embeddings by the number of mask tokens of this rank only; set "
            "config.token_dropout=False before the model is made"
        )
    if getattr(config, "trigram_input", False):
        raise UnsupportedError(
            f"{type(config).__name__} embeds each token with its two neighbors, which another rank may have; set "
            "config.trigram_input=False before the model is made, or use another model"
        )


def check_documents(seq: Sequence, kwargs: Mapping[str, Any]) -> None:
    """Raise `InputError` if the model got cumulative lengths that differ from the documents of the sequence."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"):
        if (cu_seqlens := kwargs.get(name)) is not None:
            cuts = tuple(sorted(set(cu_seqlens.flatten().tolist())))
            if cuts != tuple(sorted(set(seq.bounds))):
                raise InputError(
                    f"rank {seq.ring.rank}: {name} cuts at {cuts[:8]}, the active sequence at {seq.documents}; make "
                    f"the sequence with ring.sequence(cu_seqlens={name}) of the whole batch"
                )


def depends_on_length(kind: Any) -> bool:
    """Return whether the frequencies of a rotary embedding depend on the length of the text.

    `kind`: a rope_type, a list of them, or a dict by kind of layer.
    """
    if isinstance(kind, str):
        return "dynamic" in kind or kind == "longrope"
    return any(depends_on_length(part) for part in (kind.values() if isinstance(kind, dict) else kind or ()))


def _module_members(kinds: tuple[type, ...]) -> list[Any]:
    """Return the members of the Python module that defines an attention module and its models.

    `kinds`: the class of the attention module and its bases. The first of them whose file has models is used.
    """
    from transformers import PreTrainedModel

    for kind in kinds:
        members = list(vars(sys.modules[kind.__module__]).values())
        if any(_is_strict_subclass(member, PreTrainedModel) for member in members):
            return members
    return []


def _is_strict_subclass(member: Any, kind: type) -> bool:
    return isinstance(member, type) and issubclass(member, kind) and member is not kind


@cache
def takes_positions(kinds: tuple[type, ...]) -> bool:
    """Return whether a model in the same file as an attention module takes `position_ids`.

    `kinds`: the class of the attention module and its bases. The keyword arguments of the attention function do not
    show this, because a model may pass on position_ids that it does not use itself.
    """
    from transformers import PreTrainedModel

    models = [member for member in _module_members(kinds) if _is_strict_subclass(member, PreTrainedModel)]
    return not models or any("position_ids" in inspect.signature(model.forward).parameters for model in models)


@cache
def may_compute_positions(kinds: tuple[type, ...]) -> bool:
    """Return whether code in the file of an attention module computes positions from tokens or masks.

    Use it if the model itself cannot be probed.
    """
    members = _module_members(kinds)
    names = {getattr(member, "__name__", "") for member in members}
    names |= {name for member in members if isinstance(member, type) for name in vars(member)}
    embeddings = [member for member in members if _is_strict_subclass(member, nn.Embedding)]
    return "create_position_ids_from_input_ids" in names or any(
        "attention_mask" in inspect.signature(embedding.forward).parameters for embedding in embeddings
    )


def short(values: Tensor) -> str:
    """Return the first values as text, for a message."""
    return ", ".join(str(value) for value in values[:6].tolist()) + (", ..." if len(values) > 6 else "")


# --- Outputs ----------------------------------------------------------------------------------------------------------
# Outputs are recognised by their shapes: outputs of tokens begin with the shape of the call's tokens.

OF_THIS_RANK = "has only this rank's tokens for it"

LEAVE_OUT = (
    "leave labels out and compute the loss from the logits of every token: add it over ranks, and divide by the number "
    "of labels of all ranks"
)


_declared: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def declare_outputs(model: nn.Module, *names: str) -> None:
    """Declare that a model computes these outputs from its tokens only, and `loss` as its part of all ranks' loss."""
    _declared[model] = frozenset(names)


def token_shape(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a call's tokens: (rows, tokens), or for multiple choice (rows, choices, tokens)."""
    for part in ("decoder_", ""):  # the outputs of an encoder-decoder are those of its decoder
        ids, embeds = arguments.get(f"{part}input_ids"), arguments.get(f"{part}inputs_embeds")
        if isinstance(ids, Tensor):
            return tuple(ids.shape)
        if isinstance(embeds, Tensor):
            return tuple(embeds.shape[:-1])
    return ()


def check_output(
    model: nn.Module, out: Any, tokens: tuple[int, ...], makes_loss: bool, router_losses: Iterable[Tensor] = ()
) -> Any:
    """Return the output without entries that were computed from whole rows.

    `tokens`: see `token_shape`. `makes_loss`: the loss is this rank's part of the loss of the whole batch.
    `router_losses`: this rank's parts of router losses. Raises `InputError` on this rank if the main result of the
    model is computed from whole rows.
    """
    name = type(model).__name__
    if isinstance(out, tuple):
        raise InputError(
            "return_dict=False: outputs of tokens and of whole rows look alike without names; leave it out"
        )
    if not hasattr(out, "items"):
        return out
    declared = _declared.get(model, frozenset())
    if out.get("loss") is not None and not makes_loss and "loss" not in declared:
        raise UnsupportedError(
            f"{name} computed a loss in its own way, from labels, start_positions or similar, and {OF_THIS_RANK}: "
            f"{LEAVE_OUT}"
        )
    # Many models compute a pooled output that is rarely used. It is left out unless the output class requires it.
    # Features of images are those of this rank's tokens, or of all images.
    left_out = {"pooler_output", "image_hidden_states"} - _required(type(out))
    for entry, x in out.items():
        if not isinstance(x, Tensor) or not x.is_floating_point() or entry in left_out | declared | {"loss"}:
            continue
        if x.dim() == 0:
            if not any(x is loss for loss in router_losses):
                left_out.add(entry)
        elif _is_of_rows(model, x, tokens):
            raise UnsupportedError(
                f"{name} computes {entry} from a whole row, from one token or all of them, and {OF_THIS_RANK}; call "
                "the model without its head, pool seq.gather(last_hidden_state, dim=1) on every rank, and divide the "
                "loss by the number of ranks"
            )
    left_out = {entry for entry in left_out if out.get(entry) is not None}
    return type(out)(**{entry: x for entry, x in out.items() if entry not in left_out}) if left_out else out


def _required(kind: type[Any]) -> set[str]:
    """Return the names of the required fields of an output class."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING}


def _is_of_rows(model: nn.Module, x: Tensor, tokens: tuple[int, ...]) -> bool:
    """Return whether an output has one entry per row, and not one per token."""
    if x.dim() > len(tokens) or x.shape[0] != tokens[0]:  # per token with features, or per image
        return False
    # (rows, tokens) is ambiguous if a head has as many features as this rank has tokens: then take it for rows.
    return tuple(x.shape) != tokens or tokens[-1] in _features(model)


def _features(model: Any) -> set[int]:
    """Return the numbers of output features of a model's heads."""
    # The last linear layer of each part outside the base model gives the number of features.
    heads = [child for child in model.children() if child is not model.base_model]
    linear = [[part for part in head.modules() if isinstance(part, nn.Linear)] for head in heads]
    return {parts[-1].out_features for parts in linear if parts}


# --- Adapters of PEFT -------------------------------------------------------------------------------------------------
# An adapter that only changes linear layers (LoRA and similar) works over a ring unchanged: its gradient is a sum over
# tokens, like that of any weight. Adapters that use whole texts, or add to the loss, are refused.

OF_ONE_TOKEN = frozenset({
    "LORA", "IA3", "LOHA", "LOKR", "OFT", "VERA", "LN_TUNING", "TRAINABLE_TOKENS",
})  # fmt: skip
"""Kinds of adapters that work on each token separately."""

_REASONS = {
    "ADALORA": "adds its regularization to every rank's loss, so it would count once per rank",
    "XLORA": "weighs its adapters by features of the whole text",
    "ADAPTION_PROMPT": "attends to an additional prompt inside attention",
}


def base_of(model: Any) -> Any:
    """Return the transformers model inside a `PeftModel`, or any other model unchanged.

    Raises `UnsupportedError` for adapters that a ring does not compute.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    refuse_adapters(model)
    return model.get_base_model()


def refuse_adapters(model: Any) -> None:
    """Raise `UnsupportedError` for adapters, in `model.peft_config`, that do not work on one token at a time."""
    by_name = getattr(model, "peft_config", None)
    configs: Iterable[Any] = by_name.values() if isinstance(by_name, dict) else ()
    for config in configs:
        kind = getattr(config.peft_type, "value", str(config.peft_type))
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedError(
                f"PEFT's {kind} puts additional tokens before the text, on every rank; use LoRA or another adapter of "
                "linear layers"
            )
        if kind not in OF_ONE_TOKEN:
            reason = _REASONS.get(kind, "was not compared with one process")
            raise UnsupportedError(f"PEFT's {kind} {reason}; use one of {', '.join(sorted(OF_ONE_TOKEN))}")
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedError(
                "alora_invocation_tokens: activated LoRA searches whole texts for these tokens, but a rank has a part; "
                "leave them out"
            )


# --- Kernels of Liger -------------------------------------------------------------------------------------------------
# Liger's kernels work on one token at a time, except the loss. The fused loss takes labels that are already shifted,
# and divides by num_items_in_batch. So a rank's loss is its part of the loss of the whole batch.

_LIGER = Host(
    "liger-kernel",
    ("0.8",),
    sources={"liger_kernel.transformers.model.loss_utils:LigerForCausalLMLoss": ("c0fda452",)},
)


def accept_liger_loss(model: Any) -> None:
    """Accept the loss of a model whose forward is Liger's.

    Raises `UnsupportedError` for a version of Liger whose loss differs, and for forwards other than those of Liger's
    language models.
    """
    forward = model.forward
    if not (getattr(forward, "__module__", "") or "").startswith("liger_kernel."):
        return
    _LIGER.require()
    if forward.__name__ != "lce_forward":
        raise UnsupportedError(
            f"Liger's {forward.__name__} of {type(model).__name__} was not compared with one process; leave "
            "fused_linear_cross_entropy out, by liger_kernel_config or the arguments of Liger's function"
        )
    declare_outputs(model, "loss")

"""Encoder-decoders with one configuration, such as T5, BART and Whisper: their preparation, checks and batches.

The decoder's tokens are sharded. The encoder runs in one of two ways, which `prepare` chooses. Sharded: its tokens are
sharded over another sequence, `seq.encoder`, and the decoder attends to them over the ring. Replicated: every
rank has the whole input of the encoder, runs it locally, and the decoder attends to its output locally.

Guarantees: positions and position biases are those of the whole text, and the decoder's inputs are made from the labels
of the whole text. A call whose inputs do not fit the way that was chosen is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ringattn.adapters.context import runs_inside
from ringattn.adapters.host_versions import Host
from ringattn.adapters.hosts import check_alike
from ringattn.adapters.transformers.checks import check_every_rank_has_tokens, check_tokens
from ringattn.core.geometry import StridedRange
from ringattn.core.layout import LayoutName
from ringattn.engine.philox import is_dropped
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.runtime.activation import Activation, activation, active_sequence, attended, entered
from ringattn.sequence import Sequence

_REPLACED = {
    "bart": ("BartLearnedPositionalEmbedding.forward", ("ae0722ac", "c8622069")),
    "blenderbot": ("BlenderbotLearnedPositionalEmbedding.forward", ("97c60b35", "8c9b7bea")),
    "blenderbot-small": ("BlenderbotSmallLearnedPositionalEmbedding.forward", ("97c60b35", "8c9b7bea")),
    "m2m_100": ("M2M100SinusoidalPositionalEmbedding.forward", ("b5943c04", "21a9c0ec")),
    "marian": ("MarianSinusoidalPositionalEmbedding.forward", ("79ae9c5a", "32f9ffdd")),
    "mbart": ("MBartLearnedPositionalEmbedding.forward", ("ae0722ac", "c8622069")),
    "mt5": ("MT5Attention.compute_bias", ("96230557",)),
    "pegasus": ("PegasusSinusoidalPositionalEmbedding.forward", ("79ae9c5a", "32f9ffdd")),
    "plbart": ("PLBartLearnedPositionalEmbedding.forward", ("ae0722ac", "c8622069")),
    "t5": ("T5Attention.compute_bias", ("96230557",)),
    "umt5": ("UMT5Attention.compute_bias", ("cf980712",)),
    "whisper": ("WhisperPositionalEmbedding.forward", ("a6bda81f", "561af062")),
}
"""By model type: the function that counts positions, whose arguments are replaced, and the digests of its sources."""

FAMILIES = {
    kind: Host(
        "transformers",
        ("5.23", "5.24"),
        f"part for models of type {kind}",
        sources={f"transformers.models.{folder}.modeling_{folder}:{function}": digests},
    )
    for kind, (function, digests) in _REPLACED.items()
    for folder in [kind.replace("-", "_")]
}
"""The model types whose positions, masks and losses are known, and what the adapter relies on in each."""

EncoderName = Literal["sharded", "replicated"]

ENCODER = "ringattn_encoder"
"""The attribute by which `prepare` records on an encoder-decoder how its encoder runs; copies of a model keep it."""

CROSS = "ringattn_cross"
"""The attribute that marks the attention modules from the decoder to the encoder."""

BIASED = "ringattn_biased"
"""The attribute that marks self-attention modules which add a learned bias of the distance to their scores."""

_CROSS_NAMES = "encoder_attn", "EncDecAttention"
_OF_ENCODER = {"input_ids": -1, "inputs_embeds": -2, "attention_mask": -1}
_OF_DECODER = {"decoder_input_ids": -1, "decoder_inputs_embeds": -2, "decoder_attention_mask": -1, "labels": -1}
_SOUND = "input_features"


def encoder_of(model: Any) -> EncoderName | None:
    """Return how the encoder of a prepared encoder-decoder runs, or None for any other model."""
    how: EncoderName | None = getattr(model, ENCODER, None)
    return how


# --- Preparation ------------------------------------------------------------------------------------------------------


def has_one_configuration(config: Any) -> bool:
    """Return whether a configuration is that of an encoder-decoder, and of both its parts."""
    return bool(getattr(config, "is_encoder_decoder", False)) and not any(
        getattr(config, name, None) is not None for name in ("decoder", "encoder")
    )


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Raise `UnsupportedError` for other types than `FAMILIES`, and for classes that do not predict tokens."""
    config: Any = model.config
    name = type(model).__name__
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"{name} is an encoder-decoder of type {config.model_type}, whose positions and masks over ranks are not "
            f"known; train it without a ring, or use a model of type {', '.join(sorted(FAMILIES))}"
        )
    kinds = [kind.__name__ for kind in type(model).__mro__]
    kinds = [kind for kind in kinds if not kind.endswith(("PreTrainedModel", "EncoderModel"))]
    if not any(kind.endswith(("ForConditionalGeneration", "Model")) for kind in kinds):
        raise UnsupportedError(
            f"{name} does not predict the tokens of a decoder; train it without a ring, or prepare the whole "
            "encoder-decoder without a head and compute the loss from gathered states"
        )


def choose_encoder(model: Any, encoder: EncoderName | None) -> EncoderName:
    """Return how the encoder runs: as requested, else as before, else sharded if it reads tokens.

    Raises `InputError` for an unknown or different request, and `UnsupportedError` for a sharded encoder of sound.
    """
    before = encoder_of(model)
    if encoder not in (None, "sharded", "replicated"):
        raise InputError(f"encoder={encoder!r}: it must be 'sharded' or 'replicated'")
    if before is not None and encoder not in (None, before):
        raise InputError(f"encoder={encoder!r}: this model was prepared with encoder={before!r}")
    reads_sound = _reads_sound(model)
    if encoder == "sharded" and reads_sound:
        raise UnsupportedError(
            f"encoder='sharded': the encoder of {type(model).__name__} reads sound with convolutions; leave it out, "
            "every rank then runs the encoder on the whole input"
        )
    return encoder or before or ("replicated" if reads_sound else "sharded")


def prepare_parts(model: Any, encoder: EncoderName) -> None:
    """Make the encoder run as chosen, and give both parts the positions of the whole text. In place, idempotent."""
    FAMILIES[model.config.model_type].require()
    setattr(model, ENCODER, encoder)
    parts = model.get_encoder(), model.get_decoder()
    runs_inside(parts[0], _encoder_context)
    for name, module in model.named_modules():
        last_name = name.rpartition(".")[2]
        if last_name in _CROSS_NAMES:
            setattr(module, CROSS, True)
        elif hasattr(module, "compute_bias") and not hasattr(module, BIASED):
            setattr(module, BIASED, True)
            module.compute_bias = MethodType(_compute_bias, module)
    for part in parts:
        table = getattr(part, "embed_positions", None)
        # The positions of Whisper's encoder are a plain table, which needs nothing: its encoder is not sharded.
        if table is not None and type(table) is not nn.Embedding and not hasattr(table, ENCODER):
            setattr(table, ENCODER, encoder)
            table.register_forward_pre_hook(_whole_positions, with_kwargs=True)
            table.register_forward_hook(_shard_positions)


def _encoder_context() -> AbstractContextManager[None]:
    """Return the context of an encoder's call: its own sequence, or None for a local encoder."""
    active = activation()
    if active is None or active.seq is None:
        return nullcontext()
    encoder = active.seq.encoder
    return entered(Activation(encoder, None if encoder is None else active.dropout_seed))


@torch.compiler.disable
def _whole_positions(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace the arguments of a module for positions, which would count the tokens that this rank has from 0."""
    if (seq := active_sequence()) is None:
        return None
    signature = inspect.signature(table.forward)
    bound = signature.bind(*args, **kwargs)
    inputs = bound.arguments
    if "position_ids" in signature.parameters:
        inputs["position_ids"] = seq.positions()
    else:  # M2M100 counts the tokens that are not padding, so it gets all tokens, and the result is sharded
        ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
        if ids is not None:
            inputs["input_ids"] = seq.gather(ids)
        if embeds is not None:  # only the number of tokens matters
            inputs["inputs_embeds"] = embeds[:, :1].expand(-1, seq.length, -1)
    return bound.args, bound.kwargs


@torch.compiler.disable
def _shard_positions(table: nn.Module, args: object, out: Tensor) -> Tensor | None:
    if (seq := active_sequence()) is None or "position_ids" in inspect.signature(table.forward).parameters:
        return None
    return seq.shard(out, dim=1)


@torch.compiler.disable
def _compute_bias(module: Any, queries: int, keys: int, device: Any = None, past_seen_tokens: Any = 0) -> Tensor:
    """Return the bias of this rank's queries and the keys of all ranks. Replaces `compute_bias` of T5's attention."""
    if (seq := active_sequence()) is not None:
        # The host adds this to 0, 1, ..., so the sum is the position of each query.
        past_seen_tokens = (seq.positions() - torch.arange(queries, device=seq.ring.device))[:, None].to(device)
        keys = seq.length
    bias: Tensor = type(module).compute_bias(module, queries, keys, device=device, past_seen_tokens=past_seen_tokens)
    return bias


def _reads_sound(model: Any) -> bool:
    return _SOUND in inspect.signature(model.get_encoder().forward).parameters


# --- Checks -----------------------------------------------------------------------------------------------------------


def check_parts(model: Any, seq: Sequence, arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` on this rank for inputs of an encoder-decoder that are not what its parts need."""
    name, how = type(model).__name__, encoder_of(model)
    for what in ("encoder_outputs", "past_key_values", "position_ids", "decoder_position_ids"):
        if arguments.get(what) is not None:
            raise InputError(
                f"{what}: {name} computes it itself over a ring; leave it out, and for generate() use "
                "`with ring.activate(None):`"
            )
    if seq.documents is not None or (seq.encoder is not None and seq.encoder.documents is not None):
        raise UnsupportedError(f"{name} over packed documents: pad the rows of a batch instead")
    if how == "sharded" and seq.encoder is None:
        raise InputError(
            f"{name} was prepared with encoder='sharded', but the active sequence has no encoder: activate "
            "seq.with_encoder(encoder_seq), or make both with shard_batch(ring, batch, model=model)"
        )
    if how == "replicated" and seq.encoder is not None:
        raise InputError(
            f"{name} was prepared with encoder='replicated', but the active sequence has an encoder, so its input may "
            "be sharded: activate seq.with_encoder(None), and pass the whole input of the encoder on every rank"
        )
    if arguments.get("decoder_input_ids") is None and arguments.get("decoder_inputs_embeds") is None:
        raise InputError(
            f"decoder_input_ids are missing, so {name} would shift the tokens of this rank: shift them over the whole "
            "text and shard them, as shard_batch(ring, batch, model=model) does"
        )
    if model.training and (random := _drawn_on_each_rank(model.config)):
        raise UnsupportedError(
            f"{random}: in training, each rank would draw by itself which layers or inputs to leave out; set it to 0, "
            "or apply_spec_augment to False"
        )
    for names, part in ((_OF_DECODER, seq), (_OF_ENCODER, seq.encoder)):
        for what, dim in names.items():
            if part is not None and isinstance(x := arguments.get(what), Tensor):
                check_tokens(part, x.shape[dim], what)


def check_encoder_inputs(model: Any, seq: Sequence, arguments: Mapping[str, Any]) -> None:
    """Raise `DisagreementError` on every rank if a replicated encoder gets different inputs. A collective call."""
    if encoder_of(model) == "replicated":
        inputs = {name: arguments[name] for name in (*_OF_ENCODER, _SOUND) if arguments.get(name) is not None}
        check_alike(seq.ring, inputs, "every rank must pass the whole input of a replicated encoder")


def _drawn_on_each_rank(config: Any) -> str:
    """Return the entry of a configuration by which a rank leaves out layers or inputs at random, or an empty text."""
    names = [name for name in ("encoder_layerdrop", "decoder_layerdrop", "layerdrop") if getattr(config, name, 0.0)]
    if getattr(config, "apply_spec_augment", False):
        names += [name for name in ("mask_time_prob", "mask_feature_prob") if getattr(config, name, 0.0)]
    return ", ".join(names)


# --- Batches ----------------------------------------------------------------------------------------------------------


def shard_pair(
    ring: Ring, batch: Mapping[str, Any], layout: LayoutName | str, model: Any
) -> tuple[Sequence, dict[str, Any]]:
    """Return the decoder's sequence, and this rank's inputs: see `shard_batch`. The batches of all ranks are equal."""
    if unknown := sorted(set(batch) - {*_OF_ENCODER, *_OF_DECODER, _SOUND, "num_items_in_batch"}):
        raise InputError(
            f"cannot shard the inputs {', '.join(unknown)} for {type(model).__name__}: remove them from the batch"
        )
    whole = dict(batch)
    if whole.get("decoder_input_ids") is None and whole.get("decoder_inputs_embeds") is None:
        if whole.get("labels") is None:
            raise InputError("the batch has neither decoder_input_ids nor labels to make them from")
        whole["decoder_input_ids"] = _shifted_right(model, whole["labels"])
    _refuse_padded_labels(whole)
    seq = _sequence_of(ring, whole, _OF_DECODER, layout, "causal")
    if encoder_of(model) == "sharded":
        seq = seq.with_encoder(_sequence_of(ring, whole, _OF_ENCODER, layout, "full"))
    parts = ((_OF_DECODER, seq), (_OF_ENCODER, seq.encoder))
    shards = {name: x for name, x in whole.items() if x is not None}
    for names, part in parts:
        shards |= {name: part.shard(whole[name]) for name in names if part is not None and whole.get(name) is not None}
    return seq, shards


def _sequence_of(
    ring: Ring, batch: Mapping[str, Any], names: Mapping[str, int], layout: LayoutName | str, purpose: str
) -> Sequence:
    """Return the sequence of the inputs with these names. Raises `InputError` if their lengths differ."""
    lengths = {name: batch[name].shape[1] for name in names if batch.get(name) is not None}
    if len(set(lengths.values())) != 1:
        raise InputError(f"the inputs {lengths} must have one number of tokens, and at least one must be given")
    seq = ring.sequence(next(iter(lengths.values())), layout=layout, for_=purpose)
    check_every_rank_has_tokens(seq)
    return seq


def _shifted_right(model: Any, labels: Tensor) -> Tensor:
    """Return the inputs of the decoder that the model computes from whole labels."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        ids: Tensor = model.prepare_decoder_input_ids_from_labels(labels)
        return ids
    # Some models have only a function in their file, which their forward calls.
    kind = type(model.get_base_model() if hasattr(model, "get_base_model") else model)
    files = [sys.modules[base.__module__] for base in kind.__mro__]
    shift: Any = next(file.shift_tokens_right for file in files if hasattr(file, "shift_tokens_right"))
    shifted: Tensor = shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)
    return shifted


def _refuse_padded_labels(batch: Mapping[str, Any]) -> None:
    labels, mask = batch.get("labels"), batch.get("decoder_attention_mask")
    if labels is not None and mask is not None and ((labels != -100) & (mask == 0)).any():
        raise InputError("labels at padded positions of decoder_attention_mask: set them to -100")


# --- Attention with a learned bias ------------------------------------------------------------------------------------


def attend_with_bias(
    seq: Sequence, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor, causal: bool, scale: float | None,
    dropout_p: float, dropout_seed: int | None, **_: None,
) -> Tensor:  # fmt: skip
    """Compute attention of this rank's queries to all keys, which every rank gathers. A collective call.

    The engines have no learned bias of the scores, and no gradient of one. This rank holds the keys and values of one
    layer of all ranks, and the scores of its queries.

    Shape:
        q, k, v: (batch, tokens, heads, dim)
        bias: (1, heads, tokens, keys of all ranks)
    """
    attended()
    with seq.ring.refused_by_all():
        if seq.mask is not None:
            raise UnsupportedError(
                f"seq carries mask={seq.mask.text}, and this model adds a position bias, which is supported for whole "
                "rows and documents; leave the mask out, or use a model with rotary positions"
            )
    k, v = seq.gather(k), seq.gather(v)
    queries, keys = seq.positions(), torch.arange(seq.length, device=q.device)
    edges = torch.tensor((seq.documents or (0, seq.length))[1:], device=q.device)
    reads = torch.bucketize(queries, edges, right=True)[:, None] == torch.bucketize(keys, edges, right=True)
    if causal:
        reads &= queries[:, None] >= keys
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    # The least number and not -inf: a padded query may attend to nothing, and its gradient must not be NaN.
    scores = scores.masked_fill(~reads, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    if dropout_seed is not None:
        weights = weights.masked_fill(_dropped(weights, seq, dropout_seed, dropout_p), 0.0) / (1 - dropout_p)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def _dropped(weights: Tensor, seq: Sequence, seed: int, p: float) -> Tensor:
    """Return which weights, (batch, heads, tokens, keys), are dropped: the same pairs as by every engine."""
    dropped = torch.empty_like(weights, dtype=torch.bool)
    start = 0
    for run in seq.layout.shards[seq.ring.rank]:
        stop = start + run.count
        for head in range(weights.shape[1]):  # one at a time, because a pair takes 40 bytes meanwhile
            is_dropped(
                dropped[:, head : head + 1, start:stop], StridedRange(head, 1), run, StridedRange(0, seq.length),
                seed, p,
            )  # fmt: skip
        start = stop
    return dropped

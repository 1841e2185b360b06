"""Ring attention for models of Hugging Face transformers, through their public hooks.

    ringattn.adapters.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ringattn")
    ringattn.adapters.transformers.prepare(model)
    with ring.activate(seq):
        loss = model(input_ids=seq.shard(tokens), position_ids=seq.positions()[None], ...).loss

`attention` holds the attention function, `host_masks` the mask function and the supported versions, `inputs` the checks
of the inputs of attention, `calls` the checks around each call of a model, `checks` the refusals, `routers` the router
loss of experts, `positions` the token positions that models compute themselves, `batches` sharded batches and whole
outputs, `states` the recurrences and convolutions of hybrid models, `towers` towers whose images are sharded, `memory`
the options of `prepare` that save memory, and `trainer` the Trainer.

Guarantees: results equal those of one process with `attn_implementation="eager"`, or an error says what to do. Masks,
windows, softcap, sinks and documents are computed or refused, and positions are compared with those of the sequence.
Without an active sequence, attention is local, as with `sdpa`, if `context.sequence_of` allows it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn

from ringattn.adapters.transformers.attention import attention_forward
from ringattn.adapters.transformers.batches import shard_batch
from ringattn.adapters.transformers.calls import (
    has_states_only,
    mark_parts,
    refuse_text_towers,
    watch,
    watch_rotary,
)
from ringattn.adapters.transformers.checks import accept_liger_loss, base_of, refuse_alibi
from ringattn.adapters.transformers.compressing import compress_keys
from ringattn.adapters.transformers.encoder_decoder import (
    EncoderName,
    choose_encoder,
    has_one_configuration,
    prepare_parts,
    refuse_encoder_decoder,
)
from ringattn.adapters.transformers.host_masks import HOST, mask_spec
from ringattn.adapters.transformers.latents import keep_latents
from ringattn.adapters.transformers.memory import save_memory
from ringattn.adapters.transformers.positions import shard_images as shard_images_of
from ringattn.adapters.transformers.positions import watch_images
from ringattn.adapters.transformers.routers import replace_router_loss
from ringattn.adapters.transformers.selecting import select_keys
from ringattn.adapters.transformers.states import watch_states
from ringattn.errors import InputError, UnsupportedError

__all__ = ["prepare", "register", "shard_batch"]

NAME = "ringattn"
"""The value of `attn_implementation`."""

prepared_models: WeakSet[nn.Module] = WeakSet()


def register() -> None:
    """Make `attn_implementation="ringattn"` known to transformers: attention and masks. Idempotent.

    Raises:
        UnsupportedError: The installed version of transformers differs where this adapter relies on it, see
            `host_versions`.

    Example:
        register()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ringattn")
    """
    HOST.require()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_spec)


def prepare(
    model: Any,
    *,
    tiled_mlp: int | None = None,
    chunked_loss: int | None = None,
    offload_checkpoints: bool = False,
    head_groups: int | None = None,
    shard_images: bool = False,
    encoder: EncoderName | None = None,
) -> Any:
    """Make the text part of a model attend through the ring, and check the inputs of every later call.

    The recurrences and convolutions of hybrid models are computed over the ring too, see docs/hybrid.md: functions that
    their modeling files look up by name are replaced for all models of the same file. Without an active sequence they
    compute as before.

    Towers for images and sound, which have a separate configuration, keep their attention and are not sharded. Under an
    active sequence of several ranks, a call needs the position_ids of this rank's tokens. A call with labels also needs
    shift_labels and num_items_in_batch. Other calls raise `InputError`.

    Args:
        model: A PreTrainedModel of transformers, or a PeftModel around one. It is changed in place.
        tiled_mlp: The number of tokens that a feed-forward computes at a time, and recomputes in backward. None: all
            tokens at once, without recomputation.
        chunked_loss: With labels, the number of tokens whose logits exist at a time; no logits are returned. None: all.
        offload_checkpoints: Checkpoint the layers and keep their inputs in host memory.
        head_groups: The number of groups of K/V heads that each layer attends with, one after another. It divides the
            K/V heads. Calls with gradients need use_cache=False. None: all heads at once.
        shard_images: Run the tower of each rank on some of the images, and gather the features. Every rank still gets
            the pixels of all images.
        encoder: How the encoder of an encoder-decoder runs. sharded: its tokens are sharded over `seq.encoder`.
            replicated: every rank runs it on the whole input. None: as before; at first sharded, or replicated if it
            reads sound.

    Returns:
        The model.

    Raises:
        InputError: A number is below 1, or an option differs from the one that the model was prepared with; or
            `encoder` is given for a model other than an encoder-decoder.
        UnsupportedError: The model's attention cannot be set or adds ALiBi itself, the model has a text encoder with a
            separate configuration, or its PEFT adapters do not work on one token at a time. With `tiled_mlp`: its
            feed-forwards are experts. With `head_groups`: an attention module cannot be divided by heads. With
            `chunked_loss`: its loss is not transformers' loss of causal models. With `shard_images`: images in this
            model are not supported. See also `register`.

    Example:
        model = prepare(AutoModelForCausalLM.from_pretrained(name))
        with ring.activate(seq):
            logits = model(input_ids=seq.shard(tokens), position_ids=seq.positions()[None]).logits
    """
    register()
    whole, model = model, base_of(model)
    has_encoder = has_one_configuration(model.config)
    if has_encoder:
        refuse_encoder_decoder(model)
        encoder = choose_encoder(model, encoder)
        if offload_checkpoints or any(option is not None for option in (tiled_mlp, chunked_loss, head_groups)):
            raise UnsupportedError(
                f"tiled_mlp, chunked_loss, head_groups and offload_checkpoints were not compared with one process for "
                f"{type(model).__name__}, an encoder-decoder; leave them out"
            )
    elif encoder is not None:
        raise InputError(f"encoder={encoder!r}: {type(model).__name__} is not an encoder-decoder; leave it out")
    # For these, `get_text_config` would return a copy for one of the parts.
    has_own = has_encoder or not hasattr(model.config, "get_text_config")
    text = model.config if has_own else model.config.get_text_config(decoder=True)
    refuse_alibi(model, text)
    # A composite model (with towers) gets the implementation for its text part only.
    if text is model.config:
        model.set_attn_implementation(NAME)
    else:
        names = [name for name in model.config.sub_configs if getattr(model.config, name) is text]
        model.set_attn_implementation(dict.fromkeys(names, NAME))
    # The parts are marked first, because the functions below distinguish text from towers by these marks.
    mark_parts(model, text)
    watch_states(model)
    if text._attn_implementation != NAME and not has_states_only(model):
        raise UnsupportedError(
            f"the attention of {type(model).__name__} cannot be set to {NAME!r}; only models whose attention uses "
            "transformers' AttentionInterface can attend through a ring"
        )
    refuse_text_towers(model)
    keep_latents(model)
    select_keys(model)
    compress_keys(model)
    accept_liger_loss(model)
    replace_router_loss(model)  # before `watch`, which wraps the forward
    if encoder is not None:
        prepare_parts(model, encoder)
    watch(model)  # again for a prepared model: a patch may have replaced its forward since
    if model not in prepared_models:
        watch_rotary(model)
        watch_images(model)
        prepared_models.add(model)
    if shard_images:
        shard_images_of(model)
    # This comes last, because it wraps the forward and the loss that `watch` has set.
    save_memory(model, tiled_mlp, chunked_loss, offload_checkpoints, head_groups)
    return whole

"""Ring attention for models of Hugging Face transformers, through their public hooks.

    ringattn.adapters.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ringattn")
    ringattn.adapters.transformers.prepare(model)
    with ring.activate(seq):
        loss = model(input_ids=seq.shard(tokens), position_ids=seq.positions()[None], ...).loss

`attention` holds the attention function and the masks, `calls` the checks around each call of a model, `checks` the
refusals, `positions` the token positions that models compute themselves, `batches` sharded batches and whole outputs,
`memory` the options of `prepare` that save memory, and `trainer` the Trainer.

Guarantees: results equal those of one process with `attn_implementation="eager"`, or an error says what to do. Masks,
windows, softcap, sinks and documents are computed or refused, and positions are compared with those of the sequence.
Without an active sequence, attention is local, as with `sdpa`, where `context.sequence_of` allows it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn

from ringattn.adapters.transformers.attention import attention_forward, mask_spec, require_known
from ringattn.adapters.transformers.batches import shard_batch
from ringattn.adapters.transformers.calls import mark_parts, refuse_text_towers, watch, watch_rotary
from ringattn.adapters.transformers.checks import base_of, know_liger, refuse_alibi
from ringattn.adapters.transformers.memory import save_memory
from ringattn.adapters.transformers.positions import watch_images
from ringattn.errors import UnsupportedError

__all__ = ["prepare", "register", "shard_batch"]

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

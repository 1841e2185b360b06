"""Which modules of a model are its text, whose tokens lie over ranks, and which are towers for images and sound.

Every rank has the whole of what a tower sees, so that it attends locally.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.adapters.alike import refused_by_all
from ringattn.adapters.context import attends_locally
from ringattn.adapters.transformers_mask import MaskSpec
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import active_sequence

PART = "ringattn_part"
"""The attribute by which `prepare` marks modules as "text" or "tower"; copies of a model keep it."""


def mark_parts(model: nn.Module, text: Any) -> None:
    """Modules of the text's configuration are text, modules of another sub-model's are a tower's."""
    towers = _parts_of(model.config) - _parts_of(text)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is text or id(config) in towers:
            setattr(module, PART, "text" if config is text else "tower")
    _mark_local(model)


def refuse_text_towers(model: Any) -> None:
    """Raise `UnsupportedError` for an encoder-decoder whose encoder reads the text and has a configuration of its own.

    `mark_parts` has taken it for a tower.
    """
    if not getattr(model.config, "is_encoder_decoder", False):
        return
    for part in model.modules():
        if getattr(part, PART, None) != "tower" or part.config is model.config:
            continue
        if "input_ids" in inspect.signature(part.forward).parameters:
            name = type(model).__name__
            raise UnsupportedError(
                f"{name} reads its text with {type(part).__name__}, which has a configuration of its own and would "
                "see this rank's tokens alone: prepare and call the encoder and the decoder by themselves, the decoder "
                "with the encoder's last_hidden_state as encoder_hidden_states beside an encoder_attention_mask of ones"
            )


def _mark_local(module: nn.Module) -> None:
    """What is a tower, with all that it holds, attends locally by whatever function it calls."""
    parts = {getattr(part, PART, None) for part in module.modules()}
    if getattr(module, PART, None) == "tower" and "text" not in parts:
        attends_locally(module)
        return
    for child in module.children():
        _mark_local(child)


def _parts_of(config: Any) -> set[int]:
    """The configurations of all sub-models, by identity."""
    subs = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return {id(config)}.union(*(_parts_of(sub) for sub in subs if sub is not None))


def is_tower(module: nn.Module, query: Tensor, mask: object) -> bool:
    """Whether it attends over an image or sound, of which every rank has the whole.

    Known of modules that `prepare` has marked. Of others only what looks like a tower and gets other numbers of tokens
    than a shard has is one: raises `InputError` on all ranks where it gets as many.
    """
    if (part := getattr(module, PART, None)) is not None:
        return bool(part == "tower")
    if not _looks_like_tower(module, mask):
        return False
    if torch._C._current_graph_task_id() != -1:  # inside backward, of a forward pass that was checked
        return True
    seq = active_sequence()
    if seq is None:
        return False  # attention is local where `sequence_of` allows that
    if seq.ring.world_size > 1 and query.shape[2] == seq.counts[seq.ring.rank]:
        with refused_by_all(seq.ring):
            raise InputError(
                f"rank {seq.ring.rank}: {type(module).__name__} may be a tower that sees a whole image, or text of "
                f"which the {query.shape[2]} tokens are this rank's: call ringattn.adapters.transformers.prepare("
                "model) once, which tells them apart, or call a tower inside `with ring.activate(None):`"
            )
    return True


def _looks_like_tower(module: nn.Module, mask: object) -> bool:
    if getattr(module, "is_causal", False) or (isinstance(mask, MaskSpec) and mask.causal):
        return False
    config: Any = getattr(module, "config", None)
    kind = str(getattr(config, "model_type", ""))
    seen = any(hasattr(config, name) for name in ("patch_size", "image_size", "num_mel_bins"))
    return seen or any(word in kind for word in ("vision", "audio", "siglip", "clip_vision"))

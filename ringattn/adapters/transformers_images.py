"""Images and videos in the text of Qwen's vision-language models, whose rotary positions have three rows, over a ring.

Every rank has all images and runs the tower on them; of the tower's features it takes those of its own tokens. So the
gradients of the tower are this rank's part, like all others. Positions (time, height, width) are what the model makes
of whole rows, and are compared with that.
Guarantees: for `KNOWN` models what one process computes; images given to any other whose tokens stand in the text are
refused by name, on all ranks.
Checked with transformers 5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.adapters.alike import refused_by_all
from ringattn.adapters.transformers_checks import short
from ringattn.adapters.transformers_probe import probe_copy
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import active_sequence
from ringattn.sequence import Sequence

KNOWN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""By `config.model_type`."""

PIXELS = {"pixel_values": "image", "pixel_values_videos": "video"}
"""What brings images, and what kind of features the model makes of it."""

WHOLE = (*PIXELS, "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""Inputs of images that every rank gets as they are."""

_WORDS = ("pixel", "image", "video", "audio", "input_features", "mm_encoder")
"""Parts of the names of inputs that bring what a tower sees."""


def watch_images(model: nn.Module) -> None:
    """Check the images of every call of a model from now on, and give a rank's tokens their features."""
    for module in model.modules():
        if hasattr(module, "get_placeholder_mask"):
            module.register_forward_pre_hook(_before, with_kwargs=True)


def image_places(model: Any, batch: Mapping[str, Any]) -> Tensor | None:
    """The positions that a model makes of whole rows with images, (3, rows, tokens); None: without images.

    Raises `InputError` where they cannot be asked of `model`, and beside other positions.
    """
    if all(batch.get(name) is None for name in PIXELS):
        return None
    found = [module for module in model.modules() if _is_known(module)] if isinstance(model, nn.Module) else []
    if not found or batch.get("input_ids") is None:
        raise InputError(
            f"a batch with images needs input_ids and model=, one of {', '.join(KNOWN)}, which makes the positions of "
            "its tokens; for others make inputs_embeds of the whole batch on every rank, and shard those"
        )
    if batch.get("position_ids") is not None:
        raise InputError("position_ids beside images: leave them out, the model makes them of the images' sizes")
    return _places(found[0], batch)


def _is_known(module: Any) -> bool:
    """Whether it takes features that were made before, and makes positions, as `KNOWN` models of 5.23 do."""
    if getattr(getattr(module, "config", None), "model_type", "") not in KNOWN:
        return False
    if not hasattr(module, "get_rope_index") or not hasattr(module, "get_placeholder_mask"):
        return False
    makes = inspect.signature(module.get_rope_index).parameters
    return "mm_encoder_outputs" in inspect.signature(module.forward).parameters and "mm_token_type_ids" in makes


def _places(module: Any, whole: Mapping[str, Any]) -> Tensor:
    """(3, rows, tokens), of whole inputs."""
    ids = whole["input_ids"]
    kinds = whole.get("mm_token_type_ids")
    if kinds is None:
        kinds = (ids == module.config.image_token_id).int() + 2 * (ids == module.config.video_token_id).int()
    names = inspect.signature(module.get_rope_index).parameters
    given = {name: whole.get(name) for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
    try:
        places: Tensor = probe_copy(module).get_rope_index(
            input_ids=ids, mm_token_type_ids=kinds, attention_mask=whole.get("attention_mask"),
            **{name: x for name, x in given.items() if name in names},
        )[0]  # fmt: skip
    except Exception as error:
        sizes = {name: x.tolist() for name, x in given.items() if x is not None}
        raise InputError(
            f"{type(module).__name__} finds no positions of whole rows with {int((kinds != 0).sum())} tokens of images "
            f"or videos, of sizes {sizes} ({type(error).__name__}: {error})"
        ) from error
    return places


@torch.compiler.disable
def _before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    seq = active_sequence()
    if seq is None or seq.ring.world_size == 1 or torch._C._current_graph_task_id() != -1:
        return None
    given = {**inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments, **kwargs}
    given = {name: x for name, x in given.items() if x is not None and name != "kwargs"}
    with refused_by_all(seq.ring):
        brings = (Tensor, list, tuple, dict)
        seen = sorted(name for name, x in given.items() if isinstance(x, brings) and any(w in name for w in _WORDS))
        if not set(seen) & set(PIXELS):
            _refuse_towers(module, seen, given, seq)
            return None
        if not _is_known(module):
            raise UnsupportedError(_OTHERS.format(type(module).__name__, ", ".join(seen)))
        if set(seen) - set(WHOLE) or "input_ids" not in given:
            raise UnsupportedError(
                f"{type(module).__name__} over a ring takes images as {', '.join(WHOLE)} beside input_ids, and got "
                f"{', '.join(seen)}{'' if 'input_ids' in given else ' without input_ids'}"
            )
    tokens = ("input_ids", "mm_token_type_ids", "attention_mask")
    whole: dict[str, Any] = {name: seq.gather(given[name]) for name in tokens if name in given}
    whole |= {name: given[name] for name in seen}
    with refused_by_all(seq.ring):
        places = _places(module, whole)
        _check_places(given.get("position_ids"), seq.shard(places, 2), seq)
    features = {}
    for name, kind in PIXELS.items():
        if name in given:
            features[kind] = _of_this_rank(module, kind, given[name], whole, seq)
            given[name] = None
    return (), {**given, "mm_encoder_outputs": features}


_OTHERS = (
    "{} puts images into the text's tokens, and over a ring this is known of " + ", ".join(KNOWN) + " only; it got {}: "
    "make inputs_embeds of the whole batch on every rank, images included, and give it seq.shard(inputs_embeds)"
)


def _refuse_towers(module: nn.Module, seen: list[str], given: Mapping[str, Any], seq: Sequence) -> None:
    """Raise for what a tower would see, and for positions of three rows that are not a text's."""
    if seen and not (_is_known(module) and set(seen) <= set(WHOLE)):
        raise UnsupportedError(_OTHERS.format(type(module).__name__, ", ".join(seen)))
    ids = given.get("position_ids")
    if isinstance(ids, Tensor) and ids.dim() == 3 and "input_ids" in given:
        texts = (seq.positions(per_document).to(ids.device) for per_document in (False, True))
        if not any(torch.equal(ids, one.expand_as(ids)) for one in texts):
            raise InputError(
                f"rank {seq.ring.rank}: position_ids are {short(ids[0, 0])}, or others in the {len(ids)} rows, and not "
                "those of this rank's tokens of a text without images; pass position_ids=seq.positions()[None], or the "
                "images too"
            )


def _check_places(ids: Any, wanted: Tensor, seq: Sequence) -> None:
    """Raise `InputError` unless these are the three rows, after one of the text's own positions or alone."""
    rows = ids[-3:] if isinstance(ids, Tensor) and ids.dim() == 3 and len(ids) in (3, 4) else None
    if rows is None or rows.shape != wanted.shape or not torch.equal(rows, wanted.to(rows)):
        raise InputError(
            f"rank {seq.ring.rank}: position_ids {tuple(getattr(ids, 'shape', ()))} are not the (3, rows, tokens) that "
            "the model makes of whole rows with these images; make them with shard_batch(ring, batch, "
            "model=model), which shards model.model.get_rope_index(...)[0] in dimension 2"
        )


def _of_this_rank(module: Any, kind: str, pixels: Tensor, whole: Mapping[str, Any], seq: Sequence) -> Any:
    """The features of this rank's tokens, out of those of all images, in the form in which the model makes them."""
    ids = whole["input_ids"]
    stands = ids == getattr(module.config, f"{kind}_token_id")
    # Features stand in the order of the tokens of row after row, of the whole batch.
    number = (stands.flatten().cumsum(0) - 1).view_as(ids)
    mine = seq.shard(number)[seq.shard(stands)]
    made = getattr(module, f"get_{kind}_features")(pixels, whole[f"{kind}_grid_thw"], return_dict=True)
    features = torch.cat(list(made.pooler_output))
    if len(features) != int(stands.sum()):
        with refused_by_all(seq.ring):
            raise InputError(f"{len(features)} features of {kind}s for {int(stands.sum())} tokens in the whole batch")
    made.pooler_output = (features[mine],)
    if getattr(made, "deepstack_features", None) is not None:
        made.deepstack_features = [(torch.cat(list(one))[mine],) for one in made.deepstack_features]
    return made

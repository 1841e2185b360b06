"""Positions that a model computes itself, for whole rows: from tokens, from masks, or from images.

Most models count 0, 1, .... RoBERTa and similar models start after the padding index and skip padding, OPT counts the
real tokens of its mask, and the vision-language models of Qwen give images positions by time, height and width.

Guarantees: no weight is read, only the positions are computed, and the model is not changed.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ringattn.adapters.transformers.checks import (
    has_tree,
    may_compute_positions,
    positions_call,
    short,
    text_positions,
)
from ringattn.adapters.transformers.towers import SHARDED, ImageShards
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import activate, active_sequence
from ringattn.sequence import Sequence

# --- Positions that a model counts ------------------------------------------------------------------------------------
# A probe runs the forward pass of a copy up to the embedding table of positions. Every table on the way returns zeros.
# The indices of the look-up in that table are the positions.

_PROBE_TOKENS = 8
"""Enough for two padded tokens in front, one at the end, and real ones between."""

_COMPUTING = (F.linear, F.layer_norm, F.dropout, F.conv1d, torch.matmul)
"""The probe ends at the first of these or at the first layer. A model looks up its positions before."""


class _Counting(NamedTuple):
    """The look-up of positions in a model whose positions are not 0, 1, ...."""

    lookup: int
    """The index of the look-up from the end, -1 for the last, because a call with inputs_embeds looks up no tokens."""
    added: int
    """The offset that the model adds to given position_ids."""


_known: WeakKeyDictionary[nn.Module, _Counting | None] = WeakKeyDictionary()


class _Lookups(TorchFunctionMode):
    """A mode that records the indices of all look-ups in tables, and ends the probe at the first computation."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COMPUTING:
            raise ProbeEndedError
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        indices, table = args[:2]
        self.indices.append(indices)
        # Zeros of stride 0 take no memory. The weights of the table are not read: they may be sharded or on meta.
        return torch.zeros((), dtype=table.dtype, device=indices.device).expand(*indices.shape, table.shape[-1])


def computes_positions(model: Any) -> bool:
    """Return whether `model` computes positions for whole rows that differ from 0, 1, ...."""
    if model not in _known:
        _known[model] = _counting(model)
    return _known[model] is not None


def model_positions(
    model: Any, inputs: dict[str, Tensor], documents: list[int] | tuple[int, ...] | None = None
) -> Tensor | None:
    """Return the position_ids, (rows, tokens), that `model` computes if it gets none, or None for 0, 1, ....

    `inputs`: input_ids or inputs_embeds, and attention_mask if there is one, of whole rows. `documents`: cumulative
    lengths; each document then counts as a row. Raises `UnsupportedError` for a model that may compute other positions
    but cannot be probed.
    """
    if not computes_positions(model):
        return None
    counting = _known[model]
    assert counting is not None
    tokens = inputs["input_ids" if "input_ids" in inputs else "inputs_embeds"].shape[1]
    cuts = documents or (0, tokens)
    parts = []
    for start, stop in pairwise(cuts):
        lookups = _lookups(model, {name: x[:, start:stop] for name, x in inputs.items()})
        if len(lookups) < -counting.lookup:
            return None  # ESM: its inputs_embeds include positions already, and nothing is looked up
        parts.append(lookups[counting.lookup] - counting.added)
    return torch.cat(parts, 1)


def _counting(model: Any) -> _Counting | None:
    """Return how the model looks up positions, or None if they are 0, 1, ... or the look-up is unknown.

    The model is probed with rows that are padded in their tokens, in their mask, in both and not at all.
    """
    # Row 0 has no padding, row 1 has padding in both, row 2 in its mask only, row 3 in its tokens only.
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    pad = 1 if pad is None else pad
    padding = torch.zeros(4, _PROBE_TOKENS, dtype=torch.bool)
    padding[1:, :2], padding[1:, -1] = True, True
    in_tokens, in_mask = padding.clone(), padding.clone()
    in_tokens[2], in_mask[3] = False, False
    device = next(model.parameters()).device
    device = torch.device("cpu") if device.type == "meta" else device
    rows = {"input_ids": torch.where(in_tokens, pad, 5 if pad != 5 else 6), "attention_mask": (~in_mask).long()}
    rows = {name: x.to(device) for name, x in rows.items()}
    plain = torch.arange(_PROBE_TOKENS, device=device).expand(4, -1)
    # One probe with position_ids identifies the look-up that uses them. One without shows what the model computes.
    with_ids, without_ids = _lookups(model, {**rows, "position_ids": plain}), _lookups(model, rows)
    if len(with_ids) != len(without_ids):
        return None
    for number, (given_ids, computed_ids) in enumerate(zip(with_ids, without_ids, strict=True)):
        added = int(given_ids.flatten()[0])
        if given_ids.dim() == 2 and torch.equal(given_ids.expand(4, -1), plain + added):  # the table of positions
            # Only positions of real tokens decide, because those of padding have no effect.
            is_plain = torch.equal(computed_ids.expand(4, -1)[~in_mask], given_ids.expand(4, -1)[~in_mask])
            return None if is_plain else _Counting(number - len(without_ids), added)
    return None


def _lookups(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the indices of each look-up in a table during a forward pass, in order."""
    copied = probe_copy(model)
    # The copy is in evaluation mode and the probe ends before dropout, so no random number is drawn. Do not save the
    # generator's state here: in torch, two threads can then deadlock between the generator's lock and the GIL.
    with torch.no_grad(), activate(None), _Lookups() as lookups:
        try:
            copied(**inputs)
        except ProbeEndedError:
            pass
        except Exception as error:
            if may_compute_positions(type(model).__mro__):
                raise UnsupportedError(
                    f"{type(model).__name__} may count positions from padding or the mask, and cannot be probed for "
                    "them with input_ids and attention_mask only; use another model"
                ) from error
            return []  # a model that cannot be called like this computes no positions from these inputs
    return lookups.indices


# --- Copies of a model for probes -------------------------------------------------------------------------------------
# A copy shares the parameters, but copies buffers, attributes and configurations. No hook runs in it.

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module")
"""Names under which torch.compile and FSDP1 keep the wrapped module. A call of FSDP1's wrapper would gather weights."""


class ProbeEndedError(Exception):
    """The forward pass of a copy has reached a layer or another operation that ends the probe."""


@torch.no_grad()
def probe_copy(model: nn.Module) -> Any:
    """Return a copy of `model` in evaluation mode, for one probe.

    Each call of a module goes directly to the `forward` of its class. So no hook runs, not even torch's global ones,
    and no `forward` that was set on an instance. A call of a member of an `nn.ModuleList` raises `ProbeEndedError`.
    Objects other than modules, tensors, plain containers and configurations are shared.
    """
    return _Copies().module(model)


class _Copies:
    """The copies of objects, by the id of the original. If two modules share an object, their copies share its copy."""

    def __init__(self) -> None:
        self.by_id: dict[int, Any] = {}
        self.originals: list[Any] = []
        """Originals are kept alive, so that no other object reuses an id."""

    def module(self, module: nn.Module) -> Any:
        """Return the copy of a module, or of the module that it wraps."""
        for name in _WRAPPED:
            if (wrapped := module._modules.get(name)) is not None:
                return self.module(wrapped)
        if id(module) in self.by_id:
            return self.by_id[id(module)]
        copied = self._keep(module, object.__new__(type(module)))
        for name, value in list(vars(module).items()):
            if name == "_modules" and isinstance(module, nn.ModuleList):
                vars(copied)[name] = {index: _Layer(self, layer) for index, layer in value.items()}
            elif name != "forward":
                vars(copied)[name] = self.value(value)
        # `nn.Module.__call__` calls `_compiled_call_impl` instead of the hooks and `forward`.
        vars(copied).update(training=False, _compiled_call_impl=MethodType(type(module).forward, copied))
        return copied

    def value(self, value: Any) -> Any:
        """Return the copy of an attribute or of a member of a container."""
        from transformers.configuration_utils import PretrainedConfig  # this name exists in 4.57 too

        if id(value) in self.by_id:
            return self.by_id[id(value)]
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, PretrainedConfig):
            return copy.deepcopy(value, self.by_id)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.module(value.__self__))
        if type(value) is partial:
            return partial(self.value(value.func), *map(self.value, value.args), **self._members(value.keywords))
        if type(value) in (list, tuple, set):
            return self._keep(value, type(value)(map(self.value, value)))
        if type(value) in (dict, OrderedDict, defaultdict):
            copied = self._keep(value, copy.copy(value))
            copied.update(self._members(value))
            return copied
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            return self._keep(value, value.detach().clone())
        return value

    def _members(self, members: dict[Any, Any]) -> dict[Any, Any]:
        return {key: self.value(member) for key, member in list(members.items())}

    def _keep(self, original: Any, copied: Any) -> Any:
        self.by_id[id(original)] = copied
        self.originals.append(original)
        return copied


class _Layer(nn.Module):
    """A stand-in for a member of an `nn.ModuleList`. It has the attributes of a copy, but a call ends the probe."""

    def __init__(self, copies: _Copies, layer: nn.Module) -> None:
        super().__init__()
        self.eval()
        vars(self).update(copies=copies, layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.copies.module(self.layer), name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ProbeEndedError


# --- Positions and features of images ---------------------------------------------------------------------------------
# Every rank has all images and runs the tower on them, but keeps only the features of its tokens. So the gradients of
# the tower are this rank's part of the sum, like all others. With `shard_images`, it runs the tower on some images and
# gathers the features. Images for models outside `KNOWN` are refused on all ranks. Checked with transformers 5.23.

ROTATED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Supported models that give images positions of three rows, by `config.model_type`."""

COUNTED = (
    "aya_vision", "cohere2_vision", "gemma3", "got_ocr2", "internvl", "lighton_ocr", "llava", "llava_next",
    "llava_onevision", "mistral3", "vipllava",
)  # fmt: skip
"""Supported models that count the tokens of images like those of text."""

KNOWN = (*ROTATED, *COUNTED)

PIXELS = {"pixel_values": "image", "pixel_values_videos": "video"}
"""Inputs with pixels, and the kind of features that the model computes from them."""

IMAGE_INPUTS = (*PIXELS, "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_sizes")
"""Inputs of images that every rank gets as they are."""

_WORDS = ("pixel", "image", "video", "audio", "input_features", "mm_encoder")
"""Parts of the names of a tower's inputs."""


def watch_images(model: nn.Module) -> None:
    """Check the images of every later call of a model, and select the features of this rank's tokens."""
    for module in model.modules():
        if hasattr(module, "get_placeholder_mask"):
            module.register_forward_pre_hook(_before, with_kwargs=True)


def shard_images(model: nn.Module) -> None:
    """Make each rank of a ring run the tower of a model on some of the images in every later call.

    Raises `UnsupportedError` if the model is not one of `KNOWN`.
    """
    modules = [*filter(_is_known, model.modules())]
    if not modules:
        raise UnsupportedError(
            f"shard_images: {type(model).__name__} takes no images, or not like {', '.join(KNOWN)}; leave it out"
        )
    for module in modules:
        setattr(module, SHARDED, True)


def image_positions(model: Any, batch: Mapping[str, Any]) -> Tensor | None:
    """Return the positions that a model computes for whole rows with images, (3, rows, tokens).

    None: there are no images, or the model counts their tokens like those of text. Raises `InputError` if the model is
    not one of `KNOWN`, or computes positions and the batch has position_ids as well.
    """
    if all(batch.get(name) is None for name in PIXELS):
        return None
    modules: list[Any] = [*filter(_is_known, model.modules())] if isinstance(model, nn.Module) else []
    if not modules or batch.get("input_ids") is None:
        raise InputError(
            f"a batch with images needs input_ids and model=, one of {', '.join(KNOWN)}; for other models, compute "
            "inputs_embeds of the whole batch on every rank, and shard those"
        )
    if modules[0].config.model_type in COUNTED:
        return None
    if batch.get("position_ids") is not None:
        raise InputError(
            "position_ids with images: leave them out, the model computes them from the sizes of the images"
        )
    return _compute_image_positions(modules[0], batch)


def _is_known(module: Any) -> bool:
    """Return whether a module takes image features and computes positions, like `KNOWN` models of transformers 5.23."""
    kind = getattr(getattr(module, "config", None), "model_type", "")
    if kind not in KNOWN or not hasattr(module, "get_placeholder_mask"):
        return False
    if "mm_encoder_outputs" not in inspect.signature(module.forward).parameters:
        return False
    if kind in COUNTED:
        return True
    return hasattr(module, "get_rope_index") and (
        "mm_token_type_ids" in inspect.signature(module.get_rope_index).parameters
    )


def _compute_image_positions(module: Any, whole: Mapping[str, Any]) -> Tensor:
    """Return the positions (3, rows, tokens) of whole inputs, computed by a copy of the module."""
    ids = whole["input_ids"]
    kinds = whole.get("mm_token_type_ids")
    if kinds is None:
        kinds = (ids == module.config.image_token_id).int() + 2 * (ids == module.config.video_token_id).int()
    names = inspect.signature(module.get_rope_index).parameters
    sizes_by_name = {name: whole.get(name) for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
    try:
        positions: Tensor = probe_copy(module).get_rope_index(
            input_ids=ids, mm_token_type_ids=kinds, attention_mask=whole.get("attention_mask"),
            **{name: x for name, x in sizes_by_name.items() if name in names},
        )[0]  # fmt: skip
    except Exception as error:
        printed_sizes = {name: x.tolist() for name, x in sizes_by_name.items() if x is not None}
        raise InputError(
            f"{type(module).__name__} cannot compute positions for whole rows with {int((kinds != 0).sum())} image or "
            f"video tokens of sizes {printed_sizes} ({type(error).__name__}: {error}); check the tokens and the sizes"
        ) from error
    return positions


@torch.compiler.disable
def _before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    seq = active_sequence()
    # The id is -1 outside of backward. Recomputation skips the checks below, which communicate.
    if seq is None or seq.ring.world_size == 1 or torch._C._current_graph_task_id() != -1:
        return None
    arguments = {**inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments, **kwargs}
    arguments = {name: x for name, x in arguments.items() if x is not None and name != "kwargs"}
    with seq.ring.refused_by_all():
        containers = (Tensor, list, tuple, dict)
        tower_inputs = sorted(
            name for name, x in arguments.items() if isinstance(x, containers) and any(word in name for word in _WORDS)
        )
        if not set(tower_inputs) & set(PIXELS):
            _refuse_towers(module, tower_inputs, arguments, seq)
            return None
        if not _is_known(module):
            raise UnsupportedError(_OTHERS.format(type(module).__name__, ", ".join(tower_inputs)))
        if set(tower_inputs) - set(IMAGE_INPUTS) or "input_ids" not in arguments:
            raise UnsupportedError(
                f"{type(module).__name__} over a ring takes images as {', '.join(IMAGE_INPUTS)} together with "
                "input_ids, but got "
                f"{', '.join(tower_inputs)}{'' if 'input_ids' in arguments else ' without input_ids'}"
            )
        mask = arguments.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise UnsupportedError(
                f"{type(module).__name__} over a ring takes images only with an attention_mask of two dimensions, or "
                "without one"
            )
        if has_tree(seq) and module.config.model_type in ROTATED:
            raise UnsupportedError(
                f"{type(module).__name__} computes positions of images in packed order, not along the paths of a tree; "
                "leave the images out, or give each sequence its own row"
            )
    tokens = ("input_ids", "mm_token_type_ids", "attention_mask")
    whole: dict[str, Any] = {name: seq.gather(arguments[name]) for name in tokens if name in arguments}
    if module.config.model_type in ROTATED:
        with seq.ring.refused_by_all():
            positions = _compute_image_positions(module, whole | {name: arguments[name] for name in tower_inputs})
            _check_image_positions(arguments.get("position_ids"), seq.shard(positions, 2), seq)
    # The model skips its tower if it gets features, so every pixel input is replaced by features.
    features = {}
    for name, kind in PIXELS.items():
        if name in arguments:
            features[kind] = _features_of_this_rank(module, kind, arguments, whole["input_ids"], seq)
    arguments |= dict.fromkeys(PIXELS.keys() & arguments.keys())
    return (), {**arguments, "mm_encoder_outputs": features}


_OTHERS = (
    "{} inserts images into the text's tokens, which over a ring is supported for " + ", ".join(KNOWN) + " only; it "
    "got {}: compute inputs_embeds of the whole batch with images on every rank, and pass seq.shard(inputs_embeds)"
)


def _refuse_towers(module: nn.Module, tower_inputs: list[str], arguments: Mapping[str, Any], seq: Sequence) -> None:
    """Raise for inputs of a tower, and for three-dimensional positions that are not those of a text."""
    if tower_inputs and not (_is_known(module) and set(tower_inputs) <= set(IMAGE_INPUTS)):
        raise UnsupportedError(_OTHERS.format(type(module).__name__, ", ".join(tower_inputs)))
    ids = arguments.get("position_ids")
    if isinstance(ids, Tensor) and ids.dim() == 3 and "input_ids" in arguments:
        if not any(torch.equal(ids, expected.to(ids).expand_as(ids)) for expected in text_positions(seq)):
            raise InputError(
                f"rank {seq.ring.rank}: position_ids are {short(ids[0, 0])} (first of {len(ids)} rows), not those of "
                "this rank's tokens of a text without images; pass "
                f"position_ids={positions_call(seq)}, or pass the images as well"
            )


def _check_image_positions(ids: Any, expected: Tensor, seq: Sequence) -> None:
    """Raise `InputError` unless the last three rows of `ids` are the expected ones. A row of text may come first."""
    rows = ids[-3:] if isinstance(ids, Tensor) and ids.dim() == 3 and len(ids) in (3, 4) else None
    if rows is None or rows.shape != expected.shape or not torch.equal(rows, expected.to(rows)):
        raise InputError(
            f"rank {seq.ring.rank}: position_ids {tuple(getattr(ids, 'shape', ()))} are not the (3, rows, tokens) that "
            "the model computes for whole rows with these images; make them with shard_batch(ring, batch, "
            "model=model), which shards model.model.get_rope_index(...)[0] in dimension 2"
        )


def _features_of_this_rank(module: Any, kind: str, arguments: Mapping[str, Any], ids: Tensor, seq: Sequence) -> Any:
    """Run the tower on the images, and return the features of this rank's tokens in the model's output class.

    `arguments`: those of the call. `ids`: the tokens of the whole batch, (rows, tokens).
    """
    is_feature = ids == getattr(module.config, f"{kind}_token_id")
    # Features are in the order of their tokens, row by row over the whole batch.
    number = (is_feature.flatten().cumsum(0) - 1).view_as(ids)
    local = seq.shard(number)[seq.shard(is_feature)]
    run_tower = getattr(module, f"get_{kind}_features")
    names = inspect.signature(run_tower).parameters
    inputs = {name: x for name, x in arguments.items() if name in names}
    if getattr(module, SHARDED, False):
        pixels = next(name for name in PIXELS if PIXELS[name] == kind)
        images = {name: x for name, x in inputs.items() if name in IMAGE_INPUTS}
        shards = ImageShards(module, pixels, images, seq)
        with seq.ring.refused_by_all():
            outputs = run_tower(**inputs | shards.inputs, return_dict=True)
    else:
        shards, outputs = None, run_tower(**inputs, return_dict=True)
    # One tensor for each image, or one of all images.
    is_list = isinstance(outputs.pooler_output, list | tuple)
    parts = [part.flatten(0, -2) for part in outputs.pooler_output]
    deepstack = getattr(outputs, "deepstack_features", None)
    features, *levels = [torch.cat(parts), *(torch.cat(list(level)) for level in deepstack or ())]
    if shards is not None:
        features, *levels = shards.gather(parts, [features, *levels])
    if len(features) != int(is_feature.sum()):
        with seq.ring.refused_by_all():
            raise InputError(f"{len(features)} {kind} features for {int(is_feature.sum())} tokens in the whole batch")
    outputs.pooler_output = (features[local],) if is_list else features[local]
    if deepstack is not None:
        outputs.deepstack_features = [(level[local],) for level in levels]
    return outputs

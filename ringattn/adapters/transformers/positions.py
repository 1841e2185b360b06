"""Positions that a model computes by itself, for whole rows: counted from tokens or masks, or from images.

Most models count 0, 1, .... RoBERTa and its relatives start after the padding index and skip padding, OPT counts the
real tokens of its mask, and the vision-language models of Qwen place images by time, height and width.

Guarantees: no weight is read, nothing but the positions is computed, and the model stays as it was.
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

from ringattn.adapters.transformers.checks import may_count_by_itself, short
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import activate, active_sequence
from ringattn.sequence import Sequence

# --- Positions that a model counts by itself --------------------------------------------------------------------------
# The forward pass of a copy runs up to the table of its positions, with every table on the way replaced by zeros. The
# indices that it looks up there are the positions.

_PROBE_TOKENS = 8

_COMPUTING = (F.linear, F.layer_norm, F.dropout, F.conv1d, torch.matmul)
"""A model has looked up its positions before the first of these, and before its first layer."""


class _Counting(NamedTuple):
    """A model whose places are not 0, 1, ...: which look-up they are, and what it adds to those that it is given."""

    lookup: int
    """From the last one, -1, since a model that is given inputs_embeds looks up no tokens."""
    added: int


_known: WeakKeyDictionary[nn.Module, _Counting | None] = WeakKeyDictionary()


class _Lookups(TorchFunctionMode):
    """What is looked up in tables, of tokens and others, up to the first operation that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COMPUTING:
            raise ProbeEndedError
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        places, table = args[:2]
        self.found.append(places)
        return torch.zeros((), dtype=table.dtype, device=places.device).expand(*places.shape, table.shape[-1])


def counts_by_itself(model: Any) -> bool:
    """Whether the places that `model` makes of whole rows are others than 0, 1, ... in every row."""
    if model not in _known:
        _known[model] = _counting(model)
    return _known[model] is not None


def own_places(
    model: Any, given: dict[str, Tensor], documents: list[int] | tuple[int, ...] | None = None
) -> Tensor | None:
    """The position_ids, (rows, tokens), with which `model` computes what it does without, or None for 0, 1, ....

    `given`: input_ids or inputs_embeds, and attention_mask where there is one, of whole rows. `documents`: cumulative
    lengths; each is then a row of its own. Raises `UnsupportedError` for a model that may make others, and cannot be
    asked.
    """
    if not counts_by_itself(model):
        return None
    counting = _known[model]
    assert counting is not None
    tokens = given["input_ids" if "input_ids" in given else "inputs_embeds"].shape[1]
    cuts = documents or (0, tokens)
    parts = []
    for start, stop in pairwise(cuts):
        found = _lookups(model, {name: x[:, start:stop] for name, x in given.items()})
        if len(found) < -counting.lookup:
            return None  # embeddings of ESM hold their places already, and it looks up none
        parts.append(found[counting.lookup] - counting.added)
    return torch.cat(parts, 1)


def _counting(model: Any) -> _Counting | None:
    """Asked with rows that are padded in their tokens, in their mask, in both and not at all."""
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
    told, found = _lookups(model, {**rows, "position_ids": plain}), _lookups(model, rows)
    if len(told) != len(found):
        return None
    for number, (given, places) in enumerate(zip(told, found, strict=True)):
        added = int(given.flatten()[0])
        if given.dim() == 2 and torch.equal(given.expand(4, -1), plain + added):  # the table of places
            is_plain = torch.equal(places.expand(4, -1)[~in_mask], given.expand(4, -1)[~in_mask])
            return None if is_plain else _Counting(number - len(found), added)
    return None


def _lookups(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """What a forward pass looks up in each of its tables, one after the other."""
    copied = probe_copy(model)
    # The copy is in evaluation mode, and the probe ends before dropout, so no random number is drawn. Keeping the
    # generator's state here would be a deadlock of torch's: two threads wait for the generator and for Python's lock.
    with torch.no_grad(), activate(None), _Lookups() as lookups:
        try:
            copied(**given)
        except ProbeEndedError:
            pass
        except Exception as error:
            if may_count_by_itself(type(model).__mro__):
                raise UnsupportedError(
                    f"{type(model).__name__} may count places by its padding or mask, and cannot be asked for "
                    "them with input_ids and attention_mask alone; take another model"
                ) from error
            return []  # what cannot be called like this makes no places by itself
    return lookups.found


# --- Copies of a model for probes -------------------------------------------------------------------------------------
# A copy shares the parameters and has its own buffers, attributes and configurations. No hook runs in it.

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module")
"""Where torch.compile and FSDP1 keep the module that they wrap; FSDP1 would gather its weights."""


class ProbeEndedError(Exception):
    """The forward pass of a copy has reached a layer, or whatever else ends the probe."""


@torch.no_grad()
def probe_copy(model: nn.Module) -> Any:
    """Return a copy of `model` in evaluation mode, for one probe.

    Each call of a module goes straight to the `forward` of its class. So no hook runs, not even those that torch runs
    for every module, and no `forward` that was set on an instance. A call of a member of an `nn.ModuleList` raises
    `ProbeEndedError`. Objects that are neither modules, tensors, plain containers nor configurations are shared.
    """
    return _Copies().module(model)


class _Copies:
    """Copies by the identity of the original: what two modules share, their copies share."""

    def __init__(self) -> None:
        self.by_id: dict[int, Any] = {}
        self.originals: list[Any] = []
        """Kept alive, so that no other object gets the id of one."""

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
        # torch calls this in place of the hooks and `forward`.
        vars(copied).update(training=False, _compiled_call_impl=MethodType(type(module).forward, copied))
        return copied

    def value(self, value: Any) -> Any:
        """Return the copy of an attribute or of a member of a container."""
        from transformers.configuration_utils import PretrainedConfig  # the name that 4.57 has, too

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
    """A member of an `nn.ModuleList`: its attributes are those of its copy, and its call ends the probe."""

    def __init__(self, copies: _Copies, layer: nn.Module) -> None:
        super().__init__()
        self.eval()
        vars(self).update(copies=copies, layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.copies.module(self.layer), name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ProbeEndedError


# --- Positions and features of images ---------------------------------------------------------------------------------
# Every rank has all images and runs the tower on them; it keeps the features of its own tokens. So the gradients of
# the tower are this rank's part, as all others. Images for models outside `KNOWN` are refused on all ranks. Checked
# with transformers 5.23.

KNOWN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""By `config.model_type`."""

PIXELS = {"pixel_values": "image", "pixel_values_videos": "video"}
"""What brings images, and what kind of features the model makes of it."""

IMAGE_INPUTS = (*PIXELS, "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
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
    with seq.ring.refused_by_all():
        brings = (Tensor, list, tuple, dict)
        seen = sorted(name for name, x in given.items() if isinstance(x, brings) and any(w in name for w in _WORDS))
        if not set(seen) & set(PIXELS):
            _refuse_towers(module, seen, given, seq)
            return None
        if not _is_known(module):
            raise UnsupportedError(_OTHERS.format(type(module).__name__, ", ".join(seen)))
        if set(seen) - set(IMAGE_INPUTS) or "input_ids" not in given:
            raise UnsupportedError(
                f"{type(module).__name__} over a ring takes images as {', '.join(IMAGE_INPUTS)} beside input_ids, and "
                f"got {', '.join(seen)}{'' if 'input_ids' in given else ' without input_ids'}"
            )
    tokens = ("input_ids", "mm_token_type_ids", "attention_mask")
    whole: dict[str, Any] = {name: seq.gather(given[name]) for name in tokens if name in given}
    whole |= {name: given[name] for name in seen}
    with seq.ring.refused_by_all():
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
    if seen and not (_is_known(module) and set(seen) <= set(IMAGE_INPUTS)):
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
        with seq.ring.refused_by_all():
            raise InputError(f"{len(features)} features of {kind}s for {int(stands.sum())} tokens in the whole batch")
    made.pooler_output = (features[mine],)
    if getattr(made, "deepstack_features", None) is not None:
        made.deepstack_features = [(torch.cat(list(one))[mine],) for one in made.deepstack_features]
    return made

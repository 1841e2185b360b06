"""Checks around each call of a prepared model: its inputs, its outputs, and the parts of the model that attend.

Attention sees only q, k and v; what it cannot see is checked here. `around_forward` wraps the model's `forward`:
torch runs hooks only where a module is called, and the tuners of PEFT call `model.forward` directly.

Guarantees: on a ring of several ranks, all ranks refuse inputs that are not a shard, losses or outputs that would
contain this rank's tokens alone, and models that mix tokens without attention.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.adapters.context import attends_locally
from ringattn.adapters.transformers.checks import (
    LEAVE_OUT,
    check_encoder,
    check_output,
    check_tokens,
    depends_on_length,
    refuse_adapters,
    refuse_layers,
    short,
    token_shape,
)
from ringattn.adapters.transformers.positions import counts_by_itself, own_places
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import active_sequence
from ringattn.sequence import Sequence

# --- Calls ------------------------------------------------------------------------------------------------------------

SHARDED = {"input_ids": -1, "inputs_embeds": -2, "position_ids": -1, "labels": -1, "shift_labels": -1}
"""Arguments of a model, by the dimension of their tokens."""


@dataclass
class ModelCall:
    """A forward pass that is under way in a prepared model, over a ring."""

    model: nn.Module
    seq: Sequence
    given: Mapping[str, Any]
    outer: ModelCall | None
    has_attended: bool = False
    has_chosen: bool = False
    """Frequencies of a rotary embedding, by the whole length."""
    is_placed: bool = False
    """Its positions are those that the model would make by itself of the whole rows."""


SHARD = "ringattn_shard"
"""Marks a cache that was filled under a sequence of several ranks."""

_call: ContextVar[ModelCall | None] = ContextVar("ringattn_call", default=None)


class WatchedLoss:
    """A model's `loss_function`, and whether the model has called it with what makes a rank's part of the loss.

    A model may define the function and make its loss by itself, or hand only some of its arguments on.
    """

    def __init__(self, loss: Any) -> None:
        self.loss, self.is_used = loss, False
        self.__name__ = getattr(loss, "__name__", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("shift_labels") is not None and kwargs.get("num_items_in_batch") is not None:
            self.is_used = True
        return self.loss(*args, **kwargs)


def watch(model: Any) -> None:
    """Check every call of a PreTrainedModel from now on."""
    if hasattr(model, "loss_function") and not isinstance(model.loss_function, WatchedLoss):
        model.loss_function = WatchedLoss(model.loss_function)
    around_forward(model, _before, _after)
    inner = getattr(model, "base_model", model)
    if inner is not model and inner not in _outer:
        _outer[inner] = weakref.ref(model)
        inner.register_forward_pre_hook(_refuse_replaced)


_outer: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Of a model without its head: the whole model."""


def _refuse_replaced(inner: nn.Module, args: tuple[Any, ...]) -> None:
    """Raise `InputError` where the model's forward was replaced since, and its calls are not checked any more."""
    if torch.compiler.is_compiling():
        return
    seq = active_sequence()
    if seq is None or seq.ring.world_size == 1:
        return
    model = _outer[inner]() if inner in _outer else None  # none of a copy's, until that is prepared
    if model is not None and not stands_around(model):
        with seq.ring.refused_by_all():
            raise InputError(
                f"the forward of {type(model).__name__} was replaced after prepare(model), by Liger or another patch, "
                "and its calls would not be checked: call prepare(model) once more"
            )


def under_way() -> ModelCall | None:
    """The innermost call that goes over a ring, unless attention is local inside of it."""
    call = _call.get()
    return call if call is not None and active_sequence() is not None else None


def attending() -> ModelCall | None:
    """The same, as its attention goes through the ring."""
    call = under_way()
    if call is not None:
        call.has_attended = True
    return call


@torch.compiler.disable
def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch._C._current_graph_task_id() != -1:
        return
    seq = active_sequence()
    given = {**inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments, **kwargs}
    if seq is None or seq.ring.world_size == 1:
        _check_cache(given.get("past_key_values"))
    else:
        _check_inputs(model, seq, given)
    if seq is None:
        return
    is_placed = given.get("position_ids") is not None and not _decodes(given) and counts_by_itself(model)
    is_placed = is_placed and _is_placed(model, seq, given)
    if is_placed or seq.ring.world_size > 1:
        _call.set(ModelCall(model, seq, given, _call.get(), is_placed=is_placed))


def _check_inputs(model: nn.Module, seq: Sequence, given: Mapping[str, Any]) -> None:
    """Raise `InputError`, on all ranks, for what is not a shard, or would give something of this rank's tokens."""
    with seq.ring.refused_by_all():
        refuse_layers(_text_config(model))  # those before the first attention would have run by then
        refuse_adapters(model)
        _refuse_picking(model)
        if given.get("labels") is not None:
            _check_loss(model, given)
        kept = given.get("logits_to_keep")
        if isinstance(kept, Tensor) or kept:
            raise InputError(
                "logits_to_keep would keep logits of each rank's own tokens; leave it out and take those of the tokens "
                "that seq.positions() names, and for generate() use `with ring.activate(None):`"
            )
        if given.get("encoder_hidden_states") is not None:
            check_encoder(seq, given.get("encoder_attention_mask"))
        if given.get("position_ids") is None:
            raise InputError(
                "position_ids are missing, and the model would count from 0 on every rank: pass "
                "position_ids=seq.positions()[None]"
            )
        if not _decodes(given):
            for name, dim in SHARDED.items():
                if isinstance(x := given.get(name), Tensor):
                    check_tokens(seq, x.shape[dim], name)


@torch.compiler.disable
def _after(model: nn.Module, args: object, out: Any) -> Any:
    call = _call.get()
    if call is None or call.model is not model:
        return None
    _call.set(call.outer)
    if out is None or call.seq.ring.world_size == 1:  # without an output the call failed
        return None
    if call.outer is not None:
        call.outer.has_attended |= call.has_attended
    _mark_caches(call, out)
    with call.seq.ring.refused_by_all():
        if not call.has_attended:
            raise UnsupportedError(
                f"no attention of {type(model).__name__} went through the ring: whatever mixes its tokens saw those of "
                "this rank alone"
            )
        has_labels = call.given.get("labels") is not None
        return check_output(model, out, token_shape(call.given), has_labels and _is_used(model))


def _mark_caches(call: ModelCall, out: Any) -> None:
    """What this call has filled is of this rank's tokens."""
    for cache in (call.given.get("past_key_values"), getattr(out, "past_key_values", None)):
        if cache is not None and cache.get_seq_length() > 0:
            setattr(cache, SHARD, True)


def _check_cache(cache: Any) -> None:
    """Raise `InputError` where whole tokens would follow a cache of one rank's."""
    if not getattr(cache, SHARD, False):
        return
    if cache.get_seq_length() == 0:  # emptied since
        delattr(cache, SHARD)
        return
    raise InputError(
        "this cache holds this rank's tokens alone, since it was filled under a sequence of several ranks; fill one "
        "with the whole prompt, on every rank, inside `with ring.activate(None):`"
    )


def _is_placed(model: nn.Module, seq: Sequence, given: Mapping[str, Any]) -> bool:
    """Whether the model would make positions by itself of such inputs.

    Raises `InputError` unless those given are what it would make of the whole rows, or documents. A collective call.
    Padding may be anywhere.
    """
    ids, embeds, mask = (given.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
    whole = {} if ids is None else {"input_ids": seq.gather(ids)}
    if embeds is not None:
        whole["inputs_embeds"] = embeds[:, :1].expand(-1, seq.length, -1)  # only how many there are matters
    if mask is not None:
        whole["attention_mask"] = seq.gather(mask)
    found: Tensor = given["position_ids"]
    wanted = [seq.shard(own) for cuts in {None, seq.documents} if (own := own_places(model, whole, cuts)) is not None]
    if not wanted:
        return False
    real = torch.ones_like(wanted[0], dtype=torch.bool) if mask is None else mask != 0
    with seq.ring.refused_by_all():
        if found.dim() != 2 or not any(torch.equal(found.expand_as(own)[real], own[real]) for own in wanted):
            raise InputError(
                f"rank {seq.ring.rank}: position_ids are {short(found.flatten())}, {type(model).__name__} by itself "
                f"would count {short(wanted[0][0])} of whole rows; make them with shard_batch(ring, batch, model=model)"
            )
    return True


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _refuse_picking(model: Any) -> None:
    """Raise `UnsupportedError` for a head that takes tokens from the places it is told, or finds by itself."""
    takes = inspect.signature(model.forward).parameters
    named = [name for name in takes if name.endswith("_positions") and name not in ("start_positions", "end_positions")]
    if named:
        raise UnsupportedError(
            f"{type(model).__name__} takes {', '.join(named)}: its head would pick tokens that other ranks have; call "
            "the model beneath it, and the head on seq.gather(last_hidden_state, dim=1) on every rank, and divide the "
            "loss by the ranks"
        )


def _decodes(given: Mapping[str, Any]) -> bool:
    """Whether these tokens follow others in a cache, which masks are refused for."""
    cache = given.get("past_key_values")
    return cache is not None and cache.get_seq_length() > 0


def _is_used(model: Any) -> bool:
    loss = model.loss_function
    return isinstance(loss, WatchedLoss) and loss.is_used


def _check_loss(model: Any, given: Mapping[str, Any]) -> None:
    """Raise `InputError` where the model's own loss would not be this rank's part of the whole batch's."""
    if isinstance(getattr(model, "loss_function", None), WatchedLoss):
        model.loss_function.is_used = False  # from here on, in this call
    if getattr(getattr(model, "loss_function", None), "__name__", "") != "ForCausalLMLoss":
        raise UnsupportedError(f"{type(model).__name__} would make its loss of this rank's tokens alone: {LEAVE_OUT}")
    if _adds_router_loss(model, given):
        raise UnsupportedError(
            f"output_router_logits beside labels: {type(model).__name__} would add the whole routers' loss of this "
            "rank's tokens on every rank; set it to False, or leave labels out and make both losses"
        )
    if given.get("shift_labels") is None:
        raise InputError(
            "labels without shift_labels would be shifted inside of each shard: pass "
            "shift_labels=seq.shard_labels(tokens) too"
        )
    if (mask := given.get("attention_mask")) is not None and mask.shape == given["shift_labels"].shape:
        if ((given["shift_labels"] != -100) & (mask == 0)).any():
            raise InputError(
                "shift_labels has labels at padded positions of attention_mask, whose outputs are not defined: set "
                "them to -100, as well as the label of the first real token after padding, before labels are shifted"
            )
    if given.get("num_items_in_batch") is None:
        raise InputError(
            "labels without num_items_in_batch make a mean of every rank's own labels: pass the number of labels of "
            "all ranks, and add the losses"
        )


def _adds_router_loss(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether this call makes a loss of its routers, which the argument says, or else any configuration of the text."""
    asked = given.get("output_router_logits")
    if asked is not None:
        return bool(asked)
    configs = model.config, model.config.get_text_config(decoder=True)
    return any(getattr(config, "output_router_logits", False) for config in configs)


# --- Steps around forward ---------------------------------------------------------------------------------------------

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], object]

After = Callable[[Any, tuple[Any, ...], Any], Any]

AROUND = "ringattn_around"
"""Marks a forward that has these steps around it."""


def around_forward(model: nn.Module, before: Before, after: After) -> None:
    """Run `before(model, args, kwargs)` and `after(model, args, out)` around `model.forward` from now on.

    What `after` returns replaces the output, unless it is None. It runs also where the forward pass failed, then with
    None for the output. Copies of the model keep both. Nothing changes where they stand around it already.
    """
    inner: Any = model.forward
    if stands_around(model):
        return
    original = inner.__func__ if isinstance(inner, MethodType) and inner.__self__ is model else _unbound(inner)

    @wraps(original)
    @torch.compiler.disable(recursive=False)  # the model below is compiled all the same
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self, args, kwargs)
        out = changed = None
        try:
            out = original(self, *args, **kwargs)
        finally:
            changed = after(self, args, out)
        return out if changed is None else changed

    told: Any = forward
    del told.__wrapped__  # accelerate unwraps forwards as far as this leads
    told.__signature__ = inspect.signature(original)
    setattr(told, AROUND, True)
    model.forward = MethodType(forward, model)


def stands_around(model: nn.Module) -> bool:
    """Whether the steps are still there: others may have put their own forward around it, or in its place."""
    forward: Any = model.forward
    while forward is not None and not getattr(forward, AROUND, False):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    bound = inspect.signature(function)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    told: Any = call
    told.__signature__ = bound.replace(parameters=[this, *bound.parameters.values()])
    return call


# --- Rotary embeddings that depend on the length ----------------------------------------------------------------------
# transformers takes the largest position that a `dynamic` or `longrope` module gets as the length of the text, and a
# rank has only its own positions. Each module therefore gets one more position, the largest of all ranks, and the
# cosines of that position are dropped again. Checked with transformers 5.23.

USED = "ringattn_rotary_used"
"""Marks a module that has chosen frequencies by a sequence of several ranks."""


def watch_rotary(model: nn.Module) -> None:
    """Let the rotary modules of a model's text choose by the whole length from now on."""
    for module in model.modules():
        if getattr(module, PART, None) == "tower" or not depends_on_length(getattr(module, "rope_type", None)):
            continue
        if "position_ids" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_with_the_last, with_kwargs=True)
            module.register_forward_hook(_without_it)


@torch.compiler.disable
def _with_the_last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch._C._current_graph_task_id() != -1:
        if getattr(module, USED, False):
            raise InputError(
                f"backward computes {type(module).__name__} again, which chose its frequencies by the length of a "
                "whole sequence; checkpoint layers, as gradient_checkpointing_enable does, and not the whole model"
            )
        return None
    if (call := under_way()) is None:
        return None
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    ids: Tensor = bound.arguments["position_ids"]
    with call.seq.ring.refused_by_all():
        if ids.shape[-1] != call.seq.counts[call.seq.ring.rank]:
            raise InputError(
                f"{type(module).__name__} got positions {tuple(ids.shape)}, not those of this rank's tokens"
            )
    last = call.seq.gather(ids, dim=ids.dim() - 1).max()
    bound.arguments["position_ids"] = torch.cat([ids, last.expand(*ids.shape[:-1], 1)], -1)
    setattr(module, USED, True)
    call.has_chosen = True
    return bound.args, bound.kwargs


@torch.compiler.disable
def _without_it(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    if torch._C._current_graph_task_id() != -1 or under_way() is None:
        return None
    return tuple(x[..., :-1, :] for x in out) if isinstance(out, tuple) else out[..., :-1, :]


# --- Parts of a model: text and towers --------------------------------------------------------------------------------
# The tokens of the text are sharded over ranks. Every rank has all that a tower (images, sound) sees, so towers attend
# locally.

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

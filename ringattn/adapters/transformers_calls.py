"""Calls of a prepared model of transformers: what it is given and what it returns, which its attention does not see.

Guarantees: over a ring of several ranks all of them refuse inputs that are not a shard, a loss or an output that would
be of a rank's tokens alone, and a model that mixes tokens without attention.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.adapters.alike import refused_by_all
from ringattn.adapters.peft import refuse_adapters
from ringattn.adapters.transformers_checks import check_encoder, check_tokens, refuse_layers, short
from ringattn.adapters.transformers_forward import around_forward, stands_around
from ringattn.adapters.transformers_outputs import LEAVE_OUT, check_output, token_shape
from ringattn.adapters.transformers_places import counts_by_itself, own_places
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import active_sequence
from ringattn.sequence import Sequence

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

    @property
    def positions(self) -> Any:
        """The position_ids that it was given."""
        return self.given.get("position_ids")

    @property
    def has_labels(self) -> bool:
        """Whether it was asked for a loss by labels."""
        return self.given.get("labels") is not None


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
        with refused_by_all(seq.ring):
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
    with refused_by_all(seq.ring):
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
    with refused_by_all(call.seq.ring):
        if not call.has_attended:
            raise UnsupportedError(
                f"no attention of {type(model).__name__} went through the ring: whatever mixes its tokens saw those of "
                "this rank alone"
            )
        return check_output(model, out, token_shape(call.given), call.has_labels and _is_used(model))


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
    with refused_by_all(seq.ring):
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

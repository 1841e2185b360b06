"""Checks around each call of a prepared model: its inputs, its outputs, and the parts of the model that attend.

Attention gets only q, k and v, so everything else is checked here. `around_forward` wraps the model's `forward`,
because torch runs hooks only for calls of a module, and PEFT's tuners call `model.forward` directly.

Guarantees: on a ring of several ranks, all ranks refuse inputs that are not a shard, losses or outputs that would be
computed from this rank's tokens only, and models that mix tokens without attention.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
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
    has_tree,
    positions_call,
    refuse_adapters,
    refuse_layers,
    short,
    token_shape,
)
from ringattn.adapters.transformers.compressing import compresses_keys
from ringattn.adapters.transformers.encoder_decoder import check_encoder_inputs, check_parts, encoder_of
from ringattn.adapters.transformers.positions import computes_positions, model_positions
from ringattn.adapters.transformers.selecting import selects_blocks, selects_keys
from ringattn.adapters.transformers.token_labels import TokenLabels, loss_name, shifts_labels
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import active_sequence
from ringattn.sequence import Sequence

# --- Calls ------------------------------------------------------------------------------------------------------------

SHARDED = {"input_ids": -1, "inputs_embeds": -2, "position_ids": -1, "labels": -1, "shift_labels": -1}
"""Sharded arguments of a model, and the dimension of their tokens."""


@dataclass
class ModelCall:
    """A running forward pass of a prepared model over a ring."""

    model: nn.Module
    seq: Sequence
    arguments: Mapping[str, Any]
    outer: ModelCall | None
    has_attended: bool = False
    has_whole_length: bool = False
    """A rotary embedding has chosen its frequencies from the length of the whole sequence."""
    has_checked_positions: bool = False
    """The position_ids are known to be those that the model computes itself for the whole rows."""
    token_labels: TokenLabels | None = None
    """The labels that the model gets, if its loss does not shift labels."""
    router_losses: list[Tensor] = field(default_factory=list)
    """This rank's parts of router losses that were computed in this call."""
    tables: dict[tuple[int, int], Any] = field(default_factory=dict)
    """The masks that were given as tables, by the id and the version of the table, see `table_masks`."""


CACHES = "past_key_values", "cache_params", "cache"
"""The names of a cache among the arguments and outputs of models: the second one if they have states only, the third
one from transformers 5.24 on.
"""

SHARD = "ringattn_shard"
"""Attribute of a cache that was filled under a sequence of several ranks."""

SUMS_OVER_RANKS = "ringattn_sums_over_ranks"
"""Attribute of a model whose last call computed a loss with sums over ranks: from `TokenLabels`, or of routers."""

ROUTER_LOSS = "ringattn_router_loss"
"""Attribute of a prepared model: whether `replace_router_loss` knows the function of its router loss."""

_call: ContextVar[ModelCall | None] = ContextVar("ringattn_call", default=None)


class WatchedLoss:
    """A model's `loss_function` that records whether it was called with the arguments for a rank's part of the loss.

    A model may define the function but compute its loss in another way, or pass only some of its arguments.
    """

    def __init__(self, loss: Any) -> None:
        self.loss, self.is_used = loss, False
        self.__name__ = getattr(loss, "__name__", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("shift_labels") is not None and kwargs.get("num_items_in_batch") is not None:
            self.is_used = True
        loss = self.loss(*args, **kwargs)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, TokenLabels):
                argument.losses.append(loss)
        return loss


def watch(model: Any) -> None:
    """Check every later call of a PreTrainedModel."""
    if hasattr(model, "loss_function") and not isinstance(model.loss_function, WatchedLoss):
        model.loss_function = WatchedLoss(model.loss_function)
    around_forward(model, _before, _after)
    inner = getattr(model, "base_model", model)
    if inner is not model and inner not in _outer:
        _outer[inner] = weakref.ref(model)
        # If a patch replaces the model's forward, the checks are gone. The inner model's hook still detects this.
        inner.register_forward_pre_hook(_refuse_replaced)


_outer: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Maps a model without its head to the whole model."""


def _refuse_replaced(inner: nn.Module, args: tuple[Any, ...]) -> None:
    """Raise `InputError` if the model's forward was replaced since `prepare`, so that its calls are not checked."""
    if torch.compiler.is_compiling():
        return
    seq = active_sequence()
    if seq is None or seq.ring.world_size == 1:
        return
    model = _outer[inner]() if inner in _outer else None  # a copy has no entry until it is prepared
    if model is not None and not is_wrapped(model):
        with seq.ring.refused_by_all():
            raise InputError(
                f"the forward of {type(model).__name__} was replaced after prepare(model), by Liger or another patch, "
                "so its calls are not checked: call prepare(model) again"
            )


def current_call() -> ModelCall | None:
    """Return the innermost call over a ring, or None while attention is local inside it."""
    call = _call.get()
    return call if call is not None and active_sequence() is not None else None


def attending_call() -> ModelCall | None:
    """Return the innermost call over a ring, and record that it has attended through the ring."""
    call = current_call()
    if call is not None:
        call.has_attended = True
    return call


@torch.compiler.disable
def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check the arguments of a call. Return those that replace them, or None."""
    # Inside backward (an id other than -1) the call is a recomputation, and its forward pass was checked.
    if torch._C._current_graph_task_id() != -1:
        if getattr(model, SUMS_OVER_RANKS, False):
            raise InputError(
                f"backward recomputes {type(model).__name__} with a loss that needs sums over all ranks; checkpoint "
                "layers, as gradient_checkpointing_enable does, and not the whole model"
            )
        return None
    seq = active_sequence()
    # `kwargs` is merged in again, because `bind_partial` puts arguments for a **kwargs parameter into a nested dict.
    arguments = {**inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments, **kwargs}
    if seq is not None and has_tree(seq):
        _refuse_losses(model, seq, arguments)
    if seq is None or seq.ring.world_size == 1:
        for name in CACHES:
            _check_cache(arguments.get(name))
    else:
        _check_inputs(model, seq, arguments)
        check_encoder_inputs(model, seq, arguments)
    labels = _token_labels(model, seq, arguments)
    is_over_ranks = seq is not None and seq.ring.world_size > 1
    balances = is_over_ranks and getattr(model, ROUTER_LOSS, False) and adds_router_loss(model, arguments)
    setattr(model, SUMS_OVER_RANKS, labels is not None or balances)
    if seq is None:
        return None
    # Positions are also checked here on one rank. Otherwise attention would compare them with those of the sequence,
    # and refuse a model that counts its positions in another way.
    is_checkable = arguments.get("position_ids") is not None and not _decodes(arguments) and computes_positions(model)
    has_checked_positions = encoder_of(model) is not None or (
        is_checkable and _has_own_positions(model, seq, arguments)
    )
    if has_checked_positions or seq.ring.world_size > 1 or has_tree(seq):
        _call.set(
            ModelCall(
                model, seq, arguments, _call.get(), has_checked_positions=has_checked_positions, token_labels=labels
            )
        )
    return None if labels is None else _with_labels(model, args, kwargs, labels)


def _with_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], labels: TokenLabels) -> Any:
    """Return the arguments of a call with other labels."""
    if "labels" in kwargs:
        return args, {**kwargs, "labels": labels}
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    bound.arguments["labels"] = labels
    return bound.args, bound.kwargs


def _token_labels(model: nn.Module, seq: Sequence | None, arguments: Mapping[str, Any]) -> TokenLabels | None:
    """Return what the model gets instead of its labels, or None for the labels themselves."""
    labels = arguments.get("labels")
    if labels is not None and seq is not None and seq.ring.world_size > 1 and not shifts_labels(model):
        return TokenLabels(model, seq, labels)
    return None


def _check_inputs(model: nn.Module, seq: Sequence, arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` on all ranks for inputs that are not a shard, or whose outputs need other ranks' tokens."""
    with seq.ring.refused_by_all():
        refuse_layers(_text_config(model), _computed(model))  # attention checks this too, but after other layers
        refuse_adapters(model)
        _refuse_token_selection(model)
        _check_tables(model, seq, arguments)
        if arguments.get("labels") is not None:
            _check_loss(model, arguments)
        kept = arguments.get("logits_to_keep")
        if isinstance(kept, Tensor) or kept:
            raise InputError(
                "logits_to_keep would keep the last logits of each rank's shard; leave it out and select logits by "
                "seq.positions(), and for generate() use `with ring.activate(None):`"
            )
        if encoder_of(model) is not None:
            check_parts(model, seq, arguments)
            return
        if arguments.get("encoder_hidden_states") is not None:
            check_encoder(seq, arguments.get("encoder_attention_mask"))
        if arguments.get("position_ids") is None and not has_states_only(model):
            raise InputError(
                "position_ids are missing, so the model would count from 0 on every rank: pass "
                f"position_ids={positions_call(seq)}"
            )
        if not _decodes(arguments):
            for name, dim in SHARDED.items():
                if isinstance(x := arguments.get(name), Tensor):
                    check_tokens(seq, x.shape[dim], name)


@torch.compiler.disable
def _after(model: nn.Module, args: object, out: Any) -> Any:
    call = _call.get()
    if call is None or call.model is not model:
        return None
    # Models call models, such as an encoder-decoder its decoder, so calls form a stack.
    _call.set(call.outer)
    if out is None or call.seq.ring.world_size == 1:  # no output: the call failed
        return None
    if call.outer is not None:
        call.outer.has_attended |= call.has_attended
    _mark_caches(call, out)
    with call.seq.ring.refused_by_all():
        # A model with its own attention kernels would attend to its shard without an error.
        if not call.has_attended:
            raise UnsupportedError(
                f"no attention of {type(model).__name__} used the ring, so its layers mixed only the tokens of this "
                "rank; use a model whose attention goes through transformers' AttentionInterface"
            )
        if call.arguments.get("labels") is not None and adds_router_loss(model, call.arguments):
            check_router_loss(model, was_computed=bool(call.router_losses))
        return check_output(
            model, out, token_shape(call.arguments), _makes_loss(call, out), router_losses=call.router_losses
        )


def _mark_caches(call: ModelCall, out: Any) -> None:
    """Mark the caches that this call has filled: they hold only this rank's tokens."""
    for cache in (get(name) for name in CACHES for get in (call.arguments.get, lambda name: getattr(out, name, None))):
        if cache is not None and _is_filled(cache):
            setattr(cache, SHARD, True)


def _is_filled(cache: Any) -> bool:
    """Return whether a cache has seen tokens."""
    layers = getattr(cache, "layers", ())
    states = [layer.has_previous_state for layer in layers if hasattr(layer, "has_previous_state")]
    if any(any(each.values()) if isinstance(each, dict) else each for each in states):
        return True
    # Without layers of attention, a cache has no length.
    return len(states) < max(len(layers), 1) and cache.get_seq_length() > 0


def _check_cache(cache: Any) -> None:
    """Raise `InputError` for a local call whose cache holds only one rank's tokens."""
    if not getattr(cache, SHARD, False):
        return
    if not _is_filled(cache):  # it was reset
        delattr(cache, SHARD)
        return
    raise InputError(
        "this cache holds only this rank's tokens, because it was filled under a sequence of several ranks; fill a new "
        "cache with the whole prompt, on every rank, inside `with ring.activate(None):`"
    )


def _has_own_positions(model: nn.Module, seq: Sequence, arguments: Mapping[str, Any]) -> bool:
    """Return whether the model would compute positions other than 0, 1, ... itself if it got none with these inputs.

    Raises `InputError` if it would, and the position_ids differ from its positions for the whole rows, or for whole
    documents. Padding may be anywhere. A collective call.
    """
    ids, embeds, mask = (arguments.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
    if _tables(arguments):
        with seq.ring.refused_by_all():
            raise UnsupportedError(
                f"{type(model).__name__} computes its positions itself, also from attention_mask, which has four "
                "dimensions; pass a mask of two dimensions, or use a model with rotary positions"
            )
    whole = {} if ids is None else {"input_ids": seq.gather(ids)}
    if embeds is not None:
        whole["inputs_embeds"] = embeds[:, :1].expand(-1, seq.length, -1)  # only the number of tokens matters
    if mask is not None:
        whole["attention_mask"] = seq.gather(mask)
    position_ids: Tensor = arguments["position_ids"]
    # Whole rows and packed documents are both valid, and differ for models that count from each document.
    candidates = [
        seq.shard(positions)
        for cuts in {None, seq.documents}
        if (positions := model_positions(model, whole, cuts)) is not None
    ]
    if not candidates:
        return False
    if has_tree(seq):
        with seq.ring.refused_by_all():
            raise UnsupportedError(
                f"{type(model).__name__} computes its positions itself, in packed order, not along the paths of a "
                "tree; give each sequence its own row, or use a model with rotary positions"
            )
    real = torch.ones_like(candidates[0], dtype=torch.bool) if mask is None else mask != 0
    with seq.ring.refused_by_all():
        if position_ids.dim() != 2 or not any(
            torch.equal(position_ids.expand_as(positions)[real], positions[real]) for positions in candidates
        ):
            raise InputError(
                f"rank {seq.ring.rank}: position_ids are {short(position_ids.flatten())}, but for whole rows "
                f"{type(model).__name__} counts {short(candidates[0][0])}; make them with shard_batch(ring, batch, "
                "model=model)"
            )
    return True


STATES = "ringattn_states"
"""The attribute of modules with the kinds of layers with a state that `states.watch_states` computes over a ring."""


def _computed(model: Any) -> frozenset[str]:
    """Return the kinds of layers with a state that are computed over a ring."""
    computed: frozenset[str] = getattr(model, STATES, frozenset())
    if computed and getattr(model, "_use_kernels", False):
        raise UnsupportedError(
            f"use_kernels=True: kernels of the hub replace whole layers of {type(model).__name__}; load the model "
            "without it, and install fla, mamba-ssm or causal-conv1d"
        )
    return computed


def has_states_only(model: Any) -> bool:
    """Return whether a prepared model has no attention, so that it needs no positions, such as Mamba."""
    kinds = set(getattr(_text_config(model), "layer_types", None) or ())
    return kinds == {"linear_attention"} and kinds <= getattr(model, STATES, frozenset())


def _text_config(model: Any) -> Any:
    config = model.config
    if encoder_of(model) is not None:
        return config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _refuse_token_selection(model: Any) -> None:
    """Raise `UnsupportedError` for a head that selects tokens by positions among its arguments."""
    parameters = inspect.signature(model.forward).parameters
    named = [
        name for name in parameters if name.endswith("_positions") and name not in ("start_positions", "end_positions")
    ]
    if named:
        raise UnsupportedError(
            f"{type(model).__name__} takes {', '.join(named)}: its head would select tokens that other ranks have; "
            "call the model without its head, then the head on seq.gather(last_hidden_state, dim=1) on every rank, and "
            "divide the loss by the number of ranks"
        )


def _decodes(arguments: Mapping[str, Any]) -> bool:
    """Return whether these tokens follow others in a cache. Masks refuse such calls later, with a better reason."""
    caches = (arguments.get(name) for name in CACHES)
    return any(cache is not None and _is_filled(cache) for cache in caches)


def _makes_loss(call: ModelCall, out: Any) -> bool:
    """Return whether the loss in the output of a call is this rank's part of the loss of the whole batch."""
    if call.arguments.get("labels") is None:
        return False
    if call.token_labels is not None:
        losses = call.token_labels.losses
        return bool(losses) and hasattr(out, "get") and out.get("loss") is losses[-1]
    loss: Any = call.model.loss_function
    return isinstance(loss, WatchedLoss) and loss.is_used


def _refuse_losses(model: Any, seq: Sequence, arguments: Mapping[str, Any]) -> None:
    """Raise on all ranks if a model would compute a loss from a tree, in which a token may have several labels."""
    with seq.ring.refused_by_all():
        if any(arguments.get(name) is not None for name in ("labels", "shift_labels")):
            raise InputError(
                "labels in a tree: the last token of a node has a label per child, and the model takes one; leave "
                "labels out, and compute the loss from ringattn.adapters.trees.edge_log_probs(logits, merged.ids, seq)"
            )
        if adds_router_loss(model, arguments):
            raise UnsupportedError(
                "output_router_logits in a tree: a token that several sequences share would count once in the router "
                "loss; set it to False, or give each sequence its own row"
            )


def _tables(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Return the masks of four dimensions among the arguments of a call. Models take one mask, or one by layer type."""
    mask = arguments.get("attention_mask")
    masks = mask.values() if isinstance(mask, Mapping) else [mask]
    return [each for each in masks if isinstance(each, Tensor) and each.dim() == 4]


def _check_tables(model: Any, seq: Sequence, arguments: Mapping[str, Any]) -> None:
    """Raise for masks of four dimensions in models that use their mask for more than attention."""
    tables, config = _tables(arguments), _text_config(model)
    if not tables:
        return
    if encoder_of(model) is not None or selects_keys(config) or selects_blocks(config) or compresses_keys(config):
        raise UnsupportedError(
            f"attention_mask of four dimensions in {type(model).__name__}, an encoder-decoder or a model that selects "
            "or compresses keys, is not supported; pass a mask of two dimensions"
        )
    if adds_router_loss(model, arguments):
        raise UnsupportedError(
            "output_router_logits counts the tokens of an attention_mask of two dimensions; set it to False"
        )
    labels = arguments.get("labels" if arguments.get("shift_labels") is None else "shift_labels")
    for table in tables:
        # Queries that attend to no key: attention over a ring returns zeros, other implementations something else.
        if labels is not None and table.shape[-2] == seq.length:
            is_empty = ~seq.shard(table.any(-1)[:, 0])
            if ((labels != -100) & is_empty).any():
                raise InputError(
                    "attention_mask has labels at tokens that attend to no key, whose outputs are undefined: before "
                    "shifting, set the labels that they predict to -100"
                )


def _check_loss(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` if the model's loss would not be this rank's part of the loss of the whole batch."""
    if isinstance(getattr(model, "loss_function", None), WatchedLoss):
        model.loss_function.is_used = False  # reset for this call
    # The loss is checked by name, which the wrapped loss keeps. Other losses shift labels or average in unknown ways.
    if not shifts_labels(model):
        _check_token_labels(model, arguments)
        return
    if loss_name(model) != "ForCausalLMLoss":
        raise UnsupportedError(
            f"{type(model).__name__} would compute its loss from this rank's tokens only: {LEAVE_OUT}"
        )
    if adds_router_loss(model, arguments):
        check_router_loss(model)
    if arguments.get("shift_labels") is None:
        raise InputError(
            "labels without shift_labels would be shifted within each shard: also pass "
            "shift_labels=seq.shard_labels(tokens)"
        )
    if (mask := arguments.get("attention_mask")) is not None and mask.shape == arguments["shift_labels"].shape:
        if ((arguments["shift_labels"] != -100) & (mask == 0)).any():
            raise InputError(
                "shift_labels has labels at padded positions of attention_mask, whose outputs are undefined: before "
                "shifting, set them and the label of the first real token after padding to -100"
            )
    if arguments.get("num_items_in_batch") is None:
        raise InputError(
            "labels without num_items_in_batch give a mean over the labels of each rank: pass the number of labels of "
            "all ranks, and add the losses"
        )


def _check_token_labels(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` for labels of tokens that were shifted, or whose outputs are undefined."""
    if arguments.get("shift_labels") is not None:
        raise InputError(
            f"{type(model).__name__} has one label for each token, but got labels that were shifted for a causal "
            "model: pass shard_batch(ring, batch, model=model), or seq.shard(labels) without shift_labels"
        )
    name = "attention_mask" if encoder_of(model) is None else "decoder_attention_mask"
    labels, mask = arguments["labels"], arguments.get(name)
    if mask is not None and mask.shape == labels.shape and ((labels != -100) & (mask == 0)).any():
        raise InputError(f"labels at padded positions of {name}, whose outputs are undefined: set them to -100")


def check_router_loss(model: Any, was_computed: bool = True) -> None:
    """Raise `UnsupportedError` unless the router loss of a model is computed from the tokens of all ranks."""
    if not (was_computed and getattr(model, ROUTER_LOSS, False)):
        raise UnsupportedError(
            f"output_router_logits with labels: {type(model).__name__} would add a router loss of this rank's tokens "
            "on every rank, and computes it in its own way; set it to False, or leave labels out and compute both "
            "losses"
        )


def adds_router_loss(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether this call adds a router loss: by its argument, or else by the model's configurations."""
    requested = arguments.get("output_router_logits")
    if requested is not None:
        return bool(requested)
    configs = model.config, _text_config(model)
    return any(getattr(config, "output_router_logits", False) for config in configs)


# --- Steps around forward ---------------------------------------------------------------------------------------------

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

After = Callable[[Any, tuple[Any, ...], Any], Any]

AROUND = "ringattn_around"
"""The attribute that marks a forward as wrapped by `around_forward`."""


def around_forward(model: nn.Module, before: Before, after: After) -> None:
    """Run `before(model, args, kwargs)` and `after(model, args, out)` around every later call of `model.forward`.

    The result of `before`, (args, kwargs), replaces the arguments and that of `after` the output, unless it is None. If
    the forward pass fails, `after` runs with None as the output. Copies of the model keep both steps. A model that is
    already wrapped is not changed.
    """
    # An instance attribute, not a subclass: `type(model)` and saved checkpoints stay the same.
    inner: Any = model.forward
    if is_wrapped(model):
        return
    # The function without its model: `copy.deepcopy` binds the wrapper to the copy, which must not call this model.
    original = inner.__func__ if isinstance(inner, MethodType) and inner.__self__ is model else _unbound(inner)

    @wraps(original)
    @torch.compiler.disable(recursive=False)  # the wrapped model is still compiled
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(self, args, kwargs) or (args, kwargs)
        out = changed = None
        try:
            out = original(self, *args, **kwargs)
        finally:
            changed = after(self, args, out)
        return out if changed is None else changed

    wrapper: Any = forward
    del wrapper.__wrapped__  # accelerate would use it to unwrap the forward, which removes the steps
    # Trainer and `generate` read the signature of forward, to choose the columns and arguments that they pass.
    wrapper.__signature__ = inspect.signature(original)
    setattr(wrapper, AROUND, True)
    model.forward = MethodType(forward, model)


def is_wrapped(model: nn.Module) -> bool:
    """Return whether the steps are still around the model's forward. A patch may have wrapped or replaced it."""
    forward: Any = model.forward
    while forward is not None and not getattr(forward, AROUND, False):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes a `self` and ignores it, for a forward that is not a method of the model."""

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    unbound: Any = call
    unbound.__signature__ = signature.replace(parameters=[self_parameter, *signature.parameters.values()])
    return call


# --- Rotary embeddings that depend on the length ----------------------------------------------------------------------
# For `dynamic` and `longrope` modules, transformers takes the largest position in the call as the length of the text.
# A rank has only the positions of its shard. Each module therefore gets one more position, the largest of all ranks.
# The cosines and sines of that position are dropped again. Checked with transformers 5.23.

USED = "ringattn_rotary_used"
"""Attribute of a module that has chosen its frequencies under a sequence of several ranks."""


def watch_rotary(model: nn.Module) -> None:
    """Make the rotary modules of a model's text use the length of the whole sequence in every later call."""
    for module in model.modules():
        if getattr(module, PART, None) == "tower" or not depends_on_length(getattr(module, "rope_type", None)):
            continue
        if "position_ids" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_append_last_position, with_kwargs=True)
            module.register_forward_hook(_drop_last_position)


@torch.compiler.disable
def _append_last_position(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch._C._current_graph_task_id() != -1:
        if getattr(module, USED, False):
            raise InputError(
                f"backward recomputes {type(module).__name__}, which chose its frequencies from the length of the "
                "whole sequence; checkpoint layers, as gradient_checkpointing_enable does, and not the whole model"
            )
        return None
    if (call := current_call()) is None:
        return None
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    ids: Tensor = bound.arguments["position_ids"]
    with call.seq.ring.refused_by_all():
        if ids.shape[-1] != call.seq.counts[call.seq.ring.rank]:
            raise InputError(
                f"{type(module).__name__} got positions {tuple(ids.shape)}, not those of this rank's tokens"
            )
    # Gathered instead of `seq.length - 1`: position_ids may start elsewhere or restart per document.
    last = call.seq.gather(ids, dim=ids.dim() - 1).max()
    bound.arguments["position_ids"] = torch.cat([ids, last.expand(*ids.shape[:-1], 1)], -1)
    setattr(module, USED, True)
    call.has_whole_length = True
    return bound.args, bound.kwargs


@torch.compiler.disable
def _drop_last_position(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    # The same conditions as in `_append_last_position`: what was not appended must not be dropped.
    if torch._C._current_graph_task_id() != -1 or current_call() is None:
        return None
    return tuple(x[..., :-1, :] for x in out) if isinstance(out, tuple) else out[..., :-1, :]


# --- Parts of a model: text and towers --------------------------------------------------------------------------------
# The tokens of the text are sharded over ranks. Every rank has the whole input of a tower (images, sound), so towers
# attend locally.

PART = "ringattn_part"
"""The attribute by which `prepare` marks modules as "text" or "tower"; copies of a model keep it."""


def mark_parts(model: nn.Module, text: Any) -> None:
    """Mark modules as text if they have the text's configuration, and as tower if they have another sub-model's."""
    # Configurations are compared by identity, because those of equal sub-models compare equal.
    towers = _parts_of(model.config) - _parts_of(text)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is text or id(config) in towers:
            setattr(module, PART, "text" if config is text else "tower")
    _mark_local(model)


def refuse_text_towers(model: Any) -> None:
    """Raise `UnsupportedError` for an encoder-decoder whose encoder reads text but has a separate configuration.

    `mark_parts` has marked such an encoder as a tower.
    """
    if not getattr(model.config, "is_encoder_decoder", False):
        return
    for part in model.modules():
        if getattr(part, PART, None) != "tower" or part.config is model.config:
            continue
        if "input_ids" in inspect.signature(part.forward).parameters:
            name = type(model).__name__
            raise UnsupportedError(
                f"{name} reads its text with {type(part).__name__}, which has a separate configuration and would get "
                "only this rank's tokens: prepare and call the encoder and the decoder separately, the decoder with "
                "the encoder's last_hidden_state as encoder_hidden_states and an encoder_attention_mask of ones"
            )


def _mark_local(module: nn.Module) -> None:
    """Make towers, with all modules inside, attend locally whatever attention function they call."""
    parts = {getattr(part, PART, None) for part in module.modules()}
    if getattr(module, PART, None) == "tower" and "text" not in parts:
        attends_locally(module)
        return
    for child in module.children():
        _mark_local(child)


def _parts_of(config: Any) -> set[int]:
    """Return the ids of a configuration and of all its sub-configurations."""
    subs = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return {id(config)}.union(*(_parts_of(sub) for sub in subs if sub is not None))

"""Less memory in training for models of transformers: tiled feed-forwards, a loss in chunks, checkpoints on the host.

These are the options `prepare(model, tiled_mlp=..., chunked_loss=..., offload_checkpoints=...)`. They cover the methods
of Arctic Long Sequence Training (arXiv:2506.13996). `head_groups=...` is in `head_groups`. With labels, a model with
`chunked_loss` returns its loss but no logits, because the logits of all tokens never exist at the same time.

Guarantees: loss and gradients equal those without the options up to rounding, or the option is refused by name. float64
is kept, while transformers' own loss rounds logits to float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringattn.adapters.transformers.calls import AROUND, WatchedLoss
from ringattn.adapters.transformers.head_groups import grouped_attention
from ringattn.adapters.transformers.module_state import module_state, refuse_updates
from ringattn.adapters.transformers.sharded_weights import (
    gather_for,
    gathers_columns,
    refuse_hidden,
    refuse_partitioned,
    without_hooks,
)
from ringattn.errors import InputError, UnsupportedError
from ringattn.integers import whole_number
from ringattn.layers.tiled import Tiling, check_device, inputs_on_host, tiled

FEED_FORWARDS = ("mlp", "feed_forward")
"""Names of the feed-forward in decoder layers of transformers."""

TILES = "ringattn_tiles"
"""The name of the part of a feed-forward that computes it in tiles."""

LOSS = "ForCausalLMLoss"


@dataclass(frozen=True)
class Saving:
    """The memory options of a prepared model."""

    tiled_mlp: int | None
    chunked_loss: int | None
    offload_checkpoints: bool
    head_groups: int | None


NO_SAVING = Saving(None, None, False, None)
SAVING = "ringattn_saving"
"""The attribute of a prepared model with its `Saving`. Copies of the model keep it."""


def save_memory(
    model: Any, tiled_mlp: int | None, chunked_loss: int | None, offload_checkpoints: bool, head_groups: int | None
) -> None:
    """Set the memory options of `transformers.prepare` in a model, in place. Options of an earlier call stay.

    Raises `InputError` for numbers below 1 or different from an earlier call, and `UnsupportedError` if the model does
    not support an option.
    """
    needed = "{} must be a number of tokens, at least 1, or None"
    if tiled_mlp is not None:
        tiled_mlp = whole_number(tiled_mlp, needed.format("tiled_mlp"), 1)
    if chunked_loss is not None:
        chunked_loss = whole_number(chunked_loss, needed.format("chunked_loss"), 1)
    if head_groups is not None:
        head_groups = whole_number(head_groups, "head_groups must be a number of groups, at least 1, or None", 1)
    before = getattr(model, SAVING, NO_SAVING)
    saving = Saving(tiled_mlp or before.tiled_mlp, chunked_loss or before.chunked_loss,
                    offload_checkpoints or before.offload_checkpoints, head_groups or before.head_groups)  # fmt: skip
    for name in ("tiled_mlp", "chunked_loss", "head_groups"):
        old = getattr(before, name)
        if old is not None and old != getattr(saving, name):
            raise InputError(f"{name}={getattr(saving, name)}: this model was prepared with {name}={old}")
    parts = _feed_forwards(model) if saving.tiled_mlp and not before.tiled_mlp else []
    chunks = ChunkedLoss(model, saving.chunked_loss) if saving.chunked_loss and not before.chunked_loss else None
    groups = saving.head_groups or 1
    attention = grouped_attention(model, groups) if groups > 1 and not before.head_groups else []
    # Changes begin here, after all refusals, so a refused model is unchanged.
    for grouped in attention:
        grouped.install()
    for part in parts:
        TiledForward(part, tiled_mlp or 0).install()
    if chunks is not None:
        chunks.install()
    if saving.offload_checkpoints and not before.offload_checkpoints:
        OffloadedCheckpoints(model).install()
    setattr(model, SAVING, saving)


def refuse_logits(model: Any, what: str) -> None:
    """Raise `UnsupportedError` for `what`, which needs logits, if the model returns none when it gets labels."""
    if getattr(model, SAVING, NO_SAVING).chunked_loss is not None:
        raise UnsupportedError(
            f"{what} needs logits, but this model was prepared with chunked_loss and returns none with labels; leave "
            "one of the two out"
        )


# --- feed-forwards ---------------------------------------------------------------------------------------------------


class TiledForward(nn.Module):
    """A feed-forward's forward that computes one tile of tokens at a time.

    It is a part of the feed-forward, without weights. ZeRO 3 gathers the weights of the feed-forward for calls of this
    one, because ranks may have different numbers of tiles.
    """

    def __init__(self, part: nn.Module, tokens: int) -> None:
        super().__init__()
        self.whole = (part,)  # not as a part of this module, because this one is a part of it
        self.plain, self.tokens = part.forward, tokens

    def install(self) -> None:
        """Replace the forward of the feed-forward."""
        (part,) = self.whole
        part.add_module(TILES, self)
        part.forward = self.run

    @torch.compiler.disable
    def run(self, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        """Return the feed-forward of (batch, tokens, dim), in the same shape."""
        (part,) = self.whole
        if others or named:
            raise UnsupportedError(
                f"tiled_mlp: {type(part).__name__} takes more arguments than hidden states, which cannot be "
                "tiled; leave tiled_mlp out"
            )
        gather_for(self, part.parameters())
        out: Tensor = self(hidden_states)
        return out

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute the feed-forward with gathered weights."""
        (part,), forward = self.whole, self.plain
        refuse_partitioned(part, "tiled_mlp")
        if torch.is_grad_enabled():
            refuse_hidden(part, "tiled_mlp")
        if any(hasattr(weight, "ds_id") for weight in part.parameters()):
            forward = partial(type(part).forward, without_hooks(part, "tiled_mlp"))
        # A feed-forward of transformers expects a batch dimension.
        state = partial(module_state, part)
        tiling = Tiling(lambda rows: forward(rows[None])[0], self.tokens, draws=part.training, state=state)
        with refuse_updates(part, "tiled_mlp"):
            return tiled(tiling, hidden_states, list(part.parameters()))


def _feed_forwards(model: Any) -> list[nn.Module]:
    """Return the feed-forwards of all decoder layers. Raises `UnsupportedError` unless each works token by token."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = [part for part in text.modules() if isinstance(part, GradientCheckpointingLayer)]
    parts = []
    for layer in layers:
        part = next((getattr(layer, name) for name in FEED_FORWARDS if hasattr(layer, name)), None)
        if part is None:
            raise UnsupportedError(
                f"tiled_mlp: {type(layer).__name__} has no module named {' or '.join(FEED_FORWARDS)}; leave it out"
            )
        _check_token_wise(part)
        parts.append(part)
    if not parts:
        raise UnsupportedError(f"tiled_mlp: {type(model).__name__} has no layers that transformers can checkpoint")
    return parts


def _check_token_wise(part: nn.Module) -> None:
    """Raise `UnsupportedError` for experts, and for modules other than linear layers with functions between them."""
    leaves = [module for module in part.modules() if not list(module.children())]
    loose = [name for module in part.modules() if list(module.children())
             for name, _ in module.named_parameters(recurse=False)]  # fmt: skip
    odd = [leaf for leaf in leaves if next(leaf.parameters(), None) is not None
           and not isinstance(leaf, nn.Linear) and type(leaf).__name__ != "Conv1D"]  # fmt: skip
    experts = any("expert" in name or "router" in name for name, _ in part.named_modules())
    if loose or odd or experts:
        raise UnsupportedError(
            f"tiled_mlp: {type(part).__name__} does not consist of linear layers only (experts may use all tokens "
            "of a batch together); leave tiled_mlp out"
        )


# --- loss ------------------------------------------------------------------------------------------------------------


class LaterLogits:
    """A placeholder for the logits of all tokens between a model's head and its loss.

    It records elementwise functions, such as a softcap. They are applied when the loss computes the logits of a chunk.
    Any other use is refused.
    """

    def __init__(self, hidden: Tensor, functions: tuple[Callable[[Tensor], Tensor], ...] = ()) -> None:
        self.hidden, self.functions = hidden, functions

    def followed(self, function: Callable[[Tensor], Tensor]) -> LaterLogits:
        """Return a placeholder for the logits after one more elementwise function."""
        return LaterLogits(self.hidden, (*self.functions, function))

    def __mul__(self, factor: Any) -> LaterLogits:
        factor = _number(factor)
        return self.followed(lambda x: x * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> LaterLogits:
        divisor = _number(divisor)
        return self.followed(lambda x: x / divisor)

    def float(self) -> LaterLogits:
        """Return a placeholder for the logits in float32 or wider, as the loss expects them."""
        return self.followed(lambda x: x.to(torch.promote_types(x.dtype, torch.float32)))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> LaterLogits:
        if function is torch.tanh and isinstance(args[0], LaterLogits) and not kwargs:
            later: LaterLogits = args[0]
            return later.followed(torch.tanh)
        raise _refused(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refused(name)

    def __getitem__(self, index: Any) -> Any:
        raise _refused("indexing")


def _number(value: Any) -> Any:
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad):
        return value
    raise _refused("arithmetic with tensors")


class NoLogitsError(UnsupportedError, AttributeError):
    """Code used the logits of all tokens. Also an AttributeError, so that hasattr() returns False."""


def _refused(what: str) -> NoLogitsError:
    return NoLogitsError(
        f"chunked_loss: with labels the logits of all tokens do not exist, but the model uses them ({what}); leave "
        "labels out of the call, or chunked_loss out of prepare()"
    )


class ChunkedLoss:
    """The loss of a causal model, computed from the logits of a few tokens at a time."""

    def __init__(self, model: Any, tokens: int) -> None:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        loss = getattr(model, "loss_function", None)
        takes = inspect.signature(model.forward).parameters
        if head is None or getattr(loss, "__name__", "") != LOSS or "labels" not in takes:
            raise UnsupportedError(
                f"chunked_loss: {type(model).__name__} has no output embeddings with transformers' {LOSS}; leave it out"
            )
        self.model, self.head, self.tokens = model, head, tokens
        self.gathers_columns = gathers_columns(head)
        self.head_forward, self.loss, self.forward = head.forward, loss, model.forward
        # A call may pass labels by position.
        self.label_index = list(takes).index("labels")
        self.has_labels = False
        self.__name__ = LOSS

    def install(self) -> None:
        """Replace the head's forward, the loss function and the model's forward by methods of this object."""
        self.head.forward = self.forward_head
        if isinstance(self.loss, WatchedLoss):  # it stays outermost, to record the call
            self.loss.loss = self
        else:
            self.model.loss_function = self
        # No hooks, because PEFT calls a model's forward directly. Bound to this object, so that a copy of the model
        # gets a copy of this object. No `__wrapped__`, because accelerate would unwrap the forward by it.
        signature = inspect.signature(self.forward)
        chunks_parameter = inspect.Parameter("chunks", inspect.Parameter.POSITIONAL_ONLY)

        def forward(chunks: ChunkedLoss, *args: Any, **named: Any) -> Any:
            return chunks.run(args, named)

        wrapper: Any = forward
        wrapper.__signature__ = signature.replace(parameters=[chunks_parameter, *signature.parameters.values()])
        setattr(wrapper, AROUND, True)  # the wrapped forward contains the checks of a call
        self.model.forward = MethodType(forward, self)

    def run(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the model's forward with `has_labels` set for the head, and return its output without the placeholder."""
        outer = self.has_labels  # restored afterwards: checks inside the call may run the model again
        self.has_labels = (args[self.label_index] if self.label_index < len(args) else named.get("labels")) is not None
        try:
            out = self.forward(*args, **named)
        finally:
            self.has_labels = outer
        if isinstance(out, tuple) and any(isinstance(entry, LaterLogits) for entry in out):
            raise InputError("return_dict=False: with chunked_loss there are no logits to return; leave it out")
        if isinstance(out, tuple) or not hasattr(out, "items"):
            return out
        return type(out)(**{name: entry for name, entry in out.items() if not isinstance(entry, LaterLogits)})

    @torch.compiler.disable
    def forward_head(self, hidden: Tensor, *others: Any, later: Later | None = None) -> Any:
        """Return the logits; in a call with labels, their placeholder; and with `later`, the loss.

        The loss is computed in a second call of the head, so that hooks that gather sharded weights run around it.
        """
        if later is not None:
            return self._sum(hidden, later)
        return LaterLogits(hidden) if self.has_labels else self.head_forward(hidden, *others)

    def __call__(
        self, logits: Any, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the loss in place of transformers' loss function. `logits` is the placeholder from the head."""
        if not isinstance(logits, LaterLogits):
            raise _refused("a loss outside the model's call")
        # Shift like transformers: the last token of a row gets no label. Over a ring, `shift_labels` is always given.
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        # Nothing was computed yet: the head runs below, on one chunk of hidden states at a time.
        hidden, rows = logits.hidden, shift_labels.numel()
        if hidden.shape[:-1].numel() != rows:
            raise InputError(f"chunked_loss: {rows} labels for {hidden.shape[:-1].numel()} tokens; pass one for each")
        shift_labels = shift_labels.to(hidden.device)
        total: Tensor = self.head(hidden, later=Later(shift_labels, ignore_index, vocab_size, logits.functions))
        if num_items_in_batch is None:
            return total / (shift_labels != ignore_index).sum()
        count = num_items_in_batch
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    def _sum(self, hidden: Tensor, later: Later) -> Tensor:
        if not self.gathers_columns and any(isinstance(weight, DTensor) for weight in self.head.parameters()):
            raise UnsupportedError(
                "chunked_loss: the head's weights are sharded, and not by transformers with all logits as the output; "
                "leave chunked_loss out"
            )
        if torch.is_grad_enabled():
            refuse_hidden(self.head, "chunked_loss")

        def loss_of(rows: Tensor, labels: Tensor) -> Tensor:
            logits: Tensor = self.head_forward(rows[None])[0]
            for function in later.functions:
                logits = function(logits)
            # At least float32, as in transformers' loss; float64 stays.
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return F.cross_entropy(wide.view(-1, later.vocabulary), labels, ignore_index=later.ignore, reduction="sum")

        tiling = Tiling(loss_of, self.tokens, summed=True, state=partial(module_state, self.head))
        with refuse_updates(self.head, "chunked_loss"):
            return tiled(tiling, hidden, list(self.head.parameters()), [later.labels])


@dataclass(frozen=True)
class Later:
    """The arguments of the head's second call: labels, the ignored label, and functions to apply to the logits."""

    labels: Tensor
    ignore: int
    vocabulary: int
    functions: tuple[Callable[[Tensor], Tensor], ...]


# --- checkpoints -----------------------------------------------------------------------------------------------------


class OffloadedCheckpoints:
    """Activation checkpointing of a model's layers with the inputs kept in host memory."""

    def __init__(self, model: Any) -> None:
        self.model, self.set = model, model._set_gradient_checkpointing
        if "gradient_checkpointing_func" not in inspect.signature(self.set).parameters:
            raise UnsupportedError(
                f"offload_checkpoints: {type(model).__name__} sets up checkpointing in its own way; leave it out"
            )

    def install(self) -> None:
        """Turn checkpointing on. If a Trainer sets it again later, inputs still go to the host."""
        self.model._set_gradient_checkpointing = self.set_checkpointing
        names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # since 5.23, and before
        next(getattr(self.model, name) for name in names if hasattr(self.model, name))({"use_reentrant": False})
        self.model.register_forward_pre_hook(self._before)

    def set_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = torch.utils.checkpoint.checkpoint, **others: Any
    ) -> None:
        """Set up checkpointing like the model does, with inputs kept on the host."""

        def on_host(function: Any, *args: Any, **named: Any) -> Any:
            for x in args:
                if isinstance(x, Tensor):
                    check_device(x.device, "offload_checkpoints=True")
            with inputs_on_host():
                return gradient_checkpointing_func(function, *args, **named)

        self.set(enable=enable, gradient_checkpointing_func=on_host, **others)

    @torch.compiler.disable
    def _before(self, model: nn.Module, args: object) -> None:
        checkpoints = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
        if model.training and torch.is_grad_enabled() and not checkpoints:
            raise InputError(
                "offload_checkpoints=True: gradient checkpointing was turned off after prepare(); turn it on, or "
                "prepare the model without this option"
            )

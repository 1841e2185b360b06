"""Less memory in training for models of transformers: tiled feed-forwards, a loss in chunks, checkpoints on the host.

What `prepare(model, tiled_mlp=..., chunked_loss=..., offload_checkpoints=...)` sets, at the level of Arctic Long
Sequence Training (arXiv:2506.13996). With labels a model then gives its loss and no logits, which never exist whole.
Guarantees: the loss and gradients of the model without them up to rounding (float64 stays so, where transformers' own
loss rounds logits to float32), or a refusal by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringattn.adapters.transformers.calls import AROUND, WatchedLoss
from ringattn.errors import InputError, UnsupportedError
from ringattn.layers.tiled import Tiling, check_device, inputs_on_host, tiled

FEED_FORWARDS = ("mlp", "feed_forward")
"""What decoder layers of transformers call theirs."""

LOSS = "ForCausalLMLoss"


@dataclass(frozen=True)
class Saving:
    """What a model was prepared with."""

    tiled_mlp: int | None
    chunked_loss: int | None
    offload_checkpoints: bool


SAVING = "ringattn_saving"
"""The attribute of a prepared model that holds its `Saving`; copies have it too."""


def save_memory(model: Any, tiled_mlp: int | None, chunked_loss: int | None, offload_checkpoints: bool) -> None:
    """Set the options of `transformers.prepare` in a model, in place; those of an earlier call stay.

    Raises `InputError` for numbers below 1 and for others than before, `UnsupportedError` where the model cannot.
    """
    for name, number in (("tiled_mlp", tiled_mlp), ("chunked_loss", chunked_loss)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise InputError(f"{name}={number!r}: is a number of tokens, at least 1, or None")
    before = getattr(model, SAVING, Saving(None, None, False))
    wanted = Saving(tiled_mlp or before.tiled_mlp, chunked_loss or before.chunked_loss,
                    offload_checkpoints or before.offload_checkpoints)  # fmt: skip
    for name in ("tiled_mlp", "chunked_loss"):
        old = getattr(before, name)
        if old is not None and old != getattr(wanted, name):
            raise InputError(f"{name}={getattr(wanted, name)}: this model was prepared with {name}={old}")
    found = _feed_forwards(model) if wanted.tiled_mlp and not before.tiled_mlp else []
    chunks = ChunkedLoss(model, wanted.chunked_loss) if wanted.chunked_loss and not before.chunked_loss else None
    for part in found:  # only now, so that a model that is refused stays as it was
        part.forward = TiledForward(part.forward, part, tiled_mlp or 0)
    if chunks is not None:
        chunks.install()
    if wanted.offload_checkpoints and not before.offload_checkpoints:
        OffloadedCheckpoints(model).install()
    setattr(model, SAVING, wanted)


def refuse_logits(model: Any, what: str) -> None:
    """Raise `UnsupportedError` for `what`, which needs the logits of a model that makes none beside labels."""
    if getattr(model, SAVING, Saving(None, None, False)).chunked_loss is not None:
        raise UnsupportedError(
            f"{what} needs logits, and this model was prepared with chunked_loss, which makes none beside labels; "
            "leave one of the two out"
        )


# --- feed-forwards ---------------------------------------------------------------------------------------------------


class TiledForward:
    """A feed-forward's `forward` that takes a tile of tokens at a time."""

    def __init__(self, forward: Callable[..., Tensor], part: nn.Module, tokens: int) -> None:
        self.forward, self.part, self.tokens = forward, part, tokens

    def __call__(self, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        """(batch, tokens, dim) -> the same."""
        if others or named:
            raise UnsupportedError(
                f"tiled_mlp: {type(self.part).__name__} takes more than hidden states, which might not be of single "
                "tokens; leave tiled_mlp out"
            )
        tiling = Tiling(lambda rows: self.forward(rows[None])[0], self.tokens, draws=self.part.training)
        return tiled(tiling, hidden_states, list(self.part.parameters()))


def _feed_forwards(model: Any) -> list[nn.Module]:
    """Those of all decoder layers. Raises `UnsupportedError` unless each layer has one that is of single tokens."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = [part for part in text.modules() if isinstance(part, GradientCheckpointingLayer)]
    found = []
    for layer in layers:
        part = next((getattr(layer, name) for name in FEED_FORWARDS if hasattr(layer, name)), None)
        if part is None:
            raise UnsupportedError(
                f"tiled_mlp: {type(layer).__name__} has no module named {' or '.join(FEED_FORWARDS)}; leave it out"
            )
        _check_token_wise(part)
        found.append(part)
    if not found:
        raise UnsupportedError(f"tiled_mlp: {type(model).__name__} has no layers that transformers can checkpoint")
    return found


def _check_token_wise(part: nn.Module) -> None:
    """Raise `UnsupportedError` for experts, and for anything but linear layers with functions between."""
    leaves = [one for one in part.modules() if not list(one.children())]
    own = [name for one in part.modules() if list(one.children()) for name, _ in one.named_parameters(recurse=False)]
    odd = [one for one in leaves if next(one.parameters(), None) is not None
           and not isinstance(one, nn.Linear) and type(one).__name__ != "Conv1D"]  # fmt: skip
    experts = any("expert" in name or "router" in name for name, _ in part.named_modules())
    if own or odd or experts:
        raise UnsupportedError(
            f"tiled_mlp: {type(part).__name__} is not made of linear layers alone (experts see a batch's tokens "
            "together, and their routers' loss needs them all); leave tiled_mlp out"
        )


# --- loss ------------------------------------------------------------------------------------------------------------


class LaterLogits:
    """Stands for the logits of all tokens between a model's head and its loss; functions of single numbers may follow.

    Anything else that a model does with them is refused.
    """

    def __init__(self, hidden: Tensor, then: tuple[Callable[[Tensor], Tensor], ...] = ()) -> None:
        self.hidden, self.then = hidden, then

    def followed(self, function: Callable[[Tensor], Tensor]) -> LaterLogits:
        """With one more function of single numbers."""
        return LaterLogits(self.hidden, (*self.then, function))

    def __mul__(self, factor: Any) -> LaterLogits:
        factor = _number(factor)
        return self.followed(lambda x: x * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> LaterLogits:
        divisor = _number(divisor)
        return self.followed(lambda x: x / divisor)

    def float(self) -> LaterLogits:
        """As the loss takes them: in float32 at the least."""
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


def _number(one: Any) -> Any:
    if isinstance(one, (int, float)) or (isinstance(one, Tensor) and one.dim() == 0 and not one.requires_grad):
        return one
    raise _refused("arithmetic with tensors")


class NoLogitsError(UnsupportedError, AttributeError):
    """Logits of all tokens were asked for; also of the kind that hasattr() takes for no."""


def _refused(what: str) -> NoLogitsError:
    return NoLogitsError(
        f"chunked_loss: logits of all tokens are not made beside labels, and {what} of them is asked for; leave labels "
        "out of the call, or chunked_loss out of prepare()"
    )


class ChunkedLoss:
    """A causal model's loss by labels, of so many tokens' logits at a time."""

    def __init__(self, model: Any, tokens: int) -> None:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        loss = getattr(model, "loss_function", None)
        takes = inspect.signature(model.forward).parameters
        if head is None or getattr(loss, "__name__", "") != LOSS or "labels" not in takes:
            raise UnsupportedError(
                f"chunked_loss: {type(model).__name__} has no output embeddings with transformers' {LOSS}; leave it out"
            )
        self.model, self.head, self.tokens = model, head, tokens
        self.head_forward, self.loss, self.forward = head.forward, loss, model.forward
        self.place = list(takes).index("labels")
        self.has_labels = False
        self.__name__ = LOSS

    def install(self) -> None:
        """From now on."""
        self.head.forward = self.forward_head
        if isinstance(self.loss, WatchedLoss):  # which stays the outer one
            self.loss.loss = self
        else:
            self.model.loss_function = self
        # Not by hooks: PEFT calls a model's forward past them. Bound to this object, so that copies of a model have
        # their own; without `__wrapped__`, by which accelerate would take it away.
        signature = inspect.signature(self.forward)
        first = inspect.Parameter("chunks", inspect.Parameter.POSITIONAL_ONLY)

        def told(chunks: ChunkedLoss, *args: Any, **named: Any) -> Any:
            return chunks.run(args, named)

        marked: Any = told
        marked.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])
        setattr(marked, AROUND, True)  # the checks of a call stand inside
        self.model.forward = MethodType(told, self)

    def run(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The model's forward, whose head knows whether there are labels; without what stands for logits."""
        outer = self.has_labels  # the checks of a call may run the model once more inside
        self.has_labels = (args[self.place] if self.place < len(args) else named.get("labels")) is not None
        try:
            out = self.forward(*args, **named)
        finally:
            self.has_labels = outer
        if isinstance(out, tuple) and any(isinstance(one, LaterLogits) for one in out):
            raise InputError("return_dict=False: beside chunked_loss there are no logits to return; leave it out")
        if isinstance(out, tuple) or not hasattr(out, "items"):
            return out
        return type(out)(**{name: one for name, one in out.items() if not isinstance(one, LaterLogits)})

    @torch.compiler.disable
    def forward_head(self, hidden: Tensor, *others: Any, later: Later | None = None) -> Any:
        """What stands for the logits in a call with labels; given the call's labels, the loss; else the logits.

        The loss is made in a second call of the head, so that the hooks of whoever shards its weights run around it.
        """
        if later is not None:
            return self._sum(hidden, later)
        return LaterLogits(hidden) if self.has_labels else self.head_forward(hidden, *others)

    def __call__(
        self, logits: Any, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        """transformers' loss; `logits` stand for those that the head will make."""
        if not isinstance(logits, LaterLogits):
            raise _refused("a loss made outside of the model's call")
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden, rows = logits.hidden, shift_labels.numel()
        if hidden.shape[:-1].numel() != rows:
            raise InputError(f"chunked_loss: {rows} labels for {hidden.shape[:-1].numel()} tokens; give one for each")
        shift_labels = shift_labels.to(hidden.device)
        total: Tensor = self.head(hidden, later=Later(shift_labels, ignore_index, vocab_size, logits.then))
        if num_items_in_batch is None:
            return total / (shift_labels != ignore_index).sum()
        count = num_items_in_batch
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

    def _sum(self, hidden: Tensor, later: Later) -> Tensor:
        if any(isinstance(weight, DTensor) for weight in self.head.parameters()):
            raise UnsupportedError(
                "chunked_loss: the head's weights are sharded by tensor parallelism; leave chunked_loss out"
            )

        def loss_of(rows: Tensor, labels: Tensor) -> Tensor:
            logits: Tensor = self.head_forward(rows[None])[0]
            for function in later.then:
                logits = function(logits)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return F.cross_entropy(wide.view(-1, later.vocabulary), labels, ignore_index=later.ignore, reduction="sum")

        tiling = Tiling(loss_of, self.tokens, summed=True)
        return tiled(tiling, hidden, list(self.head.parameters()), [later.labels])


@dataclass(frozen=True)
class Later:
    """What the head is called with a second time: labels, the one that does not count, and functions of the logits."""

    labels: Tensor
    ignore: int
    vocabulary: int
    then: tuple[Callable[[Tensor], Tensor], ...]


# --- checkpoints -----------------------------------------------------------------------------------------------------


class OffloadedCheckpoints:
    """Activation checkpointing of a model's layers whose inputs wait in host memory."""

    def __init__(self, model: Any) -> None:
        self.model, self.set = model, model._set_gradient_checkpointing
        if "gradient_checkpointing_func" not in inspect.signature(self.set).parameters:
            raise UnsupportedError(f"offload_checkpoints: {type(model).__name__} sets its checkpoints by itself")

    def install(self) -> None:
        """Turn checkpointing on, and keep to the host whoever sets it again, such as a Trainer."""
        self.model._set_gradient_checkpointing = self.set_checkpointing
        names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # since 5.23, and before
        next(getattr(self.model, name) for name in names if hasattr(self.model, name))({"use_reentrant": False})
        self.model.register_forward_pre_hook(self._before)

    def set_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = torch.utils.checkpoint.checkpoint, **others: Any
    ) -> None:
        """As the model does, with what the checkpoints keep on the host."""

        def on_host(function: Any, *args: Any, **named: Any) -> Any:
            for one in args:
                if isinstance(one, Tensor):
                    check_device(one.device, "offload_checkpoints=True")
            with inputs_on_host():
                return gradient_checkpointing_func(function, *args, **named)

        self.set(enable=enable, gradient_checkpointing_func=on_host, **others)

    @torch.compiler.disable
    def _before(self, model: nn.Module, args: object) -> None:
        checkpoints = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
        if model.training and torch.is_grad_enabled() and not checkpoints:
            raise InputError(
                "offload_checkpoints=True: gradient checkpointing was turned off since; turn it on, or prepare the "
                "model without"
            )

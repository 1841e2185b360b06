"""Calls of a sharded model by code that was written for one process: whole inputs and whole outputs.

Inside of `whole_calls` a model shards the batch that it is called with, and its outputs are those of the whole batch on
every rank: its loss at once, logits and hidden states when they are first read. So a loss made of them, computed on
every rank in full, has the value of one process.
Guarantees: the backward of an output sums the gradients of all ranks, so the *mean* over ranks of each parameter's
gradient (DDP, FSDP) is that of one process; an output that cannot be made whole raises when it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ringattn.adapters.transformers_batches import shard_batch
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence


class _Shard:
    """This rank's tokens of an output, (rows, tokens, ...), gathered at the first read. A collective call then."""

    def __init__(self, seq: Sequence, local: Tensor) -> None:
        self.seq = seq
        self.local = local.detach().requires_grad_(local.requires_grad)
        self.gathered: Tensor | None = None

    def whole(self) -> Tensor:
        """Return the whole output, with a graph that leads to `local`."""
        if self.gathered is None:
            with torch.enable_grad():
                self.gathered = self.seq.gather(self.local, dim=1)
        return self.gathered


_OF_SHAPE = frozenset(
    "size dim ndimension numel nelement __len__ stride is_contiguous is_floating_point is_complex get_device "
    "register_hook retain_grad __hash__ __repr__".split()
)
"""Functions of a tensor that need no values."""
_READING = frozenset("data T mT H mH real imag grad".split())
"""Properties of a tensor that need its values, or are tensors."""


class WholeTensor(Tensor):
    """A tensor of a whole batch whose values are gathered when they are first read; its shape is known before."""

    shard: _Shard
    plain: Tensor | None

    @staticmethod
    def __new__(cls, shard: _Shard) -> WholeTensor:
        local = shard.local
        shape = (local.shape[0], shard.seq.length, *local.shape[2:])
        self: WholeTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self.shard, self.plain = shard, None
        return self

    def read(self) -> Tensor:
        """Return an ordinary tensor in its place, the same at each call, so that changes of it in place are seen."""
        if self.plain is None:
            with torch.enable_grad():
                self.plain = _Read.apply(self)
        return self.plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_property = func.__name__ == "__get__" and func.__self__.__name__ not in _READING
        if is_property or func.__name__ in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(cls, cls.read, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached from C++ alone, which passes `__torch_function__` by.
        for declared, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, cls) and declared.alias_info is not None and declared.alias_info.is_write:
                raise UnsupportedError(
                    f"{func.__name__} would change an output of a model over a ring in place from C++; give it a copy, "
                    "such as outputs.logits.clone()"
                )
        args, kwargs = tree_map_only(cls, lambda x: x.shard.whole().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"WholeTensor({tuple(self.shape)}, {self.dtype})"


class _Gather(torch.autograd.Function):
    """From this rank's tokens to a `WholeTensor`; the gradient is the sum of all ranks' gradients of these tokens."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, seq: Sequence) -> Tensor:
        ctx.shard = _Shard(seq, local)
        return WholeTensor(ctx.shard)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shard = ctx.shard
        return torch.autograd.grad(shard.whole(), shard.local, grad, retain_graph=True)[0], None


class _Read(torch.autograd.Function):
    """From a `WholeTensor` to a tensor of its values."""

    @staticmethod
    def forward(ctx: Any, whole: WholeTensor) -> Tensor:
        return whole.shard.whole().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Sum(torch.autograd.Function):
    """The sum over ranks; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return _summed(part, ring)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.ring), None


def _summed(x: Tensor, ring: Ring) -> Tensor:
    total = x.detach().clone()
    ring.all_reduce([total])
    return total


class NotWhole:
    """Stands for an output that is not made whole: whoever uses it gets an `UnsupportedError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{self._name} of a model over a ring is not made whole for a loss, only the loss and outputs of (rows, "
            "tokens, ...) are; leave it out of the loss, or train without a ring"
        )

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map_only(cls, cls._refuse, (args, kwargs))


for _operator in (
    "add radd sub rsub mul rmul truediv rtruediv pow matmul rmatmul neg abs getitem iter len bool float int lt le gt ge"
).split():
    setattr(NotWhole, f"__{_operator}__", NotWhole._refuse)


def whole(outputs: Any) -> Any:
    """Return `outputs` with the values of each `WholeTensor` in it."""
    return tree_map_only(WholeTensor, lambda x: x.read().detach(), outputs)


def _whole_outputs(seq: Sequence, out: Any) -> Any:
    """Return a model's outputs of the whole batch, given those of this rank's tokens."""
    items = {name: _whole_output(name, seq, x) for name, x in out.items()}
    fields = getattr(type(out), "__dataclass_fields__", {})
    if "logits" in fields and items.get("logits") is None:
        items["logits"] = NotWhole("logits")  # of chunked_loss, which makes none
    return type(out)(**items)


def _whole_output(name: str, seq: Sequence, x: Any) -> Any:
    if isinstance(x, tuple | list):
        return type(x)(_whole_output(name, seq, part) for part in x)
    if isinstance(x, Tensor) and name == "loss" and x.dim() == 0:
        return _Sum.apply(x, seq.ring)
    if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] == seq.counts[seq.ring.rank]:
        return _Gather.apply(x, seq)
    return None if x is None else NotWhole(name)


class WholeCalls:
    """The calls of one model inside of `whole_calls`."""

    def __init__(self, ring: Ring, model: Any, layout: LayoutName | str, dropout_seed: int) -> None:
        self.ring, self.model, self.layout, self.dropout_seed = ring, model, layout, dropout_seed
        self.seq: Sequence | None = None
        self.active = ExitStack()

    def _activate(self, seq: Sequence) -> AbstractContextManager[None]:
        return self.ring.activate(seq, dropout_seed=self.dropout_seed)

    def enter(self, outer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Shard the inputs of a call, and activate their sequence until it ends. A collective call."""
        if torch._C._current_graph_task_id() != -1:
            return None
        if args:
            raise InputError("inputs without names: call the model with keywords, as Trainer does")
        batch = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
        self.seq, sharded = shard_batch(self.ring, batch, self.layout, model=self.model)
        if "shift_labels" in sharded and kwargs.get("num_items_in_batch") is None:
            labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
            sharded["num_items_in_batch"] = (labels != -100).sum()  # the model's loss is the mean over this batch then
        self.active.enter_context(self._activate(self.seq))
        return args, {**kwargs, **sharded}

    def leave(self, outer: nn.Module, args: Any, out: Any) -> Any:
        """End the activation, and make the outputs whole. A collective call."""
        if torch._C._current_graph_task_id() != -1:
            return None
        failure = sys.exc_info() if out is None else (None, None, None)
        self.active.__exit__(*failure)
        self.active = ExitStack()
        if out is None:
            return None
        if not hasattr(out, "items"):
            raise InputError("return_dict=False: outputs without names cannot be made whole; leave it out")
        assert self.seq is not None
        return _whole_outputs(self.seq, out)


@contextmanager
def whole_calls(
    ring: Ring, outer: nn.Module, model: Any, layout: LayoutName | str, dropout_seed: int
) -> Iterator[None]:
    """Inside, `outer` takes whole batches, the same on every rank, and returns whole outputs.

    Args:
        ring: The ring.
        outer: What is called: the model, or what DDP, FSDP or a compiler made of it.
        model: The prepared model inside of `outer`.
        layout: As in `Ring.sequence`.
        dropout_seed: As in `Ring.activate`.

    Returns:
        A context manager.

    Raises:
        DisagreementError: The ranks' batches differ.
        InputError: A batch cannot be sharded, see `shard_batch`.
    """
    calls = WholeCalls(ring, model, layout, dropout_seed)
    hooks = [
        outer.register_forward_pre_hook(calls.enter, with_kwargs=True, prepend=True),
        outer.register_forward_hook(calls.leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

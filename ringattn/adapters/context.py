"""Which sequence an adapter's call attends over; modules that always attend locally; recomputation.

In forward it is the sequence of the innermost `Ring.activate`. If nothing is active the call attends locally, but only
while no ring of several ranks is open: a sharded model must never attend to its own shard by accident.
During recomputation `runtime.activation` finds the sequence that the checkpointed region had in forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn

from ringattn.errors import InputError
from ringattn.runtime.activation import activate, activation, entered
from ringattn.runtime.runtime import shared_ring_is_open
from ringattn.sequence import Sequence

__all__ = ["attends_locally", "recompute_context", "sequence_of"]

_towers: ContextVar[tuple[tuple[nn.Module, AbstractContextManager[None]], ...]] = ContextVar(
    "ringattn_towers", default=()
)
_LOCAL = "ringattn_local"
_Module = TypeVar("_Module", bound=nn.Module)


@torch.compiler.disable
def sequence_of() -> Sequence | None:
    """Return the sequence that this rank's tokens belong to; None: attend locally.

    It is that of the innermost `Ring.activate`, during recomputation that of the region's forward run.
    `Ring.attention` checks that the tensors have as many tokens as this rank owns, on all ranks.

    Returns:
        The sequence, or None.

    Raises:
        InputError: Nothing is active and a ring of several ranks is open; or backward recomputes a region that is not
            known.

    Example:
        out = attend(sequence_of(), q, k, v, causal=True)
    """
    active = activation()
    if active is None and shared_ring_is_open():
        raise InputError(
            "a ring of several ranks is open and no sequence is active, so this model may hold shards: call it inside "
            "`with ring.activate(seq):`. For local attention call it inside `with ring.activate(None):` or, if the "
            "ring is not at hand, inside `with ringattn.adapters.local.local_attention():`"
        )
    return None if active is None else active.seq


def recompute_context() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of a checkpoint that does not keep the active sequence by itself.

    `torch.utils.checkpoint.checkpoint` needs none. The region's recomputation begins with what is active when the
    checkpoint is called; an `activate` inside the region wins over it.

    Returns:
        The context managers of the forward run and of the recomputation.

    Example:
        with ring.activate(seq):
            out = checkpoint(layer, x, use_reentrant=False, context_fn=recompute_context)
    """
    active = activation()
    return nullcontext(), nullcontext() if active is None else Reentered(lambda: entered(active))


class Reentered(AbstractContextManager[None]):
    """A context manager that may be entered repeatedly: each backward pass over a graph recomputes its regions."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self.make = make
        self.entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        inner = self.make()
        inner.__enter__()
        self.entered.append(inner)

    def __exit__(self, *error: Any) -> None:
        self.entered.pop().__exit__(*error)


def attends_locally(module: _Module) -> _Module:
    """Every call of `module` is made inside `Ring.activate(None)` from now on. Idempotent.

    For a tower, whose input every rank has whole; copies of the module keep it.

    Args:
        module: The module. It is changed in place.

    Returns:
        The module.

    Raises:
        Nothing.

    Example:
        model.vision = attends_locally(model.vision)
    """
    if not getattr(module, _LOCAL, False):
        setattr(module, _LOCAL, True)
        module.register_forward_pre_hook(_enter_tower)
        module.register_forward_hook(_leave_tower, always_call=True)
    return module


@torch.compiler.disable
def _enter_tower(module: nn.Module, args: object) -> None:
    local = activate(None)
    local.__enter__()
    _towers.set((*_towers.get(), (module, local)))


@torch.compiler.disable
def _leave_tower(module: nn.Module, args: object, out: object) -> None:
    *outer, (entered, local) = _towers.get() or ((None, nullcontext()),)
    if entered is module:
        _towers.set(tuple(outer))
        local.__exit__(None, None, None)

"""The active sequence of an adapter's call, modules that always attend locally, and contexts for recomputation.

In forward, a call attends over the sequence of the innermost `Ring.activate`. If nothing is active, the call is local,
but only while no ring of several ranks is open: a sharded model must never attend to its own shard by accident.
During recomputation, `runtime.activation` finds the sequence that the checkpointed region had in forward.
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
    """Return the sequence that this rank's tokens belong to, or None for local attention.

    This is the sequence of the innermost `Ring.activate`. During recomputation, it is the sequence that the
    checkpointed region had in forward. `Ring.attention` checks on all ranks that the tensors have the number of tokens
    that the rank owns.

    Returns:
        The sequence, or None.

    Raises:
        InputError: Nothing is active and a ring of several ranks is open; or backward recomputes a checkpointed region
            whose forward pass was not recorded.

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
    """Return the two contexts for the `context_fn` of a checkpoint that does not restore the active sequence.

    `torch.utils.checkpoint.checkpoint` does not need it. The recomputation starts with the activation at the time of
    this call. An `activate` inside the region takes precedence.

    Returns:
        A context manager for the forward run and one for the recomputation.

    Example:
        with ring.activate(seq):
            out = checkpoint(layer, x, use_reentrant=False, context_fn=recompute_context)
    """
    # The activation is captured now, in forward. In backward, this thread may have another activation, or none.
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
    """Run every later call of `module` inside `Ring.activate(None)`. Idempotent.

    Use it for towers (vision, audio), because every rank holds their whole input. Copies of the module keep this
    setting.

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
    # Hooks, not a replaced `forward`: they survive copies and pickles of the module.
    local = activate(None)
    local.__enter__()
    _towers.set((*_towers.get(), (module, local)))


@torch.compiler.disable
def _leave_tower(module: nn.Module, args: object, out: object) -> None:
    *outer, (entered, local) = _towers.get() or ((None, nullcontext()),)
    # `always_call` also runs this hook if an earlier pre-hook raised, before `_enter_tower` ran for this module.
    if entered is module:
        _towers.set(tuple(outer))
        local.__exit__(None, None, None)

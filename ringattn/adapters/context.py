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

_contexts: ContextVar[tuple[tuple[nn.Module, AbstractContextManager[None]], ...]] = ContextVar(
    "ringattn_contexts", default=()
)
_CONTEXT = "ringattn_context"
"""Attribute of a module: a function that returns the context of its calls."""
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
            "ring is not at hand, inside `with ringattn.adapters.local.local_attention():`. In a method of Trainer, "
            "see 'Calls of the model in methods of Trainer' in docs/embedding-trainers.md"
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
    return runs_inside(module, _local)


def _local() -> AbstractContextManager[None]:
    return activate(None)


def runs_inside(module: _Module, context: Callable[[], AbstractContextManager[None]]) -> _Module:
    """Run every later call of `module` inside the context that `context()` returns. The first `context` stays.

    `context` is a function of a module, so that copies and pickles of `module` keep it. Returns the module.
    """
    if not hasattr(module, _CONTEXT):
        setattr(module, _CONTEXT, context)
        # Hooks, not a replaced `forward`: they survive copies and pickles of the module.
        module.register_forward_pre_hook(_enter_context)
        module.register_forward_hook(_leave_context, always_call=True)
    return module


@torch.compiler.disable
def _enter_context(module: nn.Module, args: object) -> None:
    context = getattr(module, _CONTEXT)()
    context.__enter__()
    _contexts.set((*_contexts.get(), (module, context)))


@torch.compiler.disable
def _leave_context(module: nn.Module, args: object, out: object) -> None:
    *outer, (inside, context) = _contexts.get() or ((None, nullcontext()),)
    # `always_call` also runs this hook if an earlier pre-hook raised, before `_enter_context` ran for this module.
    if inside is module:
        _contexts.set(tuple(outer))
        context.__exit__(None, None, None)
